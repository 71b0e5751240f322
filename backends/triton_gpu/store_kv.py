"""Scatter new keys and values into the cache on a GPU.

    cache[slot // block_size, slot % block_size] = row of the token, for every slot >= 0
    in a quantised cache: e4m3(clamp(row * (1 / scale), -448, 448))

Layout as in the contract, any strides but the last. Grid: (tiles of tokens, slices of the heads); a
program moves ELEMENTS elements of keys and as many of values (of latents keys alone), [tokens,
heads, head_dim], 16 bytes a thread and copy where strides allow, and asks for all of them before it
knows their slots: rows whose slot is negative are loaded in vain. One launch writes both caches.
Bytes moved: each row read once and written once. Exact. The sign of a slot is tested before it is
divided, because Triton's division truncates. Slots past the cache are the caller's mistake and are
not looked for.
"""

import math
from typing import cast

import torch
import triton.language as tl
from torch import Tensor

from backends.checks import check_store_kv
from backends.contract import Backend, KVCache
from backends.triton_gpu.shared.e4m3 import narrow, scale_step
from backends.triton_gpu.shared.launch import Launch, launcher
from backends.triton_gpu.shared.place import Place, ceil_div, device_function, power_of_two, sign

ELEMENTS = 1024
WARPS = 4


@device_function
def _as_stored(
    data: tl.tensor, scale: tl.tensor, head: tl.tensor, live: tl.tensor,
    SCALE: tl.constexpr, E4M3: tl.constexpr, NATIVE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Elements as the cache holds them; SCALE: from head to head, -1: there is no scale."""
    if E4M3:
        data = data.to(tl.float32)
        if SCALE >= 0:
            each = tl.load(scale + head * SCALE, mask=live, other=1.0)
            data *= tl.div_rn(tl.full(each.shape, 1.0, tl.float32), each)[None, :, None]
        data = narrow(data, NATIVE)
    return data


@launcher(
    integers=("key_stride", "value_stride", "num_tokens"),
    indices=("slots", "k_scale", "v_scale"),
    pointers=("key", "value", "k_cache", "v_cache"),
)
def _scatter(
    key: tl.tensor,  # [num_tokens, num_kv_heads, head_dim]
    value: tl.tensor,  # likewise
    k_cache: tl.tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]; e4m3 if E4M3
    v_cache: tl.tensor,  # likewise
    slots: tl.tensor,  # int64 [num_tokens]
    k_scale: tl.tensor,  # float32 [1] or [num_kv_heads], read if K_SCALE >= 0
    v_scale: tl.tensor,  # likewise
    key_stride: tl.tensor,  # from token to token
    value_stride: tl.tensor,
    num_tokens: tl.tensor,
    KEY_HEAD: tl.constexpr,  # from head to head
    VALUE_HEAD: tl.constexpr,
    K_STRIDES: tl.constexpr,  # block, offset, head
    V_STRIDES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,  # KV heads
    HEAD_DIM: tl.constexpr,
    ALIGN: tl.constexpr,  # elements that divide all strides but those from head to head
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,  # head_dim as a power of two
    E4M3: tl.constexpr,
    NATIVE: tl.constexpr,
    K_SCALE: tl.constexpr,  # from head to head, -1: there is none
    V_SCALE: tl.constexpr,
    LATENT: tl.constexpr,  # there are no values beside the keys
) -> None:
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    live = head < NUM_HEADS
    dim = tl.arange(0, WIDTH)[None, None, :]
    inside = live[None, :, None] & (dim < HEAD_DIM)
    there = (token < num_tokens)[:, None, None] & inside
    row, across = token.to(tl.int64), head[None, :, None]
    key_row = tl.multiple_of(row * key_stride, ALIGN)[:, None, None]
    k_data = tl.load(key + key_row + (across * KEY_HEAD + dim), mask=there)
    v_data = k_data
    if not LATENT:
        value_row = tl.multiple_of(row * value_stride, ALIGN)[:, None, None]
        v_data = tl.load(value + value_row + (across * VALUE_HEAD + dim), mask=there)

    slot = tl.load(slots + token, mask=token < num_tokens, other=-1)
    mask = (slot >= 0)[:, None, None] & inside
    block_id, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    k_row = block_id * K_STRIDES[0] + offset * K_STRIDES[1]
    k_row = tl.multiple_of(k_row, ALIGN)[:, None, None]
    k_data = _as_stored(k_data, k_scale, head, live, K_SCALE, E4M3, NATIVE)
    tl.store(k_cache + k_row + (across * K_STRIDES[2] + dim), k_data, mask=mask)
    if not LATENT:
        v_row = block_id * V_STRIDES[0] + offset * V_STRIDES[1]
        v_row = tl.multiple_of(v_row, ALIGN)[:, None, None]
        v_data = _as_stored(v_data, v_scale, head, live, V_SCALE, E4M3, NATIVE)
        tl.store(v_cache + v_row + (across * V_STRIDES[2] + dim), v_data, mask=mask)


def store_kv(
    backend: Backend,
    place: Place,
    key: Tensor,
    value: Tensor | None,
    cache: KVCache,
    slot_mapping: Tensor,
) -> None:
    """Write each token's key and value into its slot; see `Backend.store_kv`.

    Raises:
        InvalidArgumentError: a shape, dtype or device breaks the contract; nothing written.
    """
    k_scale, v_scale = cache.k_scale, cache.v_scale
    signature = (
        "store", sign(key), sign(value), sign(cache.k), sign(cache.v), sign(slot_mapping),
        sign(k_scale), sign(v_scale),
    )  # fmt: skip
    plan = cast("Launch | None", place.plan(signature))
    if plan is None:
        check_store_kv(backend, key, value, cache, slot_mapping)
        plan = _plan(place, key, value, cache)
        place.keep(signature, plan)
    if plan.grid[0]:
        k = slot_mapping if k_scale is None else k_scale
        v = slot_mapping if v_scale is None else v_scale
        value = key if value is None else value
        tensors = (key, value, cache.k, cache.v, slot_mapping, k, v)
        plan.run(tensors)


def _plan(place: Place, key: Tensor, value: Tensor | None, cache: KVCache) -> Launch:
    num_tokens, num_kv_heads, head_dim = key.shape
    is_latent = value is None
    value = key if value is None else value
    width = power_of_two(head_dim)
    heads = max(1, min(power_of_two(num_kv_heads), ELEMENTS // width))
    tokens = max(1, ELEMENTS // width // heads)
    (key_stride, key_head, _), (value_stride, value_head, _) = key.stride(), value.stride()
    k_strides, v_strides = cache.k.stride()[:3], cache.v.stride()[:3]
    align = math.gcd(16, key_stride, value_stride, *k_strides[:2], *v_strides[:2])
    constants = (
        key_head, value_head, k_strides, v_strides, cache.k.shape[1], num_kv_heads, head_dim, align,
        tokens, heads, width, cache.k.dtype == torch.float8_e4m3fn, place.has_e4m3(key.device),
        scale_step(cache.k_scale), scale_step(cache.v_scale), is_latent,
    )  # fmt: skip
    dtypes = (key.dtype, cache.k.dtype)
    variant = _scatter.variant(place, key.device, dtypes, constants, num_warps=WARPS)
    grid = (ceil_div(num_tokens, tokens), ceil_div(num_kv_heads, heads), 1)
    return Launch(variant, grid, (key_stride, value_stride, num_tokens))
