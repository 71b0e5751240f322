"""Attention of single query tokens on a GPU, with long sequences split over programs.

    out[h] = sum_c 2^(lse_c - top) part_c / sum_c 2^(lse_c - top),  top = max_c lse_c
    part_c = sum_k p_k v[k] / sum_k p_k, lse_c = log2 sum_k 2^logit_k,  k in chunk c

Grid: (KV head, num_seqs + target), one program a chunk; `splits` holds the plan, which every
program works out by itself from `seq_lens`. The grid depends on the batch's shape alone, so that a
CUDA graph may be replayed with other lengths and tables; surplus programs return at once. A
sequence in one chunk is written directly, the others by `merge`. Sequences with other than one
query token are left alone.

A program: warp w owns the keys 16 w .. 16 w + 15 of a tile in a batched product, with its own
running maximum and sum; the warps meet once, after the loop. Products are transposed, keys x rows
and head_dim x rows, because a matrix instruction has at least 16 rows but only 8 columns, and
queries are few. Entries of the block table are loaded a tile ahead and carried, one for 16 keys if
block_size allows, so that the loads of K and V can be pipelined as 16-byte copies. K is read
unmasked within its blocks, since whatever an unseen key brings is replaced; V is masked, since
0 * NaN is NaN. A program takes 8 or 16 query heads of a KV head; a wider group takes several
programs, side by side, that read the same keys.

Bytes moved: K and V once, plus 8 * head_dim a chunk and query head where a sequence is split.
Error: at most twice that of the same algorithm emulated in the cache's dtype. Deterministic for
given lengths; blocks may lie in any order. Only `block_id * stride` is int64.
"""

# ruff: noqa: N803, N806 - compile-time values are upper case, as everywhere in Triton

import math

import torch
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from backends.contract import PagedBatch
from backends.triton_gpu.merge import merge
from backends.triton_gpu.place import Place, ceil_div, device_function, jit, power_of_two
from backends.triton_gpu.soft_cap import LOG2E, cap_logits
from backends.triton_gpu.splits import count_splits, plan_grid

WARPS = 2
STAGES = 4


@device_function
def _write(
    part: tl.tensor, lse: tl.tensor, out: tl.tensor, partial: tl.tensor,
    item: tl.tensor, items: tl.tensor, row: tl.tensor, head: tl.tensor, live: tl.tensor,
    splits: tl.tensor,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, O_STRIDES: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    """The rows' results: final, or for the merge."""
    dim = tl.arange(0, WIDTH)
    mask = live[:, None] & (dim < HEAD_DIM)[None, :]
    if splits == 1:
        to = out + row.to(tl.int64) * O_STRIDES[0] + (head * O_STRIDES[1])[:, None] + dim[None, :]
        tl.store(to, part.to(out.dtype.element_ty), mask=mask)
    else:
        index = item * NUM_HEADS + head
        tl.store(partial + index[:, None] * HEAD_DIM + dim[None, :], part, mask=mask)
        tl.store(partial + items * (NUM_HEADS * HEAD_DIM) + index, lse, mask=live)


@jit(do_not_specialize=["num_seqs", "table_stride", "window", "target"])
def _attend_chunk(
    query: tl.tensor,  # [num_tokens, num_q_heads, head_dim]
    k_cache: tl.tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
    v_cache: tl.tensor,  # likewise
    out: tl.tensor,  # like query
    partial: tl.tensor,  # float32 [items, num_q_heads, head_dim] parts, then [items, num_q_heads]
    query_start_loc: tl.tensor,  # int32 [num_seqs + 1]
    seq_lens: tl.tensor,  # int32 [num_seqs]
    tables: tl.tensor,  # int32 [num_seqs, max_blocks]
    sinks: tl.tensor,  # float32 [num_q_heads], read if HAS_SINKS
    num_seqs: tl.tensor,
    table_stride: tl.tensor,
    scale: tl.tensor,  # float
    soft_cap: tl.tensor,  # float, used if HAS_CAP
    window: tl.tensor,  # used if HAS_WINDOW
    target: tl.tensor,  # chunks wanted a KV head
    Q_STRIDES: tl.constexpr,  # token, head
    K_STRIDES: tl.constexpr,  # block, offset, head
    V_STRIDES: tl.constexpr,
    O_STRIDES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,  # query heads
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    ALIGN: tl.constexpr,  # elements that divide all strides of the caches
    WARPS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,  # head_dim as a power of two
    SEQS: tl.constexpr,  # num_seqs as a power of two; 0: nothing is split
    CHAINED: tl.constexpr,
) -> None:
    TILE: tl.constexpr = WARPS * 16
    SLICES: tl.constexpr = (GROUP + ROWS - 1) // ROWS
    if CHAINED:
        gdc_launch_dependents()
    item = tl.program_id(1)
    if SEQS:
        counts = count_splits(
            query_start_loc, seq_lens, num_seqs, target, window, HAS_WINDOW, TILE, SEQS
        )
        s = tl.sum((tl.cumsum(counts, 0) <= item).to(tl.int32), 0)
        if s >= num_seqs:
            return
        here = tl.arange(0, SEQS)
        split = item - tl.sum(tl.where(here < s, counts, 0), 0)
        splits = tl.sum(tl.where(here == s, counts, 0), 0)
    else:
        s, split, splits = item, 0, 1
    start = tl.load(query_start_loc + s)
    length = tl.load(seq_lens + s)
    if tl.load(query_start_loc + s + 1) - start != 1:
        return
    seen = length * 0
    if HAS_WINDOW:
        seen = tl.maximum(length - window, 0)
    tiles = (length + TILE - 1) // TILE - seen // TILE
    begin = (seen // TILE + split * tiles // splits) * TILE
    end = tl.minimum((seen // TILE + (split + 1) * tiles // splits) * TILE, length)

    kv_head = tl.program_id(0) // SLICES
    member = tl.program_id(0) % SLICES * ROWS + tl.arange(0, ROWS)
    head = kv_head * GROUP + member
    live = member < GROUP
    dim = tl.arange(0, WIDTH)
    at = start.to(tl.int64) * Q_STRIDES[0] + (head * Q_STRIDES[1])[:, None] + dim[None, :]
    q = tl.load(query + at, mask=live[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
    highest, total, sums = _walk_chunk(
        q, k_cache + kv_head * K_STRIDES[2], v_cache + kv_head * V_STRIDES[2],
        tables + s.to(tl.int64) * table_stride, begin, end, seen, scale, soft_cap,
        K_STRIDES, V_STRIDES, BLOCK_SIZE, HEAD_DIM, HAS_CAP, HAS_WINDOW, ALIGN, WARPS, ROWS, WIDTH,
    )  # fmt: skip
    if HAS_SINKS:  # one more logit, in the first chunk alone
        sink = tl.load(sinks + head, mask=live & (split == 0), other=float("-inf")) * LOG2E
        top = tl.maximum(highest, sink)
        total = total * tl.exp2(highest - top) + tl.exp2(sink - top)
        sums = sums * tl.exp2(highest - top)[None, :]
        highest = top
    _write(
        tl.permute(sums / total[None, :], (1, 0)), highest + tl.log2(total), out, partial,
        item, tl.num_programs(1), start, head, live, splits, NUM_HEADS, HEAD_DIM, O_STRIDES, WIDTH,
    )  # fmt: skip


@device_function
def _walk_chunk(
    q: tl.tensor, k_cache: tl.tensor, v_cache: tl.tensor, table: tl.tensor,
    begin: tl.tensor, end: tl.tensor, seen: tl.tensor, scale: tl.tensor, soft_cap: tl.tensor,
    K_STRIDES: tl.constexpr, V_STRIDES: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr, HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr, ALIGN: tl.constexpr,
    WARPS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Each row's highest logit (base 2), total weight, and weighted sum of values."""
    TILE: tl.constexpr = WARPS * 16
    KEYS: tl.constexpr = 16 if BLOCK_SIZE % 16 == 0 else 1  # that share an entry of the table
    q = tl.broadcast_to(tl.permute(q, (1, 0))[None, :, :], (WARPS, WIDTH, ROWS))
    highest = tl.full([WARPS, 1, ROWS], -1e30, tl.float32)
    totals = tl.zeros([WARPS, 16, ROWS], tl.float32)
    sums = tl.zeros([WARPS, WIDTH, ROWS], tl.float32)
    lane = tl.arange(0, 16)
    dim = tl.arange(0, WIDTH)[None, None, :]
    across = tl.arange(0, WIDTH)[None, :, None]
    group = tl.arange(0, TILE // KEYS) * KEYS
    seen_group = seen // KEYS * KEYS
    block_id = _load_entries(table, begin + group, seen_group, end, BLOCK_SIZE, HAS_WINDOW)
    for tile_start in range(begin, end, TILE):
        block = block_id.to(tl.int64)
        offset = ((tile_start + group).to(tl.uint32) % BLOCK_SIZE).to(tl.int32)
        k_at = block * K_STRIDES[0] + offset * K_STRIDES[1]
        v_at = block * V_STRIDES[0] + offset * V_STRIDES[1]
        k_at = tl.multiple_of(tl.reshape(k_at, (WARPS, 16 // KEYS)), (ALIGN, ALIGN))[:, :, None]
        v_at = tl.multiple_of(tl.reshape(v_at, (WARPS, 16 // KEYS)), (ALIGN, ALIGN))[:, None, :]
        if KEYS == 16:
            k_at = k_at + (lane * K_STRIDES[1])[None, :, None]
            v_at = v_at + (lane * V_STRIDES[1])[None, None, :]
        key = tile_start + tl.arange(0, WARPS)[:, None, None] * 16 + lane[None, :, None]
        live = key < end
        if HAS_WINDOW:
            live = live & (key >= seen)
        column_key = tile_start + tl.arange(0, WARPS)[:, None, None] * 16 + lane[None, None, :]
        column_live = column_key < end
        if HAS_WINDOW:
            column_live = column_live & (column_key >= seen)
        if WIDTH == HEAD_DIM:
            k = tl.load(k_cache + k_at + dim)
            v = tl.load(v_cache + v_at + across, mask=column_live, other=0.0)
        else:
            k = tl.load(k_cache + k_at + dim, mask=dim < HEAD_DIM, other=0.0)
            v = tl.load(v_cache + v_at + across, mask=column_live & (across < HEAD_DIM), other=0.0)
        block_id = _load_entries(
            table, tile_start + TILE + group, seen_group, end, BLOCK_SIZE, HAS_WINDOW
        )
        logits = tl.dot(k, q, input_precision="ieee")
        if HAS_CAP:
            logits = cap_logits(logits * scale, soft_cap) * LOG2E
        else:
            logits = logits * (scale * LOG2E)
        logits = tl.where(live, logits, float("-inf"))
        now = tl.maximum(highest, tl.max(logits, 1, keep_dims=True))
        p = tl.exp2(logits - now)
        rescale = tl.exp2(highest - now)
        totals = totals * rescale + p
        sums = sums * rescale
        sums = tl.dot(v, p.to(v.dtype), sums, input_precision="ieee")
        highest = now
    top = tl.max(highest, 0, keep_dims=True)
    weight = tl.exp2(highest - top)
    total = tl.sum(tl.sum(totals, 1, keep_dims=True) * weight, 0)
    return tl.reshape(top, (ROWS,)), tl.reshape(total, (ROWS,)), tl.sum(sums * weight, 0)


@device_function
def _load_entries(
    table: tl.tensor, key: tl.tensor, seen: tl.tensor, end: tl.tensor,
    BLOCK_SIZE: tl.constexpr, HAS_WINDOW: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The blocks of these keys; block 0 for keys that are not seen."""
    live = key < end
    if HAS_WINDOW:
        live = live & (key >= seen)
    return tl.load(table + key.to(tl.uint32) // BLOCK_SIZE, mask=live, other=0)


def decode(
    place: Place,
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: PagedBatch,
    out: Tensor,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: Tensor | None,
) -> None:
    """Write the rows of the sequences with one query token; arguments as `paged_attention` checks.

    Two launches, one above `splits.MAX_PLANNED` sequences. `sinks` are float32 and contiguous.
    """
    num_heads, num_seqs = query.shape[1], batch.num_seqs
    block_size, num_kv_heads, head_dim = k_cache.shape[1:]
    group = num_heads // num_kv_heads
    rows = rows_a_program(group, head_dim)
    programs = num_kv_heads * ceil_div(group, rows)
    warps = warps_a_program(head_dim, query.element_size())
    grid = plan_grid(place, out.device, num_seqs, programs)
    size = grid.items * num_heads * (head_dim + 1) if grid.seqs else 0
    partial = torch.empty(size, dtype=torch.float32, device=out.device)
    strides = (*k_cache.stride()[:3], *v_cache.stride()[:3])
    with place.guard(query.device):
        _attend_chunk[programs, grid.items](
            query, k_cache, v_cache, out, partial,
            batch.query_start_loc, batch.seq_lens, batch.block_table,
            out if sinks is None else sinks,
            num_seqs, batch.block_table.stride(0), scale, 1.0 if soft_cap is None else soft_cap,
            window or 0, grid.target,
            query.stride()[:2], strides[:3], strides[3:], out.stride()[:2],
            block_size, num_heads, group, head_dim,
            soft_cap is not None, window is not None, sinks is not None,
            math.gcd(16, *strides), warps, rows, max(16, power_of_two(head_dim)), grid.seqs,
            place.can_chain(out.device),
            num_warps=warps, num_stages=STAGES,
        )  # fmt: skip
        if grid.seqs:
            merge(place, partial, batch, out, grid, group=group, window=window, tile=16 * warps)


def rows_a_program(group: int, head_dim: int) -> int:
    """Query heads a program: 16 only where there are as many, and registers to hold their sums."""
    return 8 if group <= 8 or head_dim > 128 else 16


def warps_a_program(head_dim: int, itemsize: int) -> int:
    """Warps, each with 16 keys a tile, such that the tiles in flight fit in shared memory."""
    row_bytes = max(16, power_of_two(head_dim)) * itemsize
    return max(1, min(WARPS, 1024 // row_bytes))
