"""The work of each program of Hopper's prefill, and the tiles of keys that an item takes.

An item is a tile of 128 or 192 rows, 64 a group: TOKENS query tokens of one sequence times PACK
query heads of one KV head. Items are numbered in the order of `prefill/order.py`, query heads
fastest. Programs take them in rounds, forth (0 1 2 ..) or back (.. 2 1 0) as the Thue-Morse
sequence says (forth, back, back, forth, then the same four the other way round, ..), which gives
each about the same work without synchronisation. Simply alternating forth and back is as even where
lengths fall steadily, but doubles the imbalance of a pattern that repeats every second round, as
the lengths of equal sequences do: 3 % of the time at 16 x 512 new tokens.

Keys are walked from the last tile that a row sees down to the first. Of those tiles a run in the
middle is seen whole by all rows; the ones before it hold the diagonal, and with a window the ones
after it hold its edge: only these need a mask.

Where items are too few for the programs and contexts long (SPLIT), an item's tiles are cut into
pieces of about equal length, each an item that leaves a part to `merge`. Their
number is that of the list, or for one sequence the one of `count_work` that takes the fewest
steps, as a round of all programs takes as long as its longest item.

A list of work (`prefill/order.py`) names the tiles; a batch of one sequence does without. Gluon.
"""

from typing import TYPE_CHECKING, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from backends.triton_gpu.prefill.order import (
    ENTRY,
    ITEM_STEPS,
    MERGE_STEPS,
    WAVES,
    count_steps,
)

if TYPE_CHECKING:
    from typing import TypeVar

    _F = TypeVar("_F")

    def gluon_function(function: _F) -> _F:
        """`gluon.jit` for functions that kernels call."""
else:
    gluon_function = gluon.jit

HALF = gl.constexpr(64)
"""Rows of an item that a group multiplies."""
WAVE_BITS = gl.constexpr(3)
"""For the number of a wave, from 1 on, below its number of steps."""


@gluon_function
def allocate_barriers(SLOTS: gl.constexpr, ARRIVALS: gl.constexpr) -> gl.tensor:
    """Barriers that complete after ARRIVALS arrivals each."""
    barriers = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(barriers.index(slot), count=ARRIVALS)
    return barriers


class Given(NamedTuple):
    """Arguments of the kernel that most of its warps read; see `prefill`."""

    out: gl.tensor
    partial: gl.tensor
    query_start_loc: gl.tensor
    seq_lens: gl.tensor
    work: gl.tensor
    most_items: gl.tensor
    sinks: gl.tensor
    scale: gl.tensor
    soft_cap: gl.tensor
    window: gl.tensor
    k_scale: gl.tensor
    v_scale: gl.tensor


class Ring(NamedTuple):
    """Tiles in shared memory that are filled and emptied in turn."""

    tiles: gl.tensor
    tails: gl.tensor
    """The smaller part of each row, of a head_dim that is no power of two."""
    full: gl.tensor
    """A barrier a tile: it has landed."""
    tails_full: gl.tensor
    """A barrier a tail, where there are fewer of them than tiles."""
    empty: gl.tensor
    """A barrier a tile: all that read it are done."""


class Rings(NamedTuple):
    """Of keys and of values."""

    k: gl.tensor
    v: gl.tensor
    turns: gl.tensor
    """A barrier a group: it may issue its products. Used if they take turns."""


class Land(NamedTuple):
    """The places where values land: in their ring, or in bytes before they are widened."""

    tiles: gl.tensor
    full: gl.tensor
    empty: gl.tensor


class Work(NamedTuple):
    """The numbers of items, of tiles and of their pieces."""

    items: gl.tensor
    """Of this program."""
    tiles: gl.tensor
    """Of query tokens in the batch, times their pieces."""
    pieces: gl.tensor
    """Of each, unless there is a list of work."""


class Item(NamedTuple):
    """A tile of rows, and which of the keys that it sees."""

    seq: gl.tensor
    row: gl.tensor
    """The first."""
    tokens: gl.tensor
    position: gl.tensor
    """Of the first query token."""
    length: gl.tensor
    """Of the sequence."""
    first: gl.tensor
    """Position of the sequence's first query token."""
    part: gl.tensor
    """The slice of the heads."""
    piece: gl.tensor
    pieces: gl.tensor
    number: gl.tensor


@gluon_function
def count_work(given: gl.tensor, FORM: gl.constexpr) -> gl.tensor:
    """Return the number of this program's items, and the tiles and pieces of all programs."""
    if FORM.planned:
        tiles = gl.load(given.work)
        pieces = tiles * 0 + 1
    else:
        query_len = gl.load(given.query_start_loc + 1) - gl.load(given.query_start_loc)
        tiles = (query_len + FORM.tokens - 1) // FORM.tokens
        pieces = tiles * 0 + 1
        if FORM.split:
            length = gl.load(given.seq_lens)
            pieces = _choose_pieces(tiles * FORM.slices, length, query_len, given.window, FORM)
            tiles = tiles * pieces
    items = tiles * FORM.slices
    programs = gl.num_programs(0)
    rounds = items // programs
    own = rounds + (find_turn(rounds) < items - rounds * programs).to(gl.int32)
    return Work(own, tiles, pieces)


@gluon_function
def _choose_pieces(
    items: gl.tensor, length: gl.tensor, query_len: gl.tensor, window: gl.tensor,
    FORM: gl.constexpr,
) -> gl.tensor:  # fmt: skip
    """Pieces of each item of a sequence; no more than each of them has tiles of keys."""
    programs = gl.num_programs(0)
    longest, most = count_steps(length, query_len, window, FORM.shape.tile, FORM.has_window)
    items = gl.maximum(items, 1)
    fewest = ((items + programs - 1) // programs * (longest + ITEM_STEPS)) << WAVE_BITS
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    wave = gl.arange(0, 32, LANES) % WAVES + 1  # all at once: divisions take long
    pieces = _pieces_of(wave, items, most, programs)
    rounds = (items * pieces + programs - 1) // programs
    steps = rounds * ((longest + pieces - 1) // pieces + ITEM_STEPS) + MERGE_STEPS
    fewest = gl.minimum(gl.min((steps << WAVE_BITS) + wave, 0), fewest)
    wave = fewest & ((1 << WAVE_BITS) - 1)
    return gl.where(wave > 0, _pieces_of(wave, items, most, programs), 1)


@gluon_function
def _pieces_of(
    wave: gl.tensor, items: gl.tensor, most: gl.tensor, programs: gl.tensor
) -> gl.tensor:
    """Pieces an item that make about `wave` rounds of the programs."""
    return gl.minimum(gl.maximum(wave * programs // items, 1), most)


@gluon_function
def find_turn(n: gl.tensor) -> gl.tensor:
    """This program's place in round n: from the end where n has an odd number of ones."""
    me = gl.program_id(0)
    n ^= n >> 16
    n ^= n >> 8
    n ^= n >> 4
    n ^= n >> 2
    n ^= n >> 1
    return gl.where(n % 2 == 0, me, gl.num_programs(0) - 1 - me)


@gluon_function
def read_item(n: gl.tensor, work: gl.tensor, given: gl.tensor, FORM: gl.constexpr) -> gl.tensor:
    """This program's n-th item, or any where there are no more; a while before it is needed."""
    n = gl.maximum(gl.minimum(n, work.items - 1), 0)
    item = n * gl.num_programs(0) + find_turn(n)
    rank = item // FORM.slices
    if FORM.planned:
        entry = given.work + ENTRY + rank * ENTRY
        seq = gl.load(entry)
        row = gl.load(entry + 1)
        tokens = gl.load(entry + 2)
        position = gl.load(entry + 3)
        length = gl.load(entry + 4)
        first = gl.load(entry + 5)
        piece = gl.load(entry + 6)
        pieces = gl.load(entry + 7)
    else:
        start = gl.load(given.query_start_loc)
        query_len = gl.load(given.query_start_loc + 1) - start
        length = gl.load(given.seq_lens)
        first = length - query_len
        pieces = work.pieces
        piece = rank % pieces
        skipped = (work.tiles - 1 - rank) // pieces * FORM.tokens
        seq = rank * 0
        row = start + skipped
        tokens = gl.minimum(query_len - skipped, FORM.tokens)
        position = first + skipped
    part = item % FORM.slices
    return Item(seq, row, tokens, position, length, first, part, piece, pieces, item)


@gluon_function
def find_heads(item: gl.tensor, FORM: gl.constexpr) -> tuple[gl.tensor, gl.tensor]:
    """(KV head, first query head) of an item."""
    EACH: gl.constexpr = (FORM.group + FORM.pack - 1) // FORM.pack
    kv_head = item.part // EACH
    return kv_head, kv_head * FORM.group + item.part % EACH * FORM.pack


@gluon_function
def find_rows(
    row: gl.tensor, item: gl.tensor, FORM: gl.constexpr
) -> tuple[gl.tensor, gl.tensor, gl.tensor]:
    """(query token, query head, whether it is there) of rows of an item, by their numbers."""
    kv_head, first = find_heads(item, FORM)
    token, head = row // FORM.pack, first + row % FORM.pack
    live = token < item.tokens
    if FORM.group % FORM.pack > 0:
        live = live & (head < (kv_head + 1) * FORM.group)
    return token, head, live


@gluon_function
def find_span(
    item: gl.tensor, window: gl.tensor, FORM: gl.constexpr
) -> tuple[gl.tensor, gl.tensor, gl.tensor, gl.tensor]:
    """Tiles of keys as limits: all are begin .. end - 1, seen whole are the third .. fourth - 1.

    begin <= third <= fourth <= end - 1: the last tile counts as one that needs a mask.
    """
    TILE: gl.constexpr = FORM.shape.tile
    stop = item.position + item.tokens
    end = (stop + TILE - 1) // TILE
    begin = stop * 0
    whole_begin = begin
    if FORM.has_window:
        begin = gl.maximum(item.position - window + 1, 0) // TILE
        whole_begin = (gl.maximum(stop - window, 0) + TILE - 1) // TILE
        whole_begin = gl.minimum(whole_begin, end - 1)
    whole_end = gl.maximum((item.position + 1) // TILE, whole_begin)
    if FORM.split:
        tiles = end - begin
        end = begin + (item.piece + 1) * tiles // item.pieces
        begin += item.piece * tiles // item.pieces
        whole_begin = gl.minimum(gl.maximum(whole_begin, begin), end - 1)
        whole_end = gl.maximum(whole_end, whole_begin)
    return begin, end, whole_begin, gl.minimum(whole_end, end - 1)


@gluon_function
def find_live(
    item: gl.tensor, window: gl.tensor, FORM: gl.constexpr
) -> tuple[gl.tensor, gl.tensor]:
    """Positions whose values are there to be read by an item, as limits: begin .. end - 1.

    Within the blocks that its rows see, those that some query of the sequence sees.
    """
    BLOCK_SIZE: gl.constexpr = FORM.block_size
    begin = item.length * 0
    if FORM.has_window:
        seen = gl.maximum(item.first - window + 1, 0)
        low = gl.maximum(item.position - window + 1, 0) // BLOCK_SIZE
        begin = gl.maximum(seen, low * BLOCK_SIZE)
    high = (item.position + item.tokens - 1) // BLOCK_SIZE
    return begin, gl.minimum(item.length, (high + 1) * BLOCK_SIZE)
