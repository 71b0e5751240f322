"""`/v1/responses`: OpenAI's newer interface, as another form of a chat, without a memory.

Decides: what of the items is what of a chat, and how an answer's items and events look. Items of
other types, such as the searches of an earlier turn, are left out and named. Nothing is stored:
`previous_response_id` is refused, and an answer says `store: false`.
https://platform.openai.com/docs/api-reference/responses

Does not know: how a chat is answered (`chat.py`), how an answer is cut into items (`blocks.py`),
which tools can be called (`flat_tools.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, get_args

from fastapi import APIRouter, Request, Response
from pydantic import PrivateAttr

from model.serve.blocks import Block, BlockForm, OtherRequest, content_of, event
from model.serve.bounds import KNOWN, OTHER, Lenient, Many, Other, Text, by_type
from model.serve.chat import converse
from model.serve.conversation import Effort
from model.serve.errors import ApiError
from model.serve.flat_tools import (
    FlatChoice,
    FlatTool,
    Offered,
    arguments_with,
    choice_of,
    function_of,
    input_of,
    offered,
)
from model.serve.large_bodies import LargeBodyRoute
from model.serve.logprobs import quoted
from model.serve.protocol import ChatRequest, JsonSchema
from model.serve.reasoning import CountingReader
from model.serve.service import Service
from model.serve.tools import Name, earlier_call
from model.token_stream import TokenStream


class Part(Lenient):
    """A piece of a message, of reasoning or of what came of a call."""

    type: Literal[
        "input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal",
        "input_image",
    ]  # fmt: skip
    text: Text = ""
    refusal: Text = ""
    image_url: Text = ""


_Parts = Text | Many[Part]


_Readable = Literal[
    "message", "reasoning", "function_call", "function_call_output", "custom_tool_call",
    "custom_tool_call_output", "local_shell_call", "local_shell_call_output",
]  # fmt: skip
"""The types of items that a model can read."""


class Item(Lenient):
    """A message, reasoning, a call, or what came of one."""

    type: _Readable = "message"
    id: str | None = None
    role: Literal["system", "developer", "user", "assistant"] = "user"
    content: _Parts | None = None
    summary: Many[Part] | None = None
    call_id: str | None = None
    name: Name | None = None
    namespace: Name | None = None
    arguments: Text = ""
    input: Text = ""
    action: dict[str, Any] | None = None
    output: _Parts = ""

    def call(self, place: str) -> dict[str, object]:
        """Return the call of an earlier answer that it is, as a chat has it. O(arguments).

        Raises:
            ApiError: it has no name, or its arguments are no JSON object; `place` names it.
        """
        if self.type == "local_shell_call":
            call_id = self.call_id or self.id
            return earlier_call(call_id, "local_shell", quoted(self.action or {}), place)
        is_custom = self.type == "custom_tool_call"
        arguments = arguments_with(self.input) if is_custom else self.arguments
        name = self.name and Offered(self.name, self.namespace).function_name
        return earlier_call(self.call_id, name, arguments, place)


_OneItem = Annotated[
    Annotated[Item, KNOWN] | Annotated[Other, OTHER],
    by_type(*get_args(_Readable)),
]


class TextFormat(JsonSchema):
    """What an answer must be."""

    type: Literal["text", "json_object", "json_schema"] = "text"


class TextOptions(Lenient):
    """How an answer's text is."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningOptions(Lenient):
    """How much the model reasons."""

    effort: Effort | None = None


class ResponsesRequest(OtherRequest):
    """`POST /v1/responses`."""

    UNSUPPORTED: ClassVar[dict[str, tuple[object, ...]]] = {
        "previous_response_id": (), "conversation": (), "background": (False,), "prompt": (),
    }  # fmt: skip
    IGNORED: ClassVar[dict[str, tuple[object, ...]]] = {
        "truncation": ("disabled",), "top_logprobs": (0,), "include": ([],),
        "context_management": ([],),
    }  # fmt: skip
    FIELDS: ClassVar[dict[str, str]] = {
        "messages": "input", "max_tokens": "max_output_tokens", "response_format": "text",
        "reasoning_effort": "reasoning",
    }  # fmt: skip

    model: str | None = None
    input: Text | Many[_OneItem]
    instructions: Text | None = None
    tools: Many[FlatTool] | None = None
    tool_choice: FlatChoice | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    user: Text | None = None
    # Taken, and nothing follows from them, or refused or named unless they ask for nothing.
    store: bool | None = None
    include: Many[str] | None = None
    metadata: dict[str, Any] | None = None
    stream_options: dict[str, Any] | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    prompt: Any = None
    truncation: str | None = None
    max_tool_calls: int | None = None
    top_logprobs: int | None = None
    context_management: Any = None

    _offered: dict[str, Offered] = PrivateAttr(default_factory=dict)

    @property
    def offered(self) -> dict[str, Offered]:
        """The tools that can be called, by the name of their function, once it is a chat. O(1)."""
        return self._offered

    def translated(self) -> dict[str, object]:
        """It as the fields of a chat. O(input).

        Raises:
            ApiError: the arguments of a call are no JSON object, or an image has no URL.
        """
        names = ("model", "parallel_tool_calls", "temperature", "top_p", "stream", "user")
        fields = {name: getattr(self, name) for name in names}
        if self.text and self.text.verbosity not in {None, "medium"}:
            self._left_out.append("text.verbosity")
        if self.tools is not None:
            fields["tools"] = self._functions(self.tools)
        wanted = self.text and self.text.format
        if wanted:
            schema = wanted.model_dump(by_alias=True, exclude={"type"}, exclude_none=True)
            fields["response_format"] = {"type": wanted.type, "json_schema": schema or None}
        return fields | {
            "messages": self._messages(),
            "max_tokens": self.max_output_tokens,
            "reasoning_effort": self.reasoning and self.reasoning.effort,
            "tool_choice": choice_of(self.tool_choice),
        }

    def _functions(self, tools: Sequence[FlatTool]) -> list[dict[str, object]]:
        """Return the tools that can be called as a chat has them, and name the others."""
        functions = []
        for place, tool, namespace in offered(tools):
            if isinstance(tool, Other):
                self._left_out.append(f"{place} ({tool.type})")
                continue
            one = Offered(tool.name, namespace, tool.type == "custom")
            self._offered[one.function_name] = one
            functions.append(function_of(tool, one.function_name))
        return functions

    def _messages(self) -> list[dict[str, Any]]:
        """The items as messages: what the assistant said in one turn is one."""
        told: list[dict[str, Any]] = []
        if self.instructions:
            told.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*told, {"role": "user", "content": self.input}]
        for place, item in enumerate(self.input):
            text = "" if isinstance(item, Other) else _joined(item.content or item.summary or "")
            if isinstance(item, Other) or (item.type == "reasoning" and not text):
                self._left_out.append(f"input.{place} ({item.type})")  # or it is encrypted
            elif item.type.endswith("_output"):
                output = _content(item.output, f"input.{place}.output")
                call_id = item.call_id or item.id
                told.append({"role": "tool", "tool_call_id": call_id, "content": output})
            elif item.type == "message" and item.role != "assistant":
                content = _content(item.content or "", f"input.{place}.content")
                told.append({"role": item.role, "content": content})
            else:
                if not told or told[-1]["role"] != "assistant":
                    told.append({"role": "assistant", "content": ""})
                turn = told[-1]
                if item.type.endswith("_call"):
                    turn.setdefault("tool_calls", []).append(item.call(f"input.{place}"))
                else:
                    name = "content" if item.type == "message" else "reasoning_content"
                    turn[name] = turn.get(name, "") + text
        if not told:
            got = ", ".join(self._left_out[:3]) or "none"
            raise ApiError(400, f"input: wanted a message to answer, got {got}", param="input")
        return told


def _content(parts: str | Sequence[Part], place: str) -> str | list[dict[str, object]]:
    if isinstance(parts, str):
        return parts
    for number, part in enumerate(parts):
        if part.type == "input_image" and not part.image_url:  # it is in a file elsewhere
            field = f"{place}.{number}.image_url"
            raise ApiError(400, f"{field}: missing", param=field)
    return content_of((part.text or part.refusal, part.image_url) for part in parts)


def _joined(parts: str | Sequence[Part]) -> str:
    return parts if isinstance(parts, str) else "".join([p.text or p.refusal for p in parts])


class _Answer(BlockForm):
    """How responses are written."""

    def __init__(
        self,
        body: ChatRequest,
        service: Service,
        readers: Sequence[CountingReader],
        asked: ResponsesRequest,
    ) -> None:
        super().__init__(service, readers)
        self._offered = asked.offered
        self._numbers = itertools.count()
        told = asked.model_dump(by_alias=True)
        same = ("instructions", "max_output_tokens", "metadata")
        chosen: dict[str, object] = {"top_p": None, **service.sampling_defaults}
        self._head: dict[str, object] = {
            "id": service.new_id("resp"), "object": "response", "created_at": service.now(),
            "model": body.model or service.name, **{name: told[name] for name in same},
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "tool_choice": told["tool_choice"] or "auto", "tools": told["tools"] or [],
            "text": told["text"] or {"format": {"type": "text"}},
            "reasoning": told["reasoning"] or {"effort": None},
            "previous_response_id": None, "store": False, "truncation": "disabled",
            "background": False,
            **{
                name: chosen[name] if told[name] is None else told[name]
                for name in ("temperature", "top_p")
            },
        }  # fmt: skip

    def begin(self, stream: TokenStream) -> str:
        del stream
        response = {"response": self._response("in_progress")}
        return self._event("response.created", response) + self._event(
            "response.in_progress", response
        )

    def opened(self, block: Block) -> str:
        empty = replace(block, text="")
        item = {**self._item(empty, "in_progress"), "content": []}
        if block.kind == "call":
            del item["content"]
        begun = {"output_index": block.number, "item": item}
        events = self._event("response.output_item.added", begun)
        if block.kind == "call":
            return events
        part = {**self._place(block), "part": _part(empty)}
        return events + self._event("response.content_part.added", part)

    def grown(self, block: Block, text: str) -> str:
        if self._tool(block).is_custom:  # its text is inside of the JSON, and told at its end
            return ""
        return self._event(f"{_EVENTS[block.kind]}.delta", {**self._place(block), "delta": text})

    def closed(self, block: Block) -> str:
        place = self._place(block)
        if self._tool(block).is_custom:
            kind, text = "response.custom_tool_call_input", input_of(block.text)
            events = self._event(f"{kind}.delta", {**place, "delta": text})
            events += self._event(f"{kind}.done", {**place, "input": text})
        elif block.kind == "call":
            told = {**place, "arguments": block.text, "name": self._tool(block).name}
            events = self._event(f"{_EVENTS[block.kind]}.done", told)
        else:
            events = self._event(f"{_EVENTS[block.kind]}.done", {**place, "text": block.text})
            part = {**place, "part": _part(block)}
            events += self._event("response.content_part.done", part)
        ended = {"output_index": block.number, "item": self._item(block, "completed")}
        return events + self._event("response.output_item.done", ended)

    def done(self, reason: str, stream: TokenStream) -> str:
        response = self.answer(reason, stream)
        return self._event(f"response.{response['status']}", {"response": response})

    def failed(self, error: ApiError) -> str:
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        response = self._response("failed", error={"code": code, "message": error.message})
        return self._event("response.failed", {"response": response})

    def answer(self, reason: str, stream: TokenStream) -> dict[str, object]:
        is_cut = reason == "length"
        counts = self.usage(stream)
        return self._response(
            "incomplete" if is_cut else "completed",
            incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
            usage={
                "input_tokens": counts.prompt_tokens,
                "input_tokens_details": counts.prompt_tokens_details.model_dump(),
                "output_tokens": counts.completion_tokens,
                "output_tokens_details": counts.completion_tokens_details.model_dump(),
                "total_tokens": counts.total_tokens,
            },
        )

    def _response(self, status: str, **others: object) -> dict[str, object]:
        output = [self._item(block, "completed") for block in self.blocks]
        told = {"error": None, "incomplete_details": None, "usage": None, **others}
        return {**self._head, "status": status, "output": output, **told}

    def _event(self, kind: str, told: dict[str, Any]) -> str:
        return event(kind, {**told, "sequence_number": next(self._numbers)})

    def _place(self, block: Block) -> dict[str, Any]:
        """Where a piece of a block belongs."""
        place: dict[str, Any] = {"item_id": block.block_id, "output_index": block.number}
        if block.kind != "call":
            place["content_index"] = 0
        if block.kind == "content":
            place["logprobs"] = []
        return place

    def _tool(self, block: Block) -> Offered:
        """The tool that a block calls."""
        return self._offered.get(block.name) or Offered(block.name)

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        """A block as an item of the output."""
        head = {"id": block.block_id, "status": status}
        match block.kind:
            case "call":
                return {**head, "call_id": block.call_id, **self._tool(block).item(block.text)}
            case "reasoning":
                return {**head, "type": "reasoning", "summary": [], "content": [_part(block)]}
        return {**head, "type": "message", "role": "assistant", "content": [_part(block)]}


_EVENTS = {
    "reasoning": "response.reasoning_text", "content": "response.output_text",
    "call": "response.function_call_arguments",
}  # fmt: skip


def _part(block: Block) -> dict[str, object]:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}


def responses(service: Service) -> APIRouter:
    """The routes. O(1)."""
    router = APIRouter(route_class=LargeBodyRoute)

    @router.post("/v1/responses")
    async def respond(body: ResponsesRequest, request: Request) -> Response:
        """Answer input."""

        def form(chat: ChatRequest, asked: Service, readers: Sequence[CountingReader]) -> _Answer:
            return _Answer(chat, asked, readers, body)

        return await converse(service, body.chat(), request, form, body.FIELDS)

    return router
