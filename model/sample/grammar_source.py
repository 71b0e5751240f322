"""Grammars in llguidance's own format.

Decides: how a schema, a choice, calls of tools and a text behind reasoning are spelled there, with
white space as compact as models write it: a space behind a comma and a colon.

Invariants: each tool's schema is a separate grammar, so that `$ref`s stay within it.

Does not know: tokens, how a grammar is compiled.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from model.control.grammar import Grammar
from model.sample.json_schemas import Overlap, SchemaError, Schemas, place_of

COMPACT: dict[str, object] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}

_DESCRIPTIONS = frozenset({"type", "title", "description", "$schema"})
"""Keywords that say nothing about the properties of an object."""

_WHITE = frozenset({"whitespace_flexible", "whitespace_pattern"})

WHITE_SPACE = r"[ ]|\n[ ]{0,32}|\n\t{0,8}"
"""White space between the parts of a JSON answer by the letter: a space, or a new line with its
indentation.

Without a bound a model that is unsure may write white space to the end of its answer.
"""

_SLASHED = {"/": r"\/", "\n": r"\n"}
"""Characters that a lark grammar escapes inside of an expression."""

_AT_LINE = re.compile(r"at (\d+)\(\d+\): (?:failed to compile JSON schema: )?(.*)", re.DOTALL)
_EXCERPT = re.compile(r"\s+\d+ \| ")


@dataclass(frozen=True, slots=True)
class Source:
    """A grammar as llguidance reads it.

    Attributes:
        text: the grammar.
        lark: as text, if it is one.
        schemas: the schemas that it has, by the rule.
        overlaps: schemas that have to compile too, else patterns overlap with properties.
    """

    text: str
    lark: str
    schemas: dict[str, tuple[str, object]]
    overlaps: list[Overlap]

    def explained(self, why: str) -> str:
        """Return an error message of the library with the tool and the place in its schema."""
        found = _AT_LINE.match(why)
        lines = self.lark.splitlines()
        if found and int(found[1]) <= len(lines):
            rule = lines[int(found[1]) - 1].partition(":")[0]
            why = _EXCERPT.split(found[2])[0] if rule in self.schemas else why
            return self._in_schema(rule, why)
        return self._in_schema("", why)

    def _in_schema(self, rule: str, why: str) -> str:
        name, schema = self.schemas.get(rule, ("", None))
        place = "" if schema is None else place_of(why, schema)
        return f"{name}{place}{': ' if place else ''}{why}"


class _Writer:
    """Writes the source of one grammar."""

    def __init__(self, grammar: Grammar, *, is_literal: bool) -> None:
        self._grammar = grammar
        self._is_literal = is_literal if grammar.closes is None else not grammar.closes
        self.schemas: dict[str, tuple[str, object]] = {}
        self.overlaps: list[Overlap] = []

    def source(self) -> Source:
        """Return the source. O(grammar)."""
        grammar, lark = self._grammar, ""
        if grammar.reasoning is not None:
            lark = _behind(self._rules(), *grammar.reasoning)
        elif grammar.form in {"json_schema", "json_object"}:
            text = str(LLMatcher.grammar_from_json_schema(self._json("")))
            return Source(text, "", self.schemas, self.overlaps)
        elif grammar.form == "regex":
            return Source(str(LLMatcher.grammar_from_regex(grammar.text)), "", {}, [])
        elif grammar.form == "gbnf":
            lark = gbnf_to_lark(grammar.text)
        else:
            lark = self._rules()
        text = str(LLMatcher.grammar_from_lark(lark))
        return Source(text, lark, self.schemas, self.overlaps)

    def _rules(self) -> str:
        """Return the grammar as rules of lark, of which the first one is `start`."""
        text = self._grammar.text
        match self._grammar.form:
            case "json_schema" | "json_object":
                return f"start: json\njson: %json {self._json('json')}"
            case "regex":
                slashed = re.sub(r"\\.|[/\n]", lambda one: _SLASHED.get(one[0], one[0]), text)
                return f"start: /{slashed}/"
            case "choice":
                return f"start: {' | '.join(map(json.dumps, json.loads(text)))}"
            case "tool_calls":
                return "\n".join(self._calls(json.loads(text)))
            case _:
                return text

    def _json(self, rule: str) -> str:
        """Return a JSON form as a schema with its white space."""
        text = self._grammar.text
        schema = json.loads(text) if self._grammar.form == "json_schema" else {"type": "object"}
        own = schema.get("x-guidance") if isinstance(schema, dict) else None
        usual = dict[str, object](whitespace_pattern=WHITE_SPACE) if self._is_literal else COMPACT
        white: object = usual if own is None else own  # the library says what is wrong with it
        if isinstance(own, dict) and not _WHITE & {*own}:
            white = {**usual, **own}
        return self._schema(rule, "", schema, white, closes=not self._is_literal)

    def _schema(self, rule: str, name: str, schema: object, white: object, *, closes: bool) -> str:
        self.schemas[rule] = (name, schema)
        schemas = Schemas(schema, closes)
        try:
            made = schemas.prepared()
        except SchemaError as error:
            raise SchemaError(f"{name}{error}") from error
        self.overlaps += [Overlap(f"{name}{one.place}", one.schema) for one in schemas.overlaps]
        if made is False:
            return "false"
        return json.dumps({**(made if isinstance(made, dict) else {}), "x-guidance": white})

    def _calls(self, described: dict[str, list[dict[str, object]] | int]) -> Iterator[str]:
        """Yield the rules of calls; `Grammar.tool_calls` describes them."""
        tools, most = described["tools"], described["most"]
        if not isinstance(tools, list):
            raise TypeError(tools)
        calls = []
        for number, tool in enumerate(tools):
            begin = json.dumps(f'{{"name": "{tool["name"]}", "arguments": ')
            calls.append(f'{begin} args{number} "}}"')
        more = f' (", " call){{0,{most - 1}}}' if isinstance(most, int) and most > 1 else ""
        yield f'start: "[" call{more} "]"' if most else "start: args0"
        if most:
            yield f"call: {' | '.join(calls)}"
        for number, tool in enumerate(tools):
            closes = not self._is_literal or tool["strict"] is True
            name = f"the tool {tool['name']!r}: "
            schema = _of_arguments(name, tool["schema"], closes=closes)
            written = self._schema(f"args{number}", name, schema, COMPACT, closes=closes)
            yield f"args{number}: %json {written}"


def _of_arguments(name: str, schema: object, *, closes: bool) -> object:
    """Return the schema of a tool's arguments, which are an object even if it does not say so.

    Raises:
        SchemaError: it allows no object.
    """
    if not isinstance(schema, dict):
        return schema
    types = schema.get("type")
    types = "object" if types is None else types
    if "object" not in (types if isinstance(types, list) else [types]):
        raise SchemaError(f"{name}#/type: wanted object, got {json.dumps(types)[:40]}")
    made = {key: value for key, value in schema.items() if key != "nullable"} | {"type": "object"}
    if closes and {*made} <= _DESCRIPTIONS:
        made["properties"] = {}  # it takes nothing
    return made


def _behind(rules: str, begin: str, end: str) -> str:
    """Return rules of lark behind reasoning."""
    answer = re.sub(r"^start\b", "guided_answer", rules, flags=re.MULTILINE)
    start = f"({json.dumps(begin)} reasoning_text)?" if begin else "reasoning_text"
    ended = re.escape(end).replace("/", r"\/")
    text = f"reasoning_text: reasoned /\\n{{0,2}}/\nreasoned[lazy]: /(?s:.*){ended}/"
    return f"start: {start} guided_answer\n{text}\n{answer}\n"


def source_of(grammar: Grammar, *, is_literal: bool) -> Source:
    """Return a grammar as llguidance reads it. O(grammar).

    Args:
        grammar: the grammar.
        is_literal: True if schemas mean what JSON Schema says, unless the grammar itself says.

    Raises:
        Exception: it is not valid JSON, a schema that cannot be enforced, or not a valid grammar of
            its kind.
    """
    return _Writer(grammar, is_literal=is_literal).source()
