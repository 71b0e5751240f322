"""Merge the parts of split sequences into their output rows on a GPU.

    out[h] = sum_c 2^(lse_c - top) part_c / sum_c 2^(lse_c - top),  top = max_c lse_c

Layout: part_c and lse_c (base 2) of the chunks c of all sequences, side by side in the order of the
plan, float32; of sequences that share a prefix also the parts that `cascade` has left. Grid:
(slices of the query heads, sequence); a program works the plan out again (see splits), while the
kernel before it still runs where the GPU can launch early, and returns at once for a sequence of
one chunk. All chunks of a row are loaded together where registers can hold them.
Bytes moved: each part read once. The sum's order is the chunks', so that it is deterministic.
"""

# ruff: noqa: N803 - compile-time arguments are upper case, as everywhere in Triton

from dataclasses import dataclass

import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from backends.contract import PagedBatch
from backends.triton_gpu.cascade import MOST_CHUNKS, Shared
from backends.triton_gpu.launch import Variant, launcher
from backends.triton_gpu.place import Place, device_function, power_of_two
from backends.triton_gpu.splits import Grid, alike_splits, count_splits, first_seen

WARPS = 2
MANY_PROGRAMS = 1024
FEW_CHUNKS = 16
"""Loaded together where there are many sequences, most of which have few."""


@device_function
def _find_parts(
    query_start_loc: tl.tensor, seq_lens: tl.tensor, s: tl.tensor, start: tl.tensor,
    num_seqs: tl.tensor, window: tl.tensor, target: tl.tensor, shared: tl.tensor,
    HAS_WINDOW: tl.constexpr, HAS_SHARED: tl.constexpr, TILE: tl.constexpr, VECTOR: tl.constexpr,
    ALIKE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """(first part, how many) of a sequence; none if it has other than one query token."""
    if ALIKE:
        length = tl.load(seq_lens + s)
        tiles = (length + TILE - 1) // TILE
        tiles -= first_seen(s, length, window, shared, HAS_WINDOW, HAS_SHARED) // TILE
        one = tl.load(query_start_loc + s + 1) - start == 1
        first, splits = s * target, tl.where(one, alike_splits(tiles, TILE), 0)
    else:
        counts = count_splits(
            query_start_loc, seq_lens, num_seqs, target, window, shared,
            HAS_WINDOW, HAS_SHARED, TILE, VECTOR,
        )  # fmt: skip
        here = tl.arange(0, VECTOR)
        first = tl.sum(tl.where(here < s, counts, 0), 0)
        splits = tl.sum(tl.where(here == s, counts, 0), 0)
    return first, splits


@device_function
def _add_parts(
    parts: tl.tensor, lses: tl.tensor, first: tl.tensor, count: tl.tensor, step: tl.tensor,
    head: tl.tensor, top: tl.tensor, sums: tl.tensor,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, STEP: tl.constexpr, WIDTH: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The sum of a head's parts, `step` apart, weighted."""
    dim = tl.arange(0, WIDTH)
    for begin in range(0, count, STEP):
        index = begin + tl.arange(0, STEP)
        entry = (first + index * step) * NUM_HEADS + head
        live = index < count
        weight = tl.exp2(tl.load(lses + entry, mask=live, other=float("-inf")) - top)
        mask = live[:, None] & (dim < HEAD_DIM)[None, :]
        part = tl.load(parts + entry[:, None] * HEAD_DIM + dim[None, :], mask=mask, other=0.0)
        sums += tl.sum(part * weight[:, None], 0)
    return sums


@launcher(
    integers=(
        "o_stride", "num_seqs", "window", "target", "items",
        "shared_first", "shared_last", "shared_tokens", "shared_chunks",
    ),
    indices=("query_start_loc", "seq_lens"),
    pointers=("out",),
)  # fmt: skip
def _merge_chunks(
    partial: tl.tensor,  # float32 [items, num_q_heads, head_dim] parts, then [items, num_q_heads]
    shared_partial: tl.tensor,  # likewise [shared_chunks * shared sequences, ...], if HAS_SHARED
    out: tl.tensor,  # [num_tokens, num_q_heads, head_dim]
    query_start_loc: tl.tensor,  # int32 [num_seqs + 1]
    seq_lens: tl.tensor,  # int32 [num_seqs]
    o_stride: tl.tensor,  # from token to token
    num_seqs: tl.tensor,
    window: tl.tensor,
    target: tl.tensor,
    items: tl.tensor,
    shared_first: tl.tensor,  # used if HAS_SHARED, as the others
    shared_last: tl.tensor,
    shared_tokens: tl.tensor,
    shared_chunks: tl.tensor,
    O_HEAD: tl.constexpr,  # from head to head
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    TILE: tl.constexpr,
    VECTOR: tl.constexpr,
    ALIKE: tl.constexpr,
    HEADS: tl.constexpr,  # a program
    MOST: tl.constexpr,  # chunks a sequence at most, as a power of two
    STEP: tl.constexpr,  # chunks loaded at once
    WIDTH: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    s = tl.program_id(1)
    start = tl.load(query_start_loc + s)
    shared = (shared_first, shared_last, shared_tokens)
    first, splits = _find_parts(
        query_start_loc, seq_lens, s, start, num_seqs, window, target, shared,
        HAS_WINDOW, HAS_SHARED, TILE, VECTOR, ALIKE,
    )  # fmt: skip
    parts_too = 0
    if HAS_SHARED:
        parts_too = tl.where((s >= shared_first) & (s < shared_last), shared_chunks, 0)
    if CHAINED:
        gdc_wait()
    if (splits == 0) | (splits + parts_too == 1):
        return
    dim = tl.arange(0, WIDTH)
    chunk = tl.arange(0, MOST)
    lses = partial + items * (NUM_HEADS * HEAD_DIM)
    sharing = shared_last - shared_first
    shared_lses = shared_partial + shared_chunks * sharing * (NUM_HEADS * HEAD_DIM)
    for h in range(HEADS):
        head = tl.program_id(0) * HEADS + h
        index = (first + chunk) * NUM_HEADS + head
        lse = tl.load(lses + index, mask=chunk < splits, other=float("-inf"))
        top = tl.max(lse, 0)
        lse_too = lse
        if HAS_SHARED:
            index = (s - shared_first + chunk * sharing) * NUM_HEADS + head
            lse_too = tl.load(shared_lses + index, mask=chunk < parts_too, other=float("-inf"))
            top = tl.maximum(top, tl.max(lse_too, 0))
        total = tl.sum(tl.exp2(lse - top), 0)
        sums = _add_parts(
            partial, lses, first, splits, 1, head, top, tl.zeros([WIDTH], tl.float32),
            NUM_HEADS, HEAD_DIM, STEP, WIDTH,
        )  # fmt: skip
        if HAS_SHARED:
            total += tl.sum(tl.exp2(lse_too - top), 0)
            sums = _add_parts(
                shared_partial, shared_lses, s - shared_first, parts_too, sharing, head, top, sums,
                NUM_HEADS, HEAD_DIM, STEP, WIDTH,
            )  # fmt: skip
        to = out + start.to(tl.int64) * o_stride + head * O_HEAD + dim
        tl.store(to, (sums / total).to(out.dtype.element_ty), mask=dim < HEAD_DIM)


@dataclass(frozen=True, slots=True)
class Plan:
    """All of a launch but the tensors."""

    variant: Variant
    grid: tuple[int, int, int]
    numbers: tuple[int, ...]
    """Those that come first: the output's stride, num_seqs."""
    target: int
    items: int


def plan_merge(
    place: Place,
    batch: PagedBatch,
    out: Tensor,
    grid: Grid,
    *,
    group: int,
    window: int | None,
    tile: int,
    shared: Shared,
) -> Plan:
    """How the sequences in several chunks are merged; a tile is as many keys as in `decode`."""
    num_heads, head_dim = out.shape[1:]
    many = batch.num_seqs * num_heads > MANY_PROGRAMS and not (grid.alike or shared.chunks)
    heads = group if many else 1
    most = power_of_two(max(grid.most, MOST_CHUNKS if shared.chunks else 1))
    step = FEW_CHUNKS if many or shared.chunks else chunks_at_once(most, head_dim)
    chained = place.can_chain(out.device)
    constants = (
        out.stride(1), num_heads, head_dim, window is not None, shared.chunks > 0, tile,
        grid.vector, grid.alike, heads, most, min(most, step), power_of_two(head_dim), chained,
    )  # fmt: skip
    options = {"launch_pdl": True} if chained else {}
    variant = _merge_chunks.variant(
        place, out.device, (out.dtype,), constants, num_warps=WARPS, **options
    )
    numbers = (out.stride(0), batch.num_seqs)
    grid_shape = (num_heads // heads, batch.num_seqs, 1)
    return Plan(variant, grid_shape, numbers, grid.target, grid.items)


def merge(
    plan: Plan, partial: Tensor, batch: PagedBatch, out: Tensor, window: int, shared: Shared
) -> None:
    """Write the rows of the sequences in several chunks."""
    parts_too = partial if shared.partial is None else shared.partial
    tensors = (partial, parts_too, out, batch.query_start_loc, batch.seq_lens)
    numbers = (
        *plan.numbers, window, plan.target, plan.items,
        shared.first_seq, shared.last_seq, shared.num_tokens, shared.chunks,
    )  # fmt: skip
    plan.variant.launch(plan.grid, tensors, numbers)


def chunks_at_once(most: int, head_dim: int) -> int:
    """Chunks that a program loads together: 128 registers a thread hold their parts."""
    return min(most, 128 * 32 * WARPS // max(128, power_of_two(head_dim)))
