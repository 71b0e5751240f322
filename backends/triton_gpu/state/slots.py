"""The places of the states that a program reads and writes, and the rows of its sequence."""

import triton.language as tl
from torch import Tensor

from backends.states import StateBatch
from backends.triton_gpu.shared.place import device_function

INDICES = ("read_slots", "write_slots", "query_start_loc", "num_stored")


@device_function
def slot_at(slots: tl.tensor, index: tl.tensor, SLOT: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Return the first element of a slot, and True if there is one."""
    slot = tl.load(slots + index)
    return slot.to(tl.int64) * SLOT, slot >= 0


@device_function
def rows_at(
    query_start_loc: tl.tensor, num_stored: tl.tensor, seq: tl.tensor, HAS_DRAFTS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The first row of a sequence, the number of its rows, and of those that are stored."""
    start = tl.load(query_start_loc + seq)
    count = tl.load(query_start_loc + seq + 1) - start
    stored = count
    if HAS_DRAFTS:
        stored = tl.load(num_stored + seq)
    return start, count, stored


def index_tensors(batch: StateBatch) -> tuple[Tensor, ...]:
    """Return a kernel's `INDICES`; slots stand in for tensors that it does not read. O(1)."""
    reads, starts, stored = batch.read_slots, batch.query_start_loc, batch.num_stored
    beside = [reads if each is None else each for each in (starts, stored)]
    return (reads, batch.write_slots, *beside)
