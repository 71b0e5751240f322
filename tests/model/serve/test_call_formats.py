"""A call is read as it was made, in each format that models have, whatever its arguments hold."""

import json
import re
import typing
from functools import cache

import pytest
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

from model.serve import call_parser, config
from model.serve.answer_formats import ALIASES, FORMATS, format_of
from model.serve.reading import Reader
from tests.model.serve.test_reading import parts_of, reading


def dumps(value):
    return json.dumps(value, ensure_ascii=False)


def hermes(calls):
    texts = [f'\n<tool_call>\n{{"name": "{n}", "arguments": {dumps(a)}}}\n</tool_call>'
             for n, a in calls]  # fmt: skip
    return "".join(texts)


def printed(value):
    """A value as a template prints it that leaves all but lists and objects to Python."""
    return dumps(value) if isinstance(value, dict | list) else str(value)


def tagged(outer):
    def render(calls):
        texts = []
        for name, arguments in calls:
            values = "".join(
                f"<parameter={key}>\n{printed(value)}\n</parameter>\n"
                for key, value in arguments.items()
            )
            texts.append(f"\n<{outer}>\n<function={name}>\n{values}</function>\n</{outer}>")
        return "".join(texts)

    return render


def seed(calls):
    texts = []
    for name, arguments in calls:
        values = "".join(f"<parameter={key}>{printed(value)}</parameter>\n"
                         for key, value in arguments.items())  # fmt: skip
        texts.append(
            f"\n<seed:tool_call>\n<function={name}>\n{values}</function>\n</seed:tool_call>"
        )
    return "".join(texts)


def glm(calls):
    texts = []
    for name, arguments in calls:
        values = "".join(
            f"<arg_key>{key}</arg_key>\n"
            f"<arg_value>{value if isinstance(value, str) else dumps(value)}</arg_value>\n"
            for key, value in arguments.items()
        )
        texts.append(f"\n<tool_call>{name}\n{values}</tool_call>")
    return "".join(texts)


def section(begin, end, one, between=""):
    return lambda calls: begin + between.join(one(n, dumps(a)) for n, a in calls) + end


def listed(begin, end=""):
    def render(calls):
        return f"{begin}{dumps([{'name': name, 'arguments': each} for name, each in calls])}{end}"

    return render


def gemma(value):
    match value:
        case str():
            return f'<|"|>{value}<|"|>'
        case dict():
            return "{" + ",".join(f"{key}:{gemma(each)}" for key, each in value.items()) + "}"
        case list():
            return "[" + ",".join(map(gemma, value)) + "]"
    return dumps(value)


DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
CALL, SEP, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
HARMONY = ("<|start|>assistant<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}"
           "<|call|>")  # fmt: skip
RENDERED = {
    "hermes": [hermes],
    "qwen3_coder": [tagged("tool_call")],
    "seed_oss": [seed],
    "glm45": [glm],
    "deepseek_v3": [
        section(*DEEPSEEK, lambda n, a: f"{CALL}function{SEP}{n}\n```json\n{a}\n```{END}", "\n"),
        section(*DEEPSEEK, lambda n, a: f"{CALL}{n}{SEP}{a}{END}"),
    ],
    "kimi_k2": [
        section("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>",
                lambda n, a: f"<|tool_call_begin|>functions.{n}:0<|tool_call_argument_begin|>{a}"
                "<|tool_call_end|>"),
    ],
    "mistral": [
        listed("[TOOL_CALLS] "),
        section("", "", lambda n, a: f"[TOOL_CALLS]{n}[ARGS]{a}"),
        section("", "", lambda n, a: f"[TOOL_CALLS]{n}[CALL_ID]abcdefghi[ARGS]{a}"),
    ],
    "llama3_json": [
        section("", "", lambda n, a: f'{{"name": "{n}", "parameters": {a}}}', "; "),
        section("<|python_tag|>", "", lambda n, a: f'{{"name": "{n}", "parameters": {a}}}', "; "),
    ],
    "phi4_mini_json": [listed("<|tool_call|>", "<|/tool_call|>"), listed("functools")],
    "granite": [listed("<|tool_call|>"), listed("<tool_call>")],
    "functionary": [
        section("", "", lambda n, a: f">>>{n}\n{a}"),
        section("", "", lambda n, a: f"<function={n}>{a}</function>"),
        section("", "", lambda n, a: f"<|from|> assistant\n<|recipient|> {n}\n<|content|> {a}"),
    ],
    "jamba": [
        listed("<tool_calls>", "</tool_calls>"),
        section("<tool_calls>\n", "</tool_calls>",
                lambda n, a: f'{{"name": "{n}", "arguments": {a}}}\n'),
    ],
    "internlm": [
        section("", "", lambda n, a: f'<|action_start|><|plugin|>{{"name": "{n}", "parameters": '
                f"{a}}}<|action_end|>"),
    ],
    "gemma4": [
        lambda calls: "".join(f"<|tool_call>call:{n}{gemma(a)}<tool_call|>" for n, a in calls),
    ],
    "openai": [section("", "", HARMONY.format)],
}  # fmt: skip
"""Calls as the chat templates of each format write them."""

NAMELESS = {"llama3_json"}  # calls that no tag opens have no text before them
UNCLEAR = {
    "qwen3_coder": ("\n</parameter>\n<parameter=", "\n</parameter>\n</function>\n</tool_call>"),
    "seed_oss": ("</parameter>\n<parameter=", "</parameter>\n</function>\n</seed:tool_call>"),
    "glm45": ("</arg_value>\n<arg_key>", "</arg_value>\n</tool_call>"),
    "gemma4": ('<|"|>',),
}
"""Texts that a value cannot hold, because the format has no way to write them."""

COMMON = ["\n", "\n\n", " ", "  ", "\t", "\r\n", "`", "```\n", '"', "\\", "é", "😀", "\x00",
          "\u2028", "a", "12", "null", "True", "{", "}", "[1]", ": ", ", ", "<think>",
          "</think>"]  # fmt: skip
keys = st.text(st.characters(categories=["Ll", "Lu", "Nd"], include_characters="_ -."),
               min_size=1, max_size=6).filter(lambda key: key[0] != " ")  # fmt: skip


@cache
def pieces_of(name):
    """The tags of a format, and what may stand beside them."""
    form = FORMATS[name]
    texts = [piece for one in form.calls for text in (one.text, one.parameter)
             for piece in call_parser.pieces(text)]  # fmt: skip
    tags = {piece for piece in (*texts, *form.section, *form.layout, *form.reasoning)
            if piece[0] != "{"}  # fmt: skip
    return st.sampled_from(sorted(tags)) | st.sampled_from(COMMON)


@cache
def values_of(name):
    """Strings that hold the tags of a format, and any JSON of them."""
    strings = st.lists(pieces_of(name), max_size=5).map("".join) | st.text(
        st.characters(exclude_categories=["Cs"]), max_size=8
    )
    numbers = st.integers(-(10**30), 10**30) | st.floats(allow_nan=False, allow_infinity=False)
    return strings | st.recursive(
        st.none() | st.booleans() | numbers | strings,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
        max_leaves=6,
    )


def type_of(value):
    types = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array",
             dict: "object", type(None): "null"}  # fmt: skip
    return types[type(value)]


def is_text_alone(value):
    """Return True if a string looks like no other value."""
    try:
        json.loads(value)
    except ValueError:
        return value.strip() not in {"True", "False", "None"}
    return False


@st.composite
def typed(draw, value):
    """A schema of a value, which says its type in one of the ways of JSON Schema."""
    kind = {"type": type_of(value)}
    named = {"$ref": f"#/$defs/{kind['type']}"}
    ways = [kind, named, {"allOf": [named]}, {"anyOf": [named, {"type": "array", "minItems": 99}]},
            {"enum": [value, [["other"]]]}, {"const": value}, {"type": [kind["type"]]}]  # fmt: skip
    if not isinstance(value, str) or is_text_alone(value):
        ways += [{}, {"description": "any"}, {"type": [kind["type"], "null"]},
                 {**kind, "nullable": True}, {"oneOf": [{"type": "string"}, kind]}]  # fmt: skip
    return draw(st.sampled_from(ways))


@st.composite
def called(draw, name):
    """A tool, and what it is called with."""
    arguments = draw(st.dictionaries(keys, values_of(name), max_size=4))
    properties = {key: draw(typed(value)) for key, value in arguments.items()}
    defs = {name: {"type": name} for name in
            ("boolean", "integer", "number", "string", "array", "object", "null")}  # fmt: skip
    schema = {"type": "object", "properties": properties, "$defs": defs}
    return schema, arguments


def is_clear(value, unclear):
    """Return True if a format can write a value."""
    if isinstance(value, dict):
        return all(is_clear(each, unclear) for pair in value.items() for each in pair)
    if isinstance(value, list):
        return all(is_clear(each, unclear) for each in value)
    return not isinstance(value, str) or not any(text in f"\n{value}\n" for text in unclear)


SAID = ["", "So: the tag <tool_call> opens a call.", "Hm \n\n", "`[TOOL_CALLS]`", " a\tb <think>"]


def check_read_back(name, data):
    """Render calls as a template does, read them in pieces and at once, and compare."""
    render = data.draw(st.sampled_from(RENDERED[name]))
    made = data.draw(st.lists(called(name), min_size=1, max_size=2))
    assume(all(is_clear(arguments, UNCLEAR.get(name, ())) for _, arguments in made))
    tools = [{"function": {"name": f"f.{n}-x", "parameters": schema}}
             for n, (schema, _) in enumerate(made)]  # fmt: skip
    calls = [(f"f.{n}-x", arguments) for n, (_, arguments) in enumerate(made)]
    said = "" if name in NAMELESS else data.draw(st.sampled_from(SAID))
    text = said + render(calls)
    reader = reading("", tool=name)
    form = reader.free(b"x", tools)
    whole = parts_of(reader, form, [text])
    assert parts_of(reader, form, text) == whole
    place = data.draw(st.integers(0, len(text)))
    assert parts_of(reader, form, [text[:place], text[place:]]) == whole
    if said:
        assert (whole[0].kind, whole[0].text) == ("content", said)
        whole = whole[1:]
    assert [part.kind for part in whole] == ["call", "arguments"] * len(calls)
    pairs = zip(whole[::2], whole[1::2], strict=True)
    read = [(one.text, json.loads(two.text)) for one, two in pairs]
    assert repr(read) == repr(calls)  # 1 is not 1.0, nor True


FEW = settings(max_examples=25, deadline=None)


@pytest.mark.parametrize("name", RENDERED)
def test_arguments_are_read_as_they_were_written(name):
    FEW(given(st.data())(lambda data: check_read_back(name, data)))()


def check_cuts(name, data):
    """Read any pieces of a format's texts: nothing depends on the cuts, and nothing is lost."""
    call = st.sampled_from([render([("f", {"a": "x"})]) for render in RENDERED[name]])
    broken = st.tuples(call, st.integers(0, 60)).map(lambda one: one[0][: one[1]])
    text = "".join(data.draw(st.lists(pieces_of(name) | call | broken | st.just("f"), max_size=8)))
    reader = reading("", tool=name)
    tools = [{"function": {"name": "f", "parameters": {}}}] * data.draw(st.integers(0, 1))
    form = reader.free(data.draw(st.sampled_from([b"x", b"<think>\n"])), tools)
    whole = parts_of(reader, form, [text])
    assert parts_of(reader, form, text) == whole
    place = data.draw(st.integers(0, len(text)))
    assert parts_of(reader, form, [text[:place], text[place:]]) == whole
    gone = (*reader.format.layout, *reader.format.reasoning)
    if {part.kind for part in whole} <= {"content"} and not any(tag in text for tag in gone):
        assert "".join(part.text for part in whole) == ("" if form.is_reasoning else text)


@pytest.mark.parametrize("name", RENDERED)
def test_the_parts_do_not_depend_on_the_cuts_in_any_format(name):
    settings(FEW, max_examples=40)(given(st.data())(lambda data: check_cuts(name, data)))()


def strips_values(monkeypatch):
    made = call_parser.as_json
    monkeypatch.setattr(call_parser, "as_json", lambda text, *more: made(text.strip(), *more))


def knows_types_by_their_word_alone(monkeypatch):
    made = call_parser.as_json

    def as_json(text, schema, root):
        return made(text, schema if "type" in schema else {"type": "string"}, root)

    monkeypatch.setattr(call_parser, "as_json", as_json)


def ends_values_at_the_first_tag(monkeypatch):
    def parameter(source, end, follow):
        text = yield from call_parser.until(source, end.rstrip(" \n"))
        yield from call_parser.blank(source)
        return text

    monkeypatch.setattr(call_parser, "_parameter", parameter)


def ends_strings_at_any_quote(monkeypatch):
    monkeypatch.setattr(call_parser, "_ESCAPE", re.compile(r"\\"))


def ends_sections_at_any_tag(monkeypatch):
    def value(source, *more, **others):
        text = yield from call_parser.until(source, "}")
        return text + "}"

    monkeypatch.setattr(call_parser, "value", value)


def does_not_wait_for_the_rest_of_a_tag(monkeypatch):
    def literal(source, mark):
        is_there = source.text.startswith(mark, source.place)
        source.place += len(mark) * is_there
        return is_there
        yield

    monkeypatch.setattr(call_parser, "literal", literal)


def drops_blanks_before_calls(monkeypatch):
    told = Reader._tell
    monkeypatch.setattr(
        Reader, "_tell", lambda self, text, **more: told(self, text.rstrip(), **more)
    )


@pytest.mark.parametrize(
    ("plant", "name"),
    [
        (strips_values, "qwen3_coder"),
        (strips_values, "glm45"),
        (knows_types_by_their_word_alone, "glm45"),
        (ends_values_at_the_first_tag, "qwen3_coder"),
        (ends_strings_at_any_quote, "hermes"),
        (ends_sections_at_any_tag, "kimi_k2"),
        (does_not_wait_for_the_rest_of_a_tag, "deepseek_v3"),
        (drops_blanks_before_calls, "mistral"),
    ],
)
def test_a_planted_bug_is_caught(plant, name, monkeypatch):
    plant(monkeypatch)
    hunt = settings(FEW, max_examples=200, phases=[Phase.generate], report_multiple_bugs=False)
    with pytest.raises((AssertionError, ValueError)):
        hunt(given(st.data())(lambda data: check_read_back(name, data)))()


def test_every_format_is_tried_and_can_be_chosen():
    assert {format_of(name).calls for name in RENDERED} == {one.calls for one in FORMATS.values()}
    tools = set(typing.get_args(config.ToolCallParser))
    assert tools | {*typing.get_args(config.ReasoningParser)} == {*FORMATS, *ALIASES}
    assert all(format_of(name).calls for name in tools)
    assert all(format_of(name).reasoning for name in typing.get_args(config.ReasoningParser))
