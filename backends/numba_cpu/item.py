"""One item of decode or of few rows: a query tile over some KV heads, tile after tile of keys.

The formula and the order of the loops stand in `paged_attention`, the products in `tiles`, the
softmax in `rows`; here they meet. Compiled code from here is part of `SOURCE_DIGEST`, see `bits`.
"""

import zlib
from pathlib import Path

import numpy as np

from backends.numba_cpu import rows
from backends.numba_cpu.bits import jit, span
from backends.numba_cpu.rows import find_keys, load_rows, soften_rows, start_rows, store_rows
from backends.numba_cpu.schedule import Ints, Longs
from backends.numba_cpu.tiles import TILE, Floats, add_tile, score_tile

SOURCE_DIGEST = zlib.crc32(Path(__file__).read_bytes(), rows.SOURCE_DIGEST)

ROWS = 16
"""Query rows an item has a KV head, at most; those of more rows are for `prefill`."""


@jit()
def attend_item(
    tensors: tuple[Floats, ...],  # query, k_cache, v_cache, out: flat, bits
    strides: tuple[int, ...],  # query 2, k_cache 3, v_cache 3, out 2
    sizes: tuple[int, int, int, int, int],  # block_size, num_kv_heads, group, head_dim, value_dim
    table: Ints,  # of the item's sequence
    place: tuple[int, int, int],  # first query row, tokens, first position
    heads: tuple[int, int],  # first KV head, how many
    sinks: Floats,
    scales: tuple[Floats, Floats],  # of the caches' elements: K, V [num_kv_heads]
    numbers: tuple[np.float32, np.float32, int],  # factor, soft_cap, window
    floats: tuple[Floats, ...],  # workspace: rows, sums, highest, total, scores
    offsets: tuple[Longs, Longs],  # workspace: of keys, of values
) -> None:
    """One query tile over some KV heads: load the rows, walk the keys, store the result."""
    query, k_cache, v_cache, out = tensors
    block_size, _, group, size, value_size = sizes
    first_row, count, position = place
    head, num_heads = heads
    factor, soft_cap, window = numbers
    states, sums, highest, total, scores = floats
    most, num_rows = max(1, ROWS // group) * group, count * group
    sums[: num_heads * most * value_size] = 0
    for h in range(num_heads):
        q_head, mine = (head + h) * group, h * most
        first = first_row * strides[0] + q_head * strides[1]
        piece = span(states, mine * size, most * size)
        load_rows(query, first, strides, count, group, size, factor * scales[0][head + h], piece)
        sink = span(sinks, q_head, group) if sinks.size else sinks
        start_rows(sink, count, group, span(highest, mine, most), span(total, mine, most))
    seen = 0 if window == 0 else max(0, position - window + 1)
    for tile in range(seen // TILE * TILE, position + count, TILE):
        live = min(TILE, position + count - tile)
        find_keys(table, block_size, tile, seen - tile, live, strides, offsets[0], offsets[1], head)
        score_tile(
            states, num_heads, most, num_rows, size, k_cache, offsets[0], strides[4], live, scores
        )
        for h in range(num_heads):
            soften_rows(
                span(scores, h * most * TILE, most * TILE),
                span(sums, h * most * value_size, most * value_size),
                span(highest, h * most, most), span(total, h * most, most),
                (0, num_rows), group, value_size, position - tile, live, window, soft_cap,
            )  # fmt: skip
        add_tile(
            sums,
            num_heads,
            most,
            num_rows,
            value_size,
            v_cache,
            offsets[1],
            strides[7],
            live,
            scores,
        )
    for h in range(num_heads):
        first = first_row * strides[8] + (head + h) * group * strides[9]
        piece = span(sums, h * most * value_size, most * value_size)
        store_rows(
            piece, value_size, span(total, h * most, most), scales[1][head + h],
            count, group, value_size, out, first, strides,
        )  # fmt: skip
