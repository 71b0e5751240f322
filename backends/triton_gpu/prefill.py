"""Attention of sequences with several query tokens on a GPU: prefill and chunked prefill.

    out[j, h] = sum_k p_k v[k, h // group] / (sum_k p_k + p_sink)
    p_k = exp(logit_k - max);  logit_k = scale * q.k, or cap * tanh(scale * q.k / cap)

Hopper GPUs take `hopper_prefill` where it can (its `can_attend` is the rule) and sequences may have
more than 16 rows. Everything else, and every other GPU, takes the kernel here.

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
Deterministic; blocks may lie in any order. Only `block_id * stride` is
int64. Values are the caller's duty.
"""

import math
from dataclasses import dataclass

import triton.language as tl
from torch import Tensor

from backends.contract import AttentionTerms, KVCache, PagedBatch
from backends.triton_gpu import hopper_prefill
from backends.triton_gpu.e4m3 import scale_step, widen
from backends.triton_gpu.launch import Variant, launcher
from backends.triton_gpu.place import Place, device_function, power_of_two
from backends.triton_gpu.prefill_order import find_tile
from backends.triton_gpu.soft_cap import LOG2E, tanh

DEEP = 160 << 10  # bytes of shared memory for three stages of 64 keys
HUGE = 224 << 10  # of 128
FEW = 16  # rows of a sequence and KV head that are too few for tiles of 128
LONG = 1 << 20  # a query length for which tiles are chosen that serve every length


@device_function
def _start_rows(
    sinks: tl.tensor, head: tl.tensor, live: tl.tensor, ROWS: tl.constexpr, HAS_SINKS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Running maximum and total of each row before its first key: nothing, or its sink."""
    highest = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks + head, mask=live, other=0.0).to(tl.float32) * LOG2E
        highest = tl.maximum(highest, sink)
        total = tl.exp2(sink - highest)
    return highest, total


@device_function
def _load_entries(
    table: tl.tensor, key: tl.tensor, seen: tl.tensor, stop: tl.tensor, BLOCK_SIZE: tl.constexpr
) -> tl.tensor:
    """The blocks of these keys; block 0 for keys that are not seen."""
    live = (key >= seen) & (key < stop)
    return tl.load(table + key.to(tl.uint32) // BLOCK_SIZE, mask=live, other=0)


@device_function
def _walk_keys(
    q: tl.tensor, highest: tl.tensor, total: tl.tensor, sums: tl.tensor, position: tl.tensor,
    k_cache: tl.tensor, v_cache: tl.tensor, table: tl.tensor,
    begin: tl.tensor, end: tl.tensor,  # of the walk, begin at a tile
    seen: tl.tensor, stop: tl.tensor,  # positions of the keys that some row sees
    scale: tl.tensor, soft_cap: tl.tensor, window: tl.tensor,
    K_STRIDES: tl.constexpr, V_STRIDES: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr, NEGATIVE: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr, E4M3: tl.constexpr, NATIVE: tl.constexpr, MASKED: tl.constexpr,
    ALIGN: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """The rows' highest logits, totals of their weights and weighted sums of values."""
    dim = tl.arange(0, WIDTH)
    lane = tl.arange(0, TILE)
    block_id = _load_entries(table, begin + lane, seen, stop, BLOCK_SIZE)
    for tile_start in range(begin, end, TILE):
        key = tile_start + lane
        if TILE % BLOCK_SIZE == 0:
            offset = lane % BLOCK_SIZE
        else:
            offset = (key.to(tl.uint32) % BLOCK_SIZE).to(tl.int32)
        block = block_id.to(tl.int64)
        k_at = tl.multiple_of(block * K_STRIDES[0] + offset * K_STRIDES[1], ALIGN)
        v_at = tl.multiple_of(block * V_STRIDES[0] + offset * V_STRIDES[1], ALIGN)
        inside = dim < HEAD_DIM
        live = (key >= seen) & (key < stop)
        if MASKED:
            k = tl.load(
                k_cache + k_at[:, None] + dim[None, :],
                mask=live[:, None] & inside[None, :], other=0.0,
            )  # fmt: skip
            v = tl.load(
                v_cache + v_at[:, None] + dim[None, :],
                mask=live[:, None] & inside[None, :], other=0.0,
            )  # fmt: skip
        else:
            k = tl.load(k_cache + k_at[:, None] + dim[None, :], mask=inside[None, :], other=0.0)
            v = tl.load(v_cache + v_at[:, None] + dim[None, :], mask=inside[None, :], other=0.0)
        block_id = _load_entries(table, key + TILE, seen, stop, BLOCK_SIZE)
        if E4M3:
            k = widen(k, NATIVE).to(q.dtype)
            v = widen(v, NATIVE).to(q.dtype)
        logits = tl.dot(q, tl.trans(k), input_precision="ieee")
        factor = tl.maximum(tl.abs(scale), 1e-30) * LOG2E  # above 0, for -inf * 0 is NaN
        if HAS_CAP:
            logits = tanh(logits * (scale / soft_cap))
            factor = soft_cap * LOG2E
        elif NEGATIVE:
            logits = -logits
        if MASKED:
            visible = live[None, :] & (key[None, :] <= position[:, None])
            if HAS_WINDOW:
                visible = visible & (key[None, :] > position[:, None] - window)
            logits = tl.where(visible, logits, float("-inf"))
        now = tl.maximum(highest, tl.max(logits, 1) * factor)
        p = tl.exp2(logits * factor - now[:, None])
        rescale = tl.exp2(highest - now)
        total = total * rescale + tl.sum(p, 1)
        sums = sums * rescale[:, None]
        sums = tl.dot(p.to(v.dtype), v, sums, input_precision="ieee")
        highest = now
    return highest, total, sums


@launcher(
    integers=("num_seqs", "table_stride", "window", "shortest"),
    indices=("query_start_loc", "seq_lens", "tables", "k_scale", "v_scale"),
    pointers=("query", "k_cache", "v_cache", "out", "sinks"),
)
def _attend(
    query: tl.tensor,  # [num_tokens, num_q_heads, head_dim]
    k_cache: tl.tensor,  # [num_blocks, block_size, num_kv_heads, head_dim], bytes if E4M3
    v_cache: tl.tensor,  # likewise
    out: tl.tensor,  # like query
    query_start_loc: tl.tensor,  # int32 [num_seqs + 1]
    seq_lens: tl.tensor,  # int32 [num_seqs]
    tables: tl.tensor,  # int32 [num_seqs, max_blocks]
    sinks: tl.tensor,  # [num_q_heads], read if HAS_SINKS
    k_scale: tl.tensor,  # float32 [1] or [num_kv_heads], read if K_SCALE >= 0
    v_scale: tl.tensor,  # likewise, V_SCALE
    num_seqs: tl.tensor,
    table_stride: tl.tensor,
    scale: tl.tensor,  # float
    soft_cap: tl.tensor,  # float, used if HAS_CAP
    window: tl.tensor,  # used if HAS_WINDOW
    shortest: tl.tensor,  # query tokens; sequences with fewer are left alone
    Q_STRIDES: tl.constexpr,  # token, head
    K_STRIDES: tl.constexpr,  # block, offset, head
    V_STRIDES: tl.constexpr,
    O_STRIDES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NEGATIVE: tl.constexpr,  # the scale
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    E4M3: tl.constexpr,
    NATIVE: tl.constexpr,
    K_SCALE: tl.constexpr,  # from head to head, -1: there is none
    V_SCALE: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,  # ROWS // GROUP
    ALIGN: tl.constexpr,  # elements that divide all strides of the caches
    TILE: tl.constexpr,  # keys
    WIDTH: tl.constexpr,  # head_dim as a power of two
) -> None:
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
    mask = live[:, None] & (dim < HEAD_DIM)[None, :]
    offsets = (start + token).to(tl.int64) * Q_STRIDES[0] + head * Q_STRIDES[1]
    q = tl.load(query + offsets[:, None] + dim[None, :], mask=mask, other=0.0)
    position = first + token
    if E4M3 and query.dtype.element_ty == tl.bfloat16:
        q = q.to(tl.float16)  # whose fraction holds what the cache holds
    if K_SCALE >= 0:
        scale *= tl.load(k_scale + kv_head * K_SCALE)

    highest, total = _start_rows(sinks, head, live, ROWS, HAS_SINKS)
    stop = first + tl.minimum(token_start + TOKENS, query_len)
    stop = tl.where(token_start < query_len, stop, 0)
    seen = stop * 0
    if HAS_WINDOW:
        seen = tl.maximum(first + token_start - window + 1, 0)
    table = tables + s.to(tl.int64) * table_stride
    k_cache += kv_head * K_STRIDES[2]
    v_cache += kv_head * V_STRIDES[2]
    sums = tl.zeros([ROWS, WIDTH], tl.float32)
    middle = seen // TILE * TILE
    if not HAS_WINDOW:
        middle = tl.minimum(first + token_start + 1, stop) // TILE * TILE
        highest, total, sums = _walk_keys(
            q, highest, total, sums, position, k_cache, v_cache, table, seen, middle, seen, stop,
            scale, soft_cap, window, K_STRIDES, V_STRIDES, BLOCK_SIZE, HEAD_DIM,
            NEGATIVE, HAS_CAP, HAS_WINDOW, E4M3, NATIVE,
            MASKED=False, ALIGN=ALIGN, TILE=TILE, WIDTH=WIDTH,
        )  # fmt: skip
    highest, total, sums = _walk_keys(
        q, highest, total, sums, position, k_cache, v_cache, table, middle, stop, seen, stop,
        scale, soft_cap, window, K_STRIDES, V_STRIDES, BLOCK_SIZE, HEAD_DIM,
        NEGATIVE, HAS_CAP, HAS_WINDOW, E4M3, NATIVE,
        MASKED=True, ALIGN=ALIGN, TILE=TILE, WIDTH=WIDTH,
    )  # fmt: skip
    result = sums / tl.where(live, total, 1.0)[:, None]
    if V_SCALE >= 0:
        result *= tl.load(v_scale + kv_head * V_SCALE)
    offsets = (start + token).to(tl.int64) * O_STRIDES[0] + head * O_STRIDES[1]
    tl.store(out + offsets[:, None] + dim[None, :], result.to(out.dtype.element_ty), mask=mask)


@dataclass(frozen=True, slots=True)
class Plan:
    """All of the portable kernel's launch but tensors and the numbers that calls differ in."""

    variant: Variant
    grid: tuple[int, int, int]


def plan_prefill(
    place: Place,
    query: Tensor,
    cache: KVCache,
    batch: PagedBatch,
    out: Tensor,
    terms: AttentionTerms,
) -> Plan | hopper_prefill.Plan:
    """How to prefill a batch of this shape."""
    num_kv_heads, head_dim = cache.k.shape[2:]
    group = query.shape[1] // num_kv_heads
    longest = LONG if terms.batch_invariant else batch.max_query_len
    if longest * group > FEW and hopper_prefill.can_attend(place, query, cache, out, terms):
        return hopper_prefill.plan_attend(place, query, cache, batch, out, terms)
    width = max(16, power_of_two(head_dim))
    size, room = query.element_size(), place.shared_bytes(query.device)
    rows, keys, warps, stages = shape_of_tiles(width * size, size, group, longest, room)
    tokens = rows // group
    k_strides, v_strides = cache.k.stride()[:3], cache.v.stride()[:3]
    constants = (
        query.stride()[:2], k_strides, v_strides, out.stride()[:2], cache.k.shape[1], group,
        head_dim, terms.scale < 0, terms.soft_cap is not None, terms.window is not None,
        terms.sinks is not None, cache.k.element_size() == 1, place.has_e4m3(query.device),
        scale_step(cache.k_scale), scale_step(cache.v_scale), rows, tokens,
        math.gcd(16, *k_strides, *v_strides), keys, width,
    )  # fmt: skip
    dtypes = (query.dtype, cache.k.dtype, None if terms.sinks is None else terms.sinks.dtype)
    variant = _attend.variant(
        place, query.device, dtypes, constants, num_warps=warps, num_stages=stages
    )
    return Plan(variant, (num_kv_heads, batch.num_tokens // tokens + batch.num_seqs, 1))


def prefill(
    plan: Plan | hopper_prefill.Plan,
    query: Tensor,
    cache: KVCache,
    batch: PagedBatch,
    out: Tensor,
    terms: AttentionTerms,
    *,
    shortest: int,
) -> None:
    """Write the rows of the sequences with `shortest` query tokens or more."""
    if isinstance(plan, hopper_prefill.Plan):
        hopper_prefill.attend(plan, query, cache, batch, out, terms, shortest=shortest)
        return
    lens = batch.seq_lens
    tensors = (
        query, cache.k, cache.v, out, batch.query_start_loc, lens, batch.block_table,
        out if terms.sinks is None else terms.sinks,
        lens if cache.k_scale is None else cache.k_scale,
        lens if cache.v_scale is None else cache.v_scale,
    )  # fmt: skip
    numbers = (
        batch.num_seqs, batch.block_table.stride(0),
        float(terms.scale), float(terms.soft_cap or 1.0),
        min(terms.window or 0, batch.max_seq_len + 1), shortest,
    )  # fmt: skip
    plan.variant.launch(plan.grid, tensors, numbers)


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
