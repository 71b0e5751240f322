"""A traced network, cut at its attention and compiled.

`few_rows_kernels` is imported when it is first used, because it imports Triton.
"""

from importlib import import_module
from types import ModuleType


def __getattr__(name: str) -> ModuleType:
    """Import the kernels."""
    if name == "few_rows_kernels":
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
