"""How many chunks each sequence's keys are cut into for decode: the plan, made on the GPU.

Planned for the batch, so that all sequences together give each KV head about `target` programs, as
many as the GPU runs at a time, and never more than num_seqs + target:

    chunk = max(1, ceil(tiles of all sequences / target)) tiles
    splits of a sequence = ceil(its tiles / chunk - 1/8);  split i owns the tiles from
    i * tiles // splits

Batch-invariant (ALIKE), by the sequence's own length alone: ceil(tiles / ALIKE_KEYS keys), at most
ALIKE_MOST, with `target` places kept for each sequence.

Every program works the plan out by itself from `seq_lens`, in a few instructions on one vector: no
plan on the host, no launch for it, no synchronisation, and a CUDA graph may be replayed with other
lengths. Above MAX_PLANNED sequences the vector would be long and splitting gain little: there every
sequence is one chunk.

Knows lengths alone: neither caches nor tables.
"""

# ruff: noqa: N803 - compile-time values are upper case, as everywhere in Triton

from dataclasses import dataclass

import torch
import triton.language as tl

from backends.triton_gpu.place import Place, ceil_div, device_function

VECTORS = (1, 16, 64, 256, 1024)
"""Lengths of the planning vector: few, because a kernel is compiled for each."""
MAX_PLANNED = VECTORS[-1]
PROGRAMS_A_MULTIPROCESSOR = 2
PROGRAMS_OF_E4M3 = 4
"""Likewise over a quantised cache, whose tiles are half as large."""
ALIKE_KEYS = tl.constexpr(256)
ALIKE_MOST = tl.constexpr(32)


@dataclass(frozen=True, slots=True)
class Grid:
    """What the host knows of the plan: it depends on the batch's shape, not on its lengths."""

    target: int
    """Chunks wanted a KV head, and the most that one sequence gets; 0: nothing is split."""
    shape: tuple[int, int]
    """Chunks a KV head at most, all sequences together: as a product."""
    vector: int
    """At least num_seqs; 0: nothing is planned."""
    alike: bool
    """Batch-invariant."""

    @property
    def items(self) -> int:
        """Chunks a KV head at most, all sequences together."""
        return self.shape[0] * self.shape[1]

    @property
    def most(self) -> int:
        """Chunks that one sequence gets at most, whatever the batch in the batch-invariant plan."""
        return ALIKE_MOST.value if self.alike else self.target

    @property
    def splits(self) -> bool:
        """Whether a sequence may get several chunks."""
        return self.alike or self.vector > 0


def plan_grid(
    place: Place, device: torch.device, num_seqs: int, programs_a_chunk: int, *, e4m3: bool
) -> Grid:
    """The grid for a batch whose every chunk takes this many programs."""
    if num_seqs > MAX_PLANNED:
        return Grid(target=0, shape=(num_seqs, 1), vector=0, alike=False)
    each = PROGRAMS_OF_E4M3 if e4m3 else PROGRAMS_A_MULTIPROCESSOR
    slots = each * place.num_multiprocessors(device)
    target = max(1, slots // programs_a_chunk)
    vector = next(size for size in VECTORS if size >= num_seqs)
    return Grid(target=target, shape=(num_seqs + target, 1), vector=vector, alike=False)


def alike_grid(num_seqs: int, max_seq_len: int) -> Grid:
    """The batch-invariant grid: the same chunks whatever else is in the batch."""
    target = max(1, min(ALIKE_MOST.value, ceil_div(max_seq_len, ALIKE_KEYS.value)))
    return Grid(target=target, shape=(target, num_seqs), vector=0, alike=True)


@device_function
def first_seen(
    s: tl.tensor, length: tl.tensor, window: tl.tensor, shared: tl.tensor,
    HAS_WINDOW: tl.constexpr, HAS_SHARED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Position of the first key that decode visits: those before are out of sight, or shared."""
    seen = length * 0
    if HAS_WINDOW:
        seen = tl.maximum(length - window, 0)
    if HAS_SHARED:
        seen = tl.where((s >= shared[0]) & (s < shared[1]), tl.minimum(shared[2], length), seen)
    return seen


@device_function
def count_splits(
    query_start_loc: tl.tensor,  # int32 [num_seqs + 1]
    seq_lens: tl.tensor,  # int32 [num_seqs]
    num_seqs: tl.tensor,
    target: tl.tensor,
    window: tl.tensor,
    shared: tl.tensor,  # first sequence, past the last one, tokens
    HAS_WINDOW: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    TILE: tl.constexpr,
    VECTOR: tl.constexpr,
) -> tl.tensor:
    """Chunks of each sequence [VECTOR]: 0 unless it has one query token."""
    s = tl.arange(0, VECTOR)
    start = tl.load(query_start_loc + s, mask=s < num_seqs, other=0)
    stop = tl.load(query_start_loc + s + 1, mask=s < num_seqs, other=0)
    length = tl.load(seq_lens + s, mask=s < num_seqs, other=0)
    length = tl.where(stop - start == 1, length, 0)
    seen = first_seen(s, length, window, shared, HAS_WINDOW, HAS_SHARED)
    tiles = (length + TILE - 1) // TILE - seen // TILE
    chunk = tl.maximum((tl.sum(tiles, 0) + target - 1) // target, 1)
    return tl.where(tiles > 0, tl.maximum((tiles + chunk - 1 - chunk // 8) // chunk, 1), 0)


@device_function
def find_chunk(
    query_start_loc: tl.tensor, seq_lens: tl.tensor, num_seqs: tl.tensor, item: tl.tensor,
    target: tl.tensor, window: tl.tensor, shared: tl.tensor,
    HAS_WINDOW: tl.constexpr, HAS_SHARED: tl.constexpr, TILE: tl.constexpr, VECTOR: tl.constexpr,
    ALIKE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """(sequence, split, splits) of an item; there is none if sequence == num_seqs."""
    if ALIKE:
        s = item // target
        length = tl.load(seq_lens + s)
        tiles = (length + TILE - 1) // TILE
        tiles -= first_seen(s, length, window, shared, HAS_WINDOW, HAS_SHARED) // TILE
        split, splits = item % target, alike_splits(tiles, TILE)
        s = tl.where(split < splits, s, num_seqs)
    elif VECTOR:
        counts = count_splits(
            query_start_loc, seq_lens, num_seqs, target, window, shared,
            HAS_WINDOW, HAS_SHARED, TILE, VECTOR,
        )  # fmt: skip
        here = tl.arange(0, VECTOR)
        s = tl.minimum(tl.sum((tl.cumsum(counts, 0) <= item).to(tl.int32), 0), num_seqs)
        split = item - tl.sum(tl.where(here < s, counts, 0), 0)
        splits = tl.sum(tl.where(here == s, counts, 0), 0)
    else:
        s, split, splits = item, 0, 1
    return s, split, splits


@device_function
def alike_splits(tiles: tl.tensor, TILE: tl.constexpr) -> tl.tensor:
    """Chunks of a sequence with so many tiles of keys, whatever else is in the batch."""
    each: tl.constexpr = ALIKE_KEYS // TILE
    return tl.minimum(tl.maximum((tiles + each - 1) // each, 1), ALIKE_MOST)
