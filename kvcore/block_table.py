"""A block table: the blocks of one sequence for one layer group, by position.

Entry `i` holds the tokens from `i * block_size` on. A table grows at its end and is cut there; at
its beginning entries become the null block when no query can see them any more, so indices never
move. The table counts nothing and frees nothing: it says which blocks left it, and the manager
gives them back.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import final

from kvcore.block import Block
from kvcore.groups import FullAttention, LayerGroup


@final
class BlockTable:
    """One group's blocks of one sequence.

    Attributes:
        group: what its layers see.
        block_size: tokens a block.
        forgets: whether its layers lose sight of anything.
        blocks: its blocks in order, the null block where one was given back.
        block_ids: their ids, as `array("i")`.
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
        self.block_ids = array("i")
        self.num_null = 0
        self.num_published = 0

    def num_missing(self, num_tokens: int) -> int:
        """Return how many blocks it lacks to hold `num_tokens` tokens. O(1)."""
        return max(0, -(-num_tokens // self.block_size) - len(self.blocks))

    def grow(self, blocks: Sequence[Block]) -> None:
        """Append blocks. O(len(blocks))."""
        self.blocks.extend(blocks)
        self.block_ids.extend([block.block_id for block in blocks])

    def start(self, null: Block, num_null: int, blocks: Sequence[Block]) -> None:
        """Fill an empty table: `num_null` null entries, then published blocks."""
        self.grow([null] * num_null)
        self.grow(blocks)
        self.num_null = num_null
        self.num_published = len(self.blocks)

    def cut(self, keep: int) -> list[Block]:
        """Keep the first `keep` entries; return the blocks that left, in order."""
        left = self.blocks[max(keep, self.num_null) :]
        del self.blocks[keep:], self.block_ids[keep:]
        self.num_null = min(self.num_null, keep)
        self.num_published = min(self.num_published, keep)
        return left

    def forget(self, null: Block, before: int) -> list[Block]:
        """Make the entries before `before` null; return the blocks that left, in order."""
        left = self.blocks[self.num_null : before]
        for index in range(self.num_null, before):
            self.blocks[index] = null
            self.block_ids[index] = null.block_id
        self.num_null = max(self.num_null, before)
        return left
