"""Scatter new keys and values into the cache on a CPU.

    cache[slot // block_size, slot % block_size] = row of the token, for every slot >= 0
    in a quantised cache: e4m3(clamp(row * (1 / scale), -448, 448))

Layout as in the contract, any strides but the last. Bytes moved: each row read once and written
once. Exact: rows are moved as bits, and quantised with the roundings of the contract. Slots and
scales are all checked before the first row is written.
"""

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from backends.checks import check_store_kv
from backends.contract import Backend
from backends.errors import InvalidArgumentError
from backends.numba_cpu.bits import (
    SOURCE_DIGEST,
    exact,
    flat,
    flat_words,
    jit,
    narrow,
    widen,
)
from backends.numba_cpu.scales import Floats, per_head
from backends.numba_cpu.workers import Workers

Longs = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
Words = np.ndarray[tuple[int, ...], np.dtype[np.float32]]

GRAIN_BYTES = 1 << 18  # fewer bytes a thread than this cost more to hand out than to move


@jit(cache=True)
def _past_the_end(slots: Longs, num_slots: int) -> int:
    """Index of the first slot that the cache does not have, or the number of slots."""
    for i in range(slots.size):
        if slots[i] >= num_slots:
            return i
    return slots.size


@jit(cache=True)
def _scatter(
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
            at = slot // block_size * strides[2] + slot % block_size * strides[3]
            for h in range(num_heads):
                source = rows[i * strides[0] + h * strides[1] :][:size]
                target = cache[at + h * strides[4] :][:size]
                for d in range(size):
                    target[d] = source[d]


@lru_cache(maxsize=1)
def _quantising(source_digest: int) -> Callable[..., None]:
    """Compile for the sources with this digest; closing over it makes it part of the cache key."""

    @exact(cache=True)
    def quantise(
        rows: Words,  # flat [num_tokens, num_kv_heads, head_dim]: bits
        cache: Words,  # flat [num_blocks, block_size, num_kv_heads, head_dim]: bytes
        slots: Longs,  # [num_tokens]
        scales: Floats,  # [num_kv_heads]
        sizes: tuple[int, int, int],  # block_size, num_kv_heads, head_dim
        strides: tuple[int, ...],  # rows 2, cache 3
        start: int,
        stop: int,
    ) -> None:
        _ = source_digest
        block_size, num_heads, size = sizes
        for i in range(start, stop):
            slot = slots[i]
            if slot >= 0:
                at = slot // block_size * strides[2] + slot % block_size * strides[3]
                for h in range(num_heads):
                    source = rows[i * strides[0] + h * strides[1] :][:size]
                    target = cache[at + h * strides[4] :][:size]
                    inverse = np.float32(1.0) / scales[h]
                    for d in range(size):
                        target[d] = narrow(widen(source[d]) * inverse, target[d])

    return quantise


def store_kv(
    backend: Backend,
    workers: Workers,
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
        InvalidArgumentError: a shape, dtype, device or slot breaks the contract; nothing written.
    """
    check_store_kv(backend, key, value, k_cache, v_cache, slot_mapping, k_scale, v_scale)
    slots = flat(slot_mapping)
    num_blocks, block_size, num_kv_heads, head_dim = k_cache.shape
    bad = _past_the_end(slots, num_blocks * block_size)
    if bad < slots.size:
        wanted = f"a slot below {num_blocks * block_size}"
        raise InvalidArgumentError(f"slot_mapping[{bad}]", wanted, str(slots[bad]))
    scales = (
        per_head("k_scale", k_scale, num_kv_heads),
        per_head("v_scale", v_scale, num_kv_heads),
    )
    sizes = (block_size, num_kv_heads, head_dim)
    grain = GRAIN_BYTES // (num_kv_heads * head_dim * key.element_size())
    for rows, cache, scale in ((key, k_cache, scales[0]), (value, v_cache, scales[1])):
        move = _mover(rows, cache, slots, scale, sizes)
        workers.run_evenly(move, slots.size, grain)


def _mover(
    rows: Tensor, cache: Tensor, slots: Longs, scales: Floats, sizes: tuple[int, int, int]
) -> Callable[[int, int], None]:
    """What stores the tokens start .. stop - 1 of one cache."""
    strides = (*rows.stride()[:2], *cache.stride()[:3])
    if cache.dtype == torch.float8_e4m3fn:
        source, target, kernel = flat(rows), flat(cache), _quantising(SOURCE_DIGEST)
        return lambda start, stop: kernel(
            source, target, slots, scales, sizes, strides, start, stop
        )
    source, target = flat_words(rows), flat_words(cache)
    return lambda start, stop: _scatter(source, target, slots, sizes, strides, start, stop)
