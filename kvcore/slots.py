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


def write_ints(name: str, out: object, values: array[int]) -> None:
    """Copy `values` to the beginning of the writable buffer `out`. O(len(values)).

    Raises:
        InvalidArgumentError: `out` is not a writable, contiguous, one-dimensional buffer of
            integers of the same width, or is too short; it is not touched then.
    """
    view = _int_view(name, out, (values.itemsize,))
    if len(view) < len(values):
        raise InvalidArgumentError(
            f"{name}: wanted room for {len(values)} entries, got {len(view)}"
        )
    width = values.itemsize
    # Same width and signedness under two letters ("l" and "q"): as bytes they are the same.
    view.cast("B")[: width * len(values)] = memoryview(values).cast("B")


def write_rows(name: str, out: object, rows: Sequence[array[int]], stride: int) -> None:
    """Copy int32 rows into `out`, row `i` to entry `i * stride` and after. O(entries).

    Raises:
        InvalidArgumentError: `out` is not a writable, contiguous buffer of int32 or int64, or is
            too short; it is not touched then.
    """
    view = _int_view(name, out, (4, 8))
    wanted = (len(rows) - 1) * stride + len(rows[-1]) if rows else 0
    if len(view) < wanted:
        raise InvalidArgumentError(f"{name}: wanted room for {wanted} entries, got {len(view)}")
    width = view.itemsize
    data = view.cast("B")
    for index, row in enumerate(rows):
        values = row if width == row.itemsize else array("q", row)
        start = index * stride * width
        data[start : start + len(row) * width] = memoryview(values).cast("B")


def _int_view(name: str, out: object, widths: tuple[int, ...]) -> memoryview:
    """Return `out` as a flat view of signed integers, if it is one that can be written to."""
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
    return view
