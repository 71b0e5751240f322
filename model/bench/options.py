"""What a benchmark's command line asks for, by workload.

Invariants: options that exist are consistent (`args.py` makes them); they never change.

Does not know: flags, torch, models.
"""

from dataclasses import dataclass

from model.bench.workloads import Shape
from model.control.config import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """A benchmark that serves requests."""

    workload: str
    model: str
    backend: str
    dtype: str
    dummy_weights: bool
    shape: Shape
    seed: int
    temperature: float
    request_rate: float
    max_concurrency: int | None
    engine: EngineConfig
    peers: tuple[str, ...]
    rounds: int
    json: bool
    trace: str | None
    stats: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class WasteOptions:
    """The memory of a flat cache and of a paged one."""

    model: str
    dtype: str
    lengths: tuple[int, ...]
    row_slots: int
    trace: str
    shape: Shape
    seed: int
    block_sizes: tuple[int, ...]
    rows: int
    engine: EngineConfig
    json: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOptions:
    """What a step costs the host."""

    num_running: int
    num_steps: int
    block_size: int
    json: bool


BenchOptions = ServeOptions | WasteOptions | HostOptions
"""What a command line asks for."""
