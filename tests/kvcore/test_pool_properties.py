"""The pool by what is the same: many at once and one at a time, one call and two, found or not."""

import itertools
import random
from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import kvcore
import kvcore.inspect.invariants
from tests.kvcore.pools import ids, published, token
from tests.kvcore.views import pool_view


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=6))
@example([(3, 2), (1, 1), (4, 0), (0, 5), (2, 2), (0, 1), (1, 0)])
def test_one_at_a_time_is_many_at_once(rounds):
    pools = many, single = [kvcore.BlockPool(32, 1) for _ in range(2)]
    held = ([], [])
    for num_taken, num_released in rounds:
        held[0].extend(many.take(num_taken))
        held[1].extend([single.take(1)[0] for _ in range(num_taken)])
        leaving = [blocks[:num_released] for blocks in held]
        many.release(leaving[0])
        for block in leaving[1]:
            single.release([block])
        for blocks in held:
            del blocks[:num_released]
        assert ids(held[0]) == ids(held[1])
        assert pool_view(many) == pool_view(single)
        assert {block.ref_count for pool in pools for block in pool.blocks} <= {0, 1}


def check_trees(pool):
    """Check that the trees are sound, whatever is held."""
    kvcore.inspect.invariants.index(SimpleNamespace(pool=pool, groups=[kvcore.FullAttention(1)]))


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(1, 2)), max_size=6))
@example([(True, False, 1), (False, False, 1), (True, True, 1)])
@pytest.mark.parametrize("verb", ["forget", "tick"])
def test_what_is_released_along_is_what_is_released_after(verb, kinds):
    views = []
    for is_one_call in (False, True):
        pool = kvcore.BlockPool(14, 1)
        leaving = pool.take(len(kinds))
        kept = published(pool, 20)
        pool.keep(kept[0], [(1, 2)])
        pool.release(kept)
        wrong = published(pool, 21)
        for index, (is_published, is_wrong, count) in enumerate(kinds):
            if is_published:
                pool.publish([leaving[index]], b"n", None, [token(index)])
            if is_published and is_wrong:
                wrong.append(leaving[index])
            if count > 1:
                pool.hold([leaving[index]])
        first = 3 if verb == "tick" else wrong
        if is_one_call:
            getattr(pool, verb)(first, leaving)
        else:
            getattr(pool, verb)(first)
            pool.release(leaving)
        views.append(pool_view(pool))
    assert views[0] == views[1]


def publish_path(pool, copies, path, *, shares):
    """Publish what a request has computed; it shares the blocks that are there, or has its own."""
    parent = None
    for end in range(1, len(path) + 1):
        known = copies.setdefault(tuple(path[:end]), [])
        if not (shares and known):
            (block,) = pool.take(1)
            pool.publish([block], b"n", parent, [token(path[end - 1])])
            known.append(block)
        parent = known[0 if shares else -1]


BRANCH = [[3, 1, 1], [3, 1, 2], [3, 1, 3], [3, 1, 0]]


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), min_size=1, max_size=6),
    st.booleans(),
    st.sampled_from(["nothing", "something else", "the same"]),
    st.floats(0, 1),
    st.randoms(),
)
@example(BRANCH, True, "nothing", 1, random.Random(34))
@example(BRANCH, True, "nothing", 1, random.Random(4))
@example(BRANCH, False, "nothing", 1, random.Random(1))
@example([[1, 2], [1, 2]], False, "the same", 0.8, random.Random(5))
@example([[1], [2], [3], [0]], False, "something else", 1, random.Random(2))
def test_what_is_evicted_leaves_the_rest_to_be_found(paths, shares, holds_next, share, order):
    pool = kvcore.BlockPool(24, 1)
    copies = {}  # of each prefix, oldest first
    for path in paths:
        publish_path(pool, copies, path, shares=shares)
    prefixes = {block: prefix for prefix, blocks in copies.items() for block in blocks}
    leaving = [block for block in prefixes if order.random() < share]
    order.shuffle(leaving)
    for _ in range(2 if holds_next == "the same" else 1):
        for block in leaving:
            pool.release([block])
        pool.take(pool.num_free_blocks - len(leaving))
        for number, block in enumerate(leaving):
            assert pool.take(1) == [block]
            prefix = prefixes[block]
            copies[prefix].remove(block)
            if holds_next == "something else":
                pool.publish([block], b"another", None, [token(number)])
            elif holds_next == "the same" and (len(prefix) == 1 or copies[prefix[:-1]]):
                parent = copies[prefix[:-1]][0] if len(prefix) > 1 else None
                pool.publish([block], b"n", parent, [token(prefix[-1])])
                copies[prefix].append(block)
            check_trees(pool)
            for path in paths if order.random() < 0.7 else ():  # to look is to change a little
                firsts = [copies[tuple(path[: n + 1])][:1] for n in range(len(path))]
                wanted = [block for (block,) in itertools.takewhile(bool, firsts)]
                assert pool.match(b"n", b"".join(map(token, path)), len(path)) == wanted
        leaving = [block for block in leaving if block.node is not None]


@given(
    st.lists(st.tuples(st.booleans(), st.integers(1, 2)), max_size=5),
    st.integers(0, 5),
    st.integers(0, 3),
    st.integers(0, 7),
)
@example([(False, 1)], 3, 0, 1)
@example([(False, 1)], 3, 0, 0)
@example([(False, 1)], 2, 1, 3)
@example([(False, 1), (True, 1)], 2, 0, 1)
@example([(False, 1), (True, 2)], 0, 3, 2)
def test_to_exchange_is_to_take_and_then_to_release(kinds, num_empty, num_idle, num_new):
    views = []
    for is_one_call in (False, True):
        pool = kvcore.BlockPool(14, 1)
        leaving = pool.take(len(kinds))
        for index, (is_published, count) in enumerate(kinds):
            if is_published:
                pool.publish([leaving[index]], b"n", None, [token(index)])
            if count > 1:
                pool.hold([leaving[index]])
        pool.release(published(pool, *range(10, 10 + num_idle)))
        pool.release(pool.take(num_empty))
        num_new = min(num_new, pool.num_free_blocks)
        if is_one_call:
            pool.exchange(pool.next_blocks(num_new), leaving)
        else:
            pool.take(num_new)
            pool.release(leaving)
        views.append(pool_view(pool))
    assert views[0] == views[1]


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 3)), max_size=12), st.randoms())
@example([(True, 1)] * 3 + [(False, 1)] * 2 + [(True, 2)], random.Random(1))
def test_what_a_table_revives_is_what_others_hold(kinds, order):
    pools = [kvcore.BlockPool(16, 1) for _ in range(2)]
    places = list(range(len(kinds)))
    order.shuffle(places)
    ways = (kvcore.BlockPool.revive, kvcore.BlockPool.hold)
    for pool, take_back in zip(pools, ways, strict=True):
        blocks = pool.take(len(kinds))
        for index, (is_published, count) in enumerate(kinds):
            if is_published:
                pool.publish([blocks[index]], b"n", None, [token(index)])
            for _ in range(count - 1):
                pool.hold([blocks[index]])
        pool.release([blocks[place] for place in places])
        left = [block for block in blocks if block.ref_count or block.node]
        take_back(pool, left)
    assert pool_view(pools[0]) == pool_view(pools[1])
