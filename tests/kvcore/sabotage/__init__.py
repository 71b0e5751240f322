"""Allocators with one bug each, every bug one that an engine has shipped, or might.

The rows beside them are those of the corpus of real bugs (docs/reference/corpus.md), the
properties those of docs/reference/properties.md: a machine that does not catch them proves nothing.
"""

import importlib
import pkgutil

from tests.kvcore.sabotage.registry import SABOTAGES, Sabotage

for _module in pkgutil.iter_modules(__path__):  # each registers its bugs
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["SABOTAGES", "Sabotage"]
