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
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self

from kvcore import DEFAULT_NAMESPACE, InvalidArgumentError, MultimodalItem, Namespace, Tokens
from kvcore.wire.errors import ClosedError, EndpointError, MalformedError
from kvcore.wire.follower import Follower, FollowerStats
from kvcore.wire.index import Index
from kvcore.wire.messages import END, Batch, decode, sequence_bytes, sequence_of
from kvcore.wire.transport import Socket, Transport, ZmqTransport

MAX_MESSAGE_BYTES: Final = 1 << 30
"""A publisher that sends more at once is cut off, until it has been silent for long."""

_MAX_ASKED: Final = 3  # so often without an answer, and what is missing is given up
_AT_ONCE: Final = 1000
_JOIN_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Source:
    """The addresses of a publisher.

    Attributes:
        endpoint: the address at which it publishes, such as "tcp://10.0.0.7:5557".
        replay: the address that answers requests for missed batches; None: there is none.
        topic: the beginning of its topics.
    """

    endpoint: str
    replay: str | None = None
    topic: str = ""


@dataclass(frozen=True, slots=True)
class SourceStatus:
    """The state of the connection to a publisher.

    Attributes:
        silent_s: seconds since its last message, or since it was added if none has come.
        was_heard: True if a message has ever come.
        is_known: True if any of its contents are known.
        met: the counters of its follower.
    """

    silent_s: float
    was_heard: bool
    is_known: bool
    met: FollowerStats


class Subscriber:
    """An index of several publishers, kept up to date.

    Args:
        sources: the addresses of publishers, by name. `add` adds more.
        ask_after_s: a request without an answer for so long is made again, and a publisher that is
            silent for so long is asked.
        forget_after_s: a publisher that does not answer for so long is forgotten, and one that
            publishes nothing for so long is connected to anew. After lost batches that could not be
            had, everything is asked for after so long.
        max_message_bytes: the largest message that is read.
        transport: gives the sockets, the thread and the clock; None: those of ZeroMQ and of this
            process.

    Attributes:
        index: the contents that they hold; any thread may read it.

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
        transport: Transport | None = None,
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
        self._transport = ZmqTransport() if transport is None else transport
        self._links: dict[str, _Link] = {}
        self._inbox: list[tuple[str, Source | None]] = []
        self._lock = threading.Lock()
        self._closing = False
        for name, source in sources.items():
            try:
                self._links[name] = self._open(name, source)
            except EndpointError:
                self._transport.close()
                raise
        self._transport.start("kvcore-subscriber", self._run)

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
        now = self._transport.now_s()
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
        self._transport.wake()
        self._transport.join(_JOIN_S)

    def __enter__(self) -> Self:
        """Return the subscriber; leaving the block closes it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def _check_open(self) -> None:
        if self._closing or not self._transport.is_running:
            raise ClosedError("subscriber: wanted an open one, got one that is closed")

    def _tell(self, name: str, source: Source | None) -> None:
        with self._lock:
            self._inbox.append((name, source))
        self._transport.wake()

    def _open(self, name: str, source: Source) -> _Link:
        return _Link(name, source, self._transport, self.index, self._max_message_bytes)

    def _run(self) -> None:
        for link in self._links.values():
            link.join()
        while not self._closing:
            sockets = [each for link in self._links.values() for each in link.sockets]
            ready = self._transport.wait(sockets, self._ask_after_s / 4)
            self._move()
            for link in self._links.values():
                try:
                    link.read(ready)
                    link.tend(self._ask_after_s, self._forget_after_s)
                except Exception:  # noqa: BLE001  # what one sends does not end the others
                    link.follower.fail()

    def _move(self) -> None:
        """Apply the calls of `add` and `remove`."""
        with self._lock:
            wanted, self._inbox = self._inbox, []
        for name, source in wanted:
            with self._lock:
                gone = self._links.pop(name, None)
            if gone is not None:
                gone.close()
                with contextlib.suppress(Exception):  # as in `Follower.fail`
                    self.index.forget(name)
            if source is not None:
                link = self._open(name, source)
                link.join()
                with self._lock:
                    self._links[name] = link


class _Link:
    """The sockets of one publisher, and its follower."""

    def __init__(
        self,
        name: str,
        source: Source,
        transport: Transport,
        index: Index,
        max_message_bytes: int,
    ) -> None:
        self._source = source
        self._transport = transport
        self._index = index
        self._max_message_bytes = max_message_bytes
        self.follower = Follower(name, index, can_ask=source.replay is not None)
        self.heard_at = self._asked_at = self._live_at = transport.now_s()
        self.was_heard = False
        self._num_connected = self._num_closed = 0
        self._asked: Socket | None = None
        self._num_asked = 0
        if source.replay is not None:  # first: nothing else is open yet where that raises
            transport.ask(source.replay, max_message_bytes).close()
        self._listen()

    @property
    def sockets(self) -> list[Socket]:
        """The sockets to poll: the live one, and that of a replay while it is expected. O(1)."""
        return [self._live] if self._asked is None else [self._live, self._asked]

    def join(self) -> None:
        """Ask what there is."""
        self._ask()

    def close(self) -> None:
        """Listen no more."""
        self._hang_up()
        self._live.close()

    def read(self, ready: Collection[Socket]) -> None:
        """Take what has come."""
        if self._asked is not None and self._asked in ready:
            self._read_answer(self._asked)
        if self._live in ready:
            for _ in range(_AT_ONCE):  # then it is the others' turn
                frames = self._live.receive()
                if frames is None:
                    break
                self._note_connections()
                self._take(frames)

    def tend(self, ask_after_s: float, forget_after_s: float) -> None:
        """Ask, or ask again, or forget, if it is time to."""
        now = self._transport.now_s()
        self._note_connections()
        if now - self._live_at >= forget_after_s:
            self._listen_again()
        if self._source.replay is None:
            return
        if now - self.heard_at >= forget_after_s and self.follower.next is not None:
            self.follower.forget()
        if self._asked is None:
            lacks_s = now - self._asked_at if self.follower.lacks else 0.0
            if now - self.heard_at >= ask_after_s or lacks_s >= forget_after_s:
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
        self.heard_at = self._live_at = self._transport.now_s()
        self.was_heard = True
        try:
            asked = self.follower.live(*_read(frames))
        except MalformedError:
            self.follower.stats.num_malformed += 1
            return
        if asked:
            self._ask()

    def _listen(self) -> None:
        """Open the socket that listens."""
        topic = self._source.topic.encode()
        self._live = self._transport.listen(self._source.endpoint, topic, self._max_message_bytes)

    def _note_connections(self) -> None:
        """Ask what there is if a connection was made anew since the last look."""
        before = self._num_connected
        self._num_connected = self._num_closed + self._live.num_connections()
        if self._num_connected > max(before, 1):  # the first is no news: `join` has asked
            self._ask(is_reconnected=True)

    def _listen_again(self) -> None:
        """Connect anew: ZeroMQ cuts off a sender of too much at once, and for good."""
        self._live_at = self._transport.now_s()
        self._num_closed = self._num_connected
        self._live.close()
        self._listen()

    def _ask(self, *, is_reconnected: bool = False) -> None:
        """Ask for what comes after what is known."""
        self._hang_up()
        if self._source.replay is None:
            return
        self._asked = self._transport.ask(self._source.replay, self._max_message_bytes)
        self._asked_at = self._transport.now_s()
        self._asked.send((b"", sequence_bytes(self.follower.ask(is_reconnected=is_reconnected))))

    def _hang_up(self) -> None:
        if self._asked is not None:
            self._asked.close()
            self._asked = None

    def _read_answer(self, asked: Socket) -> None:
        while (frames := asked.receive()) is not None:
            self.heard_at = self._asked_at = self._transport.now_s()
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


def _read(frames: list[bytes]) -> tuple[int, Batch]:
    """Return the number and the batch of a message.

    Raises:
        MalformedError: it is not one.
    """
    if len(frames) != 3:
        raise MalformedError(f"message: wanted 3 frames, got {len(frames)}")
    return sequence_of(frames[1]), decode(frames[2])
