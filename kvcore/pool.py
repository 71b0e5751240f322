"""The block pool: the state of every block, and the order in which free blocks are reused.

Decides which block is allocated next. A block is free or held, and a published block can be hit
whether it is free or not. It loses its content (is *evicted*) only when it is reused. Free blocks
without content are reused first, the last released first, because nothing is lost with them; then
blocks that were never held, by id; then published blocks, least recently used first; then blocks
with a retention priority. Callers release the blocks of a sequence tail first, so that a shared
prefix outlives its continuations.

Invariants: every call checks and allocates first and changes state afterwards, and a change only
sets existing links, counters and entries: a call that raises, for whatever reason, has changed
nothing. `hold`, `publish` and `release` check their blocks and then do what `revive`, `attach` and
`give_back` do; callers whose blocks need no check call the latter.

Does not know sequences, how much of a block is written, or when a block may be published.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import lcm
from operator import length_hint
from typing import SupportsIndex, final

from kvcore.arguments import Flag, as_bool, as_int
from kvcore.block import NULL_BLOCK, Block, Node, PendingRelease
from kvcore.content_tree import ContentTree, ContentWatcher, evict, lost_contents
from kvcore.errors import (
    BlockStateError,
    DoubleFreeError,
    ForeignBlockError,
    InvalidArgumentError,
    OutOfBlocksError,
)
from kvcore.events import EventLog
from kvcore.eviction.idle_blocks import IdleBlocks
from kvcore.eviction.lifetimes import LifetimeRecorder
from kvcore.eviction.retention import RetentionTerm
from kvcore.identity.tokens import BYTES_PER_TOKEN


@final
class BlockPool:
    """A fixed number of blocks. Block 0 is the null block and is never handed out.

    Args:
        num_blocks: blocks in the cache, the null block included; at least 2.
        block_sizes: tokens a block, for each layer group; at least 1.
        log: records the KV events; None: none are recorded.

    Attributes:
        num_blocks: the number of blocks, the null block included.
        block_sizes: tokens a block, for each layer group.
        common_size: their least common multiple; the length of a hit is a multiple of it.
        is_uneven: True if they differ.
        null: block 0.
        empty_blocks: the free blocks without content that were held before, the next one to reuse
            last. They are reused first, and then the blocks that were never held, by id.
        idle_blocks: the free blocks with content, which are reused after those.
        trees: the published content of each layer group.
        lifetimes: records block lifetimes and reuse gaps; None: not recorded.
        watcher: hears which contents are published, and when any of them proves invalid; None: no
            tier is behind the pool.
        step: the current time of deadlines, in steps of the caller.
        num_used_blocks: the number of held blocks.
        num_deferred_blocks: the number of held blocks whose holders are all leases: they become
            free when those end.
        peak_used_blocks: the largest number of held blocks so far.
        num_cached_blocks: the number of published blocks, held or free.
        num_evicted_blocks: the number of evictions so far.
        num_allocated_blocks: the number of blocks allocated so far.
        num_computed_tokens: tokens with KV in held blocks, counted once for each sequence; the
            callers update it.

    Raises:
        InvalidArgumentError: a size out of range.
    """

    __slots__ = (
        "_log", "_made", "_num_extra_slots", "_num_seen", "_passing", "block_sizes", "common_size",
        "empty_blocks", "idle_blocks", "is_uneven", "lifetimes", "null", "num_allocated_blocks",
        "num_blocks", "num_cached_blocks", "num_computed_tokens", "num_deferred_blocks",
        "num_evicted_blocks", "num_used_blocks", "peak_used_blocks", "step", "trees", "watcher",
    )  # fmt: skip

    def __init__(
        self, num_blocks: SupportsIndex, *block_sizes: SupportsIndex, log: EventLog | None = None
    ) -> None:
        self.num_blocks = as_int("num_blocks", num_blocks, 2, 2**31 - 1)
        self.block_sizes = tuple([as_int("block_size", size, 1, 2**20) for size in block_sizes])
        self.common_size = lcm(*self.block_sizes)
        self.is_uneven = len(set(self.block_sizes)) > 1
        self._num_extra_slots = 0  # of held blocks, beyond the first group's block size for each
        self._passing = bytearray(self.num_blocks if self.is_uneven else 0)  # `attach` says what
        self.null = Block(NULL_BLOCK)
        self._made = [self.null]  # a block is made when it is looked at or handed out first
        self._num_seen = 1  # the null block, and those that were held once
        self.idle_blocks = IdleBlocks()
        self.empty_blocks: list[Block] = []
        self.trees = tuple(
            [ContentTree(size, group, log) for group, size in enumerate(self.block_sizes)]
        )
        self._log = log
        self.lifetimes: LifetimeRecorder | None = None
        self.watcher: ContentWatcher | None = None
        self.step = 0
        self.num_used_blocks = self.peak_used_blocks = self.num_cached_blocks = 0
        self.num_evicted_blocks = self.num_allocated_blocks = self.num_computed_tokens = 0
        self.num_deferred_blocks = 0

    @property
    def blocks(self) -> list[Block]:
        """Every block, by id; missing block objects are created. Read it, do not write it."""
        self._make(self.num_blocks)
        return self._made

    def made_block(self, block_id: int) -> Block | None:
        """Return a block by its id; None if it was never used, so it is free and empty. O(1)."""
        return self._made[block_id] if block_id < len(self._made) else None

    def made_blocks(self, block_ids: Sequence[int]) -> list[Block]:
        """Return the existing block objects of some ids, each once. O(ids)."""
        made = [self.made_block(block_id) for block_id in dict.fromkeys(block_ids)]
        return [block for block in made if block is not None]

    @property
    def num_usable_blocks(self) -> int:
        """The number of blocks that can be allocated in all. O(1)."""
        return self.num_blocks - 1

    @property
    def num_free_blocks(self) -> int:
        """The number of blocks that can be allocated now. O(1)."""
        return self.num_blocks - 1 - self.num_used_blocks

    @property
    def num_used_slots(self) -> int:
        """The number of slots of the held blocks. O(1)."""
        return self.num_used_blocks * self.block_sizes[0] + self._num_extra_slots

    @property
    def last_event(self) -> int:
        """The number of the last event, 0 without events. O(1)."""
        return 0 if self._log is None else self._log.number

    def free_blocks(self) -> Iterator[Block]:
        """Yield the free blocks in the order of their reuse."""
        yield from reversed(self.empty_blocks)
        yield from self.blocks[self._num_seen :]
        yield from self.idle_blocks

    def next_blocks(self, count: int) -> list[Block]:
        """Return the blocks that `take` would allocate, in order; changes nothing. O(count).

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
            found = self.idle_blocks.first(count)
        elif len(found) < count:
            found += self.idle_blocks.first(count - len(found))
        return found

    def take(self, num_blocks: SupportsIndex) -> list[Block]:
        """Allocate free blocks, each with one holder; published ones are evicted. O(num_blocks).

        Raises:
            OutOfBlocksError: fewer are free.
            InvalidArgumentError: a negative number.
        """
        if type(num_blocks) is int and num_blocks == 1 and self.empty_blocks:
            taken = [self.empty_blocks[-1]]
            self.empty_blocks.pop().ref_count = 1
            self.idle_blocks.found = None
            self.num_allocated_blocks += 1
            used = self.num_used_blocks = self.num_used_blocks + 1
            if used > self.peak_used_blocks:  # noqa: PLR1730  # a call would cost a third of it all
                self.peak_used_blocks = used
            return taken
        taken = self.next_blocks(as_int("num_blocks", num_blocks, 0))
        self.hand_out(taken)
        return taken

    def hand_out(self, blocks: list[Block], num_returned: int = 0) -> None:
        """Allocate the blocks that `next_blocks` has just returned. O(blocks).

        The last `num_returned` empty blocks were released since then, and stay free. An exception
        leaves the pool unchanged.
        """
        count = len(blocks)
        empty = self.empty_blocks
        size = len(empty) - num_returned
        if count <= size:
            del empty[size - count : size]
            for block in blocks:
                block.ref_count = 1
        elif size == 0 and self._num_seen == self.num_blocks:
            self._evict(blocks)
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
        if count:
            self.idle_blocks.found = None
        self.num_allocated_blocks += count
        used = self.num_used_blocks = self.num_used_blocks + count
        if used > self.peak_used_blocks:  # noqa: PLR1730  # as in `take`
            self.peak_used_blocks = used

    def exchange(self, blocks: list[Block], released: list[Block]) -> None:
        """Do what `hand_out` and then `give_back` do, or nothing. O(blocks)."""
        pending = self._begin_release(released, is_own=True)
        try:
            self.hand_out(blocks, len(pending.empty))
        except BaseException:
            self._take_back(pending)
            raise
        self._end_release(pending)

    def _evict(self, blocks: list[Block]) -> None:
        """Allocate the next free blocks that have content. Fails before it changes anything."""
        if self._log is not None:
            self._note_lost(blocks)
        self.idle_blocks.cut_front(blocks)
        evict(self.trees, blocks)
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

    def hold(
        self, blocks: Sequence[Block], kept: Sequence[tuple[Block, tuple[RetentionTerm, ...]]] = ()
    ) -> None:
        """Check blocks and add a holder to each, like `revive`. O(len(blocks)).

        Raises:
            ForeignBlockError: a block of another pool, or the null block.
            BlockStateError: a block is free and has no content, or is given twice.
        """
        self._check_own(blocks)
        for block in blocks:
            if block.ref_count == 0 and block.node is None:
                raise BlockStateError(f"hold: wanted a held or published block, got {block!r}")
        if len(set(blocks)) != len(blocks):
            raise BlockStateError("hold: wanted each block once")
        self.revive(list(blocks), kept)

    def revive(
        self, blocks: list[Block], kept: Sequence[tuple[Block, tuple[RetentionTerm, ...]]] = ()
    ) -> None:
        """Add a holder to each block; free blocks leave the free queue. O(len(blocks)).

        Blocks in `kept` get new retention terms, as `IdleBlocks.merged_terms` returns them.

        Args:
            blocks: each once; held, or published.
            kept: some of them, with their retention terms.
        """
        idle = [block for block in blocks if block.ref_count == 0]
        deferred = self.num_deferred_blocks
        if deferred and len(idle) < len(blocks):
            deferred -= sum([0 < block.ref_count == block.num_leases for block in blocks])
        if kept:
            self.idle_blocks.prepare_terms(kept)
        self.num_deferred_blocks = deferred
        if len(idle) == len(blocks):
            for block in idle:
                block.ref_count = 1
        else:
            for block in blocks:
                block.ref_count += 1
        if idle:
            self._unqueue(idle)
        for block, terms in kept:
            self.idle_blocks.set_terms(block, terms)

    def release(self, blocks: Sequence[Block]) -> None:
        """Remove a holder from each block, in this order; the last one frees it. O(len(blocks)).

        Raises:
            ForeignBlockError: a block of another pool, or the null block.
            DoubleFreeError: a block is given more often than it is held.
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
        self._end_release(self._begin_release(list(blocks)))

    def give_back(self, blocks: list[Block]) -> None:
        """Release distinct blocks that are known to belong to this pool. O(len(blocks)).

        Written out for the case where each has one holder and no content is lost: half the time of
        `_begin_release` for a few blocks. If any block of a sequence has others, its first has, the
        last one here; this is only a hint.
        """
        if self.is_uneven or not blocks or blocks[-1].ref_count != 1:
            self._end_release(self._begin_release(blocks, is_own=True))
            return
        empty: list[Block] = []
        waiting = iter(blocks)
        is_shared = False
        try:
            for block in waiting:
                if block.ref_count != 1:
                    is_shared = True
                    break
                if block.node is None:
                    empty.append(block)
                block.ref_count = 0
        except BaseException:
            self._hold_again(blocks[: -1 - length_hint(waiting)])
            raise
        if is_shared:
            self._hold_again(blocks[: -1 - length_hint(waiting)])
            self._end_release(self._begin_release(blocks, is_own=True))
            return
        try:
            content = blocks[len(empty) :]
            if empty and blocks[len(empty) - 1] is not empty[-1]:  # the others are not the last
                content = [block for block in blocks if block.node is not None]
            self.empty_blocks += empty
        except BaseException:
            self._hold_again(blocks)
            raise
        self.num_used_blocks -= len(empty)
        if content:
            self._queue_freed(content)

    def forget(self, blocks: Sequence[Block], released: Sequence[Block] = ()) -> None:
        """Remove invalid content from blocks, then release `released`.

        Free blocks without content are reused first. O(blocks and their copies).

        Raises:
            ForeignBlockError: a block of another pool, or the null block.
            DoubleFreeError: a block is released more often than it is held.
        """
        self._check_own(blocks)
        losing = [block for block in dict.fromkeys(blocks) if block.node is not None]
        idle = [block for block in losing if block.next_free is not None]
        before = PendingRelease([], len(self.empty_blocks), self.last_event)
        try:
            self.empty_blocks += idle
            self._note_lost(losing)
            pending = self._begin_release(list(released), losing)
        except BaseException:
            self._take_back(before)
            raise
        if losing:
            self.idle_blocks.remove_run(idle)  # what was found last may be among the others
        self._lose(losing)
        for block in idle:
            block.group = 0
        self._end_release(pending)

    def keep(self, block: Block, terms: Sequence[RetentionTerm]) -> None:
        """Keep a held, published block longer than others, once it is free. O(terms).

        Raises:
            ForeignBlockError: a block of another pool, or the null block.
            BlockStateError: the block is free or not published.
        """
        self._check_own((block,))
        if block.ref_count == 0 or block.node is None:
            raise BlockStateError(f"keep: wanted a held, published block, got {block!r}")
        self.idle_blocks.keep(block, terms)

    def tick(self, num_steps: int, released: Sequence[Block] = ()) -> None:
        """Advance the time and end expired retention, then release `released`.

        O(n log n) of the expired blocks. Raises like `release`.
        """
        pending = self._begin_release(list(released))
        try:
            self.idle_blocks.expire(self.step + num_steps)
        except BaseException:
            self._take_back(pending)
            raise
        self.step += num_steps
        self._end_release(pending)

    def clear(self, *, canonical_order: Flag = False) -> int:
        """Forget all published content at once; return how many blocks held some.

        Held blocks stay held. Free blocks stay free; those that lose their content are reused
        first, in their former order, or all by id with `canonical_order`. O(contents), and with
        `canonical_order` O(n log n) of the blocks that were ever held.
        """
        is_sorted = as_bool("canonical_order", canonical_order)
        if self.watcher is not None:
            self.watcher.cleared()
        idle = list(self.idle_blocks)
        idle.reverse()
        contents = [list(tree.nodes()) for tree in self.trees]
        num_published = self.num_cached_blocks
        size = len(self.empty_blocks)
        by_id = self.empty_blocks + idle if is_sorted else []
        by_id.sort(key=lambda block: -block.block_id)
        try:
            self.empty_blocks += idle
            if self._log is not None:
                self._log.cleared()
        except BaseException:
            del self.empty_blocks[size:]
            raise
        if is_sorted:
            self.empty_blocks = by_id
        self.idle_blocks.clear()
        for tree, nodes in zip(self.trees, contents, strict=True):
            tree.clear(nodes)
        for block in idle:
            block.group = 0
        self.num_cached_blocks = 0
        if self._log is not None:
            self._log.trim()
        return num_published

    def match(
        self,
        namespace_key: bytes,
        packed: bytes,
        max_blocks: int,
        group: int = 0,
        items: Sequence[bytes] | None = None,
    ) -> list[Block]:
        """Return the blocks of the longest published prefix, as `ContentTree.match`."""
        return self.trees[group].match(namespace_key, packed, max_blocks, items)

    def path(
        self,
        namespace_key: bytes,
        packed: bytes,
        max_blocks: int,
        group: int,
        items: Sequence[bytes] | None = None,
    ) -> list[Block | None]:
        """Return the published blocks along a prefix, None for evicted ones. O(blocks)."""
        return self.trees[group].path(namespace_key, packed, max_blocks, items)

    def publish(
        self,
        blocks: Sequence[Block],
        namespace_key: bytes,
        parent: Block | None,
        contents: Sequence[bytes],
        group: int = 0,
    ) -> None:
        """Publish consecutive blocks: prefix cache look-ups find them from now on.

        O(len(blocks)), and with a parent O(its depth).

        Args:
            blocks: held blocks, all of whose tokens are written, each once.
            namespace_key: the encoded namespace; used if `parent` is None.
            parent: the published block before the first one; None at the beginning.
            contents: for each its tokens, packed: block_size * 4 bytes; then its encoded items.
            group: the layer group that the blocks belong to.

        Raises:
            ForeignBlockError: a block of another pool, or the null block.
            BlockStateError: a block is free, published already or given twice, or `parent` is not
                published for the same group.
            InvalidArgumentError: not a whole block of tokens, or not one content for each block.
        """
        self._check_unpublished(blocks, contents, self.block_sizes[group] * BYTES_PER_TOKEN)
        above: Node | None = None
        if parent is not None:
            self._check_own((parent,))
            above = parent.node
            if above is None or parent.group != group:
                raise BlockStateError(f"publish: wanted a published parent, got {parent!r}")
            namespace_key = above.root().tokens
        self.attach(list(blocks), namespace_key, above, list(contents), group)

    def attach(
        self,
        blocks: list[Block],
        namespace_key: bytes,
        above: Node | None,
        contents: list[bytes],
        group: int,
        passing: bytes = b"",
    ) -> None:
        """Publish blocks of a table without checks. O(len(blocks)).

        `above` is the content before the first, in the same namespace; None at the beginning. A
        nonzero byte of `passing` marks a block that no hit can use: its content is forgotten when
        it is released. Empty: hits can use all blocks.
        """
        mark = 0 if self._log is None else self._log.number
        if self.is_uneven:
            self.assign(blocks, group)
        try:
            self.trees[group].attach(blocks, namespace_key, above, contents)
        except BaseException:
            self.unpublish((), mark)  # the tree has undone the rest
            raise
        self.num_cached_blocks += len(blocks)
        if self.is_uneven:
            for index, block in enumerate(blocks):
                self._passing[block.block_id] = passing[index] if passing else 0
        if self.lifetimes is not None:
            for block in blocks:
                self.lifetimes.published(block.block_id, self.step)
        if self.watcher is not None:
            self.watcher.published(blocks)

    def unpublish(self, blocks: Sequence[Block], last_event: int) -> None:
        """Undo `publish` and `keep` of blocks since an event. Cannot fail. O(len(blocks)).

        Blocks that are not published are ignored.
        """
        for block in reversed(blocks):
            if block.node is not None:
                self.num_cached_blocks -= 1
            self.trees[block.group].detach(block)
            self.idle_blocks.forget(block)
        if self._log is not None:
            self._log.take_back(last_event)

    def _note_lost(self, blocks: Sequence[Block]) -> None:
        """Record the contents that are lost with these blocks, all or none. O(copies)."""
        if self._log is None:
            return
        mark = self._log.number
        try:
            lost = lost_contents(blocks)
            for number in range(len(self.trees)):
                nodes = [node for node, group in lost if group == number]
                if nodes:
                    self._log.removed(nodes, number)
        except BaseException:
            self._log.take_back(mark)
            raise

    def _check_unpublished(
        self, blocks: Sequence[Block], contents: Sequence[bytes], width: int
    ) -> None:
        self._check_own(blocks)
        if len(blocks) != len(contents):
            raise InvalidArgumentError(
                f"contents: wanted one for each of {len(blocks)} blocks, got {len(contents)}"
            )
        for block in blocks:
            if block.ref_count == 0 or block.node is not None:
                raise BlockStateError(f"publish: wanted a held, unpublished block, got {block!r}")
        if len(set(blocks)) != len(blocks):
            raise BlockStateError("publish: wanted each block once")
        for content in contents:
            if len(content) < width:
                raise InvalidArgumentError(f"contents: wanted {width} bytes, got {len(content)}")

    def assign(self, blocks: Sequence[Block], group: int) -> None:
        """Set the layer group of held blocks. Cannot fail.

        Needed after an allocation if the block sizes of the groups differ; blocks that are not
        assigned count as blocks of the first group. O(len(blocks)), or O(1) for equal sizes.
        """
        if self.is_uneven:
            self._num_extra_slots -= self._extra_slots(blocks)
            for block in blocks:
                block.group = group
            self._num_extra_slots += self._extra_slots(blocks)

    def _extra_slots(self, blocks: Sequence[Block]) -> int:
        """Count the slots of blocks, those beyond the first group's block size. O(len(blocks))."""
        sizes = self.block_sizes
        return sum([sizes[block.group] - sizes[0] for block in blocks])

    def _make(self, num_blocks: int) -> None:
        """Create the first `num_blocks` block objects. O(new ones)."""
        made = self._made
        if len(made) < num_blocks:
            made.extend([Block(block_id) for block_id in range(len(made), num_blocks)])

    def _unqueue(self, idle: list[Block]) -> None:
        """Remove free blocks with content from the free queue. Cannot fail."""
        if self.lifetimes is not None:
            for block in idle:
                self.lifetimes.revived(block.block_id, self.step)
        self.idle_blocks.find_run(idle)
        self.num_used_blocks += len(idle)
        self.peak_used_blocks = max(self.peak_used_blocks, self.num_used_blocks)
        if self.is_uneven:
            self._num_extra_slots += self._extra_slots(idle)

    def _count_emptied(self, blocks: list[Block]) -> None:
        """Count blocks without content as free. Cannot fail. O(blocks)."""
        self.num_used_blocks -= len(blocks)
        if self.is_uneven:
            self._num_extra_slots -= self._extra_slots(blocks)
            for block in blocks:
                block.group = 0

    def _begin_release(
        self, released: list[Block], losing: Sequence[Block] = (), *, is_own: bool = False
    ) -> PendingRelease:
        """Remove a holder from each block, or from none: the part that can fail. O(len(released)).

        `_end_release` completes it and `_take_back` undoes it. Blocks in `losing`, and blocks that
        no hit can use, lose their content. `is_own`: the blocks are known to belong to this pool.
        """
        pending = PendingRelease(released, len(self.empty_blocks), self.last_event)
        freed = self._uncount(released, is_own=is_own)
        try:
            pending.content = [block for block in freed if block.node is not None]
            if pending.content and (self.is_uneven or losing):
                self._sort_out(pending, freed, losing)
            elif not pending.content:
                pending.empty = freed
            elif len(pending.content) < len(freed):
                pending.empty = [block for block in freed if block.node is None]
            self.empty_blocks += pending.empty
        except BaseException:
            self._take_back(pending)
            raise
        return pending

    def _sort_out(
        self, pending: PendingRelease, freed: Sequence[Block], losing: Sequence[Block]
    ) -> None:
        """Find the freed blocks that lose their content, and record the events."""
        lost = set(losing)
        known = self._passing
        passing = [b for b in pending.content if b not in lost and known and known[b.block_id]]
        self._note_lost(passing)
        pending.passing = passing
        lost.update(passing)
        pending.empty = [block for block in freed if block.node is None or block in lost]
        pending.content = [block for block in pending.content if block not in lost]

    def _end_release(self, pending: PendingRelease) -> None:
        """Complete a release: put the freed blocks in the free queue. Cannot fail. O(blocks)."""
        if pending.passing:
            self._lose(pending.passing)
        if pending.empty:
            self._count_emptied(pending.empty)
        if pending.content:
            self._queue_freed(pending.content)

    def _take_back(self, pending: PendingRelease) -> None:
        """Undo a pending release. Cannot fail. O(blocks)."""
        del self.empty_blocks[pending.num_empty :]
        if self._log is not None:
            self._log.take_back(pending.last_event)
        self._hold_again(pending.released)

    def _lose(self, blocks: Sequence[Block]) -> None:
        """Remove the content of blocks from the tree; the events are recorded. Cannot fail."""
        self.num_cached_blocks -= len(blocks)
        for block in blocks:
            self.trees[block.group].detach(block)
            self.idle_blocks.forget(block)
        if self._log is not None:
            self._log.trim()

    def _uncount(self, released: list[Block], *, is_own: bool) -> list[Block]:
        """Remove a holder from each block, or from none; return the freed blocks.

        Blocks up to the first that has other holders are counted in a separate loop: it takes two
        thirds of the time of the loop in `_uncount_shared`.
        """
        made = self._made
        waiting = iter(released)
        try:
            if is_own:  # the same loop without the ownership check, a quarter of the time
                for block in waiting:
                    if block.ref_count != 1:
                        break
                    block.ref_count = 0
                else:
                    return released
            else:
                for block in waiting:
                    if block.ref_count != 1 or made[block.block_id] is not block:
                        break
                    block.ref_count = 0
                else:
                    return released
        except (AttributeError, IndexError, TypeError):
            pass  # not a block of this pool
        freed = released[: len(released) - length_hint(waiting) - 1]
        try:
            shared = released[len(freed) :]
            self._check_own(() if is_own else shared)
            return freed + self._uncount_shared(shared)
        except BaseException:
            self._hold_again(freed)
            raise

    def _uncount_shared(self, released: list[Block]) -> list[Block]:
        """Do what `_uncount` does for own blocks that may have several holders or come twice."""
        freed: list[Block] = []
        waiting = iter(released)
        try:
            for block in waiting:
                count = block.ref_count - 1
                if count <= block.num_leases:
                    if count < 0:
                        number = block.block_id
                        raise DoubleFreeError(  # noqa: TRY301  # the others have to be undone
                            f"release: block {number} is released more often than it is held"
                        )
                    if count == 0:
                        freed.append(block)
                    elif count == block.num_leases:
                        self.num_deferred_blocks += 1
                block.ref_count = count
        except BaseException:
            self._hold_again(released[: -1 - length_hint(waiting)])
            raise
        return freed

    def _hold_again(self, blocks: list[Block]) -> None:
        """Undo the release of blocks. Cannot fail. O(len(blocks))."""
        for block in blocks:
            if 0 < block.ref_count == block.num_leases:
                self.num_deferred_blocks -= 1
            block.ref_count += 1

    def _queue_freed(self, freed: list[Block]) -> None:
        """Put freed blocks with content into the free queue. Cannot fail."""
        self.num_used_blocks -= len(freed)
        if self.is_uneven:
            self._num_extra_slots -= self._extra_slots(freed)
        if self.lifetimes is not None:
            for block in freed:
                self.lifetimes.freed(block.block_id, self.step)
        self.idle_blocks.push_run(freed)

    def _check_own(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            if block.block_id <= NULL_BLOCK or self.made_block(block.block_id) is not block:
                raise ForeignBlockError(f"wanted a block of this pool, got {block!r}")
