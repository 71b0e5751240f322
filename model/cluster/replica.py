"""One replica: an asynchronous engine in an actor of Ray's, on one GPU or on several.

Where several processes share the network, this one leads, and has an actor for each of the others,
in the same placement group; they end with it.

Decides: that a replica whose engine has stopped is not healthy, so that Ray starts another.

Does not know: HTTP, the other replicas, who chooses among them.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import traceback
from collections.abc import AsyncIterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

import ray
from ray.util import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from kvcore.wire import Publisher
from model.async_engine import AsyncEngine, EngineState, NotServingError
from model.cli.exits import FAILED
from model.cluster.config import ClusterOptions
from model.cluster.routing import EVENTS, REPLAY
from model.cluster.scaling import WAITING
from model.cluster.sent import Facts, Message, Piece, Refusal, Sent, Taken
from model.errors import ModelError

if TYPE_CHECKING:  # torch is not loaded where a replica is only named
    from model.engine import Engine

REFUSED = "kvcore-refused: "
"""Stands before the one line that says why a replica cannot be."""


class Replica:
    """Runs requests for the face.

    Args:
        options: the command line.
    """

    def __init__(self, options: ClusterOptions) -> None:
        self._options = options
        self._others = _start_others(options)
        self._publisher: Publisher | None = None
        try:
            start = import_module("model.cli.start")
            engine: Engine = start.make_engine(options.model, options.engine, print)
        except ModelError as error:
            raise RuntimeError(f"{REFUSED}{error}") from None
        self._engine = AsyncEngine(
            engine,
            max_waiting=options.serve.max_waiting,
            stream_share=options.serve.stream_share,
            announce=self._announce,
        )

    async def generate(self, sent: Sent) -> AsyncIterator[Message]:
        """Continue a prompt: that it was taken, then what comes of it; or why not."""
        try:
            stream = await self._engine.submit(sent.asked)
        except ModelError as error:
            yield Refusal.of(error)
            return
        async with stream:
            yield Taken()
            try:
                async for delta in stream:
                    yield Piece(delta, stream.num_cached_tokens)
            except ModelError as error:
                yield Refusal.of(error)

    async def facts(self) -> Facts:
        """What the face has to know."""
        engine = self._engine.engine
        return Facts(
            engine.vocab_size, engine.max_model_len, engine.kv.block_size,
            engine.config.max_num_seqs,
        )  # fmt: skip

    async def record_replica_metadata(self) -> Mapping[str, str]:
        """Where the events are; Ray asks once, before it sends requests."""
        self._engine.start()
        await self._engine.ready()
        found = self._publisher
        if found is None or found.replay is None:
            return {}
        return {EVENTS: found.endpoint, REPLAY: found.replay}

    async def record_autoscaling_stats(self) -> Mapping[str, float]:
        """How many tokens wait; Ray asks now and then."""
        return {WAITING: float(await self._engine.call(_num_waiting_tokens))}

    async def check_health(self) -> None:
        """Raise if no request can be run any more; Ray asks now and then."""
        health = self._engine.health
        if health.state is EngineState.STOPPED:
            raise NotServingError(f"the engine has stopped: {health.last_fault}")

    async def __del__(self) -> None:
        """Give back what the engine holds; Ray waits for it when the replica is let go."""
        with contextlib.suppress(ModelError):
            await self._engine.stop()

    def _announce(self, engine: Engine, wake: Any) -> Publisher:  # noqa: ANN401  # as Announcer
        where = f"tcp://{ray.util.get_node_ip_address()}:*"
        self._publisher = Publisher(engine.kv, where, where, wake=wake)
        return self._publisher


def _num_waiting_tokens(engine: Engine) -> int:
    unfinished = (*engine.waiting, *engine.running)
    return sum(max(0, one.num_prompt_tokens - one.num_computed_tokens) for one in unfinished)


class _Follower:
    """A process that shares the network of a replica."""

    def __init__(self, options: ClusterOptions, environment: Mapping[str, str]) -> None:
        self._options = options
        os.environ.update(environment)

    def follow(self) -> int:
        """Do what the replica does, until it ends; an error ends this process, and so the replica.

        An actor outlives what its methods raise, and those it shares a network with would wait.
        """
        try:
            start = import_module("model.cli.start")
            code: int = start.follow(self._options.model, self._options.engine)
        except BaseException:  # noqa: BLE001  # whatever it is
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(FAILED)
        return code


def _start_others(options: ClusterOptions) -> list[Any]:
    """Start the processes that share the network, and be the first of them."""
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
