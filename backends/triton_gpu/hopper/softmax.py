"""The online softmax of `shared/softmax.py` where few warps wait for it: Hopper's prefill, latents.

A thread has two rows of a tile, and there are only as many warps as the matrix unit needs. So a
step is as long as its chains of dependent instructions. With COLUMNS = 8, as many as four lanes
have of a row, the maxima and sums of a tile are taken in four chains a thread instead of two, and a
total is kept for each column; those of other lanes are added to it after the last tile. With 1, the
lanes exchange a sum each step.
"""

from triton.experimental.gluon import language as gl

from backends.triton_gpu.hopper.items import gluon_function
from backends.triton_gpu.shared.softmax import raise_highest


@gluon_function
def in_columns(tile: gl.tensor, COLUMNS: gl.constexpr) -> gl.tensor:
    """A tile [rows, keys] as [rows, keys / COLUMNS, COLUMNS]."""
    return tile.reshape([tile.shape[0], tile.shape[1] // COLUMNS, COLUMNS])


@gluon_function
def start_totals(each: gl.tensor, tile: gl.tensor, COLUMNS: gl.constexpr) -> gl.tensor:
    """Totals [rows, COLUMNS] that add up to `each` row's, for tiles that lie like this one."""
    LAYOUT: gl.constexpr = gl.SliceLayout(1, in_columns(tile, COLUMNS).type.layout)
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))[None, :]
    each = gl.convert_layout(each, gl.SliceLayout(1, LAYOUT))
    return gl.where(column == 0, each[:, None], 0.0)


@gluon_function
def add_up(totals: gl.tensor, LAYOUT: gl.constexpr) -> gl.tensor:
    """The total of each row, in this layout."""
    return gl.convert_layout(gl.sum(totals, 1), LAYOUT)


@gluon_function
def add_weights(
    logits: gl.tensor, highest: gl.tensor, totals: gl.tensor, factor: gl.tensor | None = None
) -> tuple[gl.tensor, gl.tensor, gl.tensor, gl.tensor]:
    """(weights of a tile, highest, totals, rescale), as by `add_tile` with keys along axis 1."""
    ROW: gl.constexpr = gl.SliceLayout(1, logits.type.layout)
    COLUMNS: gl.constexpr = totals.shape[1]
    top = gl.convert_layout(gl.max(gl.max(in_columns(logits, COLUMNS), 1), 1), ROW)
    if factor is not None:
        top = top * factor
        if factor.type.is_block():
            factor = factor[:, None]
        logits = logits * factor
    now, rescale = raise_highest(highest, top)
    weights = gl.exp2(logits - now[:, None])
    by = gl.convert_layout(rescale, gl.SliceLayout(1, totals.type.layout))
    totals = totals * by[:, None] + gl.sum(in_columns(weights, COLUMNS), 1)
    return weights, now, totals, rescale
