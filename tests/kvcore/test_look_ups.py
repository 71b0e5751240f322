"""A look-up that comes to nothing leaves the order of reuse as it was."""

import pytest

import kvcore

HYBRID = [kvcore.FullAttention(), kvcore.SlidingWindow(20)]


def used(groups=None):
    """Two prompts that are no longer held, the first one older."""
    kv = kvcore.KVCacheManager(24, 4, groups=groups)
    for first in (0, 100):
        seq = kv.open(range(first, first + 9))
        kv.reserve(seq, 9)
        kv.commit(seq, 9)
        kv.close(seq)
    return kv


def order(kv):
    return [block.block_id for block in kv.pool.free_blocks()]


@pytest.mark.parametrize("groups", [None, HYBRID], ids=["full", "hybrid"])
def test_a_request_that_is_opened_and_closed_does_not_make_its_prefix_young(groups):
    kv = used(groups)
    before = order(kv)
    for _ in range(3):
        seq = kv.open(range(9))
        assert seq.num_cached_tokens == 8
        kv.close(seq)
        assert order(kv) == before
    kvcore.check(kv)


def test_a_waiting_request_that_is_tried_again_and_again_does_not_pin_its_prefix():
    kv = used()
    runner = kv.open([7])
    for step in range(kv.num_free_blocks - 2):
        waiting = kv.open(range(60))
        with pytest.raises(kvcore.OutOfBlocksError):
            kv.reserve(waiting, 4 * kv.num_usable_blocks)
        kv.close(waiting)
        kv.reserve_to(runner, 4 * (step + 1))
    assert kv.plan(range(9)).num_cached_tokens == 0  # the older one has gone
    assert kv.plan(range(100, 109)).num_cached_tokens == 8


def test_a_pin_that_comes_to_nothing_leaves_no_trace_either():
    kv = used()
    before = order(kv)
    seq = kv.open(range(9))
    lease = kv.lease(seq)
    kv.close(seq)
    lease.end()
    assert order(kv) == before


@pytest.mark.parametrize("groups", [None, HYBRID], ids=["full", "hybrid"])
@pytest.mark.parametrize("priority", [0, 3])
def test_nor_where_it_stands_in_several_places_and_is_kept(groups, priority):
    kv = kvcore.KVCacheManager(64, 4, groups=groups)
    whole = kv.open(range(21), retain=[kvcore.Retention(0, 9, priority)] if priority else ())
    kv.reserve(whole, 21)
    kv.commit(whole, 21)
    pins = [kv.lease(whole, num_tokens=count) for count in (8, 20, 12)]
    kv.close(whole)
    for pin in pins[1:]:
        between = kv.open(range(100 + pin.lease_id, 120))
        kv.reserve(between, between.num_tokens)
        kv.commit(between, between.num_tokens)
        pin.end()
        kv.close(between)
    pins[0].end()
    before = order(kv)
    for length in (21, 13, 6, 21):
        seq = kv.open(range(length), retain=[kvcore.Retention(0, 9, priority)] if priority else ())
        assert seq.num_cached_tokens == (length - 1) // 4 * 4
        kv.close(seq)
        assert order(kv) == before
        kvcore.check(kv)


def test_a_prefix_that_is_to_be_kept_from_now_on_is_young():
    kv = used()
    kv.close(kv.open(range(9), retain=[kvcore.Retention(0, 4)]))
    assert order(kv)[-4:] == [4, 3, 2, 1]


def test_a_prefix_that_was_used_is_young():
    kv = used()
    seq = kv.open(range(9))
    kv.reserve(seq, 1)
    kv.commit(seq, 1)
    kv.close(seq)
    assert order(kv)[-4:] == [4, 3, 2, 1]


def test_a_prefix_that_another_has_used_meanwhile_is_young():
    kv = used()
    waiting, other = kv.open(range(9)), kv.open(range(100, 109))
    kv.close(other)
    kv.close(waiting)
    assert order(kv)[-4:] == [4, 3, 2, 1]
