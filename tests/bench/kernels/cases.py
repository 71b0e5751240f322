"""What is measured: cases as data, and a row of results for each."""

import math
import random
import statistics
from dataclasses import dataclass

import torch
from torch import Tensor

from backends.contract import KVCache, KVLayout, PagedBatch, SharedPrefix

BLOCK_SIZE = 16
HEAD_DIM = 128


@dataclass(frozen=True, slots=True)
class Row:
    """One measured case: medians, and the spread of ours, in microseconds."""

    case: str
    median_us: float
    low_us: float
    """The fastest round."""
    high_us: float
    """The slowest round."""
    gb_per_s: float
    """Bytes that have to move, over the median."""
    others_us: dict[str, float]
    """Medians of the yardsticks."""
    ratios: dict[str, float]
    """Median over rounds of yardstick time / our time in the same round."""
    tflop_per_s: float = 0.0
    """Operations of both products over the visible pairs, over the median; 0: not counted."""


@dataclass(frozen=True, slots=True)
class DecodeCase:
    """A batch of equal sequences with `new` query tokens each, and `others`; bf16 if not told.

    The first `shared` positions of all are the same blocks.
    """

    batch: int
    length: int
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = HEAD_DIM
    dtype: torch.dtype = torch.bfloat16
    new: int = 1
    cache_dtype: torch.dtype | None = None
    """Of a quantised cache; None: `dtype`."""
    shared: int = 0
    value_dim: int = 0
    """Above 0: over latents of `head_dim` numbers, the first of which are values."""
    others: tuple[tuple[int, int], ...] = ()
    """(query tokens, length) of further sequences."""
    what: str = ""
    """What such a batch is called."""
    block_size: int = BLOCK_SIZE

    @property
    def seqs(self) -> tuple[tuple[int, int], ...]:
        """(query tokens, length) of each sequence."""
        return ((self.new, self.length),) * self.batch + self.others

    @property
    def layout(self) -> KVLayout:
        """What a slot of the cache holds."""
        dtype, value_dim = self.cache_dtype or self.dtype, self.value_dim or self.head_dim
        return KVLayout(
            self.num_kv_heads, self.head_dim, value_dim, dtype, is_latent=self.value_dim > 0
        )

    @property
    def name(self) -> str:
        """As the tables of the documentation name it."""
        kind = "decode" if self.new == 1 else f"prefill {self.new} of"
        heads = f"{self.num_q_heads}/{self.num_kv_heads} heads d{self.head_dim}"
        if self.value_dim:
            rest = self.head_dim - self.value_dim
            heads = f"{self.num_q_heads} heads over latents of {self.value_dim} + {rest}"
        cache = "" if self.cache_dtype is None else f" over {str(self.cache_dtype)[6:]}"
        shared = f", {self.shared} shared" if self.shared else ""
        what = self.what or f"{kind} {self.batch} x {self.length}"
        blocks = "" if self.block_size == BLOCK_SIZE else f", blocks of {self.block_size}"
        return f"{what}{shared}, {heads}, {str(self.dtype)[6:]}{cache}{blocks}"

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that have to be read at least once."""
        row = sum(self.layout.row_bytes)
        own = sum(length - self.shared for _, length in self.seqs)
        return (own + self.shared) * row

    @property
    def flop(self) -> int:
        """Operations of both products: 2 a visible (query, key) pair, query head and dimension."""
        pairs = sum(new * (length - new) + new * (new + 1) // 2 for new, length in self.seqs)
        both = self.head_dim + self.layout.value_dim
        return 2 * pairs * self.num_q_heads * both

    def inputs(self, device: torch.device) -> tuple[Tensor, KVCache, PagedBatch]:
        """Query, cache with shuffled blocks, batch."""
        counts, lengths = zip(*self.seqs, strict=True)
        blocks = [-(-length // self.block_size) for length in lengths]
        shape = (1 + sum(blocks), self.block_size, self.num_kv_heads, self.head_dim)
        layout = self.layout
        cache = layout.over(
            [torch.randn(shape, device=device).to(layout.dtype) for _ in layout.row_bytes]
        )
        table = torch.zeros(len(blocks), max(blocks), dtype=torch.int32)
        ids, at = (1 + torch.randperm(sum(blocks))).int(), 0
        for row, own in zip(table, blocks, strict=True):
            row[:own] = ids[at : at + own]
            at += own
        shared = self.shared // self.block_size
        table[:, :shared] = table[0, :shared]
        rows = sum(counts)
        query = torch.randn(rows, self.num_q_heads, self.head_dim, device=device).to(self.dtype)
        batch = PagedBatch(
            torch.tensor([0, *counts], device=device).cumsum(0).int(),
            torch.tensor(lengths, dtype=torch.int32, device=device),
            table.to(device),
            torch.full((rows,), -1, dtype=torch.int64, device=device),
            max(counts),
            max(lengths),
            SharedPrefix(0, len(blocks), self.shared) if self.shared else None,
        )
        return query, cache, batch


def ragged(count: int, low: int, high: int, middle: int, seed: int = 1) -> DecodeCase:
    """Decode of `count` lengths as in chats: most around `middle`, few much longer."""
    draw = random.Random(seed)
    lengths: list[int] = []
    while len(lengths) < count:
        length = int(middle * math.exp(draw.gauss(0, 1)))
        if low <= length <= high:
            lengths.append(length)
    rest = tuple((1, length) for length in lengths[1:])
    return DecodeCase(1, lengths[0], others=rest, what=f"ragged decode, {count} of {low} to {high}")


def row_of(
    case: str, times: list[float], size: int, others: dict[str, float], ratios: dict[str, float]
) -> Row:
    """Sum up the times of a case, in microseconds, and the bytes that it moves."""
    median = statistics.median(times)
    return Row(case, median, min(times), max(times), size / median / 1e3, others, ratios)
