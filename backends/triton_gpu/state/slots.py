"""Where the states lie that a program reads and writes."""

import triton.language as tl

from backends.triton_gpu.shared.place import device_function

INDICES = ("read_slots", "write_slots")


@device_function
def slot_at(slots: tl.tensor, index: tl.tensor, SLOT: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Where a slot begins, in elements, and whether there is one."""
    slot = tl.load(slots + index)
    return slot.to(tl.int64) * SLOT, slot >= 0
