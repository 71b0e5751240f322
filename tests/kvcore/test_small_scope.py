"""Exhaustion of a small scope, as far as the default run has time for."""

import pytest

import kvcore
from tests.kvcore import small_scope
from tests.kvcore.sabotage import SABOTAGES
from tests.kvcore.views import PropertyError

pytestmark = pytest.mark.source_build  # it copies whole managers

REACHED = {
    "full": [1, 2, 16, 102, 549, 2739],
    "full and window": [1, 2, 15, 86, 412],
    "six before four": [1, 2, 17, 112, 620],
    "uneven three": [1, 2, 17, 114, 647],
    "window, told later": [1, 2, 17, 110, 616],
    "full and window, loaded": [1, 2, 18, 133, 831],
    "full and state": [1, 2, 21, 175, 1318],
    "full and three pieces": [1, 2, 21, 175],
    "full and state, told later": [1, 2, 19, 145, 958],
}


FORESEEN = {"window, told later", "full and window, loaded"}
DEEPER = pytest.mark.slow  # four fifths of the states are those of the last operation


@pytest.mark.parametrize(
    ("layout", "depth"),
    [(layout, 4 if layout == "full" else 3) for layout in REACHED]
    + [
        pytest.param(layout, len(counts) - 1, marks=DEEPER)
        for layout, counts in REACHED.items()
        if len(counts) > 4
    ],
)
def test_every_state_that_a_few_operations_reach_is_sound(layout, depth):
    counts, _ = small_scope.explore(depth, layout, foresees=layout in FORESEEN)
    assert counts == REACHED[layout][: depth + 1]


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("manager_leaks_the_last_block_on_close", "full"),
        ("manager_publishes_what_is_only_reserved", "full"),
        ("manager_forks_a_half_full_block_without_a_copy", "full"),
        ("leases_hold_nothing", "full"),
        ("groups_are_asked_once_where_a_cut_may_stand", "six before four"),
        ("states_begin_with_what_a_former_holder_has_left", "full and state"),
        ("states_are_published_for_the_block_before", "full and three pieces"),
        ("states_go_back_with_the_tokens_alone", "full and state, told later"),
    ],
)
def test_exhaustion_finds_planted_bugs_in_few_operations(monkeypatch, name, layout):
    bug = SABOTAGES[name]
    monkeypatch.setattr(bug.machine, "make_manager", staticmethod(bug.make))
    with SABOTAGES[name].planted(), pytest.raises((PropertyError, kvcore.InvariantError)) as caught:
        small_scope.explore(4, layout)
    assert caught.value.prop in SABOTAGES[name].properties
    assert " -> " in caught.value.__notes__[0]
