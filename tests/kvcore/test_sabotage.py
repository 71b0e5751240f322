"""A checker is itself checked: every planted bug is caught, and for the right reason."""

import pytest
from hypothesis.stateful import RULE_MARKER

from tests.kvcore import machines
from tests.kvcore.hunts import NEAR, SEAMS, SEEDS, hunt, near
from tests.kvcore.sabotage import SABOTAGES

pytestmark = pytest.mark.source_build


def test_those_that_are_named_here_are_planted_and_have_rules():
    first_words = {name.partition("_")[0] for name in SABOTAGES}
    assert set(SABOTAGES) >= set(SEEDS)
    assert {*SABOTAGES, *first_words} >= set(NEAR)
    unaided = [name for name, planted in SABOTAGES.items() if planted.examples]
    assert not [name for name in unaided if near(name) or name in SEEDS]
    for rules in NEAR.values():
        assert all(hasattr(getattr(machines.ManagerMachine, rule), RULE_MARKER) for rule in rules)
    for planted in SABOTAGES.values():
        for rule in planted.near:
            assert hasattr(getattr(planted.machine, rule), RULE_MARKER), rule


@pytest.mark.parametrize("name", [*SABOTAGES])
def test_a_planted_bug_is_caught_for_the_right_reason(name):
    assert hunt(name) in SABOTAGES[name].properties


def test_there_are_enough_planted_bugs_of_every_part():
    parts = [planted.machine for planted in SABOTAGES.values()]
    assert len(parts) >= 12
    assert set(parts) == set(SEAMS)
