"""Prefill and chunked prefill on Hopper GPUs, warps with roles of their own; Gluon.

    out[j, h] = sum_k p_k v[k, h // group] / (sum_k p_k + p_sink)
    p_k = exp(logit_k - max);  logit_k = scale * q.k, or cap * tanh(scale * q.k / cap)

The formula and the results of `prefill`, whose kernel serves what this one cannot (`can_attend`).
There the softmax waits for one product and holds up the next. Here one warp loads (`hopper_load`)
and two groups of four multiply and compute exponentials (`hopper_consume`), so that copies, matrix
unit and exponential unit work at the same time.

Layout: an item is 128 rows, TOKENS query tokens of one sequence times PACK query heads of one KV
head, PACK being the largest power of two that divides the group; it walks the tiles of 128 keys
(64 above head_dim 128) that it sees, last first. In shared memory are rings of tiles of K and of V
and the rows of two items, 224 KiB at head_dim 128 (`shape_for`). Rows of K, V and Q are padded with
zeros to 64, 128 or 256 numbers by the copy engine.
Grid: one program a multiprocessor, which takes items in the order of `hopper_items`. Where a batch
has too few items for them, the keys of items are cut, and `merge` adds the parts up.

Bytes moved: K and V once an item, from L2 mostly. Sums and the softmax are float32; the
probabilities are rounded to the cache's dtype before they meet V. Error: at most twice that of the
same algorithm emulated in that dtype. Deterministic; blocks may lie in any order. Sources of ideas:
FlashAttention-3 (arXiv 2407.08608) for the roles and for what overlaps what.
"""

# ruff: noqa: N803, N806 - compile-time values are upper case, as everywhere in Triton

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from backends.contract import PagedBatch
from backends.triton_gpu.hopper_consume import consume
from backends.triton_gpu.hopper_items import HALF, gluon_function
from backends.triton_gpu.hopper_load import load_tiles
from backends.triton_gpu.launch import Boxes, launcher
from backends.triton_gpu.merge import merge_pieces
from backends.triton_gpu.place import Place, ceil_div, power_of_two
from backends.triton_gpu.prefill_order import RECORD, Items, order_tiles

ROWS = 128
CONSUMER_REGISTERS = {2: 240, 3: 160}
LOADER_REGISTERS = 24
LONG_ENOUGH = 8
"""Tiles of keys below which cutting gains nothing."""
LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)


@gluon_function
def _barriers(SLOTS: gl.constexpr, ARRIVALS: gl.constexpr) -> gl.tensor:
    barriers = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(barriers.index(slot), count=ARRIVALS)
    return barriers


@launcher(
    integers=("table_stride", "window", "most_items", "records"),
    indices=("query_start_loc", "seq_lens", "tables", "work", "sinks"),
    pointers=("out",),
    boxes=3,
    in_gluon=True,
)
def _attend(
    q_desc: gl.tensor,  # [num_tokens, num_q_heads, head_dim], boxes [TOKENS / 2, PACK, WIDTH]
    k_desc: gl.tensor,  # [slots, num_kv_heads, head_dim], boxes [at most block_size, 1, WIDTH]
    v_desc: gl.tensor,  # likewise
    out: gl.tensor,  # like query
    partial: gl.tensor,  # float32, see hopper_consume._store_part, written if SPLIT
    query_start_loc: gl.tensor,  # int32 [num_seqs + 1]
    seq_lens: gl.tensor,  # int32 [num_seqs]
    tables: gl.tensor,  # int32 [num_seqs, max_blocks]
    work: gl.tensor,  # int32, of prefill_order, read if PLANNED
    sinks: gl.tensor,  # float32 [num_q_heads], read if HAS_SINKS
    table_stride: gl.tensor,
    most_items: gl.tensor,
    records: gl.tensor,  # where they begin in work
    scale: gl.tensor,  # float, above 0
    soft_cap: gl.tensor,  # float, used if HAS_CAP
    window: gl.tensor,  # used if HAS_WINDOW
    TOKEN_STRIDE: gl.constexpr,  # of out
    HEAD_STRIDE: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    K_ROWS: gl.constexpr,  # from block to block, in slots
    V_ROWS: gl.constexpr,
    NUM_HEADS: gl.constexpr,  # query heads
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    HAS_CAP: gl.constexpr,
    HAS_WINDOW: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    PLANNED: gl.constexpr,  # otherwise there is one sequence
    SPLIT: gl.constexpr,  # items may be cut
    TILE: gl.constexpr,  # keys
    BUFFERS: gl.constexpr,  # items whose rows are in shared memory
    K_DEPTH: gl.constexpr,  # tiles of K in shared memory
    V_DEPTH: gl.constexpr,
    GROUPS: gl.constexpr,  # of consumers
    REGISTERS: gl.constexpr,
    LOADER_REGISTERS: gl.constexpr,
) -> None:
    PACK: gl.constexpr = q_desc.block_shape[1]
    TOKENS: gl.constexpr = GROUPS * q_desc.block_shape[0]
    WIDTH: gl.constexpr = q_desc.block_shape[2]
    SLICES: gl.constexpr = NUM_HEADS // PACK
    q_tiles = gl.allocate_shared_memory(
        q_desc.dtype, [GROUPS * BUFFERS, TOKENS // GROUPS, PACK, WIDTH], q_desc.layout
    )
    k_tiles = gl.allocate_shared_memory(k_desc.dtype, [K_DEPTH, TILE, 1, WIDTH], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(v_desc.dtype, [V_DEPTH, TILE, 1, WIDTH], v_desc.layout)
    q_full, q_empty = _barriers(BUFFERS, 1), _barriers(BUFFERS, GROUPS)
    k_full, k_empty = _barriers(K_DEPTH, 1), _barriers(K_DEPTH, GROUPS)
    v_full, v_empty = _barriers(V_DEPTH + 1, 1), _barriers(V_DEPTH, GROUPS)
    fence_async_shared()
    given = (
        out, partial, query_start_loc, seq_lens, work, most_items, records,
        sinks, scale, soft_cap, window,
    )  # fmt: skip
    rows = (q_tiles, q_full, q_empty)
    ring = (k_tiles, k_full, k_empty, v_tiles, v_full, v_empty)
    descs = (q_desc, k_desc, v_desc)
    if GROUPS == 2:
        gl.warp_specialize([
            (consume, (
                given, rows, ring, SLICES, PACK, TOKENS, HEAD_DIM, TOKEN_STRIDE, HEAD_STRIDE,
                HAS_CAP, HAS_WINDOW, HAS_SINKS, PLANNED, SPLIT, 0, GROUPS,
            )),
            (consume, (
                given, rows, ring, SLICES, PACK, TOKENS, HEAD_DIM, TOKEN_STRIDE, HEAD_STRIDE,
                HAS_CAP, HAS_WINDOW, HAS_SINKS, PLANNED, SPLIT, 1, GROUPS,
            )),
            (load_tiles, (
                descs, given, tables, table_stride, rows, ring,
                BLOCK_SIZE, K_ROWS, V_ROWS, SLICES, PACK, GROUP, TOKENS, HAS_WINDOW,
                PLANNED, SPLIT, GROUPS,
            )),
        ], [4, 1], [REGISTERS, LOADER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (
                given, rows, ring, SLICES, PACK, TOKENS, HEAD_DIM, TOKEN_STRIDE, HEAD_STRIDE,
                HAS_CAP, HAS_WINDOW, HAS_SINKS, PLANNED, SPLIT, 0, GROUPS,
            )),
            (consume, (
                given, rows, ring, SLICES, PACK, TOKENS, HEAD_DIM, TOKEN_STRIDE, HEAD_STRIDE,
                HAS_CAP, HAS_WINDOW, HAS_SINKS, PLANNED, SPLIT, 1, GROUPS,
            )),
            (consume, (
                given, rows, ring, SLICES, PACK, TOKENS, HEAD_DIM, TOKEN_STRIDE, HEAD_STRIDE,
                HAS_CAP, HAS_WINDOW, HAS_SINKS, PLANNED, SPLIT, 2, GROUPS,
            )),
            (load_tiles, (
                descs, given, tables, table_stride, rows, ring,
                BLOCK_SIZE, K_ROWS, V_ROWS, SLICES, PACK, GROUP, TOKENS, HAS_WINDOW,
                PLANNED, SPLIT, GROUPS,
            )),
        ], [4, 4, 1], [REGISTERS, REGISTERS, LOADER_REGISTERS])  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shape:
    """How the kernel is cut for a head_dim."""

    width: int
    """head_dim as it lies in shared memory."""
    tile: int
    """Keys a tile."""
    buffers: int
    """Items whose rows are in shared memory; with two, an item starts before the last has ended."""
    k_depth: int
    """Tiles of K in shared memory."""
    v_depth: int
    """Tiles of V, which are freed later."""
    groups: int = 2
    """Of consumers, of 64 rows each."""

    @property
    def rows(self) -> int:
        """Of an item."""
        return self.groups * HALF.value

    @property
    def registers(self) -> int:
        """Of a thread that multiplies."""
        return CONSUMER_REGISTERS[self.groups]


SHAPES: dict[tuple[int, bool], Shape] = {
    (64, False): Shape(64, 128, 2, 4, 4),
    (64, True): Shape(64, 128, 1, 5, 5),
    (128, False): Shape(128, 128, 2, 2, 3),
    (128, True): Shape(128, 128, 1, 3, 3),
    (256, False): Shape(256, 64, 1, 2, 2),
    (256, True): Shape(256, 64, 1, 2, 2),
}


def shape_for(head_dim: int, *, split: bool) -> Shape:
    """The largest tiles that leave two of each in 227 KiB and the sums in registers.

    Pieces have one item's rows there, and more keys on the way instead.
    """
    return SHAPES[max(64, power_of_two(head_dim)), split]


def heads_an_item(group: int) -> int:
    """Query heads of a KV head that share an item: the largest power of two in the group."""
    return min(group & -group, int(HALF.value))


def items_a_kv_head(group: int, query_len: int) -> int:
    """Items that so many query tokens of a sequence make."""
    pack = heads_an_item(group)
    return group // pack * ceil_div(query_len, ROWS // pack)


def can_attend(
    place: Place, query: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, scale: float
) -> bool:
    """Whether this path serves the call; `prefill`'s portable kernel serves every other.

    It takes a GPU of compute capability 9.x; 16-bit dtypes; head_dim 40 to 256 in steps of 8;
    block_size a power of two from 8; a scale above 0; and what the copy engine asks for: addresses
    and strides in steps of 16 bytes, blocks of a cache a whole number of slots apart, and fewer
    than 2^31 slots.
    """
    block_size, _, head_dim = k_cache.shape[1:]
    return (
        not place.interpreting
        and _is_hopper(query.device)
        and query.element_size() == 2
        and k_cache.dtype == query.dtype
        and 40 <= head_dim <= 256
        and head_dim % 8 == 0
        and block_size >= 8
        and block_size & (block_size - 1) == 0
        and scale > 0
        and all(_can_copy(tensor) for tensor in (query, out, k_cache, v_cache))
        and all(_slots(cache) < 1 << 31 for cache in (k_cache, v_cache))
    )


@lru_cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] == 9


def _can_copy(tensor: Tensor) -> bool:
    *outer, token, head, _ = tensor.stride()
    return (
        tensor.data_ptr() % 16 == 0
        and all(stride > 0 and stride % 8 == 0 for stride in (*outer, token, head))
        and all(stride % token == 0 for stride in outer)
    )


def _slots(cache: Tensor) -> int:
    """Slots from the first of a cache to its last, those of other tensors between them included."""
    return (cache.shape[0] - 1) * (cache.stride(0) // cache.stride(1)) + cache.shape[1]


def attend(
    place: Place,
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: PagedBatch,
    out: Tensor,
    *,
    shortest: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: Tensor | None,
    may_split: bool,
) -> None:
    """Write the rows of the sequences with `shortest` query tokens or more; see `can_attend`.

    One launch, one more where there are several sequences, and one where keys may be cut.
    """
    num_heads, num_kv_heads = query.shape[1], k_cache.shape[2]
    block_size, head_dim = k_cache.shape[1], k_cache.shape[3]
    pack = heads_an_item(num_heads // num_kv_heads)
    planned = batch.num_seqs > 1
    shape = shape_for(head_dim, split=False)
    multiprocessors = place.num_multiprocessors(query.device)
    split = may_split and may_cut(
        batch.num_tokens, batch.max_seq_len, num_heads // pack, pack, shape, multiprocessors
    )
    shape = shape_for(head_dim, split=split)
    items = cut_batch(
        batch, shape.rows // pack, num_heads // pack, shape.tile, multiprocessors, split=split
    )
    work, partial = batch.seq_lens, out
    if planned:
        work = order_tiles(place, batch, items, shortest=shortest, window=window)
    elif items.split:
        work = torch.empty(
            items.records + RECORD.value * items.tiles, dtype=torch.int32, device=out.device
        )
    most_items = items.ranks * items.slices
    if items.split:
        size = most_items * shape.rows * (head_dim + 1)
        partial = torch.empty(size, dtype=torch.float32, device=out.device)
    rows = Boxes(query, query.shape, query.stride(), (HALF.value // pack, pack, shape.width), LAYOUT)
    k, v = (
        Boxes(
            cache, (_slots(cache), num_kv_heads, head_dim), cache.stride()[1:],
            (min(block_size, shape.tile), 1, shape.width), LAYOUT,
        )
        for cache in (k_cache, v_cache)
    )  # fmt: skip
    constants = (
        *out.stride()[:2], block_size,
        k_cache.stride(0) // k_cache.stride(1), v_cache.stride(0) // v_cache.stride(1),
        num_heads, num_heads // num_kv_heads, head_dim,
        soft_cap is not None, window is not None, sinks is not None, planned, items.split,
        shape.tile, shape.buffers, shape.k_depth, shape.v_depth,
        shape.groups, shape.registers, LOADER_REGISTERS,
    )  # fmt: skip
    variant = _attend.variant(place, out.device, (query.dtype,), constants, num_warps=4)
    tensors = (
        out, partial, batch.query_start_loc, batch.seq_lens, batch.block_table, work,
        out if sinks is None else sinks,
    )  # fmt: skip
    numbers = (
        batch.block_table.stride(0), most_items, items.records,
        float(scale), float(soft_cap or 1.0), window or 0,
    )  # fmt: skip
    variant.launch((items.programs, 1, 1), tensors, numbers, (rows, k, v))
    if items.split:
        merge_pieces(place, partial, work, batch, out, items, pack=pack)


def may_cut(
    num_tokens: int, max_seq_len: int, slices: int, pack: int, shape: Shape, programs: int
) -> bool:
    """Whether items are few and contexts long, as far as the host knows."""
    whole = num_tokens * pack // shape.rows * slices
    return whole < programs and max_seq_len >= LONG_ENOUGH * shape.tile


def cut_batch(
    batch: PagedBatch, tokens: int, slices: int, tile: int, programs: int, *, split: bool
) -> Items:
    """How a batch is cut, as far as its shape says: keys only where items are few."""
    tiles = batch.num_tokens // tokens + batch.num_seqs
    return Items(tokens, slices, tile, tiles, programs, split)
