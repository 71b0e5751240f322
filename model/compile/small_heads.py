"""Queries and keys of few tokens, normed and rotated, as one kernel for a GPU.

    h' = h / rms(h) * scale                 of each head, where there are scales
    out = h' * cos + turned(h') * sin       turned: the second half, negative, then the first

Queries, keys and values of a token lie one after the other, as one product gives them. Grid:
(token, head of queries or keys), a warp each. Bytes moved: queries and keys read and written once;
values stay where they are. Sums are float32, and nothing is rounded on the way.

Knows nothing of layers, caches or batches.
"""

# ruff: noqa: N803 - compile-time arguments are upper case, as everywhere in Triton

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


def _jit(function: Any) -> Any:  # noqa: ANN401  # Triton has no types
    """A kernel."""
    return triton.jit(function)


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
    cos_low = tl.load(cos + turn, mask=inside, other=0.0).to(tl.float32)
    cos_high = tl.load(cos + turn + HALF, mask=inside, other=0.0).to(tl.float32)
    sin_low = tl.load(sin + turn, mask=inside, other=0.0).to(tl.float32)
    sin_high = tl.load(sin + turn + HALF, mask=inside, other=0.0).to(tl.float32)
    to = out + (token * HEADS + head) * DIM + lane
    dtype = out.dtype.element_ty
    tl.store(to, (low * cos_low - high * sin_low).to(dtype), mask=inside)
    tl.store(to + HALF, (high * cos_high + low * sin_high).to(dtype), mask=inside)


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
    """Queries, keys and values of each token, as the module says: [num_tokens, heads, dim].

    One launch; values are a view of the product.

    Args:
        product: [1, num_tokens, numbers], without gaps.
        cos: [1, num_tokens, dim].
        sin: likewise.
        q_scale: [dim], of the norm; None: there is none, nor for keys.
        k_scale: [dim].
        eps: of the norm.
        num_q_heads: heads of queries.
        num_kv_heads: heads of keys, and of values.
        overlapping: None: where the device can.
    """
    num_tokens, dim = product.shape[1], cos.shape[-1]
    heads = num_q_heads + num_kv_heads
    if overlapping is None:
        overlapping = product.is_cuda and torch.cuda.get_device_capability(product.device) >= (9, 0)
    out = torch.empty((num_tokens, heads, dim), dtype=product.dtype, device=product.device)
    options: dict[str, Any] = {"launch_pdl": True} if overlapping else {}
    scales = [cos if one is None else one for one in (q_scale, k_scale)]
    _rotate[num_tokens, heads](
        product, cos.contiguous(), sin.contiguous(), *scales, out, eps, product.shape[2],
        num_q_heads, heads, dim, dim // 2, triton.next_power_of_2(dim // 2), q_scale is not None,
        overlapping, num_warps=1, **options,
    )  # fmt: skip
    values = product[0, :, heads * dim :].view(num_tokens, num_kv_heads, dim)
    return out[:, :num_q_heads], out[:, num_q_heads:], values


def attend_rotated(
    call: Callable[[int, Tensor, Tensor, Tensor], Tensor],
    layer: int,
    *given: Any,  # noqa: ANN401  # those of `rotate`
) -> Tensor:
    """Attention of a layer over what `rotate` gives: [num_tokens, num_q_heads, dim]."""
    return call(layer, *rotate(*given))
