"""A traced network, cut at its attention and compiled.

`few_rows_kernels` and `lora_kernels` are imported when they are first used: they import Triton.
"""

from importlib import import_module
from types import ModuleType


def __getattr__(name: str) -> ModuleType:
    """Import the kernels."""
    if name in ("few_rows_kernels", "lora_kernels"):
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
