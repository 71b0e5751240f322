"""How likely tokens were, as OpenAI's clients read it: JSON, a piece at a time.

Decides: what a token is called: its own text. A token that is a part of a character has no text of
its own, but bytes; one that is special has an empty text. And how many entries are
written at once: 256 answers of 200 tokens have a million, which is seconds of the event loop.

Does not know: how the numbers came about, how an answer is sent.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from model.control.request import SampledToken
from model.control.submission import Submission

if TYPE_CHECKING:  # it loads Transformers
    from model.load.codec import TextCodec

ENTRY_BYTES = 128
"""What an entry takes in memory until its answer is sent: two numbers in a tuple."""

PIECE_ENTRIES = 1024
"""Entries that are written at once, a few milliseconds' worth."""

_BROKEN = "\ufffd"
_Item = TypeVar("_Item")
quoted = json.JSONEncoder().encode
"""A text as JSON, in ASCII."""


def num_entries(asked: Submission, max_model_len: int) -> int:
    """The most log-probabilities that an answer may have. O(1)."""
    params, count = asked.params, 0
    if params.logprobs is not None:
        num_tokens = params.n * min(params.max_tokens, max_model_len)
        count = num_tokens * (1 + params.logprobs)
    if params.prompt_logprobs is not None:  # a token has at least one character, but for a few
        num_tokens = min(len(asked.prompt) + 8, max_model_len)
        count += num_tokens * (1 + params.prompt_logprobs)
    return count


class LogprobsWriter:
    """Writes the log-probabilities of one request.

    Args:
        codec: tokens to text and to bytes.
    """

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._texts: dict[int, str] = {}
        self._named: dict[int, tuple[str, str]] = {}

    def of_chat(self, tokens: Sequence[SampledToken]) -> Iterator[str]:
        """The `logprobs` of a chat's choice. O(tokens * tops)."""
        yield '{"content":'
        yield from _listed(tokens, self._of_chat, _per_piece(tokens))
        yield "}"

    def of_completion(self, tokens: Sequence[SampledToken], offset: int) -> Iterator[str]:
        """The `logprobs` of a completion's choice. O(tokens * tops).

        Args:
            tokens: of one answer, one after the other.
            offset: characters of the answer before them.
        """
        yield '{"tokens":'
        yield from _listed(tokens, lambda token: quoted(self._text(token.token_id)), PIECE_ENTRIES)
        yield ',"token_logprobs":'
        yield from _listed(tokens, lambda token: _number(token.logprob), PIECE_ENTRIES)
        yield ',"top_logprobs":'
        yield from _listed(tokens, self._tops, _per_piece(tokens))
        yield ',"text_offset":'
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(self._text(token.token_id))
        yield from _listed(offsets, str, PIECE_ENTRIES)
        yield "}"

    def of_prompt(self, tokens: Sequence[SampledToken]) -> Iterator[str]:
        """The `prompt_logprobs` of a request, as vLLM has them. O(tokens * tops).

        Args:
            tokens: of the prompt, without the first, which has no probability.
        """
        yield "[null"
        size = _per_piece(tokens)
        for begin in range(0, len(tokens), size):
            yield "".join([f",{self._ranked(one)}" for one in tokens[begin : begin + size]])
        yield "]"

    def _ranked(self, token: SampledToken) -> str:
        tops = [(*top, str(rank)) for rank, top in enumerate(token.top_logprobs, 1)]
        own = (token.token_id, token.logprob, "null")
        own = next((top for top in tops if top[0] == token.token_id), own)
        told = [own, *[top for top in tops if top[0] != token.token_id]]
        entries = [
            f'"{number}":{{"logprob":{_number(logprob)},"rank":{rank},'
            f'"decoded_token":{quoted(self._text(number))}}}'
            for number, logprob, rank in told
        ]
        return f"{{{','.join(entries)}}}"

    def length(self, tokens: Sequence[SampledToken]) -> int:
        """Characters of the tokens' own texts. O(tokens)."""
        return sum([len(self._text(token.token_id)) for token in tokens])

    def _of_chat(self, token: SampledToken) -> str:
        tops = ",".join([self._entry(*top) + "}" for top in token.top_logprobs])
        return f'{self._entry(token.token_id, token.logprob or 0.0)},"top_logprobs":[{tops}]}}'

    def _entry(self, token_id: int, logprob: float) -> str:
        named = self._named.get(token_id)
        if named is None:
            text = self._text(token_id)
            known = self._codec.token_bytes(token_id) if _BROKEN in text else None
            own = list(text.encode() if known is None else known)
            named = (f'{{"token":{quoted(text)},"logprob":', f',"bytes":{json.dumps(own)}')
            self._named[token_id] = named
        return f"{named[0]}{_number(logprob)}{named[1]}"

    def _tops(self, token: SampledToken) -> str:
        if token.logprob is None:  # the first of a prompt
            return "null"
        told: dict[str, float] = {}
        for number, logprob in token.top_logprobs:
            told.setdefault(self._text(number), logprob)  # two may have one text: the likelier
        return "{" + ",".join([f"{quoted(t)}:{_number(value)}" for t, value in told.items()]) + "}"

    def _text(self, token_id: int) -> str:
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self._codec.decode([token_id])
        return text


def _per_piece(tokens: Sequence[SampledToken]) -> int:
    """How many of these tokens have the entries of a piece."""
    return max(1, PIECE_ENTRIES // (1 + len(tokens[0].top_logprobs))) if tokens else 1


def _listed(items: Sequence[_Item], write: Callable[[_Item], str], per_piece: int) -> Iterator[str]:
    """A list as JSON, in pieces of a number of items."""
    yield "["
    for begin in range(0, len(items), per_piece):
        some = ",".join([write(item) for item in items[begin : begin + per_piece]])
        yield f",{some}" if begin else some
    yield "]"


def _number(value: float | None) -> str:
    """A number as JSON; null where it is none."""
    return "null" if value is None or not math.isfinite(value) else repr(value)
