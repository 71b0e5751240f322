"""The order in which prefill's tiles of rows are worked on, made on the GPU.

A tile is `TOKENS` successive query tokens of one sequence. Sequences with more keys come first, so
that what ends late starts early; the tiles of a sequence stay together, because they read the same
keys and find them in L2. Within the last sequence the last tile, which sees most, comes first, and
sequences alternate: of two neighbours one begins as the other ends, so that what runs at the same
time is about as long. So

    rank = tiles of the sequences that are longer, or as long and before + tiles ahead in its own

and each tile finds its rank in a separate program: no sorting. The list of work is int32
[ENTRY + ENTRY * ranks]: the number of ranks, a zero (COUNTER), then for each rank (sequence, first
row, tokens, position of the first, keys of the sequence, position of its first query token, piece,
pieces). Sequences of fewer than `shortest` query tokens are left out.

Where tiles are too few for the programs and contexts long (SPLIT), the keys of a tile are cut into
pieces, with a rank each, one after the other: floor(its tiles of keys / chunk), where chunk is such
that all pieces make 1 to WAVES rounds of the programs, whichever takes the fewest steps, or no tile
is cut. A step is a tile of keys; an item costs ITEM_STEPS beside its own, and the merge
MERGE_STEPS.

Grid: one program for each tile that there may be, num_tokens // TOKENS + num_seqs; sequence s owns
the programs from query_start_loc[s] // TOKENS + s on and each finds its sequence by bisection (the
numbering is vLLM's). Knows lengths alone: neither caches nor tables.
"""

from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
import triton.language as tl
from torch import Tensor

from backends.contract import PagedBatch
from backends.triton_gpu.shared.launch import Variant, launcher
from backends.triton_gpu.shared.place import Place, device_function
from backends.triton_gpu.shared.rows import sequence_of_tile

ENTRY = tl.constexpr(8)
"""int32 a rank in the list of work, and ahead of it."""
COUNTER = tl.constexpr(1)
"""The place in the list of the counter by which programs meet."""
WAVES = tl.constexpr(4)
ITEM_STEPS = tl.constexpr(3)
MERGE_STEPS = tl.constexpr(2)
SEQS = 128


@device_function
def find_tile(
    query_start_loc: tl.tensor,
    seq_lens: tl.tensor,
    num_seqs: tl.tensor,
    tile: tl.tensor,
    TOKENS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """(sequence, its first row, its query length, position of query token 0, tile's first token).

    The sequence is that of `sequence_of_tile`.
    """
    low = sequence_of_tile(query_start_loc, num_seqs, tile, TOKENS)
    start = tl.load(query_start_loc + low)
    query_len = tl.load(query_start_loc + low + 1) - start
    first = tl.load(seq_lens + low) - query_len
    return low, start, query_len, first, (tile - start // TOKENS - low) * TOKENS


class _Batch(NamedTuple):
    """The inputs of the order."""

    query_start_loc: tl.tensor
    seq_lens: tl.tensor
    num_seqs: tl.tensor
    shortest: tl.tensor
    window: tl.tensor
    programs: tl.tensor


@device_function
def _load_seqs(
    batch: tl.tensor, base: tl.tensor, CUT: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """(sequences from `base` on, their tiles of query tokens, query lengths, lengths)."""
    s = base + tl.arange(0, CUT.seqs)
    there = s < batch.num_seqs
    from_row = tl.load(batch.query_start_loc + s, mask=there, other=0)
    to_row = tl.load(batch.query_start_loc + s + 1, mask=there, other=0)
    lengths = tl.load(batch.seq_lens + s, mask=there, other=0)
    counts = (to_row - from_row + CUT.tokens - 1) // CUT.tokens
    counts = tl.where(to_row - from_row < batch.shortest, 0, counts)
    return s, counts, to_row - from_row, lengths


@device_function
def count_steps(
    length: tl.tensor, query_len: tl.tensor, window: tl.tensor,
    TILE: tl.constexpr, HAS_WINDOW: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """(tiles of keys that an item of a sequence has at most, pieces that each has at most)."""
    least = length - query_len + 1
    longest = (length + TILE - 1) // TILE
    if HAS_WINDOW:
        least = tl.minimum(least, window)
        longest = tl.minimum(longest, window // TILE + 2)
    return longest, tl.maximum(tl.minimum((least + TILE - 1) // TILE, longest // 2), 1)


@device_function
def _count_pieces(longest: tl.tensor, most: tl.tensor, chunk: tl.tensor) -> tl.tensor:
    return tl.minimum(tl.maximum(longest // chunk, 1), most)


@device_function
def _choose_chunk(batch: tl.tensor, CUT: tl.constexpr) -> tl.tensor:
    """Tiles of keys a piece, such that all take the fewest steps; 2^30: nothing is cut."""
    num_seqs, programs, window = batch.num_seqs, batch.programs, batch.window
    items = num_seqs * 0
    work = items
    top = items
    for base in range(0, num_seqs, CUT.seqs):
        _, counts, query_len, length = _load_seqs(batch, base, CUT)
        longest, _ = count_steps(length, query_len, window, CUT.tile, CUT.has_window)
        longest = tl.where(counts > 0, longest, 0)
        items += tl.sum(counts, 0) * CUT.slices
        work += tl.sum(counts * longest, 0) * CUT.slices
        top = tl.maximum(top, tl.max(longest, 0))
    best = items * 0 + (1 << 30)
    fewest = _steps(items, work, top, programs)
    for wave in tl.static_range(1, WAVES + 1):
        chunk = tl.maximum((work + wave * programs - 1) // (wave * programs), 1)
        cut = items * 0
        top = items * 0
        for base in range(0, num_seqs, CUT.seqs):
            _, counts, query_len, length = _load_seqs(batch, base, CUT)
            longest, most = count_steps(length, query_len, window, CUT.tile, CUT.has_window)
            pieces = _count_pieces(longest, most, chunk)
            cut += tl.sum(counts * pieces, 0) * CUT.slices
            size = tl.where(counts > 0, (longest + pieces - 1) // pieces, 0)
            top = tl.maximum(top, tl.max(size, 0))
        steps = _steps(cut, work, top, programs) + MERGE_STEPS
        best = tl.where(steps < fewest, chunk, best)
        fewest = tl.minimum(steps, fewest)
    return best


@device_function
def _steps(items: tl.tensor, work: tl.tensor, top: tl.tensor, programs: tl.tensor) -> tl.tensor:
    """Steps until the last program is done; the longest item takes `top`."""
    rounds = ((items + programs - 1) // programs).to(tl.float32)
    mean = work.to(tl.float32) / tl.maximum(items, 1).to(tl.float32)
    return tl.maximum(rounds * mean, top.to(tl.float32)) + rounds * ITEM_STEPS


@launcher(
    integers=("num_seqs", "shortest", "window", "programs"),
    indices=("query_start_loc", "seq_lens", "work"),
)  # fmt: skip
def _rank(
    query_start_loc: tl.tensor,  # int32 [num_seqs + 1]
    seq_lens: tl.tensor,  # int32 [num_seqs]
    work: tl.tensor,  # int32 [ENTRY + ENTRY * ranks]
    num_seqs: tl.tensor,
    shortest: tl.tensor,  # query tokens; sequences with fewer are left out
    window: tl.tensor,  # used if has_window and split, as the next
    programs: tl.tensor,  # that share the items
    CUT: tl.constexpr,
) -> None:
    TOKENS: tl.constexpr = CUT.tokens
    batch = _Batch(query_start_loc, seq_lens, num_seqs, shortest, window, programs)
    mine, start, query_len, first, skipped = find_tile(
        query_start_loc, seq_lens, num_seqs, tl.program_id(0), TOKENS
    )
    length = first + query_len
    chunk = num_seqs * 0 + 1
    pieces = chunk
    if CUT.split:
        chunk = _choose_chunk(batch, CUT)
        longest, most = count_steps(length, query_len, window, CUT.tile, CUT.has_window)
        pieces = _count_pieces(longest, most, chunk)
    rank = mine * 0
    ranks = mine * 0
    behind = mine * 0
    for base in range(0, num_seqs, CUT.seqs):
        s, counts, query_lens, lengths = _load_seqs(batch, base, CUT)
        before = (lengths > length) | ((lengths == length) & (s < mine))
        after = (counts > 0) & ~before & (s != mine)
        behind += tl.sum(after.to(tl.int32), 0)
        if CUT.split:
            sizes, limits = count_steps(lengths, query_lens, window, CUT.tile, CUT.has_window)
            counts *= _count_pieces(sizes, limits, chunk)
        rank += tl.sum(tl.where(before, counts, 0), 0)
        ranks += tl.sum(counts, 0)
    falling = behind % 2 == 0
    rank += tl.where(falling, (query_len - skipped - 1) // TOKENS, skipped // TOKENS) * pieces
    if tl.program_id(0) == 0:
        tl.store(work, ranks)
        tl.store(work + COUNTER, 0)
    live = (skipped < query_len) & (query_len >= shortest)
    if live:
        for piece in range(pieces):
            entry = work + ENTRY + (rank + piece) * ENTRY
            tl.store(entry, mine)
            tl.store(entry + 1, start + skipped)
            tl.store(entry + 2, tl.minimum(query_len - skipped, TOKENS))
            tl.store(entry + 3, first + skipped)
            tl.store(entry + 4, length)
            tl.store(entry + 5, first)
            tl.store(entry + 6, piece)
            tl.store(entry + 7, pieces)


class Cut(NamedTuple):
    """The compile-time values of the kernel."""

    tokens: int
    """`Items.tokens`; `slices`, `tile` and `split` are those of `Items` too."""
    slices: int
    tile: int
    has_window: bool
    split: bool
    seqs: int
    """Sequences that are looked at together."""


@dataclass(frozen=True, slots=True)
class Items:
    """The sizes by which a batch is cut, as far as they follow from its shape."""

    tokens: int
    """Query tokens a tile."""
    slices: int
    """Items a tile and piece."""
    tile: int
    """Keys a step."""
    tiles: int
    """At most."""
    programs: int
    """That share the items."""
    split: bool
    """True if the keys of a tile may be cut into several items."""

    @property
    def ranks(self) -> int:
        """The most ranks: each wave has room for one item a program, and each tile has one rank."""
        waves = int(WAVES.value) if self.split else 0
        return self.tiles + waves * self.programs // self.slices

    @property
    def size(self) -> int:
        """int32 numbers of the list of work."""
        return int(ENTRY.value) * (1 + self.ranks)


@dataclass(frozen=True, slots=True)
class Order:
    """The launch that lists the work, for batches of one shape that are cut alike."""

    variant: Variant
    grid: tuple[int, int, int]
    size: int
    """int32 numbers of the list."""
    programs: int
    """That share the items."""
    kept_as: tuple[int, Items]
    """Equal for plans that make the same list."""


def plan_order(place: Place, device: torch.device, items: Items, *, has_window: bool) -> Order:
    """Return the launch that orders batches that are cut like this."""
    cut = Cut(items.tokens, items.slices, items.tile, has_window, items.split, SEQS)
    variant = _rank.variant(place, device, (), (cut,), num_warps=1)
    grid = (items.tiles, 1, 1)
    return Order(variant, grid, items.size, items.programs, (id(variant), items))


def keep_order(order: Order, batch: PagedBatch, *, shortest: int, window: int) -> Tensor:
    """The list of work: made once for all layers that are cut alike, where the batch keeps it."""
    kept = batch.kept
    if kept is None:
        return order_tiles(order, batch, shortest=shortest, window=window)
    key = (*order.kept_as, shortest, window)
    work = kept.get(key)
    if work is None:
        work = kept[key] = order_tiles(order, batch, shortest=shortest, window=window)
    return cast("Tensor", work)


def order_tiles(order: Order, batch: PagedBatch, *, shortest: int, window: int) -> Tensor:
    """The list of work; one launch, no synchronisation."""
    lens = batch.seq_lens
    work = torch.empty(order.size, dtype=torch.int32, device=lens.device)
    numbers = (lens.shape[0], shortest, window, order.programs)
    order.variant.launch(order.grid, (batch.query_start_loc, lens, work), numbers)
    return work


def keep_counter(batch: PagedBatch) -> Tensor:
    """The list of work of a batch of one sequence, which needs none but for its zero (COUNTER)."""
    kept = batch.kept
    work = None if kept is None else kept.get("counter")
    if work is None:
        work = torch.zeros(ENTRY.value, dtype=torch.int32, device=batch.seq_lens.device)
        if kept is not None:
            kept["counter"] = work
    return cast("Tensor", work)
