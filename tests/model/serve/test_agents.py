"""Agents at work: loops with tools, and what becomes of requests that fail, leave or come late."""

import json

import anthropic
import httpx
import openai
import pytest

from model.async_engine import AsyncEngine
from model.serve.config import ServeConfig
from tests.model.serve.calls import STRICT, TEMPLATE, guide
from tests.model.serve.conftest import DEADLINE_S, Served
from tests.model.serve.test_clients import connect, kill, raw_request

CITY = {
    "type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"],
    "additionalProperties": False,
}  # fmt: skip
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": CITY, "strict": True},
}
FUNCTIONS = {"add": lambda a, b: a + b, "weather": lambda city: {"Oslo": -3, "Rome": 22}[city]}
USER = [{"role": "user", "content": "Add, then say how warm it is."}]
BODIES = {
    "/v1/chat/completions": {"messages": USER, "max_tokens": 1500, "ignore_eos": True},
    "/v1/responses": {"input": "Go on.", "max_output_tokens": 1500, "ignore_eos": True},
    "/v1/messages": {"messages": USER, "max_tokens": 1500, "ignore_eos": True},
}


def run(call):
    return FUNCTIONS[call.name](**json.loads(call.arguments))


@pytest.mark.parametrize("streams", [False, True])
def test_an_agent_calls_two_tools_and_answers(agents, streams):
    """The model chooses the arguments, and the tool where it may; each result is in the prompt."""
    messages, results, lengths = [*USER], [], []
    add = {"type": "function", "function": {"name": "add"}}
    with openai.OpenAI(base_url=f"{agents.url}/v1", api_key="none") as client:
        for choice in (add, "required", "none"):
            asked = {
                "model": "tiny", "messages": messages, "tools": [STRICT, WEATHER],
                "max_tokens": 100,
                "tool_choice": choice, "temperature": 0, "parallel_tool_calls": False,
                "extra_body": guide("It is.") if choice == "none" else {},
            }  # fmt: skip
            if streams:
                with client.chat.completions.stream(**asked) as stream:
                    made = stream.get_final_completion()
            else:
                made = client.chat.completions.create(**asked)
            lengths.append((made.usage and made.usage.prompt_tokens) or len(messages))
            messages.append(made.choices[0].message.to_dict())
            for call in made.choices[0].message.tool_calls or ():
                results.append((call.function.name, run(call.function)))
                told = {"role": "tool", "tool_call_id": call.id, "content": str(results[-1][1])}
                messages.append(told)
    assert [name in FUNCTIONS for name, _ in results] == [True, True]
    assert results[0][0] == "add"
    assert messages[-1]["content"] == "It is."
    assert not messages[-1].get("tool_calls")
    assert lengths == sorted(set(lengths))


def test_the_same_loop_by_messages(agents):
    tools = [{"name": "weather", "input_schema": CITY}]
    messages, answers = [*USER], []
    with anthropic.Anthropic(base_url=agents.url, api_key="none") as client:
        for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "none"}):
            answer = client.messages.create(
                model="tiny", max_tokens=60, messages=messages, tools=tools, tool_choice=choice,
                extra_body={"temperature": 0},
            )  # fmt: skip
            answers.append(answer)
            messages.append({"role": "assistant", "content": answer.content})
            results = [
                {"type": "tool_result", "tool_use_id": block.id,
                 "content": str(FUNCTIONS[block.name](**block.input))}
                for block in answer.content
                if block.type == "tool_use"
            ]  # fmt: skip
            messages.append({"role": "user", "content": results or "Thanks."})
    assert [answer.stop_reason == "tool_use" for answer in answers] == [True, False]
    assert answers[1].usage.cache_read_input_tokens > 0  # the turn before is found


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_leaves_frees_its_blocks(agents, path, streams):
    agents.wait_for(lambda: agents.engine.num_open == 0)
    before = agents.num_free_blocks()
    with connect(agents) as connection:
        body = json.dumps({**BODIES[path], "stream": streams}).encode()
        connection.sendall(raw_request(body, path))
        agents.wait_for(lambda: agents.engine.num_open == 1)
        agents.wait_for(lambda: agents.num_free_blocks() < before)
        kill(connection)
        agents.wait_for(lambda: agents.engine.num_open == 0)
    assert agents.num_free_blocks() == before


@pytest.mark.parametrize("path", BODIES)
def test_an_error_in_the_middle_of_a_stream_is_an_event_of_its_interface(agents, path, monkeypatch):
    asked = {**BODIES[path], "stream": True, "guided_grammar": 'start: e\ne: e e | "a" | e e e'}
    with httpx.Client(base_url=agents.url, timeout=DEADLINE_S) as http:
        one = {**asked, **{name: 1 for name in asked if name.startswith("max")}}
        assert http.post(path, json=one).status_code == 200
        monkeypatch.setattr(agents.engine.engine._grammars, "_token_s", 0.0)
        events = http.post(path, json=asked).text.split("\n\n")[:-1]
    if path == "/v1/chat/completions":
        assert events.pop() == "data: [DONE]"
    name, _, data = events[-1].rpartition("data: ")
    told = json.loads(data)
    error = told["response"]["error"] if path == "/v1/responses" else told["error"]
    assert "--grammar-token-s" in error["message"]
    assert name == {
        "/v1/chat/completions": "", "/v1/messages": "event: error\n",
        "/v1/responses": "event: response.failed\n",
    }[path]  # fmt: skip
    agents.wait_for(lambda: agents.engine.num_open == 0)
    assert agents.call(lambda engine: engine.kv.stats().num_used_blocks) == 0


def test_a_server_that_drains_refuses_each_interface_in_its_own_words(make_engine):
    config = ServeConfig(port=0, served_model_name="tiny", chat_template=TEMPLATE)
    with (
        Served(AsyncEngine(make_engine), config) as running,
        httpx.Client(base_url=running.url, timeout=DEADLINE_S) as http,
    ):
        assert http.post("/v1/messages", json={**BODIES["/v1/messages"], "max_tokens": 1})
        running.run(running.engine.drain(0))
        for path, body in BODIES.items():
            refused = http.post(path, json=body)
            assert refused.status_code == 503
            assert refused.headers["Retry-After"]
            assert refused.json()["type"] == "error"


def test_an_answer_of_messages_may_be_as_long_as_the_model_allows(agents):
    asked = {"messages": USER, "max_tokens": 10**6, "guided_choice": ["It is warm."]}
    with httpx.Client(base_url=agents.url, timeout=DEADLINE_S) as http:
        assert http.post("/v1/messages", json=asked).json()["content"][0]["text"] == "It is warm."


@pytest.mark.parametrize(
    ("name", "wrong"), [("tool_call_parser", "mine"), ("reasoning_parser", "hermes")]
)
def test_a_parser_that_is_unknown_is_refused_with_those_that_are_known(name, wrong):
    with pytest.raises(Exception, match=f"{name}: wanted one of .*'gemma4'.*{wrong}"):
        ServeConfig(**{name: wrong})
