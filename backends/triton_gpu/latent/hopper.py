"""Attention of few query tokens over latents on Hopper: a warp-specialized Gluon kernel.

The formula, the rows and the parts of `latent`, whose kernels serve what this one cannot
(`can_attend`), and tiles of many query tokens. There the products of a tile wait for its copy and
hold up the next one. Here four warps copy and two groups of four multiply: each group has half of
the rows and takes every tile.

A program may be launched while the kernel before it still runs. It then reads only lengths and
block tables, which no kernel writes that launches the next one early; queries, latents, sinks and
everything that is stored wait. Likewise the merge is launched early, and finds registers beside a
program of few rows.

Layout: in shared memory two tiles of 64 latents, cut where the values end, and the rows of the
queries. Logits are latents x queries, sums are numbers x queries: the tile is the left side of both
products where it lies, and few rows waste nothing. Slots that no row sees are zeros there, since
0 * NaN is NaN.

Bytes moved: each latent once a slice of rows, plus 8 * value_dim a part and row where a sequence is
cut. Error and order as in `latent`.
"""

from typing import NamedTuple

from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from backends.contract import KVCache
from backends.triton_gpu.decode.splits import (
    Cut,
    Lengths,
    count_tiles,
    find_part,
    keys_of_split,
    load_seq,
)
from backends.triton_gpu.hopper.items import allocate_barriers, gluon_function
from backends.triton_gpu.shared.launch import launcher
from backends.triton_gpu.shared.layer import Layer, query_align
from backends.triton_gpu.shared.place import Place
from backends.triton_gpu.shared.soft_cap import base2_logits
from backends.triton_gpu.shared.softmax import (
    add_sink,
    add_tile,
    is_within,
    load_entries,
    load_sinks,
)

TILE = 64
REST = 64
WARPS = 4
ROWS_OF_LARGE_SUMS = 64
"""Their sums alone take 128 registers of a thread that multiplies values of 512 numbers."""


class _Tiles(NamedTuple):
    """Shared memory that warps hand each other: two tiles of latents, cut where the values end."""

    latents: gl.tensor
    """Their values."""
    rest: gl.tensor
    weights: gl.tensor
    """A tile's, of each group."""
    full: gl.tensor
    empty: gl.tensor
    ready: gl.tensor
    """That a group's queries are there."""


class _Keys(NamedTuple):
    """The share of a program: the keys begin .. end - 1, with rows from this token on."""

    begin: gl.tensor
    end: gl.tensor
    token: gl.tensor
    length: gl.tensor
    """Of the sequence, as the next."""
    query_len: gl.tensor
    window: gl.tensor
    scale: gl.tensor
    soft_cap: gl.tensor


class _Rows(NamedTuple):
    """The sources and the targets of a program's rows."""

    query: gl.tensor
    q_stride: gl.tensor
    q_head: gl.tensor
    sinks: gl.tensor
    out: gl.tensor
    partial: gl.tensor
    head: gl.tensor
    """The first."""
    start: gl.tensor
    """The sequence's first row."""
    o_stride: gl.tensor
    place: gl.tensor
    """Of the part's first row in `partial`."""
    rows: gl.tensor
    """In `partial`."""
    is_first: gl.tensor
    is_final: gl.tensor


@gluon_function
def _load_tiles(
    cache: gl.tensor, table: gl.tensor, begin: gl.tensor, end: gl.tensor,
    c_tiles: gl.tensor, r_tiles: gl.tensor, full: gl.tensor, empty: gl.tensor,
    FORM: gl.constexpr,
) -> None:  # fmt: skip
    """Copy the tiles that hold the keys begin .. end - 1, each into the other buffer.

    Entries of the table are loaded a tile ahead.
    """
    LAYER: gl.constexpr = FORM.layer
    BLOCK_SIZE: gl.constexpr = LAYER.block_size
    TILE: gl.constexpr = c_tiles.shape[1]
    VALUES: gl.constexpr = c_tiles.shape[2]
    REST: gl.constexpr = r_tiles.shape[2]
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    NARROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    lane = gl.arange(0, TILE, gl.SliceLayout(1, WIDE))
    rest_lane = gl.arange(0, TILE, gl.SliceLayout(1, NARROW))
    dim = gl.arange(0, VALUES, gl.SliceLayout(0, WIDE))[None, :]
    rest = gl.arange(0, REST, gl.SliceLayout(0, NARROW))[None, :]
    first = begin // TILE * TILE
    key, rest_key = first + lane, first + rest_lane
    block = load_entries(table, key, begin, end, BLOCK_SIZE, HAS_BEGIN=True)
    rest_block = load_entries(table, rest_key, begin, end, BLOCK_SIZE, HAS_BEGIN=True)
    if FORM.chained:
        gdc_wait()
    for i in range((end - first + TILE - 1) // TILE):
        buffer = i % 2
        live = is_within(key, begin, end, HAS_BEGIN=True)
        at = block.to(gl.int64) * LAYER.k_strides[0] + key % BLOCK_SIZE * LAYER.k_strides[1]
        rest_live = is_within(rest_key, begin, end, HAS_BEGIN=True)
        rest_at = rest_block.to(gl.int64) * LAYER.k_strides[0]
        rest_at += rest_key % BLOCK_SIZE * LAYER.k_strides[1] + VALUES
        key += TILE
        rest_key += TILE
        block = load_entries(table, key, begin, end, BLOCK_SIZE, HAS_BEGIN=True)
        rest_block = load_entries(table, rest_key, begin, end, BLOCK_SIZE, HAS_BEGIN=True)
        mbarrier.wait(empty.index(buffer), (i // 2 & 1) ^ 1)
        async_copy.async_copy_global_to_shared(
            c_tiles.index(buffer), cache + at[:, None] + dim, mask=live[:, None]
        )
        async_copy.async_copy_global_to_shared(
            r_tiles.index(buffer), cache + rest_at[:, None] + rest, mask=rest_live[:, None]
        )
        async_copy.mbarrier_arrive(full.index(buffer), increment_count=False)


@gluon_function
def _walk(
    q: gl.tensor, q_rest: gl.tensor, tiles: gl.tensor, keys: gl.tensor, limit: gl.tensor,
    FORM: gl.constexpr, GROUP_ID: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor, gl.tensor]:  # fmt: skip
    """Each row's highest logit (base 2), total weight, weighted sum of values [VALUES, ROWS]."""
    LAYER: gl.constexpr = FORM.layer
    TILE: gl.constexpr = tiles.latents.shape[1]
    VALUES: gl.constexpr = tiles.latents.shape[2]
    ROWS: gl.constexpr = q.shape[0]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    lane = gl.arange(0, TILE, gl.SliceLayout(1, LAYOUT))
    highest = gl.full([ROWS], -1e30, gl.float32, gl.SliceLayout(0, LAYOUT))
    totals = gl.full([TILE, ROWS], 0.0, gl.float32, LAYOUT)
    sums = gl.full([VALUES, ROWS], 0.0, gl.float32, LAYOUT)
    p_tile = tiles.weights.index(GROUP_ID)
    first = keys.begin // TILE * TILE
    low, high = keys.begin, gl.minimum(limit, keys.end)[None, :]
    if LAYER.has_window:
        low = gl.maximum(limit - keys.window, low)[None, :]
    for i in range((keys.end - first + TILE - 1) // TILE):
        buffer = i % 2
        c, r = tiles.latents.index(buffer), tiles.rest.index(buffer)
        mbarrier.wait(tiles.full.index(buffer), i // 2 & 1)
        fence_async_shared()
        blank = gl.full([TILE, ROWS], 0.0, gl.float32, LAYOUT)
        logits = warpgroup_mma(c, q.permute((1, 0)), blank, use_acc=False, is_async=True)
        logits = warpgroup_mma(r, q_rest.permute((1, 0)), logits, is_async=True)
        logits = warpgroup_mma_wait(0, deps=[logits])
        logits = base2_logits(logits, keys.scale, keys.soft_cap, LAYER.has_cap)
        key = (first + i * TILE + lane)[:, None]
        live = is_within(key, low, high, HAS_BEGIN=True)
        logits = gl.where(live, logits, float("-inf"))
        p, highest, totals, rescale = add_tile(logits, highest, totals, 0)
        p_tile.store(p.to(p_tile.dtype))
        fence_async_shared()
        sums = warpgroup_mma(c.permute((1, 0)), p_tile, sums * rescale[None, :], is_async=True)
        sums = warpgroup_mma_wait(0, deps=[sums])
        mbarrier.arrive(tiles.empty.index(buffer), count=1)
    return highest, gl.sum(totals, 0), sums


@gluon_function
def _limits(
    keys: gl.tensor, ROWS: gl.constexpr, HEADS: gl.constexpr, OFFSET: gl.constexpr
) -> gl.tensor:
    """Return the number of keys that each row sees from the first on; rows start at OFFSET."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    row = OFFSET + gl.arange(0, ROWS, gl.SliceLayout(0, LAYOUT))
    return keys.length - keys.query_len + 1 + keys.token + row // HEADS


@gluon_function
def _load_queries(
    rows: gl.tensor, keys: gl.tensor, q: gl.tensor, offset: gl.tensor,
    FORM: gl.constexpr, OFFSET: gl.constexpr,
) -> None:  # fmt: skip
    """A part of a group's rows, from number `offset` on, into shared memory; zeros elsewhere."""
    LAYER: gl.constexpr = FORM.layer
    ROWS: gl.constexpr = q.shape[0]
    WIDTH: gl.constexpr = q.shape[1]
    Q_ALIGN: gl.constexpr = LAYER.q_align
    LANES: gl.constexpr = [4, 8] if WIDTH < 256 else [1, 32]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], LANES, [4, 1], [1, 0])
    row = OFFSET + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    dim = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    token = keys.token + row // FORM.heads
    head = rows.head + row % FORM.heads
    live = (token < keys.query_len) & (head < LAYER.num_heads)
    at = (rows.start + token).to(gl.int64) * rows.q_stride + (head.to(gl.int64) * rows.q_head)
    at = gl.multiple_of(at + offset, Q_ALIGN)
    numbers = gl.load(rows.query + at[:, None] + dim[None, :], mask=live[:, None], other=0.0)
    q.store(numbers)


@gluon_function
def _attend(
    q: gl.tensor, q_rest: gl.tensor, tiles: gl.tensor, keys: gl.tensor, rows: gl.tensor,
    FORM: gl.constexpr, GROUP_ID: gl.constexpr,
) -> None:  # fmt: skip
    """A group's queries, all tiles, and the result."""
    LAYER: gl.constexpr = FORM.layer
    VALUES: gl.constexpr = tiles.latents.shape[2]
    ROWS: gl.constexpr = q.shape[0]
    OFFSET: gl.constexpr = GROUP_ID * ROWS
    limit = _limits(keys, ROWS, FORM.heads, OFFSET)
    if FORM.chained:
        gdc_wait()
    _load_queries(rows, keys, q, 0, FORM, OFFSET)
    _load_queries(rows, keys, q_rest, VALUES, FORM, OFFSET)
    fence_async_shared()
    mbarrier.arrive(tiles.ready.index(GROUP_ID), count=1)
    mbarrier.wait(tiles.ready.index(GROUP_ID), 0)
    highest, total, sums = _walk(q, q_rest, tiles, keys, limit, FORM, GROUP_ID)
    row = OFFSET + gl.arange(0, ROWS, highest.type.layout)
    head = rows.head + row % FORM.heads
    token = keys.token + row // FORM.heads
    live = (token < keys.query_len) & (head < LAYER.num_heads)
    if LAYER.has_sinks:
        sink = load_sinks(rows.sinks, head, live & rows.is_first)
        highest, total, rescale = add_sink(sink, highest, total)
        sums = sums * rescale[None, :]
    result = sums * (1.0 / gl.where(total > 0, total, 1.0))[None, :]  # none may be seen of a part
    dim = gl.arange(0, VALUES, gl.SliceLayout(1, sums.type.layout))[:, None]
    mask = gl.expand_dims(live, 0) & (dim < VALUES)
    if rows.is_final:
        to = (rows.start + token).to(gl.int64) * rows.o_stride + head * LAYER.o_head
        to = rows.out + to[None, :] + dim
        gl.store(to, result.to(rows.out.dtype.element_ty), mask=mask)
    else:
        at = rows.place + token * LAYER.num_heads + head
        gl.store(rows.partial + at[None, :] * VALUES + dim, result, mask=mask)
        gl.store(rows.partial + rows.rows * VALUES + at, highest + gl.log2(total), mask=live)


@gluon_function
def _allocate(
    dtype: gl.constexpr, COUNT: gl.constexpr, ROWS: gl.constexpr, VALUES: gl.constexpr,
    REST: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor]:  # fmt: skip
    """Shared memory for tiles of rows, cut where the values end."""
    FIRST: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, VALUES], dtype)
    SECOND: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, REST], dtype)
    values = gl.allocate_shared_memory(dtype, [COUNT, ROWS, VALUES], FIRST)
    return values, gl.allocate_shared_memory(dtype, [COUNT, ROWS, REST], SECOND)


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
    in_gluon=True,
)
def attend_rows(
    query: gl.tensor, cache: gl.tensor, out: gl.tensor, sinks: gl.tensor, partial: gl.tensor,
    query_start_loc: gl.tensor, seq_lens: gl.tensor, tables: gl.tensor,
    scales: gl.tensor,  # noqa: ARG001  # of quantised caches, which this kernel does not take
    q_stride: gl.tensor, q_head: gl.tensor, o_stride: gl.tensor, num_seqs: gl.tensor,
    table_stride: gl.tensor,
    most: gl.tensor, target: gl.tensor, window: gl.tensor, scale: gl.tensor, soft_cap: gl.tensor,
    FORM: gl.constexpr,
) -> None:  # fmt: skip
    """Attend a part of a sequence with a slice of its rows; parameters as in `latent`."""
    LAYER: gl.constexpr = FORM.layer
    CUT: gl.constexpr = FORM.cut
    SLICES: gl.constexpr = (LAYER.num_heads + FORM.heads - 1) // FORM.heads
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    if FORM.chained:
        gdc_launch_dependents()
    item = gl.program_id(2) * gl.num_programs(1) + gl.program_id(1)
    lengths = Lengths(query_start_loc, seq_lens, num_seqs, most, window, target, 0)
    here = gl.arange(0, CUT.vector or 1, LANES)
    s, split, splits = find_part(item, here, lengths, CUT)
    if s >= num_seqs:
        if FORM.chained:  # the kernel after this one relies on the end of all before it
            gdc_wait()
        return
    start, query_len, length = load_seq(lengths, s)
    seen, total_tiles = count_tiles(s, query_len, length, lengths, CUT)
    token = gl.program_id(0) // SLICES * (FORM.rows // FORM.heads)
    if (total_tiles == 0) | (token >= query_len):
        if FORM.chained:
            gdc_wait()
        return
    begin, end = keys_of_split(seen, length, total_tiles, split, splits, CUT)
    begin = gl.maximum(begin, seen)
    head = gl.program_id(0) % SLICES * FORM.heads
    dtype: gl.constexpr = cache.dtype.element_ty
    OWN: gl.constexpr = FORM.rows // 2
    TILE: gl.constexpr = CUT.tile
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, OWN], dtype)
    q, q_rest = _allocate(dtype, 2, OWN, LAYER.head_dim, LAYER.rest_dim)
    c_tiles, r_tiles = _allocate(dtype, 2, TILE, LAYER.head_dim, LAYER.rest_dim)
    p_tiles = gl.allocate_shared_memory(dtype, [2, TILE, OWN], WEIGHTS)
    full, empty, ready = allocate_barriers(2, 128), allocate_barriers(2, 2), allocate_barriers(2, 1)
    fence_async_shared()
    table = tables + s.to(gl.int64) * table_stride
    num_rows = gl.num_programs(1) * gl.num_programs(2) * most * LAYER.num_heads
    tiles = _Tiles(c_tiles, r_tiles, p_tiles, full, empty, ready)
    keys = _Keys(begin, end, token, length, query_len, window, scale, soft_cap)
    is_final = (splits == 1) & (item >= 0)  # no constant: Triton 3.6 fails at branches on one
    rows = _Rows(
        query, q_stride, q_head, sinks, out, partial, head, start, o_stride,
        item * most * LAYER.num_heads, num_rows, split == 0, is_final,
    )  # fmt: skip
    gl.warp_specialize([
        (_attend, (q.index(0), q_rest.index(0), tiles, keys, rows, FORM, 0)),
        (_attend, (q.index(1), q_rest.index(1), tiles, keys, rows, FORM, 1)),
        (_load_tiles, (cache, table, begin, end, c_tiles, r_tiles, full, empty, FORM)),
    ], [4, 4], [FORM.registers.multiply, FORM.registers.copy])  # fmt: skip


class Registers(NamedTuple):
    """Of a thread."""

    multiply: int
    copy: int
    launch: int
    """On average, which all threads have at the launch."""


class Form(NamedTuple):
    """The compile-time values of the kernel."""

    layer: Layer
    cut: Cut
    rows: int
    heads: int
    """A program."""
    chained: bool
    """This kernel and the next may each be launched before the one before it has ended."""

    @property
    def registers(self) -> Registers:
        """The registers of a thread, by the work of its warps.

        Few rows leave a multiprocessor 16,384, which a program of the merge takes.
        """
        if self.rows >= ROWS_OF_LARGE_SUMS:
            return Registers(multiply=200, copy=96, launch=168)
        return Registers(multiply=144, copy=96, launch=128)


def can_attend(place: Place, query: Tensor, cache: KVCache) -> bool:
    """Return True if this path serves the call; the portable kernel of `latent` serves all others.

    It takes a GPU of compute capability 9.x; 16-bit queries and latents of the same dtype, of 512
    or 256 or 128 values and 64 more numbers.
    """
    rest = cache.k.shape[3] - cache.v.shape[3]
    return (
        place.is_hopper(query.device)
        and query.element_size() == 2
        and cache.k.dtype == query.dtype
        and cache.v.shape[3] in (128, 256, 512)
        and rest == REST
        and all(number % 8 == 0 for number in (*cache.k.stride()[:2], query_align(query)))
    )
