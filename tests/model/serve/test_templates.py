"""Conversations of agents become the prompts that published chat templates write."""

import itertools
import json
import re
from types import SimpleNamespace

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.async_engine import AsyncEngine
from model.errors import InvalidArgumentError, ModelNotFoundError, UsageError
from model.serve.config import ServeConfig
from model.serve.messages import MessagesRequest
from model.serve.protocol import ChatRequest
from model.serve.responses import ResponsesRequest
from model.serve.tools import call_ids
from tests.hang import HANG_S
from tests.model.serve.calls import guide
from tests.model.serve.conftest import Served
from tests.model.serve.histories import (
    ASK,
    HISTORIES,
    IMAGE,
    STORED,
    TOOLS,
    call,
    calls,
    codec_of,
    prompt_of,
    prompts_of,
    result,
    templates,
)
from tests.model.serve.test_reading import parts_of, reading

PROMPTS = json.loads(STORED.read_text())
TEXTS = templates()
ONE_CALL = HISTORIES["call"]
TEXT_FORM = {"deepseek-r1", "deepseek-v3", "deepseek-v3.1", "functionary-v3.1", "functionary-v3.2"}


@pytest.fixture(scope="module")
def codecs():
    return {name: codec_of(text) for name, text in TEXTS.items()}


# The prompts.


@pytest.mark.parametrize("name", TEXTS)
def test_a_history_becomes_the_stored_prompt(name):
    assert len(PROMPTS[name]) == len(HISTORIES) == 12
    assert prompts_of(TEXTS[name]) == PROMPTS[name]


def test_a_stored_prompt_has_all_calls_and_results_or_the_template_writes_none():
    """What the stored prompts are for; a refusal is the template's own."""
    writes_none = {"phi-3.5", "qwen2.5-vl", "lfm2", "idefics3"}
    for name, prompts in PROMPTS.items():
        for history, prompt in prompts.items():
            if prompt.startswith("REFUSED"):
                assert name in {"mistral-v1", "gemma-2", "gemma-3"}, (name, history)
                assert re.search("roles must alternate|no system role", prompt)
                continue
            for message in HISTORIES[history] if name not in writes_none else ():
                for one in message.get("tool_calls") or ():
                    for value in json.loads(one["function"]["arguments"]).values():
                        shown = json.dumps(value, ensure_ascii=False)[1:-1]
                        forms = [str(value)[1:-1], shown, str(value).strip(), "True, None"]
                        assert any(form in prompt for form in forms), (name, history)
                if message["role"] == "tool" and isinstance(message["content"], str):
                    assert message["content"] in prompt.rpartition(ASK["content"])[2]
            assert "'city'" not in prompt
            assert '\\"city' not in prompt


ARGUMENTS = st.dictionaries(
    st.text("abcxyz_", min_size=1),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=6,
    ),
    max_size=3,
)


@given(arguments=ARGUMENTS, name=st.sampled_from(sorted({*TEXT_FORM, "phi-4-mini", "qwen2.5",
       "mistral-nemo", "kimi-k2", "llama-3.1", "granite-4"})))  # fmt: skip
def test_a_template_of_json_writes_arguments_once_and_as_json(codecs, arguments, name):
    """Whatever they are, the text between the marks of the call is the JSON of the arguments."""
    whole = prompt_of(codecs[name], [ASK, calls(call(1, **arguments)), result(1, "-3")])
    written = json.dumps(arguments, ensure_ascii=False)
    assert written in whole
    bare = prompt_of(codecs[name], [ASK, calls(call(1)), result(1, "-3")])
    assert whole == bare.replace("{}", written, 1)


def test_arguments_that_a_template_prints_are_those_that_the_client_sent(codecs):
    """Their spaces too, for the prefix cache has the prompt with them."""
    one = call(1)
    one["function"]["arguments"] = '{"a":1.0,\n "b": "\\u00fc"}'
    said = [ASK, calls(one), result(1, "-3")]
    for name in TEXT_FORM:
        assert one["function"]["arguments"] in prompt_of(codecs[name], said)
    assert '{"a": 1.0, "b": "ü"}' in prompt_of(codecs["qwen2.5"], said)


@pytest.mark.parametrize("content", [None, "", [], "missing"])
@pytest.mark.parametrize("name", ["deepseek-r1", "glm-4.5", "qwen3", "lfm2", "hunyuan-a13b"])
def test_a_call_without_text_is_the_same_however_a_client_says_so(codecs, name, content):
    message = calls(call(1, city="Oslo"), content=content)
    if content == "missing":
        del message["content"]
    prompt = prompt_of(codecs[name], [ASK, message, result(1, "-3")], tools=TOOLS)
    assert prompt == PROMPTS[name]["call"]


def test_text_beside_a_call_that_hides_it_becomes_a_message_of_its_own(codecs):
    for name in ("deepseek-r1", "phi-4-mini"):
        prompt = PROMPTS[name]["text_and_call"]
        assert prompt.index("I look.") < prompt.index('{"city": "Oslo"}') < prompt.index("-3")
    assert codecs["deepseek-v3"]._template(None, ()).form.splits_calls is False


def test_several_calls_are_put_before_their_results_where_a_message_has_one_alone():
    for name in ("llama-3.1", "gpt-oss"):
        said = ["Oslo", "-3", "Bergen", "4"]
        places = [PROMPTS[name]["parallel"].rindex(one) for one in said]
        assert places == sorted(places)


def test_a_result_whose_call_is_not_there_is_kept(codecs):
    said = [ASK, calls(call(1, city="Oslo"), call(2, city="Bergen")), result(2, "4"),
            result(3, "lost"), result(1, "-3"), ASK]  # fmt: skip
    prompt = prompt_of(codecs["llama-3.1"], said)
    places = [prompt.index(one) for one in ('Oslo"}', "-3", "Bergen", '"4"', "lost")]
    assert places == sorted(places)


def test_developers_are_the_system_where_the_template_has_no_such_role(codecs):
    """Also where its text names them, but not their messages."""
    for name in ("command-r7b", "apertus", "qwen2.5", "llama-3.1"):
        assert PROMPTS[name]["developer"] == PROMPTS[name]["system"]
    assert "developer<|message|># Instructions\n\nBe brief." in PROMPTS["gpt-oss"]["developer"]


def test_a_tool_has_what_the_template_cannot_do_without(codecs):
    bare = {"type": "function", "function": {"name": "now"}}
    for name, codec in codecs.items():
        if name not in {"mistral-v1", "gemma-2", "gemma-3"}:
            assert prompt_of(codec, [ASK], tools=[bare])
    assert '{"name": "now"}' in prompt_of(codecs["qwen2.5"], [ASK], tools=[bare])


def test_parameters_without_a_description_pass_a_template_that_wants_one():
    text = (
        "{% for t in tools %}{% for n, p in t.function.parameters.properties | items %}"
        "{{ n + ': ' + p.description }}{% endfor %}{% endfor %}{{ messages[0].content }}"
    )
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    assert prompt_of(codec_of(text), [ASK], tools=[tool]) == f"city: {ASK['content']}"
    assert prompt_of(codec_of(text), [ASK]) == ASK["content"]


def test_a_result_has_the_name_of_its_function(codecs):
    assert "result for weather: -3" in PROMPTS["functiongemma"]["call"]
    said = [ASK, calls(call(1, "note")), {**result(1, "ok"), "name": "other"}]
    assert "result for other: ok" in prompt_of(codecs["functiongemma"], said)


def test_messages_as_transformers_has_them_are_taken_too(codecs):
    """As `LLM.chat` passes them on: without a content or an id, with arguments as an object."""
    function = {"name": "weather", "arguments": {"city": "Oslo"}}
    said = [ASK, {"role": "assistant", "tool_calls": [{"function": function}]},
            {"role": "tool", "content": "-3"}]  # fmt: skip
    for name in ("qwen2.5", "deepseek-v3", "glm-4.5", "functionary-v3.2"):
        wanted = prompt_of(codecs[name], ONE_CALL)
        assert codecs[name].render_chat(said) == (wanted, False)
    said[1]["tool_calls"][0]["function"]["arguments"] = '{"city": '
    with pytest.raises(InvalidArgumentError, match=r"^messages: .*chat template accepts: "):
        codecs["qwen2.5"].render_chat(said)


def test_reasoning_of_an_earlier_answer_has_either_name(codecs):
    for field in ("reasoning_content", "reasoning"):
        said = [ASK, calls(call(1, city="Oslo"), **{field: "Which tool?"}), result(1, "-3")]
        assert prompt_of(codecs["qwen3"], said, tools=TOOLS) == PROMPTS["qwen3"]["reasoning"]


# Images.


def test_an_image_is_a_part_where_the_template_takes_it_and_its_text_elsewhere():
    marks = {
        "qwen2.5-vl": "<|vision_start|><|image_pad|><|vision_end|>", "mistral-small-3": "[IMG]",
        "qwen3-vl": "<|vision_start|><|image_pad|><|vision_end|>", "llama-4": "<|image|>",
        "kimi-k2": "<|media_pad|>", "idefics3": "<image>", "qwen2.5": "<image>",
    }  # fmt: skip  # the last one is the mark of the model's processor, for a template without any
    for name, mark in marks.items():
        prompt = PROMPTS[name]["image"]
        assert prompt.count(mark) == 2
        assert "A map:" in prompt.rpartition(mark)[0]


def test_a_template_that_puts_images_before_a_text_gets_parts():
    text = (
        "{% for m in messages %}"
        "{% for p in m.content if p.type == 'image' %}<image>\n{% endfor %}"
        "{% for p in m.content if p.type == 'text' %}{{ p.text }}{% endfor %}"
        "{% endfor %}"
    )
    assert prompt_of(codec_of(text), HISTORIES["image"][:1]) == "<image>\nWhere is it?"


def messages_with_image(path):
    """An image in the result of a call, as each interface has it."""
    source = {"type": "base64", "media_type": "image/png", "data": IMAGE.partition(",")[2]}
    use = {"type": "tool_use", "id": "call00001", "name": "weather", "input": {"city": "Oslo"}}
    if path == "/v1/messages":
        content = [{"type": "text", "text": "A map: "}, {"type": "image", "source": source}]
        found = {"type": "tool_result", "tool_use_id": "call00001", "content": content}
        turns = [ASK, {"role": "assistant", "content": [use]}, {"role": "user", "content": [found]}]
        return {"messages": turns, "max_tokens": 1}
    arguments = {"call_id": "call00001", "name": "weather", "arguments": '{"city": "Oslo"}'}
    output = [{"type": "input_text", "text": "A map: "},
              {"type": "input_image", "image_url": IMAGE}]  # fmt: skip
    return {"input": [
        ASK, {"type": "function_call", **arguments},
        {"type": "function_call_output", "call_id": "call00001", "output": output},
    ], "max_output_tokens": 1}  # fmt: skip


def test_an_image_in_a_result_reaches_the_template_from_every_interface(codecs):
    said = [ASK, *HISTORIES["image"][1:]]
    wanted = ChatRequest.model_validate({"messages": said}).messages
    for path, kind in (("/v1/messages", MessagesRequest), ("/v1/responses", ResponsesRequest)):
        made = kind.model_validate(messages_with_image(path)).chat().messages
        assert made[-1] == wanted[-1]
        told = [message.model_dump(exclude_none=True) for message in made]
        assert "A map: <|vision_start|><|image_pad|>" in prompt_of(codecs["qwen3-vl"], told)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/v1/chat/completions"])
def test_a_model_of_text_refuses_an_image_in_a_result(http, path):
    chat = {"messages": HISTORIES["image"], "max_tokens": 1}
    answer = http.post(path, json=chat if "chat" in path else messages_with_image(path))
    assert answer.status_code == 400
    assert "reads text alone" in answer.json()["error"]["message"]


# Ids of calls.


def test_ids_of_calls_are_nine_letters_or_digits_and_differ():
    made = [one for one, _ in zip(call_ids(), range(1000), strict=False)]
    assert all(re.fullmatch("[0-9A-Za-z]{9}", one) for one in made)
    assert len(set(made)) == 1000
    assert not set(made) & {one for one, _ in zip(call_ids(), range(1000), strict=False)}


@pytest.mark.parametrize("call_id", ["call_q7sZBp0", "toolu_01A09q90qw90lq917835lq9", "é", "1"])
def test_an_id_of_another_server_is_one_that_the_template_takes(codecs, call_id):
    one = {**call(1, city="Oslo"), "id": call_id}
    said = [ASK, calls(one), {**result(1, "-3"), "tool_call_id": call_id}]
    prompt = prompt_of(codecs["mistral-small-3"], said)
    [made], [again] = (re.findall(pattern, prompt) for pattern in
                       (r"\[CALL_ID\](\w+)\[", r"\[TOOL_RESULTS\](\w+)\["))  # fmt: skip
    assert made == again
    assert re.fullmatch("[0-9A-Za-z]{9}", made)
    assert call_id in prompt_of(codecs["kimi-k2"], said)


NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize(
    ("name", "choice"),
    [("mistral-nemo", "required"), ("deepseek-v3", NAMED), ("functionary-v3.2", "required"),
     ("llama-3.1", NAMED)],
)  # fmt: skip
def test_a_call_of_the_server_sent_back_is_in_the_next_prompt(make_engine, name, choice):
    """A demanded call, its result, and the prompt of the turn behind them."""
    city = {"enum": ["Oslo"]}
    parameters = {"type": "object", "properties": {"city": city}, "required": ["city"],
                  "additionalProperties": False}  # fmt: skip
    function = {"name": "weather", "description": "", "parameters": parameters}
    tools = [{"type": "function", "function": function}]
    config = ServeConfig(port=0, served_model_name="tiny", chat_template=TEXTS[name])
    with (
        Served(AsyncEngine(make_engine), config) as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client,
        httpx.Client(base_url=running.url, timeout=HANG_S) as http,
    ):
        asked = {"model": "tiny", "tools": tools, "temperature": 0, "max_tokens": 40}
        first = client.chat.completions.create(
            messages=[ASK], tool_choice=choice, parallel_tool_calls=False, **asked
        )
        message = first.choices[0].message
        [made] = message.tool_calls
        found = {"role": "tool", "tool_call_id": made.id, "content": "-3"}
        said = [ASK, message.to_dict(), found]
        again = client.chat.completions.create(messages=said, **{**asked, "tools": []})
        tokens = http.post("/tokenize", json={"messages": said}).json()["tokens"]
        prompt = http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert again.usage.prompt_tokens == len(tokens)
    stored = prompt_of(codec_of(TEXTS[name]), ONE_CALL).replace("call00001", made.id)
    assert prompt.replace(" ", "") == re.sub("</?s>| ", "", stored)


SCHEMA = {"properties": {"text": {"type": "string"}, "list": {"type": "array"}}}


@pytest.mark.parametrize("name", sorted(TEXTS))
@pytest.mark.parametrize("history", ["call", "parallel", "nested", "no_arguments"])
def test_a_call_is_read_as_the_template_writes_it(codecs, name, history):
    """A template whose format is known; the identities of Kimi's calls are its own."""
    made = reading(template=TEXTS[name], model_type="")
    if not made.knows_calls or (name == "llama-3.1" and history == "parallel"):
        return
    said = HISTORIES[history][1]
    if name == "kimi-k2":
        said = {**said, "tool_calls": [
            {**one, "id": f"functions.{one['function']['name']}:{number}"}
            for number, one in enumerate(said["tool_calls"])
        ]}  # fmt: skip
    begin = prompt_of(codecs[name], [ASK], tools=TOOLS)
    whole = prompt_of(codecs[name], [ASK, said], tools=TOOLS, add_generation_prompt=False)
    size = next(n for n in range(len(whole)) if not begin.startswith(whole[: n + 1]))
    tools = [{"type": "function", "function": {"name": one, "parameters": SCHEMA}}
             for one in ("weather", "note")]  # fmt: skip
    told = parts_of(made, made.free(begin[:size].encode(), tools), [whole[size:]])
    read = [(one.text, json.loads(other.text))
            for one, other in itertools.pairwise(told) if one.kind == "call"]  # fmt: skip
    assert read == [(one["function"]["name"], json.loads(one["function"]["arguments"]))
                    for one in said["tool_calls"]]  # fmt: skip


ANSWERS = {
    "call": '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
    "parallel": '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Bergen"}}\n</tool_call>',
    "text_and_call": "I look.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
    "reasoning": "<think>\nWhich tool?\n</think>\n\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
}
"""What a model writes of its own accord, by the history that it leads to."""


@pytest.fixture(scope="module")
def qwen3(make_engine):
    config = ServeConfig(port=0, served_model_name="tiny", chat_template=TEXTS["qwen3"])
    with Served(AsyncEngine(make_engine), config) as running:
        yield running


@pytest.mark.parametrize("history", ANSWERS)
@pytest.mark.parametrize("streams", [False, True])
def test_a_free_answer_sent_back_makes_the_stored_prompt(qwen3, history, streams):
    """Calls, text and reasoning come back as they were written."""
    with (
        openai.OpenAI(base_url=f"{qwen3.url}/v1", api_key="none", max_retries=0) as client,
        httpx.Client(base_url=qwen3.url, timeout=HANG_S) as http,
    ):
        asked = {
            "model": "tiny", "messages": [ASK], "tools": TOOLS, "max_tokens": 200,
            "temperature": 0, "extra_body": guide(ANSWERS[history]),
        }  # fmt: skip
        if streams:
            with client.chat.completions.stream(**asked) as stream:
                answer = stream.get_final_completion()
        else:
            answer = client.chat.completions.create(**asked)
        message = answer.choices[0].message.to_dict()
        pairs = zip(message["tool_calls"], ("-3", "4"), strict=False)
        found = [
            {"role": "tool", "tool_call_id": made["id"], "content": text} for made, text in pairs
        ]
        body = {"messages": [ASK, message, *found], "tools": TOOLS}
        tokens = http.post("/tokenize", json=body).json()["tokens"]
        prompt = http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    marks = "<|im_start|>", "<|im_end|>"
    stored = PROMPTS["qwen3"][history]
    for mark in marks:  # special tokens of the tiny model
        stored = stored.replace(mark, "")
    assert prompt.replace(marks[0], "").replace(marks[1], "") == stored


# The end of a prompt, with which reading its answer starts.

DEEPSEEK = "<\uff5cAssistant\uff5c>"


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("deepseek-r1", f"{DEEPSEEK}<think>\n"), ("deepseek-v3.1", f"{DEEPSEEK}</think>"),
        ("nemotron-nano-2", "<SPECIAL_11>Assistant\n<think>\n"),
        ("minimax-m2", "]~b]ai\n<think>\n"),
        ("qwen3", "<|im_start|>assistant\n"), ("gpt-oss", "<|start|>assistant"),
        ("phi-4-mini", "<|end|><|assistant|>"), ("mistral-nemo", "[/INST]"),
        ("command-r7b", "<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"),
    ],
)  # fmt: skip
def test_the_end_of_a_prompt_is_what_follows_the_last_message(codecs, name, wanted):
    said = [
        ASK,
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "Is <think> it?"},
    ]
    assert codecs[name].begun_answer(said) == wanted
    assert codecs[name].begun_answer(said, opens_answer=False) == ""


def test_an_answer_that_goes_on_begins_with_its_message(codecs):
    said = [ASK, {"role": "assistant", "content": "<think>\nIt is"}]
    options = {"continue_final_message": True}
    begun = codecs["qwen2.5"].begun_answer(said, opens_answer=False, options=options)
    assert begun == "<|im_start|>assistant\n<think>\nIt is"
    alone = codecs["qwen2.5"].begun_answer(said[1:], opens_answer=False, options=options)
    assert alone.endswith(begun)
    assert codec_of(None).begun_answer(said) == "assistant:"


@pytest.mark.parametrize("name", TEXTS)
def test_the_end_of_a_prompt_does_not_depend_on_earlier_turns(codecs, name):
    """So a long conversation is not rendered twice."""
    said = [ASK, {"role": "assistant", "content": "It is cold."}] * 3
    for end in ([ASK], [ASK, calls(call(1, city="Oslo")), result(1, "-3")]):
        try:
            wanted = codecs[name].begun_answer(end)
        except InvalidArgumentError:  # no tools
            continue
        assert codecs[name].begun_answer([*said, *end]) == wanted
        assert prompt_of(codecs[name], [*said, *end]).endswith(wanted)


# Templates that are broken, and what they refuse.

BROKEN = {
    "{% for m in messages %}{{ m.content }}": r"TemplateSyntaxError: .*'endfor'.*\(line 1\)",
    "{{ messages | nothing }}": "No filter named 'nothing'",
    "{{ nothing(messages) }}": "'nothing' is undefined",
    "{{ messages[0].content.text.words }}": "has no attribute 'text'",
    "{% include 'other' %}{{ messages }}": "no loader for this environment",
    "{{ 1 / 0 }}": "division by zero",
    "{# nothing #}": "it shows no message",
    "{{ bos_token }}": "it shows no message",
    "{% for m in messages if m.role == 'tool' %}{{ m.content }}{% endfor %}": "it shows no message",
}


def engine_of(codec):
    """What the check looks at of an engine."""
    return SimpleNamespace(model=SimpleNamespace(codec=codec))


@pytest.mark.parametrize("text", BROKEN)
def test_a_broken_template_is_refused_at_start_in_one_line(text):
    own = codec_of(text)
    with pytest.raises(UsageError, match=f"^--chat-template: .*{BROKEN[text]}") as given:
        ServeConfig(chat_template=text).check_template()
    with pytest.raises(ModelNotFoundError, match=f"^model: its chat.*{BROKEN[text]}.*--chat-temp"):
        ServeConfig().check_template(engine_of(own))
    several = codec_of({"default": TEXTS["qwen3"], "tool_use": text})
    with pytest.raises(ModelNotFoundError):
        ServeConfig().check_template(engine_of(several))
    ServeConfig(chat_template=TEXTS["qwen3"]).check_template(engine_of(own))
    assert "\n" not in str(given.value)


def test_a_template_that_takes_some_conversation_starts():
    for text in [
        *TEXTS.values(), None, "{{ raise_exception('documents are wanted') }}",
        {"default": TEXTS["qwen2.5"], "tool_use": TEXTS["hermes-3"]},
        "{% if messages[0].role != 'system' %}{{ 1 / 0 }}{% endif %}{{ messages }}",
        "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}",
        "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}",
    ]:  # fmt: skip
        ServeConfig().check_template(engine_of(codec_of(text)))


def test_a_model_with_a_template_for_tools_uses_it_with_tools_alone():
    codec = codec_of({"default": TEXTS["qwen2.5"], "tool_use": TEXTS["hermes-3"]})
    assert prompt_of(codec, ONE_CALL, tools=TOOLS) == PROMPTS["hermes-3"]["call"]
    assert prompt_of(codec, HISTORIES["chat"]) == PROMPTS["qwen2.5"]["chat"]


def test_a_refusal_of_the_template_is_told_in_its_words(codecs):
    with pytest.raises(
        InvalidArgumentError, match=r"^messages: .* accepts: There is no system role$"
    ):
        prompt_of(codecs["gemma-2"], HISTORIES["system"])


STRICT = """\
{%- if enable_thinking is defined and enable_thinking is not boolean %}
{{- raise_exception('enable_thinking is true or false') }}{% endif %}
{%- if messages[0].content == 'think' and not (enable_thinking | default(true)) %}
{{- raise_exception('there is always a thought') }}{% endif %}
{%- if reasoning_effort is defined and reasoning_effort == 'none' %}
{{- raise_exception('no such effort') }}{% endif %}
{%- if messages[0].content == 'bad' %}{{ raise_exception('a bad message') }}{% endif %}
{%- for tool in tools or () if tool.function.name == 'bad' %}
{{- raise_exception('a bad tool') }}{% endfor %}
{{- (documents or []) | length }}{{ (budget or 0) + 1 }}{{ messages[0].content }}"""


@pytest.fixture(scope="module")
def strict(make_engine):
    config = ServeConfig(port=0, served_model_name="tiny", chat_template=STRICT)
    with (
        Served(AsyncEngine(make_engine), config) as running,
        httpx.Client(base_url=running.url, timeout=HANG_S) as http,
    ):
        yield http


BAD = {"type": "function", "function": {"name": "bad"}}
LONG = [ASK, {"role": "assistant", "content": "It is cold."}] * 9 + [ASK]


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"chat_template_kwargs": {"enable_thinking": "yes"}},
         "chat_template_kwargs.enable_thinking", "enable_thinking is true or false"),
        ({"chat_template_kwargs": {"x": 1, "budget": "much"}},
         "chat_template_kwargs.budget", "str"),
        ({"chat_template_kwargs": {"documents": 5}}, "chat_template_kwargs.documents", "iterable"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", "field"),
        ({"chat_template_kwargs": {"tools": 5}}, "chat_template_kwargs.tools", "field"),
        ({"chat_template_kwargs": {"add_generation_prompt": False}},
         "chat_template_kwargs.add_generation_prompt", "field"),
        ({"chat_template_kwargs": {"conversations": []}},
         "chat_template_kwargs.conversations", "multiple values"),
        ({"reasoning_effort": "none"}, "reasoning_effort", "no such effort"),
        ({"reasoning_effort": "none", "messages": [{"role": "user", "content": "think"}]},
         "reasoning_effort", "always a thought"),
        ({"tools": [BAD]}, "tools", "a bad tool"),
        ({"messages": LONG, "tools": [BAD], "chat_template_kwargs": {"x": 1}},
         "tools", "a bad tool"),
        ({"messages": [{"role": "user", "content": "bad"}]}, "messages", "a bad message"),
        ({"messages": [{"role": "user", "content": "bad"}],
          "chat_template_kwargs": {"enable_thinking": "yes"}}, "messages", "true or false"),
    ],
)  # fmt: skip
def test_an_error_names_the_field_that_the_template_refuses(strict, fields, param, says):
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, **fields}
    for path in ("/v1/chat/completions", "/tokenize"):
        sent = body if "chat" in path else {n: v for n, v in body.items() if n != "max_tokens"}
        answer = strict.post(path, json=sent)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert (error["param"], error["message"][: len(param) + 1]) == (param, f"{param}:")
        assert says in error["message"]
    good = {"chat_template_kwargs": {"tokenize": True, "budget": 3, "enable_thinking": False}}
    assert (
        strict.post(
            "/v1/chat/completions",
            json={
                **body,
                **fields,
                "messages": [ASK],
                "tools": None,
                "reasoning_effort": None,
                **good,
            },
        ).status_code
        == 200
    )
