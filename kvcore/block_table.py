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
from kvcore.groups import FullAttention, LayerGroup


@final
class BlockTable:
    """One group's blocks of one sequence.

    Attributes:
        group: what its layers see.
        block_size: tokens a block.
        forgets: whether its layers lose sight of anything.
        blocks: its blocks in order, the null block where one was given back.
        block_ids: their ids, as `array("I")`: the kind that Python fills fastest.
        num_null: how many entries from the start are the null block.
        num_published: how many entries from the start have been published, null ones included.
    """

    __slots__ = (
        "block_ids",
        "block_size",
        "blocks",
        "forgets",
        "group",
        "num_null",
        "num_published",
    )

    def __init__(self, group: LayerGroup) -> None:
        self.group = group
        self.block_size = group.block_size
        self.forgets = not isinstance(group, FullAttention)
        self.blocks: list[Block] = []
        self.block_ids = array("I")
        self.num_null = 0
        self.num_published = 0

    def num_missing(self, num_tokens: int) -> int:
        """Return how many blocks it lacks to hold `num_tokens` tokens. O(1)."""
        return max(0, -(-num_tokens // self.block_size) - len(self.blocks))

    def grow(self, blocks: list[Block]) -> tuple[BlockId, ...]:
        """Append blocks; return their ids. O(len(blocks))."""
        new = [block.id_object for block in blocks]
        self.blocks += blocks
        self.block_ids.fromlist(new)  # type: ignore[arg-type]  # they are ints
        return tuple(new)  # type: ignore[arg-type]

    def start(self, null: Block, num_null: int, blocks: list[Block]) -> None:
        """Fill an empty table: `num_null` null entries, then published blocks."""
        if num_null:
            self.grow([null] * num_null)
        if blocks:
            self.grow(blocks)
        self.num_null = num_null
        self.num_published = len(self.blocks)

    def beyond(self, keep: int) -> list[Block]:
        """Return the blocks after the first `keep` entries, in order: those that `cut` lets go.

        Raises:
            BufferError: somebody holds a view of `block_ids`, so it could not be cut.
        """
        self.block_ids.append(0)  # says whether it can be resized
        self.block_ids.pop()
        return self.blocks[max(keep, self.num_null) :]

    def cut(self, keep: int) -> None:
        """Keep the first `keep` entries. Cannot fail after `beyond`."""
        del self.blocks[keep:], self.block_ids[keep:]
        self.num_null = min(self.num_null, keep)
        self.num_published = min(self.num_published, keep)

    def before(self, place: int) -> list[Block]:
        """Return the blocks before entry `place`, in order: those that `forget` lets go."""
        return self.blocks[self.num_null : place]

    def forget(self, null: Block, before: int) -> None:
        """Make the entries before `before` null. Cannot fail."""
        for index in range(self.num_null, before):
            self.blocks[index] = null
            self.block_ids[index] = null.block_id
        self.num_null = max(self.num_null, before)
