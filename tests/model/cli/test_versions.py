"""A command that fails beside a package in an unsupported version says so in one line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from model.cli.exits import exits
from model.cli.versions import unsupported

ROOT = Path(__file__).parents[3]
ENGINE = """\
Metadata-Version: 2.4
Name: kvcore-engine
Version: 9
Requires-Dist: torch<2.15,>=2.10
Requires-Dist: numba>=0.61
Requires-Dist: safetensors>=0.8; platform_system == 'No such system'
Requires-Dist: fastapi<0.200,>=0.133; extra == 'serve'
Requires-Dist: ray<3,>=2.60; extra == 'cluster'
Requires-Dist: a-package-that-is-absent>=1
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Puts packages of these versions, and an engine, before the others."""
    monkeypatch.syspath_prepend(tmp_path)

    def put(name, text):
        (tmp_path / f"{name}.dist-info").mkdir()
        (tmp_path / f"{name}.dist-info" / "METADATA").write_text(text)

    def make(**versions):
        put("kvcore_engine-9", ENGINE)
        for name, number in versions.items():
            put(f"{name}-{number}", f"Metadata-Version: 2.4\nName: {name}\nVersion: {number}\n")
        return tmp_path

    return make


@pytest.mark.parametrize(
    ("versions", "found"),
    [
        ({"torch": "2.10.0+cpu", "numba": "0.61.0", "fastapi": "0.150.0"}, []),
        ({"torch": "2.14.1"}, []),
        ({"torch": "2.9.1"}, ["torch: wanted <2.15,>=2.10, got 2.9.1"]),
        ({"torch": "2.15.0"}, ["torch: wanted <2.15,>=2.10, got 2.15.0"]),
        (
            {"torch": "1.13.1", "numba": "0.60.0"},
            ["torch: wanted <2.15,>=2.10, got 1.13.1", "numba: wanted >=0.61, got 0.60.0"],
        ),
        ({"fastapi": "0.95.0"}, ["fastapi: wanted <0.200,>=0.133, got 0.95.0"]),
        ({"safetensors": "0.1", "ray": "1.0"}, []),  # of another system; of an extra of its own
    ],
)
def test_the_metadata_says_which_packages_are_unsupported(installed, versions, found):
    installed(**versions)
    assert [line for line in unsupported() if line.partition(":")[0] in versions] == found


@pytest.mark.parametrize(
    ("got", "source", "reason"),
    [
        ("2.6.0", "", "(ImportError: cannot import name "),
        ("2.15.0", "raise RuntimeError('CUDA 14')", "(RuntimeError: CUDA 14)"),
    ],
)
def test_a_command_that_fails_names_what_is_supported(installed, got, source, reason):
    folder = installed(torch=got)
    (folder / "torch.py").write_text(source)
    done = subprocess.run(
        [sys.executable, "-m", "model.run", "--prompt", "x"],
        env={**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if not line.startswith("loading ")]
    assert line.startswith(f"error: torch: wanted <2.15,>=2.10, got {got} (")
    assert reason in line


def test_an_error_beside_supported_packages_stays_a_bug_of_ours(installed, capsys):
    installed(torch="2.14.0")
    with pytest.raises(SystemExit) as ending, exits():
        raise IndexError("list index out of range")
    assert ending.value.code == 3
    assert "This is a bug in kvcore" in capsys.readouterr().err


def test_an_error_of_ours_beside_an_unsupported_package_is_one_line(installed, capsys):
    installed(torch="2.15.1")
    with pytest.raises(SystemExit) as ending, exits():
        raise AttributeError("no such name")
    line = "error: torch: wanted <2.15,>=2.10, got 2.15.1 (AttributeError: no such name)\n"
    assert (ending.value.code, capsys.readouterr().err) == (2, line)


def test_metadata_that_cannot_be_read_hides_no_error(installed, capsys):
    (installed() / "kvcore_engine-9.dist-info/METADATA").write_text(
        "Metadata-Version: 2.4\nName: kvcore-engine\nVersion: 9\nRequires-Dist: torch >> 2\n"
    )
    with pytest.raises(SystemExit) as ending, exits():
        raise IndexError("list index out of range")
    assert ending.value.code == 3
    assert "IndexError: list index out of range" in capsys.readouterr().err
