"""One item of prefill: a tile of many query rows over one KV head.

Formula, layout and bytes moved stand in `paged_attention`. Each tile of keys and values is widened
to float32 once, into a workspace, the keys transposed, and serves all rows of the item; that takes
about as long as the products of 8 rows, so items of few rows go to `item` instead. Rows are taken
`ROWS_AT_ONCE` at a time, and of a tile only the keys that one of them sees. Compiled code from here
is part of `SOURCE_DIGEST`, see `bits`.
"""

import zlib
from pathlib import Path

import numpy as np

from backends.numba_cpu import matmul, rows
from backends.numba_cpu.bits import jit, span, widen
from backends.numba_cpu.matmul import LANES, ROWS_AT_ONCE, multiply_rows
from backends.numba_cpu.rows import find_keys, load_rows, soften_rows, start_rows, store_rows
from backends.numba_cpu.schedule import Ints, Longs
from backends.numba_cpu.tiles import TILE, Floats

SOURCE_DIGEST = zlib.crc32(matmul.SOURCE_DIGEST.to_bytes(4), rows.SOURCE_DIGEST)
SOURCE_DIGEST = zlib.crc32(Path(__file__).read_bytes(), SOURCE_DIGEST)

PREFILL_ROWS = 256
"""Query rows an item has, about."""


@jit()
def padded(number: int, multiple: int) -> int:
    """The number, rounded up."""
    return (number + multiple - 1) // multiple * multiple


@jit()
def _pack_keys(cache: Floats, offsets: Longs, size: int, packed: Floats) -> None:
    """packed[d, t] = key t, in float32."""
    for t in range(TILE):
        key = span(cache, offsets[t], size)
        for d in range(size):
            packed[d * TILE + t] = widen(key[d])


@jit()
def _pack_values(
    cache: Floats, offsets: Longs, live: int, size: int, width: int, packed: Floats
) -> None:
    """packed[t, d] = value t, in float32, rows `width` apart."""
    for t in range(live):
        value, row = span(cache, offsets[t], size), span(packed, t * width, width)
        for d in range(size):
            row[d] = widen(value[d])


@jit()
def _most_keys(first: int, stop: int, group: int) -> int:
    """Return 1 + the keys that the last of `ROWS_AT_ONCE` rows sees beyond the item's first."""
    return (min(first + ROWS_AT_ONCE, stop) - 1) // group + 1


@jit()
def attend_prefill(
    tensors: tuple[Floats, ...],  # query, k_cache, v_cache, out: flat, bits
    strides: tuple[int, ...],  # query 2, k_cache 3, v_cache 3, out 2
    sizes: tuple[int, int, int, int, int],  # block_size, num_kv_heads, group, head_dim, value_dim
    table: Ints,  # of the item's sequence
    place: tuple[int, int, int],  # first query row, tokens, first position
    head: int,  # KV head
    sinks: Floats,
    scales: tuple[Floats, Floats],  # of the caches' elements: K, V [num_kv_heads]
    numbers: tuple[np.float32, np.float32, int],  # factor, soft_cap, window
    floats: tuple[Floats, ...],  # workspace: rows, sums, highest, total, scores
    packed: tuple[Floats, Floats],  # workspace: a tile's keys, its values
    offsets: tuple[Longs, Longs],  # workspace: of keys, of values
) -> None:
    """One query tile over a KV head: load the rows, walk the keys, store the result."""
    query, k_cache, v_cache, out = tensors
    block_size, _, group, size, value_size = sizes
    first_row, count, position = place
    factor, soft_cap, window = numbers
    states, sums, highest, total, scores = floats
    num_rows, width = count * group, padded(value_size, LANES)
    sums[: padded(num_rows, ROWS_AT_ONCE) * width] = 0
    first = first_row * strides[0] + head * group * strides[1]
    load_rows(query, first, strides, count, group, size, factor * scales[0][head], states)
    sink = span(sinks, head * group, group) if sinks.size else sinks
    start_rows(sink, count, group, highest, total)
    seen = 0 if window == 0 else max(0, position - window + 1)
    for tile in range(seen // TILE * TILE, position + count, TILE):
        live = min(TILE, position + count - tile)
        find_keys(table, block_size, tile, seen - tile, live, strides, offsets[0], offsets[1], head)
        _pack_keys(k_cache, offsets[0], size, packed[0])
        _pack_values(v_cache, offsets[1], live, value_size, width, packed[1])
        start = max(0, tile - position) * group // ROWS_AT_ONCE * ROWS_AT_ONCE
        stop = num_rows
        if window > 0:
            stop = (tile + live - 1 + window - position) * group
            stop = min(num_rows, padded(stop, ROWS_AT_ONCE))
        scores[start * TILE : padded(stop, ROWS_AT_ONCE) * TILE] = 0
        for r in range(start, stop, ROWS_AT_ONCE):
            num_keys = min(live, position - tile + _most_keys(r, stop, group))
            left, row = span(scores, r * TILE, 1), span(states, r * size, 1)
            multiply_rows(left, TILE, row, size, packed[0], TILE, size, num_keys)
        soften_rows(
            scores, sums, highest, total, (start, stop), group, width,
            position - tile, live, window, soft_cap,
        )  # fmt: skip
        for r in range(start, stop, ROWS_AT_ONCE):
            num_keys = min(live, position - tile + _most_keys(r, stop, group))
            left, row = span(sums, r * width, 1), span(scores, r * TILE, 1)
            multiply_rows(left, width, row, TILE, packed[1], width, num_keys, width)
    first = first_row * strides[8] + head * group * strides[9]
    store_rows(
        sums, width, total, scales[1][head], count, group, value_size, out, first, strides
    )  # fmt: skip
