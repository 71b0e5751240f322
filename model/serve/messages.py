"""`/v1/messages`: Anthropic's interface, as another form of a chat.

Decides: what of a message's blocks is what of a chat, and how an answer's blocks and events look.
https://docs.anthropic.com/en/api/messages

Does not know: how a chat is answered (`chat.py`), how an answer is cut into blocks (`blocks.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field

from model.serve.blocks import Block, BlockForm, OtherRequest, content_of, event
from model.serve.bounds import Lenient, Many, Text
from model.serve.chat import converse
from model.serve.errors import ApiError
from model.serve.generation import usage
from model.serve.large_bodies import LargeBodyRoute
from model.serve.logprobs import quoted
from model.serve.protocol import ChatRequest
from model.serve.service import Service
from model.serve.tools import Name, earlier_call
from model.token_stream import TokenStream

if TYPE_CHECKING:  # it loads Transformers
    from model.serve.reading import Reader

_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}
_FIELDS = {"stop": "stop_sequences", "response_format": "output_config"}


class TextBlock(Lenient):
    """Text."""

    type: Literal["text"]
    text: Text


class ImageSource(Lenient):
    """Where an image is: in the request, or behind a URL."""

    type: Literal["base64", "url"]
    media_type: str = ""
    data: str = ""
    url: str = ""


class ContentBlock(Lenient):
    """Text, an image, reasoning of an earlier answer, a call, or what came of one."""

    type: Literal["text", "image", "thinking", "redacted_thinking", "tool_use", "tool_result"]
    text: Text = ""
    thinking: Text = ""
    id: str | None = None
    name: Name | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    source: ImageSource | None = None
    content: Text | Many[ContentBlock] | None = None

    @property
    def image_url(self) -> str:
        """The URL of its image; empty: it is none. O(image)."""
        if self.type != "image" or self.source is None:
            return ""
        source = self.source
        is_own = source.type == "base64"
        return f"data:{source.media_type};base64,{source.data}" if is_own else source.url


class Turn(Lenient):
    """A message."""

    role: Literal["user", "assistant", "system"]
    content: Text | Many[ContentBlock]

    def translated(self, place: str) -> list[dict[str, object]]:
        """It as messages of a chat: what came of calls first. O(content).

        Raises:
            ApiError: a call has no name; `place` names the message.
        """
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        told: list[dict[str, object]] = []
        said: dict[str, Any] = {"role": self.role}
        is_said = not self.content
        for number, block in enumerate(self.content):
            if block.type == "tool_result":
                output = _content(block.content or "")
                told.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": output})
                continue
            is_said = True
            if block.thinking:
                said["reasoning_content"] = said.get("reasoning_content", "") + block.thinking
            if block.type == "tool_use":
                made = earlier_call(
                    block.id, block.name, quoted(block.input or {}), f"{place}.content.{number}"
                )
                said.setdefault("tool_calls", []).append(made)
        said["content"] = _content(self.content)
        return [*told, said] if is_said else told


class CustomTool(Lenient):
    """A tool."""

    type: Literal["custom"] | None = None
    name: Name
    description: Text | None = None
    input_schema: dict[str, Any]


class ToolChoice(Lenient):
    """Which tool is called."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Lenient):
    """Whether the model reasons."""

    type: Literal["enabled", "disabled", "adaptive"]


class OutputFormat(Lenient):
    """What an answer must be."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Lenient):
    """How much the model reasons, and what its answer must be."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountRequest(OtherRequest):
    """`POST /v1/messages/count_tokens`."""

    UNSUPPORTED: ClassVar[dict[str, tuple[object, ...]]] = {
        "container": (), "mcp_servers": ([],),
    }  # fmt: skip

    model: str | None = None
    messages: Many[Turn] = Field(min_length=1)
    system: Text | Many[TextBlock] | None = None
    tools: Many[CustomTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    def translated(self) -> dict[str, object]:
        """It as the fields of a chat. O(messages)."""
        messages = [
            one
            for place, turn in enumerate(self.messages)
            for one in turn.translated(f"messages.{place}")
        ]
        if self.system:
            messages.insert(0, {"role": "system", "content": _joined(self.system)})
        fields: dict[str, object] = {"model": self.model, "messages": messages}
        if self.messages[-1].role == "assistant":  # the beginning of the answer
            fields["continue_final_message"] = True
        if self.tools is not None:
            fields["tools"] = [
                {"type": "function", "function": {
                    "name": tool.name, "description": tool.description,
                    "parameters": tool.input_schema,
                }}
                for tool in self.tools
            ]  # fmt: skip
        choice = self.tool_choice
        if choice is not None:
            named = {"type": "function", "function": {"name": choice.name or ""}}
            modes = {"auto": "auto", "any": "required", "none": "none", "tool": named}
            fields["tool_choice"] = modes[choice.type]
            fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        if self.thinking is not None and self.thinking.type != "adaptive":
            fields["chat_template_kwargs"] = {"enable_thinking": self.thinking.type == "enabled"}
        config = self.output_config or OutputConfig()
        if config.effort is not None:
            fields["reasoning_effort"] = "xhigh" if config.effort == "max" else config.effort
        if config.format is not None:
            schema = {"schema": config.format.schema_}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        return fields


class Metadata(Lenient):
    """Whose request it is."""

    user_id: Text | None = None


class MessagesRequest(CountRequest):
    """`POST /v1/messages`."""

    max_tokens: int
    stop_sequences: Many[Text] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: Metadata | None = None

    def translated(self) -> dict[str, object]:
        """It as the fields of a chat. O(messages)."""
        names = ("max_tokens", "stream", "temperature", "top_p", "top_k")
        more = {name: getattr(self, name) for name in names}
        more["user"] = self.metadata and self.metadata.user_id
        return {**super().translated(), **more, "stop": self.stop_sequences}


class TokenCount(BaseModel):
    """The answer of `/v1/messages/count_tokens`."""

    input_tokens: int


def _content(blocks: str | Sequence[ContentBlock]) -> str | list[dict[str, object]]:
    if isinstance(blocks, str):
        return blocks
    return content_of((block.text, block.image_url) for block in blocks)


def _joined(texts: str | Sequence[TextBlock]) -> str:
    return texts if isinstance(texts, str) else "".join([block.text for block in texts])


class _Answer(BlockForm):
    """How Anthropic's messages are written."""

    def __init__(self, body: ChatRequest, service: Service, readers: Sequence[Reader]) -> None:
        super().__init__(service, readers)
        self._head: dict[str, object] = {
            "id": service.new_id("msg"), "type": "message", "role": "assistant",
            "model": body.model or service.name,
        }  # fmt: skip

    def begin(self, stream: TokenStream) -> str:
        said: dict[str, object] = {"content": [], "stop_reason": None, "stop_sequence": None}
        said["usage"] = _usage(stream)
        return event("message_start", {"message": {**self._head, **said}})

    def opened(self, block: Block) -> str:
        empty = replace(block, text="{}" if block.kind == "call" else "")
        return event("content_block_start", {"index": block.number, "content_block": _told(empty)})

    def grown(self, block: Block, text: str) -> str:
        kind, name = {
            "reasoning": ("thinking_delta", "thinking"),
            "content": ("text_delta", "text"),
            "call": ("input_json_delta", "partial_json"),
        }[block.kind]
        delta = {"type": kind, name: text}
        return event("content_block_delta", {"index": block.number, "delta": delta})

    def closed(self, block: Block) -> str:
        return event("content_block_stop", {"index": block.number})

    def done(self, reason: str, stream: TokenStream) -> str:
        told = {"delta": _ending(reason, stream), "usage": _usage(stream)}
        return event("message_delta", told) + event("message_stop", {})

    def failed(self, error: ApiError) -> str:
        return event("error", error.body)

    def answer(self, reason: str, stream: TokenStream) -> dict[str, object]:
        content = [_told(block) for block in self.blocks]
        ending = _ending(reason, stream)
        return {**self._head, "content": content, **ending, "usage": _usage(stream)}


def _told(block: Block) -> dict[str, object]:
    """A block as a message has it; a call that was cut off is text."""
    arguments = block.arguments if block.kind == "call" else None
    if arguments is not None:
        return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": arguments}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    return {"type": "text", "text": block.text}


def _ending(reason: str, stream: TokenStream) -> dict[str, object]:
    """Why an answer has ended."""
    stop = stream.samples[0].stop_string
    told = _STOP_REASONS.get(reason, "end_turn" if stop is None else "stop_sequence")
    return {"stop_reason": told, "stop_sequence": stop}


def _usage(stream: TokenStream) -> dict[str, int]:
    counts = usage(stream)
    cached = counts.prompt_tokens_details.cached_tokens
    return {
        "input_tokens": counts.prompt_tokens - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": counts.completion_tokens,
    }


def messages(service: Service) -> APIRouter:
    """The routes. O(1)."""
    router = APIRouter(route_class=LargeBodyRoute)

    @router.post("/v1/messages")
    async def message(body: MessagesRequest, request: Request) -> Response:
        """Answer messages."""
        return await converse(service, body.chat(), request, _Answer, _FIELDS, is_cut=True)

    @router.post("/v1/messages/count_tokens")
    async def count(body: CountRequest) -> TokenCount:
        """Count the tokens of messages."""
        chat = body.chat()
        chat.check(is_strict=service.config.strict_fields)
        service.check_model(chat.model)
        service.serving()
        return TokenCount(input_tokens=len(await service.encode_chat(chat.messages, chat)))

    return router
