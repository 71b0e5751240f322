"""The stores of Hopper's prefill: an item's rows go, divided and rounded, to `out`, or as parts.

Rows go to `out` by way of the shared memory that q lay in, so that 16 bytes are stored at a time.
Where that is wanted early for the next item's q (`Shape.direct`), lanes exchange numbers instead.
A piece of an item leaves float32 [items, rows of an item, head_dim], divided by its own totals, and
behind them all the base-2 logarithm of the totals, for `merge`.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from backends.triton_gpu.hopper.items import HALF, find_rows, gluon_function


class State(NamedTuple):
    """The running sums of a group's rows."""

    weights: gl.tensor
    """Of the last tile of keys, whose values are not yet in the sums."""
    sums: gl.tensor
    extra: gl.tensor
    """The sums' smaller part, of a head_dim that is no power of two."""
    highest: gl.tensor
    total: gl.tensor


@gluon.constexpr_function  # type: ignore[untyped-decorator]
def _exchanged(width: int, steps: int) -> gl.DistributedLinearLayout:
    """HALF rows of `width` numbers, 32 or more: a product's after some exchanges between lanes.

    In a row a thread of the product has 2 neighbours; each step doubles them, up to 8.
    """
    columns = [[0, 1 << bit] for bit in range(width.bit_length() - 1)]
    rows = [[1 << bit, 0] for bit in range(6)]
    near, lanes = columns[:3], columns[3:5]
    if steps == 1:
        near, lanes = [*columns[:2], columns[4]], columns[2:4]
    registers = [*near, rows[3], *columns[5:]]
    shape = [HALF.value, width]
    return gl.DistributedLinearLayout(registers, lanes + rows[:3], rows[4:], [], shape)


@gluon_function
def _store(
    sums: gl.tensor, share: gl.tensor, tile: gl.tensor, out: gl.tensor, item: gl.tensor,
    FIRST: gl.constexpr, FORM: gl.constexpr, GROUP_ID: gl.constexpr,
) -> None:  # fmt: skip
    """Divide, round, store from dimension FIRST, 16 bytes each; `tile` is the rows' own."""
    DTYPE: gl.constexpr = out.dtype.element_ty
    share = gl.convert_layout(share, gl.SliceLayout(1, sums.type.layout))
    result = sums * share[:, None]
    WIDE: gl.constexpr = (
        _exchanged(sums.shape[1], 2) if FORM.shape.direct
        else gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    )  # fmt: skip
    if FORM.shape.direct:  # in two steps, each of which is done by shuffles
        result = gl.convert_layout(result, _exchanged(sums.shape[1], 1)).to(DTYPE)
        result = gl.convert_layout(result, WIDE)
    else:
        tile.store(result.to(DTYPE))
        result = tile.load(WIDE)
        fence_async_shared()
    r = gl.arange(0, HALF, gl.SliceLayout(1, WIDE))
    dim = FIRST + gl.arange(0, sums.shape[1], gl.SliceLayout(0, WIDE))
    token, head, live = find_rows(GROUP_ID * HALF + r, item, FORM)
    to = (item.row + token).to(gl.int64) * FORM.token_stride + head * FORM.head_stride
    mask = live[:, None] & (dim < FORM.head_dim)[None, :]
    gl.store(out + to[:, None] + dim[None, :], result, mask=mask)


@gluon_function
def _store_part(
    sums: gl.tensor, share: gl.tensor, partial: gl.tensor, item: gl.tensor, FIRST: gl.constexpr,
    FORM: gl.constexpr, GROUP_ID: gl.constexpr,
) -> None:  # fmt: skip
    """Divide and store for the merge, from dimension FIRST: parts [items, rows, head_dim]."""
    ROW: gl.constexpr = gl.SliceLayout(1, sums.type.layout)
    share = gl.convert_layout(share, ROW)
    r = gl.arange(0, HALF, ROW)
    dim = FIRST + gl.arange(0, sums.shape[1], gl.SliceLayout(0, sums.type.layout))
    _, _, live = find_rows(GROUP_ID * HALF + r, item, FORM)
    row = item.number * FORM.shape.rows + GROUP_ID * HALF + r
    mask = live[:, None] & (dim < FORM.head_dim)[None, :]
    gl.store(
        partial + row[:, None] * FORM.head_dim + dim[None, :], sums * share[:, None], mask=mask
    )


@gluon_function
def finish(
    state: gl.tensor, rows: gl.tensor, slot: gl.tensor, v: gl.tensor, given: gl.tensor,
    item: gl.tensor, v_scale: gl.tensor, FORM: gl.constexpr, GROUP_ID: gl.constexpr,
) -> None:  # fmt: skip
    """Store the rows of an item, or of a piece the parts and then log2 of the totals."""
    partial, total = given.partial, state.total
    if FORM.split:
        if item.pieces <= 1:
            _store_rows(state, v_scale / total, rows, slot, v, given.out, item, FORM, GROUP_ID)
        else:
            share = gl.where(total > 0, v_scale / total, 0.0)  # a row may see nothing of its piece
            _store_part(state.sums, share, partial, item, 0, FORM, GROUP_ID)
            WIDTH: gl.constexpr = v.tiles.shape[3]
            if v.tails.shape[3] < WIDTH:
                _store_part(state.extra, share, partial, item, WIDTH, FORM, GROUP_ID)
            r = gl.arange(0, HALF, total.type.layout)
            _, _, live = find_rows(GROUP_ID * HALF + r, item, FORM)
            lses = partial + given.most_items * (FORM.shape.rows * FORM.head_dim)
            row = item.number * FORM.shape.rows + GROUP_ID * HALF + r
            gl.store(lses + row, state.highest + gl.log2(total), mask=live)
    else:
        _store_rows(state, v_scale / total, rows, slot, v, given.out, item, FORM, GROUP_ID)


@gluon_function
def _store_rows(
    state: gl.tensor, share: gl.tensor, rows: gl.tensor, slot: gl.tensor, v: gl.tensor,
    out: gl.tensor, item: gl.tensor, FORM: gl.constexpr, GROUP_ID: gl.constexpr,
) -> None:  # fmt: skip
    """Store an item's rows, both parts of them where there are two."""
    WIDTH: gl.constexpr = v.tiles.shape[3]
    TAIL: gl.constexpr = v.tails.shape[3]
    tile = rows.tiles.index(slot).reshape([HALF, WIDTH])
    _store(state.sums, share, tile, out, item, 0, FORM, GROUP_ID)
    if TAIL < WIDTH:
        tail = rows.tails.index(slot).reshape([HALF, TAIL])
        _store(state.extra, share, tail, out, item, WIDTH, FORM, GROUP_ID)
