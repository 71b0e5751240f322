"""What the scheduler says: the plan of a step, and its counters.

Invariants: a plan is a value; nothing in it changes after it was made.

Does not know: how the plan came about (`scheduler.py`), or how it is computed (`batch.py`).
"""

from dataclasses import dataclass

from model.request import Request


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `start` to `start + num_tokens - 1` of a request, to be computed in one step.

    Attributes:
        samples: the chunk ends at the last known token, so its logits give the next one.
    """

    request: Request
    start: int
    num_tokens: int
    samples: bool


@dataclass(frozen=True, slots=True)
class Step:
    """What one forward pass computes; every request appears at most once."""

    chunks: tuple[Chunk, ...]

    @property
    def num_tokens(self) -> int:
        """The tokens of the step. O(num_chunks)."""
        return sum(chunk.num_tokens for chunk in self.chunks)


@dataclass(slots=True)
class SchedulerStats:
    """Counters since the scheduler was made.

    `num_hit_tokens` counts prompt tokens found in the cache when a request is first admitted; what
    a preempted request finds of itself is not a hit.
    """

    num_prompt_tokens: int = 0
    num_hit_tokens: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    peak_running: int = 0
