"""The pace of streams: it leaves the processor to the engine while pieces are sent.

Decides: each round of sending is followed by a pause that is a multiple of its cost: with few
streams each token is sent at once, with very many several are sent together.

Does not know: the pieces, and their readers.
"""

import time
from collections.abc import Callable

STREAM_SHARE = 0.05
"""The largest share of the time that sending takes by default."""

LONGEST_S = 0.1
"""The longest pause, so that a reader sees none."""


class Pace:
    """The clock of the rounds of sending. It belongs to one thread.

    Args:
        share: the largest share of the time that sending may take; 1: each round is due at once.
        now: the clock, in seconds.
        worked: the processor time of this thread, in seconds.
    """

    def __init__(
        self,
        share: float,
        *,
        now: Callable[[], float] = time.perf_counter,
        worked: Callable[[], float] = time.thread_time,
    ) -> None:
        self._share = share
        self._now = now
        self._worked = worked
        self._began_s = self._before_s = 0.0
        self._due_s = -1.0

    def wait_s(self) -> float:
        """Return the seconds until the next round, at most `LONGEST_S`; 0: it is due. O(1)."""
        return max(self._due_s - self._now(), 0.0)

    def begin(self) -> None:
        """Note that a round begins. O(1)."""
        self._began_s = self._now()
        self._before_s = self._worked()

    def end(self) -> None:
        """Note that the round is over: the thread's work since `begin` is its cost. O(1)."""
        cost_s = self._worked() - self._before_s
        rest_s = cost_s / self._share if self._share < 1 else 0.0
        self._due_s = self._began_s + min(rest_s, LONGEST_S)
