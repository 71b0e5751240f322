"""From logits to tokens.

Decides: which token follows. A row is divided by its temperature, cut to its top_k, then to its
top_p (Holtzman et al. 2020, arXiv:1904.09751) of what top_k left, and drawn from by inverting its
cumulative distribution at one uniform number.

Invariants: a row's token depends on its own logits, parameters, seed and index alone, so neither
    the
batch it is in nor a preemption changes it; equal logits go by token id, the lower first.

Does not know: requests, text, where the logits come from.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from model.errors import NumericalError
from model.params import SamplingParams


@dataclass(frozen=True, slots=True)
class Draw:
    """How one row is drawn from.

    Attributes:
        params: temperature, top_k and top_p.
        key: 128 bits; rows of one request share it, different requests differ in it.
        index: the number of the token in its request's output, from 0.
    """

    params: SamplingParams
    key: int
    index: int

    def uniform(self) -> float:
        """A number in [0, 1) that depends on `key` and `index` alone. O(1).

        Philox is counter-based (Salmon et al. 2011): the n-th number needs no state from before.
        """
        generator = np.random.Generator(np.random.Philox(key=self.key, counter=self.index))
        return float(generator.random())


def draw_key(seed: int | None, engine_seed: int, request_id: int, sample: int = 0) -> int:
    """The key of a request: its seed and which sample it is, or the engine's seed and its id. O(1).

    Bit 63 tells the two kinds apart.
    """
    return seed << 64 | sample if seed is not None else engine_seed << 64 | 1 << 63 | request_id


def sample(logits: Tensor, draws: Sequence[Draw | None]) -> list[int]:
    """Choose one token a row. O(num_rows * vocab_size), with a sort for rows that are drawn.

    Args:
        logits: [num_rows, vocab_size].
        draws: one a row; None: the most likely token.

    Raises:
        NumericalError: a row holds NaN, +inf or nothing but -inf.
    """
    if not draws:
        return []
    best, best_ids = logits.float().max(dim=-1)
    tokens: list[int] = best_ids.tolist()
    values: list[float] = best.tolist()
    if not all(map(math.isfinite, values)):
        row, value = next((i, x) for i, x in enumerate(values) if not math.isfinite(x))
        raise NumericalError(f"logits: wanted finite numbers, got {value} in row {row}")
    drawing = {
        row: draw
        for row, draw in enumerate(draws)
        if draw is not None and not draw.params.is_greedy
    }
    if drawing:
        drawn = _draw(logits[list(drawing)].double(), list(drawing.values()))
        for row, token in zip(drawing, drawn, strict=True):
            tokens[row] = token
    return tokens


def _draw(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    """Draw one token a row from what temperature, top_k and top_p leave; float64 throughout."""
    mass, token_ids = kept_mass(logits, [draw.params for draw in draws])
    cumulative = mass.cumsum(dim=-1)
    uniform = torch.tensor([[draw.uniform()] for draw in draws], dtype=torch.float64)
    target = uniform.to(cumulative.device) * cumulative[:, -1:]
    place = torch.searchsorted(cumulative, target, right=True)
    # Rounding may put the target at the very end: then the last token that has mass is meant.
    last = (mass > 0).sum(dim=-1, keepdim=True) - 1
    tokens: list[int] = token_ids.gather(-1, torch.minimum(place, last)).squeeze(-1).tolist()
    return tokens


def kept_mass(logits: Tensor, params: Sequence[SamplingParams]) -> tuple[Tensor, Tensor]:
    """The probabilities that temperature, top_k and top_p leave, most likely token first.

    O(num_rows * vocab_size * log(vocab_size)).

    Args:
        logits: float64 [num_rows, vocab_size], finite or -inf.
        params: one a row, none greedy.

    Returns:
        mass: float64 [num_rows, vocab_size], zero where a token cannot be drawn, not normalised
            after the cuts; and the token id of each: int64 [num_rows, vocab_size].
    """
    device, vocab_size = logits.device, logits.shape[-1]
    temperature = _column([p.temperature for p in params], device)
    top_k = _column([float(p.top_k or vocab_size) for p in params], device)
    top_p = _column([p.top_p for p in params], device)
    ranked, token_ids = logits.sort(dim=-1, descending=True, stable=True)
    mass = ((ranked - ranked[:, :1]) / temperature).softmax(dim=-1)
    mass = mass.where(torch.arange(vocab_size, device=device) < top_k, 0.0)
    mass = mass / mass.sum(dim=-1, keepdim=True)
    # A token stays if the more likely ones have not reached top_p without it; the first always
    # does.
    before = mass.cumsum(dim=-1) - mass
    return mass.where((before < top_p) | (top_p >= 1), 0.0), token_ids


def _column(values: list[float], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=device).unsqueeze(-1)
