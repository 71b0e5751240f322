"""Fairness between clients: the order of their requests, and how many may be there.

The requests of each client take turns with those of the others, so that a client with hundreds of
requests, or with long ones, delays mostly itself. The scheme is start-time fair queueing (Goyal,
Vin and Cheng 1996): a request takes a turn, and another one for each `TURN_TOKENS` of its prompt. A
client's next request is placed behind all turns of its last, and the first of a client that has
none unfinished at the present virtual time. Virtual time follows the places of the requests that
end, and advances with each by at least its turns divided by the number of clients; one that ends
before it has run had no turn, and changes nothing.

The output of a request is counted when it ends, for those that its client sends later. To count it
while it is computed, as Sheng et al. 2024 do (arXiv:2401.00588), would change places after arrival,
and the proof that every request ends rests on places that do not change. The tokens of one step are
divided by `shares.py`.

When all clients together have reached a limit, a request is refused only if it would give its
client more than an equal share of it. So a client that fills the queue gets no other one refused.
The k-th client that comes has `limit // k` above the limit at most, and all together never have
more than `limit + limit // 2 + limit // 3 + ... + 1`: 7.3 times a limit of 1,280.

Invariants:
- a client's unfinished requests are in the order of their arrival;
- with one client, or none named, so are all;
- a request is overtaken only by requests that arrive before virtual time comes to its place, which
  it does after no more than its distance times the number of clients have run and ended;
- a client without unfinished requests is forgotten: O(clients with unfinished requests) of memory.

Does not know: which requests run, the clients behind the names.
"""

from collections import Counter
from collections.abc import Mapping

TURN_TOKENS = 256
"""The number of tokens for which a request takes one more turn."""


class FairOrder:
    """Gives each new request its place, the lower the sooner.

    Args:
        span: the turns that one level of priority is worth.

    Attributes:
        now: virtual time, in turns of a client that is served alone.
    """

    def __init__(self, span: int) -> None:
        self.now = 0.0
        self._span = span
        self._next: dict[str | None, float] = {}  # the first turn that each client has not taken
        self._num_unfinished: Counter[str | None] = Counter()

    @property
    def num_clients(self) -> int:
        """The number of clients with unfinished requests. O(1)."""
        return len(self._num_unfinished)

    def add(self, client: str | None, priority: int, turns: int = 1) -> float:
        """Return a new request's place: its client's next turn, moved by its priority. O(1)."""
        self._num_unfinished[client] += 1
        turn = max(self.now, self._next.get(client, self.now))
        self._next[client] = turn + turns
        return turn + priority * self._span

    def end(
        self,
        client: str | None,
        priority: int,
        place: float,
        turns: int = 1,
        *,
        has_run: bool,
        more: int = 0,
    ) -> None:
        """Note that a request of this client and priority at this place has ended. O(1).

        Args:
            client: as `add` was given it.
            priority: as above.
            place: that `add` returned.
            turns: as above.
            has_run: False: it has ended before it ran.
            more: turns that it has taken beyond those, with its output.
        """
        if has_run:
            turn = place - max(0, priority) * self._span  # an urgent one comes before its turn
            self.now = max(self.now + turns / len(self._num_unfinished), turn)
            self._next[client] += more
        self._num_unfinished[client] -= 1
        if not self._num_unfinished[client]:
            del self._num_unfinished[client], self._next[client]


def turns_of(num_tokens: int) -> int:
    """Return the turns that a request of this many tokens takes. O(1)."""
    return 1 + num_tokens // TURN_TOKENS


class FairLimit:
    """The counts of the clients' requests, and the limit on further ones.

    Attributes:
        total: the requests of all clients.
    """

    def __init__(self) -> None:
        self.total = 0
        self._counts: Counter[str | None] = Counter()

    def add(self, wanted: Mapping[str | None, int]) -> None:
        """Count further requests, by client. O(len(wanted))."""
        self.total += sum(wanted.values())
        self._counts.update(wanted)

    def remove(self, wanted: Mapping[str | None, int]) -> None:
        """Count requests no longer. O(len(wanted))."""
        self.total -= sum(wanted.values())
        for client, count in wanted.items():
            self._counts[client] -= count
            if not self._counts[client]:
                del self._counts[client]

    def admits(self, wanted: Mapping[str | None, int], limit: int) -> bool:
        """Return True if further requests may be added. O(number of clients).

        Args:
            wanted: the number of further requests, by client.
            limit: the most requests of all; above it each client may have an equal share of it.
        """
        if self.total + sum(wanted.values()) <= limit:
            return True
        share = limit // len(self._counts.keys() | wanted.keys())
        return all(self._counts[client] + count <= share for client, count in wanted.items())
