"""What stands before the routes: keys, pages of other origins, room, pace, and the log."""

import asyncio
import json
import shutil
import signal
import socket
import ssl
import subprocess

import httpx
import pytest
from starlette.datastructures import Headers

import model.cli.args as run_args
import model.cluster.args as cluster_args
from model.async_engine import AsyncEngine
from model.errors import InvalidArgumentError, UsageError
from model.serve.answers import ErrorReport
from model.serve.args import parse_args
from model.serve.config import ServeConfig
from model.serve.gate import LINE_BEGINS, Gate
from model.serve.process import _access_log
from tests.model.serve.conftest import DEADLINE_S, Served

SHORT = {"prompt": "A tuple is", "max_tokens": 2, "temperature": 0}
KEY = {"Authorization": "Bearer second"}


@pytest.fixture(scope="module")
def guarded(make_engine):
    config = ServeConfig(
        port=0,
        api_keys=("first", "second"),
        allow_origins=("https://example.org",),
    )
    engine = AsyncEngine(lambda: make_engine(max_num_seqs=2), max_waiting=2)
    with Served(engine, config) as running:
        yield running


@pytest.fixture
def client(guarded):
    with httpx.Client(base_url=guarded.url, timeout=DEADLINE_S) as made:
        yield made


@pytest.mark.parametrize(
    "shown",
    [None, "Bearer third", "Bearer", "Basic second", "second", "Bearer second x"],
)
def test_without_a_key_nothing_is_answered_but_how_the_server_is(client, shown):
    headers = {} if shown is None else {"Authorization": shown}
    for path in ("/v1/completions", "/tokenize", "/detokenize", "/nope"):
        refused = client.post(path, json=SHORT, headers=headers)
        assert refused.status_code == 401
        assert ErrorReport.model_validate_json(refused.text).error.code == "invalid_api_key"
    assert client.get("/v1/models", headers=headers).status_code == 401
    for path in ("/health", "/version", "/metrics"):
        assert client.get(path, headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("argv", "variable", "named"),
    [
        (["--api-key", ""], None, "--api-key: wanted text that is not empty, got ''"),
        (["--api-key", "a", "--api-key", ""], None, "--api-key: wanted text that is not empty"),
        ([], "", r"\$KVCORE_API_KEY is set and empty.* --api-key"),
        (["--api-key", "a"], "", r"\$KVCORE_API_KEY is set and empty"),
        (["--api-key", " "], None, "--api-key .* without spaces.* got others in key number 1$"),
        (["--api-key", "a", "--api-key", "two words"], None, "in key number 2$"),
        (["--api-key", "schlüssel"], None, "--api-key .* ASCII"),
        ([], "secret\n", r"or \$KVCORE_API_KEY\): .* got others in key number 1$"),
    ],
)
@pytest.mark.parametrize("parse", [parse_args, cluster_args.parse_args])
def test_a_key_that_no_header_can_hold_is_refused_at_the_start(
    monkeypatch, parse, argv, variable, named
):
    if variable is not None:
        monkeypatch.setenv("KVCORE_API_KEY", variable)
    with pytest.raises(UsageError, match=named):
        parse(argv)


def test_a_configuration_with_an_empty_key_is_refused_and_the_environments_key_is_taken(
    monkeypatch,
):
    with pytest.raises(InvalidArgumentError, match="api_keys: wanted a list, each text that is"):
        ServeConfig(api_keys=("a", ""))
    monkeypatch.setenv("KVCORE_API_KEY", "secret")
    assert parse_args([]).serve.api_keys == ("secret",)
    assert parse_args(["--api-key", "a"]).serve.api_keys == ("a",)


def test_an_empty_key_is_never_the_key_even_where_a_configuration_has_one(monkeypatch):
    monkeypatch.setattr(ServeConfig, "__post_init__", lambda self: None)
    gate = Gate(None, ServeConfig(api_keys=("",)))
    assert not gate._has_key(Headers({"authorization": "Bearer "}))
    assert not gate._has_key(Headers({"authorization": "Bearer"}))


@pytest.mark.parametrize(
    "origin",
    ["foo", "", " ", "example.org", "https://example.org/", "https://Example.org", "http:"],
)
def test_an_origin_that_no_browser_sends_is_refused(origin):
    with pytest.raises(UsageError, match=r"--allow-origin: wanted \* or an origin .* got '"):
        parse_args(["--allow-origin", origin])


@pytest.mark.parametrize(
    "origin", ["*", "null", "https://example.org", "http://[::1]:3000", "app://localhost"]
)
def test_an_origin_that_browsers_send_is_taken(origin):
    assert parse_args(["--allow-origin", origin]).serve.allow_origins == (origin,)


@pytest.mark.parametrize(
    ("parse", "argv", "message"),
    [
        (parse_args, ["--draft-tokens", "4"],
         "--draft-tokens: has no effect without --drafts or --draft-model"),
        (parse_args, ["--tls-certfile", "a"], "--tls-certfile: .* --tls-keyfile"),
        (parse_args, ["--tls-keyfile", "a"], "--tls-keyfile: .* --tls-certfile"),
        (parse_args, ["--kv-replay", "a"], "--kv-replay: .* --kv-events"),
        (parse_args, ["--expert-parallel"], "--expert-parallel: .* --tp"),
        (parse_args, ["--check-ranks"], "--check-ranks: .* --tp"),
        (cluster_args.parse_args, ["--draft-tokens", "4"], "--draft-tokens: .* --drafts or --dra"),
        (cluster_args.parse_args, ["--waiting-tokens", "9"], "--waiting-tokens: .* --max-replicas"),
        (cluster_args.parse_args, ["--miss-weight", "3", "--router", "round-robin"],
         "--miss-weight: has no effect without --router prefix"),
        (cluster_args.parse_args, ["--running-weight", "3", "--router", "ray-prefix"],
         "--running-weight: .* --router prefix or --router power-of-two"),
        (run_args.parse_args, ["--draft-tokens", "4"], "--draft-tokens: .* --drafts or --draft-m"),
    ],
)  # fmt: skip
def test_a_flag_that_would_do_nothing_is_refused_and_names_the_one_it_needs(parse, argv, message):
    with pytest.raises(UsageError, match=message):
        parse(argv)


def test_a_flag_beside_the_one_that_it_needs_is_taken():
    assert parse_args(["--draft-tokens", "4", "--drafts", "ngram"]).engine.most_drafts == 4
    assert cluster_args.parse_args(["--miss-weight", "3"]).cluster.miss_weight == 3


def test_with_a_key_all_is_answered(client):
    assert client.post("/v1/completions", json=SHORT, headers=KEY).status_code == 200


def test_pages_of_an_origin_that_is_named_may_read_answers_and_others_not(client):
    named = client.get("/health", headers={"Origin": "https://example.org"})
    assert named.headers["access-control-allow-origin"] == "https://example.org"
    other = client.get("/health", headers={"Origin": "https://example.com"})
    assert "access-control-allow-origin" not in other.headers


def test_a_body_that_does_not_come_is_given_up(make_engine):
    config = ServeConfig(port=0, request_timeout_s=0.3)
    with Served(AsyncEngine(make_engine), config) as hurried:
        address = hurried.listener.getsockname()[:2]
        with socket.create_connection(address, timeout=DEADLINE_S) as connection:
            connection.sendall(
                b"POST /tokenize HTTP/1.1\r\nHost: x\r\n"
                b"Content-Type: application/json\r\nContent-Length: 50\r\n\r\n{"
            )
            assert connection.recv(100).startswith(b"HTTP/1.1 408")


def test_who_comes_when_the_queue_is_full_is_told_to_come_again(guarded):
    asked = {"prompt": "A tuple is", "max_tokens": 300, "ignore_eos": True}

    async def many():
        async with httpx.AsyncClient(base_url=guarded.url, timeout=DEADLINE_S) as client:
            calls = [client.post("/v1/completions", json=asked, headers=KEY) for _ in range(12)]
            return await asyncio.gather(*calls)

    responses = asyncio.run(many())
    codes = sorted(response.status_code for response in responses)
    assert set(codes) == {200, 429}
    assert codes.count(200) >= 4
    refused = next(response for response in responses if response.status_code == 429)
    assert refused.headers["retry-after"] == "1"
    assert ErrorReport.model_validate_json(refused.text).error.type == "rate_limit_error"


def test_the_log_has_a_line_of_json_for_each_request_and_no_secret(guarded, client):
    headers = {**KEY, "X-Request-Id": "mine-1"}
    response = client.post("/v1/completions", json=SHORT, headers=headers)
    assert response.headers["x-request-id"] == "mine-1"
    guarded.wait_for(lambda: any("mine-1" in line for line in guarded.lines))
    line = json.loads(next(line for line in guarded.lines if "mine-1" in line))
    assert (line["method"], line["path"], line["status"]) == ("POST", "/v1/completions", 200)
    assert line["completion_tokens"] == 2
    assert "second" not in json.dumps(guarded.lines)
    odd = client.get("/health", headers={"X-Request-Id": "a\tb"})
    assert odd.headers["x-request-id"] != "a\tb"


def test_a_process_answers_while_it_loads_drains_at_sigterm_and_says_when_a_port_is_taken(
    forks,
):
    command = ["-m", "model.serve", "--port"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ran = forks.run(*command, port)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr == f"error: --host 127.0.0.1 --port {port}: Address already in use\n"
    with forks.start(
        *[*command, "0", "--num-blocks", "300", "--drain-timeout-s", "600"], is_open=True
    ) as process:
        url = process.stderr.readline().split(": loading")[0]
        assert httpx.get(f"{url}/health", timeout=DEADLINE_S).status_code == 503
        while "ready in" not in (line := process.stderr.readline()):
            assert line
        asked = {"prompt": "A tuple is", "max_tokens": 400, "ignore_eos": True, "stream": True}
        with httpx.stream(
            "POST", f"{url}/v1/completions", json=asked, timeout=DEADLINE_S
        ) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            assert "draining: waiting for 1 running requests" in process.stderr.readline()
            assert httpx.get(f"{url}/health", timeout=DEADLINE_S).json()["status"] == "draining"
            refused = httpx.post(f"{url}/v1/completions", json=SHORT, timeout=DEADLINE_S)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert list(lines)[-2] == "data: [DONE]"
        assert process.stderr.readline() == "drained: 0 requests were aborted\n"
        assert process.wait(DEADLINE_S) == 0


def test_a_certificate_makes_it_https(make_engine, tmp_path):
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("wants the openssl command, to make a certificate")
    key, certificate = str(tmp_path / "key.pem"), str(tmp_path / "certificate.pem")
    subprocess.run(
        [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-keyout", key, "-out", certificate, "-days", "1", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True, timeout=DEADLINE_S,
    )  # fmt: skip
    config = ServeConfig(port=0, tls_certfile=certificate, tls_keyfile=key)
    trust = ssl.create_default_context(cafile=certificate)
    with Served(AsyncEngine(make_engine), config) as running:
        assert running.url.startswith("https://")
        assert httpx.get(f"{running.url}/health", verify=trust).status_code == 200
        with httpx.Client(base_url=running.url, verify=trust, timeout=DEADLINE_S) as client:
            answer = client.post("/v1/completions", json={**SHORT, "stream": True})
            assert answer.text.endswith("data: [DONE]\n\n")
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(f"{running.url}/health")
        plain = running.url.replace("https", "http")
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{plain}/health")


def test_a_full_disk_costs_lines_of_the_access_log_and_one_warning(capsys):
    with _access_log(parse_args(["--access-log", "/dev/full"])) as write:
        for _ in range(3):
            write("{}")
    said = capsys.readouterr().err
    assert said.count("--access-log: cannot write '/dev/full', lines are lost: No space") == 1


def test_an_access_log_is_continued_and_no_other_file_is(guarded, client, tmp_path):
    client.get("/health")
    guarded.wait_for(lambda: guarded.lines)
    line = guarded.lines[0]
    assert line.startswith(LINE_BEGINS)
    log, model = tmp_path / "log", tmp_path / "model"
    log.write_text(f"{line}\n", encoding="utf-8")
    model.mkdir()
    (model / "config.json").write_text("{}", encoding="utf-8")
    with _access_log(parse_args(["--access-log", str(log)])) as write:
        write(line)
    assert log.read_text(encoding="utf-8") == f"{line}\n{line}\n"
    for path in (model / "config.json", tmp_path):
        options = parse_args(["--model", str(model), "--access-log", str(path)])
        with pytest.raises(UsageError, match="--access-log: "), _access_log(options):
            pytest.fail("it was opened")
    assert (model / "config.json").read_text(encoding="utf-8") == "{}"
