"""Attention of up to 64 rows over latents on Hopper, which multiplying bounds: prompts, many heads.

The formula, the rows and the parts of `latent`. `hopper` has tiles of latents on the left side of
its products, which wastes nothing on few rows; here the rows are, 64 of them, and the sums of their
512 numbers fill the registers of two groups of four warps. Each has half of the values. The first
multiplies the rows with the keys and computes the weights, which go to the second by way of shared
memory. One warp loads, by the copy engine.

A tile of 64 latents lies in three pieces: the first group's half of the values with the rest of
the key, which it frees, and the second group's half. The matrix unit does, in turn: the first
group's values of a tile, the keys of the next one, and, while the first group computes the weights
of that, the second group's values. So it always has work, and each piece is freed most of a step
before it is needed again, of two in shared memory.

Layout: 64 rows are TOKENS query tokens of one sequence times HEADS heads. In shared memory are the
rows, two tiles, and the weights of one, 225 KiB for 512 values.
Grid: `attend_part` as in `latent`; `attend_tile` (slice of heads, tile of tokens), the last tile
first, since it sees most.

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
from backends.triton_gpu.hopper.items import allocate_barriers, gluon_function
from backends.triton_gpu.hopper.load import clear_values, load_entries
from backends.triton_gpu.hopper.prefill import can_copy, count_slots, layout_of
from backends.triton_gpu.prefill.order import find_tile
from backends.triton_gpu.shared.launch import Box, launcher
from backends.triton_gpu.shared.layer import Layer
from backends.triton_gpu.shared.place import Place, power_of_two
from backends.triton_gpu.shared.soft_cap import base2_logits
from backends.triton_gpu.shared.softmax import add_tile, is_visible, load_sinks

ROWS = 64
TILE = 64
REST = 64
WARPS = 4
REGISTERS = (240, 24)
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
    """What a row's earlier sums are multiplied by, and at the end the result."""
    ready: gl.tensor
    """Barriers: the queries are there."""
    left_full: gl.tensor
    left_empty: gl.tensor
    right_full: gl.tensor
    right_empty: gl.tensor
    weighed: gl.tensor
    """A tile's weights are there."""
    turn: gl.tensor
    """The second group may multiply: the first one's products are done."""
    taken: gl.tensor
    """It has."""


class _Work(NamedTuple):
    """What a program attends: the keys begin .. end - 1 of a sequence, with rows from a token on."""

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


class _Target(NamedTuple):
    """Where results go."""

    out: gl.tensor
    o_stride: gl.tensor
    sinks: gl.tensor
    partial: gl.tensor
    place: gl.tensor
    """Of the part's first row in `partial`."""
    rows: gl.tensor
    """In `partial`."""


@gluon_function
def _load(boxes: gl.tensor, tiles: gl.tensor, work: gl.tensor, FORM: gl.constexpr) -> None:
    """Copy the rows, then every tile, into the buffer of its turn."""
    q_wide, q_rest, c_wide, c_rest = boxes
    HALF: gl.constexpr = FORM.half
    KEYS: gl.constexpr = tiles.left.shape[1]
    BLOCK_SIZE: gl.constexpr = FORM.layer.block_size
    COPY: gl.constexpr = c_wide.block_shape[0]
    COPIES: gl.constexpr = KEYS // COPY
    low, high = work.begin // BLOCK_SIZE, (work.end - 1) // BLOCK_SIZE
    first = work.begin // KEYS * KEYS
    ahead = load_entries(work.table, first, low, high, BLOCK_SIZE)
    lane = gl.arange(0, 32, ahead.type.layout)
    row, ready = work.start + work.token, tiles.ready.index(0)
    mbarrier.expect(ready, 2 * q_wide.block_type.nbytes + q_rest.block_type.nbytes)
    tma.async_copy_global_to_shared(q_wide, [row, work.head, 0], ready, tiles.queries)
    tma.async_copy_global_to_shared(q_rest, [row, work.head, 2 * HALF], ready, tiles.rest_queries)
    tma.async_copy_global_to_shared(q_wide, [row, work.head, HALF], ready, tiles.right_queries)
    live_begin = gl.maximum(work.seen, low * BLOCK_SIZE)
    live_end = gl.minimum(work.length, (high + 1) * BLOCK_SIZE)
    edges = first * 0
    for i in range((work.end - first + KEYS - 1) // KEYS):
        key, at, phase = first + i * KEYS, i % DEPTH, (i // DEPTH & 1) ^ 1
        entries, ahead = ahead, load_entries(work.table, key + KEYS, low, high, BLOCK_SIZE)
        edge = (key + KEYS > work.length) | (key < work.seen)
        to = gl.where(edge, DEPTH, at)
        left_full, right_full = tiles.left_full.index(to), tiles.right_full.index(to)
        mbarrier.wait(tiles.left_empty.index(at), phase)
        mbarrier.expect(left_full, COPIES * (c_wide.block_type.nbytes + c_rest.block_type.nbytes))
        for c in gl.static_range(COPIES):
            slot = gl.sum(gl.where(lane == c, entries, 0), 0) * FORM.slots + key % BLOCK_SIZE
            tma.async_copy_global_to_shared(
                c_wide, [slot, 0, 0], left_full, tiles.left.index(at).slice(c * COPY, COPY, 0)
            )
            tma.async_copy_global_to_shared(
                c_rest, [slot, 0, 2 * HALF], left_full, tiles.rest.index(at).slice(c * COPY, COPY, 0)
            )
        mbarrier.wait(tiles.right_empty.index(at), phase)
        mbarrier.expect(right_full, COPIES * c_wide.block_type.nbytes)
        for c in gl.static_range(COPIES):
            slot = gl.sum(gl.where(lane == c, entries, 0), 0) * FORM.slots + key % BLOCK_SIZE
            tma.async_copy_global_to_shared(
                c_wide, [slot, 0, HALF], right_full, tiles.right.index(at).slice(c * COPY, COPY, 0)
            )
        if edge:  # 0 * NaN is NaN: what no row sees becomes zeros
            mbarrier.wait(left_full, edges & 1)
            mbarrier.wait(right_full, edges & 1)
            edges += 1
            clear_values(tiles.left.index(at), live_begin - key, live_end - key)
            clear_values(tiles.right.index(at), live_begin - key, live_end - key)
            fence_async_shared()
            mbarrier.arrive(tiles.left_full.index(at), count=1)
            mbarrier.arrive(tiles.right_full.index(at), count=1)


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
    return add_tile(logits, highest, total, 1)


@gluon_function
def _publish(
    weights: gl.tensor, rescale: gl.tensor, tiles: gl.tensor
) -> None:
    """Leave a tile's weights for the second group."""
    tiles.weights.store(weights.to(tiles.weights.dtype))
    tiles.scales.store(rescale)
    fence_async_shared()
    mbarrier.arrive(tiles.weighed.index(0), count=1)


@gluon_function
def _lead(
    tiles: gl.tensor, work: gl.tensor, target: gl.tensor, FORM: gl.constexpr
) -> None:
    """The first group: logits, weights and the left half of the sums."""
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
    steps = (work.end - first + KEYS - 1) // KEYS
    mbarrier.wait(tiles.ready.index(0), 0)
    logits = warpgroup_mma_wait(0, deps=[_multiply_keys(tiles, first * 0)])
    weights, highest, total, rescale = _soften(logits, highest, total, first, last, work, FORM)
    _publish(weights, rescale, tiles)
    for i in range(1, steps):
        before = (i - 1) % DEPTH
        p = gl.convert_layout(weights.to(tiles.left.dtype), LEFT)
        values = tiles.left.index(before).reshape([KEYS, HALF])
        sums = warpgroup_mma(p, values, sums, is_async=True)
        logits = _multiply_keys(tiles, i)
        sums, logits = warpgroup_mma_wait(3, deps=[sums, logits])
        mbarrier.arrive(tiles.left_empty.index(before), count=1)
        logits, sums = warpgroup_mma_wait(0, deps=[logits, sums])
        mbarrier.arrive(tiles.turn.index(0), count=1)
        weights, highest, total, rescale = _soften(
            logits, highest, total, first + i * KEYS, last, work, FORM
        )
        sums = sums * gl.convert_layout(rescale, gl.SliceLayout(1, SUMS))[:, None]
        mbarrier.wait(tiles.taken.index(0), (i - 1) & 1)
        _publish(weights, rescale, tiles)
    p = gl.convert_layout(weights.to(tiles.left.dtype), LEFT)
    values = tiles.left.index((steps - 1) % DEPTH).reshape([KEYS, HALF])
    sums = warpgroup_mma(p, values, sums, is_async=True)
    mbarrier.arrive(tiles.turn.index(0), count=1)
    sums = warpgroup_mma_wait(0, deps=[sums])
    share = 1.0 / gl.where(total > 0, total, 1.0)  # a row may see nothing of a part
    mbarrier.wait(tiles.taken.index(0), (steps - 1) & 1)
    tiles.scales.store(share)
    mbarrier.arrive(tiles.weighed.index(0), count=1)
    _store(sums, gl.convert_layout(share, gl.SliceLayout(1, SUMS)), work, target, 0, FORM)
    if not work.is_final:
        at = target.place + token * LAYER.num_heads + head
        lse = highest + gl.log2(total)
        gl.store(target.partial + target.rows * (2 * HALF) + at, lse, mask=live)


@gluon_function
def _follow(
    tiles: gl.tensor, work: gl.tensor, target: gl.tensor, FORM: gl.constexpr
) -> None:
    """The second group: the right half of the sums."""
    KEYS: gl.constexpr = tiles.right.shape[1]
    HALF: gl.constexpr = tiles.right.shape[3]
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    sums = gl.full([_COUNT, HALF], 0.0, gl.float32, SUMS)
    first = work.begin // KEYS * KEYS
    steps = (work.end - first + KEYS - 1) // KEYS
    for i in range(steps):
        at = i % DEPTH
        mbarrier.wait(tiles.weighed.index(0), i & 1)
        sums = sums * tiles.scales.load(gl.SliceLayout(1, SUMS))[:, None]
        mbarrier.wait(tiles.right_full.index(at), i // DEPTH & 1)
        mbarrier.wait(tiles.turn.index(0), i & 1)
        values = tiles.right.index(at).reshape([KEYS, HALF])
        sums = warpgroup_mma(tiles.weights, values, sums, is_async=True)
        sums = warpgroup_mma_wait(0, deps=[sums])
        mbarrier.arrive(tiles.right_empty.index(at), count=1)
        mbarrier.arrive(tiles.taken.index(0), count=1)
    mbarrier.wait(tiles.weighed.index(0), steps & 1)
    share = tiles.scales.load(gl.SliceLayout(1, SUMS))
    _store(sums, share, work, target, HALF, FORM)


@gluon_function
def _store(
    sums: gl.tensor, share: gl.tensor, work: gl.tensor, target: gl.tensor, FIRST: gl.constexpr,
    FORM: gl.constexpr,
) -> None:  # fmt: skip
    """Store the rows' values from number FIRST on, as results or as a part's."""
    LAYER: gl.constexpr = FORM.layer
    token, head, live = _rows_of(work, gl.SliceLayout(1, sums.type.layout), FORM)
    dim = FIRST + gl.arange(0, sums.shape[1], gl.SliceLayout(0, sums.type.layout))[None, :]
    result = sums * share[:, None]
    if work.is_final:
        to = (work.start + token).to(gl.int64) * target.o_stride + head * LAYER.o_head
        rounded = result.to(target.out.dtype.element_ty)
        gl.store(target.out + to[:, None] + dim, rounded, mask=live[:, None])
    else:
        at = target.place + token * LAYER.num_heads + head
        gl.store(target.partial + at[:, None] * LAYER.head_dim + dim, result, mask=live[:, None])


@gluon_function
def _attend(boxes: gl.tensor, work: gl.tensor, target: gl.tensor, FORM: gl.constexpr) -> None:
    """What both kernels do once they know their work."""
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
        allocate_barriers(1, 1),
        allocate_barriers(DEPTH + 1, 1), allocate_barriers(DEPTH, 1),
        allocate_barriers(DEPTH + 1, 1), allocate_barriers(DEPTH, 1),
        allocate_barriers(1, 1), allocate_barriers(1, 1), allocate_barriers(1, 1),
    )  # fmt: skip
    fence_async_shared()
    gl.warp_specialize([
        (_lead, (tiles, work, target, FORM)),
        (_follow, (tiles, work, target, FORM)),
        (_load, (boxes, tiles, work, FORM)),
    ], [4, 1], FORM.registers)  # fmt: skip


@launcher(
    integers=("o_stride", "num_seqs", "table_stride", "most", "window", "target"),
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
    o_stride: gl.tensor, num_seqs: gl.tensor, table_stride: gl.tensor,
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
    into = _Target(out, o_stride, sinks, partial, place, rows)
    _attend((q_wide, q_rest, c_wide, c_rest), work, into, FORM)


@launcher(
    integers=("o_stride", "num_seqs", "table_stride", "shortest", "window"),
    indices=("query_start_loc", "seq_lens", "tables"),
    pointers=("out", "sinks"),
    boxes=4,
    in_gluon=True,
)
def attend_tile(
    q_wide: gl.tensor, q_rest: gl.tensor, c_wide: gl.tensor, c_rest: gl.tensor,
    out: gl.tensor, sinks: gl.tensor,
    query_start_loc: gl.tensor, seq_lens: gl.tensor, tables: gl.tensor,
    o_stride: gl.tensor, num_seqs: gl.tensor, table_stride: gl.tensor, shortest: gl.tensor,
    window: gl.tensor, scale: gl.tensor, soft_cap: gl.tensor, FORM: gl.constexpr,
) -> None:  # fmt: skip
    """Attend a tile of tokens with a slice of the heads; the parameters are those above."""
    LAYER: gl.constexpr = FORM.layer
    tile = gl.num_programs(1) - 1 - gl.program_id(1)
    s, start, query_len, first, token = find_tile(
        query_start_loc, seq_lens, num_seqs, tile, FORM.tokens
    )
    if (query_len < shortest) | (token >= query_len):
        return
    begin, seen = first * 0, first * 0
    if LAYER.has_window:
        seen = gl.maximum(first - window + 1, 0)
        begin = gl.maximum(first + token - window + 1, 0)
    work = _Work(
        tables + s.to(gl.int64) * table_stride, begin,
        first + gl.minimum(token + FORM.tokens, query_len), seen, first + query_len,
        query_len, start, token, gl.program_id(0) * FORM.heads, window, scale, soft_cap,
        first >= 0, first >= 0,
    )  # fmt: skip
    into = _Target(out, o_stride, sinks, out, first, first)
    _attend((q_wide, q_rest, c_wide, c_rest), work, into, FORM)


class Form(NamedTuple):
    """What the kernels are compiled for."""

    layer: Layer
    heads: int
    """A program."""
    slots: int
    """From block to block."""
    cut: Cut | None = None
    """Of parts; None: of tiles of tokens."""
    chained: bool = False
    """The next kernel may be launched before this one has ended."""
    tile: int = TILE
    """Keys."""
    registers: tuple[int, int] = REGISTERS

    @property
    def half(self) -> int:
        """Numbers of a value that a group has."""
        return self.layer.head_dim // 2

    @property
    def tokens(self) -> int:
        """A program."""
        return ROWS // self.heads

    @property
    def slices(self) -> int:
        """Programs that share the heads of a token."""
        return -(-self.layer.num_heads // self.heads)


def form_of(layer: Layer, cache: KVCache, cut: Cut | None, *, chained: bool) -> Form:
    """What a kernel for such a layer is compiled for."""
    heads = min(ROWS, power_of_two(layer.num_heads))
    return Form(layer, heads, cache.k.stride(0) // cache.k.stride(1), cut, chained)


def boxes_of(form: Form, query: Tensor, cache: KVCache) -> tuple[Box, ...]:
    """How the copy engine sees the query and the latents."""
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
    """Whether these kernels serve the call; `hopper` or `latent` serves every other.

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
