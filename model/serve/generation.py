"""From a request to its answer, whole or as a stream of events.

Decides: what happens where a client goes away: a task watches the connection and closes the stream
of tokens at once, whatever the answer waits for. An error before the first piece is an answer of
its own; one after it is an event, because the status has been sent.

Invariants: however an answer ends, nothing of its request is left in the engine.

Does not know: what an answer looks like (`completions.py`, `chat.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from fastapi import Request, Response
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from model.control.request import FinishReason
from model.control.submission import Submission
from model.errors import ModelError
from model.serve.errors import ApiError, api_error
from model.serve.protocol import PromptTokensDetails, Usage
from model.serve.service import Served
from model.token_stream import Delta, TokenStream

quoted = json.JSONEncoder().encode
"""A text as JSON, in ASCII."""

CLIENT_GONE = 499
"""The status in the access log of an answer that nobody waited for, as nginx has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a request asks.

    Attributes:
        submissions: of the engine.
        streams: whether pieces are sent as they come.
        names: the request's names for what the runner calls otherwise.
    """

    submissions: Sequence[Submission]
    streams: bool
    names: dict[str, str]


class Form(Protocol):
    """How one answer is written."""

    def begin(self) -> str:
        """The events before the first token."""
        ...

    def piece(self, delta: Delta) -> str:
        """The event of a piece; empty if there is nothing to tell."""
        ...

    def end(self, stream: TokenStream) -> str:
        """The events after the last."""
        ...

    def whole(self, deltas: Sequence[Delta], stream: TokenStream) -> BaseModel:
        """The whole answer."""
        ...


def usage(stream: TokenStream) -> Usage:
    """The counts of a stream's tokens. O(samples)."""
    prompt, output = stream.num_prompt_tokens, stream.num_output_tokens
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=output,
        total_tokens=prompt + output,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=stream.num_cached_tokens),
    )


class EventForm:
    """What every answer has: its head, which each of its events repeats, and usage at the end.

    An event is spelled by hand, so that what is the same in all events of a stream is made once; it
    is the JSON that its model would give, in ASCII, because some readers end lines where Unicode
    does.

    Args:
        head: the fields that a whole answer begins with.
        kind: the name of an event's object.
        includes_usage: whether a last event tells it; the others have null for it then.
    """

    def __init__(self, head: dict[str, object], kind: str, *, includes_usage: bool) -> None:
        self._head = head
        self._begin = f'data: {quoted({**head, "object": kind})[:-1]}, "choices":['
        self._end = "]" + (',"usage":null' if includes_usage else "") + "}\n\n"
        self._includes_usage = includes_usage

    def end(self, stream: TokenStream) -> str:
        """The event that tells the usage, where it was asked for. O(samples)."""
        if not self._includes_usage:
            return ""
        return f'{self._begin}],"usage":{usage(stream).model_dump_json()}}}\n\n'


def reason_name(delta: Delta) -> str | None:
    """What OpenAI calls the reason why a sample has ended.

    Raises:
        ApiError: it ended because of an error.
    """
    reason = delta.finish_reason
    if reason is FinishReason.ERROR:
        raise ApiError(
            500, "the model's logits are no numbers for this prompt", code="numerical_error"
        )
    return None if reason is None else reason.value


async def answer(request: Request, engine: Served, asked: Asked, form: Form) -> Response:
    """Answer a request.

    Raises:
        ApiError: it is refused, or fails before anything was sent.
    """
    try:
        stream = await engine.submit(*asked.submissions)
    except ModelError as error:
        raise api_error(error, asked.names) from error
    if asked.streams:
        return _EventStream(stream, form)
    async with stream, _watching(request.receive, stream) as watcher:
        try:
            deltas = await stream.whole()
        except ModelError as error:
            if watcher.done():
                return Response(status_code=CLIENT_GONE)
            raise api_error(error, asked.names) from error
        _note(request.scope, stream)
        return Response(form.whole(deltas, stream).model_dump_json(), media_type="application/json")


class _EventStream(Response):
    """Server-sent events of a stream of tokens."""

    media_type = "text/event-stream"

    def __init__(self, stream: TokenStream, form: Form) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._stream = stream
        self._form = form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._stream as stream, _watching(receive, stream):
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            # Once for each piece: so not through all that stands between the server and this, of
            # which each only looks at how an answer starts, nor resumed through all of it.
            send_on = scope.get("state", {}).get("send", send)
            await asyncio.create_task(self._send_events(send_on))
            _note(scope, stream)

    async def _send_events(self, send: Send) -> None:
        """All that has come since the last piece goes together; the end with the last of it."""
        form, stream = self._form, self._stream
        events, goes_on = form.begin(), True
        while goes_on:
            try:
                for delta in await stream.news():
                    events += form.piece(delta)
                goes_on = not stream.is_over
                if not goes_on:
                    events += form.end(stream)
            except (ModelError, ApiError) as error:
                events += f"data: {quoted(api_error(error).body)}\n\n"
                goes_on = False
            if not goes_on:
                events += "data: [DONE]\n\n"
            if events:
                body = events.encode()
                await send({"type": "http.response.body", "body": body, "more_body": goes_on})
                events = ""


@contextlib.asynccontextmanager
async def _watching(receive: Receive, stream: TokenStream) -> AsyncIterator[asyncio.Task[None]]:
    """Close a stream as soon as its client has gone away."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        stream.close()

    watcher = asyncio.create_task(watch())
    try:
        yield watcher
    finally:
        watcher.cancel()


def _note(scope: Scope, stream: TokenStream) -> None:
    """Leave the counts for the access log."""
    counts = scope.setdefault("state", {})
    counts["prompt_tokens"] = stream.num_prompt_tokens
    counts["cached_tokens"] = stream.num_cached_tokens
    counts["completion_tokens"] = stream.num_output_tokens
