"""The project stays within its budgets, and what counts is itself shown to count."""

from pathlib import Path

import pytest

from tests.architecture import BUDGETS
from tests.sizes import counts

ROOT = Path(__file__).parents[1]
SLACK = 1.03


@pytest.fixture(scope="module")
def found():
    return counts(ROOT)


@pytest.mark.parametrize("name", BUDGETS)
def test_nothing_is_over_its_budget_and_no_budget_is_stale(found, name):
    assert found[name] <= BUDGETS[name], "shorten, or raise the budget in tests/architecture.py"
    assert BUDGETS[name] <= max(found[name] * SLACK, 10), "lower the budget: keep what was won"


def test_every_folder_has_a_budget(found):
    assert found.keys() == BUDGETS.keys()


PLANTED = {
    "lines of model/serve": "x = 1\n",
    "docstrings that begin with What, Whether or See": 'def f():\n    """What comes."""\n',
    "places with private names of other libraries": "import torch\n\ntorch._C.f()\n",
    "arrows between folders of model": "import model.cli.exits\n",
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_line_is_counted(tmp_path, name):
    (tmp_path / "model/serve").mkdir(parents=True)
    path = tmp_path / "model/serve/planted.py"
    path.write_text('"""A module."""\n')
    before = counts(tmp_path)
    path.write_text('"""A module."""\n' + PLANTED[name])
    added = PLANTED[name].count("\n") if name.startswith("lines") else 1
    assert counts(tmp_path)[name] == before.get(name, 0) + added


@pytest.mark.parametrize(
    "code",
    [
        "from torch._inductor import config\n",
        "import torch._dynamo\n",
        "def f(layer):\n    layer._buffers.clear()\n",
        'def f(layer):\n    return getattr(layer, "_modules")\n',
        'def f(patch):\n    patch("torch._inductor.codecache.f")\n',
    ],
)
def test_private_names_are_found_in_every_form(tmp_path, code):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/planted.py").write_text(code)
    assert counts(tmp_path)["places with private names of other libraries"] == 1


@pytest.mark.parametrize(
    "code",
    [
        "class A:\n    def __init__(self):\n        self._b = 1\n\n\ndef f(a):\n    return a._b\n",
        "def _b():\n    pass\n\n\ndef f(a):\n    return a._b\n",
        "from __future__ import annotations\n",
        "import os\n\nos._exit(1)\n",
    ],
)
def test_our_own_and_documented_names_are_not_counted(tmp_path, code):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/planted.py").write_text(code)
    assert counts(tmp_path)["places with private names of other libraries"] == 0
