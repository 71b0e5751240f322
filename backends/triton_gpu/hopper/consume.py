"""The warps of Hopper's prefill that multiply: groups of four, 64 rows of an item each.

A group keeps the matrix unit busy while it computes exponentials: the product q.k of the next tile
is issued before the product p.v of this one, then waited for alone, and the softmax of the next
tile runs while p.v does. p stays in registers. Where the rows of two items fit in shared memory, at
the end of an item the next item's first product is issued too, so that the item's last steps
(dividing, rounding, storing) hide behind it. While one group computes, the others' products have
the matrix unit. Where that gains (`Shape.turns`), groups take turns to issue products, as in
FlashAttention-3, so that they do not all compute at the same time.

A head_dim that is no power of two lies in two parts, 96 as 64 and 32: q.k is the sum of two
products, and p.v has a result for each part (`extra` is the smaller one's).

Of an e4m3 cache the keys are multiplied as they are stored, which goes at twice the speed, with q
as a sum of two e4m3 numbers, which are exactly a bfloat16 (`_divide_rows`). Each row of q is scaled
by a power of two first. The values come widened (`widen`).

A soft cap is tanh(x) = 2 s - 1 with s = 1 / (exp(-2x) + 1), and the softmax takes 2 s, since all of
a row's logits may be raised alike. Exponentials and reciprocals are what a multiprocessor computes
fewest of, and what a capped step waits for: four numbers share one reciprocal (`_sigmoid`), unless
results must not depend on neighbours. The absolute error is small, not the relative one near 0 as
in `soft_cap.tanh`, which takes more instructions; so caps above `prefill.MOST_CAP` are not served.

Four things here are as they are for the assembler's sake:
- The wait for the next tile's values stands between the exponentials and the wait for p.v, because
  it is a branch: without one the exponentials are moved behind the wait, and nothing overlaps.
- No branch stands around a product, because then it waits for every single instruction: an item
  that is not there is multiplied all the same.
- Weights are carried from step to step as they are, or where registers are short (`Shape.packed`)
  rounded and packed by hand. Rounded alone they would be halves of registers, which takes two
  instructions for each pair instead of one.
- The address of q is worked out in every step (`nothing`). Otherwise it is spilled, and the store
  may end up in a loop that is not entered, so that the reload reads something else.
`tests/backends/compile_offline.py` checks the first, the second and the last.
"""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from backends.triton_gpu.hopper.items import (
    HALF,
    count_work,
    find_heads,
    find_rows,
    find_span,
    gluon_function,
    read_item,
)
from backends.triton_gpu.hopper.merge import merge_items
from backends.triton_gpu.hopper.softmax import add_up, add_weights, in_columns, start_totals
from backends.triton_gpu.hopper.store import State, finish
from backends.triton_gpu.shared.soft_cap import LOG2E

QUADS = gl.constexpr(
    "{.reg .f32 p, q, r;"
    + "".join(
        f"mul.ftz.f32 p, ${8 + i}, ${8 + j}; mul.ftz.f32 q, ${8 + k}, ${8 + m};"
        "mul.ftz.f32 r, p, q; rcp.approx.ftz.f32 r, r;"
        "mul.ftz.f32 q, r, q; mul.ftz.f32 p, r, p;"
        f"mul.ftz.f32 ${i}, q, ${8 + j}; mul.ftz.f32 ${j}, q, ${8 + i};"
        f"mul.ftz.f32 ${k}, p, ${8 + m}; mul.ftz.f32 ${m}, p, ${8 + k};"
        for i, j, k, m in ((0, 1, 4, 5), (2, 3, 6, 7))  # of one row each, as a thread holds logits
    )
    + "}"
)
"""1 / x of eight numbers, four of them by one reciprocal of their product."""
EIGHT = gl.constexpr(",".join(["=&f"] * 8 + ["f"] * 8))


@gluon_function
def _sigmoid(x: gl.tensor, ALIKE: gl.constexpr) -> gl.tensor:
    """1 / (2^x + 1); ALIKE: each number is rounded as if it were alone."""
    if ALIKE:
        return gl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [gl.exp2(x) + 1], dtype=gl.float32,
            is_pure=True, pack=1,
        )  # fmt: skip
    x = gl.inline_asm_elementwise(
        "min.NaN.ftz.f32 $0, $1, 0f41F00000;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )  # 30, so that a product of four is finite
    return gl.inline_asm_elementwise(
        QUADS, EIGHT, [gl.exp2(x) + 1], dtype=gl.float32, is_pure=True, pack=8
    )


@gluon_function
def _mask(
    logits: gl.tensor, last: gl.tensor, other: gl.constexpr, window: gl.tensor, FORM: gl.constexpr
) -> gl.tensor:  # fmt: skip
    """The logits of the columns that a row sees, up to its `last`; `other` for the rest.

    A thread compares numbers that the compiler knows with one limit for each place of eight.
    """
    EIGHTS: gl.constexpr = in_columns(logits, 8).type.layout
    PLACES: gl.constexpr = gl.SliceLayout(1, EIGHTS)
    place = gl.arange(0, 8, gl.SliceLayout(0, PLACES))[None, :]
    last = gl.convert_layout(last, gl.SliceLayout(1, PLACES))[:, None] - place
    eight = gl.arange(0, logits.shape[1] // 8, gl.SliceLayout(0, gl.SliceLayout(2, EIGHTS)))
    visible = 8 * eight[None, :, None] <= last[:, None, :]
    if FORM.has_window:  # by one comparison, in which columns after the last are far before it
        before = last[:, None, :] - 8 * eight[None, :, None]
        visible = before.to(gl.uint32) < window.to(gl.uint32)
    kept = gl.where(visible, in_columns(logits, 8), other).reshape(logits.shape)
    return gl.convert_layout(kept, logits.type.layout)


@gluon_function
def _soften(
    logits: gl.tensor, highest: gl.tensor, total: gl.tensor, last: gl.tensor, scale: gl.tensor,
    given: gl.tensor, FORM: gl.constexpr, MASKED: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor, gl.tensor, gl.tensor]:  # fmt: skip
    """(weights, highest logits in base 2, totals, what earlier sums are multiplied by).

    A row sees the columns up to its `last`; over an e4m3 cache it has a `scale` too.
    """
    factor = scale * LOG2E
    if FORM.has_cap:
        by = scale / given.soft_cap * (-2 * LOG2E)
        if FORM.e4m3:
            by = by[:, None]
        logits = logits * by
        if MASKED and not FORM.alike:  # a masked one may be NaN, and four share one reciprocal
            logits = _mask(logits, last, 0.0, given.window, FORM)
        logits = _sigmoid(logits, FORM.alike)
        factor = given.soft_cap * (2 * LOG2E)
    if MASKED:
        logits = _mask(logits, last, float("-inf"), given.window, FORM)
    return add_weights(logits, highest, total, factor)


@gluon_function
def _multiply_keys(
    rows: gl.tensor, slot: gl.tensor, k: gl.tensor, j: gl.tensor, there: gl.tensor
) -> gl.tensor:
    """Issue the product of the rows with the j-th tile of keys, once it is there; no wait for it.

    Unless it is `there` to come: then with what the memory holds.
    """
    DEPTH: gl.constexpr = k.tiles.shape[0]
    TILE: gl.constexpr = k.tiles.shape[1]
    PARTS: gl.constexpr = rows.tails.shape[0] // rows.tiles.shape[0]
    TAIL: gl.constexpr = rows.tails.shape[3] if rows.tails.shape[3] < rows.tiles.shape[3] else 0
    STEP: gl.constexpr = 256 // k.tiles.dtype.primitive_bitwidth
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, STEP])
    mbarrier.wait(k.full.index(j % DEPTH), j // DEPTH & 1, pred=there)
    keys = k.tiles.index(j % DEPTH).reshape([TILE, k.tiles.shape[3]]).permute((1, 0))
    blank = gl.full([HALF, TILE], 0.0, gl.float32, LOGITS)
    if k.tiles.dtype != rows.tiles.dtype:
        logits = blank
        for part in gl.static_range(PARTS):
            q = rows.tails.index(slot * PARTS + part).reshape([HALF, rows.tails.shape[3]])
            logits = warpgroup_mma(q, keys, logits, use_acc=part > 0, is_async=True)
    else:
        q = rows.tiles.index(slot).reshape([HALF, rows.tiles.shape[3]])
        logits = warpgroup_mma(q, keys, blank, use_acc=False, is_async=True)
        if TAIL > 0:
            TAILS: gl.constexpr = k.tails.shape[0]
            if TAILS < DEPTH:
                mbarrier.wait(k.tails_full.index(j % TAILS), j // TAILS & 1, pred=there)
            q = rows.tails.index(slot).reshape([HALF, TAIL])
            keys = k.tails.index(j % TAILS).reshape([TILE, TAIL]).permute((1, 0))
            logits = warpgroup_mma(q, keys, logits, is_async=True)
    return logits


@gluon_function
def _pack(weights: gl.tensor, v: gl.tensor, FORM: gl.constexpr) -> gl.tensor:
    """Weights as they are carried: as they are, or rounded, two neighbours in 32 bits."""
    packed = weights
    if FORM.shape.packed:
        NAME: gl.constexpr = "bf16x2" if v.tiles.dtype == gl.bfloat16 else "f16x2"
        low, high = weights.reshape([weights.shape[0], weights.shape[1] // 2, 2]).split()
        packed = gl.inline_asm_elementwise(
            "cvt.rn." + NAME + ".f32 $0, $2, $1;", "=r,f,f", [low, high],
            dtype=gl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    return packed


@gluon_function
def _unpack(packed: gl.tensor, dtype: gl.constexpr) -> gl.tensor:
    """Weights carried by `_pack`, rounded."""
    weights = packed
    if packed.dtype == gl.int32:
        low = packed.to(gl.int16).to(dtype, bitcast=True)
        high = (packed >> 16).to(gl.int16).to(dtype, bitcast=True)
        weights = gl.join(low, high).reshape([packed.shape[0], 2 * packed.shape[1]])
    else:
        weights = packed.to(dtype)
    return weights


@gluon_function
def _multiply_values(state: gl.tensor, v: gl.tensor, j: gl.tensor) -> tuple[gl.tensor, gl.tensor]:
    """Issue the product of the weights, rounded, with the j-th tile of values; no wait for it."""
    TILE: gl.constexpr = v.tiles.shape[1]
    TAIL: gl.constexpr = v.tails.shape[3]
    sums, extra, at = state.sums, state.extra, j % v.tiles.shape[0]
    LEFT: gl.constexpr = gl.DotOperandLayout(0, sums.type.layout, 2)
    p = gl.convert_layout(_unpack(state.weights, v.tiles.dtype), LEFT)
    tile = v.tiles.index(at).reshape([TILE, v.tiles.shape[3]])
    sums = warpgroup_mma(p, tile, sums, is_async=True)
    if v.tiles.shape[3] > TAIL:
        p = gl.convert_layout(p, gl.DotOperandLayout(0, extra.type.layout, 2))
        extra = warpgroup_mma(p, v.tails.index(at).reshape([TILE, TAIL]), extra, is_async=True)
    return sums, extra


@gluon_function
def _wait(sums: gl.tensor, extra: gl.tensor, v: gl.tensor) -> tuple[gl.tensor, gl.tensor]:
    """Until all products are done."""
    if v.tails.shape[3] < v.tiles.shape[3]:
        sums, extra = warpgroup_mma_wait(0, deps=[sums, extra])
    else:
        sums = warpgroup_mma_wait(0, deps=[sums])
    return sums, extra


@gluon_function
def _wait_for_logits(
    logits: gl.tensor, sums: gl.tensor, extra: gl.tensor, v: gl.tensor
) -> tuple[gl.tensor, gl.tensor, gl.tensor]:
    """Until q.k is done, p.v being issued after it."""
    if v.tails.shape[3] < v.tiles.shape[3]:
        logits, sums, extra = warpgroup_mma_wait(2, deps=[logits, sums, extra])
    else:
        logits, sums = warpgroup_mma_wait(1, deps=[logits, sums])
    return logits, sums, extra


@gluon_function
def _await_turn(rings: gl.tensor, j: gl.tensor, FORM: gl.constexpr, GROUP_ID: gl.constexpr) -> None:
    """Until the group before this one has issued its products of step j, group 0 of step j - 1."""
    if FORM.shape.turns:
        FIRST: gl.constexpr = 1 if GROUP_ID == 0 else 0
        mbarrier.wait(rings.turns.index(GROUP_ID), (j & 1) ^ FIRST)


@gluon_function
def _end_turn(rings: gl.tensor, FORM: gl.constexpr, GROUP_ID: gl.constexpr) -> None:
    """Let the next group issue its products."""
    if FORM.shape.turns:
        mbarrier.arrive(rings.turns.index((GROUP_ID + 1) % FORM.shape.groups), count=1)


@gluon_function
def _divide_rows(rows: gl.tensor, slot: gl.tensor, scale: gl.tensor) -> gl.tensor:
    """Leave q as sums of e4m3 numbers in shared memory; the scale of each row's logits.

    An e4m3 number has four significant bits. What is left of a number when the nearest one is taken
    away has four less, or eight in all with its sign, so that two make up a bfloat16 exactly, as
    long as they are not below 2^-18 of the row's largest.
    """
    PARTS: gl.constexpr = rows.tails.shape[0] // rows.tiles.shape[0]
    WIDTH: gl.constexpr = rows.tiles.shape[3]
    WIDE: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    q = rows.tiles.index(slot).reshape([HALF, WIDTH]).load(WIDE).to(gl.float32)
    largest = gl.maximum(gl.max(gl.abs(q), 1), 1e-30)
    up = gl.exp2(gl.floor(gl.log2(256.0 / largest)))
    q = q * up[:, None]
    for part in gl.static_range(PARTS):
        small = q.to(gl.float8e4nv)
        rows.tails.index(slot * PARTS + part).reshape([HALF, WIDTH]).store(small)
        q -= small.to(gl.float32)
    fence_async_shared()
    return scale / up


@gluon_function
def _walk(
    state: gl.tensor, rows: gl.tensor, slot: gl.tensor, rings: gl.tensor, j: gl.tensor,
    last: gl.tensor, steps: gl.tensor, scale: gl.tensor, given: gl.tensor,
    FORM: gl.constexpr, GROUP_ID: gl.constexpr, MASKED: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor, gl.tensor]:  # fmt: skip
    """Take `steps` more tiles, downwards: (state, j, last).

    Each step is the softmax of tile j while the values of tile j - 1 are multiplied. The values of
    tile j - 1 have landed; those of tile j have at the end of the step. A row sees the columns of
    the tile before the first step up to `last`.
    """
    k, v = rings.k, rings.v
    DEPTH: gl.constexpr = v.tiles.shape[0]
    nothing = gl.num_programs(1) - 1  # 0, which the compiler does not know
    for _ in range(steps):
        last += k.tiles.shape[1]
        _await_turn(rings, j, FORM, GROUP_ID)
        logits = _multiply_keys(rows, slot + j * nothing, k, j, there=True)
        sums, extra = _multiply_values(state, v, j - 1)
        _end_turn(rings, FORM, GROUP_ID)
        logits, sums, extra = _wait_for_logits(logits, sums, extra, v)
        mbarrier.arrive(k.empty.index(j % k.tiles.shape[0]), count=1)
        weights, highest, total, rescale = _soften(
            logits, state.highest, state.total, last, scale, given, FORM, MASKED
        )
        mbarrier.wait(v.full.index(j % DEPTH), j // DEPTH & 1)
        sums, extra = _wait(sums, extra, v)
        mbarrier.arrive(v.empty.index((j - 1) % DEPTH), count=1)
        sums = sums * gl.convert_layout(rescale, gl.SliceLayout(1, sums.type.layout))[:, None]
        if v.tails.shape[3] < v.tiles.shape[3]:
            rescale = gl.convert_layout(rescale, gl.SliceLayout(1, extra.type.layout))
            extra = extra * rescale[:, None]
        state = State(_pack(weights, v, FORM), sums, extra, highest, total)
        j += 1
    return state, j, last


@gluon_function
def _attend_item(
    logits: gl.tensor, highest: gl.tensor, total: gl.tensor, rows: gl.tensor, slot: gl.tensor,
    rings: gl.tensor, j: gl.tensor, item: gl.tensor, scale: gl.tensor, given: gl.tensor,
    FORM: gl.constexpr, GROUP_ID: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor]:  # fmt: skip
    """An item from its first logits to its last weights: (state, j)."""
    v = rings.v
    DEPTH: gl.constexpr = v.tiles.shape[0]
    TILE: gl.constexpr = FORM.shape.tile
    WIDTH: gl.constexpr = v.tiles.shape[3]
    TAIL: gl.constexpr = v.tails.shape[3]
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    EXTRA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TAIL, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, logits.type.layout)
    begin, end, whole_begin, whole_end = find_span(item, given.window, FORM)
    token = GROUP_ID * (FORM.tokens // FORM.shape.groups) + gl.arange(0, HALF, ROW) // FORM.pack
    last = item.position + token - (end - 1) * TILE
    total = start_totals(total, logits, FORM.shape.columns)
    weights, highest, total, _ = _soften(
        logits, highest, total, last, scale, given, FORM, MASKED=True
    )
    sums = gl.full([HALF, WIDTH], 0.0, gl.float32, SUMS)
    extra = total
    if TAIL < WIDTH:
        extra = gl.full([HALF, TAIL], 0.0, gl.float32, EXTRA)
    else:
        extra = gl.full([HALF], 0.0, gl.float32, ROW)
    state = State(_pack(weights, v, FORM), sums, extra, highest, total)
    mbarrier.wait(v.full.index(j % DEPTH), j // DEPTH & 1)
    j += 1
    state, j, last = _walk(
        state, rows, slot, rings, j, last, end - 1 - whole_end, scale, given, FORM, GROUP_ID,
        MASKED=True,
    )  # fmt: skip
    state, j, last = _walk(
        state, rows, slot, rings, j, last, whole_end - whole_begin, scale, given, FORM, GROUP_ID,
        MASKED=False,
    )  # fmt: skip
    if FORM.has_window:
        state, j, last = _walk(
            state, rows, slot, rings, j, last, whole_begin - begin, scale, given, FORM, GROUP_ID,
            MASKED=True,
        )  # fmt: skip
    total = add_up(state.total, ROW)
    return State(state.weights, state.sums, state.extra, state.highest, total), j


@gluon_function
def _start_rows(
    given: gl.tensor, item: gl.tensor, ROW: gl.constexpr, FORM: gl.constexpr
) -> tuple[gl.tensor, gl.tensor]:
    """(highest logits, totals) before the first key: a sink is one more, in the first piece."""
    highest = gl.full([HALF], -1e30, gl.float32, ROW)
    total = gl.full([HALF], 0.0, gl.float32, ROW)
    if FORM.has_sinks:
        _, head, there = find_rows(gl.arange(0, HALF, ROW), item, FORM)
        sink = gl.load(given.sinks + head, mask=there, other=0.0)
        sink = sink.to(gl.float32) * LOG2E
        if FORM.has_cap:
            sink += given.soft_cap * LOG2E  # as all logits are
        if FORM.split:
            highest = gl.where(item.piece == 0, sink, highest)
            total += gl.where(item.piece == 0, 1.0, 0.0)
        else:
            highest = sink
            total += 1.0
    return highest, total


@gluon_function
def _consume_ahead(
    given: gl.tensor, rows: gl.tensor, rings: gl.tensor, FORM: gl.constexpr, GROUP_ID: gl.constexpr
) -> None:
    """A group's rows of every item of this program, the next item's begun before the last ends."""
    k, v = rings.k, rings.v
    BUFFERS: gl.constexpr = FORM.shape.buffers
    K_DEPTH: gl.constexpr = k.tiles.shape[0]
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, k.tiles.shape[1], 16])
    ROW: gl.constexpr = gl.SliceLayout(1, LOGITS)
    work = count_work(given, FORM)
    items, j = work.items, work.tiles * 0
    mbarrier.wait(rows.full.index(0), 0, pred=items > 0)
    _await_turn(rings, j, FORM, GROUP_ID)
    logits = _multiply_keys(rows, j + GROUP_ID, k, j, items > 0)
    _end_turn(rings, FORM, GROUP_ID)
    logits = warpgroup_mma_wait(0, deps=[logits])
    mbarrier.arrive(k.empty.index(0), count=1, pred=items > 0)
    item = read_item(j, work, given, FORM)
    for n in range(items):
        ahead = read_item(n + 1, work, given, FORM)
        slot = n % BUFFERS * FORM.shape.groups + GROUP_ID
        highest, total = _start_rows(given, item, ROW, FORM)
        state, j = _attend_item(
            logits, highest, total, rows, slot, rings, j, item, given.scale, given, FORM, GROUP_ID
        )
        m, more = n + 1, n + 1 < items
        mbarrier.wait(rows.full.index(m % BUFFERS), m // BUFFERS & 1, pred=more)
        _await_turn(rings, j, FORM, GROUP_ID)
        logits = _multiply_keys(rows, m % BUFFERS * FORM.shape.groups + GROUP_ID, k, j, more)
        sums, extra = _multiply_values(state, v, j - 1)
        _end_turn(rings, FORM, GROUP_ID)
        logits, sums, extra = _wait_for_logits(logits, sums, extra, v)
        sums, extra = _wait(sums, extra, v)
        mbarrier.arrive(k.empty.index(j % K_DEPTH), count=1, pred=more)
        mbarrier.arrive(v.empty.index((j - 1) % v.tiles.shape[0]), count=1)
        state = State(state.weights, sums, extra, state.highest, state.total)
        finish(state, rows, slot, v, given, item, 1.0, FORM, GROUP_ID)
        mbarrier.arrive(rows.empty.index(n % BUFFERS), count=1)
        item = ahead


@gluon_function
def _take(
    n: gl.tensor, j: gl.tensor, item: gl.tensor, given: gl.tensor, rows: gl.tensor,
    rings: gl.tensor, FORM: gl.constexpr, GROUP_ID: gl.constexpr,
) -> gl.tensor:  # fmt: skip
    """One item or piece from its first product to its store; the next tile's number."""
    k, v, scale = rings.k, rings.v, given.scale
    STEP: gl.constexpr = 256 // k.tiles.dtype.primitive_bitwidth
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, k.tiles.shape[1], STEP])
    ROW: gl.constexpr = gl.SliceLayout(1, LOGITS)
    kv_head, _ = find_heads(item, FORM)
    slot = n * 0 + GROUP_ID
    by = scale * 0 + 1.0
    if FORM.v_scale >= 0:
        by = gl.load(given.v_scale + kv_head * FORM.v_scale)
    if FORM.k_scale >= 0:
        scale *= gl.load(given.k_scale + kv_head * FORM.k_scale)
    mbarrier.wait(rows.full.index(0), n & 1)
    if FORM.e4m3:
        scale = gl.convert_layout(_divide_rows(rows, slot, scale), ROW)
    logits = _multiply_keys(rows, slot, k, j, there=True)
    logits = warpgroup_mma_wait(0, deps=[logits])
    mbarrier.arrive(k.empty.index(j % k.tiles.shape[0]), count=1)
    highest, total = _start_rows(given, item, ROW, FORM)
    state, j = _attend_item(
        logits, highest, total, rows, slot, rings, j, item, scale, given, FORM, GROUP_ID
    )
    if FORM.shape.direct:
        mbarrier.arrive(rows.empty.index(0), count=1)
    sums, extra = _multiply_values(state, v, j - 1)
    sums, extra = _wait(sums, extra, v)
    mbarrier.arrive(v.empty.index((j - 1) % v.tiles.shape[0]), count=1)
    state = State(state.weights, sums, extra, state.highest, state.total)
    finish(state, rows, slot, v, given, item, by, FORM, GROUP_ID)
    if not FORM.shape.direct:
        mbarrier.arrive(rows.empty.index(0), count=1)
    return j


@gluon_function
def _consume_each(
    given: gl.tensor, rows: gl.tensor, rings: gl.tensor, FORM: gl.constexpr, GROUP_ID: gl.constexpr
) -> None:
    """A group's rows of every item of this program, one item after the other.

    If items are split, few and maybe pieces, groups whose rows an item does not have pass it by,
    and leave the matrix unit to the others.
    """
    work = count_work(given, FORM)
    j = work.tiles * 0
    ahead = given  # until one is read
    if FORM.split and FORM.planned:
        ahead = read_item(j, work, given, FORM)
    for n in range(work.items):
        if FORM.split and FORM.planned:
            item = ahead
            ahead = read_item(n + 1, work, given, FORM)
        else:
            item = read_item(n, work, given, FORM)
        if FORM.split:
            if item.tokens > GROUP_ID * (FORM.tokens // FORM.shape.groups):
                j = _take(n, j, item, given, rows, rings, FORM, GROUP_ID)
            else:
                begin, end, _, _ = find_span(item, given.window, FORM)
                mbarrier.wait(rows.full.index(0), n & 1)
                j = _pass_by(rings, j, end - begin)
                mbarrier.arrive(rows.empty.index(0), count=1)
        else:
            j = _take(n, j, item, given, rows, rings, FORM, GROUP_ID)
    if FORM.split:
        merge_items(given, work, FORM, GROUP_ID)


@gluon_function
def _pass_by(rings: gl.tensor, j: gl.tensor, steps: gl.tensor) -> gl.tensor:
    """Skip `steps` tiles; the number of the next one."""
    k, v = rings.k, rings.v
    for _ in range(steps):
        k_at, v_at = j % k.tiles.shape[0], j % v.tiles.shape[0]
        mbarrier.wait(k.full.index(k_at), j // k.tiles.shape[0] & 1)
        mbarrier.arrive(k.empty.index(k_at), count=1)
        mbarrier.wait(v.full.index(v_at), j // v.tiles.shape[0] & 1)
        mbarrier.arrive(v.empty.index(v_at), count=1)
        j += 1
    return j


@gluon_function
def consume(
    given: gl.tensor, rows: gl.tensor, rings: gl.tensor, FORM: gl.constexpr, GROUP_ID: gl.constexpr
) -> None:
    """A group's rows of every item of this program, in order."""
    if FORM.shape.buffers > 1:
        _consume_ahead(given, rows, rings, FORM, GROUP_ID)
    else:
        _consume_each(given, rows, rings, FORM, GROUP_ID)
