"""From logits to tokens: cuts by thresholds, then a draw at one random number per row.

Decides: which token follows. With a temperature T, a token lies `z = (largest logit - logit) / T`
below the most likely one, and weighs exp(-z) (`passes.py`). A row is cut to its top_k, then to the
smallest set of most likely tokens that reaches top_p of what top_k left (Holtzman et al. 2020,
arXiv:1904.09751), then to the tokens that weigh at least min_p of the most likely one: the order in
which Transformers cuts. Each cut is a threshold on z, so tokens with equal logits stay or go
together, and the vocabulary is never sorted. Then the distribution, ordered by token id, is
inverted at one number.

The number is the `index`-th of SplitMix64 (Steele et al. 2014) from where the request's numbers
start, so it needs no earlier state; a hash of the seed gives the start.

Invariants: the token of a row depends only on its logits, parameters, seed and index, so neither
the batch nor a preemption changes it. Shapes depend on no value, and nothing waits for the device
until the result is read.

Does not know: requests, text, where the logits come from (`request_sampler.py` changes them).
"""

import functools
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import model.sample
from model.control.params import SamplingParams
from model.errors import NumericalError
from model.sample.passes import PLAIN, Passes, distances_of, weights_of


@dataclass(frozen=True, slots=True)
class Draw:
    """The terms by which one row is drawn.

    Attributes:
        params: temperature, top_k, top_p and min_p.
        stream: 64 bits, the start of the request's random numbers.
        index: the number of the token in the output of its request, from 0.
    """

    params: SamplingParams
    stream: int
    index: int

    def uniform(self) -> float:
        """Return a number in [0, 1) that depends only on `stream` and `index`. O(1)."""
        return float(uniforms(np.array([self.stream], np.uint64), np.array([self.index]))[0])


def stream_of(seed: int | None, engine_seed: int, request_id: int, sample: int = 0) -> int:
    """Return the start of a request's random numbers: 64 bits. O(1).

    A hash of its seed and the number of the sample, or of the engine's seed and the id of the
    request. Hashing makes requests with close seeds independent.
    """
    parts = (0, seed, sample) if seed is not None else (1, engine_seed, request_id)
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest())


def uniforms(streams: NDArray[np.uint64], indexes: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return for each stream the number at its index, in [0, 1), by SplitMix64. O(streams)."""
    mixed = streams + (indexes.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    found: NDArray[np.float64] = (mixed >> np.uint64(11)) * 2.0**-53
    return found


@dataclass(frozen=True, slots=True)
class Cut:
    """Rows that are cut by rank or by mass.

    Attributes:
        rows: int64 [num_cut], indices into the rows that draw; None: all.
        top_p: float64 [num_cut, 1].
        top_k: int64 [num_cut, 1]; 0: none.
        most: at least the largest top_k; 0: the rows are cut by mass alone.
    """

    rows: Tensor | None
    top_p: Tensor
    top_k: Tensor
    most: int


@dataclass(frozen=True, slots=True)
class DrawTerms:
    """The terms by which a step's rows are drawn: columns on the device, an entry a drawn row.

    Attributes:
        rows: int64 [num_draws], the rows of the logits; None: all.
        sharpness: float32 [num_draws, 1], 1 / temperature.
        reach: float32 [num_draws, 1], the largest distance from the most likely token (min_p).
        cuts: the cuts of these rows.
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
    """Return the terms of the rows that draw. O(rows).

    Args:
        rows: of the logits, in order.
        params: of each of these rows, none greedy.
        num_rows: of the logits.
        vocab_size: of the logits.
        device: of the logits.
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
    """Return 1 / temperature, for a temperature above 0. O(1)."""
    return min(max(1 / params.temperature, 1e-30), 1e30)


def reach_of(params: SamplingParams) -> float:
    """Return the largest distance from the most likely token that min_p allows. O(1)."""
    return -math.log(params.min_p) if params.min_p else math.inf


def sample(logits: Tensor, draws: Sequence[Draw | None]) -> list[int]:
    """Choose one token per row and wait for it; None: the most likely. O(num_rows * vocab_size).

    Raises:
        NumericalError: a row holds NaN, +inf or only -inf.
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
    """Return the tokens of all rows: drawn for the rows of `terms`, the most likely for all others.

    O(num_draws * vocab_size).

    Args:
        logits: [num_rows, vocab_size].
        most_likely: of the logits, see `Passes`.
        terms: how rows draw.
        numbers: float64 [num_draws, 1], in [0, 1).
        passes: over the logits.

    Returns:
        int64 [num_rows]; undefined for a row whose largest logit is not finite.
    """
    best, tokens = most_likely
    rows = terms.rows
    some = logits if rows is None else logits[rows]
    above = (best if rows is None else best[rows])[:, None].float()
    reach = furthest(some, above, terms, passes)
    chosen = passes.invert(some, above, terms.sharpness, reach, numbers)
    return chosen if rows is None else tokens.index_put((rows,), chosen)


def furthest(logits: Tensor, best: Tensor, terms: DrawTerms, passes: Passes = PLAIN) -> Tensor:
    """Return the largest distance of a token that may be drawn: float32 [num_draws, 1].

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


@functools.cache
def passes_for(device_type: str) -> Passes:
    """Return the passes for a type of device: on a GPU its kernels, imported on first use."""
    if device_type != "cuda":
        return PLAIN
    passes: Passes = model.sample.draw_kernels.GpuPasses()
    return passes


def _ranked_reach(tops: Tensor, best: Tensor, sharpness: Tensor, cut: Cut) -> Tensor:
    """Return the distance of the last token that top_k, then top_p leave: [num_rows, 1]; or inf."""
    distances = distances_of(tops, best, sharpness)
    ranks = torch.arange(cut.most, device=tops.device)
    weights = weights_of(distances).double().masked_fill(ranks >= cut.top_k, 0.0)
    cumulative = weights.cumsum(dim=-1)
    last = torch.searchsorted(cumulative, cut.top_p * cumulative[:, -1:])
    reach = distances.gather(1, last.clamp(max=cut.most - 1))
    return reach.masked_fill(cut.top_k == 0, torch.inf)


def column(
    values: Sequence[float], device: torch.device, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Return one number per row: [num_rows, 1]; the copy may still run on return. O(num_rows)."""
    made = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").unsqueeze(-1)
    return made.to(device, non_blocking=True)


def index_of(rows: Sequence[int], device: torch.device) -> Tensor:
    """Return rows as an index: int64 [num_rows]. O(num_rows)."""
    return column(rows, device, torch.int64).squeeze(-1)
