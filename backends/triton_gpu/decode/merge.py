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

from typing import NamedTuple

import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from backends.contract import PagedBatch
from backends.triton_gpu.decode.cascade import MOST_CHUNKS, Shared, keys_a_part, load_shared
from backends.triton_gpu.decode.splits import Cut, Grid, Lengths, find_parts
from backends.triton_gpu.shared.launch import Launch, launcher
from backends.triton_gpu.shared.place import Place, ceil_div, device_function, power_of_two
from backends.triton_gpu.shared.softmax import add_tile

WARPS = 2
MANY_WARPS = 4
"""For many sequences, of which one may have most of the parts, and for pieces of rows that are
wide, or of the rows of one sequence."""
MANY_SEQS = 64
MANY_PROGRAMS = 2100
"""More would start one after the other; then a program takes several heads."""
WIDE_PROGRAMS = 528
"""Likewise of rows wider than WIDEST; a batch in which nothing is cut pays for their starts."""
WIDEST = 256
PIECE = 64
"""Numbers of a row that a program merges at least, if it has more than WIDEST."""
FEW_PARTS = 8
"""Loaded together, a warp, where there are many sequences, most of which have few, or many rows: of
programs with fewer registers more find room."""
FEWEST_PARTS = tl.constexpr(4)
"""Of a sequence that has no more, all rows of a program are merged together, whole."""
AT_ONCE = 2048
"""Numbers of a part that a program loads together, of such rows."""


class _Part(NamedTuple):
    """A part of each row, in the order of their numbers, and the rows' log-sum-exps."""

    sums: tl.tensor
    """float32 [parts, rows, head_dim]."""
    lses: tl.tensor
    """[parts, rows]."""
    first: tl.tensor
    """The number of a row's first part."""
    count: tl.tensor
    step: tl.tensor
    """From one part of a row to the next."""
    rows: tl.tensor


@device_function
def _add_parts(
    part: tl.tensor, row: tl.tensor, piece: tl.tensor,
    highest: tl.tensor, total: tl.tensor, sums: tl.tensor, FORM: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Add a row's parts to (highest, total, sums), from the number `piece` on."""
    STEP: tl.constexpr = FORM.step
    dim = piece + tl.arange(0, FORM.width)
    for begin in range(0, part.count, STEP):
        index = begin + tl.arange(0, STEP)
        entry = (part.first + index * part.step) * part.rows + row
        live = index < part.count
        mask = live[:, None] & (dim < FORM.head_dim)[None, :]
        at = part.sums + entry[:, None] * FORM.head_dim + dim[None, :]
        each = tl.load(at, mask=mask, other=0.0)
        lse = tl.load(part.lses + entry, mask=live, other=float("-inf"))
        weight, highest, total, rescale = add_tile(lse, highest, total, 0)
        sums = sums * rescale + tl.sum(each * weight[:, None], 0)
    return highest, total, sums


@device_function
def _merge_many(
    own: tl.tensor, shared: tl.tensor, out: tl.tensor, start: tl.tensor, o_stride: tl.tensor,
    FORM: tl.constexpr,
) -> None:  # fmt: skip
    """A program's piece of its rows, one row after the other."""
    WIDTH: tl.constexpr = FORM.width
    piece = tl.program_id(2) * WIDTH
    dim = piece + tl.arange(0, WIDTH)
    for h in range(FORM.heads):
        row = tl.program_id(0) * FORM.heads + h
        head = row % FORM.num_heads
        highest, total, sums = _add_parts(
            own, row, piece, tl.full([], -1e30, tl.float32), tl.full([], 0.0, tl.float32),
            tl.zeros([WIDTH], tl.float32), FORM,
        )  # fmt: skip
        if FORM.cut.has_shared:
            highest, total, sums = _add_parts(shared, head, piece, highest, total, sums, FORM)
        to = out + (start + row // FORM.num_heads).to(tl.int64) * o_stride
        to += head * FORM.o_head + dim
        tl.store(to, (sums / total).to(out.dtype.element_ty), mask=dim < FORM.head_dim)


@device_function
def _merge_few(
    own: tl.tensor, out: tl.tensor, start: tl.tensor, o_stride: tl.tensor, FORM: tl.constexpr
) -> None:
    """All rows of a program whose sequence has at most FEWEST_PARTS, all parts loaded at once."""
    HEADS: tl.constexpr = FORM.heads
    part = tl.arange(0, FEWEST_PARTS)
    dim = tl.arange(0, FORM.whole_width)
    for base in range(0, HEADS, FORM.together):
        h = base + tl.arange(0, FORM.together)
        row = tl.program_id(0) * HEADS + h
        entry = (own.first + part)[None, :] * own.rows + row[:, None]
        there = (h < HEADS)[:, None] & (part < own.count)[None, :]
        lse = tl.load(own.lses + entry, mask=there, other=float("-inf"))
        mask = there[:, :, None] & (dim < FORM.head_dim)[None, None, :]
        at = own.sums + entry[:, :, None] * FORM.head_dim + dim[None, None, :]
        parts = tl.load(at, mask=mask, other=0.0)
        top = tl.where(h < HEADS, tl.max(lse, 1), 0.0)
        weight = tl.exp2(lse - top[:, None])
        total = tl.where(h < HEADS, tl.sum(weight, 1), 1.0)
        sums = tl.sum(parts * weight[:, :, None], 1) / total[:, None]
        to = (start + row // FORM.num_heads).to(tl.int64) * o_stride
        to += row % FORM.num_heads * FORM.o_head
        mask = (h < HEADS)[:, None] & (dim < FORM.head_dim)[None, :]
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
    shared_partial: tl.tensor,  # likewise [shared_chunks * sharing, ...], read if has_shared
    out: tl.tensor,  # [num_tokens, num_q_heads, head_dim]
    query_start_loc: tl.tensor,  # int32 [num_seqs + 1]
    seq_lens: tl.tensor,  # int32 [num_seqs]
    shared_now: tl.tensor,  # int32 [3], read if has_shared
    o_stride: tl.tensor,  # from token to token
    num_seqs: tl.tensor,
    most: tl.tensor,  # query tokens of a sequence that decode takes
    items: tl.tensor,  # parts at most, of all sequences
    target: tl.tensor,
    sharing: tl.tensor,  # sequences at most; used if has_shared, as the next
    shared_chunks: tl.tensor,  # at most
    window: tl.tensor,
    FORM: tl.constexpr,
) -> None:
    CUT: tl.constexpr = FORM.cut
    ROW: tl.constexpr = FORM.num_heads * FORM.head_dim
    s = tl.program_id(1)
    start = tl.load(query_start_loc + s)
    shared = load_shared(shared_now, num_seqs, CUT.has_shared)
    query_len = tl.load(query_start_loc + s + 1) - start
    lengths = Lengths(query_start_loc, seq_lens, num_seqs, most, window, target, shared)
    first, count = find_parts(s, lengths, CUT)
    parts_too = 0
    if CUT.has_shared:
        keys = keys_a_part(shared[2], shared_chunks, FORM.prefix_tile)
        inside = (s >= shared[0]) & (s < shared[1])
        parts_too = tl.where(inside, (shared[2] + keys - 1) // keys, 0)
    idle = (count == 0) | (count + parts_too == 1)
    idle = idle | (tl.program_id(0) * FORM.heads // FORM.num_heads >= query_len)
    if not CUT.has_shared:  # whole rows are merged by the first of their pieces
        idle = idle | ((count <= FEWEST_PARTS) & (tl.program_id(2) > 0))
    if FORM.chained:
        gdc_launch_dependents()
        is_first = (s == 0) & (tl.program_id(0) == 0) & (tl.program_id(2) == 0)
        if idle & ~is_first:
            return
        gdc_wait()
    if idle:
        return
    rows = FORM.num_heads  # known to the compiler, unless many
    if FORM.many:
        rows = most * FORM.num_heads
    own = _Part(partial, partial + items * rows * FORM.head_dim, first, count, 1, rows)
    too = own
    if CUT.has_shared:
        lses = shared_partial + shared_chunks * sharing * ROW
        sharer = s - shared[0]
        too = _Part(shared_partial, lses, sharer, parts_too, sharing, FORM.num_heads)
        _merge_many(own, too, out, start, o_stride, FORM)
    elif count > FEWEST_PARTS:
        _merge_many(own, too, out, start, o_stride, FORM)
    else:
        _merge_few(own, out, start, o_stride, FORM)


class Form(NamedTuple):
    """The compile-time values of the kernel."""

    cut: Cut
    o_head: int
    """From one head of the output to the next."""
    num_heads: int
    head_dim: int
    many: bool
    """Sequences may have several query tokens."""
    heads: int
    """A program."""
    step: int
    """Parts that are loaded at once."""
    width: int
    """Numbers of a row that a program merges."""
    whole_width: int
    """`head_dim` as a power of two."""
    together: int
    """Rows of few parts that are merged together."""
    chained: bool
    """This kernel may be launched before the one before it has ended."""
    prefix_tile: int
    """Keys, of which a part of a shared prefix is a multiple."""


def plan_merge(
    place: Place,
    batch: PagedBatch,
    out: Tensor,
    grid: Grid,
    cut: Cut,
    group: int,
    most: int,
    shared: Shared,
) -> Launch:
    """Return the launch that merges the parts that `decode` or `latent` leaves."""
    num_heads, head_dim = out.shape[1:]
    parts = power_of_two(max(grid.most, MOST_CHUNKS if shared.chunks else 1))
    width = whole = power_of_two(head_dim)
    if head_dim > WIDEST:
        rows, width = max(1, grid.vector) * most * num_heads, PIECE
        while width < whole and rows * ceil_div(head_dim, width) > WIDE_PROGRAMS:
            width *= 2
    heads, pieces = 1, ceil_div(head_dim, width)
    if not (grid.alike or shared.chunks):
        programs = WIDE_PROGRAMS if head_dim > WIDEST else MANY_PROGRAMS
        heads = heads_a_program(grid.vector, num_heads, group, programs, many=most > 1)
    is_wide = head_dim > WIDEST and (grid.vector == 1 or width > PIECE)
    warps = MANY_WARPS if is_wide or grid.vector >= MANY_SEQS else WARPS
    step = parts_at_once(parts, width, warps)
    if grid.vector >= MANY_SEQS or most > 1:
        step = min(step, FEW_PARTS * warps)
    together = min(power_of_two(heads), max(1, AT_ONCE // whole))
    chained = place.can_chain(out.device)
    form = Form(
        cut, out.stride(1), num_heads, head_dim, most > 1, heads, step, width, whole, together,
        chained, shared.tile,
    )  # fmt: skip
    options = {"launch_pdl": True} if chained else {}
    variant = _merge_parts.variant(
        place, out.device, (out.dtype,), (form,), num_warps=warps, **options
    )
    counts = (batch.num_seqs, most, grid.items, grid.target, shared.num_seqs, shared.chunks)
    shape = (most * num_heads // heads, batch.num_seqs, pieces)
    return Launch(variant, shape, (out.stride(0), *counts))


def heads_a_program(vector: int, num_heads: int, group: int, programs: int, *, many: bool) -> int:
    """Heads that a program merges one after the other, so that there are at most `programs`."""
    if many:
        return 1 if vector < MANY_SEQS else group
    fits = (n for n in range(1, group + 1) if vector * num_heads // n <= programs)
    return next((n for n in fits if group % n == 0), group)


def merge(
    plan: Launch, partial: Tensor, batch: PagedBatch, out: Tensor, window: int, shared: Shared
) -> None:
    """Write the rows of the sequences in several parts."""
    parts_too = partial if shared.partial is None else shared.partial
    now = batch.seq_lens if shared.now is None else shared.now
    tensors = (partial, parts_too, out, batch.query_start_loc, batch.seq_lens, now)
    plan.run(tensors, window)


def parts_at_once(most: int, width: int, warps: int) -> int:
    """Parts that a program loads together: 128 registers a thread hold them."""
    return min(most, 128 * 32 * warps // max(128, width))
