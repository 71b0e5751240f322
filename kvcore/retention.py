"""Retention: published blocks that are to be reused later than least recently used would have it.

A sequence may ask for ranges of its tokens to be kept with a priority, for ever or for a number of
steps. The wish holds for whole paths: a block is kept at least as strongly as any block after it in
the sequence, because content without what stands before it is worth nothing. Free blocks with a
priority wait on a shelf of their own; they are reused when no free block without one is left, the
lowest priority first and least recently used first within it. A block whose time is over joins the
ordinary queue as if it had been used just then.

Blocks that nobody asked to keep are never looked at here, and cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

from kvcore.arguments import as_int
from kvcore.block import Block
from kvcore.errors import InvalidArgumentError
from kvcore.free_queue import FreeQueue

FOREVER = 2**63 - 1
"""The deadline of what has none."""


@dataclass(frozen=True, slots=True)
class Retention:
    """A wish: keep the blocks of a range of tokens longer than others.

    Attributes:
        start: the first position.
        stop: one past the last.
        priority: 1 or more; what has none is reused first, then the lowest.
        max_steps: for how many steps from the opening of the sequence; None: for ever.

    Raises:
        InvalidArgumentError: a field is out of range.
    """

    start: int
    stop: int
    priority: int = 1
    max_steps: int | None = None

    def __post_init__(self) -> None:
        start = as_int("start", self.start, 0)
        object.__setattr__(self, "start", start)
        object.__setattr__(self, "stop", as_int("stop", self.stop, start + 1))
        object.__setattr__(self, "priority", as_int("priority", self.priority, 1, 2**31 - 1))
        if self.max_steps is not None:
            object.__setattr__(self, "max_steps", as_int("max_steps", self.max_steps, 1, 2**62))


def check_wishes(wishes: Sequence[Retention]) -> tuple[Retention, ...]:
    """Return wishes as a tuple.

    Raises:
        InvalidArgumentError: something else than a `Retention` is among them.
    """
    try:
        checked = tuple(wishes)
    except TypeError:
        raise InvalidArgumentError(
            f"retain: wanted a sequence of Retention, got {type(wishes).__name__}"
        ) from None
    for wish in checked:
        if type(wish) is not Retention:
            raise InvalidArgumentError(f"retain: wanted Retention, got {type(wish).__name__}")
    return checked


Wish = tuple[int, int]
"""A priority, and the step from which it holds no longer."""


def wishes_for(
    wishes: Sequence[Retention], start: int, opened_at: int, now: int
) -> tuple[Wish, ...]:
    """Return what holds for a block that begins at token `start`. O(wishes).

    All wishes that reach into it or beyond it and whose time is not over.
    """
    found: list[Wish] = []
    for wish in wishes:
        deadline = FOREVER if wish.max_steps is None else opened_at + wish.max_steps
        if wish.stop > start and deadline > now:
            found.append((wish.priority, deadline))
    return tuple(found)


@final
class RetentionShelf:
    """Which blocks are kept, and the free ones among them in the order of their reuse.

    Attributes:
        kept: for each kept block's id, free or held, its wishes: the highest priority first, and
            after it only what holds for longer.
        num_free: how many blocks wait here.
    """

    __slots__ = ("_queues", "kept", "num_free")

    def __init__(self) -> None:
        self.kept: dict[int, tuple[Wish, ...]] = {}
        self._queues: dict[int, FreeQueue] = {}
        self.num_free = 0

    def front(self, block: Block, wishes: Sequence[Wish]) -> tuple[Wish, ...]:
        """Return what a block is kept for if these wishes join. O(wishes)."""
        latest = 0
        front: list[Wish] = []
        for priority, deadline in sorted(
            [*self.kept.get(block.block_id, ()), *wishes], reverse=True
        ):
            if deadline > latest:
                front.append((priority, deadline))
                latest = deadline
        for priority, _ in front:  # nothing that is freed later has to make its queue
            if priority not in self._queues:
                self._queues[priority] = FreeQueue()
        return tuple(front)

    def keep(self, block: Block, wishes: Sequence[Wish]) -> None:
        """Keep a held block at least as strongly as this. O(wishes)."""
        front = self.front(block, wishes)
        if front:
            self.kept[block.block_id] = front

    def make_room(self, blocks: Sequence[Block]) -> None:
        """Let wishes for these blocks be set without a growth that could fail. O(len(blocks))."""
        try:
            for block in blocks:
                self.kept.setdefault(block.block_id, ())
        except BaseException:
            for block in blocks:
                if not self.kept.get(block.block_id, True):
                    del self.kept[block.block_id]
            raise

    def drop(self, block: Block) -> None:
        """Forget the wishes for a block that is not on a shelf. O(1)."""
        self.kept.pop(block.block_id, None)

    def push(self, block: Block) -> bool:
        """Put a block that has just become free on its shelf, last in line. Cannot fail. O(1).

        Returns:
            False if nobody wants it kept.
        """
        wishes = self.kept.get(block.block_id)
        if not wishes:
            return False
        self._queues[wishes[0][0]].push_back(block)
        self.num_free += 1
        return True

    def remove(self, block: Block) -> bool:
        """Take a free block from its shelf. O(1).

        Returns:
            False if it is on none.
        """
        wishes = self.kept.get(block.block_id)
        if not wishes:
            return False
        self._queues[wishes[0][0]].remove(block)
        self.num_free -= 1
        return True

    def clear(self) -> None:
        """Keep nothing any more; whatever waits is free elsewhere. Cannot fail. O(num_free)."""
        for queue in self._queues.values():
            queue.clear()
        self.kept.clear()
        self.num_free = 0

    def expire(self, now: int) -> list[Block]:
        """Forget the wishes whose time is over, all or none. O(kept blocks).

        A block on a shelf falls to that of the wish that is left.

        Returns:
            The free blocks for which no wish is left, in the order of their reuse.
        """
        still = [(block_id, _still(wishes, now)) for block_id, wishes in self.kept.items()]
        changed = {block_id: left for block_id, left in still if left != self.kept[block_id]}
        falling = [block for block in self if block.block_id in changed]
        freed = [block for block in falling if not changed[block.block_id]]
        for block in falling:
            self.remove(block)
        for block_id, left in changed.items():
            if left:
                self.kept[block_id] = left
            else:
                del self.kept[block_id]
        for block in falling:
            self.push(block)
        return freed

    def __iter__(self) -> Iterator[Block]:
        """Yield the blocks that wait, in the order of their reuse. O(num_free)."""
        for priority in sorted(self._queues):
            yield from self._queues[priority]


def _still(wishes: tuple[Wish, ...], now: int) -> tuple[Wish, ...]:
    """Return the wishes whose time is not over."""
    return tuple([wish for wish in wishes if wish[1] > now])
