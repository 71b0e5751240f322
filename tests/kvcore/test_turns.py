"""Chats in turns hit while what their hits need fits into the pool, over published layouts."""

import pytest

import kvcore
from tests.bench.turns import BAR, LAYOUTS, TRAFFIC, Layout, Traffic, hit_shares, needed_blocks

CHATS = [case for case in TRAFFIC if "reasoning" not in case and "again" not in case]


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("case", CHATS)
def test_chats_hit_while_what_they_need_fills_nine_tenths_of_the_pool(case, name):
    (share,) = hit_shares(LAYOUTS[name], TRAFFIC[case], (0.9,)).values()
    assert share >= BAR


@pytest.mark.parametrize("name", ["Gemma 3 1B", "gpt-oss-20b"])
@pytest.mark.parametrize("case", [case for case in TRAFFIC if case not in CHATS])
def test_prompts_that_leave_answers_out_hit_while_their_ends_fit(case, name):
    (share,) = hit_shares(LAYOUTS[name], TRAFFIC[case], (0.8,)).values()
    assert share >= BAR


def test_what_hits_need_is_the_whole_text_and_the_windows_at_its_ends():
    layout = Layout(
        (kvcore.FullAttention(), kvcore.SlidingWindow(9), kvcore.ChunkedLocal(12)), 4, 21, 2
    )
    # Texts of 21 + 67 tokens and, in the last of four turns, 3 answers and 3 questions more.
    last = 21 + 3 * (67 + 59) + 67
    assert (last // 4, last // 12 * 12) == (116, 456)
    traffic = Traffic(layout)
    assert needed_blocks(layout, traffic) == 2 * (116 + 2 + (464 - 456) // 4)
