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
    usual = {"release", "_let_go", "_uncount", "__init__", "last_event", "_let_leave"}
    assert called(pool.release, pool.take(3))[1] == usual | {"_count_emptied"}
    way = called(pool.release, published(pool, 1, 2)[::-1])[1]
    assert way == usual | {"_put_back", "push_run"}


@pytest.mark.parametrize("num_others", [0, 2, 3])
def test_what_is_evicted_tail_first_leaves_its_branch_without_a_walk(pool, num_others):
    """Alone below the root it takes the root along; beside two others it leaves a dictionary."""
    for other in range(num_others):
        published(pool, 10 + other)
    pool.release(published(pool, 1, 2, 3)[::-1])
    pool.take(pool.num_free_blocks - 3)
    ways = [called(pool.take, 1)[1] for _ in range(3)]
    usual = {"take", "as_int", "next_blocks", "first", "hand_out"}
    usual |= {"_evict", "cut_front", "evict"}
    assert ways[:2] == [usual, usual]
    assert ways[2] - usual == (set() if num_others else {"detach", "_prune"})
    assert pool.num_evicted_blocks == 3


LAYOUTS = {
    "full": None,
    "and a window": [kvcore.FullAttention(), kvcore.SlidingWindow(40)],
    "and two, uneven": [
        kvcore.FullAttention(),
        kvcore.SlidingWindow(40, 8),
        kvcore.ChunkedLocal(48, 12),
    ],
}


def test_a_request_of_one_layer_group_goes_no_way_that_several_need():
    kv = kvcore.KVCacheManager(32, 4)
    tokens = kvcore.pack(range(10))
    seq = kv.open(tokens)
    kv.reserve(seq, 10)
    again = {"_check_open", "check_length", "_grow", "find_limits"}
    for count, ways in [(12, again), (11, set()), (0, set())]:
        assert called(kv.reserve, seq, count) == (((),), ways | {"reserve"})
    assert not called(kv.commit, seq, 10)[1] & {"_move", "_settle", "_set"}
    assert called(kv.reserve, seq, 6)[1] == again | {
        *("reserve", "grow", "_grow_table"),
        *("next_blocks", "hand_out", "_make", "__init__"),
    }
    again, way = called(kv.open, tokens)
    assert again.num_cached_tokens == 8
    assert "match" in way
    assert not way & {"find_prefix", "find_blocks"}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_decode_step_counts_and_does_no_more_where_no_block_is_full(layout):
    kv = kvcore.KVCacheManager(32, 4, groups=LAYOUTS[layout])
    seqs = [kv.open([number]) for number in range(3)]
    for seq in seqs:
        kv.reserve(seq, 1)
    kv.decode_step(seqs, [1, 2, 3])
    ways = [called(kv.decode_step, seqs, [1, 2, 3])[1] for _ in range(4)]
    usual = {"decode_step", "_checked_step", "pack"}
    assert [way == usual for way in ways] == [True, True, False, True]
    assert ("_decode_plain" if layout == "full" else "_move") in ways[2]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_chunk_that_fills_no_block_is_counted_from_the_second_on(layout):
    kv = kvcore.KVCacheManager(64, 4, groups=LAYOUTS[layout])
    seq = kv.open([1, 2, 3])
    kv.reserve(seq, 3)
    ways = [called(kv.commit, seq, 1)[1] for _ in range(3)]
    assert [way == {"commit"} for way in ways] == [False, True, True]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_verb_only_counts_between_changes(layout):
    """As each request's own verbs, as a step of all, and as a step ahead of what is told."""
    kv = kvcore.KVCacheManager(256, 4, groups=LAYOUTS[layout])
    seqs = [kv.open([number]) for number in range(3)]
    for seq in seqs:
        kv.reserve(seq, 1)

    def one_by_one():
        for seq in seqs:
            kv.commit(seq, 1)
            kv.append(seq, 5)
            kv.reserve(seq, 1)

    def ahead():
        kv.step(seqs, [1, 1, 1], None)
        kv.resolve_step(seqs, [1, 2, 3])

    def two_calls():
        kv.commit_step(seqs, [1, 1, 1])
        for seq in seqs:
            kv.append(seq, 5)
        kv.reserve_step(seqs, [1, 1, 1])

    shared = {"as_counts", "check_lengths", "check_sum", "_checked_step", "pack"}
    for call, usual in [
        (one_by_one, {"commit", "append", "reserve"}),
        (lambda: kv.step(seqs, [1, 1, 1], [1, 2, 3]), {"step", *shared}),
        (ahead, {"step", "resolve_step", "check_expected", *shared}),
        (two_calls, {"commit_step", "append", "reserve_step", "as_counts", "_checked_step"}),
    ]:
        ways = [called(call)[1] for _ in range(12)]
        assert sum(way == usual for way in ways) >= 5, ways
