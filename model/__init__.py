"""The runner: requests, schedule, batch, forward, sample; `python -m model.run` is its front door.

Importing this package loads no torch. `model.engine` and `model.loader` do, and Transformers too.
"""

from model.config import EngineConfig, SchedulerConfig
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
from model.params import SamplingParams
from model.request import FinishReason, Request, Status
from model.scheduler import Scheduler
from model.step import Chunk, SchedulerStats, Step

__all__ = [
    "Chunk",
    "EngineConfig",
    "FinishReason",
    "InvalidArgumentError",
    "ModelError",
    "ModelNotFoundError",
    "Request",
    "RequestStateError",
    "RequestTooLongError",
    "SamplingParams",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerStateError",
    "SchedulerStats",
    "StalledError",
    "Status",
    "Step",
    "UnsupportedModelError",
]
