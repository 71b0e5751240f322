"""The host tier: copies in host memory, a bounded number of bytes.

Decides: what goes when the bytes are used up. A payload is copied once when it is put, and checked
against its checksum when it is returned, because memory that was overwritten by mistake must be a
miss too. Safe for several threads.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, SupportsIndex, final

from kvcore.tiers.record import Key, Meaning, checksum_of
from kvcore.tiers.tier import IndexedTier, TierError

ENTRY_BYTES: Final = 512
"""What is counted for a copy beside its payload: its key, checksum and places in the order."""


@final
class HostTier(IndexedTier[tuple[bytes, bytes, int]]):
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

    def __init__(self, capacity_bytes: SupportsIndex) -> None:
        super().__init__("host", capacity_bytes)

    def start(self, meaning: Meaning, largest: int) -> None:
        """See `Tier.start`. It begins empty, so the meaning of its copies is always ours."""
        del meaning
        if self.stats.capacity_bytes < largest + ENTRY_BYTES:
            raise TierError(
                f"host tier: wanted room for a copy of {largest:,} bytes, got "
                f"{self.stats.capacity_bytes:,} in all"
            )

    def get(self, key: Key, length: int) -> memoryview | None:
        """See `Tier.get`."""
        found = self._entries.get(key)
        if found is None:
            return None
        payload, checksum, _ = found
        is_short = len(payload) != length
        if is_short or checksum_of(payload) != checksum:
            with self._lock:
                self.stats.faults["short" if is_short else "corrupted"] += 1
                if self._entries.get(key) is found:
                    self._drop(key)
            return None
        with self._lock:
            self._note_hit(key, length)
        return memoryview(payload)

    def put(self, key: Key, payload: memoryview, priority: int, epoch: int) -> bool:
        """See `Tier.put`."""
        size = len(payload) + ENTRY_BYTES
        if epoch != self.epoch or size > self.stats.capacity_bytes:
            return False
        if key in self._entries:
            return True
        content = bytes(payload)
        checksum = checksum_of(content)
        with self._lock:
            if epoch != self.epoch:
                return False
            if key in self._entries:
                return True
            while self.stats.used_bytes + size > self.stats.capacity_bytes:
                self._drop(self._order.oldest())
                self.stats.num_evicted += 1
            self._insert(key, (content, checksum, self._next_number), priority)
            self._next_number += 1
            self.stats.used_bytes += size
            self._note_stored(len(content))
        return True

    def forget(self, since: int, keys: Collection[Key]) -> None:
        """See `Tier.forget`."""
        with self._lock:
            self.epoch += 1
            for key, (_, _, number) in [*self._entries.items()]:
                if number >= since or key in keys:
                    self._drop(key)

    def clear(self) -> None:
        """See `Tier.clear`. O(1)."""
        with self._lock:
            self.epoch += 1
            self._remove_all()
            self.stats.used_bytes = 0

    def close(self) -> None:
        """See `Tier.close`; a host tier is gone then."""
        self.clear()

    def _drop(self, key: Key) -> None:
        payload, _, _ = self._remove(key)
        self.stats.used_bytes -= len(payload) + ENTRY_BYTES
