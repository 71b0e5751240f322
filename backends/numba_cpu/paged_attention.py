"""Attention over the paged cache on a CPU: decode, prefill and chunked prefill.

    out[j, h] = sum_k p_k v[k, h // group] / (sum_k p_k + p_sink)
    p_k = exp(logit_k - max);  logit_k = scale * q.k, or cap * tanh(scale * q.k / cap)
    (of a quantised cache k = k_scale * stored: folded into the scale; v_scale: into the result)

Layout: a row is one (query token, query head); the rows of an item share a KV head. Keys come in
tiles of 64 positions, whatever the block size, by way of the block table. In decode (`item`) the
tiles are the outer loop and the KV heads the inner one, so that memory is walked in order; items of
more rows (`prefill`) widen each tile once for all of them. A row's arithmetic
depends neither on block ids nor on the cut into threads: outputs are bitwise equal under any
permutation of the blocks and any number of threads.

Bytes moved: K and V once an item (up to 16 rows a KV head, or about 256). Sums are float32; error:
at most what `backends.oracle` allows. Offsets are int64. Values are checked before anything is
written: query_start_loc, lengths, table entries. Shapes are checked once a signature; addresses are
read in every call.
"""

import zlib
from collections.abc import Callable
from functools import lru_cache, partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from backends.checks import check_paged_attention
from backends.contract import AttentionTerms, Backend, KVCache, PagedBatch, SharedPrefix
from backends.errors import InvalidArgumentError
from backends.numba_cpu import item, prefill, schedule
from backends.numba_cpu.bits import LOG2E, TAGS, Tag, at, jit, span
from backends.numba_cpu.item import ROWS, attend_item
from backends.numba_cpu.launch import Plans, Workers, per_head, sign
from backends.numba_cpu.matmul import LANES, ROWS_AT_ONCE
from backends.numba_cpu.prefill import PREFILL_ROWS, attend_prefill, padded
from backends.numba_cpu.schedule import FAULTS, Longs, check_batch, cut, make_items
from backends.numba_cpu.tiles import TILE, Floats

SOURCE_DIGEST = zlib.crc32(schedule.SOURCE_DIGEST.to_bytes(4), item.SOURCE_DIGEST)
SOURCE_DIGEST = zlib.crc32(prefill.SOURCE_DIGEST.to_bytes(4), SOURCE_DIGEST)

SERIAL_COST = 1 << 18  # multiply-adds below which a second thread costs more than it saves


class _Kernels(NamedTuple):
    """The compiled functions of this file; they take tensors as addresses."""

    prepare: Callable[..., tuple[int, int, int, int, int]]
    attend: Callable[..., None]


@lru_cache(maxsize=1)
def _kernels(source_digest: int) -> _Kernels:
    """Compile for the sources with this digest; closing over it makes it part of the cache key."""

    @jit(cache=True)
    def prepare(
        tensors: tuple[int, int, int],  # query_start_loc, seq_lens, block_table
        num_seqs: int,
        num_tokens: int,
        table: tuple[int, int, int, int],  # row stride, entries a row, block_size, num_blocks
        limits: tuple[int, int],  # max_query_len, max_seq_len
        window: int,  # 0: none
        tile_tokens: int,
        num_kv_heads: int,
        key_cost: int,  # multiply-adds a key
        items: Longs,  # [at least the number of items, 5], written
        bounds: Longs,  # [1 + the most parts], written
    ) -> tuple[int, int, int, int, int]:
        """(fault, sequence, value) as `check_batch`, then how many units and parts."""
        _ = source_digest
        starts = at(tensors[0], num_seqs + 1, np.int32(0))
        lengths = at(tensors[1], num_seqs, np.int32(0))
        tables = at(tensors[2], 1, np.int32(0))
        fault, index, value = check_batch(
            starts, lengths, tables, table[0], table[1], table[2], table[3],
            num_tokens, window, limits,
        )  # fmt: skip
        if fault:
            return fault, index, value, 0, 0
        num_items = make_items(starts, lengths, tile_tokens, window, items)
        cost = 0
        for i in range(num_items):
            cost += items[i, 4]
        parts = bounds.size - 1 if cost * key_cost > SERIAL_COST else 1
        cut(items, num_items, num_kv_heads, bounds[: parts + 1])
        return 0, 0, 0, num_items * num_kv_heads, parts

    @jit(cache=True)
    def attend(
        tensors: tuple[int, int, int, int],  # query, k_cache, v_cache, out
        tags: tuple[Tag, Tag],  # of query and out, of the caches
        strides: tuple[int, ...],  # query 2, k_cache 3, v_cache 3, out 2
        sizes: tuple[
            int, int, int, int, int
        ],  # block_size, num_kv_heads, group, head_dim, value_dim
        block_table: int,  # [num_seqs, max_blocks]
        table_stride: int,
        items: Longs,  # [num_items, 5]
        sinks: Floats,  # [num_q_heads] or [0]
        scales: tuple[Floats, Floats],  # of the caches' elements: K, V [num_kv_heads]
        numbers: tuple[float, float],  # scale, soft_cap; 0: none
        window: int,  # 0: none
        start: int,  # first unit
        stop: int,  # past the last unit
    ) -> None:
        _ = source_digest
        num_kv_heads, group, size, value_size = sizes[1:]
        most = max(num_kv_heads * ROWS, padded(max(PREFILL_ROWS, group), ROWS_AT_ONCE))
        width = padded(value_size, LANES)
        arrays = (
            at(tensors[0], 1, tags[0]),
            at(tensors[1], 1, tags[1]),
            at(tensors[2], 1, tags[1]),
            at(tensors[3], 1, tags[0]),
        )
        tables = at(block_table, 1, np.int32(0))
        floats = (
            np.empty(most * size, np.float32),
            np.empty(most * width, np.float32),
            np.empty(most, np.float32),
            np.empty(most, np.float32),
            np.empty(most * TILE, np.float32),
        )
        packed = (np.empty(TILE * size, np.float32), np.empty(TILE * width, np.float32))
        offsets = (np.empty(TILE, np.int64), np.empty(TILE, np.int64))
        scale, soft_cap = np.float32(numbers[0]), np.float32(numbers[1])
        factor = scale if soft_cap > 0 else scale * np.float32(LOG2E)
        unit = start
        while unit < stop:
            index, head = unit // num_kv_heads, unit % num_kv_heads
            table = span(tables, items[index, 0] * table_stride, 1)
            place = (items[index, 1], items[index, 2], items[index, 3])
            numbers_here = (factor, soft_cap, window)
            if place[1] * group > ROWS:
                attend_prefill(
                    arrays, strides, sizes, table, place, head, sinks,
                    scales, numbers_here, floats, packed, offsets,
                )  # fmt: skip
                unit += 1
                continue
            # decode: all heads at once, memory in order; else a head at a time, its tile in cache
            num_heads = min(num_kv_heads - head, stop - unit) if place[1] == 1 else 1
            attend_item(
                arrays, strides, sizes, table, place, (head, num_heads), sinks,
                scales, numbers_here, floats, offsets,
            )  # fmt: skip
            unit += num_heads

    return _Kernels(prepare, attend)


class AttentionPlan(NamedTuple):
    """The checked arguments of all calls with one signature."""

    tags: tuple[Tag, Tag]  # of query and out, of the caches
    strides: tuple[int, ...]  # query 2, k_cache 3, v_cache 3, out 2
    sizes: tuple[int, int, int, int, int]  # block_size, num_kv_heads, group, head_dim, value_dim
    num_blocks: int
    tile_tokens: int
    key_cost: int  # multiply-adds a key
    no_sinks: Floats
    no_scales: tuple[Floats, Floats]


def paged_attention(
    backend: Backend,
    workers: Workers,
    plans: Plans[AttentionPlan],
    query: Tensor,
    cache: KVCache,
    batch: PagedBatch,
    terms: AttentionTerms,
    out: Tensor | None,
) -> Tensor:
    """Attention of every query row; see `Backend.paged_attention`.

    Raises:
        InvalidArgumentError: a shape, dtype, device or value breaks the contract; nothing written.
    """
    table, num_tokens, sinks = batch.block_table, batch.slot_mapping.shape[0], terms.sinks
    k_cache, v_cache, k_scale, v_scale = cache.k, cache.v, cache.k_scale, cache.v_scale
    signature = (
        sign(query, k_cache, v_cache, out, sinks, k_scale, v_scale),
        num_tokens,
        batch.seq_lens.device,
        terms.batch_invariant,
    )
    plan = plans.get(signature)
    if plan is None or batch.max_seq_len > table.shape[1] * plan.sizes[0]:
        check_paged_attention(backend, query, cache, batch, terms, out)
        plan = _plan(query, cache, out)
        plans.keep(signature, plan)
    if out is None:
        out = torch.empty((num_tokens, query.shape[1], v_cache.shape[3]), dtype=query.dtype)
    reach = 0 if terms.window is None else min(terms.window, batch.max_seq_len + 1)
    items, bounds, units, parts = _prepare(plan, batch, reach, torch.get_num_threads())
    if k_scale is None and v_scale is None:
        scales = plan.no_scales
    else:
        num_kv_heads = plan.sizes[1]
        scales = (
            per_head("cache.k_scale", k_scale, num_kv_heads),
            per_head("cache.v_scale", v_scale, num_kv_heads),
        )
    attend = partial(
        _kernels(SOURCE_DIGEST).attend,
        (query.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), out.data_ptr()),
        plan.tags,
        plan.strides,
        plan.sizes,
        table.data_ptr(),
        table.stride(0),
        items,
        plan.no_sinks if sinks is None else sinks.detach().float().contiguous().numpy(),
        scales,
        (float(terms.scale), float(terms.soft_cap or 0.0)),
        reach,
    )
    if parts == 1:
        attend(0, units)
    else:
        workers.run(attend, [(a, b) for a, b in pairwise(bounds.tolist()) if a < b])
    return out


def _plan(query: Tensor, cache: KVCache, out: Tensor | None) -> AttentionPlan:
    """Plan a call that has passed its checks."""
    num_blocks, block_size, num_kv_heads, head_dim = cache.k.shape
    num_q_heads, value_dim = query.shape[1], cache.v.shape[3]
    group = num_q_heads // num_kv_heads
    of_out = (num_q_heads * value_dim, value_dim) if out is None else out.stride()[:2]
    return AttentionPlan(
        (TAGS[query.dtype], TAGS[cache.k.dtype]),
        (*query.stride()[:2], *cache.k.stride()[:3], *cache.v.stride()[:3], *of_out),
        (block_size, num_kv_heads, group, head_dim, value_dim),
        num_blocks,
        max(1, PREFILL_ROWS // group),
        num_q_heads * (head_dim + value_dim) // 2,
        np.empty(0, np.float32),
        (per_head("k_scale", None, num_kv_heads), per_head("v_scale", None, num_kv_heads)),
    )


def _prepare(
    plan: AttentionPlan, batch: PagedBatch, reach: int, width: int
) -> tuple[Longs, Longs, int, int]:
    """The work of a batch: items, bounds of the parts, how many units and parts.

    Raises:
        InvalidArgumentError: a value breaks the contract.
    """
    starts, lengths, table = batch.query_start_loc, batch.seq_lens, batch.block_table
    num_seqs, num_tokens = lengths.shape[0], batch.slot_mapping.shape[0]
    items = np.empty((num_seqs + num_tokens // plan.tile_tokens, 5), np.int64)
    bounds = np.empty(1 + width, np.int64)
    fault, index, value, units, parts = _kernels(SOURCE_DIGEST).prepare(
        (starts.data_ptr(), lengths.data_ptr(), table.data_ptr()),
        num_seqs,
        num_tokens,
        (table.stride(0), table.shape[1], plan.sizes[0], plan.num_blocks),
        (batch.max_query_len, batch.max_seq_len),
        reach,
        plan.tile_tokens,
        plan.sizes[1],
        plan.key_cost,
        items,
        bounds,
    )
    if fault:
        wanted = (
            "",
            f"0 first, then ascending by at most {batch.max_query_len}, to {num_tokens}",
            f"at least the query length, at most {batch.max_seq_len} and the table's room",
            f"a block id of 0 .. {plan.num_blocks - 1}",
        )[fault]
        raise InvalidArgumentError(f"batch.{FAULTS[fault]}[{index}]", wanted, str(value))
    if batch.shared_prefix is not None:
        _check_shared(batch, batch.shared_prefix, plan.sizes[0])
    return items, bounds, units, parts


def _check_shared(batch: PagedBatch, prefix: SharedPrefix, block_size: int) -> None:
    """Raise unless all sequences of a shared prefix have its blocks; numba does not need it."""
    first, last, num_tokens = (
        prefix.first_seq,
        prefix.first_seq + prefix.num_seqs,
        prefix.num_tokens,
    )
    if prefix.now is not None:
        first, last, num_tokens = prefix.now.tolist()
    if first >= last or num_tokens == 0:
        return
    rows = slice(first, last)
    before = batch.seq_lens[rows] - batch.query_start_loc.diff()[rows]
    shortest = int(before.min())
    if shortest < num_tokens:
        wanted = f"{num_tokens} tokens before the queries of its sequences"
        raise InvalidArgumentError("batch.shared_prefix", wanted, str(shortest))
    entries = batch.block_table[rows, : -(-num_tokens // block_size)]
    if not bool((entries == entries[0]).all()):
        wanted = "the same blocks in the tables of its sequences"
        raise InvalidArgumentError("batch.shared_prefix", wanted, "different ones")
