"""KV events: the contents that were stored and removed, for an index outside the process.

Events refer to contents by block hash, never by block id: a content is stored with its first copy
and removed with its last. An event covers a *run*: consecutive contents that were stored or removed
together, so one prompt is one event. Sequence numbers of events increase by one, so a reader
detects a gap. At every moment `fold(all events so far)` is exactly the set of contents that can be
hit, and so is `fold(later events, snapshot)`. A parent is stored before its child, and a content is
removed before it is stored again.

An event contains everything that a message to a router needs, so no other state is kept for it. It
refers to the packed tokens and unpacks them when they are read. When the events that wait hold more
than `max_hashes` block hashes, all of them are dropped: the reader gets an `EventsLost` and starts
again from a snapshot. Events are recorded only if the manager was created with `record_events`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, final

from kvcore.block import Node
from kvcore.errors import InvalidArgumentError
from kvcore.identity.block_hash import BlockHash, HashAlgorithm, digest, hashes_after
from kvcore.identity.tokens import BYTES_PER_TOKEN

MAX_HASHES: Final = 65_536
"""The most block hashes that waiting events may hold; at least the number of blocks."""


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Consecutive contents became available for prefix cache hits.

    Attributes:
        number: its sequence number.
        group: the layer group.
        block_hashes: the block hashes, in the order of the prefix.
        parent: the block hash before the first; None: the run starts its namespace, whose hash is
            the digest of its key.
        namespace_key: the encoded namespace.
        block_size: tokens a block.
        contents: for each its tokens, packed, then its encoded items.
        before: the content of the block before the first; empty where there is none.
    """

    number: int
    group: int
    block_hashes: tuple[BlockHash, ...]
    parent: BlockHash | None
    namespace_key: bytes
    block_size: int
    contents: tuple[bytes, ...]
    before: bytes = b""

    @property
    def packed(self) -> bytes:
        """The tokens of the whole run, 4 bytes each. O(tokens)."""
        size = self.block_size * BYTES_PER_TOKEN
        return b"".join([content[:size] for content in self.contents])

    @property
    def tokens(self) -> tuple[int, ...]:
        """The token ids of the whole run. O(tokens)."""
        return tuple(array("I", self.packed))

    @property
    def items(self) -> tuple[bytes, ...]:
        """The encoded items that overlap each content; empty for text. O(contents)."""
        size = self.block_size * BYTES_PER_TOKEN
        return tuple([content[size:] for content in self.contents])


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Contents cannot be hit any more: their last copies were evicted, in this order."""

    number: int
    group: int
    block_hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class AllCleared:
    """Nothing can be hit any more."""

    number: int


@dataclass(frozen=True, slots=True)
class EventsLost:
    """The events up to this number that were not taken are lost: start again from a snapshot."""

    number: int


Event = BlocksStored | BlocksRemoved | AllCleared | EventsLost


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All contents that can be hit at one moment.

    Attributes:
        number: the sequence number of the last event before it, 0 if there was none.
        stored: the cached contents in runs, a parent before its children.
    """

    number: int
    stored: tuple[BlocksStored, ...]


def fold(
    events: Iterable[Event], start: Snapshot | None = None
) -> frozenset[tuple[int, BlockHash]]:
    """Return the contents that can be hit after these events, as (group, block hash). O(hashes).

    Args:
        events: in order; those that a snapshot already knows are skipped.
        start: the snapshot to start from; None: an empty cache.

    Raises:
        InvalidArgumentError: events after the start were lost.
    """
    known = 0 if start is None else start.number
    found: set[tuple[int, BlockHash]] = set()
    for run in () if start is None else start.stored:
        found.update([(run.group, block_hash) for block_hash in run.block_hashes])
    for event in events:
        if event.number <= known:
            continue
        if isinstance(event, BlocksStored):
            found.update([(event.group, block_hash) for block_hash in event.block_hashes])
        elif isinstance(event, BlocksRemoved):
            found.difference_update(
                [(event.group, block_hash) for block_hash in event.block_hashes]
            )
        elif isinstance(event, EventsLost):
            raise InvalidArgumentError(
                f"start: wanted a snapshot at event {event.number} or later, got one at {known}: "
                "the events between were lost"
            )
        else:
            found.clear()
    return frozenset(found)


@final
class EventLog:
    """The events that were not taken yet.

    Args:
        block_sizes: tokens a block, for each layer group.
        algorithm: the hash function of block hashes.

    Attributes:
        number: the sequence number of the last event, 0 before the first.
        max_hashes: the most block hashes that waiting events may hold; the owner may set it.
        algorithm: the hash function of block hashes.
    """

    __slots__ = ("_block_sizes", "_lost", "_num_hashes", "_pending", "algorithm", "max_hashes",
                 "number")  # fmt: skip

    def __init__(self, block_sizes: Sequence[int], algorithm: HashAlgorithm) -> None:
        digest(b"", algorithm)  # refuses an unknown algorithm now
        self.algorithm: HashAlgorithm = algorithm
        self._block_sizes = tuple(block_sizes)
        self._pending: list[Event] = []
        self._num_hashes = 0
        self._lost = 0
        self.number = 0
        self.max_hashes = MAX_HASHES

    def take(self) -> tuple[Event, ...]:
        """Return the events since the last call, oldest first, and forget them. O(events).

        The first is an `EventsLost` if too many have waited.
        """
        events = tuple(self._pending)
        if self._lost:
            events = (EventsLost(self._lost), *events)
        self._pending.clear()
        self._num_hashes = self._lost = 0
        return events

    def stored(self, nodes: list[Node], namespace_key: bytes, group: int) -> None:
        """Record that a run of contents was stored. O(nodes)."""
        event = self._describe(nodes, namespace_key, group, self.number + 1)
        self._pending.append(event)
        self._num_hashes += len(nodes)
        self.number += 1

    def removed(self, nodes: list[Node], group: int) -> None:
        """Record that contents were removed. O(nodes)."""
        hashes = tuple([BlockHash(node.block_hash or self._hash(node, group)) for node in nodes])
        self._pending.append(BlocksRemoved(self.number + 1, group, hashes))
        self._num_hashes += len(nodes)
        self.number += 1

    def cleared(self) -> None:
        """Record that all contents were removed. O(1)."""
        self._pending.append(AllCleared(self.number + 1))
        self._num_hashes += 1
        self.number += 1

    def trim(self) -> None:
        """Drop the waiting events if they hold too many block hashes. Cannot fail.

        Called at the end of calls that remove contents: without removals there are never more
        hashes than blocks. O(1) for each dropped event.
        """
        if self._num_hashes > self.max_hashes:
            self._pending.clear()
            self._num_hashes = 0
            self._lost = self.number

    def take_back(self, number: int) -> None:
        """Undo the recording of the events after `number`, which were not taken.

        Cannot fail. O(events forgotten).
        """
        while self.number > number:
            event = self._pending.pop()
            named = isinstance(event, (BlocksStored, BlocksRemoved))
            self._num_hashes -= len(event.block_hashes) if named else 1  # type: ignore[union-attr]
            self.number -= 1

    def snapshot(self, roots: Iterable[tuple[int, Node]]) -> Snapshot:
        """Return the contents below (group, root) pairs as a snapshot. O(nodes)."""
        runs: list[BlocksStored] = []
        for group, root in roots:
            run: list[Node] = []
            for node in root.descendants():
                if node.is_piece():
                    continue
                if run and node.parent is not run[-1]:
                    runs.append(self._describe(run, root.tokens, group, self.number))
                    run = []
                if node.first_copy is not None:
                    run.append(node)
            if run:
                runs.append(self._describe(run, root.tokens, group, self.number))
        return Snapshot(self.number, tuple(runs))

    def _describe(
        self, nodes: list[Node], namespace_key: bytes, group: int, number: int
    ) -> BlocksStored:
        """Return an event for a non-empty run of contents, and set their block hashes."""
        above = nodes[0].parent or nodes[0]
        parent = self._hash(above, group)
        size = self._block_sizes[group]
        contents = [node.tokens for node in nodes]
        hashes = hashes_after(parent, contents, size, self.algorithm)
        for node, block_hash in zip(nodes, hashes, strict=True):
            node.block_hash = block_hash
        return BlocksStored(
            number,
            group,
            tuple(hashes),
            None if above.parent is None else parent,
            namespace_key,
            size,
            tuple(contents),
            b"" if above.parent is None else above.tokens,
        )

    def _hash(self, node: Node, group: int) -> BlockHash:
        return node_hash(node, self._block_sizes[group], self.algorithm)


def node_hash(node: Node, block_size: int, algorithm: HashAlgorithm) -> BlockHash:
    """Return the block hash of a node. O(ancestors without one); theirs are set too.

    The nodes of a pool keep the hashes of one algorithm: that of its events, if it records any.
    """
    unnamed: list[Node] = []
    above: Node | None = node
    while above is not None and above.block_hash is None:
        unnamed.append(above)
        above = above.parent
    for child in reversed(unnamed):
        if child.parent is None or child.parent.block_hash is None:
            child.block_hash = digest(child.tokens, algorithm)
        else:
            parent = child.parent.block_hash
            (child.block_hash,) = hashes_after(parent, [child.tokens], block_size, algorithm)
    return BlockHash(node.block_hash or b"")
