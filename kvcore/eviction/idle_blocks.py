"""Free blocks that hold content, in the order of their reuse; and what is kept longer than that.

Those that nobody wants kept go first, least recently used first. Those with a priority wait on a
shelf each of their own; they are reused when no other free block is left, the lowest priority first
and least recently used first within it. A block whose time is over joins the ordinary queue as if
it had been used just then. Blocks that nobody asked to keep are never looked at, and cost nothing.

A look-up that comes to nothing leaves no trace: the blocks that were found last go back to where
each of them stood, kept or not, if all of them come back before anything else has moved. So a
request that is tried again and again does not make its prefix young.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import final

from kvcore.block import Block
from kvcore.eviction.deadlines import Deadlines
from kvcore.eviction.free_queue import FreeQueue
from kvcore.eviction.retention import FOREVER, RetentionTerm


@final
class IdleBlocks:
    """The free blocks that hold content, in the order of their reuse.

    Attributes:
        found: what a look-up has found last, in the order in which it left; None once anything else
            was taken, given back or lost, or is kept for something else.
        queue: those that nobody wants kept: they go first, least recently used first.
        kept: for each kept block's id, free or held, its terms: the highest priority first, and
            after it only what holds for longer.
        num_shelved: how many wait because they are kept.
    """

    __slots__ = (
        "_deadlines", "_num_pushed", "_shelves", "_since", "found", "kept", "num_shelved", "queue"
    )  # fmt: skip

    def __init__(self) -> None:
        self.found: list[Block] | None = None
        self.queue = FreeQueue()
        self.kept: dict[int, tuple[RetentionTerm, ...]] = {}
        self._shelves: dict[int, FreeQueue] = {}  # by priority
        self._deadlines: Deadlines[Block] = Deadlines()  # of kept blocks
        self._since: dict[int, int] = {}  # of kept blocks: the how manieth joined its shelf last
        self._num_pushed = 0
        self.num_shelved = 0

    def merged_terms(
        self, block: Block, terms: Sequence[RetentionTerm]
    ) -> tuple[RetentionTerm, ...]:
        """Return what a block is kept for if these terms join. O(terms)."""
        latest = 0
        merged: list[RetentionTerm] = []
        for priority, deadline in sorted(
            [*self.kept.get(block.block_id, ()), *terms], reverse=True
        ):
            if deadline > latest:
                merged.append((priority, deadline))
                latest = deadline
        for priority, _ in merged:  # nothing that is freed later has to make its shelf
            if priority not in self._shelves:
                self._shelves[priority] = FreeQueue()
        return tuple(merged)

    def keep(self, block: Block, terms: Sequence[RetentionTerm]) -> None:
        """Keep a held block at least as strongly as this. O(terms)."""
        merged = self.merged_terms(block, terms)
        if merged:
            self.prepare_terms(((block, merged),))
            self.set_terms(block, merged)

    def set_terms(self, block: Block, merged: tuple[RetentionTerm, ...]) -> None:
        """Keep a held block for what `merged` has told; there is room. Cannot fail. O(1)."""
        old = self.kept.get(block.block_id, ())
        if old != merged:
            self._drop_deadlines(block, old, merged)
            self.kept[block.block_id] = merged
            self.found = None

    def prepare_terms(self, changes: Sequence[tuple[Block, tuple[RetentionTerm, ...]]]) -> None:
        """Let these be set without a growth that could fail, or change nothing. O(terms)."""
        try:
            for block, merged in changes:
                self.kept.setdefault(block.block_id, ())
                self._since.setdefault(block.block_id, 0)
                for _, deadline in merged:
                    if deadline != FOREVER:
                        self._deadlines.add(block, deadline)
        except BaseException:
            for block, merged in changes:
                self._drop_deadlines(block, merged, self.kept.get(block.block_id, ()))
                if not self.kept.get(block.block_id, True):
                    del self.kept[block.block_id]
                    self._since.pop(block.block_id, None)
            raise

    def _drop_deadlines(
        self, block: Block, old: tuple[RetentionTerm, ...], merged: tuple[RetentionTerm, ...]
    ) -> None:
        """Forget when old terms end, unless one of the merged ends then. Cannot fail. O(terms)."""
        for _, deadline in old:
            for _, other in merged:
                if other == deadline:
                    break
            else:
                self._deadlines.drop(block, deadline)

    def forget(self, block: Block) -> None:
        """Forget the terms for a block that does not wait. Cannot fail. O(terms)."""
        if block.block_id in self.kept:
            self._drop_deadlines(block, self.kept.pop(block.block_id), ())
            self._since.pop(block.block_id, None)

    def first(self, count: int) -> list[Block]:
        """Return the blocks that are reused next, at most `count`; changes nothing. O(count)."""
        found = self.queue.first(count)
        if len(found) < count:
            found += islice(self.shelved(), count - len(found))
        return found

    def push_run(self, blocks: list[Block]) -> None:
        """Let blocks wait that nobody holds any more, each last in its line. Cannot fail.

        If they are what was found last, each goes back to where it stood. O(len(blocks)).
        """
        found = self.found
        self.found = None
        if found is not None and len(found) == len(blocks) and _all_free(found):
            self._put_back(found)
            return
        if not self.kept:
            self.queue.push_run(blocks)
            return
        for block in blocks:
            terms = self.kept.get(block.block_id)
            if terms:
                self._shelves[terms[0][0]].push_back(block)
                self.num_shelved += 1
                self._num_pushed += 1
                self._since[block.block_id] = self._num_pushed
            else:
                self.queue.push_back(block)

    def _put_back(self, found: list[Block]) -> None:
        """Undo what `find_run` has done last. Cannot fail. O(len(found))."""
        for block in reversed(found):
            terms = self.kept.get(block.block_id)
            if terms:
                self._shelves[terms[0][0]].put_back(block)
                self.num_shelved += 1
            else:
                self.queue.put_back(block)

    def remove(self, block: Block) -> None:
        """Take out a block, from wherever it waits. Cannot fail. O(1)."""
        self.found = None
        terms = self.kept.get(block.block_id)
        if terms:
            self._shelves[terms[0][0]].remove(block)
            self.num_shelved -= 1
        else:
            self.queue.remove(block)

    def remove_run(self, blocks: list[Block]) -> None:
        """Take out blocks, each named once. Cannot fail. O(len(blocks))."""
        self.found = None
        if self.num_shelved:
            for block in blocks:
                self.remove(block)
        else:
            self.queue.remove_run(blocks)

    def find_run(self, blocks: list[Block]) -> None:
        """Do what `remove_run` does for what a look-up has found, and remember it."""
        self.remove_run(blocks)
        self.found = blocks

    def cut_front(self, blocks: list[Block]) -> None:
        """Take out the blocks that are reused next, as `first` has named them. Cannot fail.

        They are not kept any more. Their links are left to the caller, as `FreeQueue.cut_front`
        does. O(1), and O(len(blocks)) where any block is kept.
        """
        self.found = None
        if not self.kept:
            self.queue.cut_front(blocks)
            return
        for block in blocks:
            self.remove(block)
            self.forget(block)

    def clear(self) -> None:
        """Keep nothing any more; whatever waits is free elsewhere. Cannot fail. O(waiting)."""
        self.found = None
        self.queue.clear()
        for queue in self._shelves.values():
            queue.clear()
        self.kept.clear()
        self._since.clear()
        self._deadlines.clear()
        self.num_shelved = 0

    def expire(self, now: int) -> None:
        """Forget the terms whose time is over, all or none. O(n log n) of the blocks with one.

        A block that waits goes to the shelf of the term that is left; where none is, it is the last
        in line of those that nobody wants kept.
        """
        losing = self._deadlines.due(now)
        if not losing:
            return
        waiting: list[tuple[int, int, Block]] = []  # in the order of their reuse
        for block in losing:
            if block.next_free is not None:
                priority = self.kept[block.block_id][0][0]
                waiting.append((priority, self._since[block.block_id], block))
        waiting.sort(key=_place)
        left = {block: _still(self.kept[block.block_id], now) for block in losing}
        fallen = [block for _, _, block in waiting if not left[block]]
        staying = [block for _, _, block in waiting if left[block]]
        self.found = None
        for _, _, block in waiting:
            self.remove(block)
        for block, terms in left.items():
            if terms:
                self.set_terms(block, terms)
            else:
                self.forget(block)
        for run in (fallen, staying):
            if run:
                self.push_run(run)

    def shelved(self) -> Iterator[Block]:
        """Yield the kept blocks that wait, in the order of their reuse. O(num_shelved)."""
        for priority in sorted(self._shelves):
            yield from self._shelves[priority]

    def __iter__(self) -> Iterator[Block]:
        """Yield the blocks that wait, in the order of their reuse. O(waiting)."""
        yield from self.queue
        yield from self.shelved()


def _all_free(blocks: list[Block]) -> bool:
    """Say whether nobody holds any of these. O(len(blocks))."""
    for block in blocks:  # noqa: SIM110  # a generator costs more, and allocates
        if block.ref_count:
            return False
    return True


def _place(waiting: tuple[int, int, Block]) -> tuple[int, int]:
    """Return what orders kept blocks by their reuse."""
    return waiting[0], waiting[1]


def _still(terms: tuple[RetentionTerm, ...], now: int) -> tuple[RetentionTerm, ...]:
    """Return the terms whose time is not over."""
    return tuple([term for term in terms if term[1] > now])
