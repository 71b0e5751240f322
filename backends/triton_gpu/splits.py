"""How decode's keys are shared out among programs: the plan, made on the GPU.

All tiles of keys of all sequences lie side by side, sequence after sequence, and are cut into equal
ranges, one a program and KV head. A range may hold the end of one sequence, some whole ones and the
beginning of another: whatever the lengths and their order, every program has the same work, and
equal sequences are cut evenly or not at all:

    ranges = live * max(1, ceil(target / live - 1/8)), at most one a tile
    range r owns the places r * places // ranges .. (r + 1) * places // ranges - 1

live is the number of sequences that decode takes, target the programs a KV head that the GPU runs
at a time. A sequence has a place for each of its tiles, and START more for what beginning it costs,
unless ranges are SHORT; a cut at place x stands before tile x * tiles / places, rounded.
What range r computes of sequence s is part r + s: the parts of a sequence lie side by side.

Batch-invariant (ALIKE), by the sequence's own length alone: ceil(tiles / ALIKE_KEYS keys) equal
parts, at most ALIKE_MOST, with `target` places kept for each sequence.

Every program works the plan out by itself from `seq_lens`, in a few instructions on one vector: no
plan on the host, no launch for it, no synchronisation, and a CUDA graph may be replayed with other
lengths. Above MAX_PLANNED sequences the vector would be long and cutting gain little: there every
sequence is one program's.

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
START = tl.constexpr(2)
SHORT = tl.constexpr(8)
ALIKE_KEYS = tl.constexpr(256)
ALIKE_MOST = tl.constexpr(32)


@dataclass(frozen=True, slots=True)
class Grid:
    """What the host knows of the plan: it depends on the batch's shape, not on its lengths."""

    target: int
    """Programs wanted a KV head; 0: nothing is cut."""
    shape: tuple[int, int]
    """Programs a KV head at most: as a product."""
    parts: int
    """Parts a KV head at most, all sequences together."""
    vector: int
    """At least num_seqs; 0: nothing is planned."""
    alike: bool
    """Batch-invariant."""

    @property
    def most(self) -> int:
        """Parts that one sequence gets at most, in batches of this planning vector."""
        return ALIKE_MOST.value if self.alike else self.vector + self.target

    @property
    def splits(self) -> bool:
        """Whether a sequence may get several parts."""
        return self.alike or self.vector > 0


def plan_grid(
    place: Place, device: torch.device, num_seqs: int, programs_a_range: int, *, e4m3: bool
) -> Grid:
    """The grid for a batch whose every range takes this many programs."""
    if num_seqs > MAX_PLANNED:
        return Grid(target=0, shape=(num_seqs, 1), parts=0, vector=0, alike=False)
    each = PROGRAMS_OF_E4M3 if e4m3 else PROGRAMS_A_MULTIPROCESSOR
    slots = each * place.num_multiprocessors(device)
    target = max(1, slots // programs_a_range)
    most = num_seqs + target
    vector = next(size for size in VECTORS if size >= num_seqs)
    return Grid(target, shape=(most, 1), parts=most + num_seqs, vector=vector, alike=False)


def alike_grid(num_seqs: int, max_seq_len: int) -> Grid:
    """The batch-invariant grid: the same parts whatever else is in the batch."""
    target = max(1, min(ALIKE_MOST.value, ceil_div(max_seq_len, ALIKE_KEYS.value)))
    return Grid(target, shape=(target, num_seqs), parts=target * num_seqs, vector=0, alike=True)


@device_function
def count_tiles(
    s: tl.tensor, query_len: tl.tensor, length: tl.tensor, most: tl.tensor, window: tl.tensor,
    shared: tl.tensor, HAS_WINDOW: tl.constexpr, HAS_SHARED: tl.constexpr, TILE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """(first key, tiles of keys) that decode visits of a sequence; the keys before are out of
    sight, or shared. None where it has no query token, or more than `most`.
    """
    seen = length * 0
    if HAS_WINDOW:
        seen = tl.maximum(length - query_len + 1 - window, 0)
    if HAS_SHARED:
        seen = tl.where((s >= shared[0]) & (s < shared[1]), tl.minimum(shared[2], length), seen)
    tiles = (length + TILE - 1) // TILE - seen // TILE
    return seen, tl.where((query_len > 0) & (query_len <= most), tiles, 0)


@device_function
def plan_ranges(
    query_start_loc: tl.tensor,  # int32 [num_seqs + 1]
    seq_lens: tl.tensor,  # int32 [num_seqs]
    num_seqs: tl.tensor,
    target: tl.tensor,
    most: tl.tensor,  # query tokens of a sequence that decode takes
    window: tl.tensor,
    shared: tl.tensor,  # first sequence, past the last one, tokens
    HAS_WINDOW: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    TILE: tl.constexpr,
    VECTOR: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """(places of each sequence [VECTOR], past its last one likewise, places, ranges, START or 0)."""
    s = tl.arange(0, VECTOR)
    start = tl.load(query_start_loc + s, mask=s < num_seqs, other=0)
    stop = tl.load(query_start_loc + s + 1, mask=s < num_seqs, other=0)
    length = tl.load(seq_lens + s, mask=s < num_seqs, other=0)
    _, tiles = count_tiles(
        s, stop - start, length, most, window, shared, HAS_WINDOW, HAS_SHARED, TILE
    )
    both = tl.sum(tiles.to(tl.int64) + ((tiles > 0).to(tl.int64) << 32), 0)
    total = both.to(tl.int32)
    live = tl.maximum((both >> 32).to(tl.int32), 1)
    ranges = live * tl.maximum((8 * target + 7 * live - 1) // (8 * live), 1)
    ranges = tl.maximum(tl.minimum(ranges, total), 1)
    extra = tl.where(total // ranges >= SHORT, START, 0)
    places = tl.where(tiles > 0, tiles + extra, 0)
    return places, tl.cumsum(places, 0), total + live * extra, ranges, extra


@device_function
def range_start(r: tl.tensor, places: tl.tensor, ranges: tl.tensor) -> tl.tensor:
    """r * places // ranges, without its large product."""
    return r * (places // ranges) + r * (places % ranges) // ranges


@device_function
def range_of(place: tl.tensor, places: tl.tensor, ranges: tl.tensor) -> tl.tensor:
    """The range that owns a place."""
    return (((place + 1).to(tl.int64) * ranges - 1) // tl.maximum(places, 1)).to(tl.int32)


@device_function
def tile_at(place: tl.tensor, tiles: tl.tensor, extra: tl.tensor) -> tl.tensor:
    """The tile before which a cut at a place of its sequence stands."""
    places = tiles + extra
    place = tl.minimum(tl.maximum(place, 0), places)
    return place - (place * extra + places // 2) // tl.maximum(places, 1)


@device_function
def find_work(
    query_start_loc: tl.tensor, seq_lens: tl.tensor, num_seqs: tl.tensor, item: tl.tensor,
    target: tl.tensor, most: tl.tensor, window: tl.tensor, shared: tl.tensor,
    HAS_WINDOW: tl.constexpr, HAS_SHARED: tl.constexpr, TILE: tl.constexpr, VECTOR: tl.constexpr,
    ALIKE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """(first sequence, past the last one, its first place less the range's, the range's, extra)."""
    if ALIKE:
        first = item // target
        last, before, size, extra = first + 1, item * 0, item * 0, item * 0
    elif VECTOR:
        places, ends, total, ranges, extra = plan_ranges(
            query_start_loc, seq_lens, num_seqs, target, most, window, shared,
            HAS_WINDOW, HAS_SHARED, TILE, VECTOR,
        )  # fmt: skip
        low = range_start(item, total, ranges)
        size = range_start(item + 1, total, ranges) - low
        size = tl.where(item < ranges, size, 0)
        first = tl.sum((ends <= low).to(tl.int32), 0)
        last = tl.minimum(tl.sum((ends < low + size).to(tl.int32), 0) + 1, num_seqs)
        last = tl.where(size > 0, last, first)
        here = tl.arange(0, VECTOR) == first
        before = tl.sum(tl.where(here, ends - places, 0), 0) - low
    else:
        first = item
        last, before, size, extra = first + 1, item * 0, item * 0, item * 0
    return first, last, before, size, extra


@device_function
def alike_splits(tiles: tl.tensor, TILE: tl.constexpr) -> tl.tensor:
    """Parts of a sequence with so many tiles of keys, whatever else is in the batch."""
    each: tl.constexpr = ALIKE_KEYS // TILE
    return tl.minimum(tl.maximum((tiles + each - 1) // each, 1), ALIKE_MOST)


@device_function
def cut_sequence(
    item: tl.tensor, s: tl.tensor, tiles: tl.tensor, before: tl.tensor, size: tl.tensor,
    extra: tl.tensor, target: tl.tensor,
    TILE: tl.constexpr, VECTOR: tl.constexpr, ALIKE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """(first tile, past the last one, number of the part) that this program has of a sequence."""
    if ALIKE:
        split, splits = item % target, alike_splits(tiles, TILE)
        begin = tl.minimum(split, splits) * tiles // splits
        end = tl.minimum(split + 1, splits) * tiles // splits
        part = item
    elif VECTOR:
        begin, end = tile_at(-before, tiles, extra), tile_at(size - before, tiles, extra)
        part = item + s
    else:
        begin, end, part = tiles * 0, tiles, item
    return begin, end, part


@device_function
def find_parts(
    query_start_loc: tl.tensor, seq_lens: tl.tensor, s: tl.tensor, num_seqs: tl.tensor,
    target: tl.tensor, most: tl.tensor, window: tl.tensor, shared: tl.tensor,
    HAS_WINDOW: tl.constexpr, HAS_SHARED: tl.constexpr, TILE: tl.constexpr, VECTOR: tl.constexpr,
    ALIKE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """(first part, how many) of a sequence; none if decode does not take it."""
    if ALIKE:
        query_len = tl.load(query_start_loc + s + 1) - tl.load(query_start_loc + s)
        _, tiles = count_tiles(
            s, query_len, tl.load(seq_lens + s), most, window, shared, HAS_WINDOW, HAS_SHARED, TILE
        )
        first, count = s * target, tl.where(tiles > 0, alike_splits(tiles, TILE), 0)
    else:
        places, ends, total, ranges, extra = plan_ranges(
            query_start_loc, seq_lens, num_seqs, target, most, window, shared,
            HAS_WINDOW, HAS_SHARED, TILE, VECTOR,
        )  # fmt: skip
        here = tl.arange(0, VECTOR) == s
        size = tl.sum(tl.where(here, places, 0), 0)
        end = tl.sum(tl.where(here, ends, 0), 0)
        tiles = tl.maximum(size - extra, 1)
        begin = end - size + size // 2 // tiles  # the last place whose cut stands before tile 0
        low = range_of(begin, total, ranges)
        high = range_of(tl.where(tiles > 1, end - 1, begin), total, ranges)
        first, count = low + s, tl.where(size > 0, high - low + 1, 0)
    return first, count
