"""The number of parts that each sequence's keys are cut into for decode, planned on the GPU.

Planned for the batch, so that all sequences together give each KV head about `target` programs, as
many as the GPU runs at a time, and never more than num_seqs + FINER * target:

    chunk = max(1, ceil(tiles of all sequences / target)) tiles
    splits of a sequence = ceil(its tiles / chunk - 1/8);  split i owns the tiles from
    i * tiles // splits

Where sequences are many (from a planning vector of MANY_SEQS on) and lengths differ much, a program
that has a long part would end long after the others. There chunks are FINER times smaller, though
not below SHORT tiles, and the parts of the long sequences, more than half a chunk, come first, in
the sequences' order, before those of the others, so that programs end with small parts. Parts are
numbered in this order.

Batch-invariant (ALIKE), by the sequence's own length alone: ceil(tiles / ALIKE_KEYS keys) parts,
at most ALIKE_MOST, with `target` places kept for each sequence.

Every program works the plan out by itself from `seq_lens`, in a few instructions on one vector: no
plan on the host, no launch for it, no synchronisation, and a CUDA graph may be replayed with other
lengths. Above MAX_PLANNED sequences the vector would be long and cutting gain little: there every
sequence is one part.

Knows lengths alone: neither caches nor tables.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton.language as tl

from backends.triton_gpu.shared.place import Place, ceil_div, device_function

VECTORS = (1, 16, 64, 256, 1024)
"""Lengths of the planning vector: few, because a kernel is compiled for each."""
MAX_PLANNED = VECTORS[-1]
PROGRAMS_A_MULTIPROCESSOR = 2
MORE_PROGRAMS = 4
"""Likewise over a quantised cache, whose tiles are half as large."""
FINER = tl.constexpr(2)
MANY_SEQS = tl.constexpr(64)
SHORT = tl.constexpr(16)
ALIKE_KEYS = tl.constexpr(256)
ALIKE_MOST = tl.constexpr(32)


@dataclass(frozen=True, slots=True)
class Grid:
    """The part of the plan that the host knows: it depends on the batch's shape alone."""

    target: int
    """Parts wanted a KV head, and the most that one of equal sequences gets; 0: nothing is cut."""
    shape: tuple[int, int]
    """Parts a KV head at most, all sequences together: as a product."""
    vector: int
    """At least num_seqs; 0: nothing is planned."""
    alike: bool
    """Batch-invariant."""

    @property
    def items(self) -> int:
        """Parts a KV head at most, all sequences together."""
        return self.shape[0] * self.shape[1]

    @property
    def most(self) -> int:
        """Parts that one sequence gets at most."""
        if self.alike:
            return int(ALIKE_MOST.value)
        return self.target * (int(FINER.value) if self.vector >= MANY_SEQS.value else 1)

    @property
    def splits(self) -> bool:
        """True if a sequence may get several parts."""
        return self.alike or self.vector > 0


class Cut(NamedTuple):
    """The compile-time values of the kernels that compute the plan."""

    tile: int
    """Keys."""
    vector: int
    """`Grid.vector`."""
    alike: bool
    has_window: bool
    has_shared: bool = False
    """Some sequences may share a prefix, which `cascade` reads."""


class Lengths(NamedTuple):
    """The inputs of the plan, in a kernel."""

    query_start_loc: tl.tensor
    """int32 [num_seqs + 1]."""
    seq_lens: tl.tensor
    """int32 [num_seqs]."""
    num_seqs: tl.tensor
    most: tl.tensor
    """Query tokens of the sequences that decode takes, at most."""
    window: tl.tensor
    """Used if `has_window`."""
    target: tl.tensor
    """`Grid.target`."""
    shared: tl.tensor
    """(first sequence, one past the last, tokens) of a shared prefix; used if `has_shared`."""


def plan_grid(
    place: Place, device: torch.device, num_seqs: int, programs_a_part: int, *, each: int
) -> Grid:
    """The grid for a batch whose parts take `programs_a_part`; a multiprocessor runs `each`."""
    if num_seqs > MAX_PLANNED:
        return Grid(target=0, shape=(num_seqs, 1), vector=0, alike=False)
    slots = each * place.num_multiprocessors(device)
    target = max(1, slots // programs_a_part)
    vector = next(size for size in VECTORS if size >= num_seqs)
    most = target * (int(FINER.value) if vector >= MANY_SEQS.value else 1)
    return Grid(target, shape=(num_seqs + most, 1), vector=vector, alike=False)


def alike_grid(num_seqs: int, max_seq_len: int) -> Grid:
    """The batch-invariant grid: the same parts whatever else is in the batch."""
    target = max(1, min(ALIKE_MOST.value, ceil_div(max_seq_len, ALIKE_KEYS.value)))
    return Grid(target, shape=(target, num_seqs), vector=0, alike=True)


@device_function
def load_seq(lengths: tl.tensor, s: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """(first row, query tokens, length) of a sequence."""
    start = tl.load(lengths.query_start_loc + s)
    query_len = tl.load(lengths.query_start_loc + s + 1) - start
    return start, query_len, tl.load(lengths.seq_lens + s)


@device_function
def count_tiles(
    s: tl.tensor, query_len: tl.tensor, length: tl.tensor, lengths: tl.tensor, CUT: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """(first key, tiles of keys) that decode visits of a sequence.

    Earlier keys are outside the window, or shared. No tiles if decode does not take the sequence.
    """
    seen = length * 0
    shared = lengths.shared
    if CUT.has_window:
        seen = tl.maximum(length - query_len + 1 - lengths.window, 0)
    if CUT.has_shared:
        seen = tl.where((s >= shared[0]) & (s < shared[1]), tl.minimum(shared[2], length), seen)
    tiles = (length + CUT.tile - 1) // CUT.tile - seen // CUT.tile
    return seen, tl.where((query_len > 0) & (query_len <= lengths.most), tiles, 0)


@device_function
def keys_of_split(
    seen: tl.tensor, length: tl.tensor, tiles: tl.tensor, split: tl.tensor, splits: tl.tensor,
    CUT: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """(begin, end) of the keys of a split; it begins at a tile, maybe before `seen`."""
    first = seen // CUT.tile
    begin = (first + split * tiles // splits) * CUT.tile
    return begin, tl.minimum((first + (split + 1) * tiles // splits) * CUT.tile, length)


@device_function
def _count_splits(
    s: tl.tensor, lengths: tl.tensor, CUT: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """(splits of each sequence, those of long sequences plus 2^16 times the others).

    `s` is 0 .. vector - 1.
    """
    there = s < lengths.num_seqs
    start = tl.load(lengths.query_start_loc + s, mask=there, other=0)
    stop = tl.load(lengths.query_start_loc + s + 1, mask=there, other=0)
    length = tl.load(lengths.seq_lens + s, mask=there, other=0)
    _, tiles = count_tiles(s, stop - start, length, lengths, CUT)
    total = tl.sum(tiles, 0)
    chunk = tl.maximum((total + lengths.target - 1) // lengths.target, 1)
    if CUT.vector >= MANY_SEQS:
        live = tl.sum((tiles > 0).to(tl.int32), 0)
        uneven = tl.max(tiles, 0).to(tl.float32) * live > 1.25 * total.to(tl.float32)
        finer = tl.maximum((chunk + FINER - 1) // FINER, tl.minimum(chunk, SHORT))
        chunk = tl.where(uneven, finer, chunk)
    counts = tl.maximum((tiles + chunk - 1 - chunk // 8) // chunk, 1)
    counts = tl.where(tiles > 0, counts, 0)
    return counts, tl.where(2 * tiles > chunk, counts, counts << 16)


@device_function
def find_part(
    item: tl.tensor, here: tl.tensor, lengths: tl.tensor, CUT: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """(sequence, split, splits) of an item; there is none if sequence == num_seqs.

    `here` is 0 .. vector - 1, in a layout of the caller's language; 0 if the vector is.
    """
    num_seqs, target = lengths.num_seqs, lengths.target
    if CUT.alike:
        s = item // target
        _, query_len, length = load_seq(lengths, s)
        _, tiles = count_tiles(s, query_len, length, lengths, CUT)
        split, splits = item % target, _alike_splits(tiles, CUT)
        s = tl.where(split < splits, s, num_seqs)
    elif CUT.vector:
        counts, classes = _count_splits(here, lengths, CUT)
        ends = tl.cumsum(classes, 0)
        long = tl.sum(classes, 0) & 0xFFFF
        ends = tl.where(item < long, ends & 0xFFFF, long + (ends >> 16))
        s = tl.minimum(tl.sum((ends <= item).to(tl.int32), 0), num_seqs)
        splits = tl.sum(tl.where(here == s, counts, 0), 0)
        split = item - tl.sum(tl.where(here == s, ends - counts, 0), 0)
    else:
        s, split, splits = item, 0, 1
    return s, split, splits


@device_function
def find_parts(s: tl.tensor, lengths: tl.tensor, CUT: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """(first part, number of parts) of a sequence; none if decode does not take it."""
    if CUT.alike:
        _, query_len, length = load_seq(lengths, s)
        _, tiles = count_tiles(s, query_len, length, lengths, CUT)
        first, splits = s * lengths.target, tl.where(tiles > 0, _alike_splits(tiles, CUT), 0)
    else:
        here = tl.arange(0, CUT.vector)
        counts, classes = _count_splits(here, lengths, CUT)
        before = tl.sum(tl.where(here < s, classes, 0), 0)
        splits = tl.sum(tl.where(here == s, counts, 0), 0)
        is_long = tl.sum(tl.where(here == s, classes, 0), 0) == splits
        long = tl.sum(classes, 0) & 0xFFFF
        first = tl.where(is_long, before & 0xFFFF, long + (before >> 16))
    return first, splits


@device_function
def _alike_splits(tiles: tl.tensor, CUT: tl.constexpr) -> tl.tensor:
    """Splits of a sequence with `tiles` tiles of keys, independent of the batch."""
    EACH: tl.constexpr = ALIKE_KEYS // CUT.tile
    return tl.minimum(tl.maximum((tiles + EACH - 1) // EACH, 1), ALIKE_MOST)
