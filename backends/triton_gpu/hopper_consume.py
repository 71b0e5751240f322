"""The warps of Hopper's prefill that multiply: two groups of four, 64 rows of an item each.

A group keeps the matrix unit busy while it computes exponentials: the product q.k of the next tile
is issued before the product p.v of this one, then waited for alone, and the softmax of the next
tile runs while p.v does. p stays in registers. At the end of an item the next item's first product
is issued too, so that the item's last steps (dividing, rounding, storing) hide behind it. While
one group computes, the other's products have the matrix unit.

Four things here are as they are for the assembler's sake:
- The wait for the next tile's values stands between the exponentials and the wait for p.v, because
  it is a branch: without one the exponentials are moved behind the wait, and nothing overlaps.
- No branch stands around a product, because then it waits for every single instruction: an item
  that is not there is multiplied all the same.
- Weights are carried from step to step unrounded. Rounded ones would be carried as halves of
  registers, which takes two instructions for each pair.
- The address of q is worked out in every step (`nothing`). Otherwise it is spilled, and the store
  may end up in a loop that is not entered: what is read then is not what was stored.
`tests/backends/compile_offline.py` checks the first, the second and the last.
"""

# ruff: noqa: N803, N806 - compile-time values are upper case, as everywhere in Triton

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from backends.triton_gpu.hopper_items import (
    HALF,
    count_items,
    count_tiles,
    find_span,
    gluon_function,
    read_item,
)
from backends.triton_gpu.prefill_order import RECORD
from backends.triton_gpu.soft_cap import LOG2E, cap_logits


@gluon_function
def _soften(
    logits: gl.tensor, highest: gl.tensor, total: gl.tensor, last: gl.tensor,
    scale: gl.tensor, soft_cap: gl.tensor, window: gl.tensor,
    HAS_CAP: gl.constexpr, HAS_WINDOW: gl.constexpr, MASKED: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor, gl.tensor, gl.tensor]:  # fmt: skip
    """(weights, highest logits in base 2, totals, what earlier sums are multiplied by).

    A row sees the columns up to its `last`.
    """
    factor = scale * LOG2E
    if HAS_CAP:
        logits = cap_logits(logits * scale, soft_cap)
        factor = LOG2E
    if MASKED:
        column = gl.arange(0, logits.shape[1], gl.SliceLayout(0, logits.type.layout))[None, :]
        seen = column <= last[:, None]
        if HAS_WINDOW:
            seen = seen & (column > last[:, None] - window)
        logits = gl.where(seen, logits, float("-inf"))
    now = gl.maximum(highest, gl.max(logits, 1) * factor)
    weights = gl.exp2(logits * factor - now[:, None])
    rescale = gl.exp2(highest - now)
    return weights, now, total * rescale + gl.sum(weights, 1), rescale


@gluon_function
def _multiply_keys(q: gl.tensor, ring: gl.tensor, j: gl.tensor, there: gl.tensor) -> gl.tensor:
    """Issue the product of the rows with the j-th tile of keys, once it is there; no wait for it.

    Unless it is `there` to come: then with what the memory holds.
    """
    k_tiles, k_full, _, _, _, _ = ring
    DEPTH: gl.constexpr = k_tiles.shape[0]
    TILE: gl.constexpr = k_tiles.shape[1]
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    mbarrier.wait(k_full.index(j % DEPTH), j // DEPTH & 1, pred=there)
    keys = k_tiles.index(j % DEPTH).reshape([TILE, k_tiles.shape[3]]).permute((1, 0))
    blank = gl.full([HALF, TILE], 0.0, gl.float32, LOGITS)
    return warpgroup_mma(q, keys, blank, use_acc=False, is_async=True)


@gluon_function
def _pack(weights: gl.tensor, dtype: gl.constexpr) -> gl.tensor:
    """Neighbours rounded and side by side in 32 bits, as the product takes them."""
    first, second = gl.split(weights.reshape([weights.shape[0], weights.shape[1] // 2, 2]))
    NAME: gl.constexpr = "bf16x2" if dtype == gl.bfloat16 else "f16x2"
    return gl.inline_asm_elementwise(
        "cvt.rn." + NAME + ".f32 $0, $2, $1;", "=r,r,r", [first, second],
        dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon_function
def _unpack(packed: gl.tensor, dtype: gl.constexpr) -> gl.tensor:
    """The weights that `_pack` has packed."""
    first, second = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [packed],
        dtype=(gl.int16, gl.int16), is_pure=True, pack=1,
    )  # fmt: skip
    pairs = gl.join(first.to(dtype, bitcast=True), second.to(dtype, bitcast=True))
    return pairs.reshape([packed.shape[0], packed.shape[1] * 2])


@gluon_function
def _multiply_values(
    weights: gl.tensor, sums: gl.tensor, ring: gl.tensor, j: gl.tensor
) -> gl.tensor:
    """Issue the product of the weights, rounded, with the j-th tile of values; no wait for it."""
    v_tiles = ring[3]
    TILE: gl.constexpr = v_tiles.shape[1]
    if weights.dtype == gl.int32:
        weights = _unpack(weights, v_tiles.dtype)
    p = gl.convert_layout(weights.to(v_tiles.dtype), gl.DotOperandLayout(0, sums.type.layout, 2))
    values = v_tiles.index(j % v_tiles.shape[0]).reshape([TILE, v_tiles.shape[3]])
    return warpgroup_mma(p, values, sums, is_async=True)


@gluon_function
def _begin(
    q_tiles: gl.tensor, q_full: gl.tensor, ring: gl.tensor, n: gl.tensor, j: gl.tensor,
    there: gl.tensor, GROUP_ID: gl.constexpr, GROUPS: gl.constexpr,
) -> gl.tensor:  # fmt: skip
    """Issue the n-th item's first product, of its rows and tile j; no wait for it."""
    BUFFERS: gl.constexpr = q_tiles.shape[0] // GROUPS
    mbarrier.wait(q_full.index(n % BUFFERS), n // BUFFERS & 1, pred=there)
    q = q_tiles.index(n % BUFFERS * GROUPS + GROUP_ID).reshape([HALF, q_tiles.shape[3]])
    return _multiply_keys(q, ring, j, there)


@gluon_function
def _walk(
    q_tiles: gl.tensor, slot: gl.tensor, weights: gl.tensor, sums: gl.tensor,
    highest: gl.tensor, total: gl.tensor,
    ring: gl.tensor, j: gl.tensor, last: gl.tensor, steps: gl.tensor,
    scale: gl.tensor, soft_cap: gl.tensor, window: gl.tensor,
    HAS_CAP: gl.constexpr, HAS_WINDOW: gl.constexpr, MASKED: gl.constexpr,
    ROUNDED: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor, gl.tensor, gl.tensor, gl.tensor, gl.tensor]:  # fmt: skip
    """Take so many more tiles, downwards: (weights, sums, highest, total, j, last).

    Each step is the softmax of tile j while the values of tile j - 1 are multiplied. The values of
    tile j - 1 have landed; those of tile j have at the end of the step. A row sees the columns of
    the tile before the first step up to `last`.
    """
    k_tiles, _, k_empty, v_tiles, v_full, v_empty = ring
    DEPTH: gl.constexpr = v_tiles.shape[0]
    nothing = gl.num_programs(1) - 1  # 0, which the compiler does not know
    for _ in range(steps):
        last += k_tiles.shape[1]
        q = q_tiles.index(slot + j * nothing).reshape([HALF, q_tiles.shape[3]])
        logits = _multiply_keys(q, ring, j, there=True)
        sums = _multiply_values(weights, sums, ring, j - 1)
        logits, sums = warpgroup_mma_wait(1, deps=[logits, sums])
        mbarrier.arrive(k_empty.index(j % k_tiles.shape[0]), count=1)
        weights, highest, total, rescale = _soften(
            logits, highest, total, last, scale, soft_cap, window, HAS_CAP, HAS_WINDOW, MASKED
        )
        if ROUNDED:
            weights = _pack(weights, v_tiles.dtype)
        mbarrier.wait(v_full.index(j % DEPTH), j // DEPTH & 1)
        sums = warpgroup_mma_wait(0, deps=[sums])
        mbarrier.arrive(v_empty.index((j - 1) % DEPTH), count=1)
        sums = sums * gl.convert_layout(rescale, gl.SliceLayout(1, sums.type.layout))[:, None]
        j += 1
    return weights, sums, highest, total, j, last


@gluon_function
def _store(
    sums: gl.tensor, total: gl.tensor, q: gl.tensor, out: gl.tensor,
    row: gl.tensor, tokens: gl.tensor, part: gl.tensor,
    PACK: gl.constexpr, TOKENS: gl.constexpr, HEAD_DIM: gl.constexpr,
    TOKEN_STRIDE: gl.constexpr, HEAD_STRIDE: gl.constexpr, GROUP_ID: gl.constexpr, GROUPS: gl.constexpr,
) -> None:  # fmt: skip
    """Divide, round and store, by way of the rows' own shared memory, 16 bytes at a time."""
    WIDTH: gl.constexpr = sums.shape[1]
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    share = gl.convert_layout(1.0 / total, gl.SliceLayout(1, sums.type.layout))
    q.store((sums * share[:, None]).to(out.dtype.element_ty))
    result = q.load(WIDE)
    fence_async_shared()
    r = gl.arange(0, HALF, gl.SliceLayout(1, WIDE))
    dim = gl.arange(0, WIDTH, gl.SliceLayout(0, WIDE))
    token = GROUP_ID * (TOKENS // GROUPS) + r // PACK
    to = (row + token).to(gl.int64) * TOKEN_STRIDE + (part * PACK + r % PACK) * HEAD_STRIDE
    mask = (token < tokens)[:, None] & (dim < HEAD_DIM)[None, :]
    gl.store(out + to[:, None] + dim[None, :], result, mask=mask)


@gluon_function
def _attend_item(
    logits: gl.tensor, highest: gl.tensor, total: gl.tensor,
    q_tiles: gl.tensor, slot: gl.tensor, ring: gl.tensor,
    j: gl.tensor, position: gl.tensor, tokens: gl.tensor, piece: gl.tensor, pieces: gl.tensor,
    scale: gl.tensor, soft_cap: gl.tensor, window: gl.tensor,
    PACK: gl.constexpr, TOKENS: gl.constexpr, HAS_CAP: gl.constexpr, HAS_WINDOW: gl.constexpr,
    SPLIT: gl.constexpr, GROUP_ID: gl.constexpr, GROUPS: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor, gl.tensor, gl.tensor, gl.tensor]:  # fmt: skip
    """An item from its first logits to its last weights: (weights, sums, highest, total, j)."""
    k_tiles, _, _, _, v_full, _ = ring
    DEPTH: gl.constexpr = v_full.shape[0] - 1
    TILE: gl.constexpr = k_tiles.shape[1]
    WIDTH: gl.constexpr = k_tiles.shape[3]
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, logits.type.layout)
    begin, end, whole_begin, whole_end = find_span(
        position, tokens, piece, pieces, window, TILE, HAS_WINDOW, SPLIT
    )
    token = GROUP_ID * (TOKENS // GROUPS) + gl.arange(0, HALF, ROW) // PACK
    last = position + token - (end - 1) * TILE
    weights, highest, total, _ = _soften(
        logits, highest, total, last, scale, soft_cap, window, HAS_CAP, HAS_WINDOW,
        MASKED=True,
    )  # fmt: skip
    ROUNDED: gl.constexpr = GROUPS > 2
    if ROUNDED:
        weights = _pack(weights, k_tiles.dtype)
    sums = gl.full([HALF, WIDTH], 0.0, gl.float32, SUMS)
    mbarrier.wait(v_full.index(j % DEPTH), j // DEPTH & 1)
    j += 1
    weights, sums, highest, total, j, last = _walk(
        q_tiles, slot, weights, sums, highest, total, ring, j, last, end - 1 - whole_end,
        scale, soft_cap, window, HAS_CAP, HAS_WINDOW, MASKED=True, ROUNDED=ROUNDED,
    )  # fmt: skip
    weights, sums, highest, total, j, last = _walk(
        q_tiles, slot, weights, sums, highest, total, ring, j, last, whole_end - whole_begin,
        scale, soft_cap, window, HAS_CAP, HAS_WINDOW, MASKED=False, ROUNDED=ROUNDED,
    )  # fmt: skip
    if HAS_WINDOW:
        weights, sums, highest, total, j, last = _walk(
            q_tiles, slot, weights, sums, highest, total, ring, j, last, whole_begin - begin,
            scale, soft_cap, window, HAS_CAP, HAS_WINDOW, MASKED=True, ROUNDED=ROUNDED,
        )  # fmt: skip
    return weights, sums, highest, total, j


@gluon_function
def _store_part(
    sums: gl.tensor, highest: gl.tensor, total: gl.tensor, partial: gl.tensor,
    item: gl.tensor, items: gl.tensor, tokens: gl.tensor,
    PACK: gl.constexpr, TOKENS: gl.constexpr, HEAD_DIM: gl.constexpr, GROUP_ID: gl.constexpr, GROUPS: gl.constexpr,
) -> None:  # fmt: skip
    """Divide and store for the merge: parts [items, GROUPS * HALF, HEAD_DIM], then log2 of totals."""
    ROW: gl.constexpr = gl.SliceLayout(1, sums.type.layout)
    share = gl.where(total > 0, 1.0 / total, 0.0)  # a row may see nothing of its piece
    share = gl.convert_layout(share, ROW)
    lse = gl.convert_layout(highest + gl.log2(total), ROW)
    r = gl.arange(0, HALF, ROW)
    dim = gl.arange(0, sums.shape[1], gl.SliceLayout(0, sums.type.layout))
    live = GROUP_ID * (TOKENS // GROUPS) + r // PACK < tokens
    row = item * (GROUPS * HALF) + GROUP_ID * HALF + r
    mask = live[:, None] & (dim < HEAD_DIM)[None, :]
    gl.store(partial + row[:, None] * HEAD_DIM + dim[None, :], sums * share[:, None], mask=mask)
    gl.store(partial + items * (GROUPS * HALF * HEAD_DIM) + row, lse, mask=live)


@gluon_function
def _record(
    records: gl.tensor, number: gl.tensor, row: gl.tensor, tokens: gl.tensor, part: gl.tensor,
    pieces: gl.tensor, SLICES: gl.constexpr,
) -> None:  # fmt: skip
    """Tell the merge of a tile of one sequence what `prefill_order` tells of many."""
    rank = number // SLICES
    if (part == 0) & (rank % pieces == 0):
        to = records + rank // pieces * RECORD
        gl.store(to, rank)
        gl.store(to + 1, pieces)
        gl.store(to + 2, row)
        gl.store(to + 3, tokens)


@gluon_function
def _consume_whole(
    given: gl.tensor, rows: gl.tensor, ring: gl.tensor,
    SLICES: gl.constexpr, PACK: gl.constexpr, TOKENS: gl.constexpr, HEAD_DIM: gl.constexpr,
    TOKEN_STRIDE: gl.constexpr, HEAD_STRIDE: gl.constexpr,
    HAS_CAP: gl.constexpr, HAS_WINDOW: gl.constexpr, HAS_SINKS: gl.constexpr,
    PLANNED: gl.constexpr, GROUP_ID: gl.constexpr, GROUPS: gl.constexpr,
) -> None:  # fmt: skip
    """As `consume`; items are whole."""
    out, _, query_start_loc, seq_lens, work, _, _, sinks, scale, soft_cap, window = given
    q_tiles, q_full, q_empty = rows
    k_tiles, k_full, k_empty, v_tiles, v_full, v_empty = ring
    BUFFERS: gl.constexpr = q_tiles.shape[0] // GROUPS
    K_DEPTH: gl.constexpr = k_tiles.shape[0]
    V_DEPTH: gl.constexpr = v_tiles.shape[0]
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, k_tiles.shape[1], 16])
    ROW: gl.constexpr = gl.SliceLayout(1, LOGITS)
    tiles, pieces = count_tiles(
        query_start_loc, seq_lens, work, window, SLICES, TOKENS, k_tiles.shape[1],
        HAS_WINDOW, PLANNED, SPLIT=False,
    )  # fmt: skip
    items = count_items(tiles * SLICES)
    j = tiles * 0
    logits = gl.full([HALF, k_tiles.shape[1]], 0.0, gl.float32, LOGITS)
    if BUFFERS > 1:
        logits = _begin(q_tiles, q_full, ring, j, j, items > 0, GROUP_ID, GROUPS)
        logits = warpgroup_mma_wait(0, deps=[logits])
        mbarrier.arrive(k_empty.index(0), count=1, pred=items > 0)
    item = read_item(
        j, items, tiles, pieces, query_start_loc, seq_lens, work, SLICES, TOKENS, PLANNED
    )
    row, tokens, position, part = item[1], item[2], item[3], item[6]
    for n in range(items):
        item = read_item(
            n + 1, items, tiles, pieces, query_start_loc, seq_lens, work, SLICES, TOKENS, PLANNED
        )
        if BUFFERS == 1:
            logits = _begin(q_tiles, q_full, ring, n, j, there=True, GROUP_ID=GROUP_ID, GROUPS=GROUPS)
            logits = warpgroup_mma_wait(0, deps=[logits])
            mbarrier.arrive(k_empty.index(j % K_DEPTH), count=1)
        slot = n % BUFFERS * GROUPS + GROUP_ID
        highest = gl.full([HALF], -1e30, gl.float32, ROW)
        total = gl.full([HALF], 0.0, gl.float32, ROW)
        if HAS_SINKS:
            highest = gl.load(sinks + part * PACK + gl.arange(0, HALF, ROW) % PACK) * LOG2E
            total += 1.0
        weights, sums, highest, total, j = _attend_item(
            logits, highest, total, q_tiles, slot, ring, j, position, tokens, pieces, pieces,
            scale, soft_cap, window,
            PACK, TOKENS, HAS_CAP, HAS_WINDOW, SPLIT=False, GROUP_ID=GROUP_ID, GROUPS=GROUPS,
        )  # fmt: skip
        if BUFFERS > 1:
            logits = _begin(q_tiles, q_full, ring, n + 1, j, n + 1 < items, GROUP_ID, GROUPS)
            sums = _multiply_values(weights, sums, ring, j - 1)
            logits, sums = warpgroup_mma_wait(0, deps=[logits, sums])
            mbarrier.arrive(k_empty.index(j % K_DEPTH), count=1, pred=n + 1 < items)
        else:
            sums = warpgroup_mma_wait(0, deps=[_multiply_values(weights, sums, ring, j - 1)])
        mbarrier.arrive(v_empty.index((j - 1) % V_DEPTH), count=1)
        _store(
            sums, total, q_tiles.index(slot).reshape([HALF, q_tiles.shape[3]]), out,
            row, tokens, part,
            PACK, TOKENS, HEAD_DIM, TOKEN_STRIDE, HEAD_STRIDE, GROUP_ID, GROUPS,
        )  # fmt: skip
        mbarrier.arrive(q_empty.index(n % BUFFERS), count=1)
        row, tokens, position, part = item[1], item[2], item[3], item[6]


@gluon_function
def _consume_pieces(
    given: gl.tensor, rows: gl.tensor, ring: gl.tensor,
    SLICES: gl.constexpr, PACK: gl.constexpr, TOKENS: gl.constexpr, HEAD_DIM: gl.constexpr,
    TOKEN_STRIDE: gl.constexpr, HEAD_STRIDE: gl.constexpr,
    HAS_CAP: gl.constexpr, HAS_WINDOW: gl.constexpr, HAS_SINKS: gl.constexpr,
    PLANNED: gl.constexpr, GROUP_ID: gl.constexpr, GROUPS: gl.constexpr,
) -> None:  # fmt: skip
    """As `consume`; items may be pieces.

    They are few, so that none starts before the last has ended. The second group passes by an item
    whose rows are all the first one's, and leaves the matrix unit to it.
    """
    out, partial, query_start_loc, seq_lens, work, most_items, records = given[:7]
    sinks, scale, soft_cap, window = given[7:]
    q_tiles, q_full, q_empty = rows
    k_tiles, k_full, k_empty, v_tiles, v_full, v_empty = ring
    TILE: gl.constexpr = k_tiles.shape[1]
    tiles, pieces = count_tiles(
        query_start_loc, seq_lens, work, window, SLICES, TOKENS, TILE,
        HAS_WINDOW, PLANNED, SPLIT=True,
    )  # fmt: skip
    items = count_items(tiles * SLICES)
    j = tiles * 0
    for n in range(items):
        _, row, tokens, position, _, _, part, piece, of, number = read_item(
            n, items, tiles, pieces, query_start_loc, seq_lens, work, SLICES, TOKENS, PLANNED
        )
        if not PLANNED and GROUP_ID == 0:
            _record(work + records, number, row, tokens, part, of, SLICES)
        if tokens > GROUP_ID * (TOKENS // GROUPS):
            logits = _begin(q_tiles, q_full, ring, n, j, there=True, GROUP_ID=GROUP_ID, GROUPS=GROUPS)
            logits = warpgroup_mma_wait(0, deps=[logits])
            mbarrier.arrive(k_empty.index(j % k_tiles.shape[0]), count=1)
            ROW: gl.constexpr = gl.SliceLayout(1, logits.type.layout)
            highest = gl.full([HALF], -1e30, gl.float32, ROW)
            total = gl.full([HALF], 0.0, gl.float32, ROW)
            if HAS_SINKS:  # one more logit, in the first piece alone
                sink = gl.load(sinks + part * PACK + gl.arange(0, HALF, ROW) % PACK) * LOG2E
                highest = gl.where(piece == 0, sink, highest)
                total += gl.where(piece == 0, 1.0, 0.0)
            weights, sums, highest, total, j = _attend_item(
                logits, highest, total, q_tiles, n * 0 + GROUP_ID, ring, j, position, tokens,
                piece, of, scale, soft_cap, window,
                PACK, TOKENS, HAS_CAP, HAS_WINDOW, SPLIT=True, GROUP_ID=GROUP_ID, GROUPS=GROUPS,
            )  # fmt: skip
            sums = warpgroup_mma_wait(0, deps=[_multiply_values(weights, sums, ring, j - 1)])
            mbarrier.arrive(v_empty.index((j - 1) % v_tiles.shape[0]), count=1)
            if of > 1:
                _store_part(
                    sums, highest, total, partial, number, most_items, tokens,
                    PACK, TOKENS, HEAD_DIM, GROUP_ID, GROUPS,
                )  # fmt: skip
            else:
                _store(
                    sums, total, q_tiles.index(GROUP_ID).reshape([HALF, q_tiles.shape[3]]), out,
                    row, tokens, part,
                    PACK, TOKENS, HEAD_DIM, TOKEN_STRIDE, HEAD_STRIDE, GROUP_ID, GROUPS,
                )  # fmt: skip
        else:
            begin, end, _, _ = find_span(
                position, tokens, piece, of, window, TILE, HAS_WINDOW, SPLIT=True
            )
            mbarrier.wait(q_full.index(0), n & 1)
            j = _pass_by(ring, j, end - begin)
        mbarrier.arrive(q_empty.index(0), count=1)


@gluon_function
def _pass_by(ring: gl.tensor, j: gl.tensor, steps: gl.tensor) -> gl.tensor:
    """Let so many tiles go unread; the next one's number."""
    k_tiles, k_full, k_empty, v_tiles, v_full, v_empty = ring
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
    SLICES: gl.constexpr, PACK: gl.constexpr, TOKENS: gl.constexpr, HEAD_DIM: gl.constexpr,
    TOKEN_STRIDE: gl.constexpr, HEAD_STRIDE: gl.constexpr,
    HAS_CAP: gl.constexpr, HAS_WINDOW: gl.constexpr, HAS_SINKS: gl.constexpr,
    PLANNED: gl.constexpr, SPLIT: gl.constexpr, GROUP_ID: gl.constexpr, GROUPS: gl.constexpr,
) -> None:  # fmt: skip
    """A group's rows of every item of this program, in order."""
    if SPLIT:
        _consume_pieces(
            given, rows, ring, SLICES, PACK, TOKENS, HEAD_DIM, TOKEN_STRIDE, HEAD_STRIDE,
            HAS_CAP, HAS_WINDOW, HAS_SINKS, PLANNED, GROUP_ID, GROUPS,
        )  # fmt: skip
    else:
        _consume_whole(
            given, rows, ring, SLICES, PACK, TOKENS, HEAD_DIM, TOKEN_STRIDE, HEAD_STRIDE,
            HAS_CAP, HAS_WINDOW, HAS_SINKS, PLANNED, GROUP_ID, GROUPS,
        )  # fmt: skip
