"""Autoscaling: the number of replicas follows the tokens of prompts that wait in them.

Ray Serve asks periodically, and waits before it follows the answer.

Does not know: Ray beside the metrics of a deployment, engines.
"""

import math
from collections.abc import Mapping
from typing import Any

WAITING = "num_waiting_tokens"
"""The name of the tokens that wait in a replica, in its autoscaling metrics."""


class ByWaitingTokens:
    """A policy of Ray Serve.

    Args:
        waiting_tokens: the number of tokens that may wait for each replica.
    """

    def __init__(self, waiting_tokens: int) -> None:
        self._waiting_tokens = waiting_tokens

    def __call__(self, context: Any) -> tuple[int, dict[str, object]]:  # noqa: ANN401  # Ray's
        """Return the number of replicas, and an empty state. O(replicas)."""
        metrics: Mapping[str, Mapping[object, float]] = context.aggregated_metrics or {}
        waiting = sum(metrics.get(WAITING, {}).values())
        least, most = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        return max(least, min(most, math.ceil(waiting / self._waiting_tokens))), {}
