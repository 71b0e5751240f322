"""Modules that need Ray, without it: what they take from it is played."""

import importlib
import sys
from types import ModuleType

import pytest

_NEED_RAY = (
    "model.cluster.ingress",
    "model.cluster.replica",
    "model.cluster.routing",
    "model.cluster.session",
)


@pytest.fixture
def played(monkeypatch):
    """Import a module while these modules of Ray's have these names, which are errors."""

    def load(name, ray):
        for each in _NEED_RAY:
            monkeypatch.delitem(sys.modules, each, raising=False)
        for module, names in {"ray": [], **ray}.items():
            made = ModuleType(module)
            for each in names:
                setattr(made, each, type(each, (Exception,), {}))
            monkeypatch.setitem(sys.modules, module, made)
        return importlib.import_module(name)

    yield load
    for each in _NEED_RAY:
        sys.modules.pop(each, None)
