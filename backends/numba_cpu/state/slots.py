"""The states that a batch reads and writes, checked before the first byte is written.

Compiled code from here is part of `SOURCE_DIGEST`, see `bits`.
"""

import zlib
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import numpy as np

from backends.errors import InvalidArgumentError
from backends.numba_cpu import bits
from backends.numba_cpu.bits import at, exact
from backends.states import StateBatch

SOURCE_DIGEST = zlib.crc32(Path(__file__).read_bytes(), bits.SOURCE_DIGEST)

Slots = tuple[int, int, int, int]
"""Addresses of read_slots, write_slots, query_start_loc and num_stored; 0: there is none."""


@exact()
def rows_of(where: Slots, s: int) -> tuple[int, int, int]:
    """The first row of a sequence, the one past those that are stored, and the one past all."""
    first, last = s, s + 1
    if where[2]:
        starts = at(where[2], s + 2, np.int32(0))
        first, last = int(starts[s]), int(starts[s + 1])
    stored = last
    if where[3]:
        stored = first + int(at(where[3], s + 1, np.int32(0))[s])
    return first, stored, last


@lru_cache(maxsize=1)
def _kernel(source_digest: int) -> Callable[..., tuple[int, int, int | np.int32]]:
    """Compile for the sources with this digest; closing over it makes it part of the cache key."""

    @exact(cache=True)
    def find_fault(
        slots: Slots, num_seqs: int, num_slots: int, num_rows: int
    ) -> tuple[int, int, int | np.int32]:
        """(fault, index, value); fault 1: read_slots, 2: write_slots, then the rows."""
        _ = source_digest
        for side in range(2):
            values = at(slots[side], num_seqs, np.int32(0))
            for s in range(num_seqs):
                if values[s] >= num_slots:
                    return side + 1, s, values[s]
        for s in range(num_seqs):
            first, stored, last = rows_of(slots, s)
            if first < 0 or last < first or last > num_rows:
                return 3, s + 1, np.int32(last)
            if stored < first or stored > last:
                return 4, s, np.int32(stored - first)
        return 0, 0, np.int32(0)

    return find_fault


def checked(batch: StateBatch, num_slots: int, num_rows: int) -> Slots:
    """The batch's addresses, after a look at its values. O(num_seqs).

    Raises:
        InvalidArgumentError: a value breaks the contract.
    """
    given = (batch.read_slots, batch.write_slots, batch.query_start_loc, batch.num_stored)
    reads, writes, starts, stored = [0 if each is None else each.data_ptr() for each in given]
    slots = (reads, writes, starts, stored)
    fault, index, value = _kernel(SOURCE_DIGEST)(slots, batch.num_seqs, num_slots, num_rows)
    if fault:
        name = ("read_slots", "write_slots", "query_start_loc", "num_stored")[fault - 1]
        wanted = f"a slot below {num_slots}"
        if fault > 2:
            wanted = (f"ascending rows up to {num_rows}", "at most the sequence's rows")[fault - 3]
        raise InvalidArgumentError(f"batch.{name}[{index}]", wanted, str(value))
    return slots
