"""Detokenizes a text piece by piece.

Decides: when a piece of text is final: a character whose bytes are in several tokens is held back
until it is complete, and text that may start a stop string until it cannot. And when tokens are
decoded: when the text is taken, all new ones at once; with stop strings immediately, because they
may end a request.

For a tokenizer of the library `tokenizers`, its `DecodeStream` decodes, in a fifth of the time of
decoding again from one piece back. The latter remains for other tokenizers, for a text that ends
inside a character, and for a text that the stream fails on because its tokens are no text (invalid
bytes, for a decoder that looks at all of them together).

Invariants: the pieces, in order, are the whole text; without a stop string that equals decoding all
tokens at once, except for such bytes; no piece ends inside a character.

Does not know: requests, which tokenizer it is.
"""

from collections.abc import Callable, Iterator, Sequence

_INCOMPLETE = "\ufffd"
_CONTEXT_TOKENS = 8

Step = Callable[[list[int]], str | None]
"""Takes the next tokens, returns the text that they complete; None or empty: none."""


def pieces(
    decode: Callable[[Sequence[int]], str], tokens: Sequence[int], size: int
) -> Iterator[str]:
    """Yield the text of tokens, of about `size` of them at a time; joined, it is that of all.

    But for bytes that are no text. A cut is where the text before it stays as it is, whatever
    follows; each piece is decoded behind a few tokens before it, which some decoders need.
    """
    start, context = 0, tokens[:0]
    while start < len(tokens):
        stop = _cut(decode, tokens, start + size)
        known = decode(context)
        yield decode([*context, *tokens[start:stop]])[len(known) :]
        start, width = stop, _CONTEXT_TOKENS
        context = tokens[max(0, stop - width) : stop]
        while width < size and not decode(context):  # they are special tokens
            width *= 2
            context = tokens[max(0, stop - width) : stop]


def _cut(decode: Callable[[Sequence[int]], str], tokens: Sequence[int], near: int) -> int:
    """Return a place behind `near` at which a text can be cut; `near` itself if there is none."""
    for stop in range(near, near + _CONTEXT_TOKENS):
        if stop >= len(tokens):
            return len(tokens)
        before = decode(tokens[stop - _CONTEXT_TOKENS : stop])
        whole = decode(tokens[stop - _CONTEXT_TOKENS : stop + _CONTEXT_TOKENS])
        if whole.startswith(before) and not before.endswith(_INCOMPLETE):
            return stop
    return near


class TextStream:
    """The growing text of one request.

    Args:
        decode: tokens to text, without special tokens.
        stop: the text ends before the first of these that is complete.
        step: decodes one piece after another, for this text only; None: use `decode`.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stop: tuple[str, ...] = (),
        step: Step | None = None,
    ) -> None:
        self.is_stopped = False
        self.stop_string: str | None = None  # the one that has ended it
        self._decode = decode
        self._stop = stop
        self._step = step
        self._pending: list[int] = []
        self._untaken: list[str] = []
        self._held: list[int] = []  # decoded, but their text is not final
        self._context: list[int] = []  # tokens of the last piece, which some decoders need
        self._text = ""
        self._num_shown = 0

    @property
    def text(self) -> str:
        """All final text of the tokens decoded so far, taken or not. O(text)."""
        return self._text[: self._num_shown]

    def add(self, token: int) -> None:
        """Add a token. O(1); with stop strings O(held tokens), and it may set `is_stopped`."""
        self._pending.append(token)
        if self._stop:
            self._decode_pending()

    def take(self) -> str:
        """Return the text that became final since the last call, often none. O(new tokens)."""
        self._decode_pending()
        pieces, self._untaken = self._untaken, []
        return "".join(pieces)

    def close(self) -> None:
        """End the text: all held text is final, a broken character included."""
        self._decode_pending()
        if not self.is_stopped:
            self._accept(self._fresh())
            self._show(len(self._text))

    def _decode_pending(self) -> None:
        pending, self._pending = self._pending, []
        if self.is_stopped or not pending:
            return
        self._held += pending
        piece = self._piece(pending)
        if piece is not None:
            self._accept(piece)
            self._show(len(self._text) - self._num_held())

    def _piece(self, tokens: list[int]) -> str | None:
        """Return the text that the next tokens complete; None: none yet."""
        if self._step is not None:
            try:
                return self._step(tokens) or None
            except Exception:  # noqa: BLE001  # the library may raise any error
                self._step = None
        fresh = self._fresh()
        return None if fresh.endswith(_INCOMPLETE) else fresh

    def _fresh(self) -> str:
        """Return the text of the held tokens, after the piece before them."""
        known = self._decode(self._context)
        return self._decode([*self._context, *self._held])[len(known) :]

    def _accept(self, fresh: str) -> None:
        self._context = self._held if fresh else self._context + self._held
        self._held = []
        self._text += fresh
        if not self._stop:
            return
        places = ((self._text.find(stop, self._num_shown), stop) for stop in self._stop)
        found = [(place + len(stop), place, stop) for place, stop in places if place >= 0]
        if found:  # the first complete one, however the text is cut into tokens
            self.is_stopped = True
            _, place, self.stop_string = min(found)
            self._text = self._text[:place]

    def _num_held(self) -> int:
        """Return the number of characters at the end with which a stop string may start."""
        if self.is_stopped or not self._stop:
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

    def _show(self, end: int) -> None:
        self._untaken.append(self._text[self._num_shown : end])
        self._num_shown = end
