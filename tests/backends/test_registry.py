"""Backends are found by name, loaded when asked for, and say why they cannot run."""

import importlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch

import backends
from backends import conformance, registry
from tests.backends.honest import HonestBackend

HERE = "tests.backends.test_registry"
ROOT = Path(__file__).parents[2]


def load_honest():
    return HonestBackend()


def load_broken():
    raise OSError("libfast.so is missing")


def load_picky():
    raise backends.BackendUnavailableError("picky", "needs an NPU", "numba")


def load_nothing():
    return object()


@pytest.fixture
def plug_ins(monkeypatch):
    """Register entry points (name -> value) as if installed packages had."""

    def register(*pairs):
        points = [EntryPoint(name, value, registry.ENTRY_POINT_GROUP) for name, value in pairs]

        def entry_points(*, group):
            return [point for point in points if point.group == group]

        monkeypatch.setattr(registry, "entry_points", entry_points)

    return register


def _python(code, **environment):
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("name", ["numba", "triton"])
def test_importing_backends_imports_no_toolchain_and_loading_one_not_that_of_another(name):
    code = (
        "import sys, backends; found = {'numba', 'llvmlite', 'triton'} & set(sys.modules);"
        f"backends.get_backend({name!r}); print(found, *{{'numba', 'triton'}} & set(sys.modules))"
    )
    assert _python(code, TRITON_INTERPRET="1") == f"set() {name}"


def test_names_are_listed_before_one_that_needs_torch_is_loaded():
    code = (
        "import sys, backends; missing = {*backends.__all__, '__name__'} - {*dir(backends)};"
        "print(missing, 'torch' in sys.modules)"
    )
    assert _python(code) == "set() False"


def test_auto_is_numba_without_cuda_and_triton_with_it(monkeypatch):
    asked = []
    monkeypatch.setattr(registry, "_load", lambda name, point: asked.append(name))
    for cuda in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda cuda=cuda: cuda)
        backends.get_backend()
    assert asked == ["numba", "triton"]


def test_the_same_backend_comes_back_each_time():
    assert backends.get_backend("numba") is backends.get_backend("numba")


def test_an_unknown_name_lists_the_known_ones_and_the_closest():
    with pytest.raises(backends.UnknownBackendError) as caught:
        backends.get_backend("tritn")
    assert "auto, numba, triton" in str(caught.value)
    assert "did you mean 'triton'" in str(caught.value)


def test_a_plug_in_is_found_and_loaded_when_asked_for(plug_ins):
    plug_ins(("honest", f"{HERE}:load_honest"), ("broken", "no.such.module:load"))
    assert backends.backend_names() == ("numba", "triton", "broken", "honest")
    backend = backends.get_backend("honest")
    assert isinstance(backend, HonestBackend)
    assert isinstance(backend, backends.Backend)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (f"{HERE}:load_broken", "OSError: libfast.so is missing"),
        ("no.such.module:load", "No module named 'no'"),
        (f"{HERE}:load_nothing", "returned object, which is no Backend"),
        (f"{HERE}:absent", "absent"),
    ],
)
def test_a_broken_plug_in_gives_its_reason_and_an_alternative(plug_ins, value, reason):
    plug_ins(("broken", value))
    with pytest.raises(backends.BackendUnavailableError) as caught:
        backends.get_backend("broken")
    assert reason in caught.value.reason
    assert "numba" in caught.value.alternative
    assert "broken" not in caught.value.alternative


def test_a_plug_ins_own_refusal_is_passed_on(plug_ins):
    plug_ins(("picky", f"{HERE}:load_picky"))
    with pytest.raises(backends.BackendUnavailableError, match="needs an NPU"):
        backends.get_backend("picky")


def test_a_plug_in_cannot_take_a_built_in_name(plug_ins):
    plug_ins(("numba", f"{HERE}:load_broken"))
    assert backends.get_backend("numba").name == "numba"
    assert backends.backend_names().count("numba") == 1


def test_two_packages_with_one_name_are_an_error_that_names_both(plug_ins):
    plug_ins(("twin", f"{HERE}:load_honest"), ("twin", f"{HERE}:load_broken"))
    with pytest.raises(backends.BackendUnavailableError, match=r"load_broken.*load_honest"):
        backends.get_backend("twin")


def test_list_backends_says_which_can_run_and_why_others_cannot(plug_ins):
    plug_ins(("broken", f"{HERE}:load_broken"))
    found = {status.name: status for status in backends.list_backends()}
    assert found["numba"].available
    assert found["numba"].reason == ""
    assert not found["broken"].available
    assert "libfast.so" in found["broken"].reason


def test_the_registry_reads_what_packages_install():
    assert registry.entry_points is importlib.metadata.entry_points


def test_the_plug_in_of_the_documentation_conforms_and_processes_find_what_one_finds(
    tmp_path, monkeypatch
):
    text = (ROOT / "docs" / "how-to" / "add-a-backend.md").read_text()
    config = re.search(r"```toml\n(.*?)```", text, re.DOTALL).group(1)
    points = tomllib.loads(config)["project"]["entry-points"][registry.ENTRY_POINT_GROUP]
    code = re.search(r"```python\n(# kvcore_example.py.*?)```", text, re.DOTALL).group(1)
    (tmp_path / "kvcore_example.py").write_text(code)
    installed = tmp_path / "kvcore_example-0.1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: kvcore-example\nVersion: 0.1\n"
    )
    lines = [f"{name} = {value}\n" for name, value in points.items()]
    (installed / "entry_points.txt").write_text(f"[{registry.ENTRY_POINT_GROUP}]\n{''.join(lines)}")
    command = [sys.executable, "-m", "backends.conformance", "example"]
    done = subprocess.run(
        [*command, "--quick", "--json", "--jobs", "2"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["passed"]
    assert len(report["findings"]) > 50
    monkeypatch.syspath_prepend(tmp_path)
    cases = conformance._cases(importlib.import_module("kvcore_example").Example(), quick=True)
    found = Counter(one["case"] for one in report["findings"] if one["check"] == "untouched")
    assert found >= Counter(case for check, case, _ in cases if check == "attention")
    assert set(found.values()) == {1}
