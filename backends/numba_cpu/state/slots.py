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
from backends.states import StateBatch

SOURCE_DIGEST = zlib.crc32(Path(__file__).read_bytes(), bits.SOURCE_DIGEST)

Slots = tuple[int, int, int]
"""Addresses of read_slots and write_slots, and the rows of each sequence."""


@lru_cache(maxsize=1)
def _kernel(source_digest: int) -> Callable[..., tuple[int, int, int | np.int32]]:
    """Compile for the sources with this digest; closing over it makes it part of the cache key."""

    @exact(cache=True)
    def find_fault(slots: Slots, num_seqs: int, num_slots: int) -> tuple[int, int, int | np.int32]:
        """(fault, index, value); fault 1: read_slots, 2: write_slots."""
        _ = source_digest
        for side in range(2):
            values = at(slots[side], num_seqs, np.int32(0))
            for s in range(num_seqs):
                if values[s] >= num_slots:
                    return side + 1, s, values[s]
        return 0, 0, np.int32(0)

    return find_fault


def checked(batch: StateBatch, num_slots: int) -> Slots:
    """The batch's addresses, after a look at its values. O(num_seqs).

    Raises:
        InvalidArgumentError: a value breaks the contract.
    """
    slots = (batch.read_slots.data_ptr(), batch.write_slots.data_ptr(), batch.query_len)
    fault, index, value = _kernel(SOURCE_DIGEST)(slots, batch.num_seqs, num_slots)
    if fault:
        name = ("read_slots", "write_slots")[fault - 1]
        wanted = f"a slot below {num_slots}"
        raise InvalidArgumentError(f"batch.{name}[{index}]", wanted, str(value))
    return slots
