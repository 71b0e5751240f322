"""Whatever the schema allows, and what it does not, no request is answered by a 500."""

import json

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.serve.answers import ChatCompletion, Completion, ErrorReport
from model.serve.messages import CountRequest, MessagesRequest
from model.serve.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from model.serve.responses import ResponsesRequest
from tests.hang import HANG_S

ROUTES = {
    "/v1/completions": (CompletionRequest, Completion),
    "/v1/chat/completions": (ChatRequest, ChatCompletion),
    "/tokenize": (TokenizeRequest, None),
    "/detokenize": (DetokenizeRequest, None),
    "/v1/responses": (ResponsesRequest, None),
    "/v1/messages": (MessagesRequest, None),
    "/v1/messages/count_tokens": (CountRequest, None),
}
NUMBERS = st.one_of(
    st.integers(-2, 40), st.integers(), st.floats(allow_nan=False, allow_infinity=False)
)
LEAVES = st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=8))
JSON = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=6,
)
NAMES = st.sampled_from(["f", "g", "", "a b"])
SCHEMAS = st.one_of(
    st.just({"type": "object", "properties": {"a": {"enum": [1, "x"]}}, "required": ["a"],
             "additionalProperties": False}),
    st.dictionaries(st.sampled_from(["type", "properties", "$ref", "enum"]), JSON, max_size=2),
)  # fmt: skip
FUNCTIONS = st.fixed_dictionaries({"name": NAMES}, optional={"parameters": SCHEMAS})
TEXTS = st.one_of(
    st.text(max_size=8),
    st.lists(
        st.fixed_dictionaries(
            {"type": st.sampled_from(["text", "input_text", "output_text", "refusal", "x"]),
             "text": st.text(max_size=5)},
            optional={"refusal": st.text(max_size=3)},
        ),
        max_size=2,
    ),
)  # fmt: skip
ARGUMENTS = st.sampled_from(['{"a": 1}', "{}", "", "[", "[1]", '"\\ud800"', "1e999"])
CALLS = st.lists(
    st.fixed_dictionaries(
        {"function": st.fixed_dictionaries({"name": NAMES, "arguments": ARGUMENTS})},
        optional={"id": st.text(max_size=3), "type": st.just("function")},
    ),
    max_size=2,
)


def some_of(kinds, **fields):
    """An object of one of these types, with some of these fields, or with any JSON in them."""
    others = {name: values | JSON for name, values in fields.items()}
    return st.fixed_dictionaries({"type": st.sampled_from(kinds)}, optional=others)


ITEMS = st.lists(
    st.one_of(
        some_of(
            ["custom_tool_call", "local_shell_call", "custom_tool_call_output", "reasoning",
             "local_shell_call_output", "web_search_call", "item_reference", "compaction"],
            id=st.text(max_size=2), call_id=st.text(max_size=2), name=NAMES, namespace=NAMES,
            input=st.text(max_size=5), output=TEXTS, summary=TEXTS,
            action=st.dictionaries(st.text(max_size=3), JSON, max_size=2),
        ),
        st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": TEXTS}),
        st.fixed_dictionaries({"type": st.just("function_call"), "call_id": st.text(max_size=2),
                               "name": NAMES, "arguments": ARGUMENTS}),
        st.fixed_dictionaries({"type": st.just("function_call_output"), "output": TEXTS,
                               "call_id": st.text(max_size=2)}),
        st.fixed_dictionaries({"type": st.just("reasoning"), "content": TEXTS}),
        JSON,
    ),
    max_size=4,
)  # fmt: skip
SOURCES = some_of(
    ["text", "content", "base64", "url", "file"], data=st.text(max_size=5), content=TEXTS,
    media_type=st.just("text/plain"), url=st.text(max_size=3),
)  # fmt: skip
BLOCKS = st.lists(
    st.one_of(
        some_of(
            ["document", "search_result", "redacted_thinking", "server_tool_use", "image",
             "web_search_tool_result", "tool_reference"],
            source=SOURCES, title=st.text(max_size=3), content=TEXTS, context=st.text(max_size=3),
        ),
        st.fixed_dictionaries({"type": st.just("text"), "text": st.text(max_size=8)}),
        st.fixed_dictionaries({"type": st.just("thinking"), "thinking": st.text(max_size=8)}),
        st.fixed_dictionaries({"type": st.just("tool_use"), "id": st.text(max_size=2),
                               "name": NAMES, "input": st.dictionaries(st.text(max_size=3), JSON)}),
        st.fixed_dictionaries({"type": st.just("tool_result"), "tool_use_id": st.text(max_size=2),
                               "content": TEXTS}),
        JSON,
    ),
    max_size=3,
)  # fmt: skip
TOOLS = {
    ChatRequest: st.fixed_dictionaries({"type": st.just("function"), "function": FUNCTIONS}),
    ResponsesRequest: st.builds(lambda f: {"type": "function", **f}, FUNCTIONS),
    MessagesRequest: st.fixed_dictionaries({"name": NAMES, "input_schema": SCHEMAS}),
}
OTHERS = some_of(
    ["custom", "namespace", "web_search", "local_shell", "bash_20250124", "mcp"], name=NAMES,
    tools=st.lists(TOOLS[ResponsesRequest], max_size=2), format=JSON, input_schema=SCHEMAS,
)  # fmt: skip
TOOLS = {kind: tools | OTHERS for kind, tools in TOOLS.items()}
TOOLS |= {TokenizeRequest: TOOLS[ChatRequest], CountRequest: TOOLS[MessagesRequest]}
CHOICES = st.one_of(
    st.sampled_from(["auto", "none", "required"]),
    st.builds(lambda name: {"type": "function", "function": {"name": name}}, NAMES),
    st.builds(lambda name: {"type": "function", "name": name}, NAMES),
    st.fixed_dictionaries({"type": st.sampled_from(["auto", "any", "tool", "none"])},
                          optional={"name": NAMES}),
    some_of(["allowed_tools", "custom", "web_search"], name=NAMES, namespace=NAMES,
            mode=st.sampled_from(["auto", "required"]),
            tools=st.lists(TOOLS[ResponsesRequest], max_size=2),
            allowed_tools=st.fixed_dictionaries({
                "mode": st.sampled_from(["auto", "required"]),
                "tools": st.lists(TOOLS[ChatRequest], max_size=2)})),
)  # fmt: skip
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["system", "user", "assistant", "tool", "x"]),
            "content": st.one_of(
                st.none(),
                st.text(max_size=12),
                st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": st.text()})),
                BLOCKS,
                JSON,
            ),
        },
        optional={"tool_calls": CALLS},
    ),
    max_size=3,
)
ENDS = {  # what the last event of a stream begins with
    "/v1/responses": ("event: response.completed", "event: response.incomplete"),
    "/v1/messages": "event: message_stop",
}
LIKELY = {  # values that come further than to the check of types
    "prompt": st.one_of(
        st.text(max_size=20),
        st.lists(st.text(max_size=5), max_size=3),
        st.lists(st.integers(-1, 2100), max_size=5),
        st.lists(st.lists(st.integers(0, 2047), max_size=3), max_size=3),
    ),
    "messages": MESSAGES,
    "input": st.one_of(st.text(max_size=12), ITEMS),
    "system": TEXTS,
    "tool_choice": CHOICES,
    "max_output_tokens": st.integers(0, 6),
    "reasoning_effort": st.sampled_from(["none", "high", "x"]),
    "continue_final_message": st.booleans(),
    "tokens": st.lists(st.one_of(st.integers(-1, 2100), st.integers()), max_size=5),
    "max_tokens": st.integers(0, 6),
    "max_completion_tokens": st.integers(0, 6),
    "temperature": st.floats(-1, 3),
    "top_p": st.floats(-0.5, 1.5),
    "min_p": st.floats(-0.5, 1.5),
    "top_k": st.integers(-2, 3000),
    "n": st.integers(0, 4),
    "seed": st.integers(-1, 2**64),
    "logprobs": st.one_of(st.booleans(), st.integers(-1, 25)),
    "top_logprobs": st.integers(-1, 25),
    "stop": st.one_of(st.text(max_size=3), st.lists(st.text(max_size=3), max_size=3)),
    "stream": st.booleans(),
    "echo": st.booleans(),
    "model": st.sampled_from(["tiny", "other", ""]),
    "logit_bias": st.dictionaries(
        st.one_of(st.integers(-1, 2100).map(str), st.text(max_size=3)), st.floats(-150, 150),
        max_size=3,
    ),
    "cache_salt": st.text(max_size=5),
    "retain": st.lists(st.from_regex(r"[0-9]{1,3}:[0-9]{0,3}(@[0-9])?(/[0-9]{1,3})?"), max_size=3),
    "priority": st.integers(-(2**40), 2**40),
    "stop_token_ids": st.lists(st.integers(-1, 2**33), max_size=3),
}  # fmt: skip


WELL = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
RIGHT = {  # values that are taken, so that answers of all kinds are seen
    "prompt": WELL.map("a".__add__),
    "tokens": st.lists(st.integers(0, 2047), max_size=5),
    "messages": st.lists(
        st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": WELL}),
        min_size=1, max_size=3,
    ),
    "input": WELL,
    "max_tokens": st.integers(1, 5),
    "max_output_tokens": st.integers(1, 5),
    "stream": st.booleans(),
    "temperature": st.floats(0, 2),
    "guided_choice": st.lists(
        st.sampled_from(["<think>a</think>b", "<tool_call>{}</tool_call>", "\ufffd\U0001f600"]),
        min_size=1, max_size=2,
    ),
}  # fmt: skip


@st.composite
def bodies(draw, request_type):
    names = list(request_type.model_fields)
    if draw(st.booleans()):
        right = {name: values for name, values in RIGHT.items() if name in names}
        if request_type in {TokenizeRequest, ResponsesRequest}:
            del right["prompt"]
        if request_type not in {TokenizeRequest, DetokenizeRequest}:
            right["guided_choice"] = st.none() | RIGHT["guided_choice"]
        return draw(st.fixed_dictionaries(right))
    needed = [name for name in ("prompt", "messages", "tokens", "input") if name in names]
    likely = LIKELY | {"tools": st.lists(TOOLS.get(request_type, JSON), max_size=2)}
    if request_type is ResponsesRequest:
        needed.remove("prompt")
    chosen = draw(st.lists(st.sampled_from(names), max_size=6, unique=True))
    body = {
        name: draw(st.one_of(likely[name], likely[name], JSON) if name in likely else JSON)
        for name in dict.fromkeys([*needed, *chosen])
        if name != "messages" or request_type is not TokenizeRequest or draw(st.booleans())
    }
    if request_type in {CompletionRequest, ChatRequest, MessagesRequest}:
        body.setdefault("max_tokens", 3)
    if request_type is ResponsesRequest:
        body.setdefault("max_output_tokens", 3)
    if draw(st.integers(0, 9)) == 0:
        body[draw(st.text(max_size=5))] = draw(JSON)
    return body


@pytest.mark.hypothesis
@pytest.mark.parametrize("path", ROUTES)
def test_no_body_of_any_kind_makes_a_500_or_an_answer_of_another_form(agents, path):
    request_type, answer_type = ROUTES[path]
    served, kinds = agents, set()
    with httpx.Client(base_url=served.url, timeout=HANG_S) as client:

        @settings(max_examples=40)
        @given(body=bodies(request_type))
        def check(body):
            response = client.post(path, json=body)
            kinds.add((response.status_code, response.headers["content-type"][:10]))
            assert response.status_code in {200, 400, 404}, response.text
            if response.status_code != 200:
                error = ErrorReport.model_validate_json(response.text).error
                assert error.message
            elif response.headers["content-type"] == "application/json":
                if answer_type is not None:
                    answer_type.model_validate_json(response.text)
            else:
                last = response.text.split("\n\n")[-2]
                assert last.startswith(ENDS.get(path, "data: [DONE]")), last

        check()
    assert len(kinds) > 1
    assert 200 in {status for status, _ in kinds}  # not all of them are refused
    served.wait_for(lambda: served.engine.num_open == 0)
    assert served.call(lambda engine: engine.kv.stats().num_used_blocks) == 0


def test_the_schema_names_what_every_route_takes(http):
    schema = http.get("/openapi.json").json()
    assert {*ROUTES} <= set(schema["paths"])
    for path, (request_type, _) in ROUTES.items():
        body = schema["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        assert body["schema"] == {"$ref": f"#/components/schemas/{request_type.__name__}"}
    assert json.dumps(schema)
