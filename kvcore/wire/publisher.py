"""Publishes KV events over ZeroMQ without delaying a step.

`publish` is called by the thread that owns the manager, once a step: it takes the events and hands
them to a thread of the publisher's own, which encodes, numbers and sends them and answers requests
for missed batches. A reader that is too slow loses batches; it asks for them on the replay socket.
Published blocks are not remembered: a reader that the buffer cannot serve needs a snapshot of the
cache, and only the owner's thread can take one, in `publish`.

An idle engine calls no `publish`. So by default a snapshot is taken ahead: when half of the buffer
has been filled since the last one, the next `publish` takes another, and the buffer keeps the last
one and every batch after it. Then every request is answered at once by the publisher's thread. With
`wake`, a snapshot is taken only when a reader asks for one, and `wake` makes the owner's thread
call `publish`.

If the publisher's thread falls behind by too many batches, the waiting ones are given up and a
snapshot takes their place, as the next batch.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self, SupportsIndex

from kvcore import (
    AllCleared,
    BlockHash,
    Event,
    EventsLost,
    InvalidArgumentError,
    KVCacheManager,
    Snapshot,
)
from kvcore.arguments import as_int
from kvcore.tiers import Changes, KeepingTier, group_of, is_private
from kvcore.wire.encoder import CopiesChanged, Encoder, HashForm
from kvcore.wire.errors import ClosedError, EndpointError
from kvcore.wire.history import History, Sent
from kvcore.wire.messages import END, Form, sequence_bytes
from kvcore.wire.transport import Socket, Transport, ZmqTransport

REPLAY_BYTES: Final = 64 << 20
"""The bytes of sent batches that are kept for replays."""

MAX_WAITING: Final = 1024
"""The most batches that wait for the publisher's thread."""

_JOIN_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class PublisherStats:
    """Counters of a publisher.

    Attributes:
        last_sequence: the number of the newest batch.
        num_batches: batches sent.
        num_bytes: their size.
        num_replays: requests answered.
        num_snapshots: snapshots taken of the cache.
        num_overflows: the number of times that too many batches were waiting.
        num_refused: malformed requests.
    """

    last_sequence: int
    num_batches: int
    num_bytes: int
    num_replays: int
    num_snapshots: int
    num_overflows: int
    num_refused: int


class Publisher:
    """Publishes the KV events of a manager.

    Args:
        manager: created with `record_events`; only the publisher takes events.
        endpoint: the address to publish at, such as "tcp://*:5557"; ":*" picks a free port.
        replay: the address for requests of missed batches; None: none.
        topic: the first frame of every message, and in form "map" of every answer.
        rank: the data-parallel rank.
        form: how events are spelled: "map", as engines do now, or "array", as they did before.
        hash_form: "u64": the low 64 bits of a block hash; "bytes": the whole hash.
        lora_ids: numbers of adapters, for readers that want them.
        publish_salted: publish content with a salt too, and the salt.
        first_sequence: the number of the first batch, at least 1, for what was there before it is
            numbered too; None: the time in microseconds.
        replay_bytes: how many bytes of batches are kept for replays. Without `wake` also the last
            snapshot and all batches after it are kept, about twice a snapshot where that is more.
        wake: called, by the publisher's thread, when a reader needs a snapshot and `publish` should
            be called soon, though no step may be due. None: `publish` takes a snapshot whenever
            the batches since the last one exceed half of `replay_bytes` (and the size of that
            snapshot), so that a late reader is answered while the engine is idle.
        transport: gives the sockets, the thread and the clocks; None: those of ZeroMQ and of this
            process.
        tiers: those behind the manager whose copies are published too; the events of the manager
            are sha256 then.

    Attributes:
        endpoint: the address at which it publishes, with the port that was picked.
        replay: the address at which it answers, likewise.

    Raises:
        InvalidArgumentError: an invalid argument, or a manager that records no events.
        EndpointError: an address is in use or invalid. Nothing is left open.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        endpoint: str,
        replay: str | None = None,
        *,
        topic: str = "",
        rank: SupportsIndex = 0,
        form: Form = "map",
        hash_form: HashForm = "u64",
        lora_ids: Mapping[str, int] | None = None,
        publish_salted: bool = False,
        first_sequence: SupportsIndex | None = None,
        replay_bytes: SupportsIndex = REPLAY_BYTES,
        wake: Callable[[], None] | None = None,
        transport: Transport | None = None,
        tiers: Sequence[KeepingTier] = (),
    ) -> None:
        if manager.events is None:
            raise InvalidArgumentError(
                "manager: wanted one with record_events='xxh3-128' or 'sha256', got none"
            )
        dp_rank = as_int("rank", rank, 0, 2**31 - 1)
        self._transport = ZmqTransport() if transport is None else transport
        if first_sequence is None:
            first_sequence = int(self._transport.time_s() * 1_000_000)
        first = as_int("first_sequence", first_sequence, 1, 2**62)
        kept = as_int("replay_bytes", replay_bytes, 0)
        self._manager = manager
        self._log = manager.events
        self._topic = topic.encode()
        self._tells_topic = form == "map"
        self._encoder = Encoder(
            manager.groups, form=form, hash_form=hash_form, rank=dp_rank, lora_ids=lora_ids,
            publish_salted=publish_salted, clock=self._transport.time_s,
        )  # fmt: skip
        self._log.take()
        self._tiers = tuple(tiers)
        self._copies: list[Changes] = []
        base = self._encoder.snapshot(*self._snapshot())
        self._history = History(first, kept, base, keep_base=replay is not None and wake is None)
        self._first = first
        self._queue: deque[tuple[Event | CopiesChanged, ...] | _Snapshot] = deque()
        self._wake_owner = wake
        self._asking: list[bytes] = []
        self._snapshot_wanted = self._closing = False
        self._num_bytes = self._num_replays = self._num_snapshots = 0
        self._num_overflows = self._num_refused = 0
        try:
            self._pub = self._transport.publish(endpoint)
            self._router = None if replay is None else self._transport.answer(replay)
        except EndpointError:
            self._transport.close()
            raise
        self.endpoint = self._pub.address
        self.replay = None if self._router is None else self._router.address
        self._transport.start("kvcore-publisher", self._run)

    def publish(self) -> None:
        """Send what has changed since the last call. Call it after each step, from its thread.

        Waits for nothing. O(1), and O(contents) where a snapshot is due.

        Raises:
            ClosedError: the publisher is closed.
        """
        if self._closing or not self._transport.is_running:
            raise ClosedError("publish: wanted an open publisher, got one that is closed")
        taken = self._log.take()
        events: tuple[Event | CopiesChanged, ...] = taken
        if self._tiers:
            events += self._copies_after(taken)
        if not events and not self._snapshot_wanted:
            return
        is_full = len(self._queue) >= MAX_WAITING
        if is_full:
            self._num_overflows += 1
            self._queue = deque()  # the publisher's thread ends the batch that it is at
        if is_full or (events and isinstance(events[0], EventsLost)):
            self._snapshot_wanted = False
            self._queue.append(_Snapshot(*self._snapshot(), is_batch=True))
        else:
            if events:
                self._queue.append(events)
            if self._snapshot_wanted:
                self._snapshot_wanted = False
                self._queue.append(_Snapshot(*self._snapshot(), is_batch=False))
        self._transport.wake()

    def _snapshot(self) -> tuple[Snapshot, list[CopiesChanged]]:
        """Return all that the cache and the tiers have; later changes are published after it."""
        for tier, changes in zip(self._tiers, self._copies, strict=False):
            tier.unwatch(changes)
        self._copies = [tier.watch(threading.Event()) for tier in self._tiers]
        return self._manager.snapshot(), [*self._take_copies()]

    def _copies_after(self, events: tuple[Event, ...]) -> tuple[CopiesChanged, ...]:
        """Return what has changed in the tiers; all of it where readers have forgotten all."""
        if any(isinstance(event, AllCleared) for event in events):
            _, copies = self._snapshot()
            return tuple(copies)
        return tuple(self._take_copies())

    def _take_copies(self) -> Iterator[CopiesChanged]:
        for tier, changes in zip(self._tiers, self._copies, strict=True):
            changed = changes.take()
            named = {key: (group_of(key), BlockHash(key[4:])) for key in changed}
            salted = frozenset([name for key, name in named.items() if is_private(key)])
            if changed:
                copies = {name: changed[key] for key, name in named.items()}
                yield CopiesChanged(tier.medium, copies, salted)

    def stats(self) -> PublisherStats:
        """Return what was done so far. O(1)."""
        last = self._history.last
        return PublisherStats(
            last_sequence=last,
            num_batches=last - self._first + 1,
            num_bytes=self._num_bytes,
            num_replays=self._num_replays,
            num_snapshots=self._num_snapshots,
            num_overflows=self._num_overflows,
            num_refused=self._num_refused,
        )

    def close(self) -> None:
        """Send what waits, then close the sockets and end the thread. A second call does nothing.

        Readers keep what they know; a publisher that takes this one's place clears it.
        """
        if self._closing:
            return
        self._closing = True
        for tier, changes in zip(self._tiers, self._copies, strict=True):
            tier.unwatch(changes)
        self._transport.wake()
        self._transport.join(_JOIN_S)

    def __enter__(self) -> Self:
        """Return the publisher; leaving the block closes it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def _run(self) -> None:
        sockets = [] if self._router is None else [self._router]
        while True:
            self._transport.wait(sockets, None)
            closing = self._closing
            while queue := self._queue:
                self._send(queue.popleft())
            if self._history.is_base_old:
                self._snapshot_wanted = True  # the next `publish` takes one
            if self._router is not None:
                self._hear(self._router)
            if closing:
                return

    def _send(self, waiting: tuple[Event | CopiesChanged, ...] | _Snapshot) -> None:
        if isinstance(waiting, _Snapshot):
            payload = self._encoder.snapshot(waiting.snapshot, waiting.copies)
            self._num_snapshots += 1
            if waiting.is_batch:
                self._out(self._history.add(payload, anew=True))
            else:
                self._history.rebase(payload)
            self._answer_all()
            return
        batch = self._encoder.batch(waiting)
        if batch is not None:
            self._out(self._history.add(batch))

    def _out(self, sent: Sent) -> None:
        self._num_bytes += len(sent.payload)
        self._pub.send((self._topic, sequence_bytes(sent.sequence), sent.payload))

    def _hear(self, router: Socket) -> None:
        """Read the requests that are there, and answer those that can be."""
        while (received := router.receive()) is not None:
            client, *frames = received
            if len(frames) != 2 or frames[0] or len(frames[1]) != 8:
                self._num_refused += 1
                continue
            # `SNAPSHOT` reads as a number that is far in the future, and gets one.
            found = self._history.since(int.from_bytes(frames[1], "big"))
            if found is not None:
                self._answer(router, client, found)
                continue
            self._asking.append(client)
            self._snapshot_wanted = True
            if self._wake_owner is not None:
                self._wake_owner()

    def _answer_all(self) -> None:
        """Answer the subscribers that wait for a snapshot."""
        found = self._history.anew()
        if self._router is not None and found is not None:
            for client in self._asking:
                self._answer(self._router, client, found)
        self._asking.clear()

    def _answer(self, router: Socket, client: bytes, found: list[Sent]) -> None:
        topic, none = ((self._topic,), (b"",)) if self._tells_topic else ((), ())
        for sequence, payload in found:
            router.send((client, b"", *topic, sequence_bytes(sequence), payload))
        router.send((client, b"", *none, END, b""))
        self._num_replays += 1


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """A snapshot, which is sent as a batch if events were lost, or kept for requests."""

    snapshot: Snapshot
    copies: list[CopiesChanged]
    is_batch: bool
