"""A large body is read on another thread, and means what it would mean if it were small."""

import json
import threading

import httpx
import pytest

from model.serve import large_bodies
from model.serve.large_bodies import LARGE_BYTES, MAX_BRACKETS
from tests.model.serve.conftest import DEADLINE_S
from tests.model.serve.test_clients import connect, raw_request

USER = {"role": "user", "content": "x"}
SPACE = b" " * LARGE_BYTES
BODIES = [
    ("/v1/completions", {"prompt": "A tuple is", "max_tokens": 3, "temperature": 0}),
    ("/v1/completions", {"prompt": "a", "temperature": "warm"}),
    ("/v1/completions", {"prompt": "a", "stop": ["q"] * 17}),
    ("/v1/completions", {"max_tokens": 3}),
    ("/v1/completions", {"prompt": "a", "suffix": "."}),
    ("/v1/completions", [1, 2]),
    ("/v1/completions", 7),
    ("/v1/chat/completions", {"messages": [{"role": "narrator", "content": "x"}]}),
    ("/v1/responses", {"input": [{"type": "item_reference", "id": "x"}]}),
    ("/v1/responses", {"input": "x", "n": 2}),
    ("/v1/messages", {"messages": [USER], "max_tokens": 1, "tool_choice": {"type": "any"}}),
    ("/v1/messages", {"messages": [USER], "max_tokens": 1, "temperature": "warm"}),
    ("/v1/messages/count_tokens", {"messages": [USER]}),
    ("/tokenize", {"prompt": "a", "b": 1}),
    ("/detokenize", {"tokens": [5, 6]}),
]


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_a_large_body_means_what_a_small_one_does(http, path, body):
    text, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
    small, large = (http.post(path, content=one, headers=headers) for one in (text, text + SPACE))
    told = [one.json() for one in (small, large)]
    for one in told:
        one.pop("id", None), one.pop("created", None), one.pop("usage", None)
    assert (small.status_code, told[0]) == (large.status_code, told[1])


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (b'{"prompt": ', "invalid_json"),
        (b'{"prompt": "\xff"}', "invalid_json"),
        (b'{"prompt": ' + b"[" * 9000 + b"]" * 9000 + b"}", "invalid_json"),
        (b'{"prompt": [' + b"[]," * MAX_BRACKETS + b"[]]}", None),
        (b'{"prompt": "' + b"{" * MAX_BRACKETS + b'"}', None),
    ],
)
def test_what_is_no_json_or_has_too_much_in_it_is_refused(http, text, code):
    headers = {"Content-Type": "application/json"}
    refused = http.post("/v1/completions", content=text + SPACE, headers=headers)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (400, code)
    assert error["message"].startswith("body: wanted ")


@pytest.mark.parametrize("is_large", [True, False])
def test_others_are_answered_while_a_large_body_is_read(served, monkeypatch, is_large):
    goes_on, begun, read = threading.Event(), threading.Event(), large_bodies.read_body

    def waits(*given):
        begun.set()
        assert goes_on.wait(DEADLINE_S)
        return read(*given)

    monkeypatch.setattr(large_bodies, "read_body", waits)
    body = b'{"prompt": "a", "max_tokens": 1}' + SPACE * is_large
    with connect(served) as connection, httpx.Client(base_url=served.url) as http:
        connection.sendall(raw_request(body, Connection="close"))
        if is_large:
            assert begun.wait(DEADLINE_S)
        assert http.get("/health").status_code == 200
        goes_on.set()
        assert b" 200 " in connection.recv(100)
    assert begun.is_set() is is_large
