"""The inner loops of attention: small dense products over key rows that lie anywhere in memory.

Rows of a tile are query rows in float32; keys are rows of the cache in its own format, widened as
they are loaded. Four keys at a time; the caller pads the list of offsets to a multiple of 4 with
any live key, whose probability is 0. Every loop over `head_dim` vectorises without knowing it at
compile time, so one compilation a dtype serves every head size and group size.
Compiled code from here is part of `SOURCE_DIGEST`, see `bits`.
"""

import zlib
from pathlib import Path

import numpy as np

from backends.numba_cpu import bits
from backends.numba_cpu.bits import LOG2E, exp2, jit, tanh, widen

SOURCE_DIGEST = zlib.crc32(Path(__file__).read_bytes(), bits.SOURCE_DIGEST)

Floats = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
Longs = np.ndarray[tuple[int, ...], np.dtype[np.int64]]

_ZERO = np.float32(0.0)
_MINUS_INF = np.float32(-np.inf)


@jit()
def _dots_4x4(
    x0: Floats, x1: Floats, x2: Floats, x3: Floats,
    k0: Floats, k1: Floats, k2: Floats, k3: Floats,
    scores: Floats, at: int,
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
    scores[0, at], scores[0, at + 1], scores[0, at + 2], scores[0, at + 3] = a00, a01, a02, a03
    scores[1, at], scores[1, at + 1], scores[1, at + 2], scores[1, at + 3] = a10, a11, a12, a13
    scores[2, at], scores[2, at + 1], scores[2, at + 2], scores[2, at + 3] = a20, a21, a22, a23
    scores[3, at], scores[3, at + 1], scores[3, at + 2], scores[3, at + 3] = a30, a31, a32, a33


@jit()
def _dots_1x4(
    x0: Floats, k0: Floats, k1: Floats, k2: Floats, k3: Floats, scores: Floats, at: int
) -> None:
    a0 = a1 = a2 = a3 = _ZERO
    for d in range(x0.size):
        x = x0[d]
        a0 += x * widen(k0[d])
        a1 += x * widen(k1[d])
        a2 += x * widen(k2[d])
        a3 += x * widen(k3[d])
    scores[at], scores[at + 1], scores[at + 2], scores[at + 3] = a0, a1, a2, a3


@jit()
def _add_4x4(
    x0: Floats, x1: Floats, x2: Floats, x3: Floats,
    v0: Floats, v1: Floats, v2: Floats, v3: Floats,
    p: Floats, at: int,
) -> None:  # fmt: skip
    a00, a01, a02, a03 = p[0, at], p[0, at + 1], p[0, at + 2], p[0, at + 3]
    a10, a11, a12, a13 = p[1, at], p[1, at + 1], p[1, at + 2], p[1, at + 3]
    a20, a21, a22, a23 = p[2, at], p[2, at + 1], p[2, at + 2], p[2, at + 3]
    a30, a31, a32, a33 = p[3, at], p[3, at + 1], p[3, at + 2], p[3, at + 3]
    for d in range(x0.size):
        y0, y1, y2, y3 = widen(v0[d]), widen(v1[d]), widen(v2[d]), widen(v3[d])
        x0[d] += a00 * y0 + a01 * y1 + a02 * y2 + a03 * y3
        x1[d] += a10 * y0 + a11 * y1 + a12 * y2 + a13 * y3
        x2[d] += a20 * y0 + a21 * y1 + a22 * y2 + a23 * y3
        x3[d] += a30 * y0 + a31 * y1 + a32 * y2 + a33 * y3


@jit()
def _add_1x4(
    x0: Floats, v0: Floats, v1: Floats, v2: Floats, v3: Floats, p: Floats, at: int
) -> None:
    a0, a1, a2, a3 = p[at], p[at + 1], p[at + 2], p[at + 3]
    for d in range(x0.size):
        x0[d] += a0 * widen(v0[d]) + a1 * widen(v1[d]) + a2 * widen(v2[d]) + a3 * widen(v3[d])


@jit()
def score_tile(
    rows: Floats, keys: Floats, offsets: Longs, shift: int, num_keys: int, scores: Floats
) -> None:
    """scores[r, t] = rows[r] . keys[offsets[t] + shift :], t below num_keys rounded up to 4."""
    num_rows, size = rows.shape
    for t in range(0, num_keys, 4):
        k0 = keys[offsets[t] + shift :][:size]
        k1 = keys[offsets[t + 1] + shift :][:size]
        k2 = keys[offsets[t + 2] + shift :][:size]
        k3 = keys[offsets[t + 3] + shift :][:size]
        r = 0
        while r + 4 <= num_rows:
            _dots_4x4(rows[r], rows[r + 1], rows[r + 2], rows[r + 3], k0, k1, k2, k3, scores[r:], t)
            r += 4
        while r < num_rows:
            _dots_1x4(rows[r], k0, k1, k2, k3, scores[r], t)
            r += 1


@jit()
def add_tile(
    rows: Floats, values: Floats, offsets: Longs, shift: int, num_keys: int, p: Floats
) -> None:
    """rows[r] += sum over t of p[r, t] * values[offsets[t] + shift :]."""
    num_rows, size = rows.shape
    for t in range(0, num_keys, 4):
        v0 = values[offsets[t] + shift :][:size]
        v1 = values[offsets[t + 1] + shift :][:size]
        v2 = values[offsets[t + 2] + shift :][:size]
        v3 = values[offsets[t + 3] + shift :][:size]
        r = 0
        while r + 4 <= num_rows:
            _add_4x4(rows[r], rows[r + 1], rows[r + 2], rows[r + 3], v0, v1, v2, v3, p[r:], t)
            r += 4
        while r < num_rows:
            _add_1x4(rows[r], v0, v1, v2, v3, p[r], t)
            r += 1


@jit()
def soften(
    scores: Floats, first: int, last: int, soft_cap: np.float32, highest: Floats, total: Floats
) -> np.float32:
    """Turn one row's logits into probabilities against its running maximum, in place.

    Keys outside first .. last get 0. `highest` and `total` (one element each) are carried on;
    returns what the row's sum so far has to be multiplied by. With a soft cap the logits come in
    units of nature, without one in units of log 2; a cap of 0 is none.
    """
    if soft_cap > _ZERO:
        for t in range(scores.size):
            scores[t] = np.float32(LOG2E) * soft_cap * tanh(scores[t] / soft_cap)
    for t in range(first):
        scores[t] = _MINUS_INF
    for t in range(last + 1, scores.size):
        scores[t] = _MINUS_INF
    before = highest[0]
    now = before
    for t in range(scores.size):
        now = max(now, scores[t])
    added = _ZERO
    for t in range(scores.size):
        p = exp2(scores[t] - now)
        scores[t] = p
        added += p
    rescale = exp2(before - now)
    highest[0] = now
    total[0] = total[0] * rescale + added
    return rescale
