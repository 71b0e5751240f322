"""Merge the parts of split sequences into their output rows on a GPU, after decode and prefill.

    out[h] = sum_c 2^(lse_c - top) part_c / sum_c 2^(lse_c - top),  top = max_c lse_c

Layout: part_c and lse_c (base 2) of the parts c of all sequences, side by side in the order of the
plan, float32; of sequences that share a prefix also the parts that `cascade` has left. A row is a
query token and head of a sequence. Grid: (slices of the rows, sequence); a program works the plan
out again (see splits), while the kernel before it still runs where the GPU can launch early, and
returns at once for a sequence in one part. All parts of a row are loaded together where registers
can hold them.
Bytes moved: each part read once. The sum's order is the chunks', so that it is deterministic.
"""

import math
from dataclasses import dataclass

import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from backends.contract import PagedBatch
from backends.triton_gpu.cascade import (
    KEYS_A_CHUNK,
    MOST_CHUNKS,
    WHOLE,
    Shared,
    keys_a_part,
    load_shared,
)
from backends.triton_gpu.launch import Variant, launcher
from backends.triton_gpu.place import Place, ceil_div, device_function, power_of_two
from backends.triton_gpu.splits import Grid, find_parts

WARPS = 2
MANY_WARPS = 4
"""Where there are many sequences, of which one may have most of the parts, and where the rows of
one sequence are wider than WIDEST."""
MANY_SEQS = 64
MANY_PROGRAMS = 2100
"""More would start one after the other; then a program takes several heads."""
WIDEST = 256
PIECE = 64
"""Numbers of a row that a program merges, if it has more than WIDEST; twice as many where there are
many sequences."""
FEW_PARTS = 64
"""Loaded together where there are many sequences, most of which have few."""
FEWEST_PARTS = tl.constexpr(4)
"""Of a sequence that has no more, all rows of a program are merged together, whole."""
WIDE_HEADS = 4
"""A program, of rows wider than WIDEST, where there are many sequences."""
AT_ONCE = 2048
"""Numbers of a part that a program loads together, of such rows."""


@device_function
def _add_parts(
    parts: tl.tensor, lses: tl.tensor, first: tl.tensor, count: tl.tensor, step: tl.tensor,
    row: tl.tensor, rows: tl.tensor, piece: tl.tensor,
    highest: tl.tensor, total: tl.tensor, sums: tl.tensor,
    HEAD_DIM: tl.constexpr, STEP: tl.constexpr, WIDTH: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Add a row's parts, `step` apart, to (highest, total, sums): WIDTH numbers from `piece` on."""
    dim = piece + tl.arange(0, WIDTH)
    for begin in range(0, count, STEP):
        index = begin + tl.arange(0, STEP)
        entry = (first + index * step) * rows + row
        live = index < count
        mask = live[:, None] & (dim < HEAD_DIM)[None, :]
        part = tl.load(parts + entry[:, None] * HEAD_DIM + dim[None, :], mask=mask, other=0.0)
        lse = tl.load(lses + entry, mask=live, other=float("-inf"))
        now = tl.maximum(highest, tl.max(lse, 0))
        weight = tl.exp2(lse - now)
        rescale = tl.exp2(highest - now)
        sums = sums * rescale + tl.sum(part * weight[:, None], 0)
        total = total * rescale + tl.sum(weight, 0)
        highest = now
    return highest, total, sums


@device_function
def _merge_many(
    partial: tl.tensor, lses: tl.tensor, out: tl.tensor, first: tl.tensor, count: tl.tensor,
    start: tl.tensor, o_stride: tl.tensor, rows: tl.tensor,
    shared_partial: tl.tensor, sharer: tl.tensor, parts_too: tl.tensor, sharing: tl.tensor,
    shared_chunks: tl.tensor,
    O_HEAD: tl.constexpr, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    HAS_SHARED: tl.constexpr, HEADS: tl.constexpr, STEP: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    """A program's piece of its rows, one row after the other."""
    piece = tl.program_id(2) * WIDTH
    dim = piece + tl.arange(0, WIDTH)
    shared_lses = shared_partial + shared_chunks * sharing * (NUM_HEADS * HEAD_DIM)
    for h in range(HEADS):
        row = tl.program_id(0) * HEADS + h
        head = row % NUM_HEADS
        highest, total, sums = _add_parts(
            partial, lses, first, count, 1, row, rows, piece,
            tl.full([], -1e30, tl.float32), tl.full([], 0.0, tl.float32),
            tl.zeros([WIDTH], tl.float32), HEAD_DIM, STEP, WIDTH,
        )  # fmt: skip
        if HAS_SHARED:
            highest, total, sums = _add_parts(
                shared_partial, shared_lses, sharer, parts_too, sharing, head, NUM_HEADS, piece,
                highest, total, sums, HEAD_DIM, STEP, WIDTH,
            )  # fmt: skip
        to = out + (start + row // NUM_HEADS).to(tl.int64) * o_stride + head * O_HEAD + dim
        tl.store(to, (sums / total).to(out.dtype.element_ty), mask=dim < HEAD_DIM)


@device_function
def _merge_few(
    partial: tl.tensor, lses: tl.tensor, out: tl.tensor, first: tl.tensor, count: tl.tensor,
    start: tl.tensor, o_stride: tl.tensor, rows: tl.tensor,
    O_HEAD: tl.constexpr, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEADS: tl.constexpr,
    WIDTH: tl.constexpr, TOGETHER: tl.constexpr,
) -> None:  # fmt: skip
    """All rows of a program whose sequence has at most FEWEST_PARTS, all parts loaded at once."""
    part = tl.arange(0, FEWEST_PARTS)
    dim = tl.arange(0, WIDTH)
    for base in range(0, HEADS, TOGETHER):
        h = base + tl.arange(0, TOGETHER)
        row = tl.program_id(0) * HEADS + h
        entry = (first + part)[None, :] * rows + row[:, None]
        there = (h < HEADS)[:, None] & (part < count)[None, :]
        lse = tl.load(lses + entry, mask=there, other=float("-inf"))
        mask = there[:, :, None] & (dim < HEAD_DIM)[None, None, :]
        at = partial + entry[:, :, None] * HEAD_DIM + dim[None, None, :]
        parts = tl.load(at, mask=mask, other=0.0)
        top = tl.where(h < HEADS, tl.max(lse, 1), 0.0)
        weight = tl.exp2(lse - top[:, None])
        total = tl.where(h < HEADS, tl.sum(weight, 1), 1.0)
        sums = tl.sum(parts * weight[:, :, None], 1) / total[:, None]
        to = (start + row // NUM_HEADS).to(tl.int64) * o_stride + row % NUM_HEADS * O_HEAD
        mask = (h < HEADS)[:, None] & (dim < HEAD_DIM)[None, :]
        tl.store(out + to[:, None] + dim[None, :], sums.to(out.dtype.element_ty), mask=mask)


@launcher(
    integers=(
        "o_stride", "num_seqs", "most", "items", "window", "target", "sharing", "shared_chunks",
    ),
    indices=("query_start_loc", "seq_lens", "shared_now"),
    pointers=("out",),
)  # fmt: skip
def _merge_parts(
    partial: tl.tensor,  # float32 [parts, most, num_q_heads, head_dim], then without head_dim
    shared_partial: tl.tensor,  # likewise [shared_chunks * sharing, ...], read if HAS_SHARED
    out: tl.tensor,  # [num_tokens, num_q_heads, head_dim]
    query_start_loc: tl.tensor,  # int32 [num_seqs + 1]
    seq_lens: tl.tensor,  # int32 [num_seqs]
    shared_now: tl.tensor,  # int32 [3], read if HAS_SHARED
    o_stride: tl.tensor,  # from token to token
    num_seqs: tl.tensor,
    most: tl.tensor,  # query tokens of a sequence that decode takes
    items: tl.tensor,  # parts at most, of all sequences
    window: tl.tensor,
    target: tl.tensor,
    sharing: tl.tensor,  # sequences at most; used if HAS_SHARED, as the next
    shared_chunks: tl.tensor,  # at most
    O_HEAD: tl.constexpr,  # from head to head
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    MANY: tl.constexpr,  # query tokens of a sequence, otherwise one
    TILE: tl.constexpr,
    VECTOR: tl.constexpr,
    ALIKE: tl.constexpr,
    HEADS: tl.constexpr,  # a program
    STEP: tl.constexpr,  # parts loaded at once
    WIDTH: tl.constexpr,  # numbers of a row that a program merges
    WHOLE_WIDTH: tl.constexpr,  # head_dim as a power of two
    TOGETHER: tl.constexpr,  # rows that are merged together, of few parts
    CHAINED: tl.constexpr,
    KEYS: tl.constexpr,  # a part of what is shared, as the next two
    PREFIX_TILE: tl.constexpr,
    WHOLE: tl.constexpr,
) -> None:
    s = tl.program_id(1)
    start = tl.load(query_start_loc + s)
    shared = load_shared(shared_now, num_seqs, HAS_SHARED, WHOLE)
    query_len = tl.load(query_start_loc + s + 1) - start
    first, count = find_parts(
        query_start_loc, seq_lens, s, num_seqs, target, most, window, shared,
        HAS_WINDOW, HAS_SHARED, TILE, VECTOR, ALIKE,
    )  # fmt: skip
    parts_too = 0
    if HAS_SHARED:
        keys = keys_a_part(shared[2], shared_chunks, KEYS, PREFIX_TILE)
        inside = (s >= shared[0]) & (s < shared[1])
        parts_too = tl.where(inside, (shared[2] + keys - 1) // keys, 0)
    if CHAINED:
        gdc_launch_dependents()
        gdc_wait()
    if (count == 0) | (count + parts_too == 1):
        return
    if tl.program_id(0) * HEADS // NUM_HEADS >= query_len:
        return
    rows = NUM_HEADS  # known to the compiler, unless MANY
    if MANY:
        rows = most * NUM_HEADS
    lses = partial + items * rows * HEAD_DIM
    if HAS_SHARED:
        _merge_many(
            partial, lses, out, first, count, start, o_stride, rows,
            shared_partial, s - shared[0], parts_too, sharing, shared_chunks,
            O_HEAD, NUM_HEADS, HEAD_DIM, HAS_SHARED, HEADS, STEP, WIDTH,
        )  # fmt: skip
    elif count > FEWEST_PARTS:
        _merge_many(
            partial, lses, out, first, count, start, o_stride, rows,
            shared_partial, s, parts_too, sharing, shared_chunks,
            O_HEAD, NUM_HEADS, HEAD_DIM, HAS_SHARED, HEADS, STEP, WIDTH,
        )  # fmt: skip
    elif tl.program_id(2) == 0:
        _merge_few(
            partial, lses, out, first, count, start, o_stride, rows,
            O_HEAD, NUM_HEADS, HEAD_DIM, HEADS, WHOLE_WIDTH, TOGETHER,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Plan:
    """All of a launch but the tensors."""

    variant: Variant
    grid: tuple[int, int, int]
    numbers: tuple[int, ...]
    """Those that come first: the output's stride, num_seqs, most, items."""
    target: int


def plan_merge(
    place: Place,
    batch: PagedBatch,
    out: Tensor,
    grid: Grid,
    *,
    group: int,
    most: int,
    window: int | None,
    tile: int,
    shared: Shared,
) -> Plan:
    """How the sequences in several parts are merged; a tile is as many keys as in `decode`."""
    num_heads, head_dim = out.shape[1:]
    parts = power_of_two(max(grid.most, MOST_CHUNKS if shared.chunks else 1))
    width = power_of_two(head_dim)
    if head_dim > WIDEST:
        width = PIECE if grid.vector < MANY_SEQS else 2 * PIECE
    heads, pieces = 1, ceil_div(head_dim, width)
    if pieces > 1 and grid.vector >= MANY_SEQS:
        heads = math.gcd(num_heads, WIDE_HEADS)
    elif not (grid.alike or shared.chunks):
        heads = heads_a_program(grid.vector, num_heads, group, many=most > 1)
    is_wide = pieces > 1 and grid.vector == 1
    warps = MANY_WARPS if is_wide or grid.vector >= MANY_SEQS else WARPS
    at_once = parts_at_once(parts, width, warps)
    step = at_once if grid.vector < MANY_SEQS and not shared.chunks else min(parts, FEW_PARTS)
    whole = power_of_two(head_dim)
    together = min(power_of_two(heads), max(1, AT_ONCE // whole))
    chained = place.can_chain(out.device)
    constants = (
        out.stride(1), num_heads, head_dim, window is not None, shared.chunks > 0, most > 1, tile,
        grid.vector, grid.alike, heads, step, width, whole,
        together, chained, KEYS_A_CHUNK, shared.tile, WHOLE,
    )  # fmt: skip
    options = {"launch_pdl": True} if chained else {}
    variant = _merge_parts.variant(
        place, out.device, (out.dtype,), constants, num_warps=warps, **options
    )
    numbers = (out.stride(0), batch.num_seqs, most, grid.items)
    shape = (most * num_heads // heads, batch.num_seqs, pieces)
    return Plan(variant, shape, numbers, grid.target)


def heads_a_program(vector: int, num_heads: int, group: int, *, many: bool) -> int:
    """Heads that a program merges one after the other: few where programs are few."""
    if many:
        return 1 if vector < MANY_SEQS else group
    fits = (n for n in range(1, group + 1) if vector * num_heads // n <= MANY_PROGRAMS)
    return next((n for n in fits if group % n == 0), group)


def merge(
    plan: Plan, partial: Tensor, batch: PagedBatch, out: Tensor, window: int, shared: Shared
) -> None:
    """Write the rows of the sequences in several parts."""
    parts_too = partial if shared.partial is None else shared.partial
    now = batch.seq_lens if shared.now is None else shared.now
    tensors = (partial, parts_too, out, batch.query_start_loc, batch.seq_lens, now)
    numbers = (
        *plan.numbers, window, plan.target,
        shared.num_seqs, shared.chunks,
    )  # fmt: skip
    plan.variant.launch(plan.grid, tensors, numbers)


def parts_at_once(most: int, width: int, warps: int) -> int:
    """Parts that a program loads together: 128 registers a thread hold them."""
    return min(most, 128 * 32 * warps // max(128, width))
