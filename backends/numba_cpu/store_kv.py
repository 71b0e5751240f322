"""Scatter new keys and values into the cache on a CPU.

    cache[slot // block_size, slot % block_size] = row of the token, for every slot >= 0
    in a quantised cache: e4m3(clamp(row * (1 / scale), -448, 448))

Layout as in the contract, any strides but the last. Bytes moved: each row read once and written
once. Exact: rows are moved as bits, and quantised with the roundings of the contract. Slots and
scales are all checked before the first row is written. A call with the signature of one before is
not checked and planned again: what is left to look at are values.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from backends.checks import check_store_kv
from backends.contract import Backend, KVCache
from backends.errors import InvalidArgumentError
from backends.numba_cpu.bits import (
    SOURCE_DIGEST,
    TAGS,
    WORD_TAGS,
    Tag,
    at,
    exact,
    jit,
    narrow,
    span,
    widen,
)
from backends.numba_cpu.launch import Floats, Plans, Workers, per_head, sign

Longs = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
Words = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
Layout = tuple[tuple[int, int, int], tuple[int, ...], tuple[int, ...]]
"""block_size, num_kv_heads, head_dim; strides of keys and of values: rows 2, cache 3."""

GRAIN_BYTES = 1 << 18  # fewer bytes a thread than this cost more to hand out than to move


@jit()
def _move(
    rows: Words,  # flat [num_tokens, num_kv_heads, head_dim]
    cache: Words,  # flat [num_blocks, block_size, num_kv_heads, head_dim]
    slots: Longs,  # [num_tokens]
    sizes: tuple[int, int, int],  # block_size, num_kv_heads, head_dim
    strides: tuple[int, ...],  # rows 2, cache 3
    start: int,
    stop: int,
) -> None:
    block_size, num_heads, size = sizes
    if strides[1] == size and strides[4] == size:
        num_heads, size = 1, num_heads * size
    for i in range(start, stop):
        slot = slots[i]
        if slot >= 0:
            first = slot // block_size * strides[2] + slot % block_size * strides[3]
            for h in range(num_heads):
                source = span(rows, i * strides[0] + h * strides[1], size)
                target = span(cache, first + h * strides[4], size)
                for d in range(size):
                    target[d] = source[d]


@exact()
def _quantise(
    rows: Words,  # flat [num_tokens, num_kv_heads, head_dim]: bits
    cache: Words,  # flat [num_blocks, block_size, num_kv_heads, head_dim]: bytes
    slots: Longs,  # [num_tokens]
    scales: Floats,  # [num_kv_heads]
    sizes: tuple[int, int, int],  # block_size, num_kv_heads, head_dim
    strides: tuple[int, ...],  # rows 2, cache 3
    start: int,
    stop: int,
) -> None:
    block_size, num_heads, size = sizes
    for i in range(start, stop):
        slot = slots[i]
        if slot >= 0:
            first = slot // block_size * strides[2] + slot % block_size * strides[3]
            for h in range(num_heads):
                source = span(rows, i * strides[0] + h * strides[1], size)
                target = span(cache, first + h * strides[4], size)
                inverse = np.float32(1.0) / scales[h]
                for d in range(size):
                    target[d] = narrow(widen(source[d]) * inverse, target[d])


class _Kernels(NamedTuple):
    """The compiled functions of this file; they take tensors as addresses."""

    past_the_end: Callable[..., int]
    scatter: Callable[..., None]
    quantise: Callable[..., None]


@lru_cache(maxsize=1)
def _kernels(source_digest: int) -> _Kernels:
    """Compile for the sources with this digest; closing over it makes it part of the cache key."""

    @jit(cache=True)
    def past_the_end(slot_mapping: int, num_tokens: int, num_slots: int) -> int:
        """Index of the first slot that the cache does not have, or the number of slots."""
        _ = source_digest
        slots = at(slot_mapping, num_tokens, np.int64(0))
        for i in range(num_tokens):
            if slots[i] >= num_slots:
                return i
        return num_tokens

    @jit(cache=True)
    def scatter(
        tensors: tuple[int, int, int, int],  # key, k_cache; value, v_cache, or 0: none
        tag: Tag,
        slot_mapping: int,
        layout: Layout,
        start: int,
        stop: int,
    ) -> None:
        _ = source_digest
        sizes, k_strides, v_strides = layout
        slots = at(slot_mapping, stop, np.int64(0))
        key, k_cache = at(tensors[0], 1, tag), at(tensors[1], 1, tag)
        _move(key, k_cache, slots, sizes, k_strides, start, stop)
        if tensors[2] == 0:
            return
        value, v_cache = at(tensors[2], 1, tag), at(tensors[3], 1, tag)
        _move(value, v_cache, slots, sizes, v_strides, start, stop)

    @exact(cache=True)
    def quantise(
        tensors: tuple[int, int, int, int],  # key, k_cache; value, v_cache, or 0: none
        tag: Tag,
        scales: tuple[Floats, Floats],  # [num_kv_heads]
        slot_mapping: int,
        layout: Layout,
        start: int,
        stop: int,
    ) -> None:
        _ = source_digest
        sizes, k_strides, v_strides = layout
        slots, byte = at(slot_mapping, stop, np.int64(0)), np.uint8(0)
        key, k_cache = at(tensors[0], 1, tag), at(tensors[1], 1, byte)
        _quantise(key, k_cache, slots, scales[0], sizes, k_strides, start, stop)
        if tensors[2] == 0:
            return
        value, v_cache = at(tensors[2], 1, tag), at(tensors[3], 1, byte)
        _quantise(value, v_cache, slots, scales[1], sizes, v_strides, start, stop)

    return _Kernels(past_the_end, scatter, quantise)


class StorePlan(NamedTuple):
    """The checked arguments of all calls with one signature."""

    layout: Layout
    num_slots: int
    num_kv_heads: int
    grain: int  # tokens
    tag: Tag
    is_quantised: bool


def store_kv(
    backend: Backend,
    workers: Workers,
    plans: Plans[StorePlan],
    key: Tensor,
    value: Tensor | None,
    cache: KVCache,
    slot_mapping: Tensor,
) -> None:
    """Write each token's key and value into its slot; see `Backend.store_kv`.

    Raises:
        InvalidArgumentError: a shape, dtype, device or slot breaks the contract; nothing written.
    """
    signature = sign(key, value, cache.k, cache.v, slot_mapping, cache.k_scale, cache.v_scale)
    plan = plans.get(signature)
    if plan is None:
        check_store_kv(backend, key, value, cache, slot_mapping)
        plan = _plan(key, value, cache)
        plans.keep(signature, plan)
    layout, num_slots, num_kv_heads, grain, tag, is_quantised = plan
    kernels = _kernels(SOURCE_DIGEST)
    slots, num_tokens = slot_mapping.data_ptr(), slot_mapping.shape[0]
    bad = kernels.past_the_end(slots, num_tokens, num_slots)
    if bad < num_tokens:
        wanted = f"a slot below {num_slots}"
        raise InvalidArgumentError(f"slot_mapping[{bad}]", wanted, str(int(slot_mapping[bad])))
    values = (0, 0) if value is None else (value.data_ptr(), cache.v.data_ptr())
    tensors = (key.data_ptr(), cache.k.data_ptr(), *values)
    if is_quantised:
        scales = (
            per_head("cache.k_scale", cache.k_scale, num_kv_heads),
            per_head("cache.v_scale", cache.v_scale, num_kv_heads),
        )
        move = partial(kernels.quantise, tensors, tag, scales, slots, layout)
    else:
        move = partial(kernels.scatter, tensors, tag, slots, layout)
    workers.run_evenly(move, num_tokens, grain)


def _plan(key: Tensor, value: Tensor | None, cache: KVCache) -> StorePlan:
    """Plan a call that has passed its checks."""
    num_blocks, block_size, num_kv_heads, head_dim = cache.k.shape
    layout = (
        (block_size, num_kv_heads, head_dim),
        (*key.stride()[:2], *cache.k.stride()[:3]),
        (0,) * 5 if value is None else (*value.stride()[:2], *cache.v.stride()[:3]),
    )
    is_quantised = cache.k.dtype == torch.float8_e4m3fn
    return StorePlan(
        layout,
        num_blocks * block_size,
        num_kv_heads,
        GRAIN_BYTES // (2 * num_kv_heads * head_dim * key.element_size()),
        TAGS[key.dtype] if is_quantised else WORD_TAGS[key.element_size()],
        is_quantised,
    )
