"""The tool that tries versions finds what fails, and what it stored is what the extras say."""

import json
import re
import subprocess

import pytest
import yaml
from packaging.requirements import Requirement

from tests import versions
from tests.distributions import PROJECT, ROOT, bare

REQUIREMENTS = (
    "torch>=2.7",
    "torch>=2.10,<2.15",
    "numba>=0.9",
    "uvloop>=0.21; platform_system != 'Windows'",
    "lm-eval[api]>=0.4.9",
    "greenlet",
)
WORKFLOWS = ROOT / ".github" / "workflows"


@pytest.fixture
def stored():
    [part] = json.loads(versions.STORED.read_text(encoding="utf-8"))["parts"]
    return {
        title: {row[0]: row[place] for row in part["rows"]}
        for place, title in enumerate(part["columns"][1:], 1)
    }


def ended(code, stdout="", stderr="", args=("python", "-m", "pytest")):
    return subprocess.CompletedProcess(args, code, stdout, stderr)


def test_the_oldest_has_the_highest_of_the_lower_bounds_of_each_package():
    found = versions.lowest(REQUIREMENTS)
    assert found == ("torch==2.10", "numba==0.9", "uvloop==0.21", "lm-eval==0.4.9")


def test_the_newest_has_no_upper_bound():
    assert versions.uncapped(REQUIREMENTS)[1] == "torch>=2.10"
    assert not any("<" in line for line in versions.uncapped(versions.needs(versions.EXTRAS, ())))
    (newest,) = versions.combinations(["newest"], None, full=False)
    assert newest.pins == ()
    assert not any("<" in line for line in newest.requirements)


def test_pins_of_one_command_are_one_combination():
    first, second = versions.combinations(
        ["torch==2.14.0", "oldest", "transformers==5.20.*"], "3.12", full=False
    )
    assert (first.title, second.title) == ("oldest", "torch==2.14.0, transformers==5.20.*")
    assert second.pins == ("torch==2.14.0", "transformers==5.20.*")
    assert {first.python, second.python} == {"3.12"}


@pytest.mark.parametrize("name", ["eldest", "torch", "torch>=2", "-e .", "torch==2;x", ""])
def test_another_name_is_refused_with_those_there_are(name):
    with pytest.raises(SystemExit, match=r"wanted oldest, newest, vllm, sglang or NAME==VERSION"):
        versions.combinations([name], None, full=False)


@pytest.mark.parametrize(
    ("done", "result", "is_bad"),
    [
        (ended(0, "....\n9 passed, 3 skipped in 2.10s\n"), "9 passed", False),
        (ended(0, "4 skipped in 2.10s\n"), "skipped", True),
        (ended(1, "1 failed, 9 passed in 2.10s\n"), "1 failed, 9 passed", True),
        (ended(2, "!!! 5 errors during collection !!!\n3 errors in 1s"), "3 errors", True),
        (ended(4, "", "ImportError while loading"), "failed: ", True),
        (ended(0, "text", "compiling\n", ["python", "-m", "model.run"]), "passed", False),
        (
            ended(1, "text", "a\nerror: no\n", ["python", "-m", "model.run"]),
            "failed: error: no",
            True,
        ),
        (ended(-11, "", "", ["python", "-c", "x"]), "failed: ", True),
    ],
)
def test_a_part_that_fails_is_never_a_pass(done, result, is_bad):
    assert versions.outcome(done) == result
    assert versions.is_bad(result) == is_bad


def test_a_python_that_is_absent_and_packages_that_conflict_have_a_row(monkeypatch, tmp_path):
    (one,) = versions.combinations(["torch==9.0"], "3.9999", full=False)
    missing = versions.tried(one, {}, tmp_path, None)
    assert missing["installs"] == "not run: no Python 3.9999 here"
    monkeypatch.setattr(versions, "interpreter", lambda _: "python")
    monkeypatch.setattr(versions.subprocess, "run", lambda *_, **__: None)
    error = "WARNING: slow\nERROR: No matching distribution found for torch==9.0\nERROR: more"
    monkeypatch.setattr(versions, "ran", lambda *_: ended(1, "", error))
    failed = versions.tried(one, {}, tmp_path, None)
    assert failed["installs"] == "failed: No matching distribution found for torch==9.0"


def test_an_installed_combination_has_its_versions_and_its_results(monkeypatch, tmp_path):
    def ran(command, *_):
        answers = {"-V": ended(0, "Python 3.12.1"), "pip": ended(0), "list": ended(0, listed)}
        answers["model.run"] = ended(1, "", "error: tokens differ", ["model.run"])
        return next(done for word, done in reversed(answers.items()) if word in command)

    listed = json.dumps([{"name": "Torch", "version": "2.14.0"}])
    monkeypatch.setattr(versions, "interpreter", lambda _: "python")
    monkeypatch.setattr(versions.subprocess, "run", lambda *_, **__: None)
    monkeypatch.setattr(versions, "ran", ran)
    (one,) = versions.combinations(["vllm"], None, full=False)
    column = versions.tried(one, {"verify": versions.VERIFY}, tmp_path, None)
    assert (column["Python"], column["torch"], column["numba"]) == ("3.12.1", "2.14.0", "-")
    assert (column["installs"], column["verify"]) == ("passed", "failed: error: tokens differ")
    assert "torch==2.14.0" in (tmp_path / "constraints.txt").read_text()


def test_a_run_replaces_its_columns_and_leaves_the_others(monkeypatch, tmp_path):
    monkeypatch.setattr(versions, "STORED", tmp_path / "versions.json")
    columns = {
        "oldest": {"Python": "3.11.7", "date": "2026-01-01", "torch": "2.10.0", "verify": "passed"},
        "newest": {"Python": "3.13.0", "date": "2026-01-02", "installs": "failed: x"},
    }
    for title, column in columns.items():
        versions.store(versions.merged([(title, column)]))
    again = columns["oldest"] | {"date": "2026-02-01", "verify": "failed: y"}
    versions.store(versions.merged([("oldest", again)]))
    found = json.loads(versions.STORED.read_text(encoding="utf-8"))
    assert found["date"] == "2026-02-01"
    assert found["parts"][0]["columns"] == ["", "oldest, 3.11", "newest, 3.13"]
    rows = {row[0]: row[1:] for row in found["parts"][0]["rows"]}
    assert rows["verify"] == ["failed: y", "-"]
    assert rows["torch"] == ["2.10.0", "-"]


@pytest.mark.parametrize("kind", ["oldest", "newest", *versions.TITLES.values()])
def test_the_page_has_the_combinations_and_no_part_failed(stored, kind):
    found = [one for title, one in stored.items() if title.startswith(f"{kind}, ")]
    assert found
    for one in found:
        assert {"installs", "imports", "verify", *versions.QUICK} <= one.keys()
        assert not any(re.search("failed|error", result) for result in one.values()), one
        assert {one[part] for part in ("installs", "imports", "verify")} == {"passed"}, one


def test_the_page_has_the_lower_bounds_and_the_last_minors_below_the_upper_ones(stored):
    oldest = next(one for title, one in stored.items() if title.startswith("oldest, "))
    requirements = versions.needs(versions.EXTRAS, ())
    for line in versions.lowest(requirements):
        wanted = Requirement(line)
        assert wanted.specifier.contains(oldest[wanted.name]), line
    for name in ("torch", "transformers"):
        line = next(line for line in requirements if bare(line) == name)
        major, minor = re.search(r"<(\d+)\.(\d+)", line).groups()
        tried = [one[name] for one in stored.values()]
        assert any(version.startswith(f"{major}.{int(minor) - 1}.") for version in tried), line


def test_the_extras_allow_what_the_engines_have(stored):
    for title, one in stored.items():
        for line in versions.needs(versions.EXTRAS, ()):
            wanted = Requirement(line)
            if title.rpartition(",")[0] in {"oldest", *versions.TITLES.values()}:
                assert wanted.specifier.contains(one[wanted.name]), (title, line)


def test_the_workflows_run_the_gate_and_the_newest_packages_on_every_python():
    gate = yaml.safe_load((WORKFLOWS / "gate.yml").read_text(encoding="utf-8"))
    assert {"run": "bash .ci/run"} in gate["jobs"]["gate"]["steps"]
    weekly = yaml.safe_load((WORKFLOWS / "versions.yml").read_text(encoding="utf-8"))
    (job,) = weekly["jobs"].values()
    [command] = [step["run"] for step in job["steps"] if "run" in step]
    assert command.startswith("python -m tests.versions newest --python ${{ matrix.python }}")
    classifiers = [line.rpartition(" ")[2] for line in PROJECT["project"]["classifiers"]]
    assert job["strategy"]["matrix"]["python"] == [one for one in classifiers if one[:2] == "3."]
    assert weekly[True]["schedule"]  # YAML reads the key `on` as true
