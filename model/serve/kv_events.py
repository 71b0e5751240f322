"""What routers are told of the cache: kvcore's publisher, beside the engine's steps.

Decides: that an address in use is reported before a model is loaded, by the name of its flag.

Does not know: HTTP, clients, what a step is.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvcore.wire import EndpointError, Publisher, check_endpoint
from model.errors import UsageError
from model.serve.config import ServeConfig

if TYPE_CHECKING:
    from model.engine_core import EngineCore

Announces = Callable[["EngineCore", Callable[[], None]], Publisher]


def announces(config: ServeConfig, endpoint: str) -> Announces:
    """What opens the publisher that the settings ask for, of an engine and what wakes it.

    Raises:
        UsageError: an address is in use, or is none.
    """
    replay = config.kv_replay
    try:
        check_endpoint("--kv-events", endpoint)
        if replay is not None:
            check_endpoint("--kv-replay", replay)
    except EndpointError as error:
        raise UsageError(str(error)) from error

    def announce(engine: "EngineCore", wake: Callable[[], None]) -> Publisher:
        return Publisher(engine.kv, endpoint, replay, wake=wake, tiers=engine.keeping_tiers)

    return announce
