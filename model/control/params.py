"""How the tokens of one request are chosen, and when they end.

Decides: which values of the sampling parameters make sense.

Invariants: a SamplingParams that exists is valid; it never changes.

Does not know: torch, logits (`sampler.py` reads these fields), the command line.
"""

from dataclasses import dataclass

from model.control.grammar import Grammar
from model.control.settings import check_settings, setting
from model.errors import InvalidSettingError

MAX_INT = 2**63 - 1
"""The largest max_tokens, top_k and seed: what 64 bits hold."""

MAX_LOGPROBS = 20
"""The most tokens that are told beside each token, as OpenAI and vLLM have it."""

MAX_TOKEN_ID = 2**32 - 1
"""The largest token id, as kvcore packs them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The sampling parameters of one request; what each means stands with it.

    Penalties, bias and grammar change the logits, in this order; then the temperature divides them;
    then top_k, top_p and min_p cut, in this order. A temperature of 0 takes the most likely token
    after the changes. Tokens of equal logits are cut together.

    Raises:
        InvalidSettingError: a value that is not allowed.
    """

    max_tokens: int = setting(
        64, help="the most tokens to generate for a prompt", least=1, most=MAX_INT
    )
    temperature: float = setting(
        0.0,
        help="0 takes the most likely token; above 0 it divides the logits of what is drawn",
        least=0,
        most=1_000_000,
    )
    top_k: int | None = setting(
        None, help="draw from the most likely tokens alone, this many", least=1, most=MAX_INT
    )
    top_p: float = setting(
        1.0, help="draw from the fewest most likely tokens that reach this mass", above=0, most=1
    )
    min_p: float = setting(
        0.0,
        help="draw from tokens at least this many times as likely as the most likely",
        least=0,
        most=1,
    )
    repetition_penalty: float = setting(
        1.0,
        help="divides the logits above 0 of tokens that prompt or output have, and multiplies "
        "those below",
        least=0.01,
        most=100,
    )
    presence_penalty: float = setting(
        0.0, help="taken from the logits of tokens that the output has", least=-2, most=2
    )
    frequency_penalty: float = setting(
        0.0, help="likewise, once for each time that the output has them", least=-2, most=2
    )
    logit_bias: tuple[tuple[int, float], ...] = setting(
        (),
        help="pairs of a token id and what is added to its logit, from -100 to 100",
        flag="",
    )
    seed: int | None = setting(
        None,
        help="of the draws, which it makes a function of the request alone; the prompts of a "
        "command line draw with this and their numbers, from 0, modulo 2**63",
        least=0,
        most=MAX_INT,
    )
    stop_token_ids: tuple[int, ...] = setting(
        (),
        help="any of these ends the text, and stays in the tokens",
        least=0,
        most=MAX_TOKEN_ID,
        flag="",
    )
    stop: tuple[str, ...] = setting((), help="a text ends before any of these", least=1)
    ignore_eos: bool = setting(False, help="go on after the model's own end of text")
    logprobs: int | None = setting(
        None,
        help="tell how likely each token was in the model's own distribution, and this many of the "
        "most likely tokens",
        least=0,
        most=MAX_LOGPROBS,
    )

    grammar: Grammar | None = setting(None, help="what the text must be", flag="")

    def __post_init__(self) -> None:
        if not isinstance(self.grammar, Grammar | None):
            raise InvalidSettingError("grammar", "a Grammar", self.grammar)
        check_settings(self)
        _check_bias(self.logit_bias)

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
        return bool(self.logit_bias) or self.counts_tokens or self.grammar is not None


def _check_bias(pairs: tuple[object, ...]) -> None:
    """Pairs of a token and a number from -100 to 100, each token once."""
    tokens = set()
    for pair in pairs:
        match pair:
            case (int(token), int() | float() as bias) if (
                isinstance(pair, tuple)
                and not isinstance(token, bool)
                and not isinstance(bias, bool)
                and 0 <= token <= MAX_TOKEN_ID
                and -100 <= bias <= 100
                and token not in tokens
            ):
                tokens.add(token)
            case _:
                raise InvalidSettingError(
                    "logit_bias",
                    "pairs of a token id and a number from -100 to 100, no token twice",
                    pair,
                )
