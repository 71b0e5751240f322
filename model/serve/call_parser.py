"""Reads calls of tools out of a text that comes piece by piece.

Decides: when a text is a call in one of the forms of `answer_formats.py`. Each function here is a
generator that yields while it needs more text, and goes on where it was, so a text is read once
however it is cut. JSON is read strictly, and arguments keep its spelling.

Invariants: a text that is no call raises `NotACallError` at the first character that cannot be of
one, and the reader goes back to where it began.

Does not know: text around calls, reasoning, tokens.
"""

import json
import re
from collections.abc import Callable, Generator, Mapping
from functools import cache
from typing import NamedTuple, TypeVar

from model.serve.answer_formats import CallForm
from model.serve.parameter_types import as_json, property_schema

_T = TypeVar("_T")
Steps = Generator[None, None, _T]
"""Reads a part of a text; yields while it needs more of it."""

_DEEPEST = 64
_BLANK = re.compile(r"\s*")
_NAME = re.compile(r"[\w.-]*", re.ASCII)
_MOST_NAME = 128  # characters; a request may have no other name
_DIGITS = re.compile(r"[0-9]*")
_SCALAR = re.compile(r"[-+.\w]*")
_IS_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_ESCAPE_BEGUN = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_SLOT = re.compile(r"(\{\w+\}| )")
_GEMMA_QUOTE = '<|"|>'
_AS_JSON = {"True": "true", "False": "false", "None": "null"}


class NotACallError(Exception):
    """The text is no call.

    Attributes:
        is_cut: True if it could have become one, but the answer ended.
    """

    def __init__(self, *, is_cut: bool = False) -> None:
        super().__init__("no call")
        self.is_cut = is_cut


class Call(NamedTuple):
    """A call that was read.

    Attributes:
        name: the function.
        arguments: a JSON object, as text.
        number: the number that the model gives it; empty: none.
    """

    name: str
    arguments: str
    number: str = ""


class Source:
    """A text that grows.

    Attributes:
        text: what of it is not done with.
        place: where it is read.
        is_whole: True if nothing follows.
    """

    __slots__ = ("is_whole", "place", "text")

    def __init__(self, text: str = "", *, is_whole: bool = False) -> None:
        self.text, self.place, self.is_whole = text, 0, is_whole

    def drop(self) -> None:
        """Be done with the text up to the place. O(text that is left)."""
        self.text, self.place = self.text[self.place :], 0


def literal(source: Source, mark: str) -> Steps[bool]:
    """Read a mark, if it comes next. O(mark)."""
    while True:
        if source.text.startswith(mark, source.place):
            source.place += len(mark)
            return True
        if source.is_whole or not mark.startswith(source.text[source.place :]):
            return False
        yield


def run(source: Source, pattern: re.Pattern[str]) -> Steps[str]:
    """Read characters while they are of a pattern, which any number of them match. O(text)."""
    begin = source.place
    while True:
        found = pattern.match(source.text, source.place)
        source.place = found.end() if found else source.place
        if source.place < len(source.text) or source.is_whole:
            return source.text[begin : source.place]
        yield


def blank(source: Source) -> Steps[str]:
    """Read white space. O(it)."""
    return run(source, _BLANK)


def until(source: Source, mark: str) -> Steps[str]:
    """Read up to a mark, and the mark. O(text)."""
    begin = look = source.place
    while True:
        found = source.text.find(mark, look)
        if found >= 0:
            source.place = found + len(mark)
            return source.text[begin:found]
        if source.is_whole:
            raise NotACallError(is_cut=True)
        look = max(begin, len(source.text) - len(mark) + 1)
        yield


def expect(source: Source, text: str) -> Steps[None]:
    """Read a text in which a space is any white space and `~` one newline or none. O(text)."""
    for piece in re.split(r"([ ~])", text):
        if piece == " ":
            yield from blank(source)
        elif piece == "~":
            yield from literal(source, "\n")
        elif piece and not (yield from literal(source, piece)):
            raise NotACallError(is_cut=_is_cut(source, piece))


def _is_cut(source: Source, mark: str) -> bool:
    return source.is_whole and mark.startswith(source.text[source.place :])


def _char(source: Source) -> Steps[str]:
    """Return the next character, which is not read. O(1)."""
    while source.place >= len(source.text):
        if source.is_whole:
            raise NotACallError(is_cut=True)
        yield
    return source.text[source.place]


def value(source: Source, depth: int = _DEEPEST, *, is_gemma: bool = False) -> Steps[str]:
    """Read a value and return it as JSON. O(text).

    Args:
        source: the text.
        depth: how deeply it may be nested.
        is_gemma: True if keys are bare and strings have Gemma's quotes.
    """
    if not depth:
        raise NotACallError
    yield from blank(source)
    char = yield from _char(source)
    if char == "{":
        pairs = yield from members(source, depth, is_gemma=is_gemma)
        return "{" + ", ".join(f"{key}: {each}" for key, each in pairs) + "}"
    if char == "[":
        made = yield from _items(source, "]", lambda: value(source, depth - 1, is_gemma=is_gemma))
        return "[" + ", ".join(made) + "]"
    if char in {'"', "<"}:
        return (yield from _string(source, is_gemma=is_gemma))
    scalar = yield from run(source, _SCALAR)
    scalar = _AS_JSON.get(scalar, scalar) if is_gemma else scalar
    if not _IS_SCALAR.fullmatch(scalar):
        raise NotACallError(is_cut=source.is_whole and source.place == len(source.text))
    return scalar


def members(
    source: Source, depth: int = _DEEPEST, *, is_gemma: bool = False
) -> Steps[list[tuple[str, str]]]:
    """Read an object and return its keys and values, each as JSON. O(text)."""

    def member() -> Steps[tuple[str, str]]:
        yield from blank(source)
        if is_gemma and (yield from _char(source)) != "<":
            key = json.dumps((yield from until(source, ":")), ensure_ascii=False)
        else:
            key = yield from _string(source, is_gemma=is_gemma)
            yield from expect(source, " :")
        return key, (yield from value(source, depth - 1, is_gemma=is_gemma))

    yield from expect(source, " ")
    if (yield from _char(source)) != "{":
        raise NotACallError
    return (yield from _items(source, "}", member))


def _items(source: Source, closer: str, item: Callable[[], Steps[_T]]) -> Steps[list[_T]]:
    """Read what is between brackets, with commas between."""
    made: list[_T] = []
    source.place += 1
    yield from blank(source)
    if (yield from _char(source)) == closer:
        source.place += 1
        return made
    while True:
        made.append((yield from item()))
        yield from blank(source)
        char = yield from _char(source)
        if char not in {",", closer}:
            raise NotACallError
        source.place += 1
        if char == closer:
            return made


def _string(source: Source, *, is_gemma: bool) -> Steps[str]:
    """Read a string and return it as JSON."""
    if is_gemma:
        yield from expect(source, _GEMMA_QUOTE)
        return json.dumps((yield from until(source, _GEMMA_QUOTE)), ensure_ascii=False)
    begin = source.place
    yield from expect(source, '"')
    while True:
        yield from run(source, _PLAIN)
        char = yield from _char(source)
        if char == '"':
            source.place += 1
            return source.text[begin : source.place]
        while (found := _ESCAPE.match(source.text, source.place)) is None:
            rest = source.text[source.place : source.place + 6]
            if not _ESCAPE_BEGUN.fullmatch(rest) or source.is_whole:
                raise NotACallError(is_cut=bool(_ESCAPE_BEGUN.fullmatch(rest)))
            yield
        source.place = found.end()


def _whole(steps: Steps[_T]) -> _T:
    """Return what is read of a text that is whole."""
    try:
        next(steps)
    except StopIteration as done:
        made: _T = done.value
        return made
    except NotACallError as error:
        raise NotACallError from error  # this text is whole, the answer may not be
    raise NotACallError


def _call_of(pairs: list[tuple[str, str]]) -> Call:
    """Return the call that an object describes."""
    fields = {json.loads(key): text for key, text in pairs}
    if "function" in fields:
        return _call_of(_whole(members(Source(fields["function"], is_whole=True))))
    name = json.loads(fields.get("name", "null"))
    if not isinstance(name, str) or not 0 < len(name) <= _MOST_NAME or not _NAME.fullmatch(name):
        raise NotACallError
    return Call(name, _object(fields.get("arguments", fields.get("parameters", "null"))))


def _object(text: str) -> str:
    """Return arguments as the JSON of an object; some models write it as a string."""
    if text.startswith('"'):
        text = _whole(value(Source(json.loads(text), is_whole=True)))
    if text == "null":
        return "{}"
    if not text.startswith("{"):
        raise NotACallError
    return text


@cache
def pieces(text: str) -> tuple[str, ...]:
    """Return the slots of a form and the texts between them, in order. O(form), once."""
    return tuple(piece for piece in _SLOT.split(text) if piece)


def opener(form: CallForm) -> str:
    """Return the tag that a form begins with; empty: it has none. O(1)."""
    first = pieces(form.text)[0]
    return "" if first.startswith("{") else first


def calls(
    source: Source, form: CallForm, schemas: Mapping[str, Mapping[str, object]]
) -> Steps[list[Call]]:
    """Read what has this form. O(text).

    Args:
        source: the text.
        form: the form.
        schemas: those of the arguments of the tools on offer, which type parameters.
    """
    found: dict[str, str] = {"{name}": "", "{arguments}": "{}", "{number}": ""}
    made: list[Call] = []
    parts = pieces(form.text)
    for number, piece in enumerate(parts):
        match piece:
            case "{call}":
                made = [(yield from _listed(source))]
            case "{calls}":
                made = yield from _list(source)
            case "{lines}":
                made = yield from _lines(source)
            case "{arguments}" | "{gemma}":
                text = yield from value(source, is_gemma=piece == "{gemma}")
                found["{arguments}"] = _object(text)
            case "{parameters}":
                schema = schemas.get(found["{name}"], {})
                found["{arguments}"] = yield from _parameters(
                    source, form.parameter, parts[number + 1], schema
                )
            case "{name}" | "{id}" | "{number}":
                found[piece] = yield from _word(source, piece)
            case _:
                yield from _tag(source, piece, may_miss=number == len(parts) - 1 and _ends(parts))
    return made or [Call(found["{name}"], found["{arguments}"], found["{number}"])]


def _word(source: Source, slot: str) -> Steps[str]:
    text = yield from run(source, _DIGITS if slot == "{number}" else _NAME)
    if not 0 < len(text) <= _MOST_NAME:
        raise NotACallError(is_cut=source.is_whole and not text)
    return text


def _list(source: Source) -> Steps[list[Call]]:
    yield from blank(source)
    if (yield from _char(source)) != "[":
        raise NotACallError
    made = yield from _items(source, "]", lambda: _listed(source))
    if not made:
        raise NotACallError
    return made


def _lines(source: Source) -> Steps[list[Call]]:
    made = [(yield from _listed(source))]
    while True:
        yield from blank(source)
        if (yield from _char(source)) != "{":
            return made
        made.append((yield from _listed(source)))


def _listed(source: Source) -> Steps[Call]:
    return _call_of((yield from members(source)))


def _ends(parts: tuple[str, ...]) -> bool:
    """Return True if a call is complete before its last tag."""
    before = [piece for piece in parts[:-1] if piece != " "][-1]
    return before in {"{call}", "{calls}", "{arguments}", "{gemma}"} or before[0] != "{"


def _tag(source: Source, tag: str, *, may_miss: bool) -> Steps[None]:
    """Read a tag; the last one may be missing or cut off at the end of an answer."""
    try:
        yield from expect(source, tag)
    except NotACallError as error:
        if not (error.is_cut and may_miss):
            raise
        source.place = len(source.text)


def _parameters(
    source: Source, form: str, follows: str, schema: Mapping[str, object]
) -> Steps[str]:
    """Read parameters and return them as a JSON object.

    Args:
        source: the text.
        form: the form of each.
        follows: the tag behind the last.
        schema: the schema of all of them.
    """
    begin, _, rest = form.partition("{key}")
    between, _, end = rest.partition("{value}")
    key_end = re.split("[ ~\n]", between)[0]
    made: dict[str, str] = {}
    while (yield from literal(source, begin)):
        key = yield from until(source, key_end)
        if "\n" in key or key in made:
            raise NotACallError
        yield from expect(source, between[len(key_end) :])
        text = yield from _parameter(source, end, (begin, follows))
        made[key] = as_json(text, property_schema(schema, key), schema)
    pairs = (f"{json.dumps(key, ensure_ascii=False)}: {text}" for key, text in made.items())
    return "{" + ", ".join(pairs) + "}"


def _parameter(source: Source, end: str, follow: tuple[str, ...]) -> Steps[str]:
    """Read a value up to its end, behind which another parameter or the end of all follows."""
    tag, begin, after = end.strip(" ~") if "~" in end else end.rstrip(" \n"), source.place, end[-1:]
    while True:
        yield from until(source, tag)
        value_end = source.place - len(tag)
        place = source.place
        try:
            yield from expect(source, after if after in {" ", "\n"} else "")
        except NotACallError as error:
            if error.is_cut:
                raise
            source.place = place - len(tag) + 1
            continue
        behind = source.place
        for mark in follow:
            is_end = yield from literal(source, mark)
            source.place = behind
            if is_end:
                text = source.text[begin:value_end]
                return text.removesuffix("\n") if "~" in end else text
        source.place = place - len(tag) + 1
