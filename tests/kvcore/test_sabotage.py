"""A checker is itself checked: every planted bug is caught, and for the right reason."""

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

import kvcore
from tests.kvcore import machines
from tests.kvcore.sabotage import SABOTAGES
from tests.kvcore.views import PropertyError

pytestmark = pytest.mark.source_build

SEAMS = {
    machines.FreeQueueMachine: "make_queue",
    machines.PoolMachine: "make_pool",
    machines.ManagerMachine: "make_manager",
}

# Reproducible, and without the search for a smaller example: here only the verdict counts.
HUNT = settings(
    max_examples=3000,
    stateful_step_count=40,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    report_multiple_bugs=False,
    print_blob=False,
    deadline=None,
)


def hunt(name, settings=HUNT):
    """Run the machine on a planted bug; return the property that it says is broken, or None.

    An error of misuse that a rule did not expect is P3: the allocator's own guard has seen that its
    caller, here the broken part, broke a rule.
    """
    planted = SABOTAGES[name]
    seam = {SEAMS[planted.machine]: staticmethod(planted.make), "layouts": planted.layouts}
    seam["with_events"] = "always" if name.startswith("events") else "never"
    broken = type(name, (planted.machine,), seam)
    try:
        with planted.planted():
            run_state_machine_as_test(broken, settings=settings)
    except (PropertyError, kvcore.InvariantError) as error:
        return error.prop
    except kvcore.MisuseError:
        return "P3"
    return None


@pytest.mark.parametrize("name", SABOTAGES)
def test_a_planted_bug_is_caught_for_the_right_reason(name):
    assert hunt(name) in SABOTAGES[name].properties


def test_there_are_enough_planted_bugs_of_every_part():
    parts = [planted.machine for planted in SABOTAGES.values()]
    assert len(parts) >= 12
    assert set(parts) == set(SEAMS)
