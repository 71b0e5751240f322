"""Attention of up to 64 rows over latents on Hopper, which multiplying bounds: prompts, many heads.

The formula, the rows and the parts of `latent`. `hopper` has tiles of latents on the left side of
its products, which wastes nothing on few rows; here the rows are, 64 of them, and the sums of their
512 numbers fill the registers of two groups of four warps. Each has half of the values. The first
multiplies the rows with the keys and computes the weights, which go to the second by way of shared
memory. Two warps load half of the values each, by the copy engine: starting the copies of a tile in
blocks of 16 tokens takes one about as long as multiplying it.

A tile of 64 latents lies in pieces: the first group's half of the values with the rest of the key,
which it frees, and the second group's half. While the matrix unit has the values of a tile and the
keys of the next, the pieces of the one before are loaded anew; while it has nothing but the second
group's values, the first one computes weights.

Layout: 64 rows are TOKENS query tokens of one sequence times HEADS heads. In shared memory are the
rows, two tiles, and the weights of one, 225 KiB for 512 values.
Grid: `attend_part` as in `latent`. `attend_tile`: one program a multiprocessor, which takes tiles
of tokens and slices of heads in the order of `prefill/order.py`; what comes next is loaded while a
tile ends.

Weights and factors go from the first group to the second by `weighed` and back by `taken`: a group
has a barrier of its four warps between what it writes or reads and the one thread that arrives, and
a fence before that where the matrix unit reads what was stored. So compute-sanitizer's racecheck,
which does not follow an mbarrier from one part of a program to another, reports reads after writes
here that are in order; `tests/backends/compile_kernels.py` checks the compiled code
for the barriers.

Bytes moved: each latent once a program, from L2 mostly, plus 8 * value_dim a part and row where a
sequence is cut. Error and order as in `latent`. Source of the idea: FlashMLA, for halves of the
values in two groups.
"""

from typing import NamedTuple

from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
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
from backends.triton_gpu.hopper.items import allocate_barriers, find_turn, gluon_function
from backends.triton_gpu.hopper.load import clear_values, load_entries
from backends.triton_gpu.hopper.prefill import can_copy, count_slots, layout_of
from backends.triton_gpu.hopper.softmax import add_up, add_weights, start_totals
from backends.triton_gpu.prefill.order import ENTRY
from backends.triton_gpu.shared.launch import Box, launcher
from backends.triton_gpu.shared.layer import Layer
from backends.triton_gpu.shared.place import Place, ceil_div, power_of_two
from backends.triton_gpu.shared.soft_cap import base2_logits
from backends.triton_gpu.shared.softmax import is_visible, load_sinks

ROWS = 64
TILE = 64
REST = 64
WARPS = 4
REGISTERS = (224, 56, 56)
DEPTH = gl.constexpr(2)
_COUNT = gl.constexpr(ROWS)


class _Tiles(NamedTuple):
    """Shared memory that the warps hand each other."""

    queries: gl.tensor
    """The rows' numbers that meet the left half of the values; the next two likewise."""
    right_queries: gl.tensor
    rest_queries: gl.tensor
    left: gl.tensor
    """Tiles of latents: the first half of the values."""
    right: gl.tensor
    rest: gl.tensor
    weights: gl.tensor
    """Of one tile."""
    scales: gl.tensor
    """The factors of the rows' earlier sums, and at the end of the results."""
    ready: gl.tensor
    """Barriers: the queries are there."""
    free: gl.tensor
    """They have been multiplied."""
    left_full: gl.tensor
    left_empty: gl.tensor
    right_full: gl.tensor
    right_empty: gl.tensor
    weighed: gl.tensor
    """A tile's weights are there, or what results are multiplied by."""
    taken: gl.tensor
    """The second group has read them."""


class _Half(NamedTuple):
    """Half of the values of each tile, and its barriers."""

    tiles: gl.tensor
    full: gl.tensor
    empty: gl.tensor


class _Work(NamedTuple):
    """The share of a program: the keys begin .. end - 1 of a sequence, rows from a token on."""

    table: gl.tensor
    begin: gl.tensor
    end: gl.tensor
    seen: gl.tensor
    """The first key that any row of the sequence sees."""
    length: gl.tensor
    """Of the sequence, as the next two."""
    query_len: gl.tensor
    start: gl.tensor
    """The first row."""
    token: gl.tensor
    head: gl.tensor
    window: gl.tensor
    scale: gl.tensor
    soft_cap: gl.tensor
    is_first: gl.tensor
    is_final: gl.tensor


class _Call(NamedTuple):
    """The arguments from which each warp reads its program's work, of tiles of tokens."""

    tables: gl.tensor
    table_stride: gl.tensor
    list: gl.tensor
    """Of work, see `order`."""
    window: gl.tensor
    scale: gl.tensor
    soft_cap: gl.tensor


class _Target(NamedTuple):
    """The targets of a program's results."""

    out: gl.tensor
    sinks: gl.tensor
    partial: gl.tensor
    place: gl.tensor
    """Of the part's first row in `partial`."""
    rows: gl.tensor
    """In `partial`."""


@gluon_function
def _count_works(call: gl.tensor, FORM: gl.constexpr) -> gl.tensor:
    """Tiles of tokens that this program takes at most, or its one part."""
    programs = gl.num_programs(0)
    count = programs * 0 + 1
    if not FORM.cuts:
        count = (gl.load(call.list) * FORM.slices + programs - 1) // programs
    return count


@gluon_function
def _find_work(n: gl.tensor, work: gl.tensor, call: gl.tensor, FORM: gl.constexpr) -> gl.tensor:
    """The n-th; its keys end where they begin if there is none. A part is known from the start."""
    if not FORM.cuts:
        work = _find_tile(n, call, FORM)
    return work


@gluon_function
def _find_tile(n: gl.tensor, call: gl.tensor, FORM: gl.constexpr) -> gl.tensor:
    """The n-th tile of tokens and slice of heads of this program."""
    item = n * gl.num_programs(0) + find_turn(n)
    rank = item // FORM.slices
    there = rank < gl.load(call.list)
    entry = call.list + ENTRY + gl.where(there, rank, 0) * ENTRY
    seq, row, tokens = gl.load(entry), gl.load(entry + 1), gl.load(entry + 2)
    position, length, first = gl.load(entry + 3), gl.load(entry + 4), gl.load(entry + 5)
    begin, seen = first * 0, first * 0
    if FORM.layer.has_window:
        seen = gl.maximum(first - call.window + 1, 0)
        begin = gl.maximum(position - call.window + 1, 0)
    token = position - first
    return _Work(
        call.tables + seq.to(gl.int64) * call.table_stride, begin,
        gl.where(there, position + tokens, begin), seen, length, length - first, row - token, token,
        item % FORM.slices * FORM.heads, call.window, call.scale, call.soft_cap, there, there,
    )  # fmt: skip


@gluon_function
def _load(
    boxes: gl.tensor, tiles: gl.tensor, only: gl.tensor, call: gl.tensor, FORM: gl.constexpr,
    LEFT: gl.constexpr,
) -> None:  # fmt: skip
    """Copy one half of every tile of all work, in the order in which they are multiplied.

    LEFT: the first half of the values with the rest of the key, and the rows; otherwise the second.
    """
    q_wide, q_rest, _, _ = boxes
    HALF: gl.constexpr = FORM.half
    KEYS: gl.constexpr = tiles.left.shape[1]
    BLOCK_SIZE: gl.constexpr = FORM.layer.block_size
    count = _count_works(call, FORM)
    j, m, edges = count * 0, count * 0, count * 0
    for n in range(count):
        work = _find_work(n, only, call, FORM)
        if work.begin < work.end:
            low, high = work.begin // BLOCK_SIZE, (work.end - 1) // BLOCK_SIZE
            first = work.begin // KEYS * KEYS
            ahead = load_entries(work.table, first, low, high, BLOCK_SIZE)
            if LEFT:
                row, ready = work.start + work.token, tiles.ready.index(0)
                mbarrier.wait(tiles.free.index(0), (m & 1) ^ 1)
                mbarrier.expect(ready, 2 * q_wide.block_type.nbytes + q_rest.block_type.nbytes)
                tma.async_copy_global_to_shared(q_wide, [row, work.head, 0], ready, tiles.queries)
                tma.async_copy_global_to_shared(
                    q_rest, [row, work.head, 2 * HALF], ready, tiles.rest_queries
                )
                tma.async_copy_global_to_shared(
                    q_wide, [row, work.head, HALF], ready, tiles.right_queries
                )
            live_begin = gl.maximum(work.seen, low * BLOCK_SIZE)
            live_end = gl.minimum(work.length, (high + 1) * BLOCK_SIZE)
            for key in range(first, work.end, KEYS):
                entries = ahead
                ahead = load_entries(work.table, key + KEYS, low, high, BLOCK_SIZE)
                edge = (key + KEYS > work.length) | (key < work.seen)
                _load_tile(boxes, tiles, entries, key, j, edge, FORM, LEFT)
                if edge:  # 0 * NaN is NaN: what no row sees becomes zeros
                    at = j % DEPTH
                    half = _half_of(tiles, LEFT)
                    mbarrier.wait(half.full.index(DEPTH), edges & 1)
                    edges += 1
                    clear_values(half.tiles.index(at), live_begin - key, live_end - key)
                    fence_async_shared()
                    mbarrier.arrive(half.full.index(at), count=1)
                j += 1
            m += 1


@gluon_function
def _half_of(tiles: gl.tensor, LEFT: gl.constexpr) -> gl.tensor:
    if LEFT:
        return _Half(tiles.left, tiles.left_full, tiles.left_empty)
    else:  # noqa: RET505 - known to the compiler
        return _Half(tiles.right, tiles.right_full, tiles.right_empty)


@gluon_function
def _load_tile(
    boxes: gl.tensor, tiles: gl.tensor, entries: gl.tensor, key: gl.tensor, j: gl.tensor,
    edge: gl.tensor, FORM: gl.constexpr, LEFT: gl.constexpr,
) -> None:  # fmt: skip
    """Start the copies of one half of the j-th tile, when it has room; `edge`: it lands apart."""
    _, _, c_wide, c_rest = boxes
    HALF: gl.constexpr = FORM.half
    COPY: gl.constexpr = c_wide.block_shape[0]
    COPIES: gl.constexpr = tiles.left.shape[1] // COPY
    BYTES: gl.constexpr = c_wide.block_type.nbytes + (c_rest.block_type.nbytes if LEFT else 0)
    half = _half_of(tiles, LEFT)
    lane = gl.arange(0, 32, entries.type.layout)
    at = j % DEPTH
    landed = half.full.index(gl.where(edge, DEPTH, at))
    mbarrier.wait(half.empty.index(at), (j // DEPTH & 1) ^ 1)
    mbarrier.expect(landed, COPIES * BYTES)
    for c in gl.static_range(COPIES):
        slot = gl.sum(gl.where(lane == c, entries, 0), 0) * FORM.slots
        slot += key % FORM.layer.block_size
        part = half.tiles.index(at).slice(c * COPY, COPY, 0)
        tma.async_copy_global_to_shared(c_wide, [slot, 0, 0 if LEFT else HALF], landed, part)
        if LEFT:
            part = tiles.rest.index(at).slice(c * COPY, COPY, 0)
            tma.async_copy_global_to_shared(c_rest, [slot, 0, 2 * HALF], landed, part)


@gluon_function
def _multiply_keys(tiles: gl.tensor, i: gl.tensor) -> gl.tensor:
    """Issue the products of the rows with the i-th tile of keys; no wait for them."""
    KEYS: gl.constexpr = tiles.left.shape[1]
    HALF: gl.constexpr = tiles.left.shape[3]
    REST: gl.constexpr = tiles.rest.shape[3]
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    at, phase = i % DEPTH, i // DEPTH & 1
    mbarrier.wait(tiles.left_full.index(at), phase)
    logits = gl.full([_COUNT, KEYS], 0.0, gl.float32, LOGITS)
    q = tiles.queries.reshape([_COUNT, HALF])
    keys = tiles.left.index(at).reshape([KEYS, HALF]).permute((1, 0))
    logits = warpgroup_mma(q, keys, logits, use_acc=False, is_async=True)
    q = tiles.rest_queries.reshape([_COUNT, REST])
    keys = tiles.rest.index(at).reshape([KEYS, REST]).permute((1, 0))
    logits = warpgroup_mma(q, keys, logits, is_async=True)
    mbarrier.wait(tiles.right_full.index(at), phase)
    q = tiles.right_queries.reshape([_COUNT, HALF])
    keys = tiles.right.index(at).reshape([KEYS, HALF]).permute((1, 0))
    return warpgroup_mma(q, keys, logits, is_async=True)


@gluon_function
def _rows_of(
    work: gl.tensor, LAYOUT: gl.constexpr, FORM: gl.constexpr
) -> tuple[gl.tensor, gl.tensor, gl.tensor]:
    """(query token, query head, whether it is there) of each row."""
    row = gl.arange(0, _COUNT, LAYOUT)
    token, head = work.token + row // FORM.heads, work.head + row % FORM.heads
    return token, head, (token < work.query_len) & (head < FORM.layer.num_heads)


@gluon_function
def _soften(
    logits: gl.tensor, highest: gl.tensor, total: gl.tensor, key: gl.tensor, last: gl.tensor,
    work: gl.tensor, FORM: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor, gl.tensor, gl.tensor]:  # fmt: skip
    """(weights, highest, totals, rescale) of a tile that starts at `key`; masked where need be."""
    LAYER: gl.constexpr = FORM.layer
    KEYS: gl.constexpr = logits.shape[1]
    logits = base2_logits(logits, work.scale, work.soft_cap, LAYER.has_cap)
    position = work.length - work.query_len + work.token  # of the first row
    masked = key + KEYS - 1 > position
    if LAYER.has_window:
        masked = masked | (key <= position + (FORM.tokens - 1) - work.window)
    if masked:
        column = key + gl.arange(0, KEYS, gl.SliceLayout(0, logits.type.layout))[None, :]
        visible = is_visible(column, last[:, None], work.window, LAYER.has_window)
        logits = gl.where(visible, logits, float("-inf"))
    return add_weights(logits, highest, total)


@gluon_function
def _publish(weights: gl.tensor, rescale: gl.tensor, tiles: gl.tensor, w: gl.tensor) -> None:
    """Leave a tile's weights for the second group, once it has read the w - 1 before."""
    mbarrier.wait(tiles.taken.index(0), (w & 1) ^ 1)
    tiles.weights.store(weights.to(tiles.weights.dtype))
    tiles.scales.store(rescale)
    fence_async_shared()
    mbarrier.arrive(tiles.weighed.index(0), count=1)


@gluon_function
def _lead(
    tiles: gl.tensor, only: gl.tensor, call: gl.tensor, target: gl.tensor, FORM: gl.constexpr
) -> None:
    """The first group: logits, weights and the left half of the sums of all work."""
    count = _count_works(call, FORM)
    j, m = count * 0, count * 0
    for n in range(count):
        work = _find_work(n, only, call, FORM)
        if work.begin < work.end:
            j = _lead_rows(tiles, work, target, j, m, FORM)
            m += 1


@gluon_function
def _lead_rows(
    tiles: gl.tensor, work: gl.tensor, target: gl.tensor, j: gl.tensor, m: gl.tensor,
    FORM: gl.constexpr,
) -> gl.tensor:  # fmt: skip
    """The first group's share of the m-th work, whose first tile is the j-th; the next tile."""
    LAYER: gl.constexpr = FORM.layer
    KEYS: gl.constexpr = tiles.left.shape[1]
    HALF: gl.constexpr = tiles.left.shape[3]
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, LOGITS)
    token, head, live = _rows_of(work, ROW, FORM)
    last = work.length - work.query_len + token
    highest = gl.full([_COUNT], -1e30, gl.float32, ROW)
    total = gl.full([_COUNT], 0.0, gl.float32, ROW)
    if LAYER.has_sinks:
        has_sink = live & work.is_first
        highest = gl.where(has_sink, load_sinks(target.sinks, head, live), highest)
        total = gl.where(has_sink, 1.0, total)
    sums = gl.full([_COUNT, HALF], 0.0, gl.float32, SUMS)
    first = work.begin // KEYS * KEYS
    mbarrier.wait(tiles.ready.index(0), m & 1)
    logits = warpgroup_mma_wait(0, deps=[_multiply_keys(tiles, j)])
    total = start_totals(total, logits, COLUMNS=8)
    weights, highest, total, rescale = _soften(logits, highest, total, first, last, work, FORM)
    _publish(weights, rescale, tiles, j + m)
    for key in range(first + KEYS, work.end, KEYS):
        p = gl.convert_layout(weights.to(tiles.left.dtype), LEFT)
        values = tiles.left.index(j % DEPTH).reshape([KEYS, HALF])
        sums = warpgroup_mma(p, values, sums, is_async=True)
        logits = _multiply_keys(tiles, j + 1)
        sums, logits = warpgroup_mma_wait(3, deps=[sums, logits])
        mbarrier.arrive(tiles.left_empty.index(j % DEPTH), count=1)
        j += 1
        logits, sums = warpgroup_mma_wait(0, deps=[logits, sums])
        weights, highest, total, rescale = _soften(logits, highest, total, key, last, work, FORM)
        _publish(weights, rescale, tiles, j + m)
        sums = sums * gl.convert_layout(rescale, gl.SliceLayout(1, SUMS))[:, None]
    mbarrier.arrive(tiles.free.index(0), count=1)
    p = gl.convert_layout(weights.to(tiles.left.dtype), LEFT)
    values = tiles.left.index(j % DEPTH).reshape([KEYS, HALF])
    sums = warpgroup_mma(p, values, sums, is_async=True)
    total = add_up(total, ROW)
    share = 1.0 / gl.where(total > 0, total, 1.0)  # a row may see nothing of a part
    sums = warpgroup_mma_wait(0, deps=[sums])
    mbarrier.arrive(tiles.left_empty.index(j % DEPTH), count=1)
    j += 1
    mbarrier.wait(tiles.taken.index(0), ((j + m) & 1) ^ 1)
    tiles.scales.store(share)
    mbarrier.arrive(tiles.weighed.index(0), count=1)
    _store(sums, gl.convert_layout(share, gl.SliceLayout(1, SUMS)), work, target, 0, FORM)
    if FORM.cuts:
        at = target.place + token * LAYER.num_heads + head
        lse = highest + gl.log2(total)
        gl.store(target.partial + target.rows * (2 * HALF) + at, lse, mask=live & ~work.is_final)
    return j


@gluon_function
def _follow(
    tiles: gl.tensor, only: gl.tensor, call: gl.tensor, target: gl.tensor, FORM: gl.constexpr
) -> None:
    """The second group: the right half of the sums of all work."""
    KEYS: gl.constexpr = tiles.right.shape[1]
    HALF: gl.constexpr = tiles.right.shape[3]
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    count = _count_works(call, FORM)
    j, m = count * 0, count * 0
    for n in range(count):
        work = _find_work(n, only, call, FORM)
        if work.begin < work.end:
            sums = gl.full([_COUNT, HALF], 0.0, gl.float32, SUMS)
            for _ in range(work.begin // KEYS * KEYS, work.end, KEYS):
                at = j % DEPTH
                mbarrier.wait(tiles.weighed.index(0), (j + m) & 1)
                sums = sums * tiles.scales.load(gl.SliceLayout(1, SUMS))[:, None]
                mbarrier.wait(tiles.right_full.index(at), j // DEPTH & 1)
                values = tiles.right.index(at).reshape([KEYS, HALF])
                sums = warpgroup_mma(tiles.weights, values, sums, is_async=True)
                sums = warpgroup_mma_wait(0, deps=[sums])
                mbarrier.arrive(tiles.right_empty.index(at), count=1)
                mbarrier.arrive(tiles.taken.index(0), count=1)
                j += 1
            mbarrier.wait(tiles.weighed.index(0), (j + m) & 1)
            share = tiles.scales.load(gl.SliceLayout(1, SUMS))
            mbarrier.arrive(tiles.taken.index(0), count=1)
            m += 1
            _store(sums, share, work, target, HALF, FORM)


@gluon_function
def _store(
    sums: gl.tensor, share: gl.tensor, work: gl.tensor, target: gl.tensor, FIRST: gl.constexpr,
    FORM: gl.constexpr,
) -> None:  # fmt: skip
    """Store the rows' values from number FIRST on, as results or as a part's."""
    LAYER: gl.constexpr = FORM.layer
    HALF: gl.constexpr = sums.shape[1]
    WIDE: gl.constexpr = FORM.stored
    result = sums * share[:, None]
    if FORM.cuts:
        token, head, live = _rows_of(work, gl.SliceLayout(1, sums.type.layout), FORM)
        dim = FIRST + gl.arange(0, HALF, gl.SliceLayout(0, sums.type.layout))[None, :]
        at = target.place + token * LAYER.num_heads + head
        there = (live & ~work.is_final)[:, None]
        gl.store(target.partial + at[:, None] * LAYER.head_dim + dim, result, mask=there)
    token, head, live = _rows_of(work, gl.SliceLayout(1, WIDE), FORM)
    dim = FIRST + gl.arange(0, HALF, gl.SliceLayout(0, WIDE))[None, :]
    to = (work.start + token).to(gl.int64) * FORM.token_stride + head * LAYER.o_head
    rounded = gl.convert_layout(result.to(target.out.dtype.element_ty), FORM.swapped)
    rounded = gl.convert_layout(rounded, WIDE)
    gl.store(target.out + to[:, None] + dim, rounded, mask=(live & work.is_final)[:, None])


@gluon_function
def _attend(
    boxes: gl.tensor, work: gl.tensor, call: gl.tensor, target: gl.tensor, FORM: gl.constexpr
) -> None:
    """Attend to the program's keys, once its work is known: the common part of both kernels."""
    q_wide, q_rest, c_wide, c_rest = boxes
    HALF: gl.constexpr = FORM.half
    REST: gl.constexpr = FORM.layer.rest_dim
    KEYS: gl.constexpr = FORM.tile
    dtype: gl.constexpr = c_wide.dtype
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_COUNT, KEYS], dtype)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tiles = _Tiles(
        gl.allocate_shared_memory(dtype, q_wide.block_shape, q_wide.layout),
        gl.allocate_shared_memory(dtype, q_wide.block_shape, q_wide.layout),
        gl.allocate_shared_memory(dtype, q_rest.block_shape, q_rest.layout),
        gl.allocate_shared_memory(dtype, [DEPTH, KEYS, 1, HALF], c_wide.layout),
        gl.allocate_shared_memory(dtype, [DEPTH, KEYS, 1, HALF], c_wide.layout),
        gl.allocate_shared_memory(dtype, [DEPTH, KEYS, 1, REST], c_rest.layout),
        gl.allocate_shared_memory(dtype, [_COUNT, KEYS], WEIGHTS),
        gl.allocate_shared_memory(gl.float32, [_COUNT], PLAIN),
        allocate_barriers(1, 1), allocate_barriers(1, 1),
        allocate_barriers(DEPTH + 1, 1), allocate_barriers(DEPTH, 1),
        allocate_barriers(DEPTH + 1, 1), allocate_barriers(DEPTH, 1),
        allocate_barriers(1, 1), allocate_barriers(1, 1),
    )  # fmt: skip
    fence_async_shared()
    gl.warp_specialize([
        (_lead, (tiles, work, call, target, FORM)),
        (_follow, (tiles, work, call, target, FORM)),
        (_load, (boxes, tiles, work, call, FORM, True)),
        (_load, (boxes, tiles, work, call, FORM, False)),
    ], [4, 1, 1], FORM.registers)  # fmt: skip


@launcher(
    integers=("num_seqs", "table_stride", "most", "window", "target"),
    indices=("query_start_loc", "seq_lens", "tables"),
    pointers=("out", "sinks"),
    boxes=4,
    in_gluon=True,
)
def attend_part(
    q_wide: gl.tensor,  # query, boxes [TOKENS, HEADS, half of value_dim]
    q_rest: gl.tensor,  # [TOKENS, HEADS, the rest of a key]
    c_wide: gl.tensor,  # cache as [slots, 1, head_dim], boxes [at most block_size, 1, half]
    c_rest: gl.tensor,
    out: gl.tensor, sinks: gl.tensor, partial: gl.tensor,
    query_start_loc: gl.tensor, seq_lens: gl.tensor, tables: gl.tensor,
    num_seqs: gl.tensor, table_stride: gl.tensor,
    most: gl.tensor, target: gl.tensor, window: gl.tensor, scale: gl.tensor, soft_cap: gl.tensor,
    FORM: gl.constexpr,
) -> None:  # fmt: skip
    """Attend a part of a sequence with a slice of its rows; other parameters as in `latent`."""
    LAYER: gl.constexpr = FORM.layer
    CUT: gl.constexpr = FORM.cut
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    if FORM.chained:
        gdc_launch_dependents()
        gdc_wait()
    item = gl.program_id(2) * gl.num_programs(1) + gl.program_id(1)
    lengths = Lengths(query_start_loc, seq_lens, num_seqs, most, window, target, 0)
    s, split, splits = find_part(item, gl.arange(0, CUT.vector or 1, LANES), lengths, CUT)
    if s >= num_seqs:
        return
    start, query_len, length = load_seq(lengths, s)
    seen, total_tiles = count_tiles(s, query_len, length, lengths, CUT)
    token = gl.program_id(0) // FORM.slices * FORM.tokens
    if (total_tiles == 0) | (token >= query_len):
        return
    begin, end = keys_of_split(seen, length, total_tiles, split, splits, CUT)
    work = _Work(
        tables + s.to(gl.int64) * table_stride, gl.maximum(begin, seen), end, seen, length,
        query_len, start, token, gl.program_id(0) % FORM.slices * FORM.heads, window, scale,
        soft_cap, split == 0, splits == 1,
    )  # fmt: skip
    rows = gl.num_programs(1) * gl.num_programs(2) * most * LAYER.num_heads
    place = item * most * LAYER.num_heads
    into = _Target(out, sinks, partial, place, rows)
    _attend((q_wide, q_rest, c_wide, c_rest), work, lengths, into, FORM)


@launcher(
    integers=("table_stride", "window"),
    indices=("tables", "work"),
    pointers=("out", "sinks"),
    boxes=4,
    in_gluon=True,
)
def attend_tile(
    q_wide: gl.tensor, q_rest: gl.tensor, c_wide: gl.tensor, c_rest: gl.tensor,
    out: gl.tensor, sinks: gl.tensor, tables: gl.tensor,
    work: gl.tensor,  # int32, of prefill_order
    table_stride: gl.tensor, window: gl.tensor, scale: gl.tensor, soft_cap: gl.tensor,
    FORM: gl.constexpr,
) -> None:  # fmt: skip
    """Attend tiles of tokens with slices of the heads; other parameters are those above."""
    call = _Call(tables, table_stride, work, window, scale, soft_cap)
    into = _Target(out, sinks, out, table_stride, table_stride)
    _attend((q_wide, q_rest, c_wide, c_rest), call, call, into, FORM)


class Form(NamedTuple):
    """The compile-time values of the kernels."""

    layer: Layer
    heads: int
    """A program."""
    slots: int
    """From block to block."""
    token_stride: int
    """Of out."""
    cut: Cut | None = None
    """Of parts; None: of tiles of tokens."""
    chained: bool = False
    """The next kernel may be launched before this one has ended."""
    tile: int = TILE
    """Keys."""
    registers: tuple[int, int, int] = REGISTERS

    @property
    def cuts(self) -> bool:
        """True if a program has one part; otherwise it has tiles of tokens."""
        return self.cut is not None

    @property
    def half(self) -> int:
        """The numbers of a value that a group has."""
        return self.layer.head_dim // 2

    @property
    def swapped(self) -> gl.DistributedLinearLayout:
        """A group's sums, each in the warp that had it, with four numbers of a row in a thread."""
        return self._sums((1, 2), (8, 4), 16)

    @property
    def stored(self) -> gl.DistributedLinearLayout:
        """With eight. In two steps the compiler takes shuffles, in one it wants shared memory."""
        return self._sums((1, 2, 4), (8, 16), 32)

    def _sums(
        self, first: tuple[int, ...], lanes: tuple[int, ...], then: int
    ) -> gl.DistributedLinearLayout:
        """Return a layout of columns: some in a thread's first registers, in lanes, then more."""
        rest = [then << i for i in range((self.half // then).bit_length() - 1)]
        registers = [*([0, n] for n in first), [8, 0], *([0, n] for n in rest)]
        across = [*([0, n] for n in lanes), [1, 0], [2, 0], [4, 0]]
        return gl.DistributedLinearLayout(
            registers, across, [[16, 0], [32, 0]], [], [ROWS, self.half]
        )

    @property
    def tokens(self) -> int:
        """A program."""
        return ROWS // self.heads

    @property
    def slices(self) -> int:
        """Programs that share the heads of a token."""
        return slices_of(self.layer.num_heads)


def heads_a_program(num_heads: int) -> int:
    """Return the heads of a program: all, as a power of two, but at most its rows."""
    return min(ROWS, power_of_two(num_heads))


def slices_of(num_heads: int) -> int:
    """Programs that share the heads of a token."""
    return ceil_div(num_heads, heads_a_program(num_heads))


def form_of(layer: Layer, cache: KVCache, out: Tensor, cut: Cut | None, *, chained: bool) -> Form:
    """Return the compile-time values of a kernel for such a layer."""
    slots = cache.k.stride(0) // cache.k.stride(1)
    return Form(layer, heads_a_program(layer.num_heads), slots, out.stride(0), cut, chained)


def boxes_of(form: Form, query: Tensor, cache: KVCache) -> tuple[Box, ...]:
    """Return the boxes in which the copy engine reads the query and the latents."""
    k, boxes = cache.k, []
    for tensor, shape, strides, size in (
        (query, query.shape, query.stride(), (form.tokens, form.heads)),
        (k, (count_slots(k), *k.shape[2:]), k.stride()[1:], (min(k.shape[1], TILE), 1)),
    ):
        for width in (form.half, REST):
            layout = layout_of(width, tensor.itemsize)
            boxes.append(Box(shape, strides, (*size, width), layout))
    return tuple(boxes)


def can_attend(place: Place, query: Tensor, cache: KVCache) -> bool:
    """Return True if these kernels serve the call; `hopper` or `latent` serves every other.

    It takes what `hopper` does, a block_size that is a power of two from 8, and what the copy
    engine asks for: addresses and strides in steps of 16 bytes, blocks a whole number of slots
    apart, and fewer than 2^31.
    """
    block_size, rest = cache.k.shape[1], cache.k.shape[3] - cache.v.shape[3]
    return (
        place.is_hopper(query.device)
        and query.element_size() == 2
        and cache.k.dtype == query.dtype
        and cache.v.shape[3] in (128, 256, 512)
        and rest == REST
        and block_size >= 8
        and block_size & (block_size - 1) == 0
        and can_copy(query)
        and can_copy(cache.k)
        and count_slots(cache.k) < 1 << 31
    )
