"""Attention of few query tokens a sequence on a GPU, with long sequences split over programs.

    out[h] = sum_c 2^(lse_c - top) part_c / sum_c 2^(lse_c - top),  top = max_c lse_c
    part_c = sum_k p_k v[k] / sum_k p_k, lse_c = log2 sum_k 2^logit_k,  k in part c

Grid: (KV head, parts at most), one program a part; `splits` holds the plan, which every program
works out by itself from `seq_lens`. The grid depends on the batch's shape alone, so that a CUDA
graph may be replayed with other lengths and tables; surplus programs return at once. A sequence in
one part is written directly, the others by `merge`, and so are those whose prefix `cascade` has
read for them.

A row is a query head of a KV head, or if MANY a pair of query token and head: a few tokens that
are verified, or the end of a prompt, read the keys together. A program takes 8 or 16 rows and walks
keys a tile at a time (`chunk`); more rows take several programs, side by side, that read the same
keys. Sequences with more than `most` query tokens are left alone. Of a quantised cache the scale of
the keys is part of the scale, that of the values part of the result; products are float16.

Bytes moved: K and V once, plus 8 * head_dim a part and row where a sequence is cut.
Error: at most what `backends.oracle` allows. Deterministic for given lengths, and in the
batch-invariant plan for a given sequence; blocks may lie in any order.
"""

import math
from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from backends.contract import AttentionTerms, KVCache, PagedBatch
from backends.triton_gpu import merge as merging
from backends.triton_gpu.cascade import NOBODY, WHOLE, Shared, load_shared
from backends.triton_gpu.chunk import walk_chunk
from backends.triton_gpu.e4m3 import scale_step
from backends.triton_gpu.launch import Variant, launcher
from backends.triton_gpu.place import Place, ceil_div, device_function, power_of_two
from backends.triton_gpu.soft_cap import LOG2E
from backends.triton_gpu.splits import (
    MORE_PROGRAMS,
    PROGRAMS_A_MULTIPROCESSOR,
    alike_grid,
    count_tiles,
    find_part,
    plan_grid,
)

WARPS = 2
STAGES = 4
FEW_STAGES = 3
FEW_SEQS = 16


@device_function
def _write(
    result: tl.tensor, lse: tl.tensor, out: tl.tensor, out_at: tl.tensor, partial: tl.tensor,
    row: tl.tensor, rows: tl.tensor, live: tl.tensor, final: tl.tensor,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    """The rows' results: final, or for the merge."""
    dim = tl.arange(0, WIDTH)
    mask = live[:, None] & (dim < HEAD_DIM)[None, :]
    if final:
        to = out + out_at[:, None] + dim[None, :]
        tl.store(to, result.to(out.dtype.element_ty), mask=mask)
    else:
        tl.store(partial + row[:, None] * HEAD_DIM + dim[None, :], result, mask=mask)
        tl.store(partial + rows * HEAD_DIM + row, lse, mask=live)


@device_function
def _find_rows(
    query_len: tl.tensor, slices: tl.tensor, q_stride: tl.tensor, o_stride: tl.tensor,
    Q_HEAD: tl.constexpr, O_HEAD: tl.constexpr, GROUP: tl.constexpr, ROW_ALIGN: tl.constexpr,
    ROWS: tl.constexpr, MANY: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """(KV head, query head, query token, whether it is there, where in query, in out) of rows."""
    SLICES: tl.constexpr = (GROUP + ROWS - 1) // ROWS
    if MANY:
        kv_head = tl.program_id(0) // slices
        row = tl.program_id(0) % slices * ROWS + tl.arange(0, ROWS)
        token, head = row // GROUP, kv_head * GROUP + row % GROUP
        live = token < query_len
        q_row = tl.multiple_of(token * q_stride, [ROW_ALIGN]) + head * Q_HEAD
        o_row = tl.multiple_of(token * o_stride, [ROW_ALIGN]) + head * O_HEAD
    else:
        kv_head = tl.program_id(0) // SLICES
        member = tl.program_id(0) % SLICES * ROWS + tl.arange(0, ROWS)
        token, head = member * 0, kv_head * GROUP + member
        live = member < GROUP
        q_row, o_row = head * Q_HEAD, head * O_HEAD
    return kv_head, head, token, live, q_row, o_row


@device_function
def _add_sink(
    sink: tl.tensor, highest: tl.tensor, total: tl.tensor, sums: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """One more logit a row, in the denominator alone."""
    top = tl.maximum(highest, sink)
    rescale = tl.exp2(highest - top)
    return top, total * rescale + tl.exp2(sink - top), sums * rescale[None, :]


@launcher(
    integers=(
        "q_stride", "o_stride", "num_seqs", "table_stride", "slices", "most", "window", "target",
    ),
    indices=("query_start_loc", "seq_lens", "tables", "shared_now", "k_scale", "v_scale"),
    pointers=("query", "k_cache", "v_cache", "out", "sinks"),
)  # fmt: skip
def _attend_chunk(
    query: tl.tensor,  # [num_tokens, num_q_heads, head_dim]
    k_cache: tl.tensor,  # [num_blocks, block_size, num_kv_heads, head_dim], bytes if E4M3
    v_cache: tl.tensor,  # likewise
    out: tl.tensor,  # like query
    sinks: tl.tensor,  # [num_q_heads], read if HAS_SINKS
    partial: tl.tensor,  # float32 [parts, most, num_q_heads, head_dim], then without head_dim
    query_start_loc: tl.tensor,  # int32 [num_seqs + 1]
    seq_lens: tl.tensor,  # int32 [num_seqs]
    tables: tl.tensor,  # int32 [num_seqs, max_blocks]
    shared_now: tl.tensor,  # int32 [3], read if HAS_SHARED: these sequences start at a tile
    k_scale: tl.tensor,  # float32 [1] or [num_kv_heads], read if K_SCALE >= 0
    v_scale: tl.tensor,  # likewise
    q_stride: tl.tensor,  # from token to token
    o_stride: tl.tensor,
    num_seqs: tl.tensor,
    table_stride: tl.tensor,
    slices: tl.tensor,  # programs that a KV head's rows take, used if MANY
    most: tl.tensor,  # query tokens of a sequence that this kernel takes; 1 unless MANY
    window: tl.tensor,  # used if HAS_WINDOW
    target: tl.tensor,  # see splits
    scale: tl.tensor,  # float
    soft_cap: tl.tensor,  # float, used if HAS_CAP
    Q_HEAD: tl.constexpr,  # from head to head
    O_HEAD: tl.constexpr,
    K_STRIDES: tl.constexpr,  # block, offset, head
    V_STRIDES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,  # query heads
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    MANY: tl.constexpr,
    ROW_ALIGN: tl.constexpr,  # elements that divide all strides of query and out
    ALIGN: tl.constexpr,  # likewise of the caches
    WARPS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,  # head_dim as a power of two
    VECTOR: tl.constexpr,  # see splits
    ALIKE: tl.constexpr,
    E4M3: tl.constexpr,
    NATIVE: tl.constexpr,
    K_SCALE: tl.constexpr,  # from head to head, -1: there is none
    V_SCALE: tl.constexpr,
    CHAINED: tl.constexpr,
    WHOLE: tl.constexpr,
) -> None:
    TILE: tl.constexpr = WARPS * 16
    if CHAINED:
        gdc_launch_dependents()
    item = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    shared = load_shared(shared_now, num_seqs, HAS_SHARED, WHOLE)
    here = tl.arange(0, VECTOR or 1)
    s, split, splits = find_part(
        query_start_loc, seq_lens, num_seqs, item, target, most, window, shared, here,
        HAS_WINDOW, HAS_SHARED, TILE, VECTOR, ALIKE,
    )  # fmt: skip
    if s >= num_seqs:
        return
    start = tl.load(query_start_loc + s)
    query_len = tl.load(query_start_loc + s + 1) - start
    length = tl.load(seq_lens + s)
    seen, tiles = count_tiles(
        s, query_len, length, most, window, shared, HAS_WINDOW, HAS_SHARED, TILE
    )
    kv_head, head, token, live, q_row, o_row = _find_rows(
        query_len, slices, q_stride, o_stride, Q_HEAD, O_HEAD, GROUP, ROW_ALIGN, ROWS, MANY
    )
    if MANY:  # a slice of rows that the sequence does not have
        tiles = tl.where(tl.program_id(0) % slices * ROWS // GROUP < query_len, tiles, 0)
    if tiles == 0:
        return
    begin = (seen // TILE + split * tiles // splits) * TILE
    end = tl.minimum((seen // TILE + (split + 1) * tiles // splits) * TILE, length)
    dim = tl.arange(0, WIDTH)
    q_at = tl.multiple_of(start.to(tl.int64) * q_stride, ROW_ALIGN)
    at = q_at + q_row[:, None] + dim[None, :]
    q = tl.load(query + at, mask=live[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
    if E4M3:
        q = q.to(tl.float16)
    if K_SCALE >= 0:
        scale *= tl.load(k_scale + kv_head * K_SCALE)
    highest, total, sums = walk_chunk(
        q, k_cache + kv_head * K_STRIDES[2], v_cache + kv_head * V_STRIDES[2],
        tables + s.to(tl.int64) * table_stride, begin, end, seen,
        length - query_len + 1 + token, window, scale, soft_cap,
        K_STRIDES, V_STRIDES, BLOCK_SIZE, HEAD_DIM, HAS_CAP, HAS_WINDOW, ALIGN,
        WARPS, ROWS, WIDTH, E4M3, NATIVE, MANY,
    )  # fmt: skip
    if V_SCALE >= 0:
        sums *= tl.load(v_scale + kv_head * V_SCALE)
    if HAS_SINKS:  # in the first part alone
        sink = tl.load(sinks + head, mask=live & (split == 0), other=float("-inf"))
        highest, total, sums = _add_sink(sink.to(tl.float32) * LOG2E, highest, total, sums)
    final = splits == 1
    if HAS_SHARED:
        final = final & ((s < shared[0]) | (s >= shared[1]))
    share = tl.where(total > 0, total, 1.0)  # a row of several may see nothing of this part
    items = tl.num_programs(1) * tl.num_programs(2)
    _write(
        tl.permute(sums / share[None, :], (1, 0)), highest + tl.log2(total), out,
        tl.multiple_of(start.to(tl.int64) * o_stride, ROW_ALIGN) + o_row, partial,
        (item * most + token) * NUM_HEADS + head, items * most * NUM_HEADS, live, final,
        HEAD_DIM, WIDTH,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Plan:
    """All of decode's launches but tensors and numbers of this call."""

    variant: Variant
    grid: tuple[int, int, int]
    parts_size: int
    """float32 numbers that the parts need."""
    numbers: tuple[int, ...]
    """Those that come first: strides, num_seqs, slices, most."""
    target: int
    merge: merging.Plan | None


def plan_decode(
    place: Place,
    query: Tensor,
    cache: KVCache,
    batch: PagedBatch,
    out: Tensor,
    terms: AttentionTerms,
    *,
    most: int = 1,
    shared: Shared = NOBODY,
) -> Plan:
    """How to decode this batch's sequences of up to `most` query tokens, and others of its shape.

    Arguments have been checked.
    """
    num_heads, head_dim = query.shape[1:]
    num_kv_heads, e4m3 = cache.k.shape[2], cache.k.dtype == torch.float8_e4m3fn
    group = num_heads // num_kv_heads
    rows = rows_a_program(group, head_dim, many=most > 1)
    warps = warps_a_program(head_dim, cache.k.element_size())
    slices = ceil_div(most * group, rows)
    programs = num_kv_heads * slices
    if terms.batch_invariant:
        grid = alike_grid(batch.num_seqs, batch.max_seq_len)
    else:
        each = MORE_PROGRAMS if e4m3 or most > 1 else PROGRAMS_A_MULTIPROCESSOR
        grid = plan_grid(place, out.device, batch.num_seqs, programs, each=each)
    (q_stride, q_head, _), (o_stride, o_head, _) = query.stride(), out.stride()
    k_strides, v_strides = cache.k.stride()[:3], cache.v.stride()[:3]
    constants = (
        q_head, o_head, k_strides, v_strides, cache.k.shape[1], num_heads, group, head_dim,
        terms.soft_cap is not None, terms.window is not None, terms.sinks is not None,
        shared.chunks > 0, most > 1, math.gcd(16, q_stride, q_head, o_stride, o_head),
        math.gcd(16, *k_strides, *v_strides), warps, rows, max(16, power_of_two(head_dim)),
        grid.vector, grid.alike, e4m3, place.has_e4m3(out.device),
        scale_step(cache.k_scale), scale_step(cache.v_scale), place.can_chain(out.device), WHOLE,
    )  # fmt: skip
    sinks_dtype = None if terms.sinks is None else terms.sinks.dtype
    variant = _attend_chunk.variant(
        place, out.device, (query.dtype, cache.k.dtype, sinks_dtype), constants,
        num_warps=warps, num_stages=stages_a_program(grid.vector, e4m3=e4m3),
    )  # fmt: skip
    return Plan(
        variant,
        (programs, *grid.shape),
        grid.items * most * num_heads * (head_dim + 1) if grid.splits else 0,
        (
            q_stride, o_stride, batch.num_seqs, batch.block_table.stride(0),
            slices, most,
        ),
        grid.target,
        merging.plan_merge(
            place, batch, out, grid,
            group=group, most=most, window=terms.window, tile=16 * warps, shared=shared,
        ) if grid.splits else None,
    )  # fmt: skip


def decode(
    plan: Plan,
    query: Tensor,
    cache: KVCache,
    batch: PagedBatch,
    out: Tensor,
    terms: AttentionTerms,
    shared: Shared = NOBODY,
) -> None:
    """Write the rows of the sequences that the plan is for.

    Two launches, one above `splits.MAX_PLANNED` sequences.
    """
    lens = batch.seq_lens
    partial = torch.empty(plan.parts_size, dtype=torch.float32, device=out.device)
    tensors = (
        query, cache.k, cache.v, out, out if terms.sinks is None else terms.sinks, partial,
        batch.query_start_loc, lens, batch.block_table,
        lens if shared.now is None else shared.now,
        lens if cache.k_scale is None else cache.k_scale,
        lens if cache.v_scale is None else cache.v_scale,
    )  # fmt: skip
    window = 0 if terms.window is None else min(terms.window, batch.max_seq_len + 1)
    numbers = (*plan.numbers, window, plan.target, float(terms.scale), terms.soft_cap or 1.0)
    plan.variant.launch(plan.grid, tensors, numbers)
    if plan.merge is not None:
        merging.merge(plan.merge, partial, batch, out, window, shared)


def rows_a_program(group: int, head_dim: int, *, many: bool) -> int:
    """Rows a program: 16 only where there are as many, and registers to hold their sums."""
    return 8 if (group <= 8 and not many) or head_dim > 128 else 16


def stages_a_program(vector: int, *, e4m3: bool) -> int:
    """Tiles of a program in flight, its own included; by the length of the planning vector.

    A tile less starts sooner, which shows where a step is short, and costs bandwidth where many
    programs read for long; over a quantised cache there it costs nothing. As measured.
    """
    return FEW_STAGES if e4m3 or 0 < vector <= FEW_SEQS else STAGES


def warps_a_program(head_dim: int, itemsize: int) -> int:
    """Warps, each with 16 keys a tile, such that the tiles in flight fit in shared memory."""
    row_bytes = max(16, power_of_two(head_dim)) * itemsize
    return max(1, min(WARPS, 1024 // row_bytes))
