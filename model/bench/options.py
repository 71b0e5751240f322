"""What a benchmark's command line asks for.

Decides: the settings of a benchmark. Invariants: options never change; `args.py` says which mean
nothing together.

Does not know: torch, models.
"""

import math
from dataclasses import dataclass
from typing import Literal

from model.bench.workloads import Shape, Workload
from model.cli.options import ModelOptions, TraceOptions
from model.control.config import EngineConfig
from model.control.params import SamplingParams
from model.control.settings import setting

Peer = Literal["generate", "generate_batch", "generate_batch_sized", "no-prefix-cache"]
"""What can run beside us."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkOptions:
    """What is measured."""

    workload: Literal[Workload, "waste", "host"] = setting("uniform", help="what is measured")
    peer: tuple[Peer, ...] = setting((), help="what runs beside us")
    rounds: int = setting(1, help="turns of each", least=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightOptions:
    """Whose weights are measured."""

    dummy_weights: bool = setting(
        False,
        help="random weights of the model's configuration; --model may be qwen3-0.6b or qwen3-8b",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivalOptions:
    """What is drawn, and when requests come."""

    seed: int = setting(0, help="of lengths, tokens, moments")
    temperature: float = setting(
        0.0, help="0: the most likely token; above 0: draw", least=0, below=math.inf
    )
    top_k: int | None = setting(
        None,
        help="draw from the most likely tokens alone, this many",
        least=1,
        needs=("temperature",),
    )
    top_p: float = setting(
        1.0,
        help="draw from the fewest most likely tokens that reach this mass",
        above=0,
        most=1,
        needs=("temperature",),
    )
    request_rate: float = setting(
        math.inf, help="requests a second, at random moments; inf: all at once", above=0
    )
    max_concurrency: int | None = setting(
        None, help="requests in flight at once (default: any number)", least=1
    )

    @property
    def params(self) -> SamplingParams:
        """How all tokens are chosen. O(1)."""
        return SamplingParams(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)


@dataclass(frozen=True, slots=True, kw_only=True)
class WasteOptions:
    """The memory of a flat cache and of a paged one."""

    lengths: tuple[int, ...] = setting(
        (1024, 640, 384, 200), help="tokens of the sequences to hold", least=1, unit="list"
    )
    row_slots: int = setting(1024, help="slots of a flat cache's row for them", least=1)
    trace_of: Workload = setting("uniform", help="the workload that is replayed without a network")
    block_sizes: tuple[int, ...] = setting(
        (8, 16, 32, 64, 128, 256), help="on these block sizes, and on rows", least=1, unit="list"
    )
    rows: int = setting(32, help="memory: the number of rows of the longest request", least=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOptions:
    """What a step costs the host."""

    steps: int = setting(128, help="steps that are timed", least=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrintOptions:
    """What comes out."""

    json: bool = setting(False, help="one JSON document on stdout")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """A command line, parsed.

    Attributes:
        work: what is measured.
        weights: whose are measured.
        model: which runs, and on what.
        engine: sizes.
        shape: of the workload that is served or replayed, or of as many requests.
        arrivals: what is drawn, and when requests come.
        waste: of `--workload waste`.
        host: of `--workload host`.
        trace: what is told of the steps of our first turn.
        json: whether one document is printed in place of a table.
    """

    work: WorkOptions
    weights: WeightOptions
    model: ModelOptions
    engine: EngineConfig
    shape: Shape
    arrivals: ArrivalOptions
    waste: WasteOptions
    host: HostOptions
    trace: TraceOptions
    json: bool
