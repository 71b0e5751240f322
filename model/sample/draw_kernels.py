"""The passes over all logits (`passes.py`) as kernels for a GPU.

PyTorch takes several passes for each of them, and a topk over 150,000 numbers takes longer than
reading them ten times. Here a row is cut into chunks of 128 tokens, and one pass finds the largest
logit of each: the k largest logits of a row are in the k chunks with the largest maxima; one
program per row finds up to 64 of them by narrowing down the smallest bit by bit. Mass is added up
in bins by distance: once in coarse bins, once inside one of them.

Layout: a program takes TILE chunks of one row, or one number per chunk of a row. Bytes moved: the
logits once for the largest, once for top_k, twice for top_p, once for the weights. Weights are
integers and sums are int64: exact in any order, so results do not depend on the grid, and equal
those of `PlainPasses` except for the last bit of an exponential.

Does not know: requests or cuts (`sampler.py`).
"""

# ruff: noqa: N803 - compile-time arguments are upper case, as everywhere in Triton

import inspect
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from model.sample.passes import BITS, FINE, bin_of_mass, reach_of_bins

CHUNK = 128
TILE = 32
"""Chunks per program."""
MOST = 64
"""The most top logits of a row that one program finds."""

_SHIFTS = {torch.bfloat16: 16, torch.float16: 13}

_STRIDES = ["count", "sharpness_stride", "reach_stride"]
_POINTERS = [
    "best", "sharpness", "reach", "numbers", "tokens", "which", "sums", "peaks", "taken", "coarse",
    "bins",
]  # fmt: skip


def _inner(function: Any) -> Any:  # noqa: ANN401  # Triton has no types
    """Return a function that kernels call."""
    return triton.jit(function)


def _jit(function: Any) -> Any:  # noqa: ANN401  # Triton has no types
    """Return a kernel that is compiled once per vocabulary size and dtype, for all arguments."""
    names = inspect.signature(function).parameters
    return triton.jit(
        do_not_specialize=[name for name in _STRIDES if name in names],
        do_not_specialize_on_alignment=[name for name in _POINTERS if name in names],
    )(function)


@_jit
def _find_peaks(
    logits: tl.tensor,  # [num_rows, vocab_size]
    peaks: tl.tensor,  # float32 [num_rows, chunks], written
    STRIDE: tl.constexpr,  # of logits, from row to row
    VOCAB: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1) * TILE + tl.arange(0, TILE)
    token = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    x = tl.load(logits + row * STRIDE + token, mask=token < VOCAB, other=float("-inf"))
    x = x.to(tl.float32)
    x = tl.where(x == x, x, float("inf"))  # noqa: PLR0124  # NaN counts as inf
    tl.store(peaks + row * CHUNKS + chunk, tl.max(x, 1), mask=chunk < CHUNKS)


@_jit
def _find_best(
    logits: tl.tensor,  # [num_rows, vocab_size]
    peaks: tl.tensor,  # float32 [num_rows, chunks]
    best: tl.tensor,  # [num_rows], the dtype of the logits, written
    tokens: tl.tensor,  # int64 [num_rows], written
    STRIDE: tl.constexpr,
    VOCAB: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    WIDTH: tl.constexpr,  # a power of two, at least chunks
) -> None:
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, WIDTH)
    peak = tl.load(peaks + row * CHUNKS + lane, mask=lane < CHUNKS, other=float("-inf"))
    highest = tl.max(peak, 0)
    chunk = tl.min(tl.where(peak == highest, lane, WIDTH), 0)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * STRIDE + token, mask=token < VOCAB, other=float("-inf"))
    x = x.to(tl.float32)
    found = tl.min(tl.where(x == highest, token, VOCAB - 1), 0)
    tl.store(best + row, highest.to(best.dtype.element_ty))
    tl.store(tokens + row, found.to(tl.int64))


@_jit
def _take_chunks(
    logits: tl.tensor,  # [num_rows, vocab_size]
    which: tl.tensor,  # int64 [num_rows, count], chunks
    taken: tl.tensor,  # [num_rows, count, CHUNK], written
    count: tl.tensor,
    STRIDE: tl.constexpr,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * TILE + tl.arange(0, TILE)
    chunk = tl.load(which + row * count + place, mask=place < count, other=0)
    lane = tl.arange(0, CHUNK)
    token = chunk[:, None] * CHUNK + lane[None, :]
    inside = (place < count)[:, None]
    x = tl.load(logits + row * STRIDE + token, mask=inside & (token < VOCAB), other=float("-inf"))
    tl.store(taken + (row * count + place[:, None]) * CHUNK + lane[None, :], x, mask=inside)


@_inner
def _order(x: tl.tensor, SHIFT: tl.constexpr) -> tl.tensor:
    """Return integers in the order of the floats, without their lowest SHIFT bits, which are 0.

    NaN is as large as inf.
    """
    bits = tl.where(x == x, x, float("inf")).to(tl.uint32, bitcast=True)  # noqa: PLR0124
    number = tl.where(bits >> 31 == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    return number >> SHIFT


@_inner
def _limit(number: tl.tensor, count: tl.tensor, SHIFT: tl.constexpr) -> tl.tensor:
    """Return the largest integer that at least `count` numbers reach, bit by bit."""
    found = tl.sum(number * 0, 0)
    for step in range(32 - SHIFT):
        tried = found | (tl.full([], 1, tl.uint32) << (31 - SHIFT - step))
        found = tl.where(tl.sum((number >= tried).to(tl.int32), 0) >= count, tried, found)
    return found


@_jit
def _take_top(
    logits: tl.tensor,  # [num_rows, vocab_size]
    peaks: tl.tensor,  # float32 [num_rows, chunks]
    which: tl.tensor,  # int32 [num_rows, MOST], written and read
    taken: tl.tensor,  # [num_rows, MOST], the dtype of the logits, written and read
    best: tl.tensor,  # [num_rows, count], likewise, written: the largest, the largest first
    count: tl.tensor,  # at most MOST, and less than chunks
    STRIDE: tl.constexpr,
    VOCAB: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    WIDTH: tl.constexpr,  # a power of two, at least chunks
    MOST: tl.constexpr,
    SHIFT: tl.constexpr,  # the bits that float32 has more than the dtype of the logits
) -> None:
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, WIDTH)
    peak = tl.load(peaks + row * CHUNKS + lane, mask=lane < CHUNKS, other=float("-inf"))
    order = _order(peak, SHIFT)
    limit = _limit(order, count, SHIFT)
    above, equal = order > limit, order == limit
    spare = count - tl.sum(above.to(tl.int32), 0)
    chosen = above | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= spare))
    place = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(which + row * MOST + place, lane, mask=chosen)
    tl.debug_barrier()

    entry = tl.arange(0, MOST)
    chunk = tl.load(which + row * MOST + entry, mask=entry < count, other=CHUNKS)
    token = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    x = tl.load(logits + row * STRIDE + token, mask=token < VOCAB, other=float("-inf"))
    x = tl.reshape(x.to(tl.float32), [MOST * CHUNK])
    order = _order(x, SHIFT)
    limit = _limit(order, count, SHIFT)
    above = order > limit
    place = tl.cumsum(above.to(tl.int32), 0) - 1
    stored = taken + row * MOST
    tl.store(stored + place, x.to(taken.dtype.element_ty), mask=above)
    least = tl.max(tl.where(order == limit, x, float("-inf")), 0)
    filled = (entry >= tl.sum(above.to(tl.int32), 0)) & (entry < count)
    tl.store(stored + entry, tl.zeros_like(entry).to(tl.float32) + least, mask=filled)
    tl.debug_barrier()

    value = tl.load(stored + entry, mask=entry < count, other=float("-inf"))
    order = _order(value.to(tl.float32), 0)
    before = (order[None, :] > order[:, None]) | (
        (order[None, :] == order[:, None]) & (entry[None, :] < entry[:, None])
    )
    rank = tl.sum(before.to(tl.int32), 1)
    tl.store(best + row * count + rank, value, mask=entry < count)


@_inner
def _weigh(x: tl.tensor, best: tl.tensor, sharpness: tl.tensor, reach: tl.tensor) -> tl.tensor:
    """Return weights as in `passes.py`: int64."""
    distance = (best - x.to(tl.float32)) * sharpness
    weight = tl.floor(tl.exp(-distance) * 34359738368.0)
    return tl.where(distance <= reach, weight, 0.0).to(tl.int64)


@_jit
def _sum_chunks(
    logits: tl.tensor,  # [num_rows, vocab_size]
    best: tl.tensor,  # float32 [num_rows, 1]
    sharpness: tl.tensor,  # float32 [num_rows, 1]
    reach: tl.tensor,  # float32 [num_rows, 1]
    sums: tl.tensor,  # int64 [num_rows, chunks], written
    sharpness_stride: tl.tensor,
    reach_stride: tl.tensor,
    STRIDE: tl.constexpr,
    VOCAB: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1) * TILE + tl.arange(0, TILE)
    highest = tl.load(best + row)
    sharp = tl.load(sharpness + row * sharpness_stride)
    limit = tl.load(reach + row * reach_stride)
    token = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    x = tl.load(logits + row * STRIDE + token, mask=token < VOCAB, other=float("-inf"))
    total = tl.sum(_weigh(x, highest, sharp, limit), 1)
    tl.store(sums + row * CHUNKS + chunk, total, mask=chunk < CHUNKS)


@_jit
def _invert(
    logits: tl.tensor,  # [num_rows, vocab_size]
    sums: tl.tensor,  # int64 [num_rows, chunks]
    best: tl.tensor,  # float32 [num_rows, 1]
    sharpness: tl.tensor,  # float32 [num_rows, 1]
    reach: tl.tensor,  # float32 [num_rows, 1]
    numbers: tl.tensor,  # float64 [num_rows, 1]
    tokens: tl.tensor,  # int64 [num_rows], written
    sharpness_stride: tl.tensor,
    reach_stride: tl.tensor,
    STRIDE: tl.constexpr,
    VOCAB: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, WIDTH)
    part = tl.load(sums + row * CHUNKS + lane, mask=lane < CHUNKS, other=0)
    ends = tl.cumsum(part, 0)
    total = tl.sum(part, 0)
    number = tl.load(numbers + row)
    target = tl.minimum((number * total.to(tl.float64)).to(tl.int64), total - 1)
    chunk = tl.minimum(tl.sum((ends <= target).to(tl.int32), 0), CHUNKS - 1)
    target -= tl.sum(tl.where(lane < chunk, part, 0), 0)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * STRIDE + token, mask=token < VOCAB, other=float("-inf"))
    weights = _weigh(
        x, tl.load(best + row), tl.load(sharpness + row * sharpness_stride),
        tl.load(reach + row * reach_stride),
    )  # fmt: skip
    place = tl.sum((tl.cumsum(weights, 0) <= target).to(tl.int32), 0)
    found = tl.minimum(chunk * CHUNK + place, VOCAB - 1)
    tl.store(tokens + row, found.to(tl.int64))


@_jit
def _add_mass(
    logits: tl.tensor,  # [num_rows, vocab_size]
    best: tl.tensor,  # float32 [num_rows, 1]
    sharpness: tl.tensor,  # float32 [num_rows, 1]
    coarse: tl.tensor,  # int64 [num_rows, 1], the bin that is looked into, if INSIDE
    bins: tl.tensor,  # int64 [num_rows, 2 ** BITS], added to
    sharpness_stride: tl.tensor,
    STRIDE: tl.constexpr,
    VOCAB: tl.constexpr,
    FINE: tl.constexpr,  # fine bins to one
    BITS: tl.constexpr,
    INSIDE: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    x = tl.load(logits + row * STRIDE + token, mask=token < VOCAB, other=float("-inf"))
    highest = tl.load(best + row)
    sharp = tl.load(sharpness + row * sharpness_stride)
    weight = _weigh(x, highest, sharp, float("inf"))
    distance = (highest - x.to(tl.float32)) * sharp
    fine = tl.minimum(distance * FINE, (1 << (2 * BITS)) - 1).to(tl.int32)
    place = fine >> BITS
    counts = weight > 0
    if INSIDE:
        counts = counts & (place == tl.load(coarse + row).to(tl.int32))
        place = fine & ((1 << BITS) - 1)
    tl.atomic_add(bins + row * (1 << BITS) + place, weight, mask=counts, sem="relaxed")


class GpuPasses:
    """`Passes` by these kernels; for logits whose rows are contiguous."""

    def most_likely(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the largest logit of each row, and the first token that has it.

        NaN counts as inf.
        """
        peaks = _peaks_of(logits)
        rows, chunks = peaks.shape
        best = torch.empty(rows, dtype=logits.dtype, device=logits.device)
        tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
        if rows:
            _find_best[rows,](logits, peaks, best, tokens, *_sizes(logits), CHUNK, _width(chunks))
        return best, tokens

    def top_values(self, logits: Tensor, count: int) -> Tensor:
        """Return the largest logits of each row, in falling order."""
        rows = len(logits)
        peaks = _peaks_of(logits)
        if count >= peaks.shape[1] or not rows:
            return logits.topk(count).values
        if count <= MOST:
            which = torch.empty((rows, MOST), dtype=torch.int32, device=logits.device)
            found = torch.empty((rows, MOST), dtype=logits.dtype, device=logits.device)
            best = torch.empty((rows, count), dtype=logits.dtype, device=logits.device)
            _take_top[rows,](
                logits, peaks, which, found, best, count, *_sizes(logits), CHUNK,
                _width(peaks.shape[1]), MOST, _SHIFTS.get(logits.dtype, 0), num_warps=8,
            )  # fmt: skip
            return best
        which = peaks.topk(count, sorted=False).indices
        taken = torch.empty((rows, count * CHUNK), dtype=logits.dtype, device=logits.device)
        _take_chunks[rows, triton.cdiv(count, TILE)](
            logits, which, taken, count, *_sizes(logits)[:2], CHUNK, TILE
        )
        return taken.topk(count).values

    def nuclear_reach(
        self, logits: Tensor, best: Tensor, sharpness: Tensor, top_p: Tensor
    ) -> Tensor:
        """Return the distance of the last token that top_p leaves."""
        rows, best = len(logits), best.contiguous()
        places: list[Tensor] = []
        target: Tensor | None = None
        for is_inside in (False, True):
            bins = torch.zeros((rows, 1 << BITS), dtype=torch.int64, device=logits.device)
            if rows:
                _add_mass[rows, triton.cdiv(logits.shape[1], CHUNK * TILE)](
                    logits, best, sharpness, places[0] if places else bins, bins,
                    sharpness.stride(0), *_sizes(logits)[:2], 1 << FINE, BITS, is_inside,
                    CHUNK * TILE,
                )  # fmt: skip
            place, target = bin_of_mass(bins.double(), target, top_p)
            places.append(place)
        return reach_of_bins(*places)

    def log_sums(self, logits: Tensor) -> Tensor:
        """Return the logarithm of each row's sum of exp: a sum of weights, exact in any order."""
        best = self.most_likely(logits)[0][:, None].float()
        ones = torch.ones_like(best)
        total = _chunk_sums(logits, best, ones, ones / 0).sum(-1, keepdim=True)
        return best + (total.double() / 2.0**35).log().float()

    def invert(
        self, logits: Tensor, best: Tensor, sharpness: Tensor, reach: Tensor, numbers: Tensor
    ) -> Tensor:
        """Return the token of each row at its number, in the order of the ids."""
        rows, chunks = len(logits), triton.cdiv(logits.shape[1], CHUNK)
        tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
        best = best.contiguous()
        strides = (sharpness.stride(0), reach.stride(0))
        sums = _chunk_sums(logits, best, sharpness, reach)
        if rows:
            _invert[rows,](
                logits, sums, best, sharpness, reach, numbers.contiguous(), tokens, *strides,
                *_sizes(logits), CHUNK, _width(chunks),
            )  # fmt: skip
        return tokens

    def warm_up(self, vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
        """Compile all kernels for this vocabulary and dtype, and for float32."""
        one = torch.ones((1, 1), device=device)
        for each in dict.fromkeys((dtype, torch.float32)):
            logits = torch.zeros((1, vocab_size), dtype=each, device=device)
            best = self.most_likely(logits)[0][:, None].float()
            for count in (1, MOST + 1):
                self.top_values(logits, min(count, vocab_size))
            reach = self.nuclear_reach(logits, best, one, one.double())
            self.invert(logits, best, one, reach, one.double() / 2)


def _chunk_sums(logits: Tensor, best: Tensor, sharpness: Tensor, reach: Tensor) -> Tensor:
    """Return the weights of each chunk: int64 [num_rows, chunks]."""
    rows, chunks = len(logits), triton.cdiv(logits.shape[1], CHUNK)
    sums = torch.empty((rows, chunks), dtype=torch.int64, device=logits.device)
    if rows:
        _sum_chunks[rows, triton.cdiv(chunks, TILE)](
            logits, best, sharpness, reach, sums, sharpness.stride(0), reach.stride(0),
            *_sizes(logits), CHUNK, TILE,
        )  # fmt: skip
    return sums


def _sizes(logits: Tensor) -> tuple[int, int, int]:
    """Return the row stride, the vocabulary size and the number of chunks."""
    return logits.stride(0), logits.shape[1], triton.cdiv(logits.shape[1], CHUNK)


def _width(chunks: int) -> int:
    return 1 << max(4, (chunks - 1).bit_length())


def _peaks_of(logits: Tensor) -> Tensor:
    """Return the largest logit of each chunk: float32 [num_rows, chunks]; inf if one is NaN."""
    rows, vocab_size = logits.shape
    chunks = triton.cdiv(vocab_size, CHUNK)
    peaks = torch.empty((rows, chunks), dtype=torch.float32, device=logits.device)
    if rows:
        _find_peaks[rows, triton.cdiv(chunks, TILE)](logits, peaks, *_sizes(logits), CHUNK, TILE)
    return peaks
