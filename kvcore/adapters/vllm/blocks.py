"""The view of blocks that vLLM's scheduler gets: tables of ids, and the face of a pool.

vLLM's own classes here have queues, hashes and reference counts. Its scheduler asks for ids and
counts alone, and outputs that are kept beside the tokens for what is cached under a hash. Imports
nothing of vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvcore import Block, KVCacheManager, Lease

Ids = Sequence[Sequence[int]]
"""Block ids, for each layer group."""


class BlockView(NamedTuple):
    """A block, for callers that want more than ids, which vLLM's scheduler does not."""

    block_id: int

    @property
    def is_null(self) -> bool:
        """True if this is the null block, in place of one that no layer sees any more."""
        return self.block_id == 0


class Blocks:
    """The blocks that a call has appended to a request's tables, or all of them."""

    __slots__ = ("_ids",)

    def __init__(self, ids: Ids) -> None:
        self._ids = ids

    @property
    def blocks(self) -> tuple[list[BlockView], ...]:
        """The blocks of each layer group. O(blocks)."""
        return tuple([[BlockView(block_id) for block_id in ids] for ids in self._ids])

    def get_block_ids(
        self,
        allow_none: bool = False,  # noqa: FBT001, FBT002  # vLLM's signature
        *,
        group_ids: Sequence[int] | None = None,
    ) -> tuple[list[int], ...] | None:
        """Return new lists of the ids of each group; None, if wanted, for none at all."""
        ids = self._ids if group_ids is None else [self._ids[group] for group in group_ids]
        if allow_none and not any(ids):
            return None
        return tuple([list(group) for group in ids])

    def new_empty(self) -> Blocks:
        """Return none, of as many groups."""
        return Blocks(((),) * len(self._ids))


class PoolFace:
    """The part of vLLM's `block_pool` that its scheduler and connectors use.

    vLLM keeps outputs beside the tokens (routed experts) by its own block hashes. Where a request
    has them, the blocks of one group are known by them here; the hits of kvcore never depend on it.
    """

    def __init__(self, kv: KVCacheManager, hash_block_size: int) -> None:
        self._kv = kv
        self._hashed: dict[bytes, Block] = {}
        self._hashes: dict[int, bytes] = {}
        self.num_gpu_blocks = kv.num_blocks
        self.hash_block_size = hash_block_size

    def note(self, block_hash: bytes, block: Block) -> None:
        """Remember which block has the content of a hash. O(1)."""
        before = self._hashes.get(block.block_id)
        if before is not None and self._hashed.get(before) is block:
            del self._hashed[before]
        self._hashes[block.block_id] = block_hash
        self._hashed[block_hash] = block

    def get_cached_block(
        self,
        block_hash: bytes,
        kv_cache_group_ids: Sequence[int],  # noqa: ARG002  # vLLM's signature
    ) -> list[BlockView] | None:
        """Return the block that can be hit under one of vLLM's hashes; None: there is none."""
        block = self._hashed.get(block_hash)
        if block is None or block.node is None:
            return None
        return [BlockView(block.block_id)]

    def get_num_free_blocks(self) -> int:
        """Return how many blocks could be handed out. O(1)."""
        return self._kv.num_free_blocks

    def get_usage(self) -> float:
        """Return which part of the blocks is held, from 0 to 1. O(1)."""
        usable = self._kv.num_usable_blocks
        return 1.0 - self._kv.num_free_blocks / usable if usable else 0.0

    def free_blocks(self, leases: Iterable[Lease]) -> None:
        """Give back what `pop_blocks_for_free` has returned. O(blocks)."""
        for lease in leases:
            lease.end()
