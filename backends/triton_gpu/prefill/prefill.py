"""Attention of sequences with several query tokens on a GPU: prefill and chunked prefill.

    out[j, h] = sum_k p_k v[k, h // group] / (sum_k p_k + p_sink)
    p_k = exp(logit_k - max);  logit_k = scale * q.k, or cap * tanh(scale * q.k / cap)

The kernel for every GPU. Where `hopper/prefill.py` can serve a call, `paged_attention` takes that.

Layout: a row is one (query token, head of the group); a program holds a tile of rows of one
sequence and KV head and walks the keys it can see, a tile at a time, by way of the block table:
first the tiles that all its rows see whole, without a mask, then those on the diagonal and at the
end, with one; with a window all have one. Table entries are loaded a tile ahead and carried.
Grid: (KV head, tile of rows), late tiles, which see most, first. Sequence s owns the tiles from
query_start_loc[s] // TOKENS + s on and each program finds its sequence by bisection: no plan on the
host, no synchronisation, and at most one idle program a sequence and KV head.

A cache of 8-bit floats is widened to float16, which holds all its values; K's scale multiplies the
softmax's, V's the result.

Bytes moved: K and V once a tile of rows. Sums and the softmax are float32; the probabilities are
rounded to the cache's dtype before they meet V. Error: at most what `backends.oracle` allows.
Deterministic; blocks may lie in any order. Only `block_id * stride` is int64. Values are the
caller's duty.
"""

from typing import NamedTuple

import triton.language as tl
from torch import Tensor

from backends.contract import AttentionTerms, KVCache, PagedBatch
from backends.triton_gpu.prefill.order import find_tile
from backends.triton_gpu.shared.e4m3 import load_scale, widen
from backends.triton_gpu.shared.launch import Launch, launcher
from backends.triton_gpu.shared.layer import Layer, head_offset, layer_of
from backends.triton_gpu.shared.place import Place, device_function, power_of_two
from backends.triton_gpu.shared.soft_cap import split_logits
from backends.triton_gpu.shared.softmax import (
    add_tile,
    is_visible,
    is_within,
    load_entries,
    load_sinks,
    raise_highest,
)

DEEP = 160 << 10  # bytes of shared memory for three stages of 64 keys
HUGE = 224 << 10  # of 128
FEW = 16  # rows of a sequence and KV head that are too few for tiles of 128
LONG = 1 << 20  # a query length for which tiles are chosen that serve every length


@device_function
def _walk_keys(
    q: tl.tensor, highest: tl.tensor, total: tl.tensor, sums: tl.tensor, position: tl.tensor,
    k_cache: tl.tensor, v_cache: tl.tensor, table: tl.tensor,
    begin: tl.tensor, end: tl.tensor,  # of the walk, begin at a tile
    seen: tl.tensor, stop: tl.tensor,  # positions of the keys that some row sees
    scale: tl.tensor, soft_cap: tl.tensor, window: tl.tensor,
    FORM: tl.constexpr, MASKED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """The rows' highest logits, totals of their weights and weighted sums of values."""
    LAYER: tl.constexpr = FORM.layer
    BLOCK_SIZE: tl.constexpr = LAYER.block_size
    TILE: tl.constexpr = FORM.tile
    ALIGN: tl.constexpr = LAYER.align
    dim = tl.arange(0, LAYER.width)
    lane = tl.arange(0, TILE)
    block_id = load_entries(table, begin + lane, seen, stop, BLOCK_SIZE, HAS_BEGIN=True)
    for tile_start in range(begin, end, TILE):
        key = tile_start + lane
        if TILE % BLOCK_SIZE == 0:
            offset = lane % BLOCK_SIZE
        else:
            offset = (key.to(tl.uint32) % BLOCK_SIZE).to(tl.int32)
        block = block_id.to(tl.int64)
        k_at = block * LAYER.k_strides[0] + offset * LAYER.k_strides[1]
        v_at = block * LAYER.v_strides[0] + offset * LAYER.v_strides[1]
        k_at = tl.multiple_of(k_at, ALIGN)
        v_at = tl.multiple_of(v_at, ALIGN)
        mask = (dim < LAYER.head_dim)[None, :]
        live = is_within(key, seen, stop, HAS_BEGIN=True)
        if MASKED:
            mask = live[:, None] & mask
        k = tl.load(k_cache + k_at[:, None] + dim[None, :], mask=mask, other=0.0)
        v = tl.load(v_cache + v_at[:, None] + dim[None, :], mask=mask, other=0.0)
        block_id = load_entries(table, key + TILE, seen, stop, BLOCK_SIZE, HAS_BEGIN=True)
        if LAYER.e4m3:
            k = widen(k, LAYER.native).to(q.dtype)
            v = widen(v, LAYER.native).to(q.dtype)
        logits = tl.dot(q, tl.trans(k), input_precision="ieee")
        logits, factor = split_logits(logits, scale, soft_cap, LAYER.has_cap, FORM.negative)
        if MASKED:
            visible = is_visible(key[None, :], position[:, None], window, LAYER.has_window)
            logits = tl.where(live[None, :] & visible, logits, float("-inf"))
        p, highest, total, rescale = add_tile(logits, highest, total, 1, factor)
        sums = sums * rescale[:, None]
        sums = tl.dot(p.to(v.dtype), v, sums, input_precision="ieee")
    return highest, total, sums


@launcher(
    integers=("q_stride", "q_head", "num_seqs", "table_stride", "window", "shortest"),
    indices=("query_start_loc", "seq_lens", "tables", "k_scale", "v_scale"),
    pointers=("query", "k_cache", "v_cache", "out", "sinks"),
)
def _attend(
    query: tl.tensor,  # [num_tokens, num_q_heads, head_dim]
    k_cache: tl.tensor,  # [num_blocks, block_size, num_kv_heads, head_dim], bytes if e4m3
    v_cache: tl.tensor,  # likewise
    out: tl.tensor,  # like query
    query_start_loc: tl.tensor,  # int32 [num_seqs + 1]
    seq_lens: tl.tensor,  # int32 [num_seqs]
    tables: tl.tensor,  # int32 [num_seqs, max_blocks]
    sinks: tl.tensor,  # [num_q_heads], read if has_sinks
    k_scale: tl.tensor,  # float32 [1] or [num_kv_heads], read if there is one
    v_scale: tl.tensor,  # likewise
    q_stride: tl.tensor,  # from token to token
    q_head: tl.tensor,  # from head to head
    num_seqs: tl.tensor,
    table_stride: tl.tensor,
    scale: tl.tensor,  # float
    soft_cap: tl.tensor,  # float, used if has_cap
    window: tl.tensor,  # used if has_window
    shortest: tl.tensor,  # query tokens; sequences with fewer are left alone
    FORM: tl.constexpr,
) -> None:
    LAYER: tl.constexpr = FORM.layer
    GROUP: tl.constexpr = LAYER.group
    ROWS: tl.constexpr = FORM.rows
    WIDTH: tl.constexpr = LAYER.width
    TOKENS: tl.constexpr = ROWS // GROUP
    TILE: tl.constexpr = FORM.tile
    kv_head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    s, start, query_len, first, token_start = find_tile(
        query_start_loc, seq_lens, num_seqs, tile, TOKENS
    )
    query_len = tl.where(query_len < shortest, 0, query_len)
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, WIDTH)
    token = token_start + row // GROUP
    head = kv_head * GROUP + row % GROUP
    live = (token < query_len) & (row < TOKENS * GROUP)
    mask = live[:, None] & (dim < LAYER.head_dim)[None, :]
    Q_ALIGN: tl.constexpr = LAYER.q_align
    offsets = tl.multiple_of((start + token).to(tl.int64) * q_stride, [Q_ALIGN])
    offsets += head_offset(head, q_head, Q_ALIGN)
    q = tl.load(query + offsets[:, None] + dim[None, :], mask=mask, other=0.0)
    position = first + token
    if LAYER.e4m3 and query.dtype.element_ty == tl.bfloat16:
        q = q.to(tl.float16)  # whose fraction holds what the cache holds
    scale *= load_scale(k_scale, kv_head, LAYER.k_scale)

    highest = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if LAYER.has_sinks:
        sink = load_sinks(sinks, head, live)
        highest, _ = raise_highest(highest, sink)
        total = tl.exp2(sink - highest)
    stop = first + tl.minimum(token_start + TOKENS, query_len)
    stop = tl.where(token_start < query_len, stop, 0)
    seen = stop * 0
    if LAYER.has_window:
        seen = tl.maximum(first + token_start - window + 1, 0)
    table = tables + s.to(tl.int64) * table_stride
    k_cache += kv_head * LAYER.k_strides[2]
    v_cache += kv_head * LAYER.v_strides[2]
    sums = tl.zeros([ROWS, WIDTH], tl.float32)
    middle = seen // TILE * TILE
    if not LAYER.has_window:
        middle = tl.minimum(first + token_start + 1, stop) // TILE * TILE
        highest, total, sums = _walk_keys(
            q, highest, total, sums, position, k_cache, v_cache, table, seen, middle, seen, stop,
            scale, soft_cap, window, FORM, MASKED=False,
        )  # fmt: skip
    highest, total, sums = _walk_keys(
        q, highest, total, sums, position, k_cache, v_cache, table, middle, stop, seen, stop,
        scale, soft_cap, window, FORM, MASKED=True,
    )  # fmt: skip
    result = sums / tl.where(live, total, 1.0)[:, None]
    result *= load_scale(v_scale, kv_head, LAYER.v_scale)
    offsets = (start + token).to(tl.int64) * FORM.o_token + head * LAYER.o_head
    tl.store(out + offsets[:, None] + dim[None, :], result.to(out.dtype.element_ty), mask=mask)


class Form(NamedTuple):
    """The compile-time values of the portable kernel."""

    layer: Layer
    o_token: int
    negative: bool
    """The scale."""
    rows: int
    tile: int
    """Keys."""


def plan_prefill(
    place: Place,
    query: Tensor,
    cache: KVCache,
    batch: PagedBatch,
    out: Tensor,
    terms: AttentionTerms,
) -> Launch:
    """Return the launch that prefills a batch of this shape."""
    num_kv_heads = cache.k.shape[2]
    group = query.shape[1] // num_kv_heads
    longest = LONG if terms.batch_invariant else batch.max_query_len
    layer = layer_of(place, query, cache, out, terms)
    size, room = query.element_size(), place.shared_bytes(query.device)
    rows, keys, warps, stages = shape_of_tiles(layer.width * size, size, group, longest, room)
    form = Form(layer, out.stride(0), terms.scale < 0, rows, keys)
    dtypes = (query.dtype, cache.k.dtype, None if terms.sinks is None else terms.sinks.dtype)
    variant = _attend.variant(
        place, query.device, dtypes, (form,), num_warps=warps, num_stages=stages
    )
    grid = (num_kv_heads, batch.num_tokens // (rows // group) + batch.num_seqs, 1)
    return Launch(variant, grid, (*query.stride()[:2], batch.num_seqs, batch.block_table.stride(0)))


def prefill(
    plan: Launch,
    query: Tensor,
    cache: KVCache,
    batch: PagedBatch,
    out: Tensor,
    terms: AttentionTerms,
    *,
    shortest: int,
) -> None:
    """Write the rows of the sequences with `shortest` query tokens or more."""
    lens = batch.seq_lens
    tensors = (
        query, cache.k, cache.v, out, batch.query_start_loc, lens, batch.block_table,
        out if terms.sinks is None else terms.sinks,
        lens if cache.k_scale is None else cache.k_scale,
        lens if cache.v_scale is None else cache.v_scale,
    )  # fmt: skip
    window = min(terms.window or 0, batch.max_seq_len + 1)
    plan.run(tensors, float(terms.scale), float(terms.soft_cap or 1.0), window, shortest)


def shape_of_tiles(
    row_bytes: int, itemsize: int, group: int, max_query_len: int, shared_bytes: int
) -> tuple[int, int, int, int]:
    """Rows and keys a tile, warps, stages; three stages where shared memory holds them.

    The largest tiles, 128 x 128, where three stages of those fit (Hopper and after). Otherwise K
    and V in two stages stay within 64 KiB, and the rows within 32 KiB.
    """
    few = max_query_len * group <= FEW
    half = itemsize == 2 and row_bytes <= 256
    if half and not few and shared_bytes >= HUGE:
        return 128, 128, 8, 3
    rows = 16 if few else max(16, min(64, (32 << 10) // row_bytes))
    keys = max(16, min(64, 64 * 256 // row_bytes))
    return max(rows, power_of_two(group)), keys, 4, 3 if half and shared_bytes >= DEEP else 2
