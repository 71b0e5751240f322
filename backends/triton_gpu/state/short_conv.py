"""A short causal convolution of each channel with itself, a token after the other, on a GPU.

    out[t] = f(bias + sum over j of weight[:, j] * input[t - width + 1 + j])

Layout: states [num_slots, width - 1, channels], slots any distance apart: rows of inputs, oldest
first. Grid: (tiles of channels, sequences). An input before the sequence's first new token comes
out of the slot that is read, any other out of `x`, so that no state is carried from token to token.
The slot that is read may be written by the sequence's last token: all loads of a token end before
its stores begin. Bytes moved: the state and x read once, the state written once, the
weights read by every sequence, out of L2. Tolerance: `state_oracle.short_conv`; states are exact.
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
from backends.triton_gpu.state.slots import INDICES, slot_at

TILE = 256
"""Channels a program, 8 of them a thread."""
OPTIONS = {"num_warps": 1, "enable_fp_fusion": False}
"""As in `linear_attention`."""


class Form(NamedTuple):
    """Compile-time values."""

    slot: int
    """From slot to slot."""
    channels: int
    width: int
    taps: int
    """`width` as a power of two."""
    tile: int
    align: int
    """Elements that divide both strides."""
    has_bias: bool
    silu: bool
    single: bool
    """Each sequence has one row."""


@launcher(
    integers=("x_stride", "out_stride", "query_len"),
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
    x_stride: tl.tensor,  # from token to token
    out_stride: tl.tensor,
    query_len: tl.tensor,  # rows of each sequence
    FORM: tl.constexpr,
) -> None:
    WIDTH: tl.constexpr = FORM.width
    CHANNELS: tl.constexpr = FORM.channels
    ALIGN: tl.constexpr = FORM.align
    channel, seq = tl.program_id(0) * FORM.tile + tl.arange(0, FORM.tile), tl.program_id(1)
    live, j = channel < CHANNELS, tl.arange(0, FORM.taps)
    both = (j < WIDTH)[:, None] & live[None, :]
    w = tl.load(weight + channel[None, :] * WIDTH + j[:, None], mask=both, other=0)
    count = 1 if FORM.single else query_len
    start = seq * count
    place, there = slot_at(read_slots, seq, FORM.slot)
    to, kept = slot_at(write_slots, seq, FORM.slot)
    for i in range(count):
        t = start + i
        row = t - (WIDTH - 1) + j  # of each tap's input
        old = (row < start)[:, None] & both
        before = state + place + ((row - start + WIDTH - 1) * CHANNELS)[:, None] + channel[None, :]
        inputs = tl.load(before, mask=old & there, other=0)
        rows = tl.multiple_of(row.to(tl.int64) * x_stride, ALIGN)
        new = tl.load(x + rows[:, None] + channel[None, :], mask=both & (row >= start)[:, None])
        inputs = tl.where(old, inputs, new)
        acc = tl.sum(tl.where(both, inputs.to(tl.float32) * w.to(tl.float32), 0.0), 0)
        if FORM.has_bias:
            acc += tl.load(bias + channel, mask=live, other=0).to(tl.float32)
        if FORM.silu:
            acc = acc / (1.0 + tl.exp(-acc))
        target = out + tl.multiple_of(t.to(tl.int64) * out_stride, ALIGN) + channel
        tl.store(target, acc.to(out.dtype.element_ty), mask=live)
        after = state + to + ((j - 1) * CHANNELS)[:, None] + channel[None, :]
        tl.debug_barrier()
        tl.store(after, inputs, mask=both & kept & (i == count - 1) & (j > 0)[:, None])


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
    weight, bias, reads = terms.weight, terms.bias, batch.read_slots
    signature = (
        "short conv", sign(x), sign(state), sign(reads), sign(batch.write_slots),
        batch.query_len, sign(out), sign(weight), bias is None, terms.silu,
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
        plan.run((x, weight, given, state, out, reads, batch.write_slots))
    return out


def _plan(
    place: Place, x: Tensor, state: Tensor, batch: StateBatch, terms: ShortConvTerms, out: Tensor
) -> Launch:
    """Plan a call whose arguments have been checked; compiles nothing."""
    channels, width = terms.weight.shape
    strides = (x.stride(0), out.stride(0))
    form = Form(
        state.stride(0), channels, width, power_of_two(width), TILE, math.gcd(16, *strides),
        terms.bias is not None, terms.silu, batch.query_len == 1,
    )  # fmt: skip
    variant = _step.variant(place, state.device, (x.dtype,), (form,), **OPTIONS)
    integers = (*strides, batch.query_len)
    return Launch(variant, (ceil_div(channels, TILE), batch.num_seqs, 1), integers)
