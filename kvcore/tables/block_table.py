"""A block table: the blocks of one sequence for one layer group, by position.

Entry `i` holds the tokens from `i * block_size` on. A table grows and is cut at its end; at its
beginning entries become the null block when no later query can see them, so indices never move. The
table counts and frees nothing: it returns the blocks to remove, the manager releases them, and then
the table is cut.
"""

from __future__ import annotations

from array import array
from typing import final

from kvcore.block import Block, BlockId
from kvcore.tables.groups import NEVER, ChunkedLocal, LayerGroup, SlidingWindow


@final
class BlockTable:
    """One group's blocks of one sequence.

    Attributes:
        group: the layer group.
        block_size: tokens a block.
        forgets: True if the group has a sliding window or chunks.
        window: the tokens of a sliding window; 0: the group has none.
        chunk: the tokens of a chunk of chunked local attention; 0: the group has none.
        blocks: its blocks in order, the null block for released ones.
        num_null: the number of leading null entries.
        num_published: the number of leading published entries, null ones included.
        trailing: the blocks that left the window last, which the own end of the sequence still
            needs. The table does not hold them, and they may hold other content by now.
        num_changes: the number of times that entries were appended, removed or replaced by others
            than null.
    """

    __slots__ = (
        "_ids",
        "block_size",
        "blocks",
        "chunk",
        "forgets",
        "group",
        "num_changes",
        "num_null",
        "num_published",
        "trailing",
        "window",
    )

    def __init__(self, group: LayerGroup) -> None:
        self.group = group
        self.block_size = group.block_size
        self.window = group.window if isinstance(group, SlidingWindow) else 0
        self.chunk = group.chunk if isinstance(group, ChunkedLocal) else 0
        self.forgets = self.window + self.chunk > 0
        self.blocks: list[Block] = []
        self._ids: array[int] | None = None
        self.num_null = 0
        self.num_published = 0
        self.trailing: tuple[Block, ...] = ()
        self.num_changes = 0

    def num_missing(self, num_tokens: int) -> int:
        """Return the number of missing blocks for `num_tokens` tokens. O(1)."""
        return max(0, -(-num_tokens // self.block_size) - len(self.blocks))

    def first_kept(self, num_tokens: int) -> int:
        """Return `first_kept_block` of its group. O(1).

        Written out on plain ints: compiled, this saves a quarter of a decode step with a window.
        """
        size = self.block_size
        visible = 0
        if self.window:
            visible = (num_tokens - self.window + 1) // size
        elif self.chunk:
            visible = num_tokens // self.chunk * self.chunk // size
        return max(0, min(visible, num_tokens // size - 1))

    def first_loaded(self, num_computed_tokens: int, num_tokens: int) -> int:
        """Return the first block to take for the KV of `num_tokens` tokens from outside. O(1).

        Blocks that the sequence has computed, or that no later query sees, are not loaded.
        """
        return max(num_computed_tokens // self.block_size, self.first_kept(num_tokens))

    def next_pass(self, kept: int) -> int:
        """Return the least number of tokens of which `first_kept` is more than `kept`. O(1)."""
        begin = (kept + 1) * self.block_size
        if self.window:
            visible = begin + self.window - 1
        elif self.chunk:
            visible = -(-begin // self.chunk) * self.chunk
        else:
            return NEVER
        return max(visible, begin + self.block_size)

    @property
    def block_ids(self) -> array[int]:
        """The block ids; read it, do not write it. O(blocks appended since).

        An `array("I")`, which Python fills fastest. A buffer view of it blocks no call, but may be
        outdated after the next call.
        """
        ids = self._ids
        if ids is None:
            ids = self._ids = array("I")
        if len(ids) < len(self.blocks):
            new = [block.block_id for block in self.blocks[len(ids) :]]
            try:
                ids.fromlist(new)  # type: ignore[arg-type]  # a BlockId is an int
            except BufferError:  # it has an exported buffer view, so it cannot be resized
                ids = self._ids = ids[:]
                ids.fromlist(new)  # type: ignore[arg-type]
        return ids

    def grow(self, blocks: list[Block]) -> tuple[BlockId, ...]:
        """Append blocks; return their ids. O(len(blocks))."""
        if len(blocks) == 1:  # a decode step has many of these
            appended: tuple[object, ...] = (blocks[0].id_object,)
        else:
            appended = tuple([block.id_object for block in blocks])
        self.blocks += blocks
        self.num_changes += 1
        return appended  # type: ignore[return-value]  # they are ints

    def start(self, null: Block, num_null: int, blocks: list[Block]) -> None:
        """Fill an empty table: `num_null` null entries, then published blocks."""
        self.blocks += [null] * num_null
        self.blocks += blocks
        self.num_null = num_null
        self.num_published = len(self.blocks)
        self.num_changes += 1

    def renew(self, blocks: list[Block], num_null: int, num_published: int) -> None:
        """Replace the entries; the first `num_null` are null. Cannot fail."""
        self.blocks = blocks
        self._ids = None
        self.num_null = num_null
        self.num_published = num_published
        self.trailing = ()
        self.num_changes += 1

    def beyond(self, keep: int) -> list[Block]:
        """Return the blocks after the first `keep` entries, in order: those that `cut` removes."""
        return self.blocks[max(keep, self.num_null) :]

    def cut(self, keep: int) -> None:
        """Keep the first `keep` entries. Cannot fail."""
        if keep < len(self.blocks):
            self.num_changes += 1
        del self.blocks[keep:]
        if self._ids is not None and len(self._ids) > keep:
            try:
                del self._ids[keep:]
            except BufferError:
                self._ids = None
        self.num_null = min(self.num_null, keep)
        if keep < self.num_published:
            self.num_published = keep
            self.trailing = ()

    def before(self, place: int) -> list[Block]:
        """Return the blocks before entry `place`, in order: those that `forget` removes."""
        return self.blocks[self.num_null : place]

    def forget(self, null: Block, before: int) -> None:
        """Make the entries before `before` null. Cannot fail."""
        first = self.num_null
        if before <= first:
            return
        ids = self._ids
        known = 0 if ids is None else len(ids)
        for index in range(first, before):
            self.blocks[index] = null
            if index < known and ids is not None:
                ids[index] = null.block_id
        self.num_null = before
