"""The settings of several replicas as one.

Invariants: a configuration that exists is in range; it never changes.

Does not know: Ray.
"""

import math
from dataclasses import dataclass
from typing import Literal

from model.cli.options import ModelOptions
from model.control.config import EngineConfig
from model.control.settings import check_settings, setting
from model.errors import InvalidArgumentError
from model.serve.config import ServeConfig

Routing = Literal["prefix", "round-robin", "power-of-two", "ray-power-of-two", "ray-prefix"]
"""How a replica is chosen; the last two are Ray Serve's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """How many replicas there are, and which of them takes a request."""

    replicas: int = setting(2, help="replicas, or the fewest of them", least=1, most=1024)
    max_replicas: int | None = setting(
        None, help="as many as waiting tokens ask for, up to this (default: --replicas)", least=1
    )
    waiting_tokens: int = setting(
        4096, help="tokens of prompts that may wait for each replica before there is one more",
        least=1, needs=("max_replicas",),
    )  # fmt: skip
    router: Routing = setting(
        "prefix",
        help="which replica takes a request: the one that holds most of its prompt and has least "
        "to do, the next one, the less loaded of two; or Ray's own",
    )
    running_weight: int = setting(
        16,
        help="what a running request costs in that choice, in tokens that wait",
        least=0,
        needs=("router=prefix", "router=power-of-two"),
    )
    miss_weight: float = setting(
        2.0, help="what a token of the prompt costs that a replica does not hold", least=0,
        below=math.inf, needs=("router=prefix",),
    )  # fmt: skip
    retries: int = setting(
        2, help="how often a request is sent again whose replica was lost before its first token",
        least=0, most=100,
    )  # fmt: skip
    replica_timeout_s: float = setting(
        60.0, help="how long a request waits for a replica that takes it", above=0, below=math.inf
    )
    start_timeout_s: float = setting(
        300.0, help="how long Ray may take to start its proxy, which is slow on a busy machine",
        above=0, below=math.inf,
    )  # fmt: skip
    cpus_per_process: float = setting(
        1.0, help="processors that Ray sets aside for each process of a replica", least=0,
        below=math.inf,
    )  # fmt: skip
    address: str | None = setting(
        None,
        help="a Ray cluster that runs, such as auto (default: one of this machine, which ends with "
        "this command)",
    )

    def __post_init__(self) -> None:
        check_settings(self)
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise InvalidArgumentError(
                f"max_replicas: wanted at least {self.replicas}, which is replicas, "
                f"got {self.max_replicas}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """A command line, parsed.

    Attributes:
        cluster: how many replicas, and who takes what.
        serve: how clients are met.
        model: which runs in each.
        engine: its sizes, in each.
    """

    cluster: ClusterConfig
    serve: ServeConfig
    model: ModelOptions
    engine: EngineConfig
