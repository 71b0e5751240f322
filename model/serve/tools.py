"""Tools: what a request offers to the model, and what an answer that must call one looks like.

Decides: that a call which `tool_choice` demands is written as JSON, by a grammar: the arguments of
the named function, or a list of objects with `name` and `arguments`. A call that the model is free
to make has the model's own form, which `reading.py` reads.

Does not know: how a model writes a call of its own accord, requests.
"""

import itertools
import json
import secrets
import string
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from model.control.grammar import Grammar
from model.serve.bounds import Lenient, Strict, Text
from model.serve.errors import ApiError

Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
"""The name of a function."""

Mode = Literal["none", "auto", "required"]
"""Whether tools are called: never, as the model likes, or at least one."""

MAX_CALLS = 16
"""The most calls of an answer that has to call tools: a weak model might never stop."""

_DIGITS = string.digits + string.ascii_letters
_ID_LENGTH = 9
_MOST_IDS = len(_DIGITS) ** _ID_LENGTH

_NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}


class Function(Lenient):
    """A function that the model may call; without parameters it takes none."""

    name: Name
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Lenient):
    """A tool, as a chat has it."""

    type: Literal["function"]
    function: Function


class ChosenFunction(Strict):
    """The function that must be called."""

    name: Name


class ChosenTool(Strict):
    """The tool that must be called."""

    type: Literal["function"]
    function: ChosenFunction


class CalledFunction(Lenient):
    """A function and what it was called with: a JSON object, as text."""

    name: Name
    arguments: Text = "{}"
    parsed_arguments: Any = None  # by OpenAI's client


class ToolCall(Lenient):
    """A call in an earlier message of the assistant."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None

    def as_template_reads_it(self, place: str) -> dict[str, object]:
        """Return it with its arguments as they came, if they are a JSON object. O(arguments).

        Raises:
            ApiError: they are no JSON object; `place` names the field.
        """
        arguments_of(self.function.arguments, f"{place}.function.arguments")
        function = {"name": self.function.name, "arguments": self.function.arguments or "{}"}
        called: dict[str, object] = {"type": self.type, "function": function}
        return called if self.id is None else {"id": self.id, **called}


def call_ids() -> Iterator[str]:
    """Return ids for calls: nine letters or digits, which the templates of Mistral's models want.

    They begin at random, so that those of another server are not met again.
    """
    begin = secrets.randbelow(_MOST_IDS)
    return (_short((begin + number) % _MOST_IDS) for number in itertools.count())


def _short(number: int) -> str:
    digits = []
    for _ in range(_ID_LENGTH):
        number, digit = divmod(number, len(_DIGITS))
        digits.append(_DIGITS[digit])
    return "".join(digits)


def arguments_of(text: str, field: str) -> dict[str, object]:
    """What a function was called with. O(text).

    Raises:
        ApiError: it is no JSON object; the field is named.
    """
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ApiError(400, f"{field}: wanted a JSON object as text", param=field)
    return found


def earlier_call(
    call_id: str | None, name: str | None, arguments: str, place: str
) -> dict[str, object]:
    """A call of an earlier answer, as a chat has it. O(arguments).

    Raises:
        ApiError: it has no name, or its arguments are no JSON object; `place` names it.
    """
    if name is None:
        raise ApiError(400, f"{place}.name: missing", param=f"{place}.name")
    arguments_of(arguments, f"{place}.arguments")
    return {"id": call_id, "function": {"name": name, "arguments": arguments}}


def call_grammar(tools: Sequence[Tool], name: str | None, *, is_parallel: bool) -> Grammar:
    """What an answer must be that calls tools. O(schemas).

    Args:
        tools: those on offer.
        name: of the one that must be called, whose arguments are the answer; None: the answer is a
            list of calls.
        is_parallel: whether the list may have several, at most `MAX_CALLS`.
    """
    offered = [
        (one.name, one.parameters or _NOTHING, one.strict is True)
        for one in (tool.function for tool in tools)
        if name in {None, one.name}
    ]
    most = 0 if name is not None else MAX_CALLS if is_parallel else 1
    return Grammar.tool_calls(offered, most)
