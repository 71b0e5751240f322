"""Rounds in turns: what makes two times comparable.

A case has one run for each subject. In every round each subject has its turn, a different one goes
first each time, and ratios are taken within a round, so that what slows the machine slows both.
Allocators are timed by the CPU time of the thread: they wait for nothing, and other programs' time
is not theirs. Before the rounds, garbage is collected and what is left is frozen: the collector
runs as it would in an engine and does not walk the set-up.
"""

import gc
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from time import thread_time_ns
from typing import NamedTuple


class BenchError(Exception):
    """A benchmark cannot run: what was wanted, and what came."""


class Round(NamedTuple):
    """What one subject did in one round: its cost in the case's unit, and the tokens it hit."""

    cost: float
    num_hit_tokens: int = 0


class Spread(NamedTuple):
    """A median with the lowest and the highest round."""

    median: float
    low: float
    high: float


class Subject(NamedTuple):
    """What is measured: a line of the table. Ours is compared with the others, not they with it."""

    label: str
    peer: object
    is_ours: bool = False


@dataclass(slots=True)
class Case:
    """One thing that is timed, with every subject that can do it.

    Attributes:
        group: which heading it belongs to.
        name: a sentence that says what happens.
        runs: (subject, function that runs one round).
        rounds, warm_up: rounds that count, and those before them.
        per: (how many, of what) a cost covers; it is shown for one of them too.
        unit: of the cost: "ns", or what is counted.
        queried, possible, wanted: prompt tokens of a round that are looked up; how many could hit
            at most; how many hit where nothing is missed (None: not known).
    """

    group: str
    name: str
    runs: list
    rounds: int
    warm_up: int = 1
    per: tuple[float, str] | None = None
    unit: str = "ns"
    queried: int = 0
    possible: int = 0
    wanted: int | None = None


@dataclass(slots=True)
class Row:
    """What was measured for one subject in one case; `ratios`: another's cost over this one's."""

    group: str
    case: str
    subject: str
    unit: str
    cost: Spread
    per: tuple[float, str] | None = None
    hit_rate: float | None = None
    wanted_hit_rate: float | None = None
    ratios: dict[str, Spread] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)


def spread(values):
    return Spread(median(values), min(values), max(values))


def ran_ns(begin):
    """Nanoseconds that the thread ran since `thread_time_ns()` gave `begin`; at least 1."""
    return max(1, thread_time_ns() - begin)


@contextmanager
def settled():
    """Keep the collector away from everything that exists at the beginning."""
    was_frozen = gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not was_frozen:
            gc.unfreeze()


def measure(case):
    """Run a case; a row for each subject, in the order of its runs."""
    found = [[] for _ in case.runs]
    with settled():
        for number in range(case.warm_up + case.rounds):
            for turn in range(len(case.runs)):
                index = (number + turn) % len(case.runs)
                subject, run = case.runs[index]
                result = run()
                if not 0 <= result.num_hit_tokens <= case.possible:
                    raise BenchError(
                        f"{subject.label}: {case.group}, {case.name}: hits {result.num_hit_tokens} "
                        f"tokens of {case.queried}; at most {case.possible} were there to hit"
                    )
                if number >= case.warm_up:
                    found[index].append(result)
    costs = {
        subject.label: [each.cost for each in results]
        for (subject, _), results in zip(case.runs, found, strict=True)
    }
    queried, wanted = case.queried, case.wanted
    return [
        Row(
            group=case.group,
            case=case.name,
            subject=subject.label,
            unit=case.unit,
            cost=spread(costs[subject.label]),
            per=case.per,
            hit_rate=median([one.num_hit_tokens for one in results]) / queried if queried else None,
            wanted_hit_rate=wanted / queried if queried and wanted is not None else None,
            ratios={
                other.label: ratio(costs[other.label], costs[subject.label])
                for other, _ in case.runs
                if subject.is_ours and not other.is_ours
            },
        )
        for (subject, _), results in zip(case.runs, found, strict=True)
    ]


def ratio(theirs, ours):
    """The spread of one cost over the other, round by round."""
    return spread([their / our for their, our in zip(theirs, ours, strict=True)])
