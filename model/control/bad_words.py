"""Bad words: sequences of tokens that an output must not have.

A sequence is kept out by barring its last token wherever the output ends with the others, as vLLM
does. Only the output counts: a word that begins in the prompt is not seen.

Invariants: what is barred depends on the last tokens of the output alone.

Does not know: logits, tokenizers.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Self

from model.errors import InvalidSettingError

if TYPE_CHECKING:  # torch is not loaded for it
    from model.load.codec import TextCodec

MAX_TOKENS = 1024
"""Of all bad words of a request together, as in vLLM."""


class BadWords:
    """The sequences that one request must not generate.

    Args:
        sequences: of token ids, none empty.

    Attributes:
        always: tokens that are sequences of their own: barred everywhere.
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

    @classmethod
    def of(cls, codec: "TextCodec", words: Iterable[str]) -> Self:
        """Words as token ids, each with and without a space before it. O(words).

        vLLM leaves out the form with a space where it has another number of tokens, and so lets the
        word pass there.

        Raises:
            InvalidSettingError: they have too many tokens, or none.
        """
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            for lead in ("", " "):
                form = tuple(codec.encode(lead + word.lstrip(), adds_special_tokens=False))
                if not form:
                    raise InvalidSettingError("bad_words", "words that have tokens", word)
                found[form] = None
        count = sum(map(len, found))
        if count > MAX_TOKENS:
            wanted = f"at most {MAX_TOKENS} tokens, with and without a space before each word"
            raise InvalidSettingError("bad_words", wanted, count)
        return cls(found)

    @property
    def has_longer(self) -> bool:
        """Whether any has more than one token. O(1)."""
        return bool(self._after)

    @property
    def last_tokens(self) -> frozenset[int]:
        """Every token that may be barred. O(sequences)."""
        return frozenset(self._last)

    def after(self, output: Sequence[int], newest: int | None = None) -> list[int]:
        """The tokens that would end a sequence of several. O(sequences), mostly O(1).

        Args:
            output: its tokens so far.
            newest: the token behind them; None: there is none.
        """
        tail = (*output[-self._longest :], *(() if newest is None else (newest,)))
        if not tail:
            return []
        near = self._after.get(tail[-1], ())
        return [last for before, last in near if tail[-len(before) :] == before]
