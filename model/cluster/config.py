"""The settings of several replicas behind one server.

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
"""The way in which a replica is chosen; the last two are Ray Serve's routers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """The number of replicas, and how one of them is chosen for a request."""

    replicas: int = setting(
        2,
        help="number of replicas; with --max-replicas, the minimum",
        least=1,
        most=1024,
        is_common=True,
    )
    max_replicas: int | None = setting(
        None,
        help="autoscale up to this many replicas (default: --replicas)",
        least=1,
        is_common=True,
    )
    waiting_tokens: int = setting(
        4096, help="waiting prompt tokens per replica above which a replica is added",
        least=1, needs=("max_replicas",),
    )  # fmt: skip
    router: Routing = setting(
        "prefix",
        help="how a replica is chosen for a request: prefix: by its prefix cache hit and load; "
        "round-robin: in turn; power-of-two: the less loaded of two random ones; ray-*: by Ray",
    )
    running_weight: int = setting(
        16,
        help="cost of a running request in that choice, in waiting tokens",
        least=0,
        needs=("router=prefix", "router=power-of-two"),
    )
    miss_weight: float = setting(
        2.0, help="cost of a prompt token that is not in the prefix cache of a replica", least=0,
        below=math.inf, needs=("router=prefix",),
    )  # fmt: skip
    retries: int = setting(
        2, help="how often a request is sent again if its replica is lost before its answer starts",
        least=0, most=100,
    )  # fmt: skip
    replica_timeout_s: float = setting(
        60.0, help="how long a request waits for a replica to accept it", above=0, below=math.inf
    )
    start_timeout_s: float = setting(
        300.0, help="how long Ray may take to start its proxy, which is slow on a busy machine",
        above=0, below=math.inf,
    )  # fmt: skip
    cpus_per_process: float = setting(
        1.0, help="CPUs that Ray reserves for each process of a replica", least=0,
        below=math.inf,
    )  # fmt: skip
    address: str | None = setting(
        None,
        help="address of a running Ray cluster, or auto (default: start Ray on this machine, and "
        "stop it with this command)",
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
        cluster: the replicas, and how requests are routed to them.
        serve: the settings of the server.
        model: the model of each replica.
        engine: the sizes of each replica's engine.
    """

    cluster: ClusterConfig
    serve: ServeConfig
    model: ModelOptions
    engine: EngineConfig
