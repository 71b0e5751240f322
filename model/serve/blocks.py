"""Answers that are told as blocks: of reasoning, of text and calls of tools, one after the other.

This is what `/v1/responses` and `/v1/messages` have in common: a request that is a chat in other
words, and an answer whose stream says where each block begins and ends.

Decides: that such a request is read as a chat (`ChatRequest`), with every field of a chat that it
does not have itself, and how parts become blocks.

Does not know: what a block looks like.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import ConfigDict, PrivateAttr, ValidationError

from model.serve.answers import Usage
from model.serve.bounds import Strict
from model.serve.errors import ApiError, in_body
from model.serve.generation import num_reasoning_tokens, read, usage
from model.serve.logprobs import quoted
from model.serve.protocol import ChatRequest, ignored, refuse_unsupported
from model.serve.reading import Part
from model.serve.reasoning import CountingReader
from model.serve.service import Service
from model.token_stream import Delta, TokenStream


class OtherRequest(Strict):
    """A request that says in other words what a chat says."""

    model_config = ConfigDict(extra="allow")
    MOST_STRANGERS = 16
    UNSUPPORTED: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    """Fields that can only have these values, because nothing else is done."""

    IGNORED: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    """Fields from which nothing follows; with other values than these they are named."""

    FIELDS: ClassVar[Mapping[str, str]] = {}
    """The names of fields of a chat that have another name here."""

    _chat: ChatRequest | None = PrivateAttr(default=None)
    _left_out: list[str] = PrivateAttr(default_factory=list)

    def translated(self) -> dict[str, object]:
        """It as the fields of a chat; adds to `_left_out` what none of them has. O(messages).

        Raises:
            ApiError: it means nothing.
        """
        raise NotImplementedError

    def prepare(self) -> None:
        """Become a chat. O(messages).

        Raises:
            ApiError, RequestValidationError: as `chat` does.
        """
        self._chat = self._as_chat()

    def chat(self) -> ChatRequest:
        """It as a chat. O(messages), once.

        Raises:
            ApiError: it asks for what is not done, or means nothing.
            RequestValidationError: a field of a chat is wrong.
        """
        return self._chat or self._as_chat()

    def _as_chat(self) -> ChatRequest:
        refuse_unsupported(self, self.UNSUPPORTED)
        self._left_out.clear()
        fields = {name: value for name, value in self.translated().items() if value is not None}
        try:
            made = ChatRequest.model_validate({**(self.model_extra or {}), **fields})
        except ValidationError as error:
            raise in_body(error, self.FIELDS) from error
        made.note(ignored(self, self.IGNORED), self._left_out)
        if made.n not in {None, 1}:
            raise ApiError(400, f"n: wanted 1 here, got {made.n}", param="n")
        return made


@dataclass(slots=True)
class Block:
    """A part of an answer from its beginning to its end.

    Attributes:
        number: among those of the answer, from 0.
        kind: what it is.
        block_id: its name.
        text: of reasoning and text; of a call its arguments.
        name: of the function that is called.
        call_id: of a call.
    """

    number: int
    kind: Literal["reasoning", "content", "call"]
    block_id: str
    text: str = ""
    name: str = ""
    call_id: str = ""

    @property
    def arguments(self) -> dict[str, object] | None:
        """What a function is called with; None: the call was cut off. O(text)."""
        try:
            found = json.loads(self.text)
        except (ValueError, RecursionError):
            return None
        return found if isinstance(found, dict) else None


class BlockForm(ABC):
    """How an answer of blocks is written.

    Attributes:
        blocks: those that have begun.
    """

    KINDS: ClassVar[Mapping[str, str]] = {"reasoning": "rs", "content": "msg", "call": "fc"}
    """What the name of a block begins with, for each kind."""

    def __init__(self, service: Service, readers: Sequence[CountingReader]) -> None:
        [self._reader] = readers
        self._service = service
        self._new_id = service.new_id
        self.blocks: list[Block] = []

    @abstractmethod
    def begin(self, stream: TokenStream) -> str:
        """The events before the first block."""

    @abstractmethod
    def opened(self, block: Block) -> str:
        """The events of a block that begins."""

    @abstractmethod
    def grown(self, block: Block, text: str) -> str:
        """The event of a piece of a block."""

    @abstractmethod
    def closed(self, block: Block) -> str:
        """The events of a block that ends."""

    @abstractmethod
    def done(self, reason: str, stream: TokenStream) -> str:
        """The events after the last block, which ended for this reason of a chat."""

    @abstractmethod
    def failed(self, error: ApiError) -> str:
        """The events after an error."""

    @abstractmethod
    def answer(self, reason: str, stream: TokenStream) -> dict[str, object]:
        """The whole answer, which ended for this reason of a chat."""

    def usage(self, stream: TokenStream) -> Usage:
        """The counts of the answer's tokens. O(tokens) if some are reasoning."""
        return usage(stream, num_reasoning_tokens([self._reader], stream, self._service))

    def piece(self, delta: Delta, stream: TokenStream) -> Iterable[str]:
        """The events of a piece. O(text)."""
        parts, reason = read(self._reader, delta)
        yield from self._events(parts)
        if reason != "null":
            if self.blocks:
                yield self.closed(self.blocks[-1])
            yield self.done(json.loads(reason), stream)

    def end(self, stream: TokenStream) -> str:
        """Nothing: the last piece has told the end. O(1)."""
        del stream
        return ""

    def whole(self, deltas: Sequence[Delta], stream: TokenStream) -> Iterator[str]:
        """The whole answer. O(text)."""
        [delta] = deltas
        parts, reason = read(self._reader, delta)
        for part in parts:
            self._take(part)
        yield quoted(self.answer(json.loads(reason), stream))

    def _events(self, parts: Iterable[Part]) -> Iterator[str]:
        for part in parts:
            last = self.blocks[-1] if self.blocks else None
            block = self._take(part)
            if block is not last:
                if last is not None:
                    yield self.closed(last)
                yield self.opened(block)
            if part.kind != "call":
                yield self.grown(block, part.text)

    def _take(self, part: Part) -> Block:
        """The block that a part belongs to; it begins one if it does not go on with the last."""
        last = self.blocks[-1] if self.blocks else None
        if last is not None and part.kind != "call" and part.kind in {last.kind, "arguments"}:
            last.text += part.text
            return last
        kind: Literal["reasoning", "content", "call"]
        kind = "call" if part.kind == "arguments" else part.kind
        made = Block(len(self.blocks), kind, self._new_id(self.KINDS[kind]))
        if part.kind == "call":
            made.name, made.call_id = part.text, part.call_id
        else:
            made.text = part.text
        self.blocks.append(made)
        return made


def content_of(parts: Iterable[tuple[str, str]]) -> str | list[dict[str, object]]:
    """The content of a message of a chat: a text, or parts if some are images. O(text).

    Args:
        parts: each a text and "", or "" and the URL of an image.
    """
    told = list(parts)
    if not any(url for _, url in told):
        return "".join([text for text, _ in told])
    return [
        {"type": "image_url", "image_url": {"url": url}} if url else {"type": "text", "text": text}
        for text, url in told
    ]


def event(kind: str, told: Mapping[str, object]) -> str:
    """An event that has a name. O(its text)."""
    return f"event: {kind}\ndata: {quoted({'type': kind, **told})}\n\n"
