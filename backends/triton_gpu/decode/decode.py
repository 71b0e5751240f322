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
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from backends.contract import AttentionTerms, KVCache, PagedBatch
from backends.triton_gpu.decode import merge as merging
from backends.triton_gpu.decode.cascade import NOT_SHARED, Shared, load_shared
from backends.triton_gpu.decode.chunk import walk_chunk
from backends.triton_gpu.decode.splits import (
    MORE_PROGRAMS,
    PROGRAMS_A_MULTIPROCESSOR,
    Cut,
    Lengths,
    alike_grid,
    count_tiles,
    find_part,
    keys_of_split,
    load_seq,
    plan_grid,
)
from backends.triton_gpu.shared.e4m3 import load_scale
from backends.triton_gpu.shared.launch import Launch, launcher
from backends.triton_gpu.shared.layer import Layer, head_offset, layer_of
from backends.triton_gpu.shared.place import Place, ceil_div, device_function, power_of_two
from backends.triton_gpu.shared.softmax import add_sink, load_sinks

WARPS = 2
STAGES = 4
FEW_STAGES = 3
FEW_SEQS = 16


@device_function
def _find_rows(
    query_len: tl.tensor, slices: tl.tensor, q_stride: tl.tensor, q_head: tl.tensor,
    o_stride: tl.tensor, FORM: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """(KV head, query head, query token, whether it is there, where in query, in out) of rows."""
    LAYER: tl.constexpr = FORM.layer
    GROUP: tl.constexpr = LAYER.group
    ROWS: tl.constexpr = FORM.rows
    SLICES: tl.constexpr = (GROUP + ROWS - 1) // ROWS
    ROW_ALIGN: tl.constexpr = FORM.row_align
    Q_ALIGN: tl.constexpr = LAYER.q_align
    if FORM.many:
        kv_head = tl.program_id(0) // slices
        row = tl.program_id(0) % slices * ROWS + tl.arange(0, ROWS)
        token, head = row // GROUP, kv_head * GROUP + row % GROUP
        live = token < query_len
        q_row = tl.multiple_of(token * q_stride, [ROW_ALIGN])
        o_row = tl.multiple_of(token * o_stride, [ROW_ALIGN]) + head * LAYER.o_head
    else:
        kv_head = tl.program_id(0) // SLICES
        member = tl.program_id(0) % SLICES * ROWS + tl.arange(0, ROWS)
        token, head = member * 0, kv_head * GROUP + member
        live = member < GROUP
        q_row, o_row = token, head * LAYER.o_head
    return kv_head, head, token, live, head_offset(head, q_head, Q_ALIGN) + q_row, o_row


@launcher(
    integers=(
        "q_stride", "q_head", "o_stride", "num_seqs", "table_stride", "slices", "most", "window",
        "target",
    ),
    indices=("query_start_loc", "seq_lens", "tables", "shared_now", "k_scale", "v_scale"),
    pointers=("query", "k_cache", "v_cache", "out", "sinks"),
)  # fmt: skip
def _attend_chunk(
    query: tl.tensor,  # [num_tokens, num_q_heads, head_dim]
    k_cache: tl.tensor,  # [num_blocks, block_size, num_kv_heads, head_dim], bytes if e4m3
    v_cache: tl.tensor,  # likewise
    out: tl.tensor,  # like query
    sinks: tl.tensor,  # [num_q_heads], read if has_sinks
    partial: tl.tensor,  # float32 [parts, most, num_q_heads, head_dim], then without head_dim
    query_start_loc: tl.tensor,  # int32 [num_seqs + 1]
    seq_lens: tl.tensor,  # int32 [num_seqs]
    tables: tl.tensor,  # int32 [num_seqs, max_blocks]
    shared_now: tl.tensor,  # int32 [3], read if has_shared: these sequences start at a tile
    k_scale: tl.tensor,  # float32 [1] or [num_kv_heads], read if there is one
    v_scale: tl.tensor,  # likewise
    q_stride: tl.tensor,  # from token to token
    q_head: tl.tensor,  # from head to head
    o_stride: tl.tensor,
    num_seqs: tl.tensor,
    table_stride: tl.tensor,
    slices: tl.tensor,  # programs that a KV head's rows take, used if many
    most: tl.tensor,  # query tokens of a sequence that this kernel takes; 1 unless many
    target: tl.tensor,  # see splits
    window: tl.tensor,  # used if has_window
    scale: tl.tensor,  # float
    soft_cap: tl.tensor,  # float, used if has_cap
    FORM: tl.constexpr,
) -> None:
    LAYER: tl.constexpr = FORM.layer
    CUT: tl.constexpr = FORM.cut
    ROW_ALIGN: tl.constexpr = FORM.row_align
    if FORM.chained:
        gdc_launch_dependents()
    item = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    shared = load_shared(shared_now, num_seqs, CUT.has_shared)
    lengths = Lengths(query_start_loc, seq_lens, num_seqs, most, window, target, shared)
    s, split, splits = find_part(item, tl.arange(0, CUT.vector or 1), lengths, CUT)
    if s >= num_seqs:
        return
    start, query_len, length = load_seq(lengths, s)
    seen, tiles = count_tiles(s, query_len, length, lengths, CUT)
    kv_head, head, token, live, q_row, o_row = _find_rows(
        query_len, slices, q_stride, q_head, o_stride, FORM
    )
    if FORM.many:  # a slice of rows that the sequence does not have
        tiles = tl.where(tl.program_id(0) % slices * FORM.rows // LAYER.group < query_len, tiles, 0)
    if tiles == 0:
        return
    begin, end = keys_of_split(seen, length, tiles, split, splits, CUT)
    dim = tl.arange(0, LAYER.width)
    mask = live[:, None] & (dim < LAYER.head_dim)[None, :]
    q_at = tl.multiple_of(start.to(tl.int64) * q_stride, ROW_ALIGN)
    q = tl.load(query + (q_at + q_row[:, None] + dim[None, :]), mask=mask, other=0.0)
    if LAYER.e4m3:
        q = q.to(tl.float16)
    scale *= load_scale(k_scale, kv_head, LAYER.k_scale)
    highest, total, sums = walk_chunk(
        q, k_cache + kv_head * LAYER.k_strides[2], v_cache + kv_head * LAYER.v_strides[2],
        tables + s.to(tl.int64) * table_stride, begin, end, seen,
        length - query_len + token, window, scale, soft_cap,
        LAYER, FORM.warps, FORM.rows, FORM.many,
    )  # fmt: skip
    sums *= load_scale(v_scale, kv_head, LAYER.v_scale)
    if LAYER.has_sinks:  # in the first part alone
        sink = load_sinks(sinks, head, live & (split == 0))
        highest, total, rescale = add_sink(sink, highest, total)
        sums = sums * rescale[None, :]
    final = splits == 1
    if CUT.has_shared:
        final = final & ((s < shared[0]) | (s >= shared[1]))
    share = tl.where(total > 0, total, 1.0)  # a row of several may see nothing of this part
    result = tl.permute(sums / share[None, :], (1, 0))
    if final:
        to = out + (tl.multiple_of(start.to(tl.int64) * o_stride, ROW_ALIGN) + o_row)[:, None]
        tl.store(to + dim[None, :], result.to(out.dtype.element_ty), mask=mask)
    else:
        row = (item * most + token) * LAYER.num_heads + head
        rows = tl.num_programs(1) * tl.num_programs(2) * most * LAYER.num_heads
        at = partial + row[:, None] * LAYER.head_dim
        tl.store(at + dim[None, :], result, mask=mask)
        tl.store(partial + rows * LAYER.head_dim + row, highest + tl.log2(total), mask=live)


class Form(NamedTuple):
    """The compile-time values of the kernel."""

    layer: Layer
    cut: Cut
    many: bool
    """Sequences may have several query tokens."""
    row_align: int
    """Elements that divide all strides of query and out."""
    warps: int
    rows: int
    chained: bool
    """The next kernel may be launched before this one has ended."""


@dataclass(frozen=True, slots=True)
class Plan:
    """All of decode's launches except tensors and numbers of this call."""

    launch: Launch
    parts_size: int
    """float32 numbers that the parts need."""
    merge: Launch | None


def plan_decode(
    place: Place,
    query: Tensor,
    cache: KVCache,
    batch: PagedBatch,
    out: Tensor,
    terms: AttentionTerms,
    *,
    most: int = 1,
    shared: Shared = NOT_SHARED,
) -> Plan:
    """Return the launches for sequences of up to `most` query tokens, in batches of this shape.

    Arguments have been checked.
    """
    num_heads, head_dim = query.shape[1:]
    layer = layer_of(place, query, cache, out, terms)
    rows = rows_a_program(layer.group, head_dim, many=most > 1)
    warps = warps_a_program(head_dim, cache.k.element_size())
    slices = ceil_div(most * layer.group, rows)
    programs = num_heads // layer.group * slices
    if terms.batch_invariant:
        grid = alike_grid(batch.num_seqs, batch.max_seq_len)
    else:
        each = PROGRAMS_A_MULTIPROCESSOR + (most > 1)  # steps of several tokens take longer
        each = MORE_PROGRAMS if layer.e4m3 else each
        grid = plan_grid(place, out.device, batch.num_seqs, programs, each=each)
    cut = Cut(16 * warps, grid.vector, grid.alike, layer.has_window, shared.chunks > 0)
    row_align = math.gcd(layer.q_align, *out.stride()[:2])
    form = Form(layer, cut, most > 1, row_align, warps, rows, place.can_chain(out.device))
    sinks_dtype = None if terms.sinks is None else terms.sinks.dtype
    variant = _attend_chunk.variant(
        place, out.device, (query.dtype, cache.k.dtype, sinks_dtype), (form,),
        num_warps=warps, num_stages=stages_a_program(grid.vector, e4m3=layer.e4m3),
    )  # fmt: skip
    merge = None
    if grid.splits:
        merge = merging.plan_merge(place, batch, out, grid, cut, layer.group, most, shared)
    numbers = (
        *query.stride()[:2], out.stride(0), batch.num_seqs, batch.block_table.stride(0),
        slices, most, grid.target,
    )  # fmt: skip
    launch = Launch(variant, (programs, *grid.shape), numbers)
    size = grid.items * most * num_heads * (head_dim + 1) if grid.splits else 0
    return Plan(launch, size, merge)


def decode(
    plan: Plan,
    query: Tensor,
    cache: KVCache,
    batch: PagedBatch,
    out: Tensor,
    terms: AttentionTerms,
    shared: Shared = NOT_SHARED,
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
    plan.launch.run(tensors, window, float(terms.scale), terms.soft_cap or 1.0)
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
