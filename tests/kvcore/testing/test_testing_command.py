"""`python -m kvcore.testing`, and the same as a pytest plugin: what is printed and returned."""

import io
import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import hypothesis
import pytest

from kvcore import testing
from kvcore.testing.command import BEGINS, FOUND, KNOWN, MISUSED, NOTHING, main
from kvcore.testing.hunt import hunt
from tests.kvcore.engines import BROKEN, OurAllocator
from tests.kvcore.engines.dictionary import DictionaryAllocator

ROOT = Path(__file__).parents[3]
TENANT = "tests.kvcore.engines.broken:ignores_the_tenant"
QUICK = ("--profile", "quick")


def run(*arguments):
    out = io.StringIO()
    return main(arguments, out), out.getvalue()


def test_the_command_finds_prints_and_writes_a_program(tmp_path):
    files = ("--json", str(tmp_path / "found.json"), "--junit", str(tmp_path / "found.xml"))
    code, text = run(TENANT, *QUICK, "--machine", "TenantMachine", *files)
    assert code == FOUND
    assert re.search(r"^P7: b hits block 1", text, re.MULTILINE)
    assert "    #   1:a[0 0]*   0 free" in text
    assert "TenantMachine" in text.splitlines()[-2]

    found = json.loads((tmp_path / "found.json").read_text())
    (finding,) = found["findings"]
    assert (finding["key"], finding["machine"], found["seed"]) == ("P7: begin", "TenantMachine", 0)
    suite = ET.parse(tmp_path / "found.xml").getroot()  # noqa: S314  # we wrote it
    assert (suite.get("tests"), suite.get("failures")) == ("1", "1")
    assert suite.find("testcase/failure").text == finding["drawn"]

    assert (tmp_path / "found.json").read_text().startswith(BEGINS["--json"])
    assert (tmp_path / "found.xml").read_text().startswith(BEGINS["--junit"])

    names = {"allocator": BROKEN["ignores_the_tenant"][0]()}
    exec(finding["drawn"].replace("\n    ", "\n").strip(), names)  # noqa: S102  # it can be pasted
    assert names["cached"] == 2


@pytest.mark.parametrize("flag", ["--json", "--junit"])
def test_a_report_overwrites_no_file_but_a_report(tmp_path, capsys, flag):
    path = tmp_path / "adapter.py"
    path.write_text("class Mine: ...")
    assert run(TENANT, *QUICK, flag, str(path))[0] == MISUSED
    assert f"{flag}: {str(path)!r} holds something" in capsys.readouterr().err
    assert path.read_text() == "class Mine: ..."


def test_what_is_known_is_met_counted_and_left_behind():
    code, text = run(TENANT, *QUICK, "--machine", "TenantMachine", "--known", "P7: begin")
    assert code == KNOWN
    assert re.search(r"^known: P7: begin, met \d+ times$", text, re.MULTILINE)


class WrongTwice(BROKEN["ignores_the_tenant"][0], BROKEN["reuses_the_newest"][0]):
    """Two bugs, of which one hides the other."""


def test_the_search_goes_on_behind_what_it_has_found():
    found = hunt(WrongTwice, [testing.TenantMachine], profile="quick", go_on=True, seed=3).findings
    assert {finding.key for finding in found} == {"P7: begin", "P15: reserve"}
    assert len(found) == 2


def test_nothing_is_found_where_nothing_is_wrong_until_the_time_is_over():
    code, text = run(
        "tests.kvcore.engines:OurWindows", *QUICK, "--seconds", "2", "--block-size", "2"
    )
    assert code == NOTHING
    assert "GroupMachine" in text
    assert "nothing found" in text


def test_one_seed_finds_one_thing():
    machines = [testing.ChurnMachine]
    cls = BROKEN["refuses_the_last_block"][0]
    first, second = (hunt(cls, machines, profile="quick", seed=5) for _ in range(2))
    assert first.findings == second.findings
    assert first.seen == second.seen


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "wanted MODULE:FACTORY"),
        (["no.such.module:Adapter"], "No module named 'no'"),
        (["kvcore:nothing"], "has no attribute 'nothing'"),
        (["kvcore:__version__"], "wanted something to call, got '"),
        (["builtins:open"], "making it raised TypeError("),
        (["tests.kvcore.engines.needs_an_engine:Adapter"], "importing it raised KeyError('AN_EN"),
        (["builtins:dict"], "promises: wanted a collection of Promise, got None"),
        ([TENANT, "--machine", "Tenant"], "--machine: wanted some of RequestMachine"),
    ],
)
def test_a_wrong_command_says_what_was_wanted(capsys, arguments, message):
    assert run(*arguments) == (MISUSED, "")
    assert message in capsys.readouterr().err


@pytest.mark.source_build
def test_every_new_verb_can_be_replayed_and_drawn():
    settings = hypothesis.settings(max_examples=60, derandomize=True, database=None)
    for name in ("leases_end_with_their_sequence", "copies_back_in_the_wrong_order"):
        with pytest.raises(testing.PropertyError) as caught:
            testing.check_allocator(
                BROKEN[name][0], machines=[testing.RequestMachine], settings=settings
            )
        drawn = testing.replay(BROKEN[name][0], caught.value.steps, draw=True)
        assert drawn.message == caught.value.message
        assert len(drawn.steps) < 16
        calls = [line for line in drawn.program.splitlines() if not line.startswith("    #")]
        assert calls == caught.value.program.splitlines()


def test_a_picture_shows_who_holds_what():
    driver = testing.Driver(DictionaryAllocator(), draw=True)
    driver.start(5, 2)
    first = driver.begin([1, 2, 3])
    driver.reserve(first, 3)
    driver.commit(first, 3)
    driver.begin([1, 2, 9])
    driver.lease(first)
    driver.finish(first)
    assert driver.program.lines[-1] == "#   1:b(lease1)[1 2]*  2:(lease1)[3 .]   2 free"


def test_the_module_runs_as_a_command():
    command = [sys.executable, "-m", "kvcore.testing", TENANT, *QUICK, "--machine", "ChurnMachine"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == NOTHING, done.stderr
    assert "ChurnMachine" in done.stdout


def test_the_plugin_adds_a_test_for_each_machine(tmp_path):
    (tmp_path / "conftest.py").write_text(
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        'pytest_plugins = ["kvcore.testing.pytest_plugin"]\n'
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--kvcore", TENANT]
    command += ["--kvcore-profile", "quick", "-k", "TenantMachine or ChurnMachine"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "1 failed, 1 passed, 2 deselected" in done.stdout, done.stdout + done.stderr
    assert "P7: b hits block 1" in done.stdout
    assert "allocator.begin([0, 0, 0], 'red')  # 2" in done.stdout


def test_our_own_handles_survive_a_reset_while_they_are_swapped_out():
    driver = testing.Driver(OurAllocator())
    driver.start(9, 2)
    request = driver.begin([1, 2, 3, 4, 5])
    driver.reserve(request, 5)
    driver.commit(request, 5)
    driver.swap_out(request)
    driver.reset()
    assert driver.swap_in(request)
    assert driver.begin([1, 2, 3, 4, 5]).cached == 0
