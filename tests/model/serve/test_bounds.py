"""What is too long is refused by name, and costs little before it is."""

import asyncio
import json
import socket
import time

import pytest
from pydantic import ValidationError

from model.serve.errors import ApiError
from model.serve.protocol import ChatRequest, CompletionRequest, DetokenizeRequest
from tests.model.serve.conftest import DEADLINE_S

USER = {"role": "user", "content": "x"}
PART = {"type": "text", "text": ""}
TOO_LONG = [
    (CompletionRequest, {"prompt": "a", "stop": ["q"] * 17}, "stop"),
    (CompletionRequest, {"prompt": "a", "stop": [f"q{i}" for i in range(100_000)]}, "stop"),
    (CompletionRequest, {"prompt": "a", "stop": "q" * 1025}, "stop"),
    (CompletionRequest, {"prompt": "a", "stop": ["q" * 100] * 11}, "stop"),
    (CompletionRequest, {"prompt": "a", "stop_token_ids": [1] * 1025}, "stop_token_ids"),
    (CompletionRequest, {"prompt": "a", "bad_words": ["q"] * 129}, "bad_words"),
    (CompletionRequest, {"prompt": "a", "guided_json": {"enum": [*range(32_768)]}}, "guided_json"),
    (CompletionRequest, {"prompt": "a", "structured_outputs": {"json": {"a": [[]] * 40_000}}},
     "json"),
    (ChatRequest, {"messages": [USER], "tools": [
        {"type": "function", "function": {"name": "f", "parameters": {"a": {"enum": [{}] * 99}}}}
    ] * 400}, "tools"),
    (ChatRequest, {"messages": [USER], "bad_words": ["q" * 50] * 100}, "bad_words"),
    (CompletionRequest, {"prompt": "a", "logit_bias": dict.fromkeys(map(str, range(4097)), 1)},
     "logit_bias"),
    (CompletionRequest, {"prompt": "a", "guided_choice": ["a"] * 1025}, "guided_choice"),
    (CompletionRequest, {"prompt": "a", "guided_regex": "a" * 70_000}, "guided_regex"),
    (CompletionRequest, {"prompt": "a", "metadata": dict.fromkeys(map(str, range(1025)), "")},
     "metadata"),
    (CompletionRequest, {"prompt": ["a"] * 2049}, "prompt"),
    (CompletionRequest, {"prompt": [[1]] * 700_000}, "prompt"),
    (CompletionRequest, {"prompt": [[1] * 600_000] * 2}, "prompt"),
    (CompletionRequest, {"prompt": ["a", 1] * 400_000}, "prompt"),
    (CompletionRequest, {"prompt": [1] * 900_000 + ["a"]}, "prompt"),
    (ChatRequest, {"messages": [USER] * 16_385}, "messages"),
    (ChatRequest, {"messages": [{"role": "user", "content": [PART] * 20_000}]}, "messages"),
    (ChatRequest, {"messages": [USER], "tools": [{}] * 1025}, "tools"),
    (DetokenizeRequest, {"tokens": [5] * 1_100_000}, "tokens"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "body", "param"), TOO_LONG)
def test_what_is_longer_than_anything_that_means_something_is_refused_by_name(kind, body, param):
    with pytest.raises(ApiError) as refused:
        kind.model_validate(body)
    assert (refused.value.status, refused.value.param) == (400, param)
    assert refused.value.message.startswith(f"{param}: wanted at most ")


WRONG = [
    (CompletionRequest, {"prompt": [1] * 2000 + ["a"]}),
    (CompletionRequest, {"prompt": [[1, 2, "a"]] * 2000}),
    (CompletionRequest, {"prompt": [1, True]}),
    (DetokenizeRequest, {"tokens": [1], **dict.fromkeys(map(str, range(400_000)), 1)}),
    (CompletionRequest, {"prompt": "a", "stop": [1] * 16}),
    (ChatRequest, {"messages": [{"rol": "user"}] * 16_000}),
    (ChatRequest, {"messages": [{"role": 5, **dict.fromkeys(map(str, range(400_000)), 1)}]}),
    (DetokenizeRequest, {"tokens": ["a"] * 1_000_000}),
]


@pytest.mark.parametrize(("kind", "body"), WRONG)
def test_of_many_wrong_entries_few_are_told(kind, body):
    began_s = time.thread_time()
    with pytest.raises(ValidationError) as refused:
        kind.model_validate(body)
    assert refused.value.error_count() <= 8
    assert time.thread_time() - began_s < 1  # minutes once


def test_the_largest_that_is_right_is_taken():
    assert len(CompletionRequest(prompt=[1] * 1_000_000).prompts) == 1
    assert len(CompletionRequest(prompt=[[1, 2]] * 2048).prompts) == 2048
    assert len(ChatRequest.model_validate({"messages": [USER] * 16_384}).messages) == 16_384


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "a", "stop": ["q"] * 17}, "stop"),
        ("/v1/completions", {"prompt": "\ud800 x"}, "prompt"),
        ("/v1/completions", {"prompt": ["a", "\ud800"]}, "prompt"),
        ("/v1/completions", {"prompt": "a", "stop": "\ud800"}, "stop"),
        ("/v1/completions", {"prompt": "a", "cache_salt": "\ud800"}, "cache_salt"),
        ("/v1/completions", {"prompt": ["a"] * 400}, "prompt"),  # 316 run or wait here
        ("/v1/completions", {"prompt": ["a"] * 100, "n": 4}, "n"),
        ("/tokenize", {"prompt": "a", "a": 1, "b": [2]}, "a"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "\udfff"}]},
         "messages.0.content"),
        ("/tokenize", {"prompt": "\ud800"}, "prompt"),
    ],
)  # fmt: skip
def test_it_is_said_as_openai_says_it(http, path, body, param):
    refused = http.post(
        path, content=json.dumps(body), headers={"Content-Type": "application/json"}
    )
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, param), error
    assert error["message"].startswith(param)
    assert "PreTokenized" not in error["message"]


def test_a_block_that_is_no_number_is_named(http):
    refused = http.get("/view/blocks/x")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "block_id")


def test_the_page_answers_head(http):
    answer = http.head("/")
    assert (answer.status_code, answer.content) == (200, b"")


@pytest.mark.parametrize(
    "head",
    [
        b"X: " + b"a" * 2_000_000,
        b"X: a\r\n" * 100_000,
        b"X: " + b"a" * 66_000,
    ],
    ids=["one header", "many headers", "just too long"],
)
def test_headers_without_end_are_refused(served, head):
    begin = b"GET /health HTTP/1.1\r\nHost: x\r\n"
    with socket.create_connection(served.listener.getsockname()[:2], DEADLINE_S) as connection:
        try:
            connection.sendall(begin + head + b"\r\n\r\n")
            answer = connection.recv(100)
        except (BrokenPipeError, ConnectionResetError):
            answer = b""  # it was closed before all of it was sent
        assert answer == b"" or answer.startswith(b"HTTP/1.1 400")


def test_long_headers_and_bodies_of_one_connection_are_answered(http):
    for _ in range(3):
        long = http.get("/health", headers={"X": "a" * 60_000})
        assert long.status_code == 200
        body = http.post("/detokenize", json={"tokens": [5] * 100_000})
        assert body.status_code == 200, body.text


@pytest.mark.parametrize("count", [30_000, 100_000])  # one compiles, one is refused
def test_a_schema_with_many_entries_takes_no_thread_long(served, http, monkeypatch, count):
    served.call(lambda engine: engine.prepare_grammars())  # as a server does before it starts
    http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2})  # kernels are compiled
    most = {"loop": 0.0, "step": 0.0}
    once, step = asyncio.Handle._run, type(served.engine.engine).step

    def measured(name, function, one):
        began_s = time.thread_time()
        try:
            return function(one)
        finally:
            most[name] = max(most[name], time.thread_time() - began_s)

    monkeypatch.setattr(asyncio.Handle, "_run", lambda one: measured("loop", once, one))
    monkeypatch.setattr(type(served.engine.engine), "step", lambda one: measured("step", step, one))
    schema = {"enum": [f"{number}" for number in range(count)]}
    asked = {
        "prompt": "A tuple is", "max_tokens": 4,
        "response_format": {"type": "json_schema", "json_schema": {"schema": schema}},
    }  # fmt: skip
    assert len(json.dumps(asked)) < 1 << 20
    answer = http.post("/v1/completions", json=asked)
    assert answer.status_code == (200 if count == 30_000 else 400), answer.text[:200]
    assert 0 < most["loop"] < 0.05
    assert most["step"] < 0.05
