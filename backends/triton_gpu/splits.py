"""How many chunks each sequence's keys are cut into for decode: the plan, made on the GPU.

    chunk = max(1, ceil(tiles of all sequences / target)) tiles
    splits of a sequence = ceil(its tiles / chunk);  split i owns the tiles from i * tiles // splits

so that all sequences together give each KV head about `target` programs, as many as the GPU runs at
a time, and never more than num_seqs + target. Every program works the plan out by itself from
`seq_lens`, in a few instructions on one vector: no plan on the host, no launch for it, no
synchronisation, and a CUDA graph may be replayed with other lengths. Above MAX_PLANNED sequences
the vector would be long and splitting gain little: there every sequence is one chunk.

Knows lengths alone: neither caches nor tables.
"""

# ruff: noqa: N803 - compile-time arguments are upper case, as everywhere in Triton

from dataclasses import dataclass

import torch
import triton.language as tl

from backends.triton_gpu.place import Place, device_function, power_of_two

MAX_PLANNED = 1024
PROGRAMS_A_MULTIPROCESSOR = 2


@dataclass(frozen=True, slots=True)
class Grid:
    """What the host knows of the plan: it depends on the batch's shape, not on its lengths."""

    target: int
    """Chunks wanted a KV head, and the most that one sequence gets; 0: nothing is split."""
    items: int
    """Chunks a KV head at most, all sequences together."""
    seqs: int
    """num_seqs as a power of two; 0: nothing is split."""


def plan_grid(place: Place, device: torch.device, num_seqs: int, programs_a_chunk: int) -> Grid:
    """The grid for a batch whose every chunk takes this many programs."""
    if num_seqs > MAX_PLANNED:
        return Grid(target=0, items=num_seqs, seqs=0)
    slots = PROGRAMS_A_MULTIPROCESSOR * place.num_multiprocessors(device)
    target = max(1, slots // programs_a_chunk)
    return Grid(target=target, items=num_seqs + target, seqs=power_of_two(num_seqs))


@device_function
def count_splits(
    query_start_loc: tl.tensor,  # int32 [num_seqs + 1]
    seq_lens: tl.tensor,  # int32 [num_seqs]
    num_seqs: tl.tensor,
    target: tl.tensor,
    window: tl.tensor,
    HAS_WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    SEQS: tl.constexpr,
) -> tl.tensor:
    """Chunks of each sequence [SEQS]: 0 unless it has one query token."""
    s = tl.arange(0, SEQS)
    start = tl.load(query_start_loc + s, mask=s < num_seqs, other=0)
    stop = tl.load(query_start_loc + s + 1, mask=s < num_seqs, other=0)
    length = tl.load(seq_lens + s, mask=s < num_seqs, other=0)
    length = tl.where(stop - start == 1, length, 0)
    tiles = (length + TILE - 1) // TILE
    if HAS_WINDOW:
        tiles -= tl.maximum(length - window, 0) // TILE
    chunk = tl.maximum((tl.sum(tiles, 0) + target - 1) // target, 1)
    return (tiles + chunk - 1) // chunk
