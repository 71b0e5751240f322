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

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from model.control.params import SamplingParams
from model.errors import NumericalError


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


_CHUNK = 256

ChunkSums = Callable[[Tensor, Tensor, Tensor], Tensor]


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

    def read(self) -> list[int | None]:
        """The tokens, once they are there and with them all that was sent before. O(num_rows).

        None for a row that holds NaN, +inf or nothing but -inf.
        """
        if self._copied is not None:
            self._copied.synchronize()
        values: list[float] = self._best.tolist()
        tokens: list[int | None] = self._read.tolist()
        if not all(map(math.isfinite, values)):
            return [
                token if math.isfinite(value) else None
                for token, value in zip(tokens, values, strict=True)
            ]
        return tokens


def sample(logits: Tensor, draws: Sequence[Draw | None]) -> list[int]:
    """Choose one token a row and wait for it: `draw`, then `Drawn.read`.

    Raises:
        NumericalError: a row holds NaN, +inf or nothing but -inf.
    """
    tokens: list[int] = []
    for row, token in enumerate(draw(logits, draws).read()):
        if token is None:
            raise NumericalError(f"logits: wanted finite numbers, row {row} has others")
        tokens.append(token)
    return tokens


def draw(
    logits: Tensor,
    draws: Sequence[Draw | None],
    most_likely: tuple[Tensor, Tensor] | None = None,
    sums_of: ChunkSums | None = None,
) -> Drawn:
    """Choose one token a row. O(num_rows * vocab_size), with a sort for rows that are cut.

    Args:
        logits: [num_rows, vocab_size].
        draws: one a row; None: the most likely token.
        most_likely: `logits.max(dim=-1)`, if that is known.
        sums_of: `chunk_sums`, or what that was compiled to.
    """
    if not draws:  # and still something to wait for
        return Drawn(logits.new_empty(0), logits.new_empty(0, dtype=torch.int64))
    best, tokens = logits.max(dim=-1) if most_likely is None else most_likely
    cut: dict[int, Draw] = {}
    whole: dict[int, Draw] = {}
    for row, how in enumerate(draws):
        if how is not None and not how.params.is_greedy:
            (cut if how.params.top_k is not None or how.params.top_p < 1 else whole)[row] = how
    draw_whole = functools.partial(_draw_whole, sums_of=sums_of or chunk_sums)
    for some, choose in ((whole, draw_whole), (cut, _draw_cut)):
        if len(some) == len(draws):
            tokens = choose(logits, best, list(some.values()))
        elif some:
            rows = _column(list(some), logits.device, torch.int64).squeeze(-1)
            chosen = choose(logits[rows], best[rows], list(some.values()))
            tokens = tokens.index_put((rows,), chosen)
    return Drawn(best, tokens)


def chunk_sums(logits: Tensor, best: Tensor, sharpness: Tensor) -> Tensor:
    """The mass of every so many tokens: float64 [num_rows, chunks]. O(num_rows * vocab_size).

    The first step of a draw, and the only one that reads all logits; it may be compiled.

    Args:
        logits: [num_rows, vocab_size].
        best: [num_rows, 1], the largest of each row.
        sharpness: float64 [num_rows, 1], one over the temperature.
    """
    mass = _mass(logits, best, sharpness)
    padded = nn.functional.pad(mass, (0, -mass.shape[-1] % _CHUNK))
    return padded.view(mass.shape[0], -1, _CHUNK).sum(dim=-1, dtype=torch.float64)


def _mass(logits: Tensor, best: Tensor, sharpness: Tensor) -> Tensor:
    """Probabilities times a number of their own row.

    A GPU takes them in float32, which it computes alike wherever an element stands.
    """
    dtype = torch.float64 if logits.device.type == "cpu" else torch.float32
    return ((logits.to(dtype) - best.to(dtype)) * sharpness.to(dtype)).exp()


def _draw_whole(logits: Tensor, best: Tensor, draws: Sequence[Draw], sums_of: ChunkSums) -> Tensor:
    """Draw one token a row from all, in the order of their ids; first a chunk, then a token of it.

    Sums are float64 everywhere.
    """
    device, vocab_size, best = logits.device, logits.shape[-1], best[:, None]
    sharpness = _column([min(1 / how.params.temperature, 1e30) for how in draws], device)
    sums = sums_of(logits, best, sharpness)
    before = sums.cumsum(dim=-1)
    target = _column([how.uniform() for how in draws], device) * before[:, -1:]
    chunk = _first_above(before, target, sums)
    target = target - (before.gather(1, chunk) - sums.gather(1, chunk))
    tokens = chunk * _CHUNK + torch.arange(_CHUNK, device=device)
    inside = logits.gather(1, tokens.clamp(max=vocab_size - 1))
    mass = _mass(inside, best, sharpness).double().where(tokens < vocab_size, 0.0)
    return tokens.gather(1, _first_above(mass.cumsum(dim=-1), target, mass)).squeeze(-1)


def _draw_cut(logits: Tensor, best: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Draw one token a row from what temperature, top_k and top_p leave; float64 throughout."""
    del best
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
