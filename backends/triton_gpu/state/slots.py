"""Which rows a program walks, and where the states lie that it reads and writes."""

import triton.language as tl

from backends.triton_gpu.shared.place import device_function

INDICES = ("read_slots", "write_slots", "query_start_loc")


@device_function
def rows_of(
    query_start_loc: tl.tensor, seq: tl.tensor, RAGGED: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The first row of a sequence, and the one past its last."""
    if RAGGED:
        return tl.load(query_start_loc + seq), tl.load(query_start_loc + seq + 1)
    return seq, seq + 1


@device_function
def slot_at(slots: tl.tensor, index: tl.tensor, SLOT: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Where a slot begins, in elements, and whether there is one."""
    slot = tl.load(slots + index)
    return slot.to(tl.int64) * SLOT, slot >= 0
