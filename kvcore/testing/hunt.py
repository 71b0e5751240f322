"""A search for failures, round by round, with a budget of time, and what it found.

A round runs each machine once, with another seed; the same seed and the same number of rounds
find the same. A failure is shortened, drawn, and known from then on, so that the search continues
past it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import hypothesis

from kvcore.testing.answers import check_adapter
from kvcore.testing.errors import BrokenError
from kvcore.testing.machine import AllocatorMachine
from kvcore.testing.run import check_allocator
from kvcore.testing.shorten import replay

PROFILES = {"quick": (20, 30), "default": (100, 50), "deep": (1000, 100)}
"""Examples a machine and round, and steps an example."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that goes wrong.

    Attributes:
        machine: the machine that found it.
        key: the failure and its verb, in the form that `known` takes.
        message: the wanted and the actual result.
        program: the calls that lead there, shortened.
        drawn: the same with a picture of the pool after every call.
        seed: with which it was found.
    """

    machine: str
    key: str
    message: str
    program: str
    drawn: str
    seed: int


@dataclass(slots=True)
class Result:
    """The failures that a search has found, and the events that it has seen.

    Attributes:
        promises: the promises of the allocator.
        machines: the names of those that ran, in order.
        findings: the failures, each key once.
        seen: the number of events of each kind; a kind that is missing was not tested.
        known: the number of times that each known failure was met.
        num_rounds: the number of times that each machine ran.
        seconds: the time that each machine ran.
    """

    promises: list[str]
    machines: list[str]
    findings: list[Finding] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)
    known: Counter[str] = field(default_factory=Counter)
    num_rounds: int = 0
    seconds: dict[str, float] = field(default_factory=dict)


def hunt(
    make_allocator: Callable[[], object],
    machines: Sequence[type[AllocatorMachine]],
    *,
    block_sizes: Sequence[int] = AllocatorMachine.block_sizes,
    profile: str = "default",
    seconds: float = 0.0,
    seed: int = 0,
    known: Collection[str] = (),
    go_on: bool = False,
) -> Result:
    """Search for failures: one round, and more until the time is over.

    Args:
        make_allocator: makes an adapter.
        machines: the machines to run.
        block_sizes: the block sizes for `start`, the simplest first.
        profile: how much a round does, one of `PROFILES`.
        seconds: begin no machine after that many seconds, but run each once.
        seed: of the first round; the next one has the next.
        known: failures to continue past, by key ("P9: begin") or by what goes wrong ("P9").
        go_on: True: continue past a failure; else a machine that has found one is done.

    Raises:
        AdapterError: an adapter lacks a verb, or returns something of another kind.
    """
    promises = check_adapter(make_allocator())
    result = Result(sorted(p.name for p in promises), [m.__name__ for m in machines])
    result.seconds = dict.fromkeys(result.machines, 0.0)
    started, waiting = time.monotonic(), list(machines)
    while waiting:
        for machine in list(waiting):
            begun = time.monotonic()
            if seconds and result.num_rounds and begun - started >= seconds:
                return result
            settings, number = _settings(profile), seed + result.num_rounds
            expected = [*known, *(finding.key for finding in result.findings)] if go_on else known
            try:
                seen = check_allocator(
                    make_allocator,  # type: ignore[arg-type]  # whatever it calls a request
                    machines=[machine],
                    block_sizes=block_sizes,
                    settings=settings,
                    seed=number,
                    known=expected,
                )
            except BrokenError as error:
                result.findings.append(_finding(make_allocator, machine, error, number))
                if not go_on:
                    waiting.remove(machine)
            else:
                _count(result, seen)
            took = time.monotonic() - begun
            result.seconds[machine.__name__] += took
        result.num_rounds += 1
        if time.monotonic() - started >= seconds and not (go_on and _found_now(result, seed)):
            return result
    return result


def _found_now(result: Result, seed: int) -> bool:
    """Return True if the last round has found something: then there may be more behind it."""
    last = seed + result.num_rounds - 1
    return any(finding.seed == last for finding in result.findings)


def _settings(profile: str) -> hypothesis.settings:
    examples, steps = PROFILES[profile]
    return hypothesis.settings(
        max_examples=examples,
        stateful_step_count=steps,
        database=None,
        deadline=None,
        print_blob=False,
        derandomize=False,
    )


def _finding(
    make_allocator: Callable[[], object],
    machine: type[AllocatorMachine],
    error: BrokenError,
    seed: int,
) -> Finding:
    drawn = replay(make_allocator, error.steps, draw=True)
    return Finding(
        machine.__name__,
        error.key,
        error.message,
        error.program,
        drawn.program if drawn is not None else error.program,
        seed,
    )


def _count(result: Result, seen: dict[str, int]) -> None:
    for what, count in seen.items():
        if what.startswith("known "):
            result.known[what.removeprefix("known ")] += count
        else:
            result.seen[what] += count
