"""Files that a command writes: what they may replace, and what a run that fails leaves of them."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from model.cli.files import OutputFile
from model.errors import UsageError

BEGINS = '{"trace": ['


@pytest.fixture
def path(tmp_path):
    return tmp_path / "out.json"


def output(path):
    return OutputFile("--trace", str(path), BEGINS)


def refused(path, inputs=()):
    before = {each: each.read_bytes() for each in Path(path).parent.iterdir() if each.is_file()}
    with pytest.raises(UsageError, match="--trace: ") as error:
        output(path).check(map(str, inputs))
    assert before == {each: each.read_bytes() for each in before}
    return str(error.value)


@pytest.mark.parametrize("old", [None, "", f"{BEGINS}1]}}"])
def test_a_new_an_empty_and_an_own_file_are_replaced_and_not_before_the_end(path, old):
    if old is not None:
        path.write_text(old)
        path.chmod(0o640)
    output(path).check([])
    assert [each.name for each in path.parent.iterdir()] == ([] if old is None else [path.name])
    with output(path).replaced() as out:
        out.write(f"{BEGINS}2]}}")
        out.flush()
        assert (path.read_text() if path.exists() else None) == old
    assert path.read_text() == f"{BEGINS}2]}}"
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    if old is not None:
        assert stat.S_IMODE(path.stat().st_mode) == 0o640


@pytest.mark.parametrize("other", ["{}", BEGINS[:-1], "a prompt\n", "\x00"])
def test_a_file_that_the_flag_has_not_written_is_refused(path, other):
    path.write_text(other)
    assert "holds something that --trace has not written" in refused(path)


def test_an_input_is_refused_by_whatever_name_it_is_called(path, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "empty.json").touch()
    (tmp_path / "prompts.txt").write_text(f"{BEGINS}]")
    os.link(model / "empty.json", tmp_path / "hard")
    (tmp_path / "soft").symlink_to(tmp_path / "prompts.txt")
    inputs = (tmp_path / "not there", model, tmp_path / "prompts.txt")
    for name in ("hard", "soft", "prompts.txt", "model/../prompts.txt", "model/empty.json"):
        assert "which this run reads" in refused(tmp_path / name, inputs)
    output(path).check(map(str, inputs))


def test_a_body_that_raises_leaves_the_old_file_and_nothing_beside_it(path):
    path.write_text(BEGINS)
    writing = output(path).replaced()
    writing.__enter__().write("half")
    assert not writing.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert [each.read_text() for each in path.parent.iterdir()] == [BEGINS]


def test_a_link_stays_a_link_and_a_device_a_device(path, tmp_path):
    path.symlink_to(tmp_path / "elsewhere")
    output(path).check([])
    with output(path).replaced() as out:
        out.write(BEGINS)
    assert path.is_symlink()
    assert (tmp_path / "elsewhere").read_text() == BEGINS
    null = output("/dev/null")
    null.check([])
    with null.replaced() as out:
        out.write(BEGINS)
    assert Path("/dev/null").is_char_device()


def test_what_cannot_be_written_is_told_at_once(path, tmp_path):
    cases = [
        (tmp_path, "Is a directory"),
        (tmp_path / "no" / "file", "No such file"),
        (tmp_path / ("x" * 300), "File name too long"),
        ("a\0b", "null byte"),
        (tmp_path / "loop", "symbolic links"),
    ]
    (tmp_path / "loop").symlink_to("loop")
    for where, reason in cases:
        with pytest.raises(UsageError, match=f"--trace: cannot write .*: .*{reason}"):
            output(where).check([])
    assert list(tmp_path.iterdir()) == [tmp_path / "loop"]


def test_a_long_name_is_replaced_too(tmp_path):
    path = tmp_path / ("x" * 255)
    output(path).check([])
    for _ in range(2):
        with output(path).replaced() as out:
            out.write(BEGINS)
    assert list(tmp_path.iterdir()) == [path]


def test_the_file_where_stdout_goes_is_refused(tmp_path):
    run = (
        "from model.cli.files import OutputFile\n"
        "try: OutputFile('--trace', '/dev/stdout', '{').check([])\n"
        "except Exception as error: print(error)"
    )
    with (tmp_path / "out").open("wb") as out:
        subprocess.run([sys.executable, "-c", run], stdout=out, check=True)
    assert "is where stdout goes" in (tmp_path / "out").read_text()
