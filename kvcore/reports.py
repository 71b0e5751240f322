"""The values that calls return. They are snapshots and never change afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import SupportsIndex

from kvcore.arguments import as_int
from kvcore.block import Block, BlockId
from kvcore.eviction.lifetimes import LifetimeStats


@dataclass(frozen=True, slots=True)
class Plan:
    """The blocks that opening a sequence and reserving all its tokens would take now.

    Attributes:
        num_cached_tokens: tokens that would be found computed.
        num_new_blocks: blocks to be taken for the rest.
        num_revived_blocks: cached blocks that are free now and leave the free queue too.
        num_free_blocks: blocks free now.
        num_deferred_blocks: blocks held by leases alone; they become free when the leases end.
        found: for each layer group the blocks that would be found; `cached_block_ids` says which.
    """

    num_cached_tokens: int
    num_new_blocks: int
    num_revived_blocks: int
    num_free_blocks: int
    num_deferred_blocks: int = 0
    found: Sequence[Sequence[Block]] = field(default=(), repr=False, compare=False)

    @property
    def cached_block_ids(self) -> tuple[tuple[BlockId, ...], ...]:
        """For each layer group the ids of the blocks that would be found, in order. O(those).

        For a sliding window these are only the blocks that the next token sees; without a look-up
        the result is empty. The blocks are not held: the next call may reuse them.
        """
        return tuple([tuple([block.block_id for block in blocks]) for blocks in self.found])

    @property
    def fits(self) -> bool:
        """True if `open` and `reserve` of the whole sequence would succeed now."""
        return self.fits_above(0)

    def fits_above(self, watermark: SupportsIndex) -> bool:
        """Say whether it fits and leaves at least `watermark` blocks free for others. O(1).

        Raises:
            InvalidArgumentError: a negative number.
        """
        taken = self.num_new_blocks + self.num_revived_blocks
        return taken + as_int("watermark", watermark, 0) <= self.num_free_blocks


@dataclass(frozen=True, slots=True)
class CopyOrder:
    """A copy of KV that the caller must make before it writes to either block.

    Attributes:
        src: the block to copy from.
        dst: the block to copy to.
        num_tokens: the number of its first tokens.
        group: the layer group that both belong to.
    """

    src: BlockId
    dst: BlockId
    num_tokens: int
    group: int


@dataclass(unsafe_hash=True, slots=True)  # frozen costs three times as much to make
class Growth:
    """Blocks that a step appended to one table.

    Attributes:
        index: the place of the sequence in the step.
        group: the layer group of the table.
        block_ids: the appended block ids.
    """

    index: int
    group: int
    block_ids: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True)
class ResetReport:
    """The result of `reset`.

    Attributes:
        num_forgotten_blocks: blocks whose content cannot be hit any more.
        num_used_blocks: blocks that open sequences still hold.
        num_open_sequences: the number of open sequences; they continue and share nothing any more.
    """

    num_forgotten_blocks: int
    num_used_blocks: int
    num_open_sequences: int


@dataclass(slots=True)
class LookUps:
    """The tokens of look-ups in the prefix cache, and those that were hits."""

    num_tokens: int = 0
    num_hit_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Stats:
    """A manager's counters.

    Attributes:
        num_blocks: blocks in the cache, the null block included.
        num_used_blocks: held now.
        num_free_blocks: free now, those with content that can still be hit included.
        num_cached_blocks: published now, held or free.
        peak_used_blocks: the most that were held at once.
        num_queried_tokens: tokens of all sequences opened in a namespace with caching on.
        num_hit_tokens: those of them that were found computed.
        num_evicted_blocks: published blocks that were reused for something else.
        num_allocated_blocks: blocks handed out; hits are not among them.
        num_resumed_tokens: tokens of sequences that were opened as resumed: work done before,
            queried again; they are not among the queried ones, so a preemption is no hit.
        num_resumed_hit_tokens: those of them that were found computed.
        num_computed_tokens: tokens of the open sequences whose KV is written, shared ones counted
            for each.
        num_slots: slots of the used blocks, leased ones included: the memory of those tokens.
        lifetimes: durations of blocks, None unless recorded.
    """

    num_blocks: int
    num_used_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    peak_used_blocks: int
    num_queried_tokens: int
    num_hit_tokens: int
    num_evicted_blocks: int
    num_allocated_blocks: int
    num_resumed_tokens: int = 0
    num_resumed_hit_tokens: int = 0
    num_computed_tokens: int = 0
    num_slots: int = 0
    lifetimes: LifetimeStats | None = None

    @property
    def hit_rate(self) -> float:
        """Hit tokens of queried ones, 0 to 1; 0 before the first query."""
        return self.num_hit_tokens / self.num_queried_tokens if self.num_queried_tokens else 0.0
