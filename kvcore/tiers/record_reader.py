"""Reads of records by several threads; records that follow each other are read by one call.

Decides: which records one call reads, on which thread. A payload goes straight to where it is
wanted, in pieces, and is checked there; nothing is held meanwhile, so a record may be evicted while
it is read, which its reader has to look at afterwards.

Does not know: the index, which faults count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, final

from kvcore.tiers.folder import Segments
from kvcore.tiers.record import RECORD_BYTES, Fault, Header, fault_of

_RUN_BYTES: Final = 8 << 20  # of records that one call reads, and one at least
_MAX_BUFFERS: Final = 512  # of a call, of which systems take 1,024

Results = Sequence[Fault | OSError | None]
"""For each record why it cannot be served; None: it can."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A record that is to be read: its place among those asked for, and where it is to be."""

    place: int
    header: Header
    offset: int
    target: Sequence[memoryview]

    @property
    def end(self) -> int:
        """The offset of the record behind it."""
        return self.offset + RECORD_BYTES + self.header.length


def runs_of(found: Sequence[Wanted]) -> list[list[Wanted]]:
    """Return records that follow each other on the disk, in runs of a bounded size."""
    runs: list[list[Wanted]] = []
    for wanted in sorted(found, key=lambda one: (one.header.segment, one.offset)):
        last = runs[-1][-1] if runs else None
        if (
            last is None
            or (last.header.segment, last.end) != (wanted.header.segment, wanted.offset)
            or wanted.end - runs[-1][0].offset > _RUN_BYTES
            or len(runs[-1]) * (1 + len(wanted.target)) >= _MAX_BUFFERS
        ):
            runs.append([])
        runs[-1].append(wanted)
    return runs


@final
class RecordReader:
    """Reads records.

    Args:
        files: the segments.
        num_threads: further threads; 0: none, and a read has ended when it has begun.
    """

    def __init__(self, files: Segments, num_threads: int) -> None:
        self._files = files
        threads = ThreadPoolExecutor(num_threads, "kv disk reads") if num_threads else None
        self._threads = threads

    def begin(self, runs: Sequence[Sequence[Wanted]]) -> Callable[[], list[Results]]:
        """Begin to read runs; what is returned waits for them. O(runs)."""
        if self._threads is None or len(runs) == 1:
            results = [self.read(run) for run in runs]
            return lambda: results
        waiting = [self._threads.submit(self.read, run) for run in runs]
        return lambda: [one.result() for one in waiting]

    def read(self, run: Sequence[Wanted]) -> Results:
        """Read records that follow each other; for each why it is not what its header says."""
        buffers: list[bytearray | memoryview] = []
        for wanted in run:
            buffers += [bytearray(RECORD_BYTES), *wanted.target]
        first = run[0]
        try:
            left = self._files.read(first.header.segment, first.offset, buffers)
        except OSError as error:
            return [error] * len(run)
        faults: list[Fault | OSError | None] = []
        for wanted in run:
            size = 1 + len(wanted.target)
            head, *payload = [memoryview(buffer) for buffer in buffers[:size]]
            del buffers[:size]
            if left < RECORD_BYTES + wanted.header.length:
                head, payload = head[: max(left, 0)], []
            faults.append(fault_of(head, payload, wanted.header))
            left -= RECORD_BYTES + wanted.header.length
        return faults

    def close(self) -> None:
        """Begin no further reads. O(1)."""
        if self._threads is not None:
            self._threads.shutdown(wait=False)
