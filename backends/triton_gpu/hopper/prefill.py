"""Prefill and chunked prefill on Hopper GPUs: a warp-specialized Gluon kernel.

    out[j, h] = sum_k p_k v[k, h // group] / (sum_k p_k + p_sink)
    p_k = exp(logit_k - max);  logit_k = scale * q.k, or cap * tanh(scale * q.k / cap)

The formula and the results of `prefill/prefill.py`, whose kernel serves what this one cannot
(`can_attend`). There the softmax waits for one product and holds up the next. Here one warp loads
(`load`) and two or three groups of four multiply and compute exponentials (`consume`), so that
copies, matrix unit and exponential unit work at the same time.

Layout: an item is 128 rows (192 with three groups, at head_dim 64), TOKENS query tokens of one
sequence times PACK query heads of one KV head (`heads_an_item`); it walks the tiles of 128 keys
that it sees, last first (64 above head_dim 192, or with three groups and a window or soft cap). In
shared memory are rings of tiles of K and of V and the rows of two items, 224 KiB at head_dim 128
(`shape_for`). Rows of K, V and Q are padded with zeros to 64, 128 or 256 numbers by the copy
engine.
Grid: one program a multiprocessor, which takes items in the order of `items`. Where a batch
has too few items for them, the keys of items are cut, and the programs add the parts up at the end
(`merge`).

Bytes moved: K and V once an item, from L2 mostly. Sums and the softmax are float32; the
probabilities are rounded to the cache's dtype before they meet V. Error: at most what
`backends.oracle` allows. Deterministic; blocks may lie in any order. Sources of ideas:
FlashAttention-3 (arXiv 2407.08608) for the roles and for what overlaps what.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from backends.contract import AttentionTerms, KVCache, PagedBatch
from backends.triton_gpu.hopper.consume import consume
from backends.triton_gpu.hopper.items import (
    HALF,
    Given,
    Land,
    Ring,
    Rings,
    allocate_barriers,
    gluon_function,
)
from backends.triton_gpu.hopper.load import load_tiles
from backends.triton_gpu.hopper.widen import widen_values
from backends.triton_gpu.prefill.order import Items, Order, keep_counter, keep_order, plan_order
from backends.triton_gpu.shared.e4m3 import scale_step
from backends.triton_gpu.shared.launch import Box, Variant, launcher
from backends.triton_gpu.shared.place import Place, ceil_div, power_of_two

ROWS = 2 * int(HALF.value)
"""Of an item of two groups, as all are that may be cut."""
LONG = 1024
"""Keys of a sequence below which cutting them gains nothing."""
GAIN = 1.125
"""Three groups multiply this many times the rows of two groups in the same time."""
LONGEST = 1 << 20
"""Tokens of a sequence for which items are cut where that must not depend on the batch."""
MOST_CAP = 512.0
"""The largest soft cap; its logits err by up to 3e-7 times the cap, however small they are."""


def layout_of(width: int, itemsize: int) -> gl.NVMMASharedLayout:
    """The layout of rows of `width` numbers in shared memory."""
    return gl.NVMMASharedLayout(min(128, width * itemsize), 8 * itemsize, 3)


@gluon_function
def _tiles(desc: gl.tensor, COUNT: gl.constexpr, TILE: gl.constexpr) -> gl.tensor:
    """COUNT tiles of TILE keys, each made of boxes of `desc`."""
    WIDTH: gl.constexpr = desc.block_shape[2]
    return gl.allocate_shared_memory(desc.dtype, [COUNT, TILE, 1, WIDTH], desc.layout)


@gluon_function
def _rows(desc: gl.tensor, COUNT: gl.constexpr) -> gl.tensor:
    """Shared memory for the rows of COUNT groups."""
    TOKENS: gl.constexpr = desc.block_shape[0]
    PACK: gl.constexpr = desc.block_shape[1]
    WIDTH: gl.constexpr = desc.block_shape[2]
    return gl.allocate_shared_memory(desc.dtype, [COUNT, TOKENS, PACK, WIDTH], desc.layout)


@gluon_function
def _ring(
    tiles: gl.tensor, tails: gl.tensor, SLOTS: gl.constexpr, GROUPS: gl.constexpr
) -> gl.tensor:
    """A ring of SLOTS tiles, each filled by one warp and emptied by all groups."""
    full = allocate_barriers(SLOTS, 1)
    tails_full = full
    if tails.shape[0] < SLOTS:
        tails_full = allocate_barriers(tails.shape[0], 1)
    return Ring(tiles, tails, full, tails_full, allocate_barriers(SLOTS, GROUPS))


@gluon_function
def _allocate(descs: gl.tensor, FORM: gl.constexpr) -> tuple[gl.tensor, gl.tensor, gl.tensor]:
    """Shared memory: (rows of q, rings of keys and values, where values land: in their ring)."""
    q_desc, k_desc, v_desc, q_tail, k_tail, v_tail = descs
    SHAPE: gl.constexpr = FORM.shape
    TILE: gl.constexpr = SHAPE.tile
    q_tiles = _rows(q_desc, SHAPE.groups * SHAPE.buffers)
    k_tiles, v_tiles = _tiles(k_desc, SHAPE.k_depth, TILE), _tiles(v_desc, SHAPE.v_depth, TILE)
    if FORM.has_tail:
        q_tails = _rows(q_tail, SHAPE.groups * SHAPE.buffers)
        k_tails, v_tails = _tiles(k_tail, SHAPE.k_tails, TILE), _tiles(v_tail, SHAPE.v_depth, TILE)
    else:
        q_tails, k_tails, v_tails = q_tiles, k_tiles, v_tiles
    v_full = allocate_barriers(SHAPE.v_depth + 1, 1)
    v_empty = allocate_barriers(SHAPE.v_depth, SHAPE.groups)
    rows = _ring(q_tiles, q_tails, SHAPE.buffers, SHAPE.groups)
    k = _ring(k_tiles, k_tails, SHAPE.k_depth, SHAPE.groups)
    v = Ring(v_tiles, v_tails, v_full, v_full, v_empty)
    turns = v_full
    if SHAPE.turns:
        turns = allocate_barriers(SHAPE.groups, 1)
    fence_async_shared()
    return rows, Rings(k, v, turns), Land(v_tiles, v_full, v_empty)


@gluon_function
def _allocate_e4m3(descs: gl.tensor, FORM: gl.constexpr) -> tuple[gl.tensor, gl.tensor, gl.tensor]:
    """Likewise; beside q its e4m3 parts, and values land before they are widened."""
    q_desc, k_desc, v_desc, _, _, _ = descs
    SHAPE: gl.constexpr = FORM.shape
    TILE: gl.constexpr = SHAPE.tile
    V_DEPTH: gl.constexpr = SHAPE.v_depth
    WIDTH: gl.constexpr = q_desc.block_shape[2]
    q_tiles = _rows(q_desc, SHAPE.groups * SHAPE.buffers)
    parts = _tiles(k_desc, SHAPE.groups * 2, HALF)
    k_tiles, landed = _tiles(k_desc, SHAPE.k_depth, TILE), _tiles(v_desc, SHAPE.lands, TILE)
    v_tiles = gl.allocate_shared_memory(gl.float16, [V_DEPTH, TILE, 1, WIDTH], q_desc.layout)
    rows = _ring(q_tiles, parts, SHAPE.buffers, SHAPE.groups)
    k = _ring(k_tiles, k_tiles, SHAPE.k_depth, SHAPE.groups)
    v = _ring(v_tiles, v_tiles, V_DEPTH, SHAPE.groups)
    land = Land(landed, allocate_barriers(SHAPE.lands, 1), allocate_barriers(SHAPE.lands, 1))
    fence_async_shared()
    return rows, Rings(k, v, v.full), land


@launcher(
    integers=("table_stride", "window", "most_items"),
    indices=("query_start_loc", "seq_lens", "tables", "work", "k_scale", "v_scale"),
    pointers=("out", "sinks"),
    boxes=6,
    in_gluon=True,
)
def _attend(
    q_desc: gl.tensor,  # [num_tokens, num_q_heads, head_dim], boxes [64 / PACK, PACK, WIDTH]
    k_desc: gl.tensor,  # [slots, num_kv_heads, head_dim], boxes [at most block_size, 1, WIDTH]
    v_desc: gl.tensor,  # likewise
    q_tail: gl.tensor,  # as q_desc, the rest of the head_dim beside WIDTH; None: there is none
    k_tail: gl.tensor,
    v_tail: gl.tensor,
    out: gl.tensor,  # like query
    partial: gl.tensor,  # float32, see store, written if split
    query_start_loc: gl.tensor,  # int32 [num_seqs + 1]
    seq_lens: gl.tensor,  # int32 [num_seqs]
    tables: gl.tensor,  # int32 [num_seqs, max_blocks]
    work: gl.tensor,  # int32, of prefill_order, read if planned
    sinks: gl.tensor,  # [num_q_heads], read if has_sinks
    k_scale: gl.tensor,  # float32 [1] or [num_kv_heads], read if there is one
    v_scale: gl.tensor,  # likewise
    table_stride: gl.tensor,
    most_items: gl.tensor,
    scale: gl.tensor,  # float, above 0
    soft_cap: gl.tensor,  # float, used if has_cap
    window: gl.tensor,  # used if has_window
    FORM: gl.constexpr,
) -> None:
    SHAPE: gl.constexpr = FORM.shape
    given = Given(
        out, partial, query_start_loc, seq_lens, work, most_items,
        sinks, scale, soft_cap, window, k_scale, v_scale,
    )  # fmt: skip
    descs = (q_desc, k_desc, v_desc, q_tail, k_tail, v_tail)
    if FORM.e4m3:
        rows, rings, land = _allocate_e4m3(descs, FORM)
        gl.warp_specialize([
            (consume, (given, rows, rings, FORM, 0)),
            (consume, (given, rows, rings, FORM, 1)),
            (widen_values, (given, rings, land, FORM)),
            (load_tiles, (descs, given, tables, table_stride, rows, rings, land, FORM)),
        ], SHAPE.warps, SHAPE.registers)  # fmt: skip
    else:
        rows, rings, land = _allocate(descs, FORM)
        if SHAPE.groups > 2:
            gl.warp_specialize([
                (consume, (given, rows, rings, FORM, 0)),
                (consume, (given, rows, rings, FORM, 1)),
                (consume, (given, rows, rings, FORM, 2)),
                (load_tiles, (descs, given, tables, table_stride, rows, rings, land, FORM)),
            ], SHAPE.warps, SHAPE.registers)  # fmt: skip
        else:
            gl.warp_specialize([
                (consume, (given, rows, rings, FORM, 0)),
                (consume, (given, rows, rings, FORM, 1)),
                (load_tiles, (descs, given, tables, table_stride, rows, rings, land, FORM)),
            ], SHAPE.warps, SHAPE.registers)  # fmt: skip


class Shape(NamedTuple):
    """The sizes by which the kernel is cut for a head_dim."""

    width: int
    """head_dim as it lies in shared memory, or the larger part of it."""
    tile: int
    """Keys a tile."""
    buffers: int
    """Items whose rows are in shared memory; with two, an item starts before the last has ended."""
    k_depth: int
    """Tiles of K in shared memory."""
    v_depth: int
    """Tiles of V, which are freed later."""
    tail: int = 0
    """The smaller part of head_dim."""
    k_tail_depth: int = 0
    """Tails of K in shared memory; 0: as many as tiles."""
    lands: int = 0
    """Tiles of V that wait to be widened, over an e4m3 cache."""
    wideners: int = 0
    """Warps that widen them."""
    groups: int = 2
    """Of four warps that multiply, 64 rows each."""
    turns: bool = False
    """Groups take turns to issue products. Heads of 96, 160, 192 and 256 lose by it."""
    packed: bool = False
    """Weights are carried rounded, two in a register, where registers are short."""
    direct: bool = False
    """Results are stored without shared memory, so that the next item's rows are copied earlier."""

    @property
    def registers(self) -> tuple[int, ...]:
        """Of a thread of each group of warps but the first, which multiplies as the second does."""
        most, others = REGISTERS[self.groups, self.wideners]
        return (most,) * (self.groups - 1) + (others,) * (1 + (self.wideners > 0))

    @property
    def warps(self) -> tuple[int, ...]:
        """Of each kind that `registers` counts, in its order."""
        return (4,) * (self.groups - 1) + (self.wideners,) * (self.wideners > 0) + (1,)

    @property
    def rows(self) -> int:
        """Of an item."""
        return self.groups * int(HALF.value)

    @property
    def k_tails(self) -> int:
        """Tails of K in shared memory."""
        return self.k_tail_depth or self.k_depth

    @property
    def columns(self) -> int:
        """Totals of a row (`softmax`): heads of 80 and 192 lose 5 % with more than one."""
        return 1 if self.tail else 8


class Form(NamedTuple):
    """The compile-time values of the kernel."""

    token_stride: int
    """Of out."""
    head_stride: int
    block_size: int
    k_rows: int
    """From block to block, in slots."""
    v_rows: int
    num_heads: int
    """Query heads."""
    group: int
    head_dim: int
    has_cap: bool
    has_window: bool
    has_sinks: bool
    k_scale: int
    """From a KV head's scale to the next; -1: there is none."""
    v_scale: int
    planned: bool
    """There is a list of work; otherwise there is one sequence."""
    split: bool
    """Items may be cut, and all programs run at the same time."""
    alike: bool
    """Capped logits are rounded as if each were alone."""
    pack: int
    """Query heads of an item, of one KV head; there may be fewer."""
    shape: Shape

    @property
    def tokens(self) -> int:
        """Query tokens of an item."""
        return self.shape.rows // self.pack

    @property
    def slices(self) -> int:
        """Items that share a tile of tokens."""
        return self.num_heads // self.group * ceil_div(self.group, self.pack)

    @property
    def has_tail(self) -> bool:
        """`Shape.tail` is not 0."""
        return self.shape.tail > 0

    @property
    def e4m3(self) -> bool:
        """The cache holds 8-bit floats."""
        return self.shape.lands > 0


REGISTERS = {(2, 0): (240, 24), (2, 2): (240, 32), (2, 4): (224, 32), (3, 0): (160, 32)}
SHAPES: dict[tuple[int, bool], Shape] = {
    (64, False): Shape(64, 128, 2, 4, 4),
    (64, True): Shape(64, 128, 1, 5, 5),
    (80, False): Shape(64, 128, 2, 3, 4, tail=16, turns=True),
    (80, True): Shape(64, 128, 1, 4, 4, tail=16),
    (96, False): Shape(64, 128, 2, 3, 3, tail=32),
    (96, True): Shape(64, 128, 1, 4, 4, tail=32),
    (128, False): Shape(128, 128, 2, 2, 3, turns=True),
    (128, True): Shape(128, 128, 1, 3, 3, packed=True),
    (160, False): Shape(128, 128, 1, 2, 2, tail=32, packed=True, direct=True),
    (192, False): Shape(128, 128, 1, 2, 2, tail=64, k_tail_depth=1, packed=True, direct=True),
    (256, False): Shape(256, 64, 1, 2, 3),
}
THREE_GROUPS = {  # by head_dim, and whether there is a window or a soft cap
    (64, False): Shape(64, 128, 2, 4, 4, groups=3, turns=True, packed=True),
    (64, True): Shape(64, 64, 2, 4, 4, groups=3, turns=True),  # a masked step takes more registers
}
E4M3_SHAPES = {
    64: Shape(64, 128, 1, 5, 3, lands=4, wideners=4, packed=True),
    128: Shape(128, 128, 1, 3, 2, lands=2, wideners=4, packed=True),
}


def shape_for(head_dim: int, *, split: bool, e4m3: bool = False) -> Shape:
    """The largest tiles that leave two of each in 227 KiB and the sums in registers.

    Pieces have one item's rows there, and more keys on the way instead.
    """
    if e4m3:
        return E4M3_SHAPES[next(size for size in E4M3_SHAPES if size >= head_dim)]
    size = next(size for size, _ in SHAPES if size >= head_dim)
    return SHAPES.get((size, split)) or SHAPES[size, False]


def three_groups_for(head_dim: int, terms: AttentionTerms) -> Shape | None:
    """Of larger items, which take less time a row; None: there is none for a head_dim."""
    is_masked = terms.window is not None or terms.soft_cap is not None
    sizes = [size for size, masked in THREE_GROUPS if size >= head_dim and masked == is_masked]
    return THREE_GROUPS[min(sizes), is_masked] if sizes else None


def heads_an_item(group: int, query_len: int, rows: int) -> int:
    """Query heads of a KV head that share an item of `rows` of a sequence of `query_len` tokens.

    The largest power of two in the group, or one that leaves rows empty where items are fewer then.
    """
    packs = (min(pack, int(HALF.value)) for pack in (group & -group, power_of_two(group)))
    return min(packs, key=lambda pack: _count_items(group, pack, query_len, rows))


def pack_for(shape: Shape, group: int, batch: PagedBatch, terms: AttentionTerms) -> int:
    """Query heads of a KV head that share an item of a batch.

    For three groups always those for long sequences, since they serve where rows are many.
    """
    is_long = terms.batch_invariant or shape.groups > 2
    return heads_an_item(group, LONGEST if is_long else batch.max_query_len, shape.rows)


def items_a_kv_head(group: int, query_len: int) -> int:
    """Items of two groups of a sequence of `query_len` query tokens."""
    return _count_items(group, heads_an_item(group, query_len, ROWS), query_len, ROWS)


def _count_items(group: int, pack: int, query_len: int, rows: int) -> int:
    return ceil_div(group, pack) * ceil_div(query_len, rows // pack)


def can_attend(
    place: Place, query: Tensor, cache: KVCache, out: Tensor, terms: AttentionTerms
) -> bool:
    """Return True if this path serves the call; `prefill/prefill.py` serves every other.

    It takes a GPU of compute capability 9.x; queries of 16 bits, a cache of the same dtype or, of
    bfloat16 queries, of e4m3; head_dim 40 to 256, of e4m3 to 128, in steps of 16 bytes; block_size
    a power of two from 8; a scale above 0; no soft cap above MOST_CAP; and what the copy engine
    asks for: addresses and strides in steps of 16 bytes, blocks of a cache a whole number of slots
    apart, and fewer than 2^31.
    """
    block_size, _, head_dim = cache.k.shape[1:]
    return (
        place.is_hopper(query.device)
        and query.element_size() == 2
        and (cache.k.dtype == query.dtype or _can_divide(query, cache))
        and 40 <= head_dim <= 256
        and head_dim * cache.k.element_size() % 16 == 0
        and block_size >= 8
        and block_size & (block_size - 1) == 0
        and terms.scale > 0
        and not is_large_cap(terms)
        and all(can_copy(tensor) for tensor in (query, out, cache.k, cache.v))
        and all(count_slots(tensor) < 1 << 31 for tensor in (cache.k, cache.v))
    )


def is_large_cap(terms: AttentionTerms) -> bool:
    """Return True if this kernel would apply the soft cap with too large an error."""
    return terms.soft_cap is not None and terms.soft_cap > MOST_CAP


def _can_divide(query: Tensor, cache: KVCache) -> bool:
    """Return True if e4m3 products serve; for float16 the matrix unit's sums are too coarse."""
    return (
        cache.k.dtype == torch.float8_e4m3fn
        and query.dtype == torch.bfloat16
        and query.shape[2] <= 128
    )


def can_copy(tensor: Tensor) -> bool:
    """Return True if the copy engine reads a tensor's rows, and slots of a cache, as they lie."""
    *outer, token, head, _ = tensor.stride()
    return (
        tensor.data_ptr() % 16 == 0
        and all(
            stride > 0 and stride * tensor.itemsize % 16 == 0 for stride in (*outer, token, head)
        )
        and all(stride % token == 0 for stride in outer)
    )


def count_slots(cache: Tensor) -> int:
    """Slots from the first of a cache to its last, those of other tensors between them included."""
    return (cache.shape[0] - 1) * (cache.stride(0) // cache.stride(1)) + cache.shape[1]


@dataclass(frozen=True, slots=True)
class Plan:
    """All of a call's launches but tensors and the numbers that calls differ in."""

    variant: Variant
    grid: tuple[int, int, int]
    numbers: tuple[int, ...]
    """Those that come first: stride of the tables, items at most."""
    boxes: tuple[Box | None, ...]
    """Of query, keys and values; then of their smaller parts."""
    partial_size: int
    """float32 numbers that the parts need."""
    order: Order | None


def choose_shape(
    query: Tensor, cache: KVCache, batch: PagedBatch, terms: AttentionTerms, programs: int
) -> tuple[Shape, bool]:
    """(the shape of a batch's items, whether their keys may be cut).

    Keys are cut where the programs have less than one item each. Three groups take less time a row,
    but where rounds are few, the last one of their larger items may be nearly empty. If terms are
    batch-invariant, the choice is the same for all batches.
    """
    num_heads, head_dim = query.shape[1:]
    num_kv_heads, e4m3 = cache.k.shape[2], cache.k.element_size() == 1
    group = num_heads // num_kv_heads
    two = shape_for(head_dim, split=False, e4m3=e4m3)
    three = None if e4m3 else three_groups_for(head_dim, terms)
    if terms.batch_invariant:
        return three or two, False
    pack = pack_for(two, group, batch, terms)
    whole = batch.num_tokens * pack // ROWS * num_kv_heads * ceil_div(group, pack)
    if whole < programs and batch.max_seq_len >= LONG:
        return shape_for(head_dim, split=True, e4m3=e4m3), True

    def count_steps(shape: Shape) -> int:
        """Times 64 rows that a program multiplies, if all items take as long."""
        pack = pack_for(shape, group, batch, terms)
        ends = (batch.num_seqs - 1) // 2  # a sequence's last item is half empty
        tiles = ceil_div(batch.num_tokens * pack, shape.rows) + ends
        items = tiles * num_kv_heads * ceil_div(group, pack)
        return ceil_div(items, programs) * shape.groups

    if three is not None and count_steps(three) <= GAIN * count_steps(two):
        return three, False
    return two, False


def plan_attend(
    place: Place,
    query: Tensor,
    cache: KVCache,
    batch: PagedBatch,
    out: Tensor,
    terms: AttentionTerms,
) -> Plan:
    """Return the launches for a batch of this shape; see `can_attend`."""
    device, (num_heads, head_dim) = query.device, query.shape[1:]
    block_size, num_kv_heads = cache.k.shape[1:3]
    group = num_heads // num_kv_heads
    programs, planned = place.num_multiprocessors(device), batch.num_seqs > 1
    shape, split = choose_shape(query, cache, batch, terms, programs)
    pack = pack_for(shape, group, batch, terms)
    slices, tokens = num_kv_heads * ceil_div(group, pack), shape.rows // pack
    tiles = batch.num_tokens // tokens + batch.num_seqs
    items = Items(tokens, slices, shape.tile, tiles, programs, split)
    k_stride, v_stride = cache.k.stride(), cache.v.stride()
    (o_token, o_head), rows = out.stride()[:2], k_stride[0] // k_stride[1]
    form = Form(
        o_token, o_head, block_size, rows, v_stride[0] // v_stride[1],
        num_heads, group, head_dim,
        terms.soft_cap is not None, terms.window is not None, terms.sinks is not None,
        scale_step(cache.k_scale), scale_step(cache.v_scale), planned, split,
        terms.batch_invariant and terms.soft_cap is not None, pack, shape,
    )  # fmt: skip
    dtypes = (query.dtype, cache.k.dtype, None if terms.sinks is None else terms.sinks.dtype)
    has_window, most_items = terms.window is not None, items.ranks * items.slices
    options = {"launch_cooperative_grid": True} if split else {}
    return Plan(
        _attend.variant(place, device, dtypes, (form,), num_warps=4, **options),
        (programs, 1, 1),
        (batch.block_table.stride(0), most_items),
        boxes_of(shape, query, cache, pack),
        most_items * shape.rows * (head_dim + 1) if split else 0,
        plan_order(place, device, items, has_window=has_window) if planned else None,
    )


def boxes_of(shape: Shape, query: Tensor, cache: KVCache, pack: int) -> tuple[Box | None, ...]:
    """Of query, keys and values; then of their smaller parts."""
    boxes: list[Box | None] = []
    for width in (shape.width, shape.tail):
        if width == 0:
            boxes += [None] * 3
            continue
        size = (HALF.value // pack, pack, width)
        boxes.append(Box(query.shape, query.stride(), size, layout_of(width, 2)))
        for tensor in (cache.k, cache.v):
            size = (min(tensor.shape[1], shape.tile), 1, width)
            seen = (count_slots(tensor), *tensor.shape[2:])
            boxes.append(Box(seen, tensor.stride()[1:], size, layout_of(width, tensor.itemsize)))
    return tuple(boxes)


def attend(
    plan: Plan,
    query: Tensor,
    cache: KVCache,
    batch: PagedBatch,
    out: Tensor,
    terms: AttentionTerms,
    *,
    shortest: int,
) -> None:
    """Write the rows of the sequences with `shortest` query tokens or more; see `can_attend`.

    One launch, one more where there are several sequences.
    """
    lens, device = batch.seq_lens, out.device
    window = 0 if terms.window is None else min(terms.window, batch.max_seq_len + 1)
    work, partial = lens, out
    if plan.order is not None:
        work = keep_order(plan.order, batch, shortest=shortest, window=window)
    elif plan.partial_size:
        work = keep_counter(batch)
    if plan.partial_size:
        partial = torch.empty(plan.partial_size, dtype=torch.float32, device=device)
    k, v = cache.k, cache.v
    tensors = (
        out, partial, batch.query_start_loc, lens, batch.block_table, work,
        out if terms.sinks is None else terms.sinks,
        lens if cache.k_scale is None else cache.k_scale,
        lens if cache.v_scale is None else cache.v_scale,
    )  # fmt: skip
    numbers = (*plan.numbers, float(terms.scale), float(terms.soft_cap or 1.0), window)
    boxed = (query, k, v, query, k, v)
    plan.variant.launch(plan.grid, tensors, numbers, plan.boxes, boxed)
