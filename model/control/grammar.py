"""The grammar that a text must follow: a schema, an expression, a choice or a grammar in words.

Decides: how these are spelled. Invariants: equal grammars are equal values, so each is compiled
once. A grammar that means nothing is refused when it is compiled (`sample/grammars.py`).

Does not know: tokens, the library that compiles it.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from model.errors import InvalidSettingError

Form = Literal["json_schema", "json_object", "regex", "choice", "lark", "gbnf"]

FORMS: tuple[Form, ...] = ("json_schema", "json_object", "regex", "choice", "lark", "gbnf")

ANY_OBJECT = '{"type": "object"}'

_SLASHED = {"/": r"\/", "\n": r"\n"}
"""The characters that an expression inside a lark grammar writes otherwise."""

WHITE_SPACE = r"[ ]|\n[ ]{0,32}|\n\t{0,8}"
"""The white space between the parts of a JSON answer: a space, or a new line and its indent.

Without a bound a model that is unsure may write white space to the end of its answer.
"""

_WANTED = f"an object with one of {', '.join(FORMS)}"


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar that a text must follow from its first token to its last.

    Attributes:
        form: "json_schema", "json_object" (any object), "regex" (of the whole text), "choice",
            "lark" (a grammar as llguidance spells it) or "gbnf" (as llama.cpp does).
        text: the schema or the choices as JSON, the expression, the grammar.
    """

    form: Form
    text: str

    @classmethod
    def json_schema(cls, schema: Mapping[str, object] | str) -> "Grammar":
        """Return the grammar of the JSON values that a schema allows. O(schema).

        Raises:
            InvalidSettingError: it is no JSON.
        """
        return cls("json_schema", schema if isinstance(schema, str) else _as_json(schema))

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
        """Return the same grammar after reasoning between `begin` and `end`. O(text).

        Args:
            begin: "": the reasoning has begun, and must come to its end; else it may come or not.
            end: its end.
        """
        text = self.text
        match self.form:
            case "json_schema" | "json_object":
                answer = f"guided_answer: %json {spaced(text or ANY_OBJECT)}"
            case "regex":
                slashed = re.sub(r"\\.|[/\n]", lambda one: _SLASHED.get(one[0], one[0]), text)
                answer = f"guided_answer: /{slashed}/"
            case "choice":
                answer = f"guided_answer: {' | '.join(map(_as_json, json.loads(text)))}"
            case "lark":
                answer = re.sub(r"^start\b", "guided_answer", text, flags=re.MULTILINE)
            case _:  # another language
                return self
        start = f"({_as_json(begin)} reasoning_text)?" if begin else "reasoning_text"
        ended = re.escape(end).replace("/", r"\/")
        rules = f"reasoning_text: reasoned /\\n{{0,2}}/\nreasoned[lazy]: /(?s:.*){ended}/"
        return Grammar("lark", f"start: {start} guided_answer\n{rules}\n{answer}\n")

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


def spaced(schema: str) -> str:
    """Return a schema with bounded white space, unless its `x-guidance` says otherwise. O(schema).

    Args:
        schema: as JSON; text that is no schema is returned unchanged.
    """
    try:
        read = json.loads(schema)
        read = {} if read is True else read
        if isinstance(read, dict):
            own = {"whitespace_pattern": WHITE_SPACE, **read.get("x-guidance", {})}
            if own.get("whitespace_flexible") is False:
                del own["whitespace_pattern"]
            return json.dumps({**read, "x-guidance": own})
    except (ValueError, TypeError, RecursionError):  # the compiler says what is wrong
        pass
    return schema


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _as_json(value: object) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidSettingError("grammar", f"JSON ({error})", value) from error
