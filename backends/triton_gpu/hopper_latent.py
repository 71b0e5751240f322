"""Attention of few query tokens over latents on Hopper, warps with roles of their own; Gluon.

The formula, the rows and the parts of `latent`, whose kernels serve what this one cannot
(`can_attend`), and tiles of many query tokens. There the products of a tile wait for its copy and
hold up the next one. Here four warps copy and two groups of four multiply. Up to 16 rows, which
reading bounds, each group takes the tiles of its own buffer, every other one, and at the end they
add up; more rows are shared out, half to each group, and each takes every tile.

Layout: in shared memory two tiles of 64 latents, cut where the values end, and the rows of the
queries. Logits are latents x queries, sums are numbers x queries: the tile is the left side of both
products where it lies, and few rows waste nothing. Slots that no row sees are zeros there, since
0 * NaN is NaN.

Bytes moved: each latent once a slice of rows, plus 8 * value_dim a part and row where a sequence is
cut. Error and order as in `latent`.
"""

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
from backends.triton_gpu.hopper_items import gluon_function
from backends.triton_gpu.launch import launcher
from backends.triton_gpu.place import Place
from backends.triton_gpu.soft_cap import LOG2E, base2_logits
from backends.triton_gpu.splits import count_tiles, find_part

TILE = 64
REST = 64
WARPS = 4
CONSUMER_REGISTERS = 200
LOADER_REGISTERS = 96


@gluon_function
def _load_tiles(
    cache: gl.tensor, table: gl.tensor, begin: gl.tensor, end: gl.tensor,
    c_tiles: gl.tensor, r_tiles: gl.tensor, full: gl.tensor, empty: gl.tensor,
    STRIDES: gl.constexpr, BLOCK_SIZE: gl.constexpr,
) -> None:  # fmt: skip
    """Copy the tiles that hold the keys begin .. end - 1, each into the other buffer."""
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
    for i in range((end - first + TILE - 1) // TILE):
        buffer = i % 2
        key = first + i * TILE + lane
        live = (key >= begin) & (key < end)
        block = gl.load(table + key // BLOCK_SIZE, mask=live, other=0).to(gl.int64)
        at = block * STRIDES[0] + key % BLOCK_SIZE * STRIDES[1]
        rest_key = first + i * TILE + rest_lane
        rest_live = (rest_key >= begin) & (rest_key < end)
        block = gl.load(table + rest_key // BLOCK_SIZE, mask=rest_live, other=0).to(gl.int64)
        rest_at = block * STRIDES[0] + (rest_key % BLOCK_SIZE * STRIDES[1] + VALUES)
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
    q: gl.tensor, q_rest: gl.tensor, c_tiles: gl.tensor, r_tiles: gl.tensor, p_tiles: gl.tensor,
    full: gl.tensor, empty: gl.tensor, begin: gl.tensor, end: gl.tensor, limit: gl.tensor,
    window: gl.tensor, scale: gl.tensor, soft_cap: gl.tensor,
    HAS_CAP: gl.constexpr, HAS_WINDOW: gl.constexpr, SHARED: gl.constexpr, GROUP_ID: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor, gl.tensor]:  # fmt: skip
    """Each row's highest logit (base 2), total weight, and weighted sum of values [VALUES, ROWS].

    Of every tile if SHARED, else of those in the group's own buffer.
    """
    TILE: gl.constexpr = c_tiles.shape[1]
    VALUES: gl.constexpr = c_tiles.shape[2]
    ROWS: gl.constexpr = q.shape[0]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    lane = gl.arange(0, TILE, gl.SliceLayout(1, LAYOUT))
    highest = gl.full([ROWS], -1e30, gl.float32, gl.SliceLayout(0, LAYOUT))
    totals = gl.full([TILE, ROWS], 0.0, gl.float32, LAYOUT)
    sums = gl.full([VALUES, ROWS], 0.0, gl.float32, LAYOUT)
    p_tile = p_tiles.index(GROUP_ID)
    first = begin // TILE * TILE
    FROM: gl.constexpr = 0 if SHARED else GROUP_ID
    for i in range(FROM, (end - first + TILE - 1) // TILE, 1 if SHARED else 2):
        buffer = i % 2 if SHARED else GROUP_ID
        c, r = c_tiles.index(buffer), r_tiles.index(buffer)
        mbarrier.wait(full.index(buffer), i // 2 & 1)
        fence_async_shared()
        blank = gl.full([TILE, ROWS], 0.0, gl.float32, LAYOUT)
        logits = warpgroup_mma(c, q.permute((1, 0)), blank, use_acc=False, is_async=True)
        logits = warpgroup_mma(r, q_rest.permute((1, 0)), logits, is_async=True)
        logits = warpgroup_mma_wait(0, deps=[logits])
        logits = base2_logits(logits, scale, soft_cap, HAS_CAP)
        key = (first + i * TILE + lane)[:, None]
        live = (key >= begin) & (key < gl.minimum(limit, end)[None, :])
        if HAS_WINDOW:
            live = live & (key >= (limit - window)[None, :])
        logits = gl.where(live, logits, float("-inf"))
        now = gl.maximum(highest, gl.max(logits, 0))
        p = gl.exp2(logits - now[None, :])
        rescale = gl.exp2(highest - now)[None, :]
        totals = totals * rescale + p
        highest = now
        p_tile.store(p.to(c_tiles.dtype))
        fence_async_shared()
        sums = warpgroup_mma(c.permute((1, 0)), p_tile, sums * rescale, is_async=True)
        sums = warpgroup_mma_wait(0, deps=[sums])
        mbarrier.arrive(empty.index(buffer), count=1)
    return highest, gl.sum(totals, 0), sums


@gluon_function
def _limits(
    token: gl.tensor, length: gl.tensor, query_len: gl.tensor, ROWS: gl.constexpr,
    HEADS: gl.constexpr, OFFSET: gl.constexpr,
) -> gl.tensor:  # fmt: skip
    """How many keys each row sees from the first on; a group's rows start at OFFSET."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    row = OFFSET + gl.arange(0, ROWS, gl.SliceLayout(0, LAYOUT))
    return length - query_len + 1 + token + row // HEADS


@gluon_function
def _help(
    q: gl.tensor, q_rest: gl.tensor, c_tiles: gl.tensor, r_tiles: gl.tensor, p_tiles: gl.tensor,
    full: gl.tensor, empty: gl.tensor, ready: gl.tensor, done: gl.tensor, ends: gl.tensor,
    begin: gl.tensor, end: gl.tensor, token: gl.tensor, length: gl.tensor, query_len: gl.tensor,
    window: gl.tensor, scale: gl.tensor, soft_cap: gl.tensor,
    HEADS: gl.constexpr, HAS_CAP: gl.constexpr, HAS_WINDOW: gl.constexpr,
) -> None:  # fmt: skip
    """The second group of two that share rows: its tiles, left in its buffer for the first."""
    ROWS: gl.constexpr = q.shape[0]
    VALUES: gl.constexpr = c_tiles.shape[2]
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    limit = _limits(token, length, query_len, ROWS, HEADS, 0)
    mbarrier.wait(ready.index(0), 0)
    highest, total, sums = _walk(
        q, q_rest, c_tiles, r_tiles, p_tiles, full, empty, begin, end, limit, window,
        scale, soft_cap, HAS_CAP, HAS_WINDOW, SHARED=False, GROUP_ID=1,
    )  # fmt: skip
    c_tiles.index(1)._reinterpret(gl.float32, [VALUES, ROWS], PLAIN).store(sums)  # noqa: SLF001
    ends.index(0).store(highest)
    ends.index(1).store(total)
    mbarrier.arrive(done.index(0), count=1)


@gluon_function
def _load_queries(
    query: gl.tensor, q: gl.tensor, start: gl.tensor, token: gl.tensor, head: gl.tensor,
    query_len: gl.tensor, q_stride: gl.tensor, offset: gl.tensor,
    Q_HEAD: gl.constexpr, NUM_HEADS: gl.constexpr, HEADS: gl.constexpr, OFFSET: gl.constexpr,
) -> None:  # fmt: skip
    """A part of a group's rows, from number `offset` on, into shared memory; zeros elsewhere."""
    ROWS: gl.constexpr = q.shape[0]
    WIDTH: gl.constexpr = q.shape[1]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = OFFSET + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    dim = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    token += row // HEADS
    head += row % HEADS
    live = (token < query_len) & (head < NUM_HEADS)
    at = (start + token).to(gl.int64) * q_stride + (head * Q_HEAD + offset)
    rows = gl.load(query + at[:, None] + dim[None, :], mask=live[:, None], other=0.0)
    q.store(rows)


@gluon_function
def _attend(
    q: gl.tensor, q_rest: gl.tensor, c_tiles: gl.tensor, r_tiles: gl.tensor, p_tiles: gl.tensor,
    full: gl.tensor, empty: gl.tensor, ready: gl.tensor, done: gl.tensor, ends: gl.tensor,
    begin: gl.tensor, end: gl.tensor, token: gl.tensor, length: gl.tensor, query_len: gl.tensor,
    window: gl.tensor, scale: gl.tensor, soft_cap: gl.tensor,
    query: gl.tensor, q_stride: gl.tensor, sinks: gl.tensor, out: gl.tensor, partial: gl.tensor,
    head: gl.tensor, start: gl.tensor, o_stride: gl.tensor, place: gl.tensor, rows: gl.tensor,
    is_first: gl.tensor, is_final: gl.tensor,
    Q_HEAD: gl.constexpr, O_HEAD: gl.constexpr, NUM_HEADS: gl.constexpr, HEADS: gl.constexpr,
    HAS_CAP: gl.constexpr, HAS_WINDOW: gl.constexpr, HAS_SINKS: gl.constexpr,
    SHARED: gl.constexpr, GROUP_ID: gl.constexpr,
) -> None:  # fmt: skip
    """A group's queries, its tiles, and the result; that of both groups where they share rows."""
    ROWS: gl.constexpr = q.shape[0]
    VALUES: gl.constexpr = c_tiles.shape[2]
    OFFSET: gl.constexpr = GROUP_ID * ROWS
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    limit = _limits(token, length, query_len, ROWS, HEADS, OFFSET)
    _load_queries(
        query, q, start, token, head, query_len, q_stride, 0, Q_HEAD, NUM_HEADS, HEADS, OFFSET
    )
    _load_queries(
        query, q_rest, start, token, head, query_len, q_stride, VALUES, Q_HEAD, NUM_HEADS, HEADS,
        OFFSET,
    )  # fmt: skip
    fence_async_shared()
    mbarrier.arrive(ready.index(GROUP_ID), count=1)
    mbarrier.wait(ready.index(GROUP_ID), 0)
    highest, total, sums = _walk(
        q, q_rest, c_tiles, r_tiles, p_tiles, full, empty, begin, end, limit, window,
        scale, soft_cap, HAS_CAP, HAS_WINDOW, SHARED, GROUP_ID,
    )  # fmt: skip
    if not SHARED:
        mbarrier.wait(done.index(0), 0)
        others = c_tiles.index(1)._reinterpret(gl.float32, [VALUES, ROWS], PLAIN)  # noqa: SLF001
        other_highest = ends.index(0).load(highest.type.layout)
        top = gl.maximum(highest, other_highest)
        own, other = gl.exp2(highest - top), gl.exp2(other_highest - top)
        total = total * own + ends.index(1).load(highest.type.layout) * other
        sums = sums * own[None, :] + others.load(sums.type.layout) * other[None, :]
        highest = top
    row = OFFSET + gl.arange(0, ROWS, highest.type.layout)
    head += row % HEADS
    token += row // HEADS
    live = (token < query_len) & (head < NUM_HEADS)
    if HAS_SINKS:
        sink = gl.load(sinks + head, mask=live & is_first, other=float("-inf")).to(gl.float32)
        top = gl.maximum(highest, sink * LOG2E)
        rescale = gl.exp2(highest - top)
        total = total * rescale + gl.exp2(sink * LOG2E - top)
        sums = sums * rescale[None, :]
        highest = top
    result = sums * (1.0 / gl.where(total > 0, total, 1.0))[None, :]  # none may be seen of a part
    dim = gl.arange(0, VALUES, gl.SliceLayout(1, sums.type.layout))[:, None]
    mask = gl.expand_dims(live, 0) & (dim < VALUES)
    if is_final:
        to = (start + token).to(gl.int64) * o_stride + head * O_HEAD
        gl.store(out + to[None, :] + dim, result.to(out.dtype.element_ty), mask=mask)
    else:
        at = place + token * NUM_HEADS + head
        gl.store(partial + at[None, :] * VALUES + dim, result, mask=mask)
        gl.store(partial + rows * VALUES + at, highest + gl.log2(total), mask=live)


@gluon_function
def _attend_or_help(
    q: gl.tensor, q_rest: gl.tensor, c_tiles: gl.tensor, r_tiles: gl.tensor, p_tiles: gl.tensor,
    full: gl.tensor, empty: gl.tensor, ready: gl.tensor, done: gl.tensor, ends: gl.tensor,
    begin: gl.tensor, end: gl.tensor, token: gl.tensor, length: gl.tensor, query_len: gl.tensor,
    window: gl.tensor, scale: gl.tensor, soft_cap: gl.tensor,
    query: gl.tensor, q_stride: gl.tensor, sinks: gl.tensor, out: gl.tensor, partial: gl.tensor,
    head: gl.tensor, start: gl.tensor, o_stride: gl.tensor, place: gl.tensor, rows: gl.tensor,
    is_first: gl.tensor, is_final: gl.tensor,
    Q_HEAD: gl.constexpr, O_HEAD: gl.constexpr, NUM_HEADS: gl.constexpr, HEADS: gl.constexpr,
    HAS_CAP: gl.constexpr, HAS_WINDOW: gl.constexpr, HAS_SINKS: gl.constexpr,
    SHARED: gl.constexpr,
) -> None:  # fmt: skip
    """The second group, with rows of its own or with those of the first."""
    if SHARED:
        _attend(
            q, q_rest, c_tiles, r_tiles, p_tiles, full, empty, ready, done,
            ends, begin, end, token, length, query_len, window, scale, soft_cap,
            query, q_stride, sinks, out, partial, head, start, o_stride, place, rows,
            is_first, is_final,
            Q_HEAD, O_HEAD, NUM_HEADS, HEADS, HAS_CAP, HAS_WINDOW, HAS_SINKS, SHARED, 1,
        )  # fmt: skip
    else:
        _help(
            q, q_rest, c_tiles, r_tiles, p_tiles, full, empty, ready, done,
            ends, begin, end, token, length, query_len, window, scale, soft_cap,
            HEADS, HAS_CAP, HAS_WINDOW,
        )  # fmt: skip


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


@gluon_function
def _barrier(COUNT: gl.constexpr, SLOTS: gl.constexpr) -> gl.tensor:
    barriers = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(barriers.index(slot), count=COUNT)
    return barriers


@launcher(
    integers=("q_stride", "o_stride", "num_seqs", "table_stride", "most", "window", "target"),
    indices=("query_start_loc", "seq_lens", "tables", "scales"),
    pointers=("query", "cache", "out", "sinks"),
    in_gluon=True,
)
def attend_rows(
    query: gl.tensor,  # as in latent._attend_part, all of them
    cache: gl.tensor,
    out: gl.tensor,
    sinks: gl.tensor,
    partial: gl.tensor,
    query_start_loc: gl.tensor,
    seq_lens: gl.tensor,
    tables: gl.tensor,
    scales: gl.tensor,  # noqa: ARG001  # of quantised caches, which this kernel does not take
    q_stride: gl.tensor,
    o_stride: gl.tensor,
    num_seqs: gl.tensor,
    table_stride: gl.tensor,
    most: gl.tensor,
    window: gl.tensor,
    target: gl.tensor,
    scale: gl.tensor,
    soft_cap: gl.tensor,
    Q_HEAD: gl.constexpr,
    O_HEAD: gl.constexpr,
    STRIDES: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    NUM_HEADS: gl.constexpr,
    VALUE_DIM: gl.constexpr,
    REST_DIM: gl.constexpr,
    HAS_CAP: gl.constexpr,
    HAS_WINDOW: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    TILE: gl.constexpr,
    ROWS: gl.constexpr,
    HEADS: gl.constexpr,
    VECTOR: gl.constexpr,
    ALIKE: gl.constexpr,
    CHAINED: gl.constexpr,
    SHARED: gl.constexpr,  # each group has half of the rows; otherwise half of the tiles
    REGISTERS: gl.constexpr,
    LOADER_REGISTERS: gl.constexpr,
) -> None:
    """Attend a part of a sequence with a slice of its rows."""
    SLICES: gl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    if CHAINED:
        gdc_launch_dependents()
        gdc_wait()
    item = gl.program_id(2) * gl.num_programs(1) + gl.program_id(1)
    nobody, here = (0, 0, 0), gl.arange(0, VECTOR or 1, LANES)
    s, split, splits = find_part(
        query_start_loc, seq_lens, num_seqs, item, target, most, window, nobody, here,
        HAS_WINDOW, HAS_SHARED=False, TILE=TILE, VECTOR=VECTOR, ALIKE=ALIKE,
    )  # fmt: skip
    if s >= num_seqs:
        return
    start = gl.load(query_start_loc + s)
    query_len = gl.load(query_start_loc + s + 1) - start
    length = gl.load(seq_lens + s)
    seen, tiles = count_tiles(
        s, query_len, length, most, window, nobody, HAS_WINDOW, HAS_SHARED=False, TILE=TILE
    )
    token = gl.program_id(0) // SLICES * (ROWS // HEADS)
    if (tiles == 0) | (token >= query_len):
        return
    first = seen // TILE
    begin = gl.maximum((first + split * tiles // splits) * TILE, seen)
    end = gl.minimum((first + (split + 1) * tiles // splits) * TILE, length)
    head = gl.program_id(0) % SLICES * HEADS
    dtype: gl.constexpr = cache.dtype.element_ty
    GROUPS: gl.constexpr = 2 if SHARED else 1
    OWN: gl.constexpr = ROWS // GROUPS
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, OWN], dtype)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q, q_rest = _allocate(dtype, GROUPS, OWN, VALUE_DIM, REST_DIM)
    c_tiles, r_tiles = _allocate(dtype, 2, TILE, VALUE_DIM, REST_DIM)
    p_tiles = gl.allocate_shared_memory(dtype, [2, TILE, OWN], WEIGHTS)
    ends = gl.allocate_shared_memory(gl.float32, [2, OWN], PLAIN)
    full, empty, ready = _barrier(128, 2), _barrier(GROUPS, 2), _barrier(1, 2)
    done = ready if SHARED else _barrier(1, 1)  # nobody waits for it who has rows of its own
    fence_async_shared()
    rows = gl.num_programs(1) * gl.num_programs(2) * most * NUM_HEADS
    table = tables + s.to(gl.int64) * table_stride
    place, first_split, final = item * most * NUM_HEADS, split == 0, splits == 1
    gl.warp_specialize([
        (_attend, (
            q.index(0), q_rest.index(0), c_tiles, r_tiles, p_tiles, full, empty, ready, done,
            ends, begin, end, token, length, query_len, window, scale, soft_cap,
            query, q_stride, sinks, out, partial, head, start, o_stride, place, rows,
            first_split, final,
            Q_HEAD, O_HEAD, NUM_HEADS, HEADS, HAS_CAP, HAS_WINDOW, HAS_SINKS, SHARED, 0,
        )),
        (_attend_or_help, (
            q.index(GROUPS - 1), q_rest.index(GROUPS - 1), c_tiles, r_tiles, p_tiles, full, empty,
            ready, done, ends, begin, end, token, length, query_len, window, scale, soft_cap,
            query, q_stride, sinks, out, partial, head, start, o_stride, place, rows,
            first_split, final,
            Q_HEAD, O_HEAD, NUM_HEADS, HEADS, HAS_CAP, HAS_WINDOW, HAS_SINKS, SHARED,
        )),
        (_load_tiles, (
            cache, table, begin, end, c_tiles, r_tiles, full, empty, STRIDES, BLOCK_SIZE,
        )),
    ], [4, 4], [REGISTERS, LOADER_REGISTERS])  # fmt: skip


def can_attend(place: Place, query: Tensor, cache: KVCache) -> bool:
    """Whether this path serves the call; the portable kernel of `latent` serves every other.

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
        and all(stride % 8 == 0 for stride in (*cache.k.stride()[:2], *query.stride()[:2]))
    )
