"""Neighbours of a batch that begin with the same blocks, beside all runs looked at one by one."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from model.device import shared_prefix
from model.device.shared_prefix import NOTHING, Shared, shared_run

ROWS = st.lists(
    st.tuples(st.integers(0, 40), st.lists(st.integers(1, 3), max_size=4)), min_size=1, max_size=7
)


def table_of(rows):
    """Each row: so many blocks of one beginning, then its own."""
    lists = [[*range(100, 100 + begin), *own] for begin, own in rows]
    table = np.full((len(rows), 48), 7, dtype=np.int32)  # behind the ends all are alike
    for row, blocks in enumerate(lists):
        table[row, : len(blocks)] = blocks
    return table, np.array([len(blocks) for blocks in lists]), lists


def best_of(lists):
    runs = [NOTHING]
    for first in range(len(lists)):
        for count in range(2, len(lists) - first + 1):
            columns = zip(*lists[first : first + count], strict=False)
            same = [len(set(column)) == 1 for column in columns]
            blocks = (*same, False).index(False)
            if blocks:
                runs.append(Shared(first, count, blocks))
    return max(runs, key=lambda run: (run.saved, -run.first))


@given(ROWS)
@example([(20, []), (20, []), (9, [1]), (20, [1]), (0, [])])
def test_the_run_that_saves_most_is_found(rows):
    table, filled, lists = table_of(rows)
    assert shared_run(table, filled) == best_of(lists)


def test_a_run_may_be_the_middle_of_a_batch_and_what_saves_nothing_is_none():
    table, filled, _ = table_of([(0, [1]), (30, [1]), (33, [2]), (31, []), (2, [])])
    assert shared_run(table, filled) == Shared(1, 3, 30)
    assert shared_run(table[:1], filled[:1]) == NOTHING


@pytest.mark.parametrize("bug", ["limits", "steps"])
def test_a_planted_bug_shows(bug, monkeypatch):
    def common(table, filled):
        if bug == "limits":  # entries behind the end of a row are taken for its own
            filled = np.full_like(filled, table.shape[1])
        found = original(table, filled)
        return found if bug == "limits" else np.minimum(found, 9)  # looks once and no further

    original = shared_prefix._common_blocks
    monkeypatch.setattr(shared_prefix, "_common_blocks", common)
    with pytest.raises(AssertionError):
        test_the_run_that_saves_most_is_found.hypothesis.inner_test(
            [(9, [1]), (9, [1]), (30, [2]), (30, [3])] if bug == "steps" else [(3, []), (3, [])]
        )
