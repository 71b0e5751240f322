"""Promises of a scheduler with a connector: `check_scheduler(MyAdapter)`.

The machines of this package drive an allocator. What a whole scheduler does wrong lies in its
timing: a load that arrives after its request was aborted, a failed load that is hit, a request that
waits for ever. An adapter maps six verbs to the calls that an engine makes; a run draws requests,
aborts and the ends of loads from a seed, keeps a ghost of the GPU's memory, and checks:

- P1: a chunk reads the KV of its text and no other;
- P17: no block is used while a load may still write it;
- P5: when all has ended, every block is free;
- every request ends once, after all its tokens, and within a bound once no more arrive.

It needs no Hypothesis, no threads and no clock: one seed is one run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from random import Random
from typing import Any, Final, NamedTuple, Protocol

from kvcore.testing.errors import CrashError, PropertyError
from kvcore.testing.ghost import Prefixes

_NUM_STEPS: Final = 40
"""Steps in which requests come and are aborted."""

_NUM_TOKENS: Final = 5
"""Different tokens, so that prompts meet."""


class Chunk(NamedTuple):
    """The tokens of one request that a step computes.

    Attributes:
        request: its name.
        start: the position of the first token.
        num_tokens: the number of tokens.
        block_table: its block ids.
    """

    request: str
    start: int
    num_tokens: int
    block_table: Sequence[int]


class Load(NamedTuple):
    """Blocks of one request that a connector begins to fill.

    Attributes:
        request: its name.
        start: the position of the first token, a multiple of the block size.
        block_ids: the blocks to write, in order.
    """

    request: str
    start: int
    block_ids: Sequence[int]


class Plan(NamedTuple):
    """The chunks that a step computes, and the loads that begin with it."""

    chunks: Sequence[Chunk]
    loads: Sequence[Load]


class Scheduling(Protocol):
    """The verbs of a scheduler with a connector. Called single-threaded.

    A scheduler that plans ahead, such as an asynchronous one, has an attribute `num_steps_ahead`,
    the number of steps that are sent before the first of them is read (without it, 0). Then each
    `update` is about the oldest step that was planned and not updated yet: its tokens are known
    that many steps later, and may belong to requests that were aborted meanwhile. The device
    computes the steps in their order, but a load is in no order with them.
    """

    def start(self, num_blocks: int, block_size: int) -> int:
        """Make a fresh scheduler; return how many blocks it may hand out."""

    def add(
        self, request: str, tokens: Sequence[int], num_new_tokens: int, num_stored: int
    ) -> None:
        """Queue a request: a prompt, how many tokens to draw, how many the connector can load.

        `num_stored` is a multiple of the block size, and less than the prompt has.
        """

    def abort(self, request: str) -> None:
        """End an unfinished request, whatever it waits for."""

    def schedule(self) -> Plan:
        """Plan the next step, maybe an empty one."""

    def update(
        self, tokens: Mapping[str, int], loaded: Collection[str], failed: Collection[str]
    ) -> Collection[str]:
        """Take what the oldest step gave that was not updated yet.

        Args:
            tokens: the token of each request whose chunk reached the end of its text.
            loaded: requests, aborted ones too, whose load has ended.
            failed: those of them whose blocks hold nothing of use.

        Returns:
            The requests that have ended by this.
        """

    def num_free_blocks(self) -> int:
        """Return the number of blocks that are free, cached ones included."""


def check_scheduler(
    make: Callable[[], Scheduling], seeds: Iterable[int] = range(200)
) -> dict[str, int]:
    """Run a scheduler over a ghost device and a faulty connector. Some milliseconds a seed.

    Args:
        make: makes an adapter, such as its class.
        seeds: a run each.

    Returns:
        The counts of the events that were seen.

    Raises:
        PropertyError: a promise is broken; it carries the shortest program of all failing seeds.
        CrashError: a call that was in order raised.
    """
    seen = dict.fromkeys(("requests", "hits", "loads", "failed loads", "late loads", "aborts"), 0)
    shortest: PropertyError | CrashError | None = None
    for seed in seeds:
        run = _Run(make(), Random(seed), seen)  # noqa: S311  # a run is drawn, and nothing is secret
        try:
            run.run()
        except (PropertyError, CrashError) as error:
            if shortest is None or len(error.program) < len(shortest.program):
                shortest = error
    if shortest is not None:
        raise shortest
    return seen


class _Flight(NamedTuple):
    """A load under way: which step it ends with, and whether it brings anything."""

    load: Load
    until: int
    is_good: bool


class _Sent(NamedTuple):
    """A step that the device computes: what it gives, and the blocks that it touches."""

    tokens: dict[str, int]
    loaded: set[str]
    failed: set[str]
    block_ids: set[int]


class _Run:
    """One seed."""

    def __init__(self, scheduler: Scheduling, draw: Random, seen: dict[str, int]) -> None:
        self.scheduler, self.draw, self.seen = scheduler, draw, seen
        self.size = draw.choice((2, 4, 16))
        self.num_steps = 0
        self.prefixes = Prefixes()
        self.memory: dict[int, int] = {}  # by slot
        self.texts: dict[str, list[int]] = {}  # of all that were added
        self.open: dict[str, int] = {}  # the final length of each unfinished request, in tokens
        self.computed: dict[str, int] = {}
        self.flying: list[_Flight] = []
        self.sent: list[_Sent] = []
        self.num_ahead: int = getattr(scheduler, "num_steps_ahead", 0)
        self.num_read: dict[str, int] = {}  # tokens of each text that the scheduler knows
        self.program: list[str] = []
        longest = 5 * self.size + 5
        self.num_blocks = (2 + longest // self.size) * draw.choice((1, 2, 4)) + 1
        self.stems = [self._tokens(4 * self.size) for _ in range(2)]

    def run(self) -> None:
        """Run to the end.

        Raises:
            PropertyError: a promise is broken.
            CrashError: a call raised.
        """
        usable: int = self._call("start", self.num_blocks, self.size)
        while self.num_steps < _NUM_STEPS:
            if self.draw.random() < 0.3:
                self._add()
            if self.open and self.draw.random() < 0.1:
                self._abort(self.draw.choice(list(self.open)))
            self._step()
        bound = self.num_steps + 100 + 4 * sum(self.open.values())
        while self.open or self.flying:
            if self.num_steps > bound:
                self._broken("P5", f"requests that never end: {[*self.open]}")
            self._step()
        for _ in range(1 + self.num_ahead):
            self._step()
        free: int = self._call("num_free_blocks")
        if free != usable:
            self._broken("P5", f"all has ended: wanted {usable} free blocks, got {free}")

    def _add(self) -> None:
        stem = self.draw.choice(self.stems)
        prompt = stem[: self.draw.randint(0, len(stem))] + self._tokens(self.draw.randint(1, 3))
        name, num_new = f"r{len(self.texts)}", self.draw.randint(1, self.size)
        stored = self.draw.randint(0, (len(prompt) - 1) // self.size) * self.size
        stored = stored if self.draw.random() < 0.7 else 0
        self.texts[name], self.open[name] = list(prompt), len(prompt) + num_new
        self.computed[name], self.num_read[name] = 0, len(prompt)
        self.seen["requests"] += 1
        self._call("add", name, prompt, num_new, stored)

    def _abort(self, name: str) -> None:
        del self.open[name]
        self.seen["aborts"] += 1
        self._call("abort", name)

    def _step(self) -> None:
        self.num_steps += 1
        plan: Plan = self._call("schedule")
        self._say(f"# {plan}")
        for load in plan.loads:
            self._check_targets(load.request, load.block_ids)
            for step in self.sent:
                if both := step.block_ids.intersection(load.block_ids):
                    told = f"{both}, which a step under way may write"
                    self._broken("P17", f"the load of {load.request} is given {told}")
            self.seen["loads"] += 1
            until = self.num_steps + self.draw.randint(0, 6)
            self.flying.append(_Flight(load, until, self.draw.random() < 0.8))
        tokens = {}
        for chunk in plan.chunks:
            self._compute(chunk)
            name, text = chunk.request, self.texts[chunk.request]
            if chunk.start + chunk.num_tokens == len(text):
                tokens[name] = self._path(name)[-1] % _NUM_TOKENS
        for name, token in tokens.items():
            self.texts[name].append(token)
        touched = {block for chunk in plan.chunks for block in self._table(chunk)}
        self.sent.append(_Sent(tokens, *self._arrive(), touched))
        if len(self.sent) > self.num_ahead:
            self._read(self.sent.pop(0))

    def _read(self, step: _Sent) -> None:
        """Give the scheduler the tokens and loads of a step, and check which requests end."""
        for name in step.tokens:
            self.num_read[name] += 1
        due = {name for name in step.tokens if self.num_read[name] == self.open.get(name)}
        ended = set(self._call("update", step.tokens, step.loaded, step.failed))
        if ended != due:
            self._broken("P5", f"wanted the end of {sorted(due)}, got {sorted(ended)}")
        for name in ended:
            del self.open[name]

    def _table(self, chunk: Chunk) -> Sequence[int]:
        """Return the blocks that a chunk reads or writes."""
        return chunk.block_table[: -(-(chunk.start + chunk.num_tokens) // self.size)]

    def _compute(self, chunk: Chunk) -> None:
        """Read all that a chunk sees, then write its own."""
        name, stop = chunk.request, chunk.start + chunk.num_tokens
        if name not in self.open:
            self._broken("P1", f"{name} is computed, and has ended")
        table = self._table(chunk)
        self._check_targets(name, table)
        self.seen["hits"] += self.computed[name] == 0 < chunk.start
        self.computed[name] = stop
        path = self._path(name)
        slots = [table[at // self.size] * self.size + at % self.size for at in range(stop)]
        for at in range(chunk.start):
            if self.memory.get(slots[at]) != path[at]:
                self._broken("P1", f"{name} reads at {at} what is not its own: block {table}")
        self.memory.update(zip(slots[chunk.start :], path[chunk.start : stop], strict=True))

    def _check_targets(self, name: str, block_ids: Sequence[int]) -> None:
        for flight in self.flying:
            both = {*block_ids} & {*flight.load.block_ids}
            if both:
                whose = flight.load.request
                self._broken("P17", f"{name} is given {both}, which the load of {whose} may write")

    def _arrive(self) -> tuple[set[str], set[str]]:
        """Loads end: they have written all along, so what they bring may be anywhere till now."""
        loaded, failed = set(), set()
        for flight in [each for each in self.flying if each.until <= self.num_steps]:
            self.flying.remove(flight)
            (name, start, ids), path = flight.load, self._path(flight.load.request)
            for place, block_id in enumerate(ids):
                for offset in range(self.size):
                    held = path[start + place * self.size + offset] if flight.is_good else -1
                    self.memory[block_id * self.size + offset] = held
            self.seen["late loads"] += name not in self.open
            self.seen["failed loads"] += not flight.is_good
            loaded.add(name)
            if not flight.is_good:
                failed.add(name)
        return loaded, failed

    def _path(self, name: str) -> list[int]:
        return self.prefixes.follow(self.prefixes.root("", 0), self.texts[name])

    def _tokens(self, count: int) -> list[int]:
        return [self.draw.randrange(_NUM_TOKENS) for _ in range(count)]

    def _call(self, verb: str, *given: object) -> Any:  # noqa: ANN401  # each verb has its own
        self._say(f"scheduler.{verb}({', '.join(map(repr, given))})")
        try:
            return getattr(self.scheduler, verb)(*given)
        except Exception as error:
            message = f"{verb} raised {type(error).__name__}: {error}"
            raise CrashError(message, "\n".join(self.program)) from error

    def _say(self, line: str) -> None:
        self.program.append(f"    {line}")

    def _broken(self, prop: str, message: str) -> None:
        raise PropertyError(prop, message, "\n".join(self.program))
