"""Sampling parameters: how the tokens of a request are chosen, and when they end.

Decides: which values of the sampling parameters make sense.

Invariants: a SamplingParams that exists is valid; it never changes.

Does not know: torch, logits (`sampler.py` reads these fields), the command line.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from model.control.grammar import Grammar
from model.control.settings import check_settings, setting
from model.errors import InvalidSettingError

MAX_INT = 2**63 - 1
"""The largest max_tokens, top_k and seed: what 64 bits hold."""

MAX_LOGPROBS = 20
"""The largest `logprobs`, as in OpenAI's interface and vLLM."""

MAX_BAD_WORDS = 128
"""The most `bad_words`."""

MAX_BAD_WORDS_CHARACTERS = 4096
"""Of all `bad_words` together."""

MAX_TOKEN_ID = 2**32 - 1
"""The largest token id, as kvcore packs them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The sampling parameters of one request; each field's help says its meaning.

    Penalties, bias and grammar change the logits, in this order; then the temperature divides them;
    then top_k, top_p and min_p cut, in this order. A temperature of 0 takes the most likely token
    after the changes. Tokens of equal logits are cut together.

    As in vLLM, `stop` may be one text, `stop`, `stop_token_ids` and `bad_words` lists or None,
    `logit_bias` a dict, and a `top_k` of -1 or 0 means all tokens.

    Raises:
        InvalidSettingError: a value that is not allowed.
    """

    n: int = setting(
        1, help="number of outputs for each prompt", least=1, most=1024, is_common=True
    )
    max_tokens: int = setting(
        64,
        help="largest number of tokens to generate for each prompt",
        least=1,
        most=MAX_INT,
        is_common=True,
    )
    temperature: float = setting(
        0.0,
        help="0: greedy, the most likely token; above 0: the logits are divided by it before "
        "sampling",
        least=0,
        most=1_000_000,
        is_common=True,
    )
    top_k: int | None = setting(
        None,
        help="sample only from this many of the most likely tokens",
        least=1,
        most=MAX_INT,
        is_common=True,
    )
    top_p: float = setting(
        1.0,
        help="nucleus sampling: sample from the smallest set of tokens with this total probability",
        above=0,
        most=1,
        is_common=True,
    )
    min_p: float = setting(
        0.0,
        help="drop tokens less likely than this fraction of the most likely token's probability",
        least=0,
        most=1,
    )
    repetition_penalty: float = setting(
        1.0,
        help="tokens already in the prompt or output: positive logits are divided by it, negative "
        "ones multiplied",
        least=0.01,
        most=100,
        is_common=True,
    )
    presence_penalty: float = setting(
        0.0, help="subtracted from the logits of tokens already generated", least=-2, most=2
    )
    frequency_penalty: float = setting(
        0.0,
        help="subtracted from the logits of a token once for each time it was generated",
        least=-2,
        most=2,
    )
    logit_bias: tuple[tuple[int, float], ...] = setting(
        (),
        help="pairs of a token id and a number from -100 to 100 that is added to its logit",
        flag="",
    )
    seed: int | None = setting(
        None,
        help="random seed; with one, the output depends on the request alone; prompt number i of a "
        "command line (from 0) uses seed + i, modulo 2**63",
        least=0,
        most=MAX_INT,
        is_common=True,
    )
    stop_token_ids: tuple[int, ...] = setting(
        (),
        help="token ids that end the output; the ending token stays in the output tokens",
        least=0,
        most=MAX_TOKEN_ID,
        flag="",
    )
    stop: tuple[str, ...] = setting(
        (), help="stop string: the text ends before it", least=1, is_common=True
    )
    bad_words: tuple[str, ...] = setting(
        (),
        help="text that is not generated, neither with nor without a space before it",
        least=1,
    )
    min_tokens: int = setting(
        0,
        help="smallest number of output tokens: until then no end-of-sequence token and none of "
        "the stop token ids is generated",
        least=0,
        most=MAX_INT,
    )
    ignore_eos: bool = setting(False, help="continue after the model's end-of-sequence token")
    skip_special_tokens: bool = setting(
        True,
        help="leave special tokens, such as the one that ends a text, out of the text",
        flag="",
    )
    logprobs: int | None = setting(
        None,
        help="report the log-probability of each token and of this many of the most likely tokens, "
        "before temperature and penalties",
        least=0,
        most=MAX_LOGPROBS,
    )
    prompt_logprobs: int | None = setting(
        None,
        help="report the log-probability of each prompt token but the first, and of this many of "
        "the most likely tokens in its place; the prompt is computed whole, without prefix cache "
        "hits",
        least=0,
        most=MAX_LOGPROBS,
        flag="",
    )

    grammar: Grammar | None = setting(
        None, help="structured outputs: the grammar that the text must follow", flag=""
    )

    def __post_init__(self) -> None:
        for name, value in self._as_vllm_takes_them().items():
            object.__setattr__(self, name, value)
        if not isinstance(self.grammar, Grammar | None):
            raise InvalidSettingError("grammar", "a Grammar", self.grammar)
        check_settings(self)
        _check_bias(self.logit_bias)
        _check_bad_words(self.bad_words)
        if self.min_tokens > self.max_tokens:
            wanted = f"at most max_tokens, {self.max_tokens}"
            raise InvalidSettingError("min_tokens", wanted, self.min_tokens)
        if self.min_tokens and self.grammar is not None:
            raise InvalidSettingError("min_tokens", "0 with a grammar", self.min_tokens)
        if self.bad_words and self.grammar is not None:
            raise InvalidSettingError("bad_words", "none with a grammar", self.bad_words)

    def _as_vllm_takes_them(self) -> dict[str, object]:
        """Return the fields for which vLLM takes other types, as they are here. O(fields)."""
        made: dict[str, object] = {}
        stop: object = self.stop
        if isinstance(stop, str):
            made["stop"] = (stop,)
        if type(self.top_k) is int and self.top_k in {-1, 0}:
            made["top_k"] = None
        if isinstance(self.logit_bias, Mapping):
            made["logit_bias"] = tuple(self.logit_bias.items())
        for name in ("stop", "stop_token_ids", "bad_words"):
            value = getattr(self, name)
            if isinstance(value, list) or (value is None and name not in made):
                made[name] = tuple(value or ())
        return made

    @property
    def is_greedy(self) -> bool:
        """True if the most likely token is always taken. O(1)."""
        return self.temperature == 0

    @property
    def counts_tokens(self) -> bool:
        """True if penalties make its logits depend on the tokens before. O(1)."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return penalties != (1, 0, 0)

    @property
    def changes_logits(self) -> bool:
        """True if its logits are changed before a token is chosen. O(1)."""
        is_biased = bool(self.logit_bias or self.bad_words) or self.min_tokens > 0
        return is_biased or self.counts_tokens or self.grammar is not None


def _check_bad_words(words: tuple[str, ...]) -> None:
    """Raise if there are too many bad words, or one of white space alone."""
    for word in words:
        if not word.strip():
            raise InvalidSettingError("bad_words", "a list, each text that is not blank", word)
    for count, most, what in (
        (len(words), MAX_BAD_WORDS, "texts"),
        (sum(map(len, words)), MAX_BAD_WORDS_CHARACTERS, "characters"),
    ):
        if count > most:
            raise InvalidSettingError("bad_words", f"at most {most} {what}", count)


def _check_bias(pairs: tuple[object, ...]) -> None:
    """Raise unless these are pairs of a token and a number from -100 to 100, each token once."""
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
