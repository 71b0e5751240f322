"""The tools of a response: which of them a model can call, and under which name.

A model calls functions. A custom tool, whose input is a text, is offered as a function with one
text; a function in a namespace as one whose name begins with it. A tool that OpenAI's own servers
run, such as a web search, cannot be called and is left out.

Decides: these names, and how an item of an answer or of an earlier turn names such a tool.

Does not know: messages, how a call is written.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from model.serve.bounds import KNOWN, OTHER, Lenient, Many, Other, Text, by_type, of_type
from model.serve.errors import ApiError
from model.serve.tools import Mode, Name

_INPUT = "input"


class FlatFunction(Lenient):
    """A function."""

    type: Literal["function"]
    name: Name
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class CustomTool(Lenient):
    """A tool that takes a text, which may have to follow a grammar."""

    type: Literal["custom"]
    name: Name
    description: Text | None = None
    format: dict[str, Any] | None = None


_InNamespace = Annotated[
    Annotated[FlatFunction, of_type("function")]
    | Annotated[CustomTool, of_type("custom")]
    | Annotated[Other, OTHER],
    by_type("function", "custom", apart=True),
]


class Namespace(Lenient):
    """Tools whose names are their own, such as those of one MCP server."""

    type: Literal["namespace"]
    name: Name
    tools: Many[_InNamespace]


FlatTool = Annotated[
    Annotated[FlatFunction, of_type("function")]
    | Annotated[CustomTool, of_type("custom")]
    | Annotated[Namespace, of_type("namespace")]
    | Annotated[Other, OTHER],
    by_type("function", "custom", "namespace", apart=True),
]
"""A tool on offer."""


class ChosenFlatTool(Lenient):
    """A tool that must be called, or may be."""

    type: Literal["function", "custom"]
    name: Name
    namespace: Name | None = None


_Allowed = Annotated[
    Annotated[ChosenFlatTool, KNOWN] | Annotated[Other, OTHER], by_type("function", "custom")
]


class AllowedFlatTools(Lenient):
    """The tools that may be called, of those on offer."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Many[_Allowed]


FlatChoice = (
    Mode
    | Annotated[
        Annotated[ChosenFlatTool, of_type("function")]
        | Annotated[ChosenFlatTool, of_type("custom")]
        | Annotated[AllowedFlatTools, of_type("allowed_tools")]
        | Annotated[Other, OTHER],
        by_type("function", "custom", "allowed_tools", apart=True),
    ]
)
"""The mode in which tools are called, or the tool to call."""


@dataclass(frozen=True, slots=True)
class Offered:
    """A tool as items name it.

    Attributes:
        name: of the tool.
        namespace: that has it; None: it is in none.
        is_custom: True if it takes a text.
    """

    name: str
    namespace: str | None = None
    is_custom: bool = False

    @property
    def function_name(self) -> str:
        """The name of the function that the model calls. O(1)."""
        return self.name if self.namespace is None else f"{self.namespace}__{self.name}"

    def item(self, arguments: str) -> dict[str, object]:
        """Return the fields of an item that calls it. O(arguments).

        Args:
            arguments: of the function, as JSON; of a call that was cut off, their beginning.
        """
        called: dict[str, object] = {"name": self.name}
        if self.namespace is not None:
            called["namespace"] = self.namespace
        if self.is_custom:
            return {"type": "custom_tool_call", **called, _INPUT: input_of(arguments)}
        return {"type": "function_call", **called, "arguments": arguments}


def input_of(arguments: str) -> str:
    """Return the text that a custom tool is called with; of a call that was cut off, its JSON."""
    try:
        given = json.loads(arguments)[_INPUT]
    except (ValueError, RecursionError, TypeError, KeyError):
        return arguments
    return given if isinstance(given, str) else arguments


def arguments_with(text: str) -> str:
    """Return the arguments of a function that stands for a custom tool. O(text)."""
    return json.dumps({_INPUT: text})


def offered(
    tools: Sequence[FlatFunction | CustomTool | Namespace | Other],
) -> Iterator[tuple[str, FlatFunction | CustomTool | Other, str | None]]:
    """Yield each tool with its place and its namespace. O(tools)."""
    for number, tool in enumerate(tools):
        if not isinstance(tool, Namespace):
            yield f"tools.{number}", tool, None
            continue
        for inner, one in enumerate(tool.tools):
            yield f"tools.{number}.tools.{inner}", one, tool.name


def function_of(tool: FlatFunction | CustomTool, name: str) -> dict[str, object]:
    """Return a tool as a chat has it, under the name of a function. O(schema)."""
    if isinstance(tool, FlatFunction):
        said = tool.model_dump(exclude={"type"}, exclude_none=True)
        return {"type": "function", "function": {**said, "name": name}}
    rules = (tool.format or {}).get("definition")
    lines = [tool.description, f"The input follows this grammar:\n{rules}" if rules else None]
    parameters = {
        "type": "object", "properties": {_INPUT: {"type": "string"}}, "required": [_INPUT],
        "additionalProperties": False,
    }  # fmt: skip
    description = "\n\n".join(filter(None, lines)) or None
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def choice_of(
    choice: Mode | ChosenFlatTool | AllowedFlatTools | Other | None,
) -> object:
    """Return a choice of tools as a chat has it. O(tools).

    Raises:
        ApiError: it demands a tool that cannot be called.
    """
    if isinstance(choice, Other):
        raise ApiError(
            400,
            f"tool_choice: wanted a function or a custom tool, got {choice.type!r:.100}, which "
            "cannot be called here",
            param="tool_choice",
        )
    if isinstance(choice, AllowedFlatTools):
        tools = [_chosen(tool) for tool in choice.tools if isinstance(tool, ChosenFlatTool)]
        allowed = {"mode": choice.mode, "tools": tools}
        return {"type": "allowed_tools", "allowed_tools": allowed}
    return _chosen(choice) if isinstance(choice, ChosenFlatTool) else choice


def _chosen(tool: ChosenFlatTool) -> dict[str, object]:
    name = Offered(tool.name, tool.namespace).function_name
    return {"type": "function", "function": {"name": name}}
