"""Every block there is: who holds it, what it holds, and which one is reused next.

The pool moves blocks between free and held, counts references, and keeps the trees of published
content, one a layer group. Its order of reuse: blocks without content first, because nothing is
lost with them, the last released foremost; then published ones, least recently used first. A
published block loses its content (is *evicted*) only when it is reused. Callers release a
sequence's blocks tail first, so that a shared prefix outlives what followed it.

Every call checks first and changes afterwards: one that raises has changed nothing. The pool
knows nothing of sequences, of how much of a block is written, or of when it may be published.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import SupportsIndex, final

from kvcore.arguments import as_int
from kvcore.block import NULL_BLOCK, Block, Node
from kvcore.content_tree import ContentTree
from kvcore.errors import (
    BlockStateError,
    DoubleFreeError,
    ForeignBlockError,
    InvalidArgumentError,
    OutOfBlocksError,
)
from kvcore.events import EventLog
from kvcore.free_queue import FreeQueue
from kvcore.lifetimes import LifetimeRecorder
from kvcore.retention import FOREVER, RetentionShelf, Wish
from kvcore.tokens import BYTES_PER_TOKEN


@final
class BlockPool:
    """A fixed number of blocks. Block 0 is the null block and is never handed out.

    Args:
        num_blocks: blocks in the cache, the null block included; at least 2.
        block_sizes: tokens a block, for each layer group; at least 1.
        log: where to note what can be hit and what cannot any more; None: nowhere.

    Attributes:
        blocks: every block, by id.
        empty_blocks: the free ones without content, the one reused next last: they go first. Their
            `next_free` is themselves, which says that they are free.
        free_queue: the free ones with content, the one reused next first.
        shelf: the free ones that are to be kept longer, reused after all others.
        trees: the published content of each layer group.
        lifetimes: how long blocks live, lie idle and wait; None: nobody wants to know.
        step: the time that deadlines speak of, as the caller counts it.
        num_evicted_blocks: blocks that lost published content when they were reused, ever.
        num_allocated_blocks: blocks handed out by `take`, ever.
        least_free_blocks: the fewest that were free at once.

    Raises:
        InvalidArgumentError: a size out of range.
    """

    __slots__ = (
        "_log",
        "block_sizes",
        "blocks",
        "empty_blocks",
        "free_queue",
        "least_free_blocks",
        "lifetimes",
        "num_allocated_blocks",
        "num_evicted_blocks",
        "shelf",
        "step",
        "trees",
    )

    def __init__(
        self, num_blocks: SupportsIndex, *block_sizes: SupportsIndex, log: EventLog | None = None
    ) -> None:
        num_blocks = as_int("num_blocks", num_blocks, 2, 2**31 - 1)
        self.block_sizes = tuple(as_int("block_size", size, 1, 2**20) for size in block_sizes)
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self.free_queue = FreeQueue()
        self.shelf = RetentionShelf()
        self.empty_blocks = self.blocks[:0:-1]
        for block in self.empty_blocks:
            block.next_free = block
        self.trees = tuple(
            [ContentTree(size, group, log) for group, size in enumerate(self.block_sizes)]
        )
        self._log = log
        self.lifetimes: LifetimeRecorder | None = None
        self.step = 0
        self.num_evicted_blocks = 0
        self.num_allocated_blocks = 0
        self.least_free_blocks = len(self.empty_blocks)

    @property
    def num_usable_blocks(self) -> int:
        """How many blocks can be handed out in all. O(1)."""
        return len(self.blocks) - 1

    @property
    def num_free_blocks(self) -> int:
        """How many blocks `take` could hand out now. O(1)."""
        return len(self.empty_blocks) + self.free_queue.length + self.shelf.num_free

    @property
    def num_used_blocks(self) -> int:
        """How many blocks are held. O(1)."""
        return len(self.blocks) - 1 - self.num_free_blocks

    def free_blocks(self) -> Iterator[Block]:
        """Yield the free blocks in the order of their reuse. O(num_free_blocks)."""
        yield from reversed(self.empty_blocks)
        yield from self.free_queue
        yield from self.shelf

    @property
    def peak_used_blocks(self) -> int:
        """The most blocks that were held at once. O(1)."""
        return len(self.blocks) - 1 - self.least_free_blocks

    def take(self, num_blocks: SupportsIndex) -> list[Block]:
        """Hand out free blocks, each held once; published ones are evicted. O(num_blocks).

        Raises:
            OutOfBlocksError: fewer are free.
            InvalidArgumentError: a negative number.
        """
        count = as_int("num_blocks", num_blocks, 0)
        empty = self.empty_blocks
        left = len(empty) + self.free_queue.length + self.shelf.num_free - count
        if left < 0:
            raise OutOfBlocksError(count, left + count)
        # Slices of a list move many blocks at the price of one.
        split = max(0, len(empty) - count)
        taken = empty[split:]
        del empty[split:]
        taken.reverse()
        for block in taken:
            block.next_free = None
            block.ref_count = 1
        for _ in range(count - len(taken)):
            block = self.free_queue.pop_front() if self.free_queue.length else self.shelf.pop()
            self.trees[block.group].detach(block)
            self.num_evicted_blocks += 1
            if self.lifetimes is not None:
                self.lifetimes.evicted(block.block_id, self.step)
            block.ref_count = 1
            taken.append(block)
        self.num_allocated_blocks += count
        self.least_free_blocks = min(self.least_free_blocks, left)
        return taken

    def hold(self, blocks: Sequence[Block]) -> None:
        """Count one more holder of each block, reviving those that are free. O(len(blocks)).

        Raises:
            ForeignBlockError: a block of another pool, or the null block.
            BlockStateError: a block that is free and holds no content: there is nothing to revive.
        """
        self._check_own(blocks)
        for block in blocks:
            if block.ref_count == 0 and block.node is None:
                raise BlockStateError(f"hold: wanted a held or published block, got {block!r}")
        for block in blocks:
            if block.ref_count == 0:
                if not (self.shelf.num_free and self.shelf.remove(block)):
                    self.free_queue.remove(block)
                if self.lifetimes is not None:
                    self.lifetimes.revived(block.block_id, self.step)
            block.ref_count += 1
        self.least_free_blocks = min(self.least_free_blocks, self.num_free_blocks)

    def release(self, blocks: Sequence[Block]) -> None:
        """Drop one holder of each block, in this order; the last holder frees it. O(len(blocks)).

        Raises:
            ForeignBlockError: a block of another pool, or the null block.
            DoubleFreeError: a block is named more often than it is held.
        """
        self._check_own(blocks)
        for index, block in enumerate(blocks):
            if block.ref_count == 0:
                for undone in blocks[:index]:
                    undone.ref_count += 1
                raise DoubleFreeError(
                    f"release: block {block.block_id} is named more often than it is held"
                )
            block.ref_count -= 1
        for block in blocks:
            # A block named twice was freed at its first place.
            if block.ref_count == 0 and block.next_free is None:
                if block.node is None:
                    block.next_free = block
                    self.empty_blocks.append(block)
                    continue
                if self.lifetimes is not None:
                    self.lifetimes.freed(block.block_id, self.step)
                if not (self.shelf.kept and self.shelf.push(block)):
                    self.free_queue.push_back(block)

    def match(
        self,
        namespace_key: bytes,
        packed: bytes,
        max_blocks: int,
        group: int = 0,
        items: Sequence[bytes] | None = None,
    ) -> list[Block]:
        """Return the blocks of the longest published prefix; they are not held yet. O(blocks).

        `packed` holds the tokens, 4 bytes each, and at least `max_blocks` blocks of them; `items`
        for each block the encoded items that reach into it, None if there are none.
        """
        return self.trees[group].match(namespace_key, packed, max_blocks, items)

    def path(
        self,
        namespace_key: bytes,
        packed: bytes,
        max_blocks: int,
        group: int,
        items: Sequence[bytes] | None = None,
    ) -> list[Block | None]:
        """Return what is published along a prefix, None where a block is gone. O(blocks)."""
        return self.trees[group].path(namespace_key, packed, max_blocks, items)

    def publish(
        self,
        blocks: Sequence[Block],
        namespace_key: bytes,
        parent: Block | None,
        contents: Sequence[bytes],
        group: int = 0,
    ) -> None:
        """Let others hit a run of blocks: each holds its content after that of the one before.

        O(len(blocks)).

        Args:
            blocks: held blocks, all of whose tokens are written, each once.
            namespace_key: the encoded namespace; read where `parent` is None.
            parent: a published block that holds what comes before; None at the beginning.
            contents: for each its tokens, packed: block_size * 4 bytes; then its encoded items.
            group: the layer group that the blocks belong to.

        Raises:
            ForeignBlockError: a block of another pool, or the null block.
            BlockStateError: a block is free, published already or named twice, or `parent` is not
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
        self.trees[group].attach(blocks, namespace_key, above, contents)
        if self.lifetimes is not None:
            for block in blocks:
                self.lifetimes.published(block.block_id, self.step)

    def forget(self, block: Block) -> None:
        """Take a block's content from it: it is wrong. A free one is reused first now. O(1)."""
        if block.node is None:
            return
        self.trees[block.group].detach(block)
        if block.next_free is not None:
            if not self.shelf.remove(block):
                self.free_queue.remove(block)
            block.next_free = block
            self.empty_blocks.append(block)
        self.shelf.drop(block)

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

    def advance(self, num_steps: int) -> None:
        """Let time pass; blocks whose deadline has come are not kept longer. O(kept blocks)."""
        self.step += num_steps
        for block in self.shelf.expire(self.step):
            self.free_queue.push_back(block)

    def clear(self, *, canonical_order: bool = False) -> int:
        """Forget all published content at once; return how many blocks held some. O(num_blocks).

        Held blocks stay held; free ones stay free, in the order of their reuse, or by id if
        `canonical_order` is asked for.
        """
        free = list(self.free_blocks())
        if canonical_order:
            free.sort(key=lambda block: block.block_id)
        for block in list(self.free_queue):
            self.free_queue.remove(block)
        self.shelf.expire(FOREVER)
        count = 0
        for block in self.blocks:
            if block.node is not None:
                count += 1
                block.node = block.prev_copy = block.next_copy = None
        for tree in self.trees:
            tree.clear()
        for block in free:
            block.next_free = block
        self.empty_blocks = free[::-1]
        if self._log is not None:
            self._log.cleared()
        return count

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
        if len(blocks) > 1 and len(set(blocks)) != len(blocks):
            raise BlockStateError("publish: wanted each block once")
        for content in contents:
            if len(content) < width:
                raise InvalidArgumentError(f"contents: wanted {width} bytes, got {len(content)}")

    def _check_own(self, blocks: Iterable[Block]) -> None:
        everything = self.blocks
        for block in blocks:
            block_id = block.block_id
            if not NULL_BLOCK < block_id < len(everything) or everything[block_id] is not block:
                raise ForeignBlockError(f"wanted a block of this pool, got {block!r}")
