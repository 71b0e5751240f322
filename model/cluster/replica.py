"""One replica: the application of `model.serve` over an engine, in a Ray actor, on one GPU or more.

Where several processes share the network, this actor is rank 0 and starts an actor for each of the
others in the same placement group; they end with it.

Decides: that a replica whose engine has stopped is unhealthy, so that Ray starts another; that a
request waits until the adapters are there that the ingress knew when it sent it.

Does not know: the other replicas, and how one of them is chosen.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
import traceback
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import ray
from ray import serve
from ray.util import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from kvcore.wire import Publisher
from model.async_engine import AsyncEngine, EngineState, NotServingError
from model.cli.exits import FAILED
from model.cli.imports import importing
from model.cluster.config import ClusterOptions
from model.cluster.forwarded import FIRST_TOKEN, TAKEN, AdapterTable, Forwarded, Piece
from model.cluster.routing import EVENTS, REPLAY
from model.cluster.scaling import WAITING
from model.errors import ModelError
from model.serve.app import create_app

if TYPE_CHECKING:  # the driver names this class without loading torch
    from starlette.types import Message

    from model.engine import Engine
    from model.engine_core import EngineCore
    from model.forward.lora import Adapter

_log = logging.getLogger(__name__)
REFUSED = "kvcore-refused: "
"""Stands before the line that says why a replica cannot start."""


class Replica:
    """Answers requests that the ingress forwards; Ray runs it as a deployment."""

    def __init__(self, options: ClusterOptions) -> None:
        self._options = options
        self._others = _start_others(options)
        self._publisher: Publisher | None = None
        self._following = asyncio.Lock()
        self._followed_ns = 0
        try:
            with importing():
                start = import_module("model.cli.start")
            options.serve.check_template()  # before the weights are read
            engine: EngineCore = start.make_engine(
                options.model, options.engine, print, expects_grammars=True
            )
            options.serve.sampling_defaults(engine)  # refused now or never
            options.serve.check_template(engine)  # likewise
        except ModelError as error:
            raise RuntimeError(f"{REFUSED}{error}") from None
        self._engine = AsyncEngine(
            engine,
            max_waiting=options.serve.max_waiting,
            stream_share=options.serve.stream_share,
            announce=self._announce,
        )
        self._app = create_app(self._engine, options.serve, has_page=False)

    async def answer(self, asked: Forwarded) -> AsyncIterator[str | Piece]:
        """Answer a request: TAKEN at once, then FIRST_TOKEN and the pieces of the answer.

        The request is aborted when Ray cancels this.
        """
        yield TAKEN
        await self._follow(asked.table)
        sent: asyncio.Queue[Message | None] = asyncio.Queue()
        body: list[Message] = [{"type": "http.request", "body": asked.body, "more_body": False}]

        async def receive() -> Message:
            if not body:
                await asyncio.Event().wait()  # this task is cancelled when the client goes away
            return body.pop()

        report = partial(sent.put_nowait, {"type": FIRST_TOKEN})
        scope = {**asked.scope, "state": {"first_token": report}}
        running = asyncio.create_task(self._app(scope, receive, sent.put))
        running.add_done_callback(lambda _: sent.put_nowait(None))
        held: list[Message] = []
        try:
            while (message := await sent.get()) is not None:
                if message["type"] == FIRST_TOKEN:
                    yield FIRST_TOKEN
                    continue
                held.append(message)
                if sent.empty() and message["type"] == "http.response.body":
                    yield _piece(held)
                    held.clear()
        finally:
            running.cancel()

    async def _follow(self, table: AdapterTable | None) -> None:
        """Load and unload adapters until there are those of a table that is newer than the last.

        Where one cannot be loaded, requests for it are answered as for an unknown model, and the
        next request tries again.
        """
        async with self._following:
            if table is None or table.changed_ns <= self._followed_ns:
                return
            try:
                await self._load(table)
            except ModelError as error:
                _log.warning("an adapter cannot be loaded here: %s", error)
            else:
                self._followed_ns = table.changed_ns

    async def _load(self, table: AdapterTable) -> None:
        engine: Engine = self._engine.engine  # type: ignore[assignment]  # the one that was made
        for name, version in engine.adapter_versions.items():
            if name not in table.adapters or table.versions.get(name, version) != version:
                await self._remove(engine, name)
        for name in table.adapters.keys() - engine.adapter_versions.keys():
            text = f"{name}={table.adapters[name][0]}"
            read = await asyncio.to_thread(engine.read_adapter, text)
            await self._add(engine, read)

    async def _remove(self, engine: Engine, name: str) -> None:
        await self._engine.call(lambda _: engine.remove_adapter(name))

    async def _add(self, engine: Engine, read: Adapter) -> None:
        await self._engine.call(lambda _: engine.add_adapter(read))

    async def metrics(self) -> tuple[str, str]:
        """Return the name of the replica, and its metrics as Prometheus reads them."""
        page, _ = self._app.state.metrics.page()
        return serve.get_replica_context().replica_tag, page.decode()

    async def record_replica_metadata(self) -> Mapping[str, str]:
        """Return where the events are published; Ray asks once, before it sends requests."""
        self._engine.start()
        await self._engine.ready()
        found = self._publisher
        if found is None or found.replay is None:
            return {}
        return {EVENTS: found.endpoint, REPLAY: found.replay}

    async def record_autoscaling_stats(self) -> Mapping[str, float]:
        """Return how many tokens wait; Ray asks now and then."""
        return {WAITING: float(await self._engine.call(_num_waiting_tokens))}

    async def check_health(self) -> None:
        """Raise if no request can run any more; Ray asks now and then."""
        health = self._engine.health
        if health.state is EngineState.STOPPED:
            raise NotServingError(f"the engine has stopped: {health.last_fault}")

    async def __del__(self) -> None:
        """Release what the engine holds; Ray awaits it when the replica ends."""
        with contextlib.suppress(ModelError):
            await self._engine.stop()

    def _announce(self, engine: EngineCore, wake: Any) -> Publisher:  # noqa: ANN401  # as Announcer
        where = f"tcp://{ray.util.get_node_ip_address()}:*"
        tiers = engine.keeping_tiers
        self._publisher = Publisher(engine.kv, where, where, wake=wake, tiers=tiers)
        return self._publisher


def _piece(messages: Sequence[Message]) -> Piece:
    """Return one piece of several ASGI messages."""
    starts = [(m["status"], list(m["headers"])) for m in messages if "status" in m]
    bodies = [m for m in messages if "status" not in m]
    return Piece(
        start=starts[0] if starts else None,
        body=b"".join([m.get("body", b"") for m in bodies]),
        is_last=not bodies[-1].get("more_body", False),
    )


def _num_waiting_tokens(engine: EngineCore) -> int:
    unfinished = (*engine.waiting, *engine.running)
    return sum(max(0, one.num_prompt_tokens - one.num_computed_tokens) for one in unfinished)


class _Follower:
    """A process that shares the network of a replica."""

    def __init__(self, options: ClusterOptions, environment: Mapping[str, str]) -> None:
        self._options = options
        os.environ.update(environment)

    def follow(self) -> int:
        """Run the steps of rank 0 until it ends; an error ends this process, and so the replica.

        An actor outlives what its methods raise, and the other ranks would wait for it.
        """
        try:
            with importing():
                start = import_module("model.cli.start")
            code: int = start.follow(self._options.model, self._options.engine)
        except BaseException:  # noqa: BLE001  # whatever it is
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(FAILED)
        return code


def _start_others(options: ClusterOptions) -> list[Any]:
    """Start the processes that share the network, and make this one rank 0."""
    size = options.model.tp
    if size == 1:
        return []
    with socket.create_server((ray.util.get_node_ip_address(), 0)) as free:
        host, port = free.getsockname()[:2]
    shared = {"MASTER_ADDR": host, "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
    shared["LOCAL_RANK"] = "0"  # Ray shows each process its own GPU alone
    group = get_current_placement_group()
    others = []
    for rank in range(1, size):
        actor = ray.remote(_Follower).options(
            num_cpus=options.cluster.cpus_per_process,
            num_gpus=1 if ray.get_gpu_ids() else 0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=rank
            ),
        )
        other = actor.remote(options, {**shared, "RANK": str(rank)})
        other.follow.remote()
        others.append(other)
    os.environ.update({**shared, "RANK": "0"})
    return others
