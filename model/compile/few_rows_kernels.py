"""Kernels of `few_rows.py` for a GPU: a product with all that surrounds it, and rotated heads.

`multiply`, a product of 2 or 4 rows with a weight:

    out = [residual +] x' @ weight.T [+ bias]        x' = x, or scale * x / rms(x)
    out = silu(x' @ gate.T) * (x' @ up.T)             if gated; the weight is gate, then up

With few rows a product costs as much as reading its weight. A program reads TILE rows of the
weight, a short row at once and a long one in steps of STEP numbers. The norm before and the work
after cost nothing beside that, and save a launch each, one or two microseconds. Grid: slices of
TILE numbers of `out`. Bytes moved: the weight once; x once per program, from the L2 cache.

`rotate`, queries and keys of few tokens, normed and rotated:

    h' = h / rms(h) * scale                 of each head, if there are scales
    out = h' * cos + turned(h') * sin       turned: the second half, negated, then the first

Queries, keys and values of a token are contiguous, as one product gives them. Grid: (token, query
or key head), one warp each. Bytes moved: queries and keys are read and written once; values stay.

Sums are float32. What the network rounds in between (the normed row, the product before it is
added) is not rounded here, so results are close, but not bit-identical. On a Hopper GPU a program
starts while the previous kernel of the stream still runs, and reads its weight, which no kernel
writes, before it waits for the rows.

A start lets other processes compile them: within `noting` launches are listed, not made.

Does not know: layers, caches, batches.
"""

# ruff: noqa: N803 - compile-time arguments are upper case, as everywhere in Triton

import threading
from collections.abc import Callable, Iterator, ValuesView
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_WHOLE = 4096
"""The longest row of a weight that is read at once."""
_MANY = 4096
"""The least rows of a weight for larger tiles: there are still enough programs for a GPU."""


def _jit(function: Any) -> Any:  # noqa: ANN401  # Triton has no types
    """A kernel, or a function that kernels call."""
    return triton.jit(function)


@_jit
def _at_once(
    x: tl.tensor, weight: tl.tensor, scale: tl.tensor, row: tl.tensor, start: tl.tensor,
    WIDTH: tl.constexpr, COUNT: tl.constexpr, NORMED: tl.constexpr, GATED: tl.constexpr,
    STEP: tl.constexpr, OVERLAPS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Read whole rows of the weight before waiting for x."""
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
    """Read rows of the weight in steps of STEP numbers, with STAGES steps in flight."""
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
    """How a product is divided: see the kernel."""

    tile: int
    step: int
    stages: int
    warps: int


def _cut_of(width: int, count: int, *, is_gated: bool) -> Cut:
    """How a weight of `count` rows of `width` numbers is read, as measured on an H200. O(1)."""
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
    """A product of few rows, see the module: [1, num_rows, count]. One launch.

    Args:
        x: 2 or 4 contiguous rows, in any shape.
        weight: [count, width], contiguous; both halves if gated.
        bias: [count].
        scale: [width]: rows are normed and multiplied by it; None: no norm.
        eps: of the norm.
        residual: [1, num_rows, count], added to the product.
        is_gated: whether the first half of the product gates the second.
        cut: of the weight; None: the best one.
        overlapping: whether the kernel starts early; None: where the device can.
    """
    width, count = weight.shape[1], weight.shape[0] // (2 if is_gated else 1)
    rows = x.numel() // width
    cut = cut or _cut_of(width, count, is_gated=is_gated)
    overlaps, options = overlap(x, overlapping=overlapping)
    out = torch.empty((1, rows, count), dtype=x.dtype, device=x.device)
    tensors = [x.contiguous(), weight] + [x if one is None else one for one in (scale, bias)]
    tensors += [x if residual is None else residual.contiguous(), out]
    does = (scale is not None, is_gated, bias is not None, residual is not None)
    _launch(
        "_multiply", (triton.cdiv(count, cut.tile),),
        *tensors, eps, rows, width, count, *does, cut.tile, cut.step, cut.stages, overlaps,
        num_warps=cut.warps, **options,
    )  # fmt: skip
    return out


class _Noting(threading.local):
    """Launches that this thread notes; None: it makes them."""

    noted: dict[str, Callable[[], None]] | None = None


_NOTING = _Noting()


@contextmanager
def noting() -> Iterator[ValuesView[Callable[[], None]]]:
    """List launches, each kind once, instead of making them: results hold anything.

    Only of this thread: another may serve requests.
    """
    noted = _NOTING.noted = {}
    try:
        yield noted.values()
    finally:
        _NOTING.noted = None


def _launch(
    name: str,
    grid: tuple[int, ...],
    *given: Any,  # noqa: ANN401  # of any kernel
    **options: Any,  # noqa: ANN401
) -> None:
    if _NOTING.noted is None:
        globals()[name][grid](*given, **options)
        return
    looks = [(each.shape, each.dtype) if isinstance(each, Tensor) else each for each in given]
    _NOTING.noted.setdefault(str((name, looks)), partial(_launch_alone, name, grid, given, options))


def _launch_alone(
    name: str, grid: tuple[int, ...], given: tuple[Any, ...], options: dict[str, Any]
) -> None:
    """Launch where the tensors are not: on others that look like them."""
    values = [
        torch.empty(each.shape, dtype=each.dtype, device=each.device)
        if isinstance(each, Tensor)
        else each
        for each in given
    ]
    _launch(name, grid, *values, **options)


def overlap(tensor: Tensor, *, overlapping: bool | None = None) -> tuple[bool, dict[str, Any]]:
    """Return whether a kernel starts while the previous one runs, and the launch options for it."""
    if overlapping is None:
        overlapping = tensor.is_cuda and torch.cuda.get_device_capability(tensor.device) >= (9, 0)
    return overlapping, {"launch_pdl": True} if overlapping else {}


@_jit
def store_rotated(
    low: tl.tensor,
    high: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    out: tl.tensor,
    turned: tl.tensor,
    HALF: tl.constexpr,
) -> None:
    """Store the two halves of heads, rotated where they are turned."""
    cos_low = tl.load(cos, mask=turned, other=1.0).to(tl.float32)
    cos_high = tl.load(cos + HALF, mask=turned, other=1.0).to(tl.float32)
    sin_low = tl.load(sin, mask=turned, other=0.0).to(tl.float32)
    sin_high = tl.load(sin + HALF, mask=turned, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    inside = tl.arange(0, low.shape[0]) < HALF
    tl.store(out, (low * cos_low - high * sin_low).to(dtype), mask=inside)
    tl.store(out + HALF, (high * cos_high + low * sin_high).to(dtype), mask=inside)


@_jit
def _rotate(
    product: tl.tensor,  # [num_tokens, STRIDE]
    cos: tl.tensor,  # [num_tokens, DIM]
    sin: tl.tensor,  # [num_tokens, DIM]
    q_scale: tl.tensor,  # [DIM], if NORMED
    k_scale: tl.tensor,  # [DIM], if NORMED
    out: tl.tensor,  # [num_tokens, heads of queries and keys, DIM], written
    EPS: tl.constexpr,
    STRIDE: tl.constexpr,
    Q_HEADS: tl.constexpr,
    HEADS: tl.constexpr,  # of queries and keys
    DIM: tl.constexpr,
    HALF: tl.constexpr,  # of DIM
    WIDTH: tl.constexpr,  # a power of two, at least HALF
    NORMED: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    token, head = tl.program_id(0), tl.program_id(1)
    lane = tl.arange(0, WIDTH)
    inside = lane < HALF
    first = tl.full([WIDTH], 1.0, tl.float32)
    second = first
    if NORMED:
        scale = k_scale
        if head < Q_HEADS:
            scale = q_scale
        first = tl.load(scale + lane, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(scale + HALF + lane, mask=inside, other=0.0).to(tl.float32)
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    at = product + token * STRIDE + head * DIM + lane
    low = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    if NORMED:
        squares = tl.sum(low * low, 0) + tl.sum(high * high, 0)
        norm = tl.rsqrt(squares / DIM + EPS)
        low, high = low * norm * first, high * norm * second
    turn = token * DIM + lane
    store_rotated(
        low, high, cos + turn, sin + turn, out + (token * HEADS + head) * DIM + lane, inside, HALF
    )


def rotate(
    product: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    eps: float,
    num_q_heads: int,
    num_kv_heads: int,
    *,
    overlapping: bool | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of each token, see the module: [num_tokens, heads, dim].

    One launch; values are a view of the product.

    Args:
        product: [1, num_tokens, numbers], contiguous.
        cos: [1, num_tokens, dim].
        sin: [1, num_tokens, dim].
        q_scale: [dim], of the norm; None: no norm of queries and keys.
        k_scale: [dim].
        eps: of the norm.
        num_q_heads: heads of queries.
        num_kv_heads: heads of keys, and of values.
        overlapping: whether the kernel starts early; None: where the device can.
    """
    num_tokens, dim = product.shape[1], cos.shape[-1]
    heads = num_q_heads + num_kv_heads
    overlaps, options = overlap(product, overlapping=overlapping)
    out = torch.empty((num_tokens, heads, dim), dtype=product.dtype, device=product.device)
    scales = [cos if one is None else one for one in (q_scale, k_scale)]
    _launch(
        "_rotate", (num_tokens, heads),
        product, cos.contiguous(), sin.contiguous(), *scales, out, eps, product.shape[2],
        num_q_heads, heads, dim, dim // 2, triton.next_power_of_2(dim // 2), q_scale is not None,
        overlaps, num_warps=1, **options,
    )  # fmt: skip
    values = product[0, :, heads * dim :].view(num_tokens, num_kv_heads, dim)
    return out[:, :num_q_heads], out[:, num_q_heads:], values


def attend_rotated(
    call: Callable[[int, Tensor, Tensor, Tensor], Tensor],
    layer: int,
    *given: Any,  # noqa: ANN401  # those of `rotate`
) -> Tensor:
    """Attention of a layer over the results of `rotate`: [num_tokens, num_q_heads, dim]."""
    return call(layer, *rotate(*given))
