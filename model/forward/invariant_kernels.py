"""Kernels of `batch_invariant.py` for a GPU, whose rows come out the same whatever their number.

`multiply`, a product of rows with a weight, and `sum_rows`:

    out[r] = x[r] @ weight.T [+ bias]        out[r] = sum_i x[r, i]

The libraries of a GPU choose tiles, and in how many parts they sum, by the number of rows. Here
both are fixed: a program of `multiply` has 64 rows and 64 columns and goes through a row in steps
of STEP numbers, one of `sum_rows` has a row. Rows that a tile does not have are zeros, and no row
of a product meets another. Sums are float32.

Bytes moved: the weight once for 64 rows. Sources: batch-invariant operators of vLLM and of He et
al. 2025, which fix the tiles likewise.

Does not know: networks, batches.
"""

# ruff: noqa: N803 - compile-time arguments are upper case, as everywhere in Triton

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 64
_WARPS, _STAGES = 4, 4
_LONGEST = 1024
"""Numbers of a row that are added at once."""


def _jit(function: Any) -> Any:  # noqa: ANN401  # Triton has no types
    """A kernel, compiled once for all numbers of rows."""
    return triton.jit(function, do_not_specialize=["num_rows"])


@_jit
def _multiply(
    x: tl.tensor, weight: tl.tensor, bias: tl.tensor, out: tl.tensor, num_rows: tl.tensor,
    WIDTH: tl.constexpr, COUNT: tl.constexpr, STRIDE: tl.constexpr, HAS_BIAS: tl.constexpr,
    TILE: tl.constexpr, STEP: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    there, wanted = (row < num_rows)[:, None], (column < COUNT)[:, None]
    x_at, w_at = row.to(tl.int64)[:, None] * WIDTH, column.to(tl.int64)[:, None] * STRIDE
    total = tl.zeros([TILE, TILE], tl.float32)
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
    """`functional.linear`: [..., width] with a weight [count, width]; one launch."""
    width, count = x.shape[-1], weight.shape[0]
    rows = x.reshape(-1, width).contiguous()
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    out = rows.new_empty((len(rows), count))
    if len(rows):
        grid = (triton.cdiv(len(rows), _TILE), triton.cdiv(count, _TILE))
        _multiply[grid](
            rows, weight, out if bias is None else bias, out, len(rows), width, count,
            weight.stride(0), bias is not None, _TILE, 128 // x.itemsize,
            num_warps=_WARPS, num_stages=_STAGES,
        )  # fmt: skip
    return out.reshape(*x.shape[:-1], count)


@_jit
def _sum_rows(x: tl.tensor, out: tl.tensor, WIDTH: tl.constexpr, STEP: tl.constexpr) -> None:
    lane = tl.arange(0, STEP)
    total = tl.zeros([STEP], tl.float32)
    x += tl.program_id(0).to(tl.int64) * WIDTH
    for first in range(0, WIDTH, STEP):
        part = tl.load(x + first + lane, mask=first + lane < WIDTH, other=0.0)
        total += part.to(tl.float32)
    tl.store(out + tl.program_id(0), tl.sum(total, 0))


def sum_rows(x: Tensor) -> Tensor:
    """The float32 sums of the last dimension: [..., width] gives [...]; one launch."""
    width = x.shape[-1]
    rows = x.reshape(-1, width).contiguous()
    out = torch.empty(len(rows), dtype=torch.float32, device=x.device)
    if len(rows):
        step = min(_LONGEST, triton.next_power_of_2(width))
        _sum_rows[(len(rows),)](rows, out, width, step, num_warps=_WARPS)
    return out.reshape(x.shape[:-1])
