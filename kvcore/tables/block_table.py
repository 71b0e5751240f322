"""A block table: the blocks of one sequence for one layer group, by position.

Entry `i` holds the tokens from `i * block_size` on. A table grows at its end and is cut there; at
its beginning entries become the null block when no query can see them any more, so indices never
move. The table counts nothing and frees nothing: it says which blocks are to leave it, the manager
gives them back, and then the table lets them go.
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
        group: what its layers see.
        block_size: tokens a block.
        forgets: whether its layers lose sight of anything.
        window: what a sliding window sees, in tokens; 0: it is none.
        chunk: likewise of chunked local attention.
        blocks: its blocks in order, the null block where one was given back.
        num_null: how many entries from the start are the null block.
        num_published: how many entries from the start have been published, null ones included.
    """

    __slots__ = (
        "_ids",
        "block_size",
        "blocks",
        "chunk",
        "forgets",
        "group",
        "num_null",
        "num_published",
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

    def num_missing(self, num_tokens: int) -> int:
        """Return how many blocks it lacks to hold `num_tokens` tokens. O(1)."""
        return max(0, -(-num_tokens // self.block_size) - len(self.blocks))

    def first_kept(self, num_tokens: int) -> int:
        """Return `first_kept_block` of its group. O(1).

        Spelled out on plain ints: compiled, a decode step with a window takes three quarters of the
        time that it takes with the other.
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

        What the sequence has computed in full, and what no query after them sees, is not loaded.
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
        """Its blocks' ids; read it, do not write it. O(blocks that have joined since).

        An `array("I")`, the kind that Python fills fastest. A view of it stops no verb, and says
        nothing after the next one: it may show the ids of then.
        """
        ids = self._ids
        if ids is None:
            ids = self._ids = array("I")
        if len(ids) < len(self.blocks):
            new = [block.block_id for block in self.blocks[len(ids) :]]
            try:
                ids.fromlist(new)  # type: ignore[arg-type]  # a BlockId is an int
            except BufferError:  # somebody holds a view, so it cannot be resized
                ids = self._ids = ids[:]
                ids.fromlist(new)  # type: ignore[arg-type]
        return ids

    def grow(self, blocks: list[Block]) -> tuple[BlockId, ...]:
        """Append blocks; return their ids. O(len(blocks))."""
        appended = tuple([block.id_object for block in blocks])
        self.blocks += blocks
        return appended  # type: ignore[return-value]  # they are ints

    def start(self, null: Block, num_null: int, blocks: list[Block]) -> None:
        """Fill an empty table: `num_null` null entries, then published blocks."""
        self.blocks += [null] * num_null
        self.blocks += blocks
        self.num_null = num_null
        self.num_published = len(self.blocks)

    def renew(self, blocks: list[Block], num_null: int, num_published: int) -> None:
        """Have these entries instead, of which the first `num_null` are null. Cannot fail."""
        self.blocks = blocks
        self._ids = None
        self.num_null = num_null
        self.num_published = num_published

    def beyond(self, keep: int) -> list[Block]:
        """Return the blocks after the first `keep` entries, in order: those that `cut` lets go."""
        return self.blocks[max(keep, self.num_null) :]

    def cut(self, keep: int) -> None:
        """Keep the first `keep` entries. Cannot fail."""
        del self.blocks[keep:]
        if self._ids is not None and len(self._ids) > keep:
            try:
                del self._ids[keep:]
            except BufferError:
                self._ids = None
        self.num_null = min(self.num_null, keep)
        self.num_published = min(self.num_published, keep)

    def before(self, place: int) -> list[Block]:
        """Return the blocks before entry `place`, in order: those that `forget` lets go."""
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
