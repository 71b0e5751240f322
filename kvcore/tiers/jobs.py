"""Jobs: copies on their way between the pool and the tiers, on any thread.

A job is begun and ended on the thread of the pool, and `run` may run on another. The blocks of a
job belong to a lease until it is ended. `cancel` may be called at any time: when it returns, the
job touches no block any more, however slow a device is, so its blocks may be reused at once. A job
of an earlier epoch, before the tiers were cleared, neither serves nor keeps anything.

Does not know: sequences, when a transfer is worth it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, final

from kvcore.lease import Lease
from kvcore.tiers.record import Key
from kvcore.tiers.tier import Tier


class BlockMover(Protocol):
    """Reads and writes whole blocks of the KV cache; called on the thread that runs a job.

    What it reads was computed by steps sent before the job was begun, and what it writes is read
    by steps that are sent after `run` has returned: on a GPU it has to see to both.
    """

    def read_block(self, block_id: int) -> bytes | bytearray | memoryview:
        """Return the bytes of a block; they are copied before the next call."""
        ...

    def write_block(self, block_id: int, data: memoryview) -> None:
        """Write the bytes of a block; when it returns, they are there."""
        ...


@dataclass(frozen=True, slots=True)
class Part:
    """A content, and its blocks: one, or the pieces of a state in their order.

    Attributes:
        key: what it is.
        block_ids: where it is, or is to be.
        priority: of its retention.
    """

    key: Key
    block_ids: tuple[int, ...]
    priority: int = 0


class _Job:
    """What loads and stores share.

    Attributes:
        parts: the contents to move.
        lease: holds their blocks.
        is_done: whether `run` has returned.
        num_bytes: bytes that were moved.
    """

    def __init__(
        self, parts: Sequence[Part], lease: Lease, tiers: Sequence[Tier], mover: BlockMover
    ) -> None:
        self.parts = tuple(parts)
        self.lease = lease
        self.is_done = False
        self.num_bytes = 0
        self._tiers = [(tier, tier.epoch) for tier in tiers]
        self._mover = mover
        self._is_cancelled = False
        self._lock = threading.Lock()  # held while a block is touched

    def _may_go_on(self) -> bool:
        """Whether its blocks may be touched. O(1)."""
        return not self._is_cancelled

    @property
    def is_stale(self) -> bool:
        """Whether the tiers were cleared since it was begun. O(tiers)."""
        return any(tier.epoch != epoch for tier, epoch in self._tiers)

    def cancel(self) -> None:
        """Touch no block from now on. Waits at most until one block is copied."""
        with self._lock:
            self._is_cancelled = True


@final
class LoadJob(_Job):
    """Copies of the first tokens of a sequence, from the tiers to reserved blocks.

    Attributes:
        num_tokens: tokens that it brings.
        num_found: for each tier the number of contents that were loaded from it.
        has_succeeded: whether every content is in its blocks.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        lease: Lease,
        tiers: Sequence[Tier],
        mover: BlockMover,
        block_bytes: int,
        num_tokens: int,
    ) -> None:
        super().__init__(parts, lease, tiers, mover)
        self.num_tokens = num_tokens
        self.num_found = {tier.name: 0 for tier in tiers}
        self.has_succeeded = False
        self._block_bytes = block_bytes

    @property
    def is_whole(self) -> bool:
        """Whether it is done, and every content is in its blocks and counts. O(tiers)."""
        return self.is_done and self.has_succeeded and not self.is_stale

    def run(self) -> None:
        """Load all contents; the first that is nowhere ends it. O(bytes)."""
        try:
            self.has_succeeded = all(map(self._load, self.parts))
        finally:
            self.is_done = True

    def _load(self, part: Part) -> bool:
        size = self._block_bytes
        length = size * len(part.block_ids)
        for place, (tier, _) in enumerate(self._tiers):
            if not self._may_go_on() or self.is_stale:
                return False
            payload = tier.get(part.key, length)
            if payload is None:
                continue
            for number, block_id in enumerate(part.block_ids):
                with self._lock:
                    if not self._may_go_on():
                        return False
                    self._mover.write_block(block_id, payload[number * size : (number + 1) * size])
            self.num_found[tier.name] += 1
            self.num_bytes += length
            for faster, epoch in self._tiers[:place]:
                faster.put(part.key, payload, part.priority, epoch)
            return True
        return False


@final
class StoreJob(_Job):
    """Copies of published contents, from their blocks to all tiers."""

    def run(self) -> None:
        """Store what is not stored yet; a tier that refuses is left out. O(bytes)."""
        try:
            for part in self.parts:
                self._store(part)
        finally:
            self.is_done = True

    def _store(self, part: Part) -> None:
        wanting = [(tier, epoch) for tier, epoch in self._tiers if not tier.contains(part.key)]
        if not wanting or not self._may_go_on() or self.is_stale:
            return
        pieces: list[bytes] = []
        for block_id in part.block_ids:
            with self._lock:
                if not self._may_go_on():
                    return
                pieces.append(bytes(self._mover.read_block(block_id)))
        payload = memoryview(pieces[0] if len(pieces) == 1 else b"".join(pieces))
        for tier, epoch in wanting:
            if tier.put(part.key, payload, part.priority, epoch):
                self.num_bytes += len(payload)
