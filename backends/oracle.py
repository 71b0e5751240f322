"""The meaning of the operations, plainly right: dense, a sequence at a time, in float64.

Decides the expected result and how far a backend may be from it. Invariant: it reads the cache only
through the block table and only at positions that a row of the sequence sees. Knows nothing of
speed: O(num_tokens * seq_len * num_q_heads * head_dim), a few query tokens at a time, so that what
they need of a long context fits in memory.

How far a backend may be from it, and why, is derived in `_allowed` and `_underflow`.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from backends.contract import AttentionTerms, KVCache, PagedBatch

Floats = np.ndarray[tuple[int, ...], np.dtype[np.floating]]
SUM_LOW, SUM_HIGH = 0x9E3779B1, 0x85EBCA77
"""The factors of a word's place in `block_sum`: odd, and of no simple ratio."""

_ROWS = 64  # query tokens times heads that are computed at once


@dataclass(frozen=True, slots=True)
class Expected:
    """The exact attention of a batch and the error allowed."""

    out: Tensor
    """float64 [num_tokens, num_q_heads, value_dim]; rows of no sequence are NaN."""
    allowed: Tensor
    """float64 [num_tokens, num_q_heads]: the largest Euclidean error of each row."""
    underflow: Tensor
    """The same: the part of it that numbers too small for their format may cost."""

    def worst_ratio(self, came: Tensor) -> float:
        """The largest error of a live row over the error allowed; NaN counts as infinite."""
        live = ~self.out.isnan().any(-1)
        error = (came.double().cpu() - self.out).norm(dim=-1)[live]
        ratio = (error / self.allowed[live]).nan_to_num(nan=math.inf, posinf=math.inf)
        return float(ratio.max()) if ratio.numel() else 0.0

    def relative_error(self, came: Tensor) -> float:
        """||came - out|| / ||out|| over all live rows, beside what underflow may cost."""
        live = ~self.out.isnan().any(-1)
        errors = (came.double().cpu() - self.out)[live].norm(dim=-1) - self.underflow[live]
        return float(errors.clamp(min=0).norm()) / max(float(self.out[live].norm()), 1e-30)


def block_sum(block: Sequence[Tensor]) -> int:
    """The sum of a block of all caches, as `Backend.move_blocks` writes it. O(bytes).

    Words have 8 bytes, or as many as divide the size of every part; (low half + place * SUM_LOW) *
    (high half + (place + 1) * SUM_HIGH), each factor modulo 2^32, summed modulo 2^64, as int64.
    """
    parts = [part.cpu().contiguous().reshape(-1).view(torch.uint8).numpy() for part in block]
    word = math.gcd(8, *[part.size for part in parts])
    words = np.concatenate(parts).view(f"<u{word}").astype(np.uint64)
    place, half = np.arange(words.size, dtype=np.uint64), np.uint64(0xFFFFFFFF)
    low = (words + place * np.uint64(SUM_LOW)) & half
    high = ((words >> np.uint64(32)) + (place + np.uint64(1)) * np.uint64(SUM_HIGH)) & half
    return int((low * high).sum(dtype=np.uint64).astype(np.int64))


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
    step = max(1, _ROWS // q.shape[1])
    out = np.full((*q.shape[:2], v.shape[3]), math.nan)
    allowed, underflow = np.zeros(q.shape[:2]), np.zeros(q.shape[:2])
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
            out[rows], allowed[rows], underflow[rows] = _exact_and_allowed(one, terms, query.dtype)
    return Expected(*map(torch.from_numpy, (out, allowed + underflow, underflow)))


def stands_for(cache: Tensor, scale: Tensor | None) -> Tensor:
    """Return the values of a cache: float64 [num_blocks, block_size, num_kv_heads, head_dim]."""
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
class _Rows:
    """Query tokens of one sequence, and the keys that any of them sees."""

    query: Floats  # [num_rows, num_q_heads, head_dim]
    keys: Floats  # [num_keys, num_kv_heads, head_dim]
    values: Floats  # [num_keys, num_kv_heads, value_dim]
    seen: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]  # [num_rows, num_keys]


def _exact_and_allowed(
    rows: _Rows, terms: AttentionTerms, dtype: torch.dtype
) -> tuple[Floats, Floats, Floats]:
    """The exact rows [num_rows, num_q_heads, value_dim]; the errors allowed for each head."""
    keys, values = rows.keys.transpose(1, 2, 0), rows.values.transpose(1, 0, 2)
    seen = rows.seen[:, None]
    logits = _product(rows.query, keys) * terms.scale
    if terms.soft_cap is not None:
        logits = terms.soft_cap * np.tanh(logits / terms.soft_cap)
    logits = np.where(seen, logits, -math.inf)
    highest = logits.max(axis=-1)
    sinks = np.full(highest.shape[1], -math.inf)
    if terms.sinks is not None:
        sinks = terms.sinks.detach().double().cpu().numpy()
        highest = np.maximum(highest, sinks)
    weights, of_sink = np.exp(logits - highest[..., None]), np.exp(sinks - highest)
    total = weights.sum(axis=-1) + of_sink
    p, p_sink = weights / total[..., None], of_sink / total
    out = _product(p, values)
    sizes = _product(np.abs(rows.query), np.abs(keys)) * abs(terms.scale)
    sink_sizes = np.where(p_sink > 0, np.abs(sinks), 0)
    num_keys = seen.sum(axis=-1)
    allowed = _allowed(p, sizes, p_sink, sink_sizes, values, out, num_keys, dtype)
    return out, allowed, _underflow(weights, of_sink, total, values, out, num_keys, dtype)


def _allowed(
    p: Floats,  # [num_rows, num_q_heads, num_keys]: probabilities
    sizes: Floats,  # the same: |scale| * sum over d of |q_d k_d|, of each logit
    p_sink: Floats,  # [num_rows, num_q_heads]
    sink_sizes: Floats,  # the same: |logit| of the sink
    values: Floats,  # [num_kv_heads, num_keys, value_dim]
    out: Floats,  # [num_rows, num_q_heads, value_dim]: the exact result
    num_keys: Floats,  # [num_rows, 1]: how many keys each row sees
    dtype: torch.dtype,
) -> Floats:
    """The largest Euclidean error of each row, [num_rows, num_q_heads].

    To first order, for a kernel that computes in float32 (unit roundoff u = 2^-24) and whose
    probabilities and result may be rounded to `dtype` (unit roundoff U). Write n for the keys that
    a row sees, |.| for the Euclidean norm, s_k for `sizes`, p_k for the probabilities; a sink is
    a key whose value is 0. References: N. J. Higham, Accuracy and Stability of Numerical
    Algorithms, 2nd ed. (2002), called H; N. J. Higham and T. Mary, A new approach to probabilistic
    rounding error analysis, SIAM J. Sci. Comput. 41 (2019), called HM.

    - Rounding to `dtype`: of each p_k, then of the result (H 2.2): U (sum p_k |v_k| + |out|).
    - Probabilities: p_k errs by a factor 1 + e_k, |e_k| <= 4u (1 + s_k). The 4u are for exp itself.
      Of the 4u s_k, q.k takes two: not the worst case u d s_k (H 3.1), because the products of a
      row and a key do not repeat, so their roundings are independent with mean 0 (HM) and the
      error of the sum is about u s_k for any d. The third is for the scale and log2(e), folded
      into the query or the logit, the fourth for subtracting the maximum. Numerator and total take
      the same p_k, so that the result moves by sum p_k e_k (v_k - out): by at most
      4u sum p_k (1 + s_k) |v_k - out|, which is 0 where all values are equal.
    - Sums over keys: adding t_1 .. t_n errs by at most u times the sum of the sizes of the partial
      sums (the running error bound, H 3.3 and 4.2). The total's are at most 1 (relative to the
      whole), n/2 together if all p_k are equal, which moves the result by u n |out| / 2. The
      numerator's are a part of `out` that grows alike, another u n |out| / 2, and around it a sum
      of p_k (v_k - out), which wanders without a direction: its size is at most about
      r = sqrt(sum p_k^2 |v_k - out|^2), together u n r. Independent roundings would leave sqrt(n)
      of n, but tokens repeat, and adding the same number again rounds the same way each time:
      here the worst case is met. Four roundings more are of the division and of scales.

    The bound holds for any order of the sums; kernels that sum in tiles stay below it. Nothing is
    doubled or added for safety.
    """
    u, rounding = 2.0**-24, torch.finfo(dtype).eps / 2
    of_values, of_out = _sizes(values, out)
    squares = of_values**2 + of_out[..., None] ** 2 - 2 * _product(out, values.transpose(0, 2, 1))
    apart = np.sqrt(np.maximum(squares, 0))  # |v_k - out|: [num_rows, num_q_heads, num_keys]
    to_dtype = (p * of_values).sum(axis=-1) + of_out
    probabilities = 4 * (p * (1 + sizes) * apart).sum(axis=-1)
    probabilities += 4 * p_sink * (1 + sink_sizes) * of_out
    wandering = np.sqrt(((p * apart) ** 2).sum(axis=-1))
    sums = num_keys * (of_out + wandering) + 4 * of_out
    allowed: Floats = rounding * to_dtype + u * (probabilities + sums)
    return allowed


def _underflow(
    weights: Floats,  # [num_rows, num_q_heads, num_keys]: probabilities times `total`
    of_sink: Floats,  # [num_rows, num_q_heads]: likewise
    total: Floats,  # the same; the largest weight, or the sink's, is 1
    values: Floats,  # [num_kv_heads, num_keys, value_dim]
    out: Floats,  # [num_rows, num_q_heads, value_dim]: the exact result
    num_keys: Floats,  # [num_rows, 1]: how many keys each row sees
    dtype: torch.dtype,
) -> Floats:
    """The error of each row that is allowed because numbers are small, [num_rows, num_q_heads].

    A result below the smallest normal number of its format loses its relative precision (H 2.8):
    float32 and bfloat16 may become 0, as most kernels compute them, float16 is off by half a step.

    - Weights: in float32 one errs by all of itself below 2^-126, which moves the result by
      weight |v_k - out| / total; the sink's likewise, by |out|. Rounded to float16, it errs by
      at most 2^-25 below 2^-14, which moves the numerator alone.
    - Products and partial sums of each of `value_dim` numbers err by 2^-126 for each key, values
      and the result once more each, the result by half a step of its dtype.
    """
    smallest = torch.finfo(torch.float32).smallest_normal
    of_values, of_out = _sizes(values, out)
    gone = np.where(weights < 2 * smallest, weights, 0.0)
    gone_sink = np.where(of_sink < 2 * smallest, of_sink, 0.0)
    lost = (gone * (of_values + of_out[..., None])).sum(axis=-1) + gone_sink * of_out
    step = 0.0
    if dtype == torch.float16:
        info = torch.finfo(dtype)
        step = info.smallest_normal * info.eps / 2
        rounded = np.where(weights < 2 * info.smallest_normal, np.minimum(weights, step), 0.0)
        lost += (rounded * of_values).sum(axis=-1)
    numbers = math.sqrt(out.shape[-1]) * ((num_keys + 4) * smallest + step)
    found: Floats = lost / total + numbers
    return found


def _sizes(values: Floats, out: Floats) -> tuple[Floats, Floats]:
    """|v_k|: [num_q_heads, num_keys], and |out|: [num_rows, num_q_heads]."""
    group = out.shape[1] // values.shape[0]
    of_values: Floats = np.linalg.norm(values, axis=-1).repeat(group, axis=0)
    of_out: Floats = np.linalg.norm(out, axis=-1)
    return of_values, of_out


def _product(rows: Floats, matrices: Floats) -> Floats:
    """[num_rows, num_q_heads, a], each head's times its KV head's matrix [num_kv_heads, a, b]."""
    num_rows, num_kv_heads = rows.shape[0], matrices.shape[0]
    grouped = rows.reshape(num_rows, num_kv_heads, -1, rows.shape[2]).transpose(1, 0, 2, 3)
    left = torch.from_numpy(grouped.reshape(num_kv_heads, -1, rows.shape[2]))
    product: Floats = torch.bmm(left, torch.from_numpy(matrices)).numpy()
    apart = product.reshape(num_kv_heads, num_rows, -1, matrices.shape[2]).transpose(1, 0, 2, 3)
    return apart.reshape(num_rows, rows.shape[1], -1)


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
