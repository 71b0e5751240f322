"""Linear attention with decay, of sequences of any lengths, on a GPU.

    S = exp(decay) * S;  S += key (rate * new)^T;  out = scale * S^T query + skip * value
    new = value - S^T key, or value;  with a gate decay = dt * a, dt = clamp(softplus(decay + bias))

Layout: states [num_slots, num_heads, key_dim, value_dim], slots any distance apart. Grid: (heads *
tiles of value_dim, sequences); a program holds [key_dim, a tile of value_dim] of one state in
registers, in float32, for all tokens of its sequence, and columns of a state never meet. So it
reads nothing that may have been written before: what it stores it has loaded itself.

Tokens come one after another, or `CHUNK` at once: then the tokens of a chunk are read by each other
through products of matrices, and what each adds to the state is the solution of a triangular system
(S. Yang et al., "Gated Delta Networks", arXiv:2412.06464), whose inverse is made of the inverses of
its halves. Decays between two tokens are sums of the decays between them, never differences of
larger sums, and no inverse of a decay is computed, so any decay is allowed. The products are of
tf32, which is more than rows of two bytes have. Rows of float32 go token by token, and so do states
of less than float32, which are rounded after each token, decays by channel and sequences of up to
`EXACT_TOKENS` tokens. Bytes moved: the state read once and written once; queries, keys and decays
are read again by every tile of a head, out of L2. Tolerance: `state_oracle.linear_attention`.
"""

from typing import NamedTuple, cast

import torch
import triton.language as tl
from torch import Tensor

from backends.checks import check_linear_attention
from backends.contract import Backend
from backends.states import (
    EXACT_TOKENS,
    NORM_EPSILON,
    LinearAttentionTerms,
    LinearRows,
    StateBatch,
)
from backends.triton_gpu.shared.launch import Launch, launcher
from backends.triton_gpu.shared.place import (
    HOPPER,
    Place,
    ceil_div,
    device_function,
    power_of_two,
    sign,
)
from backends.triton_gpu.state.slots import INDICES, index_tensors, rows_at, slot_at

TILE = 4096
"""Numbers of a state that a program holds: more or fewer programs are slower on an H200."""
OPTIONS = {"num_warps": 2, "enable_fp_fusion": False}
"""A compiler that fuses products and sums does so differently where there may be several tokens,
and then calls with several do not give the bits of calls with one."""
CHUNK, CHUNK_OPTIONS = 16, {"num_warps": 4, "enable_fp_fusion": False}
"""Tokens that are computed at once."""
_EPSILON = tl.constexpr(NORM_EPSILON)
_LEAST = tl.constexpr(EXACT_TOKENS + 1)
"""Fewer go one by one."""


_STRIDES = (
    "query_stride", "key_stride", "value_stride", "decay_stride", "beta_stride", "out_stride",
)  # fmt: skip
_ROWS_AND_TERMS = (
    "query", "key", "value", "decay", "beta", "out", "a", "bias", "skip", *INDICES,
)  # fmt: skip


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
    has_drafts: bool
    chunk: int
    """Tokens at once, of sequences that have as many as `_LEAST`; 0: all come one by one."""


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


@device_function
def _inverse(a: tl.tensor, CHUNK: tl.constexpr) -> tl.tensor:
    """(1 + a)^-1 of a strictly lower triangular matrix: of blocks of 2, 4, ... on the diagonal.

    A block with the inverses p and q of its halves, and b below p, has -q b p there.
    """
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    found = (i == j).to(tl.float32)
    found -= tl.where(i // 2 == j // 2, a, 0.0)
    for step in tl.static_range(1, 6):
        if (1 << step) < CHUNK:
            below = (i >> step == (j >> step) + 1) & ((j >> step) % 2 == 0)
            product = _sum(found, tl.where(below, a, 0.0))
            found -= _sum(product, found)
    return found


@device_function
def _sum(x: tl.tensor, y: tl.tensor) -> tl.tensor:
    """A product with the accuracy of float32, of small matrices: it costs three."""
    return tl.dot(x, y, input_precision="tf32x3")


@device_function
def _dot(x: tl.tensor, y: tl.tensor) -> tl.tensor:
    return tl.dot(x, y, input_precision="tf32")


@device_function
def _advance(
    s: tl.tensor,  # [key_dim, value_dim]
    q: tl.tensor,  # [CHUNK, key_dim]
    k: tl.tensor,  # likewise; zeros where there is no token
    new: tl.tensor,  # [CHUNK, value_dim]; likewise
    g: tl.tensor,  # [CHUNK]; likewise
    rate: tl.tensor,  # [CHUNK], read with the delta rule
    DELTA_RULE: tl.constexpr,
    CHUNK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The state behind a chunk, and what its tokens read."""
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    g = tl.maximum(g, -1e4)  # exp of less is 0, and 0 times it is a number
    later = tl.where(i > j, g[:, None], 0.0)  # [m, j]: what token m takes from token j's part
    between = _sum((i >= j).to(tl.float32), later)
    kept = tl.where(i >= j, tl.exp(between), 0.0)
    from_start = tl.exp(tl.cumsum(g, 0))[:, None]
    if DELTA_RULE:
        new = (new - from_start * _dot(k, s)) * rate[:, None]
        mixed = tl.where(i > j, _dot(k, tl.trans(k)) * kept, 0.0) * rate[:, None]
        new = _sum(_inverse(mixed, CHUNK), new)
    out = from_start * _dot(q, s) + _sum(_dot(q, tl.trans(k)) * kept, new)
    to_end = tl.exp(tl.sum(later, 0))[:, None]
    s = tl.exp(tl.sum(g, 0)) * s + _dot(tl.trans(k * to_end), new)
    return s, out


@device_function
def _load_rows(
    rows: tl.tensor, row: tl.tensor, stride: tl.tensor, at: tl.tensor, live: tl.tensor,
    index: tl.tensor, SIZE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Rows of a head in float32, zeros where there is none."""
    where = rows + (row.to(tl.int64) * stride + at)[:, None] + index[None, :]
    return tl.load(where, mask=live[:, None] & (index < SIZE)[None, :], other=0.0).to(tl.float32)


@device_function
def _unit(rows: tl.tensor, AXIS: tl.constexpr) -> tl.tensor:
    """Over their norms."""
    return rows * tl.rsqrt(tl.sum(rows * rows, AXIS, keep_dims=True) + _EPSILON)


@device_function
def _gated(
    x: tl.tensor, a: tl.tensor, bias: tl.tensor, low: tl.tensor, high: tl.tensor, head: tl.tensor,
    FORM: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """The decays of a gate, and its dt."""
    dt = x.to(tl.float32)
    if FORM.has_bias:
        dt += tl.load(bias + head)
    dt = tl.minimum(tl.maximum(_softplus(dt), low), high)
    return dt * tl.load(a + head), dt


@launcher(
    integers=_STRIDES,
    indices=_ROWS_AND_TERMS,
    pointers=("state",),
)
def _step(  # noqa: C901  # most branches are taken when it is compiled
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
    query_start_loc: tl.tensor,  # int32 [num_seqs + 1], read unless single
    num_stored: tl.tensor,  # int32 [num_seqs], read if has_drafts
    query_stride: tl.tensor,  # from token to token
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    decay_stride: tl.tensor,
    beta_stride: tl.tensor,
    out_stride: tl.tensor,
    scale: tl.tensor,
    low: tl.tensor,  # limits of dt
    high: tl.tensor,
    FORM: tl.constexpr,
) -> None:
    K: tl.constexpr = FORM.key_dim
    V: tl.constexpr = FORM.value_dim
    head, seq = tl.program_id(0) // FORM.tiles, tl.program_id(1)
    of_key = head // FORM.group
    start, count, stored = seq, seq * 0 + 1, seq * 0 + 1
    if not FORM.single:
        start, count, stored = rows_at(query_start_loc, num_stored, seq, FORM.has_drafts)
        if (count == 0) | ((FORM.chunk > 0) & (count >= _LEAST)):
            return
    k = tl.arange(0, FORM.width)
    v = tl.program_id(0) % FORM.tiles * FORM.tile + tl.arange(0, FORM.tile)
    live = (k < K)[:, None] & (v < V)[None, :]
    tile = state + head * (K * V) + (k[:, None] * V + v[None, :])
    place, there = slot_at(read_slots, seq, FORM.slot)
    to, kept = slot_at(write_slots, seq, FORM.slot)
    s = tl.load(tile + place, mask=live & there, other=0.0).to(tl.float32)
    for i in range(count):
        row = (start + i).to(tl.int64)
        q_row = _load(query, row * query_stride + of_key * FORM.heads[0], k, K)
        k_row = _load(key, row * key_stride + of_key * FORM.heads[1], k, K)
        v_row = _load(value, row * value_stride + head * FORM.heads[2], v, V)
        if FORM.l2norm:
            q_row, k_row = _unit(q_row, 0), _unit(k_row, 0)
        g = decay + row * decay_stride + head * FORM.heads[3]
        new = v_row
        if FORM.by_channel:
            s *= tl.exp(_load(g, 0, k, K))[:, None]
        elif FORM.has_gate:
            faded, dt = _gated(tl.load(g), a, bias, low, high, head, FORM)
            s *= tl.exp(faded)
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
        at_row = out + row * out_stride + head * FORM.heads[4] + v
        tl.store(at_row, o.to(out.dtype.element_ty), mask=v < V)
        s = s.to(state.dtype.element_ty).to(tl.float32)
        if not FORM.single:
            tl.store(tile + to, s.to(state.dtype.element_ty), mask=live & kept & (i + 1 == stored))
    if FORM.single:
        tl.store(tile + to, s.to(state.dtype.element_ty), mask=live & kept)


@launcher(
    integers=_STRIDES,
    indices=_ROWS_AND_TERMS,
    pointers=("state",),
)
def _step_chunks(
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
    query_start_loc: tl.tensor,  # int32 [num_seqs + 1], read unless single
    num_stored: tl.tensor,  # int32 [num_seqs], read if has_drafts
    query_stride: tl.tensor,  # from token to token
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    decay_stride: tl.tensor,
    beta_stride: tl.tensor,
    out_stride: tl.tensor,
    scale: tl.tensor,
    low: tl.tensor,  # limits of dt
    high: tl.tensor,
    FORM: tl.constexpr,
) -> None:
    K: tl.constexpr = FORM.key_dim
    V: tl.constexpr = FORM.value_dim
    head, seq = tl.program_id(0) // FORM.tiles, tl.program_id(1)
    of_key = head // FORM.group
    start, count, stored = rows_at(query_start_loc, num_stored, seq, FORM.has_drafts)
    if count < _LEAST:
        return
    k = tl.arange(0, FORM.width)
    v = tl.program_id(0) % FORM.tiles * FORM.tile + tl.arange(0, FORM.tile)
    live = (k < K)[:, None] & (v < V)[None, :]
    tile = state + head * (K * V) + (k[:, None] * V + v[None, :])
    place, there = slot_at(read_slots, seq, FORM.slot)
    to, kept = slot_at(write_slots, seq, FORM.slot)
    s = tl.load(tile + place, mask=live & there, other=0.0).to(tl.float32)
    done = start * 0
    while done < count:
        stop = tl.minimum(done + FORM.chunk, tl.where(done < stored, stored, count))
        i = done + tl.arange(0, FORM.chunk)
        is_row, row = i < stop, start + i
        q_rows = _load_rows(query, row, query_stride, of_key * FORM.heads[0], is_row, k, K)
        k_rows = _load_rows(key, row, key_stride, of_key * FORM.heads[1], is_row, k, K)
        v_rows = _load_rows(value, row, value_stride, head * FORM.heads[2], is_row, v, V)
        if FORM.l2norm:
            q_rows, k_rows = _unit(q_rows, 1), _unit(k_rows, 1)
        at = decay + row.to(tl.int64) * decay_stride + head * FORM.heads[3]
        g, new = tl.load(at, mask=is_row, other=0.0), v_rows
        if FORM.has_gate:
            g, dt = _gated(g, a, bias, low, high, head, FORM)
            g = tl.where(is_row, g, 0.0)
            if not FORM.delta_rule:
                new *= dt[:, None]
        rate = g
        if FORM.delta_rule:
            at = beta + row.to(tl.int64) * beta_stride + head
            rate = tl.load(at, mask=is_row, other=0.0).to(tl.float32)
        s, o_rows = _advance(s, q_rows * scale, k_rows, new, g, rate, FORM.delta_rule, FORM.chunk)
        if FORM.has_skip:
            o_rows += tl.load(skip + head) * v_rows
        at_out = out + (row.to(tl.int64) * out_stride + head * FORM.heads[4])[:, None]
        whole = is_row[:, None] & (v < V)[None, :]
        tl.store(at_out + v[None, :], o_rows.to(out.dtype.element_ty), mask=whole)
        done = stop
        tl.store(tile + to, s.to(state.dtype.element_ty), mask=live & kept & (done == stored))


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
    gate, skip = terms.gate, terms.skip
    a, bias = (None, None) if gate is None else (gate.a, gate.bias)
    signature = (
        "linear attention", *map(sign, rows), sign(state), sign(batch.read_slots),
        sign(batch.write_slots), sign(batch.query_start_loc), batch.num_stored is None, sign(out),
        terms.delta_rule, terms.l2norm, sign(a), bias is None, sign(skip),
    )  # fmt: skip
    plan = cast("tuple[Launch, ...] | None", place.plan(signature))
    if plan is None:
        check_linear_attention(backend, rows, state, batch, terms, out)
    query, key, value, decay, beta = rows
    if out is None:
        out = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    if plan is None:
        plan = _plan(place, rows, state, batch, terms, out)
        place.keep(signature, plan)
    if batch.num_seqs:
        given = (query if each is None else each for each in (beta, out, a, bias, skip))
        tensors = (query, key, value, decay, *given, state, *index_tensors(batch))
        low, high = (0.0, 0.0) if gate is None else gate.limits
        for launch in plan:
            launch.run(tensors, float(terms.scale), float(low), float(high))
    return out


def _plan(
    place: Place,
    rows: LinearRows,
    state: Tensor,
    batch: StateBatch,
    terms: LinearAttentionTerms,
    out: Tensor,
) -> tuple[Launch, ...]:
    """Plan a call whose arguments have been checked; compiles nothing."""
    query, key, value, decay, beta = rows
    heads, key_dim, value_dim = state.shape[1:]
    width, tile = tile_of(key_dim, value_dim)
    tiles, single = ceil_div(value_dim, tile), batch.query_start_loc is None
    is_half = query.dtype.itemsize < state.dtype.itemsize == 4
    is_old = 0 < place.gpu(state.device).capability[0] < HOPPER  # a chunk spills its registers
    in_chunks = is_half and len(query) > EXACT_TOKENS and not single and decay.dim() == 2
    in_chunks &= not is_old
    form = Form(
        state.stride(0), tuple(each.stride(1) for each in (query, key, value, decay, out)),
        heads // query.shape[1], key_dim, value_dim, width, tile, tiles, decay.dim() == 3,
        terms.delta_rule, terms.l2norm, terms.gate is not None,
        terms.gate is not None and terms.gate.bias is not None, terms.skip is not None,
        single, batch.num_stored is not None, CHUNK * in_chunks,
    )  # fmt: skip
    given = (query, key, value, decay, query if beta is None else beta, out)
    integers, grid = tuple(each.stride(0) for each in given), (heads * tiles, batch.num_seqs, 1)
    kernels = ((_step, OPTIONS), (_step_chunks, CHUNK_OPTIONS))
    return tuple(
        Launch(
            kernel.variant(place, state.device, (query.dtype, state.dtype), (form,), **options),
            grid,
            integers,
        )
        for kernel, options in kernels[: 1 + in_chunks]
    )


def tile_of(key_dim: int, value_dim: int) -> tuple[int, int]:
    """Powers of two: all of `key_dim`, and as many columns as TILE allows."""
    width = power_of_two(key_dim)
    return width, max(1, min(power_of_two(value_dim), TILE // width))
