"""Requests are sampled as generation_config.json recommends, unless a flag says otherwise."""

import httpx
import pytest
from transformers import GenerationConfig

from model.async_engine import AsyncEngine
from model.errors import ModelNotFoundError
from model.load.generation import sampling_defaults
from model.serve.args import parse_args
from model.serve.config import ServeConfig
from tests.model.serve.conftest import DEADLINE_S, Served

PATHS = {
    "/v1/completions": {"prompt": "A tuple is", "max_tokens": 12},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "A tuple is"}]},
    "/v1/responses": {"input": "A tuple is"},
    "/v1/messages": {"messages": [{"role": "user", "content": "A tuple is"}], "max_tokens": 7,
                     "model": "tiny"},
}  # fmt: skip
RECOMMENDED = {"temperature": 0.7, "top_k": 1, "repetition_penalty": 1.3, "max_new_tokens": 9}


class Network:
    def __init__(self, **values):
        self.generation_config = GenerationConfig(**values)


@pytest.fixture
def serve(make_engine, tiny_model, monkeypatch):
    def started(**config):
        monkeypatch.setattr(
            tiny_model.network, "generation_config", GenerationConfig(**RECOMMENDED)
        )
        made = ServeConfig(port=0, served_model_name="tiny", **config)
        return Served(AsyncEngine(make_engine), made)

    return started


def text_of(path, told):
    """The text of an answer, and how many tokens it has."""
    usage = told["usage"]
    count = usage.get("completion_tokens", usage.get("output_tokens"))
    if path.endswith("completions"):
        [choice] = told["choices"]
        return choice.get("text") or choice["message"]["content"], count
    if path == "/v1/responses":
        return told["output"][0]["content"][0]["text"], count
    return told["content"][0]["text"], count


def test_requests_are_sampled_as_the_model_recommends(serve):
    with serve() as running, httpx.Client(base_url=running.url, timeout=DEADLINE_S) as http:

        def ask(path, **fields):
            answered = http.post(path, json={**PATHS[path], **fields})
            assert answered.status_code == 200, answered.text
            return answered.json()

        for path in PATHS:
            whole = ask(path)
            text, count = text_of(path, whole)
            # top_k 1 is greedy at any temperature; the penalty changes the text.
            extra = {} if path in {"/v1/responses", "/v1/messages"} else {"repetition_penalty": 1.3}
            assert (text, count) == text_of(path, ask(path, temperature=0, **extra))
            assert count == {"/v1/completions": 12, "/v1/messages": 7}.get(path, 9)
        path = "/v1/completions"
        plain = text_of(path, ask(path, temperature=0, repetition_penalty=1))
        assert text_of(path, ask(path, repetition_penalty=1)) == plain != text_of(path, ask(path))
        drawn = {text_of(path, ask(path, top_k=-1, temperature=3, seed=n)) for n in range(6)}
        assert len(drawn) > 1  # what a request gives is taken
        assert ask("/v1/responses")["temperature"] == 0.7
        assert ask("/v1/responses", temperature=0.1)["temperature"] == 0.1
        assert text_of("/v1/chat/completions", ask("/v1/chat/completions", max_tokens=20))[1] > 9


def test_with_the_flag_they_are_sampled_as_openais_interface_has_it(serve):
    config = {"generation_config": "vllm"}
    with serve(**config) as running, httpx.Client(base_url=running.url, timeout=DEADLINE_S) as http:
        asked = PATHS["/v1/completions"]
        drawn = {
            http.post("/v1/completions", json={**asked, "seed": n}).json()["choices"][0]["text"]
            for n in range(6)
        }
        assert len(drawn) > 1
        short = {**PATHS["/v1/responses"], "max_output_tokens": 3}
        assert http.post("/v1/responses", json=short).json()["temperature"] == 1


def test_vllms_names_of_the_flag_are_taken():
    assert parse_args([]).serve.generation_config == "auto"
    assert parse_args(["--generation-config", "vllm"]).serve.generation_config == "vllm"


def test_only_sampling_values_that_the_file_gives_are_defaults():
    assert sampling_defaults(Network()) == {}
    told = {"do_sample": True, "num_beams": 4, "eos_token_id": 3, "top_p": 0.8, "top_k": 0}
    assert sampling_defaults(Network(**told)) == {"top_p": 0.8, "top_k": 0}
    network = Network()
    network.generation_config = None
    assert sampling_defaults(network) == {}


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", -1.0), ("top_p", 1.5), ("repetition_penalty", 0.0), ("top_k", "x")],
)
def test_a_value_that_is_not_allowed_names_its_field_and_the_flag(field, value):
    network = Network()
    setattr(network.generation_config, field, value)
    match = f"^model: generation_config.json: {field}: wanted .*; --generation-config vllm ignores"
    with pytest.raises(ModelNotFoundError, match=match):
        sampling_defaults(network)
    engine = type("Engine", (), {"model": type("Model", (), {"network": network})})
    assert ServeConfig(generation_config="vllm").sampling_defaults(engine) == {"temperature": 1.0}
    with pytest.raises(ModelNotFoundError, match=match):
        ServeConfig().sampling_defaults(engine)
