"""Ray's own router by the beginnings of prompts, as it is, so that ours can be compared with it.

It remembers which texts it has sent where, in an actor that it asks and waits for, and knows
nothing of what a cache still holds. Of Ray's private modules, because the public one wants vLLM.

Does not know: our router.
"""

import time
from typing import Any

from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import (
    PrefixCacheAffinityRouter,
)
from ray.serve.request_router import PendingRequest, RunningReplica

from model.cluster.sent import Sent


class PrefixRouter(PrefixCacheAffinityRouter):  # type: ignore[misc]  # Ray has no types
    """Ray's, which says how long a choice took, and what it waited for counts."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> Any:  # noqa: ANN401  # Ray's
        """Choose for a request; Ray calls it again where the chosen one has no room."""
        began = time.perf_counter_ns()
        chosen = await super().choose_replicas(candidate_replicas, pending_request)
        for one in () if pending_request is None else pending_request.args:
            if isinstance(one, Sent):
                one.decision_ns = time.perf_counter_ns() - began
        return chosen
