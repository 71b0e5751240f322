"""Merge the parts of split sequences into their output rows on a GPU.

    out[h] = sum_c 2^(lse_c - top) part_c / sum_c 2^(lse_c - top),  top = max_c lse_c

Layout: part_c and lse_c (base 2) of the chunks c of all sequences, side by side in the order of the
plan, float32. Grid: (slices of the query heads, sequence); a program works the plan out again
(see splits), while the kernel before it still runs where the GPU can launch early, and returns at
once for a sequence of one chunk. All chunks of a row are loaded together where registers can
hold them.
Bytes moved: each part read once. The sum's order is the chunks', so that it is deterministic.
"""

# ruff: noqa: N803 - compile-time arguments are upper case, as everywhere in Triton

import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from backends.contract import PagedBatch
from backends.triton_gpu.place import Place, jit, power_of_two
from backends.triton_gpu.splits import Grid, count_splits

WARPS = 2
MANY_PROGRAMS = 1024


@jit(do_not_specialize=["num_seqs", "window", "target", "items"])
def _merge_chunks(
    partial: tl.tensor,  # float32 [items, num_q_heads, head_dim] parts, then [items, num_q_heads]
    out: tl.tensor,  # [num_tokens, num_q_heads, head_dim]
    query_start_loc: tl.tensor,  # int32 [num_seqs + 1]
    seq_lens: tl.tensor,  # int32 [num_seqs]
    num_seqs: tl.tensor,
    window: tl.tensor,
    target: tl.tensor,
    items: tl.tensor,
    O_STRIDES: tl.constexpr,  # token, head
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    SEQS: tl.constexpr,
    HEADS: tl.constexpr,  # a program
    MOST: tl.constexpr,  # chunks a sequence at most, as a power of two
    STEP: tl.constexpr,  # chunks loaded at once
    WIDTH: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    counts = count_splits(
        query_start_loc, seq_lens, num_seqs, target, window, HAS_WINDOW, TILE, SEQS
    )
    s = tl.program_id(1)
    here = tl.arange(0, SEQS)
    splits = tl.sum(tl.where(here == s, counts, 0), 0)
    first = tl.sum(tl.where(here < s, counts, 0), 0)
    start = tl.load(query_start_loc + s).to(tl.int64)
    if CHAINED:
        gdc_wait()
    if splits <= 1:
        return
    dim = tl.arange(0, WIDTH)
    chunk = tl.arange(0, MOST)
    step = tl.arange(0, STEP)
    lses = partial + items * (NUM_HEADS * HEAD_DIM)
    for h in range(HEADS):
        head = tl.program_id(0) * HEADS + h
        index = (first + chunk) * NUM_HEADS + head
        lse = tl.load(lses + index, mask=chunk < splits, other=float("-inf"))
        top = tl.max(lse, 0)
        total = tl.sum(tl.exp2(lse - top), 0)
        sums = tl.zeros([WIDTH], tl.float32)
        for begin in range(0, splits, STEP):
            entry = (first + begin + step) * NUM_HEADS + head
            live = begin + step < splits
            weight = tl.exp2(tl.load(lses + entry, mask=live, other=float("-inf")) - top)
            mask = live[:, None] & (dim < HEAD_DIM)[None, :]
            part = tl.load(partial + entry[:, None] * HEAD_DIM + dim[None, :], mask=mask, other=0.0)
            sums += tl.sum(part * weight[:, None], 0)
        to = out + start * O_STRIDES[0] + head * O_STRIDES[1] + dim
        tl.store(to, (sums / total).to(out.dtype.element_ty), mask=dim < HEAD_DIM)


def merge(
    place: Place,
    partial: Tensor,
    batch: PagedBatch,
    out: Tensor,
    grid: Grid,
    *,
    group: int,
    window: int | None,
    tile: int,
) -> None:
    """Write the rows of the sequences in several chunks; a tile is as many keys as in `decode`."""
    num_heads, head_dim = out.shape[1:]
    heads = 1 if batch.num_seqs * num_heads <= MANY_PROGRAMS else group
    chained = place.can_chain(out.device)
    most = power_of_two(grid.target)
    _merge_chunks[num_heads // heads, batch.num_seqs](
        partial, out, batch.query_start_loc, batch.seq_lens,
        batch.num_seqs, window or 0, grid.target, grid.items,
        out.stride()[:2], num_heads, head_dim, window is not None, tile, grid.seqs,
        heads, most, chunks_at_once(most, head_dim), power_of_two(head_dim), chained,
        num_warps=WARPS, **({"launch_pdl": True} if chained else {}),
    )  # fmt: skip


def chunks_at_once(most: int, head_dim: int) -> int:
    """Chunks that a program loads together: 128 registers a thread hold their parts."""
    return min(most, 128 * 32 * WARPS // max(128, power_of_two(head_dim)))
