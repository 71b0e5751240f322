"""Which of many things end by a given time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.eviction.deadlines import Deadlines

CHANGES = st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.integers(0, 9)))


@given(changes=CHANGES, now=st.integers(-1, 10))
def test_what_is_due_has_a_deadline_that_has_come_and_nothing_is_left_of_what_was_dropped(
    changes, now
):
    deadlines, wanted = Deadlines(), set()
    for is_new, thing, deadline in changes:
        if is_new:
            deadlines.add(thing, deadline)
            wanted.add((thing, deadline))
        else:
            deadlines.drop(thing, deadline)
            wanted.discard((thing, deadline))
    due = deadlines.due(now)
    assert len(set(due)) == len(due)
    assert set(due) == {thing for thing, deadline in wanted if deadline <= now}
    for thing, deadline in wanted:
        deadlines.drop(thing, deadline)
    assert (deadlines._at, deadlines._order) == ({}, [])


def test_the_earliest_deadline_is_told_first_and_of_one_deadline_what_came_first():
    deadlines = Deadlines()
    for thing, deadline in ((3, 5), (1, 5), (2, 4), (9, 7)):
        deadlines.add(thing, deadline)
    assert deadlines.due(6) == [2, 3, 1]


def test_a_deadline_that_cannot_be_noted_leaves_nothing():
    deadlines = Deadlines()
    deadlines.add(1, 5)
    with pytest.raises(TypeError):
        deadlines.add(2, "never")  # has no place in the order
    assert deadlines.due(9) == [1]
    deadlines.drop(1, 5)
    assert deadlines._at == {}
