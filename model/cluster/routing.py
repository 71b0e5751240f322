"""Our scoring inside Ray Serve's request router: the KV events of each replica decide.

Ray Serve makes a router in each process that sends requests, and sends it the list of replicas;
each replica's metadata say where it publishes its events. A request without a prompt goes to any
replica.

Invariants: a replica that Ray has lost is never chosen, and its blocks are forgotten.

Does not know: requests beside their prompts, how a choice is made (`router.py`).
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from ray.serve.request_router import (
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

import kvcore
from kvcore import wire
from model.cluster.forwarded import Forwarded
from model.cluster.router import NoReplicaError, Policy, Router

EVENTS, REPLAY = "kv_events", "kv_replay"
"""The names of the addresses of its events in a replica's metadata."""


class EventRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types
    """Follows each replica's events, and sends a request to the replica that costs it least."""

    def initialize_state(
        self,
        policy: Policy = "prefix",
        running_weight: int = 16,
        miss_weight: float = 2.0,
        block_size: int = 16,
        **_: object,
    ) -> None:
        """Take the settings; Ray calls it once."""
        self._subscriber = wire.Subscriber({})
        self._choice = Router(
            self._match, policy, running_weight=running_weight, miss_weight=miss_weight,
            block_size=block_size,
        )  # fmt: skip
        self._known: dict[str, Any] = {}

    def update_replicas(self, replicas: Sequence[RunningReplica]) -> None:
        """Take which replicas there are; Ray calls it when that changes. O(replicas)."""
        found = {replica.replica_id.unique_id: replica for replica in replicas}
        for name in self._known.keys() - found.keys():
            self._forget(name)
        for name in found.keys() - self._known.keys():
            told: Mapping[str, str] = found[name].replica_metadata
            if EVENTS in told:
                self._subscriber.add(name, wire.Source(told[EVENTS], told[REPLAY]))
            self._choice.add(name)
        self._known = found
        super().update_replicas(replicas)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Forget a replica; Ray calls it as soon as it knows. O(what it holds)."""
        super().on_replica_actor_died(replica_id)
        self._forget(replica_id.unique_id)
        self._known.pop(replica_id.unique_id, None)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Choose for a request; Ray calls it again where the chosen one has no room."""
        asked = None if pending_request is None else pending_request.args[0]
        if not isinstance(asked, Forwarded) or not asked.tokens:
            return [candidate_replicas]
        asked.end_ticket()
        began = time.thread_time_ns()
        try:
            ticket = self._choice.choose(asked.tokens, asked.namespace)
        except NoReplicaError:
            return [candidate_replicas]
        asked.take(ticket, time.thread_time_ns() - began)
        return [[self._known[ticket.replica]]]

    def _match(self, tokens: Sequence[int], namespace: kvcore.Namespace) -> Mapping[str, int]:
        return self._subscriber.match(tokens, namespace=namespace)

    def _forget(self, name: str) -> None:
        self._choice.remove(name)
        self._subscriber.remove(name)
