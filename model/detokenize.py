"""Text out of tokens, piece by piece.

Decides: when a piece of text is final. A character whose bytes are spread over several tokens is
held until it is whole, and text that may be the beginning of a stop string until it is not.

Invariants: the pieces, in order, are the whole text; without a stop string that is what decoding
all tokens at once gives; no piece ends inside a character.

Does not know: requests, which tokenizer it is.
"""

from collections.abc import Callable, Sequence

_INCOMPLETE = "\ufffd"


class TextStream:
    """The growing text of one request.

    Args:
        decode: tokens to text; special tokens give none.
        stop: the text ends before the first of these that is complete.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: tuple[str, ...] = ()) -> None:
        self.is_stopped = False
        self._decode = decode
        self._stop = stop
        self._tokens: list[int] = []
        self._context = 0  # decoding starts here, one piece back: some decoders need to see it
        self._decoded = 0  # the tokens before this are in _text
        self._text = ""
        self._num_shown = 0

    @property
    def text(self) -> str:
        """All text that has been returned. O(text)."""
        return self._text[: self._num_shown]

    def push(self, token: int) -> str:
        """Add a token and return the text that became final, often none. O(tokens held)."""
        if self.is_stopped:
            return ""
        self._tokens.append(token)
        fresh = self._fresh()
        if fresh.endswith(_INCOMPLETE):
            return ""
        self._take(fresh)
        return self._show(len(self._text) - self._num_held())

    def finish(self) -> str:
        """Return the rest, a broken character included; no token follows. O(tokens held)."""
        if self.is_stopped:
            return ""
        self._take(self._fresh())
        return self._show(len(self._text))

    def _fresh(self) -> str:
        known = self._decode(self._tokens[self._context : self._decoded])
        return self._decode(self._tokens[self._context :])[len(known) :]

    def _take(self, fresh: str) -> None:
        if fresh:
            self._context = self._decoded
        self._decoded = len(self._tokens)
        self._text += fresh
        places = ((self._text.find(stop, self._num_shown), len(stop)) for stop in self._stop)
        found = [(place + size, place) for place, size in places if place >= 0]
        if found:  # the first that is complete, so that it does not matter how tokens cut the text
            self.is_stopped = True
            self._text = self._text[: min(found)[1]]

    def _num_held(self) -> int:
        """Characters at the end that a stop string may begin with."""
        if self.is_stopped:
            return 0
        pending = self._text[self._num_shown :]
        return max(
            (
                size
                for stop in self._stop
                for size in range(1, min(len(stop), len(pending) + 1))
                if pending.endswith(stop[:size])
            ),
            default=0,
        )

    def _show(self, end: int) -> str:
        piece = self._text[self._num_shown : end]
        self._num_shown = end
        return piece
