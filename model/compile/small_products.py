"""Products of few rows with a weight, and what stands around them in a layer, as kernels for a GPU.

    out = [residual +] x' @ weight.T [+ bias]        x' = x, or scale * x / rms(x)
    out = silu(x' @ gate.T) * (x' @ up.T)             where gate and up lie one after the other

With few rows a product is the reading of its weight. A program reads TILE rows of it, all at once
where a row is short, else STEP numbers of each after the other; the norm before and what comes
after cost it nothing beside that, and save a launch each, a microsecond or two. Sums are float32,
and what the network rounds on the way (the normed row, the product before it is added) is not
rounded here: results are near, not the same bits.

On a Hopper GPU a program begins while the one before it in the stream still runs, and reads its
weight, which nobody writes, before it waits for the rows.

Grid: slices of TILE numbers of `out`. Bytes moved: the weight once; x once a program, from the L2
cache. Knows nothing of layers.
"""

# ruff: noqa: N803 - compile-time arguments are upper case, as everywhere in Triton

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_WHOLE = 4096
"""Numbers of a row of the weight that are read at once, at most."""
_MANY = 4096
"""Rows of a weight from where on larger parts still make a program for every place."""


def _jit(function: Any) -> Any:  # noqa: ANN401  # Triton has no types
    """A kernel, or a function that kernels call."""
    return triton.jit(function)


@_jit
def _at_once(
    x: tl.tensor, weight: tl.tensor, scale: tl.tensor, row: tl.tensor, start: tl.tensor,
    WIDTH: tl.constexpr, COUNT: tl.constexpr, NORMED: tl.constexpr, GATED: tl.constexpr,
    STEP: tl.constexpr, OVERLAPS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """All of the weight's rows is read before x is waited for."""
    lane = tl.arange(0, STEP)[None, None, :]
    inside = lane < WIDTH
    read = tl.load(weight + start + lane, mask=inside, other=0.0)
    read_up = read
    if GATED:
        read_up = tl.load(weight + COUNT * WIDTH + start + lane, mask=inside, other=0.0)
    factor = tl.full([1, 1, STEP], 1.0, tl.float32)
    if NORMED:
        factor = tl.load(scale + lane, mask=inside, other=0.0).to(tl.float32)
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    part = tl.load(x + row * WIDTH + lane, mask=inside, other=0.0).to(tl.float32)
    squares = tl.sum(part * part, 2)
    part *= factor
    total = tl.sum(read.to(tl.float32) * part, 2)
    total_up = total
    if GATED:
        total_up = tl.sum(read_up.to(tl.float32) * part, 2)
    return total, total_up, squares


@_jit
def _in_steps(
    x: tl.tensor, weight: tl.tensor, scale: tl.tensor, row: tl.tensor, start: tl.tensor,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, COUNT: tl.constexpr, NORMED: tl.constexpr,
    GATED: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """STEP numbers of each of the weight's rows after the other, STAGES of them on their way."""
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    sums = tl.zeros([ROWS, TILE, STEP], tl.float32)
    sums_up = sums
    own = tl.zeros([ROWS, 1, STEP], tl.float32)
    for begin in tl.range(0, WIDTH, STEP, num_stages=STAGES):
        at = begin + tl.arange(0, STEP)[None, None, :]
        inside = at < WIDTH
        read = tl.load(weight + start + at, mask=inside, other=0.0).to(tl.float32)
        part = tl.load(x + row * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
        if NORMED:
            own += part * part
            part *= tl.load(scale + at, mask=inside, other=0.0).to(tl.float32)
        sums += read * part
        if GATED:
            read_up = tl.load(weight + COUNT * WIDTH + start + at, mask=inside, other=0.0)
            sums_up += read_up.to(tl.float32) * part
    return tl.sum(sums, 2), tl.sum(sums_up, 2), tl.sum(own, 2)


@_jit
def _multiply(
    x: tl.tensor,  # [ROWS, WIDTH]
    weight: tl.tensor,  # [COUNT, WIDTH], twice as many if GATED
    scale: tl.tensor,  # [WIDTH], if NORMED
    bias: tl.tensor,  # as long as the weight, if BIASED
    residual: tl.tensor,  # [ROWS, COUNT], if ADDED
    out: tl.tensor,  # [ROWS, COUNT], written
    EPS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    COUNT: tl.constexpr,
    NORMED: tl.constexpr,
    GATED: tl.constexpr,
    BIASED: tl.constexpr,
    ADDED: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,  # a power of two; all of a row at once if it is at least WIDTH
    STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    row = tl.arange(0, ROWS)[:, None, None]
    start = tl.minimum(place, COUNT - 1).to(tl.int64)[None, :, None] * WIDTH
    if STEP >= WIDTH:
        total, total_up, squares = _at_once(
            x, weight, scale, row, start, WIDTH, COUNT, NORMED, GATED, STEP, OVERLAPS
        )
    else:
        total, total_up, squares = _in_steps(
            x, weight, scale, row, start, ROWS, WIDTH, COUNT, NORMED, GATED, TILE, STEP, STAGES,
            OVERLAPS,
        )  # fmt: skip
    column = place[None, :]
    inside = column < COUNT
    if NORMED:
        norm = tl.rsqrt(squares / WIDTH + EPS)
        total, total_up = total * norm, total_up * norm
    if BIASED:
        total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        if BIASED:
            total_up += tl.load(bias + COUNT + column, mask=inside, other=0.0).to(tl.float32)
        total = total / (1.0 + tl.exp(-total)) * total_up
    to = tl.arange(0, ROWS)[:, None] * COUNT + column
    if ADDED:
        total += tl.load(residual + to, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + to, total.to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class Cut:
    """How a product is cut: see the kernel."""

    tile: int
    step: int
    stages: int
    warps: int


def cut_of(width: int, count: int, *, is_gated: bool) -> Cut:
    """How a weight of `count` rows so wide is read, as was measured on an H200. O(1)."""
    whole = triton.next_power_of_2(width)
    if whole > _WHOLE:
        return Cut(tile=4 if is_gated else 8, step=512, stages=4, warps=4)
    if whole == _WHOLE and count >= _MANY:
        return Cut(tile=2 if is_gated else 4, step=whole, stages=1, warps=4)
    if whole == _WHOLE:
        return Cut(tile=1 if is_gated else 2, step=whole, stages=1, warps=4)
    tile = max(1, min(16, 4096 // whole))
    return Cut(tile=max(1, tile // 2) if is_gated else tile, step=whole, stages=1, warps=2)


def multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    *,
    is_gated: bool = False,
    cut: Cut | None = None,
    overlapping: bool | None = None,
) -> Tensor:
    """A product of few rows, as the module says: [1, num_rows, count]. One launch.

    Args:
        x: 2 or 4 rows, one after the other in any shape.
        weight: [count, width], without gaps; of both halves if gated.
        bias: [count].
        scale: [width]: rows are normed and multiplied by this; None: they are as they are.
        eps: of the norm.
        residual: [1, num_rows, count], what the product is added to.
        is_gated: whether the first half of the product gates the second.
        cut: of the weight; None: what is best.
        overlapping: None: where the device can.
    """
    width, count = weight.shape[1], weight.shape[0] // (2 if is_gated else 1)
    rows = x.numel() // width
    cut = cut or cut_of(width, count, is_gated=is_gated)
    if overlapping is None:
        overlapping = x.is_cuda and torch.cuda.get_device_capability(x.device) >= (9, 0)
    out = torch.empty((1, rows, count), dtype=x.dtype, device=x.device)
    tensors = [x.contiguous(), weight] + [x if one is None else one for one in (scale, bias)]
    tensors += [x if residual is None else residual.contiguous(), out]
    does = (scale is not None, is_gated, bias is not None, residual is not None)
    options: dict[str, Any] = {"launch_pdl": True} if overlapping else {}
    _multiply[triton.cdiv(count, cut.tile),](
        *tensors, eps, rows, width, count, *does, cut.tile, cut.step, cut.stages, overlapping,
        num_warps=cut.warps, **options,
    )  # fmt: skip
    return out
