"""The host tier: copies in host memory, a bounded number of bytes.

Decides: what goes when the bytes are used up. Its copies lie in blocks of host memory
(`host_blocks.py`), from which a load moves many at once; jobs compare their sums, because memory
that was overwritten by mistake must be a miss too. Safe for several threads.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Final, SupportsIndex, final

from kvcore.tiers.host_blocks import HostBlocks, HostCopy, OneByOne
from kvcore.tiers.record import Key, Meaning
from kvcore.tiers.tier import IndexedTier, TierError, read_each

ENTRY_BYTES: Final = 512
"""The bytes that a copy counts beside its payload: its key, sums and places in the order."""


@final
class HostTier(IndexedTier[HostCopy]):
    """Copies in host memory.

    Args:
        capacity_bytes: the most bytes that payloads, and 512 bytes for each, may take.

    Attributes:
        name: "host".
        stats: its counters.
        epoch: how often it was cleared.

    Raises:
        InvalidArgumentError: the capacity is not positive.
    """

    medium = "CPU"
    in_blocks = True

    def __init__(self, capacity_bytes: SupportsIndex) -> None:
        super().__init__("host", capacity_bytes)
        self._blocks: HostBlocks | None = None
        self._largest = 0

    def start(self, meaning: Meaning, largest: int) -> None:
        """See `Tier.start`. It begins empty, so the meaning of its copies is always ours."""
        del meaning
        if self.stats.capacity_bytes < largest + ENTRY_BYTES:
            raise TierError(
                f"host tier: wanted room for a copy of {largest:,} bytes, got "
                f"{self.stats.capacity_bytes:,} in all"
            )
        self._largest = largest

    def most_blocks(self, largest: int, block_bytes: int) -> int:
        """Return how many blocks its copies take at most; the largest has these bytes. O(1)."""
        return self.stats.capacity_bytes * (largest // block_bytes) // (largest + ENTRY_BYTES)

    @property
    def blocks(self) -> HostBlocks:
        """The memory; that of its manager, or without one it has memory alone. O(1)."""
        if self._blocks is None:
            size = self._largest
            most = self.most_blocks(size, size) + 1  # one is written before another one goes
            self._blocks = HostBlocks(OneByOne(None, size), most, size)
        return self._blocks

    def use(self, blocks: HostBlocks) -> None:
        """Keep copies in these blocks. Called once, before there are any. O(1)."""
        self._blocks = blocks

    def hold(self, key: Key, length: int) -> HostCopy | None:
        """Return a copy of `length` bytes, held; its sums are still to be compared. O(1)."""
        with self._lock:
            copy = self._entries.get(key)
            if copy is None:
                return None
            if len(copy.ids) * self.blocks.block_bytes != length:
                self.stats.faults["short"] += 1
                self._drop(key)
                return None
            self.blocks.hold(copy)
            self._note_hit(key, length)
            return copy

    def adopt(self, key: Key, copy: HostCopy, priority: int, epoch: int) -> bool:
        """Keep a copy that is held; whether it has one now. As `put`, without a byte moved."""
        length = len(copy.ids) * self.blocks.block_bytes
        size = length + ENTRY_BYTES
        with self._lock:
            if epoch != self.epoch or size > self.stats.capacity_bytes:
                return False
            if key in self._entries:
                return True
            while self.stats.used_bytes + size > self.stats.capacity_bytes:
                self._drop(self._order.oldest())
                self.stats.num_evicted += 1
            copy.number = self._next_number
            self.blocks.keep(copy, is_kept=True)
            self._insert(key, copy, priority)
            self._next_number += 1
            self.stats.used_bytes += size
            self._note_stored(length)
        return True

    def spoil(self, key: Key, copy: HostCopy) -> None:
        """Drop a copy whose bytes have changed. O(1)."""
        with self._lock:
            self.stats.faults["corrupted"] += 1
            if self._entries.get(key) is copy:
                self._drop(key)

    def get(self, key: Key, length: int) -> memoryview | None:
        """Return a copy, or None, as `Tier.get` does."""
        copy = self.hold(key, length)
        if copy is None:
            return None
        try:
            payload = bytes(self.blocks.payload(copy))
            if self.blocks.is_right(copy):
                return memoryview(payload)
        finally:
            self.blocks.release(copy)
        self.spoil(key, copy)
        return None

    def probe(self, blocks: HostBlocks, copies: Sequence[HostCopy]) -> int:
        """Move some blocks here, which takes as long as the way back, as `Tier.probe` wants."""
        ids = [host_id for copy in copies for host_id in copy.ids]
        blocks.mover.store(range(1, len(ids) + 1), ids)()
        return len(ids) * blocks.block_bytes

    def begin_read(
        self, keys: Sequence[Key], targets: Sequence[Sequence[memoryview]]
    ) -> Callable[[], Sequence[bool]]:
        """Begin to read copies: one after the other, when they are waited for."""
        return partial(read_each, self, keys, targets)

    def put(self, key: Key, payload: memoryview, priority: int, epoch: int) -> bool:
        """Store a copy, as `Tier.put` says."""
        if epoch != self.epoch or len(payload) + ENTRY_BYTES > self.stats.capacity_bytes:
            return False
        if key in self._entries:
            return True
        copies = self.blocks.take([-(-len(payload) // self.blocks.block_bytes)])
        if not copies:
            return False
        [copy] = copies
        try:
            self.blocks.fill(copy, payload)
            copy.sums = tuple(self.blocks.mover.sums(copy.ids))
            return self.adopt(key, copy, priority, epoch)
        finally:
            self.blocks.release(copy)

    def forget(self, since: int, keys: Collection[Key]) -> None:
        """See `Tier.forget`."""
        with self._lock:
            self.epoch += 1
            for key, copy in [*self._entries.items()]:
                if copy.number >= since or key in keys:
                    self._drop(key)

    def clear(self) -> None:
        """Drop all copies. O(copies)."""
        with self._lock:
            self.epoch += 1
            copies = [*self._entries.values()]
            self._remove_all()
            self.stats.used_bytes = 0
            for copy in copies:
                self.blocks.keep(copy, is_kept=False)

    def close(self) -> None:
        """See `Tier.close`; a host tier is gone then."""
        self.clear()

    def _drop(self, key: Key) -> None:
        copy = self._remove(key)
        self.stats.used_bytes -= len(copy.ids) * self.blocks.block_bytes + ENTRY_BYTES
        self.blocks.keep(copy, is_kept=False)
