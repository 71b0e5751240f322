"""Bad words: sequences of tokens that an output must not have.

A sequence is kept out by barring its last token wherever the output ends with the others, as vLLM
does. Only the output counts: a word that begins in the prompt is not seen.

Invariants: the barred tokens depend only on the last tokens of the output.

Does not know: logits, tokenizers.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

from model.control.params import SamplingParams
from model.errors import InvalidArgumentError, InvalidSettingError

MAX_TOKENS = 1024
"""The most tokens of all bad words of a request together, as in vLLM."""


class BadWords:
    """The sequences that one request must not generate.

    Args:
        sequences: of token ids, none empty.

    Attributes:
        always: tokens that are a whole sequence: barred at every position.
    """

    def __init__(self, sequences: Iterable[tuple[int, ...]]) -> None:
        always: list[int] = []
        self._after: dict[int, list[tuple[tuple[int, ...], int]]] = {}  # by the last token before
        self._longest = 0
        self._last: set[int] = set()
        for *before, last in sequences:
            self._last.add(last)
            if before:
                self._after.setdefault(before[-1], []).append((tuple(before), last))
                self._longest = max(self._longest, len(before))
            else:
                always.append(last)
        self.always = tuple(always)

    @property
    def has_longer(self) -> bool:
        """True if a sequence has more than one token. O(1)."""
        return bool(self._after)

    @property
    def last_tokens(self) -> frozenset[int]:
        """The tokens that may be barred. O(sequences)."""
        return frozenset(self._last)

    def after(self, output: Sequence[int], newest: int | None = None) -> list[int]:
        """Return the tokens that would end a sequence of several. O(sequences), mostly O(1).

        Args:
            output: its tokens so far.
            newest: the token behind them; None: there is none.
        """
        tail = (*output[-self._longest :], *(() if newest is None else (newest,)))
        if not tail:
            return []
        near = self._after.get(tail[-1], ())
        return [last for before, last in near if tail[-len(before) :] == before]


class BadWordReader:
    """Makes the bad words of requests into tokens; those of the last 64 lists are remembered.

    vLLM leaves out the form of a word with a space before it if that has another number of tokens,
    and so lets the word pass there; here both forms count.

    Args:
        encode: tokens of a text, without special tokens.
        vocab_size: token ids are below this.
        eos_token_ids: tokens that end a text.
    """

    def __init__(
        self,
        encode: Callable[[str], Sequence[int]],
        vocab_size: int,
        eos_token_ids: frozenset[int],
    ) -> None:
        self._encode = encode
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._read = lru_cache(maxsize=64)(self._encoded)

    def of(self, params: SamplingParams) -> BadWords | None:
        """Return the bad words of a request, or None; from any thread. O(words), often O(1).

        Raises:
            InvalidArgumentError: they have no tokens, too many, some that the model does not have,
                or could bar every token there is.
        """
        if not params.bad_words:
            return None
        made = self._read(params.bad_words)
        barred = set(made.last_tokens)
        if params.min_tokens:
            barred.update(params.stop_token_ids, self._eos_token_ids)
        if len(barred) >= self._vocab_size:
            wanted = (
                f"fewer of them: the model has {self._vocab_size} tokens, and all may be barred"
            )
            raise InvalidSettingError("bad_words", wanted, params.bad_words)
        return made

    def _encoded(self, words: Iterable[str]) -> BadWords:
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            for lead in ("", " "):
                form = tuple(self._encode(lead + word.lstrip()))
                if not form:
                    raise InvalidSettingError("bad_words", "words that have tokens", word)
                found[form] = None
        count = sum(map(len, found))
        if count > MAX_TOKENS:
            wanted = f"at most {MAX_TOKENS} tokens, with and without a space before each word"
            raise InvalidSettingError("bad_words", wanted, count)
        if max(map(max, found)) >= self._vocab_size:
            raise InvalidArgumentError(
                f"bad_words: wanted words of token ids below {self._vocab_size}, "
                f"got {max(map(max, found))}"
            )
        return BadWords(found)
