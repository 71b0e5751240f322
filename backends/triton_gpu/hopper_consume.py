"""The warps of Hopper's prefill that multiply: groups of four, 64 rows of an item each.

A group keeps the matrix unit busy while it computes exponentials: the product q.k of the next tile
is issued before the product p.v of this one, then waited for alone, and the softmax of the next
tile runs while p.v does. p stays in registers. Where the rows of two items fit in shared memory, at
the end of an item the next item's first product is issued too, so that the item's last steps
(dividing, rounding, storing) hide behind it. While one group computes, the others' products have
the matrix unit.

A head_dim that is no power of two lies in two parts, 96 as 64 and 32: q.k is the sum of two
products, and p.v has a result for each part (`extra` is the smaller one's).

Of an e4m3 cache the keys are multiplied as they are stored, which goes at twice the speed, with q
as a sum of two e4m3 numbers, which are exactly a bfloat16 (`_divide_rows`). Each row of q is scaled
by a power of two first. The values come widened (`hopper_widen`).

A soft cap is 1 - 2 / (exp(2x) + 1), five instructions per logit. `soft_cap.tanh`, whose relative
error is as small near 0, takes fourteen and 1.6 times the time of prefill, because issuing
instructions is what limits this kernel; so caps above `hopper_prefill.MOST_CAP` are not served.

Four things here are as they are for the assembler's sake:
- The wait for the next tile's values stands between the exponentials and the wait for p.v, because
  it is a branch: without one the exponentials are moved behind the wait, and nothing overlaps.
- No branch stands around a product, because then it waits for every single instruction: an item
  that is not there is multiplied all the same.
- Weights are carried from step to step unrounded. Rounded ones would be carried as halves of
  registers, which takes two instructions for each pair, or packed by hand, which takes one.
- The address of q is worked out in every step (`nothing`). Otherwise it is spilled, and the store
  may end up in a loop that is not entered: what is read then is not what was stored.
`tests/backends/compile_offline.py` checks the first, the second and the last.
"""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from backends.triton_gpu.hopper_items import (
    GROUPS,
    HALF,
    count_items,
    count_tiles,
    find_span,
    gluon_function,
    read_item,
)
from backends.triton_gpu.hopper_merge import merge_items
from backends.triton_gpu.hopper_store import finish
from backends.triton_gpu.soft_cap import LOG2E


@gluon_function
def _reciprocal(x: gl.tensor) -> gl.tensor:
    """1 / x of numbers that are not denormal, in one instruction."""
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon_function
def _soften(
    logits: gl.tensor, highest: gl.tensor, total: gl.tensor, last: gl.tensor,
    scale: gl.tensor, look: gl.tensor,
    HAS_CAP: gl.constexpr, HAS_WINDOW: gl.constexpr, MASKED: gl.constexpr, E4M3: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor, gl.tensor, gl.tensor]:  # fmt: skip
    """(weights, highest logits in base 2, totals, what earlier sums are multiplied by).

    A row sees the columns up to its `last`; if E4M3 it has a `scale` of its own.
    """
    soft_cap, window = look
    factor = scale * LOG2E
    if HAS_CAP:
        by = scale / soft_cap * (2 * LOG2E)
        above = gl.exp2(logits * (by[:, None] if E4M3 else by)) + 1
        logits = 1 - 2 * _reciprocal(above)  # tanh, within 3e-7: see above
        factor = highest * 0 + soft_cap * LOG2E if E4M3 else soft_cap * LOG2E
    if MASKED:
        column = gl.arange(0, logits.shape[1], gl.SliceLayout(0, logits.type.layout))[None, :]
        seen = column <= last[:, None]
        if HAS_WINDOW:
            seen = seen & (column > last[:, None] - window)
        logits = gl.where(seen, logits, float("-inf"))
    now = gl.maximum(highest, gl.max(logits, 1) * factor)
    weights = gl.exp2(logits * (factor[:, None] if E4M3 else factor) - now[:, None])
    rescale = gl.exp2(highest - now)
    return weights, now, total * rescale + gl.sum(weights, 1), rescale


@gluon_function
def _multiply_keys(
    rows: gl.tensor, slot: gl.tensor, ring: gl.tensor, j: gl.tensor, there: gl.tensor
) -> gl.tensor:
    """Issue the product of the rows with the j-th tile of keys, once it is there; no wait for it.

    Unless it is `there` to come: then with what the memory holds.
    """
    q_tiles, q_tails = rows[:2]
    k_tiles, k_tails, k_full = ring[:3]
    DEPTH: gl.constexpr = k_tiles.shape[0]
    TILE: gl.constexpr = k_tiles.shape[1]
    PARTS: gl.constexpr = q_tails.shape[0] // q_tiles.shape[0]
    TAIL: gl.constexpr = q_tails.shape[3] if q_tails.shape[3] < q_tiles.shape[3] else 0
    STEP: gl.constexpr = 256 // k_tiles.dtype.primitive_bitwidth
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, STEP])
    mbarrier.wait(k_full.index(j % DEPTH), j // DEPTH & 1, pred=there)
    keys = k_tiles.index(j % DEPTH).reshape([TILE, k_tiles.shape[3]]).permute((1, 0))
    blank = gl.full([HALF, TILE], 0.0, gl.float32, LOGITS)
    if k_tiles.dtype != q_tiles.dtype:
        logits = blank
        for part in gl.static_range(PARTS):
            q = q_tails.index(slot * PARTS + part).reshape([HALF, q_tails.shape[3]])
            logits = warpgroup_mma(q, keys, logits, use_acc=part > 0, is_async=True)
    else:
        q = q_tiles.index(slot).reshape([HALF, q_tiles.shape[3]])
        logits = warpgroup_mma(q, keys, blank, use_acc=False, is_async=True)
        if TAIL > 0:
            q = q_tails.index(slot).reshape([HALF, TAIL])
            keys = k_tails.index(j % DEPTH).reshape([TILE, TAIL]).permute((1, 0))
            logits = warpgroup_mma(q, keys, logits, is_async=True)
    return logits


@gluon_function
def _multiply_values(
    weights: gl.tensor, sums: gl.tensor, extra: gl.tensor, ring: gl.tensor, j: gl.tensor
) -> tuple[gl.tensor, gl.tensor]:
    """Issue the product of the weights, rounded, with the j-th tile of values; no wait for it."""
    v_tiles, v_tails = ring[4:6]
    TILE: gl.constexpr = v_tiles.shape[1]
    TAIL: gl.constexpr = v_tails.shape[3]
    at = j % v_tiles.shape[0]
    p = gl.convert_layout(weights.to(v_tiles.dtype), gl.DotOperandLayout(0, sums.type.layout, 2))
    values = v_tiles.index(at).reshape([TILE, v_tiles.shape[3]])
    sums = warpgroup_mma(p, values, sums, is_async=True)
    if v_tiles.shape[3] > TAIL:
        p = gl.convert_layout(p, gl.DotOperandLayout(0, extra.type.layout, 2))
        extra = warpgroup_mma(p, v_tails.index(at).reshape([TILE, TAIL]), extra, is_async=True)
    return sums, extra


@gluon_function
def _wait(sums: gl.tensor, extra: gl.tensor, ring: gl.tensor) -> tuple[gl.tensor, gl.tensor]:
    """Until all products are done."""
    if ring[5].shape[3] < ring[4].shape[3]:
        sums, extra = warpgroup_mma_wait(0, deps=[sums, extra])
    else:
        sums = warpgroup_mma_wait(0, deps=[sums])
    return sums, extra


@gluon_function
def _wait_for_logits(
    logits: gl.tensor, sums: gl.tensor, extra: gl.tensor, ring: gl.tensor
) -> tuple[gl.tensor, gl.tensor, gl.tensor]:
    """Until q.k is done, p.v being issued after it."""
    if ring[5].shape[3] < ring[4].shape[3]:
        logits, sums, extra = warpgroup_mma_wait(2, deps=[logits, sums, extra])
    else:
        logits, sums = warpgroup_mma_wait(1, deps=[logits, sums])
    return logits, sums, extra


@gluon_function
def _divide_rows(rows: gl.tensor, slot: gl.tensor, scale: gl.tensor) -> gl.tensor:
    """Leave q as sums of e4m3 numbers in shared memory; the scale of each row's logits.

    An e4m3 number has four significant bits. What is left of a number when the nearest one is taken
    away has four less, or eight in all with its sign, so that two make up a bfloat16 exactly, as
    long as they are not below 2^-18 of the row's largest.
    """
    q_tiles, parts = rows[:2]
    PARTS: gl.constexpr = parts.shape[0] // q_tiles.shape[0]
    WIDTH: gl.constexpr = q_tiles.shape[3]
    WIDE: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    q = q_tiles.index(slot).reshape([HALF, WIDTH]).load(WIDE).to(gl.float32)
    largest = gl.maximum(gl.max(gl.abs(q), 1), 1e-30)
    up = gl.exp2(gl.floor(gl.log2(256.0 / largest)))
    q = q * up[:, None]
    for part in gl.static_range(PARTS):
        small = q.to(gl.float8e4nv)
        parts.index(slot * PARTS + part).reshape([HALF, WIDTH]).store(small)
        q -= small.to(gl.float32)
    fence_async_shared()
    return scale / up


@gluon_function
def _walk(
    rows: gl.tensor, slot: gl.tensor, weights: gl.tensor, sums: gl.tensor, extra: gl.tensor,
    highest: gl.tensor, total: gl.tensor,
    ring: gl.tensor, j: gl.tensor, last: gl.tensor, steps: gl.tensor,
    scale: gl.tensor, look: gl.tensor,
    HAS_CAP: gl.constexpr, HAS_WINDOW: gl.constexpr, MASKED: gl.constexpr,
    E4M3: gl.constexpr,
) -> tuple[gl.tensor, ...]:  # fmt: skip
    """Take so many more tiles, downwards: (weights, sums, extra, highest, total, j, last).

    Each step is the softmax of tile j while the values of tile j - 1 are multiplied. The values of
    tile j - 1 have landed; those of tile j have at the end of the step. A row sees the columns of
    the tile before the first step up to `last`.
    """
    k_tiles, _, _, k_empty, v_tiles, v_tails, v_full, v_empty = ring
    DEPTH: gl.constexpr = v_tiles.shape[0]
    nothing = gl.num_programs(1) - 1  # 0, which the compiler does not know
    for _ in range(steps):
        last += k_tiles.shape[1]
        logits = _multiply_keys(rows, slot + j * nothing, ring, j, there=True)
        sums, extra = _multiply_values(weights, sums, extra, ring, j - 1)
        logits, sums, extra = _wait_for_logits(logits, sums, extra, ring)
        mbarrier.arrive(k_empty.index(j % k_tiles.shape[0]), count=1)
        weights, highest, total, rescale = _soften(
            logits, highest, total, last, scale, look, HAS_CAP, HAS_WINDOW, MASKED, E4M3
        )
        mbarrier.wait(v_full.index(j % DEPTH), j // DEPTH & 1)
        sums, extra = _wait(sums, extra, ring)
        mbarrier.arrive(v_empty.index((j - 1) % DEPTH), count=1)
        sums = sums * gl.convert_layout(rescale, gl.SliceLayout(1, sums.type.layout))[:, None]
        if v_tails.shape[3] < v_tiles.shape[3]:
            rescale = gl.convert_layout(rescale, gl.SliceLayout(1, extra.type.layout))
            extra = extra * rescale[:, None]
        j += 1
    return weights, sums, extra, highest, total, j, last


@gluon_function
def _attend_item(
    logits: gl.tensor, highest: gl.tensor, total: gl.tensor,
    rows: gl.tensor, slot: gl.tensor, ring: gl.tensor,
    j: gl.tensor, item: gl.tensor, scale: gl.tensor, look: gl.tensor,
    PACK: gl.constexpr, TOKENS: gl.constexpr, HAS_CAP: gl.constexpr, HAS_WINDOW: gl.constexpr,
    SPLIT: gl.constexpr, GROUP_ID: gl.constexpr,
    E4M3: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor, gl.tensor, gl.tensor, gl.tensor, gl.tensor]:  # fmt: skip
    """An item from its first logits to its last weights: (weights, sums, extra, highest, .., j)."""
    k_tiles, _, _, _, v_tiles, v_tails, v_full, _ = ring
    tokens, position, piece, pieces = item[2], item[3], item[7], item[8]
    DEPTH: gl.constexpr = v_tiles.shape[0]
    TILE: gl.constexpr = k_tiles.shape[1]
    WIDTH: gl.constexpr = v_tiles.shape[3]
    TAIL: gl.constexpr = v_tails.shape[3]
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    EXTRA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TAIL, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, logits.type.layout)
    begin, end, whole_begin, whole_end = find_span(
        position, tokens, piece, pieces, look[1], TILE, HAS_WINDOW, SPLIT
    )
    token = GROUP_ID * (TOKENS // GROUPS) + gl.arange(0, HALF, ROW) // PACK
    last = position + token - (end - 1) * TILE
    weights, highest, total, _ = _soften(
        logits, highest, total, last, scale, look, HAS_CAP, HAS_WINDOW, MASKED=True, E4M3=E4M3
    )
    sums = gl.full([HALF, WIDTH], 0.0, gl.float32, SUMS)
    extra = total
    if TAIL < WIDTH:
        extra = gl.full([HALF, TAIL], 0.0, gl.float32, EXTRA)
    else:
        extra = gl.full([HALF], 0.0, gl.float32, ROW)
    mbarrier.wait(v_full.index(j % DEPTH), j // DEPTH & 1)
    j += 1
    weights, sums, extra, highest, total, j, last = _walk(
        rows, slot, weights, sums, extra, highest, total, ring, j, last, end - 1 - whole_end,
        scale, look, HAS_CAP, HAS_WINDOW, MASKED=True, E4M3=E4M3,
    )  # fmt: skip
    weights, sums, extra, highest, total, j, last = _walk(
        rows, slot, weights, sums, extra, highest, total, ring, j, last, whole_end - whole_begin,
        scale, look, HAS_CAP, HAS_WINDOW, MASKED=False, E4M3=E4M3,
    )  # fmt: skip
    if HAS_WINDOW:
        weights, sums, extra, highest, total, j, last = _walk(
            rows, slot, weights, sums, extra, highest, total, ring, j, last, whole_begin - begin,
            scale, look, HAS_CAP, HAS_WINDOW, MASKED=True, E4M3=E4M3,
        )  # fmt: skip
    return weights, sums, extra, highest, total, j


@gluon_function
def _start_rows(
    sinks: gl.tensor, item: gl.tensor, ROW: gl.constexpr, PACK: gl.constexpr,
    HAS_SINKS: gl.constexpr, SPLIT: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor]:  # fmt: skip
    """(highest logits, totals) before the first key: a sink is one more, in the first piece."""
    part, piece = item[6], item[7]
    highest = gl.full([HALF], -1e30, gl.float32, ROW)
    total = gl.full([HALF], 0.0, gl.float32, ROW)
    if HAS_SINKS:
        sink = gl.load(sinks + part * PACK + gl.arange(0, HALF, ROW) % PACK)
        sink = sink.to(gl.float32) * LOG2E
        if SPLIT:
            highest = gl.where(piece == 0, sink, highest)
            total += gl.where(piece == 0, 1.0, 0.0)
        else:
            highest = sink
            total += 1.0
    return highest, total


@gluon_function
def _consume_ahead(
    given: gl.tensor, rows: gl.tensor, ring: gl.tensor,
    SLICES: gl.constexpr, PACK: gl.constexpr, TOKENS: gl.constexpr,
    HEAD_DIM: gl.constexpr, TOKEN_STRIDE: gl.constexpr, HEAD_STRIDE: gl.constexpr,
    HAS_CAP: gl.constexpr, HAS_WINDOW: gl.constexpr, HAS_SINKS: gl.constexpr,
    PLANNED: gl.constexpr, GROUP_ID: gl.constexpr,
) -> None:  # fmt: skip
    """A group's rows of every item of this program, the next item's begun before the last ends."""
    query_start_loc, seq_lens, work = given[2:5]
    sinks, scale, soft_cap, window = given[6:10]
    q_tiles, _, q_full, q_empty = rows
    k_tiles, _, _, k_empty, v_tiles, _, _, v_empty = ring
    look = (soft_cap, window)
    BUFFERS: gl.constexpr = q_tiles.shape[0] // GROUPS
    K_DEPTH: gl.constexpr = k_tiles.shape[0]
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, k_tiles.shape[1], 16])
    ROW: gl.constexpr = gl.SliceLayout(1, LOGITS)
    tiles, pieces = count_tiles(
        query_start_loc, seq_lens, work, window, SLICES, TOKENS, k_tiles.shape[1],
        HAS_WINDOW, PLANNED, SPLIT=False,
    )  # fmt: skip
    items = count_items(tiles * SLICES)
    j = tiles * 0
    mbarrier.wait(q_full.index(0), 0, pred=items > 0)
    logits = _multiply_keys(rows, j + GROUP_ID, ring, j, items > 0)
    logits = warpgroup_mma_wait(0, deps=[logits])
    mbarrier.arrive(k_empty.index(0), count=1, pred=items > 0)
    item = read_item(
        j, items, tiles, pieces, query_start_loc, seq_lens, work, SLICES, TOKENS, PLANNED
    )
    for n in range(items):
        ahead = read_item(
            n + 1, items, tiles, pieces, query_start_loc, seq_lens, work, SLICES, TOKENS, PLANNED
        )
        slot = n % BUFFERS * GROUPS + GROUP_ID
        highest, total = _start_rows(sinks, item, ROW, PACK, HAS_SINKS, SPLIT=False)
        weights, sums, extra, highest, total, j = _attend_item(
            logits, highest, total, rows, slot, ring, j, item, scale, look,
            PACK, TOKENS, HAS_CAP, HAS_WINDOW, SPLIT=False, GROUP_ID=GROUP_ID,
            E4M3=False,
        )  # fmt: skip
        m, more = n + 1, n + 1 < items
        mbarrier.wait(q_full.index(m % BUFFERS), m // BUFFERS & 1, pred=more)
        logits = _multiply_keys(rows, m % BUFFERS * GROUPS + GROUP_ID, ring, j, more)
        sums, extra = _multiply_values(weights, sums, extra, ring, j - 1)
        logits, sums, extra = _wait_for_logits(logits, sums, extra, ring)
        sums, extra = _wait(sums, extra, ring)
        mbarrier.arrive(k_empty.index(j % K_DEPTH), count=1, pred=more)
        mbarrier.arrive(v_empty.index((j - 1) % v_tiles.shape[0]), count=1)
        finish(
            sums, extra, highest, total, rows, slot, ring, given, item, 1.0,
            PACK, TOKENS, HEAD_DIM, TOKEN_STRIDE, HEAD_STRIDE, SPLIT=False,
            GROUP_ID=GROUP_ID,
        )  # fmt: skip
        mbarrier.arrive(q_empty.index(n % BUFFERS), count=1)
        item = ahead


@gluon_function
def _take(
    n: gl.tensor, j: gl.tensor, item: gl.tensor, given: gl.tensor, rows: gl.tensor,
    ring: gl.tensor, look: gl.tensor,
    PACK: gl.constexpr, GROUP: gl.constexpr, TOKENS: gl.constexpr,
    HEAD_DIM: gl.constexpr, TOKEN_STRIDE: gl.constexpr, HEAD_STRIDE: gl.constexpr,
    HAS_CAP: gl.constexpr, HAS_WINDOW: gl.constexpr, HAS_SINKS: gl.constexpr,
    K_SCALE: gl.constexpr, V_SCALE: gl.constexpr,
    SPLIT: gl.constexpr, GROUP_ID: gl.constexpr,
) -> gl.tensor:  # fmt: skip
    """One item or piece from its first product to its store; the next tile's number."""
    sinks, scale, _, _, k_scale, v_scale = given[6:]
    q_tiles, _, q_full, _ = rows
    k_tiles, _, _, k_empty, v_tiles, _, _, v_empty = ring
    E4M3: gl.constexpr = k_tiles.dtype != q_tiles.dtype
    STEP: gl.constexpr = 256 // k_tiles.dtype.primitive_bitwidth
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, k_tiles.shape[1], STEP])
    ROW: gl.constexpr = gl.SliceLayout(1, LOGITS)
    kv_head = item[6] * PACK // GROUP
    slot = n * 0 + GROUP_ID
    by = scale * 0 + 1.0
    if V_SCALE >= 0:
        by = gl.load(v_scale + kv_head * V_SCALE)
    if K_SCALE >= 0:
        scale *= gl.load(k_scale + kv_head * K_SCALE)
    mbarrier.wait(q_full.index(0), n & 1)
    if E4M3:
        scale = gl.convert_layout(_divide_rows(rows, slot, scale), ROW)
    logits = _multiply_keys(rows, slot, ring, j, there=True)
    logits = warpgroup_mma_wait(0, deps=[logits])
    mbarrier.arrive(k_empty.index(j % k_tiles.shape[0]), count=1)
    highest, total = _start_rows(sinks, item, ROW, PACK, HAS_SINKS, SPLIT)
    weights, sums, extra, highest, total, j = _attend_item(
        logits, highest, total, rows, slot, ring, j, item, scale, look,
        PACK, TOKENS, HAS_CAP, HAS_WINDOW, SPLIT, GROUP_ID, E4M3,
    )  # fmt: skip
    sums, extra = _multiply_values(weights, sums, extra, ring, j - 1)
    sums, extra = _wait(sums, extra, ring)
    mbarrier.arrive(v_empty.index((j - 1) % v_tiles.shape[0]), count=1)
    finish(
        sums, extra, highest, total, rows, slot, ring, given, item, by,
        PACK, TOKENS, HEAD_DIM, TOKEN_STRIDE, HEAD_STRIDE, SPLIT, GROUP_ID,
    )  # fmt: skip
    return j


@gluon_function
def _consume_each(
    given: gl.tensor, rows: gl.tensor, ring: gl.tensor,
    SLICES: gl.constexpr, PACK: gl.constexpr, GROUP: gl.constexpr, TOKENS: gl.constexpr,
    HEAD_DIM: gl.constexpr, TOKEN_STRIDE: gl.constexpr, HEAD_STRIDE: gl.constexpr,
    HAS_CAP: gl.constexpr, HAS_WINDOW: gl.constexpr, HAS_SINKS: gl.constexpr,
    K_SCALE: gl.constexpr, V_SCALE: gl.constexpr,
    PLANNED: gl.constexpr, SPLIT: gl.constexpr, GROUP_ID: gl.constexpr,
) -> None:  # fmt: skip
    """A group's rows of every item of this program, one item after the other.

    If SPLIT, where items are few and may be pieces, groups whose rows an item does not have pass it
    by, and leave the matrix unit to the others.
    """
    query_start_loc, seq_lens, work = given[2:5]
    soft_cap, window = given[8:10]
    q_full, q_empty = rows[2:]
    look = (soft_cap, window)
    TILE: gl.constexpr = ring[0].shape[1]
    tiles, pieces = count_tiles(
        query_start_loc, seq_lens, work, window, SLICES, TOKENS, TILE, HAS_WINDOW, PLANNED, SPLIT
    )
    items = count_items(tiles * SLICES)
    j = tiles * 0
    ahead = given  # until one is read
    if SPLIT and PLANNED:
        ahead = read_item(
            j, items, tiles, pieces, query_start_loc, seq_lens, work, SLICES, TOKENS, PLANNED
        )
    for n in range(items):
        if SPLIT and PLANNED:
            item = ahead
            ahead = read_item(
                n + 1, items, tiles, pieces, query_start_loc, seq_lens, work,
                SLICES, TOKENS, PLANNED,
            )  # fmt: skip
        else:
            item = read_item(
                n, items, tiles, pieces, query_start_loc, seq_lens, work, SLICES, TOKENS, PLANNED
            )
        if SPLIT:
            if item[2] > GROUP_ID * (TOKENS // GROUPS):
                j = _take(
                    n, j, item, given, rows, ring, look,
                    PACK, GROUP, TOKENS, HEAD_DIM, TOKEN_STRIDE, HEAD_STRIDE,
                    HAS_CAP, HAS_WINDOW, HAS_SINKS, K_SCALE, V_SCALE, SPLIT, GROUP_ID,
                )  # fmt: skip
            else:
                span = find_span(
                    item[3], item[2], item[7], item[8], window, TILE, HAS_WINDOW, SPLIT
                )
                mbarrier.wait(q_full.index(0), n & 1)
                j = _pass_by(ring, j, span[1] - span[0])
        else:
            j = _take(
                n, j, item, given, rows, ring, look,
                PACK, GROUP, TOKENS, HEAD_DIM, TOKEN_STRIDE, HEAD_STRIDE,
                HAS_CAP, HAS_WINDOW, HAS_SINKS, K_SCALE, V_SCALE, SPLIT, GROUP_ID,
            )  # fmt: skip
        mbarrier.arrive(q_empty.index(0), count=1)
    if SPLIT:
        merge_items(
            given, items, tiles, pieces, SLICES, PACK, TOKENS, HEAD_DIM, TOKEN_STRIDE, HEAD_STRIDE,
            PLANNED, GROUP_ID,
        )  # fmt: skip


@gluon_function
def _pass_by(ring: gl.tensor, j: gl.tensor, steps: gl.tensor) -> gl.tensor:
    """Let so many tiles go unread; the next one's number."""
    k_tiles, _, k_full, k_empty, v_tiles, _, v_full, v_empty = ring
    for _ in range(steps):
        k_at, v_at = j % k_tiles.shape[0], j % v_tiles.shape[0]
        mbarrier.wait(k_full.index(k_at), j // k_tiles.shape[0] & 1)
        mbarrier.arrive(k_empty.index(k_at), count=1)
        mbarrier.wait(v_full.index(v_at), j // v_tiles.shape[0] & 1)
        mbarrier.arrive(v_empty.index(v_at), count=1)
        j += 1
    return j


@gluon_function
def consume(
    given: gl.tensor, rows: gl.tensor, ring: gl.tensor,
    SLICES: gl.constexpr, PACK: gl.constexpr, GROUP: gl.constexpr, TOKENS: gl.constexpr,
    HEAD_DIM: gl.constexpr, TOKEN_STRIDE: gl.constexpr, HEAD_STRIDE: gl.constexpr,
    HAS_CAP: gl.constexpr, HAS_WINDOW: gl.constexpr, HAS_SINKS: gl.constexpr,
    K_SCALE: gl.constexpr, V_SCALE: gl.constexpr,
    PLANNED: gl.constexpr, SPLIT: gl.constexpr, GROUP_ID: gl.constexpr,
) -> None:  # fmt: skip
    """A group's rows of every item of this program, in order."""
    if rows[0].shape[0] > GROUPS:
        _consume_ahead(
            given, rows, ring, SLICES, PACK, TOKENS, HEAD_DIM, TOKEN_STRIDE, HEAD_STRIDE,
            HAS_CAP, HAS_WINDOW, HAS_SINKS, PLANNED, GROUP_ID,
        )  # fmt: skip
    else:
        _consume_each(
            given, rows, ring, SLICES, PACK, GROUP, TOKENS, HEAD_DIM, TOKEN_STRIDE, HEAD_STRIDE,
            HAS_CAP, HAS_WINDOW, HAS_SINKS, K_SCALE, V_SCALE, PLANNED, SPLIT, GROUP_ID,
        )  # fmt: skip
