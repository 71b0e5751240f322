"""A short causal convolution of each channel with itself, all rows at once, on a GPU.

    out[t] = f(bias + sum over j of weight[:, j] * input[t - width + 1 + j])

Layout: states [num_slots, width - 1, channels], slots any distance apart: rows of inputs, oldest
first. Grid: (tiles of channels, tiles of rows); a tile of rows belongs to one sequence and is as
long as a state at least. An input before the sequence's first new token comes out of the slot that
is read, any other out of `x`. So only the first tile of a sequence reads its slot, and it also
writes the state: the slot may be the same one, and all loads end before the stores begin. Bytes
moved: the state and x read once, the state written once, the weights read by every tile of rows,
out of L2. Tolerance: `state_oracle.short_conv`; states are exact.
"""

import math
from typing import NamedTuple, cast

import torch
import triton.language as tl
from torch import Tensor

from backends.checks import check_short_conv
from backends.contract import Backend
from backends.states import ShortConvTerms, StateBatch
from backends.triton_gpu.shared.launch import Launch, launcher
from backends.triton_gpu.shared.place import Place, ceil_div, power_of_two, sign
from backends.triton_gpu.shared.rows import sequence_of_tile
from backends.triton_gpu.state.slots import INDICES, index_tensors, rows_at, slot_at

CHANNELS = 256
"""Channels a program, 8 of them a thread and row."""
ROWS = 16
"""Rows a program, where sequences have several."""
OPTIONS = {"enable_fp_fusion": False}
"""The same as in `linear_attention`, for the same reason."""


class Form(NamedTuple):
    """Compile-time values."""

    slot: int
    """From slot to slot."""
    channels: int
    width: int
    taps: int
    """`width - 1` as a power of two."""
    tile: int
    align: int
    """Elements that divide both strides."""
    has_bias: bool
    silu: bool
    single: bool
    """Each sequence has one row."""
    has_drafts: bool
    rows: int


@launcher(
    integers=("x_stride", "out_stride", "num_seqs"),
    indices=INDICES,
    pointers=("x", "weight", "bias", "state", "out"),
)
def _step(
    x: tl.tensor,  # [num_tokens, channels]
    weight: tl.tensor,  # [channels, width]
    bias: tl.tensor,  # [channels], read if FORM.has_bias
    state: tl.tensor,  # [num_slots, width - 1, channels]
    out: tl.tensor,  # [num_tokens, channels]
    read_slots: tl.tensor,  # int32 [num_seqs]
    write_slots: tl.tensor,  # likewise
    query_start_loc: tl.tensor,  # int32 [num_seqs + 1], read unless FORM.single
    num_stored: tl.tensor,  # int32 [num_seqs], read if FORM.has_drafts
    x_stride: tl.tensor,  # from token to token
    out_stride: tl.tensor,
    num_seqs: tl.tensor,
    FORM: tl.constexpr,
) -> None:
    WIDTH: tl.constexpr = FORM.width
    WHOLE: tl.constexpr = FORM.channels
    ALIGN: tl.constexpr = FORM.align
    ROWS: tl.constexpr = FORM.rows
    TILE: tl.constexpr = FORM.tile
    channel = tl.program_id(0) * TILE + tl.arange(0, TILE)
    live, seq = channel < WHOLE, tl.program_id(1)
    first = seq * 0
    start, count, stored = seq, first + 1, first + 1
    if not FORM.single:
        seq = sequence_of_tile(query_start_loc, num_seqs, seq, ROWS)
        start, count, stored = rows_at(query_start_loc, num_stored, seq, FORM.has_drafts)
        first = (tl.program_id(1) - start // ROWS - seq) * ROWS
        if first >= count:
            return
    place, there = slot_at(read_slots, seq, FORM.slot)
    row = first + tl.arange(0, ROWS)
    acc = tl.zeros((ROWS, TILE), tl.float32)
    if FORM.has_bias:
        acc += tl.load(bias + channel, mask=live, other=0).to(tl.float32)[None, :]
    for j in tl.static_range(WIDTH):
        t = row - (WIDTH - 1) + j  # of this tap's input
        old = (t < 0)[:, None] & there & live[None, :]
        before = state + place + ((t + WIDTH - 1) * WHOLE)[:, None] + channel[None, :]
        new = (t >= 0)[:, None] & (row < count)[:, None] & live[None, :]
        from_x = x + tl.multiple_of((start + t).to(tl.int64) * x_stride, ALIGN)[:, None]
        inputs = tl.load(before, mask=old, other=0)
        inputs = tl.where(old, inputs, tl.load(from_x + channel[None, :], mask=new, other=0))
        w = tl.load(weight + channel * WIDTH + j, mask=live, other=0).to(tl.float32)
        acc += inputs.to(tl.float32) * w[None, :]
    if FORM.silu:
        acc = acc / (1.0 + tl.exp(-acc))
    target = out + tl.multiple_of((start + row).to(tl.int64) * out_stride, ALIGN)[:, None]
    whole = (row < count)[:, None] & live[None, :]
    tl.store(target + channel[None, :], acc.to(out.dtype.element_ty), mask=whole)
    if first == 0:
        r = tl.arange(0, FORM.taps)  # of the rows of a state
        u = stored - (WIDTH - 1) + r
        both = (r < WIDTH - 1)[:, None] & live[None, :]
        to, kept = slot_at(write_slots, seq, FORM.slot)
        read = state + place + ((u + WIDTH - 1) * WHOLE)[:, None] + channel[None, :]
        rows = x + tl.multiple_of((start + u).to(tl.int64) * x_stride, ALIGN)[:, None]
        is_old = (u < 0)[:, None]
        past = tl.load(read, mask=both & is_old & there, other=0)
        last = tl.load(rows + channel[None, :], mask=both & (u >= 0)[:, None], other=0)
        tl.debug_barrier()
        after = state + to + (r * WHOLE)[:, None] + channel[None, :]
        tl.store(after, tl.where(is_old, past, last), mask=both & kept)


def short_conv_step(
    backend: Backend,
    place: Place,
    x: Tensor,
    state: Tensor,
    batch: StateBatch,
    terms: ShortConvTerms,
    out: Tensor | None,
) -> Tensor:
    """Convolve each sequence's new tokens; see `StateBackend.short_conv_step`.

    Raises:
        InvalidArgumentError: a shape, dtype or device breaks the contract; nothing written.
    """
    weight, bias = terms.weight, terms.bias
    signature = (
        "short conv", sign(x), sign(state), sign(batch.read_slots), sign(batch.write_slots),
        sign(batch.query_start_loc), batch.num_stored is None, sign(out), sign(weight),
        bias is None, terms.silu,
    )  # fmt: skip
    plan = cast("Launch | None", place.plan(signature))
    if plan is None:
        check_short_conv(backend, x, state, batch, terms, out)
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if plan is None:
        plan = _plan(place, x, state, batch, terms, out)
        place.keep(signature, plan)
    if plan.grid[1]:
        given = weight if bias is None else bias
        plan.run((x, weight, given, state, out, *index_tensors(batch)))
    return out


def _plan(
    place: Place, x: Tensor, state: Tensor, batch: StateBatch, terms: ShortConvTerms, out: Tensor
) -> Launch:
    """Plan a call whose arguments have been checked; compiles nothing."""
    channels, width = terms.weight.shape
    strides, single = (x.stride(0), out.stride(0)), batch.query_start_loc is None
    rows = 1 if single else max(ROWS, power_of_two(width - 1))
    form = Form(
        state.stride(0), channels, width, power_of_two(width - 1), CHANNELS, math.gcd(16, *strides),
        terms.bias is not None, terms.silu, single, batch.num_stored is not None, rows,
    )  # fmt: skip
    options = OPTIONS | {"num_warps": 1 if single else 4}
    variant = _step.variant(place, state.device, (x.dtype,), (form,), **options)
    tiles = batch.num_seqs if single else x.shape[0] // rows + batch.num_seqs
    return Launch(
        variant, (ceil_div(channels, CHANNELS), tiles * (batch.num_seqs > 0), 1),
        (*strides, batch.num_seqs),
    )  # fmt: skip
