"""Histograms of block lifetimes and reuse gaps, for choosing the size of a cache.

Times are in steps, as `tick` counts them. Three durations are recorded:

- lifetime: from the publication of a block to its eviction;
- idle time: from the last release of an evicted block to its eviction. Short idle times mean that
  the cache is too small;
- reuse gap: from the release of a block to its next hit. A cache is useful where reuse gaps are
  shorter than idle times.

Nothing is recorded unless the manager was created with `record_lifetimes`.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Final, final

MAX_STEP: Final = 2**62 - 1
"""The largest step; differences of steps fit in 64 bits."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """Durations in steps.

    Attributes:
        count: the number of durations.
        total: their sum.
        maximum: the longest; 0 if there is none.
        buckets: the number of durations of 0 steps, of 1, of 2 to 3, of 4 to 7, and so on.
    """

    count: int
    total: int
    maximum: int
    buckets: tuple[int, ...]

    @property
    def mean(self) -> float:
        """The mean duration; 0 if there is none."""
        return self.total / self.count if self.count else 0.0


@dataclass(frozen=True, slots=True)
class LifetimeStats:
    """The three histograms at one moment."""

    lifetime: Histogram
    idle_before_eviction: Histogram
    reuse_gap: Histogram


@final
class LifetimeRecorder:
    """Three histograms, and for every block when it was published and freed."""

    __slots__ = ("_durations", "_freed_at", "_published_at")

    def __init__(self, num_blocks: int) -> None:
        self._published_at = array("q", bytes(8 * num_blocks))
        self._freed_at = array("q", bytes(8 * num_blocks))
        # For each: count, total, maximum; then a bucket for each length in bits.
        self._durations = ([0] * (3 + 64), [0] * (3 + 64), [0] * (3 + 64))

    def published(self, block_id: int, now: int) -> None:
        """Record that a block was published. O(1)."""
        self._published_at[block_id] = now

    def freed(self, block_id: int, now: int) -> None:
        """Record that a published block was freed. O(1)."""
        self._freed_at[block_id] = now

    def revived(self, block_id: int, now: int) -> None:
        """Record that a free block was hit. O(1)."""
        _add(self._durations[2], now - self._freed_at[block_id])

    def evicted(self, block_id: int, now: int) -> None:
        """Record that a published block was evicted. O(1)."""
        _add(self._durations[0], now - self._published_at[block_id])
        _add(self._durations[1], now - self._freed_at[block_id])

    def stats(self) -> LifetimeStats:
        """Return a snapshot. O(buckets)."""
        lifetime, idle, gap = [_histogram(counts) for counts in self._durations]
        return LifetimeStats(lifetime, idle, gap)


def _add(counts: list[int], duration: int) -> None:
    counts[0] += 1
    counts[1] += duration
    counts[2] = max(counts[2], duration)
    counts[3 + duration.bit_length()] += 1


def _histogram(counts: list[int]) -> Histogram:
    count, total, maximum = counts[:3]
    used = maximum.bit_length() + 1 if count else 0
    return Histogram(count, total, maximum, tuple(counts[3 : 3 + used]))
