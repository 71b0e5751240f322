"""The requests that clients send: OpenAI's fields, and those that vLLM's clients add.

Decides: names, types and defaults, which of OpenAI's fields are taken although nothing follows from
them, and which are refused by name because an answer without them would be another one. What a
value may be is checked where it is used: by `SamplingParams`.

Invariants: a field that is not here is an error, but in a request itself and in what clients keep
of earlier turns (messages, parts, tools, calls), where it is ignored; what is ignored or left out
of a request itself is named in a header, or refused with --strict-fields; a value of another type
is an error, and so is more than `bounds.py` allows.

Does not know: how anything is answered.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PlainValidator,
    PrivateAttr,
    model_validator,
)

import kvcore
from model.control.grammar import Grammar
from model.control.params import MAX_INT, SamplingParams
from model.control.submission import Prompt, Retained, Submission, salted
from model.errors import InvalidArgumentError, shown
from model.serve.bounds import OTHER, Many, Other, Strict, Text, by_type, checked_prompt, of_type
from model.serve.conversation import ConversationOptions, Message
from model.serve.errors import ApiError
from model.serve.tools import ChosenTool, Mode, call_grammar

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


_IGNORED: dict[str, tuple[object, ...]] = {
    "store": (False,), "service_tier": ("auto", "default"),
}  # fmt: skip

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


def ignored(asked: BaseModel, fields: Mapping[str, tuple[object, ...]]) -> list[str]:
    """Return the fields that have other values than those that ask for nothing. O(fields)."""
    return [
        name
        for name, idle in fields.items()
        if (value := getattr(asked, name, None)) is not None and value not in idle
    ]


def _in_header(names: Iterable[str], most: int) -> list[str]:
    """Return names as a header can have them, the first of them where they are many."""
    told = [re.sub(r"[^\w.() -]", "?", name[:64], flags=re.ASCII) for name in names]
    return told if len(told) <= most else [*told[:most], f"{len(told) - most} more"]


class GenerationRequest(Strict):
    """The fields that completions and chats have in common.

    Attributes:
        ignored: fields from which nothing follows although they ask for something.
        left_out: tools, items and the like that the model does not get, by their places.
    """

    model_config = ConfigDict(extra="allow")
    MOST_STRANGERS = 16
    UNSUPPORTED: ClassVar[dict[str, tuple[object, ...]]] = {}
    """Fields that can only have these values, because nothing else is done."""

    IGNORED: ClassVar[dict[str, tuple[object, ...]]] = {}
    """Fields from which nothing follows; with other values than these they are named."""

    _ignored: list[str] = PrivateAttr(default_factory=list)
    _left_out: list[str] = PrivateAttr(default_factory=list)

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
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    store: bool | None = None

    @property
    def grammar_field(self) -> str:
        """The field that says what an answer must be; empty: none does. O(1), of several O(them).

        Several are allowed where they say the same, as clients that know old and new names do.

        Raises:
            ApiError: several say different things.
        """
        given = [name for name in _GRAMMARS if getattr(self, name) is not None]
        if self.response_format is not None and self.response_format.type == "text":
            given.remove("response_format")
        if len(given) > 1 and len({self._guide(name) for name in given}) > 1:
            raise ApiError(
                400, f"{given[1]}: cannot be combined with another {given[0]}", param=given[1]
            )
        return given[0] if given else ""

    @property
    def grammar(self) -> Grammar | None:
        """What an answer must be; None: nothing. O(it).

        Raises:
            ApiError: it says so twice, or leaves out the schema.
            InvalidArgumentError: it means nothing.
        """
        return self._guide(self.grammar_field)

    def _guide(self, name: str) -> Grammar | None:
        """Return the grammar that one field asks for."""
        match name:
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
        """Fields that are not known here, at most 16 of them. O(1)."""
        return [name for name in self.model_extra or () if name not in _UNSUPPORTED_ANYWHERE]

    def note(self, fields: Iterable[str], left_out: Iterable[str]) -> None:
        """Add fields that are ignored and what is left out of the request. O(both)."""
        self._ignored += fields
        self._left_out += left_out

    @property
    def warnings(self) -> dict[str, list[str]]:
        """The names of what nothing follows from, by the reason. O(names)."""
        every = {
            "unknown fields were ignored": self.unknown_fields,
            "fields were ignored": [*ignored(self, self.IGNORED), *self._ignored],
            "left out, as it cannot be used here": self._left_out,
        }
        return {
            why: _in_header(names, self.MOST_STRANGERS) for why, names in every.items() if names
        }

    def check(self, *, is_strict: bool) -> None:
        """Refuse what is not done here, by name. O(fields).

        Args:
            is_strict: True if what would be named in a header is refused too.

        Raises:
            ApiError: it asks for that.
        """
        for why, names in self.warnings.items() if is_strict else ():
            is_unknown = why.startswith("unknown")
            told = "unknown field" if is_unknown else f"{why}, and --strict-fields refuses that"
            code = "unknown_field" if is_unknown else "unsupported"
            param = names[0].partition(" ")[0]
            raise ApiError(400, f"{names[0]}: {told}", param=param, code=code)
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
            # -1 asks for any seed, as in llama.cpp; OpenAI's others are signed.
            "seed": None if self.seed in {None, -1} else self.seed % (MAX_INT + 1),
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

    UNSUPPORTED: ClassVar[dict[str, tuple[object, ...]]] = {"suffix": ("",)}
    IGNORED: ClassVar[dict[str, tuple[object, ...]]] = _IGNORED

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

    def check(self, *, is_strict: bool) -> None:
        """Refuse what is not done here, as above, and more texts than are sent."""
        super().check(is_strict=is_strict)
        refuse_unsupported(self, {"best_of": (1, self.n)})


class AllowedTools(Strict):
    """The tools that may be called, of those on offer."""

    mode: Literal["auto", "required"]
    tools: Many[dict[str, Any]]

    @property
    def names(self) -> set[object]:
        """The names of those that are functions. O(tools)."""
        asked = [tool.get("function") for tool in self.tools if tool.get("type") == "function"]
        return {one.get("name") for one in asked if isinstance(one, dict)}


class AllowedChoice(Strict):
    """A choice that allows some tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


_Choice = (
    Mode
    | Annotated[
        Annotated[ChosenTool, of_type("function")]
        | Annotated[AllowedChoice, of_type("allowed_tools")]
        | Annotated[Other, OTHER],
        by_type("function", "allowed_tools", apart=True),
    ]
)


class ChatRequest(ConversationOptions, GenerationRequest):
    """`POST /v1/chat/completions`."""

    UNSUPPORTED: ClassVar[dict[str, tuple[object, ...]]] = {
        "functions": ([],), "function_call": ("none", "auto"), "modalities": (["text"],),
        "audio": (),
    }  # fmt: skip
    IGNORED: ClassVar[dict[str, tuple[object, ...]]] = {
        **_IGNORED, "prediction": (), "verbosity": ("medium",), "web_search_options": (),
    }  # fmt: skip

    messages: Many[Message] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tool_choice: _Choice | None = None
    parallel_tool_calls: bool | None = None
    # Refused or ignored unless they ask for nothing.
    functions: list[Any] | None = None
    function_call: Any = None
    modalities: Many[str] | None = None
    audio: Any = None
    prediction: Any = None
    verbosity: Any = None
    web_search_options: Any = None

    @model_validator(mode="wrap")
    @classmethod
    def _with_tools_to_call(cls, given: object, make: ModelWrapValidatorHandler[Self]) -> Self:
        """Leave out tools that are no functions, and those that the choice does not allow."""
        tools = given.get("tools") if isinstance(given, dict) else None
        left_out: list[str] = []
        if isinstance(given, dict) and isinstance(tools, list):
            kinds = [tool.get("type") if isinstance(tool, dict) else None for tool in tools]
            others = {
                number: kind
                for number, kind in enumerate(kinds)
                if isinstance(kind, str) and kind != "function"
            }
            left_out = [f"tools.{number} ({kind})" for number, kind in others.items()]
            kept = [tool for number, tool in enumerate(tools) if number not in others]
            given = {**given, "tools": kept}
        made = make(given)
        made.note((), left_out)
        if isinstance(made.tool_choice, AllowedChoice):
            allowed = made.tool_choice.allowed_tools
            made.tools = [t for t in made.tools or () if t.function.name in allowed.names]
            made.tool_choice = allowed.mode
        return made

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

        A `response_format` is that of an answer's text, and a demanded call has none.

        Raises:
            ApiError: several do.
        """
        given = super().grammar_field
        if given and given != "response_format" and self.must_call:
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
        choice = self.tool_choice
        wanted = self.chosen or (choice.type if isinstance(choice, Other) else None)
        if (wanted is not None and wanted not in names) or (self.must_call and not names):
            tools = [name for name in self._left_out if name.startswith("tools.")]
            reason = f"; these were left out: {', '.join(tools)}" if tools else ""
            got = f", got {shown(wanted)}" if wanted is not None else " to call, got none"
            raise ApiError(
                400, f"tool_choice: wanted one of the functions of tools{got}{reason}",
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
