"""Schemas as clients send them: closed and compact, annotations left out, the rest refused."""

import json

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from model.control.grammar import Grammar
from model.errors import InvalidSettingError
from model.sample import json_schemas
from model.sample.grammar_compiler import GrammarCompiler
from tests.model.networks import ByteCodec

END = 256


def compiler(*, is_literal=False, token_s=9.0):
    return GrammarCompiler(
        ByteCodec().describe, 257, frozenset({END}), token_s, is_literal=is_literal
    )


@pytest.fixture(scope="module")
def closed():
    return compiler(token_s=None)


@pytest.fixture(scope="module")
def literal():
    return compiler(is_literal=True, token_s=None)


@pytest.fixture(scope="module")
def trying():
    return compiler()


def takes(made, grammar, value):
    """Return True if a text follows a grammar to its end."""
    text = value if isinstance(value, str) else json.dumps(value)
    matcher = made.compile(grammar).result().matcher.deep_copy()
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def obj(**properties):
    return {"type": "object", "properties": properties}


INT, TEXT = {"type": "integer"}, {"type": "string"}
A, B = obj(a=INT), obj(b=INT)
DEFS = {"$defs": {"A": A, "B": B}}

CLOSED = {
    "an object": (A, [{"a": 1}, {}], [{"a": 1, "z": 2}]),
    "an object in another": (obj(o=A), [{"o": {"a": 1}}], [{"o": {"z": 1}}]),
    "one that is referred to": ({"$ref": "#/$defs/A", **DEFS}, [{"a": 1}], [{"z": 1}]),
    "items": ({"type": "array", "items": A}, [[{"a": 1}]], [[{"z": 1}]]),
    "a choice": ({"anyOf": [A, B]}, [{"a": 1}, {"b": 1}], [{"z": 1}, {"a": 1, "b": 1}]),
    "a choice of references": ({"anyOf": [{"$ref": "#/$defs/A"}, {"type": "null"}], **DEFS},
                               ["null", {"a": 1}], [{"z": 1}]),
    "all of two": ({"allOf": [A, B]}, [{"a": 1, "b": 1}, {"b": 1}], [{"z": 1}]),
    "all of one": ({"allOf": [{"$ref": "#/$defs/A"}], **DEFS}, [{"a": 1}], [{"z": 1}]),
    "all of two references": ({"allOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}], **DEFS},
                              [{"a": 1, "b": 1}], [{"z": 1}]),
    "parts of a part": ({"allOf": [{"allOf": [A, B]}, obj(c=INT)]},
                        [{"a": 1, "b": 1, "c": 1}], [{"z": 1}]),
    "properties beside a choice": ({**A, "anyOf": [B, obj(c=INT)]},
                                   [{"a": 1, "b": 1}, {"a": 1, "c": 1}], [{"z": 1}]),
    "properties beside a reference": ({**A, "$ref": "#/$defs/B", **DEFS}, [{"a": 1, "b": 1}],
                                [{"z": 1}]),
    "all of some and a reference": ({"allOf": [obj(c=INT)], "$ref": "#/$defs/A", **DEFS},
                                    [{"c": 1, "a": 1}], [{"z": 1}, {"a": "x"}]),
    "a reference and all of some": ({"$ref": "#/$defs/A", "allOf": [obj(c=INT)], **DEFS},
                                    [{"a": 1, "c": 1}], [{"z": 1}, {"c": "x"}]),
    "a choice by types beside another": ({"anyOf": [INT, TEXT], "oneOf": [TEXT, {"type": "null"}]},
                                         ['"x"'], ["3", "null"]),
    "one that needs what it does not describe": ({**A, "required": ["b"]},
                                                 [{"a": 1, "b": "x"}], [{"b": 1, "z": 1}]),
    "a choice of what is needed": ({**obj(a=INT, b=INT), "anyOf": [{"required": ["a"]},
                                                                   {"required": ["b"]}]},
                                   [{"a": 1}, {"b": 1}], [{}, {"a": 1, "z": 1}]),
    "one of itself": ({**obj(a=INT, next={"$ref": "#"})}, [{"a": 1, "next": {"a": 1}}],
                      [{"next": {"z": 1}}]),
    "patterns": ({**A, "patternProperties": {"^x_": INT}}, [{"a": 1, "x_1": 2}], [{"z": 1}]),
    "unevaluatedProperties": ({**A, "unevaluatedProperties": False}, [{"a": 1}], [{"z": 1}]),
    "one without properties": ({"type": "object"}, [{"z": 1}], []),
    "one that is open": ({**A, "additionalProperties": True}, [{"a": 1, "z": 1}], []),
    "one that says what others are": ({**A, "additionalProperties": INT}, [{"a": 1, "z": 1}],
                                      [{"a": 1, "z": "x"}]),
    "a default is no schema": (obj(a={**TEXT, "default": {"properties": {}}}), [{"a": "x"}], []),
    "a property by the name of a keyword": (obj(properties=INT, format=TEXT, type=TEXT),
                                            [{"properties": 1, "format": "x", "type": "y"}], []),
    "an enum is no schema": ({"enum": [{"type": 3, "properties": {"a": 1}}]},
                             [{"type": 3, "properties": {"a": 1}}], []),
}  # fmt: skip


@pytest.mark.parametrize("name", CLOSED)
def test_objects_are_closed_where_they_do_not_say_otherwise(closed, literal, name):
    schema, right, wrong = CLOSED[name]
    for value in right:
        assert takes(closed, Grammar.json_schema(schema), value), value
    for value in wrong:
        assert not takes(closed, Grammar.json_schema(schema), value), value
    if name != "unevaluatedProperties":
        assert takes(literal, Grammar.json_schema(schema), right[0])


def test_the_letter_of_json_schema_can_be_had(closed, literal):
    open_value, spaced = {"a": 1, "z": [2]}, '{ "a": 1,\n  "z": [ 2 ] }'
    for made, closes in ((closed, False), (literal, None)):
        grammar = Grammar.json_schema(A, closes=closes)
        assert takes(made, grammar, open_value)
    assert takes(literal, Grammar.json_schema(A), spaced)
    assert not takes(literal, Grammar.json_schema(A, closes=True), open_value)
    assert not takes(literal, Grammar.json_schema(A), '{"a":' + " " * 99 + "1}")


def test_white_space_is_compact(closed, literal):
    schema = obj(a={"type": "array", "items": INT})
    for grammar in (Grammar.json_schema(schema), Grammar.json_object()):
        assert takes(closed, grammar, '{"a": [1, 2]}')
        for spaced in ('{"a":[1,2]}', '{ "a": [1, 2]}', '{"a":\n[1, 2]}'):
            assert not takes(closed, grammar, spaced)
            assert takes(literal, grammar, spaced)
    own = {"x-guidance": {"whitespace_flexible": False}}
    assert takes(closed, Grammar.json_schema({**schema, **own}), '{"a":[1,2]}')
    assert takes(closed, Grammar.json_object(), {"z": {"y": None}})


IDLE = [
    {"type": "string", "format": "path"}, {"type": "string", "format": "binary"},
    {"type": "string", "format": "regex"}, {"type": "integer", "format": "int32"},
    {"type": "integer", "format": "date"}, {"type": "array", "uniqueItems": False},
    {"type": "array", "minItems": 0.0}, {"type": "array", "maxItems": 2.0},
    {"type": "string", "minLength": 0.0, "maxLength": None}, {"type": "object", "minProperties": 0},
    {"type": "string", "default": 3, "examples": [1], "title": "T", "description": "D"},
    {"type": "string", "readOnly": True, "writeOnly": False, "deprecated": True},
    {"type": "string", "contentMediaType": "text/plain", "contentEncoding": "base64",
     "contentSchema": {}},
    {"type": "string", "$comment": "c", "$id": "i", "$anchor": "a", "x-order": 1, "example": "e"},
    {"type": "array", "minContains": 1}, {"if": {}}, {"then": {}}, {"not": False},
    {"dependentRequired": {}}, {"type": "object", "propertyNames": {"type": "string"}},
    {"type": "object", "unevaluatedProperties": True}, {"type": "array", "unevaluatedItems": {}},
    {"type": "array", "contains": {}, "minContains": 0}, {"nullable": False, "type": "string"},
    {"type": "string", "discriminator": {"propertyName": "x"}, "xml": {}, "externalDocs": {}},
]  # fmt: skip


@pytest.mark.parametrize("schema", IDLE, ids=json.dumps)
def test_what_changes_nothing_is_left_out(closed, schema):
    value = {"integer": 3, "array": [], "object": {}}.get(schema.get("type"), "x/y")
    assert takes(closed, Grammar.json_schema(obj(v=schema)), {"v": value})


@pytest.mark.parametrize("dialect", [
    "http://json-schema.org/schema#", "https://json-schema.org/draft-07/schema#",
    "http://json-schema.org/draft-07/schema#", "https://json-schema.org/draft/2020-12/schema",
    "https://example.com/own.json", "", None,
])  # fmt: skip
def test_a_dialect_that_is_unknown_is_left_out(closed, dialect):
    schema = {"$schema": dialect, **obj(v=A)}
    assert takes(closed, Grammar.json_schema(schema), {"v": {"a": 1}})
    assert not takes(closed, Grammar.json_schema(schema), {"v": {"a": 1, "z": 1}})


@pytest.mark.parametrize("key", [
    "properties", "required", "items", "additionalProperties", "anyOf", "allOf", "enum", "pattern",
    "format", "type", "$ref", "$defs", "minLength", "not", "prefixItems", "uniqueItems",
])  # fmt: skip
def test_a_keyword_that_is_null_is_one_that_is_missing(closed, literal, key):
    for made in (closed, literal):
        assert takes(made, Grammar.json_schema({"type": "object", key: None}), {})
        assert takes(made, Grammar.json_schema({key: None, **obj(v={**A, key: None})}), {"v": {}})
    assert takes(closed, Grammar.json_schema({"const": None}), "null")
    assert not takes(closed, Grammar.json_schema({"const": None}), "1")


def test_null_is_allowed_where_a_schema_is_nullable(closed, literal):
    for schema in ({"type": "string", "nullable": True},
                   {"type": ["string", "integer"], "nullable": True},
                   {"type": "string", "enum": ["x"], "nullable": True}):  # fmt: skip
        assert takes(closed, Grammar.json_schema(schema), "null")
        assert takes(closed, Grammar.json_schema(schema), '"x"')
        assert not takes(literal, Grammar.json_schema(schema), "null")


def test_names_of_properties_may_be_listed_or_have_a_pattern(closed, literal):
    listed = {"type": "object", "propertyNames": {"$ref": "#/$defs/N"}, "additionalProperties": INT,
              "$defs": {"N": {"type": "string", "enum": ["a", "b"]}}}  # fmt: skip
    pattern = {"type": "object", "propertyNames": {"pattern": "^[ab]$"}}
    for made in (closed, literal):
        for schema in (listed, pattern):
            assert takes(made, Grammar.json_schema(schema), {"b": 1})
            assert not takes(made, Grammar.json_schema(schema), {"c": 1})
        assert not takes(made, Grammar.json_schema(listed), {"a": "x"})


def tagged(value, **more):
    return {**obj(kind={"const": value}, **more), "required": ["kind"]}


def test_a_choice_by_a_tag_or_by_types_is_a_choice(closed):
    parts = {"$defs": {"A": tagged("a", x=INT), "B": tagged("b", y=INT)}}
    refs = [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}]
    tags = Grammar.json_schema({"oneOf": refs, "discriminator": {"propertyName": "kind"}, **parts})
    assert takes(closed, tags, {"kind": "a", "x": 1})
    assert not takes(closed, tags, {"kind": "a", "y": 1})
    types = Grammar.json_schema({"oneOf": [INT, {"$ref": "#/$defs/T"}], "$defs": {"T": TEXT}})
    assert takes(closed, types, "3")
    assert takes(closed, types, '"3"')
    overlapping = {"oneOf": [INT, {"type": "number"}]}
    with pytest.raises(InvalidSettingError, match=r"#/properties/v/oneOf: oneOf constraints"):
        closed.compile(Grammar.json_schema(obj(v=overlapping))).result()


REFUSED = [
    ({"type": "array", "uniqueItems": True}, "#/properties/v/uniqueItems: .* cannot be enforced"),
    ({"not": TEXT}, "#/properties/v/not: .* cannot be enforced"),
    ({"if": {}, "then": TEXT}, "#/properties/v/if: .* cannot be enforced"),
    ({"type": "object", "propertyNames": {"maxLength": 3}}, "#/properties/v/propertyNames: "),
    ({**A, "propertyNames": {"pattern": "^a"}}, "#/properties/v/propertyNames: "),
    ({"type": "array", "contains": TEXT}, "#/properties/v/contains: "),
    ({"type": "array", "items": {"type": "array", "uniqueItems": True}},
     "#/properties/v/items/uniqueItems: "),
    ({"type": "string", "pattern": "(?=a)b"}, "#/properties/v/pattern: regex parse error"),
    ({"type": "object", "patternProperties": {"^a": {}, "^ab": {}}},
     "#/properties/v/patternProperties: .* not disjoint"),
    ({"type": "file"}, '#/properties/v/type: unknown type "file"'),
    ({"type": "array", "minItems": 2.5}, "#/properties/v/minItems: wanted a count, got 2.5"),
    ({"type": "integer", "minimum": "0"}, '#/properties/v/minimum: wanted a number, got "0"'),
    ({"items": 3}, "#/properties/v/items: wanted a schema, got 3"),
    ({"type": "object", "properties": {"a/b": {"$dynamicRef": "#x"}}},
     r"#/properties/v/properties/a~1b/\$dynamicRef: "),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "message"), REFUSED, ids=lambda one: str(one)[:40])
@pytest.mark.parametrize("most", [None, 0, 1])
def test_what_cannot_be_enforced_is_refused_by_its_tool_and_place(closed, schema, message, most):
    grammar, begin = Grammar.json_schema(obj(v=schema)), "json_schema that compiles \\("
    if most is not None:
        tools = [("search", obj(v=schema), False)]
        tools = [("idle", A, False), *tools] if most else tools
        grammar = Grammar.tool_calls(tools, most)
        begin = "schemas that can be enforced \\(the tool 'search': "
    for one in (grammar, grammar.behind("", "</think>")):
        with pytest.raises(InvalidSettingError, match=f"{begin}{message}"):
            closed.compile(one).result()


OVERLAPPING = [
    {**A, "patternProperties": {"^a": TEXT}},
    {**obj(**{"x.y": INT}), "patternProperties": {"x[.]": TEXT}},
    {**obj(b=INT, ab=INT), "patternProperties": {"^c$": INT, "b$": INT}},
    {"allOf": [{**A, "patternProperties": {"a": INT}}, B]},
]


@pytest.mark.parametrize("schema", OVERLAPPING, ids=json.dumps)
def test_a_pattern_that_matches_a_property_is_refused_at_once(trying, schema):
    message = "patternProperties: a pattern matches the name of a property"
    with pytest.raises(InvalidSettingError, match=f"#.*/{message}"):
        trying.compile(Grammar.json_schema(schema)).result()
    with pytest.raises(InvalidSettingError, match=f"the tool 'f': #.*/{message}"):
        trying.compile(Grammar.tool_calls([("f", schema, False)], 0)).result()


def test_patterns_beside_other_properties_are_taken(trying):
    schema = {**obj(a=INT, **{"x.y": INT}), "patternProperties": {"^x[^.]*$": TEXT}}
    assert takes(trying, Grammar.json_schema(schema), {"a": 1, "xz": "x"})


def test_a_schema_that_refers_to_itself_ever_more_often_is_refused():
    parts = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(40)}
    schema = {"$ref": "#/$defs/d0", "$defs": {**parts, "d40": A}}
    with pytest.raises(json_schemas.SchemaError, match="too large"):
        json_schemas.Schemas(schema, closes=True).prepared()
    deep = A
    for _ in range(2000):
        deep = {"items": deep}
    with pytest.raises(json_schemas.SchemaError, match="nested too deeply"):
        json_schemas.Schemas(deep, closes=True).prepared()


CALLS = [("add", obj(a=INT, b=INT), False), ("now", {"type": "object"}, False),
         ("free", {**A, "additionalProperties": True}, False)]  # fmt: skip


def test_calls_are_closed_and_compact_and_strict_ones_always(closed, literal):
    def said(name, arguments):
        return json.dumps([{"name": name, "arguments": arguments}])

    grammar = Grammar.tool_calls(CALLS, 2)
    for made in (closed, literal):
        assert takes(made, grammar, said("add", {"a": 1}))
        assert takes(made, grammar, said("free", {"a": 1, "z": 2}))
        assert not takes(made, grammar, said("add", {"a": 1}).replace(" ", ""))
    assert takes(closed, grammar, said("now", {}))
    for name, arguments in (("add", {"a": 1, "z": 2}), ("now", {"z": 2})):
        assert not takes(closed, grammar, said(name, arguments))
        assert takes(literal, grammar, said(name, arguments))
    strict = Grammar.tool_calls([(name, schema, True) for name, schema, _ in CALLS], 2)
    assert not takes(literal, strict, said("add", {"a": 1, "z": 2}))


@pytest.mark.parametrize("most", [0, 1])
@pytest.mark.parametrize("schema", [
    {"properties": {"a": INT}}, {**A, "type": ["object", "null"]}, {**A, "nullable": True},
    {"anyOf": [{"properties": {"a": INT}}, {"type": "null"}]}, {"oneOf": [A, {"type": "string"}]},
    {"$ref": "#/$defs/A", "$defs": {"A": {"properties": {"a": INT}}}}, {"enum": [1, "x", {"a": 1}]},
    {"required": ["a"]}, {**A, "type": None}, {"type": "object", "additionalProperties": INT},
], ids=json.dumps)  # fmt: skip
def test_arguments_are_an_object_whatever_else_the_schema_allows(closed, literal, schema, most):
    grammar = Grammar.tool_calls([("f", schema, False)], most)
    for made in (closed, literal):
        for arguments in ({"a": 1}, 1, "x", None, []):
            said = [{"name": "f", "arguments": arguments}] if most else arguments
            assert takes(made, grammar, json.dumps(said)) == isinstance(arguments, dict), arguments


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"title": "now", "description": "x"},
        {"$schema": "http://json-schema.org/draft-07/schema#"},
    ],
)
def test_a_tool_that_describes_no_parameters_takes_none(closed, more):
    for schema in ({"type": "object", **more}, more):
        grammar = Grammar.tool_calls([("now", schema, False)], 0)
        assert takes(closed, grammar, {})
        assert not takes(closed, grammar, {"z": 1})


@pytest.mark.parametrize("types", ["string", ["null", "array"], [], 5])
def test_a_tool_whose_arguments_are_no_object_is_refused_by_name(closed, types):
    with pytest.raises(InvalidSettingError, match="the tool 'f': #/type: wanted object, got"):
        closed.compile(Grammar.tool_calls([("f", {"type": types}, False)], 1)).result()


scalars = st.sampled_from([INT, TEXT, {"type": "boolean"}, {"enum": ["x", 3]}])
names = st.sampled_from("abcd")
objects = st.recursive(
    st.dictionaries(names, scalars, max_size=3).map(lambda made: obj(**made)),
    lambda inner: st.dictionaries(names, inner, max_size=2).map(lambda made: obj(**made))
    | st.lists(inner, min_size=1, max_size=2).map(lambda made: {"anyOf": made})
    | st.tuples(inner, names, scalars).map(
        lambda made: {"allOf": [made[0], obj(**{made[1] + "2": made[2]})]}),
    max_leaves=4,
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(schema=objects, data=st.data())
def test_a_value_of_the_named_properties_alone_is_still_taken(closed, schema, data):
    value = data.draw(of(schema))
    assert takes(closed, Grammar.json_schema(schema), value), (schema, value)
    if isinstance(value, dict):
        assert not takes(closed, Grammar.json_schema(schema), {**value, "zz": 1})


@st.composite
def of(draw, schema):
    """A value of a schema, in the order of its properties."""
    if "anyOf" in schema:
        return draw(of(draw(st.sampled_from(schema["anyOf"]))))
    if "allOf" in schema:
        return {key: each for part in schema["allOf"] for key, each in draw(of(part)).items()}
    if "enum" in schema:
        return draw(st.sampled_from(schema["enum"]))
    if schema["type"] == "object":
        kept = [key for key in schema["properties"] if draw(st.booleans())]
        return {key: draw(of(schema["properties"][key])) for key in kept}
    return {"integer": 7, "string": "x", "boolean": True}[schema["type"]]


def closes_each_part_alone(monkeypatch):
    monkeypatch.setattr(json_schemas, "_is_composite", lambda schema: False)


def closes_nothing(monkeypatch):
    monkeypatch.setattr(json_schemas.Schemas, "_close", lambda *_: None)


@pytest.mark.parametrize("plant", [closes_each_part_alone, closes_nothing])
def test_a_planted_bug_is_caught(plant, monkeypatch):
    plant(monkeypatch)
    inner = test_a_value_of_the_named_properties_alone_is_still_taken.hypothesis.inner_test
    with pytest.raises((AssertionError, InvalidSettingError)):
        settings(max_examples=100, deadline=None, phases=[Phase.generate])(
            given(schema=objects, data=st.data())(
                lambda schema, data: inner(compiler(token_s=None), schema, data)
            )
        )()
