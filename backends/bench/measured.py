"""What is measured: cases as data, and a row of results for each."""

import statistics
from dataclasses import dataclass

import torch
from torch import Tensor

from backends.contract import KVCache, PagedBatch, SharedPrefix

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
    """A batch of equal sequences with `new` query tokens each; bf16 unless told otherwise.

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

    @property
    def name(self) -> str:
        """As the tables of the documentation name it."""
        kind = "decode" if self.new == 1 else f"prefill {self.new} of"
        heads = f"{self.num_q_heads}/{self.num_kv_heads} heads d{self.head_dim}"
        cache = "" if self.cache_dtype is None else f" over {str(self.cache_dtype)[6:]}"
        shared = f", {self.shared} shared" if self.shared else ""
        return f"{kind} {self.batch} x {self.length}{shared}, {heads}, {str(self.dtype)[6:]}{cache}"

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that have to be read at least once."""
        row = self.num_kv_heads * self.head_dim * (self.cache_dtype or self.dtype).itemsize
        return 2 * (self.batch * (self.length - self.shared) + self.shared) * row

    @property
    def flop(self) -> int:
        """Operations of both products: 4 a visible (query, key) pair, query head and dimension."""
        pairs = self.new * (self.length - self.new) + self.new * (self.new + 1) // 2
        return 4 * self.batch * pairs * self.num_q_heads * self.head_dim

    def inputs(self, device: torch.device) -> tuple[Tensor, KVCache, PagedBatch]:
        """Query, cache with shuffled blocks, batch."""
        blocks = -(-self.length // BLOCK_SIZE)
        shape = (1 + self.batch * blocks, BLOCK_SIZE, self.num_kv_heads, self.head_dim)
        kind = self.cache_dtype or self.dtype
        cache = KVCache(*(torch.randn(shape, device=device).to(kind) for _ in range(2)))
        table = 1 + torch.randperm(self.batch * blocks, device=device).view(self.batch, blocks)
        table[:, : self.shared // BLOCK_SIZE] = table[0, : self.shared // BLOCK_SIZE]
        rows = self.batch * self.new
        query = torch.randn(rows, self.num_q_heads, self.head_dim, device=device).to(self.dtype)
        batch = PagedBatch(
            torch.arange(0, rows + 1, self.new, dtype=torch.int32, device=device),
            torch.full((self.batch,), self.length, dtype=torch.int32, device=device),
            table.int(),
            torch.full((rows,), -1, dtype=torch.int64, device=device),
            self.new,
            self.length,
            SharedPrefix(0, self.batch, self.shared) if self.shared else None,
        )
        return query, cache, batch


def row_of(
    case: str, times: list[float], size: int, others: dict[str, float], ratios: dict[str, float]
) -> Row:
    """Sum up the times of a case, in microseconds, and the bytes that it moves."""
    median = statistics.median(times)
    return Row(case, median, min(times), max(times), size / median / 1e3, others, ratios)
