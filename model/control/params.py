"""How the tokens of one request are chosen, and when they end.

Decides: which values of the sampling parameters make sense.

Invariants: a SamplingParams that exists is valid; it never changes.

Does not know: torch, logits (`sampler.py` reads these fields), the command line.
"""

import math
import sys
from dataclasses import dataclass

from model.errors import InvalidArgumentError, shown

MAX_INT = 2**63 - 1
"""The largest max_tokens, top_k and seed: what 64 bits hold."""

_MAX_TOKEN_ID = 2**32 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The sampling parameters of one request.

    Attributes:
        max_tokens: the most tokens to generate, at least 1.
        temperature: 0 takes the most likely token; above 0 it divides the logits.
        top_k: only the k most likely tokens can be drawn; None: all of them.
        top_p: only the smallest set of most likely tokens whose mass reaches top_p can be drawn.
        seed: makes the draws a function of this request alone, from 0 to 2**63 - 1; None: the
            engine derives one.
        stop_token_ids: any of these ends the request; it stays in the output tokens.
        stop: any of these strings in the generated text ends the request; the text is cut before
            it.
        ignore_eos: the model's own end-of-sequence tokens do not end the request.

    Raises:
        InvalidArgumentError: a value outside these ranges.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _check_int("max_tokens", self.max_tokens, 1)
        _check_number("temperature", self.temperature, "of at least 0", 0.0, sys.float_info.max)
        if self.top_k is not None:
            _check_int("top_k", self.top_k, 1)
        _check_number("top_p", self.top_p, "above 0 and at most 1", math.nextafter(0.0, 1.0), 1.0)
        if self.seed is not None:
            _check_int("seed", self.seed, 0)
        _check_tuple("stop_token_ids", self.stop_token_ids, int)
        _check_tuple("stop", self.stop, str)
        for token in self.stop_token_ids:
            _check_int("stop_token_ids", token, 0, _MAX_TOKEN_ID)
        if not isinstance(self.ignore_eos, bool):
            raise _wanted("ignore_eos", "true or false", self.ignore_eos)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken. O(1)."""
        return self.temperature == 0


def _check_int(name: str, value: object, least: int, most: int = MAX_INT) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise _wanted(name, f"an integer from {least} to {most}", value)


def _check_number(name: str, value: object, wanted: str, low: float, high: float) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise _wanted(name, f"a number {wanted}", value)
    if not low <= value <= high:  # exact for an integer of any size; false for NaN
        raise _wanted(name, f"a number {wanted}", value)


def _check_tuple(name: str, values: object, kind: type) -> None:
    if not isinstance(values, tuple) or not all(isinstance(v, kind) and v != "" for v in values):
        raise _wanted(name, f"a tuple of {kind.__name__}, none empty", values)


def _wanted(name: str, wanted: str, got: object) -> InvalidArgumentError:
    return InvalidArgumentError(f"{name}: wanted {wanted}, got {shown(got)}")
