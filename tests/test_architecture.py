"""The plan of the house holds, and the check that says so is itself checked on planted breaches."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture import BRIDGES, LAYERS, PACKAGES, imported, violations

ROOT = Path(__file__).parents[1]
TOP_LEVEL = {
    ".ci", ".git", ".github", ".gitignore", "README.md", "backends", "docs", "kvcore", "model",
    "pyproject.toml", "tests",
}  # fmt: skip


def test_the_project_follows_its_architecture():
    assert violations(ROOT) == []


def test_the_top_level_is_what_was_agreed():
    ignored = {".venv", "build", "dist", "__pycache__"}
    found = {path.name for path in ROOT.iterdir()} - ignored
    assert {name for name in found if not name.endswith(("_cache", ".egg-info"))} - TOP_LEVEL <= {
        ".hypothesis"
    }
    assert TOP_LEVEL - {".git"} <= found


def test_the_page_says_which_files_of_kvcore_know_torch_and_the_kernels():
    knowing = {"torch": set(), "backends": set()}
    for path in (ROOT / "kvcore").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for top in {module.partition(".")[0] for module in imported(tree)} & knowing.keys():
            knowing[top].add(path.relative_to(ROOT).as_posix())
    assert all(name.startswith("kvcore/adapters/") for name in knowing["torch"])
    assert knowing["backends"] == BRIDGES
    page = " ".join((ROOT / "docs/architecture.md").read_text(encoding="utf-8").split())
    assert "only files of `kvcore/adapters` import torch" in page
    assert len(BRIDGES) == 2
    assert "two of them, the `BRIDGES` of `tests/architecture.py`, import `backends`" in page
    code = "import kvcore, sys; print(sorted({'torch', 'backends'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("package", LAYERS)
def test_every_layer_has_its_files(package):
    for part in [part for row in LAYERS[package] for part in row]:
        path = ROOT / package / part
        assert path.is_dir() or path.with_suffix(".py").is_file()


PLANTED = {
    "an upward import": (
        "kvcore/block.py", "from kvcore.pool import BlockPool", "does not stand below"
    ),
    "a device in the control plane": (
        "model/control/request.py", "from model.caches import layout", "does not stand below"
    ),
    "a command line in the engine": (
        "model/engine.py", "import model.cli.progress", "engine does not stand below cli"
    ),
    "the package itself below its files": (
        "model/engine.py", "from model import Request", "engine does not stand below __init__"
    ),
    "a backend in its contract": (
        "backends/contract.py", "from backends.numba_cpu.bits import x", "does not stand below"
    ),
    "a kernel in the other backend": (
        "backends/numba_cpu/store_kv.py", "from backends.triton_gpu import place",
        "numba_cpu does not stand below triton_gpu",
    ),
    "a kernel in the other backend, below it": (
        "backends/triton_gpu/store_kv.py",
        "from backends.numba_cpu import bits",
        "triton_gpu does not stand below numba_cpu",
    ),
    "decode in what all kernels share": (
        "backends/triton_gpu/shared/softmax.py",
        "from backends.triton_gpu.decode import splits",
        "shared does not stand below decode",
    ),
    "an import of its own layer": (
        "kvcore/tables/slots.py", "import kvcore.reports", "does not stand below"
    ),
    "a file without a layer": (
        "kvcore/radix.py", "from kvcore.errors import KVCoreError", "is in no layer"
    ),
    "a folder without layers": (
        "model/other/page.py", "import json", "give its folder a row in MODEL_LAYERS"
    ),
    "torch in the control plane": ("kvcore/pool.py", "import torch", "has no tensors"),
    "numpy in the scheduler": (
        "model/control/scheduler.py", "import numpy as np", "has no tensors"
    ),
    "a stranger in kvcore": (
        "kvcore/identity/namespace.py", "import blake3", "imports blake3, which it does not need"
    ),
    "hypothesis outside its part": (
        "kvcore/pool.py", "import hypothesis", "imports hypothesis, which it does not need"
    ),
    "the tests in what they test": (
        "kvcore/wire/index.py", "import kvcore.testing", "nothing else of kvcore may"
    ),
    "kvcore in a backend": (
        "backends/numba_cpu/store_kv.py", "import kvcore", "backends does not know kvcore"
    ),
    "a backend in kvcore": (
        "kvcore/manager.py", "import backends", "kvcore does not know backends"
    ),
    "an import past the root": (
        "model/attention/batch.py", "from kvcore.pool import BlockPool", "imported by its root"
    ),
    "an import in a function": (
        "model/engine.py", "def run():\n    import json\n", "an import inside run"
    ),
    "a guard that vanishes": ("kvcore/pool.py", "assert 1 + 1 == 2", "vanishes under python -O"),
    "a file for everything": ("model/utils.py", "x = 1", "a name that says nothing"),
    "a file without a word": ("model/attention/batch.py", "x = 1", "opens with what it decides"),
    "a function without end": (
        "model/attention/batch.py", "def run():\n" + "    x = 1\n" * 61, "run has 61 lines"
    ),
    "a file without end": ("model/attention/batch.py", "x = 1\n" * 586, "586 of code"),
    "a class without end": (
        "model/attention/batch.py", "class Batch:\n" + "    x = 1\n" * 585, "586 of code"
    ),
    "a file of much prose": (
        "model/attention/batch.py", "def f():\n    pass\n" + "# x\n" * 725, "727 lines"
    ),
    "a class and more, of much prose": (
        "model/attention/batch.py",
        "class A:\n    x = 1\n\n\nclass B:\n    y = 1\n" + "# x\n" * 725,
        "731 lines",
    ),
}  # fmt: skip


def test_a_file_that_is_one_class_may_say_much(tmp_path):
    for package in PACKAGES:
        (tmp_path / package).mkdir()
    file = tmp_path / "kvcore" / "manager.py"
    file.write_text(
        '"""All verbs."""\n\n\nclass All:\n    x = 1\n' + "# x\n" * 725, encoding="utf-8"
    )
    assert violations(tmp_path) == []


BY_ITS_PATH = {"a file without a layer", "a folder without layers", "a file for everything"}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_breach_is_reported(tmp_path, name):
    path, source, message = PLANTED[name]
    for package in PACKAGES:
        (tmp_path / package).mkdir()
    file = tmp_path / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(source, encoding="utf-8")
    assert any(message in line for line in violations(tmp_path))
    file.write_text('"""It decides nothing."""\n', encoding="utf-8")
    left = violations(tmp_path)
    assert any(message in line for line in left) == (name in BY_ITS_PATH)
