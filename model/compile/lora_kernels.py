"""The kernel of LoRA adapters for a GPU: what the adapters of all rows add, in one launch.

`expand`, for the parts of a product that are computed from one input (queries, keys and values;
gate and up), each with an inner product and a second half:

    out[r] = product[r] + inner[r, slot of r] @ up[slot of r]             of each part
    out[r] = silu(gate[r]) * up[r]                                        if gated, of two parts

`expand_normed`, for a product of one part that is added to the residual, which is normed then:

    out[0, r] = residual[r] + product[r] + inner[r, slot of r] @ up[slot of r]
    out[1, r] = out[0, r] / rms(out[0, r]) * scale

`attend_rotated`, for queries, keys and values, which attention gets normed and rotated as by
`few_rows_kernels.rotate`.

`inner` has the columns of all slots. A row reads those of its slot, and the others count as zeros,
so that a matrix instruction serves rows of different adapters. A program has 64 rows and a tile of
columns of one part. It goes through the columns of `inner` in chunks of up to 128 and leaves out
those whose slots none of its rows has. Few columns are read at once, before the kernel waits for
the product, as in `few_rows_kernels.py`. Sums are float32, and are rounded once.

In tiles of a width a row's bits do not depend on the other rows: zeros change no sum. A norm needs
a whole row, or head: of few rows each has a program, which reads the second half of its slot, and
what many rows add is added before. Bytes moved: the product and `out` once, the second halves once
for 64 rows.
Sources: SGMV of Chen et al. 2023, "Punica"; the names shrink and expand are vLLM's.

Does not know: which requests the rows belong to, which layer this is.
"""

# ruff: noqa: N803 - compile-time arguments are upper case, as everywhere in Triton

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from model.compile.few_rows_kernels import overlap, store_rotated

_ROWS = 64
"""Of a tile: the fewest of Hopper's matrix instruction."""
_WIDTHS = (64, 32, 16)
_PROGRAMS = 96
"""Wanted: nearly as many as a GPU has multiprocessors."""
_AT_ONCE = 128
"""The most columns of all slots that are read at once."""
_CHUNK = 64
_MOST_PARTS = 4
_FEW = 256
"""The most rows whose second halves are read for each row by itself."""
_NUMBERS = 16_384
"""Of a second half that a program reads at once for a row."""


def _jit(function: Any) -> Any:  # noqa: ANN401  # Triton has no types
    """A kernel, compiled once for all numbers of rows."""
    return triton.jit(function, do_not_specialize=["num_rows"])


@_jit
def _chunk(
    inner: tl.tensor, slot: tl.tensor, lane: tl.tensor, COLUMNS: tl.constexpr, RANK: tl.constexpr
) -> tl.tensor:  # fmt: skip
    """Return a chunk of the inner product: of each row the columns of its slot, otherwise zeros."""
    own = ((lane // RANK)[None, :] == slot[:, None]) & (lane < COLUMNS)[None, :]
    return tl.load(inner + lane[None, :], mask=own, other=0.0)


@_jit
def _in_chunks(
    total: tl.tensor, inner: tl.tensor, up: tl.tensor, up_stride: tl.tensor, slot: tl.tensor,
    inside: tl.tensor, COLUMNS: tl.constexpr, RANK: tl.constexpr, CHUNK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Add the products of all chunks whose slots some row has."""
    for begin in range(0, COLUMNS, CHUNK):
        present = (slot >= begin // RANK) & (slot <= (begin + CHUNK - 1) // RANK)
        if tl.max(present.to(tl.int32), 0) > 0:
            lane = begin + tl.arange(0, CHUNK)
            held = (lane < COLUMNS)[:, None] & inside[None, :]
            weights = tl.load(up + begin * up_stride, mask=held, other=0.0)
            rows = _chunk(inner, slot, lane, COLUMNS, RANK)
            total = tl.dot(rows, weights, total, input_precision="ieee")
    return total


@_jit
def _expand(
    product: tl.tensor,  # [num_rows, product_stride]
    inner: tl.tensor,  # [num_rows, inner_stride]
    up: tl.tensor,  # [COLUMNS, up_stride]
    slots: tl.tensor,  # [num_rows], or one for all
    out: tl.tensor,  # [num_rows, count], written
    num_rows: tl.tensor,
    product_stride: tl.tensor,
    inner_stride: tl.tensor,
    up_stride: tl.tensor,
    slot_stride: tl.tensor,
    count: tl.tensor,  # of columns; half of those of the product if GATED
    first_end: tl.tensor,  # of the first part; count if it is the last
    second_end: tl.tensor,
    third_end: tl.tensor,
    COLUMNS: tl.constexpr,
    RANK: tl.constexpr,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    start = tl.program_id(0) * TILE
    column = start + tl.arange(0, TILE)
    inside = column < count
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    there = row < num_rows
    place = row.to(tl.int64)[:, None]
    part = (start >= first_end).to(tl.int32) + (start >= second_end) + (start >= third_end)
    slot = tl.load(slots + row * slot_stride, mask=there, other=-1).to(tl.int32)
    inner += place * inner_stride + part * COLUMNS
    lane = tl.arange(0, CHUNK)
    up += lane[:, None] * up_stride + column[None, :]
    weights = tl.zeros([CHUNK, TILE], up.dtype.element_ty)
    weights_up = weights
    if COLUMNS <= CHUNK:
        held = (lane < COLUMNS)[:, None] & inside[None, :]
        weights = tl.load(up, mask=held, other=0.0)
        if GATED:
            weights_up = tl.load(up + count, mask=held, other=0.0)
    if OVERLAPS:
        gdc_wait()
    wanted = there[:, None] & inside[None, :]
    product += place * product_stride + column[None, :]
    total = tl.load(product, mask=wanted, other=0.0).to(tl.float32)
    total_up = total
    if GATED:
        total_up = tl.load(product + count, mask=wanted, other=0.0).to(tl.float32)
    if COLUMNS <= CHUNK:
        rows = _chunk(inner, slot, lane, COLUMNS, RANK)
        total = tl.dot(rows, weights, total, input_precision="ieee")
        if GATED:
            rows = _chunk(inner + COLUMNS, slot, lane, COLUMNS, RANK)
            total_up = tl.dot(rows, weights_up, total_up, input_precision="ieee")
    else:
        total = _in_chunks(total, inner, up, up_stride, slot, inside, COLUMNS, RANK, CHUNK)
        if GATED:
            inner, up = inner + COLUMNS, up + count
            total_up = _in_chunks(
                total_up, inner, up, up_stride, slot, inside, COLUMNS, RANK, CHUNK
            )
    if GATED:
        total = total / (1.0 + tl.exp(-total)) * total_up
    tl.store(out + place * count + column[None, :], total.to(out.dtype.element_ty), mask=wanted)


@_jit
def _of_slot(
    inner: tl.tensor, up: tl.tensor, up_stride: tl.tensor, slot: tl.tensor, inside: tl.tensor,
    total: tl.tensor, weights: tl.tensor, RANK: tl.constexpr, STEP: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Add a row's inner product times the second half of its slot; `weights` are the first ones."""
    place = tl.arange(0, STEP)
    for begin in tl.static_range(0, RANK, STEP):
        held = (begin + place < RANK) & (slot >= 0)
        if begin > 0:
            at = up + (slot * RANK + begin + place)[:, None] * up_stride
            weights = tl.load(at, mask=held[:, None] & inside[None, :], other=0.0)
        rows = tl.load(inner + slot * RANK + begin + place, mask=held, other=0.0)
        total += tl.sum(weights.to(tl.float32) * rows.to(tl.float32)[:, None], 0)
    return total


@_jit
def _expand_normed(
    product: tl.tensor,  # [num_rows, product_stride]
    inner: tl.tensor,  # [num_rows, inner_stride], if EXPANDS
    up: tl.tensor,  # [slots * RANK, up_stride], if EXPANDS
    slots: tl.tensor,  # [num_rows], or one for all, if EXPANDS
    residual: tl.tensor,  # [num_rows, WIDTH]
    scale: tl.tensor,  # [WIDTH]
    out: tl.tensor,  # [2, num_rows, WIDTH], written
    num_rows: tl.tensor,
    product_stride: tl.tensor,
    inner_stride: tl.tensor,
    up_stride: tl.tensor,
    slot_stride: tl.tensor,
    EPS: tl.constexpr,
    WIDTH: tl.constexpr,
    RANK: tl.constexpr,
    LANES: tl.constexpr,  # a power of two, at least WIDTH
    STEP: tl.constexpr,  # of RANK, a power of two
    EXPANDS: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    inside = lane < WIDTH
    factor = tl.load(scale + lane, mask=inside, other=0.0).to(tl.float32)
    slot = tl.zeros([], tl.int32)
    place = tl.arange(0, STEP)
    weights = tl.zeros([STEP, LANES], up.dtype.element_ty)
    up += lane[None, :]
    if EXPANDS:
        slot = tl.load(slots + row * slot_stride).to(tl.int32)
        held = ((place < RANK) & (slot >= 0))[:, None] & inside[None, :]
        weights = tl.load(up + (slot * RANK + place)[:, None] * up_stride, mask=held, other=0.0)
    if OVERLAPS:
        gdc_wait()
    total = tl.load(product + row * product_stride + lane, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(residual + row * WIDTH + lane, mask=inside, other=0.0).to(tl.float32)
    if EXPANDS:
        inner += row * inner_stride
        total = _of_slot(inner, up, up_stride, slot, inside, total, weights, RANK, STEP)
    rounded = total.to(out.dtype.element_ty)
    to = out + row * WIDTH + lane
    tl.store(to, rounded, mask=inside)
    total = rounded.to(tl.float32)
    norm = tl.rsqrt(tl.sum(total * total, 0) / WIDTH + EPS)
    normed = (total * norm * factor).to(out.dtype.element_ty)
    tl.store(to + num_rows.to(tl.int64) * WIDTH, normed, mask=inside)


@_jit
def _expand_rotated(
    product: tl.tensor,  # [num_rows, product_stride]
    inner: tl.tensor,  # [num_rows, inner_stride], if EXPANDS
    up: tl.tensor,  # [COLUMNS, up_stride], if EXPANDS
    slots: tl.tensor,  # [num_rows], or one for all, if EXPANDS
    cos: tl.tensor,  # [num_rows, DIM]
    sin: tl.tensor,  # [num_rows, DIM]
    q_scale: tl.tensor,  # [DIM], if NORMED
    k_scale: tl.tensor,  # [DIM], if NORMED
    out: tl.tensor,  # [num_rows, heads, DIM], written
    product_stride: tl.tensor,
    inner_stride: tl.tensor,
    up_stride: tl.tensor,
    slot_stride: tl.tensor,
    EPS: tl.constexpr,
    Q_HEADS: tl.constexpr,
    QK_HEADS: tl.constexpr,
    HEADS: tl.constexpr,  # with those of values
    DIM: tl.constexpr,
    HALF: tl.constexpr,  # of DIM
    WIDTH: tl.constexpr,  # a power of two, at least HALF
    COLUMNS: tl.constexpr,
    RANK: tl.constexpr,
    STEP: tl.constexpr,  # of RANK, a power of two
    NORMED: tl.constexpr,
    EXPANDS: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lane = tl.arange(0, WIDTH)
    inside = lane < HALF
    scale = q_scale
    if head >= Q_HEADS:
        scale = k_scale
    slot = tl.zeros([], tl.int32)
    place = tl.arange(0, STEP)
    weights = tl.zeros([STEP, WIDTH], up.dtype.element_ty)
    more = weights
    up += (head * DIM + lane)[None, :]
    if EXPANDS:
        slot = tl.load(slots + row * slot_stride).to(tl.int32)
        held = ((place < RANK) & (slot >= 0))[:, None] & inside[None, :]
        at = up + (slot * RANK + place)[:, None] * up_stride
        weights = tl.load(at, mask=held, other=0.0)
        more = tl.load(at + HALF, mask=held, other=0.0)
    if OVERLAPS:
        gdc_wait()
    at = product + row * product_stride + head * DIM + lane
    low = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    if EXPANDS:
        part = (head >= Q_HEADS).to(tl.int32) + (head >= QK_HEADS)
        inner += row * inner_stride + part * COLUMNS
        low = _of_slot(inner, up, up_stride, slot, inside, low, weights, RANK, STEP)
        high = _of_slot(inner, up + HALF, up_stride, slot, inside, high, more, RANK, STEP)
    turned = inside & (head < QK_HEADS)
    if NORMED:
        squares = tl.sum(low * low, 0) + tl.sum(high * high, 0)
        norm = tl.where(head < QK_HEADS, tl.rsqrt(squares / DIM + EPS), 1.0)
        low *= norm * tl.load(scale + lane, mask=turned, other=1.0).to(tl.float32)
        high *= norm * tl.load(scale + HALF + lane, mask=turned, other=1.0).to(tl.float32)
    turn = row * DIM + lane
    store_rotated(
        low, high, cos + turn, sin + turn, out + (row * HEADS + head) * DIM + lane, turned, HALF
    )


def tile_of(sizes: Sequence[int], num_rows: int = _ROWS) -> int:
    """The columns of a program for parts of these sizes; 0: they need a launch each. O(parts)."""
    if len(sizes) == 1:
        fitting: Sequence[int] = _WIDTHS
    else:
        fitting = [width for width in _WIDTHS if all(size % width == 0 for size in sizes)]
    if not fitting or len(sizes) > _MOST_PARTS:
        return 0
    parts = max(1, num_rows // _ROWS)
    return next(
        (width for width in fitting if sum(sizes) // width * parts >= _PROGRAMS), fitting[-1]
    )


def expand(
    product: Tensor,
    inner: Tensor,
    up: Tensor,
    slots: Tensor,
    rank: int,
    sizes: Sequence[int],
    *,
    is_gated: bool = False,
    tile: int | None = None,
    at_once: int = _AT_ONCE,
) -> Tensor:
    """Add what the adapter of each row gives, see the module: [..., sum(sizes)]; one launch.

    Args:
        product: [..., sum(sizes)], its rows contiguous.
        inner: [..., num_parts * num_slots * rank], the first halves of all slots for each row.
        up: [num_slots * rank, sum(sizes)], its rows contiguous.
        slots: int64 [num_rows], -1: no adapter; or one for all rows.
        rank: the columns of a slot.
        sizes: of the parts, for which `tile_of` has a tile.
        is_gated: return `silu(first part) * second part`, two parts of one size.
        tile: columns of a program; None: the best number, which depends on that of the rows.
        at_once: the most columns of all slots that are read at once.
    """
    columns = up.shape[0]
    rows, halves = (one.reshape(-1, one.shape[-1]) for one in (product, inner))
    count = sum(sizes) // (2 if is_gated else 1)
    out = product.new_empty((*product.shape[:-1], count))
    if not len(rows):
        return out
    sizes = [count] if is_gated else sizes
    tile = tile or tile_of(sizes, len(rows))
    ends = [sum(sizes[: place + 1]) for place in range(3)]
    chunk = max(16, triton.next_power_of_2(columns)) if columns <= at_once else _CHUNK
    overlaps, options = overlap(rows)
    _expand[(triton.cdiv(count, tile), triton.cdiv(len(rows), _ROWS))](
        rows, halves, up, slots.contiguous(), out, len(rows), rows.stride(0), halves.stride(0),
        up.stride(0), int(slots.numel() > 1), count, *ends, columns, rank, is_gated, _ROWS, tile,
        chunk, overlaps, num_warps=4, **options,
    )  # fmt: skip
    return out


def fits(sizes: Sequence[int]) -> bool:
    """Return True if parts of these sizes can share a launch. O(parts)."""
    return tile_of(sizes) > 0


def expand_parts(
    product: Tensor,
    start: int,
    inner: Tensor,
    inner_start: int,
    up: Tensor,
    slots: Tensor,
    rank: int,
    sizes: Sequence[int],
    *,
    is_gated: bool = False,
) -> Tensor:
    """As `expand`, for columns of a product, and of an inner one, that have others; one launch."""
    inner = inner.narrow(-1, inner_start, len(sizes) * up.shape[0])
    product = product.narrow(-1, start, sum(sizes))
    return expand(product, inner, up, slots, rank, sizes, is_gated=is_gated)


class _Rows(NamedTuple):
    """The arguments of the kernels for single rows: a product, and the terms added to it."""

    rows: Tensor
    halves: Tensor
    up: Tensor
    slots: Tensor

    @property
    def strides(self) -> tuple[int, ...]:
        """The strides of the rows, the inner ones, the second halves and the slots. O(1)."""
        rows = [one.stride(0) for one in (self.rows, self.halves, self.up)]
        return *rows, int(self.slots.numel() > 1)


def _rows_of(
    product: Tensor, start: int, inner: Tensor, inner_start: int, up: Tensor, slots: Tensor,
    rank: int, sizes: Sequence[int],
) -> tuple[_Rows, bool]:  # fmt: skip
    """Return the rows, and True if the kernel adds what adapters add: to many rows it was added."""
    rows = product.narrow(-1, start, sum(sizes)).flatten(0, -2)
    halves = inner.narrow(-1, inner_start, len(sizes) * up.shape[0]).flatten(0, -2)
    is_few = len(rows) <= _FEW
    if not is_few:
        rows = expand(rows, halves, up, slots, rank, sizes)
    return _Rows(rows, halves, up, slots.contiguous()), is_few


def expand_normed(*given: Any) -> Tensor:  # noqa: ANN401  # see below
    """Return [2, ..., width]: the residual with what `expand_parts` gives, and its norm.

    One launch for few rows, and otherwise two.

    Args:
        given: what `expand_parts` is given, the residual [..., width], the scale of the norm
            [width] and its eps.
    """
    *_, rank, (width,), residual, scale, eps = given
    parts, expands = _rows_of(*given[:8])
    out = parts.rows.new_empty((2, *residual.shape))
    lanes = triton.next_power_of_2(width)
    step = min(triton.next_power_of_2(rank), max(1, _NUMBERS // lanes))
    overlaps, options = overlap(out)
    _expand_normed[(len(parts.rows),)](
        *parts, residual.contiguous(), scale, out, len(parts.rows), *parts.strides, eps, width,
        rank, lanes, step, expands, overlaps, num_warps=max(1, min(8, lanes // 256)), **options,
    )  # fmt: skip
    return out


def attend_rotated(
    call: Callable[[int, Tensor, Tensor, Tensor], Tensor],
    layer: int,
    *given: Any,  # noqa: ANN401  # those of `expand_parts`, and of `few_rows_kernels.rotate`
) -> Tensor:
    """Return the attention of a layer over what `expand_parts` gives, normed and rotated.

    One launch before it for few rows, and otherwise two.
    """
    *_, up, _, rank, _ = given[:8]
    cos, sin, q_scale, k_scale, eps, num_q_heads, num_kv_heads = given[8:]
    parts, expands = _rows_of(*given[:8])
    rows, dim, turned = parts.rows, cos.shape[-1], num_q_heads + num_kv_heads
    heads = turned + (num_kv_heads if expands else 0)
    out = rows.new_empty((len(rows), heads, dim))
    scales = [cos if one is None else one for one in (q_scale, k_scale)]
    overlaps, options = overlap(rows)
    _expand_rotated[(len(rows), heads)](
        *parts, cos.contiguous(), sin.contiguous(), *scales, out, *parts.strides, eps, num_q_heads,
        turned, heads, dim, dim // 2, triton.next_power_of_2(dim // 2), up.shape[0], rank,
        min(16, triton.next_power_of_2(rank)), q_scale is not None, expands, overlaps,
        num_warps=1, **options,
    )  # fmt: skip
    values = out[:, turned:] if expands else rows[:, turned * dim :].view(-1, num_kv_heads, dim)
    return call(layer, out[:, :num_q_heads], out[:, num_q_heads:turned], values)
