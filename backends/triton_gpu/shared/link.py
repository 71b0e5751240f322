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
_SHORT_RUN: Final = 16  # blocks; shorter runs are copied faster as a list
_AT_ONCE: Final = 1024  # copies of a list; none begins before the list is read

Pairs = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
Sizes = np.ndarray[tuple[int, ...], np.dtype[np.uint64]]


class _Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = (
        ("src_x", ctypes.c_size_t), ("src_y", ctypes.c_size_t), ("src_type", ctypes.c_uint),
        ("src_host", ctypes.c_void_p), ("src_device", ctypes.c_uint64),
        ("src_array", ctypes.c_void_p), ("src_pitch", ctypes.c_size_t),
        ("dst_x", ctypes.c_size_t), ("dst_y", ctypes.c_size_t), ("dst_type", ctypes.c_uint),
        ("dst_host", ctypes.c_void_p), ("dst_device", ctypes.c_uint64),
        ("dst_array", ctypes.c_void_p), ("dst_pitch", ctypes.c_size_t),
        ("width", ctypes.c_size_t), ("height", ctypes.c_size_t),
    )  # fmt: skip


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes: the order of reads, hints of places (none), flags."""

    _fields_ = (
        ("order", ctypes.c_uint), ("hints", ctypes.c_int * 4), ("flags", ctypes.c_uint),
    )  # fmt: skip


class Sides(NamedTuple):
    """Where the blocks of caches are, and those of host memory: addresses and distances in bytes.

    Of caches one number each.
    """

    starts: Sizes
    pitches: Sizes
    sizes: Sizes
    """Of a block."""
    offsets: Sizes
    """Of its part in a block of host memory."""
    host: int
    host_pitch: int
    is_locked: bool
    """True if the host memory is page-locked; else copies go one after the other, and wait."""

    @classmethod
    def of(cls, caches: Sequence[Tensor], host: Tensor) -> "Sides":
        """The sides of [num_blocks, ...], contiguous inside a block, and of such host memory."""
        sizes = np.array([cache[0].nbytes for cache in caches], np.uint64)
        steps = [cache.stride(0) * cache.element_size() for cache in caches]
        return cls(
            np.array([cache.data_ptr() for cache in caches], np.uint64),
            np.array(steps, np.uint64),
            sizes,
            np.cumsum(sizes) - sizes,
            host.data_ptr(),
            host.stride(0),
            caches[0].device.type == "cuda" and host.is_pinned(),
        )


@lru_cache(maxsize=1)
def _driver() -> Any:  # noqa: ANN401 - a library has no type
    return ctypes.CDLL("libcuda.so.1")


def move(stream: int, sides: Sides, pairs: Pairs, *, to_host: bool) -> None:
    """Copy blocks between each cache and its part of blocks of host memory. O(blocks * caches).

    Args:
        stream: the handle of a stream; 0: the default one.
        sides: where blocks are.
        pairs: [num_moves, 2] of (block id, block id in host memory).
        to_host: the direction.

    Raises:
        RuntimeError: the driver refuses.
    """
    pairs = pairs[np.argsort(pairs[:, 0])]
    is_first = np.ones(len(pairs), np.bool_)
    is_first[1:] = (np.diff(pairs, axis=0) != 1).any(axis=1)
    starts = np.flatnonzero(is_first)
    takes_lists = stream != 0 and sides.is_locked and hasattr(_driver(), "cuMemcpyBatchAsync")
    if takes_lists and len(pairs) < _SHORT_RUN * len(starts):
        _copy_list(stream, *_addresses(sides, pairs), sides.sizes, to_host=to_host)
        return
    blocks, copies = (each.T.tolist() for each in _addresses(sides, pairs[starts]))
    heights = np.diff(starts, append=len(pairs)).tolist()
    about = _Copy2D(src_type=_UNIFIED, dst_type=_UNIFIED)
    call, where, on = _driver().cuMemcpy2DAsync_v2, ctypes.byref(about), ctypes.c_void_p(stream)
    near, far = ("src", "dst") if to_host else ("dst", "src")
    setattr(about, f"{far}_pitch", sides.host_pitch)
    sizes, pitches = sides.sizes.tolist(), sides.pitches.tolist()
    for size, pitch, *runs in zip(sizes, pitches, blocks, copies, strict=True):
        about.width = size
        setattr(about, f"{near}_pitch", pitch)
        for block, copy, height in zip(*runs, heights, strict=True):
            about.src_device, about.dst_device = (block, copy) if to_host else (copy, block)
            about.height = height
            _check(call(where, on))


def _addresses(sides: Sides, pairs: Pairs) -> tuple[Sizes, Sizes]:
    """Return where each block is in each cache, and in host memory: [num_moves, num_caches]."""
    ids = pairs.astype(np.uint64)
    copies = np.uint64(sides.host) + ids[:, 1:] * np.uint64(sides.host_pitch) + sides.offsets
    return sides.starts + ids[:, :1] * sides.pitches, copies


def _copy_list(stream: int, blocks: Sizes, copies: Sizes, sizes: Sizes, *, to_host: bool) -> None:
    sources, targets = (blocks, copies) if to_host else (copies, blocks)
    lists = [targets.reshape(-1), sources.reshape(-1), np.tile(sizes, len(blocks))]
    attributes = _Attributes(order=_STREAM_ORDER, flags=_OVERLAP)
    first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
    about = (ctypes.byref(attributes), ctypes.byref(first), ctypes.c_size_t(1))
    for place in range(0, len(lists[0]), _AT_ONCE):
        parts = [each[place : place + _AT_ONCE] for each in lists]
        code = _driver().cuMemcpyBatchAsync(
            *[ctypes.c_void_p(part.ctypes.data) for part in parts],
            ctypes.c_size_t(len(parts[0])),
            *about,
            ctypes.byref(failed),
            ctypes.c_void_p(stream),
        )
        _check(code)


def _check(code: int) -> None:
    if code:
        raise RuntimeError(f"the CUDA driver refuses a copy of blocks: error {code}")
