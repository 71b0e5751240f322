"""Every block there is, held or free; the free ones wait in the order of their reuse.

Blocks without content go first, because nothing is lost with them, the last released foremost; then
published ones, least recently used first; then those that are to be kept longer. Callers release a
sequence's blocks tail first, so that a shared prefix outlives what followed it.

What changes here for good is links, counters and entries that are there already, so a change cannot
fail in the middle; what can fail is asked before. `BlockPool` is this plus content: nothing here
knows what a block holds, beyond whether it holds anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import SupportsIndex

from kvcore.arguments import as_int
from kvcore.block import NULL_BLOCK, Block
from kvcore.errors import DoubleFreeError, ForeignBlockError, OutOfBlocksError
from kvcore.free_queue import FreeQueue
from kvcore.lifetimes import LifetimeRecorder
from kvcore.retention import RetentionShelf


class FreeBlocks:
    """All blocks, and the free ones among them.

    Attributes:
        num_blocks: how many there are, the null block included.
        block_sizes: tokens a block, for each layer group.
        is_uneven: whether they differ.
        null: block 0.
        empty_blocks: the free ones that were held once and have no content, the one reused next
            last: they go first, and after them those that were never held, by their ids.
        free_queue: the free ones with content, the one reused next first.
        shelf: the free ones that are to be kept longer, reused after all others.
        lifetimes: how long blocks live, lie idle and wait; None: nobody wants to know.
        step: the time that deadlines speak of, as the caller counts it.
        num_used_blocks: how many are held.
        peak_used_blocks: the most that were held at once.
    """

    __slots__ = (
        "_made",
        "_num_extra_slots",
        "_num_seen",
        "block_sizes",
        "empty_blocks",
        "free_queue",
        "is_uneven",
        "lifetimes",
        "null",
        "num_blocks",
        "num_used_blocks",
        "peak_used_blocks",
        "shelf",
        "step",
    )

    def __init__(self, num_blocks: SupportsIndex, *block_sizes: SupportsIndex) -> None:
        self.num_blocks = as_int("num_blocks", num_blocks, 2, 2**31 - 1)
        self.block_sizes = tuple([as_int("block_size", size, 1, 2**20) for size in block_sizes])
        self.is_uneven = len(set(self.block_sizes)) > 1
        self._num_extra_slots = 0  # of held blocks, beyond the first group's block size for each
        self.null = Block(NULL_BLOCK)
        self._made = [self.null]  # a block is made when it is looked at or handed out first
        self._num_seen = 1  # the null block, and those that were held once
        self.free_queue = FreeQueue()
        self.shelf = RetentionShelf()
        self.empty_blocks: list[Block] = []
        self.lifetimes: LifetimeRecorder | None = None
        self.step = 0
        self.num_used_blocks = 0
        self.peak_used_blocks = 0

    @property
    def blocks(self) -> list[Block]:
        """Every block, by id; those that are not made yet are now. Read it, do not write it."""
        self._make(self.num_blocks)
        return self._made

    def made_block(self, block_id: int) -> Block | None:
        """A block by its id; None if nothing has made it yet, so it is free and empty. O(1)."""
        return self._made[block_id] if block_id < len(self._made) else None

    @property
    def num_usable_blocks(self) -> int:
        """How many blocks can be handed out in all. O(1)."""
        return self.num_blocks - 1

    @property
    def num_free_blocks(self) -> int:
        """How many blocks `take` could hand out now. O(1)."""
        return self.num_blocks - 1 - self.num_used_blocks

    @property
    def num_used_slots(self) -> int:
        """How many slots the held blocks have. O(1)."""
        return self.num_used_blocks * self.block_sizes[0] + self._num_extra_slots

    def prefault(self) -> None:
        """Make every block now, where otherwise each is made when it is first handed out.

        O(num_blocks). A collector that is told to freeze what there is (`gc.freeze()`) never walks
        a block after that.
        """
        self._make(self.num_blocks)

    def free_blocks(self) -> Iterator[Block]:
        """Yield the free blocks in the order of their reuse. O(num_free_blocks)."""
        yield from reversed(self.empty_blocks)
        yield from self.blocks[self._num_seen :]
        yield from self.free_queue
        yield from self.shelf

    def next_blocks(self, count: int) -> list[Block]:
        """Return the blocks that `take` would hand out, in its order; changes nothing. O(count).

        Raises:
            OutOfBlocksError: fewer are free.
        """
        empty = self.empty_blocks
        if count <= len(empty):
            return empty[: -count - 1 : -1]  # a slice moves many blocks at the price of one
        left = self.num_blocks - 1 - self.num_used_blocks
        if count > left:
            raise OutOfBlocksError(count, left)
        found = empty[::-1]
        if self._num_seen < self.num_blocks:
            seen = min(self._num_seen + count - len(found), self.num_blocks)
            self._make(seen)
            found += self._made[self._num_seen : seen]
        if not found:
            found = self.free_queue.first(count)
        elif len(found) < count:
            found += self.free_queue.first(count - len(found))
        if len(found) < count:
            found += islice(self.shelf, count - len(found))
        return found

    def revive(self, blocks: list[Block]) -> None:
        """Count one more holder of blocks that were just found, or that a table holds. O(blocks).

        `BlockPool.hold` without its checks. Each is named once. Fails before it changes anything.
        """
        idle = [block for block in blocks if block.ref_count == 0]
        for block in blocks:
            block.ref_count += 1
        if idle:
            self._leave(idle)

    def drop(self, blocks: list[Block]) -> None:
        """Drop one holder of blocks that a table or a lease holds, in this order. O(blocks).

        `BlockPool.release` without its checks. Each is named once. Fails before it changes
        anything.
        """
        freed: list[Block] = []
        empty: list[Block] = []
        shared: list[Block] = []
        for block in blocks:
            if block.ref_count == 1:
                (empty if block.node is None else freed).append(block)
            elif block.ref_count > 1:
                shared.append(block)
            else:
                raise DoubleFreeError(f"drop: wanted blocks that somebody holds, got {block!r}")
        self.empty_blocks += empty
        for block in empty:
            block.ref_count = 0
        self._count_emptied(empty)
        for block in shared:
            block.ref_count -= 1
        if freed:
            self._put_back(freed)

    def _leave(self, idle: list[Block]) -> None:
        """Take free blocks with content from where they wait: somebody holds them. Cannot fail."""
        if self.lifetimes is not None:
            for block in idle:
                self.lifetimes.revived(block.block_id, self.step)
        if self.shelf.num_free:
            for block in idle:
                self._unqueue(block)
        else:
            self.free_queue.remove_run(idle)
        self._count_used(len(idle))
        if self.is_uneven:
            self._num_extra_slots += self._extra_slots(idle)

    def _count_used(self, count: int) -> None:
        """Note that so many more blocks are held. Cannot fail. O(1)."""
        self.num_used_blocks += count
        self.peak_used_blocks = max(self.peak_used_blocks, self.num_used_blocks)

    def _count_emptied(self, blocks: list[Block]) -> None:
        """Note that blocks without content, or that have just lost it, are held no more. O(blocks).

        Cannot fail.
        """
        self.num_used_blocks -= len(blocks)
        if self.is_uneven:
            self._num_extra_slots -= self._extra_slots(blocks)
            for block in blocks:
                block.group = 0

    def assign(self, blocks: Sequence[Block], group: int) -> None:
        """Note for which layer group held blocks are. Cannot fail.

        Wanted of blocks that were handed out where the groups' block sizes differ: what is not
        assigned counts as the first group's. O(len(blocks)) there, otherwise O(1).
        """
        if self.is_uneven:
            self._num_extra_slots -= self._extra_slots(blocks)
            for block in blocks:
                block.group = group
            self._num_extra_slots += self._extra_slots(blocks)

    def _extra_slots(self, blocks: Sequence[Block]) -> int:
        """Count the slots of blocks, those beyond the first group's block size. O(len(blocks))."""
        sizes = self.block_sizes
        extra = 0
        for block in blocks:
            extra += sizes[block.group] - sizes[0]
        return extra

    def _make(self, num_blocks: int) -> None:
        """Let the first `num_blocks` blocks be there. O(those that are new)."""
        made = self._made
        if len(made) < num_blocks:
            made.extend([Block(block_id) for block_id in range(len(made), num_blocks)])

    def _unqueue(self, block: Block) -> None:
        """Take a free block with content from where it waits. Cannot fail."""
        if not (self.shelf.num_free and self.shelf.remove(block)):
            self.free_queue.remove(block)

    def _let_go(self, blocks: Sequence[Block]) -> list[Block]:
        """Drop one holder of each block, or of none; return those that nobody holds any more."""
        named = list(blocks)
        made = self._made
        waiting = iter(named)
        try:
            for block in waiting:
                if block.ref_count != 1 or made[block.block_id] is not block:
                    break
                block.ref_count = 0
            else:
                return named
        except (AttributeError, IndexError, TypeError):
            pass  # this is no block, or none of ours
        hold_again(named[: -1 - len(list(waiting))])
        return self._let_go_shared(named)

    def _let_go_shared(self, named: list[Block]) -> list[Block]:
        """Do what `_let_go` does, for blocks that several may hold and that may be named twice."""
        self._check_own(named)
        freed: list[Block] = []
        for index, block in enumerate(named):
            if block.ref_count == 0:
                hold_again(named[:index])
                raise DoubleFreeError(
                    f"release: block {block.block_id} is named more often than it is held"
                )
            block.ref_count -= 1
            if block.ref_count == 0:
                freed.append(block)
        return freed

    def _put_back(self, freed: list[Block]) -> None:
        """Queue blocks with content that nobody holds any more. Cannot fail."""
        self.num_used_blocks -= len(freed)
        if self.is_uneven:
            self._num_extra_slots -= self._extra_slots(freed)
        if self.lifetimes is not None:
            for block in freed:
                self.lifetimes.freed(block.block_id, self.step)
        if not self.shelf.kept:
            self.free_queue.push_run(freed)
            return
        for block in freed:
            block.ref_count = 0
            if not self.shelf.push(block):
                self.free_queue.push_back(block)

    def _check_own(self, blocks: Iterable[Block]) -> None:
        everything = self._made
        for block in blocks:
            block_id = block.block_id
            if not NULL_BLOCK < block_id < len(everything) or everything[block_id] is not block:
                raise ForeignBlockError(f"wanted a block of this pool, got {block!r}")


def hold_again(blocks: Sequence[Block]) -> None:
    """Undo what letting go of blocks has counted. Cannot fail. O(len(blocks))."""
    for block in blocks:
        block.ref_count += 1
