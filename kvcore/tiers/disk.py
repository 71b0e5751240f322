"""The disk tier: copies in append-only segments that survive the process.

Decides: where a record goes, what is evicted, and when a segment is rewritten. Records are appended
to the newest segment. An evicted record stays where it is, as dead bytes, marked in one byte;
when the capacity is reached, the segment with the most dead bytes is compacted: its other records
are copied to the newest segment and the file is deleted. Live records may take seven eighths of the
capacity less two segments, so there are always dead bytes to win, and the room of one segment is
left for the copy.

Invariants: the sizes of all segments together never exceed the capacity, also during a compaction
and after a crash at any write; a record is found exactly if it is whole and of our meaning; one put
moves at most a few segments. A device without space makes the tier smaller; a device that fails
again and again, or a folder that is gone, turns it off. The index is made by reading the headers of
all records at the start; payloads are checked when they are read. Safe for several threads.

No fsync: after a power failure the records of the last seconds may be missing, or wrong, which
their checksums show. After a restart the order is that of writing.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final, SupportsIndex, final

from kvcore.arguments import as_int
from kvcore.tiers.folder import Folder, Segments
from kvcore.tiers.record import (
    DEAD,
    DEAD_OFFSET,
    RECORD_BYTES,
    SEGMENT_BYTES,
    VERSION,
    Header,
    Key,
    Meaning,
    checksum_of,
    decode_header,
    encode_segment,
    fault_of,
    segment_version,
)
from kvcore.tiers.tier import IndexedTier, TierError

_NUM_SEGMENTS: Final = 64
_MAX_SEGMENT_BYTES: Final = 256 << 20
_LEAST_SEGMENTS: Final = 8
_MAX_FAILURES: Final = 8
_FULL: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@dataclass(slots=True)
class _Segment:
    """A file: its size, the bytes of its live records, and their keys in order."""

    size: int
    live: int = 0
    keys: dict[Key, None] = field(default_factory=dict)


@final
class DiskTier(IndexedTier[tuple[Header, int]]):
    """Copies in a folder.

    Args:
        path: the folder; `kvcore-tier` is made in it.
        capacity_bytes: the most bytes that the segments may take.
        segment_bytes: the size of a segment; None: a 64th of the capacity, at most 256 MiB. At
            least one record has room in any case.
        segments: the files, for tests; None: those of `path`.

    Attributes:
        name: "disk".
        stats: its counters.
        epoch: how often it was cleared.

    Raises:
        InvalidArgumentError: the capacity is not positive.
    """

    medium = "STORAGE"

    def __init__(
        self,
        path: str | os.PathLike[str],
        capacity_bytes: SupportsIndex,
        *,
        segment_bytes: SupportsIndex | None = None,
        segments: Segments | None = None,
    ) -> None:
        super().__init__("disk", capacity_bytes)  # an entry: the header, and where it stands
        self._files: Segments = Folder(path) if segments is None else segments
        self._segments: dict[int, _Segment] = {}
        self._active: int | None = None
        self._next_segment = 1
        self._num_failures = 0
        capacity = self.stats.capacity_bytes
        self._segment_bytes = min(capacity // _NUM_SEGMENTS, _MAX_SEGMENT_BYTES)
        if segment_bytes is not None:
            self._segment_bytes = as_int("segment_bytes", segment_bytes, 1)
        self._meaning = Meaning(b"")

    def start(self, meaning: Meaning, largest: int) -> None:
        """See `Tier.start`. O(records): it reads their headers."""
        self._meaning = meaning
        capacity = self.stats.capacity_bytes
        least = SEGMENT_BYTES + RECORD_BYTES + largest
        self._segment_bytes = max(self._segment_bytes, least)
        least = _LEAST_SEGMENTS * self._segment_bytes
        if capacity < least:
            raise TierError(
                f"disk tier: wanted a capacity of at least {least:,} bytes for copies of "
                f"{largest:,}, got {capacity:,}"
            )
        self._files.start()
        try:
            self._scan()
        except OSError as error:
            self._files.close()
            raise TierError(f"disk tier: the folder cannot be read: {error}") from None
        except TierError:
            self._files.close()
            raise

    def get(self, key: Key, length: int) -> memoryview | None:
        """See `Tier.get`."""
        with self._lock:
            found = self._entries.get(key)
            if found is None:
                return None
            header, offset = found
            data = self._read(header, offset)
            if data is None or header.length != length:
                if data is not None:
                    self.stats.faults["short"] += 1
                if key in self._entries:  # not if this failure has turned the tier off
                    self._bury(key)
                return None
            self._note_hit(key, length)
            return memoryview(data)[RECORD_BYTES:]

    def put(self, key: Key, payload: memoryview, priority: int, epoch: int) -> bool:
        """See `Tier.put`. O(length), and amortised the same for compactions."""
        checksum = checksum_of(payload)
        with self._lock:
            if epoch != self.epoch or not self.stats.is_enabled:
                return False
            if key in self._entries:
                self._order.touch(key)
                return True
            try:
                has_room = self._make_room(RECORD_BYTES + len(payload))
                if not has_room or not self.stats.is_enabled:
                    return False
                self._append(key, payload, priority, checksum)
            except OSError as error:
                self._note_failure(error)
                return False
            self._num_failures = 0
            self._note_stored(len(payload))
            return True

    def forget(self, since: int, keys: Collection[Key]) -> None:
        """See `Tier.forget`. Where that cannot be written, all is forgotten."""
        with self._lock:
            self.epoch += 1
            try:
                for key, (header, _) in [*self._entries.items()]:
                    if header.number >= since or key in keys:
                        self._kill(key)
            except OSError as error:
                self._note_failure(error)
                self._clear()

    def clear(self) -> None:
        """See `Tier.clear`. O(segments): their files are deleted."""
        with self._lock:
            self.epoch += 1
            self._clear()

    def _clear(self) -> None:
        self._forget_all()
        for number in [*self._segments]:
            try:
                self._files.cut(number, 0)  # so that nothing is found if it cannot be deleted
                self._delete(number)
            except OSError as error:
                self._note_failure(error)
                self.stats.is_enabled = False

    def close(self) -> None:
        """See `Tier.close`."""
        with self._lock:
            self.epoch += 1
            self.stats.is_enabled = False
            self._forget_all()
            self._files.close()

    # The index

    def _scan(self) -> None:
        """Build the index from the files, oldest first, then evict until the capacity holds."""
        for number, size in sorted(self._files.sizes().items()):
            self._segments[number] = _Segment(size)
            self._next_segment = number + 1
            self._active = number
            try:
                self._scan_segment(number, size)
            except OSError as error:  # its other records are out of reach, the rest is not
                self._note_failure(error)
                self._active = None
        self.stats.used_bytes = sum([segment.size for segment in self._segments.values()])
        for number in [*self._segments]:
            if self.stats.used_bytes <= self.stats.capacity_bytes:
                break
            self._delete(number)
        self._evict(0)

    def _scan_segment(self, number: int, size: int) -> None:
        version = segment_version(self._files.read(number, 0, SEGMENT_BYTES), number)
        if version in ("torn", "corrupted", "stale"):
            self.stats.faults[version] += 1
            self._active = None
            return
        if version != VERSION:
            raise TierError(
                f"disk tier: the folder has segments of version {version}, this kvcore reads "
                f"version {VERSION}: give another folder"
            )
        offset = SEGMENT_BYTES
        while offset < size:
            header = decode_header(self._files.read(number, offset, RECORD_BYTES))
            if isinstance(header, Header) and header.segment != number:
                header = "stale"
            if isinstance(header, Header) and offset + RECORD_BYTES + header.length > size:
                header = "torn"
            if not isinstance(header, Header):
                self.stats.faults[header] += 1
                self._trim(number, offset)
                return
            self._next_number = max(self._next_number, header.number + 1)
            if header.meaning != self._meaning:
                self.stats.faults["foreign"] += 1
            elif not header.is_dead:
                self._add(header, offset)
            offset += RECORD_BYTES + header.length

    def _trim(self, number: int, offset: int) -> None:
        """Remove what follows the last whole record; or never append to that segment."""
        try:
            self._files.cut(number, offset)
            self._segments[number].size = offset
        except OSError:
            self._active = None

    def _add(self, header: Header, offset: int) -> None:
        """Let a record be found, instead of an older one of the same key."""
        if header.key in self._entries:
            self._drop(header.key)
        self._insert(header.key, (header, offset), header.priority)
        segment = self._segments[header.segment]
        segment.keys[header.key] = None
        segment.live += RECORD_BYTES + header.length

    def _drop(self, key: Key) -> None:
        """Let a record be found no more; its bytes are dead."""
        header, _ = self._remove(key)
        segment = self._segments[header.segment]
        del segment.keys[key]
        segment.live -= RECORD_BYTES + header.length

    def _forget_all(self) -> None:
        self._remove_all()
        for segment in self._segments.values():
            segment.live, segment.keys = 0, {}

    # Room

    def _live_limit(self) -> int:
        return (self.stats.capacity_bytes - 2 * self._segment_bytes) * 7 // 8

    def _evict(self, size: int) -> None:
        """Evict until live records leave `size` bytes within their limit."""
        live = sum([segment.live for segment in self._segments.values()])
        limit = self._live_limit() - size
        while self._entries and live > limit:
            live -= self._evict_oldest()

    def _evict_oldest(self) -> int:
        """Evict a record; return its bytes."""
        self.stats.num_evicted += 1
        return self._bury(self._order.oldest())

    def _bury(self, key: Key) -> int:
        """Drop a record as `_kill` does, if that is possible; return its bytes."""
        header, _ = self._entries[key]
        try:
            self._kill(key)
        except OSError as error:  # then a restart may find it again: it is whole, or a miss
            self._note_failure(error)
        return RECORD_BYTES + header.length

    def _kill(self, key: Key) -> None:
        """Drop a record, and say so on the disk, so that no restart finds it.

        Raises:
            OSError: a restart may find it.
        """
        header, offset = self._entries[key]
        self._drop(key)
        self._files.write(header.segment, offset + DEAD_OFFSET, [DEAD])

    def _make_room(self, size: int) -> bool:
        """Evict and compact until a record of `size` bytes fits; whether it does."""
        if SEGMENT_BYTES + size > self._segment_bytes or size > self._live_limit():
            return False
        self._evict(size)
        for _ in range(len(self._segments) + 1):
            limit = self.stats.capacity_bytes - self._segment_bytes - 2 * SEGMENT_BYTES
            if self.stats.used_bytes + size <= limit:
                return True
            while not self._compact():
                if not self._entries:
                    return False
                self._evict_oldest()
        return False

    def _compact(self) -> bool:
        """Rewrite the segment with the most dead bytes; whether that wins anything."""
        if not self._segments:
            return False
        number, segment = max(self._segments.items(), key=lambda item: item[1].size - item[1].live)
        if segment.size - segment.live <= 2 * SEGMENT_BYTES and segment.live:
            return False
        if number == self._active:
            self._active = None
        while segment.keys:  # a failure that turns the tier off empties them
            key = next(iter(segment.keys))
            header, offset = self._entries[key]
            self._drop(key)
            data = self._read(header, offset)
            room = self.stats.capacity_bytes - self.stats.used_bytes - SEGMENT_BYTES
            if data is None or len(data) > room:  # a segment of a time with a larger capacity
                continue
            try:
                payload = memoryview(data)[RECORD_BYTES:]
                self._append(key, payload, header.priority, header.checksum, header.number)
            except OSError as error:  # the file is deleted all the same, to make room
                self._note_failure(error)
        self._delete(number)
        return True

    # The files

    def _read(self, header: Header, offset: int) -> bytes | None:
        """Return a record, if it is what its header says; otherwise count the fault."""
        try:
            data = self._files.read(header.segment, offset, RECORD_BYTES + header.length)
        except OSError as error:
            self._note_failure(error)
            return None
        fault = fault_of(data, header)
        if fault is None:
            self._num_failures = 0
            return data
        self.stats.faults[fault] += 1
        return None

    def _append(
        self, key: Key, payload: memoryview, priority: int, checksum: bytes, record: int = 0
    ) -> None:
        """Write a record behind the last one, in a new segment if it is full; 0: a new one."""
        size = RECORD_BYTES + len(payload)
        number = self._active
        if number is None or self._segments[number].size + size > self._segment_bytes:
            number = self._begin_segment()
        segment = self._segments[number]
        if not record:
            record = self._next_number
            self._next_number += 1
        header = Header(key, self._meaning, priority, number, record, len(payload), checksum)
        offset = segment.size
        self._write(number, [header.encode(), payload], size)
        self._add(header, offset)

    def _begin_segment(self) -> int:
        number = self._next_segment
        self._next_segment += 1
        self._segments[number] = _Segment(0)
        self._active = number
        self._write(number, [encode_segment(number)], SEGMENT_BYTES)
        return number

    def _write(self, number: int, pieces: list[bytes | memoryview], size: int) -> None:
        """Write at the end of a segment; what is left of a write that failed is cut off."""
        segment = self._segments[number]
        try:
            self._files.write(number, segment.size, pieces)
        except OSError:
            self._active = None
            try:
                self._files.cut(number, segment.size)
            except OSError:
                segment.size += size  # how much is there is unknown: at most that
                self.stats.used_bytes += size
            if not segment.size:
                self._discard(number)
            raise
        segment.size += size
        self.stats.used_bytes += size

    def _discard(self, number: int) -> None:
        """Delete an empty segment, if that is possible."""
        del self._segments[number]
        try:
            self._files.delete(number)
        except OSError:
            return

    def _delete(self, number: int) -> None:
        """Delete a segment with all its records.

        Raises:
            OSError: the file is still there, as dead bytes.
        """
        segment = self._segments[number]
        for key in [*segment.keys]:
            self._drop(key)
        if number == self._active:
            self._active = None
        with contextlib.suppress(FileNotFoundError):
            self._files.delete(number)
        del self._segments[number]
        self.stats.used_bytes -= segment.size

    def _note_failure(self, error: OSError) -> None:
        """Count a failure: without space the tier shrinks to what it has, else it turns off."""
        if error.errno in _FULL:
            self.stats.faults["full"] += 1
            self.stats.capacity_bytes = min(self.stats.capacity_bytes, self.stats.used_bytes)
            if self.stats.capacity_bytes < _LEAST_SEGMENTS * self._segment_bytes:
                self._segment_bytes = max(self.stats.capacity_bytes // _LEAST_SEGMENTS, 1)
            return
        self.stats.faults["failed"] += 1
        self._num_failures += 1
        if self._num_failures >= _MAX_FAILURES:
            self.stats.is_enabled = False
            self._forget_all()
