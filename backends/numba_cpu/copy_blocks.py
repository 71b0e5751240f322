"""Copy whole blocks inside caches on a CPU, for forks and copy-on-write.

    cache[dst] = cache[src], for every (src, dst) and every cache

Bytes moved: each block read once and written once. Exact. All pairs are checked before the first
block is written; no dst is a src or appears twice, so the order of copies has no meaning.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import numpy as np
from torch import Tensor

from backends.checks import check_copy_blocks
from backends.contract import Backend
from backends.errors import InvalidArgumentError
from backends.numba_cpu.bits import SOURCE_DIGEST, at, jit, span
from backends.numba_cpu.launch import Workers
from backends.numba_cpu.store_kv import GRAIN_BYTES, Longs


@lru_cache(maxsize=1)
def _kernel(source_digest: int) -> Callable[..., None]:
    """Compile for the sources with this digest; closing over it makes it part of the cache key."""

    @jit(cache=True)
    def copy(
        address: int,  # of a cache [num_blocks, block_bytes]
        copies: Longs,  # [num_copies, 2]
        stride: int,  # bytes between blocks
        size: int,  # bytes a block
        start: int,
        stop: int,
    ) -> None:
        _ = source_digest
        cache = at(address, 1, np.uint8(0))
        for i in range(start, stop):
            source = span(cache, copies[i, 0] * stride, size)
            target = span(cache, copies[i, 1] * stride, size)
            for b in range(size):
                target[b] = source[b]

    return copy


def copy_blocks(
    backend: Backend, workers: Workers, caches: Sequence[Tensor], copies: Tensor
) -> None:
    """Copy blocks inside each cache; see `Backend.copy_blocks`.

    Raises:
        InvalidArgumentError: a shape, dtype, device or block id breaks the contract, or a dst is
            also a src or appears twice; nothing written.
    """
    check_copy_blocks(backend, caches, copies)
    pairs = np.ascontiguousarray(copies.numpy())
    for index, cache in enumerate(caches):
        _check_ids(pairs, cache.shape[0], index)
    targets = pairs[:, 1]
    if np.unique(targets).size < targets.size or np.isin(targets, pairs[:, 0]).any():
        raise InvalidArgumentError("copies", "each dst once, and never as a src", "an overlap")
    kernel = _kernel(SOURCE_DIGEST)
    for cache in caches:
        width = cache.element_size()
        stride, size = cache.stride(0) * width, cache[0].numel() * width
        move = partial(kernel, cache.data_ptr(), pairs, stride, size)
        workers.run_evenly(move, len(pairs), GRAIN_BYTES // size)


def _check_ids(pairs: Longs, num_blocks: int, index: int) -> None:
    if pairs.size and (pairs.min() < 0 or pairs.max() >= num_blocks):
        wanted = f"block ids of 0 .. {num_blocks - 1}, which caches[{index}] has"
        raise InvalidArgumentError("copies", wanted, f"{pairs.min()} .. {pairs.max()}")
