"""`/v1/messages` by Anthropic's own client: the tiny model writes what a guide says."""

import json

import anthropic
import openai
import pytest

from model.async_engine import AsyncEngine
from model.serve.config import ServeConfig
from model.serve.messages import MessagesRequest
from model.serve.protocol import ChatRequest
from model.serve.responses import ResponsesRequest
from tests.model.serve.calls import ADD as FUNCTION
from tests.model.serve.calls import CALL, OTHER, TEMPLATE, guide
from tests.model.serve.conftest import Served

ADD = {
    "name": "add", "description": "Add two numbers.",
    "input_schema": {
        "type": "object", "properties": {"a": {"enum": [3]}, "b": {"enum": [4]}},
        "required": ["a", "b"], "additionalProperties": False,
    },
}  # fmt: skip
NOW = {"name": "now", "input_schema": {"type": "object", "properties": {}}}
HELLO = [{"role": "user", "content": "What is 3 + 4?"}]
SAID = f"<think>Easy.</think>So:\n{CALL}\n{OTHER}"


@pytest.fixture(scope="module")
def client(agents):
    with anthropic.Anthropic(base_url=agents.url, api_key="none", max_retries=0) as made:
        yield made


def fields_of(text, fields):
    asked = {"model": "tiny", "messages": HELLO, "max_tokens": 200, **fields}
    extra = {"temperature": 0, **asked.pop("extra_body", {})}
    return asked | {"extra_body": extra | ({} if text is None else guide(text))}


def ask(client, text=None, **fields):
    return client.messages.create(**fields_of(text, fields))


def test_a_text_is_a_block(client):
    answer = ask(client, "It is 7.")
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", "tiny")
    assert [(block.type, block.text) for block in answer.content] == [("text", "It is 7.")]
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    usage = answer.usage
    counted = client.messages.count_tokens(model="tiny", messages=HELLO).input_tokens
    assert usage.input_tokens + usage.cache_read_input_tokens == counted
    assert usage.output_tokens > 0


def test_reasoning_text_and_calls_are_blocks_in_their_order(client):
    answer = ask(client, SAID, tools=[ADD, NOW])
    thought, said, add, now = answer.content
    assert (thought.type, thought.thinking) == ("thinking", "Easy.")
    assert (said.type, said.text) == ("text", "So:")
    assert (add.type, add.name, add.input) == ("tool_use", "add", {"a": 3, "b": 4})
    assert (now.type, now.name, now.input) == ("tool_use", "now", {})
    assert add.id != now.id
    assert answer.stop_reason == "tool_use"


def test_the_events_are_anthropics_in_anthropics_order(client):
    events = list(ask(client, SAID, tools=[ADD, NOW], stream=True))
    kinds = [event.type for event in events]
    once = [kind for number, kind in enumerate(kinds) if kinds[number - 1] != kind]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert once == ["message_start", *block * 4, "message_delta", "message_stop"]
    starts = [event for event in events if event.type == "content_block_start"]
    assert [event.index for event in starts] == [0, 1, 2, 3]
    told = ["", "", "", ""]
    for event in events:
        if event.type == "content_block_delta":
            [text] = set(event.delta.to_dict().values()) - {event.delta.type}
            told[event.index] += text
    assert told[:2] == ["Easy.", "So:"]
    assert [json.loads(text) for text in told[2:]] == [{"a": 3, "b": 4}, {}]
    assert events[-2].delta.stop_reason == "tool_use"
    assert events[-2].usage.output_tokens > 0


@pytest.mark.parametrize("text", [SAID, "It is 7.", "<think>Only this.</think>"])
def test_the_clients_own_accumulator_makes_the_whole_of_the_stream(client, text):
    whole = ask(client, text, tools=[ADD, NOW])
    with client.messages.stream(**fields_of(text, {"tools": [ADD, NOW]})) as stream:
        final = stream.get_final_message()
    kinds = [block.type for block in whole.content]
    assert [block.type for block in final.content] == kinds
    texts = [[block.to_dict(exclude_unset=False).get(name) for name in ("thinking", "text", "input")
              for block in answer.content] for answer in (whole, final)]  # fmt: skip
    assert texts[0] == texts[1]
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens


@pytest.mark.parametrize("streams", [False, True])
def test_a_stop_sequence_ends_the_text_and_is_named(client, streams):
    answer = ask(client, "one two three", stop_sequences=["x", " t"], stream=streams)
    if streams:
        events = list(answer)
        told = events[-2].delta
        text = "".join(event.delta.text for event in events if event.type == "content_block_delta")
    else:
        told, text = answer, answer.content[0].text
    assert (told.stop_reason, told.stop_sequence, text) == ("stop_sequence", " t", "one")


def test_an_answer_that_is_cut_off_says_so(client):
    answer = ask(client, "It is seven, I think.", max_tokens=2)
    assert answer.stop_reason == "max_tokens"
    answer = ask(client, tools=[ADD], tool_choice={"type": "tool", "name": "add"}, max_tokens=2)
    assert (answer.stop_reason, answer.content[0].type) == ("max_tokens", "text")


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "add"}])
def test_a_demanded_call_follows_its_schema(client, choice):
    choice = {**choice, "disable_parallel_tool_use": True}
    [block] = ask(client, tools=[{**ADD, "strict": True}], tool_choice=choice).content
    assert (block.name, block.input) == ("add", {"a": 3, "b": 4})


def test_a_conversation_with_results_is_the_same_prompt_as_a_chats(client, agents):
    """Anthropic's blocks become OpenAI's messages, token for token."""
    turns = [
        *HELLO,
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "s"},
            {"type": "text", "text": "So:", "cache_control": {"type": "ephemeral"}},
            {"type": "tool_use", "id": "c", "name": "add", "input": {"a": 3, "b": 4}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "7"}]},
            {"type": "text", "text": "Well?"}]},
    ]  # fmt: skip
    tool = {"name": "add", "description": "Add two numbers.",
            "input_schema": FUNCTION["function"]["parameters"]}  # fmt: skip
    call = {"id": "c", "type": "function",
            "function": {"name": "add", "arguments": '{"a": 3, "b": 4}'}}  # fmt: skip
    messages = [
        {"role": "system", "content": "Add."}, *HELLO,
        {"role": "assistant", "reasoning_content": "Hm.", "content": "So:", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "7"},
        {"role": "user", "content": "Well?"},
    ]  # fmt: skip
    with openai.OpenAI(base_url=f"{agents.url}/v1", api_key="none") as chats:
        chat = chats.chat.completions.create(
            model="tiny", messages=messages, tools=[FUNCTION], max_tokens=8, temperature=0
        )
    answer = ask(client, system="Add.", messages=turns, tools=[tool], max_tokens=8)
    count = answer.usage.input_tokens + answer.usage.cache_read_input_tokens
    assert count == chat.usage.prompt_tokens
    assert answer.usage.cache_read_input_tokens >= count - 17  # the chat's blocks are found
    assert answer.content[0].text == chat.choices[0].message.content


def test_the_last_message_may_begin_the_answer(client):
    begun = [*HELLO, {"role": "assistant", "content": "It is"}]
    assert ask(client, " 7.", messages=begun).content[0].text == " 7."


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "narrator", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]},
         "messages.0.content.0.type"),
        ({"tools": [{"type": "custom", "name": "web_search"}]}, "tools.0.input_schema"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"messages": [{"role": "user", "content": "long " * 5000}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "container_upload"}]}]},
         "messages.0.content.0.type"),
        ({"extra_body": {"n": 2}}, "n"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("streams", [False, True])
def test_what_is_not_done_is_refused_by_name(client, names, wrong, param, streams):
    with pytest.raises(anthropic.BadRequestError) as refused:
        ask(client, **wrong, stream=streams)
    body = refused.value.body
    names(body["error"], param)


def test_a_model_that_is_not_there_is_anthropics_error(client):
    with pytest.raises(anthropic.NotFoundError):
        ask(client, model="other")


def test_a_key_may_be_sent_as_anthropics_clients_send_it(make_engine):
    config = ServeConfig(port=0, served_model_name="tiny", api_keys=("secret",),
                         chat_template=TEMPLATE)  # fmt: skip
    with Served(AsyncEngine(make_engine), config) as running:
        with (
            anthropic.Anthropic(base_url=running.url, api_key="wrong", max_retries=0) as client,
            pytest.raises(anthropic.AuthenticationError),
        ):
            ask(client, "Yes.")
        with anthropic.Anthropic(base_url=running.url, api_key="secret") as client:
            assert ask(client, "Yes.").content[0].text == "Yes."
        with anthropic.Anthropic(base_url=running.url, auth_token="secret") as client:  # noqa: S106
            assert ask(client, "Yes.").content[0].text == "Yes."


def test_an_image_is_that_of_a_chat():
    """In three words: base64 and a URL in messages, and a URL in a response."""
    source = {"type": "base64", "media_type": "image/png", "data": "QQ=="}
    text, url = {"type": "text", "text": "What is this?"}, "data:image/png;base64,QQ=="
    parts = [text, {"type": "image_url", "image_url": {"url": url}}]
    wanted = ChatRequest.model_validate({"messages": [{"role": "user", "content": parts}]})
    for made in (source, {"type": "url", "url": url}):
        content = [text, {"type": "image", "source": made}]
        asked = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
        assert MessagesRequest.model_validate(asked).chat().messages == wanted.messages
    content = [{**text, "type": "input_text"}, {"type": "input_image", "image_url": url}]
    asked = {"input": [{"role": "user", "content": content}]}
    assert ResponsesRequest.model_validate(asked).chat().messages == wanted.messages
