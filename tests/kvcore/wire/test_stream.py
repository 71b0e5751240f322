"""What is lost, repeated or late is made up for, and the machine that says so can fail."""

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.kvcore.wire.machine import IndexDiffersError, StreamMachine
from tests.kvcore.wire.programs import PROGRAMS
from tests.kvcore.wire.sabotage import SABOTAGES

TestStreams = StreamMachine.TestCase
# Shrinking takes minutes: a failure is reported as it was found. For a short one, add Phase.shrink.
TestStreams.settings = settings(
    phases=[Phase.explicit, Phase.reuse, Phase.generate], report_multiple_bugs=False
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
