"""How many parts each sequence's keys are cut into for decode: the plan, made on the GPU.

Planned for the batch, so that all sequences together give each KV head about `target` programs, as
many as the GPU runs at a time, and never more than num_seqs + FINER * target:

    chunk = max(1, ceil(tiles of all sequences / target)) tiles
    splits of a sequence = ceil(its tiles / chunk - 1/8);  split i owns the tiles from
    i * tiles // splits

Where sequences are many (from a planning vector of MANY_SEQS on) and lengths differ much, a program
that has a long part would end long after the others. There chunks are FINER times smaller, though
not below SHORT tiles, and the parts of the long sequences, more than half a chunk, come first, in
the sequences' order, before those of the others: whoever is done takes a smaller part. Parts are
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

import torch
import triton.language as tl

from backends.triton_gpu.place import Place, ceil_div, device_function

VECTORS = (1, 16, 64, 256, 1024)
"""Lengths of the planning vector: few, because a kernel is compiled for each."""
MAX_PLANNED = VECTORS[-1]
PROGRAMS_A_MULTIPROCESSOR = 2
MORE_PROGRAMS = 4
"""Likewise over a quantised cache, whose tiles are half as large, or of several query tokens, whose
steps take longer."""
FINER = tl.constexpr(2)
MANY_SEQS = tl.constexpr(64)
SHORT = tl.constexpr(16)
ALIKE_KEYS = tl.constexpr(256)
ALIKE_MOST = tl.constexpr(32)


@dataclass(frozen=True, slots=True)
class Grid:
    """What the host knows of the plan: it depends on the batch's shape, not on its lengths."""

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
        """Whether a sequence may get several parts."""
        return self.alike or self.vector > 0


def plan_grid(
    place: Place, device: torch.device, num_seqs: int, programs_a_part: int, *, each: int
) -> Grid:
    """The grid for a batch whose parts take so many programs, of which a processor runs `each`."""
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
def count_tiles(
    s: tl.tensor, query_len: tl.tensor, length: tl.tensor, most: tl.tensor, window: tl.tensor,
    shared: tl.tensor, HAS_WINDOW: tl.constexpr, HAS_SHARED: tl.constexpr, TILE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """(first key, tiles of keys) that decode visits of a sequence.

    Keys before are out of sight, or shared. No tiles where it has no query token, or too many.
    """
    seen = length * 0
    if HAS_WINDOW:
        seen = tl.maximum(length - query_len + 1 - window, 0)
    if HAS_SHARED:
        seen = tl.where((s >= shared[0]) & (s < shared[1]), tl.minimum(shared[2], length), seen)
    tiles = (length + TILE - 1) // TILE - seen // TILE
    return seen, tl.where((query_len > 0) & (query_len <= most), tiles, 0)


@device_function
def count_splits(
    query_start_loc: tl.tensor,  # int32 [num_seqs + 1]
    seq_lens: tl.tensor,  # int32 [num_seqs]
    num_seqs: tl.tensor,
    target: tl.tensor,
    most: tl.tensor,  # query tokens of a sequence that decode takes
    window: tl.tensor,
    shared: tl.tensor,  # first sequence, past the last one, tokens
    s: tl.tensor,  # 0 .. VECTOR - 1
    HAS_WINDOW: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    TILE: tl.constexpr,
    VECTOR: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """(parts of each sequence [VECTOR], those of long sequences plus 2^16 times the others)."""
    start = tl.load(query_start_loc + s, mask=s < num_seqs, other=0)
    stop = tl.load(query_start_loc + s + 1, mask=s < num_seqs, other=0)
    length = tl.load(seq_lens + s, mask=s < num_seqs, other=0)
    _, tiles = count_tiles(
        s, stop - start, length, most, window, shared, HAS_WINDOW, HAS_SHARED, TILE
    )
    total = tl.sum(tiles, 0)
    chunk = tl.maximum((total + target - 1) // target, 1)
    if VECTOR >= MANY_SEQS:
        live = tl.sum((tiles > 0).to(tl.int32), 0)
        uneven = tl.max(tiles, 0).to(tl.float32) * live > 1.25 * total.to(tl.float32)
        finer = tl.maximum((chunk + FINER - 1) // FINER, tl.minimum(chunk, SHORT))
        chunk = tl.where(uneven, finer, chunk)
    counts = tl.maximum((tiles + chunk - 1 - chunk // 8) // chunk, 1)
    counts = tl.where(tiles > 0, counts, 0)
    return counts, tl.where(2 * tiles > chunk, counts, counts << 16)


@device_function
def find_part(
    query_start_loc: tl.tensor, seq_lens: tl.tensor, num_seqs: tl.tensor, item: tl.tensor,
    target: tl.tensor, most: tl.tensor, window: tl.tensor, shared: tl.tensor, here: tl.tensor,
    HAS_WINDOW: tl.constexpr, HAS_SHARED: tl.constexpr, TILE: tl.constexpr, VECTOR: tl.constexpr,
    ALIKE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """(sequence, split, splits) of an item; there is none if sequence == num_seqs.

    `here` is 0 .. VECTOR - 1, in whatever layout the caller's language wants; 0 if VECTOR is.
    """
    if ALIKE:
        s = item // target
        query_len = tl.load(query_start_loc + s + 1) - tl.load(query_start_loc + s)
        _, tiles = count_tiles(
            s, query_len, tl.load(seq_lens + s), most, window, shared, HAS_WINDOW, HAS_SHARED, TILE
        )
        split, splits = item % target, alike_splits(tiles, TILE)
        s = tl.where(split < splits, s, num_seqs)
    elif VECTOR:
        counts, classes = count_splits(
            query_start_loc, seq_lens, num_seqs, target, most, window, shared, here,
            HAS_WINDOW, HAS_SHARED, TILE, VECTOR,
        )  # fmt: skip
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
        first, splits = s * target, tl.where(tiles > 0, alike_splits(tiles, TILE), 0)
    else:
        here = tl.arange(0, VECTOR)
        counts, classes = count_splits(
            query_start_loc, seq_lens, num_seqs, target, most, window, shared, here,
            HAS_WINDOW, HAS_SHARED, TILE, VECTOR,
        )  # fmt: skip
        before = tl.sum(tl.where(here < s, classes, 0), 0)
        splits = tl.sum(tl.where(here == s, counts, 0), 0)
        is_long = tl.sum(tl.where(here == s, classes, 0), 0) == splits
        long = tl.sum(classes, 0) & 0xFFFF
        first = tl.where(is_long, before & 0xFFFF, long + (before >> 16))
    return first, splits


@device_function
def alike_splits(tiles: tl.tensor, TILE: tl.constexpr) -> tl.tensor:
    """Parts of a sequence with so many tiles of keys, whatever else is in the batch."""
    each: tl.constexpr = ALIKE_KEYS // TILE
    return tl.minimum(tl.maximum((tiles + each - 1) // each, 1), ALIKE_MOST)
