"""The meaning of the operations on states: in float64, a sequence and a token after the other.

Decides the expected outputs and states, and how far a backend may be from each number of them.
Knows nothing of speed: every state of every token is kept.

The error allowed is a running error bound (N. J. Higham, Accuracy and Stability of Numerical
Algorithms, 2nd ed. (2002), 3.3), computed beside the values: each operation of a kernel in float32
adds half a unit in the last place of its result (u = 2^-24), and passes on what its operands err.
A sum of n products errs by (sqrt(n) + 2) u times the sum of their sizes: roundings of products that
do not repeat are independent with mean 0 (N. J. Higham and T. Mary, SIAM J. Sci. Comput. 41
(2019)). exp errs by 2 units in the last place, and by 2 |x| more where x is first multiplied by
log2(e). Results are then rounded to their dtype, which for a state is also an error of the next
token. The smallest numbers of a dtype are half their step off. Of a sequence with more than
`EXACT_TOKENS` tokens of two bytes the factors of each product may be tf32.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from backends.oracle import one_thread
from backends.states import (
    EXACT_TOKENS,
    NORM_EPSILON,
    LinearAttentionTerms,
    LinearRows,
    ShortConvTerms,
    StateBatch,
)

_U = 2.0**-24
_OF_TF32 = 2.0**-8  # both factors of two products in a row, cut to 10 bits


@dataclass(frozen=True, slots=True)
class Number:
    """Exact values in float64, and how far a kernel may be from each."""

    value: Tensor
    error: Tensor

    def rounded(self, dtype: torch.dtype) -> "Number":
        """Return it as stored: exact values that may err by half a step of the dtype more."""
        info = torch.finfo(dtype)
        smallest = max(info.smallest_normal * info.eps, 2.0**-126)
        return Number(self.value, self.error + self.value.abs() * info.eps / 2 + smallest)

    def worst_ratio(self, came: Tensor) -> float:
        """The largest error over the error allowed, of numbers that are expected; NaN is inf."""
        live = ~self.value.isnan()
        error = (came.double().cpu() - self.value)[live].abs()
        ratio = torch.where(error == 0, 0.0, error / self.error[live])
        ratio = ratio.nan_to_num(nan=math.inf, posinf=math.inf)
        return float(ratio.max()) if ratio.numel() else 0.0


@dataclass(frozen=True, slots=True)
class Expected:
    """Of every row of a batch."""

    out: Number
    """[num_tokens, ...]."""
    states: Number
    """[num_tokens, ...]: the state after each token, whether or not it is written."""


def rows_of(batch: StateBatch) -> list[range]:
    """The rows of each sequence."""
    starts: Iterable[int] = range(batch.num_seqs + 1)
    if batch.query_start_loc is not None:
        starts = batch.query_start_loc.tolist()
    return [range(first, last) for first, last in pairwise(starts)]


@one_thread()
def short_conv(x: Tensor, state: Tensor, batch: StateBatch, terms: ShortConvTerms) -> Expected:
    """Return the outputs and states of `short_conv_step`; read only the slots to be read."""
    weight, rows = _exact(terms.weight), _exact(x)
    out, states = _nothing(x, x.shape[1:]), _nothing(x, state.shape[1:])
    width, exact = weight.shape[1], torch.zeros(state.shape[1:], dtype=torch.float64)
    for s, of_seq in enumerate(rows_of(batch)):
        inputs = _state_before(state, batch, s)
        for t in of_seq:
            inputs = torch.cat([inputs[1 - width :], rows[t : t + 1]])
            products = inputs.T * weight
            if terms.bias is not None:
                products = torch.cat([products, _exact(terms.bias)[:, None]], 1)
            y = Number(products.sum(1), (width + 1) * _U * products.abs().sum(1))
            _put(out, t, _silu(y).rounded(x.dtype) if terms.silu else y.rounded(x.dtype))
            _put(states, t, Number(inputs[1:], exact))
    return Expected(out, states)


@one_thread()
def linear_attention(
    rows: LinearRows, state: Tensor, batch: StateBatch, terms: LinearAttentionTerms
) -> Expected:
    """Return the outputs and states of `linear_attention_step`; read only the slots to be read."""
    query, key, value = map(_exact, rows[:3])
    query, key = (
        _normed(x.repeat_interleave(state.shape[1] // x.shape[1], 1), l2norm=terms.l2norm)[
            ..., None
        ]
        for x in (query, key)
    )
    decays, rates = _decays(rows[3], terms)
    if terms.delta_rule and rows[4] is not None:
        rates = Number(_exact(rows[4]), torch.zeros_like(rates.error))
    straight = (
        torch.zeros_like(value) if terms.skip is None else _exact(terms.skip)[:, None] * value
    )
    out, states = _nothing(value, value.shape[1:]), _nothing(value, state.shape[1:])
    of_norm = (math.sqrt(key.shape[2]) / 2 + 5) * _U if terms.l2norm else 0.0
    for s, of_seq in enumerate(rows_of(batch)):
        in_chunks = len(of_seq) > EXACT_TOKENS and rows[0].dtype.itemsize == 2
        of_product = of_norm + _OF_TF32 * in_chunks
        of_sum = (math.sqrt(key.shape[2]) + 3) * _U + of_product
        before = _state_before(state, batch, s)
        now = Number(before, torch.zeros_like(before))
        for t in of_seq:
            q, k, g = query[t], key[t], decays.value[t]
            rate, of_rate = rates.value[t][:, None], rates.error[t][:, None]
            faded = g.exp() * now.value
            of_faded = (4 + 2 * g.abs()) * _U + decays.error[t]
            error = g.exp() * now.error + faded.abs() * of_faded
            new, of_new = value[t], 0 * value[t]
            if terms.delta_rule:
                new = new - (faded * k).sum(1)
                of_new = (error * k.abs()).sum(1) + of_sum * (faded * k).abs().sum(1)
            new, of_new = rate * new, rate.abs() * of_new + of_rate * new.abs()
            of_new = of_new + 2 * _U * new.abs()
            after = faded + k * new[:, None]
            error = error + k.abs() * of_new[:, None] + _U * after.abs()
            error = error + (k * new[:, None]).abs() * (of_product + _U)
            y = terms.scale * (after * q).sum(1) + straight[t]
            of_y = (error * q.abs()).sum(1) + of_sum * (after * q).abs().sum(1)
            of_y = abs(terms.scale) * of_y + 2 * _U * (straight[t].abs() + y.abs())
            _put(out, t, Number(y, of_y).rounded(rows[2].dtype))
            now = Number(after, error).rounded(state.dtype)
            _put(states, t, now)
    return Expected(out, states)


def _exact(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().double()


def _state_before(state: Tensor, batch: StateBatch, s: int) -> Tensor:
    slot = int(batch.read_slots[s])
    if slot < 0:
        return torch.zeros(state.shape[1:], dtype=torch.float64)
    return _exact(state[slot])


def _nothing(rows: Tensor, shape: torch.Size) -> Number:
    values = [torch.full((len(rows), *shape), math.nan).double() for _ in range(2)]
    return Number(*values)


def _put(numbers: Number, t: int, row: Number) -> None:
    numbers.value[t], numbers.error[t] = row.value, row.error


def _decays(decay: Tensor, terms: LinearAttentionTerms) -> tuple[Number, Number]:
    """[num_tokens, num_heads, 1 or key_dim, 1] decays, and [num_tokens, num_heads] dt or ones."""
    x, gate = _exact(decay), terms.gate
    if gate is None:
        x = (x if x.dim() == 3 else x[..., None])[..., None]
        ones = torch.ones(x.shape[:2], dtype=torch.float64)
        return Number(x, torch.zeros_like(x)), Number(ones, torch.zeros_like(ones))
    x, a = x if gate.bias is None else x + _exact(gate.bias), _exact(gate.a)
    soft = torch.nn.functional.softplus(x, threshold=50)
    dt = soft.clamp(*gate.limits)
    of_dt = _U * x.abs() * x.sigmoid() + (8 + 2 * x.abs()) * _U * soft
    of_dt = torch.minimum(of_dt, dt)
    of_decay = a.abs() * of_dt + _U * (dt * a).abs()
    return Number((dt * a)[..., None, None], of_decay[..., None, None]), Number(dt, of_dt)


def _normed(x: Tensor, *, l2norm: bool) -> Tensor:
    return x / ((x * x).sum(-1, keepdim=True) + NORM_EPSILON).sqrt() if l2norm else x


def _silu(y: Number) -> Number:
    """SiLU, x * sigmoid(x), whose slope is at most 1.1."""
    value = y.value * y.value.sigmoid()
    return Number(value, 1.1 * y.error + (6 + 2 * y.value.abs()) * _U * value.abs())
