"""The compile-time values of the attention kernels: a layer's strides, sizes and operations.

A kernel takes one compile-time value, the `Form` of its file, which holds the `Layer`: a tuple
of numbers with names, which Triton's hooks can write as JSON. Kernels read the fields as
`LAYER.block_size`. A field that stands in a list needs a local constexpr first,
because Triton takes no Python number there.
"""

import math
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from backends.contract import AttentionTerms, KVCache
from backends.triton_gpu.shared.e4m3 import scale_step
from backends.triton_gpu.shared.place import Place, device_function, power_of_two


class Layer(NamedTuple):
    """A layer's compile-time values; of latents there is one KV head, and keys are values."""

    q_align: int
    """Elements that divide the strides of the queries, up to 16; the strides themselves are numbers
    of a call, because from head to head they grow with the step where heads come first."""
    o_head: int
    k_strides: tuple[int, ...]
    """Of a block, a slot and a head."""
    v_strides: tuple[int, ...]
    block_size: int
    num_heads: int
    """Query heads."""
    group: int
    head_dim: int
    """Of a value."""
    rest_dim: int
    """Numbers of a key after those that are its value; 0 unless of latents."""
    align: int
    """Elements that divide all strides of the cache but those from head to head of latents."""
    has_cap: bool
    has_window: bool
    has_sinks: bool
    e4m3: bool
    """The cache holds 8-bit floats."""
    native: bool
    """The GPU has an instruction that widens them."""
    k_scale: int
    """From a KV head's scale to the next; -1: there is none."""
    v_scale: int

    @property
    def width(self) -> int:
        """`head_dim` as a power of two that matrix instructions take."""
        return max(16, power_of_two(self.head_dim))


def layer_of(
    place: Place, query: Tensor, cache: KVCache, out: Tensor, terms: AttentionTerms
) -> Layer:
    """The compile-time values of calls with such arguments. O(1)."""
    num_heads, (_, block_size, num_kv_heads, key_dim) = query.shape[1], cache.k.shape
    head_dim = cache.v.shape[3]
    k_strides, v_strides = cache.k.stride()[:3], cache.v.stride()[:3]
    if cache.is_latent:
        k_strides = v_strides = (*k_strides[:2], 0)
        align = math.gcd(16, *k_strides, head_dim)
    else:
        align = math.gcd(16, *k_strides, *v_strides)
    return Layer(
        query_align(query), out.stride(1), k_strides, v_strides, block_size,
        num_heads, num_heads // num_kv_heads, head_dim, key_dim - head_dim, align,
        terms.soft_cap is not None, terms.window is not None, terms.sinks is not None,
        cache.k.dtype == torch.float8_e4m3fn, place.has_e4m3(query.device),
        scale_step(cache.k_scale), scale_step(cache.v_scale),
    )  # fmt: skip


def query_align(query: Tensor) -> int:
    """Elements that divide a query's strides, up to 16; of one token or head it has none. O(1)."""
    pairs = zip(query.shape[:2], query.stride()[:2], strict=True)
    return math.gcd(16, *(stride for size, stride in pairs if size > 1))


@device_function
def head_offset(head: tl.tensor, q_head: tl.tensor, ALIGN: tl.constexpr) -> tl.tensor:
    """Return the offset of query heads from their token; large if heads come first in memory."""
    return tl.multiple_of(head.to(tl.int64) * q_head, ALIGN)
