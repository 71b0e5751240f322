"""The settings of the server, beside those of the engine that it serves.

Invariants: a configuration that exists is in range; it never changes.

Does not know: FastAPI, the engine.
"""

import math
import os
from dataclasses import dataclass

from model.control.settings import check_settings, setting
from model.errors import UsageError
from model.pace import STREAM_SHARE

_API_KEY = "KVCORE_API_KEY"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """How a server meets its clients."""

    host: str = setting("127.0.0.1", help="address to listen on", metavar="ADDRESS")
    port: int = setting(8000, help="likewise; 0: any that is free", least=0, most=65_535)
    served_model_name: str | None = setting(
        None,
        help="what clients call the model (default: the end of its path or id)",
        metavar="NAME",
    )
    api_keys: tuple[str, ...] = setting(
        (),
        help="clients have to show one (default: $KVCORE_API_KEY, else none is asked)",
        least=1,
        flag="api-key",
        metavar="KEY",
    )
    allow_origins: tuple[str, ...] = setting(
        (),
        help="pages of this origin may read answers (CORS; default: none)",
        flag="allow-origin",
        metavar="ORIGIN",
    )
    tls_certfile: str | None = setting(
        None, help="HTTPS with this certificate", metavar="PATH", needs=("tls_keyfile",)
    )
    tls_keyfile: str | None = setting(
        None, help="and this key", metavar="PATH", needs=("tls_certfile",)
    )
    max_waiting: int = setting(
        1024,
        help="requests that may wait beside those that run; more are told to come again",
        least=0,
    )
    stream_share: float = setting(
        STREAM_SHARE,
        help="the most of the time that sending streamed tokens may take; where many streams would "
        "take more, several tokens of each go together (1: each goes at once)",
        above=0,
        most=1,
    )
    max_request_bytes: int = setting(4 << 20, help="the largest request", least=1, unit="bytes")
    max_logprobs_bytes: int = setting(
        512 << 20,
        help="the most memory for the log-probabilities of one request, 128 bytes for each token "
        "and for each likely token beside it; a request that may need more is refused",
        least=0,
        unit="bytes",
    )
    request_timeout_s: float = setting(
        60.0,
        help="how long a request may take to come",
        least=0,
        below=math.inf,
    )
    drain_timeout_s: float = setting(
        30.0, help="how long requests may go on after SIGTERM", least=0, below=math.inf
    )
    kv_events: str | None = setting(
        None,
        help="tell routers here what the cache holds (ZeroMQ), such as tcp://*:5557",
        metavar="ADDRESS",
    )
    kv_replay: str | None = setting(
        None,
        help="and answer here who has missed some of it",
        metavar="ADDRESS",
        needs=("kv_events",),
    )
    access_log: str | None = setting(
        None, help="write a JSON line for each request; -: to stdout", metavar="PATH"
    )

    def __post_init__(self) -> None:
        check_settings(self)


def keys_of_environment() -> tuple[str, ...]:
    """The API keys of a server that was started without `--api-key`. O(1).

    Raises:
        UsageError: the environment variable is set and empty.
    """
    key = os.environ.get(_API_KEY)
    if key is None:
        return ()
    if not key:
        raise UsageError(
            f"${_API_KEY}: wanted text that is not empty, got '': unset it, or give --api-key"
        )
    return (key,)
