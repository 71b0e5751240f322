"""The formats in which families of models write calls of tools and reasoning: a table.

Decides: which formats are known, by vLLM's names where it has them, and by what a model's format is
recognised: the tags that its chat template has, else its type.

A form of a call is a text with slots. A space stands for any white space, all else for itself:
`{name}` is the function's name, `{arguments}` a JSON object, `{call}` a JSON object that has both,
`{calls}` a list of these, `{lines}` several without brackets, `{number}` the call's number,
`{gemma}` an object as Gemma 4 writes it, and `{parameters}` parameters that each have a form of
their own with `{key}` and `{value}`. Forms are tried in their order, so the one that a chat
template prints comes first.

Does not know: how a text is read by them (`call_parser.py`).
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

_THINK = ("<think>", "</think>")


@dataclass(frozen=True, slots=True)
class CallForm:
    """A form of one call.

    Attributes:
        text: the text with its slots.
        parameter: the form of a parameter; one newline at each side of a value is layout where the
            form has it, and `~` is a newline that may be missing.
    """

    text: str
    parameter: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormat:
    """The format in which a family of models writes its answers.

    Attributes:
        calls: the forms of a call.
        section: the tags around all calls of an answer; empty: there are none.
        separator: the text between two calls that no tag opens.
        before: the layout between a text and a call.
        only_offered: True if only names of tools on offer make a call, as the form alone is weak.
        call_id: the identity of a call that the template writes, of `{name}` and `{number}`; empty:
            any will do.
        reasoning: the tags around reasoning; empty: there is none.
        reasons_again: True if reasoning may begin again later in an answer.
        layout: tags that are no part of any text.
        marks: texts of a chat template that has this format; it has all of one of the tuples.
        model_types: beginnings of the names of its models' types.
    """

    calls: tuple[CallForm, ...] = ()
    section: tuple[str, ...] = ()
    separator: str = ""
    before: str = ""
    only_offered: bool = False
    call_id: str = ""
    reasoning: tuple[str, ...] = ()
    reasons_again: bool = False
    layout: tuple[str, ...] = ()
    marks: tuple[tuple[str, ...], ...] = ()
    model_types: tuple[str, ...] = ()


_HERMES = AnswerFormat(
    calls=(CallForm("<tool_call> {call} </tool_call>"),),
    before="\n",
    reasoning=_THINK,
    marks=(("<tool_call>", "</tool_call>"),),
    model_types=("qwen2", "qwen3", "granitemoehybrid"),
)

_DEEPSEEK_CALL = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```"

_DEEPSEEK = AnswerFormat(
    calls=(
        CallForm(f"{_DEEPSEEK_CALL}<｜tool▁call▁end｜>"),
        CallForm("<｜tool▁call▁begin｜>{name}<｜tool▁sep｜> {arguments} <｜tool▁call▁end｜>"),
    ),
    section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    reasoning=_THINK,
    marks=(("<｜tool▁call▁begin｜>",),),
    model_types=("deepseek_v3",),
)


def _tagged(outer: str) -> tuple[CallForm, ...]:
    """Return the forms of a call with a tag for the function and each parameter. O(1).

    Args:
        outer: the name of the tag around the call.
    """
    begin, end = f"<{outer}>", f"</{outer}>"
    return (
        CallForm(
            f"{begin}\n<function={{name}}>\n{{parameters}}</function>\n{end}",
            "<parameter={key}>\n{value}\n</parameter>\n",
        ),
        CallForm(
            f"{begin} <function={{name}}> {{parameters}}</function> {end}",
            "<parameter={key}>~{value}~</parameter> ",
        ),
    )


_NAMED = (
    CallForm(
        "<tool_call>{name}\n{parameters}</tool_call>",
        "<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n",
    ),
    CallForm(
        "<tool_call> {name} {parameters}</tool_call>",
        "<arg_key>{key}</arg_key> <arg_value>{value}</arg_value> ",
    ),
)

_HARMONY_CALL = "<|channel|>commentary to=functions.{name}"

FORMATS = {
    "hermes": _HERMES,
    "qwen3": _HERMES,
    "qwen3_coder": AnswerFormat(
        calls=_tagged("tool_call"),
        before="\n",
        reasoning=_THINK,
        marks=(("<tool_call>", "<function=", "<parameter="),),
        model_types=("qwen3_5",),
    ),
    "seed_oss": AnswerFormat(
        calls=(
            CallForm(
                "<seed:tool_call>\n<function={name}>\n{parameters}</function>\n</seed:tool_call>",
                "<parameter={key}>{value}</parameter>\n",
            ),
            *_tagged("seed:tool_call")[1:],
        ),
        before="\n",
        reasoning=("<seed:think>", "</seed:think>"),
        marks=(("<seed:tool_call>", "<function="),),
        model_types=("seed_oss",),
    ),
    "glm45": AnswerFormat(
        calls=_NAMED,
        before="\n",
        only_offered=True,
        reasoning=_THINK,
        marks=(("<tool_call>", "</tool_call>", "<arg_key>"),),
        model_types=("glm4_moe",),
    ),
    "deepseek_v3": _DEEPSEEK,
    "kimi_k2": AnswerFormat(
        calls=(
            CallForm(
                "<|tool_call_begin|> functions.{name}:{number} <|tool_call_argument_begin|> "
                "{arguments} <|tool_call_end|>"
            ),
        ),
        section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        call_id="functions.{name}:{number}",
        reasoning=_THINK,
        marks=(("<|tool_call_begin|>", "<|tool_call_argument_begin|>"),),
        model_types=("kimi",),
    ),
    "mistral": AnswerFormat(
        calls=(
            CallForm("[TOOL_CALLS] {calls}"),
            CallForm("[TOOL_CALLS]{name}[ARGS] {arguments}"),
            CallForm("[TOOL_CALLS]{name}[CALL_ID]{id}[ARGS] {arguments}"),
            CallForm("[TOOL_CALLS] {name} {arguments}"),
        ),
        reasoning=("[THINK]", "[/THINK]"),
        layout=("[/TOOL_CALLS]",),
        marks=(("[TOOL_CALLS]",),),
        model_types=("mistral", "ministral", "mixtral"),
    ),
    "llama3_json": AnswerFormat(
        calls=(CallForm("<|python_tag|> {call}"), CallForm("{call}")),
        separator=";",
        only_offered=True,
        marks=(
            ('"parameters": ', "<|python_tag|>"), ('"parameters": ', "<|start_header_id|>"),
            ('"parameters": ', "<|header_start|>"),
        ),
    ),
    "phi4_mini_json": AnswerFormat(
        calls=(
            CallForm("<|tool_call|> {calls} <|/tool_call|>"),
            CallForm("functools {calls}"),
        ),
        marks=(("<|tool_call|>", "<|/tool_call|>"), ("<|tool|>", "<|/tool|>"), ("functools[",)),
        model_types=("phi4",),
    ),
    "granite": AnswerFormat(
        calls=(
            CallForm("<|tool_call|> {calls}"),
            CallForm("<tool_call> {calls}"),
            CallForm("<function_call> {call}"),
        ),
        reasoning=_THINK,
        marks=(("<|tool_call|>",), ("<function_call>",)),
        model_types=("granite",),
    ),
    "functionary": AnswerFormat(
        calls=(
            CallForm(">>>{name}\n{arguments}"),
            CallForm("<function={name}> {arguments} </function>"),
            CallForm("<|recipient|> {name}\n<|content|> {arguments}"),
        ),
        only_offered=True,
        layout=(
            ">>>all\n", "<|recipient|> all\n<|content|>", "<|from|> assistant\n", "<|stop|>",
        ),
        marks=(
            (">>>all",), ("<|recipient|>", "<|content|>"),
            ("<function=", "</function>", "<|eom_id|>"),
            ("<function=", "</function>", "<|python_tag|>"),
        ),
    ),
    "jamba": AnswerFormat(
        calls=(
            CallForm("<tool_calls> {calls} </tool_calls>"),
            CallForm("<tool_calls> {lines} </tool_calls>"),  # MiniMax-M1
        ),
        marks=(("<tool_calls>", "</tool_calls>"),),
        model_types=("jamba",),
    ),
    "internlm": AnswerFormat(
        calls=(CallForm("<|action_start|><|plugin|> {call} <|action_end|>"),),
        marks=(("<|action_start|>", "<|plugin|>"),),
        model_types=("internlm",),
    ),
    "gemma4": AnswerFormat(
        calls=(CallForm("<|tool_call>call:{name}{gemma}<tool_call|>"),),
        reasoning=("<|channel>thought\n", "<channel|>"),
        layout=("<turn|>", "<|tool_response>"),
        marks=(("<|tool_call>call:",),),
        model_types=("gemma4",),
    ),
    "openai": AnswerFormat(
        calls=(
            CallForm(f"{_HARMONY_CALL} <|constrain|> json<|message|> {{arguments}} <|call|>"),
            CallForm(f"{_HARMONY_CALL} json<|message|> {{arguments}} <|call|>"),
            CallForm(f"{_HARMONY_CALL}<|message|> {{arguments}} <|call|>"),
            CallForm(
                "<|start|>assistant to=functions.{name}<|channel|>commentary <|constrain|> "
                "json<|message|> {arguments} <|call|>"
            ),
            CallForm(
                "<|start|>assistant to=functions.{name}<|channel|>commentary json<|message|> "
                "{arguments} <|call|>"
            ),
        ),
        reasoning=("<|channel|>analysis<|message|>", "<|end|>"),
        reasons_again=True,
        layout=(
            "<|start|>assistant", "<|channel|>final<|message|>", "<|channel|>commentary<|message|>",
            "<|channel|>final <|constrain|>json<|message|>", "<|end|>", "<|return|>",
        ),
        marks=(("<|channel|>", "<|start|>assistant"),),
        model_types=("gpt_oss",),
    ),
}  # fmt: skip
"""Known formats."""

ALIASES = {
    "qwen3_xml": "qwen3_coder", "deepseek_r1": "deepseek_v3", "deepseek_v31": "deepseek_v3",
    "glm47": "glm45", "openai_gptoss": "openai",
}  # fmt: skip
"""Further names of formats, as vLLM has them."""


def format_of(name: str) -> AnswerFormat:
    """Return the format of this name. O(1)."""
    return FORMATS[ALIASES.get(name, name)]


def recognised(template: str, model_type: str) -> AnswerFormat | None:
    """Return the format of a model, or None if it is unknown. O(template).

    Args:
        template: the text of its chat template; of several formats whose tags it has, the one with
            the most tags counts.
        model_type: the type of the model, which counts if the template has no tag.
    """
    found = _best(
        (len(marks), one)
        for one in FORMATS.values()
        for marks in one.marks
        if all(mark in template for mark in marks)
    ) or _best(
        (len(begin), one)
        for one in FORMATS.values()
        for begin in one.model_types
        if model_type.startswith(begin)
    )
    if _THINK[0] not in template or (found is not None and found.reasoning):
        return found
    return replace(found or AnswerFormat(), reasoning=_THINK)


def _best(found: Iterable[tuple[int, AnswerFormat]]) -> AnswerFormat | None:
    best = max(found, default=None, key=lambda one: one[0])
    return None if best is None else best[1]
