"""The ingress beside replicas that are lost and clients that go away; Ray is played.

Its errors are played too, whether or not it is installed.
"""

import asyncio
import copy
import json
from types import SimpleNamespace

import httpx
import pytest

import kvcore
from model.cluster.args import parse_args
from model.cluster.forwarded import FIRST_TOKEN, TAKEN, Piece
from model.cluster.router import Router
from model.forward import lora
from model.load.loader import load_codec
from model.tiny import CHECKPOINT_DIR
from tests.hang import HANG_S as DEADLINE_S

EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8")]
JSON = [(b"content-type", b"application/json")]
FIRST = Piece((200, EVENTS), b"data: 1\n\n", is_last=False)
LAST = Piece(None, b"data: 2\n\n", is_last=True)
WHOLE = Piece((200, JSON), b"{}", is_last=True)
BUSY = Piece((503, JSON), b'{"error":{"code":"not_serving"}}', is_last=True)
LOST = object()
WAIT = object()
SCOPE = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [],
         "query_string": b""}  # fmt: skip


@pytest.fixture(scope="module")
def codec():
    return load_codec(str(CHECKPOINT_DIR))


@pytest.fixture
def ingress(played, codec, monkeypatch):
    found = played(
        "model.cluster.ingress",
        {
            "ray.exceptions": ["RayError"],
            "ray.serve": [],
            "ray.serve.exceptions": ["RayServeException"],
        },
    )
    loader = SimpleNamespace(load_codec=lambda _: codec)
    monkeypatch.setattr(found, "import_module", lambda _: loader)
    return found


class Call:
    """What a replica sends, and a ticket of a router that has chosen it."""

    def __init__(self, module, script, asked, router):
        self._module = module
        self._script = list(script)
        self._is_over = asyncio.Event()
        if router is not None and asked.tokens:
            asked.take(router.choose(asked.tokens, asked.namespace), 1000)
        self.asked = asked
        self.waits = asyncio.Event()

    @property
    def is_cancelled(self):
        return self._is_over.is_set()

    def cancel(self):
        self._is_over.set()

    def __aiter__(self):
        return self

    async def __anext__(self):
        if not self._script:
            raise StopAsyncIteration
        step = self._script.pop(0)
        if step is WAIT:
            self.waits.set()
            await asyncio.Event().wait()
        if step is LOST:
            raise self._module.RayError("gone")
        return step


class Handle:
    """Replicas: each request is answered by the next script."""

    def __init__(self, module, *scripts, router=None, pages=()):
        self._module, self._scripts, self._router = module, list(scripts), router
        self._pages = pages
        self.calls = []
        self.was_called = asyncio.Event()

    def options(self, method_name, stream):
        assert (method_name, stream) == ("answer", True)
        return SimpleNamespace(remote=self._answer)

    def _answer(self, asked):
        script = self._scripts.pop(0)
        self.calls.append(Call(self._module, script, asked, self._router))
        self.was_called.set()
        return self.calls[-1]

    def broadcast(self, name):
        assert name == "metrics"

        async def results_async(**_):
            return list(self._pages)

        return SimpleNamespace(results_async=results_async)


def app_of(module, handle, *flags):
    return module.Ingress(handle, parse_args(flags)).__serve_build_asgi_app__()


def ask(module, handle, *flags, path="/v1/completions", headers=None, **body):
    """One request and its answer, to the end."""

    async def main():
        transport = httpx.ASGITransport(app_of(module, handle, *flags), raise_app_exceptions=False)
        async with (
            asyncio.timeout(DEADLINE_S),
            httpx.AsyncClient(transport=transport, base_url="http://here") as client,
        ):
            if not body:
                return await client.get(path, headers=headers)
            return await client.post(path, json=body, headers=headers)

    return asyncio.run(main())


def body_of(asked):
    body = [{"type": "http.request", "body": json.dumps(asked).encode(), "more_body": False}]

    async def receive():
        return body.pop()

    return receive


def collected(messages):
    async def send(message):
        messages.append(message)

    return send


def test_an_answer_passes_as_the_replica_has_made_it(ingress):
    handle = Handle(ingress, [TAKEN, FIRST, LAST])
    answer = ask(ingress, handle, prompt=[1], stream=True)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.content == b"data: 1\n\ndata: 2\n\n"
    [call] = handle.calls
    assert json.loads(call.asked.body) == {"prompt": [1], "stream": True}
    assert call.asked.scope["path"] == "/v1/completions"
    assert not call.is_cancelled  # it came to its end by itself


@pytest.mark.parametrize("script", [[LOST], [TAKEN, LOST], [TAKEN, FIRST_TOKEN, LOST], [], [TAKEN]])
def test_a_request_whose_replica_is_lost_is_sent_again_while_the_client_has_nothing(
    ingress, script
):
    handle = Handle(ingress, script, [TAKEN, WHOLE])
    assert ask(ingress, handle, prompt=[1]).content == b"{}"
    assert len(handle.calls) == 2


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_a_stream_of_blocks_whose_replica_is_lost_ends_with_an_error_that_has_a_name(ingress, path):
    handle = Handle(ingress, [TAKEN, FIRST, LOST])
    *_, error, end = ask(ingress, handle, path=path, max_tokens=1, stream=True).text.split("\n\n")
    name, told = error.split("\n")
    assert (name, end) == ("event: error", "")
    assert json.loads(told.removeprefix("data: "))["error"]["code"] == "engine_fault"


def test_a_stream_whose_replica_is_lost_ends_with_one_error(ingress):
    handle = Handle(ingress, [TAKEN, FIRST, LOST])
    first, error, done = ask(ingress, handle, prompt=[1], stream=True).text.split("\n\n")[:3]
    told = json.loads(error.removeprefix("data: "))["error"]
    assert (first, done) == ("data: 1", "data: [DONE]")
    assert told["code"] == "engine_fault"
    assert told["message"] == "the replica that worked on the request was lost"


def test_a_replica_that_is_lost_after_the_last_piece_changes_nothing(ingress):
    handle = Handle(ingress, [TAKEN, FIRST, LAST, LOST])
    answer = ask(ingress, handle, prompt=[1], stream=True)
    assert answer.content == b"data: 1\n\ndata: 2\n\n"
    assert len(handle.calls) == 1


def test_half_of_an_answer_that_is_no_stream_is_never_taken_for_a_whole_one(ingress):
    half = Piece((200, JSON), b"{", is_last=False)
    handle = Handle(ingress, [TAKEN, half, LOST])
    sent = []
    asyncio.run(app_of(ingress, handle)(SCOPE, body_of({"prompt": [1]}), collected(sent)))
    assert [message.get("more_body") for message in sent] == [None, True]


def test_a_request_is_sent_again_as_often_as_retries_say(ingress):
    handle = Handle(ingress, *[[LOST]] * 4)
    answer = ask(ingress, handle, "--retries", "3", prompt=[1])
    assert (answer.status_code, len(handle.calls)) == (500, 4)
    assert answer.json()["error"]["code"] == "engine_fault"


def test_a_replica_that_takes_no_requests_now_is_passed_over(ingress):
    handle = Handle(ingress, [TAKEN, BUSY], [TAKEN, WHOLE])
    assert ask(ingress, handle, prompt=[1]).status_code == 200
    handle = Handle(ingress, *[[TAKEN, BUSY]] * 3)
    answer = ask(ingress, handle, prompt=[1])
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_serving")


def test_a_request_that_no_replica_takes_in_time_is_told_so(ingress):
    handle = Handle(ingress, [WAIT])
    answer = ask(ingress, handle, "--replica-timeout-s", "0.05", prompt=[1])
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_serving")
    assert handle.calls[0].is_cancelled


@pytest.mark.parametrize("script", [[WAIT], [TAKEN, WAIT], [TAKEN, FIRST, WAIT]])
def test_a_client_that_goes_away_leaves_nothing_at_a_replica(ingress, script):
    router = Router(lambda *_: {}, running_weight=1)
    router.add("a")

    async def main():
        handle = Handle(ingress, script, router=router)
        app = app_of(ingress, handle)
        client = asyncio.create_task(app(SCOPE, body_of({"prompt": [1, 2, 3]}), collected([])))
        await handle.was_called.wait()
        [call] = handle.calls
        await call.waits.wait()
        assert router.load("a") == (1 if FIRST in script else 4)
        client.cancel()
        with pytest.raises(asyncio.CancelledError):
            await client
        assert call.is_cancelled
        assert router.load("a") == 0

    asyncio.run(main())


def test_a_prompt_counts_as_waiting_until_its_first_token(ingress):
    router = Router(lambda *_: {}, running_weight=1)
    router.add("a")
    loads = []

    class Watched(Call):
        async def __anext__(self):
            loads.append(router.load("a"))
            return await super().__anext__()

    handle = Handle(ingress, [TAKEN, FIRST_TOKEN, WHOLE], router=router)
    handle._answer = lambda asked: Watched(ingress, [TAKEN, FIRST_TOKEN, WHOLE], asked, router)
    ask(ingress, handle, prompt=[1, 2, 3])
    assert loads == [4, 4, 1, 1]
    assert router.load("a") == 0


def test_what_is_refused_before_a_replica_is_asked(ingress):
    handle = Handle(ingress, [TAKEN, WHOLE])
    flags = ["--api-key", "secret", "--max-request-bytes", "100"]
    assert ask(ingress, handle, *flags, prompt=[1]).status_code == 401
    shown = {"Authorization": "Bearer secret"}
    assert ask(ingress, handle, *flags, headers=shown, prompt="x" * 200).status_code == 413
    assert not handle.calls
    answer = ask(ingress, handle, *flags, headers=shown | {"X-Request-Id": "mine"}, prompt=[1])
    assert (answer.status_code, answer.headers["x-request-id"]) == (200, "mine")


def test_metrics_are_those_of_every_replica_and_of_the_ingress(ingress):
    page = "# HELP kvcore:steps_total Steps.\n# TYPE kvcore:steps_total counter\n"
    pages = [(name, f'{page}kvcore:steps_total{{model_name="m"}} {count}\n')
             for name, count in (("a", 2), ("b", 3))]  # fmt: skip
    handle = Handle(ingress, pages=[*pages, ValueError("a replica that was just lost")])
    told = ask(ingress, handle, path="/metrics").text
    assert told.count("# TYPE kvcore:steps_total counter") == 1
    assert 'kvcore:steps_total{model_name="m",replica="a"} 2.0' in told
    assert 'kvcore:steps_total{model_name="m",replica="b"} 3.0' in told
    assert "kvcore:router_requests_total 0.0" in told


def test_the_ingress_counts_what_it_sends(ingress):
    async def main():
        handle = Handle(ingress, [LOST], [TAKEN, WHOLE])
        app = app_of(ingress, handle)
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://here"
        ) as client:
            await client.post("/v1/completions", json={"prompt": [1]})
            return (await client.get("/metrics")).text

    told = asyncio.run(main())
    assert "kvcore:router_requests_total 2.0" in told
    assert "kvcore:router_requests_again_total 1.0" in told


def test_a_replica_is_chosen_by_the_tokens_that_it_will_compute(ingress, codec):
    def prompt(path, **body):
        return ingress.prompt_of(path, json.dumps(body).encode(), codec)

    text, salted = "A tuple is", kvcore.Namespace(salt=b"mine")
    plain = kvcore.DEFAULT_NAMESPACE
    assert prompt("/v1/completions", prompt=text) == (codec.encode(text), plain)
    assert prompt("/v1/completions", prompt=[5, 6]) == ([5, 6], plain)
    assert prompt("/v1/completions", prompt=[[5], [6, 7]]) == ([5, 6, 7], plain)
    assert prompt("/v1/completions", prompt=[5], cache_salt="mine") == ([5], salted)
    messages = [{"role": "user", "content": [{"type": "text", "text": text}]}]
    told = [{"role": "user", "content": text}]
    chat, _ = prompt("/v1/chat/completions", messages=messages)
    assert chat == codec.encode_chat(told)
    chat, _ = prompt("/v1/chat/completions", messages=messages, add_generation_prompt=False)
    assert chat == codec.encode_chat(told, opens_answer=False)
    told = [{"role": "system", "content": "Be brief."}, *told]
    answer = prompt("/v1/responses", input=text, instructions="Be brief.", cache_salt="mine")
    assert answer == (codec.encode_chat(told), salted)
    same = prompt("/v1/messages", messages=messages, system="Be brief.", max_tokens=1)
    assert same == (codec.encode_chat(told), plain)


@pytest.fixture
def version(ingress, codec, tmp_path, monkeypatch):
    """The version of the adapter `sql` in `tmp_path`, which the ingress can read."""
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / file).write_bytes(b"{}")
    modules = {"model.load.loader": SimpleNamespace(load_codec=lambda _: codec)}
    monkeypatch.setattr(ingress, "import_module", lambda name: modules.get(name, lora))
    return lora.read_versions([f"sql={tmp_path}"])["sql"]


def test_a_request_for_an_adapter_is_routed_by_the_namespace_that_replicas_compute_it_in(
    ingress, tmp_path, version
):
    for model, namespace in (
        ("sql", kvcore.Namespace(salt=b"mine", lora_name="sql", lora_version=version)),
        ("gone", kvcore.Namespace(salt=b"mine")),  # a replica refuses it
    ):
        handle = Handle(ingress, [TAKEN, WHOLE])
        flags = ("--lora", f"sql={tmp_path}", "--lora", f"gone={tmp_path / 'none'}")
        ask(ingress, handle, *flags, prompt=[1], model=model, cache_salt="mine")
        assert handle.calls[0].asked.namespace == namespace


def test_an_adapter_that_is_loaded_while_it_runs_is_routed_by_its_namespace_until_it_is_unloaded(
    ingress, tmp_path, version
):
    refused = Piece((400, JSON), b"{}", is_last=True)
    handle = Handle(ingress, *[[TAKEN, piece] for piece in (refused, WHOLE, WHOLE, WHOLE, WHOLE)])

    async def main():
        app = ingress.Ingress(handle, parse_args(["--max-loras", "2"])).__serve_build_asgi_app__()
        transport = httpx.ASGITransport(app)
        async with (
            asyncio.timeout(DEADLINE_S),
            httpx.AsyncClient(transport=transport, base_url="http://here") as client,
        ):
            load = {"lora_name": "sql", "lora_path": str(tmp_path)}
            statuses = [
                (await client.post(path, json=body)).status_code
                for path, body in (
                    ("/v1/load_lora_adapter", load),
                    ("/v1/load_lora_adapter", load),
                    ("/v1/completions", {"model": "sql", "prompt": [1]}),
                    ("/v1/unload_lora_adapter", {"lora_name": "sql"}),
                    ("/v1/completions", {"model": "sql", "prompt": [1]}),
                )
            ]
            assert statuses == [400, 200, 200, 200, 200]

    asyncio.run(main())
    asked = [copy.copy(call.asked) for call in handle.calls]
    loaded = {"sql": (str(tmp_path), version)}
    assert [one.table.adapters for one in asked] == [{}, {}, loaded, loaded, {}]
    changed = [one.table.changed_ns for one in asked]
    assert changed[0] == changed[1] < changed[2] == changed[3] < changed[4]
    namespaces = [call.asked.namespace for call in handle.calls[2::2]]
    wanted = kvcore.Namespace(lora_name="sql", lora_version=version)
    assert namespaces == [wanted, kvcore.DEFAULT_NAMESPACE]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", b"{"),
        ("/v1/completions", b"\xff"),
        ("/v1/completions", b'{"prompt": [[1], "a"]}'),
        ("/v1/completions", b'{"prompt": []}'),
        ("/v1/completions", b'{"prompt": [-1]}'),
        ("/v1/completions", b'{"prompt": [4294967296]}'),
        ("/v1/chat/completions", b'{"messages": []}'),
        ("/v1/responses", b'{"input": "x", "previous_response_id": "r"}'),
        ("/v1/responses", b'{"input": "x", "n": "two"}'),
        ("/v1/messages", b'{"messages": [{"role": "user", "content": "x"}]}'),
        ("/tokenize", b'{"prompt": "x"}'),
    ],
)
def test_what_has_no_prompt_or_a_wrong_one_is_left_to_any_replica(ingress, codec, path, body):
    assert ingress.prompt_of(path, body, codec) == ((), kvcore.DEFAULT_NAMESPACE)
