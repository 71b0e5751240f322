"""Fetches images that requests name by URL.

Decides: that a URL is fetched only with `--allow-image-urls`, and only from public addresses: every
address of a host is checked, of each redirect too, and the connection goes to an address that was
checked, so that a second answer of a name server changes nothing.

Invariants: one image takes no more bytes, seconds and redirects than allowed; no proxy is asked.

Does not know: what an image is.
"""

import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urljoin, urlsplit

from model.errors import InvalidArgumentError, shown

_MOST_REDIRECTS = 3
_REDIRECTS = {301, 302, 303, 307, 308}
_PIECE = 1 << 16
_PORTS = {"http": 80, "https": 443}


def fetch(url: str, max_bytes: int, timeout_s: float) -> bytes:
    """The bytes behind a URL. At most `timeout_s` after each name is resolved.

    Raises:
        InvalidArgumentError: the URL, an address, an answer or its size is not allowed, or time is
            up.
    """
    deadline = time.monotonic() + timeout_s
    for _ in range(1 + _MOST_REDIRECTS):
        answer = _get(url, max_bytes, deadline)
        if isinstance(answer, bytes):
            return answer
        url = answer
    raise InvalidArgumentError(f"image_url: wanted at most {_MOST_REDIRECTS} redirects, got more")


def _get(url: str, max_bytes: int, deadline: float) -> bytes | str:
    """The bytes of a URL, or where it redirects to."""
    try:
        parts = urlsplit(url)
        port = parts.port or _PORTS.get(parts.scheme, 0)
    except ValueError as error:
        raise InvalidArgumentError(f"image_url: wanted a URL, got {shown(url)}") from error
    host = parts.hostname or ""
    if parts.scheme not in _PORTS or not host or parts.username is not None:
        raise InvalidArgumentError(
            f"image_url: wanted an http or https URL without a user, got {shown(url)}"
        )
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    try:
        with _connected(parts.scheme, host, port, deadline) as connection:
            connection.request("GET", target, headers={"Accept": "image/*"})
            answer = _read(connection.getresponse(), max_bytes)
        return answer if isinstance(answer, bytes) else urljoin(url, answer)
    except (OSError, ValueError, http.client.HTTPException) as error:
        if isinstance(error, InvalidArgumentError):
            raise
        late = time.monotonic() >= deadline
        why = "no time is left (--image-url-timeout-s)" if late else type(error).__name__
        raise InvalidArgumentError(f"image_url: cannot fetch {shown(url)}: {why}") from error


def _read(response: http.client.HTTPResponse, max_bytes: int) -> bytes | str:
    if response.status in _REDIRECTS:
        return response.headers.get("Location", "")
    if response.status != http.client.OK:
        raise InvalidArgumentError(f"image_url: wanted status 200, got {response.status}")
    data = bytearray()
    while piece := response.read(_PIECE):
        data += piece
        if len(data) > max_bytes:
            raise InvalidArgumentError(
                f"image_url: wanted at most {max_bytes:,} bytes (--max-image-bytes), got more"
            )
    return bytes(data)


@contextmanager
def _connected(
    scheme: str, host: str, port: int, deadline: float
) -> Iterator[http.client.HTTPConnection]:
    """A connection to a public address of a host, which ends at the deadline."""
    addresses = [entry[4][0] for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    for address in addresses:
        if not is_public(str(address)):
            raise InvalidArgumentError(f"image_url: wanted a public host, got {shown(host)}")
    left = max(0.001, deadline - time.monotonic())
    connection = http.client.HTTPConnection(host, port)
    connection.sock = socket.create_connection((str(addresses[0]), port), timeout=left)
    timer = threading.Timer(max(0.001, deadline - time.monotonic()), _shut, [connection])
    timer.daemon = True
    timer.start()
    try:
        if scheme == "https":
            context = ssl.create_default_context()
            connection.sock = context.wrap_socket(connection.sock, server_hostname=host)
            if time.monotonic() >= deadline:  # the timer has found no connection to end
                raise TimeoutError
        yield connection
    finally:
        timer.cancel()
        connection.close()


def _shut(connection: http.client.HTTPConnection) -> None:
    """End a connection whose time is up, whatever waits for it."""
    try:
        connection.sock.shutdown(socket.SHUT_RDWR)
    except (AttributeError, OSError):  # it is closed
        return


def is_public(address: str) -> bool:
    """Whether an address is one of the internet: not private, loopback, link-local or reserved.

    An IPv6 address that stands for an IPv4 one counts as that. O(1).
    """
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        inner = found.ipv4_mapped or found.sixtofour or (found.teredo or (None, None))[1]
        if inner is None and found in ipaddress.ip_network("64:ff9b::/96"):
            inner = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
        if found.is_site_local:
            return False
    return found.is_global and not (found.is_multicast or found.is_reserved)
