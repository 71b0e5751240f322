"""Transformers' names come from disk, and are those that it finds itself."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
from transformers import models
from transformers.utils.import_utils import (
    create_import_structure_from_path,
    define_import_structure,
)

from model.cli.imports import _looking_up, _Losses, _run_without_losses

SOURCE = '__all__ = ["{name}"]\n'
OPENED = """
import sys
from model.cli import imports
opened = []
sys.addaudithook(lambda event, given: opened.append(given[0]) if event == "open" else None)
with imports.importing():
    from transformers.models.qwen3 import Qwen3Config
print(sum("/models/" in str(path) and str(path).endswith(".py") for path in opened))
print(Qwen3Config.model_type, any(type(each) is imports._Finder for each in sys.meta_path))
"""

LOSSES = """
import sys
from model.cli import imports
with imports.importing():
    from transformers.modeling_utils import LOSS_MAPPING
    from transformers.loss import loss_utils
print([name for name in sys.modules if name.startswith("transformers.loss.")])
import torch
logits, classes = torch.zeros(1, 5, 3), torch.zeros(1, 2, dtype=torch.int64)
loss = LOSS_MAPPING["ForCTC"]
from transformers.loss import loss_ctc
print(loss is not loss_ctc.ForCTCLoss, LOSS_MAPPING["ForCausalLM"] is loss_utils.ForCausalLMLoss)
loss_ctc.ForCTCLoss = lambda *given, **named: (given, named)
print(loss(1, b=2))
"""


@pytest.fixture(autouse=True)
def cache_dir(tmp_path, monkeypatch):
    """A cache of files for later starts that nothing is in."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("KVCORE_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def folder(tmp_path):
    """An installation of two models."""
    for name in ("models/a", "models/b", "utils"):
        (tmp_path / name).mkdir(parents=True)
        file = name.replace("models/", "configuration_")
        (tmp_path / name / f"{file}.py").write_text(SOURCE.format(name=file))
    return tmp_path / "models"


class Finding:
    """Transformers' function, which counts how often all is read."""

    def __init__(self):
        self.count = 0

    def __call__(self, path, prefix=None):
        self.count += 1
        create_import_structure_from_path.cache_clear()  # of this process
        return define_import_structure.__wrapped__(path, prefix)


def names(found):
    return {each for modules in found.values() for values in modules.values() for each in values}


def test_stored_names_are_those_that_transformers_finds():
    place = Path(models.__file__).parent
    for _ in ("made", "read"):
        define = _looking_up(define_import_structure.__wrapped__, place)
        for asked in ((place, "models"), (str(place / "__init__.py"), None)):
            assert define(*asked) == define_import_structure.__wrapped__(*asked)
    one = str(place / "qwen3/__init__.py")
    assert define(one) == define_import_structure.__wrapped__(one)


def test_all_is_read_once_for_all_starts_until_a_file_changes(folder, cache_dir):
    find = Finding()
    for _ in ("first start", "second start"):
        define = _looking_up(find, folder)
        assert names(define(folder, "models")) == {"configuration_a", "configuration_b"}
        define(folder, "models").clear()  # callers change what they get
        assert names(define(folder / "__init__.py")) == {"configuration_a", "configuration_b"}
    assert find.count == 1
    (folder / "a/configuration_a.py").write_text(SOURCE.format(name="Another"))
    assert names(_looking_up(find, folder)(folder)) == {"Another", "configuration_b"}
    (folder / "a/deeper").mkdir()
    (folder / "a/deeper/c.py").write_text(SOURCE.format(name="Deep"))
    assert "Deep" in names(_looking_up(find, folder)(folder))
    assert find.count == 3
    (folder.parent / "elsewhere").mkdir()
    (folder / "linked").symlink_to(folder.parent / "elsewhere")
    (folder.parent / "elsewhere/d.py").write_text(SOURCE.format(name="Linked"))
    assert "Linked" in names(_looking_up(find, folder)(folder))
    assert find.count == 4
    for stored in (cache_dir / "names").iterdir():
        stored.write_bytes(stored.read_bytes()[:-1])
    assert "Deep" in names(_looking_up(find, folder)(folder))
    assert find.count == 5


def test_names_that_cannot_be_stored_are_found(folder, monkeypatch):
    (folder / "file").touch()
    monkeypatch.setenv("KVCORE_CACHE_DIR", str(folder / "file"))
    assert "configuration_a" in names(_looking_up(Finding(), folder)(folder))


def test_a_second_start_reads_no_source_of_a_model():
    command = [sys.executable, "-c", OPENED]
    first, second = (
        subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        for _ in range(2)
    )
    assert int(first[0]) > 1000
    assert int(second[0]) < 20  # the packages that are imported read themselves
    assert second[1] == "qwen3"
    assert first[2] == second[2] == "False"


def test_a_file_of_losses_is_imported_when_a_loss_is_called():
    done = subprocess.run(
        [sys.executable, "-c", LOSSES], capture_output=True, text=True, check=True
    )
    imported, replaced, result = done.stdout.splitlines()
    assert imported == "['transformers.loss.loss_utils']"
    assert replaced == "True True"
    assert result == "((1,), {'b': 2})"


def test_losses_that_are_more_than_functions_are_imported(tmp_path, monkeypatch):
    (tmp_path / "losses").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "losses/loss_a.py").write_text("class Loss:\n    weight = 1\n")
    module = ModuleType("losses.loss_utils")
    module.__package__ = "losses"
    module.__file__ = str(tmp_path / "losses/loss_utils.py")
    seen = []

    def run(module):
        found = import_module("losses.loss_a")
        seen.append(type(found))
        vars(module)["all"] = {"a": found.Loss.weight + 1}

    _run_without_losses(run, module)
    assert seen == [_Losses, ModuleType]
    assert module.all == {"a": 2}
