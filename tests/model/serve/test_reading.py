"""What a model writes is read the same however it is cut, by the template of its family."""

import itertools
import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.control.grammar import Grammar
from model.serve.answer_formats import format_of
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


def test_of_a_model_whose_format_is_unknown_calls_are_text():
    made = reading("llama", template="{{ messages }}")
    assert not made.knows_calls
    assert calls_of(made, CALL) == []
    assert "--tool-call-parser" in made.warning
    assert reading("llama").warning is None  # it has no chat template, so no tools
    assert reading("qwen3", template="{{ messages }}").warning is None


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("<tool_call>\\n{...}\\n</tool_call>", "hermes"),
        ("<tool_call>\\n<function=x>\\n<parameter=y></tool_call>", "qwen3_coder"),
        ("<tool_call>{{ name }}<arg_key>k</arg_key></tool_call>", "glm45"),
        ("{{ '[TOOL_CALLS]' }}", "mistral"),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "deepseek_v3"),
        ("<|tool_calls_section_begin|><|tool_call_begin|><|tool_call_argument_begin|>", "kimi_k2"),
        ('<|python_tag|>{"name": x, "parameters": y}', "llama3_json"),
        ("<|tool_call|>[]<|/tool_call|>", "phi4_mini_json"),
        ("<|tool_call|>{{ calls }}", "granite"),
        ('{{ "<|start_header_id|>" }}{"name": x, "parameters": y}', "llama3_json"),
        ('{{ "<|header_start|>" }}{"name": x, "parameters": y}', "llama3_json"),
        (">>>all", "functionary"),
        ('<|start_header_id|>"parameters": x <function=y></function><|eom_id|>', "functionary"),
        ("<|start|>assistant<|channel|>final<|message|>", "openai"),
    ],
)
def test_a_format_is_recognised_by_the_tags_of_its_template(template, name):
    made = reading("qwen3", template=template)
    assert made.format.calls == format_of(name).calls
    assert reading("qwen3", tool="gemma4", template=template).format == format_of("gemma4")


def test_a_template_that_thinks_has_reasoning_whatever_its_calls_are():
    for template in ("<think> {{ x }}", '<think> <|python_tag|> "parameters": '):
        made = reading("llama", template=template)
        told = parts_of(made, made.free(b"x"), "<think>Hm.</think>\n\nA.")
        assert [(part.kind, part.text) for part in told] == [
            ("reasoning", "Hm."),
            ("content", "A."),
        ]


def tool(name, properties, **more):
    schema = {"type": "object", "properties": properties, **more}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def tagged(text):
    return (
        f"<tool_call>\n<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>\n</tool_call>"
    )


@pytest.mark.parametrize(
    "text",
    ["    return x", "\n", " ", "", "a\n\n", "\r\n\tx ", "</parameter>", "x</function></tool_call>",
     "<parameter=b>\n1\n</parameter>", "<think></think>", "12", "null", '"quoted"', "{}",
     "é😀\x00"],
)  # fmt: skip
def test_a_string_argument_keeps_each_of_its_characters(text):
    made = reading(tool="qwen3_coder")
    [(_, arguments)] = calls_of(made, tagged(text), [tool("f", {"a": {"type": "string"}})])
    assert arguments == {"a": text}


INTEGER = {"type": "integer"}
TYPES = [
    ({"$ref": "#/$defs/A"}, "12", 12),
    ({"$ref": "#/definitions/B"}, "[1, 2]", [1, 2]),
    ({"$ref": "#/$defs/gone"}, "12", 12),
    ({"$ref": "#/$defs/loop"}, "12", "12"),
    ({"enum": [1, 2]}, "1", 1),
    ({"enum": ["1", "2"]}, "1", "1"),
    ({"enum": ["a", None]}, "None", None),
    ({"const": True}, "True", True),
    ({"const": "true"}, "true", "true"),
    ({"anyOf": [INTEGER, {"type": "null"}]}, "null", None),
    ({"oneOf": [{"type": "string"}, INTEGER]}, "12", 12),
    ({"oneOf": [{"type": "string"}, INTEGER]}, "12a", "12a"),
    ({"allOf": [{"$ref": "#/$defs/A"}]}, "12", 12),
    ({"type": ["integer", "null"]}, "12", 12),
    ({"type": ["string", "null"]}, "12", "12"),
    ({"type": "string", "nullable": True}, "null", None),
    ({"type": "string"}, "None", "None"),
    ({"type": "number"}, "1.50", 1.5),
    ({"type": "integer"}, "3.0", 3.0),
    ({"type": "integer"}, "three", "three"),
    ({"type": "object"}, '{"b": [1]}', {"b": [1]}),
    ({"type": "array"}, "NaN", "NaN"),
    ({}, "12", 12),
    ({}, "twelve", "twelve"),
    ({"description": "any"}, '{"a": null}', {"a": None}),
    (True, "false", False),
]


@pytest.mark.parametrize(("schema", "text", "wanted"), TYPES, ids=str)
@pytest.mark.parametrize("name", ["qwen3_coder", "glm45"])
def test_an_argument_has_the_type_that_its_schema_means(name, schema, text, wanted):
    defs = {"A": INTEGER, "loop": {"anyOf": [{"$ref": "#/$defs/loop"}, {"type": "string"}]}}
    one = tool("f", {"a": schema}, **{"$defs": defs}, definitions={"B": {"type": "array"}})
    call = tagged(text)
    if name == "glm45":
        pair = f"<arg_key>a</arg_key>\n<arg_value>{text}</arg_value>"
        call = f"<tool_call>f\n{pair}\n</tool_call>"
    [(_, arguments)] = calls_of(reading(tool=name), call, [one])
    assert repr(arguments) == repr({"a": wanted})


@pytest.mark.parametrize(("text", "types", "wanted"), [
    ("['a', \"b'c\"]", "array", ["a", "b'c"]), ("{'a': True, 'b': None}", "object",
                                                  {"a": True, "b": None}),
    ("[{'a': [1.5]}]", ["array", "null"], [{"a": [1.5]}]), ("['a']", ["array", "string"], "['a']"),
    ("[f(1)]", "array", "[f(1)]"), ("[" * 5000, "array", "[" * 5000),
    ("{1, 2}", "object", "{1, 2}"),
])  # fmt: skip
def test_a_value_that_python_printed_is_read_where_no_text_is_allowed(text, types, wanted):
    tool = {"type": "function", "function": {"name": "f", "parameters": {
        "properties": {"s": {"type": types}}}}}  # fmt: skip
    told = (f"<tool_call>\n<function=f>\n<parameter=s>\n{text}\n</parameter>\n</function>\n"
            "</tool_call>")  # fmt: skip
    assert calls_of(reading(tool="qwen3_coder"), told, [tool]) == [("f", {"s": wanted})]


def test_the_last_channel_may_name_the_form_of_its_text():
    text = '<|channel|>final <|constrain|>json<|message|>{"a": 1}<|return|>'
    made = reading(tool="openai")
    [part] = parts_of(made, made.free(b"<|start|>assistant"), text)
    assert (part.kind, part.text) == ("content", '{"a": 1}')


def test_a_schema_of_many_choices_is_looked_at_once():
    chain = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(60)}
    one = tool("f", {"a": {"$ref": "#/$defs/d0"}}, **{"$defs": {**chain, "d60": INTEGER}})
    assert calls_of(reading(tool="qwen3_coder"), tagged("7"), [one]) == [("f", {"a": 7})]


OPENERS = {
    "deepseek_r1": ("<｜User｜>Hi<｜Assistant｜><think>\n", "</think>"),
    "qwen3": ("<|im_start|>assistant\n<think>\n", "</think>"),
    "glm45": ("<|user|>\nHi<|assistant|>\n<think>", "</think>"),
    "granite": ("<|start_of_role|>assistant<|end_of_role|><think>\n", "</think>"),
    "mistral": ("[INST]Hi[/INST][THINK]", "[/THINK]"),
    "seed_oss": ("<seed:bos>assistant\n<seed:think>", "</seed:think>"),
    "gemma4": ("<|turn>model\n<|channel>thought\n", "<channel|>"),
}


@pytest.mark.parametrize("name", OPENERS)
def test_reasoning_that_the_prompt_opens_is_read_in_every_template(name):
    prompt, close = OPENERS[name]
    made = reading("", reasoning=name)
    form = made.free(prompt.encode())
    for text, wanted in (
        (f"T\n{close}\n\nA", [("reasoning", "T"), ("content", "A")]),
        (f"T{close}A {close} B", [("reasoning", "T"), ("content", f"A {close} B")]),
        ("T", [("reasoning", "T")]),
        (f"{close}  A", [("content", "  A")]),
    ):
        assert [(part.kind, part.text) for part in parts_of(made, form, text)] == wanted
    closed = made.free((prompt + close).encode())
    assert not closed.may_reason
    begun = made.free(prompt.encode() + b"So", continued=made.format.reasoning[0] + "So")
    assert begun.is_reasoning


def test_a_prompt_that_speaks_of_a_tag_opens_nothing():
    made = reading("", reasoning="deepseek_r1")
    for prompt in (
        "Is <think> a tag?<｜Assistant｜>",
        "<think>a</think>b<｜User｜>c<｜Assistant｜>",
    ):
        form = made.free(prompt.encode())
        assert (form.is_reasoning, form.may_reason) == (False, True)
    form = made.free(b"x", continued="It is")
    assert [part.kind for part in parts_of(made, form, "<think>7</think>")] == ["content"]


QUOTED = [
    "The tag <tool_call> opens a call.",
    "<tool_call> and </tool_call>",
    "<tool_call>{}</tool_call>",
    '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
    '<tool_call>{"name": "add", "arguments": "no"}</tool_call>',
    '<tool_call>{"name": "add", "arguments": {"a": 1,}}</tool_call> x',
    f"Write `{CALL}` for it.",
    f"Write:\n```\n{CALL}\n```\nThat is all.",
    f"- ```xml\n  {CALL}\n  ```\nThat is all.",
    f"1. So:\n\n    ```\n    {CALL}\n    ```\n",
    f"> ~~~ a`b\n> {CALL}\n> ~~~\n",
    f'It is "{CALL}".',
    CALL[:-14],
    "after <think>x</think> it",
]


@pytest.mark.parametrize("text", QUOTED)
@pytest.mark.parametrize("before", ["", "So:\n\n", "  "])
def test_what_only_looks_like_a_region_is_text_and_whole(text, before):
    made = reading()
    [part] = parts_of(made, made.free(b"x", (ADD, NOW)), before + text)
    assert (part.kind, part.text) == ("content", before + text)


def test_a_tag_at_the_end_of_the_prompt_begins_a_call_and_is_not_repeated():
    made = reading(tool="functionary")
    form = made.free(b"...>>>", (NOW,))
    for text, wanted in (
        ("now\n{}", [("call", "now"), ("arguments", "{}")]),
        ("all\nHi. >>>", [("content", "Hi. >>>")]),
        ("Hi. >>>", [("content", "Hi. >>>")]),
        ("now\n{", [("content", "now\n{")]),
    ):
        assert [(part.kind, part.text) for part in parts_of(made, form, [text])] == wanted
        assert [(part.kind, part.text) for part in parts_of(made, form, text)] == wanted


def test_a_tag_that_is_a_special_token_is_never_quoted():
    made = reading()
    made.has_special_tags = True
    told = parts_of(made, made.free(b"x", (ADD, NOW)), f"```\nNot closed.\n{CALL}")
    assert [part.kind for part in told] == ["content", "call", "arguments"]
    made = reading(tool="openai")
    text = (
        "<|channel|>commentary<|message|>It's `a.<|end|><|start|>assistant<|channel|>commentary "
        "to=functions.now <|constrain|>json<|message|>{}<|call|>"
    )
    told = parts_of(made, made.free(b"<|start|>assistant", (NOW,)), text)
    assert [(part.kind, part.text) for part in told] == [
        ("content", "It's `a."), ("call", "now"), ("arguments", "{}")
    ]  # fmt: skip


@pytest.mark.parametrize(
    "before",
    ["", "So `x`:", "So:\n", "```\na\n```\n\n", "It's: ", 'He said "a".', "```ls``` lists:",
     "```` ``` ```` opens code:", "1. ```sh\n   ls\n   ```", "- ~~~\n  ls\n  ~~~",
     "> ```\n> ls\n> ```"],
)  # fmt: skip
@pytest.mark.parametrize("after", ["", "\n", "\nDone.", f"\n{OTHER}"])
def test_a_call_is_read_beside_any_text(before, after):
    made = reading()
    text = f"{before}\n{CALL}{after}"
    told = parts_of(made, made.free(b"x", (ADD, NOW)), text)
    assert [part.text for part in told if part.kind == "call"][:1] == ["add"]
    content = "".join(part.text for part in told if part.kind == "content")
    assert content == before + (after if "Done" in after else "")


def test_a_call_that_ends_with_the_answer_may_lack_its_closing_tag():
    for size in range(len("</tool_call>") + 1):
        text = CALL[: len(CALL) - size]
        assert calls_of(reading(), text) == [("add", {"a": 3, "b": 4})]
    assert calls_of(reading(), CALL[:-14]) == []


NAMED = '{"name": "now", "arguments": {}}'


@pytest.mark.parametrize("name", ["a b", "now ", "größe", "a/b", "x" * 129])
def test_a_call_whose_name_no_request_may_have_is_text(name):
    for made, text in (
        (reading(), f"<tool_call>{NAMED.replace('now', name)}</tool_call>"),
        (reading(tool="mistral"), f"[TOOL_CALLS]{name}[ARGS]{{}}"),
    ):
        [part] = parts_of(made, made.free(b"x", (NOW,)), text)
        assert (part.kind, part.text) == ("content", text)


def test_the_template_of_kimi_has_the_name_in_the_identity_of_a_call():
    made = reading(tool="kimi_k2")
    text = (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:3"
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>"
    )
    [call, _] = parts_of(made, made.free(b"x", (NOW,)), text)
    assert (call.text, call.call_id) == ("now", "functions.now:3")
    form = made.demanded(b"x", None, num_earlier=5)
    told = parts_of(made, form, f"[{', '.join([NAMED] * 2)}]")
    assert [part.call_id for part in told if part.kind == "call"] == [
        "functions.now:5", "functions.now:6"
    ]  # fmt: skip
    [call, _] = parts_of(made, made.demanded(b"x", "now"), "{}")
    assert call.call_id == "functions.now:0"


def test_the_end_of_an_answer_is_no_text_where_special_tokens_are_shown():
    made = reading(template="<tool_call></tool_call>")
    made.has_special_tags, made._ends = True, ("<|im_end|>", "<|end|>")
    form = made.free(b"x", (NOW,))
    for text in ("It is.", "a <|im_end|> b", "<|im_", f"Hm.\n{OTHER}", ""):
        for end in ("<|im_end|>", "<|end|>"):
            told = parts_of(made, form, [text + end])
            assert told == parts_of(made, form, text + end)
            assert told == parts_of(made, made.free(b"x", (NOW,)), [text])


@pytest.mark.parametrize("text", ["</tool_call>", '"}}</tool_call>', "<tool_call>", "\\", "\u2028"])
def test_a_string_may_hold_the_tags_of_calls(text):
    call = json.dumps({"name": "add", "arguments": {"a": text}}, ensure_ascii=False)
    assert calls_of(reading(), f"<tool_call>{call}</tool_call>") == [("add", {"a": text})]


def test_the_numbers_of_arguments_keep_their_spelling():
    made = reading()
    for number in ("1.0", "1e400", "0.1000000000000000055511151231257827", "9" * 5000):
        text = f'<tool_call>{{"name": "add", "arguments": {{"a": {number}}}}}</tool_call>'
        [_, arguments] = parts_of(made, made.free(b"x", (ADD,)), text)
        assert arguments.text == f'{{"a": {number}}}'


CUT = '[{"name": "add", "arguments": {"a": 3, "b": "x\\u00e9"}}, {"name": "now", "arguments": {}}]'


@pytest.mark.parametrize("size", range(len(CUT) + 1))
def test_a_demanded_call_that_is_cut_off_is_told_as_far_as_it_goes(size):
    made = reading()
    told = parts_of(made, made.demanded(b"x", None), CUT[:size])
    assert {part.kind for part in told} <= {"call", "arguments"}
    names = [part.text for part in told if part.kind == "call"]
    begun = [CUT.index(" {", n) for n in (20, 70)]
    assert names == ["add", "now"][: sum(size >= place for place in begun)]
    first = "".join(part.text for part in told if part.kind == "arguments" and part.number == 0)
    assert CUT[begun[0] + 1 : size].startswith(first)
    assert len(first) >= min(size, 55) - begun[0] - 6  # part of an escape is held back
    assert parts_of(made, made.demanded(b"x", None), [CUT[:size]]) == told


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
