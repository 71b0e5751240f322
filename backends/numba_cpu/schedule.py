"""The work of each thread: query tiles, their cost, slices of equal cost; and a batch's checks.

An item is up to `tile_tokens` consecutive query tokens of one sequence; a unit is an item and a KV
head, numbered item * num_kv_heads + head. The cost of an item is the keys it visits. Also checks
the values of a batch, which on a CPU costs next to nothing. Compiled code from here is part of
`SOURCE_DIGEST`, see `bits`.
"""

import zlib
from pathlib import Path

import numpy as np

from backends.numba_cpu import bits
from backends.numba_cpu.bits import jit

SOURCE_DIGEST = zlib.crc32(Path(__file__).read_bytes(), bits.SOURCE_DIGEST)

Ints = np.ndarray[tuple[int, ...], np.dtype[np.int32]]
Longs = np.ndarray[tuple[int, ...], np.dtype[np.int64]]

FAULTS = (
    "",
    "query_start_loc",
    "seq_lens",
    "block_table",
)
"""The fields that `check_batch` may find wrong, by its first result; the first: none is."""


@jit()
def check_batch(
    query_start_loc: Ints,  # [num_seqs + 1]
    seq_lens: Ints,  # [num_seqs]
    tables: Ints,  # flat, rows `stride` apart
    stride: int,
    max_blocks: int,
    block_size: int,
    num_blocks: int,
    num_tokens: int,
    window: int,  # 0: none
    limits: tuple[int, int],  # max_query_len, max_seq_len
) -> tuple[int, int, int]:
    """(fault, sequence, value) of the first value that breaks the contract; fault 0: none."""
    if query_start_loc[0] != 0:
        return 1, 0, query_start_loc[0]
    for s in range(seq_lens.size):
        count = query_start_loc[s + 1] - query_start_loc[s]
        if count < 0 or count > limits[0] or query_start_loc[s + 1] > num_tokens:
            return 1, s + 1, query_start_loc[s + 1]
        length = seq_lens[s]
        if length < count or length > limits[1] or length > max_blocks * block_size:
            return 2, s, length
        first = 0 if window == 0 else max(0, length - count - window + 1)
        if count > 0:
            for b in range(first // block_size, (length - 1) // block_size + 1):
                block_id = tables[s * stride + b]
                if block_id < 0 or block_id >= num_blocks:
                    return 3, s, block_id
    return 0, 0, 0


@jit()
def make_items(
    query_start_loc: Ints,  # [num_seqs + 1]
    seq_lens: Ints,  # [num_seqs]
    tile_tokens: int,
    window: int,  # 0: none
    items: Longs,  # [at least the number of items, 5], written: see below
) -> int:
    """List the query tiles: (sequence, first query row, tokens, first position, cost); how many."""
    n = 0
    for s in range(seq_lens.size):
        start, stop = query_start_loc[s], query_start_loc[s + 1]
        for row in range(start, stop, tile_tokens):
            count = min(tile_tokens, stop - row)
            position = seq_lens[s] - (stop - row)
            first = 0 if window == 0 else max(0, position - window + 1)
            items[n, 0], items[n, 1], items[n, 2], items[n, 3] = s, row, count, position
            items[n, 4] = (position + count - first) * (count + 1)
            n += 1
    return n


@jit()
def cut(items: Longs, num_items: int, num_kv_heads: int, bounds: Longs) -> None:
    """Fill bounds[0 .. parts] so that each part has an equal share of the cost of all units."""
    total = 0
    for i in range(num_items):
        total += items[i, 4] * num_kv_heads
    parts = bounds.size - 1
    done, part = 0, 1
    bounds[0] = 0
    for i in range(num_items):
        for h in range(num_kv_heads):
            while part < parts and done * parts >= part * total:
                bounds[part] = i * num_kv_heads + h
                part += 1
            done += items[i, 4]
    while part <= parts:
        bounds[part] = num_items * num_kv_heads
        part += 1
