"""A checker is itself checked: every planted bug is caught, and for the right reason."""

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

import kvcore
from tests.kvcore import machines
from tests.kvcore.machines.programs import run_programs
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
            if planted.edits:
                run_programs(0, 1000)
            else:
                run_state_machine_as_test(broken, settings=settings)
    except (PropertyError, kvcore.InvariantError) as error:
        return error.prop
    except kvcore.MisuseError:
        return "P3"
    except kvcore.OutOfBlocksError:
        return "P13"
    return None


LONG = {  # searches of ten seconds and more
    "groups_are_asked_once_where_a_cut_may_stand",
    "groups_hit_what_one_of_them_lacks",
    "loads_fail_without_the_copies_of_forks",
    "loads_join_whatever_the_tokens_are_now",
    "look_ups_forget_what_they_were_asked_to_keep",
    "look_ups_make_what_they_find_young",
    "manager_keeps_from_others_what_was_not_looked_up",
    "unknown_tokens_are_guessed_for_a_fork",
}


def marked(name):
    return pytest.param(name, marks=pytest.mark.slow) if name in LONG else name


def test_those_that_take_long_are_planted():
    assert set(SABOTAGES) >= LONG


@pytest.mark.parametrize("name", [*map(marked, SABOTAGES)])
def test_a_planted_bug_is_caught_for_the_right_reason(name):
    assert hunt(name) in SABOTAGES[name].properties


def test_there_are_enough_planted_bugs_of_every_part():
    parts = [planted.machine for planted in SABOTAGES.values()]
    assert len(parts) >= 12
    assert set(parts) == set(SEAMS)
