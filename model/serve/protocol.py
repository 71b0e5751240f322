"""What clients send and get: OpenAI's fields, and those that vLLM's clients add.

Decides: names, types and defaults, which of OpenAI's fields are taken although nothing follows from
them, and which are refused by name because an answer without them would be another one. What a
value may be is checked where it is used: by `SamplingParams`.

Invariants: a field that is not here is an error, but in a request itself, where it is ignored and
named in a header unless --strict-fields is given; a value of another type is an error, and so is
more than `bounds.py` allows.

Does not know: how anything is answered.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PlainValidator

import kvcore
from model.control.grammar import Grammar
from model.control.params import SamplingParams
from model.control.submission import Prompt, Retained, Submission, salted
from model.errors import InvalidArgumentError
from model.serve.bounds import Many, Strict, Text, checked_prompt
from model.serve.conversation import ConversationOptions, Message
from model.serve.errors import ApiError
from model.serve.tools import ChosenTool, Mode, ToolCall, call_grammar

_GRAMMARS = (
    "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice",
    "guided_grammar",
)  # fmt: skip
MAX_SAMPLES = 128
"""The largest n, as OpenAI has it."""

_Forms = str | list[str] | list[int] | list[list[int]]
_Prompt = Annotated[_Forms, PlainValidator(checked_prompt, json_schema_input_type=_Forms)]


class StreamOptions(Strict):
    """What a stream tells beside its pieces."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchema(Strict):
    """The schema of `response_format`."""

    name: str = "answer"
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """What form an answer has to have."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @property
    def grammar(self) -> Grammar | None:
        """What an answer must be. O(schema).

        Raises:
            ApiError: the schema is missing.
        """
        if self.type == "text":
            return None
        if self.type == "json_object":
            return Grammar.json_object()
        if self.json_schema is None or self.json_schema.schema_ is None:
            field = "response_format.json_schema.schema"
            raise ApiError(400, f"{field}: missing", param=field)
        return Grammar.json_schema(self.json_schema.schema_, closes=self.json_schema.strict or None)


class StructuredOutputs(Strict):
    """What an answer must be, as vLLM's `structured_outputs` has it: one of these."""

    json_: dict[str, Any] | Text | None = Field(default=None, alias="json")
    regex: Text | None = None
    choice: Many[Text] | None = None
    grammar_: Text | None = Field(default=None, alias="grammar")
    json_object: bool | None = None

    @property
    def grammar(self) -> Grammar:
        """What an answer must be. O(it).

        Raises:
            ApiError: it says nothing, or several things.
            InvalidArgumentError: it means nothing.
        """
        given = self.model_dump(by_alias=True, exclude_none=True)
        if self.json_object is False:
            del given["json_object"]
        match given:
            case {"json": schema, **others} if not others:
                return Grammar.json_schema(schema)
            case {"regex": regex, **others} if not others:
                return Grammar.regex(regex)
            case {"choice": choice, **others} if not others:
                return Grammar.choice(choice)
            case {"grammar": text, **others} if not others:
                return Grammar("lark", text)
            case {"json_object": True, **others} if not others:
                return Grammar.json_object()
        names = ", ".join(given) or "none"
        raise ApiError(
            400,
            f"structured_outputs: wanted one of json, regex, choice, grammar and json_object, got "
            f"{names}",
            param="structured_outputs",
        )


_UNSUPPORTED_ANYWHERE: dict[str, tuple[object, ...]] = {
    "allowed_token_ids": (), "truncate_prompt_tokens": (), "documents": ([],),
    "prompt_embeds": (), "use_beam_search": (False,), "chat_template": (),
    "include_stop_str_in_output": (False,), "lora_request": (),
}  # fmt: skip
"""Fields of vLLM's that change an answer: these values alone change nothing."""


def refuse_unsupported(asked: BaseModel, fields: Mapping[str, tuple[object, ...]]) -> None:
    """Refuse fields that have other values than those that change nothing. O(fields).

    Raises:
        ApiError: one has.
    """
    for name, allowed in fields.items():
        value = getattr(asked, name, None)
        if value is not None and value not in allowed:
            raise ApiError(
                400, f"{name}: not supported by this server", param=name, code="unsupported"
            )


class GenerationRequest(Strict):
    """What completions and chats have in common."""

    model_config = ConfigDict(extra="allow")
    MOST_STRANGERS = 16
    UNSUPPORTED: ClassVar[dict[str, tuple[object, ...]]] = {}
    """Fields that can only have these values, because nothing else is done."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int | None = None
    seed: int | None = None
    stop: Text | Many[Text] | None = None
    stop_token_ids: Many[int] | None = None
    bad_words: Many[Text] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = None
    cache_salt: Text | None = None
    retain: Many[Text] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | Text | None = None
    guided_regex: Text | None = None
    guided_choice: Many[Text] | None = None
    guided_grammar: Text | None = None
    user: Text | None = None
    # Taken, and nothing follows from them.
    metadata: dict[str, str] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    store: bool | None = None

    @property
    def grammar_field(self) -> str:
        """The field that says what an answer must be; empty: none does. O(1).

        Raises:
            ApiError: several do.
        """
        given = [name for name in _GRAMMARS if getattr(self, name) is not None]
        if self.response_format is not None and self.response_format.type == "text":
            given.remove("response_format")
        if len(given) > 1:
            raise ApiError(400, f"{given[1]}: cannot be combined with {given[0]}", param=given[1])
        return given[0] if given else ""

    @property
    def grammar(self) -> Grammar | None:
        """What an answer must be; None: nothing. O(it).

        Raises:
            ApiError: it says so twice, or leaves out the schema.
            InvalidArgumentError: it means nothing.
        """
        match self.grammar_field:
            case "guided_json":
                return Grammar.json_schema(self.guided_json or "")
            case "guided_regex":
                return Grammar.regex(self.guided_regex or "")
            case "guided_choice":
                return Grammar.choice(self.guided_choice)
            case "guided_grammar":
                return Grammar("lark", self.guided_grammar or "")
            case "structured_outputs" if self.structured_outputs is not None:
                return self.structured_outputs.grammar
            case "response_format" if self.response_format is not None:
                return self.response_format.grammar
        return None

    def submission(
        self, prompt: Prompt, params: SamplingParams, lora_name: str | None = None
    ) -> Submission:
        """What it asks of the engine for a prompt, and the adapter that computes it. O(salt)."""
        return Submission(
            prompt,
            params,
            priority=self.priority or 0,
            client=self.user,
            namespace=salted(self.cache_salt or "", lora_name),
            retain=self.retentions,
        )

    @property
    def namespace(self) -> kvcore.Namespace:
        """Requests of the same namespace share cached blocks. O(salt)."""
        return salted(self.cache_salt or "")

    @property
    def retentions(self) -> tuple[kvcore.Retention, ...]:
        """Which of its tokens to keep in the cache longer than others. O(ranges).

        Raises:
            ApiError: one of them is no range.
        """
        try:
            return tuple([Retained.from_text(text).retention for text in self.retain or ()])
        except InvalidArgumentError as error:
            raise ApiError(400, str(error), param="retain") from error

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the counts of tokens. O(1)."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def repeats_usage(self) -> bool:
        """Whether every event has the counts so far, as vLLM tells them. O(1)."""
        options = self.stream_options
        return self.includes_usage and options is not None and bool(options.continuous_usage_stats)

    @property
    def unknown_fields(self) -> list[str]:
        """Fields that no one here knows, at most 16 of them, as a header can have them. O(1)."""
        known = _UNSUPPORTED_ANYWHERE
        names = [name for name in self.model_extra or () if name not in known]
        names = names[: self.MOST_STRANGERS]
        return [re.sub(r"[^\w.-]", "?", name[:64], flags=re.ASCII) for name in names]

    def check(self, *, is_strict: bool) -> None:
        """Refuse what is not done here, by name. O(fields).

        Args:
            is_strict: whether fields that no one here knows are refused too.

        Raises:
            ApiError: it asks for that.
        """
        for name in self.unknown_fields if is_strict else ():
            raise ApiError(400, f"{name}: unknown field", param=name, code="unknown_field")
        refuse_unsupported(self, self.UNSUPPORTED | _UNSUPPORTED_ANYWHERE)
        if self.n is not None and not 1 <= self.n <= MAX_SAMPLES:
            raise ApiError(400, f"n: wanted 1 to {MAX_SAMPLES}, got {self.n}", param="n")
        if self.stream_options is not None and not self.stream:
            raise ApiError(
                400, "stream_options: allowed only with stream=true", param="stream_options"
            )
        if self.prompt_logprobs is not None and (self.stream or getattr(self, "echo", None)):
            raise ApiError(
                400, "prompt_logprobs: cannot be combined with stream or echo",
                param="prompt_logprobs",
            )  # fmt: skip
        if self.priority is not None and abs(self.priority) >= 1 << 31:
            raise ApiError(
                400, f"priority: wanted a 32-bit integer, got {self.priority}", param="priority"
            )
        _ = self.retentions

    def sampling(
        self,
        defaults: Mapping[str, object],
        max_tokens: int,
        logprobs: int | None,
        *,
        scores_prompt: bool = False,
    ) -> SamplingParams:
        """The sampling parameters of each answer. O(fields).

        Args:
            defaults: the parameters that the request does not give.
            max_tokens: the most tokens of it.
            logprobs: how many likely tokens are told beside each, None: nothing.
            scores_prompt: whether the same is told of the prompt's tokens.

        Raises:
            ApiError: `logit_bias` names no tokens.
            InvalidArgumentError: a value is out of range.
        """
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        given: dict[str, object] = {
            "n": self.n,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "seed": self.seed,
            "stop": tuple(stop),
            "stop_token_ids": None if self.stop_token_ids is None else tuple(self.stop_token_ids),
            "bad_words": None if self.bad_words is None else tuple(self.bad_words),
            "max_tokens": max_tokens,
            "min_tokens": self.min_tokens,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "logit_bias": _biases(self.logit_bias),
            "ignore_eos": self.ignore_eos,
            "skip_special_tokens": self.skip_special_tokens,
            "logprobs": logprobs,
            "prompt_logprobs": logprobs if scores_prompt else self.prompt_logprobs,
            "grammar": self.grammar,
        }
        said = {name: value for name, value in given.items() if value is not None}
        return SamplingParams(**{**defaults, **said})  # type: ignore[arg-type]  # its own check says what is wrong


class CompletionRequest(GenerationRequest):
    """`POST /v1/completions`."""

    UNSUPPORTED: ClassVar[dict[str, tuple[object, ...]]] = {
        "suffix": ("",), "best_of": (), "store": (False,),
    }  # fmt: skip

    prompt: _Prompt
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each of the prompts. O(prompts)."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if prompt and isinstance(prompt[0], int):
            return [prompt]
        return list(prompt)  # type: ignore[arg-type]


class ChatRequest(ConversationOptions, GenerationRequest):
    """`POST /v1/chat/completions`."""

    UNSUPPORTED: ClassVar[dict[str, tuple[object, ...]]] = {
        "store": (False,), "functions": ([],), "function_call": ("none",),
        "modalities": (["text"],), "audio": (), "prediction": (), "verbosity": (),
        "web_search_options": (),
    }  # fmt: skip

    messages: Many[Message] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tool_choice: Mode | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    # Refused unless they ask for nothing.
    functions: list[Any] | None = None
    function_call: Any = None
    modalities: Many[str] | None = None
    audio: Any = None
    prediction: Any = None
    verbosity: Any = None
    web_search_options: Any = None

    def chat(self) -> Self:
        """It as a chat, as other requests have it: itself. O(1)."""
        return self

    @property
    def chosen(self) -> str | None:
        """The function that must be called; None: none must, or any. O(1)."""
        choice = self.tool_choice
        return choice.function.name if isinstance(choice, ChosenTool) else None

    @property
    def may_call(self) -> bool:
        """Whether the model may call a tool. O(1)."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def must_call(self) -> bool:
        """Whether the model has to call a tool. O(1)."""
        return self.chosen is not None or self.tool_choice == "required"

    @property
    def grammar_field(self) -> str:
        """The field that says what an answer must be, as above; `tools` where a call is demanded.

        Raises:
            ApiError: several do.
        """
        given = super().grammar_field
        if given and self.must_call:
            raise ApiError(
                400, f"{given}: cannot be combined with a tool_choice that demands a call",
                param=given,
            )  # fmt: skip
        return "tools" if self.must_call else given

    @property
    def grammar(self) -> Grammar | None:
        """What an answer must be, as above. O(it)."""
        if not self.must_call:
            return super().grammar
        is_parallel = self.parallel_tool_calls is not False
        return call_grammar(self.tools or [], self.chosen, is_parallel=is_parallel)

    def check(self, *, is_strict: bool) -> None:
        """Refuse what is not done here, as above, and choices of tools that mean nothing."""
        super().check(is_strict=is_strict)
        names = [tool.function.name for tool in self.tools or ()]
        if self.must_call and (not names or self.chosen not in {None, *names}):
            raise ApiError(
                400,
                f"tool_choice: wanted one of the functions of tools, got {self.chosen!r}"
                if names else "tool_choice: allowed only with tools",
                param="tool_choice",
            )  # fmt: skip
        if len(set(names)) < len(names):
            raise ApiError(400, "tools: wanted functions of different names", param="tools")


class TokenizeRequest(ConversationOptions):
    """`POST /tokenize`: of a prompt or of messages."""

    model: str | None = None
    prompt: Text | None = None
    messages: Many[Message] | None = None


class DetokenizeRequest(Strict):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: Many[int]


def _biases(bias: dict[str, float] | None) -> tuple[tuple[int, float], ...] | None:
    if bias is None:
        return None
    pairs = []
    for token, value in bias.items():
        if not (token.isascii() and token.isdigit() and len(token) <= 10):
            raise ApiError(
                400, f"logit_bias: wanted token ids, got {token!r:.40}", param="logit_bias"
            )
        pairs.append((int(token), value))
    return tuple(pairs)


class PromptTokensDetails(BaseModel):
    """What became of a prompt's tokens."""

    cached_tokens: int


class Usage(BaseModel):
    """How many tokens an answer took."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


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
    """What the assistant says."""

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
    """What is wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReport(BaseModel):
    """Every answer that is none."""

    type: Literal["error"] = "error"
    error: ErrorDetail


def field_names() -> set[str]:
    """The names of all fields that clients may send. O(fields)."""
    kinds: list[type[BaseModel]] = [Strict]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return {
        name
        for model in kinds
        for key, field in model.model_fields.items()
        for name in (key, field.alias or key)
    }
