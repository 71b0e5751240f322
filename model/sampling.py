"""From logits to tokens.

Decides: which token follows. A row is divided by its temperature, cut to its top_k, then to its
top_p (Holtzman et al. 2020, arXiv:1904.09751) of what top_k left, and drawn from by inverting its
cumulative distribution at one uniform number: over the tokens by their ids where nothing is cut,
which takes no sort, else over the most likely first.

Invariants: a row's token depends on its own logits, parameters, seed and index alone, so neither
the batch it is in nor a preemption changes it; equal logits go by token id, the lower first. On a
GPU drawing waits for nothing, reading for what was drawn.

Does not know: requests, text, where the logits come from.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

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


class Drawn:
    """The tokens of a step on the device, and on their way to the host.

    Args:
        best: [num_rows], the largest logit of each row.
        tokens: int64 [num_rows].

    Attributes:
        tokens: as above.
    """

    __slots__ = ("_best", "_copied", "_read", "tokens")

    def __init__(self, best: Tensor, tokens: Tensor) -> None:
        self.tokens = tokens
        self._copied: torch.cuda.Event | None = None
        if tokens.device.type == "cpu":
            self._best, self._read = best, tokens
        else:
            self._best, self._read = _to_host(best), _to_host(tokens)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def read(self) -> list[int]:
        """The tokens, once they are there. O(num_rows).

        Raises:
            NumericalError: a row holds NaN, +inf or nothing but -inf.
        """
        if self._copied is not None:
            self._copied.synchronize()
        values: list[float] = self._best.tolist()
        if not all(map(math.isfinite, values)):
            row, value = next((i, x) for i, x in enumerate(values) if not math.isfinite(x))
            raise NumericalError(f"logits: wanted finite numbers, got {value} in row {row}")
        tokens: list[int] = self._read.tolist()
        return tokens


def sample(logits: Tensor, draws: Sequence[Draw | None]) -> list[int]:
    """Choose one token a row and wait for it: `draw`, then `Drawn.read`.

    Raises:
        NumericalError: a row holds NaN, +inf or nothing but -inf.
    """
    return draw(logits, draws).read()


def draw(
    logits: Tensor,
    draws: Sequence[Draw | None],
    most_likely: tuple[Tensor, Tensor] | None = None,
) -> Drawn:
    """Choose one token a row. O(num_rows * vocab_size), with a sort for rows that are cut.

    Args:
        logits: [num_rows, vocab_size].
        draws: one a row; None: the most likely token.
        most_likely: `logits.max(dim=-1)`, if that is known.
    """
    if not draws:
        return Drawn(logits.new_empty(0), torch.empty(0, dtype=torch.int64))
    best, tokens = logits.max(dim=-1) if most_likely is None else most_likely
    cut: dict[int, Draw] = {}
    whole: dict[int, Draw] = {}
    for row, how in enumerate(draws):
        if how is not None and not how.params.is_greedy:
            (cut if how.params.top_k is not None or how.params.top_p < 1 else whole)[row] = how
    for some, choose in ((whole, _draw_whole), (cut, _draw_cut)):
        if len(some) == len(draws):
            tokens = choose(logits, list(some.values()))
        elif some:
            rows = _column(list(some), logits.device, torch.int64).squeeze(-1)
            tokens = tokens.index_put((rows,), choose(logits[rows], list(some.values())))
    return Drawn(best, tokens)


_CHUNK = 256


def _draw_whole(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Draw one token a row from all, in the order of their ids; first a chunk, then a token of it.

    A GPU takes masses in float32, which it computes alike wherever an element stands; sums are
    float64 everywhere.
    """
    exact = logits.double() if logits.device.type == "cpu" else logits.float()
    sharpness = [min(1 / how.params.temperature, 1e30) for how in draws]
    mass = exact - exact.max(dim=-1, keepdim=True).values
    mass = mass.mul_(_column(sharpness, logits.device).to(mass.dtype)).exp_()
    chunks = nn.functional.pad(mass, (0, -mass.shape[-1] % _CHUNK)).view(len(mass), -1, _CHUNK)
    sums = chunks.sum(dim=-1, dtype=torch.float64)
    before = sums.cumsum(dim=-1)
    target = _column([how.uniform() for how in draws], logits.device) * before[:, -1:]
    chunk = _first_above(before, target, sums)
    inside = chunks.gather(1, chunk[:, :, None].expand(-1, -1, _CHUNK)).squeeze(1).double()
    target = target - (before.gather(1, chunk) - sums.gather(1, chunk))
    return (chunk * _CHUNK + _first_above(inside.cumsum(dim=-1), target, inside)).squeeze(-1)


def _draw_cut(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Draw one token a row from what temperature, top_k and top_p leave; float64 throughout."""
    mass, token_ids = kept_mass(logits.double(), [how.params for how in draws])
    cumulative = mass.cumsum(dim=-1)
    uniform = _column([how.uniform() for how in draws], logits.device)
    place = _first_above(cumulative, uniform * cumulative[:, -1:], mass)
    return token_ids.gather(-1, place).squeeze(-1)


def _first_above(cumulative: Tensor, target: Tensor, mass: Tensor) -> Tensor:
    """The first place of each row whose cumulative mass is above the target: [num_rows, 1].

    Rounding may put the target at the very end: then the last place that has mass is meant.
    """
    place = torch.searchsorted(cumulative, target, right=True)
    places = torch.arange(mass.shape[-1], device=mass.device)
    return torch.minimum(place, places.where(mass > 0, 0).amax(dim=-1, keepdim=True))


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


def _column(
    values: Sequence[float], device: torch.device, dtype: torch.dtype = torch.float64
) -> Tensor:
    """One number a row: [num_rows, 1]."""
    column = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").unsqueeze(-1)
    return column.to(device, non_blocking=True)


def _to_host(content: Tensor) -> Tensor:
    host = torch.empty(content.shape, dtype=content.dtype, pin_memory=True)
    return host.copy_(content, non_blocking=True)
