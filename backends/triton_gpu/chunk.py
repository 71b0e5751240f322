"""The walk over a part of a sequence's keys in decode: few query rows, keys that lie in blocks.

Warp w owns the keys 16 w .. 16 w + 15 of a tile in a batched product, with its own running maximum
and sum; the warps meet once, after the loop. Products are transposed, keys x rows and head_dim x
rows, because a matrix instruction has at least 16 rows but only 8 columns, and queries are few.
Entries of the block table are loaded a tile ahead and carried, one for 16 keys if block_size
allows, so that the loads of K and V can be pipelined as 16-byte copies. K is read unmasked within
its blocks, since whatever an unseen key brings is replaced; V is masked, since 0 * NaN is NaN. Rows
of several query tokens (MANY) see keys up to a limit of their own. Only `block_id * stride` is
int64.
"""

import triton.language as tl

from backends.triton_gpu.e4m3 import widen
from backends.triton_gpu.place import device_function
from backends.triton_gpu.soft_cap import base2_logits


@device_function
def walk_chunk(
    q: tl.tensor, k_cache: tl.tensor, v_cache: tl.tensor, table: tl.tensor,
    begin: tl.tensor, end: tl.tensor, seen: tl.tensor, limit: tl.tensor, window: tl.tensor,
    scale: tl.tensor, soft_cap: tl.tensor,
    K_STRIDES: tl.constexpr, V_STRIDES: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr, HAS_CAP: tl.constexpr, SKIPS: tl.constexpr, ALIGN: tl.constexpr,
    WARPS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, E4M3: tl.constexpr,
    NATIVE: tl.constexpr, MANY: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Each row's highest logit (base 2), total weight, and weighted sum of values.

    A row sees the keys begin .. end - 1, none before `seen`; if MANY those before its `limit`.
    """
    TILE: tl.constexpr = WARPS * 16
    KEYS: tl.constexpr = 16 if BLOCK_SIZE % 16 == 0 else 1  # that share an entry of the table
    q = tl.broadcast_to(tl.permute(q, (1, 0))[None, :, :], (WARPS, WIDTH, ROWS))
    highest = tl.full([WARPS, 1, ROWS], -1e30, tl.float32)
    totals = tl.zeros([WARPS, 16, ROWS], tl.float32)
    sums = tl.zeros([WARPS, WIDTH, ROWS], tl.float32)
    lane = tl.arange(0, 16)
    dim = tl.arange(0, WIDTH)[None, None, :]
    across = tl.arange(0, WIDTH)[None, :, None]
    group = tl.arange(0, TILE // KEYS) * KEYS
    seen_group = seen // KEYS * KEYS
    block_id = _load_entries(table, begin + group, seen_group, end, BLOCK_SIZE, SKIPS)
    for tile_start in range(begin, end, TILE):
        block = block_id.to(tl.int64)
        offset = ((tile_start + group).to(tl.uint32) % BLOCK_SIZE).to(tl.int32)
        k_at = block * K_STRIDES[0] + offset * K_STRIDES[1]
        v_at = block * V_STRIDES[0] + offset * V_STRIDES[1]
        k_at = tl.multiple_of(tl.reshape(k_at, (WARPS, 16 // KEYS)), (ALIGN, ALIGN))[:, :, None]
        v_at = tl.multiple_of(tl.reshape(v_at, (WARPS, 16 // KEYS)), (ALIGN, ALIGN))[:, None, :]
        if KEYS == 16:
            k_at = k_at + (lane * K_STRIDES[1])[None, :, None]
            v_at = v_at + (lane * V_STRIDES[1])[None, None, :]
        key = tile_start + tl.arange(0, WARPS)[:, None, None] * 16 + lane[None, :, None]
        live = _see(key, seen, end, limit, window, SKIPS, MANY)
        column_key = tile_start + tl.arange(0, WARPS)[:, None, None] * 16 + lane[None, None, :]
        column_live = column_key < end
        if SKIPS:
            column_live = column_live & (column_key >= seen)
        if WIDTH == HEAD_DIM:
            k = tl.load(k_cache + k_at + dim)
            v = tl.load(v_cache + v_at + across, mask=column_live, other=0.0)
        else:
            k = tl.load(k_cache + k_at + dim, mask=dim < HEAD_DIM, other=0.0)
            v = tl.load(v_cache + v_at + across, mask=column_live & (across < HEAD_DIM), other=0.0)
        block_id = _load_entries(
            table, tile_start + TILE + group, seen_group, end, BLOCK_SIZE, SKIPS
        )
        if E4M3:
            k = widen(k, NATIVE)
            v = widen(v, NATIVE)
        logits = tl.dot(k, q, input_precision="ieee")
        logits = base2_logits(logits, scale, soft_cap, HAS_CAP)
        logits = tl.where(live, logits, float("-inf"))
        now = tl.maximum(highest, tl.max(logits, 1, keep_dims=True))
        p = tl.exp2(logits - now)
        rescale = tl.exp2(highest - now)
        totals = totals * rescale + p
        sums = sums * rescale
        sums = tl.dot(v, p.to(v.dtype), sums, input_precision="ieee")
        highest = now
    top = tl.max(highest, 0, keep_dims=True)
    weight = tl.exp2(highest - top)
    total = tl.sum(tl.sum(totals, 1, keep_dims=True) * weight, 0)
    return tl.reshape(top, (ROWS,)), tl.reshape(total, (ROWS,)), tl.sum(sums * weight, 0)


@device_function
def _see(
    key: tl.tensor, seen: tl.tensor, end: tl.tensor, limit: tl.tensor, window: tl.tensor,
    SKIPS: tl.constexpr, MANY: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Which of the keys a row sees: the same for all rows, unless MANY."""
    if MANY:
        seen = limit[None, None, :] - window
        end = limit[None, None, :]
    live = key < end
    if SKIPS:
        live = live & (key >= seen)
    return live


@device_function
def _load_entries(
    table: tl.tensor, key: tl.tensor, seen: tl.tensor, end: tl.tensor,
    BLOCK_SIZE: tl.constexpr, SKIPS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The blocks of these keys; block 0 for keys that are not seen."""
    live = key < end
    if SKIPS:
        live = live & (key >= seen)
    return tl.load(table + key.to(tl.uint32) // BLOCK_SIZE, mask=live, other=0)
