"""Whatever the schema allows, and what it does not, no request is answered by a 500."""

import json

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.serve.protocol import (
    ChatCompletion,
    ChatRequest,
    Completion,
    CompletionRequest,
    DetokenizeRequest,
    ErrorReport,
    TokenizeRequest,
)

ROUTES = {
    "/v1/completions": (CompletionRequest, Completion),
    "/v1/chat/completions": (ChatRequest, ChatCompletion),
    "/tokenize": (TokenizeRequest, None),
    "/detokenize": (DetokenizeRequest, None),
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
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["system", "user", "assistant", "tool", "x"]),
            "content": st.one_of(
                st.none(),
                st.text(max_size=12),
                st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": st.text()})),
                JSON,
            ),
        }
    ),
    max_size=3,
)
LIKELY = {  # values that come further than to the check of types
    "prompt": st.one_of(
        st.text(max_size=20),
        st.lists(st.text(max_size=5), max_size=3),
        st.lists(st.integers(-1, 2100), max_size=5),
        st.lists(st.lists(st.integers(0, 2047), max_size=3), max_size=3),
    ),
    "messages": MESSAGES,
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


@st.composite
def bodies(draw, request_type):
    names = list(request_type.model_fields)
    needed = [name for name in ("prompt", "messages", "tokens") if name in names]
    chosen = draw(st.lists(st.sampled_from(names), max_size=6, unique=True))
    body = {
        name: draw(st.one_of(LIKELY[name], LIKELY[name], JSON) if name in LIKELY else JSON)
        for name in dict.fromkeys([*needed, *chosen])
        if name != "messages" or request_type is not TokenizeRequest or draw(st.booleans())
    }
    if request_type in {CompletionRequest, ChatRequest}:
        body.setdefault("max_tokens", 3)
    if draw(st.integers(0, 9)) == 0:
        body[draw(st.text(max_size=5))] = draw(JSON)
    return body


@pytest.mark.hypothesis
@pytest.mark.parametrize("path", ROUTES)
def test_no_body_of_any_kind_makes_a_500_or_an_answer_of_another_form(served, path):
    request_type, answer_type = ROUTES[path]
    with httpx.Client(base_url=served.url, timeout=60) as client:

        @settings(max_examples=60)
        @given(body=bodies(request_type))
        def check(body):
            response = client.post(path, json=body)
            assert response.status_code in {200, 400, 404}, response.text
            if response.status_code != 200:
                error = ErrorReport.model_validate_json(response.text).error
                assert error.message
            elif response.headers["content-type"] == "application/json":
                if answer_type is not None:
                    answer_type.model_validate_json(response.text)
            else:
                assert response.text.endswith("data: [DONE]\n\n")

        check()
    served.wait_for(lambda: served.engine.num_open == 0)
    assert served.call(lambda engine: engine.kv.stats().num_used_blocks) == 0


def test_the_schema_names_what_every_route_takes(http):
    schema = http.get("/openapi.json").json()
    assert {*ROUTES} <= set(schema["paths"])
    for path, (request_type, _) in ROUTES.items():
        body = schema["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        assert body["schema"] == {"$ref": f"#/components/schemas/{request_type.__name__}"}
    assert json.dumps(schema)
