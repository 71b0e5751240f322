"""The server's socket, open before anything slow is loaded.

Does not know: what is served on it.
"""

import socket

from model.cli.limits import allow_open_files
from model.errors import UsageError
from model.serve.config import ServeConfig

_BACKLOG = 2048
_LEAST_FILES = 64
"""Open files of a server: about 30 of its process, and one for each connection."""


def listen(config: ServeConfig) -> socket.socket:
    """Open the socket; clients that connect wait until they are served.

    Raises:
        UsageError: the address cannot be had, or the process may open too few files.
    """
    allow_open_files(_LEAST_FILES)
    where = f"--host {config.host} --port {config.port}"
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind)
    except (OSError, UnicodeError) as error:
        raise UsageError(f"{where}: {error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise UsageError(f"{where}: {error.strerror or error}") from error
    return listener


def address_of(listener: socket.socket, config: ServeConfig) -> str:
    """Where a socket is reached, as a browser takes it. O(1)."""
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"{'http' if config.tls_certfile is None else 'https'}://{shown}:{port}"
