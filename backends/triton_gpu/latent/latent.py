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

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from backends.contract import AttentionTerms, KVCache, PagedBatch
from backends.triton_gpu.decode import merge as merging
from backends.triton_gpu.decode.cascade import NOT_SHARED
from backends.triton_gpu.decode.splits import (
    MAX_PLANNED,
    Cut,
    Lengths,
    alike_grid,
    count_tiles,
    find_part,
    keys_of_split,
    load_seq,
    plan_grid,
)
from backends.triton_gpu.latent import hopper as hopper_latent
from backends.triton_gpu.latent import wide
from backends.triton_gpu.prefill.order import Items, Order, find_tile, keep_order, plan_order
from backends.triton_gpu.shared.e4m3 import load_scale, widen
from backends.triton_gpu.shared.launch import Launch, Variant, launcher
from backends.triton_gpu.shared.layer import Layer, head_offset, layer_of
from backends.triton_gpu.shared.place import Place, ceil_div, device_function, power_of_two
from backends.triton_gpu.shared.soft_cap import base2_logits
from backends.triton_gpu.shared.softmax import add_sink, add_tile, is_visible, is_within, load_sinks

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
    begin: tl.tensor, end: tl.tensor, last: tl.tensor, window: tl.tensor,
    scale: tl.tensor, soft_cap: tl.tensor, FORM: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Each row's highest logit (base 2), total weight, and weighted sum of values [WIDTH, ROWS].

    A row sees the keys begin .. end - 1 that come up to its `last`, and within its window.
    """
    LAYER: tl.constexpr = FORM.layer
    BLOCK_SIZE: tl.constexpr = LAYER.block_size
    TILE: tl.constexpr = FORM.tile
    ROWS: tl.constexpr = FORM.rows
    WIDTH: tl.constexpr = LAYER.width
    ALIGN: tl.constexpr = LAYER.align
    highest = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([WIDTH, ROWS], tl.float32)
    lane = tl.arange(0, TILE)
    dim = tl.arange(0, WIDTH)[None, :]
    rest = tl.arange(0, FORM.rest)[None, :]
    tile_start = begin // TILE * TILE
    key = tile_start + lane
    inside = is_within(key, begin, end, HAS_BEGIN=True)
    block_id = tl.load(table + key // BLOCK_SIZE, mask=inside, other=0)
    for tile in range(tile_start, end, TILE):
        key = tile + lane
        inside = is_within(key, begin, end, HAS_BEGIN=True)
        at = block_id.to(tl.int64) * LAYER.k_strides[0] + key % BLOCK_SIZE * LAYER.k_strides[1]
        at = tl.multiple_of(at, ALIGN)[:, None]
        c = tl.load(cache + at + dim, mask=inside[:, None] & (dim < LAYER.head_dim), other=0.0)
        c_rest = c
        if LAYER.rest_dim:
            mask = inside[:, None] & (rest < LAYER.rest_dim)
            c_rest = tl.load(cache + at + (LAYER.head_dim + rest), mask=mask, other=0.0)
        ahead = key + TILE
        is_next = is_within(ahead, begin, end, HAS_BEGIN=True)
        block_id = tl.load(table + ahead // BLOCK_SIZE, mask=is_next, other=0)
        if LAYER.e4m3:
            c = widen(c, LAYER.native).to(q.dtype)
        logits = tl.dot(c, q, input_precision="ieee")
        if LAYER.rest_dim:
            if LAYER.e4m3:
                c_rest = widen(c_rest, LAYER.native).to(q.dtype)
            logits = tl.dot(c_rest, q_rest, logits, input_precision="ieee")
        logits = base2_logits(logits, scale, soft_cap, LAYER.has_cap)
        visible = is_visible(key[:, None], last[None, :], window, LAYER.has_window)
        logits = tl.where(inside[:, None] & visible, logits, float("-inf"))
        p, highest, total, rescale = add_tile(logits, highest, total, 0)
        sums = sums * rescale[None, :]
        sums = tl.dot(tl.trans(c), p.to(c.dtype), sums, input_precision="ieee")
    return highest, total, sums


@device_function
def _attend_rows(
    query: tl.tensor, q_at: tl.tensor, cache: tl.tensor, table: tl.tensor, sinks: tl.tensor,
    scales: tl.tensor, head: tl.tensor, live: tl.tensor, has_sink: tl.tensor,
    begin: tl.tensor, end: tl.tensor, last: tl.tensor, window: tl.tensor,
    scale: tl.tensor, soft_cap: tl.tensor, FORM: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Results of the rows [WIDTH, ROWS], and the logarithms (base 2) of their totals."""
    LAYER: tl.constexpr = FORM.layer
    dim = tl.arange(0, LAYER.width)[:, None]
    rest = tl.arange(0, FORM.rest)[:, None]
    q_at = q_at[None, :]
    q = tl.load(query + q_at + dim, mask=live[None, :] & (dim < LAYER.head_dim), other=0.0)
    q_rest = q
    if LAYER.rest_dim:
        mask = live[None, :] & (rest < LAYER.rest_dim)
        q_rest = tl.load(query + q_at + (LAYER.head_dim + rest), mask=mask, other=0.0)
    if LAYER.e4m3 and query.dtype.element_ty == tl.bfloat16:
        q = q.to(tl.float16)  # whose fraction holds what the cache holds
        q_rest = q_rest.to(tl.float16)
    each = load_scale(scales, 0, LAYER.k_scale)
    highest, total, sums = _walk(
        q, q_rest, cache, table, begin, end, last, window, scale * each, soft_cap, FORM
    )
    sums *= each
    if LAYER.has_sinks:
        sink = load_sinks(sinks, head, has_sink)
        highest, total, rescale = add_sink(sink, highest, total)
        sums *= rescale[None, :]
    share = tl.where(total > 0, total, 1.0)  # a row may see nothing of a part
    return sums / share[None, :], highest + tl.log2(total)


@launcher(
    integers=(
        "q_stride",
        "q_head",
        "o_stride",
        "num_seqs",
        "table_stride",
        "most",
        "window",
        "target",
    ),
    indices=("query_start_loc", "seq_lens", "tables", "scales"),
    pointers=("query", "cache", "out", "sinks"),
)
def _attend_part(
    query: tl.tensor,  # [num_tokens, num_q_heads, head_dim]
    cache: tl.tensor,  # [num_blocks, block_size, 1, head_dim], bytes if e4m3
    out: tl.tensor,  # [num_tokens, num_q_heads, value_dim]
    sinks: tl.tensor,  # [num_q_heads], read if has_sinks
    partial: tl.tensor,  # float32 [parts, most, num_q_heads, value_dim], then without value_dim
    query_start_loc: tl.tensor,  # int32 [num_seqs + 1]
    seq_lens: tl.tensor,  # int32 [num_seqs]
    tables: tl.tensor,  # int32 [num_seqs, max_blocks]
    scales: tl.tensor,  # float32 [1], read if there is one
    q_stride: tl.tensor,  # from token to token
    q_head: tl.tensor,  # from head to head
    o_stride: tl.tensor,
    num_seqs: tl.tensor,
    table_stride: tl.tensor,
    most: tl.tensor,  # query tokens of a sequence that this kernel takes
    target: tl.tensor,  # see splits
    window: tl.tensor,  # used if has_window
    scale: tl.tensor,  # float
    soft_cap: tl.tensor,  # float, used if has_cap
    FORM: tl.constexpr,
) -> None:
    LAYER: tl.constexpr = FORM.layer
    CUT: tl.constexpr = FORM.cut
    HEADS: tl.constexpr = FORM.heads
    if FORM.chained:
        gdc_launch_dependents()
    item = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    lengths = Lengths(query_start_loc, seq_lens, num_seqs, most, window, target, 0)
    s, split, splits = find_part(item, tl.arange(0, CUT.vector or 1), lengths, CUT)
    if s >= num_seqs:
        return
    start, query_len, length = load_seq(lengths, s)
    seen, tiles = count_tiles(s, query_len, length, lengths, CUT)
    token = tl.program_id(0) // FORM.slices * FORM.tokens
    if (tiles == 0) | (token >= query_len):
        return
    row = tl.arange(0, FORM.rows)
    token += row // HEADS
    head = tl.program_id(0) % FORM.slices * HEADS + row % HEADS
    live = (token < query_len) & (head < LAYER.num_heads)
    begin, end = keys_of_split(seen, length, tiles, split, splits, CUT)
    q_at = (start + token).to(tl.int64) * q_stride + head_offset(head, q_head, LAYER.q_align)
    result, lse = _attend_rows(
        query, q_at, cache,
        tables + s.to(tl.int64) * table_stride, sinks, scales, head, live, live & (split == 0),
        tl.maximum(begin, seen), end, length - query_len + token, window, scale, soft_cap, FORM,
    )  # fmt: skip
    dim = tl.arange(0, LAYER.width)[:, None]
    mask = live[None, :] & (dim < LAYER.head_dim)
    if splits == 1:
        to = (start + token).to(tl.int64) * o_stride + head * LAYER.o_head
        tl.store(out + to[None, :] + dim, result.to(out.dtype.element_ty), mask=mask)
    else:
        rows = tl.num_programs(1) * tl.num_programs(2) * most * LAYER.num_heads
        at = (item * most + token) * LAYER.num_heads + head
        tl.store(partial + at[None, :] * LAYER.head_dim + dim, result, mask=mask)
        tl.store(partial + rows * LAYER.head_dim + at, lse, mask=live)


@launcher(
    integers=("q_stride", "q_head", "o_stride", "num_seqs", "table_stride", "shortest", "window"),
    indices=("query_start_loc", "seq_lens", "tables", "scales"),
    pointers=("query", "cache", "out", "sinks"),
)
def _attend_tile(
    query: tl.tensor, cache: tl.tensor, out: tl.tensor, sinks: tl.tensor,
    query_start_loc: tl.tensor, seq_lens: tl.tensor, tables: tl.tensor, scales: tl.tensor,
    q_stride: tl.tensor, q_head: tl.tensor, o_stride: tl.tensor, num_seqs: tl.tensor,
    table_stride: tl.tensor,
    shortest: tl.tensor,  # query tokens; sequences with fewer are left alone
    window: tl.tensor, scale: tl.tensor, soft_cap: tl.tensor, FORM: tl.constexpr,
) -> None:  # fmt: skip
    """Attend a tile of tokens; the parameters are those of `_attend_part`."""
    LAYER: tl.constexpr = FORM.layer
    HEADS: tl.constexpr = FORM.heads
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    s, start, query_len, first, token_start = find_tile(
        query_start_loc, seq_lens, num_seqs, tile, FORM.tokens
    )
    if (query_len < shortest) | (token_start >= query_len):
        return
    row = tl.arange(0, FORM.rows)
    token = token_start + row // HEADS
    head = tl.program_id(0) * HEADS + row % HEADS
    live = (token < query_len) & (head < LAYER.num_heads)
    seen = first * 0
    if LAYER.has_window:
        seen = tl.maximum(first + token_start - window + 1, 0)
    q_at = (start + token).to(tl.int64) * q_stride + head_offset(head, q_head, LAYER.q_align)
    result, _ = _attend_rows(
        query, q_at, cache,
        tables + s.to(tl.int64) * table_stride, sinks, scales, head, live, live,
        seen, first + tl.minimum(token_start + FORM.tokens, query_len), first + token, window,
        scale, soft_cap, FORM,
    )  # fmt: skip
    dim = tl.arange(0, LAYER.width)[:, None]
    to = (start + token).to(tl.int64) * o_stride + head * LAYER.o_head
    mask = live[None, :] & (dim < LAYER.head_dim)
    tl.store(out + to[None, :] + dim, result.to(out.dtype.element_ty), mask=mask)


@dataclass(frozen=True, slots=True)
class Plan:
    """All launches of calls with one signature but their tensors and numbers."""

    room: int
    """Positions that a row of the block table has entries for."""
    most: int
    """Query tokens of a sequence whose keys may be cut; 0: none."""
    part: Launch
    parts_size: int
    """float32 numbers that the parts need."""
    merge: Launch | None
    tile: Launch
    order: Order | None
    """The kernel that lists the tiles; None: the tiles need no list."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes by which a kernel is cut."""

    tile: int
    """Keys."""
    rows: int
    heads: int
    """A program."""
    warps: int
    stages: int


class Form(NamedTuple):
    """The compile-time values of the portable kernels."""

    layer: Layer
    tile: int
    """Keys."""
    rows: int
    heads: int
    """A program."""
    cut: Cut | None
    """Of parts; None: of tiles of tokens."""
    chained: bool
    """The next kernel may be launched before this one has ended."""

    @property
    def rest(self) -> int:
        """`rest_dim` as a power of two that matrix instructions take."""
        return max(16, power_of_two(self.layer.rest_dim))

    @property
    def tokens(self) -> int:
        """A program."""
        return self.rows // self.heads

    @property
    def slices(self) -> int:
        """Programs that share the heads of a token."""
        return ceil_div(self.layer.num_heads, self.heads)


def shape_for(num_heads: int, tokens: int, row_bytes: int, itemsize: int, room: int) -> Shape:
    """Tiles such that two of them, and the rows, fit in `room` bytes of shared memory.

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
    """Of `hopper`'s kernel: the rows that its sums have registers for."""
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
    """Return the launches for this batch and others of its shape; arguments are checked."""
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
    is_wide = wide.can_attend(place, query, cache)
    part = shape_for(num_heads, max(1, most), row_bytes, query.element_size(), room)
    if on_hopper:
        part = hopper_shape(num_heads, max(1, most))
    slices = ceil_div(num_heads, part.heads)
    programs = slices * ceil_div(max(1, most), part.rows // part.heads)
    if terms.batch_invariant:
        grid = alike_grid(batch.num_seqs, batch.max_seq_len)
    else:
        each = PROGRAMS_A_MULTIPROCESSOR
        grid = plan_grid(place, out.device, batch.num_seqs, programs, each=each)
    layer = layer_of(place, query, cache, out, terms)
    cut = Cut(part.tile, grid.vector, grid.alike, layer.has_window)
    merge = None
    if grid.splits and most:
        merge = merging.plan_merge(place, batch, out, grid, cut, num_heads, most, NOT_SHARED)
    if cut.vector == 16:  # with a vector of half a warp the compiler spills in the walk
        cut = cut._replace(vector=32)
    strides = (*query.stride()[:2], out.stride(0), batch.num_seqs, batch.block_table.stride(0))
    part_grid = (programs, *grid.shape)
    if is_wide and part.rows == wide.ROWS:
        part_launch = _wide(place, query, cache, out, terms, layer, cut, part_grid)
        part_launch = part_launch._replace(numbers=(*strides[3:], most, grid.target))
    else:
        part_variant = _variant(place, query, cache, terms, layer, part, cut, on_hopper=on_hopper)
        part_launch = Launch(part_variant, part_grid, (*strides, most, grid.target))
    tile_launch, order = _plan_tiles(place, query, cache, batch, out, terms, layer, most + 1)
    return Plan(
        batch.block_table.shape[1] * block_size, most, part_launch,
        grid.items * most * num_heads * (value_dim + 1) if grid.splits else 0, merge, tile_launch,
        order,
    )  # fmt: skip


def _plan_tiles(
    place: Place,
    query: Tensor,
    cache: KVCache,
    batch: PagedBatch,
    out: Tensor,
    terms: AttentionTerms,
    layer: Layer,
    shortest: int,
) -> tuple[Launch, Order | None]:
    """The launch for sequences from `shortest` query tokens on, and what lists its tiles."""
    num_heads, itemsize = layer.num_heads, query.element_size()
    if wide.can_attend(place, query, cache):
        launch = _wide(place, query, cache, out, terms, layer, None, (1, 1, 1))
        tokens, slices = wide.ROWS // wide.heads_a_program(num_heads), wide.slices_of(num_heads)
        tiles = batch.num_tokens // tokens + batch.num_seqs
        programs = min(slices * tiles, place.num_multiprocessors(out.device))
        items = Items(tokens, slices, wide.TILE, tiles, programs, split=False)
        order = plan_order(place, out.device, items, has_window=layer.has_window)
        numbers = (batch.block_table.stride(0),)
        return launch._replace(grid=(programs, 1, 1), numbers=numbers), order
    row_bytes = (layer.width + max(16, power_of_two(layer.rest_dim))) * itemsize
    room = place.shared_bytes(out.device)
    shape = shape_for(num_heads, MANY_ROWS, row_bytes, itemsize, room)
    variant = _variant(place, query, cache, terms, layer, shape, None, on_hopper=False)
    tiles = batch.num_tokens // (shape.rows // shape.heads) + batch.num_seqs
    grid = (ceil_div(num_heads, shape.heads), tiles, 1)
    strides = (*query.stride()[:2], out.stride(0), batch.num_seqs, batch.block_table.stride(0))
    return Launch(variant, grid, (*strides, shortest)), None


def _wide(
    place: Place,
    query: Tensor,
    cache: KVCache,
    out: Tensor,
    terms: AttentionTerms,
    layer: Layer,
    cut: Cut | None,
    grid: tuple[int, int, int],
) -> Launch:
    """The launch of a kernel of `wide`: of parts that are cut so, without a cut of tiles."""
    chained = cut is not None and place.can_chain(query.device)
    form = wide.form_of(layer, cache, out, cut, chained=chained)
    dtypes = (query.dtype, None if terms.sinks is None else terms.sinks.dtype)
    kernel = wide.attend_tile if cut is None else wide.attend_part
    variant = kernel.variant(
        place, query.device, dtypes, (form,), num_warps=wide.WARPS,
        **({"launch_pdl": True} if chained else {}),
    )  # fmt: skip
    return Launch(variant, grid, (), wide.boxes_of(form, query, cache))


def _variant(
    place: Place,
    query: Tensor,
    cache: KVCache,
    terms: AttentionTerms,
    layer: Layer,
    shape: Shape,
    cut: Cut | None,
    *,
    on_hopper: bool,
) -> Variant:
    """The kernel for parts that are cut so; without a cut the one for tiles."""
    device = query.device
    dtypes = (query.dtype, cache.k.dtype, None if terms.sinks is None else terms.sinks.dtype)
    if cut is None:
        form = Form(layer, shape.tile, shape.rows, shape.heads, None, chained=False)
        options = {"num_warps": shape.warps, "num_stages": shape.stages}
        return _attend_tile.variant(place, device, dtypes, (form,), **options)
    chained = place.can_chain(device)
    if on_hopper:
        few = hopper_latent.Form(layer, cut, shape.rows, shape.heads, chained)
        return hopper_latent.attend_rows.variant(
            place, device, dtypes, (few,), num_warps=shape.warps, maxnreg=few.registers.launch,
            **({"launch_pdl": True} if chained else {}),
        )  # fmt: skip
    form = Form(layer, shape.tile, shape.rows, shape.heads, cut, chained)
    return _attend_part.variant(
        place, device, dtypes, (form,), num_warps=shape.warps, num_stages=shape.stages
    )


def attend_latents(
    plan: Plan, query: Tensor, cache: KVCache, batch: PagedBatch, out: Tensor, terms: AttentionTerms
) -> None:
    """Write every row of the batch: a launch for each kernel that may have some, and the merge."""
    lens, sinks = batch.seq_lens, out if terms.sinks is None else terms.sinks
    where = (batch.query_start_loc, lens, batch.block_table)
    scales = lens if cache.k_scale is None else cache.k_scale
    window = min(terms.window or 0, batch.max_seq_len + 1)
    logits = (float(terms.scale), terms.soft_cap or 1.0)
    boxed = (query, query, cache.k, cache.k)
    if plan.most:
        partial = torch.empty(plan.parts_size, dtype=torch.float32, device=out.device)
        if plan.part.boxes:
            tensors = (out, sinks, partial, *where)
            plan.part.run(tensors, window, *logits, boxed=boxed)
        else:
            plan.part.run((query, cache.k, out, sinks, partial, *where, scales), window, *logits)
        if plan.merge is not None:
            merging.merge(plan.merge, partial, batch, out, window, NOT_SHARED)
    if batch.max_query_len <= plan.most:
        return
    if plan.order is not None:
        work = keep_order(plan.order, batch, shortest=plan.most + 1, window=window)
        plan.tile.run((out, sinks, batch.block_table, work), window, *logits, boxed=boxed)
    else:
        plan.tile.run((query, cache.k, out, sinks, *where, scales), window, *logits)
