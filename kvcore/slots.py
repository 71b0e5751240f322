"""Positions to slots: pure arithmetic, written straight into buffers that others own.

A slot numbers one token's place in the cache: `block_id * block_size + offset`. Slots are 64 bits
wide everywhere: block 200,000 of 16 tokens and 8 heads of 128 is beyond 2**31 elements. This file
knows block ids and sizes, and nothing of blocks, sequences or tensors.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NewType

from kvcore.errors import InvalidArgumentError

Slot = NewType("Slot", int)
"""A token's place in the KV cache."""


def slot_of(block_table: Sequence[int], position: int, block_size: int) -> Slot:
    """Return the slot of one position. O(1). `block_table` covers `position`."""
    block_index, offset = divmod(position, block_size)
    return Slot(block_table[block_index] * block_size + offset)


def slots_of(block_table: Sequence[int], start: int, stop: int, block_size: int) -> array[int]:
    """Return the slots of the positions from `start` to `stop - 1`, as int64. O(stop - start).

    `block_table` covers them.
    """
    slots = array("q")
    position = start
    while position < stop:
        block_index, offset = divmod(position, block_size)
        count = min(block_size - offset, stop - position)
        first = block_table[block_index] * block_size + offset
        slots.extend(range(first, first + count))
        position += count
    return slots


def int_view(name: str, out: object, widths: tuple[int, ...], num_entries: int) -> memoryview:
    """Return a buffer that can take `num_entries` integers as a view. O(1).

    Args:
        name: what the caller calls it.
        out: any object with a buffer.
        widths: the bytes an integer may have.
        num_entries: the room wanted.

    Raises:
        InvalidArgumentError: `out` is not a writable, contiguous, one-dimensional buffer of signed
            integers of such a width, or is too short.
    """
    try:
        view = memoryview(out)  # type: ignore[arg-type]  # the call is the check
    except TypeError:
        raise InvalidArgumentError(
            f"{name}: wanted a writable buffer, got {type(out).__name__}"
        ) from None
    signed = view.format.lstrip("@=<") in {"i", "l", "q"}
    if view.ndim != 1 or view.itemsize not in widths or not signed:
        wanted = " or ".join(f"int{8 * width}" for width in widths)
        raise InvalidArgumentError(
            f"{name}: wanted one dimension of {wanted}, "
            f"got {view.ndim} of {view.itemsize} bytes with format {view.format!r}"
        )
    if view.readonly or not view.contiguous:
        raise InvalidArgumentError(f"{name}: wanted a writable, contiguous buffer")
    if len(view) < num_entries:
        raise InvalidArgumentError(
            f"{name}: wanted room for {num_entries} entries, got {len(view)}"
        )
    return view


def put_ints(view: memoryview, start: int, values: array[int]) -> None:
    """Copy integers into an `int_view`, to entry `start` and after. O(len(values))."""
    width = view.itemsize
    if width != values.itemsize:
        values = array("q" if width == 8 else "i", values)
    # The same width under two letters ("l" and "q"): as bytes they are the same.
    target = view.cast("B")[start * width : (start + len(values)) * width]
    target[:] = memoryview(values).cast("B")
