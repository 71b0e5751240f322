"""From logits to tokens: cuts by thresholds, and a draw at one number a row.

Decides: which token follows. With a temperature T, a token lies `z = (largest logit - logit) / T`
below the most likely one, and weighs exp(-z). A row is cut to its top_k, then to the smallest set
of most likely tokens that reaches top_p of what top_k left (Holtzman et al. 2020,
arXiv:1904.09751), then to what weighs at least min_p of the most likely: the order in which
Transformers cuts. Each cut is a threshold on z, so tokens of equal logits stay or go together, and
the vocabulary is never sorted: top_k takes the k largest, top_p alone two histograms of the
weights, the second inside one bin of the first, which finds its threshold to 2**-17. Then the
distribution is inverted, over the tokens by their ids, at one number.

Weights are integers, 2**35 for the most likely token, so what weighs less than 2**-35 of that is
never drawn, and sums of weights are exact in float64, in whatever order they are taken.

The number is the n-th of SplitMix64 (Steele et al. 2014) from where the request starts, so it needs
no state from before; where that is, a hash of its seed says.

Invariants: a row's token depends on its own logits, parameters, seed and index alone, so neither
the batch it is in nor a preemption changes it. Shapes depend on no value, and nothing waits for the
device but reading what was drawn.

Does not know: requests, text, where the logits come from (`request_sampler.py` changes them).
"""

import functools
import hashlib
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from model.control.params import SamplingParams
from model.errors import NumericalError


class Passes(Protocol):
    """The passes over all logits: what a device may have kernels for."""

    def most_likely(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The largest of each row, and one that is as large: [num_rows], int64 [num_rows].

        Args:
            logits: [num_rows, vocab_size]; what is no number makes the largest no finite one.
        """
        ...

    def top_values(self, logits: Tensor, count: int) -> Tensor:
        """The largest of each row, in falling order: [num_rows, count].

        Args:
            logits: [num_rows, vocab_size].
            count: at most vocab_size.
        """
        ...

    def nuclear_reach(
        self, logits: Tensor, best: Tensor, sharpness: Tensor, top_p: Tensor
    ) -> Tensor:
        """How far the last token lies that top_p leaves, up to 2**-17 further: [num_rows, 1].

        Args:
            logits: [num_rows, vocab_size].
            best: float32 [num_rows, 1], the largest of each row.
            sharpness: float32 [num_rows, 1], one over the temperature.
            top_p: float64 [num_rows, 1].
        """
        ...

    def invert(
        self, logits: Tensor, best: Tensor, sharpness: Tensor, reach: Tensor, numbers: Tensor
    ) -> Tensor:
        """The token of each row at its number, in the order of the ids: int64 [num_rows].

        Args:
            logits: [num_rows, vocab_size].
            best: float32 [num_rows, 1], the largest of each row.
            sharpness: float32 [num_rows, 1], one over the temperature.
            reach: float32 [num_rows, 1]; what lies further below the best has no weight.
            numbers: float64 [num_rows, 1], in [0, 1).
        """
        ...

    def warm_up(self, vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
        """Compile what there is to compile; a second for each kind of logits, or nothing at all.

        Args:
            vocab_size: of the logits.
            dtype: as they come; rows that are changed first are float32.
            device: where they are.
        """
        ...


_CHUNK = 256
_SCALE = 2.0**35  # 2**18 tokens of it are less than 2**53
FINE = 17  # bits of a threshold below one
BITS = 11  # of each of its two histograms: what lies 2**5 below weighs nothing
_PIECE = 2**19  # logits that a core works on at once, so that they stay in its caches


@dataclass(frozen=True, slots=True)
class Draw:
    """How one row is drawn from.

    Attributes:
        params: temperature, top_k, top_p and min_p.
        stream: 64 bits, where the request's numbers start.
        index: the number of the token in its request's output, from 0.
    """

    params: SamplingParams
    stream: int
    index: int

    def uniform(self) -> float:
        """A number in [0, 1) that depends on `stream` and `index` alone. O(1)."""
        return float(uniforms(np.array([self.stream], np.uint64), np.array([self.index]))[0])


def stream_of(seed: int | None, engine_seed: int, request_id: int, sample: int = 0) -> int:
    """Where a request's numbers start: 64 bits. O(1).

    By its own seed and which sample it is, or by the engine's seed and its id; a hash, so that
    requests whose seeds are close have nothing in common.
    """
    parts = (0, seed, sample) if seed is not None else (1, engine_seed, request_id)
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest())


def uniforms(streams: NDArray[np.uint64], indexes: NDArray[np.int64]) -> NDArray[np.float64]:
    """For each stream its number `index`, in [0, 1): what SplitMix64 gives there. O(streams)."""
    mixed = streams + (indexes.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    found: NDArray[np.float64] = (mixed >> np.uint64(11)) * 2.0**-53
    return found


@dataclass(frozen=True, slots=True)
class Cut:
    """Rows among those that draw which are cut by rank or by mass.

    Attributes:
        rows: int64 [num_cut], which of those that draw; None: all.
        top_p: float64 [num_cut, 1].
        top_k: int64 [num_cut, 1]; 0: there is none.
        most: the largest top_k, or a little more; 0: there is none, they are cut by mass alone.
    """

    rows: Tensor | None
    top_p: Tensor
    top_k: Tensor
    most: int


@dataclass(frozen=True, slots=True)
class DrawTerms:
    """How the rows of a step draw: columns on the device, a place for each row that draws.

    Attributes:
        rows: int64 [num_draws], which rows of the logits; None: all.
        sharpness: float32 [num_draws, 1], one over the temperature.
        reach: float32 [num_draws, 1], how far below the most likely a token may lie by min_p.
        cuts: of these rows.
    """

    rows: Tensor | None
    sharpness: Tensor
    reach: Tensor
    cuts: tuple[Cut, ...] = ()


def draw_terms(
    rows: Sequence[int],
    params: Sequence[SamplingParams],
    num_rows: int,
    vocab_size: int,
    device: torch.device,
) -> DrawTerms:
    """The terms of the rows that draw. O(rows).

    Args:
        rows: of the logits, in order.
        params: of each of these, none greedy.
        num_rows: of the logits.
        vocab_size: of the logits.
        device: where they are.
    """
    ranked: list[int] = []
    nuclear: list[int] = []
    for place, how in enumerate(params):
        if how.top_k is not None and how.top_k < vocab_size:
            ranked.append(place)
        elif how.top_p < 1:
            nuclear.append(place)
    cuts = []
    for places, has_rank in ((ranked, True), (nuclear, False)):
        if places:
            some = [params[place] for place in places]
            ranks = [how.top_k or 0 for how in some]
            cuts.append(
                Cut(
                    rows=None if len(places) == len(params) else index_of(places, device),
                    top_p=column([how.top_p for how in some], device),
                    top_k=column(ranks, device, torch.int64),
                    most=min(vocab_size, 1 << (max(ranks) - 1).bit_length()) if has_rank else 0,
                )
            )
    return DrawTerms(
        rows=None if len(rows) == num_rows else index_of(rows, device),
        sharpness=column([sharpness_of(how) for how in params], device, torch.float32),
        reach=column([reach_of(how) for how in params], device, torch.float32),
        cuts=tuple(cuts),
    )


def sharpness_of(params: SamplingParams) -> float:
    """One over a temperature above 0. O(1)."""
    return min(max(1 / params.temperature, 1e-30), 1e30)


def reach_of(params: SamplingParams) -> float:
    """How far below the most likely a token may lie by min_p. O(1)."""
    return -math.log(params.min_p) if params.min_p else math.inf


class PlainPasses:
    """The passes by PyTorch's operators; see `Passes`. O(num_rows * vocab_size) each."""

    def most_likely(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """See `Passes`."""
        best, tokens = logits.max(dim=-1)
        return best, tokens

    def top_values(self, logits: Tensor, count: int) -> Tensor:
        """See `Passes`."""
        return logits.topk(count).values

    def nuclear_reach(
        self, logits: Tensor, best: Tensor, sharpness: Tensor, top_p: Tensor
    ) -> Tensor:
        """See `Passes`."""
        return _by_pieces(_nuclear_reach_of, logits, best, sharpness, top_p)

    def invert(
        self, logits: Tensor, best: Tensor, sharpness: Tensor, reach: Tensor, numbers: Tensor
    ) -> Tensor:
        """See `Passes`: first the chunk, then its token."""
        vocab_size = logits.shape[-1]
        sums = _by_pieces(_chunk_sums, logits, best, sharpness, reach)
        before = sums.cumsum(dim=-1)
        chunk, target = _first_above(before, (numbers * before[:, -1:]).floor())
        target = target - (before.gather(1, chunk) - sums.gather(1, chunk))
        tokens = chunk * _CHUNK + torch.arange(_CHUNK, device=logits.device)
        inside = logits.gather(1, tokens.clamp(max=vocab_size - 1))
        distances = _distances(inside, best, sharpness)
        weights = _weights(distances).masked_fill((distances > reach) | (tokens >= vocab_size), 0.0)
        place, _ = _first_above(weights.double().cumsum(dim=-1), target)
        return tokens.gather(1, place).squeeze(-1)

    def warm_up(self, vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
        """See `Passes`: there is nothing to compile."""


PLAIN = PlainPasses()


def sample(logits: Tensor, draws: Sequence[Draw | None]) -> list[int]:
    """Choose one token a row and wait for it; None: the most likely one. O(num_rows * vocab_size).

    Raises:
        NumericalError: a row holds NaN, +inf or nothing but -inf.
    """
    num_rows, vocab_size = logits.shape
    if not draws:
        return []
    passes = passes_for(logits.device.type)
    best, tokens = passes.most_likely(logits)
    rows = [row for row, how in enumerate(draws) if how is not None and not how.params.is_greedy]
    if rows:
        drawing = [how for how in draws if how is not None and not how.params.is_greedy]
        params = [how.params for how in drawing]
        terms = draw_terms(rows, params, num_rows, vocab_size, logits.device)
        streams = np.array([how.stream for how in drawing], np.uint64)
        numbers = uniforms(streams, np.array([how.index for how in drawing]))
        own = torch.from_numpy(numbers).unsqueeze(-1).to(logits.device)
        tokens = choose(logits, (best, tokens), terms, own, passes)
    for row, value in enumerate(best.tolist()):
        if not math.isfinite(value):
            raise NumericalError(f"logits: wanted finite numbers, row {row} has others")
    chosen: list[int] = tokens.tolist()
    return chosen


def choose(
    logits: Tensor,
    most_likely: tuple[Tensor, Tensor],
    terms: DrawTerms,
    numbers: Tensor,
    passes: Passes = PLAIN,
) -> Tensor:
    """The tokens of all rows: those that draw draw, the others have their most likely one.

    O(num_draws * vocab_size).

    Args:
        logits: [num_rows, vocab_size].
        most_likely: of these, as `Passes` finds it.
        terms: how rows draw.
        numbers: float64 [num_draws, 1], in [0, 1).
        passes: over the logits.

    Returns:
        int64 [num_rows]; anything where a row's largest is not finite.
    """
    best, tokens = most_likely
    rows = terms.rows
    some = logits if rows is None else logits[rows]
    above = (best if rows is None else best[rows])[:, None].float()
    reach = furthest(some, above, terms, passes)
    chosen = passes.invert(some, above, terms.sharpness, reach, numbers)
    return chosen if rows is None else tokens.index_put((rows,), chosen)


def furthest(logits: Tensor, best: Tensor, terms: DrawTerms, passes: Passes = PLAIN) -> Tensor:
    """How far below the most likely a token may lie and be drawn: float32 [num_draws, 1].

    O(num_draws * vocab_size).

    Args:
        logits: [num_draws, vocab_size], of the rows that draw.
        best: float32 [num_draws, 1], the largest of each row.
        terms: how they draw.
        passes: over the logits.
    """
    reach = terms.reach
    for cut in terms.cuts:
        of = (logits, best, terms.sharpness)
        if cut.rows is not None:
            of = (logits[cut.rows], best[cut.rows], terms.sharpness[cut.rows])
        if cut.most:
            limit = _ranked_reach(passes.top_values(of[0], cut.most), *of[1:], cut)
        else:
            limit = passes.nuclear_reach(*of, cut.top_p)
        if cut.rows is not None:
            limit = reach.index_put((cut.rows,), limit)
        reach = torch.minimum(reach, limit)
    return reach


def _distances(logits: Tensor, best: Tensor, sharpness: Tensor) -> Tensor:
    """How far below the most likely each token lies: float32."""
    return (best - logits.float()) * sharpness


def _weights(distances: Tensor) -> Tensor:
    """Integers, in float32; 2**35 for the most likely."""
    return torch.exp(-distances).mul_(_SCALE).floor_()


@functools.cache
def passes_for(device_type: str) -> Passes:
    """Those of a device: kernels on a GPU, which are loaded when they are first asked for."""
    if device_type != "cuda":
        return PLAIN
    passes: Passes = import_module("model.sample.draw_kernels").GpuPasses()
    return passes


def _chunk_sums(logits: Tensor, best: Tensor, sharpness: Tensor, reach: Tensor) -> Tensor:
    """The weight of every so many tokens: float64 [num_rows, chunks]."""
    distances = _distances(logits, best, sharpness)
    weights = _weights(distances).masked_fill(distances > reach, 0.0)
    padded = nn.functional.pad(weights, (0, -weights.shape[-1] % _CHUNK))
    return padded.view(weights.shape[0], -1, _CHUNK).sum(dim=-1, dtype=torch.float64)


def _first_above(cumulative: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The first place of each row whose sum is above the target, and that; each [num_rows, 1].

    A target at the very end is the last integer below it: a number just below 1 rounds to it.
    """
    target = torch.minimum(target, cumulative[:, -1:] - 1)
    place = torch.searchsorted(cumulative, target, right=True)
    return place.clamp(max=cumulative.shape[-1] - 1), target


def _ranked_reach(tops: Tensor, best: Tensor, sharpness: Tensor, cut: Cut) -> Tensor:
    """How far the last token lies that top_k, then top_p leave: [num_rows, 1]; inf without one."""
    distances = _distances(tops, best, sharpness)
    ranks = torch.arange(cut.most, device=tops.device)
    weights = _weights(distances).double().masked_fill(ranks >= cut.top_k, 0.0)
    cumulative = weights.cumsum(dim=-1)
    last = torch.searchsorted(cumulative, cut.top_p * cumulative[:, -1:])
    reach = distances.gather(1, last.clamp(max=cut.most - 1))
    return reach.masked_fill(cut.top_k == 0, torch.inf)


def _nuclear_reach_of(logits: Tensor, best: Tensor, sharpness: Tensor, top_p: Tensor) -> Tensor:
    distances = _distances(logits, best, sharpness)
    weights = _weights(distances).double()
    fine = distances.mul_(2.0**FINE).nan_to_num_(0.0).clamp_(max=2.0 ** (2 * BITS) - 1).int()
    coarse = (fine >> BITS).long()
    histogram = weights.new_zeros(len(logits), 1 << BITS).scatter_add_(1, coarse, weights)
    place, target = bin_of_mass(histogram, None, top_p)
    weights = weights.masked_fill_(coarse != place, 0.0)
    inside = (fine & ((1 << BITS) - 1)).long()
    histogram.zero_().scatter_add_(1, inside, weights)
    return reach_of_bins(place, bin_of_mass(histogram, target, top_p)[0])


def bin_of_mass(histogram: Tensor, target: Tensor | None, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """The first bin of each row where its mass is reached, and what is wanted of that bin.

    Args:
        histogram: float64 [num_rows, bins].
        target: float64 [num_rows, 1], the mass; None: a share of all there is.
        top_p: float64 [num_rows, 1], that share.

    Returns:
        Each [num_rows, 1]: int64, and float64.
    """
    cumulative = histogram.cumsum(dim=-1)
    if target is None:
        target = top_p * cumulative[:, -1:]
    place = torch.searchsorted(cumulative, target).clamp_(max=histogram.shape[1] - 1)
    return place, target - (cumulative.gather(1, place) - histogram.gather(1, place))


def reach_of_bins(coarse: Tensor, fine: Tensor) -> Tensor:
    """How far the end of a fine bin in a coarse one lies: float32 [num_rows, 1]."""
    reach = ((coarse << BITS) + fine + 1).float() * 2.0**-FINE
    return torch.nextafter(reach, torch.zeros_like(reach))  # the next bin's first is not in


def _by_pieces(compute: Callable[..., Tensor], logits: Tensor, *columns: Tensor) -> Tensor:
    """A computation a row; each core of a CPU does so many rows at once that they stay in caches.

    Rows are dealt out, because torch would cut each small operation among its threads: they would
    wait for each other hundreds of times, and on a busy machine each wait may be a time slice.
    """
    count = max(1, _PIECE // logits.shape[-1])
    if logits.device.type != "cpu" or count >= len(logits):
        return compute(logits, *columns)
    pieces = zip(*(torch.split(tensor, count) for tensor in (logits, *columns)), strict=True)
    workers = _workers(torch.get_num_threads())
    return torch.cat(list(workers.map(lambda piece: compute(*piece), pieces)))


@functools.cache
def _workers(count: int) -> ThreadPoolExecutor:
    """Threads in each of which torch uses one; made once."""
    workers = ThreadPoolExecutor(count, "sampler", torch.set_num_threads, (1,))
    all_are_there = threading.Barrier(count)
    list(workers.map(lambda _: all_are_there.wait(), range(count)))
    torch.set_num_threads(count)  # of threads to come they have changed it
    return workers


def column(
    values: Sequence[float], device: torch.device, dtype: torch.dtype = torch.float64
) -> Tensor:
    """One number a row: [num_rows, 1]; on its way when this returns. O(num_rows)."""
    made = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").unsqueeze(-1)
    return made.to(device, non_blocking=True)


def index_of(rows: Sequence[int], device: torch.device) -> Tensor:
    """Rows as an index: int64 [num_rows]. O(num_rows)."""
    return column(rows, device, torch.int64).squeeze(-1)
