"""What each program of Hopper's prefill works on, and which tiles of keys an item takes.

An item is a tile of 128 rows: TOKENS query tokens of one sequence times PACK query heads of one KV
head. Items are numbered in the order of `prefill_order`, query heads fastest. Programs take them
in rounds, forth (0 1 2 ..) or back (.. 2 1 0) as the Thue-Morse sequence says (forth, back, back,
forth, then the same four the other way round, ..), which gives each about the same work without
asking anybody at run time. Taking turns, forth and back, gives the same where lengths fall evenly,
but doubles what is left of a pattern that repeats every other round, as lengths of equal sequences
do: 3 % of the time at 16 x 512 new tokens.

Keys are walked from the last tile that a row sees down to the first. Of those tiles a run in the
middle is seen whole by all rows; the ones before it hold the diagonal, and with a window the ones
after it hold its edge: only these need a mask.

Where items are too few for the programs and contexts long (SPLIT), an item's tiles are cut into
pieces of about equal length, each an item of its own that leaves a part to `hopper_merge`. Their
number is that of the list, or for one sequence the one of `count_tiles` that takes the fewest
steps, as a round of all programs takes as long as its longest item.

A list of work (`prefill_order`) names the tiles; a batch of one sequence does without. Gluon.
"""

from typing import TYPE_CHECKING

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from backends.triton_gpu.prefill_order import ENTRY, ITEM_STEPS, MERGE_STEPS, WAVES

if TYPE_CHECKING:
    from typing import TypeVar

    _F = TypeVar("_F")

    def gluon_function(function: _F) -> _F:
        """`gluon.jit` for functions that kernels call."""
else:
    gluon_function = gluon.jit

GROUPS = gl.constexpr(2)
"""Of four warps each that multiply an item's rows. Three gain nothing at a head_dim of 64."""
HALF = gl.constexpr(64)
"""Rows of an item that a group multiplies."""


@gluon_function
def count_tiles(
    query_start_loc: gl.tensor, seq_lens: gl.tensor, work: gl.tensor, window: gl.tensor,
    SLICES: gl.constexpr, TOKENS: gl.constexpr, TILE: gl.constexpr,
    HAS_WINDOW: gl.constexpr, PLANNED: gl.constexpr, SPLIT: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor]:  # fmt: skip
    """(tiles of query tokens in the batch times their pieces, pieces of each, if not PLANNED)."""
    if PLANNED:
        tiles = gl.load(work)
        pieces = tiles * 0 + 1
    else:
        query_len = gl.load(query_start_loc + 1) - gl.load(query_start_loc)
        tiles = (query_len + TOKENS - 1) // TOKENS
        pieces = tiles * 0 + 1
        if SPLIT:
            length = gl.load(seq_lens)
            pieces = _choose_pieces(
                tiles * SLICES, length, length - query_len, window, TILE, HAS_WINDOW
            )
            tiles = tiles * pieces
    return tiles, pieces


@gluon_function
def _choose_pieces(
    items: gl.tensor, length: gl.tensor, first: gl.tensor, window: gl.tensor,
    TILE: gl.constexpr, HAS_WINDOW: gl.constexpr,
) -> gl.tensor:  # fmt: skip
    """Pieces of each item of a sequence; no more than each of them has tiles of keys."""
    programs = gl.num_programs(0)
    least = first + 1
    longest = (length + TILE - 1) // TILE
    if HAS_WINDOW:
        least = gl.minimum(least, window)
        longest = gl.minimum(longest, window // TILE + 2)
    most = gl.maximum(gl.minimum((least + TILE - 1) // TILE, longest // 2), 1)
    items = gl.maximum(items, 1)
    best = items * 0 + 1
    fewest = (items + programs - 1) // programs * (longest + ITEM_STEPS)
    for wave in gl.static_range(1, WAVES + 1):
        pieces = gl.minimum(gl.maximum(wave * programs // items, 1), most)
        rounds = (items * pieces + programs - 1) // programs
        steps = rounds * ((longest + pieces - 1) // pieces + ITEM_STEPS) + MERGE_STEPS
        best = gl.where(steps < fewest, pieces, best)
        fewest = gl.minimum(steps, fewest)
    return best


@gluon_function
def count_items(items: gl.tensor) -> gl.tensor:
    """How many of the items are this program's."""
    programs = gl.num_programs(0)
    rounds = items // programs
    return rounds + (_turn(rounds) < items - rounds * programs).to(gl.int32)


@gluon_function
def _turn(n: gl.tensor) -> gl.tensor:
    """This program's place in round n: from the end where n has an odd number of ones."""
    me = gl.program_id(0)
    n ^= n >> 16
    n ^= n >> 8
    n ^= n >> 4
    n ^= n >> 2
    n ^= n >> 1
    return gl.where(n % 2 == 0, me, gl.num_programs(0) - 1 - me)


@gluon_function
def read_item(
    n: gl.tensor, items: gl.tensor, tiles: gl.tensor, pieces: gl.tensor,
    query_start_loc: gl.tensor, seq_lens: gl.tensor, work: gl.tensor,
    SLICES: gl.constexpr, TOKENS: gl.constexpr, PLANNED: gl.constexpr,
) -> tuple[gl.tensor, ...]:  # fmt: skip
    """This program's n-th item, or any where there are no more; read one ahead, it takes a while.

    (sequence, first row, query tokens, position of the first, keys of the sequence, position of its
    first query token, which slice of the heads, which piece, how many there are, its number).
    """
    n = gl.maximum(gl.minimum(n, items - 1), 0)
    item = n * gl.num_programs(0) + _turn(n)
    rank = item // SLICES
    if PLANNED:
        entry = work + ENTRY + rank * ENTRY
        s = gl.load(entry)
        row = gl.load(entry + 1)
        tokens = gl.load(entry + 2)
        position = gl.load(entry + 3)
        length = gl.load(entry + 4)
        first = gl.load(entry + 5)
        piece = gl.load(entry + 6)
        pieces = gl.load(entry + 7)
    else:
        start = gl.load(query_start_loc)
        query_len = gl.load(query_start_loc + 1) - start
        length = gl.load(seq_lens)
        first = length - query_len
        piece = rank % pieces
        skipped = (tiles - 1 - rank) // pieces * TOKENS
        s = rank * 0
        row = start + skipped
        tokens = gl.minimum(query_len - skipped, TOKENS)
        position = first + skipped
    return s, row, tokens, position, length, first, item % SLICES, piece, pieces, item


@gluon_function
def find_span(
    position: gl.tensor, tokens: gl.tensor, piece: gl.tensor, pieces: gl.tensor,
    window: gl.tensor, TILE: gl.constexpr, HAS_WINDOW: gl.constexpr, SPLIT: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor, gl.tensor, gl.tensor]:  # fmt: skip
    """Tiles of keys as limits: all are begin .. end - 1, seen whole are the third .. fourth - 1.

    begin <= third <= fourth <= end - 1: the last tile counts as one that needs a mask.
    """
    stop = position + tokens
    end = (stop + TILE - 1) // TILE
    begin = stop * 0
    whole_begin = begin
    if HAS_WINDOW:
        begin = gl.maximum(position - window + 1, 0) // TILE
        whole_begin = (gl.maximum(stop - window, 0) + TILE - 1) // TILE
        whole_begin = gl.minimum(whole_begin, end - 1)
    whole_end = gl.maximum((position + 1) // TILE, whole_begin)
    if SPLIT:
        tiles = end - begin
        end = begin + (piece + 1) * tiles // pieces
        begin += piece * tiles // pieces
        whole_begin = gl.minimum(gl.maximum(whole_begin, begin), end - 1)
        whole_end = gl.maximum(whole_end, whole_begin)
    return begin, end, whole_begin, gl.minimum(whole_end, end - 1)


@gluon_function
def find_live(
    position: gl.tensor, tokens: gl.tensor, length: gl.tensor, first: gl.tensor,
    window: gl.tensor, BLOCK_SIZE: gl.constexpr, HAS_WINDOW: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor]:  # fmt: skip
    """Positions whose values are there to be read by an item, as limits: begin .. end - 1.

    Within the blocks that its rows see, those that some query of the sequence sees.
    """
    begin = length * 0
    if HAS_WINDOW:
        seen = gl.maximum(first - window + 1, 0)
        low = gl.maximum(position - window + 1, 0) // BLOCK_SIZE
        begin = gl.maximum(seen, low * BLOCK_SIZE)
    high = (position + tokens - 1) // BLOCK_SIZE
    return begin, gl.minimum(length, (high + 1) * BLOCK_SIZE)
