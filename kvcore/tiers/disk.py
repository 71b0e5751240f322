"""The disk tier: copies in append-only segments that survive the process.

Decides: where a record goes, what is evicted, and when a segment is rewritten. Records are appended
to the newest segment. An evicted record stays where it is, as dead bytes, marked in one byte;
when the capacity is reached, the segment with the most dead bytes is compacted: its other records
are copied to the newest segment and the file is deleted. Live records may take seven eighths of the
capacity less two segments, so there are always dead bytes to win, and the room of one segment is
left for the copy.

Invariants: the sizes of all segments together never exceed the capacity, also during a compaction
and after a crash at any write; a record is found exactly if it is whole and of our meaning; one put
moves at most a few segments. The index is made by reading the headers of all records at the start;
payloads are checked when they are read. Safe for several threads.

Failures of the device are of three kinds. Without space the tier shrinks to what it holds. Where
writes fail again and again, or the device has become read-only, nothing is stored, and the copies
that are there are served. Where reads fail again and again, or a reset cannot empty the files, or
a full device leaves room for nothing, the tier is off, and its index is empty. After a pause the
next put takes the whole capacity again, and in the last two states the files, as a start does. Each
further failure doubles the pause.

No fsync: after a power failure the records of the last seconds may be missing, or wrong, which
their checksums show. After a restart the order is that of writing.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Final, SupportsIndex, final

from kvcore.arguments import as_int
from kvcore.tiers.folder import Folder, Segments
from kvcore.tiers.host_blocks import HostBlocks, HostCopy
from kvcore.tiers.record import (
    DEAD,
    DEAD_OFFSET,
    RECORD_BYTES,
    SEGMENT_BYTES,
    VERSION,
    Fault,
    Header,
    Key,
    Meaning,
    checksum_of,
    decode_header,
    encode_segment,
    segment_version,
)
from kvcore.tiers.record_reader import RecordReader, Results, Wanted, runs_of
from kvcore.tiers.tier import IndexedTier, TierError

_NUM_SEGMENTS: Final = 64
_MAX_SEGMENT_BYTES: Final = 256 << 20
_LEAST_SEGMENTS: Final = 8
_MAX_FAILURES: Final = 8
_FIRST_PAUSE_S: Final = 1.0
_LAST_PAUSE_S: Final = 60.0
_FULL: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_READERS: Final = min(8, os.cpu_count() or 1)  # threads
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Segment:
    """A file: its size, the bytes of its live records, and their keys in order."""

    size: int
    live: int = 0
    keys: dict[Key, None] = field(default_factory=dict)


@final
class _Pauses:
    """The pauses before a device that has failed is tried again.

    An episode is a run of failures, each within a pause's length of the try before it. In it each
    pause is twice as long as the last, up to a minute.

    Args:
        now_s: a clock, in seconds.
    """

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._pause_s = _FIRST_PAUSE_S
        self._due_s = math.inf  # of the next try; infinite where none is planned
        self._over_s = -math.inf  # when the episode is over, if nothing fails before

    def begin(self) -> bool:
        """Begin a pause, unless one runs; True: an episode begins with it. O(1)."""
        if self._due_s < math.inf:
            return False
        now_s = self._now_s()
        is_first = now_s >= self._over_s
        self._pause_s = _FIRST_PAUSE_S if is_first else min(2 * self._pause_s, _LAST_PAUSE_S)
        self._due_s = now_s + self._pause_s
        return is_first

    def end(self) -> bool:
        """End a pause that has passed; True: there was one, and it is time to try. O(1)."""
        if self._due_s == math.inf or (now_s := self._now_s()) < self._due_s:
            return False
        self._due_s, self._over_s = math.inf, now_s + self._pause_s
        return True


@final
class DiskTier(IndexedTier[tuple[Header, int]]):
    """Copies in a folder.

    Args:
        path: the folder; `kvcore-tier` is made in it.
        capacity_bytes: the most bytes that the segments may take.
        segment_bytes: the size of a segment; None: a 64th of the capacity, at most 256 MiB. At
            least one record has room in any case.
        segments: the files, for tests, which no further threads read; None: those of `path`.
        now_s: a clock, in seconds, for the pauses after failures.

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
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__("disk", capacity_bytes)  # an entry: the header, and where it stands
        self._path = os.fspath(path)
        self._files: Segments = Folder(path) if segments is None else segments
        self._segments: dict[int, _Segment] = {}
        self._active: int | None = None
        self._next_segment = 1
        self._num_failed_reads = self._num_failed_writes = 0  # without a success since
        self._pauses = _Pauses(now_s)
        self._is_read_only = False  # writes fail, and are not tried
        self._has_unmarked = False  # the files have evicted records that are not marked as dead
        self._is_outdated = False  # a reset could not empty the files
        capacity = self.stats.capacity_bytes
        self._segment_bytes = min(capacity // _NUM_SEGMENTS, _MAX_SEGMENT_BYTES)
        if segment_bytes is not None:
            self._segment_bytes = as_int("segment_bytes", segment_bytes, 1)
        self._whole = capacity, self._segment_bytes  # sizes while the device has space
        self._least_bytes = RECORD_BYTES  # of the largest record
        self._meaning = Meaning(b"")
        self._reads = RecordReader(self._files, 0 if segments else _READERS)

    def start(self, meaning: Meaning, largest: int) -> None:
        """Find the records of the files. O(records): it reads their headers."""
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
        self._whole = capacity, self._segment_bytes
        self._least_bytes = RECORD_BYTES + largest
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
        """Read a copy. O(length)."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        size = min(length, entry[0].length + 1)  # `length` may be anything
        payload = memoryview(bytearray(size))
        [is_there] = self.begin_read([key], [[payload]])()
        return payload if is_there else None

    def begin_read(
        self, keys: Sequence[Key], targets: Sequence[Sequence[memoryview]]
    ) -> Callable[[], Sequence[bool]]:
        """Begin to read copies, those that follow each other in a segment in one call. O(keys).

        Several threads read and check them, without the lock.
        """
        found: list[Wanted] = []
        with self._lock:
            for place, (key, target) in enumerate(zip(keys, targets, strict=True)):
                if (entry := self._entries.get(key)) is not None:
                    header, offset = entry
                    if header.length == sum(map(len, target)):
                        found.append(Wanted(place, header, offset, target))
                    else:
                        self.stats.faults["short"] += 1
                        self._bury(key)
        runs = runs_of(found)
        wait = self._reads.begin(runs)
        return lambda: self._end_read(len(keys), runs, wait())

    def probe(self, blocks: HostBlocks, copies: Sequence[HostCopy]) -> int:
        """Read the oldest copies, as `Tier.probe` wants; these are not counted."""
        left = [view for copy in copies for view in blocks.views(copy)]
        found: list[Wanted] = []
        with self._lock:
            for header, offset in self._entries.values():
                count = header.length // blocks.block_bytes
                if count > len(left):
                    break
                found.append(Wanted(0, header, offset, [left.pop() for _ in range(count)]))
        runs = runs_of(found)
        size = 0
        for run, faults in zip(runs, self._reads.begin(runs)(), strict=True):
            for wanted, fault in zip(run, faults, strict=True):
                size += wanted.header.length if fault is None else 0
        return size

    def _end_read(
        self, count: int, runs: Sequence[Sequence[Wanted]], results: Sequence[Results]
    ) -> list[bool]:
        """Count what was read, and bury records that are not what their headers say."""
        is_there = [False] * count
        with self._lock:
            for run, faults in zip(runs, results, strict=True):
                for wanted, fault in zip(run, faults, strict=True):
                    key = wanted.header.key
                    if fault is None:
                        is_there[wanted.place] = True
                        self._num_failed_reads = 0
                        self._note_hit(key, wanted.header.length)
                    elif self._entries.get(key) != (wanted.header, wanted.offset):
                        self.stats.faults["gone"] += 1  # evicted or moved meanwhile
                    else:
                        self._note_fault(fault)
                        if key in self._entries:  # not if this failure has turned the tier off
                            self._bury(key)
        return is_there

    def put(self, key: Key, payload: memoryview, priority: int, epoch: int) -> bool:
        """Write a copy. O(length), and amortised the same for compactions."""
        checksum = checksum_of(payload)
        with self._lock:
            if epoch != self.epoch:
                return False
            if self._pauses.end():
                self._try_again()
            if key in self._entries:
                self._order.touch(key)
                return True
            try:
                has_room = self._may_write and self._make_room(RECORD_BYTES + len(payload))
                if not (has_room and self._may_write):  # making room may have failed
                    return False
                self._append(key, payload, priority, checksum)
            except OSError as error:
                self._note_failed_write(error)
                return False
            self._num_failed_writes = 0
            self._note_stored(len(payload))
            return True

    def forget(self, since: int, keys: Collection[Key]) -> None:
        """Forget copies, as `Tier` says; all of them where that cannot be written."""
        with self._lock:
            self.epoch += 1
            if (
                self._has_unmarked or not self.stats.is_enabled
            ):  # the files have more than the index
                self._clear()
            try:
                for key, (header, _) in [*self._entries.items()]:
                    if header.number >= since or key in keys:
                        self._kill(key)
            except OSError as error:
                self._note_failed_write(error)
                self._clear()

    def clear(self) -> None:
        """Forget all copies. O(segments): their files are deleted."""
        with self._lock:
            self.epoch += 1
            self._clear()

    def _clear(self) -> None:
        self._forget_all()
        self._has_unmarked, self._is_outdated = False, not self.stats.is_enabled
        for number in [*self._segments]:
            try:
                self._files.cut(number, 0)  # so that nothing is found if it cannot be deleted
                self._delete(number)
            except OSError as error:
                self._note_failed_write(error)
                self._turn_off("a reset cannot empty its files", error)
                self._is_outdated = True

    def close(self) -> None:
        """Let go of the files, for good."""
        with self._lock:
            self.epoch += 1
            self.stats.is_enabled = False
            self._pauses = _Pauses(lambda: -math.inf)  # no try comes any more
            self._forget_all()
            self._files.close()
        self._reads.close()

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
                self._note_failed_read(error)
                self._active = None
        self.stats.used_bytes = sum([segment.size for segment in self._segments.values()])
        for number in [*self._segments]:
            if self.stats.used_bytes <= self.stats.capacity_bytes:
                break
            self._delete(number)
        self._evict(0)

    def _scan_segment(self, number: int, size: int) -> None:
        version = segment_version(self._bytes_at(number, 0, SEGMENT_BYTES), number)
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
            header = decode_header(self._bytes_at(number, offset, RECORD_BYTES))
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
            self._note_failed_write(error)
            self._has_unmarked = True
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
            payload = self._read_one(header, offset)
            room = self.stats.capacity_bytes - self.stats.used_bytes - SEGMENT_BYTES
            if (
                payload is None or RECORD_BYTES + len(payload) > room
            ):  # a segment of a time with a larger capacity
                continue
            try:
                self._append(key, payload, header.priority, header.checksum, header.number)
            except OSError as error:  # the file is deleted all the same, to make room
                self._note_failed_write(error)
        self._delete(number)
        return True

    # The files

    def _read_one(self, header: Header, offset: int) -> memoryview | None:
        """Return a payload, if the record is what its header says; otherwise count the fault."""
        payload = memoryview(bytearray(header.length))
        [fault] = self._reads.read([Wanted(0, header, offset, [payload])])
        if fault is None:
            self._num_failed_reads = 0
            return payload
        self._note_fault(fault)
        return None

    def _note_fault(self, fault: Fault | OSError) -> None:
        if isinstance(fault, OSError):
            self._note_failed_read(fault)
        else:
            self._num_failed_reads = 0
            self.stats.faults[fault] += 1

    def _bytes_at(self, number: int, offset: int, size: int) -> bytes:
        """Return the bytes of a segment there, fewer at its end."""
        data = bytearray(size)
        return bytes(data[: self._files.read(number, offset, [data])])

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
            except OSError as error:
                if segment.size or not isinstance(error, FileNotFoundError):  # else none was made
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

    # Failures

    @property
    def _may_write(self) -> bool:
        return self.stats.is_enabled and not self._is_read_only

    def _note_failed_read(self, error: OSError) -> None:
        """Count a read that failed; after some in a row the tier is off."""
        self.stats.faults["failed"] += 1
        self._num_failed_reads += 1
        if self._num_failed_reads >= _MAX_FAILURES:
            self._turn_off("its device cannot be read", error)

    def _note_failed_write(self, error: OSError) -> None:
        """Count a write that failed: without space the tier shrinks, after some it writes no more.

        O(1).
        """
        if error.errno in _FULL:
            self.stats.faults["full"] += 1
            self._shrink(error)
            return
        self.stats.faults["failed"] += 1
        self._num_failed_writes += 1
        if self._num_failed_writes >= _MAX_FAILURES or error.errno == errno.EROFS:
            self._is_read_only = True
            self._pause("its device cannot be written, so nothing is stored", error)

    def _shrink(self, error: OSError) -> None:
        """Take no more bytes than the tier has now; without room for a copy, turn it off."""
        stats, (whole, _) = self.stats, self._whole
        stats.capacity_bytes = min(stats.capacity_bytes, stats.used_bytes)
        if stats.capacity_bytes < _LEAST_SEGMENTS * self._segment_bytes:
            self._segment_bytes = max(stats.capacity_bytes // _LEAST_SEGMENTS, 1)
        if not self._entries and self._live_limit() < self._least_bytes:
            self._turn_off("its device is full", error)
        self._pause(f"its device is full at {stats.used_bytes:,} of {whole:,} bytes", error)

    def _turn_off(self, what: str, error: OSError | TierError) -> None:
        """Find nothing and take nothing until the next try."""
        self.stats.is_enabled = False
        self._forget_all()
        self._pause(f"{what}, so it is off", error)

    def _pause(self, what: str, error: OSError | TierError) -> None:
        """Wait before the next try; log the first failure of an episode."""
        if self._pauses.begin():
            why = error.strerror if isinstance(error, OSError) else error
            _log.warning("disk tier %s: %s (%s); it is tried again later", self._path, what, why)

    def _try_again(self) -> None:
        """Take the whole capacity again; after failed reads or writes the files, as a start does.

        They may have been replaced meanwhile, or have come back. O(records).
        """
        self.stats.capacity_bytes, self._segment_bytes = self._whole
        if self._may_write:
            return
        try:
            self._files.retake()
            if self._is_outdated:
                for number in self._files.sizes():
                    self._files.delete(number)
        except (OSError, TierError) as error:
            self._pause("its folder cannot be used", error)
            return
        self._forget_all()
        self._segments, self._active = {}, None
        self.stats.is_enabled, self._is_read_only = True, False
        self._has_unmarked = self._is_outdated = False
        self._num_failed_reads, self._num_failed_writes = 0, _MAX_FAILURES - 1
        try:
            self._scan()
        except (OSError, TierError) as error:
            self._turn_off("its folder cannot be read", error)
        if self.stats.is_enabled:
            _log.info("disk tier %s: its device can be used again", self._path)
