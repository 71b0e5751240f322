"""Linear attention with decay, one token after the other, on a GPU.

    S = exp(decay) * S;  S += key (rate * new)^T;  out = scale * S^T query + skip * value
    new = value - S^T key, or value;  with a gate decay = dt * a, dt = clamp(softplus(decay + bias))

Layout: states [num_slots, num_heads, key_dim, value_dim], slots any distance apart. Grid: (heads *
tiles of value_dim, sequences); a program holds [key_dim, a tile of value_dim] of one state in
registers, in float32, for all tokens of its sequence, and columns of a state never meet. So it
reads nothing that may have been written before: what it stores it has loaded itself. Bytes moved:
the state read once and written once; queries, keys and decays are read again by
every tile of a head, out of L2. Tolerance: `state_oracle.linear_attention`.
"""

from typing import NamedTuple, cast

import torch
import triton.language as tl
from torch import Tensor

from backends.checks import check_linear_attention
from backends.contract import Backend
from backends.states import NORM_EPSILON, LinearAttentionTerms, LinearRows, StateBatch
from backends.triton_gpu.shared.launch import Launch, launcher
from backends.triton_gpu.shared.place import Place, ceil_div, device_function, power_of_two, sign
from backends.triton_gpu.state.slots import INDICES, slot_at

TILE = 4096
"""Numbers of a state that a program holds: more or fewer programs are slower on an H200."""
OPTIONS = {"num_warps": 2, "enable_fp_fusion": False}
"""A compiler that fuses products and sums does so differently where there may be several tokens,
and then calls with several do not give the bits of calls with one."""
_EPSILON = tl.constexpr(NORM_EPSILON)


class Form(NamedTuple):
    """Compile-time values: the layout of the tensors and the kind of recurrence."""

    slot: int
    """From slot to slot."""
    heads: tuple[int, ...]
    """From head to head of query, key, value, decay and out."""
    group: int
    """Heads a key head."""
    key_dim: int
    value_dim: int
    width: int
    """`key_dim` as a power of two."""
    tile: int
    """Of `value_dim`."""
    tiles: int
    by_channel: bool
    """Decays come per channel of a key."""
    delta_rule: bool
    l2norm: bool
    has_gate: bool
    has_bias: bool
    has_skip: bool
    single: bool
    """Each sequence has one row."""


@device_function
def _softplus(x: tl.tensor) -> tl.tensor:
    """log(1 + exp(x)), to a few units in the last place everywhere.

    For a small y the rounding of 1 + y is divided out of log(1 + y) again (a method of W. Kahan).
    """
    y = tl.exp(-tl.abs(x))
    w = 1.0 + y
    log = tl.where(w == 1.0, y, tl.log(w) * (y / tl.where(w == 1.0, 1.0, w - 1.0)))
    return tl.maximum(x, 0.0) + log


@device_function
def _load(rows: tl.tensor, at: tl.tensor, index: tl.tensor, size: tl.constexpr) -> tl.tensor:
    return tl.load(rows + at + index, mask=index < size, other=0.0).to(tl.float32)


@launcher(
    integers=(
        "query_stride", "key_stride", "value_stride", "decay_stride", "beta_stride", "out_stride",
        "query_len",
    ),
    indices=("query", "key", "value", "decay", "beta", "out", "a", "bias", "skip", *INDICES),
    pointers=("state",),
)  # fmt: skip
def _step(
    query: tl.tensor,  # [num_tokens, num_key_heads, key_dim]
    key: tl.tensor,  # likewise
    value: tl.tensor,  # [num_tokens, num_heads, value_dim]
    decay: tl.tensor,  # [num_tokens, num_heads], or with key_dim at the end if by_channel
    beta: tl.tensor,  # [num_tokens, num_heads], read if delta_rule
    out: tl.tensor,  # [num_tokens, num_heads, value_dim]
    a: tl.tensor,  # float32 [num_heads], read if has_gate
    bias: tl.tensor,  # likewise, read if has_bias
    skip: tl.tensor,  # likewise, read if has_skip
    state: tl.tensor,  # [num_slots, num_heads, key_dim, value_dim]
    read_slots: tl.tensor,  # int32 [num_seqs]
    write_slots: tl.tensor,  # likewise
    query_stride: tl.tensor,  # from token to token
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    decay_stride: tl.tensor,
    beta_stride: tl.tensor,
    out_stride: tl.tensor,
    query_len: tl.tensor,  # rows of each sequence
    scale: tl.tensor,
    low: tl.tensor,  # limits of dt
    high: tl.tensor,
    FORM: tl.constexpr,
) -> None:
    K: tl.constexpr = FORM.key_dim
    V: tl.constexpr = FORM.value_dim
    head, seq = tl.program_id(0) // FORM.tiles, tl.program_id(1)
    k = tl.arange(0, FORM.width)
    v = tl.program_id(0) % FORM.tiles * FORM.tile + tl.arange(0, FORM.tile)
    live = (k < K)[:, None] & (v < V)[None, :]
    tile = state + head * (K * V) + (k[:, None] * V + v[None, :])
    count = 1 if FORM.single else query_len
    place, there = slot_at(read_slots, seq, FORM.slot)
    s = tl.load(tile + place, mask=live & there, other=0.0).to(tl.float32)
    for i in range(count):
        row, of_key = (seq * count + i).to(tl.int64), head // FORM.group
        q_row = _load(query, row * query_stride + of_key * FORM.heads[0], k, K)
        k_row = _load(key, row * key_stride + of_key * FORM.heads[1], k, K)
        v_row = _load(value, row * value_stride + head * FORM.heads[2], v, V)
        if FORM.l2norm:
            q_row *= tl.rsqrt(tl.sum(q_row * q_row, 0) + _EPSILON)
            k_row *= tl.rsqrt(tl.sum(k_row * k_row, 0) + _EPSILON)
        g = decay + row * decay_stride + head * FORM.heads[3]
        new = v_row
        if FORM.by_channel:
            s *= tl.exp(_load(g, 0, k, K))[:, None]
        elif FORM.has_gate:
            dt = tl.load(g).to(tl.float32)
            if FORM.has_bias:
                dt += tl.load(bias + head)
            dt = tl.minimum(tl.maximum(_softplus(dt), low), high)
            s *= tl.exp(dt * tl.load(a + head))
            if not FORM.delta_rule:
                new *= dt
        else:
            s *= tl.exp(tl.load(g))
        if FORM.delta_rule:
            rate = tl.load(beta + row * beta_stride + head).to(tl.float32)
            new = (new - tl.sum(s * k_row[:, None], 0)) * rate
        s = tl.fma(k_row[:, None], new[None, :], s)
        o = tl.sum(s * (q_row * scale)[:, None], 0)
        if FORM.has_skip:
            o += tl.load(skip + head) * v_row
        to = out + row * out_stride + head * FORM.heads[4] + v
        tl.store(to, o.to(out.dtype.element_ty), mask=v < V)
        s = s.to(state.dtype.element_ty).to(tl.float32)
    place, there = slot_at(write_slots, seq, FORM.slot)
    tl.store(tile + place, s.to(state.dtype.element_ty), mask=live & there)


def linear_attention_step(
    backend: Backend,
    place: Place,
    rows: LinearRows,
    state: Tensor,
    batch: StateBatch,
    terms: LinearAttentionTerms,
    out: Tensor | None,
) -> Tensor:
    """One token after the other, of every sequence; see `StateBackend.linear_attention_step`.

    Raises:
        InvalidArgumentError: a shape, dtype or device breaks the contract; nothing written.
    """
    gate, skip, reads = terms.gate, terms.skip, batch.read_slots
    a, bias = (None, None) if gate is None else (gate.a, gate.bias)
    signature = (
        "linear attention", *map(sign, rows), sign(state), sign(reads), sign(batch.write_slots),
        batch.query_len, sign(out), terms.delta_rule, terms.l2norm, sign(a), bias is None,
        sign(skip),
    )  # fmt: skip
    plan = cast("Launch | None", place.plan(signature))
    if plan is None:
        check_linear_attention(backend, rows, state, batch, terms, out)
    query, key, value, decay, beta = rows
    if out is None:
        out = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    if plan is None:
        plan = _plan(place, rows, state, batch, terms, out)
        place.keep(signature, plan)
    if plan.grid[1]:
        given = (query if each is None else each for each in (beta, out, a, bias, skip))
        tensors = (query, key, value, decay, *given, state, reads, batch.write_slots)
        low, high = (0.0, 0.0) if gate is None else gate.limits
        plan.run(tensors, float(terms.scale), float(low), float(high))
    return out


def _plan(
    place: Place,
    rows: LinearRows,
    state: Tensor,
    batch: StateBatch,
    terms: LinearAttentionTerms,
    out: Tensor,
) -> Launch:
    """Plan a call whose arguments have been checked; compiles nothing."""
    query, key, value, decay, beta = rows
    heads, key_dim, value_dim = state.shape[1:]
    width, tile = tile_of(key_dim, value_dim)
    tiles = ceil_div(value_dim, tile)
    form = Form(
        state.stride(0), tuple(each.stride(1) for each in (query, key, value, decay, out)),
        heads // query.shape[1], key_dim, value_dim, width, tile, tiles, decay.dim() == 3,
        terms.delta_rule, terms.l2norm, terms.gate is not None,
        terms.gate is not None and terms.gate.bias is not None, terms.skip is not None,
        batch.query_len == 1,
    )  # fmt: skip
    dtypes = (query.dtype, state.dtype)
    variant = _step.variant(place, state.device, dtypes, (form,), **OPTIONS)
    given = (query, key, value, decay, query if beta is None else beta, out)
    integers = (*(each.stride(0) for each in given), batch.query_len)
    return Launch(variant, (heads * tiles, batch.num_seqs, 1), integers)


def tile_of(key_dim: int, value_dim: int) -> tuple[int, int]:
    """Powers of two: all of `key_dim`, and as many columns as TILE allows."""
    width = power_of_two(key_dim)
    return width, max(1, min(power_of_two(value_dim), TILE // width))
