"""The warps of Hopper's prefill that widen values of an e4m3 cache for the matrix products.

The matrix unit takes 16-bit values in any order and 8-bit ones only transposed, so that a tile of
values lands as it is stored and goes to the ring of the consumers in float16, which holds all its
numbers. Slots that no query sees may hold NaN, and 0 * NaN is NaN: where a tile has such slots,
past the sequence's end or before its window, and where one block stood in for another, zeros are
written. Keys are not widened.
"""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from backends.triton_gpu.hopper.items import (
    count_work,
    find_live,
    find_span,
    gluon_function,
    read_item,
)


@gluon_function
def widen_values(given: gl.tensor, rings: gl.tensor, land: gl.tensor, FORM: gl.constexpr) -> None:
    """Widen every tile of values of this program's items, in the order in which they land."""
    v, window = rings.v, given.window
    DEPTH: gl.constexpr = v.tiles.shape[0]
    LANDS: gl.constexpr = land.tiles.shape[0]
    TILE: gl.constexpr = v.tiles.shape[1]
    WARPS: gl.constexpr = FORM.shape.wideners
    work = count_work(given, FORM)
    j = work.tiles * 0
    for n in range(work.items):
        item = read_item(n, work, given, FORM)
        begin, end, _, _ = find_span(item, window, FORM)
        live_begin, live_end = find_live(item, window, FORM)
        for i in range(end - begin):
            key = (end - 1 - i) * TILE
            at, land_at = j % DEPTH, j % LANDS
            source, target = land.tiles.index(land_at), v.tiles.index(at)
            mbarrier.wait(land.full.index(land_at), j // LANDS & 1)
            mbarrier.wait(v.empty.index(at), (j // DEPTH & 1) ^ 1)
            if (key + TILE > live_end) | (key < live_begin):
                _widen(source, target, live_begin - key, live_end - key, MASKED=True, WARPS=WARPS)
            else:
                _widen(source, target, key, key, MASKED=False, WARPS=WARPS)
            fence_async_shared()
            mbarrier.arrive(v.full.index(at), count=1)
            mbarrier.arrive(land.empty.index(land_at), count=1)
            j += 1


@gluon_function
def _widen(
    source: gl.tensor, target: gl.tensor, begin: gl.tensor, end: gl.tensor,
    MASKED: gl.constexpr, WARPS: gl.constexpr,
) -> None:  # fmt: skip
    """Write a tile in float16; if MASKED, zeros to all rows but begin .. end - 1."""
    TILE: gl.constexpr = source.shape[0]
    WIDTH: gl.constexpr = source.shape[2]
    AT_ONCE: gl.constexpr = max(8, WARPS * 512 // WIDTH)  # rows, not fewer than are swizzled
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [WARPS, 1], [1, 0])
    for first in gl.static_range(0, TILE, AT_ONCE):
        small = source.reshape([TILE, WIDTH]).slice(first, AT_ONCE, 0).load(LAYOUT)
        wide = small.to(gl.float16)
        if MASKED:
            row = first + gl.arange(0, AT_ONCE, gl.SliceLayout(1, LAYOUT))
            live = ((row >= begin) & (row < end))[:, None]
            wide = gl.where(live, wide, gl.zeros_like(wide))
        target.reshape([TILE, WIDTH]).slice(first, AT_ONCE, 0).store(wide)
