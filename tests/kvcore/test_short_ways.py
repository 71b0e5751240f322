"""What nearly every call is: which functions of kvcore it goes through, counted and not timed.

Beside each short way there is a long one that does the same for every case, so a short way that is
never taken breaks nothing, and no clock on a busy machine would tell. These tests do.
"""

import sys
from pathlib import Path

import pytest

import kvcore
from tests.kvcore.pools import published

pytestmark = pytest.mark.source_build  # compiled functions call each other unseen

HOME = str(Path(kvcore.__file__).parent)


def called(function, *args):
    """What a call returns, and the names of kvcore's functions that it goes through."""
    names = set()

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(HOME):
            names.add(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        result = function(*args)
    finally:
        sys.setprofile(None)
    return result, {name for name in names if not name.startswith("<")}


def test_one_block_is_one_call(pool):
    pool.release(pool.take(3))
    taken, way = called(pool.take, 1)
    assert way == {"take"}
    assert called(pool.release, taken)[1] == {"release"}


def test_blocks_with_one_holder_are_let_go_in_one_loop(pool):
    assert called(pool.release, pool.take(3))[1] == {"release", "_let_go", "_count_emptied"}
    way = called(pool.release, published(pool, 1, 2)[::-1])[1]
    assert way == {"release", "_let_go", "_put_back", "push_run"}


@pytest.mark.parametrize("num_others", [0, 2, 3])
def test_what_is_evicted_tail_first_leaves_its_branch_without_a_walk(pool, num_others):
    """Alone below the root it takes the root along; beside two others it leaves a dictionary."""
    for other in range(num_others):
        published(pool, 10 + other)
    pool.release(published(pool, 1, 2, 3)[::-1])
    pool.take(pool.num_free_blocks - 3)
    ways = [called(pool.take, 1)[1] for _ in range(3)]
    usual = {"take", "as_int", "next_blocks", "first", "hand_out", "_count_used"}
    usual |= {"_evict", "_unqueue_front", "cut_front", "evict"}
    assert ways[:2] == [usual, usual]
    assert ways[2] - usual == (set() if num_others else {"detach", "_prune", "_set_aside", "clear"})
    assert pool.num_evicted_blocks == 3


CHECKS = {"as_int", "_room_wanted", "_check_open", "_check_length"}


def test_a_request_of_one_layer_group_goes_no_way_that_several_need():
    kv = kvcore.KVCacheManager(32, 4)
    tokens = kvcore.pack(range(10))
    seq = kv.open(tokens)
    kv.reserve(seq, 10)
    for count in (12, 11, 0):
        assert called(kv.reserve, seq, count) == (((),), CHECKS | {"reserve"})
    assert "advance_all" not in called(kv.commit, seq, 10)[1]
    assert called(kv.reserve, seq, 6)[1] == CHECKS | {
        *("reserve", "grow", "next_blocks", "hand_out", "_make", "__init__", "_count_used")
    }
    again, way = called(kv.open, tokens)
    assert again.num_cached_tokens == 8
    assert "match" in way
    assert not way & {"find_prefix", "find_blocks"}


def test_a_decode_step_counts_and_does_no_more_where_no_block_is_full():
    kv = kvcore.KVCacheManager(32, 4)
    seqs = [kv.open([number]) for number in range(3)]
    for seq in seqs:
        kv.reserve(seq, 1)
    kv.decode_step(seqs, [1, 2, 3])
    ways = [called(kv.decode_step, seqs, [1, 2, 3])[1] for _ in range(4)]
    usual = {"decode_step", "_checked_step", "pack"}
    assert [way == usual for way in ways] == [True, True, False, True]
    assert "advance_decodes" in ways[2]
    assert not ways[2] & {"advance_all", "_fill_groups", "committable"}
