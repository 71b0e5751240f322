"""Every block there is: who holds it, what it holds, and which one is reused next.

The pool moves blocks between free and held and counts references. A published block loses its
content (is *evicted*) only when it is reused; the order of reuse stands in `free_blocks.py`, what
can be found in `published.py`.

Every call checks and allocates first and changes afterwards: one that raises, whatever the reason,
has changed nothing. The pool knows nothing of sequences, of how much of a block is written, or of
when it may be published.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import SupportsIndex, final

from kvcore.arguments import as_int
from kvcore.block import Block
from kvcore.errors import BlockStateError
from kvcore.events import EventLog
from kvcore.free_blocks import hold_again
from kvcore.published import PublishedBlocks
from kvcore.retention import Wish


@final
class BlockPool(PublishedBlocks):
    """A fixed number of blocks. Block 0 is the null block and is never handed out.

    Args:
        num_blocks: blocks in the cache, the null block included; at least 2.
        block_sizes: tokens a block, for each layer group; at least 1.
        log: where to note what can be hit and what cannot any more; None: nowhere.

    Attributes:
        block_sizes: tokens a block, for each layer group.
        trees: the published content of each layer group.
        num_evicted_blocks: blocks that lost published content when they were reused, ever.
        num_allocated_blocks: blocks handed out by `take`, ever.

    Raises:
        InvalidArgumentError: a size out of range.
    """

    __slots__ = ("num_allocated_blocks", "num_evicted_blocks")

    def __init__(
        self, num_blocks: SupportsIndex, *block_sizes: SupportsIndex, log: EventLog | None = None
    ) -> None:
        super().__init__(num_blocks, *block_sizes, log=log)
        self.num_evicted_blocks = 0
        self.num_allocated_blocks = 0

    def take(self, num_blocks: SupportsIndex) -> list[Block]:
        """Hand out free blocks, each held once; published ones are evicted. O(num_blocks).

        Raises:
            OutOfBlocksError: fewer are free.
            InvalidArgumentError: a negative number.
        """
        if type(num_blocks) is int and num_blocks == 1 and self.empty_blocks:
            taken = [self.empty_blocks[-1]]
            self.empty_blocks.pop().ref_count = 1
            self.num_allocated_blocks += 1
            used = self.num_used_blocks = self.num_used_blocks + 1
            if used > self.peak_used_blocks:  # noqa: PLR1730  # a call would cost a third of it all
                self.peak_used_blocks = used
            return taken
        taken = self.next_blocks(as_int("num_blocks", num_blocks, 0))
        self.hand_out(taken)
        return taken

    def hand_out(self, blocks: list[Block], num_returned: int = 0) -> None:
        """Do what `take` does, for the blocks that `next_blocks` has just named. O(blocks).

        The last `num_returned` empty blocks have come back since then, and stay. Whatever is
        raised, nothing has changed.
        """
        count = len(blocks)
        empty = self.empty_blocks
        size = len(empty) - num_returned
        if count <= size:
            del empty[size - count : size]
            for block in blocks:
                block.ref_count = 1
        else:
            fresh = min(count - size, self.num_blocks - self._num_seen)
            others = blocks[: size + fresh]
            with_content = blocks[len(others) :]
            if with_content:
                self._evict(with_content)
            self._num_seen += fresh
            del empty[:size]
            for block in others:
                block.ref_count = 1
        self.num_allocated_blocks += count
        self._count_used(count)

    def exchange(self, blocks: list[Block], released: list[Block]) -> None:
        """Do what `hand_out` does, then drop one holder of each released block. O(blocks).

        Raises like `release`; whatever is raised, nothing has changed.
        """
        if not released:
            self.hand_out(blocks)
            return
        freed = self._let_go(released)
        size = len(self.empty_blocks)
        try:
            content = [block for block in freed if block.node is not None]
            empty = [block for block in freed if block.node is None]
            self.empty_blocks += empty
            self.hand_out(blocks, len(empty))
        except BaseException:
            del self.empty_blocks[size:]
            hold_again(released)
            raise
        self._count_emptied(empty)
        if content:
            self._put_back(content)

    def _evict(self, blocks: list[Block]) -> None:
        """Hand out free blocks that hold content, those reused next. Fails before it changes them.

        Tail first, as a sequence gives its blocks back, each is the last of its branch.
        """
        if self._log is not None:
            self._note_lost(blocks)
        self._unqueue_front(blocks)
        if len(self.trees) == 1:
            self.trees[0].evict(blocks, 0, len(blocks))
        else:
            for index, block in enumerate(blocks):
                self.trees[block.group].evict(blocks, index, index + 1)
        if self.is_uneven:
            for block in blocks:
                block.group = 0
        if self.lifetimes is not None:
            for block in blocks:
                self.lifetimes.evicted(block.block_id, self.step)
        self.num_evicted_blocks += len(blocks)
        self.num_cached_blocks -= len(blocks)
        if self._log is not None:
            self._log.trim()

    def _unqueue_front(self, blocks: list[Block]) -> None:
        """Take the blocks with content that are reused next from where they wait. Cannot fail."""
        if not self.shelf.kept:
            self.free_queue.cut_front(blocks)
            return
        for block in blocks:
            self._unqueue(block)
            self.shelf.drop(block)

    def hold(
        self, blocks: Sequence[Block], kept: Sequence[tuple[Block, tuple[Wish, ...]]] = ()
    ) -> None:
        """Count one more holder of each block, reviving those that are free. O(len(blocks)).

        Some of them are kept longer than others from now on, as `RetentionShelf.front` says.

        Raises:
            ForeignBlockError: a block of another pool, or the null block.
            BlockStateError: a block that is free and holds no content: there is nothing to revive.
        """
        self._check_own(blocks)
        for block in blocks:
            if block.ref_count == 0 and block.node is None:
                raise BlockStateError(f"hold: wanted a held or published block, got {block!r}")
        idle = [block for block in dict.fromkeys(blocks) if block.ref_count == 0]
        self.shelf.make_room([block for block, _ in kept])
        hold_again(blocks)
        self._leave(idle)
        for block, front in kept:
            self.shelf.kept[block.block_id] = front

    def release(self, blocks: Sequence[Block]) -> None:
        """Drop one holder of each block, in this order; the last holder frees it. O(len(blocks)).

        Raises:
            ForeignBlockError: a block of another pool, or the null block.
            DoubleFreeError: a block is named more often than it is held.
        """
        if isinstance(blocks, list) and len(blocks) == 1:
            block: Block = blocks[0]
            if (
                block.ref_count == 1
                and block.node is None
                and block.group == 0
                and block.block_id < len(self._made)
                and self._made[block.block_id] is block
            ):
                self.empty_blocks.append(block)
                block.ref_count = 0
                self.num_used_blocks -= 1
                return
        freed = self._let_go(blocks)
        try:
            content = [block for block in freed if block.node is not None]
            empty = freed
            if content:
                empty = [block for block in freed if block.node is None]
            self.empty_blocks += empty
        except BaseException:
            hold_again(blocks)
            raise
        if empty:
            self._count_emptied(empty)
        if content:
            self._put_back(content)

    def forget(self, blocks: Sequence[Block], released: Sequence[Block] = ()) -> None:
        """Take their content from blocks: it is wrong. Then drop one holder of each released block.

        Free ones are reused first now. O(blocks and their copies).

        Raises:
            ForeignBlockError: a block of another pool, or the null block.
            DoubleFreeError: a block is released more often than it is held.
        """
        self._check_own(blocks)
        losing = [block for block in dict.fromkeys(blocks) if block.node is not None]
        freed = self._let_go(released)
        size = len(self.empty_blocks)
        try:
            lost = set(losing)
            idle = [block for block in losing if block.next_free is not None]
            empty = [block for block in freed if block.node is None or block in lost]
            content = [block for block in freed if block.node is not None and block not in lost]
            self.empty_blocks += idle + empty
            self._note_lost(losing)
        except BaseException:
            del self.empty_blocks[size:]
            hold_again(released)
            raise
        self.num_cached_blocks -= len(losing)
        for block in idle:
            self._unqueue(block)
        for block in losing:
            self.trees[block.group].detach(block)
            self.shelf.drop(block)
        for block in idle:
            block.group = 0
        self._count_emptied(empty)
        self._put_back(content)
        if self._log is not None:
            self._log.trim()

    def keep(self, block: Block, wishes: Sequence[Wish]) -> None:
        """Keep a held, published block longer than others, once it is free. O(wishes).

        Raises:
            ForeignBlockError: a block of another pool, or the null block.
            BlockStateError: the block is free or not published.
        """
        self._check_own((block,))
        if block.ref_count == 0 or block.node is None:
            raise BlockStateError(f"keep: wanted a held, published block, got {block!r}")
        self.shelf.keep(block, wishes)

    def advance(self, num_steps: int, released: Sequence[Block] = ()) -> None:
        """Let time pass; blocks whose deadline has come are not kept longer. O(kept blocks).

        Then drop one holder of each released block. Raises like `release`.
        """
        freed = self._let_go(released)
        size = len(self.empty_blocks)
        try:
            content = [block for block in freed if block.node is not None]
            empty = [block for block in freed if block.node is None]
            self.empty_blocks += empty
            fallen = self.shelf.expire(self.step + num_steps)
        except BaseException:
            del self.empty_blocks[size:]
            hold_again(released)
            raise
        self.step += num_steps
        self._count_emptied(empty)
        for block in fallen:
            self.free_queue.push_back(block)
        self._put_back(content)

    def clear(self, *, canonical_order: bool = False) -> int:
        """Forget all published content at once; return how many blocks held some.

        Held blocks stay held. Free ones stay free, those that lose content foremost, in the order
        of their reuse; or all by id if `canonical_order` is asked for. O(contents), and with
        `canonical_order` O(n log n) of the blocks that were ever held.
        """
        idle = [*self.free_queue, *self.shelf]
        idle.reverse()
        contents = [list(tree.nodes()) for tree in self.trees]
        num_published = self.num_cached_blocks
        size = len(self.empty_blocks)
        by_id = self.empty_blocks + idle if canonical_order else []
        by_id.sort(key=lambda block: -block.block_id)
        try:
            self.empty_blocks += idle
            if self._log is not None:
                self._log.cleared()
        except BaseException:
            del self.empty_blocks[size:]
            raise
        if canonical_order:
            self.empty_blocks = by_id
        self.free_queue.clear()
        self.shelf.clear()
        for tree, nodes in zip(self.trees, contents, strict=True):
            tree.clear(nodes)
        for block in idle:
            block.group = 0
        self.num_cached_blocks = 0
        if self._log is not None:
            self._log.trim()
        return num_published
