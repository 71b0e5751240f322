"""The sockets, the thread and the clocks of a publisher or subscriber.

`ZmqTransport` is the real one. A test passes another one, in which messages are lost, late and
repeated and time is simulated. Publishers and subscribers share no transport.

Sockets are opened before the thread starts, or by it; from then on only the thread uses them.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from typing import Final, Protocol

import zmq

from kvcore.wire.errors import EndpointError

_PUBLISH_HIGH_WATER: Final = 10_000  # batches that wait for one reader before it loses them
_LISTEN_HIGH_WATER: Final = 100_000
_PUBLISH_LINGER_MS: Final = 500
_REQUEST_BYTES: Final = 1024  # a request is 8 bytes


class Socket(Protocol):
    """One end of connections."""

    @property
    def address(self) -> str:
        """The address that it is bound to, with the port that was picked. O(1)."""
        ...

    def send(self, frames: Sequence[bytes]) -> None:
        """Send a message; does not wait. O(bytes)."""
        ...

    def receive(self) -> list[bytes] | None:
        """Return the next message that is there; None: there is none. O(bytes)."""
        ...

    def num_connections(self) -> int:
        """Return how often a listening socket has been connected so far. O(new ones)."""
        ...

    def close(self) -> None:
        """Close it. O(1)."""
        ...


class Transport(Protocol):
    """The sockets, threads and clocks that a publisher or a subscriber uses."""

    def now_s(self) -> float:
        """Return the reading of a clock, in seconds; only differences mean anything. O(1)."""
        ...

    def time_s(self) -> float:
        """Return the time, in seconds since 1970. O(1)."""
        ...

    def publish(self, endpoint: str) -> Socket:
        """Open a socket that sends to all that listen. Raises: EndpointError."""
        ...

    def answer(self, endpoint: str) -> Socket:
        """Open a socket that receives requests and sends answers. Raises: EndpointError.

        The first frame of a request is the address of its sender; that of an answer, of its reader.
        """
        ...

    def listen(self, endpoint: str, topic: bytes, max_bytes: int) -> Socket:
        """Open a socket that receives what is published. Raises: EndpointError.

        Args:
            endpoint: the address at which it is published.
            topic: the bytes that the first frame begins with.
            max_bytes: the largest message; a sender of a larger one is disconnected.
        """
        ...

    def ask(self, endpoint: str, max_bytes: int) -> Socket:
        """Open a socket that sends requests and receives answers. Raises: EndpointError."""
        ...

    def wait(self, sockets: Collection[Socket], timeout_s: float | None) -> Collection[Socket]:
        """Wait for a message, for `wake`, or for `timeout_s`; return the sockets with messages."""
        ...

    def wake(self) -> None:
        """Let the thread return from `wait`; from any thread. O(1)."""
        ...

    def start(self, name: str, run: Callable[[], None]) -> None:
        """Run a function on a thread; all sockets are closed at its end. O(1)."""
        ...

    @property
    def is_running(self) -> bool:
        """True if the thread has been started and has not ended. O(1)."""
        ...

    def join(self, timeout_s: float) -> None:
        """Wait for the thread to end, at most for `timeout_s`."""
        ...

    def close(self) -> None:
        """Close all sockets, where no thread was started. O(sockets)."""
        ...


class ZmqSocket:
    """A socket of ZeroMQ.

    Args:
        opened: the socket.
        counts: True if it counts its connections.
    """

    def __init__(self, opened: zmq.Socket[bytes], *, counts: bool = False) -> None:
        self.opened = opened
        self._num_connected = 0
        self._connected = (
            opened.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED) if counts else None
        )

    @property
    def address(self) -> str:
        """The address that it is bound to. O(1)."""
        return self.opened.getsockopt_string(zmq.LAST_ENDPOINT)

    def send(self, frames: Sequence[bytes]) -> None:
        """Send a message. O(bytes)."""
        self.opened.send_multipart(frames)

    def receive(self) -> list[bytes] | None:
        """Return the next message, if there is one. O(bytes)."""
        return self.opened.recv_multipart() if self.opened.poll(0) else None

    def num_connections(self) -> int:
        """Return how often it has been connected. O(new ones)."""
        while self._connected is not None and self._connected.poll(0):
            self._connected.recv_multipart()
            self._num_connected += 1
        return self._num_connected

    def close(self) -> None:
        """Close it; what has not been sent is dropped. O(1)."""
        if self._connected is not None:
            self.opened.disable_monitor()  # first: ZeroMQ waits for a monitor that is not read
            self._connected.close(linger=0)
        self.opened.close(linger=0)


class ZmqTransport:
    """Sockets of ZeroMQ, a thread of this process, its clocks."""

    now_s = staticmethod(time.monotonic)
    time_s = staticmethod(time.time)

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._bell: socket.socket | None = None
        self._ear: socket.socket | None = None

    @cached_property
    def _context(self) -> zmq.Context[zmq.Socket[bytes]]:
        return zmq.Context()

    def publish(self, endpoint: str) -> ZmqSocket:
        """Open a socket that sends to all that listen. Raises: EndpointError."""
        opened = self._open(zmq.PUB, _PUBLISH_LINGER_MS)
        opened.sndhwm = _PUBLISH_HIGH_WATER
        _attach(opened.bind, "endpoint", endpoint)
        return ZmqSocket(opened)

    def answer(self, endpoint: str) -> ZmqSocket:
        """Open a socket that receives requests and sends answers. Raises: EndpointError."""
        opened = self._open(zmq.ROUTER, _PUBLISH_LINGER_MS)
        opened.sndhwm = 0  # a replay is as long as the buffer, and must not lose its end
        opened.maxmsgsize = _REQUEST_BYTES
        _attach(opened.bind, "replay", endpoint)
        return ZmqSocket(opened)

    def listen(self, endpoint: str, topic: bytes, max_bytes: int) -> ZmqSocket:
        """Open a socket that receives what is published. Raises: EndpointError."""
        opened = self._open(zmq.SUB, 0, max_bytes)
        opened.subscribe(topic)
        made = ZmqSocket(opened, counts=True)
        try:
            _attach(opened.connect, "endpoint", endpoint)
        except EndpointError:
            made.close()
            raise
        return made

    def ask(self, endpoint: str, max_bytes: int) -> ZmqSocket:
        """Open a socket that sends requests and receives answers. Raises: EndpointError."""
        opened = self._open(zmq.DEALER, 0, max_bytes)
        try:
            _attach(opened.connect, "replay", endpoint)
        except EndpointError:
            opened.close()
            raise
        return ZmqSocket(opened)

    def wait(self, sockets: Collection[Socket], timeout_s: float | None) -> Collection[Socket]:
        """Wait for a message, for `wake`, or for `timeout_s`; return the sockets with messages."""
        poller = zmq.Poller()
        made = {each.opened: each for each in sockets if isinstance(each, ZmqSocket)}
        for each in (*made, self._ear):
            poller.register(each, zmq.POLLIN)
        ready = dict(poller.poll(None if timeout_s is None else int(timeout_s * 1000)))
        if self._ear is not None and self._ear.fileno() in ready:
            self._ear.recv(4096)
        return {each for opened, each in made.items() if opened in ready}

    def wake(self) -> None:
        """Let the thread return from `wait`. O(1)."""
        if self._bell is not None:
            with contextlib.suppress(BlockingIOError):  # then it has been woken often enough
                self._bell.send(b"!")

    def start(self, name: str, run: Callable[[], None]) -> None:
        """Run a function on a thread. O(1)."""
        self._bell, self._ear = socket.socketpair()
        self._bell.settimeout(0)
        self._ear.settimeout(0)

        def run_and_close() -> None:
            try:
                run()
            finally:
                self._context.destroy()

        self._thread = threading.Thread(target=run_and_close, name=name, daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """True if the thread has been started and has not ended. O(1)."""
        return self._thread is not None and self._thread.is_alive()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread to end."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        for each in (self._bell, self._ear):
            if each is not None:
                each.close()

    def close(self) -> None:
        """Close all sockets. O(sockets)."""
        self._context.destroy(linger=0)

    def _open(self, kind: int, linger_ms: int, max_bytes: int = -1) -> zmq.Socket[bytes]:
        opened: zmq.Socket[bytes] = self._context.socket(kind)
        opened.linger = linger_ms
        opened.rcvhwm = _LISTEN_HIGH_WATER
        opened.maxmsgsize = max_bytes
        return opened


def check_endpoint(argument: str, endpoint: str) -> None:
    """Find out whether a publisher could be bound to an address, long before there is one.

    Args:
        argument: the name of the address, for the error.
        endpoint: the address.

    Raises:
        EndpointError: it is in use, or is none.
    """
    with zmq.Context() as context, context.socket(zmq.PUB) as opened:
        opened.linger = 0
        _attach(opened.bind, argument, endpoint)


def _attach(attach: Callable[[str], object], argument: str, endpoint: str) -> None:
    """Bind or connect a socket.

    Raises:
        EndpointError: the address is in use, or is none.
    """
    try:
        attach(endpoint)
    except (zmq.ZMQError, TypeError, UnicodeError) as error:
        raise EndpointError(argument, str(endpoint), str(error)) from None
