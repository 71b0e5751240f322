"""Requests that coding agents and frameworks send by default are answered, and say what they lack."""

import json
import re
from typing import get_args, get_type_hints

import anthropic.types
import anthropic.types.beta
import httpx
import openai.types.responses
import pytest

from model.async_engine import AsyncEngine
from model.serve.config import ServeConfig
from model.serve.messages import MessagesRequest
from model.serve.responses import ResponsesRequest
from tests.model.serve.calls import ADD, NOW, TEMPLATE, guide
from tests.model.serve.conftest import DEADLINE_S, Served
from tests.model.serve.shapes import CLAUDE, CODEX, MCP, PATCH, SHAPES, SHELL

WARNING = re.compile(r'299 - "[^":]+: ([^"]+)"')


LEFT_OUT = "left out, as it cannot be used here"


@pytest.fixture(scope="module")
def http(agents):
    with httpx.Client(base_url=agents.url, timeout=DEADLINE_S) as client:
        yield client


def warned(answer):
    """The names in the header `Warning` of an answer."""
    found = WARNING.findall(answer.headers.get("Warning", ""))
    return tuple(name for names in found for name in names.split(", "))


@pytest.mark.parametrize("name", SHAPES)
def test_the_request_of_an_agent_is_answered_and_what_is_left_out_is_named(http, name):
    path, body, names = SHAPES[name]
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert warned(answer) == names
    if path.endswith("count_tokens"):
        assert answer.json()["input_tokens"] > 0
    elif body.get("stream"):
        assert "error" not in answer.text.split("\n\n")[-2].partition("data: ")[0]
        assert re.search(r"event: (response\.(completed|incomplete)|message_stop)", answer.text)


def _types(union):
    """The types that a client's package has for the members of a union."""
    hints = [get_type_hints(one).get("type") for one in get_args(union)]
    return {text for hint in hints for text in _texts(hint) if isinstance(text, str)}


def _texts(hint):
    return [text for one in get_args(hint) for text in (_texts(one) or [one])]


TOOLS = _types(openai.types.responses.ToolParam) - {"function", "custom", "namespace"}
ITEMS = _types(openai.types.responses.ResponseInputItemParam) - {
    "message", "function_call", "function_call_output", "custom_tool_call",
    "custom_tool_call_output", "local_shell_call", "local_shell_call_output",
}  # fmt: skip
NAMED = _types(anthropic.types.beta.BetaToolUnionParam) - {"custom"}
BLOCKS = _types(anthropic.types.ContentBlockParam) - {
    "text", "image", "search_result", "tool_use", "tool_result",
}  # fmt: skip


@pytest.mark.parametrize("kind", sorted(TOOLS))
def test_any_other_tool_of_openais_is_left_out_by_name(kind):
    body = {**CODEX, "tools": [{"type": kind, "name": {"any": "form"}, "tools": 5}, SHELL]}
    chat = ResponsesRequest.model_validate(body).chat()
    assert [tool.function.name for tool in chat.tools] == ["shell_command"]
    assert chat.warnings == {LEFT_OUT: [f"tools.0 ({kind})"]}


@pytest.mark.parametrize("kind", sorted(ITEMS))
def test_any_other_item_of_openais_is_left_out_by_name(kind):
    item = {"type": kind, "id": "x"} | ({} if kind == "reasoning" else {"output": 7, "name": ""})
    chat = ResponsesRequest.model_validate({**CODEX, "input": [*CODEX["input"], item]}).chat()
    assert len(chat.messages) == 3
    assert chat.warnings == {LEFT_OUT: [f"input.2 ({kind})"]}


@pytest.mark.parametrize("kind", sorted(NAMED))
def test_any_tool_of_anthropics_is_left_out_by_name(kind):
    body = {**CLAUDE, "tools": [{"type": kind, "name": "x"}]}
    chat = MessagesRequest.model_validate(body).chat()
    assert (chat.tools, chat.warnings) == ([], {LEFT_OUT: [f"tools.0 ({kind})"]})


@pytest.mark.parametrize("kind", sorted(BLOCKS))
def test_a_block_without_text_is_left_out_of_an_earlier_turn_by_name(kind):
    blocks = [{"type": kind, "id": "x"}, {"type": "text", "text": "So."}]
    turn = {"role": "assistant", "content": blocks}
    body = {**CLAUDE, "messages": [*CLAUDE["messages"], turn, {"role": "user", "content": "?"}]}
    chat = MessagesRequest.model_validate(body).chat()
    assert [message.said for message in chat.messages[2:]] == ["So.", "?"]
    assert chat.warnings == {LEFT_OUT: [f"messages.1.content.0 ({kind})"]}


@pytest.mark.parametrize(
    "source",
    [{"type": "base64", "media_type": "application/pdf", "data": "QQ=="}, {"type": "file"},
     {"type": "url", "url": "https://example.com/a.pdf"}],
)  # fmt: skip
def test_a_document_that_cannot_be_read_is_refused_where_the_question_is_about_it(http, source):
    document = {"type": "document", "source": source}
    asked = {"role": "user", "content": [document, {"type": "text", "text": "Sum it up."}]}
    refused = http.post("/v1/messages", json={**CLAUDE, "messages": [asked]})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "messages.0.content.0.type"
    later = [asked, {"role": "assistant", "content": "No."}, {"role": "user", "content": "Why?"}]
    answer = http.post("/v1/messages", json={**CLAUDE, "messages": later})
    assert warned(answer) == ("messages.0.content.0 (document)",)


SEARCH = {"type": "web_search", "name": "web_search"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {**CODEX, "tools": [SEARCH], "tool_choice": "required"}),
        ("/v1/responses", {**CODEX, "tools": [SHELL, SEARCH], "tool_choice": SEARCH}),
        ("/v1/responses", {**CODEX, "tools": [SHELL, SEARCH], "tool_choice": {
            "type": "allowed_tools", "mode": "required", "tools": [SEARCH]}}),
        ("/v1/responses", {**CODEX, "tools": [SHELL], "tool_choice": {
            "type": "custom", "name": "apply_patch"}}),
        ("/v1/messages", {**CLAUDE, "tools": [SEARCH], "tool_choice": {"type": "any"}}),
        ("/v1/messages", {**CLAUDE, "tools": [SEARCH], "tool_choice": {
            "type": "tool", "name": "web_search"}}),
        ("/v1/chat/completions", {"messages": CLAUDE["messages"], "tools": [SEARCH],
                                  "tool_choice": "required"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "tools": [SEARCH],
                                  "tool_choice": {"type": "custom", "custom": {"name": "x"}}}),
    ],
)  # fmt: skip
def test_a_choice_that_demands_what_was_left_out_is_refused_by_name(http, names, path, body):
    refused = http.post(path, json=body)
    assert refused.status_code == 400
    names(refused.json()["error"], "tool_choice")


@pytest.mark.parametrize("streams", [False, True])
def test_a_custom_tool_is_called_with_a_text(http, streams):
    """It is a function for the model, and OpenAI's custom tool for the client."""
    patch = {**PATCH, "format": {"type": "text"}}
    tools, text = [SHELL, patch], json.dumps({"input": "a\n\tb"})
    call = f'<tool_call>\n{{"name": "apply_patch", "arguments": {text}}}\n</tool_call>'
    body = {**CODEX, "tools": tools, "stream": streams, "max_output_tokens": 200, **guide(call)}
    answer = http.post("/v1/responses", json=body)
    if streams:
        events = [json.loads(one.partition("data: ")[2]) for one in answer.text.split("\n\n")[:-1]]
        told = {event["type"]: event for event in events}
        assert told["response.custom_tool_call_input.delta"]["delta"] == "a\n\tb"
        assert told["response.custom_tool_call_input.done"]["input"] == "a\n\tb"
        assert not any("function_call_arguments" in kind for kind in told)
        output = told["response.completed"]["response"]["output"]
        assert told["response.output_item.done"]["item"] == output[0]
    else:
        output = answer.json()["output"]
    [item] = output
    assert (item["type"], item["name"], item["input"]) == (
        "custom_tool_call", "apply_patch", "a\n\tb",
    )  # fmt: skip
    again = http.post("/v1/responses", json={**body, "input": [*CODEX["input"], item, {
        "type": "custom_tool_call_output", "call_id": item["call_id"], "output": "Done."}]})  # fmt: skip
    assert (again.status_code, warned(again)) == (200, ())


def test_a_function_in_a_namespace_is_called_by_both_names(http):
    call = '<tool_call>\n{"name": "mcp__docs__find", "arguments": {"query": "x"}}\n</tool_call>'
    body = {**CODEX, "tools": [MCP], "stream": False, "max_output_tokens": 200, **guide(call)}
    [item] = http.post("/v1/responses", json=body).json()["output"]
    assert (item["type"], item["namespace"], item["name"]) == ("function_call", "mcp__docs", "find")
    assert json.loads(item["arguments"]) == {"query": "x"}


@pytest.mark.parametrize("mode", ["auto", "required"])
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/chat/completions"])
def test_a_choice_of_allowed_tools_offers_no_other(http, path, mode):
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    told = {} if mode == "required" else guide(call)
    asked = {"temperature": 0, "parallel_tool_calls": False, **told}
    if path == "/v1/responses":
        tools = [{"type": "function", **tool["function"]} for tool in (ADD, NOW)]
        allowed = {"mode": mode, "tools": [{"type": "function", "name": "now"}]}
        asked |= {"input": "?", "max_output_tokens": 200}
    else:
        tools = [ADD, NOW]
        allowed = {"allowed_tools": {"mode": mode, "tools": [NOW]}}
        asked |= {"messages": [{"role": "user", "content": "?"}], "max_tokens": 200}
    asked |= {"tools": tools, "tool_choice": {"type": "allowed_tools", **allowed}}
    answer = http.post(path, json=asked)
    assert answer.status_code == 200, answer.text
    assert json.dumps(answer.json()).count('"name": "now"') >= 1
    only = {**asked, "tools": tools[1:], "tool_choice": mode}
    usages = [one.json()["usage"] for one in (answer, http.post(path, json=only))]
    counts = [one.get("input_tokens", one.get("prompt_tokens")) for one in usages]
    assert counts[0] == counts[1]


def test_a_strict_server_refuses_what_it_would_leave_out(make_engine):
    config = ServeConfig(
        port=0, served_model_name="tiny", chat_template=TEMPLATE, strict_fields=True
    )
    wrong = {
        "tools.1": ("/v1/responses", {**CODEX, "tools": [SHELL, SEARCH]}),
        "input.2": ("/v1/responses", {**CODEX, "input": [*CODEX["input"], {"type": "compaction"}]}),
        "store": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}],
                                           "store": True}),
        "tools.0": ("/v1/messages", {**CLAUDE, "tools": [{"type": "bash_20250124"}]}),
    }  # fmt: skip
    with (
        Served(AsyncEngine(make_engine), config) as running,
        httpx.Client(base_url=running.url, timeout=DEADLINE_S) as client,
    ):
        for param, (path, body) in wrong.items():
            refused = client.post(path, json=body)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        for path, body in (("/v1/responses", CODEX), ("/v1/messages", CLAUDE)):
            assert client.post(path, json=body).status_code == 200
