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

A list of work (`prefill_order`) names the tiles; a batch of one sequence does without. Gluon.
"""

# ruff: noqa: N803 - compile-time arguments are upper case, as everywhere in Triton

from typing import TYPE_CHECKING

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from backends.triton_gpu.prefill_order import ENTRY

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    from backends.triton_gpu.place import Kernel

    _F = TypeVar("_F")

    def gluon_function(function: _F) -> _F:
        """`gluon.jit` for functions that kernels call."""

    def gluon_kernel(**options: object) -> Callable[[Callable[..., None]], Kernel]:
        """`gluon.jit` with options."""
else:
    gluon_function = gluon.jit
    gluon_kernel = gluon.jit

HALF = gl.constexpr(64)
"""Rows of an item that one group of four warps multiplies."""


@gluon_function
def count_tiles(
    query_start_loc: gl.tensor, work: gl.tensor, TOKENS: gl.constexpr, PLANNED: gl.constexpr
) -> gl.tensor:
    """Tiles of query tokens in the batch."""
    if PLANNED:
        return gl.load(work)
    else:  # noqa: RET505 - a compile-time branch
        query_len = gl.load(query_start_loc + 1) - gl.load(query_start_loc)
        return (query_len + TOKENS - 1) // TOKENS


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
    n: gl.tensor,
    items: gl.tensor,
    tiles: gl.tensor,
    query_start_loc: gl.tensor,
    seq_lens: gl.tensor,
    work: gl.tensor,
    SLICES: gl.constexpr,
    TOKENS: gl.constexpr,
    PLANNED: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor, gl.tensor, gl.tensor, gl.tensor, gl.tensor, gl.tensor]:
    """This program's n-th item, or any where there are no more; read one ahead, it takes a while.

    (sequence, first row, query tokens, position of the first, keys of the sequence, position of its
    first query token, which slice of the heads).
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
    else:
        start = gl.load(query_start_loc)
        query_len = gl.load(query_start_loc + 1) - start
        length = gl.load(seq_lens)
        first = length - query_len
        skipped = (tiles - 1 - rank) * TOKENS
        s = rank * 0
        row = start + skipped
        tokens = gl.minimum(query_len - skipped, TOKENS)
        position = first + skipped
    return s, row, tokens, position, length, first, item % SLICES


@gluon_function
def find_span(
    position: gl.tensor,
    tokens: gl.tensor,
    window: gl.tensor,
    TILE: gl.constexpr,
    HAS_WINDOW: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor, gl.tensor, gl.tensor]:
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
    return begin, end, whole_begin, gl.minimum(whole_end, end - 1)
