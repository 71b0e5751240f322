"""From logits to the next token: sampling, structured outputs.

`draw_kernels` is imported when it is first used, because it imports Triton.
"""

from importlib import import_module
from types import ModuleType


def __getattr__(name: str) -> ModuleType:
    """Import the kernels."""
    if name == "draw_kernels":
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
