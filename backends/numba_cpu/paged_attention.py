"""Attention over the paged cache on a CPU: decode, prefill and chunked prefill by one kernel.

    out[j, h] = sum_k p_k v[k, h // group] / (sum_k p_k + p_sink)
    p_k = exp(logit_k - max);  logit_k = scale * q.k, or cap * tanh(scale * q.k / cap)
    (of a quantised cache k = k_scale * stored: folded into the scale; v_scale: into the result)

Layout: a row is one (query token, query head); the rows of an item share a KV head. Keys come in
tiles of 64 positions, whatever the block size, by way of the block table. In decode the tiles are
the outer loop and the KV heads the inner one, so that memory is walked in order. A row's arithmetic
depends neither on block ids nor on the cut into threads: outputs are bitwise equal under any
permutation of the blocks and any number of threads.

Bytes moved: K and V once an item (about 16 rows a KV head). Sums are float32; the error stays below
twice that of an exact computation rounded to the cache's dtype. Offsets are int64. Values are
checked before anything is written: query_start_loc, lengths, table entries.
"""

from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from backends.checks import check_paged_attention
from backends.contract import Backend, PagedBatch
from backends.errors import InvalidArgumentError
from backends.numba_cpu.bits import LOG2E, flat, jit, span
from backends.numba_cpu.rows import (
    SOURCE_DIGEST,
    find_keys,
    load_rows,
    soften_rows,
    start_rows,
    store_rows,
)
from backends.numba_cpu.scales import per_head
from backends.numba_cpu.schedule import FAULTS, Ints, Longs, check_batch, cut, make_items
from backends.numba_cpu.tiles import TILE, Floats, add_tile, score_tile
from backends.numba_cpu.workers import Workers

ROWS = 16
SERIAL_COST = 1 << 18  # multiply-adds below which a second thread costs more than it saves


@jit()
def _attend_item(
    tensors: tuple[Floats, ...],  # query, k_cache, v_cache, out: flat, bits
    strides: tuple[int, ...],  # query 2, k_cache 3, v_cache 3, out 2
    sizes: tuple[int, int, int, int],  # block_size, num_kv_heads, group, head_dim
    table: Ints,  # of the item's sequence
    item: tuple[int, int, int],  # first query row, tokens, first position
    heads: tuple[int, int],  # first KV head, how many
    sinks: Floats,
    scales: tuple[Floats, Floats],  # of the caches' elements: K, V [num_kv_heads]
    numbers: tuple[np.float32, np.float32, int],  # factor, soft_cap, window
    floats: tuple[Floats, ...],  # workspace: rows, sums, highest, total, scores
    offsets: tuple[Longs, Longs],  # workspace: of keys, of values
) -> None:
    """One query tile over some KV heads: load the rows, walk the keys, store the result."""
    query, k_cache, v_cache, out = tensors
    block_size, _, group, size = sizes
    first_row, count, position = item
    head, num_heads = heads
    factor, soft_cap, window = numbers
    rows, sums, highest, total, scores = floats
    most, num_rows = max(1, ROWS // group) * group, count * group
    sums[: num_heads * most * size] = 0
    for h in range(num_heads):
        q_head, mine = (head + h) * group, h * most
        at = first_row * strides[0] + q_head * strides[1]
        piece = span(rows, mine * size, most * size)
        load_rows(query, at, strides, count, group, size, factor * scales[0][head + h], piece)
        sink = span(sinks, q_head, group) if sinks.size else sinks
        start_rows(sink, count, group, span(highest, mine, most), span(total, mine, most))
    seen = 0 if window == 0 else max(0, position - window + 1)
    for tile in range(seen // TILE * TILE, position + count, TILE):
        live = min(TILE, position + count - tile)
        find_keys(table, block_size, tile, seen - tile, live, strides, offsets[0], offsets[1], head)
        score_tile(
            rows, num_heads, most, num_rows, size, k_cache, offsets[0], strides[4], live, scores
        )
        for h in range(num_heads):
            soften_rows(
                span(scores, h * most * TILE, most * TILE),
                span(sums, h * most * size, most * size),
                span(highest, h * most, most), span(total, h * most, most),
                count, group, size, position - tile, live, window, soft_cap,
            )  # fmt: skip
        add_tile(
            sums, num_heads, most, num_rows, size, v_cache, offsets[1], strides[7], live, scores
        )
    for h in range(num_heads):
        at = first_row * strides[8] + (head + h) * group * strides[9]
        piece = span(sums, h * most * size, most * size)
        store_rows(
            piece, span(total, h * most, most), scales[1][head + h],
            count, group, size, out, at, strides,
        )  # fmt: skip


@lru_cache(maxsize=1)
def _kernel(source_digest: int) -> Callable[..., None]:
    """Compile for the sources with this digest; closing over it makes it part of the cache key."""

    @jit(cache=True)
    def attend(
        tensors: tuple[Floats, ...],  # query, k_cache, v_cache, out: flat, bits
        strides: tuple[int, ...],  # query 2, k_cache 3, v_cache 3, out 2
        sizes: tuple[int, int, int, int],  # block_size, num_kv_heads, group, head_dim
        tables: Ints,  # flat [num_seqs, max_blocks]
        table_stride: int,
        items: Longs,  # [num_items, 5]
        sinks: Floats,  # [num_q_heads] or [0]
        scales: tuple[Floats, Floats],  # of the caches' elements: K, V [num_kv_heads]
        scale: np.float32,
        soft_cap: np.float32,  # 0: none
        window: int,  # 0: none
        start: int,  # first unit
        stop: int,  # past the last unit
    ) -> None:
        _ = source_digest
        num_kv_heads, group, size = sizes[1], sizes[2], sizes[3]
        most = num_kv_heads * max(1, ROWS // group) * group
        floats = (
            np.empty(most * size, np.float32),
            np.empty(most * size, np.float32),
            np.empty(most, np.float32),
            np.empty(most, np.float32),
            np.empty(most * TILE, np.float32),
        )
        offsets = (np.empty(TILE, np.int64), np.empty(TILE, np.int64))
        factor = scale if soft_cap > 0 else scale * np.float32(LOG2E)
        unit = start
        while unit < stop:
            index, head = unit // num_kv_heads, unit % num_kv_heads
            table = span(tables, items[index, 0] * table_stride, 1)
            item = (items[index, 1], items[index, 2], items[index, 3])
            # decode: all heads at once, memory in order; else a head at a time, its tile in cache
            num_heads = min(num_kv_heads - head, stop - unit) if item[1] == 1 else 1
            _attend_item(
                tensors, strides, sizes, table, item, (head, num_heads), sinks,
                scales, (factor, soft_cap, window), floats, offsets,
            )  # fmt: skip
            unit += num_heads

    return attend


def paged_attention(
    backend: Backend,
    workers: Workers,
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    batch_invariant: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of every query row; see `Backend.paged_attention`.

    Raises:
        InvalidArgumentError: a shape, dtype, device or value breaks the contract; nothing written.
    """
    check_paged_attention(
        backend, query, k_cache, v_cache, batch,
        scale=scale, window=window, soft_cap=soft_cap, sinks=sinks, out=out,
        k_scale=k_scale, v_scale=v_scale, batch_invariant=batch_invariant,
    )  # fmt: skip
    if out is None:
        out = torch.empty(query.shape, dtype=query.dtype)
    span = 0 if window is None else min(window, batch.max_seq_len + 1)
    query_start_loc, seq_lens = flat(batch.query_start_loc), flat(batch.seq_lens)
    tables, table_stride = flat(batch.block_table), batch.block_table.stride(0)
    block_size, num_kv_heads, head_dim = k_cache.shape[1:]
    group = query.shape[1] // num_kv_heads
    _check_values(batch, query_start_loc, seq_lens, tables, k_cache.shape[0], block_size, span)
    tile_tokens = max(1, ROWS // group)
    items = np.empty((batch.num_seqs + batch.num_tokens // tile_tokens, 5), np.int64)
    num_items = make_items(query_start_loc, seq_lens, tile_tokens, span, items)
    work = int(items[:num_items, 4].sum()) * query.shape[1] * head_dim
    bounds = np.empty(1 + (workers.width if work > SERIAL_COST else 1), np.int64)
    cut(items, num_items, num_kv_heads, bounds)
    strides = (*query.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3], *out.stride()[:2])
    no_sinks = np.empty(0, np.float32)
    kernel = _kernel(SOURCE_DIGEST)
    arguments = (
        (flat(query), flat(k_cache), flat(v_cache), flat(out)),
        strides,
        (block_size, num_kv_heads, group, head_dim),
        tables,
        table_stride,
        items,
        no_sinks if sinks is None else sinks.detach().float().contiguous().numpy(),
        (per_head("k_scale", k_scale, num_kv_heads), per_head("v_scale", v_scale, num_kv_heads)),
        np.float32(scale),
        np.float32(soft_cap or 0.0),
        span,
    )
    pieces = [(int(a), int(b)) for a, b in pairwise(bounds) if a < b]
    workers.run(lambda start, stop: kernel(*arguments, start, stop), pieces)
    return out


def _check_values(
    batch: PagedBatch,
    query_start_loc: Ints,
    seq_lens: Ints,
    tables: Ints,
    num_blocks: int,
    block_size: int,
    span: int,
) -> None:
    fault, index, value = check_batch(
        query_start_loc,
        seq_lens,
        tables,
        batch.block_table.stride(0),
        batch.block_table.shape[1],
        block_size,
        num_blocks,
        batch.num_tokens,
        span,
        (batch.max_query_len, batch.max_seq_len),
    )
    if fault:
        wanted = (
            "",
            f"0 first, then ascending by at most {batch.max_query_len}, to {batch.num_tokens}",
            f"at least the query length, at most {batch.max_seq_len} and the table's room",
            f"a block id of 0 .. {num_blocks - 1}",
        )[fault]
        raise InvalidArgumentError(f"batch.{FAULTS[fault]}[{index}]", wanted, str(value))
    prefix = batch.shared_prefix
    if prefix is not None:  # said for backends that read it once; here it is only checked
        rows = slice(prefix.first_seq, prefix.first_seq + prefix.num_seqs)
        before = seq_lens[rows] - np.diff(query_start_loc)[rows]
        if before.min() < prefix.num_tokens:
            wanted = f"{prefix.num_tokens} tokens before the queries of its sequences"
            raise InvalidArgumentError("batch.shared_prefix", wanted, str(before.min()))
        entries = batch.block_table[rows, : -(-prefix.num_tokens // block_size)]
        if not bool((entries == entries[0]).all()):
            wanted = "the same blocks in the tables of its sequences"
            raise InvalidArgumentError("batch.shared_prefix", wanted, "different ones")
