"""From a request to its answer, whole or as a stream of events.

Decides: what happens where a client goes away: a task watches the connection and closes the stream
of tokens at once, whatever the answer waits for. An error before the first piece is an answer of
its own; one after it is an event, because the status has been sent. A large answer is written in
parts, between which others have their turn on the event loop.

Invariants: however an answer ends, nothing of its request is left in the engine.

Does not know: what an answer looks like (`completions.py`, `chat.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from model.async_engine import EngineFaultError
from model.control.request import FinishReason
from model.control.submission import Submission
from model.errors import ModelError
from model.serve.answers import CompletionTokensDetails, PromptTokensDetails, Usage
from model.serve.errors import CLIENT_GONE, ApiError, api_error
from model.serve.gate import client_of
from model.serve.logprobs import ENTRY_BYTES, LogprobsWriter, num_entries, quoted
from model.serve.protocol import GenerationRequest
from model.serve.reading import Part
from model.serve.reasoning import CountingReader
from model.serve.service import Service
from model.token_stream import Delta, TokenStream

_TURN_CHARACTERS = 32_768
"""What is written of an answer before others have a turn on the event loop."""

_DONE = "data: [DONE]\n\n"


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

    def begin(self, stream: TokenStream) -> str:
        """The events before the first token."""
        ...

    def piece(self, delta: Delta, stream: TokenStream) -> Iterable[str]:
        """The event of a piece, in parts; none if there is nothing to tell."""
        ...

    def end(self, stream: TokenStream) -> str:
        """The events after the last."""
        ...

    def failed(self, error: ApiError) -> str:
        """The events after an error, in place of those of the end."""
        ...

    def whole(self, deltas: Sequence[Delta], stream: TokenStream) -> Iterator[str]:
        """The whole answer, in parts."""
        ...


def usage(stream: TokenStream, num_reasoning_tokens: int = 0) -> Usage:
    """The counts of a stream's tokens. O(samples)."""
    prompt, output = stream.num_prompt_tokens, stream.num_output_tokens
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=output,
        total_tokens=prompt + output,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=stream.num_cached_tokens),
        completion_tokens_details=CompletionTokensDetails(reasoning_tokens=num_reasoning_tokens),
    )


def num_reasoning_tokens(
    readers: Sequence[CountingReader], stream: TokenStream, service: Service
) -> int:
    """Return how many of a stream's tokens are reasoning. O(tokens) if any is."""
    decode = service.engine.engine.model.codec.decode
    return sum(
        reader.num_tokens(
            partial(decode, skip_special_tokens=sample.request.params.skip_special_tokens),
            [token.token_id for token in sample.tokens],
        )
        for reader, sample in zip(readers, stream.samples, strict=False)
        if reader.has_reasoning
    )


def with_warning(response: Response, asked: GenerationRequest) -> Response:
    """An answer whose header names what of its request was ignored or left out. O(names)."""
    told = [f'299 - "{why}: {", ".join(names)}"' for why, names in asked.warnings.items()]
    if told:
        response.headers["Warning"] = ", ".join(told)
    return response


class EventForm:
    """What every answer has: its head, which each of its events repeats, and usage.

    Answers and events are spelled by hand, so that what is the same in all events of a stream is
    made once and a large answer is made in parts; they are the JSON that their models would give,
    in ASCII, because some readers end lines where Unicode does.

    Args:
        body: what was asked.
        service: who is asked.
        head: the fields that answers and events begin with.
        kinds: the name of an answer's object, and of an event's.
    """

    def __init__(
        self,
        body: GenerationRequest,
        service: Service,
        head: dict[str, object],
        kinds: tuple[str, str],
    ) -> None:
        answer, event = (quoted({**head, "object": kind})[:-1] for kind in kinds)
        self._begin_whole = f'{answer}, "choices":['
        self._begin = f'data: {event}, "choices":['
        self._includes_usage = body.includes_usage
        self._repeats_usage = body.repeats_usage
        self._tells_ids = bool(body.return_token_ids)
        self._scores_prompt = body.prompt_logprobs is not None
        self._writer = LogprobsWriter(service.engine.engine.model.codec)
        self._num_told: dict[int, int] = {}  # tokens of each sample so far

    def end(self, stream: TokenStream) -> str:
        """The event that tells the usage, where it was asked for, and the last one. O(samples)."""
        if not self._includes_usage:
            return _DONE
        return f'{self._begin}],"usage":{self._usage(stream).model_dump_json()}}}\n\n{_DONE}'

    def failed(self, error: ApiError) -> str:
        """The event of an error, and the last one. O(message)."""
        return f"data: {quoted(error.body)}\n\n{_DONE}"

    def _usage(self, stream: TokenStream) -> Usage:
        """The counts that are told. O(samples)."""
        return usage(stream)

    def _end(self, stream: TokenStream, delta: Delta) -> str:
        """The end of an event about a piece. O(1).

        Its usage is what vLLM tells: the tokens of that sample and of its own prompt.
        """
        if not self._repeats_usage:
            return "]{}}}\n\n".format(',"usage":null' if self._includes_usage else "")
        sample = delta.sample
        count = self._num_told[sample] = self._num_told.get(sample, 0) + len(delta.tokens)
        prompt = stream.samples[sample].request.num_prompt_tokens
        return (
            f'],"usage":{{"prompt_tokens":{prompt},"completion_tokens":{count},'
            f'"total_tokens":{prompt + count}}}}}\n\n'
        )

    def _ids(self, delta: Delta) -> str:
        """The field of a piece's token ids, where they were asked for. O(tokens)."""
        if not self._tells_ids:
            return ""
        return f',"token_ids":{quoted([token.token_id for token in delta.tokens])}'

    def _prompt_ids(self, stream: TokenStream, sample: int) -> str:
        """Likewise, of the tokens of its prompt. O(prompt)."""
        if not self._tells_ids:
            return ""
        return f',"prompt_token_ids":{quoted(stream.samples[sample].request.prompt_tokens)}'

    def _of_prompt(self, stream: TokenStream, sample: int) -> Iterator[str]:
        """All fields that tell of a prompt, in parts. O(prompt)."""
        yield self._prompt_ids(stream, sample)
        if self._scores_prompt:
            yield ',"prompt_logprobs":'
            yield from self._writer.of_prompt(stream.samples[sample].request.prompt_logprobs)

    def _whole(
        self,
        choices: Iterable[Iterator[str]],
        stream: TokenStream,
        beside: Iterable[str] = (),
    ) -> Iterator[str]:
        """An answer of these choices, and of fields beside them, in parts."""
        yield self._begin_whole
        for number, choice in enumerate(choices):
            if number:
                yield ","
            yield from choice
        yield "]"
        yield from beside
        yield f',"usage":{self._usage(stream).model_dump_json()}}}'


def reason_json(delta: Delta) -> str:
    """What OpenAI calls the reason why a sample has ended, as JSON; null: it has not.

    Raises:
        ModelError: it ended because of an error.
    """
    reason = delta.finish_reason
    if reason is None:
        return "null"
    if reason is FinishReason.ERROR:
        raise delta.error or EngineFaultError("engine: it failed while it computed this request")
    return quoted(reason.value)


def read(reader: CountingReader, delta: Delta) -> tuple[list[Part], str]:
    """What is new in an answer, and why it has ended, as JSON; null: it has not. O(text).

    Raises:
        ModelError: it ended because of an error.
    """
    reason = reason_json(delta)
    parts = reader.read(delta.text, is_last=delta.finish_reason is not None)
    if delta.finish_reason is FinishReason.STOP and reader.num_calls:
        reason = '"tool_calls"'
    return parts, reason


async def answer(request: Request, service: Service, asked: Asked, form: Form) -> Response:
    """Answer a request.

    Raises:
        ApiError: it is refused, or fails before anything was sent.
    """
    _check_logprobs(asked, service)
    submissions = [
        replace(one, client=_client_of(request, service, one.client)) for one in asked.submissions
    ]
    try:
        stream = await _submitted(request, service, submissions)
    except ModelError as error:
        raise api_error(error, asked.names) from error
    if stream is None:
        return Response(status_code=CLIENT_GONE)
    if asked.streams:
        return _EventStream(stream, form, asked.names)
    async with stream, _watching(request.receive, stream) as watcher:
        try:
            stream.on_first_token = request.scope.get("state", {}).get("first_token")
            deltas = await stream.whole()
            for delta in deltas:
                reason_json(delta)  # an error is told before anything is written
        except ModelError as error:
            if watcher.done():
                return Response(status_code=CLIENT_GONE)
            raise api_error(error, asked.names) from error
        _note(request.scope, stream)
        parts = _in_turns(form.whole(deltas, stream))
        first, second = await anext(parts), await anext(parts, b"")
        if not second:
            return Response(first, media_type="application/json")
        return StreamingResponse(_chained(first, second, parts), media_type="application/json")


def _client_of(request: Request, service: Service, user: str | None) -> str | None:
    """Return the client of a request, for the order of the scheduler; None: unknown. O(1)."""
    config = service.config
    if len(config.api_keys) <= 1 and config.client_by == "user" and user is not None:
        return f"user {user}"
    return client_of(request.scope, request.headers, config)


async def _submitted(
    request: Request, service: Service, asked: Sequence[Submission]
) -> TokenStream | None:
    """What comes of a request; None: its client went away while its grammars were compiled."""
    if all(each.params.grammar is None for each in asked):
        return await service.engine.submit(*asked)
    submitting = asyncio.ensure_future(service.engine.submit(*asked))
    gone = asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait((submitting, gone), return_when=asyncio.FIRST_COMPLETED)
        return await submitting if submitting.done() else None
    finally:
        gone.cancel()
        submitting.cancel()


def _check_logprobs(asked: Asked, service: Service) -> None:
    """Refuse a request whose log-probabilities may take too much memory. O(submissions)."""
    limit, longest = service.config.max_logprobs_bytes, service.serving().max_model_len
    count = sum([num_entries(each, longest) for each in asked.submissions])
    if count * ENTRY_BYTES > limit:
        name = asked.names.get("logprobs", "logprobs")
        raise ApiError(
            400,
            f"{name}: this answer may need {count * ENTRY_BYTES} bytes for log-probabilities, and "
            f"the server allows {limit} (--max-logprobs-bytes); ask for fewer of them or a smaller "
            "max_tokens",
            param=name,
        )


async def _in_turns(parts: Iterable[str]) -> AsyncIterator[bytes]:
    """Parts of an answer, joined as far as one turn of the loop goes; none is empty."""
    held: list[str] = []
    size = 0
    for part in parts:
        held.append(part)
        size += len(part)
        if size >= _TURN_CHARACTERS:
            yield "".join(held).encode()
            held, size = [], 0
            await asyncio.sleep(0)
    if size:
        yield "".join(held).encode()


async def _chained(
    first: bytes, second: bytes, others: AsyncIterator[bytes]
) -> AsyncIterator[bytes]:
    yield first
    yield second
    async for each in others:
        yield each


class _EventStream(Response):
    """Server-sent events of a stream of tokens."""

    media_type = "text/event-stream"

    def __init__(self, stream: TokenStream, form: Form, names: Mapping[str, str]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._stream = stream
        self._form = form
        self._names = names

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
        """All that has come since the last piece goes together; the end with the last of it.

        A piece that is large goes in several parts, between which others have their turn.
        """
        form, stream = self._form, self._stream
        events, size, goes_on = [form.begin(stream)], 0, True
        while goes_on:
            try:
                for delta in await stream.news():
                    for part in form.piece(delta, stream):
                        events.append(part)
                        size += len(part)
                        if size >= _TURN_CHARACTERS:
                            await _send_body(send, events, goes_on=True)
                            events, size = [], 0
                            await asyncio.sleep(0)
                goes_on = not stream.is_over
                if not goes_on:
                    events.append(form.end(stream))
            except (ModelError, ApiError) as error:
                events.append(form.failed(api_error(error, self._names)))
                goes_on = False
            await _send_body(send, events, goes_on=goes_on)
            events, size = [], 0


async def _send_body(send: Send, parts: Sequence[str], *, goes_on: bool) -> None:
    body = "".join(parts).encode()
    if body:
        await send({"type": "http.response.body", "body": body, "more_body": goes_on})


@contextlib.asynccontextmanager
async def _watching(receive: Receive, stream: TokenStream) -> AsyncIterator[asyncio.Task[None]]:
    """Close a stream as soon as its client has gone away."""

    async def watch() -> None:
        await _gone(receive)
        stream.close()

    watcher = asyncio.create_task(watch())
    try:
        yield watcher
    finally:
        watcher.cancel()


async def _gone(receive: Receive) -> None:
    """Wait until a client has gone away."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _note(scope: Scope, stream: TokenStream) -> None:
    """Leave the counts for the access log."""
    counts = scope.setdefault("state", {})
    counts["prompt_tokens"] = stream.num_prompt_tokens
    counts["cached_tokens"] = stream.num_cached_tokens
    counts["completion_tokens"] = stream.num_output_tokens
