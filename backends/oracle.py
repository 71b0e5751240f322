"""What the operations mean, written to be obviously right: dense, a sequence at a time, in float64.

Decides the expected result and how far a backend may be from it. Invariant: it reads the cache only
through the block table and only at positions that a row of the sequence sees. Knows nothing of
speed: O(num_tokens * seq_len * num_q_heads * head_dim), a few query tokens at a time, so that what
they need of a long context fits in memory.

The distance allowed to a row is twice the error of the same algorithm emulated in the cache's dtype
(float32 sums, probabilities and result rounded), with a floor of one rounding of the row's terms.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from backends.contract import AttentionTerms, KVCache, PagedBatch

Floats = np.ndarray[tuple[int, ...], np.dtype[np.floating]]
_ROWS = 64  # query tokens times heads that are computed at once


@dataclass(frozen=True, slots=True)
class Expected:
    """The exact attention of a batch and the error allowed."""

    out: Tensor
    """float64 [num_tokens, num_q_heads, value_dim]; rows of no sequence are NaN."""
    allowed: Tensor
    """float64 [num_tokens, num_q_heads]: the largest Euclidean error of each row."""

    def worst_ratio(self, came: Tensor) -> float:
        """The largest error of a live row over the error allowed; NaN counts as infinite."""
        live = ~self.out.isnan().any(-1)
        error = (came.double().cpu() - self.out).norm(dim=-1)[live]
        ratio = (error / self.allowed[live]).nan_to_num(nan=math.inf, posinf=math.inf)
        return float(ratio.max()) if ratio.numel() else 0.0

    def relative_error(self, came: Tensor) -> float:
        """||came - out|| / ||out|| over all live rows."""
        live = ~self.out.isnan().any(-1)
        error = float((came.double().cpu() - self.out)[live].norm())
        return error / max(float(self.out[live].norm()), 1e-30)


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch computes in this thread meanwhile: on a busy machine threads mostly wait for others."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(count)


@one_thread()
def attention(query: Tensor, cache: KVCache, batch: PagedBatch, terms: AttentionTerms) -> Expected:
    """Exact attention of every query row, on the values as stored; arguments as `Backend`'s."""
    starts, lengths = batch.query_start_loc.tolist(), batch.seq_lens.tolist()
    tables = batch.block_table.cpu().numpy()
    q = query.detach().double().cpu().numpy()
    k = stands_for(cache.k, cache.k_scale).numpy()
    v = stands_for(cache.v, cache.v_scale).numpy()
    numbers = _Numbers.of(terms)
    step = max(1, _ROWS // q.shape[1])
    out = np.full((*q.shape[:2], v.shape[3]), math.nan)
    allowed = np.zeros(q.shape[:2])
    for s, length in enumerate(lengths):
        for start in range(starts[s], starts[s + 1], step):
            rows = np.arange(start, min(start + step, starts[s + 1]))
            positions = length - starts[s + 1] + rows
            first = 0 if terms.window is None else max(0, positions[0] - terms.window + 1)
            keys = np.arange(first, positions[-1] + 1)
            seen = keys <= positions[:, None]
            if terms.window is not None:
                seen &= keys > positions[:, None] - terms.window
            where = tables[s, keys // k.shape[1]], keys % k.shape[1]
            one = _Rows(q[rows], k[where], v[where], seen)
            out[rows], allowed[rows] = _exact_and_allowed(one, numbers, query.dtype)
    return Expected(torch.from_numpy(out), torch.from_numpy(allowed))


def stands_for(cache: Tensor, scale: Tensor | None) -> Tensor:
    """What a cache's elements mean: float64 [num_blocks, block_size, num_kv_heads, head_dim]."""
    values = cache.detach().double().cpu()
    return values if scale is None else values * scale.detach().double().cpu()[:, None]


def quantise(rows: Tensor, scale: Tensor | None) -> Tensor:
    """The bytes that e4m3 rows [num_tokens, num_kv_heads, head_dim] are stored as: uint8.

    By looking for the nearest of the 127 sizes there are; of two as near, the even one.
    """
    values = rows.detach().float().cpu()
    if scale is not None:
        values = values * (1 / scale.detach().cpu()[:, None])
    sizes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    middles = (sizes[1:] + sizes[:-1]) / 2
    size = values.double().abs().nan_to_num(nan=0.0, posinf=1e9)
    low = torch.searchsorted(middles, size, side="left")
    tied = size == middles[low.clamp(max=125)]
    stored = low + (tied & (low % 2 == 1) & (low < 126)).long()
    stored = (stored + 128 * values.signbit().long()).to(torch.uint8)
    return torch.where(values.isnan(), torch.tensor(0x7F, dtype=torch.uint8), stored)


@dataclass(frozen=True, slots=True)
class _Numbers:
    """The terms of a row, in the precision that it is computed in."""

    scale: float
    soft_cap: float | None
    sinks: Floats | None

    @classmethod
    def of(cls, terms: AttentionTerms) -> "_Numbers":
        sinks = None if terms.sinks is None else terms.sinks.detach().double().cpu().numpy()
        return cls(terms.scale, terms.soft_cap, sinks)

    def in_float32(self) -> "_Numbers":
        return replace(self, sinks=None if self.sinks is None else self.sinks.astype(np.float32))


@dataclass(frozen=True, slots=True)
class _Rows:
    """Query tokens of one sequence, and what any of them sees."""

    query: Floats  # [num_rows, num_q_heads, head_dim]
    keys: Floats  # [num_keys, num_kv_heads, head_dim]
    values: Floats  # [num_keys, num_kv_heads, value_dim]
    seen: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]  # [num_rows, num_keys]

    def in_float32(self) -> "_Rows":
        query, keys, values = (
            each.astype(np.float32) for each in (self.query, self.keys, self.values)
        )
        return _Rows(query, keys, values, self.seen)


def _exact_and_allowed(rows: _Rows, numbers: _Numbers, dtype: torch.dtype) -> tuple[Floats, Floats]:
    """The exact rows, and the error allowed for each of their heads."""
    exact, terms, largest = _attend(rows, numbers, None)
    emulated, _, _ = _attend(rows.in_float32(), numbers.in_float32(), dtype)
    error = np.linalg.norm(_rounded(emulated, dtype) - exact, axis=-1)
    unit = torch.finfo(dtype).eps / 2
    # in float32 the rounding of the logits themselves matters: it grows with their terms
    roundings = 1 + (4 + 2 * largest if dtype == torch.float32 else 0)
    floor = unit * roundings * np.linalg.norm(terms, axis=-1)
    return exact, 2 * np.maximum(error, floor)


def _attend(
    rows: _Rows, numbers: _Numbers, round_to: torch.dtype | None
) -> tuple[Floats, Floats, Floats]:
    """Of each row and head (the sum, the same with absolute values, the largest absolute logit)."""
    scale, soft_cap, sinks = numbers.scale, numbers.soft_cap, numbers.sinks
    keys, values = rows.keys.transpose(1, 2, 0), rows.values.transpose(1, 0, 2)
    seen = rows.seen[:, None]
    logits = _product(rows.query, keys) * scale
    if soft_cap is not None:
        logits = soft_cap * np.tanh(logits / soft_cap)
    logits = np.where(seen, logits, -math.inf)
    highest = logits.max(axis=-1)
    if sinks is not None:
        highest = np.maximum(highest, sinks)
    p = np.exp(logits - highest[..., None])
    total = p.sum(axis=-1)
    if sinks is not None:
        total = total + np.exp(sinks - highest)
    if round_to is not None:
        p = _rounded(p, round_to)
    out = _product(p, values) / total[..., None]
    terms = _product(p, np.abs(values)) / total[..., None]
    sizes = _product(np.abs(rows.query), np.abs(keys)) * abs(scale)
    return out, terms, np.where(seen, sizes, 0).max(axis=-1)


def _product(rows: Floats, matrices: Floats) -> Floats:
    """[num_rows, num_q_heads, a], each head's times its KV head's matrix [num_kv_heads, a, b]."""
    num_rows, num_kv_heads = rows.shape[0], matrices.shape[0]
    grouped = rows.reshape(num_rows, num_kv_heads, -1, rows.shape[2]).transpose(1, 0, 2, 3)
    left = torch.from_numpy(grouped.reshape(num_kv_heads, -1, rows.shape[2]))
    product: Floats = torch.bmm(left, torch.from_numpy(matrices)).numpy()
    apart = product.reshape(num_kv_heads, num_rows, -1, matrices.shape[2]).transpose(1, 0, 2, 3)
    return apart.reshape(num_rows, rows.shape[1], -1)


def _rounded(array: Floats, dtype: torch.dtype) -> Floats:
    """The array's values as this dtype would hold them."""
    return torch.from_numpy(array).to(dtype).to(torch.float32).numpy()


def slot_mapping(batch: PagedBatch, block_size: int, size: int) -> list[int]:
    """The slots of the batch's new tokens, padded with -1 to `size`."""
    starts, lengths = batch.query_start_loc.tolist(), batch.seq_lens.tolist()
    tables = batch.block_table.tolist()
    slots = []
    for s, length in enumerate(lengths):
        count = starts[s + 1] - starts[s]
        for position in range(length - count, length):
            block_id = tables[s][position // block_size]
            slots.append(block_id * block_size + position % block_size)
    return slots + [-1] * (size - len(slots))
