"""Copy whole blocks between caches and a second pool on a CPU, and sum their bytes.

    host[h] = block b of every cache, one behind the other, for every move (b, h); or back
    sums[move] = sum over words i of (low(i) + LOW * i) * (high(i) + HIGH * (i + 1))

Bytes moved: each block read once and written once. Exact. All moves are checked before the first
block is written; no target is there twice, so the order of moves has no meaning.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import numpy as np
from torch import Tensor

from backends.checks import check_move_blocks, check_moves
from backends.contract import Backend
from backends.numba_cpu.bits import SOURCE_DIGEST, at, jit, span
from backends.numba_cpu.launch import Workers
from backends.numba_cpu.store_kv import GRAIN_BYTES, Longs
from backends.oracle import SUM_HIGH, SUM_LOW

_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@lru_cache(maxsize=1)
def _kernel(source_digest: int) -> Callable[..., None]:
    """Compile for the sources with this digest; closing over it makes it part of the cache key."""

    @jit(cache=True)
    def move(
        caches: Longs,  # [num_caches, 3]: address, words between blocks, words a block
        host: int,  # address
        host_stride: int,  # words
        moves: Longs,  # [num_moves, 2]
        sums: Longs,  # [num_moves]
        to_host: bool,  # noqa: FBT001 - a kernel's argument
        tag: np.unsignedinteger,
        start: int,
        stop: int,
    ) -> None:
        _ = source_digest
        half, one = np.uint32(32), np.uint32(1)
        low_key, high_key = np.uint32(SUM_LOW), np.uint32(SUM_HIGH)
        for i in range(start, stop):
            total, offset = np.uint64(0), 0
            for c in range(caches.shape[0]):
                size = caches[c, 2]
                block = span(at(caches[c, 0], 1, tag), moves[i, 0] * caches[c, 1], size)
                copy = span(at(host, 1, tag), moves[i, 1] * host_stride + offset, size)
                source, target = (block, copy) if to_host else (copy, block)
                for w in range(size):
                    word = np.uint64(source[w])
                    target[w] = source[w]
                    place = np.uint32(w + offset)
                    low = np.uint32(np.uint32(word) + np.uint32(place * low_key))
                    high = np.uint32(word >> half) + np.uint32(np.uint32(place + one) * high_key)
                    total += np.uint64(low) * np.uint64(np.uint32(high))
                offset += size
            sums[i] = np.int64(total)

    return move


def move_blocks(
    backend: Backend,
    workers: Workers,
    caches: Sequence[Tensor],
    host: Tensor,
    moves: Tensor,
    sums: Tensor,
    *,
    to_host: bool,
) -> None:
    """Copy blocks to or from host memory; see `Backend.move_blocks`.

    Raises:
        InvalidArgumentError: a shape, dtype, device or block id breaks the contract, or a target
            appears twice; nothing written.
    """
    check_move_blocks(backend, caches, host)
    check_moves(backend, caches, host, moves, sums, to_host=to_host)
    pairs = np.ascontiguousarray(moves.numpy())
    sizes = [cache[0].nbytes for cache in caches]
    word = math.gcd(8, *sizes)
    about = [
        (cache.data_ptr(), cache.stride(0) * cache.element_size() // word, size // word)
        for cache, size in zip(caches, sizes, strict=True)
    ]
    where = np.array(about, np.int64).reshape(-1, 3)
    found, tag = np.empty(len(pairs), np.int64), _WORDS[word](0)
    kernel = _kernel(SOURCE_DIGEST)
    address, stride = host.data_ptr(), host.stride(0) // word
    move = partial(kernel, where, address, stride, pairs, found, to_host, tag)
    workers.run_evenly(move, len(pairs), -(-GRAIN_BYTES // sum(sizes)))
    sums.numpy()[:] = found
