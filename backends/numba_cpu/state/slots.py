"""Which states a batch reads and writes, checked before the first byte is written.

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
from backends.numba_cpu.schedule import Ints
from backends.states import StateBatch

SOURCE_DIGEST = zlib.crc32(Path(__file__).read_bytes(), bits.SOURCE_DIGEST)

Slots = tuple[int, int, int]
"""Addresses of read_slots, write_slots and query_start_loc; the last is 0 if there is none."""


@exact()
def rows_of(starts: Ints, address: int, seq: int) -> tuple[np.int64, np.int64]:
    """The first row of a sequence, and the one past its last; at address 0 nothing is read."""
    if address == 0:
        return np.int64(seq), np.int64(seq + 1)
    return np.int64(starts[seq]), np.int64(starts[seq + 1])


@lru_cache(maxsize=1)
def _kernel(source_digest: int) -> Callable[..., tuple[int, int, int | np.int64]]:
    """Compile for the sources with this digest; closing over it makes it part of the cache key."""

    @exact(cache=True)
    def find_fault(
        slots: Slots, num_seqs: int, num_tokens: int, num_slots: int
    ) -> tuple[int, int, int | np.int64]:
        """(fault, index, value); fault 1: query_start_loc, 2: read_slots, 3: write_slots."""
        _ = source_digest
        reads = at(slots[0], num_seqs, np.int32(0))
        writes = at(slots[1], num_tokens, np.int32(0))
        starts = at(slots[2], 1, np.int32(0))
        before = np.int64(0)
        for s in range(num_seqs):
            first, stop = rows_of(starts, slots[2], s)
            if first != before:
                return 1, s, first
            if stop < first or stop > num_tokens:
                return 1, s + 1, stop
            if reads[s] >= num_slots:
                return 2, s, reads[s]
            for t in range(first, stop):
                if writes[t] >= num_slots:
                    return 3, t, writes[t]
            before = stop
        return 0, 0, 0

    return find_fault


def checked(batch: StateBatch, num_slots: int) -> Slots:
    """The batch's addresses, after a look at its values. O(num_tokens).

    Raises:
        InvalidArgumentError: a value breaks the contract.
    """
    starts = batch.query_start_loc
    slots = (
        batch.read_slots.data_ptr(),
        batch.write_slots.data_ptr(),
        0 if starts is None else starts.data_ptr(),
    )
    fault, index, value = _kernel(SOURCE_DIGEST)(slots, batch.num_seqs, batch.num_tokens, num_slots)
    if fault:
        ends = f"0 first, then ascending, to at most {batch.num_tokens}"
        name = ("query_start_loc", "read_slots", "write_slots")[fault - 1]
        wanted = ends if fault == 1 else f"a slot below {num_slots}"
        raise InvalidArgumentError(f"batch.{name}[{index}]", wanted, str(value))
    return slots
