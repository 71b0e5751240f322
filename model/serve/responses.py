"""`/v1/responses`: OpenAI's newer interface, as another form of a chat, without a memory.

Decides: what of the items is what of a chat, and how an answer's items and events look. Nothing is
stored: `previous_response_id` is refused, and an answer says `store: false`.
https://platform.openai.com/docs/api-reference/responses

Does not know: how a chat is answered (`chat.py`), how an answer is cut into items (`blocks.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field

from model.serve.blocks import Block, BlockForm, OtherRequest, content_of, event
from model.serve.bounds import Lenient, Many, Text
from model.serve.chat import converse
from model.serve.conversation import Effort
from model.serve.errors import ApiError
from model.serve.generation import usage
from model.serve.large_bodies import LargeBodyRoute
from model.serve.protocol import ChatRequest, JsonSchema
from model.serve.service import Service
from model.serve.tools import Mode, Name, earlier_call
from model.token_stream import TokenStream

if TYPE_CHECKING:  # it loads Transformers
    from model.serve.reading import Reader

_FIELDS = {
    "messages": "input", "max_tokens": "max_output_tokens", "response_format": "text",
}  # fmt: skip


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


class Item(Lenient):
    """A message, reasoning, a call, or what came of one."""

    type: Literal["message", "reasoning", "function_call", "function_call_output"] = "message"
    role: Literal["system", "developer", "user", "assistant"] = "user"
    content: _Parts | None = None
    call_id: str | None = None
    name: Name | None = None
    arguments: Text = ""
    output: _Parts = ""


class FlatTool(Lenient):
    """A tool."""

    type: Literal["function"]
    name: Name
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChosenFlatTool(Lenient):
    """The tool that must be called."""

    type: Literal["function"]
    name: Name


class TextFormat(JsonSchema):
    """What an answer must be."""

    type: Literal["text", "json_object", "json_schema"] = "text"


class TextOptions(Lenient):
    """How an answer's text is."""

    format: TextFormat | None = None


class ReasoningOptions(Lenient):
    """How much the model reasons."""

    effort: Effort | None = None


class ResponsesRequest(OtherRequest):
    """`POST /v1/responses`."""

    UNSUPPORTED: ClassVar[dict[str, tuple[object, ...]]] = {
        "previous_response_id": (), "conversation": (), "background": (False,), "prompt": (),
        "truncation": ("disabled",), "max_tool_calls": (), "top_logprobs": (0,),
    }  # fmt: skip

    model: str | None = None
    input: Text | Annotated[Many[Item], Field(min_length=1)]
    instructions: Text | None = None
    tools: Many[FlatTool] | None = None
    tool_choice: Mode | ChosenFlatTool | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    user: Text | None = None
    # Taken, and nothing follows from them, or refused unless they ask for nothing.
    store: bool | None = None
    include: Many[str] | None = None
    metadata: dict[str, str] | None = None
    stream_options: dict[str, Any] | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    prompt: Any = None
    truncation: str | None = None
    max_tool_calls: int | None = None
    top_logprobs: int | None = None

    def translated(self) -> dict[str, object]:
        """It as the fields of a chat. O(input).

        Raises:
            ApiError: the arguments of a call are no JSON object.
        """
        names = ("model", "parallel_tool_calls", "temperature", "top_p", "stream", "user")
        fields = {name: getattr(self, name) for name in names}
        if self.tools is not None:
            fields["tools"] = [_function(tool) for tool in self.tools]
        wanted = self.text and self.text.format
        if wanted:
            schema = wanted.model_dump(by_alias=True, exclude={"type"}, exclude_none=True)
            fields["response_format"] = {"type": wanted.type, "json_schema": schema or None}
        choice = self.tool_choice
        fields["tool_choice"] = _function(choice) if isinstance(choice, ChosenFlatTool) else choice
        return fields | {
            "messages": self._messages(),
            "max_tokens": self.max_output_tokens,
            "reasoning_effort": self.reasoning and self.reasoning.effort,
        }

    def _messages(self) -> list[dict[str, Any]]:
        """The items as messages: what the assistant said in one turn is one."""
        told: list[dict[str, Any]] = []
        if self.instructions:
            told.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*told, {"role": "user", "content": self.input}]
        for place, item in enumerate(self.input):
            text = _joined(item.content or "")
            if item.type == "function_call_output":
                output = _content(item.output)
                told.append({"role": "tool", "tool_call_id": item.call_id, "content": output})
            elif item.type == "message" and item.role != "assistant":
                told.append({"role": item.role, "content": _content(item.content or "")})
            else:
                if not told or told[-1]["role"] != "assistant":
                    told.append({"role": "assistant", "content": ""})
                turn = told[-1]
                if item.type == "function_call":
                    made = earlier_call(item.call_id, item.name, item.arguments, f"input.{place}")
                    turn.setdefault("tool_calls", []).append(made)
                else:
                    name = "content" if item.type == "message" else "reasoning_content"
                    turn[name] = turn.get(name, "") + text
        return told


def _function(flat: FlatTool | ChosenFlatTool) -> dict[str, object]:
    """A function as a chat has it."""
    return {"type": "function", "function": flat.model_dump(exclude={"type"})}


def _content(parts: str | Sequence[Part]) -> str | list[dict[str, object]]:
    if isinstance(parts, str):
        return parts
    return content_of((part.text or part.refusal, part.image_url) for part in parts)


def _joined(parts: str | Sequence[Part]) -> str:
    return parts if isinstance(parts, str) else "".join([p.text or p.refusal for p in parts])


class _Answer(BlockForm):
    """How responses are written."""

    def __init__(
        self,
        body: ChatRequest,
        service: Service,
        readers: Sequence[Reader],
        asked: ResponsesRequest,
    ) -> None:
        super().__init__(service, readers)
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
        item = {**_item(empty, "in_progress"), "content": []}
        if block.kind == "call":
            del item["content"]
        begun = {"output_index": block.number, "item": item}
        events = self._event("response.output_item.added", begun)
        if block.kind == "call":
            return events
        part = {**self._place(block), "part": _part(empty)}
        return events + self._event("response.content_part.added", part)

    def grown(self, block: Block, text: str) -> str:
        return self._event(f"{_EVENTS[block.kind]}.delta", {**self._place(block), "delta": text})

    def closed(self, block: Block) -> str:
        name = "arguments" if block.kind == "call" else "text"
        told = {**self._place(block), name: block.text}
        if block.kind == "call":
            told["name"] = block.name
        events = self._event(f"{_EVENTS[block.kind]}.done", told)
        if block.kind != "call":
            part = {**self._place(block), "part": _part(block)}
            events += self._event("response.content_part.done", part)
        ended = {"output_index": block.number, "item": _item(block, "completed")}
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
        counts = usage(stream)
        return self._response(
            "incomplete" if is_cut else "completed",
            incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
            usage={
                "input_tokens": counts.prompt_tokens,
                "input_tokens_details": counts.prompt_tokens_details.model_dump(),
                "output_tokens": counts.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": counts.total_tokens,
            },
        )

    def _response(self, status: str, **others: object) -> dict[str, object]:
        output = [_item(block, "completed") for block in self.blocks]
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


_EVENTS = {
    "reasoning": "response.reasoning_text", "content": "response.output_text",
    "call": "response.function_call_arguments",
}  # fmt: skip


def _item(block: Block, status: str) -> dict[str, Any]:
    """A block as an item of the output."""
    head = {"id": block.block_id, "status": status}
    match block.kind:
        case "call":
            called = {"call_id": block.call_id, "name": block.name, "arguments": block.text}
            return {**head, "type": "function_call", **called}
        case "reasoning":
            return {**head, "type": "reasoning", "summary": [], "content": [_part(block)]}
    return {**head, "type": "message", "role": "assistant", "content": [_part(block)]}


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

        def form(chat: ChatRequest, asked: Service, readers: Sequence[Reader]) -> _Answer:
            return _Answer(chat, asked, readers, body)

        return await converse(service, body.chat(), request, form, _FIELDS)

    return router
