"""The walk over a part of a sequence's keys in decode: few query rows, keys that lie in blocks.

Warp w owns the keys 16 w .. 16 w + 15 of a tile in a batched product, with its own running maximum
and sum; the warps meet once, after the loop. Products are transposed, keys x rows and head_dim x
rows, because a matrix instruction has at least 16 rows but only 8 columns, and queries are few.
Entries of the block table are loaded a tile ahead and carried, one for 16 keys if block_size
allows, so that the loads of K and V can be pipelined as 16-byte copies. K is read unmasked within
its blocks, since whatever an unseen key brings is replaced; V is masked, since 0 * NaN is NaN. Rows
of several query tokens (MANY) each have their own last visible key. Only `block_id * stride` is
int64.
"""

import triton.language as tl

from backends.triton_gpu.shared.e4m3 import widen
from backends.triton_gpu.shared.place import device_function
from backends.triton_gpu.shared.soft_cap import base2_logits
from backends.triton_gpu.shared.softmax import add_tile, is_visible, is_within, load_entries


@device_function
def walk_chunk(
    q: tl.tensor, k_cache: tl.tensor, v_cache: tl.tensor, table: tl.tensor,
    begin: tl.tensor, end: tl.tensor, seen: tl.tensor, last: tl.tensor, window: tl.tensor,
    scale: tl.tensor, soft_cap: tl.tensor,
    LAYER: tl.constexpr, WARPS: tl.constexpr, ROWS: tl.constexpr, MANY: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Each row's highest logit (base 2), total weight, and weighted sum of values.

    A row sees the keys begin .. end - 1, none before `seen`; if MANY those up to its `last`.
    """
    TILE: tl.constexpr = WARPS * 16
    WIDTH: tl.constexpr = LAYER.width
    SKIPS: tl.constexpr = LAYER.has_window
    BLOCK_SIZE: tl.constexpr = LAYER.block_size
    KEYS: tl.constexpr = 16 if BLOCK_SIZE % 16 == 0 else 1  # that share an entry of the table
    ALIGN: tl.constexpr = LAYER.align
    q = tl.broadcast_to(tl.permute(q, (1, 0))[None, :, :], (WARPS, WIDTH, ROWS))
    highest = tl.full([WARPS, ROWS], -1e30, tl.float32)
    totals = tl.zeros([WARPS, 16, ROWS], tl.float32)
    sums = tl.zeros([WARPS, WIDTH, ROWS], tl.float32)
    lane = tl.arange(0, 16)
    dim = tl.arange(0, WIDTH)[None, None, :]
    across = tl.arange(0, WIDTH)[None, :, None]
    group = tl.arange(0, TILE // KEYS) * KEYS
    seen_group = seen // KEYS * KEYS
    block_id = load_entries(table, begin + group, seen_group, end, BLOCK_SIZE, SKIPS)
    for tile_start in range(begin, end, TILE):
        block = block_id.to(tl.int64)
        offset = ((tile_start + group).to(tl.uint32) % BLOCK_SIZE).to(tl.int32)
        k_at = block * LAYER.k_strides[0] + offset * LAYER.k_strides[1]
        v_at = block * LAYER.v_strides[0] + offset * LAYER.v_strides[1]
        k_at = tl.multiple_of(tl.reshape(k_at, (WARPS, 16 // KEYS)), (ALIGN, ALIGN))[:, :, None]
        v_at = tl.multiple_of(tl.reshape(v_at, (WARPS, 16 // KEYS)), (ALIGN, ALIGN))[:, None, :]
        if KEYS == 16:
            k_at = k_at + (lane * LAYER.k_strides[1])[None, :, None]
            v_at = v_at + (lane * LAYER.v_strides[1])[None, None, :]
        key = tile_start + tl.arange(0, WARPS)[:, None, None] * 16 + lane[None, :, None]
        if MANY:
            live = is_visible(key, last[None, None, :], window, SKIPS)
        else:
            live = is_within(key, seen, end, SKIPS)
        column_key = tile_start + tl.arange(0, WARPS)[:, None, None] * 16 + lane[None, None, :]
        column_live = is_within(column_key, seen, end, SKIPS)
        if LAYER.head_dim == WIDTH:
            k = tl.load(k_cache + k_at + dim)
            v = tl.load(v_cache + v_at + across, mask=column_live, other=0.0)
        else:
            k = tl.load(k_cache + k_at + dim, mask=dim < LAYER.head_dim, other=0.0)
            mask = column_live & (across < LAYER.head_dim)
            v = tl.load(v_cache + v_at + across, mask=mask, other=0.0)
        ahead = tile_start + TILE + group
        block_id = load_entries(table, ahead, seen_group, end, BLOCK_SIZE, SKIPS)
        if LAYER.e4m3:
            k = widen(k, LAYER.native)
            v = widen(v, LAYER.native)
        logits = tl.dot(k, q, input_precision="ieee")
        logits = base2_logits(logits, scale, soft_cap, LAYER.has_cap)
        logits = tl.where(live, logits, float("-inf"))
        p, highest, totals, rescale = add_tile(logits, highest, totals, 1)
        sums = sums * rescale[:, None, :]
        sums = tl.dot(v, p.to(v.dtype), sums, input_precision="ieee")
    top = tl.max(highest, 0)
    weight = tl.exp2(highest - top[None, :])
    total = tl.sum(tl.sum(totals, 1) * weight, 0)
    return top, total, tl.sum(sums * weight[:, None, :], 0)
