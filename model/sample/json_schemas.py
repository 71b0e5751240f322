"""JSON schemas as the engine enforces them.

Decides: the meaning of a schema where models and clients differ from its letter. An object whose
`additionalProperties` is missing has no others, because clients do not send the keyword and a model
that may go on does; and `nullable` allows null. What an object consists of by `allOf`, `anyOf`,
`oneOf` and `$ref` is closed together. The letter of JSON Schema can be asked for.

And the refusal of what llguidance cannot enforce, with the place in the schema. Annotations, and
keywords whose values change nothing, are left out: a format that is not checked, `uniqueItems:
false`, `items: null`, an unknown `$schema`.

Does not know: grammars, tokens, requests.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

_FORMATS = frozenset({
    "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
})  # fmt: skip
"""The formats that llguidance enforces; JSON Schema has all formats as annotations."""

_DIALECTS = frozenset({
    *(f"http://json-schema.org/draft-0{number}/schema" for number in (3, 4, 6, 7)),
    "https://json-schema.org/draft/2019-09/schema", "https://json-schema.org/draft/2020-12/schema",
})  # fmt: skip
"""The values of `$schema` that llguidance knows; with others the schema is read as the latest."""

_TYPES = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})
_COUNTS = frozenset({
    "minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties",
})  # fmt: skip
_NUMBERS = frozenset({"minimum", "maximum", "multipleOf"})
_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
_SCHEMAS = frozenset({"items", "additionalItems", "additionalProperties"})
_IN_PLACE = ("allOf", "anyOf", "oneOf")
_NOTHING: Mapping[str, tuple[object, ...]] = {
    "uniqueItems": (False,), "not": (False,), "contains": (), "if": (),
    "propertyNames": (True, {}, {"type": "string"}), "dependentRequired": ({},),
    "dependentSchemas": ({},), "dependencies": ({},), "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}), "$dynamicRef": (), "$recursiveRef": (),
}  # fmt: skip
"""Keywords that cannot be enforced, with the values that change nothing."""

_VALUES = frozenset({"const", "default"})
"""Keywords that may be null; others that are null are missing, as some clients write all."""

_CONDITIONS = frozenset({"then", "else"})
_IDLE = frozenset({"then", "else", "minContains", "maxContains", "nullable"})
"""Keywords that mean nothing without another one, or that were seen to."""

_MOST_SCHEMAS = 50_000
_META = re.compile(r"([\\.+*?()|\[\]{}^$])")


class SchemaError(Exception):
    """A schema cannot be enforced.

    Attributes:
        args: the message, which begins with the place as a JSON pointer.
    """


@dataclass(frozen=True, slots=True)
class Overlap:
    """A schema that compiles unless patterns of properties match the name of a property.

    Attributes:
        place: where the patterns stand, as a JSON pointer.
        schema: the schema.
    """

    place: str
    schema: str


@dataclass(slots=True)
class Schemas:
    """Prepares one schema and all that it consists of.

    Args:
        root: the whole schema.
        closes: True if objects without `additionalProperties` have no others.

    Attributes:
        overlaps: schemas that have to compile too.
    """

    root: object
    closes: bool
    overlaps: list[Overlap] = field(default_factory=list)
    _num_left: int = _MOST_SCHEMAS

    def prepared(self) -> object:
        """Return the schema as it is enforced. O(schema).

        Raises:
            SchemaError: it cannot be enforced.
        """
        try:
            return self._schema(self.root, "#", frozenset())
        except RecursionError:
            raise SchemaError("#: it is nested too deeply") from None

    def _schema(self, schema: object, place: str, names: frozenset[str]) -> object:
        """Return a schema as it is enforced.

        Args:
            schema: the schema.
            place: its place, as a JSON pointer.
            names: the properties of the object that it is a part of.
        """
        self._num_left -= 1
        if not self._num_left:
            raise SchemaError("#: it is too large")
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            raise SchemaError(f"{place}: wanted a schema, got {json.dumps(schema)[:40]}")
        given = {key: value for key, value in schema.items() if value is not None or key in _VALUES}
        schema = self._with_named_properties(given)
        if self.closes and _is_composite(schema):
            names |= self._names(schema, set())
        made: dict[str, object] = {}
        for key, value in schema.items():
            inner = f"{place}/{_step(str(key))}"
            _add(made, self._keyword(schema, str(key), value, inner, names))
        if self.closes:
            self._close(made, names)
        self._check_patterns(made, place)
        return made

    def _with_named_properties(self, schema: Mapping[str, object]) -> Mapping[str, object]:
        """Return an object whose `propertyNames` are a list or a pattern by other keywords."""
        named = self._resolved(schema.get("propertyNames"))
        if not isinstance(named, Mapping) or {"properties", "patternProperties"} & {*schema}:
            return schema
        value = schema.get("additionalProperties", {})
        others = {key: each for key, each in schema.items() if key != "propertyNames"}
        match {key: each for key, each in named.items() if key not in {"type", "title"}}:
            case {"enum": list(names), **rest} if not rest and all(map(_is_text, names)):
                made: dict[str, object] = {"properties": dict.fromkeys(names, value)}
            case {"pattern": str(pattern), **rest} if not rest:
                made = {"patternProperties": {pattern: value}}
            case _:
                return schema
        return {**others, **made, "additionalProperties": False}

    def _keyword(
        self, schema: Mapping[str, object], key: str, value: object, place: str,
        names: frozenset[str],
    ) -> Mapping[str, object]:  # fmt: skip
        """Return a keyword as it is enforced; nothing if it changes nothing."""
        if key in _MAPS and isinstance(value, Mapping):
            each = {
                str(name): self._schema(one, f"{place}/{_step(str(name))}", frozenset())
                for name, one in value.items()
            }
            return {key: each}
        if key in _LISTS and isinstance(value, list):
            part = names if key in _IN_PLACE else frozenset()
            made = [self._schema(one, f"{place}/{n}", part) for n, one in enumerate(value)]
            return {"anyOf" if key == "oneOf" and self._excludes(value) else key: made}
        if key in _SCHEMAS:
            if isinstance(value, list):
                made = [self._schema(one, f"{place}/{n}", frozenset())
                        for n, one in enumerate(value)]  # fmt: skip
                return {key: made}
            return {key: self._schema(value, place, frozenset())}
        if key == "$ref" and names:
            return self._inlined(value, names)
        return _checked(schema, key, value, place, closes=self.closes)

    def _inlined(self, name: object, names: frozenset[str]) -> Mapping[str, object]:
        """Return what a reference means in an object of more parts."""
        target = self._referred(name)
        if not isinstance(target, Mapping):
            return {"$ref": name}
        return {"allOf": [self._schema(target, str(name), names)]}

    def _close(self, made: dict[str, object], names: frozenset[str]) -> None:
        """Close an object, if it says nothing of other properties."""
        properties = made.get("properties")
        if not isinstance(properties, dict) or "additionalProperties" in made:
            return
        required = made.get("required")
        others = {*names, *(required if isinstance(required, list) else ())}
        for name in sorted(str(other) for other in others):
            properties.setdefault(name, {})
        made["additionalProperties"] = False

    def _names(self, schema: object, seen: set[int]) -> frozenset[str]:
        """Return the properties of an object and all its parts."""
        if not isinstance(schema, Mapping) or id(schema) in seen:
            return frozenset()
        seen.add(id(schema))
        properties = schema.get("properties")
        found = frozenset(map(str, properties if isinstance(properties, Mapping) else ()))
        for part in self._parts(schema):
            found |= self._names(part, seen)
        return found

    def _parts(self, schema: Mapping[str, object]) -> Iterator[object]:
        if "$ref" in schema:
            yield self._referred(schema["$ref"])
        for key in _IN_PLACE:
            parts = schema.get(key)
            yield from parts if isinstance(parts, list) else ()

    def _referred(self, name: object) -> object:
        """Return the schema that a reference within the whole leads to; None elsewhere."""
        found = self.root
        if not isinstance(name, str) or not name.startswith("#"):
            return None
        for step in name[1:].split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, Mapping):
                found = found.get(key)
            elif isinstance(found, list) and key.isascii() and key.isdigit():
                found = found[int(key)] if int(key) < len(found) else None
            else:
                return None
        return found

    def _excludes(self, schemas: Sequence[object]) -> bool:
        """Return True if no value has two of these schemas, by a tag or by their types."""
        branches = [self._resolved(one) for one in schemas]
        tags = [_tags(one) for one in branches]
        common = set(tags[0]).intersection(*tags[1:]) if tags else set()
        kinds = [_kinds(one) for one in branches]
        return any(_are_disjoint([one[name] for one in tags]) for name in common) or (
            all(kinds) and _are_disjoint(kinds)
        )

    def _resolved(self, schema: object) -> object:
        for _ in range(8):
            if not isinstance(schema, Mapping) or "$ref" not in schema:
                break
            schema = self._referred(schema["$ref"])
        return schema

    def _check_patterns(self, made: Mapping[str, object], place: str) -> None:
        """Note a schema that compiles only if no pattern matches a property."""
        patterns, properties = made.get("patternProperties"), made.get("properties")
        if not isinstance(patterns, Mapping) or not isinstance(properties, Mapping):
            return
        names = "|".join(_META.sub(r"\\\1", name) for name in properties)
        if names and patterns:
            probe = {str(key): True for key in (*patterns, f"^(?:{names})$")}
            schema = json.dumps({"type": "object", "patternProperties": probe})
            self.overlaps.append(Overlap(f"{place}/patternProperties", schema))


def place_of(why: str, schema: object) -> str:
    """Return the place of what an error message quotes, or nothing if it is not found. O(schema).

    Args:
        why: the message of llguidance.
        schema: the schema that it refused.
    """
    for place, key, value in _keywords(schema, "#"):
        if key == "pattern" and isinstance(value, str) and value in why:
            return place
        if key == "patternProperties" and isinstance(value, Mapping) and any(
            str(pattern) in why for pattern in value
        ):  # fmt: skip
            return place
        if key == "oneOf" and "oneOf" in why:
            return place
    return ""


def _keywords(schema: object, place: str) -> Iterator[tuple[str, str, object]]:
    """Yield the keywords of a schema and of all in it, with their places."""
    waiting = [(schema, place)]
    while waiting:
        one, where = waiting.pop()
        if isinstance(one, list):
            waiting += [(each, f"{where}/{n}") for n, each in enumerate(one)]
        elif isinstance(one, Mapping):
            for key, value in one.items():
                inner = f"{where}/{_step(str(key))}"
                yield inner, str(key), value
                waiting.append((value, inner))


def _add(made: dict[str, object], keyword: Mapping[str, object]) -> None:
    """Add a keyword to a schema, which may have it already in place of another one."""
    for name, value in keyword.items():
        if name not in made:
            made[name] = value
            continue
        others = made.get("allOf")
        more = value if name == "allOf" and isinstance(value, list) else [{name: value}]
        made["allOf"] = [*(others if isinstance(others, list) else ()), *more]


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _step(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def _is_composite(schema: Mapping[str, object]) -> bool:
    """Return True if an object may get its properties from several parts."""
    combined = schema.get("allOf")
    num_parts = len(combined) if isinstance(combined, list) else 0
    return num_parts + sum(key in schema for key in ("properties", "anyOf", "oneOf", "$ref")) > 1


def _checked(
    schema: Mapping[str, object], key: str, value: object, place: str, *, closes: bool
) -> Mapping[str, object]:
    """Return a keyword that holds no schema as it is enforced."""
    is_nullable = closes and schema.get("nullable") is True
    if key in _COUNTS or key in _NUMBERS:
        return {key: _number(key, value, place)}
    if key == "format":
        types = schema.get("type", "string")
        is_text = types == "string" or (isinstance(types, list) and "string" in types)
        return {key: value} if value in _FORMATS and is_text else {}
    if key == "$schema":
        return {key: value} if str(value).removesuffix("#") in _DIALECTS else {}
    if key == "type":
        return {key: _types(value, place, is_nullable=is_nullable)}
    if key == "enum" and is_nullable and isinstance(value, list) and None not in value:
        return {key: [*value, None]}
    if key in _NOTHING:
        if not _changes_nothing(schema, key, value, closes=closes):
            raise SchemaError(f"{place}: this keyword cannot be enforced")
        return {}
    return {} if key in _IDLE else {key: value}


def _number(key: str, value: object, place: str) -> object:
    """Return the value of a keyword that takes a number."""
    if key in _NUMBERS:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise SchemaError(f"{place}: wanted a number, got {json.dumps(value)[:40]}")
        return value
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if type(value) is not int or value < 0:
        raise SchemaError(f"{place}: wanted a count, got {json.dumps(value)[:40]}")
    return value


def _types(value: object, place: str, *, is_nullable: bool) -> object:
    """Return one type or a list of types."""
    named = value if isinstance(value, list) else [value]
    for one in named:
        if not isinstance(one, str) or one not in _TYPES:
            raise SchemaError(f"{place}: unknown type {json.dumps(one)[:40]}")
    return [*named, "null"] if is_nullable and "null" not in named else value


def _changes_nothing(
    schema: Mapping[str, object], key: str, value: object, *, closes: bool
) -> bool:
    """Return True if a keyword that cannot be enforced allows everything here."""
    if key == "unevaluatedProperties" and value is False:
        return closes
    if key == "if":
        return _CONDITIONS.isdisjoint(schema)
    if key == "contains":
        return schema.get("minContains") == 0 and "maxContains" not in schema
    return any(value == one and type(value) is type(one) for one in _NOTHING.get(key, ()))


def _tags(schema: object) -> dict[str, frozenset[str]]:
    """Return the values of each required property of which few are allowed."""
    found: dict[str, frozenset[str]] = {}
    if not isinstance(schema, Mapping):
        return found
    properties, required = schema.get("properties"), schema.get("required")
    if schema.get("type") != "object" or not isinstance(properties, Mapping):
        return found
    dump = partial(json.dumps, sort_keys=True)
    for name in required if isinstance(required, list) else ():
        match properties.get(name):
            case {"const": one}:
                found[name] = frozenset({dump(one)})
            case {"enum": list(several)}:
                found[name] = frozenset(map(dump, several))
    return found


def _kinds(schema: object) -> frozenset[str]:
    """Return the types of a schema's values; empty: they are unknown."""
    match schema:
        case {"type": str(one)}:
            return frozenset({"number" if one == "integer" else one})
        case {"type": list(several)}:
            return frozenset("number" if one == "integer" else str(one) for one in several)
    return frozenset()


def _are_disjoint(sets: Sequence[frozenset[str]]) -> bool:
    return sum(map(len, sets)) == len(frozenset().union(*sets))
