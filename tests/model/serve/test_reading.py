"""What a model writes is read the same however it is cut, by the template of its family."""

import itertools
import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.control.grammar import Grammar
from model.serve.reading import Reader, Reading
from tests.model.networks import ByteCodec
from tests.model.serve.calls import ADD, CALL, NOW, OTHER

PIECES = ["It is 7.", "\n", "<think>", "</think>", CALL, OTHER, "<tool_call>", "</tool_call>", "{",
          "<", "<|im_end|>", "é", '{"name": "f"}']  # fmt: skip
OPENED = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n"


def reading(model_type="qwen3", tool=None, reasoning=None, template=None):
    codec = ByteCodec()

    def decode(tokens, *, skip_special_tokens=True):
        del skip_special_tokens
        return bytes(tokens).decode()

    made = SimpleNamespace(
        decode=decode, encode=codec.encode, chat_template=template, model_type=model_type
    )
    return Reading(made, tool, reasoning)


def parts_of(made, form, texts):
    ids = map(str, range(100))
    reader = made.open(form, lambda: next(ids))
    parts = [part for text in texts for part in reader.read(text, is_last=False)]
    parts += reader.read("", is_last=True)
    joined = []
    for part in parts:
        if joined and joined[-1].kind == part.kind != "call":
            joined[-1] = joined[-1]._replace(text=joined[-1].text + part.text)
        else:
            joined.append(part)
    return joined


@given(
    pieces=st.lists(st.sampled_from(PIECES), max_size=6),
    cuts=st.lists(st.integers(0, 200), max_size=8),
    prompt=st.sampled_from(["", OPENED]),
    tools=st.sampled_from([(), (ADD, NOW)]),
)
def test_the_parts_do_not_depend_on_how_a_text_is_cut(pieces, cuts, prompt, tools):
    made, text = reading(), "".join(pieces)
    form = made.free(prompt.encode(), tools)
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    cut = [text[begin:end] for begin, end in itertools.pairwise(places)]
    assert parts_of(made, form, cut) == parts_of(made, form, [text]) == parts_of(made, form, text)


def test_the_check_of_cuts_notices_white_space_that_is_lost_at_each_of_them(monkeypatch):
    told = Reader._tell

    def strips(self, text, **more):
        return told(self, text.strip(), **more)

    monkeypatch.setattr(Reader, "_tell", strips)
    with pytest.raises(AssertionError):
        test_the_parts_do_not_depend_on_how_a_text_is_cut()


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
def test_a_text_without_regions_comes_out_as_it_went_in(text):
    made = reading("llama")
    told = parts_of(made, made.free(b"x"), [text])
    assert "".join(part.text for part in told) == text


def calls_of(made, text, tools=(ADD, NOW)):
    told = parts_of(made, made.free(b"x", tools), [text])
    return [
        (name.text, json.loads(arguments.text))
        for name, arguments in itertools.pairwise(told)
        if name.kind == "call"
    ]


XML = "<tool_call>\n<function=add>\n<parameter=a>\n3\n</parameter>\n</function>\n</tool_call>"
GEMMA = '<|tool_call>call:add{a:3,why:<|"|>say "hi"<|"|>}<tool_call|>'


@pytest.mark.parametrize(
    ("flags", "text", "wanted"),
    [
        ({"model_type": "qwen3"}, CALL, {"a": 3, "b": 4}),
        ({"model_type": "qwen3_5"}, XML, {"a": 3}),
        ({"model_type": "gemma4"}, GEMMA, {"a": 3, "why": 'say "hi"'}),
        ({"model_type": "llama", "tool": "hermes"}, CALL, {"a": 3, "b": 4}),
        ({"model_type": "qwen3", "tool": "qwen3_coder", "reasoning": "qwen3"}, XML, {"a": 3}),
        ({"model_type": "llama", "reasoning": "gemma4"}, GEMMA, {"a": 3, "why": 'say "hi"'}),
    ],
)
def test_a_family_writes_calls_in_its_own_way(flags, text, wanted):
    assert calls_of(reading(**flags), text) == [("add", wanted)]


def test_a_model_whose_form_is_unknown_has_no_calls():
    made = reading("llama")
    assert not made.knows_calls
    assert calls_of(made, CALL) == []


JSON = '[{"name": "add", "arguments": {"a": 3, "b": 4}}]'


@pytest.mark.parametrize(
    ("prompt", "flags", "marks", "text", "wanted"),
    [
        (OPENED, {}, ("", "</think>"), f"Hm.</think>\n\n{JSON}",
         ["reasoning", "call", "arguments"]),
        (OPENED + "Hm.</think>", {}, None, JSON, ["call", "arguments"]),
        ("x", {}, None, JSON, ["call", "arguments"]),
        ("x", {"reasoning": "qwen3"}, ("<think>", "</think>"), f"<think>Hm.</think>{JSON}",
         ["reasoning", "call", "arguments"]),
        ("x", {"reasoning": "qwen3"}, ("<think>", "</think>"), JSON, ["call", "arguments"]),
    ],
)  # fmt: skip
def test_a_demanded_call_comes_behind_reasoning(prompt, flags, marks, text, wanted):
    made = reading(**flags)
    form = made.demanded(prompt.encode(), None)
    assert form.reasoning == marks
    told = parts_of(made, form, text)
    assert [part.kind for part in told] == wanted
    assert told[-1].text == '{"a": 3, "b": 4}'


GUIDES = [
    (Grammar.json_schema({"enum": [{"a": 1}]}), '{"a": 1}', '{"a":1}'),
    (Grammar.json_object(), '{"a": [1]}', "[1]"),
    (Grammar.regex(r"a/b\/c[/]\d+"), "a/b/c/12", "a/b/c12"),
    (Grammar.choice(['r"e\n', "b"]), 'r"e\n', "c"),
    (Grammar("lark", 'start: x y\nx: "q"\ny: "z"\n'), "qz", "q"),
]


@pytest.mark.parametrize(("grammar", "right", "wrong"), GUIDES)
@pytest.mark.parametrize("begin", ["", "<think>"])
def test_a_guide_holds_behind_reasoning(agents, grammar, right, wrong, begin):
    behind = grammar.behind(begin, "</think>")
    matcher = agents.engine.engine._grammars.compile(behind).result().matcher
    encode = agents.engine.engine.model.codec.encode

    def follows(text):
        own, tokens = matcher.deep_copy(), encode(text)
        return own.try_consume_tokens(tokens) == len(tokens) and own.is_accepting()

    thought = f'{begin}Hm, {{"a"}} or /\nmore?</think>\n\n'
    assert follows(thought + right)
    assert not follows(thought + wrong)
    assert follows(right) == bool(begin)
    assert not follows(wrong)
