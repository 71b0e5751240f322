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

MAX_LOGPROBS = 20
"""The most tokens that are told beside each token, as OpenAI and vLLM have it."""

_MAX_TOKEN_ID = 2**32 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The sampling parameters of one request.

    Attributes:
        max_tokens: the most tokens to generate, at least 1.
        temperature: 0 takes the most likely token; above 0 it divides the logits.
        top_k: only the k most likely tokens can be drawn; None: all of them.
        top_p: only the smallest set of most likely tokens whose mass reaches top_p can be drawn.
        min_p: only tokens that are at least min_p times as likely as the most likely can be drawn.
        repetition_penalty: divides the logits above 0 of tokens that prompt or output have, and
            multiplies those below; 1: nothing.
        presence_penalty: taken from the logits of tokens that the output has.
        frequency_penalty: likewise, once for each time that it has them.
        logit_bias: pairs of a token and what is added to its logit, after the penalties.
        seed: makes the draws a function of this request alone, from 0 to 2**63 - 1; None: the
            engine derives one.
        stop_token_ids: any of these ends the request; it stays in the output tokens.
        stop: any of these strings in the generated text ends the request; the text is cut before
            it.
        ignore_eos: the model's own end-of-sequence tokens do not end the request.
        logprobs: how many of the most likely tokens are told with each token, and how likely all of
            them are; 0: the token's own log-probability alone; None: nothing. They are those of the
            model: of its logits before temperature, penalties, bias and cuts.

    Raises:
        InvalidArgumentError: a value outside these ranges.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        _check_int("max_tokens", self.max_tokens, 1)
        _check_number("temperature", self.temperature, "of at least 0", 0.0, sys.float_info.max)
        if self.top_k is not None:
            _check_int("top_k", self.top_k, 1)
        _check_number("top_p", self.top_p, "above 0 and at most 1", math.nextafter(0.0, 1.0), 1.0)
        _check_number("min_p", self.min_p, "of at least 0 and at most 1", 0.0, 1.0)
        _check_number(
            "repetition_penalty", self.repetition_penalty, "from 0.01 to 100", 0.01, 100.0
        )
        for name in ("presence_penalty", "frequency_penalty"):
            _check_number(name, getattr(self, name), "from -2 to 2", -2.0, 2.0)
        _check_bias(self.logit_bias)
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
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

    @property
    def counts_tokens(self) -> bool:
        """Whether its logits depend on the tokens that there are. O(1)."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return penalties != (1, 0, 0)

    @property
    def changes_logits(self) -> bool:
        """Whether anything is done to its logits before a token is chosen. O(1)."""
        return bool(self.logit_bias) or self.counts_tokens


def _check_int(name: str, value: object, least: int, most: int = MAX_INT) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise _wanted(name, f"an integer from {least} to {most}", value)


def _check_number(name: str, value: object, wanted: str, low: float, high: float) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise _wanted(name, f"a number {wanted}", value)
    if not low <= value <= high:  # exact for an integer of any size; false for NaN
        raise _wanted(name, f"a number {wanted}", value)


def _check_bias(pairs: object) -> None:
    """Pairs of a token and a number from -100 to 100, each token once."""
    wanted = "a tuple of pairs of a token id and a number from -100 to 100, no token twice"
    if not isinstance(pairs, tuple) or not all(
        isinstance(pair, tuple) and len(pair) == 2 for pair in pairs
    ):
        raise _wanted("logit_bias", wanted, pairs)
    for token, bias in pairs:
        _check_int("logit_bias", token, 0, _MAX_TOKEN_ID)
        _check_number("logit_bias", bias, "from -100 to 100", -100.0, 100.0)
    if len(dict(pairs)) < len(pairs):
        raise _wanted("logit_bias", wanted, pairs)


def _check_tuple(name: str, values: object, kind: type) -> None:
    if not isinstance(values, tuple) or not all(isinstance(v, kind) and v != "" for v in values):
        raise _wanted(name, f"a tuple of {kind.__name__}, none empty", values)


def _wanted(name: str, wanted: str, got: object) -> InvalidArgumentError:
    return InvalidArgumentError(f"{name}: wanted {wanted}, got {shown(got)}")
