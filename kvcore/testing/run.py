"""The machines as one call, and as a `TestCase`."""

from __future__ import annotations

import unittest
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Final, cast

import hypothesis
from hypothesis.stateful import run_state_machine_as_test

from kvcore.testing.answers import check_adapter
from kvcore.testing.errors import BrokenError
from kvcore.testing.machine import AllocatorMachine
from kvcore.testing.machines import machines_for
from kvcore.testing.protocol import Allocator, R
from kvcore.testing.shorten import is_same, shorten

LONG: Final = 20
"""Calls: where `shorten` leaves more, Hypothesis shrinks as well, at fifty times the price."""


def check_allocator(
    make_allocator: Callable[[], Allocator[R]],
    *,
    machines: Sequence[type[AllocatorMachine]] | None = None,
    block_sizes: Sequence[int] = AllocatorMachine.block_sizes,
    settings: hypothesis.settings | None = None,
    seed: int | None = None,
    known: Collection[str] = (),
) -> dict[str, int]:
    """Run the machines against an allocator.

    Args:
        make_allocator: makes an adapter, such as its class; called once for every example.
        machines: those to run; None: all that fit the promises.
        block_sizes: the block sizes for `start`, the simplest first.
        settings: the length of the search, and so on; None: the loaded Hypothesis profile.
        seed: the start of the search; None: as the settings say.
        known: failures that are known, such as "P9" or "P9: begin": where one is met, the example
            ends, and the search continues. They are counted as "known P9: begin".

    Returns:
        The counts of events: hits, evictions, refusals and so on. Those of 0 were not tested.

    Raises:
        PropertyError: a property does not hold; it carries the smallest program found.
        CrashError: a call that was in order raised.
        AdapterError: an adapter lacks a verb, or returns something of another kind.
    """
    promises = check_adapter(make_allocator())
    seen: Counter[str] = Counter()
    base = settings or hypothesis.settings()
    for machine in machines or machines_for(promises):
        runnable = bound(machine, make_allocator, block_sizes, seen, known)
        error = _search(runnable, base, seed, {hypothesis.Phase.shrink})
        if error and len(error.steps) > LONG and hypothesis.Phase.shrink in base.phases:
            other = _search(runnable, base, seed, set())
            if other and is_same(other, error) and len(other.steps) < len(error.steps):
                error = other
        if error:
            raise error
        seen.update({f"known {key}": count for key, count in runnable.waived.items()})
    return dict(sorted(seen.items()))


def _search(
    machine: type[AllocatorMachine],
    settings: hypothesis.settings,
    seed: int | None,
    left_out: Collection[hypothesis.Phase],
) -> BrokenError | None:
    """Run a machine; return the shortened failure, or None. Raises any other exception."""
    chosen = hypothesis.settings(
        settings,
        # To explain a failure by lines of ours would take longer than to find it.
        phases=[p for p in settings.phases if p not in {hypothesis.Phase.explain, *left_out}],
        deadline=None,
        report_multiple_bugs=False,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    seeded = machine if seed is None else hypothesis.seed(seed)(machine)
    try:
        run_state_machine_as_test(seeded, settings=chosen)
    except BrokenError as error:
        shorten(machine.make_allocator, error)
        return error
    except hypothesis.errors.Unsatisfiable:
        if not machine.waived:  # else every example met what is known
            raise
    return None


def bound(
    machine: type[AllocatorMachine],
    make_allocator: Callable[[], Allocator[R]],
    block_sizes: Sequence[int] = AllocatorMachine.block_sizes,
    seen: Counter[str] | None = None,
    known: Collection[str] = (),
) -> type[AllocatorMachine]:
    """Return a machine that is bound to an allocator, to be run as any Hypothesis machine."""
    attributes = {
        "make_allocator": staticmethod(make_allocator),
        "block_sizes": tuple(block_sizes),
        "seen": Counter() if seen is None else seen,
        "known": tuple(known),
        "waived": Counter(),
        "__module__": machine.__module__,
        "__doc__": machine.__doc__,
    }
    return cast("type[AllocatorMachine]", type(machine.__name__, (machine,), attributes))


def allocator_tests(
    make_allocator: Callable[[], Allocator[R]],
    *,
    machines: Sequence[type[AllocatorMachine]] | None = None,
    block_sizes: Sequence[int] = AllocatorMachine.block_sizes,
    known: Collection[str] = (),
) -> type[unittest.TestCase]:
    """Return a `TestCase` with one test for each machine, for pytest or unittest to collect."""
    chosen = machines or machines_for(check_adapter(make_allocator()))

    def test_of(machine: type[AllocatorMachine]) -> Callable[[unittest.TestCase], None]:
        def test(_: unittest.TestCase) -> None:
            check_allocator(
                make_allocator, machines=[machine], block_sizes=block_sizes, known=known
            )

        test.__doc__ = machine.__doc__
        return test

    tests = {f"test_{machine.__name__}": test_of(machine) for machine in chosen}
    return cast("type[unittest.TestCase]", type("AllocatorTests", (unittest.TestCase,), tests))
