"""A conversation: its messages, and how it becomes a prompt.

Decides: which roles and parts a message may have, and what a chat template reads of them: calls of
tools, and the reasoning of earlier answers. In which form a template reads them is its affair
(`load/chat_template.py`).

Invariants: an assistant's message is taken as an answer has it, so that it can be sent back.

Does not know: tokens, what a tool call must look like (`tools.py`).
"""

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr, model_validator

from model.control.images import check_data, data_of
from model.errors import shown
from model.serve.bounds import Lenient, Many, Strict, Text
from model.serve.errors import ApiError
from model.serve.tools import Tool, ToolCall


class TextPart(Lenient):
    """A piece of a message."""

    type: Literal["text"]
    text: Text


class ImageUrl(Lenient):
    """Where an image is: a `data:` URL, or one to fetch."""

    url: str
    detail: Literal["auto", "low", "high"] | None = None


class ImagePart(Lenient):
    """An image in a message; `data` are the bytes of its file, once they are known."""

    type: Literal["image_url"]
    image_url: ImageUrl
    _data: bytes | None = PrivateAttr(None)

    @property
    def as_template_reads_it(self) -> dict[str, object]:
        """With the image, if it is known. O(1)."""
        return {"type": "image"} if self._data is None else {"type": "image", "image": self._data}

    @property
    def is_here(self) -> bool:
        """True if the message has its bytes, in a `data:` URL. O(1)."""
        return self.image_url.url.startswith("data:")

    def check(self, most: int) -> None:
        """Refuse it by its size, before it is decoded. O(1).

        Args:
            most: the most bytes of an image.

        Raises:
            InvalidArgumentError: it has more.
        """
        check_data(self.image_url.url, most)

    def open(self, fetch: Callable[[str], bytes]) -> None:
        """Have its bytes. O(bytes).

        Raises:
            InvalidArgumentError: they cannot be had.
        """
        url = self.image_url.url
        self._data = data_of(url) if self.is_here else fetch(url)


_PARTS = {"text", "image_url"}


class Message(Lenient):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Text | Many[Annotated[TextPart | ImagePart, Field(discriminator="type")]] | None = None
    name: str | None = None
    tool_calls: Many[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: Text | None = None
    # What an answer has beside these, so that it can be sent back as it came.
    refusal: str | None = None
    reasoning: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None
    parsed: Any = None  # by OpenAI's client

    @model_validator(mode="before")
    @classmethod
    def _with_known_parts(cls, given: object) -> object:
        """Refuse parts of other kinds, such as sound and video, by name."""
        content = given.get("content") if isinstance(given, dict) else None
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind not in _PARTS:
                known = " or ".join(sorted(_PARTS))
                raise ApiError(
                    400, f"messages: wanted parts of type {known}, got {shown(kind)}",
                    param="messages", code="unsupported",
                )  # fmt: skip
        return given

    @property
    def images(self) -> list[ImagePart]:
        """Its images, in order. O(parts)."""
        parts = self.content if isinstance(self.content, list) else []
        return [part for part in parts if isinstance(part, ImagePart)]

    @property
    def said(self) -> str | list[dict[str, object]] | None:
        """All that it says: a text, or parts if some are images; None: it only calls tools."""
        if not isinstance(self.content, list):
            return self.content
        if not self.images:
            return "".join(part.text for part in self.content if isinstance(part, TextPart))
        return [
            {"type": "text", "text": part.text}
            if isinstance(part, TextPart)
            else part.as_template_reads_it
            for part in self.content
        ]


def conversation(messages: Sequence[Message]) -> list[dict[str, object]]:
    """Messages as a chat template reads them. O(their text).

    The result of a call has the name of its function, which clients leave out.

    Raises:
        ApiError: the arguments of a call are no JSON object.
    """
    told: list[dict[str, object]] = []
    names: dict[str | None, str] = {}
    for place, message in enumerate(messages):
        one: dict[str, object] = {"role": message.role, "content": message.said}
        for name in ("name", "tool_call_id", "reasoning_content"):
            if getattr(message, name) is not None:
                one[name] = getattr(message, name)
        if message.reasoning is not None:  # as vLLM calls it
            one.setdefault("reasoning_content", message.reasoning)
        if message.tool_call_id in names:
            one.setdefault("name", names[message.tool_call_id])
        if message.tool_calls:
            names |= {call.id: call.function.name for call in message.tool_calls if call.id}
            one["tool_calls"] = [
                call.as_template_reads_it(f"messages.{place}.tool_calls.{number}")
                for number, call in enumerate(message.tool_calls)
            ]
        told.append(one)
    return told


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
"""How much the model reasons."""


_OWN_FIELDS = {"messages", "tools", "add_generation_prompt", "continue_final_message"}


class ConversationOptions(Strict):
    """How a conversation becomes a prompt."""

    tools: Many[Tool] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def opens_answer(self) -> bool:
        """Whether the prompt ends where the assistant begins to speak. O(1).

        Raises:
            ApiError: it is also to end where the last message does.
        """
        if not self.continue_final_message:
            return self.add_generation_prompt is not False
        if self.add_generation_prompt:
            raise ApiError(
                400,
                "continue_final_message: cannot be combined with add_generation_prompt",
                param="continue_final_message",
            )
        return False

    @property
    def template_options(self) -> dict[str, object]:
        """What a chat template is told beside the messages. O(tools).

        Raises:
            ApiError: the client brings a template of its own, which might never end, or gives as a
                variable what is a field of the request.
        """
        told: dict[str, object] = {}
        for name in self.chat_template_kwargs or ():
            field = f"chat_template_kwargs.{name}"
            if name == "chat_template":
                raise ApiError(400, f"{field}: wanted no template of the client's", param=field)
            if name in _OWN_FIELDS:
                raise ApiError(400, f"{field}: wanted as a field of the request", param=field)
        if self.tools:
            told["tools"] = [tool.model_dump(exclude_none=True) for tool in self.tools]
        if self.continue_final_message:
            told["continue_final_message"] = True
        if self.reasoning_effort is not None:
            told["reasoning_effort"] = self.reasoning_effort
            if self.reasoning_effort == "none":  # as Qwen's templates call it
                told["enable_thinking"] = False
        return told | (self.chat_template_kwargs or {})
