"""A client with many requests does not delay the first token of another."""

import json
import socket
import threading
from types import SimpleNamespace

import httpx
import pytest
from fastapi import Request

from model import SamplingParams, Submission
from model.async_engine import AsyncEngine
from model.errors import RequestTooLongError
from model.serve.config import ServeConfig
from model.serve.generation import _client_of
from tests.model.serve.conftest import DEADLINE_S, Served
from tests.model.serve.hostile.attacks import raw

MANY = 500


def steps_to_first_token(engine, client, most=MANY):
    """How many steps a request waits for its first token; one more than `most`: even longer."""
    asked = Submission("The open() function", SamplingParams(max_tokens=4), client=client)
    [request] = engine.submit(asked)
    steps = 0
    while not request.output_tokens and steps <= most:
        engine.step()
        steps += 1
    return steps


@pytest.mark.parametrize("client", ["new", "many"])
def test_a_second_client_waits_at_most_three_times_as_long_as_alone(make_engine, client):
    engine = make_engine(num_blocks=2000, max_num_seqs=8)
    alone = steps_to_first_token(engine, client)
    for number in range(MANY):
        prompt = [number % 100 + 1] * 20
        engine.submit(Submission(prompt, SamplingParams(max_tokens=100), client="many"))
    for _ in range(5):
        engine.step()
    # The same request of the client that has sent them all waits for most of them.
    most = 3 * alone
    assert (steps_to_first_token(engine, client, most) <= most) is (client == "new")


COMPLETION = ("/v1/completions", {"prompt": "x", "max_tokens": 1})
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}


def clients_of(served, *asked):
    """The clients of requests, each a path, a body and the key that it shows."""
    seen = []

    def spy(engine):
        submit = engine.submit
        engine.submit = lambda one: seen.append(one.client) or submit(one)

    served.call(spy)
    with httpx.Client(base_url=served.url, timeout=DEADLINE_S) as http:
        for path, body, key in asked:
            headers = {"Authorization": f"Bearer {key}"}
            assert http.post(path, json=body, headers=headers).status_code == 200
    return seen


@pytest.mark.parametrize("client_by", ["address", "user"])
def test_the_address_says_whose_a_request_is_or_its_field_user(make_engine, client_by):
    path, body = COMPLETION
    asked = [
        (path, body, "none"),
        (path, body | {"user": "red"}, "none"),
        ("/v1/chat/completions", CHAT | {"user": "blue"}, "none"),
        ("/v1/responses", {"input": "x", "max_output_tokens": 1, "user": "green"}, "none"),
        ("/v1/messages", CHAT | {"metadata": {"user_id": "grey"}}, "none"),
    ]
    config = ServeConfig(port=0, client_by=client_by)
    with Served(AsyncEngine(make_engine), config) as served:
        first, *others = clients_of(served, *asked)
    assert first == "127.0.0.1"
    users = [f"user {name}" for name in ("red", "blue", "green", "grey")]
    assert others == (users if client_by == "user" else [first] * 4)


@pytest.mark.parametrize(
    ("host", "client"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::5", "2001:db8:1:2::/64"),
        ("/run/server.sock", None),
        (None, None),
    ],
)
def test_an_ipv6_network_is_one_client(host, client):
    scope = {"type": "http", "headers": [], "client": host and (host, 1)}
    service = SimpleNamespace(config=ServeConfig())
    assert _client_of(Request(scope), service, "invented") == client


def test_where_clients_have_keys_the_key_says_it(make_engine):
    path, body = COMPLETION
    config = ServeConfig(port=0, api_keys=("one", "two"))
    with Served(AsyncEngine(make_engine), config) as served:
        first, same, other = clients_of(
            served,
            (path, body | {"user": "red"}, "one"),
            (path, body | {"user": "blue"}, "one"),
            (path, body, "two"),
        )
    assert first == same != other
    assert not {first, other} & {None, "red", "blue"}
    assert "one" not in first


def test_tokens_are_made_text_in_pieces_until_their_client_leaves(make_engine, monkeypatch):
    with Served(AsyncEngine(make_engine), ServeConfig(port=0)) as served:
        codec, left, counts = served.engine.engine.model.codec, threading.Event(), {5: 0, 6: 0}
        decode = codec.decode

        def counted(tokens):
            if len(tokens) > 1000:
                counts[tokens[-1]] += 1
            if counts[5] == 2:
                left.wait(DEADLINE_S)
            assert len(tokens) < 5000
            return decode(tokens)

        monkeypatch.setattr(codec, "decode", counted)
        body = json.dumps({"tokens": [5] * 200_000}).encode()
        with socket.create_connection(("127.0.0.1", served.listener.getsockname()[1])) as client:
            client.sendall(raw("POST", "/detokenize", body))
            assert client.recv(100)
        left.set()
        with httpx.Client(base_url=served.url, timeout=DEADLINE_S) as http:
            answer = http.post("/detokenize", json={"tokens": [6] * 100_000})
        assert answer.json() == {"prompt": decode([6] * 100_000)}
        assert (
            counts[6] > 20
        )  # one client's pieces take turns, so the first text would have as many
        assert counts[5] < 10


def test_a_prompt_that_is_too_long_is_refused_before_it_is_copied(make_engine, monkeypatch):
    monkeypatch.setattr("model.engine_core.Request", None)
    engine = make_engine()
    with pytest.raises(RequestTooLongError, match="prompt of 100000 tokens"):
        engine.submit(Submission([5] * 100_000, SamplingParams(max_tokens=1)))
