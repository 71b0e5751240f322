"""The positions of each row's highest scores, on a GPU.

Grid: (rows, chunks of scores). A program holds a chunk in registers as numbers of the same order as
the scores, finds the lowest one chosen by bisection, a bit at a time, until exactly as many are at
or above it as are chosen, and writes their positions in ascending order. Equal scores at the end of
the bisection are taken from the lowest position on.

A row of several chunks takes several launches: each chunk gives its `count` best, and the next
launch chooses among these, until one chunk is left. What is among the best of a row is among the
best of its chunk, with the same order of equals, so the result is exact. Bytes moved: 4 a score,
and 8 a position of each level. How many levels there are follows from the width of `scores`.
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
_TOP = tl.constexpr(-0x80000000)


class Form(NamedTuple):
    """Compile-time values."""

    most: int
    """Positions chosen of a chunk."""
    room: int
    """`most` as a power of two: places of a chunk between levels."""
    chunk: int
    """Scores or positions a program."""
    is_first: bool
    """Chooses among scores, not among positions of the level before."""
    is_last: bool
    """Writes the result."""


@device_function
def _ordered(scores: tl.tensor) -> tl.tensor:
    """float32 as int32 of the same order; -0 is 0."""
    word = (scores + 0.0).to(tl.int32, bitcast=True)
    return word ^ ((word >> 31) & 0x7FFFFFFF)


@device_function
def _lowest(numbers: tl.tensor, live: tl.tensor, count: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """(the largest number that at least `count` live ones reach, how many do)."""
    low = count * 0 + _TOP
    found = tl.sum(live.to(tl.int32), 0)
    bit = count * 0 + 31
    while (bit >= 0) & (found != count):
        higher = low ^ (1 << bit)  # of the lowest number the sign is the first bit to be raised
        reach = tl.sum((live & (numbers >= higher)).to(tl.int32), 0)
        is_low = reach >= count
        low = tl.where(is_low, higher, low)
        found = tl.where(is_low, reach, found)
        bit -= 1
    return low, found


@launcher(
    integers=("stride", "num_seqs", "first_row", "span", "width"),
    indices=("before", "out", "query_start_loc", "seq_lens"),
    pointers=("scores",),
)
def _choose(
    scores: tl.tensor,  # float32 [rows, at least the longest length]
    before: tl.tensor,  # int32 [rows, width], positions of the level before
    out: tl.tensor,  # int32 [rows, chunks, room], or of the last level [rows, count]
    query_start_loc: tl.tensor,  # int32 [num_seqs + 1]
    seq_lens: tl.tensor,  # int32 [num_seqs]
    stride: tl.tensor,  # of the scores
    num_seqs: tl.tensor,
    first_row: tl.tensor,
    span: tl.tensor,  # tokens that `room` positions of the level before were chosen from
    width: tl.tensor,
    FORM: tl.constexpr,
) -> None:
    CHUNK: tl.constexpr = FORM.chunk
    ROOM: tl.constexpr = FORM.room
    i = tl.program_id(0)
    _, length = find_row(query_start_loc, seq_lens, num_seqs, first_row + i)
    first = tl.program_id(1) * CHUNK
    tokens = first if FORM.is_first else first // ROOM * span
    if (length == 0) | (tokens >= length):
        return
    scores += i.to(tl.int64) * stride
    here = first + tl.arange(0, CHUNK)
    if FORM.is_first:
        position = here
        live = here < length
    else:
        live = (here < width) & (here % ROOM < tl.minimum(length - here // ROOM * span, FORM.most))
        position = tl.load(before + i.to(tl.int64) * width + here, mask=live, other=0)
    numbers = _ordered(tl.load(scores + position, mask=live, other=0.0))
    count = tl.minimum(tl.sum(live.to(tl.int32), 0), FORM.most)
    lowest, found = _lowest(numbers, live, count)
    chosen = live & (numbers >= lowest)
    if found != count:  # some that are equal to the lowest are not chosen
        above = live & (numbers > lowest)
        equal = (live & (numbers == lowest)).to(tl.int32)
        left = count - tl.sum(above.to(tl.int32), 0)
        chosen = above | ((equal > 0) & (tl.cumsum(equal, 0) <= left))
    place = tl.cumsum(chosen.to(tl.int32), 0) - 1
    if FORM.is_last:
        out += i.to(tl.int64) * FORM.most
        rest = tl.arange(0, ROOM)
        tl.store(out + rest, -1, mask=(rest >= count) & (rest < FORM.most))
    else:
        out += (i.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * ROOM
    tl.store(out + place, position, mask=chosen)


def chunk_for(count: int) -> int:
    """Scores a program: a power of two, at least twice what is chosen of them."""
    room = power_of_two(count)
    return max(2 * room, min(MOST_CHUNK, max(LEAST_CHUNK, 8 * room)))


def level_widths(count: int) -> tuple[int, int, int]:
    """Widths of scores that take one launch, two, and three."""
    chunk = chunk_for(count)
    return chunk, 2 * chunk, 2 * chunk * (chunk // power_of_two(count))


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
    room, chunk = power_of_two(count), chunk_for(count)
    launches: list[Launch] = []
    sizes: list[int] = []
    width, span = max(1, scores.shape[1]), 1
    while True:
        chunks = ceil_div(width, chunk)
        form = Form(count, room, chunk, not launches, chunks == 1)
        warps = min(16, max(4, chunk // 1024))
        variant = _choose.variant(place, out.device, (), (form,), num_warps=warps)
        numbers = (scores.stride(0), batch.num_seqs, first_row, span, width)
        launches.append(Launch(variant, (num_rows, chunks, 1), numbers))
        if chunks == 1:
            return Plan(tuple(launches), tuple(sizes))
        sizes.append(num_rows * chunks * room)
        span = chunk if len(launches) == 1 else span * (chunk // room)
        width = chunks * room
