"""Linear attention with decay, one token after the other, on a CPU.

    S = exp(decay) * S;  S += key (rate * new)^T;  out = scale * S^T query + skip * value
    new = value - S^T key, or value;  with a gate decay = dt * a, dt = clamp(softplus(decay + bias))

Layout: states [num_slots, num_heads, key_dim, value_dim], slots any distance apart. A unit is a
head of a sequence, all of its tokens. Each token reads the state where the one before has left it
and writes it to scratch memory, the last one to the slot. Bytes moved: the state read
once (with the delta rule a second time, out of the core's cache) and written once per token. No
fast math, so that the bits do not depend on which loops a compiler vectorises. Tolerance:
`state_oracle.linear_attention`.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from backends.checks import check_linear_attention
from backends.contract import Backend
from backends.numba_cpu.bits import TAGS, Tag, at, exact, narrow, span, widen
from backends.numba_cpu.launch import Plans, Workers, sign
from backends.numba_cpu.state.slots import SOURCE_DIGEST, Slots, checked, rows_of
from backends.numba_cpu.tiles import Floats
from backends.states import NORM_EPSILON, LinearAttentionTerms, LinearRows, StateBatch

GRAIN = 1 << 15  # elements of states a thread: fewer cost more to hand out than to compute
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)


@exact()
def _load(rows: Floats, first: int, to: Floats) -> None:
    """Rows in float32."""
    source = span(rows, first, to.size)
    for d in range(to.size):
        to[d] = widen(source[d])


@exact()
def _store(out: Floats, added: Floats, rows: Floats, first: int) -> None:
    """The sum of both, rounded."""
    target = span(rows, first, out.size)
    for d in range(out.size):
        target[d] = narrow(out[d] + added[d], target[d])


@exact()
def _multiply(row: Floats, factor: np.float32, epsilon: np.float32) -> None:
    """A query or key times a factor, and over its norm if epsilon is not 0."""
    if epsilon > _ZERO:
        for d in range(row.size):
            epsilon += row[d] * row[d]
        factor /= np.sqrt(epsilon)
    for d in range(row.size):
        row[d] *= factor


@exact()
def _decay(
    decay: Floats,  # [key_dim], or [1]
    a: Floats,
    bias: Floats,
    head: int,
    gate: tuple[bool, bool, float, float],  # whether there is one, and it has a bias; limits of dt
    kept: Floats,  # [key_dim]; written: exp(decay)
) -> np.float32:
    """The gate's dt, or 1."""
    if decay.size > 1:
        for k in range(kept.size):
            kept[k] = np.exp(widen(decay[k]))
        return _ONE
    x, dt = widen(decay[0]), _ONE
    if gate[0]:
        if gate[1]:
            x += bias[head]
        soft = max(x, _ZERO) + np.log1p(np.exp(-abs(x)))
        dt = min(max(soft, np.float32(gate[2])), np.float32(gate[3]))
        x = dt * a[head]
    kept[:] = np.exp(x)
    return dt


@exact()
def _recall(state: Floats, kept: Floats, key: Floats, new: Floats, out: Floats) -> None:
    """Subtract S^T key of the decayed state from `new`; `out` is zeros, before and after."""
    width = new.size
    for k in range(key.size):
        row, weight = span(state, k * width, width), kept[k] * key[k]
        for v in range(width):
            out[v] += weight * widen(row[v])
    for v in range(width):
        new[v] -= out[v]
        out[v] = _ZERO


@exact()
def _advance(
    source: Floats,  # [key_dim, value_dim]: the state before the token
    target: Floats,  # likewise: after it; may be the source
    query: Floats,  # [key_dim]
    key: Floats,  # likewise
    kept: Floats,  # likewise: exp(decay)
    new: Floats,  # [value_dim]
    out: Floats,  # [value_dim]: zeros; written
) -> None:
    width = new.size
    for k in range(key.size):
        row, to = span(source, k * width, width), span(target, k * width, width)
        for v in range(width):
            after = kept[k] * widen(row[v]) + key[k] * new[v]
            out[v] += query[k] * after
            to[v] = narrow(after, to[v])


@lru_cache(maxsize=1)
def _kernel(source_digest: int) -> Callable[..., None]:
    """Compile for the sources with this digest; closing over it makes it part of the cache key."""

    @exact(cache=True)
    def step(
        tensors: tuple[int, ...],  # query, key, value, decay, beta, out, a, bias, skip; 0: none
        state: int,  # [num_slots, num_heads, key_dim, value_dim]
        tags: tuple[Tag, Tag, Tag],  # of rows, of decays, of states
        where: Slots,
        strides: tuple[int, ...],  # token and head of query, key, value, decay, beta and out
        sizes: tuple[int, int, int, int, int],  # num_heads, group, key_dim, value_dim, slot
        flags: tuple[bool, bool, bool],  # by_channel, delta_rule, l2norm
        numbers: tuple[float, float, float],  # scale, limits of dt
        start: int,  # first unit
        stop: int,  # past the last unit
    ) -> None:
        _ = source_digest
        num_heads, group, key_dim, value_dim, slot_size = sizes
        by_channel, delta_rule, l2norm = flags
        queries, keys = at(tensors[0], 1, tags[0]), at(tensors[1], 1, tags[0])
        values, decays = at(tensors[2], 1, tags[0]), at(tensors[3], 1, tags[1])
        betas, outs = at(tensors[4], 1, tags[0]), at(tensors[5], 1, tags[0])
        a, bias = at(tensors[6], num_heads, _ONE), at(tensors[7], num_heads, _ONE)
        skip = at(tensors[8], num_heads, _ONE)
        reads, writes = at(where[0], 1, np.int32(0)), at(where[1], 1, np.int32(0))
        size = key_dim * value_dim
        states = at(state, 1, tags[2])
        scratch = np.empty_like(at(state, size, tags[2]))
        query, key = np.empty(key_dim, np.float32), np.empty(key_dim, np.float32)
        kept = np.empty(key_dim, np.float32)
        new, out = np.empty(value_dim, np.float32), np.empty(value_dim, np.float32)
        added = np.empty(value_dim, np.float32)
        epsilon = np.float32(NORM_EPSILON) if l2norm else _ZERO
        gate = (tensors[6] != 0, tensors[7] != 0, numbers[1], numbers[2])
        for unit in range(start, stop):
            s, h = unit // num_heads, unit % num_heads
            source, (first, stored, last) = scratch, rows_of(where, s)
            if reads[s] >= 0:
                source = span(states, reads[s] * slot_size + h * size, size)
            else:
                scratch[:] = 0  # in every format
            for t in range(first, last):
                _load(queries, t * strides[0] + h // group * strides[1], query)
                _load(keys, t * strides[2] + h // group * strides[3], key)
                _load(values, t * strides[4] + h * strides[5], new)
                _multiply(query, np.float32(numbers[0]), epsilon)
                _multiply(key, _ONE, epsilon)
                out[:] = _ZERO
                _load(values, t * strides[4] + h * strides[5], added)
                _multiply(added, skip[h] if tensors[8] else _ZERO, _ZERO)
                at_decay = t * strides[6] + h * strides[7]
                decay = span(decays, at_decay, key_dim if by_channel else 1)
                rate = _decay(decay, a, bias, h, gate, kept)
                if delta_rule:
                    rate = widen(betas[t * strides[8] + h * strides[9]])
                    _recall(source, kept, key, new, out)
                _multiply(new, rate, _ZERO)
                target = scratch
                if t == stored - 1 and writes[s] >= 0:
                    target = span(states, writes[s] * slot_size + h * size, size)
                _advance(source, target, query, key, kept, new, out)
                _store(out, added, outs, t * strides[10] + h * strides[11])
                if t == stored - 1 and t < last - 1:  # draft tokens leave the slot as it is
                    scratch[:] = target
                source = scratch

    return step


class StatePlan(NamedTuple):
    """The checked arguments of all calls with one signature."""

    tags: tuple[Tag, Tag, Tag]  # of rows, of decays, of states
    strides: tuple[int, ...]  # token and head of query, key, value, decay, beta and out
    sizes: tuple[int, int, int, int, int]  # num_heads, group, key_dim, value_dim, slot
    flags: tuple[bool, bool, bool]  # by_channel, delta_rule, l2norm


def linear_attention_step(
    backend: Backend,
    workers: Workers,
    plans: Plans[StatePlan],
    rows: LinearRows,
    state: Tensor,
    batch: StateBatch,
    terms: LinearAttentionTerms,
    out: Tensor | None,
) -> Tensor:
    """One token after the other, of every sequence; see `StateBackend.linear_attention_step`.

    Raises:
        InvalidArgumentError: a shape, dtype, device or slot breaks the contract; nothing written.
    """
    gate, indices = terms.gate, (batch.read_slots, batch.write_slots, batch.query_start_loc)
    a, bias = (None, None) if gate is None else (gate.a, gate.bias)
    tensors = (*rows, out, a, bias, terms.skip)
    signature = (sign(*tensors, state, *indices), terms.delta_rule, terms.l2norm)
    plan = plans.get(signature)
    if plan is None:
        check_linear_attention(backend, rows, state, batch, terms, out)
    if out is None:
        out = torch.empty(rows[2].shape, dtype=rows[2].dtype)
        tensors = (*rows, out, a, bias, terms.skip)
    if plan is None:
        plan = _plan(rows, state, terms, out)
        plans.keep(signature, plan)
    step = partial(
        _kernel(SOURCE_DIGEST),
        tuple([0 if each is None else each.data_ptr() for each in tensors]),
        state.data_ptr(),
        plan.tags,
        checked(batch, state.shape[0], len(rows[0])),
        plan.strides,
        plan.sizes,
        plan.flags,
        (float(terms.scale), *map(float, (0.0, 0.0) if gate is None else gate.limits)),
    )
    _, num_heads, key_dim, value_dim = state.shape
    workers.run_evenly(step, batch.num_seqs * num_heads, GRAIN // (key_dim * value_dim))
    return out


def _plan(
    rows: LinearRows,
    state: Tensor,
    terms: LinearAttentionTerms,
    out: Tensor,
) -> StatePlan:
    """Plan a call that has passed its checks."""
    query, _, _, decay, _ = rows
    num_heads, key_dim, value_dim = state.shape[1:]
    strides = [(0, 0) if each is None else each.stride()[:2] for each in (*rows, out)]
    return StatePlan(
        (TAGS[query.dtype], TAGS[decay.dtype], TAGS[state.dtype]),
        tuple(stride for pair in strides for stride in pair),
        (num_heads, num_heads // query.shape[1], key_dim, value_dim, state.stride(0)),
        (decay.dim() == 3, terms.delta_rule, terms.l2norm),
    )
