"""Requests that agents and frameworks send by default are answered, and what they lack is named."""

import json
import re
from itertools import pairwise
from typing import get_args, get_type_hints

import anthropic.types
import anthropic.types.beta
import httpx
import openai.types.responses
import pytest
from transformers import AutoTokenizer

from model.async_engine import AsyncEngine
from model.serve.config import ServeConfig
from model.serve.messages import MessagesRequest
from model.serve.protocol import CompletionRequest
from model.serve.reasoning import num_reaching
from model.serve.responses import ResponsesRequest
from model.tiny import CHECKPOINT_DIR
from tests.model.serve.calls import ADD, NOW, TEMPLATE, guide
from tests.model.serve.conftest import DEADLINE_S, Served
from tests.model.serve.shapes import CLAUDE, CODEX, MCP, PATCH, SHAPES, SHELL

WARNING = re.compile(r'299 - "[^":]+: ([^"]+)"')


TOKENIZER = AutoTokenizer.from_pretrained(CHECKPOINT_DIR)
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
def test_a_clients_request_is_answered_and_what_is_left_out_is_named(http, name):
    path, body, names = SHAPES[name]
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert warned(answer) == names
    if path.endswith("count_tokens"):
        assert answer.json()["input_tokens"] > 0
    elif body.get("stream"):
        ends = r"event: (response\.(completed|incomplete)|message_stop)|^data: \[DONE\]"
        assert re.search(ends, answer.text, re.MULTILINE)
        assert '"error": {' not in answer.text


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


FILE = {"type": "file", "file_id": "f1"}


@pytest.mark.parametrize("image", [{"source": FILE}, {"source": {"type": "url"}}, {}])
def test_an_image_that_is_not_in_the_request_is_refused_where_the_question_is_about_it(http, image):
    image = {"type": "image", **image}
    result = {"type": "tool_result", "tool_use_id": "x", "content": [image]}
    use = {"role": "assistant", "content": [{"type": "tool_use", "id": "x", "name": "f"}]}
    later = [{"role": "assistant", "content": "No."}, {"role": "user", "content": "Why?"}]
    for block, place in ((image, "content.0"), (result, "content.0.content.0")):
        asked = [*CLAUDE["messages"], use, {"role": "user", "content": [block, TEXT_BLOCK]}]
        refused = http.post("/v1/messages", json={**CLAUDE, "messages": asked})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == f"messages.2.{place}.type"
        answer = http.post("/v1/messages", json={**CLAUDE, "messages": [*asked, *later]})
        assert warned(answer) == (f"messages.2.{place} (image)",)


@pytest.mark.parametrize("image", [{"file_id": "f1"}, {"image_url": ""}, {"detail": "auto"}])
@pytest.mark.parametrize("field", ["content", "output"])
def test_an_image_without_its_url_is_refused_by_name(http, field, image):
    parts = [{"type": "input_text", "text": "A map:"}, {"type": "input_image", **image}]
    item = {"role": "user"} if field == "content" else {**OUTPUT}
    asked = {**CODEX, "input": [{"role": "user", "content": "Hi"}, {**item, field: parts}]}
    refused = http.post("/v1/responses", json=asked)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == f"input.1.{field}.1.image_url"


TEXT_BLOCK = {"type": "text", "text": "Describe it."}
OUTPUT = {"type": "function_call_output", "call_id": "c1"}
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
        told = {event["type"]: event for event in events_of(answer)}
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
    output = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "Done."}
    again = http.post("/v1/responses", json={**body, "input": [*CODEX["input"], item, output]})
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


THOUGHT = "Hm, 3 + 4: ü😀."


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    "text",
    [f"<think>{THOUGHT}</think>It is 7.", "It is 7.", f"<think>{THOUGHT}",
     "<think>€</think>So: ü, 7 < 8."],
)  # fmt: skip
def test_tokens_of_reasoning_are_counted(http, text, streams):
    """Those that have a character of it, as the tokens of the answer say."""
    asked = {"temperature": 0, "stream": streams, **guide(text)}
    chat = http.post("/v1/chat/completions", json={
        **asked, "messages": CLAUDE["messages"], "max_tokens": 200, "return_token_ids": True,
        **({"stream_options": {"include_usage": True}} if streams else {})})  # fmt: skip
    other = http.post("/v1/responses", json={**asked, "input": "Hi", "max_output_tokens": 200})
    ids, usage = [], None
    for event in events_of(chat) if streams else [chat.json()]:
        usage = event["usage"] or usage
        ids += [token for choice in event["choices"] for token in choice.get("token_ids", ())]
    ends = [len(TOKENIZER.decode(ids[:count])) for count in range(len(ids) + 1)]
    told = TOKENIZER.decode(ids)
    inside = [
        found.span(1) for found in re.finditer(r"<think>(.*?)(?:</think>|$)", told, re.DOTALL)
    ]
    wanted = sum(
        any(begin < last and first < end for first, last in inside) for begin, end in pairwise(ends)
    )
    assert (wanted > 0) == ("<think>" in text)
    assert usage["completion_tokens_details"] == {"reasoning_tokens": wanted}
    last = events_of(other)[-1]["response"] if streams else other.json()
    assert last["usage"]["output_tokens_details"]["reasoning_tokens"] == wanted


def test_tokens_up_to_a_place_are_those_that_a_walk_finds():
    """Inside of characters of several tokens too."""
    ids = TOKENIZER.encode("Hm ü😀 € tuple(é) 数据\n x." * 3)
    lengths = [len(TOKENIZER.decode(ids[:count])) for count in range(len(ids) + 1)]
    for length in range(1, lengths[-1] + 1):
        walked = next(count for count, one in enumerate(lengths) if one >= length)
        assert num_reaching(TOKENIZER.decode, ids, length) == walked


def events_of(answer):
    """The events of a stream."""
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("text", ["ü😀", "a\u202f€", "�x"])
def test_the_bytes_of_tokens_are_those_of_the_text(http, text, streams):
    """A token that is a part of a character has bytes, although it has no text of its own."""
    answer = http.post("/v1/chat/completions", json={
        "messages": CLAUDE["messages"], "temperature": 0, "logprobs": True, "top_logprobs": 20,
        "stream": streams, **guide(text)})  # fmt: skip
    entries = [
        entry
        for event in (events_of(answer) if streams else [answer.json()])
        for choice in event["choices"]
        for entry in (choice["logprobs"] or {}).get("content", ())
    ]
    assert b"".join(bytes(entry["bytes"]) for entry in entries) == text.encode()
    assert all(top["bytes"] is not None for entry in entries for top in entry["top_logprobs"])


PROMPT = {"prompt": "A tuple is", "max_tokens": 1}
CHAT = {"messages": [{"role": "user", "content": "A tuple is"}], "max_tokens": 1}


@pytest.mark.parametrize(
    ("path", "fields", "names"),
    [
        ("completions", {"best_of": 1}, ()),
        ("completions", {"best_of": 2, "n": 2}, ()),
        ("completions", {"suffix": None, "echo": False, "logprobs": None, "stop": None}, ()),
        ("completions", {"suffix": "", "logit_bias": {}, "n": 1, "user": "", "stop": []}, ()),
        ("completions", {"store": True}, ("store",)),
        ("completions", {"service_tier": "auto", "seed": -1, "top_k": -1, "min_p": 0}, ()),
        ("chat/completions", {"seed": -1, "logit_bias": {}, "stop": None, "n": 1}, ()),
        ("chat/completions", {"seed": -(2**63), "top_logprobs": 0, "logprobs": False}, ()),
        ("chat/completions", {"store": True, "verbosity": "low"}, ("store", "verbosity")),
        ("chat/completions", {"store": False, "verbosity": "medium"}, ()),
        ("chat/completions", {"service_tier": "default"}, ()),
        ("chat/completions", {"functions": [], "function_call": "auto"}, ()),
        ("chat/completions", {"prediction": {"type": "content", "content": "x"}}, ("prediction",)),
        ("chat/completions", {"service_tier": "flex"}, ("service_tier",)),
        ("chat/completions", {"web_search_options": {}}, ("web_search_options",)),
        ("chat/completions", {"prompt_cache_key": "k", "prompt_cache_retention": "24h",
                              "safety_identifier": "s", "user": "u"}, ()),
        ("chat/completions", {"metadata": {"trace": {"id": 5}}}, ()),
        ("chat/completions", {"tools": [], "tool_choice": None, "parallel_tool_calls": True}, ()),
        ("chat/completions", {"tools": None, "tool_choice": "auto"}, ()),
        ("chat/completions", {"modalities": ["text"], "audio": None}, ()),
        ("chat/completions", {"tools": [NOW, {"type": "custom", "custom": {"name": "patch"}}]},
         ("tools.1 (custom)",)),
        ("responses", {"truncation": "auto"}, ("truncation",)),
        ("responses", {"truncation": "disabled", "background": False, "max_tool_calls": 5}, ()),
        ("responses", {"top_logprobs": 3}, ("top_logprobs",)),
        ("responses", {"store": True, "include": [], "service_tier": "auto"}, ()),
        ("responses", {"include": ["message.output_text.logprobs"]}, ("include",)),
        ("responses", {"text": {"verbosity": "high"}}, ("text.verbosity",)),
        ("responses", {"prompt_cache_key": "k", "prompt_cache_retention": "in_memory",
                       "safety_identifier": "s", "metadata": {}}, ()),
    ],
)  # fmt: skip
def test_a_field_that_clients_send_by_default_is_taken_and_named_if_ignored(
    http, path, fields, names
):
    body = {"completions": PROMPT, "chat/completions": CHAT}.get(path)
    body = body or {"input": "A tuple is", "max_output_tokens": 1}
    answer = http.post(f"/v1/{path}", json={**body, **fields})
    assert answer.status_code == 200, answer.text
    assert warned(answer) == names


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("completions", {"best_of": 3}, "best_of"),
        ("completions", {"best_of": 3, "n": 2}, "best_of"),
        ("completions", {"suffix": "x"}, "suffix"),
        ("chat/completions", {"top_logprobs": 3}, "top_logprobs"),
        ("chat/completions", {"tool_choice": {"type": "allowed_tools"}},
         "tool_choice.allowed_tools: field required"),
        ("responses", {"tools": [{"name": "add"}]}, "tools.0.type"),
        ("responses", {"tools": [{"type": "namespace", "name": "x", "tools": [
            {"type": "function"}]}]}, "tools.0.tools.0.name"),
        ("responses", {"background": True}, "background"),
        ("responses", {"reasoning": {"effort": "much"}}, "reasoning.effort"),
        ("responses", {"text": {"format": {"type": "json_schema", "name": "x"}}}, "text"),
        ("responses", {"text": {"format": {"type": "json_object"}}, "guided_regex": "a"},
         "guided_regex: cannot be combined with another text"),
    ],
)  # fmt: skip
def test_a_field_that_is_refused_has_the_clients_name(http, names, path, fields, param):
    body = {"completions": PROMPT, "chat/completions": CHAT}.get(path)
    body = body or {"input": "A tuple is", "max_output_tokens": 1}
    refused = http.post(f"/v1/{path}", json={**body, **fields})
    assert refused.status_code == 400, refused.text
    error = refused.json()["error"]
    assert error["message"].startswith(param)
    names(error, param.partition(":")[0])


def test_a_seed_of_minus_one_is_any_seed_and_others_are_one(http):
    asked = {"prompt": "A tuple is", "max_tokens": 12, "temperature": 1}
    texts = [
        [http.post("/v1/completions", json={**asked, "seed": seed}).json()["choices"][0]["text"]
         for _ in range(2)]
        for seed in (-7, 2**63 - 7)
    ]  # fmt: skip
    assert len({text for pair in texts for text in pair}) == 1
    free = CompletionRequest.model_validate({**asked, "seed": -1})
    assert free.sampling({}, 1, None).seed is None


GUIDES = [
    ({"guided_grammar": 'start: "ab"'}, {"structured_outputs": {"grammar": 'start: "ab"'}}),
    ({"guided_choice": ["ab"]}, {"structured_outputs": {"choice": ["ab"]}}),
    ({"guided_json": {"enum": ["ab"]}}, {"structured_outputs": {"json": {"enum": ["ab"]}}}),
    ({"guided_json": {"enum": ["ab"]}}, {"response_format": {
        "type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["ab"]}}}}),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new"), GUIDES)
def test_old_and_new_names_of_one_guide_may_come_together(http, old, new):
    body = {"prompt": "x", "max_tokens": 9, "temperature": 0}
    answer = http.post("/v1/completions", json={**body, **old, **new})
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"].strip('"') == "ab"
    [name] = new
    other = {"response_format": {"type": "json_object"}} if name == "response_format" else {
        "structured_outputs": {"regex": "b"}}  # fmt: skip
    refused = http.post("/v1/completions", json={**body, **old, **other})
    assert refused.status_code == 400


def test_a_form_of_the_text_does_not_hinder_a_demanded_call(http):
    """As in OpenAI's interface, where it is that of an answer's text; instructor sends both."""
    form = {"type": "json_schema", "name": "x", "schema": {"type": "object"}}
    tools = [{"type": "function", "name": "now"}]
    answer = http.post("/v1/responses", json={
        "input": "?", "max_output_tokens": 60, "tools": tools, "text": {"format": form},
        "tool_choice": {"type": "function", "name": "now"}})  # fmt: skip
    assert answer.status_code == 200, answer.text
    assert answer.json()["output"][0]["name"] == "now"
    chat = {**CHAT, "max_tokens": 60, "tools": [NOW], "tool_choice": "required",
            "parallel_tool_calls": False, "response_format": {"type": "json_object"}}  # fmt: skip
    [choice] = http.post("/v1/chat/completions", json=chat).json()["choices"]
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "now"


def test_what_servers_add_to_messages_and_tools_may_come_back(http):
    """Such as marks for caches, and reasoning in the form of a provider."""
    mark = {"cache_control": {"type": "ephemeral"}}
    call = {"id": "c", "type": "function", "function": {"name": "now", "arguments": "{}"}, **mark}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "What time is it?", **mark}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "thinking_blocks": [],
         "reasoning_details": [{"type": "reasoning.text", "text": "Hm."}],
         "provider_specific_fields": {"x": 1}},
        {"role": "tool", "tool_call_id": "c", "content": "Noon.", **mark},
    ]  # fmt: skip
    answer = http.post("/v1/chat/completions", json={
        "messages": messages, "tools": [{**NOW, **mark}], "max_tokens": 1})  # fmt: skip
    assert (answer.status_code, warned(answer)) == (200, ())
