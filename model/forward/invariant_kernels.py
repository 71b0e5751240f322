"""Kernels of `batch_invariant.py` for a GPU, whose rows come out the same whatever their number.

`multiply`, a product of rows with a weight, and `add_up`, sums or means of rows:

    out[r] = x[r] @ weight.T [+ bias]        out[r] = sum_i x[r, i] [/ width]

The libraries of a GPU choose tiles, and in how many parts they sum, by the number of rows. Here a
program of `multiply` has 64 rows and a tile of columns, and goes through a row in steps of STEP
numbers, one of `add_up` has a row. Rows that a tile does not have are zeros, and no row of a
product meets another. Sums are float32.

Decides: the tile, by the shape and dtype of the weight alone (`tile_of`). It is as wide as possible
while there are enough programs for a GPU, because a product of few rows takes as long as its weight
takes to read.

Bytes moved: the weight once for 64 rows; the rows once for each tile of columns, from the L2 cache.
Sources: batch-invariant operators of vLLM and of He et al. 2025, which fix the tiles likewise.

Does not know: networks, batches.
"""

# ruff: noqa: N803 - compile-time arguments are upper case, as everywhere in Triton

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS = 64
"""Of a tile: the fewest of Hopper's matrix instruction."""
_WIDTHS = (128, 64, 32, 16)
_PROGRAMS = 128
"""Wanted for each 64 rows: about as many as a GPU has multiprocessors."""
_WARPS, _STAGES = 4, 4
_LONGEST = 1024
"""Numbers of a row that are added at once."""


class Tile(NamedTuple):
    """The part of a weight that a program of `multiply` has."""

    columns: int
    step: int
    """Numbers of a row at once."""


def tile_of(count: int, itemsize: int) -> Tile:
    """Return the tile for a weight of `count` rows. O(1)."""
    columns = next((width for width in _WIDTHS if count // width >= _PROGRAMS), _WIDTHS[-1])
    step_bytes = 256 if columns <= 32 and itemsize == 2 else 128
    return Tile(columns, step_bytes // itemsize)


def _jit(function: Any) -> Any:  # noqa: ANN401  # Triton has no types
    """Return a kernel, compiled once for all numbers of rows."""
    return triton.jit(function, do_not_specialize=["num_rows"])


@_jit
def _multiply(
    x: tl.tensor, weight: tl.tensor, bias: tl.tensor, out: tl.tensor, num_rows: tl.tensor,
    WIDTH: tl.constexpr, COUNT: tl.constexpr, STRIDE: tl.constexpr, HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there, wanted = (row < num_rows)[:, None], (column < COUNT)[:, None]
    x_at, w_at = row.to(tl.int64)[:, None] * WIDTH, column.to(tl.int64)[:, None] * STRIDE
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, WIDTH, STEP):
        lane = (first + tl.arange(0, STEP))[None, :]
        rows = tl.load(x + x_at + lane, mask=there & (lane < WIDTH), other=0.0)
        weights = tl.load(weight + w_at + lane, mask=wanted & (lane < WIDTH), other=0.0)
        total = tl.dot(rows, tl.trans(weights), total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + column, mask=column < COUNT, other=0.0).to(tl.float32)[None, :]
    at = row.to(tl.int64)[:, None] * COUNT + column[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=there & (column < COUNT)[None, :])


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `functional.linear`: [..., width] with a weight [count, width]; one launch."""
    width, count = x.shape[-1], weight.shape[0]
    rows = x.reshape(-1, width).contiguous()
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    out = rows.new_empty((len(rows), count))
    if len(rows):
        columns, step = tile_of(count, x.itemsize)
        grid = (triton.cdiv(len(rows), _ROWS), triton.cdiv(count, columns))
        _multiply[grid](
            rows, weight, out if bias is None else bias.contiguous(), out, len(rows), width, count,
            weight.stride(0), bias is not None, _ROWS, columns, step,
            num_warps=_WARPS, num_stages=_STAGES,
        )  # fmt: skip
    return out.reshape(*x.shape[:-1], count)


@_jit
def _add_up(
    x: tl.tensor, out: tl.tensor, WIDTH: tl.constexpr, STEP: tl.constexpr, PARTS: tl.constexpr
) -> None:
    lane = tl.arange(0, STEP)
    total = tl.zeros([STEP], tl.float32)
    x += tl.program_id(0).to(tl.int64) * WIDTH
    for first in range(0, WIDTH, STEP):
        part = tl.load(x + first + lane, mask=first + lane < WIDTH, other=0.0)
        total += part.to(tl.float32)
    tl.store(out + tl.program_id(0), tl.sum(total, 0) / PARTS)


def add_up(x: Tensor, is_mean: bool) -> Tensor:  # noqa: FBT001  # an argument of an operator
    """Return float32 sums or means of the last dimension: [..., width] to [...]; one launch."""
    width = x.shape[-1]
    rows = x.reshape(-1, width).contiguous()
    out = torch.empty(len(rows), dtype=torch.float32, device=x.device)
    if len(rows):
        step = min(_LONGEST, triton.next_power_of_2(width))
        _add_up[(len(rows),)](rows, out, width, step, width if is_mean else 1, num_warps=_WARPS)
    return out.reshape(x.shape[:-1])
