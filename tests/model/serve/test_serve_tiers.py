"""A server with a disk behind its cache finds its chats again after a restart."""

import httpx

from model.async_engine import AsyncEngine
from model.control.tier_transfers import TransferCosts
from model.serve.config import ServeConfig
from tests.model.serve.conftest import DEADLINE_S, Served
from tests.model.serve.test_metrics import samples

ASKED = {"prompt": [9] * 100, "max_tokens": 5, "ignore_eos": True}


def served(make_engine, path):
    engine = AsyncEngine(lambda: make_engine(disk=str(path), host_memory_bytes=1 << 26))
    return Served(engine, ServeConfig(port=0))


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
