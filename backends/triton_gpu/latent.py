"""Attention over a cache of latents on a GPU: decode with absorbed weights, and prefill (MLA).

    out[h] = sum_k p_k c[k, :value_dim] / sum_k p_k,  p_k = exp(logit_k - max)
    logit_k = scale * q[h].c[k], or cap * tanh(scale * q[h].c[k] / cap)

Every query head reads the same row c[k] of a token, once for both products. A row of a program is
one (query token, query head); ROWS of them are HEADS heads of TOKENS tokens. Products are
transposed, keys x rows and value_dim x rows, so that the tile of latents lies in shared memory as
it was copied there, for both, and few rows waste nothing. It is cut in two where the values end:
value_dim numbers that both products read, and the rest, which only the first one does.

Two kernels share the walk over keys. `_attend_part` is for few query tokens a sequence: grid (slice
of rows, parts at most), parts planned by `splits` and added up by `merge`, as in `decode`.
`_attend_tile` is for the others: grid (slice of heads, tile of tokens), as in `prefill`. A
quantised cache is widened to float16; its scale is part of the scale and of the result.

Bytes moved: each latent once a slice of rows, plus 8 * value_dim a part and row where a sequence is
cut. Error: at most what `backends.oracle` allows. Deterministic; blocks may lie in any order.
"""

import math
from collections.abc import Hashable
from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from backends.contract import AttentionTerms, KVCache, PagedBatch
from backends.triton_gpu import hopper_latent
from backends.triton_gpu import merge as merging
from backends.triton_gpu.cascade import NOBODY
from backends.triton_gpu.e4m3 import scale_step, widen
from backends.triton_gpu.launch import Variant, launcher
from backends.triton_gpu.place import Place, ceil_div, device_function, power_of_two
from backends.triton_gpu.prefill_order import find_tile
from backends.triton_gpu.soft_cap import LOG2E, base2_logits
from backends.triton_gpu.splits import (
    MAX_PLANNED,
    Grid,
    alike_grid,
    count_tiles,
    find_part,
    plan_grid,
)

MOST_ROWS = 1024
"""Rows of a sequence, over all its query tokens, up to which its keys may be cut into parts."""
FEW_ROWS = 16
MANY_ROWS = 64
HOPPER_ROWS = (16, 32, 64)
PROGRAMS_A_MULTIPROCESSOR = 1
"""Two tiles of latents fill its shared memory."""


@device_function
def _walk(
    q: tl.tensor, q_rest: tl.tensor, cache: tl.tensor, table: tl.tensor,
    begin: tl.tensor, end: tl.tensor, limit: tl.tensor, window: tl.tensor,
    scale: tl.tensor, soft_cap: tl.tensor,
    STRIDES: tl.constexpr, BLOCK_SIZE: tl.constexpr, VALUE_DIM: tl.constexpr,
    REST_DIM: tl.constexpr, HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr, ALIGN: tl.constexpr,
    TILE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr,
    E4M3: tl.constexpr, NATIVE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Each row's highest logit (base 2), total weight, and weighted sum of values [WIDTH, ROWS].

    A row sees the keys begin .. end - 1 that are before its `limit`, and within its window.
    """
    highest = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([WIDTH, ROWS], tl.float32)
    lane = tl.arange(0, TILE)
    dim = tl.arange(0, WIDTH)[None, :]
    rest = tl.arange(0, REST)[None, :]
    tile_start = begin // TILE * TILE
    key = tile_start + lane
    inside = (key >= begin) & (key < end)
    block_id = tl.load(table + key // BLOCK_SIZE, mask=inside, other=0)
    for tile in range(tile_start, end, TILE):
        key = tile + lane
        inside = (key >= begin) & (key < end)
        at = block_id.to(tl.int64) * STRIDES[0] + key % BLOCK_SIZE * STRIDES[1]
        at = tl.multiple_of(at, ALIGN)[:, None]
        c = tl.load(cache + at + dim, mask=inside[:, None] & (dim < VALUE_DIM), other=0.0)
        c_rest = c
        if REST_DIM:
            mask = inside[:, None] & (rest < REST_DIM)
            c_rest = tl.load(cache + at + (VALUE_DIM + rest), mask=mask, other=0.0)
        ahead = key + TILE
        block_id = tl.load(
            table + ahead // BLOCK_SIZE, mask=(ahead >= begin) & (ahead < end), other=0
        )
        if E4M3:
            c = widen(c, NATIVE).to(q.dtype)
        logits = tl.dot(c, q, input_precision="ieee")
        if REST_DIM:
            if E4M3:
                c_rest = widen(c_rest, NATIVE).to(q.dtype)
            logits = tl.dot(c_rest, q_rest, logits, input_precision="ieee")
        logits = base2_logits(logits, scale, soft_cap, HAS_CAP)
        live = inside[:, None] & (key[:, None] < limit[None, :])
        if HAS_WINDOW:
            live = live & (key[:, None] >= limit[None, :] - window)
        logits = tl.where(live, logits, float("-inf"))
        now = tl.maximum(highest, tl.max(logits, 0))
        p = tl.exp2(logits - now[None, :])
        rescale = tl.exp2(highest - now)
        total = total * rescale + tl.sum(p, 0)
        sums = sums * rescale[None, :]
        sums = tl.dot(tl.trans(c), p.to(c.dtype), sums, input_precision="ieee")
        highest = now
    return highest, total, sums


@device_function
def _attend_rows(
    query: tl.tensor, q_at: tl.tensor, cache: tl.tensor, table: tl.tensor, sinks: tl.tensor,
    scales: tl.tensor, head: tl.tensor, live: tl.tensor, sinking: tl.tensor,
    begin: tl.tensor, end: tl.tensor, limit: tl.tensor, window: tl.tensor,
    scale: tl.tensor, soft_cap: tl.tensor,
    STRIDES: tl.constexpr, BLOCK_SIZE: tl.constexpr, VALUE_DIM: tl.constexpr,
    REST_DIM: tl.constexpr, HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr, ALIGN: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr, REST: tl.constexpr, E4M3: tl.constexpr, NATIVE: tl.constexpr,
    SCALE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Results of the rows [WIDTH, ROWS], and the logarithms (base 2) of their weights."""
    dim = tl.arange(0, WIDTH)[:, None]
    rest = tl.arange(0, REST)[:, None]
    q_at = q_at[None, :]
    q = tl.load(query + q_at + dim, mask=live[None, :] & (dim < VALUE_DIM), other=0.0)
    q_rest = q
    if REST_DIM:
        mask = live[None, :] & (rest < REST_DIM)
        q_rest = tl.load(query + q_at + (VALUE_DIM + rest), mask=mask, other=0.0)
    if E4M3 and query.dtype.element_ty == tl.bfloat16:
        q = q.to(tl.float16)  # whose fraction holds what the cache holds
        q_rest = q_rest.to(tl.float16)
    each = scale
    if SCALE >= 0:
        each = tl.load(scales)
        scale *= each
    highest, total, sums = _walk(
        q, q_rest, cache, table, begin, end, limit, window, scale, soft_cap,
        STRIDES, BLOCK_SIZE, VALUE_DIM, REST_DIM, HAS_CAP, HAS_WINDOW, ALIGN,
        TILE, ROWS, WIDTH, REST, E4M3, NATIVE,
    )  # fmt: skip
    if SCALE >= 0:
        sums *= each
    if HAS_SINKS:
        sink = tl.load(sinks + head, mask=sinking, other=float("-inf")).to(tl.float32)
        top = tl.maximum(highest, sink * LOG2E)
        rescale = tl.exp2(highest - top)
        total = total * rescale + tl.exp2(sink * LOG2E - top)
        sums *= rescale[None, :]
        highest = top
    share = tl.where(total > 0, total, 1.0)  # a row may see nothing of a part
    return sums / share[None, :], highest + tl.log2(total)


@launcher(
    integers=("q_stride", "o_stride", "num_seqs", "table_stride", "most", "window", "target"),
    indices=("query_start_loc", "seq_lens", "tables", "scales"),
    pointers=("query", "cache", "out", "sinks"),
)
def _attend_part(
    query: tl.tensor,  # [num_tokens, num_q_heads, head_dim]
    cache: tl.tensor,  # [num_blocks, block_size, 1, head_dim], bytes if E4M3
    out: tl.tensor,  # [num_tokens, num_q_heads, value_dim]
    sinks: tl.tensor,  # [num_q_heads], read if HAS_SINKS
    partial: tl.tensor,  # float32 [parts, most, num_q_heads, value_dim], then without value_dim
    query_start_loc: tl.tensor,  # int32 [num_seqs + 1]
    seq_lens: tl.tensor,  # int32 [num_seqs]
    tables: tl.tensor,  # int32 [num_seqs, max_blocks]
    scales: tl.tensor,  # float32 [1], read if SCALE >= 0
    q_stride: tl.tensor,  # from token to token
    o_stride: tl.tensor,
    num_seqs: tl.tensor,
    table_stride: tl.tensor,
    most: tl.tensor,  # query tokens of a sequence that this kernel takes
    window: tl.tensor,  # used if HAS_WINDOW
    target: tl.tensor,  # see splits
    scale: tl.tensor,  # float
    soft_cap: tl.tensor,  # float, used if HAS_CAP
    Q_HEAD: tl.constexpr,  # from head to head
    O_HEAD: tl.constexpr,
    STRIDES: tl.constexpr,  # of the cache: block, offset
    BLOCK_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    REST_DIM: tl.constexpr,  # of a row: what is no value
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    ALIGN: tl.constexpr,  # elements that divide the cache's strides
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,  # a program
    WIDTH: tl.constexpr,  # value_dim as a power of two
    REST: tl.constexpr,  # likewise the rest
    VECTOR: tl.constexpr,  # see splits
    ALIKE: tl.constexpr,
    E4M3: tl.constexpr,
    NATIVE: tl.constexpr,
    SCALE: tl.constexpr,  # -1: there is none
    CHAINED: tl.constexpr,
) -> None:
    TOKENS: tl.constexpr = ROWS // HEADS
    SLICES: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    if CHAINED:
        gdc_launch_dependents()
    item = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    nobody = (0, 0, 0)
    here = tl.arange(0, VECTOR or 1)
    s, split, splits = find_part(
        query_start_loc, seq_lens, num_seqs, item, target, most, window, nobody, here,
        HAS_WINDOW, HAS_SHARED=False, TILE=TILE, VECTOR=VECTOR, ALIKE=ALIKE,
    )  # fmt: skip
    if s >= num_seqs:
        return
    start = tl.load(query_start_loc + s)
    query_len = tl.load(query_start_loc + s + 1) - start
    length = tl.load(seq_lens + s)
    seen, tiles = count_tiles(
        s, query_len, length, most, window, nobody, HAS_WINDOW, HAS_SHARED=False, TILE=TILE
    )
    token = tl.program_id(0) // SLICES * TOKENS
    if (tiles == 0) | (token >= query_len):
        return
    row = tl.arange(0, ROWS)
    token += row // HEADS
    head = tl.program_id(0) % SLICES * HEADS + row % HEADS
    live = (token < query_len) & (head < NUM_HEADS)
    first = seen // TILE
    result, lse = _attend_rows(
        query, (start + token).to(tl.int64) * q_stride + head * Q_HEAD, cache,
        tables + s.to(tl.int64) * table_stride, sinks, scales, head, live, live & (split == 0),
        tl.maximum((first + split * tiles // splits) * TILE, seen),
        tl.minimum((first + (split + 1) * tiles // splits) * TILE, length),
        length - query_len + 1 + token, window, scale, soft_cap,
        STRIDES, BLOCK_SIZE, VALUE_DIM, REST_DIM, HAS_CAP, HAS_WINDOW, HAS_SINKS, ALIGN,
        TILE, ROWS, WIDTH, REST, E4M3, NATIVE, SCALE,
    )  # fmt: skip
    dim = tl.arange(0, WIDTH)[:, None]
    mask = live[None, :] & (dim < VALUE_DIM)
    if splits == 1:
        to = (start + token).to(tl.int64) * o_stride + head * O_HEAD
        tl.store(out + to[None, :] + dim, result.to(out.dtype.element_ty), mask=mask)
    else:
        rows = tl.num_programs(1) * tl.num_programs(2) * most * NUM_HEADS
        at = (item * most + token) * NUM_HEADS + head
        tl.store(partial + at[None, :] * VALUE_DIM + dim, result, mask=mask)
        tl.store(partial + rows * VALUE_DIM + at, lse, mask=live)


@launcher(
    integers=("q_stride", "o_stride", "num_seqs", "table_stride", "shortest", "window"),
    indices=("query_start_loc", "seq_lens", "tables", "scales"),
    pointers=("query", "cache", "out", "sinks"),
)
def _attend_tile(
    query: tl.tensor,  # [num_tokens, num_q_heads, head_dim]
    cache: tl.tensor,  # [num_blocks, block_size, 1, head_dim], bytes if E4M3
    out: tl.tensor,  # [num_tokens, num_q_heads, value_dim]
    sinks: tl.tensor,  # [num_q_heads], read if HAS_SINKS
    query_start_loc: tl.tensor,  # int32 [num_seqs + 1]
    seq_lens: tl.tensor,  # int32 [num_seqs]
    tables: tl.tensor,  # int32 [num_seqs, max_blocks]
    scales: tl.tensor,  # float32 [1], read if SCALE >= 0
    q_stride: tl.tensor,  # from token to token
    o_stride: tl.tensor,
    num_seqs: tl.tensor,
    table_stride: tl.tensor,
    shortest: tl.tensor,  # query tokens; sequences with fewer are left alone
    window: tl.tensor,  # used if HAS_WINDOW
    scale: tl.tensor,  # float
    soft_cap: tl.tensor,  # float, used if HAS_CAP
    Q_HEAD: tl.constexpr,  # from head to head
    O_HEAD: tl.constexpr,
    STRIDES: tl.constexpr,  # of the cache: block, offset
    BLOCK_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    REST_DIM: tl.constexpr,  # of a row: what is no value
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    ALIGN: tl.constexpr,  # elements that divide the cache's strides
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,  # a program
    WIDTH: tl.constexpr,  # value_dim as a power of two
    REST: tl.constexpr,  # likewise the rest
    E4M3: tl.constexpr,
    NATIVE: tl.constexpr,
    SCALE: tl.constexpr,  # -1: there is none
) -> None:
    TOKENS: tl.constexpr = ROWS // HEADS
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    s, start, query_len, first, token_start = find_tile(
        query_start_loc, seq_lens, num_seqs, tile, TOKENS
    )
    if (query_len < shortest) | (token_start >= query_len):
        return
    row = tl.arange(0, ROWS)
    token = token_start + row // HEADS
    head = tl.program_id(0) * HEADS + row % HEADS
    live = (token < query_len) & (head < NUM_HEADS)
    seen = first * 0
    if HAS_WINDOW:
        seen = tl.maximum(first + token_start - window + 1, 0)
    result, _ = _attend_rows(
        query, (start + token).to(tl.int64) * q_stride + head * Q_HEAD, cache,
        tables + s.to(tl.int64) * table_stride, sinks, scales, head, live, live,
        seen, first + tl.minimum(token_start + TOKENS, query_len), first + token + 1, window,
        scale, soft_cap,
        STRIDES, BLOCK_SIZE, VALUE_DIM, REST_DIM, HAS_CAP, HAS_WINDOW, HAS_SINKS, ALIGN,
        TILE, ROWS, WIDTH, REST, E4M3, NATIVE, SCALE,
    )  # fmt: skip
    dim = tl.arange(0, WIDTH)[:, None]
    to = (start + token).to(tl.int64) * o_stride + head * O_HEAD
    mask = live[None, :] & (dim < VALUE_DIM)
    tl.store(out + to[None, :] + dim, result.to(out.dtype.element_ty), mask=mask)


@dataclass(frozen=True, slots=True)
class Plan:
    """All launches of calls with one signature but their tensors and numbers."""

    room: int
    """Positions that a row of the block table has entries for."""
    most: int
    """Query tokens of a sequence whose keys may be cut; 0: none."""
    part: Variant
    part_grid: tuple[int, int, int]
    parts_size: int
    """float32 numbers that the parts need."""
    target: int
    merge: merging.Plan | None
    tile: Variant
    tile_grid: tuple[int, int, int]
    numbers: tuple[int, int, int, int]
    """Strides of queries and output, num_seqs, stride of the tables."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How a kernel is cut."""

    tile: int
    """Keys."""
    rows: int
    heads: int
    """A program."""
    warps: int
    stages: int


def shape_for(num_heads: int, tokens: int, row_bytes: int, itemsize: int, room: int) -> Shape:
    """Tiles such that two of them, and the rows, fit in so many bytes of shared memory.

    Matrix instructions of Hopper take 64 keys; of other GPUs, and of float32, fewer do.
    """
    few = num_heads * tokens <= FEW_ROWS
    rows = FEW_ROWS if few else MANY_ROWS
    if itemsize == 4 or (not few and (2 * 64 + rows) * row_bytes > room):
        rows = FEW_ROWS
    tile = 64
    while tile > 16 and (2 * tile + rows) * row_bytes > room:
        tile //= 2
    heads = min(rows, power_of_two(num_heads))
    return Shape(tile, rows, heads, 4 if rows == FEW_ROWS else 8, 2)


def hopper_shape(num_heads: int, tokens: int) -> Shape:
    """Of `hopper_latent`'s kernel: the rows that its sums have registers for."""
    rows = next((n for n in HOPPER_ROWS if n >= num_heads * tokens), HOPPER_ROWS[-1])
    heads = min(rows, power_of_two(num_heads))
    return Shape(hopper_latent.TILE, rows, heads, hopper_latent.WARPS, 0)


def plan_latents(
    place: Place,
    query: Tensor,
    cache: KVCache,
    batch: PagedBatch,
    out: Tensor,
    terms: AttentionTerms,
) -> Plan:
    """How to attend over latents in this batch and others of its shape; arguments are checked."""
    num_heads, value_dim = out.shape[1:]
    longest, block_size = batch.max_query_len, cache.k.shape[1]
    most = longest if longest * num_heads <= MOST_ROWS else 1
    if terms.batch_invariant or batch.num_seqs > MAX_PLANNED:
        most = 1
    if query.element_size() != 2:
        most = 0
    width, rest = max(16, power_of_two(value_dim)), query.shape[2] - value_dim
    row_bytes = (width + max(16, power_of_two(rest))) * query.element_size()
    room = place.shared_bytes(out.device)
    on_hopper = hopper_latent.can_attend(place, query, cache)
    part = shape_for(num_heads, max(1, most), row_bytes, query.element_size(), room)
    tile = shape_for(num_heads, MANY_ROWS, row_bytes, query.element_size(), room)
    if on_hopper:
        part = hopper_shape(num_heads, max(1, most))
    slices = ceil_div(num_heads, part.heads)
    programs = slices * ceil_div(max(1, most), part.rows // part.heads)
    if terms.batch_invariant:
        grid = alike_grid(batch.num_seqs, batch.max_seq_len)
    else:
        each = PROGRAMS_A_MULTIPROCESSOR
        grid = plan_grid(place, out.device, batch.num_seqs, programs, each=each)
    merge = None
    if grid.splits and most:
        merge = merging.plan_merge(
            place, batch, out, grid,
            group=num_heads, most=most, window=terms.window, tile=part.tile, shared=NOBODY,
        )  # fmt: skip
    tokens = tile.rows // tile.heads
    return Plan(
        batch.block_table.shape[1] * block_size, most,
        _variant(place, query, cache, out, terms, part, grid, on_hopper=on_hopper),
        (programs, *grid.shape),
        grid.items * most * num_heads * (value_dim + 1) if grid.splits else 0, grid.target, merge,
        _variant(place, query, cache, out, terms, tile, None, on_hopper=False),
        (ceil_div(num_heads, tile.heads), batch.num_tokens // tokens + batch.num_seqs, 1),
        (query.stride(0), out.stride(0), batch.num_seqs, batch.block_table.stride(0)),
    )  # fmt: skip


def plan_vector(length: int) -> int:
    """A planning vector's length here: one of half a warp makes the compiler spill in the walk."""
    return 32 if length == 16 else length


def _constants(
    query: Tensor, cache: KVCache, out: Tensor, terms: AttentionTerms
) -> tuple[Hashable, ...]:
    """The compile-time values that all kernels here begin with."""
    value_dim = cache.v.shape[3]
    return (
        query.stride(1), out.stride(1), cache.k.stride()[:2], cache.k.shape[1], query.shape[1],
        value_dim, query.shape[2] - value_dim, terms.soft_cap is not None,
        terms.window is not None, terms.sinks is not None,
    )  # fmt: skip


def _dtypes(query: Tensor, cache: KVCache, terms: AttentionTerms) -> tuple[torch.dtype | None, ...]:
    return query.dtype, cache.k.dtype, None if terms.sinks is None else terms.sinks.dtype


def _tiles(place: Place, cache: KVCache, shape: Shape) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the portable kernels are told of tiles, and of a quantised cache."""
    value_dim, rest = cache.v.shape[3], cache.k.shape[3] - cache.v.shape[3]
    sizes = (
        math.gcd(16, *cache.k.stride()[:2], value_dim), shape.tile, shape.rows, shape.heads,
        max(16, power_of_two(value_dim)), max(16, power_of_two(rest)),
    )  # fmt: skip
    is_quantised = cache.k.dtype == torch.float8_e4m3fn
    return sizes, (is_quantised, place.has_e4m3(cache.k.device), scale_step(cache.k_scale))


def _variant(
    place: Place,
    query: Tensor,
    cache: KVCache,
    out: Tensor,
    terms: AttentionTerms,
    shape: Shape,
    grid: Grid | None,
    *,
    on_hopper: bool,
) -> Variant:
    """The kernel for parts that are planned so; without a plan the one for tiles."""
    device, dtypes = out.device, _dtypes(query, cache, terms)
    constants = _constants(query, cache, out, terms)
    plan = (0, False) if grid is None else (plan_vector(grid.vector), grid.alike)
    chained = grid is not None and place.can_chain(device)
    if on_hopper:
        is_shared = shape.rows > FEW_ROWS
        own = (shape.tile, shape.rows, shape.heads, *plan, chained, is_shared)
        registers = (hopper_latent.CONSUMER_REGISTERS, hopper_latent.LOADER_REGISTERS)
        return hopper_latent.attend_rows.variant(
            place, device, dtypes, (*constants, *own, *registers),
            num_warps=shape.warps, **({"launch_pdl": True} if chained else {}),
        )  # fmt: skip
    sizes, quantised = _tiles(place, cache, shape)
    options = {"num_warps": shape.warps, "num_stages": shape.stages}
    if grid is None:
        constants = (*constants, *sizes, *quantised)
        return _attend_tile.variant(place, device, dtypes, constants, **options)
    constants = (*constants, *sizes, *plan, *quantised, chained)
    return _attend_part.variant(place, device, dtypes, constants, **options)


def attend_latents(
    plan: Plan, query: Tensor, cache: KVCache, batch: PagedBatch, out: Tensor, terms: AttentionTerms
) -> None:
    """Write every row of the batch: a launch for each kernel that may have some, and the merge."""
    lens, sinks = batch.seq_lens, out if terms.sinks is None else terms.sinks
    where = (batch.query_start_loc, lens, batch.block_table)
    scales = lens if cache.k_scale is None else cache.k_scale
    window = min(terms.window or 0, batch.max_seq_len + 1)
    logits = (float(terms.scale), terms.soft_cap or 1.0)
    if plan.most:
        partial = torch.empty(plan.parts_size, dtype=torch.float32, device=out.device)
        plan.part.launch(
            plan.part_grid,
            (query, cache.k, out, sinks, partial, *where, scales),
            (*plan.numbers, plan.most, window, plan.target, *logits),
        )
        if plan.merge is not None:
            merging.merge(plan.merge, partial, batch, out, window, NOBODY)
    if batch.max_query_len > plan.most:
        plan.tile.launch(
            plan.tile_grid,
            (query, cache.k, out, sinks, *where, scales),
            (*plan.numbers, plan.most + 1, window, *logits),
        )
