"""Scatter new keys and values into the cache on a GPU.

    cache[slot // block_size, slot % block_size] = row of the token, for every slot >= 0

Layout as in the contract, any strides but the last. Grid: (tiles of 4 tokens, pieces of a row);
one launch writes both caches. Bytes moved: each row read once and written once. Exact. The sign of
a slot is tested before it is divided, because Triton's division truncates. Slots past the cache
are the caller's mistake and are not looked for.
"""

# ruff: noqa: N803 - compile-time arguments are upper case, as everywhere in Triton

import triton.language as tl
from torch import Tensor

from backends.checks import check_store_kv
from backends.contract import Backend
from backends.triton_gpu.place import Place, ceil_div, jit, power_of_two

TOKENS = 4
MAX_WIDTH = 1024


@jit(do_not_specialize=["num_tokens"])
def _scatter(
    key: tl.tensor,  # [num_tokens, num_kv_heads, head_dim]
    value: tl.tensor,  # likewise
    k_cache: tl.tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
    v_cache: tl.tensor,  # likewise
    slots: tl.tensor,  # int64 [num_tokens]
    num_tokens: tl.tensor,
    KEY_STRIDES: tl.constexpr,  # token, head
    VALUE_STRIDES: tl.constexpr,
    K_STRIDES: tl.constexpr,  # block, offset, head
    V_STRIDES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROW: tl.constexpr,  # num_kv_heads * head_dim
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    element = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    head, dim = element // HEAD_DIM, element % HEAD_DIM
    slot = tl.load(slots + token, mask=token < num_tokens, other=-1)
    mask = (slot >= 0)[:, None] & (element < ROW)[None, :]
    block_id, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    row = token.to(tl.int64)[:, None]

    source = key + row * KEY_STRIDES[0] + (head * KEY_STRIDES[1] + dim)[None, :]
    target = k_cache + (block_id * K_STRIDES[0] + offset * K_STRIDES[1])[:, None]
    data = tl.load(source, mask=mask)
    tl.store(target + (head * K_STRIDES[2] + dim)[None, :], data, mask=mask)

    source = value + row * VALUE_STRIDES[0] + (head * VALUE_STRIDES[1] + dim)[None, :]
    target = v_cache + (block_id * V_STRIDES[0] + offset * V_STRIDES[1])[:, None]
    data = tl.load(source, mask=mask)
    tl.store(target + (head * V_STRIDES[2] + dim)[None, :], data, mask=mask)


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
    num_tokens = slot_mapping.shape[0]
    if num_tokens == 0:
        return
    row = key.shape[1] * key.shape[2]
    width = min(MAX_WIDTH, power_of_two(row))
    with place.guard(key.device):
        _scatter[ceil_div(num_tokens, TOKENS), ceil_div(row, width)](
            key,
            value,
            k_cache,
            v_cache,
            slot_mapping,
            num_tokens,
            key.stride()[:2],
            value.stride()[:2],
            k_cache.stride()[:3],
            v_cache.stride()[:3],
            k_cache.shape[1],
            key.shape[2],
            row,
            TOKENS,
            width,
        )
