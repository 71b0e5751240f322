"""`/v1/messages`: Anthropic's interface, as another form of a chat.

Decides: what of a message's blocks is what of a chat, and how an answer's blocks and events look.
Tools that Anthropic's own servers or models know, and blocks of other types, are left out and
named; a document that has no text, or an image that is in a file elsewhere, is refused in the last
message, for that is about it.
https://docs.anthropic.com/en/api/messages

Does not know: how a chat is answered (`chat.py`), how an answer is cut into blocks (`blocks.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, get_args

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field

from model.serve.blocks import Block, BlockForm, OtherRequest, content_of, event
from model.serve.bounds import KNOWN, OTHER, Lenient, Many, Other, Text, by_type
from model.serve.chat import converse
from model.serve.errors import ApiError
from model.serve.generation import usage, with_warning
from model.serve.large_bodies import LargeBodyRoute
from model.serve.logprobs import quoted
from model.serve.protocol import ChatRequest
from model.serve.reasoning import CountingReader
from model.serve.service import Service
from model.serve.tools import Name, earlier_call
from model.token_stream import TokenStream

_Readable = Literal[
    "text", "image", "document", "search_result", "thinking", "tool_use", "tool_result"
]
"""The types of blocks that a model can read."""

_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


class TextBlock(Lenient):
    """Text."""

    type: Literal["text"]
    text: Text


class Source(Lenient):
    """Where an image or a document is: in the request, behind a URL, or in a file elsewhere."""

    type: Literal["base64", "url", "text", "content", "file"]
    media_type: str = ""
    data: Text = ""
    url: str = ""
    content: Text | Many[_Block] = ""


class ContentBlock(Lenient):
    """Text, an image, a document, reasoning, a call, or what came of one or of a search."""

    type: _Readable
    text: Text = ""
    thinking: Text = ""
    id: str | None = None
    name: Name | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    source: Source | Text | None = None
    title: Text | None = None
    context: Text | None = None
    content: Text | Many[_Block] | None = None

    @property
    def image_url(self) -> str:
        """The URL of its image; empty: it is none. O(image)."""
        source = self.source
        if self.type != "image" or not isinstance(source, Source):
            return ""
        is_own = source.type == "base64"
        return f"data:{source.media_type};base64,{source.data}" if is_own else source.url

    @property
    def said(self) -> str | None:
        """Its text; None: it has none that can be read. O(text)."""
        source = self.source
        if self.type == "search_result":
            lines = [self.title, source if isinstance(source, str) else "", self.content or ""]
        elif self.type == "document":
            given = source if isinstance(source, Source) else Source(type="file")
            body = {"text": given.data, "content": given.content}.get(given.type)
            if body is None:
                return None
            lines = [self.title, self.context, body]
        else:
            return self.text
        texts = (one if isinstance(one, str) else _content(one) for one in lines if one)
        return "\n".join(["", *[text for text in texts if isinstance(text, str)], ""])


_Block = Annotated[
    Annotated[ContentBlock, KNOWN] | Annotated[Other, OTHER],
    by_type(*get_args(_Readable)),
]


class Turn(Lenient):
    """A message."""

    role: Literal["user", "assistant", "system"]
    content: Text | Many[_Block]

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
            if isinstance(block, Other):
                continue
            if block.type == "tool_result":
                output = _content(block.content or "")
                told.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": output})
                continue
            is_said = is_said or block.type != "thinking" or block.thinking != ""
            if block.thinking:
                said["reasoning_content"] = said.get("reasoning_content", "") + block.thinking
            if block.type == "tool_use":
                made = earlier_call(
                    block.id, block.name, quoted(block.input or {}), f"{place}.content.{number}"
                )
                said.setdefault("tool_calls", []).append(made)
        said["content"] = _content(self.content)
        return [*told, said] if is_said else told


def _unread(content: str | Sequence[_Block], place: str) -> Iterator[tuple[str, str]]:
    """The blocks that a model cannot read, those inside of others too: the place and the type."""
    for number, block in enumerate([] if isinstance(content, str) else content):
        where = f"{place}.content.{number}"
        is_empty = isinstance(block, ContentBlock) and (
            block.said is None or (block.type == "thinking" and not block.thinking)
            or (block.type == "image" and not block.image_url)
        )  # fmt: skip
        if isinstance(block, Other) or is_empty:
            yield where, block.type
        elif block.content is not None:
            yield from _unread(block.content, where)


class CustomTool(Lenient):
    """A tool."""

    type: Literal["custom"] | None = None
    name: Name
    description: Text | None = None
    input_schema: dict[str, Any]


_Tool = Annotated[Annotated[CustomTool, KNOWN] | Annotated[Other, OTHER], by_type("custom")]


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

    IGNORED: ClassVar[dict[str, tuple[object, ...]]] = {
        "container": (), "mcp_servers": ([],), "context_management": ({},),
    }  # fmt: skip
    FIELDS: ClassVar[dict[str, str]] = {
        "stop": "stop_sequences", "response_format": "output_config",
        "reasoning_effort": "output_config", "user": "metadata",
    }  # fmt: skip

    model: str | None = None
    messages: Many[Turn] = Field(min_length=1)
    system: Text | Many[TextBlock] | None = None
    tools: Many[_Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    # Named unless they ask for nothing.
    container: Any = None
    mcp_servers: Any = None
    context_management: Any = None

    def _messages(self) -> list[dict[str, object]]:
        """The messages of a chat; what is left out of them is named.

        Raises:
            ApiError: the last one has a document without text, or nothing that can be read.
        """
        messages: list[dict[str, object]] = []
        last = len(self.messages) - 1
        for number, turn in enumerate(self.messages):
            made = turn.translated(f"messages.{number}")
            unread = list(_unread(turn.content, f"messages.{number}"))
            for place, kind in unread if number == last else ():
                if kind in {"document", "image"} or not made:
                    raise ApiError(
                        400, f"{place}.type: wanted a block that has text, or an image with its "
                        f"data or URL, got {kind}",
                        param=f"{place}.type", code="unsupported",
                    )  # fmt: skip
            self._left_out += [f"{place} ({kind})" for place, kind in unread]
            messages += made
        if self.system:
            system = self.system if isinstance(self.system, str) else _content(self.system)
            messages.insert(0, {"role": "system", "content": system})
        return messages

    def translated(self) -> dict[str, object]:
        """It as the fields of a chat. O(messages)."""
        messages = self._messages()
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
                if isinstance(tool, CustomTool)
            ]  # fmt: skip
            self._left_out += [
                f"tools.{number} ({tool.type})"
                for number, tool in enumerate(self.tools)
                if isinstance(tool, Other)
            ]
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
        form = config.format or self.output_format
        if form is not None:
            schema = {"schema": form.schema_}
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


def _content(blocks: str | Sequence[_Block | TextBlock]) -> str | list[dict[str, object]]:
    """Return blocks as the content of a message of a chat, without those it cannot have."""
    if isinstance(blocks, str):
        return blocks
    return content_of(
        (block.text, "") if isinstance(block, TextBlock) else (block.said or "", block.image_url)
        for block in blocks
        if not isinstance(block, Other)
    )


class _Answer(BlockForm):
    """How Anthropic's messages are written."""

    def __init__(
        self, body: ChatRequest, service: Service, readers: Sequence[CountingReader]
    ) -> None:
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
        return await converse(service, body.chat(), request, _Answer, body.FIELDS, is_cut=True)

    @router.post("/v1/messages/count_tokens")
    async def count(body: CountRequest, response: Response) -> TokenCount:
        """Count the tokens of messages."""
        chat = body.chat()
        with_warning(response, chat)
        chat.check(is_strict=service.config.strict_fields)
        service.check_model(chat.model)
        service.serving()
        return TokenCount(input_tokens=len(await service.encode_chat(chat.messages, chat)))

    return router
