"""What the operations mean, written to be obviously right: one query row at a time, in float64.

Decides the expected result and how far a backend may be from it. Invariant: it reads the cache only
through the block table and only at positions that the row sees. Knows nothing of speed:
O(num_tokens * seq_len * num_q_heads * head_dim) with a Python loop over tokens.

The distance allowed to a row is twice the error of the same algorithm emulated in the cache's dtype
(float32 sums, probabilities and result rounded), with a floor of one rounding of the row's terms.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from backends.contract import AttentionTerms, KVCache, PagedBatch

Floats = np.ndarray[tuple[int, ...], np.dtype[np.floating]]


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


def attention(query: Tensor, cache: KVCache, batch: PagedBatch, terms: AttentionTerms) -> Expected:
    """Exact attention of every query row, on the values as stored; arguments as `Backend`'s."""
    block_size, window = cache.k.shape[1], terms.window
    starts, lengths = batch.query_start_loc.tolist(), batch.seq_lens.tolist()
    tables = batch.block_table.tolist()
    q = query.detach().double().cpu().numpy()
    k = stands_for(cache.k, cache.k_scale).numpy()
    v = stands_for(cache.v, cache.v_scale).numpy()
    numbers = _Numbers.of(terms)
    out = np.full((*q.shape[:2], v.shape[3]), math.nan)
    allowed = np.zeros(q.shape[:2])
    for s, length in enumerate(lengths):
        for row in range(starts[s], starts[s + 1]):
            position = length - (starts[s + 1] - row)
            first = 0 if window is None else max(0, position - window + 1)
            seen = range(first, position + 1)
            blocks = [tables[s][p // block_size] for p in seen]
            offsets = [p % block_size for p in seen]
            keys, values = k[blocks, offsets], v[blocks, offsets]
            out[row], allowed[row] = _row(q[row], keys, values, numbers, query.dtype)
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


def _row(
    query: Floats,  # [num_q_heads, head_dim]
    keys: Floats,  # [num_keys, num_kv_heads, head_dim]
    values: Floats,  # [num_keys, num_kv_heads, value_dim]
    numbers: _Numbers,
    dtype: torch.dtype,
) -> tuple[Floats, Floats]:
    """The exact row, and the error allowed for each of its heads."""
    exact, terms, largest = _attend(query, keys, values, numbers, None)
    emulated, _, _ = _attend(
        query.astype(np.float32),
        keys.astype(np.float32),
        values.astype(np.float32),
        numbers.in_float32(),
        dtype,
    )
    error = np.linalg.norm(_rounded(emulated, dtype) - exact, axis=-1)
    unit = torch.finfo(dtype).eps / 2
    # in float32 the rounding of the logits themselves matters: it grows with their terms
    roundings = 1 + (4 + 2 * largest if dtype == torch.float32 else 0)
    floor = unit * roundings * np.linalg.norm(terms, axis=-1)
    return exact, 2 * np.maximum(error, floor)


def _attend(
    query: Floats, keys: Floats, values: Floats, numbers: _Numbers, round_to: torch.dtype | None
) -> tuple[Floats, Floats, Floats]:
    """(row, its sum with absolute values, the largest logit with absolute terms) of each head."""
    scale, soft_cap, sinks = numbers.scale, numbers.soft_cap, numbers.sinks
    keys, values = keys.transpose(1, 2, 0), values.transpose(1, 0, 2)
    logits = _product(query, keys) * scale
    if soft_cap is not None:
        logits = soft_cap * np.tanh(logits / soft_cap)
    highest = logits.max(axis=1)
    if sinks is not None:
        highest = np.maximum(highest, sinks)
    p = np.exp(logits - highest[:, None])
    total = p.sum(axis=1)
    if sinks is not None:
        total = total + np.exp(sinks - highest)
    if round_to is not None:
        p = _rounded(p, round_to)
    out = _product(p, values) / total[:, None]
    terms = _product(p, np.abs(values)) / total[:, None]
    sizes = _product(np.abs(query), np.abs(keys)) * abs(scale)
    return out, terms, sizes.max(axis=1)


def _product(rows: Floats, matrices: Floats) -> Floats:
    """Each query head's row [num_q_heads, a] times its KV head's matrix [num_kv_heads, a, b]."""
    grouped = rows.reshape(matrices.shape[0], -1, rows.shape[1])
    return (grouped @ matrices).reshape(rows.shape[0], -1)


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
