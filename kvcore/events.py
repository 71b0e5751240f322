"""What was stored and removed, for whoever keeps an index of this cache from outside.

Events name content, never blocks: a content is stored with its first copy and removed with its
last. Each has a sequence number, one more than the one before, so a reader sees a gap. At every
moment `fold(all events so far)` is exactly what can be hit, and so is `fold(snapshot, later
events)`. A parent is stored before its child, and a content is removed before it is stored again.
Nothing here is done unless the manager was made with `record_events`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import final

from kvcore.block import Node
from kvcore.hashing import BlockHash, NameAlgorithm, digest, encode_block
from kvcore.tokens import BYTES_PER_TOKEN


@dataclass(frozen=True, slots=True)
class BlockStored:
    """A content can be hit now.

    Attributes:
        number: its sequence number.
        group: the layer group.
        name: the content's name.
        parent: the name of what stands before it: of a block, or of the namespace.
        namespace_key: the encoded namespace for a first block; None: that of its parent.
        tokens: the block's token ids.
        items: the encoded items that reach into the block; empty for text.
    """

    number: int
    group: int
    name: BlockHash
    parent: BlockHash
    namespace_key: bytes | None
    tokens: tuple[int, ...]
    items: bytes


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """A content cannot be hit any more: its last copy is gone."""

    number: int
    group: int
    name: BlockHash


@dataclass(frozen=True, slots=True)
class AllCleared:
    """Nothing can be hit any more."""

    number: int


Event = BlockStored | BlockRemoved | AllCleared


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that can be hit at one moment.

    Attributes:
        number: the sequence number of the last event before it, 0 if there was none.
        stored: what is cached, a parent before its children.
    """

    number: int
    stored: tuple[BlockStored, ...]


def fold(
    events: Iterable[Event], start: Snapshot | None = None
) -> frozenset[tuple[int, BlockHash]]:
    """Return what can be hit after these events, as (group, name). O(events).

    Args:
        events: in order; those that a snapshot already knows are skipped.
        start: where to begin; None: from nothing.
    """
    known = 0 if start is None else start.number
    found = set() if start is None else {(event.group, event.name) for event in start.stored}
    for event in events:
        if event.number <= known:
            continue
        if isinstance(event, BlockStored):
            found.add((event.group, event.name))
        elif isinstance(event, BlockRemoved):
            found.discard((event.group, event.name))
        else:
            found.clear()
    return frozenset(found)


@final
class EventLog:
    """Events that nobody has taken yet.

    Args:
        block_sizes: tokens a block, for each layer group.
        algorithm: how contents are named.
    """

    __slots__ = ("_algorithm", "_block_sizes", "_pending", "number")

    def __init__(self, block_sizes: Sequence[int], algorithm: NameAlgorithm) -> None:
        digest(b"", algorithm)  # refuses an unknown algorithm now
        self._algorithm: NameAlgorithm = algorithm
        self._block_sizes = tuple(block_sizes)
        self._pending: list[Event] = []
        self.number = 0

    def take(self) -> tuple[Event, ...]:
        """Return the events since the last call, oldest first, and forget them. O(events)."""
        events = tuple(self._pending)
        self._pending.clear()
        return events

    def stored(self, node: Node, group: int) -> None:
        """Note that a content has got its first block. O(1)."""
        event = self._describe(node, group, self.number + 1)
        self._pending.append(event)
        self.number += 1

    def removed(self, node: Node, group: int) -> None:
        """Note that a content has lost its last block. O(1)."""
        event = BlockRemoved(self.number + 1, group, self._name(node, group))
        self._pending.append(event)
        self.number += 1

    def cleared(self) -> None:
        """Note that all contents are gone. O(1)."""
        self._pending.append(AllCleared(self.number + 1))
        self.number += 1

    def take_back(self, number: int) -> None:
        """Forget the events after `number`, which nobody has taken: what they say did not happen.

        Cannot fail. O(events forgotten).
        """
        del self._pending[len(self._pending) - (self.number - number) :]
        self.number = number

    def snapshot(self, contents: Iterable[tuple[int, Node]]) -> Snapshot:
        """Return (group, node) pairs, parents first, as a snapshot of this moment. O(contents)."""
        stored = [self._describe(node, group, self.number) for group, node in contents]
        return Snapshot(self.number, tuple(stored))

    def _describe(self, node: Node, group: int, number: int) -> BlockStored:
        parent = node if node.parent is None else node.parent
        size = self._block_sizes[group] * BYTES_PER_TOKEN
        return BlockStored(
            number=number,
            group=group,
            name=self._name(node, group),
            parent=self._name(parent, group),
            namespace_key=parent.tokens if parent.parent is None else None,
            tokens=tuple(array("I", node.tokens[:size])),
            items=node.tokens[size:],
        )

    def _name(self, node: Node, group: int) -> BlockHash:
        """Return a node's name, naming its ancestors on the way. O(ancestors not named yet)."""
        unnamed: list[Node] = []
        above: Node | None = node
        while above is not None and above.name is None:
            unnamed.append(above)
            above = above.parent
        for child in reversed(unnamed):
            if child.parent is None or child.parent.name is None:
                child.name = digest(child.tokens, self._algorithm)
            else:
                block = encode_block(child.parent.name, child.tokens, self._block_sizes[group])
                child.name = digest(block, self._algorithm)
        return BlockHash(node.name or b"")
