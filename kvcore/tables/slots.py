"""Slot mappings: arithmetic from positions to slots, written into buffers of the caller.

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
        name: the name of the argument in errors.
        out: any object with a buffer.
        widths: the bytes an integer may have.
        num_entries: the number of entries needed.

    Raises:
        InvalidArgumentError: `out` is not a writable, contiguous, one-dimensional buffer of signed
            integers of such a width, or is too short.
    """
    view = checked_view(name, out, widths)
    if view.ndim != 1:
        raise InvalidArgumentError(f"{name}: wanted one dimension, got {view.ndim}")
    if len(view) < num_entries:
        raise InvalidArgumentError(
            f"{name}: wanted room for {num_entries} entries, got {len(view)}"
        )
    return view


def row_view(
    name: str, out: object, row_stride: int | None, num_rows: int, longest: int
) -> tuple[memoryview, int]:
    """Return a buffer of rows as a view, and how many entries a row has. O(1).

    Args:
        name: the name of the argument in errors.
        out: any object with a buffer of int32 or int64, of two dimensions, or of one.
        row_stride: entries from one row to the next; None: `out` has two dimensions.
        num_rows: the number of rows to write.
        longest: the entries of the longest row.

    Raises:
        InvalidArgumentError: `out` is not a writable, contiguous buffer of such integers, has too
            few rows or too short ones, or its dimensions and `row_stride` do not go together.
    """
    view = checked_view(name, out, (4, 8))
    if view.ndim != (2 if row_stride is None else 1):
        raise InvalidArgumentError(
            f"{name}: wanted two dimensions, or one and a row_stride, "
            f"got {view.ndim} and {'none' if row_stride is None else row_stride}"
        )
    if row_stride is None:
        height, width = view.shape or (0, 0)  # there are two
        if num_rows > height or longest > width:
            raise InvalidArgumentError(
                f"{name}: wanted at least {num_rows} rows of {longest}, got {height} of {width}"
            )
        return view, width
    if longest > row_stride:
        raise InvalidArgumentError(f"row_stride: wanted at least {longest}, got {row_stride}")
    return view, row_stride


def check_width(name: str, view: memoryview, slots: array[int]) -> None:
    """Raise where a slot does not fit into what a view holds. O(len(slots)) for 32 bits."""
    if view.itemsize == 4 and slots and max(slots) >= 2**31:
        raise InvalidArgumentError(f"{name}: wanted int64 for slot {max(slots)}, got int32")


def checked_view(name: str, out: object, widths: tuple[int, ...]) -> memoryview:
    """Return a writable, contiguous buffer of integers of one of these widths as a view. O(1)."""
    try:
        view = memoryview(out)  # type: ignore[arg-type]  # the call is the check
    except TypeError:
        raise InvalidArgumentError(
            f"{name}: wanted a writable buffer, got {type(out).__name__}"
        ) from None
    signed = view.format.lstrip("@=<") in {"i", "l", "q"}
    if view.itemsize not in widths or not signed:
        wanted = " or ".join(f"int{8 * width}" for width in widths)
        raise InvalidArgumentError(
            f"{name}: wanted {wanted}, "
            f"got {view.ndim} of {view.itemsize} bytes with format {view.format!r}"
        )
    if view.readonly or not view.c_contiguous:
        raise InvalidArgumentError(f"{name}: wanted a writable, contiguous buffer")
    return view


def put_ints(view: memoryview, start: int, values: array[int]) -> None:
    """Copy integers into an `int_view`, to entry `start` and after. O(len(values))."""
    width = view.itemsize
    if width != values.itemsize:
        values = array("q" if width == 8 else "i", values)
    # The same width under two letters ("l" and "q"): as bytes they are the same.
    target = view.cast("B")[start * width : (start + len(values)) * width]
    target[:] = memoryview(values).cast("B")
