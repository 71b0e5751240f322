"""What is lost, repeated or late is made up for, and the machine that says so can fail."""

import sys

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from kvcore import wire
from tests.kvcore.wire.index_machine import IndexMachine, TierMachine
from tests.kvcore.wire.machine import CountMachine, IndexDiffersError, StreamMachine
from tests.kvcore.wire.programs import INDEX_PROGRAMS, PROGRAMS, TIER_PROGRAMS
from tests.kvcore.wire.sabotage import LOOKAHEAD_SABOTAGES, SABOTAGES, TIER_SABOTAGES, ClingingIndex

TestStreams = StreamMachine.TestCase
TestCounts = CountMachine.TestCase
TestIndexes = IndexMachine.TestCase
TestTiers = TierMachine.TestCase
pytest.mark.machine(TestStreams)
pytest.mark.machine(TestCounts)
pytest.mark.machine(TestIndexes)
pytest.mark.machine(TestTiers)
# Shrinking takes minutes: a failure is reported as it was found. For a short one, add Phase.shrink.
TestStreams.settings = settings(
    phases=[Phase.explicit, Phase.reuse, Phase.generate], report_multiple_bugs=False
)
# An example costs little there, so there are as many where a profile has fewer.
TestCounts.settings = settings(
    TestStreams.settings, max_examples=max(60, settings.default.max_examples)
)

HUNT = settings(
    max_examples=1500, stateful_step_count=40, derandomize=True, database=None,
    phases=[Phase.generate], report_multiple_bugs=False, print_blob=False, deadline=None,
)  # fmt: skip


def run(program, machine):
    program(machine)
    machine.settle()


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_index_tells_the_truth_after(program):
    run(program, StreamMachine())


@pytest.mark.parametrize(
    ("seam", "broken"), [(seam, each) for seam, some in SABOTAGES.items() for each in some]
)
def test_a_planted_bug_is_caught(seam, broken):
    machine = type(broken.__name__, (StreamMachine,), {seam: staticmethod(broken)})
    with pytest.raises(IndexDiffersError):  # noqa: PT012  # short programs first: they cost little
        for program in PROGRAMS:
            run(program, machine())
        run_state_machine_as_test(machine, settings=HUNT)


def run_on_index(program, machine):
    machine.start()
    program(machine)
    machine.it_says_what_was_told()
    machine.what_is_held_is_in_the_tree()
    machine.teardown()


@pytest.mark.parametrize("program", INDEX_PROGRAMS)
def test_an_index_of_different_names_tells_the_truth_after(program):
    run_on_index(program, IndexMachine())


def test_a_node_that_clings_to_what_it_followed_is_caught():
    machine = type("Clinging", (IndexMachine,), {"make_index": ClingingIndex})
    with pytest.raises((IndexDiffersError, KeyError)):  # noqa: PT012  # short programs first
        for program in INDEX_PROGRAMS:
            run_on_index(program, machine())
        run_state_machine_as_test(machine, settings=HUNT)


@pytest.mark.parametrize("broken", LOOKAHEAD_SABOTAGES)
def test_an_index_that_looks_ahead_badly_is_caught(broken):
    machine = type(broken.__name__, (IndexMachine,), {"make_index": broken})
    with pytest.raises(IndexDiffersError):
        run_state_machine_as_test(machine, settings=HUNT)


def run_on_tiers(program, machine):
    machine.start()
    program(machine)
    machine.it_counts_what_is_near()


@pytest.mark.parametrize("program", TIER_PROGRAMS)
def test_an_index_counts_what_is_near_after(program):
    run_on_tiers(program, TierMachine())


@pytest.mark.parametrize("broken", TIER_SABOTAGES)
def test_an_index_that_misreads_where_a_copy_is_is_caught(broken):
    machine = type(broken.__name__, (TierMachine,), {"make_index": broken})
    with pytest.raises(IndexDiffersError):  # noqa: PT012  # short programs first: they cost little
        for program in TIER_PROGRAMS:
            run_on_tiers(program, machine())
        run_state_machine_as_test(machine, settings=HUNT)


def num_lines(call):
    """How many lines of Python a call runs."""
    count = 0

    def trace(_frame, event, _argument):
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def test_a_match_is_linear_in_the_runs_of_a_window():
    def of_gaps(num_gaps):
        """A window sees four blocks, and of every two one is gone."""
        tokens = [*range(2 * num_gaps)]
        told = {0: ("full_attention", None), 1: ("sliding_window", 4)}
        events = [
            wire.Stored(
                tokens, None, tokens, 1, group_idx=group, kv_cache_spec_kind=kind,
                kv_cache_spec_sliding_window=window,
            )
            for group, (kind, window) in told.items()
        ]  # fmt: skip
        index = wire.Index()
        index.apply("a", wire.Batch(0.0, (*events, wire.Removed(tokens[::2], group_idx=1))))
        assert index.match(tokens) == {}
        return num_lines(lambda: index.match(tokens))

    assert of_gaps(400) < 5 * of_gaps(100)
