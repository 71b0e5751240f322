"""Which replica takes a request: the one where it waits least before its first token.

Decides: by policy. `prefix` weighs what a replica holds of the prompt against what waits there
already: the cost of a replica is the tokens that wait to be computed there, some for each request
that runs, and those of the prompt that it does not hold; the last count more than once, because
what is computed twice is room and time that others would have had. `round-robin` and
`power-of-two` (the less loaded of two drawn ones) look at no prompt and stand beside it for
comparison.

What a replica holds comes from an index that follows it. What it has not told yet is guessed: a
prompt that was sent and has no first token yet will be there when the next one like it is computed,
so requests that come together stay together.

Invariants: a request counts at its replica from `choose` until its ticket ends, once; a replica
that was removed is chosen no more, and tickets of it change nothing. Calls may come from
any thread.

Does not know: sockets, Ray, time.
"""

import math
import random
import threading
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import kvcore
from model.errors import InvalidArgumentError, ModelError

Policy = Literal["prefix", "round-robin", "power-of-two"]

Match = Callable[[Sequence[int], kvcore.Namespace], Mapping[str, int]]
"""By replica, how many tokens of a prompt it holds as a prefix: `kvcore.wire.Index.match`."""

_BYTES_PER_TOKEN = 4
_LOOK_BACK = 4  # so many prompts that are on their way to a replica are looked at


class NoReplicaError(ModelError):
    """No replica takes requests now."""


@dataclass(slots=True)
class _Replica:
    """What was sent to a replica and is not done.

    Attributes:
        num_waiting_tokens: that it has to compute for requests without a first token.
        num_running: requests, those included.
        coming: prompts without a first token, packed, by ticket, with whom they share.
    """

    num_waiting_tokens: int
    num_running: int
    coming: "dict[Ticket, tuple[kvcore.Namespace, bytes]]"


class Ticket:
    """A request at its replica.

    Attributes:
        replica: which one.
        num_expected: tokens of the prompt that the replica is expected to have.
    """

    __slots__ = ("_at", "_is_over", "_lock", "_num_waiting", "num_expected", "replica")

    def __init__(
        self, replica: str, at: _Replica, lock: threading.Lock, num_expected: int, num_waiting: int
    ) -> None:
        self.replica = replica
        self.num_expected = num_expected
        self._at = at
        self._lock = lock
        self._num_waiting = num_waiting
        self._is_over = False

    def has_begun(self) -> None:
        """Say that the first token has come. Again: nothing. O(1)."""
        with self._lock:
            self._begin()

    def end(self) -> None:
        """Say that the request is over, however. Again: nothing. O(1)."""
        with self._lock:
            self._begin()
            if not self._is_over:
                self._is_over = True
                self._at.num_running -= 1

    def _begin(self) -> None:
        self._at.num_waiting_tokens -= self._num_waiting
        self._num_waiting = 0
        self._at.coming.pop(self, None)


class Router:
    """Chooses replicas.

    Args:
        match: what each replica holds of a prompt.
        policy: how to choose.
        running_weight: what a running request costs, in tokens: steps that it makes longer.
        miss_weight: what a token of the prompt costs that the replica does not hold.
        block_size: guesses count whole blocks of so many tokens.
        seed: of what is drawn.

    Raises:
        InvalidArgumentError: an unknown policy, or a number that cannot be.
    """

    def __init__(
        self,
        match: Match,
        policy: Policy = "prefix",
        *,
        running_weight: int = 16,
        miss_weight: float = 2.0,
        block_size: int = 16,
        seed: int = 0,
    ) -> None:
        if policy not in get_args(Policy):
            raise InvalidArgumentError(f"policy: wanted one of {get_args(Policy)}, got {policy!r}")
        if running_weight < 0:
            raise InvalidArgumentError(f"running_weight: wanted at least 0, got {running_weight}")
        if not miss_weight >= 0:
            raise InvalidArgumentError(f"miss_weight: wanted at least 0, got {miss_weight}")
        if block_size < 1:
            raise InvalidArgumentError(f"block_size: wanted at least 1, got {block_size}")
        self._match = match
        self._policy: Policy = policy
        self._running_weight = running_weight
        self._miss_weight = miss_weight
        self._block_size = block_size
        self._random = random.Random(seed)  # noqa: S311  # which of two equals is no secret
        self._replicas: dict[str, _Replica] = {}
        self._turn = 0
        self._lock = threading.Lock()

    @property
    def replicas(self) -> tuple[str, ...]:
        """Those that take requests. O(replicas)."""
        return tuple(self._replicas)

    def add(self, name: str) -> None:
        """Let a replica take requests; one of that name before is gone. O(1)."""
        with self._lock:
            self._replicas[name] = _Replica(0, 0, {})

    def remove(self, name: str) -> None:
        """Choose a replica no more. O(1)."""
        with self._lock:
            self._replicas.pop(name, None)

    def load(self, name: str) -> int:
        """Return what waits at a replica, in tokens. O(1)."""
        at = self._replicas[name]
        return at.num_waiting_tokens + self._running_weight * at.num_running

    def choose(
        self, tokens: Sequence[int], namespace: kvcore.Namespace = kvcore.DEFAULT_NAMESPACE
    ) -> Ticket:
        """Choose a replica for a prompt, and count the request there. O(tokens + replicas).

        Args:
            tokens: the prompt.
            namespace: with whom it shares what is computed of it.

        Raises:
            NoReplicaError: there is none.
        """
        prompt = namespace, array("I", tokens).tobytes()
        held = self._match(tokens, namespace) if self._policy == "prefix" else {}
        with self._lock:
            if not self._replicas:
                raise NoReplicaError("choose: wanted at least one replica, there is none")
            if self._policy == "prefix":
                name, expected = self._least_cost(len(tokens), held, prompt)
            else:
                name = self._next() if self._policy == "round-robin" else self._lesser_of_two()
                expected = 0
            at = self._replicas[name]
            waiting = len(tokens) - expected
            ticket = Ticket(name, at, self._lock, expected, waiting)
            at.num_waiting_tokens += waiting
            at.num_running += 1
            if self._policy == "prefix":
                at.coming[ticket] = prompt
        return ticket

    def _next(self) -> str:
        names = list(self._replicas)
        self._turn += 1
        return names[self._turn % len(names)]

    def _lesser_of_two(self) -> str:
        names = list(self._replicas)
        pair = self._random.sample(names, min(2, len(names)))
        return min(pair, key=self.load)

    def _least_cost(
        self, num_tokens: int, held: Mapping[str, int], prompt: tuple[kvcore.Namespace, bytes]
    ) -> tuple[str, int]:
        """Return the replica that has least to do before the first token, and what it holds."""
        weight = self._running_weight
        names = list(self._replicas)
        self._turn += 1
        best, least, expected = "", math.inf, 0
        for place in range(len(names)):  # from another one each time: equals take turns
            name = names[(place + self._turn) % len(names)]
            at = self._replicas[name]
            has = held.get(name, 0)
            waiting = at.num_waiting_tokens + weight * at.num_running
            if waiting >= least:
                continue  # whatever it holds
            if at.coming:
                has = max(has, self._coming(at, *prompt))
            cost = waiting + self._miss_weight * (num_tokens - has)
            if cost < least:
                best, least, expected = name, cost, has
        return best, expected

    def _coming(self, at: _Replica, namespace: kvcore.Namespace, packed: bytes) -> int:
        """Return how much of a prompt a replica will hold once it has computed what it was sent."""
        width = self._block_size * _BYTES_PER_TOKEN
        longest = 0
        for shared, sent in list(at.coming.values())[-_LOOK_BACK:]:
            if sent[:width] == packed[:width] and shared == namespace:
                longest = max(longest, _common(sent, packed))
        return longest // width * self._block_size


def _common(one: bytes, other: bytes) -> int:
    """Return how many bytes at their beginnings are the same. O(bytes)."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
