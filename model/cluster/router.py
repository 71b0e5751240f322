"""The scoring of replicas: which one takes a request.

Decides: by policy. `prefix` takes the replica of least cost: the tokens that wait to be computed
there, a constant for each running request, and the tokens of the prompt that the replica does not
hold. The last count more than once, because computing them again takes time and blocks from other
requests. `round-robin` and `power-of-two` (the less loaded of two random replicas) ignore the
prompt and serve as comparisons.

An index of KV events says what a replica holds. A prompt that was sent there and has no first token
yet counts as held too, so that requests with the same prefix that arrive together stay together.

Invariants: a request counts at its replica from `choose` until its ticket ends, once; a removed
replica is never chosen, and its tickets change nothing. Any thread may call.

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
"""Returns the length of the prompt's prefix that each replica holds: `kvcore.wire.Index.match`."""

_BYTES_PER_TOKEN = 4
_LOOK_BACK = 4  # the prompts on their way to a replica that are compared


class NoReplicaError(ModelError):
    """There is no replica."""


@dataclass(slots=True)
class _Replica:
    """The unfinished requests of a replica.

    Attributes:
        num_waiting_tokens: tokens still to compute for requests without a first token.
        num_running: requests, including those.
        coming: by ticket, the namespace and the packed prompt of requests without a first token.
    """

    num_waiting_tokens: int
    num_running: int
    coming: "dict[Ticket, tuple[kvcore.Namespace, bytes]]"


class Ticket:
    """A request at its replica.

    Attributes:
        replica: its name.
        num_expected: tokens of the prompt that the replica is expected to hold.
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
        """Record the first token; a second call changes nothing. O(1)."""
        with self._lock:
            self._begin()

    def end(self) -> None:
        """Record the end of the request; a second call changes nothing. O(1)."""
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
        match: returns what each replica holds of a prompt.
        policy: how to choose.
        running_weight: the cost of a running request, in tokens: it makes steps longer.
        miss_weight: the cost of a token of the prompt that the replica does not hold.
        block_size: prompts without a first token count as held in whole blocks of this size.
        seed: of the random choices.

    Raises:
        InvalidArgumentError: the policy is unknown, or a number is out of range.
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
        """The names of all replicas. O(replicas)."""
        return tuple(self._replicas)

    def add(self, name: str) -> None:
        """Add a replica, in place of any of the same name. O(1)."""
        with self._lock:
            self._replicas[name] = _Replica(0, 0, {})

    def remove(self, name: str) -> None:
        """Remove a replica, if it is there. O(1)."""
        with self._lock:
            self._replicas.pop(name, None)

    def load(self, name: str) -> int:
        """Return the load of a replica, in tokens. O(1)."""
        at = self._replicas[name]
        return at.num_waiting_tokens + self._running_weight * at.num_running

    def choose(
        self, tokens: Sequence[int], namespace: kvcore.Namespace = kvcore.DEFAULT_NAMESPACE
    ) -> Ticket:
        """Choose a replica for a prompt, and count the request there. O(tokens + replicas).

        Args:
            tokens: the prompt.
            namespace: requests of the same namespace share cached blocks.

        Raises:
            NoReplicaError: there is no replica.
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
        """Return the replica of least cost, and the tokens of the prompt that it holds."""
        weight = self._running_weight
        names = list(self._replicas)
        self._turn += 1
        best, least, expected = "", math.inf, 0
        for place in range(len(names)):  # start at another one each time, so that equals take turns
            name = names[(place + self._turn) % len(names)]
            at = self._replicas[name]
            has = held.get(name, 0)
            waiting = at.num_waiting_tokens + weight * at.num_running
            if waiting >= least:
                continue  # whatever the replica holds
            if at.coming:
                has = max(has, self._coming(at, *prompt))
            cost = waiting + self._miss_weight * (num_tokens - has)
            if cost < least:
                best, least, expected = name, cost, has
        return best, expected

    def _coming(self, at: _Replica, namespace: kvcore.Namespace, packed: bytes) -> int:
        """Return how much of a prompt a replica will hold after the prompts sent to it."""
        width = self._block_size * _BYTES_PER_TOKEN
        longest = 0
        for shared, sent in list(at.coming.values())[-_LOOK_BACK:]:
            if sent[:width] == packed[:width] and shared == namespace:
                longest = max(longest, _common(sent, packed))
        return longest // width * self._block_size


def _common(one: bytes, other: bytes) -> int:
    """Return the length of the common prefix. O(bytes)."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
