"""What every endpoint answers, and what it says to a request that it cannot take."""

import json

import pytest

import kvcore
from model.control.params import SamplingParams

GREEDY = {"prompt": "A tuple is", "max_tokens": 8, "temperature": 0}


def events(response):
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_completion_is_what_the_engine_alone_says(http, served):
    (alone,) = served.call(
        lambda engine: engine.generate(["A tuple is"], SamplingParams(max_tokens=8))
    )
    body = http.post("/v1/completions", json=GREEDY).json()
    assert body["choices"][0] == {
        "index": 0, "text": alone.text, "logprobs": None, "finish_reason": "length",
    }  # fmt: skip
    assert body["usage"]["completion_tokens"] == 8
    assert body["model"] == "tiny"


def test_a_stream_says_what_the_whole_says(http):
    whole = http.post("/v1/completions", json=GREEDY).json()
    asked = {**GREEDY, "stream": True, "stream_options": {"include_usage": True}}
    pieces = events(http.post("/v1/completions", json=asked))
    text = "".join(choice["text"] for piece in pieces for choice in piece["choices"])
    assert text == whole["choices"][0]["text"]
    assert pieces[-1]["usage"]["total_tokens"] == whole["usage"]["total_tokens"]


@pytest.mark.parametrize("path", ["/health", "/version", "/v1/models", "/v1/models/tiny"])
def test_what_can_be_asked_is_answered(http, path):
    assert http.get(path).status_code == 200


def test_the_version_is_kvcores(http):
    assert http.get("/version").json() == {"version": kvcore.__version__}


def test_tokens_come_back_as_the_text_they_were(http):
    tokens = http.post("/tokenize", json={"prompt": "A tuple is"}).json()["tokens"]
    assert http.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": "A tuple is"}
