"""Grammars of texts: a schema, an expression, a choice, calls of tools or a grammar.

Decides: how these are spelled. Invariants: equal grammars are equal values, so each is compiled
once. A grammar that means nothing is refused when it is compiled (`sample/grammars.py`).

Does not know: tokens, the library that compiles it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from model.errors import InvalidSettingError

Form = Literal["json_schema", "json_object", "regex", "choice", "lark", "gbnf", "tool_calls"]

FORMS: tuple[Form, ...] = ("json_schema", "json_object", "regex", "choice", "lark", "gbnf")
"""The forms that a file or a request can describe."""

_WANTED = f"an object with one of {', '.join(FORMS)}"


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar that a text must follow from its first token to its last.

    Attributes:
        form: "json_schema", "json_object" (any object), "regex" (of the whole text), "choice",
            "lark" (a grammar as llguidance spells it), "gbnf" (as llama.cpp does) or "tool_calls".
        text: the schema, the choices or the tools as JSON, the expression, the grammar.
        closes: True if objects of a schema have no properties beside those that it names, unless
            the schema says so, and white space is compact; False: as JSON Schema says; None: as the
            engine's `json_schema_mode` says.
        reasoning: the texts around reasoning that comes first; None: none does. If the first is
            empty, the reasoning has begun, and must come to its end; else it may come or not.
    """

    form: Form
    text: str
    closes: bool | None = None
    reasoning: tuple[str, str] | None = None

    @classmethod
    def json_schema(
        cls, schema: Mapping[str, object] | str, *, closes: bool | None = None
    ) -> "Grammar":
        """Return the grammar of the JSON values that a schema allows. O(schema).

        Raises:
            InvalidSettingError: it is no JSON.
        """
        text = schema if isinstance(schema, str) else _as_json(schema)
        return cls("json_schema", text, closes)

    @classmethod
    def tool_calls(
        cls, tools: Sequence[tuple[str, Mapping[str, object], bool]], most: int
    ) -> "Grammar":
        """Return the grammar of calls of tools. O(schemas).

        Args:
            tools: for each its name, the schema of its arguments, and whether that is strict.
            most: the largest number of calls in a list; 0: the text is the arguments of the one
                tool.

        Raises:
            InvalidSettingError: a schema is no JSON.
        """
        told = [
            {"name": name, "schema": schema, "strict": strict} for name, schema, strict in tools
        ]
        return cls("tool_calls", _as_json({"tools": told, "most": most}))

    @classmethod
    def json_object(cls) -> "Grammar":
        """Return the grammar of all JSON objects. O(1)."""
        return cls("json_object", "")

    @classmethod
    def regex(cls, pattern: str) -> "Grammar":
        """Return the grammar of texts that an expression matches from end to end. O(1)."""
        return cls("regex", pattern)

    @classmethod
    def choice(cls, texts: object) -> "Grammar":
        """Return the grammar of some texts, one of which must follow. O(texts).

        Raises:
            InvalidSettingError: there are none, or one is empty or no text.
        """
        if not isinstance(texts, list | tuple) or not texts or not all(map(_is_text, texts)):
            raise InvalidSettingError("grammar", "a choice of texts, none empty", texts)
        return cls("choice", _as_json(list(texts)))

    def behind(self, begin: str, end: str) -> "Grammar":
        """Return the same behind reasoning between two texts; gbnf stays as it is. O(1)."""
        return self if self.form == "gbnf" else replace(self, reasoning=(begin, end))

    @classmethod
    def of(cls, described: object) -> "Grammar":
        """Return the grammar that a file or a request describes: {"regex": "[a-z]+"}. O(described).

        Raises:
            InvalidSettingError: it describes none.
        """
        if not isinstance(described, Mapping) or len(described) != 1:
            raise InvalidSettingError("grammar", _WANTED, described)
        [(form, value)] = described.items()
        if form == "json_schema" and isinstance(value, Mapping | str):
            return cls.json_schema(value)
        if form == "json_object" and value is True:
            return cls.json_object()
        if form == "choice":
            return cls.choice(value)
        if form in {"regex", "lark", "gbnf"} and isinstance(value, str):
            return cls(form, value)
        raise InvalidSettingError("grammar", _WANTED, described)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _as_json(value: object) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidSettingError("grammar", f"JSON ({error})", value) from error
