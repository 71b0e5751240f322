"""`/v1/chat/completions`: conversations to the assistant's next message.

Decides: that a conversation becomes a prompt by the model's own chat template, or by the plain one
of `loader.py` where it has none; and that without a limit an answer may be as long as the model
allows.

Does not know: how tokens come about, how an answer is sent (`generation.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request, Response

from model.errors import InvalidArgumentError
from model.serve.answers import ChatCompletion, Usage
from model.serve.errors import ApiError, api_error
from model.serve.generation import (
    Asked,
    EventForm,
    Form,
    answer,
    num_reasoning_tokens,
    read,
    usage,
    with_warning,
)
from model.serve.large_bodies import LargeBodyRoute
from model.serve.logprobs import quoted
from model.serve.protocol import ChatRequest
from model.serve.reading import Form as ReadingForm
from model.serve.reading import Part
from model.serve.reasoning import CountingReader
from model.serve.service import Service
from model.token_stream import Delta, TokenStream


class _Messages(EventForm):
    """How the assistant's messages are written."""

    def __init__(
        self, body: ChatRequest, service: Service, readers: Sequence[CountingReader]
    ) -> None:
        head = {
            "id": service.new_id("chatcmpl"), "created": service.now(),
            "model": body.model or service.name,
        }  # fmt: skip
        super().__init__(body, service, head, ("chat.completion", "chat.completion.chunk"))
        self._readers = readers
        self._service = service
        self._tells_logprobs = bool(body.logprobs)

    def begin(self, stream: TokenStream) -> str:
        said = '"delta":{"role":"assistant","content":""}'
        firsts = [Delta(number, "", (), None) for number in range(len(stream.samples))]
        prompt = self._prompt_ids(stream, 0)
        return "".join(
            f"{self._begin}{self._plain(each, said, 'null', '')}]{prompt}"
            f"{self._end(stream, each).removeprefix(']')}"
            for each in firsts
        )

    def piece(self, delta: Delta, stream: TokenStream) -> Iterable[str]:
        parts, reason = read(self._readers[delta.sample], delta)
        said = [f'"delta":{_delta(part)}' for part in parts]
        tells_tokens = self._tells_logprobs or self._tells_ids
        if not said and (tells_tokens or delta.finish_reason is not None):
            said = ['"delta":{}']
        last = len(said) - 1
        for number, one in enumerate(said):
            ending = reason if number == last else "null"
            if tells_tokens:
                yield self._begin
                yield from self._choice(delta, one, ending)
                yield self._end(stream, delta)
            else:
                choice = self._plain(delta, one, ending, "")
                yield f"{self._begin}{choice}{self._end(stream, delta)}"
            if number < last:
                delta = delta._replace(tokens=())  # they were told with the first part

    def whole(self, deltas: Sequence[Delta], stream: TokenStream) -> Iterator[str]:
        choices = (
            self._choice(each, f'"message":{quoted(_message(parts))}', reason)
            for each in deltas
            for parts, reason in (read(self._readers[each.sample], each),)
        )
        return self._whole(choices, stream, self._of_prompt(stream, 0))

    def _usage(self, stream: TokenStream) -> Usage:
        return usage(stream, num_reasoning_tokens(self._readers, stream, self._service))

    @staticmethod
    def _plain(delta: Delta, said: str, reason: str, ids: str) -> str:
        """A choice without log-probabilities."""
        return f'{{"index":{delta.sample},{said},"logprobs":null,"finish_reason":{reason}{ids}}}'

    def _choice(self, delta: Delta, said: str, reason: str) -> Iterator[str]:
        ids = self._ids(delta)
        if not self._tells_logprobs:
            yield self._plain(delta, said, reason, ids)
            return
        yield f'{{"index":{delta.sample},{said},"finish_reason":{reason}{ids},"logprobs":'
        yield from self._writer.of_chat(delta.tokens)
        yield "}"


def _delta(part: Part) -> str:
    """A part as an event tells it, as JSON."""
    match part.kind:
        case "content":
            return f'{{"content":{quoted(part.text)}}}'
        case "reasoning":
            return f'{{"reasoning_content":{quoted(part.text)}}}'
        case "call":
            function = {"name": part.text, "arguments": ""}
            begun = {"id": part.call_id, "type": "function", "function": function}
            return quoted({"tool_calls": [{"index": part.number, **begun}]})
    piece = {"index": part.number, "function": {"arguments": part.text}}
    return quoted({"tool_calls": [piece]})


def _message(parts: Iterable[Part]) -> dict[str, object]:
    """All parts of an answer as one message."""
    told = {"reasoning": "", "content": ""}
    calls: list[dict[str, Any]] = []
    for part in parts:
        if part.kind == "call":
            function = {"name": part.text, "arguments": ""}
            calls.append({"id": part.call_id, "type": "function", "function": function})
        elif part.kind == "arguments":
            calls[-1]["function"]["arguments"] += part.text
        else:
            told[part.kind] += part.text
    message: dict[str, object] = {"role": "assistant", "content": told["content"]}
    if told["reasoning"]:
        message["reasoning_content"] = told["reasoning"]
    if calls:
        message["content"] = told["content"] or None
        message["tool_calls"] = calls
    return message


async def converse(
    service: Service,
    body: ChatRequest,
    request: Request,
    form: Callable[[ChatRequest, Service, Sequence[CountingReader]], Form] = _Messages,
    fields: Mapping[str, str] | None = None,
    *,
    is_cut: bool = False,
) -> Response:
    """Answer a conversation.

    Args:
        service: answers.
        body: what was asked.
        request: it, as it came.
        form: makes what writes the answer.
        fields: what the request calls fields of `body`, where it has other names for them.
        is_cut: whether the most tokens of the answer are cut to what the model's length allows.

    Raises:
        ApiError: it is refused, or fails before anything was sent.
    """
    try:
        return await _converse(service, body, request, form, fields or {}, is_cut=is_cut)
    except ApiError as error:
        raise error.renamed(fields or {}) from error


async def _converse(
    service: Service,
    body: ChatRequest,
    request: Request,
    form: Callable[[ChatRequest, Service, Sequence[CountingReader]], Form],
    fields: Mapping[str, str],
    *,
    is_cut: bool,
) -> Response:
    body.check(is_strict=service.config.strict_fields)
    service.check_model(body.model)
    service.serving()
    prompt, images = await service.read_chat(body.messages, body)
    max_tokens, name = body.max_completion_tokens, "max_completion_tokens"
    if max_tokens is None:
        max_tokens, name = body.max_tokens, "max_tokens"
    room = max(1, service.engine.engine.max_model_len - len(prompt))
    if max_tokens is None:
        default = service.sampling_defaults.get("max_tokens")
        max_tokens = min(room, default) if isinstance(default, int) else room
    elif is_cut:
        max_tokens = min(room, max_tokens)
    names = {
        "prompt": "messages",
        "max_tokens": name,
        "logprobs": "top_logprobs",
        "grammar": body.grammar_field,
    }
    names = {**fields, **{runners: fields.get(own, own) for runners, own in names.items()}}
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs: wanted with logprobs alone", param="top_logprobs")
    read_as = _reading_form(service, body, await service.begun_answer(body.messages, body))
    try:
        params = body.sampling(
            service.sampling_defaults,
            max_tokens,
            (body.top_logprobs or 0) if body.logprobs else None,
        )
    except InvalidArgumentError as error:
        raise api_error(error, names) from error
    if params.grammar is not None and read_as.reasoning is not None:
        params = replace(params, grammar=params.grammar.behind(*read_as.reasoning))
    if service.reading.has_special_tags and not body.must_call:
        params = replace(params, skip_special_tokens=False)
    turns = await service.turns(body.messages, prompt, body)
    submission = body.submission(prompt, params, service.adapter(body.model))
    asked = Asked(
        submissions=[replace(submission, boundaries=turns, images=images)],
        streams=bool(body.stream),
        names=names,
    )
    readers = [
        CountingReader(service.reading.open(read_as, service.new_call_id)) for _ in range(params.n)
    ]
    response = await answer(request, service, asked, form(body, service, readers))
    return with_warning(response, body)


def _reading_form(service: Service, body: ChatRequest, prompt: Sequence[int]) -> ReadingForm:
    """How the answer of a request is read."""
    num_earlier = sum(len(message.tool_calls or ()) for message in body.messages)
    if body.must_call:
        return service.reading.demanded(prompt, body.chosen, num_earlier=num_earlier)
    tools: list[dict[str, object]] = []
    if body.may_call:
        tools = [tool.model_dump() for tool in body.tools or ()]
    said = body.messages[-1].said if body.continue_final_message else None
    return service.reading.free(
        prompt,
        tools,
        1 if body.parallel_tool_calls is False else None,
        num_earlier=num_earlier,
        is_guided=body.grammar_field != "",
        continued=said if isinstance(said, str) else None,
    )


def chat(service: Service) -> APIRouter:
    """The routes. O(1)."""
    router = APIRouter(route_class=LargeBodyRoute)

    @router.post("/v1/chat/completions", response_model=ChatCompletion)
    async def talk(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        return await converse(service, body, request)

    return router
