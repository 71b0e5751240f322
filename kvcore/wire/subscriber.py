"""Follows several publishers over ZeroMQ and keeps an index of what they hold.

One thread reads all of them. For each publisher there is a socket for what it publishes and, while
something is asked for, one for the answer: a new one for each request, so that an answer that comes
too late is dropped. A publisher that says nothing for a while is asked, which finds what was lost
last and whether it still answers. One that does not answer for longer is forgotten; when it speaks
again, it is followed again. A publisher is also asked when its connection was lost and made anew,
before anything that arrives over the new connection is read: an engine that restarted numbers its
batches from 0 again, and a number alone does not tell its first batches from the ones expected.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self

import zmq

from kvcore import DEFAULT_NAMESPACE, InvalidArgumentError, MultimodalItem, Namespace, Tokens
from kvcore.wire.errors import ClosedError, EndpointError, MalformedError
from kvcore.wire.follower import Follower, FollowerStats
from kvcore.wire.index import Index
from kvcore.wire.messages import END, Batch, decode, sequence_bytes, sequence_of

MAX_MESSAGE_BYTES: Final = 1 << 30
"""A publisher that sends more at once is cut off, until it has been silent for long."""

_HIGH_WATER: Final = 100_000
_MAX_ASKED: Final = 3  # so often without an answer, and what is missing is given up
_AT_ONCE: Final = 1000
_JOIN_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Source:
    """Where a publisher is.

    Attributes:
        endpoint: where it publishes, such as "tcp://10.0.0.7:5557".
        replay: where it answers requests for what was missed; None: nowhere.
        topic: what its topics begin with.
    """

    endpoint: str
    replay: str | None = None
    topic: str = ""


@dataclass(frozen=True, slots=True)
class SourceStatus:
    """How it stands with a publisher.

    Attributes:
        silent_s: seconds since it said anything; since it was added, if it never did.
        was_heard: whether it has ever said anything.
        is_known: whether anything is known of what it holds.
        met: what its follower has met.
    """

    silent_s: float
    was_heard: bool
    is_known: bool
    met: FollowerStats


class Subscriber:
    """An index of several publishers, kept up to date.

    Args:
        sources: where they are, by name. More come by `add`.
        ask_after_s: a request without an answer for so long is made again, and a publisher that is
            silent for so long is asked.
        forget_after_s: a publisher that does not answer for so long is forgotten, and one that
            publishes nothing for so long is connected to anew.
        max_message_bytes: the largest message that is read.

    Attributes:
        index: what they hold; it may be read from any thread.

    Raises:
        EndpointError: an address that is none. Nothing is left open.
    """

    def __init__(
        self,
        sources: Mapping[str, Source],
        *,
        ask_after_s: float = 2.0,
        forget_after_s: float = 30.0,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        if not 0 < ask_after_s <= forget_after_s:
            raise InvalidArgumentError(
                "ask_after_s: wanted more than 0 and at most forget_after_s, "
                f"got {ask_after_s} and {forget_after_s}"
            )
        self.index = Index()
        self._ask_after_s = ask_after_s
        self._forget_after_s = forget_after_s
        self._max_message_bytes = max_message_bytes
        self._context = zmq.Context()
        self._links: dict[str, _Link] = {}
        self._inbox: list[tuple[str, Source | None]] = []
        self._lock = threading.Lock()
        self._closing = False
        for name, source in sources.items():
            try:
                self._links[name] = self._open(name, source)
            except EndpointError:
                self._context.destroy(linger=0)
                raise
        self._bell, self._ear = socket.socketpair()
        self._ear.settimeout(0)
        self._thread = threading.Thread(target=self._run, name="kvcore-subscriber", daemon=True)
        self._thread.start()

    def match(
        self,
        tokens: Tokens,
        *,
        namespace: Namespace = DEFAULT_NAMESPACE,
        items: Sequence[MultimodalItem] = (),
    ) -> dict[str, int]:
        """Return how many of these tokens each publisher holds as a prefix (`Index.match`)."""
        return self.index.match(tokens, namespace=namespace, items=items)

    def add(self, name: str, source: Source) -> None:
        """Follow one more publisher, or one that has moved.

        Raises:
            EndpointError: an address that is none.
            ClosedError: the subscriber is closed.
        """
        self._check_open()
        self._open(name, source).close()  # an address that is none is the caller's mistake
        self._tell(name, source)

    def remove(self, name: str) -> None:
        """Follow a publisher no more, and forget it.

        Raises:
            ClosedError: the subscriber is closed.
        """
        self._check_open()
        self._tell(name, None)

    def status(self) -> dict[str, SourceStatus]:
        """Return how it stands with each publisher. O(publishers)."""
        now = time.monotonic()
        with self._lock:
            return {
                name: SourceStatus(
                    silent_s=now - link.heard_at,
                    was_heard=link.was_heard,
                    is_known=link.follower.next is not None,
                    met=link.follower.stats,
                )
                for name, link in self._links.items()
            }

    def close(self) -> None:
        """Close the sockets and end the thread; the index stays. A second call does nothing."""
        if self._closing:
            return
        self._closing = True
        self._bell.send(b"!")
        self._thread.join(_JOIN_S)
        self._bell.close()
        self._ear.close()

    def __enter__(self) -> Self:
        """Return the subscriber; leaving the block closes it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def _check_open(self) -> None:
        if self._closing or not self._thread.is_alive():
            raise ClosedError("subscriber: wanted an open one, got one that is closed")

    def _tell(self, name: str, source: Source | None) -> None:
        with self._lock:
            self._inbox.append((name, source))
        self._bell.send(b"!")

    def _open(self, name: str, source: Source) -> _Link:
        return _Link(name, source, self._context, self.index, self._max_message_bytes)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._ear, zmq.POLLIN)
        try:
            for link in self._links.values():
                link.join(poller)
            while not self._closing:
                ready = dict(poller.poll(int(self._ask_after_s * 250)))
                if self._ear.fileno() in ready:
                    self._ear.recv(4096)
                    self._move(poller)
                for link in self._links.values():
                    try:
                        link.read(ready)
                        link.tend(self._ask_after_s, self._forget_after_s)
                    except Exception:  # noqa: BLE001  # what one sends does not end the others
                        link.follower.fail()
        finally:
            self._context.destroy(linger=0)

    def _move(self, poller: zmq.Poller) -> None:
        """Do what `add` and `remove` have asked for."""
        with self._lock:
            wanted, self._inbox = self._inbox, []
        for name, source in wanted:
            with self._lock:
                gone = self._links.pop(name, None)
            if gone is not None:
                gone.leave()
                with contextlib.suppress(Exception):  # as in `Follower.fail`
                    self.index.forget(name)
            if source is not None:
                link = self._open(name, source)
                link.join(poller)
                with self._lock:
                    self._links[name] = link


class _Link:
    """The sockets of one publisher, and its follower."""

    def __init__(
        self,
        name: str,
        source: Source,
        context: zmq.Context[zmq.Socket[bytes]],
        index: Index,
        max_message_bytes: int,
    ) -> None:
        self._source = source
        self._context = context
        self._index = index
        self._max_message_bytes = max_message_bytes
        self._poller: zmq.Poller | None = None
        self.follower = Follower(name, index, can_ask=source.replay is not None)
        self.heard_at = self._asked_at = self._live_at = time.monotonic()
        self.was_heard = False
        self._num_connected = 0
        self._asked: zmq.Socket[bytes] | None = None
        self._num_asked = 0
        if source.replay is not None:  # first: nothing else is open yet where that raises
            with self._socket(zmq.DEALER) as asking:
                _connect(asking, "replay", source.replay)
        self._listen()

    def join(self, poller: zmq.Poller) -> None:
        """Begin to listen, and ask what there is."""
        self._poller = poller
        poller.register(self._live, zmq.POLLIN)
        self._ask()

    def leave(self) -> None:
        """Listen no more."""
        if self._poller is not None:
            self._poller.unregister(self._live)
        self._hang_up()
        self.close()

    def close(self) -> None:
        """Close the sockets that listen."""
        self._live.disable_monitor()  # first: ZeroMQ waits for a monitor that is not read
        self._connected.close(linger=0)
        self._live.close(linger=0)

    def read(self, ready: Mapping[object, int]) -> None:
        """Take what has come."""
        if self._asked is not None and self._asked in ready:
            self._read_answer(self._asked)
        if self._live in ready:
            for _ in range(_AT_ONCE):  # then it is the others' turn
                if not self._live.poll(0):
                    break
                frames = self._live.recv_multipart()
                self._note_connections()
                self._take(frames)

    def tend(self, ask_after_s: float, forget_after_s: float) -> None:
        """Ask, or ask again, or forget, if it is time to."""
        now = time.monotonic()
        self._note_connections()
        if now - self._live_at >= forget_after_s:
            self._listen_again()
        if self._source.replay is None:
            return
        if now - self.heard_at >= forget_after_s and self.follower.next is not None:
            self.follower.forget()
        if self._asked is None:
            if now - self.heard_at >= ask_after_s:
                self._ask()
        elif now - self._asked_at >= ask_after_s:
            self._num_asked += 1
            if self._num_asked < _MAX_ASKED:
                self._ask()
            else:
                self._end(answered=False)

    def _end(self, *, answered: bool) -> None:
        """Take it that nothing more is answered."""
        self._hang_up()
        self._num_asked = 0
        if self.follower.replay_ended(answered=answered):
            self._ask()

    def _take(self, frames: list[bytes]) -> None:
        """Take a message as it was published."""
        self.heard_at = self._live_at = time.monotonic()
        self.was_heard = True
        try:
            asked = self.follower.live(*_read(frames))
        except MalformedError:
            self.follower.stats.num_malformed += 1
            return
        if asked:
            self._ask()

    def _listen(self) -> None:
        """Open the socket that listens, and the one that tells when it is connected."""
        self._live = self._socket(zmq.SUB)
        self._live.subscribe(self._source.topic.encode())
        self._connected = self._live.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        try:
            _connect(self._live, "endpoint", self._source.endpoint)
        except EndpointError:
            self.close()
            raise

    def _note_connections(self) -> None:
        """Ask what there is if a connection was made anew since the last look."""
        before = self._num_connected
        while self._connected.poll(0):
            self._connected.recv_multipart()
            self._num_connected += 1
        if self._num_connected > max(before, 1):  # the first is no news: `join` has asked
            self._ask()

    def _listen_again(self) -> None:
        """Connect anew: ZeroMQ cuts off who sends too much at once, and for good."""
        self._live_at = time.monotonic()
        if self._poller is not None:
            self._poller.unregister(self._live)
        self.close()
        self._listen()
        if self._poller is not None:
            self._poller.register(self._live, zmq.POLLIN)

    def _ask(self) -> None:
        """Ask for what comes after what is known."""
        self._hang_up()
        if self._source.replay is None:
            return
        self._asked = self._socket(zmq.DEALER)
        _connect(self._asked, "replay", self._source.replay)
        self._asked_at = time.monotonic()
        self._asked.send_multipart((b"", sequence_bytes(self.follower.ask())))
        if self._poller is not None:
            self._poller.register(self._asked, zmq.POLLIN)

    def _hang_up(self) -> None:
        if self._asked is not None:
            if self._poller is not None:
                self._poller.unregister(self._asked)
            self._asked.close(linger=0)
            self._asked = None

    def _read_answer(self, asked: zmq.Socket[bytes]) -> None:
        while asked.poll(0):
            frames = asked.recv_multipart()
            self.heard_at = self._asked_at = time.monotonic()
            self.was_heard = True
            if len(frames) == 4:  # newer engines repeat the topic; at the end it may be empty
                topic = frames.pop(1)
                if frames[1] != END and not topic.startswith(self._source.topic.encode()):
                    continue
            try:
                if frames[1:2] == [END]:
                    self._end(answered=True)
                    return
                again = self.follower.replayed(*_read(frames))
            except MalformedError:
                self.follower.stats.num_malformed += 1
                continue
            if again:
                self._ask()
                return

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        opened: zmq.Socket[bytes] = self._context.socket(kind)
        opened.linger = 0
        opened.rcvhwm = _HIGH_WATER
        opened.maxmsgsize = self._max_message_bytes
        return opened


def _connect(opened: zmq.Socket[bytes], argument: str, endpoint: str) -> None:
    """Connect a socket.

    Raises:
        EndpointError: an address that is none.
    """
    try:
        opened.connect(endpoint)
    except (zmq.ZMQError, TypeError, UnicodeError) as error:
        raise EndpointError(argument, str(endpoint), str(error)) from None


def _read(frames: list[bytes]) -> tuple[int, Batch]:
    """Return the number and the batch of a message.

    Raises:
        MalformedError: it is not one.
    """
    if len(frames) != 3:
        raise MalformedError(f"message: wanted 3 frames, got {len(frames)}")
    return sequence_of(frames[1]), decode(frames[2])
