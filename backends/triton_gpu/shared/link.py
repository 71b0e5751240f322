"""The GPU's copy engines, between blocks of caches and page-locked host memory.

Decides: how a list of blocks becomes calls of the driver. Copy engines disturb what runs on the
GPU least: beside decode steps of an 8B network on an H200 they moved 43 to 52 GB/s while steps took
1 % (to host memory) or 4 % (from it) longer; a kernel that reads and writes host memory made them
26 to 800 % longer, whatever its size. A run of blocks that follow each other on both sides is one
copy of two dimensions a cache. Where blocks are scattered, the driver takes many copies at once.

Does not know: which blocks, what they hold. Everything is sent on a stream and not waited for.
"""

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
from torch import Tensor

_UNIFIED: Final = 4  # CU_MEMORYTYPE_UNIFIED: the driver knows where an address lies
_STREAM_ORDER: Final = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
_OVERLAP: Final = 1  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE
_SHORT_RUN: Final = 6  # blocks; a call for a run takes as long as this many copies of a list
_AT_ONCE: Final = 1024  # copies of a list; none begins before the list is read

Pairs = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


class _Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = tuple(
        (f"{side}_{name}", kind)
        for side in ("src", "dst")
        for name, kind in (
            ("x", ctypes.c_size_t), ("y", ctypes.c_size_t), ("type", ctypes.c_uint),
            ("host", ctypes.c_void_p), ("device", ctypes.c_uint64), ("array", ctypes.c_void_p),
            ("pitch", ctypes.c_size_t),
        )
    ) + (("width", ctypes.c_size_t), ("height", ctypes.c_size_t))  # fmt: skip


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes: the order of reads, hints of places (none), flags."""

    _fields_ = (
        ("order", ctypes.c_uint), ("hints", ctypes.c_int * 4), ("flags", ctypes.c_uint),
    )  # fmt: skip


class _Side(NamedTuple):
    """Where a run of blocks begins, and how far they are apart."""

    address: int
    pitch: int


@lru_cache(maxsize=1)
def _driver() -> Any:  # noqa: ANN401 - a library has no type
    return ctypes.CDLL("libcuda.so.1")


def move(
    stream: int, caches: Sequence[Tensor], host: Tensor, pairs: Pairs, *, to_host: bool
) -> None:
    """Copy blocks between each cache and its part of blocks of host memory. O(blocks * caches).

    Args:
        stream: the handle of a stream; 0: the default one.
        caches: [num_blocks, ...], contiguous inside a block.
        host: uint8 [num_host_blocks, bytes of a block of every cache], page-locked.
        pairs: [num_moves, 2] of (block id, block id in host memory).
        to_host: the direction.

    Raises:
        RuntimeError: the driver refuses.
    """
    pairs = pairs[np.argsort(pairs[:, 0])]
    is_first = np.ones(len(pairs), np.bool_)
    is_first[1:] = (np.diff(pairs, axis=0) != 1).any(axis=1)
    starts = np.flatnonzero(is_first)
    lengths = np.diff(starts, append=len(pairs))
    lists = stream != 0 and hasattr(_driver(), "cuMemcpyBatchAsync")
    if lists and len(pairs) < _SHORT_RUN * len(starts):
        _copy_list(stream, caches, host, pairs, to_host=to_host)
        return
    runs = list(zip(pairs[starts].tolist(), lengths.tolist(), strict=True))
    offset = 0
    for cache in caches:
        pitch, size = cache.stride(0) * cache.element_size(), cache[0].nbytes
        for (block_id, host_id), length in runs:
            block = _Side(cache.data_ptr() + block_id * pitch, pitch)
            copy = _Side(host.data_ptr() + host_id * host.stride(0) + offset, host.stride(0))
            source, target = (block, copy) if to_host else (copy, block)
            _copy_run(stream, source, target, size, length)
        offset += size


def _copy_run(stream: int, source: _Side, target: _Side, size: int, length: int) -> None:
    about = _Copy2D(
        src_type=_UNIFIED, src_device=source.address, src_pitch=source.pitch,
        dst_type=_UNIFIED, dst_device=target.address, dst_pitch=target.pitch,
        width=size, height=length,
    )  # fmt: skip
    _check(_driver().cuMemcpy2DAsync_v2(ctypes.byref(about), ctypes.c_void_p(stream)))


def _copy_list(
    stream: int, caches: Sequence[Tensor], host: Tensor, pairs: Pairs, *, to_host: bool
) -> None:
    sizes = np.array([cache[0].nbytes for cache in caches], np.uint64)
    offsets = np.cumsum(sizes) - sizes
    starts = np.array([cache.data_ptr() for cache in caches], np.uint64)
    pitches = np.array([cache.stride(0) * cache.element_size() for cache in caches], np.uint64)
    ids = pairs.astype(np.uint64)
    blocks = (starts + ids[:, :1] * pitches).reshape(-1)
    begin, pitch = np.uint64(host.data_ptr()), np.uint64(host.stride(0))
    copies = (begin + ids[:, 1:] * pitch + offsets).reshape(-1)
    sources, targets = (blocks, copies) if to_host else (copies, blocks)
    lengths = np.tile(sizes, len(pairs))
    attributes = _Attributes(order=_STREAM_ORDER, flags=_OVERLAP)
    first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
    for place in range(0, len(lengths), _AT_ONCE):
        count = min(_AT_ONCE, len(lengths) - place)
        lists = [
            ctypes.c_void_p(each[place:].ctypes.data) for each in (targets, sources, lengths)
        ]
        about = (ctypes.byref(attributes), ctypes.byref(first), ctypes.c_size_t(1))
        called = _driver().cuMemcpyBatchAsync(
            *lists, ctypes.c_size_t(count), *about, ctypes.byref(failed), ctypes.c_void_p(stream)
        )
        _check(called)


def _check(code: int) -> None:
    if code:
        raise RuntimeError(f"the CUDA driver refuses a copy of blocks: error {code}")
