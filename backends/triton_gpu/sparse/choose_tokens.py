"""The positions of each row's highest scores, on a GPU.

Grid: (rows, chunks of scores). A program holds a chunk in registers as integers of the same order
as the scores, and cuts the range of the lowest one chosen in three, time after time, by counting
how many are at or above two numbers, until as many are chosen as there is room for. It writes their
positions in ascending order. Equal scores at the end of the search are taken from the lowest
position on.

A row of several chunks takes several launches: each chunk gives a few more than its `count` best,
or just these, and the next launch chooses among them, until one chunk is left. What is among the
best of a row is among the best of its chunk, with the same order of equals, so the result is exact.
Bytes moved: 4 a score, and 8 a position of each level. How many levels there are follows from the
width of `scores`.
"""

from typing import NamedTuple, cast

import torch
import triton.language as tl
from torch import Tensor

from backends.checks import check_choose_tokens
from backends.contract import Backend, PagedBatch
from backends.triton_gpu.shared.launch import Launch, launcher
from backends.triton_gpu.shared.place import Place, ceil_div, device_function, power_of_two, sign
from backends.triton_gpu.sparse.rows import find_row

MOST_CHOSEN = 8192
LEAST_CHUNK, MOST_CHUNK = 1024, 16384
LINE = tl.constexpr(32)
"""Scores of a chunk that lie in one warp."""
_DEAD = tl.constexpr(-0x80000000)
"""Below every score."""


class Form(NamedTuple):
    """Compile-time values."""

    most: int
    """Positions chosen of a row."""
    before: int
    """Places of a chunk of the level before."""
    room: int
    """Positions that a chunk may give, and its places in `out`; of the last level `most`."""
    chunk: int
    """Scores or positions a program."""
    is_first: bool
    """Chooses among scores, not among positions of the level before."""

    @property
    def places(self) -> int:
        """`room` as a power of two."""
        return power_of_two(self.room)


@device_function
def _ordered(scores: tl.tensor) -> tl.tensor:
    """float32 as int32 of the same order; -0 is 0."""
    word = (scores + 0.0).to(tl.int32, bitcast=True)
    return word ^ ((word >> 31) & 0x7FFFFFFF)


@device_function
def _lowest(
    numbers: tl.tensor, count: tl.tensor, total: tl.tensor, ROOM: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """(a number that at least `count` reach, how many do): at most ROOM, or it is the largest."""
    low = count.to(tl.int64) * 0 + _DEAD
    high = low + 0x100000000
    found = total
    while (found > ROOM) & (high - low > 1):
        first = low + (high - low + 2) // 3
        second = tl.minimum(first + (high - low) // 3, high - 1)
        is_first, is_second = numbers >= first.to(tl.int32), numbers >= second.to(tl.int32)
        both = tl.sum(tl.where(is_first, 1, 0) + tl.where(is_second, 0x10000, 0), 0)
        reach, further = both & 0xFFFF, both >> 16
        high = tl.where(further >= count, high, tl.where(reach >= count, second, first))
        low = tl.where(further >= count, second, tl.where(reach >= count, first, low))
        found = tl.where(further >= count, further, tl.where(reach >= count, reach, found))
    return low.to(tl.int32), found


@device_function
def _ranks(flags: tl.tensor, CHUNK: tl.constexpr) -> tl.tensor:
    """Count the set flags up to each, itself included: along a line in a warp, then over lines."""
    lines = tl.reshape(flags, [CHUNK // LINE, LINE])
    totals = tl.sum(lines, 1)
    ranks = tl.cumsum(lines, 1) + (tl.cumsum(totals, 0) - totals)[:, None]
    return tl.reshape(ranks, [CHUNK])


@launcher(
    integers=("stride", "num_seqs", "first_row", "span", "width"),
    indices=("before", "out", "query_start_loc", "seq_lens"),
    pointers=("scores",),
)
def _choose(
    scores: tl.tensor,  # float32 [rows, at least the longest length]
    before: tl.tensor,  # int32 [rows, width], positions of the level before
    out: tl.tensor,  # int32 [rows, chunks, room], of the last level one chunk
    query_start_loc: tl.tensor,  # int32 [num_seqs + 1]
    seq_lens: tl.tensor,  # int32 [num_seqs]
    stride: tl.tensor,  # of the scores
    num_seqs: tl.tensor,
    first_row: tl.tensor,
    span: tl.tensor,  # tokens of a row that a chunk of the level before was chosen from
    width: tl.tensor,
    FORM: tl.constexpr,
) -> None:
    CHUNK: tl.constexpr = FORM.chunk
    BEFORE: tl.constexpr = FORM.before
    ROOM: tl.constexpr = FORM.room
    i = tl.program_id(0)
    _, length = find_row(query_start_loc, seq_lens, num_seqs, first_row + i)
    first = tl.program_id(1) * CHUNK
    tokens = first if FORM.is_first else first // BEFORE * span
    if (length == 0) | (tokens >= length):
        return
    scores += i.to(tl.int64) * stride
    position = first + tl.arange(0, CHUNK)
    live = position < length
    if not FORM.is_first:
        live = (position < width) & (position // BEFORE * span < length)
        position = tl.load(before + i.to(tl.int64) * width + position, mask=live, other=-1)
        live = position >= 0
    numbers = _ordered(tl.load(scores + position, mask=live, other=0.0))
    numbers = tl.where(live, numbers, _DEAD)
    total = tl.sum(live.to(tl.int32), 0)
    count = tl.minimum(total, FORM.most)
    lowest, found = _lowest(numbers, count, total, ROOM)
    chosen = live & (numbers >= lowest)
    if found > ROOM:  # some that are equal to the lowest are not chosen
        above = live & (numbers > lowest)
        equal = (live & (numbers == lowest)).to(tl.int32)
        left = count - tl.sum(above.to(tl.int32), 0)
        chosen = above | ((equal > 0) & (_ranks(equal, CHUNK) <= left))
        found = count
    place = _ranks(chosen.to(tl.int32), CHUNK) - 1
    out += (i.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * ROOM
    rest = tl.arange(0, FORM.places)
    tl.store(out + rest, -1, mask=(rest >= found) & (rest < ROOM))
    tl.store(out + place, position, mask=chosen)


def chunk_for(count: int) -> int:
    """The number of scores per program: a power of two, at least twice `count`."""
    room = power_of_two(count)
    return max(2 * room, min(MOST_CHUNK, max(LEAST_CHUNK, 8 * room)))


def level_widths(count: int) -> list[int]:
    """Widths of scores among whose levels are those of every width up to 2^22."""
    chunk = chunk_for(count)
    fewer = chunk // power_of_two(count)
    return [min(chunk * n, 1 << 22) for n in (1, 2, fewer, 2 * fewer, fewer * fewer)]


class Plan(NamedTuple):
    """The launches of a call, a level each."""

    levels: tuple[Launch, ...]
    sizes: tuple[int, ...]
    """int32 numbers that each level but the last writes."""


def choose_tokens(
    backend: Backend,
    place: Place,
    scores: Tensor,
    batch: PagedBatch,
    first_row: int,
    out: Tensor,
) -> None:
    """Choose the tokens of some rows; see `SparseBackend.choose_tokens`.

    Raises:
        InvalidArgumentError: a shape, dtype or device breaks the contract; nothing written.
    """
    key = ("choose", sign(scores), batch.form, first_row, sign(out))
    plan = cast("Plan | None", place.plan(key))
    if plan is None or batch.max_seq_len > scores.shape[1]:
        check_choose_tokens(backend, scores, batch, first_row, out)
        plan = plan_choose(place, scores, batch, first_row, out)
        place.keep(key, plan)
    if not (batch.num_seqs and scores.numel()):
        return
    before = out
    for launch, size in zip(plan.levels, (*plan.sizes, 0), strict=True):
        to = torch.empty(size, dtype=torch.int32, device=out.device) if size else out
        launch.run((scores, before, to, batch.query_start_loc, batch.seq_lens))
        before = to


def plan_choose(
    place: Place, scores: Tensor, batch: PagedBatch, first_row: int, out: Tensor
) -> Plan:
    """Plan a call whose arguments have been checked; compiles nothing."""
    num_rows, count = out.shape
    least, chunk = power_of_two(count), chunk_for(count)
    launches: list[Launch] = []
    sizes: list[int] = []
    width, span, before = max(1, scores.shape[1]), 1, 1
    while True:
        chunks = ceil_div(width, chunk)
        room = 2 * least if 2 * least * chunks <= chunk else least
        form = Form(count, before, count if chunks == 1 else room, chunk, not launches)
        warps = min(16, max(4, chunk // 1024))
        variant = _choose.variant(place, out.device, (), (form,), num_warps=warps)
        numbers = (scores.stride(0), batch.num_seqs, first_row, span, width)
        launches.append(Launch(variant, (num_rows, chunks, 1), numbers))
        if chunks == 1:
            return Plan(tuple(launches), tuple(sizes))
        sizes.append(num_rows * chunks * room)
        span, width, before = span * (chunk // before), chunks * room, room
