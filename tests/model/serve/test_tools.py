"""Tools and reasoning in chats, by OpenAI's own client: the tiny model writes what a guide says."""

import json

import httpx
import openai
import pytest

from tests.hang import HANG_S
from tests.model.serve.calls import ADD, CALL, HELLO, NOW, OTHER, STRICT, guide


@pytest.fixture(scope="module")
def client(agents):
    with openai.OpenAI(base_url=f"{agents.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def ask(client, text=None, **fields):
    """An answer of this text, as it is read."""
    asked = {"model": "tiny", "messages": HELLO, "temperature": 0, "max_tokens": 200, **fields}
    extra = asked.pop("extra_body", {}) | ({} if text is None else guide(text))
    return client.chat.completions.create(**asked, extra_body=extra)


def folded(stream):
    """What a stream tells, as one message and its reason to end."""
    message, reason = {"content": "", "reasoning_content": "", "tool_calls": []}, None
    for piece in stream:
        [choice] = piece.choices
        reason = choice.finish_reason or reason
        message["content"] += choice.delta.content or ""
        message["reasoning_content"] += getattr(choice.delta, "reasoning_content", None) or ""
        for call in choice.delta.tool_calls or ():
            if call.index == len(message["tool_calls"]):
                message["tool_calls"].append([call.id, call.function.name, ""])
            message["tool_calls"][call.index][2] += call.function.arguments or ""
    return message, reason


READ = {
    "text": ("It is 7.", "It is 7.", "", []),
    "a call": (CALL, "", "", [("add", {"a": 3, "b": 4})]),
    "text and a call": (f"Let me see.\n{CALL}", "Let me see.", "", [("add", {"a": 3, "b": 4})]),
    "two calls": (f"{CALL}\n{OTHER}", "", "", [("add", {"a": 3, "b": 4}), ("now", {})]),
    "reasoning": ("<think>\nEasy.</think>\n\nIt is 7.", "It is 7.", "Easy.", []),
    "all": (f"<think>Easy.</think>So:\n{CALL}", "So:", "Easy.", [("add", {"a": 3, "b": 4})]),
    "no JSON": ("<tool_call>add(3, 4)</tool_call>", "<tool_call>add(3, 4)</tool_call>", "", []),
    "no name": ("<tool_call>[3, 4]</tool_call>", "<tool_call>[3, 4]</tool_call>", "", []),
    "arguments that are no object": (f"{CALL[:-35]}3}}\n</tool_call>", None, "", []),
    "a tag in a text": ("The tag <tool_call> opens a call.", None, "", []),
    "a call in code": (f"So: `{CALL}`", None, "", []),
    "a tag after reasoning": ("<think>Hm.</think>The tag <think> opens it.",
                              "The tag <think> opens it.", "Hm.", []),
    "a name alone": ('<tool_call>{"name": "now"}</tool_call>', "", "", [("now", {})]),
    "half a call": ('Hm.<tool_call>{"name": "add", "arg', None, "", []),
    "half an opening": ("a <tool_c", "a <tool_c", "", []),
    "an unknown name": ('<tool_call>{"name": "x", "arguments": {"y": "ä\\n"}}</tool_call>', "", "",
                        [("x", {"y": "ä\n"})]),
}  # fmt: skip


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("kind", READ)
def test_what_a_model_writes_is_told_as_reasoning_text_and_calls(client, kind, streams):
    text, content, reasoning, calls = READ[kind]
    content = text if content is None else content
    answer = ask(client, text, tools=[ADD, NOW], stream=streams)
    if streams:
        message, reason = folded(answer)
        told = [(name, json.loads(arguments)) for _, name, arguments in message["tool_calls"]]
        ids = [name for name, _, _ in message["tool_calls"]]
        assert (message["content"], message["reasoning_content"]) == (content, reasoning)
    else:
        [choice] = answer.choices
        reason, message = choice.finish_reason, choice.message
        made = message.tool_calls or ()
        told = [(call.function.name, json.loads(call.function.arguments)) for call in made]
        ids = [call.id for call in made]
        assert message.content == (content or None if calls else content)
        assert (getattr(message, "reasoning_content", None) or "") == reasoning
    assert told == calls
    assert len(set(ids)) == len(ids)
    assert all(ids)
    assert reason == ("tool_calls" if calls else "stop")


def test_without_tools_a_call_is_text_and_so_it_is_with_tool_choice_none(client):
    for fields in ({}, {"tools": [ADD], "tool_choice": "none"}):
        [choice] = ask(client, CALL, **fields).choices
        assert (choice.message.content, choice.finish_reason) == (CALL, "stop")


def test_one_call_at_most_is_told_where_they_may_not_be_parallel(client):
    answer = ask(client, f"{CALL}\n{OTHER}", tools=[ADD, NOW], parallel_tool_calls=False)
    assert [call.function.name for call in answer.choices[0].message.tool_calls] == ["add"]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "add"}}], ids=["any", "named"]
)
def test_a_demanded_call_follows_the_schema_of_its_tool(client, choice, streams):
    asked = {"tools": [STRICT], "tool_choice": choice, "parallel_tool_calls": False}
    answer = ask(client, **asked, stream=streams)
    if streams:
        message, reason = folded(answer)
        [(_, name, arguments)] = message["tool_calls"]
        assert message["content"] == ""
    else:
        [made] = answer.choices[0].message.tool_calls
        name, arguments, reason = made.function.name, made.function.arguments, "tool_calls"
        assert answer.choices[0].finish_reason == reason
        assert not answer.choices[0].message.content
    found = json.loads(arguments)
    assert (name, reason, set(found)) == ("add", "tool_calls", {"a", "b"})
    assert all(0 <= value <= 99 for value in found.values())


def test_a_demanded_call_that_is_cut_off_is_not_told_as_done(client):
    asked = {"tools": [STRICT], "max_tokens": 3}
    [choice] = ask(client, tool_choice="required", **asked).choices
    assert (choice.finish_reason, choice.message.tool_calls) == ("length", None)
    named = {"type": "function", "function": {"name": "add"}}
    [choice] = ask(client, tool_choice=named, **asked).choices
    assert choice.finish_reason == "length"
    with pytest.raises(json.JSONDecodeError):
        json.loads(choice.message.tool_calls[0].function.arguments)


@pytest.mark.parametrize("most", [1, 6, 9, 12, 15, 18, 21])
def test_a_list_of_calls_that_is_cut_off_is_never_content(client, most):
    asked = {"tools": [STRICT], "max_tokens": most, "tool_choice": "required"}
    [choice] = ask(client, **asked).choices
    message, reason = folded(ask(client, **asked, stream=True))
    assert choice.finish_reason == reason == "length"
    assert not choice.message.content
    assert not message["content"]
    made = [call.function for call in choice.message.tool_calls or ()]
    assert [(one.name, one.arguments) for one in made] == [
        (name, arguments) for _, name, arguments in message["tool_calls"]
    ]
    assert bool(made) == (most > 12)
    assert all(one.arguments[:1] in {"", "{"} for one in made)


FALSE = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}


@pytest.mark.parametrize("how", ["form", "guide", "outputs", "calls", "named"])
def test_objects_are_closed_and_compact(client, how):
    """The model is small and would go on: a schema that says nothing of others has none."""
    tool = {"type": "function", "function": {"name": "add", "parameters": FALSE}}
    named = {"type": "function", "function": {"name": "add"}}
    asked = {
        "form": {"response_format": {"type": "json_schema",
                                     "json_schema": {"name": "x", "schema": FALSE}}},
        "guide": {"extra_body": {"guided_json": FALSE}},
        "outputs": {"extra_body": {"structured_outputs": {"json": FALSE}}},
        "calls": {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False},
        "named": {"tools": [tool], "tool_choice": named},
    }[how]  # fmt: skip
    answer = ask(client, **asked, temperature=1.5, seed=2, max_tokens=40)
    [choice] = answer.choices
    text = choice.message.content or choice.message.tool_calls[0].function.arguments
    assert text in {'{"a": true}', '{"a": false}'}
    assert answer.usage.completion_tokens < 30


def test_several_answers_are_read_apart(client):
    named = {"type": "function", "function": {"name": "add"}}
    answer = ask(client, tools=[STRICT], tool_choice=named, n=3, temperature=1.5, seed=1)
    made = [choice.message.tool_calls[0] for choice in answer.choices]
    assert len({call.id for call in made}) == 3
    assert all(json.loads(call.function.arguments).keys() == {"a", "b"} for call in made)


def test_reasoning_that_the_prompt_begins_is_told_as_such(client, http_of):
    asked = {"model": "tiny", "messages": HELLO, "reasoning_effort": "high", "max_tokens": 6}
    message = ask(client, **asked).choices[0].message
    assert message.content == ""
    assert message.reasoning_content
    prompt = http_of("/tokenize", messages=HELLO, reasoning_effort="high")
    assert prompt.endswith("<|im_start|>assistant\n<think>\n")


@pytest.fixture
def http_of(agents):
    """The text of what tokenizing messages gives."""

    def text(path, **body):
        with httpx.Client(base_url=agents.url, timeout=HANG_S) as http:
            tokens = http.post(path, json=body).json()["tokens"]
            return http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]

    return text


@pytest.mark.parametrize("how", [{"tools": [ADD], "tool_choice": "required"},
                                 {"response_format": {"type": "json_object"}}])  # fmt: skip
def test_a_demanded_form_begins_behind_the_reasoning(client, how):
    [choice] = ask(client, **how, reasoning_effort="high", max_tokens=6).choices
    assert choice.message.reasoning_content  # this model would reason without end
    assert (choice.message.content or "", choice.message.tool_calls) == ("", None)
    [choice] = ask(client, **how, reasoning_effort="none", max_tokens=6).choices
    assert not hasattr(choice.message, "reasoning_content")


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "x"}}},
         "tool_choice"),
        ({"tools": [ADD], "tool_choice": "perhaps"}, "tool_choice"),
        ({"tools": [ADD, ADD]}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": 5}}}],
          "tool_choice": "required"}, "tools"),
        ({"tools": [ADD], "tool_choice": "required", "extra_body": {"guided_regex": "a"}},
         "guided_regex"),
        ({"messages": [*HELLO, {"role": "assistant", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "add", "arguments": "[1]"}}]}]},
         "messages.1.tool_calls.0.function.arguments"),
        ({"extra_body": {"chat_template_kwargs": {"chat_template": "{{ x }}"}}},
         "chat_template_kwargs.chat_template"),
        ({"messages": HELLO, "extra_body": {"continue_final_message": True,
                                            "add_generation_prompt": True}},
         "continue_final_message"),
    ],
)  # fmt: skip
def test_what_means_nothing_is_refused_by_name(client, names, wrong, param):
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, **wrong)
    names(refused.value.body, param)


def test_a_schema_that_cannot_be_enforced_is_refused_by_its_tool_and_place(client):
    schema = {"type": "object", "properties": {"x": {"type": "array", "uniqueItems": True}}}
    other = {"type": "function", "function": {"name": "search", "parameters": schema}}
    message = r"tools: wanted schemas that can be enforced \(the tool 'search': #/properties/x/un"
    for effort in ("none", "high"):  # behind reasoning, or not
        with pytest.raises(openai.BadRequestError, match=message):
            ask(client, tools=[ADD, other], tool_choice="required", reasoning_effort=effort)
    assert ask(client, "Hi.", tools=[ADD, other]).choices[0].message.content == "Hi."


def test_tools_and_what_came_of_them_are_in_the_prompt(http_of):
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 3}'}}
    answered = {"role": "assistant", "content": None, "tool_calls": [call],
                "reasoning_content": "Hm."}  # fmt: skip
    told = {"role": "tool", "tool_call_id": "c", "content": "7"}
    text = http_of("/tokenize", messages=[*HELLO, answered, told], tools=[NOW])
    assert '<|im_start|>system\n{"name": "now"}\n<|im_end|>' in text
    assert '<think>Hm.</think><tool_call>\n{"name": "add", "arguments": {"a": 3}}\n' in text
    assert text.endswith("<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n")
    text = http_of("/tokenize", messages=[{"role": "developer", "content": "Add."}, *HELLO])
    assert text.startswith("<|im_start|>system\nAdd.")  # the template knows no developers
    begun = [*HELLO, {"role": "assistant", "content": "It is"}]
    text = http_of("/tokenize", messages=begun, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nIt is")
