"""The ingress: it reads a client's request, forwards it to a replica, and passes on the answer.

The answer is made by the replica, which runs the application of `model.serve`. The ingress reads a
prompt only to choose a replica by its tokens.

Decides: what happens to a request whose replica is lost: it is sent again while the client has
received nothing, and fails otherwise; which adapters there are: a replica that one is loaded at is
asked first, and each request then says which ones its replica has to have.

Invariants: a request has at most one replica at a time, and none once its client is gone.

Does not know: what a request asks beside its prompt; how a replica is chosen (`router.py`).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextvars import Context
from dataclasses import replace
from importlib import import_module
from itertools import chain
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from starlette.types import Message, Receive, Scope, Send

import kvcore
from model.async_engine import EngineFaultError, NotServingError
from model.cluster.config import ClusterOptions
from model.cluster.forwarded import FIRST_TOKEN, TAKEN, AdapterTable, Forwarded, Piece
from model.errors import ModelError
from model.serve.app import meet_clients
from model.serve.blocks import OtherRequest
from model.serve.conversation import conversation
from model.serve.errors import ApiError, api_error
from model.serve.messages import MessagesRequest
from model.serve.protocol import ChatRequest, CompletionRequest
from model.serve.responses import ResponsesRequest

if TYPE_CHECKING:  # the driver names this class without loading torch
    from model.load.codec import TextCodec

_LOST = (RayError, RayServeException, ConnectionError)
_LOST_TEXT = "the replica that worked on the request was lost"
_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
_SCOPE_KEYS = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string",
               "root_path", "headers", "client", "server")  # fmt: skip
_LOOK_S = 5.0  # the longest that a request which is no POST waits for a replica
_LONG_BODY = 4096  # bytes; a longer prompt is tokenized on a thread
_MAX_TOKEN = (1 << 32) - 1
_CHATS: dict[str, type[ChatRequest | OtherRequest]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
}


_LOAD, _UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


class ReplicaLostError(EngineFaultError):
    """The replica that worked on a request is gone."""


class Ingress:
    """Forwards requests to replicas; Ray runs it as the ingress deployment."""

    def __init__(self, replicas: Any, options: ClusterOptions) -> None:  # noqa: ANN401  # Ray's
        self.calls = replicas.options(method_name="answer", stream=True)
        self.config = options.cluster
        self.num_sent = self.num_again = self.decision_ns = 0
        self._replicas = replicas
        self._serve = options.serve
        self._codec: TextCodec = import_module("model.load.loader").load_codec(options.model.path)
        self.changing = asyncio.Lock()
        found = [text.partition("=") for text in options.engine.lora]
        known = {name: (place, _version_of(name, place)) for name, _, place in found}
        self.table = AdapterTable(time.time_ns(), known)
        self._changes = options.engine.max_loras is not None

    def __serve_build_asgi_app__(self) -> FastAPI:  # Ray calls it once
        """Return the application that Ray serves to clients."""
        app = FastAPI(openapi_url=None)
        app.add_route("/metrics", self._metrics)
        app.add_route("/{path:path}", self._forward, methods=_METHODS)
        return meet_clients(app, self._serve)

    def _counters(self) -> Iterator[Metric]:
        for name, says, value in (
            ("requests", "Requests sent to a replica.", self.num_sent),
            ("requests_again", "Requests sent again, because a replica was lost.", self.num_again),
            ("decision_seconds", "Processor time of all choices.", self.decision_ns / 1e9),
        ):
            counter = CounterMetricFamily(f"kvcore:router_{name}", says)
            counter.add_metric([], value)
            yield counter

    async def _forward(self, request: Request) -> Response:
        body = await request.body()
        scope = {name: request.scope[name] for name in _SCOPE_KEYS if name in request.scope}
        about = body, self._codec, self._serve.template_options, self.table.versions
        if len(body) > _LONG_BODY:
            prompt = await asyncio.to_thread(prompt_of, request.scope["path"], *about)
        else:
            prompt = prompt_of(request.scope["path"], *about)
        table = self.table if self._changes else None
        asked = Forwarded(scope, body, *prompt, table)
        if self._changes and request.scope["path"] in (_LOAD, _UNLOAD):
            return _ChangeOfAdapters(self, asked)
        return _Answer(self, asked)

    async def change_adapters(self, path: str, body: bytes) -> None:
        """Have all replicas follow one that has changed its adapters, before they answer."""
        told = json.loads(body)
        name, adapters = told["lora_name"], dict(self.table.adapters)
        if path == _UNLOAD:
            adapters.pop(name, None)
        else:
            place = told["lora_path"]
            adapters[name] = place, await asyncio.to_thread(_version_of, name, place)
        self.table = AdapterTable(time.time_ns(), adapters)

    async def _metrics(self, _: Request) -> Response:
        """Answer with the metrics of every replica, labelled with its name, and of the ingress."""
        try:
            asked = self._replicas.broadcast("metrics")
            pages = await asked.results_async(timeout_s=_LOOK_S, return_exceptions=True)
        except (*_LOST, TimeoutError):
            pages = []
        registry = CollectorRegistry()
        replicas = merged(each for each in pages if isinstance(each, tuple))
        registry.register(_ReadMetrics([*self._counters(), *replicas]))
        return Response(generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})


def prompt_of(
    path: str,
    body: bytes,
    codec: TextCodec,
    template_options: dict[str, object] | None = None,
    adapters: Mapping[str, int] | None = None,
) -> tuple[Sequence[int], kvcore.Namespace]:
    """Return the tokens of a request's prompts, and their namespace. O(body).

    There are none where the request has no prompt or is malformed: then any replica answers it.

    Args:
        path: of the request.
        body: of the request.
        codec: the tokenizer.
        template_options: of the chat template.
        adapters: the version of each LoRA adapter, by the name that requests give as the model.
    """
    tokens: Sequence[int]
    try:
        if path == "/v1/completions":
            plain = CompletionRequest.model_validate_json(body)
            every = [codec.encode(p) if isinstance(p, str) else p for p in plain.prompts]
            tokens = every[0] if len(every) == 1 else list(chain.from_iterable(every))
            model, namespace = plain.model, plain.namespace
        elif path in _CHATS:
            asked = _CHATS[path].model_validate_json(body).chat()
            tokens = codec.encode_chat(
                conversation(asked.messages),
                opens_answer=asked.opens_answer,
                options=(template_options or {}) | asked.template_options,
            )
            model, namespace = asked.model, asked.namespace
        else:
            return (), kvcore.DEFAULT_NAMESPACE
    except (ValueError, ApiError, ModelError, RequestValidationError):
        return (), kvcore.DEFAULT_NAMESPACE
    if not tokens or min(tokens) < 0 or max(tokens) > _MAX_TOKEN:
        return (), kvcore.DEFAULT_NAMESPACE
    version = (adapters or {}).get(model or "")
    if version is not None:
        namespace = replace(namespace, lora_name=model, lora_version=version)
    return tokens, namespace


def lost_event(path: object) -> bytes:
    """Return the end of a stream whose replica is lost, as clients of the path read it. O(1)."""
    told = f"data: {json.dumps(api_error(ReplicaLostError(_LOST_TEXT)).body)}\n\n"
    is_named = path in {"/v1/messages", "/v1/responses"}
    return (f"event: error\n{told}" if is_named else f"{told}data: [DONE]\n\n").encode()


def merged(pages: Iterable[tuple[str, str]]) -> Iterable[Metric]:
    """Return the metrics of all pages, each with the label `replica`. O(samples).

    Args:
        pages: the name of each replica, and its metrics as Prometheus reads them.
    """
    families: dict[str, Metric] = {}
    for replica, page in pages:
        for each in text_string_to_metric_families(page):
            family = families.setdefault(
                each.name, Metric(each.name, each.documentation, each.type)
            )
            family.samples += [
                sample._replace(labels={**sample.labels, "replica": replica})
                for sample in each.samples
            ]
    return families.values()


class _ReadMetrics(Collector):
    """Metrics that were read before."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        """Return them."""
        return self._metrics


class _Answer(Response):
    """The answer of a replica, passed on as it comes.

    Ray cancels it when the client goes away, and the replica's work is cancelled with it.
    """

    def __init__(self, ingress: Ingress, asked: Forwarded) -> None:
        super().__init__()
        self._ingress = ingress
        self._asked = asked
        self._call: Any = None
        self._has_started = self._is_event_stream = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the request until a replica answers it.

        Raises:
            NotServingError: no replica has taken it in time.
            ReplicaLostError: replicas were lost as often as it may be tried.
        """
        del receive
        # Bodies skip the middlewares, which only look at how an answer starts.
        send_body = scope.get("state", {}).get("send", send)
        try:
            for num_left in range(self._ingress.config.retries, -1, -1):
                try:
                    if await self._is_answered(send, send_body, is_last_try=not num_left):
                        return
                finally:
                    self._release()
                self._ingress.num_again += num_left > 0
            raise ReplicaLostError("the replicas that took the request were lost")
        finally:
            self._asked.end()

    def _release(self) -> None:
        """Leave the replica; what it still does for the request is cancelled."""
        self._asked.end_ticket()
        if self._call is not None:
            self._call.cancel()
            self._call = None

    async def _is_answered(self, send: Send, send_body: Send, *, is_last_try: bool) -> bool:
        """Pass on the answer of a replica; False if another replica has to be asked."""
        try:
            async for piece in self._pieces():
                if piece.start is not None and not await self._start(
                    piece.start, send, is_last_try=is_last_try
                ):
                    return False
                await send_body(_body(piece.body, is_last=piece.is_last))
        except _LOST:
            if not self._has_started:
                return False
            if self._is_event_stream:  # else the client sees that its answer is cut off
                await send_body(_body(lost_event(self._asked.scope["path"]), is_last=True))
        return True

    async def _start(
        self, start: tuple[int, list[tuple[bytes, bytes]]], send: Send, *, is_last_try: bool
    ) -> bool:
        """Start the answer; False: the replica takes no requests now, and another may."""
        status, headers = start
        if status == 503 and not is_last_try:
            return False
        self._has_started = True
        self._is_event_stream = dict(headers).get(b"content-type", b"").startswith(b"text/event")
        await send({"type": "http.response.start", "status": status, "headers": headers})
        return True

    async def _pieces(self) -> AsyncIterator[Piece]:
        """Yield the pieces of a replica's answer.

        Raises:
            NotServingError: no replica has taken the request in time.
            RayError: the replica is lost; ConnectionError: it did not finish.
        """
        ingress, asked = self._ingress, self._asked
        is_post = asked.scope["method"] == "POST"
        limit_s = ingress.config.replica_timeout_s
        ingress.num_sent += 1
        # In a new context: Ray gives every call in the context of a request the same id.
        self._call = Context().run(ingress.calls.remote, asked)
        try:
            async with asyncio.timeout(limit_s if is_post else min(limit_s, _LOOK_S)):
                taken = await anext(self._call, None)
        except TimeoutError:
            raise NotServingError("engine: no replica takes requests now") from None
        ingress.decision_ns += asked.decision_ns
        is_over = False
        try:
            async for piece in self._call:
                asked.has_begun()
                if piece != FIRST_TOKEN:
                    is_over = piece.is_last
                    yield piece
        except _LOST:
            if not is_over:  # else the client has all of it
                raise
        self._call = None
        if taken != TAKEN or not is_over:
            raise ConnectionError("the replica did not finish the answer")


class _ChangeOfAdapters(_Answer):
    """The answer of a replica that loads or unloads an adapter; one change at a time.

    The client has the answer only when requests are sent with what has changed.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the request, change the adapters here if it succeeded, then pass on the answer."""
        held: list[Message] = []

        async def keep(message: Message) -> None:
            held.append(message)

        ingress, asked = self._ingress, self._asked
        async with ingress.changing:
            asked.table = ingress.table
            await super().__call__({**scope, "state": {}}, receive, keep)
            if held and held[0].get("status") == 200:
                await ingress.change_adapters(str(asked.scope["path"]), asked.body)
        for message in held:
            await send(message)


def _version_of(name: str, place: str) -> int | None:
    """Return an adapter's version; None: it cannot be read here, and routes no requests."""
    found: dict[str, int] = import_module("model.forward.lora").read_versions([f"{name}={place}"])
    return found.get(name)


def _body(body: bytes, *, is_last: bool) -> dict[str, object]:
    return {"type": "http.response.body", "body": body, "more_body": not is_last}
