"""Every block there is, and what it holds: content is published and found here.

One tree a layer group. A published block can be found by whoever asks for its content, free or not.
What becomes of its memory is decided elsewhere (`pool.py`): nothing here counts holders, or takes
content away for the sake of room.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import SupportsIndex

from kvcore.block import Block, Node
from kvcore.content_tree import ContentTree
from kvcore.errors import BlockStateError, InvalidArgumentError
from kvcore.events import EventLog
from kvcore.free_blocks import FreeBlocks
from kvcore.tokens import BYTES_PER_TOKEN


class PublishedBlocks(FreeBlocks):
    """All blocks, and the trees of what they hold.

    Attributes:
        trees: the published content of each layer group.
        num_cached_blocks: how many blocks hold published content, held or free.
    """

    __slots__ = ("_log", "num_cached_blocks", "trees")

    def __init__(
        self, num_blocks: SupportsIndex, *block_sizes: SupportsIndex, log: EventLog | None = None
    ) -> None:
        super().__init__(num_blocks, *block_sizes)
        self.trees = tuple(
            [ContentTree(size, group, log) for group, size in enumerate(self.block_sizes)]
        )
        self._log = log
        self.num_cached_blocks = 0

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

        O(len(blocks)), and with a parent O(its depth).

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
            namespace_key = above.root().tokens
        self.attach(list(blocks), namespace_key, above, list(contents), group)

    def attach(
        self,
        blocks: list[Block],
        namespace_key: bytes,
        above: Node | None,
        contents: list[bytes],
        group: int,
    ) -> None:
        """Do what `publish` does, without its checks, for new blocks of a table. O(len(blocks)).

        `above` is the content before the first, in the same namespace; None at the beginning.
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
        if self.lifetimes is not None:
            for block in blocks:
                self.lifetimes.published(block.block_id, self.step)

    @property
    def last_event(self) -> int:
        """The number of the last event, 0 where none are noted. O(1)."""
        return 0 if self._log is None else self._log.number

    def unpublish(self, blocks: Sequence[Block], last_event: int) -> None:
        """Undo what `publish` and `keep` did to blocks since an event. Cannot fail. O(len(blocks)).

        Blocks that were not published yet are left alone.
        """
        for block in reversed(blocks):
            if block.node is not None:
                self.num_cached_blocks -= 1
            self.trees[block.group].detach(block)
            self.shelf.drop(block)
        if self._log is not None:
            self._log.take_back(last_event)

    def _note_lost(self, blocks: Sequence[Block]) -> None:
        """Note which contents are lost if these blocks lose theirs, all or none. O(copies)."""
        log = self._log
        if log is None:
            return
        mark = log.number
        copies: dict[Node, int] = {}
        lost: list[list[Node]] = [[] for _ in self.trees]
        try:
            for block in blocks:
                node = block.node
                if node is None:
                    continue
                if node.first_copy is not block or node.last_copy is not block:
                    copies[node] = copies.get(node, len(node.copies())) - 1
                    if copies[node]:
                        continue
                lost[block.group].append(node)
            for group, nodes in enumerate(lost):
                if nodes:
                    log.removed(nodes, group)
        except BaseException:
            log.take_back(mark)
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
