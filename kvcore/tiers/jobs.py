"""Jobs: copies on their way between the pool and the tiers, on any thread.

A job is begun and ended on the thread of the pool, and `run` may run on another. The blocks of a
job belong to a lease until it is ended. `cancel` may be called at any time: when it returns, the
job touches no block any more, however slow a device is, so its blocks may be reused at once. A job
of an earlier epoch, before the tiers were cleared, neither serves nor keeps anything.

Bytes move in batches, each in one call of the mover between blocks of the device and blocks of host
memory. Other tiers read and write the latter.

Does not know: sequences, when a transfer is worth it.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import cast, final

from kvcore.lease import Lease
from kvcore.tiers.host import HostTier
from kvcore.tiers.host_blocks import HostBlocks, HostCopy, Wait
from kvcore.tiers.record import Key
from kvcore.tiers.tier import Tier


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


@dataclass(slots=True, eq=False)
class _Batch:
    """Contents that are loaded at once.

    Attributes:
        parts: the contents.
        found: for each the place of the tier that has it, and the copy, held; None: not yet.
        reads: what is still to be read.
        move: waits for its move; None: it has not begun.
    """

    parts: Sequence[Part]
    found: list[tuple[int, HostCopy] | None]
    reads: Generator[None]
    move: Wait | None = None


class _Job:
    """What loads and stores share.

    Attributes:
        parts: the contents to move.
        lease: holds their blocks.
        is_done: whether `run` has returned.
        num_bytes: bytes that were moved.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        lease: Lease,
        tiers: Sequence[Tier],
        blocks: HostBlocks,
        most_blocks: int,
    ) -> None:
        self.parts = tuple(parts)
        self.lease = lease
        self.is_done = False
        self.num_bytes = 0
        self._tiers = [(tier, tier.epoch) for tier in tiers]
        self._blocks = blocks
        self._most = most_blocks  # that move at once
        self._is_cancelled = False
        self._lock = threading.Lock()  # held while a move begins
        self._moves: list[Wait] = []  # those that have begun

    def _may_go_on(self) -> bool:
        """Return whether its blocks may be touched. O(1)."""
        return not self._is_cancelled

    @property
    def is_stale(self) -> bool:
        """True if the tiers were cleared since it was begun. O(tiers)."""
        return any(tier.epoch != epoch for tier, epoch in self._tiers)

    def cancel(self) -> None:
        """Touch no block from now on. Waits at most until two batches are copied."""
        with self._lock:
            self._is_cancelled = True
            moves = [*self._moves]
        for wait in moves:
            wait()

    def _batches(self) -> Iterator[list[Part]]:
        """Yield the contents that move at once."""
        batch: list[Part] = []
        num_blocks = 0
        for part in self.parts:
            if batch and num_blocks + len(part.block_ids) > self._most:
                yield batch
                batch, num_blocks = [], 0
            batch.append(part)
            num_blocks += len(part.block_ids)
        if batch:
            yield batch

    def _begin_move(
        self, parts: Sequence[Part], copies: Sequence[HostCopy], *, is_load: bool
    ) -> Wait | None:
        """Begin to move a batch; None: the job was cancelled."""
        block_ids = [block_id for part in parts for block_id in part.block_ids]
        host_ids = [host_id for copy in copies for host_id in copy.ids]
        mover = self._blocks.mover
        with self._lock:
            if not self._may_go_on():
                return None
            wait = mover.load(host_ids, block_ids) if is_load else mover.store(block_ids, host_ids)
            self._moves.append(wait)
        return wait

    def _end_move(self, wait: Wait, parts: Sequence[Part], copies: Sequence[HostCopy]) -> bool:
        """Wait for a move; note the sums of copies that have none, and drop those that are wrong.

        Returns:
            Whether none is.
        """
        found, is_right, begin = wait(), True, 0
        with self._lock:
            self._moves.remove(wait)
        for part, copy in zip(parts, copies, strict=True):
            sums = tuple(found[begin : begin + len(copy.ids)])
            begin += len(sums)
            if not copy.sums:
                copy.sums = sums
            elif copy.sums != sums:
                is_right = False
                for tier, _ in self._tiers:
                    if tier.in_blocks:
                        cast("HostTier", tier).spoil(part.key, copy)
        return is_right

    def _put(self, part: Part, copy: HostCopy, tiers: Sequence[tuple[Tier, int]]) -> None:
        """Have tiers keep a copy; one that refuses is left out. O(bytes)."""
        for tier, epoch in tiers:
            if tier.in_blocks:
                is_kept = cast("HostTier", tier).adopt(part.key, copy, part.priority, epoch)
            else:
                payload = self._blocks.payload(copy)
                is_kept = tier.put(part.key, payload, part.priority, epoch)
            if is_kept:
                self.num_bytes += len(copy.ids) * self._blocks.block_bytes


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
        blocks: HostBlocks,
        most_blocks: int,
        num_tokens: int,
    ) -> None:
        super().__init__(parts, lease, tiers, blocks, most_blocks)
        self.num_tokens = num_tokens
        self.num_found = {tier.name: 0 for tier in tiers}
        self.has_succeeded = False

    @property
    def is_whole(self) -> bool:
        """True if it is done, and every content is in its blocks and counts. O(tiers)."""
        return self.is_done and self.has_succeeded and not self.is_stale

    def run(self) -> None:
        """Load all contents; the first that is nowhere ends it. O(bytes)."""
        read: list[_Batch] = []
        sent: list[_Batch] = []
        try:
            for parts in self._batches():  # one is read, while two before it move
                read.append(self._begin(parts))
                if len(read) > 1 and not self._go_on(read, sent):
                    return
            while read or sent:
                if not self._go_on(read, sent):
                    return
            self.has_succeeded = True
        finally:
            for batch in (*read, *sent):
                self._end(batch)
            self.is_done = True

    def _go_on(self, read: list[_Batch], sent: list[_Batch]) -> bool:
        """Send the oldest batch that is read, and take in the one that was sent before it."""
        if read:
            sent.append(read.pop(0))
            if not self._send(sent[-1]):
                return False
        return (bool(read) and len(sent) == 1) or self._take_in(sent)

    def _begin(self, parts: Sequence[Part]) -> _Batch:
        found: list[tuple[int, HostCopy] | None] = [None] * len(parts)
        batch = _Batch(parts, found, self._read(parts, found))
        next(batch.reads, None)
        return batch

    def _read(
        self, wanted: Sequence[Part], found: list[tuple[int, HostCopy] | None]
    ) -> Generator[None]:
        """Find each content in the first tier that has it; yields while a slow one reads."""
        size = self._blocks.block_bytes
        for place, (tier, _) in enumerate(self._tiers):
            missing = [number for number, one in enumerate(found) if one is None]
            if not missing or not self._may_go_on() or self.is_stale:
                return
            parts = [wanted[number] for number in missing]
            if tier.in_blocks:
                for number, part in zip(missing, parts, strict=True):
                    held = cast("HostTier", tier).hold(part.key, size * len(part.block_ids))
                    found[number] = None if held is None else (place, held)
                continue
            copies = self._blocks.take([len(part.block_ids) for part in parts])
            if not copies:
                return
            targets = [self._blocks.views(copy) for copy in copies]
            wait = tier.begin_read([part.key for part in parts], targets)
            try:
                yield
            finally:  # until then its memory is written
                for number, copy, is_there in zip(missing, copies, wait(), strict=True):
                    if is_there:
                        found[number] = place, copy
                    else:
                        self._blocks.release(copy)

    def _send(self, batch: _Batch) -> bool:
        """Begin to move a batch when all of it is there; whether it is."""
        for _ in batch.reads:
            pass
        copies = [one[1] for one in batch.found if one is not None]
        if len(copies) == len(batch.parts):
            batch.move = self._begin_move(batch.parts, copies, is_load=True)
        return batch.move is not None

    def _take_in(self, sent: list[_Batch]) -> bool:
        """Wait for the oldest move; a copy whose bytes have changed is looked for again."""
        while (wait := sent[0].move) is not None:
            found = [one for one in sent[0].found if one is not None]
            sent[0].move = None
            if self._end_move(wait, sent[0].parts, [copy for _, copy in found]):
                self._note(sent[0].parts, found)
                self._end(sent.pop(0))
                return True
            self._end(sent[0])
            sent[0] = self._begin(sent[0].parts)
            self._send(sent[0])
        return False

    def _end(self, batch: _Batch) -> None:
        """Hold its copies no more, after what still reads or moves them."""
        batch.reads.close()
        if batch.move is not None:
            batch.move()
        for one in batch.found:
            if one is not None:
                self._blocks.release(one[1])

    def _note(self, parts: Sequence[Part], found: Sequence[tuple[int, HostCopy]]) -> None:
        """Count what was loaded, and have faster tiers keep it."""
        for part, (place, copy) in zip(parts, found, strict=True):
            self.num_found[self._tiers[place][0].name] += 1
            self.num_bytes += len(copy.ids) * self._blocks.block_bytes
            self._put(part, copy, self._tiers[:place])


@final
class StoreJob(_Job):
    """Copies of published contents, from their blocks to all tiers."""

    def run(self) -> None:
        """Store what is not stored yet; a tier that refuses is left out. O(bytes)."""
        try:
            for parts in self._batches():
                self._store([part for part in parts if self._lacking(part)])
        finally:
            self.is_done = True

    def _lacking(self, part: Part) -> list[tuple[Tier, int]]:
        """Return the tiers that have no copy of a content. O(tiers)."""
        return [(tier, epoch) for tier, epoch in self._tiers if not tier.contains(part.key)]

    def _store(self, parts: Sequence[Part]) -> None:
        if not parts or not self._may_go_on() or self.is_stale:
            return
        sizes = [len(part.block_ids) for part in reversed(parts)]  # in the order of the tokens
        copies = self._blocks.take(sizes)[::-1]
        try:
            move = self._begin_move(parts, copies, is_load=False) if copies else None
            if move is not None and self._end_move(move, parts, copies):
                for part, copy in zip(parts, copies, strict=True):
                    self._put(part, copy, self._lacking(part))
        finally:
            for copy in copies:
                self._blocks.release(copy)
