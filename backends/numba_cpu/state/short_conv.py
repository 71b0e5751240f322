"""A short causal convolution of each channel with itself, on a CPU.

    out[t] = f(bias + sum over j of weight[:, j] * input[t - width + 1 + j])

Layout: states [num_slots, width - 1, channels], slots any distance apart: rows of inputs, oldest
first. A unit is a tile of channels, of all sequences, so that its weights are turned to rows once.
An input before the sequence's first new token comes out of the slot that is read, any other out of
`x`. The slot that is read may be the one that is written, behind all tokens: rows are moved in
ascending order, each to a lower place. Bytes moved: the state and x read twice, the second time out
of the core's cache, and the state written once. States are exact; tolerance of outputs:
`state_oracle.short_conv`.
"""

from collections.abc import Callable
from functools import lru_cache, partial

import numpy as np
import torch
from torch import Tensor

from backends.checks import check_short_conv
from backends.contract import Backend
from backends.numba_cpu.bits import LOG2E, TAGS, Tag, at, exact, exp2, narrow, span, widen
from backends.numba_cpu.launch import Plans, Workers, sign
from backends.numba_cpu.state.slots import SOURCE_DIGEST, Slots, checked, rows_of
from backends.numba_cpu.tiles import Floats
from backends.states import ShortConvTerms, StateBatch

TILE = 256  # channels
GRAIN = 1 << 15  # inputs times taps a thread: fewer cost more to hand out than to compute
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)


@exact()
def _load_weights(weight: Floats, first: int, width: int, size: int, weights: Floats) -> None:
    """The weights of a tile of channels, a row per tap."""
    for j in range(width):
        taps, column = span(weights, j * TILE, size), span(weight, first + j, size * width)
        for c in range(size):
            taps[c] = widen(column[c * width])


@exact()
def _add(source: Floats, taps: Floats, sums: Floats) -> None:
    for c in range(taps.size):
        sums[c] += widen(source[c]) * taps[c]


@exact()
def _copy(source: Floats, target: Floats) -> None:
    for c in range(target.size):
        target[c] = source[c]


@exact()
def _finish(sums: Floats, target: Floats, silu: int) -> None:
    """Round the sums into the output, past x * sigmoid(x) if `silu`."""
    for c in range(target.size):
        y = sums[c]
        if silu:
            e = exp2(-abs(y) * np.float32(LOG2E))
            y = y * (_ONE if y >= _ZERO else e) / (_ONE + e)
        target[c] = narrow(y, target[c])


@lru_cache(maxsize=1)
def _kernel(source_digest: int) -> Callable[..., None]:  # noqa: C901  # loops within loops
    """Compile for the sources with this digest; closing over it makes it part of the cache key."""

    @exact(cache=True)
    def step(  # noqa: C901  # likewise
        tensors: tuple[int, int, int, int, int],  # x, weight, bias or 0: none, state, out
        tag: Tag,
        where: Slots,
        num_seqs: int,
        strides: tuple[int, int, int],  # tokens of x, tokens of out, slots
        sizes: tuple[int, int],  # channels, width
        silu: int,
        start: int,  # first tile
        stop: int,  # past the last tile
    ) -> None:
        _ = source_digest
        channels, width = sizes
        xs, weight, bias = at(tensors[0], 1, tag), at(tensors[1], 1, tag), at(tensors[2], 1, tag)
        states, outs = at(tensors[3], 1, tag), at(tensors[4], 1, tag)
        reads, writes = at(where[0], 1, np.int32(0)), at(where[1], 1, np.int32(0))
        weights, sums = np.empty(width * TILE, np.float32), np.empty(TILE, np.float32)
        biases, zeros = np.zeros(TILE, np.float32), np.zeros_like(at(tensors[3], TILE, tag))
        for tile in range(start, stop):
            channel = tile * TILE
            size = min(TILE, channels - channel)
            _load_weights(weight, channel * width, width, size, weights)
            if tensors[2]:
                _load_weights(bias, channel, 1, size, biases)
            for s in range(num_seqs):
                first, stored, last = rows_of(where, s)
                before, after = reads[s] * strides[2] + channel, writes[s] * strides[2] + channel
                for t in range(first, last + 1):  # at the end the stored inputs
                    sums[:] = biases
                    for j in range(width):
                        row, source = (t if t < last else stored - 1) - width + 1 + j, zeros
                        if row >= first:
                            source = span(xs, row * strides[0] + channel, size)
                        elif reads[s] >= 0:
                            old = before + (row - first + width - 1) * channels
                            source = span(states, old, size)
                        if t < last:
                            _add(source, span(weights, j * TILE, size), sums)
                        elif j > 0 and first < last and writes[s] >= 0:
                            _copy(source, span(states, after + (j - 1) * channels, size))
                    if t < last:
                        _finish(sums, span(outs, t * strides[1] + channel, size), silu)

    return step


def short_conv_step(
    backend: Backend,
    workers: Workers,
    plans: Plans[bool],
    x: Tensor,
    state: Tensor,
    batch: StateBatch,
    terms: ShortConvTerms,
    out: Tensor | None,
) -> Tensor:
    """Convolve each sequence's new tokens; see `StateBackend.short_conv_step`.

    Raises:
        InvalidArgumentError: a shape, dtype, device or slot breaks the contract; nothing written.
    """
    weight, bias = terms.weight, terms.bias
    indices = (batch.read_slots, batch.write_slots, batch.query_start_loc)
    signature = sign(x, weight, bias, state, out, *indices)
    if plans.get(signature) is None:
        check_short_conv(backend, x, state, batch, terms, out)
        plans.keep(signature, plan=True)
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype)
    tensors = (x, weight, bias, state, out)
    channels, width = weight.shape
    step = partial(
        _kernel(SOURCE_DIGEST),
        tuple([0 if each is None else each.data_ptr() for each in tensors]),
        TAGS[x.dtype],
        checked(batch, state.shape[0], len(x)),
        batch.num_seqs,
        (x.stride(0), out.stride(0), state.stride(0)),
        (channels, width),
        int(terms.silu),
    )
    workers.run_evenly(step, -(-channels // TILE), GRAIN // (TILE * width * max(1, len(x))))
    return out
