"""The settings of the server, beside those of the engine that it serves.

Invariants: a configuration that exists is in range; it never changes.

Does not know: FastAPI, the engine.
"""

from dataclasses import dataclass

from model.errors import InvalidArgumentError, shown

_MAX_PORT = 65_535


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """How a server meets its clients.

    Attributes:
        host: the address it listens on.
        port: likewise; 0: any that is free.
        served_model_name: what clients call the model; None: the end of its path or id.
        api_keys: a client has to show one of these; none: anybody is served.
        allow_origins: pages of these origins may read answers (CORS).
        tls_certfile, tls_keyfile: HTTPS with this certificate and key.
        max_waiting: requests that may wait beside those that have a seat; more are told to come
            again.
        max_request_bytes: the largest body.
        request_timeout_s: how long a body may take to come, and an answer to be read on.
        drain_timeout_s: how long requests may go on after a SIGTERM.
        access_log: where a JSON line for each request is written; "-": stdout; None: nowhere.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    api_keys: tuple[str, ...] = ()
    allow_origins: tuple[str, ...] = ()
    tls_certfile: str | None = None
    tls_keyfile: str | None = None
    max_waiting: int = 1024
    max_request_bytes: int = 4 << 20
    request_timeout_s: float = 60.0
    drain_timeout_s: float = 30.0
    access_log: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.port <= _MAX_PORT:
            raise InvalidArgumentError(
                f"port: wanted a number from 0 to {_MAX_PORT}, got {shown(self.port)}"
            )
        if self.max_waiting < 0:
            raise InvalidArgumentError(
                f"max_waiting: wanted at least 0, got {shown(self.max_waiting)}"
            )
        if self.max_request_bytes < 1:
            raise InvalidArgumentError(
                f"max_request_bytes: wanted at least 1, got {shown(self.max_request_bytes)}"
            )
        for name in ("request_timeout_s", "drain_timeout_s"):
            if not getattr(self, name) >= 0:
                raise InvalidArgumentError(
                    f"{name}: wanted at least 0, got {shown(getattr(self, name))}"
                )
        if (self.tls_certfile is None) != (self.tls_keyfile is None):
            raise InvalidArgumentError("tls_certfile: wanted together with tls_keyfile, got one")
