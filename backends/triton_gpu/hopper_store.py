"""How Hopper's prefill leaves an item's rows: divided and rounded in `out`, or as parts to merge.

Rows go to `out` by way of the shared memory that q lay in, so that 16 bytes are stored at a time.
A piece of an item leaves float32 [items, rows of an item, HEAD_DIM], divided by its own totals, and
behind them all the base-2 logarithm of the totals, for `hopper_merge`.
"""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from backends.triton_gpu.hopper_items import GROUPS, HALF, gluon_function


@gluon_function
def _store(
    sums: gl.tensor, share: gl.tensor, tile: gl.tensor, out: gl.tensor, item: gl.tensor,
    FIRST: gl.constexpr, PACK: gl.constexpr, TOKENS: gl.constexpr, HEAD_DIM: gl.constexpr,
    TOKEN_STRIDE: gl.constexpr, HEAD_STRIDE: gl.constexpr,
    GROUP_ID: gl.constexpr,
) -> None:  # fmt: skip
    """Divide, round, store from dimension FIRST, by way of the rows' own `tile`, 16 bytes each."""
    row, tokens, part = item[1], item[2], item[6]
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    share = gl.convert_layout(share, gl.SliceLayout(1, sums.type.layout))
    tile.store((sums * share[:, None]).to(out.dtype.element_ty))
    result = tile.load(WIDE)
    fence_async_shared()
    r = gl.arange(0, HALF, gl.SliceLayout(1, WIDE))
    dim = FIRST + gl.arange(0, sums.shape[1], gl.SliceLayout(0, WIDE))
    token = GROUP_ID * (TOKENS // GROUPS) + r // PACK
    to = (row + token).to(gl.int64) * TOKEN_STRIDE + (part * PACK + r % PACK) * HEAD_STRIDE
    mask = (token < tokens)[:, None] & (dim < HEAD_DIM)[None, :]
    gl.store(out + to[:, None] + dim[None, :], result, mask=mask)


@gluon_function
def _store_part(
    sums: gl.tensor, share: gl.tensor, partial: gl.tensor, item: gl.tensor, FIRST: gl.constexpr,
    PACK: gl.constexpr, TOKENS: gl.constexpr, HEAD_DIM: gl.constexpr,
    GROUP_ID: gl.constexpr,
) -> None:  # fmt: skip
    """Divide and store for the merge, from dimension FIRST: parts [items, rows, HEAD_DIM]."""
    tokens, number = item[2], item[9]
    ROW: gl.constexpr = gl.SliceLayout(1, sums.type.layout)
    share = gl.convert_layout(share, ROW)
    r = gl.arange(0, HALF, ROW)
    dim = FIRST + gl.arange(0, sums.shape[1], gl.SliceLayout(0, sums.type.layout))
    live = GROUP_ID * (TOKENS // GROUPS) + r // PACK < tokens
    row = (number * GROUPS + GROUP_ID) * HALF + r
    mask = live[:, None] & (dim < HEAD_DIM)[None, :]
    gl.store(partial + row[:, None] * HEAD_DIM + dim[None, :], sums * share[:, None], mask=mask)


@gluon_function
def finish(
    sums: gl.tensor, extra: gl.tensor, highest: gl.tensor, total: gl.tensor,
    rows: gl.tensor, slot: gl.tensor, ring: gl.tensor, given: gl.tensor, item: gl.tensor,
    v_scale: gl.tensor,
    PACK: gl.constexpr, TOKENS: gl.constexpr, HEAD_DIM: gl.constexpr,
    TOKEN_STRIDE: gl.constexpr, HEAD_STRIDE: gl.constexpr, SPLIT: gl.constexpr,
    GROUP_ID: gl.constexpr,
) -> None:  # fmt: skip
    """Store the rows of an item, or of a piece the parts and then log2 of the totals."""
    out, partial, most_items = given[0], given[1], given[5]
    tokens, of, number = item[2], item[8], item[9]
    if SPLIT:
        if of <= 1:
            _store_rows(
                sums, extra, v_scale / total, rows, slot, ring, out, item,
                PACK, TOKENS, HEAD_DIM, TOKEN_STRIDE, HEAD_STRIDE, GROUP_ID,
            )  # fmt: skip
        else:
            share = gl.where(total > 0, v_scale / total, 0.0)  # a row may see nothing of its piece
            _store_part(sums, share, partial, item, 0, PACK, TOKENS, HEAD_DIM, GROUP_ID)
            WIDTH: gl.constexpr = ring[4].shape[3]
            if ring[5].shape[3] < WIDTH:
                _store_part(extra, share, partial, item, WIDTH, PACK, TOKENS, HEAD_DIM, GROUP_ID)
            r = gl.arange(0, HALF, total.type.layout)
            live = GROUP_ID * (TOKENS // GROUPS) + r // PACK < tokens
            lses = partial + most_items * (GROUPS * HALF * HEAD_DIM)
            row = (number * GROUPS + GROUP_ID) * HALF + r
            gl.store(lses + row, highest + gl.log2(total), mask=live)
    else:
        _store_rows(
            sums, extra, v_scale / total, rows, slot, ring, out, item,
            PACK, TOKENS, HEAD_DIM, TOKEN_STRIDE, HEAD_STRIDE, GROUP_ID,
        )  # fmt: skip


@gluon_function
def _store_rows(
    sums: gl.tensor, extra: gl.tensor, share: gl.tensor, rows: gl.tensor, slot: gl.tensor,
    ring: gl.tensor, out: gl.tensor, item: gl.tensor,
    PACK: gl.constexpr, TOKENS: gl.constexpr, HEAD_DIM: gl.constexpr,
    TOKEN_STRIDE: gl.constexpr, HEAD_STRIDE: gl.constexpr,
    GROUP_ID: gl.constexpr,
) -> None:  # fmt: skip
    """Store an item's rows, both parts of them where there are two."""
    q_tiles, q_tails = rows[:2]
    WIDTH: gl.constexpr = ring[4].shape[3]
    TAIL: gl.constexpr = ring[5].shape[3]
    tile = q_tiles.index(slot).reshape([HALF, WIDTH])
    _store(
        sums, share, tile, out, item, 0,
        PACK, TOKENS, HEAD_DIM, TOKEN_STRIDE, HEAD_STRIDE, GROUP_ID,
    )  # fmt: skip
    if TAIL < WIDTH:
        _store(
            extra, share, q_tails.index(slot).reshape([HALF, TAIL]), out, item, WIDTH,
            PACK, TOKENS, HEAD_DIM, TOKEN_STRIDE, HEAD_STRIDE, GROUP_ID,
        )  # fmt: skip
