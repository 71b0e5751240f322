"""The answers that clients get: OpenAI's forms, with the fields that vLLM's clients add.

Does not know: requests, how an answer comes about, how it is written.
"""

from typing import Literal

from pydantic import BaseModel

from model.serve.tools import ToolCall


class PromptTokensDetails(BaseModel):
    """The counts of a prompt's tokens by their kind."""

    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    """The counts of an answer's tokens by their kind."""

    reasoning_tokens: int


class Usage(BaseModel):
    """The numbers of tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class TopLogprob(BaseModel):
    """A token, and how likely it was."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """The token that was drawn, and others in its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """The tokens of a chat's answer."""

    content: list[TokenLogprob]


class CompletionLogprobs(BaseModel):
    """The tokens of a completion."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """One text."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None


class Completion(BaseModel):
    """The answer of `/v1/completions`, and each piece of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class ChatMessage(BaseModel):
    """The message of the assistant."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(BaseModel):
    """One answer of a chat."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class ChatCompletion(BaseModel):
    """The answer of `/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ModelCard(BaseModel):
    """A model that can be asked for."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "kvcore"
    max_model_len: int


class ModelList(BaseModel):
    """All of them."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Tokenized(BaseModel):
    """The answer of `/tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]


class Detokenized(BaseModel):
    """The answer of `/detokenize`."""

    prompt: str


class HealthReport(BaseModel):
    """The answer of `/health`."""

    status: str
    num_faults: int
    last_fault: str | None


class Version(BaseModel):
    """The answer of `/version`."""

    version: str


class ErrorDetail(BaseModel):
    """The description of an error."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReport(BaseModel):
    """Every answer that is none."""

    type: Literal["error"] = "error"
    error: ErrorDetail
