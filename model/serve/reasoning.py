"""The count of an answer's tokens that are reasoning.

Decides: that a token counts if any character of it is in the text of the reasoning; the marks that
begin and end it do not.

Does not know: how reasoning is found in a text (`reading.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it loads Transformers
    from model.serve.reading import Part, Reader

_CONTEXT = 4
"""Tokens that one character may take."""


class CountingReader:
    """Reads one answer, and remembers where its reasoning is.

    Args:
        reader: finds the parts of the answer.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._text = ""  # of the answer, behind the last part that was found in it
        self._begin = 0  # of that text in the answer
        self._spans: list[tuple[int, int]] = []

    @property
    def num_calls(self) -> int:
        """The number of calls that were read so far. O(1)."""
        return self._reader.num_calls

    @property
    def has_reasoning(self) -> bool:
        """True if some of the answer so far is reasoning. O(1)."""
        return bool(self._spans)

    def read(self, text: str, *, is_last: bool) -> list[Part]:
        """Return what is new with a piece of the text, as `Reader.read` does. O(text)."""
        parts = self._reader.read(text, is_last=is_last)
        self._text += text
        for part in parts:
            place = self._text.find(part.text) if part.kind in {"reasoning", "content"} else -1
            if place < 0:
                continue
            end = place + len(part.text)
            if part.kind == "reasoning":
                begin, last = self._begin + place, self._spans[-1:]
                if last and last[0][1] == begin:
                    begin = self._spans.pop()[0]
                self._spans.append((begin, self._begin + end))
            self._text, self._begin = self._text[end:], self._begin + end
        return parts

    def num_tokens(self, decode: Callable[[Sequence[int]], str], tokens: Sequence[int]) -> int:
        """Return how many tokens are reasoning. O(tokens) for each part of it.

        Args:
            decode: tokens to text, as the answer has it.
            tokens: of the answer so far.
        """
        found, stop = 0, 0
        for begin, end in self._spans:
            first = max(stop, num_reaching(decode, tokens, begin + 1) - 1)
            stop = max(first, num_reaching(decode, tokens, end))
            found += stop - first
        return found


def num_reaching(decode: Callable[[Sequence[int]], str], tokens: Sequence[int], length: int) -> int:
    """Return how many first tokens have a text of a length. O(tokens).

    A bisection that decodes only behind the tokens that are too few, and some before them, which
    some decoders need.
    """
    low, high, known = 0, len(tokens), 0
    while high - low > 1:
        middle, context = (low + high) // 2, max(0, low - _CONTEXT)
        grown = len(decode(tokens[context:middle])) - len(decode(tokens[context:low]))
        if known + grown < length:
            low, known = middle, known + grown
        else:
            high = middle
    return high
