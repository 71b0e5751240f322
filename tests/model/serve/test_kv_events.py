"""A server tells routers what its cache holds, while it works and while it sleeps."""

import threading
import time

import httpx
import pytest

from kvcore import wire
from model.async_engine import AsyncEngine
from model.control.config import EngineConfig
from model.errors import UsageError
from model.serve.args import parse_args
from model.serve.config import ServeConfig
from model.serve.kv_events import announces
from tests.model.serve.conftest import DEADLINE_S, Served

ANYWHERE = "tcp://127.0.0.1:*"


def until(true):
    deadline = time.monotonic() + DEADLINE_S
    while not (found := true()):
        assert time.monotonic() < deadline, "waited in vain"
        threading.Event().wait(0.005)
    return found


def test_what_a_server_has_computed_is_found_by_a_follower(make_engine):
    config = ServeConfig(port=0, served_model_name="tiny", kv_events=ANYWHERE, kv_replay=ANYWHERE)
    announce = announces(config, config.kv_events)
    opened = []

    def kept(engine, wake):
        opened.append(announce(engine, wake))
        return opened[0]

    sizes = {"record_events": True, "host_memory_bytes": 1 << 26}
    engine = AsyncEngine(lambda: make_engine(**sizes), announce=kept)
    with Served(engine, config) as running, httpx.Client(base_url=running.url) as http:
        [publisher] = opened
        source = {"r": wire.Source(publisher.endpoint, publisher.replay)}
        prompt = [*range(100, 180)]
        with wire.Subscriber(source) as follower:
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 4}
            assert http.post("/v1/completions", json=body, timeout=DEADLINE_S).status_code == 200
            assert until(lambda: follower.match(prompt)) == {"r": 80}
            copies = follower.index._publishers["r"].copies
            until(lambda: len(copies) == 5)  # in host memory, though no step runs
            publisher._history._base = None  # as after a long life: the buffer is too short
            publisher._history._kept.clear()
            with wire.Subscriber(source) as late:
                assert until(lambda: late.match(prompt)) == {"r": 80}
            assert publisher.stats().num_snapshots == 1
            running.call(lambda engine: engine.kv.reset())
            until(lambda: follower.match(prompt) == {})
    assert not publisher._transport.is_running


def test_the_flag_has_the_engine_record_events():
    assert parse_args(["--kv-events", "tcp://*:5557"]).engine.record_events
    assert not parse_args([]).engine.record_events
    assert not EngineConfig().record_events


def test_an_address_in_use_is_told_before_a_model_is_loaded(make_engine):
    engine = make_engine(record_events=True)
    with wire.Publisher(engine.kv, ANYWHERE) as taken:
        for name, flag in [("kv_events", "--kv-events"), ("kv_replay", "--kv-replay")]:
            said = {"kv_events": ANYWHERE, name: taken.endpoint}
            with pytest.raises(UsageError, match=f"{flag}: wanted a free address.*in use"):
                announces(ServeConfig(**said), said["kv_events"])


def test_a_replay_without_events_is_refused():
    with pytest.raises(ValueError, match="kv_replay: has no effect without kv_events"):
        ServeConfig(kv_replay=ANYWHERE)
