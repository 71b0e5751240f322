"""A sequence: the handle that an engine holds, between `open` and `close`.

It stores its lengths, and nothing ever infers one from another:
`num_cached_tokens <= num_computed_tokens <= num_tokens`, and the table covers the computed and the
reserved ones. The manager alone changes it; after `close` every call with it is a typed error.
"""

from __future__ import annotations

from array import array
from typing import final

from kvcore.block import Block, BlockId
from kvcore.hashing import NameChain


@final
class KVSequence:
    """One request's tokens and the blocks that hold their KV.

    Attributes:
        seq_id: counts the sequences of its manager from 0.
        num_computed_tokens: tokens whose KV is written; the next step computes from here.
        num_cached_tokens: how many of them `open` found in the cache.
        is_open: False once it is closed.
        packed: its tokens, as `array("I")`. Read it, do not write it.
        blocks: its blocks, in order. Read it, do not write it.
        block_ids: their ids, as `array("i")`. Read it, do not write it.
        namespace_key: the encoded namespace, or None: never cached.
        num_published_blocks: how many blocks from the start can be hit by others.
        chain: its blocks' names, once somebody has asked for them.
        owner: the manager that opened it.
    """

    __slots__ = (
        "block_ids",
        "blocks",
        "chain",
        "is_open",
        "namespace_key",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_published_blocks",
        "owner",
        "packed",
        "seq_id",
    )

    def __init__(
        self, owner: object, seq_id: int, packed: array[int], namespace_key: bytes | None
    ) -> None:
        self.owner = owner
        self.seq_id = seq_id
        self.packed = packed
        self.namespace_key = namespace_key
        self.blocks: list[Block] = []
        self.block_ids = array("i")
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.num_published_blocks = 0
        self.is_open = True
        self.chain: NameChain | None = None

    @property
    def num_tokens(self) -> int:
        """How many tokens it has, computed or not. O(1)."""
        return len(self.packed)

    @property
    def num_blocks(self) -> int:
        """How many blocks it holds. O(1)."""
        return len(self.blocks)

    @property
    def tokens(self) -> tuple[int, ...]:
        """A copy of its tokens. O(num_tokens)."""
        return tuple(self.packed)

    @property
    def block_table(self) -> tuple[BlockId, ...]:
        """A copy of its block ids, in order. O(num_blocks)."""
        return tuple(BlockId(block_id) for block_id in self.block_ids)

    def __repr__(self) -> str:
        state = "open" if self.is_open else "closed"
        return (
            f"KVSequence({self.seq_id}, {state}, {self.num_tokens} tokens, "
            f"{self.num_computed_tokens} computed, {self.num_blocks} blocks)"
        )
