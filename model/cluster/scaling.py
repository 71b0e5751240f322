"""How many replicas there should be: as many as the tokens that wait in them ask for.

Ray Serve asks once in a while, holds the answer between its bounds, and waits before it follows.

Does not know: Ray beside what it tells of a deployment, engines.
"""

import math
from collections.abc import Mapping
from typing import Any

WAITING = "num_waiting_tokens"
"""What replicas call the tokens that wait in them."""


class ByWaitingTokens:
    """A policy of Ray Serve.

    Args:
        waiting_tokens: so many may wait for each replica.
    """

    def __init__(self, waiting_tokens: int) -> None:
        self._waiting_tokens = waiting_tokens

    def __call__(self, context: Any) -> tuple[int, dict[str, object]]:  # noqa: ANN401  # Ray's
        """Say how many replicas there should be, and what to remember: nothing. O(replicas)."""
        told: Mapping[str, Mapping[object, float]] = context.aggregated_metrics or {}
        waiting = sum(told.get(WAITING, {}).values())
        least, most = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        return max(least, min(most, math.ceil(waiting / self._waiting_tokens))), {}
