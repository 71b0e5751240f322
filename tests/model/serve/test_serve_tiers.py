"""A server with a disk behind its cache finds its chats again after a restart."""

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from model.async_engine import AsyncEngine
from model.caches import tiers as tiers_module
from model.control.tier_transfers import TransferCosts
from model.serve.config import ServeConfig
from tests.kvcore.tiers.faulty_memory import FaultyMemoryLink
from tests.model.serve.conftest import DEADLINE_S, Served
from tests.model.serve.test_metrics import samples

ASKED = {"prompt": [9] * 100, "max_tokens": 5, "ignore_eos": True}


def served(make_engine, path=None, **sizes):
    sizes = sizes or {"disk": str(path), "host_memory_bytes": 1 << 26}
    return Served(AsyncEngine(lambda: make_engine(**sizes)), ServeConfig(port=0))


def test_a_chat_survives_a_restart_and_metrics_say_so(make_engine, tmp_path, monkeypatch):
    monkeypatch.setattr(TransferCosts, "is_worth", lambda *_: True)
    answers, found = [], []
    for _ in range(2):
        with (
            served(make_engine, tmp_path) as running,
            httpx.Client(base_url=running.url, timeout=DEADLINE_S) as http,
        ):
            answer = http.post("/v1/completions", json=ASKED)
            answers.append(answer.json()["choices"][0]["text"])
            running.wait_for(lambda: running.call(lambda engine: not engine.tiers.is_busy))
            found.append(samples(http))
    assert answers[0] == answers[1]
    before, after = found
    assert before["kvcore:kv_tier_loaded_tokens_total"] == 0
    assert before["kvcore:kv_tier_stores_total"] == 12  # six blocks, in two tiers
    assert before["kvcore:kv_tier_copies"] == 12
    assert after["kvcore:kv_tier_loaded_tokens_total"] == 96
    assert after["kvcore:kv_tier_loads_total"] == 1
    assert after["kvcore:kv_tier_hits_total"] == 6
    assert after["kvcore:kv_tier_enabled"] == 2
    assert after["kvcore:prompt_tokens_cached_total"] == 96


def test_what_is_published_last_is_stored_while_nothing_runs(make_engine, tmp_path):
    with (
        served(make_engine, tmp_path) as running,
        httpx.Client(base_url=running.url, timeout=DEADLINE_S) as http,
    ):
        body = {"prompt": list(range(9, 200)) * 9, "max_tokens": 1, "ignore_eos": True}
        assert http.post("/v1/completions", json=body).status_code == 200
        running.wait_for(lambda: running.call(lambda engine: not engine.tiers.is_busy))
        assert samples(http)["kvcore:kv_tier_copies"] == 2 * (191 * 9 // 16)


@pytest.mark.parametrize("transport", ["tcp", "nixl"])
def test_metrics_say_what_carried_the_copies_of_a_peer(make_engine, monkeypatch, transport):
    monkeypatch.setattr(TransferCosts, "is_worth", lambda *_: True)
    link = FaultyMemoryLink() if transport == "nixl" else None  # stands in for NIXL
    monkeypatch.setattr(tiers_module, "_memory_at", lambda *_: link)
    sizes = {"host_memory_bytes": 1 << 26, "serve_kv": "127.0.0.1:0"}
    with served(make_engine, **sizes) as first:
        with httpx.Client(base_url=first.url, timeout=DEADLINE_S) as http:
            wanted = http.post("/v1/completions", json=ASKED).json()["choices"]
            assert "kvcore:kv_peer_copies_total" not in samples(http)  # it has no peer
        first.wait_for(lambda: first.call(lambda engine: not engine.tiers.is_busy))
        address = first.call(lambda engine: engine.tiers.server.address)
        with (
            served(make_engine, peer=(address,)) as second,
            httpx.Client(base_url=second.url, timeout=DEADLINE_S) as http,
        ):
            second.wait_for(lambda: samples(http)["kvcore:kv_tier_copies"] == 6)
            assert http.post("/v1/completions", json=ASKED).json()["choices"] == wanted
            told = {
                sample.labels["transport"]: sample.value
                for family in text_string_to_metric_families(http.get("/metrics").text)
                for sample in family.samples
                if sample.name == "kvcore:kv_peer_copies_total"
            }
            assert told == {"tcp": 0, "nixl": 0} | {transport: 6}
            assert samples(http)["kvcore:kv_tier_hits_total"] == 6
