"""Neighbours of a batch that begin with the same blocks, beside all runs looked at one by one."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from model.attention import shared_prefix
from model.attention.shared_prefix import NOTHING, Shared, Worth, shared_run

ROWS = st.lists(
    st.tuples(st.integers(0, 140), st.lists(st.sampled_from([1, 2, 900]), max_size=4)),
    min_size=1, max_size=7,
)  # fmt: skip


def table_of(rows):
    """Each row: a number of shared blocks, then its own."""
    lists = [[*range(100, 100 + begin), *own] for begin, own in rows]
    table = np.full((len(rows), 148), 7, dtype=np.int32)  # behind the ends all are alike
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
@example([(0, [900]), (3, []), (0, [1]), (0, [2]), (2, [])])  # rising and falling ids
@example([(2, []), (2, []), (0, [1]), (2, []), (2, [1])])  # the first of two that save as much
@example([(3, []), (3, []), (3, []), (0, [1]), (6, []), (6, [])])
@example([(140, [1]), (140, [2]), (139, []), (60, [900]), (57, []), (56, [1]), (57, [])])
@example([(9, [1]), (9, [2]), (10, [1]), (10, [2]), (25, []), (25, []), (26, [1])])
@example([(1, []), (1, [])])
@example([(0, []), (5, []), (5, [])])
def test_the_run_that_saves_most_is_found(rows):
    table, filled, lists = table_of(rows)
    assert shared_run(table, filled) == best_of(lists)


def test_a_run_may_be_the_middle_of_a_batch_and_what_saves_nothing_is_none():
    table, filled, _ = table_of([(0, [1]), (30, [1]), (33, [2]), (31, []), (2, [])])
    assert shared_run(table, filled) == Shared(1, 3, 30)
    assert shared_run(table[:1], filled[:1]) == NOTHING


def test_what_is_shared_saves_a_reading_for_all_rows_but_one():
    assert [Shared(0, rows, 5).saved for rows in (1, 2, 4)] == [0, 5, 15]


@given(
    worth=st.builds(Worth, *[st.integers(0, 9)] * 3, st.integers(1, 9)),
    rows=st.integers(0, 9), num_tokens=st.integers(0, 40),
)  # fmt: skip
@example(Worth(2, 30, 5, 2), 3, 11)  # 44 bytes are saved, 45 are wanted
@example(Worth(2, 30, 5, 2), 3, 12)
@example(Worth(2, 40, 4, 3), 2, 16)  # as many bytes as are wanted, by as many rows
@example(Worth(3, 40, 4, 3), 2, 16)
def test_a_run_is_worth_it_from_so_many_rows_and_so_many_bytes_on(worth, rows, num_tokens):
    bytes_read_once = num_tokens * worth.token_bytes
    saved = sum([bytes_read_once] * rows) - bytes_read_once
    wanted = worth.num_bytes + sum([worth.bytes_a_row] * rows)
    assert worth.is_reached(rows, num_tokens) == (rows >= worth.rows and not saved < wanted)


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
