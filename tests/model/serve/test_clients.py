"""Clients that go away, read slowly, send nonsense or too much: server and blocks stand."""

import asyncio
import json
import socket
import struct
import threading

import httpx
import pytest

from model.sample import grammar_compiler
from model.serve.answers import ErrorReport
from tests.hang import HANG_S

ENDLESS = {"prompt": "A tuple is", "max_tokens": 1500, "ignore_eos": True, "temperature": 0}


def raw_request(body, path="/v1/completions", **headers):
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return ("\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""])).encode() + body


def connect(served):
    return socket.create_connection(served.listener.getsockname()[:2], timeout=HANG_S)


def kill(connection):
    """Close it as the kernel does for a process that was killed: with a reset."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def leave(served, *, streams, how, more=b""):
    """Go away in the middle of an answer; how many blocks are free before and after."""
    served.wait_for(lambda: served.engine.num_open == 0)
    before = served.num_free_blocks()
    with connect(served) as connection:
        asked = json.dumps({**ENDLESS, "stream": streams}).encode()
        connection.sendall(raw_request(asked) + more)
        if streams:
            assert connection.recv(10)
        served.wait_for(lambda: served.engine.num_open == 1)
        served.wait_for(lambda: served.num_free_blocks() < before)
        how(connection)
        served.wait_for(lambda: served.engine.num_open == 0)
        return before, served.num_free_blocks()  # asked after the next step at the latest


@pytest.mark.parametrize("how", [kill, socket.socket.close])
@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_goes_away_frees_its_blocks_within_a_step(served, streams, how):
    before, after = leave(served, streams=streams, how=how)
    assert after == before


@pytest.mark.parametrize("how", [kill, socket.socket.close])
@pytest.mark.parametrize("streams", [True, False])
def test_so_does_one_whose_next_request_waits_on_the_same_connection(served, streams, how, caplog):
    next_one = raw_request(b'{"prompt": "a", "max_tokens": 1}')
    before, after = leave(served, streams=streams, how=how, more=next_one)
    assert after == before
    assert not caplog.records


def test_more_pipelined_requests_than_a_connection_may_have_end_it(served):
    with connect(served) as connection:
        connection.sendall(raw_request(json.dumps(ENDLESS).encode()) * 40)
        assert connection.recv(100).startswith(b"HTTP/1.1 400 ")
    served.wait_for(lambda: served.engine.num_open == 0)


def test_the_count_of_blocks_notices_a_request_that_is_left_behind(served, monkeypatch):
    left = []
    monkeypatch.setattr(served.engine, "_abort_requests", left.extend)
    before, after = leave(served, streams=True, how=kill)
    assert after < before
    served.call(lambda engine: [engine.abort(request) for request in left])
    assert served.num_free_blocks() == before


def test_a_slow_reader_keeps_no_block_and_gets_all_of_its_text(served, http):
    asked = {**ENDLESS, "max_tokens": 300}
    whole = http.post("/v1/completions", json=asked).json()["choices"][0]["text"]
    before = served.num_free_blocks()
    with connect(served) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.sendall(raw_request(json.dumps({**asked, "stream": True}).encode()))
        served.wait_for(lambda: served.engine.num_open == 1)
        served.wait_for(lambda: served.engine.num_open == 0)  # it ends, although nothing is read
        assert served.num_free_blocks() == before
        read = b""
        while not read.endswith(b"0\r\n\r\n"):
            read += connection.recv(1000)
    events = [
        part.split(b"data: ")[1].split(b"\n")[0]
        for part in read.split(b"\r\n")
        if b"data: " in part
    ]
    pieces = [json.loads(event) for event in events if event != b"[DONE]"]
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == whole


def guided(**fields):
    return json.dumps({"prompt": "a", **{f"guided_{k}": v for k, v in fields.items()}}).encode()


BROKEN = {
    "no JSON": b'{"prompt": ',
    "no object": b"[1, 2]",
    "a number": b"7",
    "nothing": b"",
    "no UTF-8": b'{"prompt": "\xff\xfe"}',
    "half a pair": b'{"prompt": "\\ud800"}',
    "half a pair in a name": b'{"prompt": "a", "\\ud800": 1}',
    "not a number": b'{"prompt": "a", "temperature": NaN}',
    "no end of digits": b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
    "a seed that is no whole number": b'{"prompt": "a", "seed": 1.5}',
    "a large priority": b'{"prompt": "a", "priority": ' + b"9" * 30 + b"}",
    "deep": b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "true for a number": b'{"prompt": "a", "max_tokens": true}',
    "a text for a number": b'{"prompt": "a", "max_tokens": "5"}',
    "a mixed prompt": b'{"prompt": ["a", 5]}',
    "an empty prompt among prompts": b'{"prompt": [[1], []]}',
    "zero bytes": b'{"prompt": "a", "cache_salt": 5}',
    "a million log-probabilities": b'{"prompt": "a", "n": 128, "max_tokens": 9999, "logprobs": 20}',
    "a rule that is itself": guided(grammar="start: start"),
    "a schema that is itself": guided(json={"$ref": "#"}),
    "a format that is itself": json.dumps(
        {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {
            "schema": {"$ref": "#"}}}}).encode(),
    "a rule without an end": guided(grammar='start: "a" start'),
    "a schema of nothing": guided(json={"type": "string", "minLength": 2, "maxLength": 1}),
    "a regex of nothing": guided(regex=r"a[^\s\S]"),
    "a regex that looks around": guided(regex=r"a(?=b)"),
    "more choices than a row may have": guided(json={"anyOf": [
        {"type": "object", "properties": {f"p{n}_{m}": {"type": "string"} for m in range(100)}}
        for n in range(20)]}),
    "schemas nested deeper than the stack": guided(json={"$ref": "#/$defs/d0", "$defs": {
        f"d{n}": {"properties": {"a": {"$ref": f"#/$defs/d{n + 1}"}}} for n in range(4000)}}),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_body_is_an_error_of_openais_kind(http, name):
    headers = {"Content-Type": "application/json"}
    response = http.post("/v1/completions", content=BROKEN[name], headers=headers)
    assert response.status_code == 400, response.text
    error = ErrorReport.model_validate_json(response.text).error
    asked = BROKEN[name].decode(errors="replace")
    if "guided_" in asked:
        assert error.param.startswith("guided_")
        assert f'"{error.param}"' in asked
        assert error.message.startswith(f"{error.param}: wanted a ")


def test_rules_nested_as_deep_as_a_request_can_say_are_followed(http):
    rules = "".join(f"a{n}: a{n + 1}\n" for n in range(4500))
    asked = {"prompt": "a", "guided_grammar": f'start: a0\n{rules}a4500: "x"'}
    answer = http.post("/v1/completions", json=asked)
    assert answer.json()["choices"][0]["text"] == "x"


@pytest.mark.parametrize("streams", [False, True])
def test_a_grammar_that_takes_too_long_is_an_error_of_its_own_request(
    served, http, streams, monkeypatch
):
    asked = {"prompt": "A tuple is", "max_tokens": 20, "ignore_eos": True, "temperature": 0}
    alone = http.post("/v1/completions", json=asked).json()["choices"][0]["text"]
    with connect(served) as other:
        other.sendall(raw_request(json.dumps(asked).encode()))
        guide = {**asked, "stream": streams, "guided_grammar": 'start: e\ne: e e | "a" | e e e'}
        assert http.post("/v1/completions", json={**guide, "max_tokens": 1}).status_code == 200
        monkeypatch.setattr(served.engine.engine._grammars, "_token_s", 0.0)
        refused = http.post("/v1/completions", json=guide)
        read = b""
        while b"completion_tokens" not in read:
            read += other.recv(65536)
    if streams:
        event, done = [part for part in refused.text.split("\n\n") if part][-2:]
        error = json.loads(event.removeprefix("data: "))["error"]
        assert (refused.status_code, done) == (200, "data: [DONE]")
    else:
        error = refused.json()["error"]
        assert refused.status_code == 400
    assert (error["param"], error["code"]) == ("guided_grammar", "grammar_failed")
    assert error["type"] == "invalid_request_error"
    assert "--grammar-token-s" in error["message"]
    assert json.loads(read.split(b"\r\n\r\n", 1)[1])["choices"][0]["text"] == alone
    served.wait_for(lambda: served.engine.num_open == 0)
    assert served.call(lambda engine: engine.kv.stats().num_used_blocks) == 0


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_ten_megabytes_are_refused_whole_or_in_chunks(http, path):
    big = json.dumps({"prompt": "a" * 10_000_000}).encode()
    headers = {"Content-Type": "application/json"}
    for content in (big, iter([big[:5_000_000], big[5_000_000:]])):
        response = http.post(path, content=content, headers=headers)
        assert response.status_code == 413
        assert ErrorReport.model_validate_json(response.text).error.code == "too_large"


def test_a_length_that_is_announced_and_never_comes_holds_nothing(served):
    with connect(served) as connection:
        connection.sendall(raw_request(b"{}")[:-1])
        kill(connection)
    assert served.engine.health.is_ready


def test_other_types_of_content_are_refused(http):
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        response = http.post(
            "/v1/completions", content=b'{"prompt": "a"}', headers={"Content-Type": kind}
        )
        assert response.status_code == 415
        ErrorReport.model_validate_json(response.text)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/completions", 405), ("GET", "/nope", 404), ("GET", "/v1/models/other", 404)],
)
def test_what_is_not_there_is_an_error_of_openais_kind(http, method, path, status):
    response = http.request(method, path)
    assert response.status_code == status
    ErrorReport.model_validate_json(response.text)


@pytest.mark.parametrize("count", [30, pytest.param(200, marks=pytest.mark.slow)])
def test_many_streams_lose_nothing_and_leave_no_block(served, count):
    served.wait_for(lambda: served.engine.num_open == 0)
    before = served.num_free_blocks()

    async def one(client, number):
        asked = {
            "prompt": [7 + number % 50] * (1 + number % 40), "max_tokens": 8, "ignore_eos": True,
            "temperature": 0, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        if number % 10 == 9:  # goes away in the middle
            async with client.stream("POST", "/v1/completions", json=asked) as response:
                await anext(response.aiter_raw())
            return None
        response = await client.post("/v1/completions", json=asked)
        return json.loads(response.text.split("data: ")[-2])["usage"]["completion_tokens"]

    async def many():
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=served.url, timeout=HANG_S, limits=limits) as client:
            return await asyncio.gather(*[one(client, number) for number in range(count)])

    counts = asyncio.run(many())
    assert [count for count in counts if count is not None] == [8] * (count * 9 // 10)
    served.wait_for(lambda: served.engine.num_open == 0)
    assert served.num_free_blocks() == before


def test_a_grammar_whose_client_has_gone_is_not_compiled(served, http, monkeypatch):
    goes_on, sources, source = threading.Event(), [], grammar_compiler.source_of

    def waits(grammar, **more):
        sources.append(grammar.text)
        assert goes_on.wait(HANG_S)
        return source(grammar, **more)

    monkeypatch.setattr(grammar_compiler, "source_of", waits)
    clients = [connect(served) for _ in range(6)]
    for number, client in enumerate(clients):
        asked = {"prompt": "A tuple is", "max_tokens": 3, "guided_regex": f"gone{number}"}
        client.sendall(raw_request(json.dumps(asked).encode()))
    served.wait_for(lambda: served.engine.num_open == len(clients))
    served.wait_for(lambda: len(sources) == 2)
    for client in clients:
        kill(client)
    served.wait_for(lambda: served.engine.num_open == 0)
    goes_on.set()
    asked = {"prompt": "A tuple is", "max_tokens": 3, "guided_regex": "here"}
    assert http.post("/v1/completions", json=asked).json()["choices"][0]["text"] == "here"
    assert len(sources) == 3
