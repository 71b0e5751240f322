"""What every endpoint answers, and what it says to a request that it cannot take."""

import json
import re
from pathlib import Path

import httpx
import pytest
from fastapi import applications

import kvcore
from model.async_engine import AsyncEngine
from model.control.params import SamplingParams
from model.errors import UsageError
from model.serve.args import parse_args
from model.serve.config import ServeConfig
from tests.hang import HANG_S
from tests.model.serve.conftest import DEADLINE_S, Served

ROOT = Path(__file__).parents[3]
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


def test_routes_are_described_once_when_a_client_asks(make_engine, monkeypatch):
    made, make = [], applications.get_openapi
    monkeypatch.setattr(applications, "get_openapi", lambda **of: made.append(of) or make(**of))
    with (
        Served(AsyncEngine(make_engine), ServeConfig(port=0)) as running,
        httpx.Client(base_url=running.url, timeout=DEADLINE_S) as client,
    ):
        assert client.get("/health").status_code == 200
        assert not made
        first, second = (client.get("/openapi.json").json() for _ in range(2))
        assert "/v1/completions" in first["paths"]
        assert first == second
        assert len(made) == 1


def test_a_model_whose_name_has_slashes_is_found_by_it(make_engine):
    config = ServeConfig(port=0, served_model_name="my/model")
    with (
        Served(AsyncEngine(make_engine), config) as running,
        httpx.Client(base_url=running.url, timeout=DEADLINE_S) as client,
    ):
        [listed] = client.get("/v1/models").json()["data"]
        assert client.get(f"/v1/models/{listed['id']}").json() == listed
        assert client.get("/v1/models/my%2Fmodel").json() == listed
        assert client.get("/v1/models/my").status_code == 404


def test_a_model_with_several_names_is_found_by_each(make_engine):
    options = parse_args(["--served-model-name", "tiny", "gpt-5", "org/tiny", "--port", "0"])
    config = options.serve
    assert parse_args(["--served-model-name", "one"]).serve.served_model_name == ("one",)
    assert config.served_model_name == ("tiny", "gpt-5", "org/tiny")
    with (
        Served(AsyncEngine(make_engine), config) as running,
        httpx.Client(base_url=running.url, timeout=DEADLINE_S) as client,
    ):
        listed = client.get("/v1/models").json()["data"]
        assert [one["id"] for one in listed] == ["tiny", "gpt-5", "org/tiny"]
        asked = {"prompt": list(range(100, 148)), "max_tokens": 2, "temperature": 0}
        for name in (None, "tiny", "gpt-5", "org/tiny"):
            made = client.post("/v1/completions", json={**asked, "model": name}).json()
            assert made["model"] == (name or "tiny")
            cached = made["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert (cached > 0) == (name is not None)  # they are one model: the first fills
        for path in ("/v1/models/gpt-5", "/v1/models/org/tiny"):
            assert client.get(path).status_code == 200
        refused = client.post("/v1/completions", json={**asked, "model": "other"})
        assert refused.status_code == 404
        assert "'tiny' or 'gpt-5' or 'org/tiny'" in refused.json()["error"]["message"]


def test_an_adapter_cannot_have_any_of_the_models_names():
    with pytest.raises(UsageError, match=r"--lora: .* got 'b'; --served-model-name"):
        parse_args(["--served-model-name", "a", "b", "--lora", "b=somewhere"])


def prompts_of_pages():
    """The prompts that the pages give to the tiny model."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    lines = [line for page in pages for line in page.read_text(encoding="utf-8").splitlines()]
    own = [line for line in lines if "--model" not in line]
    given = r'(?:--prompt |"prompt": |minimal |\.generate\(\[?)"([A-Z][^"]+)"'
    return sorted({prompt for line in own for prompt in re.findall(given, line)})


@pytest.mark.parametrize("prompt", prompts_of_pages())
def test_a_prompt_of_a_page_is_answered_without_a_stutter(http, prompt):
    """No three tokens or fewer come three times in a row."""
    asked = {"prompt": prompt, "temperature": 0, "max_tokens": 16, "return_token_ids": True}
    [choice] = http.post("/v1/completions", json=asked).json()["choices"]
    ids = choice["token_ids"]
    for size in (1, 2, 3):
        for at in range(len(ids)):
            said = ids[at : at + size]
            assert ids[at : at + 3 * size] != 3 * said, choice["text"]


def test_the_version_is_kvcores(http):
    assert http.get("/version").json() == {"version": kvcore.__version__}


def test_tokens_come_back_as_the_text_they_were(http):
    tokens = http.post("/tokenize", json={"prompt": "A tuple is"}).json()["tokens"]
    assert http.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": "A tuple is"}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_continuous_usage_counts_the_tokens_so_far_in_every_chunk(http, path):
    asked = {"max_tokens": 6, "temperature": 0, "n": 2, "seed": 1, "stream": True}
    if path == "/v1/completions":
        asked |= {"prompt": ["A tuple is", "A list"], "logprobs": 0}
        lengths = [len(http.post("/tokenize", json={"prompt": p}).json()["tokens"])
                   for p in asked["prompt"] for _ in range(2)]  # fmt: skip
    else:
        asked |= {"messages": [{"role": "user", "content": "A tuple is"}], "logprobs": True}
        messages = {"messages": asked["messages"]}
        lengths = [len(http.post("/tokenize", json=messages).json()["tokens"])] * 2
    options = {"include_usage": True, "continuous_usage_stats": True}
    *pieces, last = events(http.post(path, json={**asked, "stream_options": options}))
    counted = [0] * len(lengths)
    for piece in pieces:
        [choice] = piece["choices"]
        told = choice["logprobs"] or {}
        counted[choice["index"]] += len(told.get("tokens") or told.get("content") or ())
        prompt, completion = lengths[choice["index"]], counted[choice["index"]]
        assert piece["usage"] == {
            "prompt_tokens": prompt, "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }  # fmt: skip
    assert counted == [6] * len(lengths)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 6 * len(lengths)


def test_continuous_usage_is_told_only_where_usage_is_asked_for_as_vllm_has_it(http):
    asked = {**GREEDY, "stream": True, "stream_options": {"continuous_usage_stats": True}}
    assert all("usage" not in piece for piece in events(http.post("/v1/completions", json=asked)))


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/completions", {"prompt": "A tuple is"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "A tuple is"}]}),
    ],
)
def test_an_unknown_field_is_ignored_and_named_in_a_header(http, path, asked, streams):
    asked = {**asked, "max_tokens": 2, "temperature": 0, "stream": streams}
    plain = http.post(path, json=asked)
    other = http.post(path, json={**asked, "promt": "x", 'a\r\n"b': [1] * 9})
    assert "Warning" not in plain.headers
    assert other.headers["Warning"] == '299 - "unknown fields were ignored: promt, a???b"'
    assert (plain.status_code, other.status_code) == (200, 200)
    if not streams:
        assert plain.json()["choices"] == other.json()["choices"]


@pytest.mark.parametrize(
    ("name", "harmless", "other"),
    [("use_beam_search", False, True), ("chat_template", None, "x")],
)
def test_a_field_that_would_change_the_answer_is_refused_by_name(http, name, harmless, other):
    answer = http.post("/v1/completions", json={**GREEDY, name: harmless})
    assert (answer.status_code, answer.headers.get("Warning")) == (200, None)
    answer = http.post("/v1/completions", json={**GREEDY, name: other})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == f"{name}: not supported by this server"


def test_at_most_sixteen_ignored_fields_are_named(http):
    many = {f"x{number}": number for number in range(2000)}
    answer = http.post("/v1/completions", json={**GREEDY, **many})
    assert answer.status_code == 200
    assert answer.headers["Warning"].count(",") == 15


def test_strict_fields_refuses_an_unknown_field(make_engine):
    config = ServeConfig(port=0, served_model_name="tiny", strict_fields=True)
    with (
        Served(AsyncEngine(make_engine, max_waiting=10), config) as running,
        httpx.Client(base_url=running.url, timeout=HANG_S) as client,
    ):
        refused = client.post("/v1/completions", json={**GREEDY, "promt": "x"})
        assert client.post("/v1/completions", json=GREEDY).status_code == 200
    assert refused.status_code == 400
    assert refused.json()["error"] == {
        "message": "promt: unknown field",
        "type": "invalid_request_error",
        "param": "promt",
        "code": "unknown_field",
    }


@pytest.mark.parametrize(
    ("path", "body", "status", "named"),
    [
        ("/v1/embeddings", {"input": "x"}, 404, "/v1/embeddings"),
        ("/infill", {"input_prefix": "x", "input_suffix": "y"}, 404, "/infill"),
        ("/v1/completions", {**GREEDY, "suffix": "x"}, 400, "suffix"),
        ("/v1/completions", {**GREEDY, "model": "another"}, 404, "another"),
        ("/v1/batches", {"input_file_id": "x"}, 404, "/v1/batches"),
        ("/sleep", {}, 404, "/sleep"),
    ],
)
def test_what_other_servers_have_alone_is_refused_by_name(http, path, body, status, named):
    refused = http.post(path, json=body)
    assert refused.status_code == status
    assert named in refused.json()["error"]["message"]
