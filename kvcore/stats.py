"""What the allocator did, as plain numbers. A snapshot: it never changes after it was taken."""

from __future__ import annotations

from dataclasses import dataclass

from kvcore.lifetimes import LifetimeStats


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
        num_slots: slots of the used blocks, leased ones included: what those tokens really take.
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
