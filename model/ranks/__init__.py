"""The processes of a tensor parallel network.

`sum_kernels` is imported when it is first used, because it imports Triton.
"""

from importlib import import_module
from types import ModuleType


def __getattr__(name: str) -> ModuleType:
    """Import the kernels."""
    if name == "sum_kernels":
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
