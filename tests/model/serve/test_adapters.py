"""A LoRA adapter is a model of its own to a client: it names it, and the adapter's tokens come."""

import copy
from contextlib import contextmanager

import httpx
import pytest
import torch

from model.async_engine import AsyncEngine
from model.cluster import args as cluster_args
from model.errors import UsageError
from model.serve.args import parse_args
from model.serve.config import ServeConfig
from tests.model.serve.conftest import DEADLINE_S, Served

peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore")  # of the package


@pytest.fixture
def folder(tiny_model, tmp_path):
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, lora_alpha=32, target_modules=["q_proj", "v_proj"])
    network = peft.get_peft_model(copy.deepcopy(tiny_model.network), config)
    for name, parameter in network.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(std=0.3)
    network.save_pretrained(tmp_path)
    return tmp_path


@contextmanager
def serving(make_engine, **sizes):
    engine = AsyncEngine(lambda: make_engine(**sizes))
    with (
        Served(engine, ServeConfig(port=0)) as served,
        httpx.Client(base_url=served.url, timeout=DEADLINE_S) as client,
    ):
        yield client


@pytest.fixture
def http(make_engine, folder):
    with serving(make_engine, lora=(f"sql={folder}",)) as client:
        yield client


def test_an_adapter_is_listed_and_asked_for_by_its_name(http):
    base, adapter = [card["id"] for card in http.get("/v1/models").json()["data"]]
    assert adapter == "sql"
    body = {"prompt": "A tuple is", "max_tokens": 8, "temperature": 0}

    def text(**fields):
        return http.post("/v1/completions", json=body | fields).json()["choices"][0]["text"]

    assert text() == text(model=base)
    assert text(model="sql") == text(model="sql") != text()
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "temperature": 0}
    answers = [
        http.post("/v1/chat/completions", json=chat | {"model": name}).json()
        for name in (base, "sql")
    ]
    assert answers[0]["choices"] != answers[1]["choices"]
    assert [answer["model"] for answer in answers] == [base, "sql"]
    assert http.post("/v1/completions", json=body | {"model": "sql"}).json()["model"] == "sql"
    answer = http.post("/v1/completions", json=body | {"model": "other"})
    assert answer.status_code == 404
    assert "'sql'" in answer.json()["error"]["message"]


@pytest.mark.parametrize("parse", [parse_args, cluster_args.parse_args])
def test_an_adapter_with_the_name_of_the_model_is_refused(parse):
    with pytest.raises(UsageError, match="other than the model's, got 'sql'"):
        parse(["--served-model-name", "sql", "--lora", "sql=somewhere"])
    with pytest.raises(UsageError, match="other than the model's, got 'tiny'"):
        parse(["--lora", "other=somewhere", "--lora", "tiny=somewhere"])


def test_an_adapter_is_loaded_and_unloaded_while_the_server_runs(make_engine, folder):
    body = {"prompt": "A tuple is", "max_tokens": 8, "temperature": 0}
    with serving(make_engine, max_loras=1) as http:

        def text(**fields):
            return http.post("/v1/completions", json=body | fields).json()["choices"][0]["text"]

        def load(name="sql", path=folder):
            body = {"lora_name": name, "lora_path": str(path)}
            return http.post("/v1/load_lora_adapter", json=body)

        def unload(name="sql"):
            return http.post("/v1/unload_lora_adapter", json={"lora_name": name})

        base = text()
        assert load().status_code == 200
        assert [card["id"] for card in http.get("/v1/models").json()["data"]][1:] == ["sql"]
        adapted = text(model="sql")
        assert adapted != base == text()
        assert load().json()["error"]["param"] == "lora_name"  # it is there
        assert "--max-loras" in load("other").json()["error"]["message"]
        missing = load("other", folder / "nowhere")
        assert (missing.status_code, missing.json()["error"]["param"]) == (404, "lora_path")
        assert unload().status_code == 200
        assert http.post("/v1/completions", json=body | {"model": "sql"}).status_code == 404
        assert "got 'sql'" in unload().json()["error"]["message"]
        assert load("again").status_code == 200
        assert text(model="again") == adapted


def test_without_the_flag_no_adapter_is_loaded(make_engine, folder):
    with serving(make_engine) as http:
        body = {"lora_name": "sql", "lora_path": str(folder)}
        answer = http.post("/v1/load_lora_adapter", json=body)
        assert (answer.status_code, "--max-loras" in answer.text) == (400, True)
