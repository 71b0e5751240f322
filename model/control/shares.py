"""Shares: the tokens that a step computes for each client, while there are several.

Decides: how many tokens a step may have then, and how they are divided. A step should take no
longer than `STEP_S`, because a client that comes now waits for it, or than twice a step of few
tokens, because smaller pieces of prompts would save nothing: so the time of steps is measured, and
the budget follows. Of this budget each client has an equal share or all that it
wants, whichever is less (max-min fairness, as in fair queueing, Demers, Keshav and Shenker 1989),
so a client with short prompts never waits for the long ones of another. What a share leaves, for
want of blocks or because of prefix cache hits, is for all.

Invariants: every client that wants a token has one; a client alone, with no other one lately, has
the whole budget of a step.

Does not know: clocks, blocks.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from model.control.request import Request

STEP_S = 0.03
"""The seconds that a step should take while there are several clients."""

RECENT_STEPS = 1000
"""The number of steps after which a client that has left is forgotten."""

LEAST_TOKENS = 32
"""The tokens that a client may have of a step at least: in smaller pieces prompts take longer."""

_SLOWER = 1.1  # the factor by which a step of few tokens may be slower than the last
_MOST_GROWTH, _MOST_LOSS = 2, 8  # factors by which one step may change the budget


class StepBudget:
    """The most tokens of a step that is short enough, as far as steps have been measured.

    Args:
        most: the most tokens of any step.

    Attributes:
        tokens: the budget, from 32 to `most`. Other ranks are given it and measure nothing.
    """

    def __init__(self, most: int) -> None:
        self.tokens = most
        self._most = most
        self._few_s = STEP_S / 2  # of a step of few tokens

    def note(self, num_tokens: int, took_s: float) -> None:
        """Take the time of a step into account, if it says something about the budget. O(1).

        A small step that was short enough says nothing: most of its time does not depend on the
        number of its tokens.
        """
        if num_tokens <= 0 or took_s <= 0:
            return
        if num_tokens <= LEAST_TOKENS:
            self._few_s = min(took_s, _SLOWER * self._few_s)
        fits = num_tokens * max(STEP_S, 2 * self._few_s) / took_s
        if 2 * num_tokens < self.tokens and fits > num_tokens:
            return
        fits = min(max(fits, self.tokens / _MOST_LOSS), self.tokens * _MOST_GROWTH)
        self.tokens = min(max(int(fits), LEAST_TOKENS), self._most)


class Shares:
    """The tokens of one step that each client may still have.

    Args:
        wanted: the tokens that each client could have computed now.
        budget: the tokens of all.

    Attributes:
        left: the tokens of all clients that are left.
    """

    def __init__(self, wanted: Mapping[str | None, int], budget: int) -> None:
        self.left = budget
        self._of: dict[str | None, int] | None = fair_shares(wanted, budget)

    def of(self, client: str | None) -> int:
        """Return the tokens that a client may still have. O(1)."""
        return self.left if self._of is None else self._of.get(client, 0)

    def take(self, client: str | None, count: int) -> None:
        """Note that tokens are computed for a client. O(1)."""
        self.left -= count
        if self._of is not None:
            self._of[client] = self._of.get(client, 0) - count

    def join(self) -> None:
        """Give all that is left to any client. O(1)."""
        self._of = None


def fair_shares(wanted: Mapping[str | None, int], budget: int) -> dict[str | None, int]:
    """Return the tokens of each client: the same number, or all that it wants if that is less.

    At least 1 for each, even if the budget is less than that. O(clients * log(clients)).
    """
    shares: dict[str | None, int] = {}
    for client in sorted(wanted, key=wanted.__getitem__):
        shares[client] = max(1, min(wanted[client], budget // (len(wanted) - len(shares))))
        budget = max(0, budget - shares[client])
    return shares


def wanted_tokens(running: Iterable[Request], waiting: Iterable[Request]) -> Counter[str | None]:
    """Return the tokens of prompts that each client could have computed. O(requests)."""
    wanted: Counter[str | None] = Counter()
    for request in running:
        if request.num_uncomputed_tokens > 1:
            wanted[request.client] += request.num_uncomputed_tokens
    for request in waiting:
        if not request.is_led:
            wanted[request.client] += request.num_tokens
    return wanted
