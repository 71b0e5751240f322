"""Scatter new keys and values into the cache on a GPU.

    cache[slot // block_size, slot % block_size] = row of the token, for every slot >= 0
    in a quantised cache: e4m3(clamp(row / scale, -448, 448))

Layout as in the contract, any strides but the last. Grid: (tiles of tokens, pieces of a row); a
program moves ELEMENTS elements of keys and as many of values, 16 bytes a thread and copy where
strides allow, and asks for all of them before it knows their slots: rows whose slot is negative
are loaded in vain. One launch writes both caches. Bytes moved: each row read once and written once.
Exact. The sign of a slot is tested before it is divided, because Triton's division truncates. Slots
past the cache are the caller's mistake and are not looked for.
"""

# ruff: noqa: N803 - compile-time arguments are upper case, as everywhere in Triton

import math

import torch
import triton.language as tl
from torch import Tensor

from backends.checks import check_store_kv
from backends.contract import Backend
from backends.triton_gpu.e4m3 import narrow
from backends.triton_gpu.launch import launcher
from backends.triton_gpu.place import Place, ceil_div, device_function, power_of_two
from backends.triton_gpu.terms import scale_step

ELEMENTS = 1024
WARPS = 4


@device_function
def _as_stored(
    data: tl.tensor, scale: tl.tensor, head: tl.tensor, live: tl.tensor,
    SCALE: tl.constexpr, E4M3: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Elements as the cache holds them; SCALE: from head to head, -1: there is no scale."""
    if E4M3:
        data = data.to(tl.float32)
        if SCALE >= 0:
            data = tl.div_rn(data, tl.load(scale + head * SCALE, mask=live, other=1.0)[None, :])
        data = narrow(data)
    return data


@launcher(
    integers=("key_stride", "value_stride", "num_tokens"),
    indices=("slots", "k_scale", "v_scale"),
    pointers=("key", "value", "k_cache", "v_cache"),
)
def _scatter(
    key: tl.tensor,  # [num_tokens, num_kv_heads, head_dim]
    value: tl.tensor,  # likewise
    k_cache: tl.tensor,  # [num_blocks, block_size, num_kv_heads, head_dim], bytes if E4M3
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
    HEAD_DIM: tl.constexpr,
    ROW: tl.constexpr,  # num_kv_heads * head_dim
    ALIGN: tl.constexpr,  # elements that divide all strides but those inside a row
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    E4M3: tl.constexpr,
    K_SCALE: tl.constexpr,  # from head to head, -1: there is none
    V_SCALE: tl.constexpr,
) -> None:
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    element = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    head = element // HEAD_DIM
    inside = element < ROW
    there = (token < num_tokens)[:, None] & inside[None, :]
    key_row = tl.multiple_of(token.to(tl.int64) * key_stride, ALIGN)[:, None]
    value_row = tl.multiple_of(token.to(tl.int64) * value_stride, ALIGN)[:, None]
    k_data = tl.load(key + key_row + _in_row(element, KEY_HEAD, HEAD_DIM)[None, :], mask=there)
    v_data = tl.load(
        value + value_row + _in_row(element, VALUE_HEAD, HEAD_DIM)[None, :], mask=there
    )

    slot = tl.load(slots + token, mask=token < num_tokens, other=-1)
    mask = (slot >= 0)[:, None] & inside[None, :]
    block_id, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    k_row = tl.multiple_of(block_id * K_STRIDES[0] + offset * K_STRIDES[1], ALIGN)[:, None]
    v_row = tl.multiple_of(block_id * V_STRIDES[0] + offset * V_STRIDES[1], ALIGN)[:, None]
    k_data = _as_stored(k_data, k_scale, head, inside, K_SCALE, E4M3)
    v_data = _as_stored(v_data, v_scale, head, inside, V_SCALE, E4M3)
    tl.store(k_cache + k_row + _in_row(element, K_STRIDES[2], HEAD_DIM)[None, :], k_data, mask=mask)
    tl.store(v_cache + v_row + _in_row(element, V_STRIDES[2], HEAD_DIM)[None, :], v_data, mask=mask)


@device_function
def _in_row(element: tl.tensor, HEAD: tl.constexpr, HEAD_DIM: tl.constexpr) -> tl.tensor:
    """Offsets of elements in a row whose heads are this far apart; without a gap: themselves."""
    return element if HEAD == HEAD_DIM else element // HEAD_DIM * HEAD + element % HEAD_DIM


def store_kv(
    backend: Backend,
    place: Place,
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Write each token's key and value into its slot; see `Backend.store_kv`.

    Raises:
        InvalidArgumentError: a shape, dtype or device breaks the contract; nothing written.
    """
    check_store_kv(backend, key, value, k_cache, v_cache, slot_mapping, k_scale, v_scale)
    num_tokens, num_kv_heads, head_dim = key.shape
    if num_tokens == 0:
        return
    row = num_kv_heads * head_dim
    width = min(ELEMENTS, power_of_two(row))
    tokens = ELEMENTS // width
    e4m3 = k_cache.dtype == torch.float8_e4m3fn
    if e4m3:
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    (key_stride, key_head, _), (value_stride, value_head, _) = key.stride(), value.stride()
    k_strides, v_strides = k_cache.stride()[:3], v_cache.stride()[:3]
    align = math.gcd(16, key_stride, value_stride, *k_strides[:2], *v_strides[:2])
    _scatter.launch(
        place,
        (ceil_div(num_tokens, tokens), ceil_div(row, width)),
        (
            key, value, k_cache, v_cache, slot_mapping,
            slot_mapping if k_scale is None else k_scale,
            slot_mapping if v_scale is None else v_scale,
            key_stride, value_stride, num_tokens,
        ),
        (
            key_head, value_head, k_strides, v_strides, k_cache.shape[1], head_dim, row,
            align, tokens, width, e4m3, scale_step(k_scale), scale_step(v_scale),
        ),
        num_warps=WARPS,
    )  # fmt: skip
