"""The types of parameters that a model writes as plain text.

Decides: which JSON a text means by the schema of its parameter: a value that is no string where the
schema allows it, else the text itself, as it stands. A schema is looked at through `$ref`, `allOf`,
`anyOf`, `oneOf`, `enum`, `const`, lists of types and `nullable`; one without a type allows all.

Invariants: a text is never changed where the schema allows only strings.

Does not know: how parameters are found in a text.
"""

import ast
import json
from collections.abc import Iterator, Mapping
from typing import NoReturn

_PYTHON = {"True": "true", "False": "false", "None": "null"}
"""The words that a template writes when it prints a value as Python does."""

_IN_PLACE = ("allOf", "anyOf", "oneOf")


def as_json(text: str, schema: object, root: Mapping[str, object]) -> str:
    """Return the JSON that a text means. O(text + schema).

    Args:
        text: as the model wrote it.
        schema: of the parameter.
        root: of all parameters; references lead there.
    """
    said = text.strip()
    said = _PYTHON.get(said, said)
    parsed = _parsed(said)
    if parsed is not None and not isinstance(parsed[0], str) and _admits(schema, parsed[0], root):
        return said
    if not _admits(schema, text, root):
        if parsed is not None:
            return said
        if said[:1] in {"[", "{"} and (printed := _printed(said)) is not None:
            return printed
    return json.dumps(text, ensure_ascii=False)


def property_schema(root: Mapping[str, object], key: str) -> object:
    """Return the schema of a property; an empty one if it is unknown. O(schema)."""
    found = list(_properties(root, key, root, set()))
    return found[0] if len(found) == 1 else {"anyOf": found} if found else {}


def _properties(
    schema: object, key: str, root: Mapping[str, object], seen: set[int]
) -> Iterator[object]:
    """Yield the schemas that a property has in an object and in its parts."""
    if not isinstance(schema, Mapping) or id(schema) in seen:
        return
    seen.add(id(schema))
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and key in properties:
        yield properties[key]
    elif isinstance(more := schema.get("additionalProperties"), Mapping):
        yield more
    for part in _parts(schema, root):
        yield from _properties(part, key, root, seen)


def _parts(schema: Mapping[str, object], root: Mapping[str, object]) -> Iterator[object]:
    if isinstance(name := schema.get("$ref"), str):
        yield _referred(name, root)
    for combined in _IN_PLACE:
        if isinstance(parts := schema.get(combined), list):
            yield from parts


def _referred(name: str, root: Mapping[str, object]) -> object:
    """Return the schema that a reference within a schema leads to; an empty one elsewhere."""
    found: object = root
    for key in name.removeprefix("#").split("/")[1:]:
        step = key.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and step.isascii() and step.isdigit():
            found = found[int(step)] if int(step) < len(found) else {}
        else:
            found = found.get(step, {}) if isinstance(found, Mapping) else {}
    return found if name.startswith("#") else {}


def _parsed(text: str) -> tuple[object] | None:
    """Return the value of a text that is JSON, in a tuple because it may be null."""

    def refuse(name: str) -> NoReturn:
        raise ValueError(name)

    try:
        return (json.loads(text, parse_constant=refuse),)
    except (ValueError, RecursionError):
        return None


def _printed(text: str) -> str | None:
    """Return the JSON of a list or an object that is printed as Python does it; else None."""
    try:
        return json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None


def _admits(
    schema: object,
    value: object,
    root: Mapping[str, object],
    known: dict[int, bool] | None = None,
) -> bool:
    """Return True if a schema allows a value, as far as its types and its listed values say."""
    if not isinstance(schema, Mapping):
        return schema is not False
    known = {} if known is None else known
    if id(schema) not in known:
        known[id(schema)] = False  # a schema that is a part of itself adds nothing
        known[id(schema)] = (value is None and schema.get("nullable") is True) or all(
            _checks(schema, value, root, known)
        )
    return known[id(schema)]


def _checks(
    schema: Mapping[str, object], value: object, root: Mapping[str, object], known: dict[int, bool]
) -> Iterator[bool]:
    types = schema.get("type")
    if isinstance(types, str | list):
        yield any(_is_of(value, name) for name in ([types] if isinstance(types, str) else types))
    if isinstance(listed := schema.get("enum"), list):
        yield any(_same(value, one) for one in listed)
    if "const" in schema:
        yield _same(value, schema["const"])
    if isinstance(name := schema.get("$ref"), str):
        yield _admits(_referred(name, root), value, root, known)
    for combined, among in (("allOf", all), ("anyOf", any), ("oneOf", any)):
        if isinstance(parts := schema.get(combined), list):
            yield among(_admits(part, value, root, known) for part in parts)


def _same(value: object, other: object) -> bool:
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _is_of(value: object, name: object) -> bool:
    """Return True if a value has the type of this name in JSON Schema."""
    match name:
        case "string":
            return isinstance(value, str)
        case "boolean":
            return isinstance(value, bool)
        case "null":
            return value is None
        case "integer":
            is_whole = isinstance(value, float) and value.is_integer()
            return is_whole or (isinstance(value, int) and not isinstance(value, bool))
        case "number":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case "array":
            return isinstance(value, list)
        case "object":
            return isinstance(value, Mapping)
    return True
