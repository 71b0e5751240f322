"""The eviction order of free blocks with content: LRU, with retention priorities.

Blocks that no known end needs are reused first (`kvcore.tables.ends`): those that have left the
window of the sequence that filled them, and recurrent states that no prompt is expected to go on
from. Then blocks without a priority, least recently used first. Each priority has a queue of its
own; its blocks are reused when no other free block is left, the lowest priority first and least
recently used first within it. A block whose retention ends joins the ordinary queue as if it were
used at that moment. Blocks without retention are never examined, and cost nothing; nor do ends,
where there are no windows and no states.

A block may be shared, so what one sequence says may not be all: a block goes first only if no end
that needs it became known since the sequence that no longer needs it was opened. Ends are numbered,
and a block keeps the number of the last one that needs it.

A look-up whose request is not admitted leaves the order unchanged: if the blocks found last are all
released before any other change, each returns to its former place. So a request that is retried
again and again does not refresh its prefix.
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
        found: the blocks of the last look-up, in the order of their removal; None after any other
            change.
        spare: the blocks that no known end needs, without retention, in the order in which this
            was found.
        queue: the other blocks without retention, least recently used first.
        kept: for each block with retention, free or held, its terms by id: the highest priority
            first, and then only terms that hold for longer.
        num_shelved: the number of free blocks with retention.
        num_continued: how many of the last prompts, of 8 or fewer, went on from where a sequence
            had ended, rather than from where other content goes on. A prompt counts when its
            sequence ends and has computed anything: a look-up that is retried does not.
        num_ends: the number of ends that have become known; 0: blocks have no `last_end`.
    """

    __slots__ = (
        "_deadlines", "_num_pushed", "_shelves", "_since", "found", "kept",
        "num_continued", "num_ends", "num_shelved", "queue", "spare",
    )  # fmt: skip

    def __init__(self) -> None:
        self.found: list[Block] | None = None
        self.spare = FreeQueue()
        self.queue = FreeQueue()
        self.kept: dict[int, tuple[RetentionTerm, ...]] = {}
        self._shelves: dict[int, FreeQueue] = {}  # by priority
        self._deadlines: Deadlines[Block] = Deadlines()  # of kept blocks
        self._since: dict[int, int] = {}  # of kept blocks: when they joined their queue
        self._num_pushed = 0
        self.num_shelved = 0
        self.num_ends = 0
        self.num_continued = 4

    def tell(self, num_ended: int) -> None:
        """Note the end of a sequence whose prompt said `num_ended` (`Ends`). Cannot fail. O(1)."""
        self.num_continued = max(0, min(8, self.num_continued + num_ended))

    @property
    def only_branches(self) -> bool:
        """True if ends of prompts and boundaries are not worth room beside ends of sequences."""
        return self.num_continued > 5

    @property
    def only_branches_of_states(self) -> bool:
        """True if such ends are not worth room for recurrent states, which cost more. O(1)."""
        return self.num_continued > 3

    def sort_out(self, needed: list[Block], spare: list[Block], num_known: int) -> None:
        """Do what `need` and `put_first` do. Cannot fail. O(blocks)."""
        if needed:
            self.need(needed)
        if spare:
            self.put_first(spare, num_known)

    def need(self, blocks: list[Block]) -> None:
        """Note that an end has become known that needs blocks. Cannot fail. O(len(blocks)).

        Blocks without content are ignored.
        """
        self.num_ends += 1
        self.found = None
        for block in blocks:
            if block.node is not None:
                self._set_end(block, self.num_ends)

    def put_first(self, blocks: list[Block], num_known: int) -> None:
        """Let blocks be reused first, now or once they are free. Cannot fail. O(len(blocks)).

        But for those that an end needs that is newer than the first `num_known` ends, and those
        without content.
        """
        self.num_ends = max(1, self.num_ends)
        self.found = None
        for block in blocks:
            if block.node is not None and block.last_end <= num_known:
                self._set_end(block, -1)

    def _set_end(self, block: Block, number: int) -> None:
        """Set the last end that needs a block, and move it where it belongs then. O(1)."""
        moves = block.next_free is not None and (block.last_end < 0) is not (number < 0)
        if moves and not self.kept.get(block.block_id):
            self._queue_of(block).remove(block)
            block.last_end = number
            self._queue_of(block).push_back(block)
        block.last_end = number

    def _queue_of(self, block: Block) -> FreeQueue:
        """Return the queue of a block that is free, or will be. Cannot fail. O(1)."""
        if self.kept:
            terms = self.kept.get(block.block_id)
            if terms:
                return self._shelves[terms[0][0]]
        return self.queue if block.last_end >= 0 else self.spare

    def merged_terms(
        self, block: Block, terms: Sequence[RetentionTerm]
    ) -> tuple[RetentionTerm, ...]:
        """Return the terms of a block with these added, without dominated ones. O(terms)."""
        latest = 0
        merged: list[RetentionTerm] = []
        for priority, deadline in sorted(
            [*self.kept.get(block.block_id, ()), *terms], reverse=True
        ):
            if deadline > latest:
                merged.append((priority, deadline))
                latest = deadline
        for priority, _ in merged:  # so that a later release allocates nothing
            if priority not in self._shelves:
                self._shelves[priority] = FreeQueue()
        return tuple(merged)

    def keep(self, block: Block, terms: Sequence[RetentionTerm]) -> None:
        """Add retention terms to a held block. O(terms)."""
        merged = self.merged_terms(block, terms)
        if merged:
            self.prepare_terms(((block, merged),))
            self.set_terms(block, merged)

    def set_terms(self, block: Block, merged: tuple[RetentionTerm, ...]) -> None:
        """Set the merged terms of a held block; there is room. Cannot fail. O(1)."""
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
        """Forget the deadlines of old terms that no merged term has. Cannot fail. O(terms)."""
        for _, deadline in old:
            for _, other in merged:
                if other == deadline:
                    break
            else:
                self._deadlines.drop(block, deadline)

    def forget(self, block: Block) -> None:
        """Forget the terms and the ends of a block that is not queued. Cannot fail. O(terms)."""
        block.last_end = 0
        self._forget_terms(block)

    def _forget_terms(self, block: Block) -> None:
        """Forget the terms of a block that is not queued. Cannot fail. O(terms)."""
        if block.block_id in self.kept:
            self._drop_deadlines(block, self.kept.pop(block.block_id), ())
            self._since.pop(block.block_id, None)

    def first(self, count: int) -> list[Block]:
        """Return the blocks that are reused next, at most `count`; changes nothing. O(count)."""
        found = self.spare.first(count) if self.spare.length else []
        if len(found) < count:
            found += self.queue.first(count - len(found))
        if len(found) < count:
            found += islice(self.shelved(), count - len(found))
        return found

    def push_run(self, blocks: list[Block]) -> None:
        """Append freed blocks to their queues. Cannot fail.

        Blocks of the last look-up return to their former places. O(len(blocks)).
        """
        found = self.found
        self.found = None
        if found is not None and len(found) == len(blocks) and _all_free(found):
            self._put_back(found)
            return
        if not self.kept and (not self.num_ends or _none_goes_first(blocks)):
            self.queue.push_run(blocks)
            return
        for block in blocks:
            if self.kept and self.kept.get(block.block_id):
                self.num_shelved += 1
                self._num_pushed += 1
                self._since[block.block_id] = self._num_pushed
            self._queue_of(block).push_back(block)

    def _put_back(self, found: list[Block]) -> None:
        """Undo the last `find_run`. Cannot fail. O(len(found))."""
        for block in reversed(found):
            if self.kept and self.kept.get(block.block_id):
                self.num_shelved += 1
            self._queue_of(block).put_back(block)

    def remove(self, block: Block) -> None:
        """Remove a block from its queue. Cannot fail. O(1)."""
        self.found = None
        if self.kept and self.kept.get(block.block_id):
            self.num_shelved -= 1
        self._queue_of(block).remove(block)

    def remove_run(self, blocks: list[Block]) -> None:
        """Remove distinct blocks. Cannot fail. O(len(blocks))."""
        self.found = None
        if self.num_shelved or (self.spare.length and not _none_goes_first(blocks)):
            for block in blocks:
                self.remove(block)
        else:
            self.queue.remove_run(blocks)

    def find_run(self, blocks: list[Block]) -> None:
        """Remove the blocks of a look-up, and remember them. Cannot fail. O(len(blocks))."""
        if self.num_shelved or self.spare.length:
            self.remove_run(blocks)
        else:  # all that it does then
            self.queue.remove_run(blocks)
        self.found = blocks

    def cut_front(self, blocks: list[Block]) -> None:
        """Remove the blocks that `first` returned, and their retention. Cannot fail.

        The caller clears their links, as for `FreeQueue.cut_front`. O(1), or O(len(blocks)) if any
        block has retention or a known end.
        """
        self.found = None
        if not self.kept and not self.num_ends:
            self.queue.cut_front(blocks)
            return
        if not self.kept:
            count = min(self.spare.length, len(blocks))
            self.spare.cut_front(blocks[:count])
            self.queue.cut_front(blocks[count:])
        for block in blocks:
            if self.kept:
                self.remove(block)
                self._forget_terms(block)
            block.last_end = 0

    def clear(self) -> None:
        """Remove all blocks and all retention. Cannot fail. O(queued blocks)."""
        self.found = None
        self.spare.clear()
        self.queue.clear()
        for queue in self._shelves.values():
            queue.clear()
        self.kept.clear()
        self._since.clear()
        self._deadlines.clear()
        self.num_shelved = 0

    def expire(self, now: int) -> None:
        """Remove expired terms, all or none. O(n log n) of the blocks with one.

        A queued block moves to the queue of its remaining term; without one it becomes the last of
        the ordinary queue.
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
                self._forget_terms(block)
        for run in (fallen, staying):
            if run:
                self.push_run(run)

    def shelved(self) -> Iterator[Block]:
        """Yield the free blocks with retention, in the order of reuse. O(num_shelved)."""
        for priority in sorted(self._shelves):
            yield from self._shelves[priority]

    def __iter__(self) -> Iterator[Block]:
        """Yield all free blocks with content, in the order of reuse. O(queued blocks)."""
        yield from self.spare
        yield from self.queue
        yield from self.shelved()


def _none_goes_first(blocks: list[Block]) -> bool:
    """Return whether a known end may need each of the blocks. O(len(blocks))."""
    for block in blocks:  # noqa: SIM110  # as in `_all_free`
        if block.last_end < 0:
            return False
    return True


def _all_free(blocks: list[Block]) -> bool:
    """Return whether none of the blocks has a holder. O(len(blocks))."""
    for block in blocks:  # noqa: SIM110  # a generator costs more, and allocates
        if block.ref_count:
            return False
    return True


def _place(waiting: tuple[int, int, Block]) -> tuple[int, int]:
    """Return the sort key of the order of reuse."""
    return waiting[0], waiting[1]


def _still(terms: tuple[RetentionTerm, ...], now: int) -> tuple[RetentionTerm, ...]:
    """Return the terms that have not expired."""
    return tuple([term for term in terms if term[1] > now])
