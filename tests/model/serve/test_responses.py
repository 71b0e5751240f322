"""`/v1/responses` by OpenAI's own client: the tiny model writes what a guide says."""

import json

import openai
import pytest

from tests.model.serve.calls import CALL, OTHER, guide

ADD = {
    "type": "function", "name": "add", "strict": None,
    "parameters": {
        "type": "object", "properties": {"a": {"enum": [3]}, "b": {"enum": [4]}},
        "required": ["a", "b"], "additionalProperties": False,
    },
}  # fmt: skip
NOW = {"type": "function", "name": "now", "parameters": None, "strict": None}
SAID = f"<think>Easy.</think>So:\n{CALL}\n{OTHER}"


@pytest.fixture(scope="module")
def client(agents):
    with openai.OpenAI(base_url=f"{agents.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def ask(client, script=None, **fields):
    asked = {"model": "tiny", "input": "What is 3 + 4?", "temperature": 0, **fields}
    asked.setdefault("max_output_tokens", 200)
    extra = asked.pop("extra_body", {}) | ({} if script is None else guide(script))
    return client.responses.create(**asked, extra_body=extra)


def test_a_text_is_a_message(client):
    answer = ask(client, "It is 7.")
    assert (answer.object, answer.status, answer.output_text) == (
        "response",
        "completed",
        "It is 7.",
    )
    [item] = answer.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "completed")
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert answer.incomplete_details is None


def test_reasoning_text_and_calls_are_items_in_their_order(client):
    answer = ask(client, SAID, tools=[ADD, NOW])
    assert [item.type for item in answer.output] == [
        "reasoning", "message", "function_call", "function_call",
    ]  # fmt: skip
    thought, said, add, now = answer.output
    assert (thought.content[0].text, said.content[0].text) == ("Easy.", "So:")
    assert (add.name, json.loads(add.arguments)) == ("add", {"a": 3, "b": 4})
    assert (now.name, json.loads(now.arguments)) == ("now", {})
    assert len({item.id for item in answer.output} | {add.call_id, now.call_id}) == 6


def test_the_events_are_openais_in_openais_order(client):
    events = list(ask(client, SAID, tools=[ADD, NOW], stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    once = [kind for number, kind in enumerate(kinds) if kinds[number - 1] != kind]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done",
            "output_item.done"]  # fmt: skip
    assert once == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done",
        "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done",
        *call, *call,
        "completed",
    ]  # fmt: skip
    final = events[-1].response
    told = {}
    for event in events:
        if event.type.endswith(".delta"):
            told[event.output_index] = told.get(event.output_index, "") + event.delta
        if event.type == "response.output_item.done":
            assert event.item == final.output[event.output_index]
    texts = [
        item.arguments if item.type == "function_call" else item.content[0].text
        for item in final.output
    ]
    assert told == dict(enumerate(texts))
    assert final.usage.output_tokens > 0


def test_the_clients_own_accumulator_follows_the_stream(client):
    asked = {"model": "tiny", "input": "Hello", "max_output_tokens": 200}
    extra = guide(SAID) | {"temperature": 0}
    with client.responses.stream(**asked, tools=[ADD, NOW], extra_body=extra) as stream:
        final = stream.get_final_response()
    assert [item.type for item in final.output][1:3] == ["message", "function_call"]
    assert final.output_text == "So:"


@pytest.mark.parametrize("streams", [False, True])
def test_an_answer_that_is_cut_off_is_incomplete(client, streams):
    answer = ask(client, "It is seven, I think.", max_output_tokens=2, stream=streams)
    if streams:
        *_, last = answer
        assert last.type == "response.incomplete"
        answer = last.response
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "add"}])
def test_a_demanded_call_follows_its_schema(client, choice):
    tools = [{**ADD, "strict": True}]
    answer = ask(client, tools=tools, tool_choice=choice, parallel_tool_calls=False)
    [item] = answer.output
    assert (item.name, json.loads(item.arguments)) == ("add", {"a": 3, "b": 4})
    assert answer.status == "completed"


def test_an_answer_follows_the_format_of_its_text(client):
    schema = {"type": "object", "properties": {"n": {"enum": [7]}}, "required": ["n"],
              "additionalProperties": False}  # fmt: skip
    answer = ask(
        client,
        text={"format": {"type": "json_schema", "name": "x", "schema": schema}},
        extra_body={"logit_bias": {"199": -100}},  # this model likes empty lines
    )
    assert json.loads(answer.output_text) == {"n": 7}


def test_a_turn_goes_back_as_it_came(client):
    first = ask(client, SAID, tools=[ADD, NOW], instructions="Add.")
    turn = [{"role": "user", "content": "What is 3 + 4?"}, *first.output]
    outputs = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "7"}
        for item in first.output
        if item.type == "function_call"
    ]
    second = ask(client, "It is 7.", input=[*turn, *outputs], tools=[ADD, NOW], instructions="Add.")
    assert second.output_text == "It is 7."
    assert second.usage.input_tokens_details.cached_tokens > 16


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"truncation": 5}, "truncation"),
        ({"tools": [{"type": "custom"}]}, "tools.0.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_audio"}]}]},
         "input.0.content.0.type"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "add", "arguments": "["}]},
         "input.0.arguments"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "long " * 5000}, "input"),
        ({"extra_body": {"n": 2}}, "n"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": 5}}}},
         "text"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("streams", [False, True])
def test_what_is_not_done_is_refused_by_name(client, names, wrong, param, streams):
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, **wrong, stream=streams)
    names(refused.value.body, param)


def test_nothing_is_stored_and_that_is_said(client):
    answer = ask(client, "Yes.", extra_body={"store": True})
    assert answer.store is False
