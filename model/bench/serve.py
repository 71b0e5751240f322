"""Requests sent to an engine when they are due, and the times at which their tokens come.

Decides: when a request is sent (at once, at a rate, or when what it follows has been answered, and
with a limit of requests in flight), and what counts as its arrival: the moment it was due and had
room, however late the engine took it.

Invariants: one thread; every request gets exactly the tokens it asks for; nothing is left in the
engine when a call returns or raises.

Does not know: what the numbers mean (`metrics.py`).
"""

import heapq
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from model.bench.metrics import Timeline
from model.bench.workloads import BenchRequest
from model.control.params import SamplingParams
from model.control.request import Request

_GREEDY = SamplingParams()


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """How requests come.

    Attributes:
        rate: requests a second, at random moments (a Poisson process); infinite: all at once.
        max_concurrency: the most that are in flight; None: any number.
        seed: of the random moments.
    """

    rate: float = math.inf
    max_concurrency: int | None = None
    seed: int = 0

    def due(self, count: int) -> list[float]:
        """When each of `count` requests is due, in seconds from the begin. O(count)."""
        if math.isinf(self.rate):
            return [0.0] * count
        draw = random.Random(self.seed)  # noqa: S311  # a benchmark repeats
        moments, now = [], 0.0
        for _ in range(count):
            moments.append(now)
            now += draw.expovariate(self.rate)
        return moments


class Answer(Protocol):
    """What a step gives one request."""

    @property
    def request(self) -> Request:
        """Whose; its status is up to date."""
        ...

    @property
    def token_ids(self) -> Sequence[int]:
        """Its tokens: one, or several where drafts held."""
        ...

    def take_text(self) -> str:
        """Its text that became final since this was last called."""
        ...


class Serving(Protocol):
    """What takes requests and runs steps: an engine, or something in its place."""

    def add_request(self, prompt: list[int], params: SamplingParams, /) -> Request:
        """Queue a prompt."""
        ...

    def abort(self, request: Request, /) -> bool:
        """End a request now."""
        ...

    def step(self) -> Sequence[Answer]:
        """Run a step; the tokens it gave."""
        ...


@dataclass(frozen=True, slots=True)
class Served:
    """A request that was answered: its whole prompt, its answer, its times."""

    prompt: list[int]
    output: list[int]
    timeline: Timeline


def serve(
    engine: Serving,
    requests: Sequence[BenchRequest],
    arrivals: Arrivals,
    *,
    params: SamplingParams = _GREEDY,
    on_finish: Callable[[], None] = lambda: None,
) -> list[Served]:
    """Send requests to an engine and run it until all are answered.

    Args:
        engine: has nothing else to do.
        requests: what follows another comes after it.
        arrivals: when they are sent.
        params: of all requests, but for their lengths; none ends before that.
        on_finish: called when a request is answered.

    Returns:
        In the order of the requests.

    Raises:
        InvalidArgumentError: a request is refused.
    """
    return _Run(engine, requests, arrivals, params, on_finish).run()


class _Run:
    """One call of `serve`. What is ready waits in `_ready`, as (due, number)."""

    def __init__(
        self,
        engine: Serving,
        requests: Sequence[BenchRequest],
        arrivals: Arrivals,
        params: SamplingParams,
        on_finish: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._requests = requests
        self._params = params
        self._on_finish = on_finish
        self._limit = arrivals.max_concurrency or len(requests)
        self._slot_free_s = 0.0
        self._due = arrivals.due(len(requests))
        self._followers: dict[int, list[int]] = {}
        self._ready: list[tuple[float, int]] = []
        for number, request in enumerate(requests):
            if request.follows is None:
                heapq.heappush(self._ready, (self._due[number], number))
            else:
                self._followers.setdefault(request.follows, []).append(number)
        self._sent: dict[int, Request] = {}
        self._texts: list[str] = []
        self._in_flight: dict[int, int] = {}  # request_id -> number
        self._arrival_s: dict[int, float] = {}
        self._token_s: list[list[float]] = [[] for _ in requests]

    def run(self) -> list[Served]:
        begin = time.perf_counter()
        try:
            while self._ready or self._in_flight:
                now = time.perf_counter() - begin
                self._send(now)
                if not self._in_flight:  # nothing is due yet
                    time.sleep(max(0.0, self._ready[0][0] - now))
                    continue
                outputs = self._engine.step()
                now = time.perf_counter() - begin
                for output in outputs:
                    times = self._token_s[self._in_flight[output.request.request_id]]
                    times += [now] * len(output.token_ids)
                    if output.request.is_finished:
                        self._texts.append(output.take_text())  # decoded, as for any client
                        self._finished(output.request, now)
        finally:
            for number in self._in_flight.values():
                self._engine.abort(self._sent[number])
        return [self._served(number) for number in range(len(self._requests))]

    def _send(self, now: float) -> None:
        while self._ready and self._ready[0][0] <= now and len(self._in_flight) < self._limit:
            due, number = heapq.heappop(self._ready)
            request = self._engine.add_request(
                self._prompt(number),
                replace(
                    self._params, max_tokens=self._requests[number].max_tokens, ignore_eos=True
                ),
            )
            self._sent[number] = request
            self._in_flight[request.request_id] = number
            self._arrival_s[number] = max(due, self._slot_free_s)

    def _prompt(self, number: int) -> list[int]:
        own = self._requests[number]
        if own.follows is None:
            return list(own.tokens)
        return [*self._sent[own.follows].tokens, *own.tokens]

    def _finished(self, request: Request, now: float) -> None:
        if len(self._in_flight) == self._limit:
            self._slot_free_s = now
        number = self._in_flight.pop(request.request_id)
        for follower in self._followers.get(number, ()):
            heapq.heappush(self._ready, (max(self._due[follower], now), follower))
        self._on_finish()

    def _served(self, number: int) -> Served:
        request = self._sent[number]
        timeline = Timeline(
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=request.num_cached_tokens,
            arrival_s=self._arrival_s[number],
            token_s=tuple(self._token_s[number]),
        )
        return Served(request.prompt_tokens, request.output_tokens, timeline)
