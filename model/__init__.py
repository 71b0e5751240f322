"""The runner: requests, schedule, batch, forward, sample; `python -m model.run` is its front door.

Importing this package loads nothing of it: a name is loaded at its first use, so that a command
line heeds a signal from its first moment. None of the names here loads torch
but `LLM`; `model.engine` and `model.load.loader` do, and Transformers too.
"""

import _signal  # type: ignore[import-not-found]  # `signal` without its enums, which load slowly
import os
import sys
from importlib import import_module


def _interrupted(number: int, _frame: object) -> None:
    """Handle Ctrl-C as `model.cli.exits` does, until a command has come to that."""
    if sys.stderr is not None:
        sys.stderr.write("interrupted\n")
        sys.stderr.flush()
    os._exit(128 + number)


# This is the first code of ours that `python -m model.run` runs; -m: it looks for the module yet.
if sys.argv[:1] == ["-m"] and _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
    _signal.signal(_signal.SIGINT, _interrupted)

TYPE_CHECKING = False  # `typing` is slow to load too
if TYPE_CHECKING:
    from model.async_engine import AsyncEngine
    from model.control.config import EngineConfig, SchedulerConfig
    from model.control.params import SamplingParams
    from model.control.request import FinishReason, Request, SampledToken, Status
    from model.control.scheduler import Scheduler
    from model.control.step import Chunk, SchedulerStats, Step
    from model.control.submission import Submission
    from model.engine import Engine
    from model.errors import (
        InvalidArgumentError,
        ModelError,
        ModelNotFoundError,
        RequestStateError,
        RequestTooLongError,
        SchedulerStateError,
        StalledError,
        UnsupportedModelError,
    )
    from model.llm import LLM
    from model.token_stream import Delta

__all__ = [
    "LLM",
    "AsyncEngine",
    "Chunk",
    "Delta",
    "Engine",
    "EngineConfig",
    "FinishReason",
    "InvalidArgumentError",
    "ModelError",
    "ModelNotFoundError",
    "Request",
    "RequestStateError",
    "RequestTooLongError",
    "SampledToken",
    "SamplingParams",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerStateError",
    "SchedulerStats",
    "StalledError",
    "Status",
    "Step",
    "Submission",
    "UnsupportedModelError",
]

_HOMES = (
    "errors",
    "control.config",
    "control.params",
    "control.request",
    "control.step",
    "control.submission",
    "control.scheduler",
    "token_stream",
    "engine",
    "async_engine",
    "llm",
)


def __getattr__(name: str) -> object:
    """Load a name of `__all__` from the module that has it."""
    for home in _HOMES if name in __all__ else ():
        module = import_module(f"{__name__}.{home}")
        if hasattr(module, name):
            value: object = getattr(module, name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
