"""The order in which prefill's tiles of rows are worked on, made on the GPU.

A tile is `TOKENS` successive query tokens of one sequence. Sequences with more keys come first, so
that what ends late starts early; the tiles of a sequence stay together, because they read the same
keys and find them in L2. Within the last sequence the last tile, which sees most, comes first, and
sequences alternate: of two neighbours one begins as the other ends, so that what runs at the same
time is about as long. So

    rank = tiles of the sequences that are longer, or as long and before + tiles ahead in its own

and each tile finds its own rank, in a program of its own: no sorting. The list of work is int32
[ENTRY + ENTRY * tiles]: the number of tiles in the first place, then for each rank (sequence, first
row, tokens, position of the first, keys of the sequence, position of its first query token) and
two places that are not used. Sequences of fewer than `shortest` query tokens are left out.

Grid: one program for each tile that there may be, num_tokens // TOKENS + num_seqs; sequence s owns
the programs from query_start_loc[s] // TOKENS + s on and each finds its sequence by bisection (the
numbering is vLLM's). Knows lengths alone: neither caches nor tables.
"""

# ruff: noqa: N803 - compile-time arguments are upper case, as everywhere in Triton

import torch
import triton.language as tl
from torch import Tensor

from backends.contract import PagedBatch
from backends.triton_gpu.place import Place, device_function, jit

ENTRY = tl.constexpr(8)
"""int32 a tile in the list of work, and ahead of it."""
SEQS = 128  # looked at together


@device_function
def find_tile(
    query_start_loc: tl.tensor,
    seq_lens: tl.tensor,
    num_seqs: tl.tensor,
    tile: tl.tensor,
    TOKENS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """(sequence, its first row, its query length, position of query token 0, tile's first token).

    The sequence is the last one whose first tile is at or before this one.
    """
    low = tile * 0
    high = low + num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        before = tl.load(query_start_loc + middle) // TOKENS + middle <= tile
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    start = tl.load(query_start_loc + low)
    query_len = tl.load(query_start_loc + low + 1) - start
    first = tl.load(seq_lens + low) - query_len
    return low, start, query_len, first, (tile - start // TOKENS - low) * TOKENS


@jit(
    do_not_specialize=["num_seqs", "shortest"],
    do_not_specialize_on_alignment=["query_start_loc", "seq_lens", "work"],
)
def _rank(
    query_start_loc: tl.tensor,  # int32 [num_seqs + 1]
    seq_lens: tl.tensor,  # int32 [num_seqs]
    work: tl.tensor,  # int32 [ENTRY + ENTRY * programs]
    num_seqs: tl.tensor,
    shortest: tl.tensor,  # query tokens; sequences with fewer are left out
    TOKENS: tl.constexpr,
    SEQS: tl.constexpr,
) -> None:
    mine, start, query_len, first, skipped = find_tile(
        query_start_loc, seq_lens, num_seqs, tl.program_id(0), TOKENS
    )
    length = first + query_len
    rank = mine * 0
    tiles = mine * 0
    behind = mine * 0
    for base in range(0, num_seqs, SEQS):
        s = base + tl.arange(0, SEQS)
        from_row = tl.load(query_start_loc + s, mask=s < num_seqs, other=0)
        to_row = tl.load(query_start_loc + s + 1, mask=s < num_seqs, other=0)
        lengths = tl.load(seq_lens + s, mask=s < num_seqs, other=0)
        counts = (to_row - from_row + TOKENS - 1) // TOKENS
        counts = tl.where(to_row - from_row < shortest, 0, counts)
        before = (lengths > length) | ((lengths == length) & (s < mine))
        rank += tl.sum(tl.where(before, counts, 0), 0)
        after = (counts > 0) & ~before & (s != mine)
        behind += tl.sum(after.to(tl.int32), 0)
        tiles += tl.sum(counts, 0)
    falling = behind % 2 == 0
    rank += tl.where(falling, (query_len - skipped - 1) // TOKENS, skipped // TOKENS)
    if tl.program_id(0) == 0:
        tl.store(work, tiles)
    if (skipped < query_len) & (query_len >= shortest):
        entry = work + ENTRY + rank * ENTRY
        tl.store(entry, mine)
        tl.store(entry + 1, start + skipped)
        tl.store(entry + 2, tl.minimum(query_len - skipped, TOKENS))
        tl.store(entry + 3, first + skipped)
        tl.store(entry + 4, length)
        tl.store(entry + 5, first)


def order_tiles(place: Place, batch: PagedBatch, *, tokens: int, shortest: int) -> Tensor:
    """The list of work for tiles of so many tokens; one launch, no synchronisation."""
    programs = batch.num_tokens // tokens + batch.num_seqs
    size = ENTRY.value + ENTRY.value * programs
    work = torch.empty(size, dtype=torch.int32, device=batch.device)
    with place.guard(batch.device):
        _rank[programs,](
            batch.query_start_loc, batch.seq_lens, work, batch.num_seqs, shortest,
            tokens, SEQS, num_warps=1,
        )  # fmt: skip
    return work
