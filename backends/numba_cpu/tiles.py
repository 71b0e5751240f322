"""The inner loops of attention: small dense products over key rows that lie anywhere in memory.

Rows of a tile are query rows in float32, `size` apart; keys are rows of the cache in its own
format, widened as they are loaded. Four keys at a time; the caller pads the list of offsets to a
multiple of 4 with any live key, whose probability is 0. Every loop over `head_dim` vectorises
without knowing it at compile time, so one compilation a dtype serves every head size and group
size. Compiled code from here is part of `SOURCE_DIGEST`, see `bits`.
"""

import zlib
from pathlib import Path

import numpy as np

from backends.numba_cpu import bits
from backends.numba_cpu.bits import jit, prefetch, span, widen

SOURCE_DIGEST = zlib.crc32(Path(__file__).read_bytes(), bits.SOURCE_DIGEST)

TILE = 64
"""Keys a tile; a row of scores has this many."""

CACHE_LINE_BYTES = 64

Floats = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
Longs = np.ndarray[tuple[int, ...], np.dtype[np.int64]]

_ZERO = np.float32(0.0)


@jit()
def _dots_4x4(
    x0: Floats, x1: Floats, x2: Floats, x3: Floats,
    k0: Floats, k1: Floats, k2: Floats, k3: Floats,
    scores: Floats,
) -> None:  # fmt: skip
    a00 = a01 = a02 = a03 = a10 = a11 = a12 = a13 = _ZERO
    a20 = a21 = a22 = a23 = a30 = a31 = a32 = a33 = _ZERO
    for d in range(x0.size):
        y0, y1, y2, y3 = widen(k0[d]), widen(k1[d]), widen(k2[d]), widen(k3[d])
        x = x0[d]
        a00 += x * y0
        a01 += x * y1
        a02 += x * y2
        a03 += x * y3
        x = x1[d]
        a10 += x * y0
        a11 += x * y1
        a12 += x * y2
        a13 += x * y3
        x = x2[d]
        a20 += x * y0
        a21 += x * y1
        a22 += x * y2
        a23 += x * y3
        x = x3[d]
        a30 += x * y0
        a31 += x * y1
        a32 += x * y2
        a33 += x * y3
    scores[0], scores[1], scores[2], scores[3] = a00, a01, a02, a03
    row = span(scores, TILE, 4)
    row[0], row[1], row[2], row[3] = a10, a11, a12, a13
    row = span(scores, 2 * TILE, 4)
    row[0], row[1], row[2], row[3] = a20, a21, a22, a23
    row = span(scores, 3 * TILE, 4)
    row[0], row[1], row[2], row[3] = a30, a31, a32, a33


@jit()
def _dots_1x4(x0: Floats, k0: Floats, k1: Floats, k2: Floats, k3: Floats, scores: Floats) -> None:
    a0 = a1 = a2 = a3 = _ZERO
    for d in range(x0.size):
        x = x0[d]
        a0 += x * widen(k0[d])
        a1 += x * widen(k1[d])
        a2 += x * widen(k2[d])
        a3 += x * widen(k3[d])
    scores[0], scores[1], scores[2], scores[3] = a0, a1, a2, a3


@jit()
def _add_4x4(
    x0: Floats, x1: Floats, x2: Floats, x3: Floats,
    v0: Floats, v1: Floats, v2: Floats, v3: Floats,
    p: Floats,
) -> None:  # fmt: skip
    a00, a01, a02, a03 = p[0], p[1], p[2], p[3]
    row = span(p, TILE, 4)
    a10, a11, a12, a13 = row[0], row[1], row[2], row[3]
    row = span(p, 2 * TILE, 4)
    a20, a21, a22, a23 = row[0], row[1], row[2], row[3]
    row = span(p, 3 * TILE, 4)
    a30, a31, a32, a33 = row[0], row[1], row[2], row[3]
    for d in range(x0.size):
        y0, y1, y2, y3 = widen(v0[d]), widen(v1[d]), widen(v2[d]), widen(v3[d])
        x0[d] += a00 * y0 + a01 * y1 + a02 * y2 + a03 * y3
        x1[d] += a10 * y0 + a11 * y1 + a12 * y2 + a13 * y3
        x2[d] += a20 * y0 + a21 * y1 + a22 * y2 + a23 * y3
        x3[d] += a30 * y0 + a31 * y1 + a32 * y2 + a33 * y3


@jit()
def _add_1x4(x0: Floats, v0: Floats, v1: Floats, v2: Floats, v3: Floats, p: Floats) -> None:
    a0, a1, a2, a3 = p[0], p[1], p[2], p[3]
    for d in range(x0.size):
        x0[d] += a0 * widen(v0[d]) + a1 * widen(v1[d]) + a2 * widen(v2[d]) + a3 * widen(v3[d])


@jit()
def _ask_for_four(cache: Floats, offsets: Longs, shift: int, size: int) -> None:
    """Start loading four rows: with several heads in turn the hardware does not guess them."""
    for i in range(4):
        for d in range(0, size, CACHE_LINE_BYTES // cache.itemsize):
            prefetch(cache, offsets[i] + shift + d)


@jit()
def score_tile(
    rows: Floats,  # [num_heads, most, size], flat
    num_heads: int,
    most: int,  # rows from one head to the next
    num_rows: int,  # rows in use, of each head
    size: int,
    keys: Floats,  # a cache, flat
    offsets: Longs,  # [TILE]: where each key's first head starts
    head_stride: int,  # in the cache
    num_keys: int,
    scores: Floats,  # [num_heads, most, TILE], flat, written
) -> None:
    """scores[h, r, t] = rows[h, r] . key t of head h, for t below num_keys rounded up to 4."""
    for t in range(0, num_keys, 4):
        for h in range(num_heads):
            if t + 4 < num_keys and num_heads > 1:
                _ask_for_four(keys, span(offsets, t + 4, 4), h * head_stride, size)
            k0 = span(keys, offsets[t] + h * head_stride, size)
            k1 = span(keys, offsets[t + 1] + h * head_stride, size)
            k2 = span(keys, offsets[t + 2] + h * head_stride, size)
            k3 = span(keys, offsets[t + 3] + h * head_stride, size)
            r, end = h * most, h * most + num_rows
            while r + 4 <= end:
                x0 = span(rows, r * size, size)
                x1 = span(x0, size, size)
                x2 = span(x1, size, size)
                x3 = span(x2, size, size)
                _dots_4x4(x0, x1, x2, x3, k0, k1, k2, k3, span(scores, r * TILE + t, 4))
                r += 4
            while r < end:
                row = span(scores, r * TILE + t, 4)
                _dots_1x4(span(rows, r * size, size), k0, k1, k2, k3, row)
                r += 1


@jit()
def add_tile(
    rows: Floats,  # [num_heads, most, size], flat, written
    num_heads: int,
    most: int,  # rows from one head to the next
    num_rows: int,  # rows in use, of each head
    size: int,
    values: Floats,  # a cache, flat
    offsets: Longs,  # [TILE]: where each value's first head starts
    head_stride: int,  # in the cache
    num_keys: int,
    p: Floats,  # [num_heads, most, TILE], flat
) -> None:
    """rows[h, r] += sum over t of p[h, r, t] * value t of head h."""
    for t in range(0, num_keys, 4):
        for h in range(num_heads):
            if t + 4 < num_keys and num_heads > 1:
                _ask_for_four(values, span(offsets, t + 4, 4), h * head_stride, size)
            v0 = span(values, offsets[t] + h * head_stride, size)
            v1 = span(values, offsets[t + 1] + h * head_stride, size)
            v2 = span(values, offsets[t + 2] + h * head_stride, size)
            v3 = span(values, offsets[t + 3] + h * head_stride, size)
            r, end = h * most, h * most + num_rows
            while r + 4 <= end:
                x0 = span(rows, r * size, size)
                x1 = span(x0, size, size)
                x2 = span(x1, size, size)
                x3 = span(x2, size, size)
                _add_4x4(x0, x1, x2, x3, v0, v1, v2, v3, span(p, r * TILE + t, 4))
                r += 4
            while r < end:
                row = span(p, r * TILE + t, 4)
                _add_1x4(span(rows, r * size, size), v0, v1, v2, v3, row)
                r += 1
