"""The rows of a tile around the dense products: loaded, masked, made probabilities, stored.

A row is one (token, query head of the KV head's group), numbered token * group + head; all state
is float32 and belongs to one item. The running maximum starts at -1e30, not at -inf, so that no
-inf - -inf arises. Compiled code from here is part of `SOURCE_DIGEST`, see `bits`.
"""

import zlib
from pathlib import Path

import numpy as np

from backends.numba_cpu import tiles
from backends.numba_cpu.bits import LOG2E, exp2, jit, narrow, span, tanh, widen
from backends.numba_cpu.schedule import Ints
from backends.numba_cpu.tiles import TILE, Floats, Longs

SOURCE_DIGEST = zlib.crc32(Path(__file__).read_bytes(), tiles.SOURCE_DIGEST)

_LOWEST = np.float32(-1e30)
_MINUS_INF = np.float32(-np.inf)


@jit()
def load_rows(
    query: Floats,
    first: int,
    strides: tuple[int, ...],
    count: int,
    group: int,
    size: int,
    factor: np.float32,
    rows: Floats,
) -> None:
    """Rows (token, head of the group) of one KV head, in float32, times the scale."""
    for r in range(count * group):
        source = span(query, first + r // group * strides[0] + r % group * strides[1], size)
        row = span(rows, r * size, size)
        for d in range(size):
            row[d] = widen(source[d]) * factor


@jit()
def store_rows(
    sums: Floats,
    width: int,  # from one row of sums to the next
    total: Floats,
    scale: np.float32,
    count: int,
    group: int,
    size: int,
    out: Floats,
    first: int,
    strides: tuple[int, ...],
) -> None:
    """The rows' sums times the values' scale over their totals, rounded, into the output."""
    for r in range(count * group):
        target = span(out, first + r // group * strides[8] + r % group * strides[9], size)
        row = span(sums, r * width, size)
        share = scale / total[r]
        for d in range(size):
            target[d] = narrow(row[d] * share, target[d])


@jit()
def start_rows(sinks: Floats, count: int, group: int, highest: Floats, total: Floats) -> None:
    """Running maximum and total before the first key: nothing, or the sinks of these heads."""
    for r in range(count * group):
        highest[r], total[r] = _LOWEST, np.float32(0.0)
        if sinks.size:
            sink = sinks[r % group] * np.float32(LOG2E)
            highest[r] = max(sink, _LOWEST)
            total[r] = exp2(sink - highest[r])


@jit()
def find_keys(
    table: Ints,
    block_size: int,
    tile: int,
    skip: int,
    live: int,
    strides: tuple[int, ...],
    k_offsets: Longs,
    v_offsets: Longs,
    head: int,
) -> None:
    """Find the offsets of a head's keys and values; outside skip .. live - 1 the nearest ones."""
    for t in range(TILE):
        position = tile + min(max(t, skip), live - 1)
        block_id = np.int64(table[position // block_size])
        offset = position % block_size
        k_offsets[t] = block_id * strides[2] + offset * strides[3] + head * strides[4]
        v_offsets[t] = block_id * strides[5] + offset * strides[6] + head * strides[7]


@jit()
def _soften(
    scores: Floats,  # [TILE], in place: logits become probabilities
    first: int,
    last: int,
    soft_cap: np.float32,
    highest: Floats,  # [1], carried on: the running maximum
    total: Floats,  # [1], carried on: the sum of the probabilities
) -> np.float32:
    """Turn one row's logits into probabilities; keys outside first .. last get 0.

    Returns what the row's sum so far has to be multiplied by. With a soft cap (above 0) the logits
    come in natural units, without one in units of log 2.
    """
    if soft_cap > np.float32(0.0):
        for t in range(TILE):
            scores[t] = np.float32(LOG2E) * soft_cap * tanh(scores[t] / soft_cap)
    for t in range(TILE):
        if t < first or t > last:
            scores[t] = _MINUS_INF
    before = highest[0]
    a = b = c = d = e = f = g = h = before  # one maximum would wait for itself 64 times
    for t in range(0, TILE, 8):
        a, b = max(a, scores[t]), max(b, scores[t + 1])
        c, d = max(c, scores[t + 2]), max(d, scores[t + 3])
        e, f = max(e, scores[t + 4]), max(f, scores[t + 5])
        g, h = max(g, scores[t + 6]), max(h, scores[t + 7])
    now = max(a, b, c, d, e, f, g, h)
    added = np.float32(0.0)
    for t in range(TILE):
        p = exp2(scores[t] - now)
        scores[t] = p
        added += p
    rescale = exp2(before - now)
    highest[0] = now
    total[0] = total[0] * rescale + added
    return rescale


@jit()
def soften_rows(
    scores: Floats,
    sums: Floats,
    highest: Floats,
    total: Floats,
    which: tuple[int, int],  # first row, past the last one
    group: int,
    size: int,
    last: int,  # of the first token's keys, in this tile
    live: int,
    window: int,
    soft_cap: np.float32,
) -> None:
    """Probabilities of a tile, and sums so far rescaled to the new maxima."""
    for r in range(which[0], which[1]):
        end = last + r // group
        first = 0 if window == 0 else max(0, end - window + 1)
        row = span(scores, r * TILE, TILE)
        rescale = _soften(
            row, first, min(end, live - 1), soft_cap, span(highest, r, 1), span(total, r, 1)
        )
        if rescale != np.float32(1.0):
            so_far = span(sums, r * size, size)
            for d in range(size):
                so_far[d] *= rescale
