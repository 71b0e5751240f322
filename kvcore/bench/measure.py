"""Rounds in turns: what makes two times comparable.

A case has one run for each subject. In every round each subject has its turn, a different one
goes first each time, and ratios are taken within a round, so that what slows the machine slows
both. What is read is the time that the thread ran: an allocator waits for nothing, and other
programs' time is not its own. (That clock loses a millisecond now and then on a busy virtual
machine; a median does not notice, the lowest round may.) Before the rounds, garbage is collected
and what is left is frozen: the collector runs as it would in an engine, and does not walk the
set-up.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from time import thread_time_ns
from typing import NamedTuple

from kvcore.bench.peer import PeerError, Subject, Workload


class Round(NamedTuple):
    """What one subject did in one round: its cost in the case's unit, and the tokens it hit."""

    cost: float
    num_hit_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Run:
    """A subject, ready for a case. `measure` runs one round."""

    subject: Subject
    measure: Callable[[], Round]


@dataclass(frozen=True, slots=True)
class Case:
    """One line of a workload, with every subject that can do it.

    Attributes:
        workload: which one.
        name: what is special about the line.
        unit: what `Round.cost` counts; less is better.
        runs: the subjects.
        num_rounds: rounds that count.
        num_warm_up: rounds before them that do not.
        num_queried_tokens: prompt tokens of a round that are looked up.
        num_possible_hits: how many of them could hit at most, to the token.
        num_wanted_hits: how many hit where nothing is missed; None: no cache can be asked for more
            than it has room for.
    """

    workload: Workload
    name: str
    unit: str
    runs: list[Run]
    num_rounds: int
    num_warm_up: int = 1
    num_queried_tokens: int = 0
    num_possible_hits: int = 0
    num_wanted_hits: int | None = None


@dataclass(frozen=True, slots=True)
class Spread:
    """A median with the lowest and the highest round."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Row:
    """What was measured for one subject in one case.

    Attributes:
        workload, case, unit: as in `Case`.
        subject: its label.
        tokens: the form of its prompts.
        cost: over the rounds, in the unit.
        hit_rate: hit tokens of queried ones; None where nothing is looked up.
        wanted_hit_rate: what it is where nothing is missed; None where that is not known.
        speedup: for ours, by peer: the peer's cost over ours, within each round.
    """

    workload: Workload
    case: str
    unit: str
    subject: str
    tokens: str
    cost: Spread
    hit_rate: float | None
    wanted_hit_rate: float | None
    speedup: dict[str, Spread]


def ran_ns(begin: int) -> int:
    """Return the nanoseconds that the thread ran since `thread_time_ns()` said `begin`.

    At least 1, so that ratios exist where the clock is coarse.
    """
    return max(1, thread_time_ns() - begin)


def spread(values: list[float]) -> Spread:
    """Return the median, the least and the greatest of at least one value."""
    return Spread(median(values), min(values), max(values))


@contextmanager
def settled() -> Iterator[None]:
    """Keep the collector away from everything that exists at the beginning.

    Where something was frozen before, all of it stays so.
    """
    was_frozen = gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not was_frozen:
            gc.unfreeze()


def measure(case: Case) -> list[Row]:
    """Run a case and return a row for each subject, in the order of its runs.

    Raises:
        PeerError: a subject says that it hit more than was ever written.
    """
    rounds: list[list[Round]] = [[] for _ in case.runs]
    with settled():
        for number in range(case.num_warm_up + case.num_rounds):
            for turn in range(len(case.runs)):
                index = (number + turn) % len(case.runs)
                result = case.runs[index].measure()
                _check_hits(case, case.runs[index].subject, result)
                if number >= case.num_warm_up:
                    rounds[index].append(result)
    return [
        _row(case, run.subject, results, _speedups(case, run.subject, results, rounds))
        for run, results in zip(case.runs, rounds, strict=True)
    ]


def _check_hits(case: Case, subject: Subject, result: Round) -> None:
    if not 0 <= result.num_hit_tokens <= case.num_possible_hits:
        raise PeerError(
            f"{subject.label}: {case.workload}, {case.name}: hits {result.num_hit_tokens} tokens "
            f"of {case.num_queried_tokens}, and {case.num_possible_hits} at most were there to hit"
        )


def _speedups(
    case: Case, subject: Subject, ours: list[Round], rounds: list[list[Round]]
) -> dict[str, Spread]:
    if not subject.is_ours:
        return {}
    return {
        run.subject.label: spread(
            [its.cost / mine.cost for its, mine in zip(theirs, ours, strict=True)]
        )
        for run, theirs in zip(case.runs, rounds, strict=True)
        if not run.subject.is_ours
    }


def _row(case: Case, subject: Subject, results: list[Round], speedup: dict[str, Spread]) -> Row:
    queried = case.num_queried_tokens
    wanted = case.num_wanted_hits
    return Row(
        workload=case.workload,
        case=case.name,
        unit=case.unit,
        subject=subject.label,
        tokens=subject.tokens,
        cost=spread([result.cost for result in results]),
        hit_rate=(
            median([result.num_hit_tokens for result in results]) / queried if queried else None
        ),
        wanted_hit_rate=wanted / queried if queried and wanted is not None else None,
        speedup=speedup,
    )
