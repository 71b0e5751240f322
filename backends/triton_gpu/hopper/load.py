"""The warp of Hopper's prefill that does nothing but load: Q, K and V, by the copy engine (TMA).

Rings of tiles in shared memory, each with two barriers: `full` says that a tile has landed, `empty`
that all groups of consumers are done with it. One copy a block of the cache (or a tile's part of a
block), K and V in turn. Where the ring of K holds fewer tails than tiles, each tail has another
`full` barrier. Where only one item's rows fit, the next item's rows are copied after the first
tiles of its keys and values, which find room earlier. Entries of the table past what the rows see
are never read; the nearest entry stands in, since the mask takes its keys away.

The mask cannot take away a value that is NaN, because 0 * NaN is NaN. So where a tile holds slots
that no query sees, past the sequence's end or before its window, the loader waits for the tile and
writes zeros over their values, and over all that stood in for others, before it says `full`; that
is one tile or two in a sequence and head, however long the sequence.
"""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from backends.triton_gpu.hopper.items import (
    count_work,
    find_heads,
    find_live,
    find_span,
    gluon_function,
    read_item,
)


@gluon_function
def load_tiles(
    descs: gl.tensor, given: gl.tensor, tables: gl.tensor, table_stride: gl.tensor,
    rows: gl.tensor, rings: gl.tensor, land: gl.tensor, FORM: gl.constexpr,
) -> None:  # fmt: skip
    """Load every tile of this program's items, in the order in which they are consumed."""
    q_desc, k_desc, v_desc, q_tail, k_tail, v_tail = descs
    window, k = given.window, rings.k
    BLOCK_SIZE: gl.constexpr = FORM.block_size
    K_DEPTH: gl.constexpr = k.tiles.shape[0]
    K_TAILS: gl.constexpr = k.tails.shape[0]
    APART: gl.constexpr = K_TAILS < K_DEPTH
    LATE: gl.constexpr = FORM.planned if FORM.split else FORM.shape.buffers == 1
    TILE: gl.constexpr = k.tiles.shape[1]
    FREE: gl.constexpr = min(K_TAILS, rings.v.tiles.shape[0] + FORM.shape.lands - 1, 2)
    work = count_work(given, FORM)
    j, edges = work.tiles * 0, work.tiles * 0
    ahead_item = read_item(j, work, given, FORM)
    for n in range(work.items):
        item = ahead_item
        if not FORM.split and not LATE:
            _load_rows(q_desc, q_tail, rows, n, item, FORM)
        kv_head, _ = find_heads(item, FORM)
        table = tables + item.seq.to(gl.int64) * table_stride
        seen = item.length * 0
        low = seen
        if FORM.has_window:
            seen = gl.maximum(item.first - window + 1, 0)
            low = gl.maximum(item.position - window + 1, 0) // BLOCK_SIZE
        high = (item.position + item.tokens - 1) // BLOCK_SIZE
        begin, end, _, _ = find_span(item, window, FORM)
        ahead = load_entries(table, (end - 1) * TILE, low, high, BLOCK_SIZE)
        if FORM.split and not FORM.planned:  # behind a load that takes as long
            _load_rows(q_desc, q_tail, rows, n, item, FORM)
        live_begin, live_end = find_live(item, window, FORM)
        ahead_item = read_item(n + 1, work, given, FORM)
        late = gl.minimum(gl.minimum(n, 1) * FREE, end - begin - 1)  # behind tiles that find room
        for i in range(end - begin):
            if LATE:  # noqa: SIM102 - known to the compiler, the rest is not
                if i == late:
                    _load_rows(q_desc, q_tail, rows, n, item, FORM)
            key = (end - 1 - i) * TILE
            entries, ahead = ahead, load_entries(table, key - TILE, low, high, BLOCK_SIZE)
            k_at = j % K_DEPTH
            mbarrier.wait(k.empty.index(k_at), (j // K_DEPTH & 1) ^ 1)
            _copy_blocks(
                k_desc, None if APART else k_tail, entries, key, kv_head, k.full.index(k_at),
                k.tiles.index(k_at), k.tails.index(j % K_TAILS), FORM.k_rows, 0, FORM,
            )  # fmt: skip
            if APART:
                room = j + K_DEPTH - K_TAILS  # in the tile with the place of the last such tail
                mbarrier.wait(k.empty.index(room % K_DEPTH), (room // K_DEPTH & 1) ^ 1)
                at = j % K_TAILS
                _copy_blocks(
                    k_tail, None, entries, key, kv_head, k.tails_full.index(at),
                    k.tails.index(at), k.tails.index(at), FORM.k_rows, FORM.shape.width, FORM,
                )  # fmt: skip
            edges = _load_values(
                v_desc, v_tail, entries, key, kv_head, rings.v, land, j, edges,
                (key + TILE > item.length) | (key < seen), live_begin, live_end, FORM,
            )  # fmt: skip
            j += 1


@gluon_function
def _load_values(
    desc: gl.tensor, tail: gl.tensor, entries: gl.tensor, key: gl.tensor, kv_head: gl.tensor,
    v: gl.tensor, land: gl.tensor, j: gl.tensor, edges: gl.tensor, edge: gl.tensor,
    live_begin: gl.tensor, live_end: gl.tensor, FORM: gl.constexpr,
) -> gl.tensor:  # fmt: skip
    """Load the j-th tile of values, once there is room; how many had to be cleared so far."""
    DEPTH: gl.constexpr = v.tiles.shape[0]
    LANDS: gl.constexpr = land.tiles.shape[0]
    if FORM.e4m3:
        to = j % LANDS
        mbarrier.wait(land.empty.index(to), (j // LANDS & 1) ^ 1)
        _copy_blocks(
            desc, tail, entries, key, kv_head, land.full.index(to),
            land.tiles.index(to), land.tiles.index(to), FORM.v_rows, 0, FORM,
        )  # fmt: skip
    else:
        at = j % DEPTH
        mbarrier.wait(v.empty.index(at), (j // DEPTH & 1) ^ 1)
        _copy_blocks(
            desc, tail, entries, key, kv_head, v.full.index(gl.where(edge, DEPTH, at)),
            v.tiles.index(at), v.tails.index(at), FORM.v_rows, 0, FORM,
        )  # fmt: skip
        if edge:
            mbarrier.wait(v.full.index(DEPTH), edges & 1)
            edges += 1
            clear_values(v.tiles.index(at), live_begin - key, live_end - key)
            if FORM.has_tail:
                clear_values(v.tails.index(at), live_begin - key, live_end - key)
            fence_async_shared()
            mbarrier.arrive(v.full.index(at), count=1)
    return edges


@gluon_function
def _load_rows(
    desc: gl.tensor, tail: gl.tensor, rows: gl.tensor, n: gl.tensor, item: gl.tensor,
    FORM: gl.constexpr,
) -> None:  # fmt: skip
    """Start the copies of the n-th item's rows, once there is room."""
    GROUPS: gl.constexpr = FORM.shape.groups
    BUFFERS: gl.constexpr = rows.tiles.shape[0] // GROUPS
    REST: gl.constexpr = tail.block_type.nbytes if FORM.has_tail else 0
    buffer = n % BUFFERS
    _, head = find_heads(item, FORM)
    full = rows.full.index(buffer)
    mbarrier.wait(rows.empty.index(buffer), (n // BUFFERS & 1) ^ 1)
    mbarrier.expect(full, GROUPS * (desc.block_type.nbytes + REST))
    for group in gl.static_range(GROUPS):
        token, to = item.row + group * (FORM.tokens // GROUPS), buffer * GROUPS + group
        tma.async_copy_global_to_shared(desc, [token, head, 0], full, rows.tiles.index(to))
        if FORM.has_tail:
            tma.async_copy_global_to_shared(
                tail, [token, head, rows.tiles.shape[3]], full, rows.tails.index(to)
            )


@gluon_function
def load_entries(
    table: gl.tensor, key: gl.tensor, low: gl.tensor, high: gl.tensor, BLOCK_SIZE: gl.constexpr
) -> gl.tensor:
    """The entries of the table from `key` on, one a lane, each from within low .. high."""
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    index = gl.minimum(gl.maximum(key // BLOCK_SIZE + lane, low), high)
    return gl.load(table + index)


@gluon_function
def _copy_blocks(
    desc: gl.tensor, tail_desc: gl.tensor, entries: gl.tensor, key: gl.tensor, kv_head: gl.tensor,
    full: gl.tensor, tile: gl.tensor, tail: gl.tensor, ROWS: gl.constexpr, FIRST: gl.constexpr,
    FORM: gl.constexpr,
) -> None:  # fmt: skip
    """Start the copies of one tile of keys or values from dimension FIRST on.

    `full` completes when all have landed.
    """
    TILE: gl.constexpr = tile.shape[0]
    COPY: gl.constexpr = desc.block_shape[0]
    lane = gl.arange(0, 32, entries.type.layout)
    REST: gl.constexpr = tail_desc.block_type.nbytes if tail_desc is not None else 0
    mbarrier.expect(full, TILE // COPY * (desc.block_type.nbytes + REST))
    for c in gl.static_range(TILE // COPY):
        entry = gl.sum(gl.where(lane == c, entries, 0), 0)
        slot = entry * ROWS + key % FORM.block_size
        tma.async_copy_global_to_shared(
            desc, [slot, kv_head, FIRST], full, tile.slice(c * COPY, COPY, 0)
        )
        if tail_desc is not None:
            tma.async_copy_global_to_shared(
                tail_desc, [slot, kv_head, tile.shape[2]], full, tail.slice(c * COPY, COPY, 0)
            )


@gluon_function
def clear_values(tile: gl.tensor, begin: gl.tensor, end: gl.tensor) -> None:
    """Write zeros to all rows of a tile [TILE, 1, WIDTH] but begin .. end - 1."""
    TILE: gl.constexpr = tile.shape[0]
    WIDTH: gl.constexpr = tile.shape[2]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    for first in gl.static_range(0, TILE, 8):
        if (first < begin) | (first + 8 > end):
            row = first + gl.arange(0, 8, gl.SliceLayout(1, LAYOUT))
            live = ((row >= begin) & (row < end))[:, None]
            for column in gl.static_range(0, WIDTH, 64):
                part = tile.reshape([TILE, WIDTH]).slice(first, 8, 0)
                if WIDTH > 64:
                    part = part.slice(column, 64, 1)
                values = part.load(LAYOUT)
                part.store(gl.where(live, values, gl.zeros_like(values)))
