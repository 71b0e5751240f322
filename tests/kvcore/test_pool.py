"""The pool by example: seven blocks, one token a block, ids by hand."""

import itertools
import random
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import kvcore
import kvcore.invariants
from tests.kvcore.views import pool_view


def token(number):
    return kvcore.pack([number]).tobytes()


@pytest.fixture
def pool():
    return kvcore.BlockPool(8, 1)


def ids(blocks):
    return [block.block_id for block in blocks]


def published(pool, *tokens, namespace=b"n"):
    """Take a block for each token, one after the other in a prefix."""
    blocks = pool.take(len(tokens))
    pool.publish(blocks, namespace, None, [token(number) for number in tokens])
    return blocks


def refused(pool, error, message, call):
    before = pool_view(pool)
    with pytest.raises(error, match=message):
        call()
    assert pool_view(pool) == before


# Sizes and counters.


def test_a_new_pool_has_every_block_but_the_null_block_free(pool):
    assert ids(pool.blocks) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert ids(pool.free_blocks()) == [1, 2, 3, 4, 5, 6, 7]
    assert (pool.num_usable_blocks, pool.num_free_blocks, pool.num_used_blocks) == (7, 7, 0)
    assert (pool.peak_used_blocks, pool.num_allocated_blocks, pool.num_evicted_blocks) == (0, 0, 0)
    assert (pool.num_cached_blocks, pool.step, pool.last_event) == (0, 0, 0)
    assert pool.block_sizes == (1,)
    assert pool.lifetimes is None


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((1, 1), "num_blocks: wanted 2 to 2147483647, got 1"),
        ((2**31, 1), f"got {2**31}"),
        ((2, 0), "block_size: wanted 1 to 1048576, got 0"),
        ((2, 4, 2**20 + 1), f"block_size.*got {2**20 + 1}"),
    ],
)
def test_a_size_out_of_range_is_named(sizes, message):
    with pytest.raises(kvcore.InvalidArgumentError, match=message):
        kvcore.BlockPool(*sizes)


def test_the_smallest_pool_and_the_largest_block_are_allowed():
    pool = kvcore.BlockPool(2, 1, 2**20)
    assert (pool.num_usable_blocks, pool.block_sizes) == (1, (1, 2**20))


def test_counters_count_what_was_taken_evicted_and_held_at_once(pool):
    pool.release(published(pool, 1, 2, 3))
    pool.take(5)
    assert (pool.num_allocated_blocks, pool.num_evicted_blocks) == (8, 1)
    assert (pool.num_used_blocks, pool.num_free_blocks, pool.peak_used_blocks) == (5, 2, 5)
    assert pool.num_cached_blocks == 2
    pool.release(pool.blocks[4:6])
    assert (pool.num_used_blocks, pool.peak_used_blocks) == (3, 5)
    hits = pool.match(b"n", token(1) + token(2), 2)
    assert ids(hits) == []  # block 1 stood first, and is gone
    pool.hold([pool.blocks[2]])
    assert (pool.num_used_blocks, pool.peak_used_blocks) == (4, 5)


def test_reviving_blocks_counts_for_the_peak(pool):
    blocks = published(pool, 1, 2)
    pool.release(blocks)
    pool.take(2)
    assert pool.peak_used_blocks == 2
    pool.hold(blocks)
    assert pool.peak_used_blocks == 4


# Take.


def test_taken_blocks_are_held_once_and_nowhere_else(pool):
    taken = pool.take(3)
    assert ids(taken) == [1, 2, 3]
    assert [block.ref_count for block in taken] == [1, 1, 1]
    assert [block.next_free for block in taken] == [None] * 3
    assert ids(pool.free_blocks()) == [4, 5, 6, 7]
    assert pool.take(0) == []


def test_what_is_taken_next_is_told_and_stays_where_it_is(pool):
    pool.release(published(pool, 1, 2, 3)[::-1])
    before = pool_view(pool)
    for count in range(8):
        told = pool.next_blocks(count)
        assert ids(told) == [4, 5, 6, 7, 3, 2, 1][:count]
    assert pool_view(pool) == before
    refused(pool, kvcore.OutOfBlocksError, "needed 8.* 7 available", lambda: pool.next_blocks(8))


def test_more_than_there_is_cannot_be_taken(pool):
    pool.release(published(pool, 1, 2))
    held = pool.take(1)
    refused(pool, kvcore.OutOfBlocksError, "needed 7.* 6 available", lambda: pool.take(7))
    refused(pool, kvcore.InvalidArgumentError, "num_blocks.*-1", lambda: pool.take(-1))
    assert ids(pool.take(6)) == [4, 5, 6, 7, 1, 2]
    refused(pool, kvcore.OutOfBlocksError, "needed 1.* 0 available", lambda: pool.take(1))
    assert ids(held) == [3]


def test_empty_blocks_go_before_idle_ones_and_those_before_kept_ones(pool):
    idle, kept, empty = published(pool, 1), published(pool, 2), pool.take(1)
    pool.keep(kept[0], [(1, 10)])
    for blocks in (kept, idle, empty):
        pool.release(blocks)
    assert ids(pool.free_blocks()) == [3, 4, 5, 6, 7, 1, 2]
    assert (pool.num_free_blocks, pool.num_used_blocks) == (7, 0)
    assert ids(pool.take(7)) == [3, 4, 5, 6, 7, 1, 2]
    assert pool.shelf.kept == {}
    assert pool.num_evicted_blocks == 2
    assert pool.num_cached_blocks == 0


# Hold.


def test_holding_a_free_block_takes_it_out_of_the_free_ones(pool):
    first, second = published(pool, 1, 2)
    pool.release([second, first])
    pool.hold([second, second])
    assert (first.ref_count, second.ref_count) == (0, 2)
    assert ids(pool.free_blocks()) == [3, 4, 5, 6, 7, 1]
    assert pool.num_free_blocks == 6


def test_a_kept_block_leaves_its_shelf_when_it_is_held_and_comes_back_to_it(pool):
    (block,) = published(pool, 1)
    pool.keep(block, [(2, 9)])
    pool.release([block])
    assert (pool.shelf.num_free, pool.free_queue.length) == (1, 0)
    pool.hold([block])
    assert (pool.shelf.num_free, pool.num_free_blocks) == (0, 6)
    pool.release([block])
    assert (pool.shelf.num_free, pool.num_free_blocks) == (1, 7)


def test_an_idle_block_is_held_also_while_others_are_kept(pool):
    idle, kept = published(pool, 1), published(pool, 2)
    pool.keep(kept[0], [(1, 9)])
    pool.release([*idle, *kept])
    pool.hold(idle)
    assert (pool.free_queue.length, pool.shelf.num_free, pool.num_free_blocks) == (0, 1, 6)


def test_what_is_held_can_be_kept_with_the_same_call(pool):
    (block,) = published(pool, 1)
    pool.release([block])
    pool.hold([block], [(block, ((3, 9),))])
    assert pool.shelf.kept == {1: ((3, 9),)}


def test_what_cannot_be_held_is_named(pool):
    (block,) = published(pool, 1)
    empty, stranger = pool.blocks[5], kvcore.BlockPool(8, 1).blocks[1]
    for wrong, error in (
        (empty, kvcore.BlockStateError),
        (stranger, kvcore.ForeignBlockError),
        (pool.blocks[0], kvcore.ForeignBlockError),
        (kvcore.Block(-1), kvcore.ForeignBlockError),
        (kvcore.Block(8), kvcore.ForeignBlockError),
        (kvcore.Block(99), kvcore.ForeignBlockError),
    ):
        message = rf"Block\({wrong.block_id},"
        refused(pool, error, message, lambda wrong=wrong: pool.hold([block, wrong]))
        for call in (pool.release, pool.forget):
            if error is kvcore.ForeignBlockError:
                refused(pool, error, message, lambda c=call, w=wrong: c([block, w]))


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
    """That the trees are sound, whoever holds what."""
    kvcore.invariants.index(SimpleNamespace(pool=pool, groups=[kvcore.FullAttention(1)]))


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(1, 2)), max_size=6))
@example([(True, False, 1), (False, False, 1), (True, True, 1)])
@pytest.mark.parametrize("verb", ["forget", "advance"])
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
        first = 3 if verb == "advance" else wrong
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
def test_what_a_table_drops_and_revives_is_what_others_release_and_hold(kinds, order):
    pools = [kvcore.BlockPool(16, 1) for _ in range(2)]
    places = list(range(len(kinds)))
    order.shuffle(places)
    for pool, let_go, take_back in zip(
        pools,
        (kvcore.BlockPool.drop, kvcore.BlockPool.release),
        (kvcore.BlockPool.revive, kvcore.BlockPool.hold),
        strict=True,
    ):
        blocks = pool.take(len(kinds))
        for index, (is_published, count) in enumerate(kinds):
            if is_published:
                pool.publish([blocks[index]], b"n", None, [token(index)])
            for _ in range(count - 1):
                pool.hold([blocks[index]])
        let_go(pool, [blocks[place] for place in places])
        left = [block for block in blocks if block.ref_count or block.node]
        take_back(pool, left)
    assert pool_view(pools[0]) == pool_view(pools[1])


@pytest.mark.parametrize("block_id", [-1, 0, 1, 8, 99])
@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_block_that_others_hold_is_not_ours_to_release(pool, block_id, count):
    one, other = pool.take(2)
    stranger = kvcore.Block(block_id)
    stranger.ref_count = count
    message = rf"Block\({block_id},"
    for named in ([stranger], [one, stranger], [one, other, stranger, one]):
        refused(pool, kvcore.ForeignBlockError, message, lambda n=named: pool.release(n))
        assert stranger.ref_count == count


def test_what_is_no_block_is_not_released_and_neither_is_what_stands_before_it(pool):
    one, other = pool.take(2)
    for named in (["x"], [one, "x"], [one, other, "x"]):
        refused(pool, (AttributeError, TypeError), "str", lambda n=named: pool.release(n))


# Release.


def test_the_last_holder_frees_a_block_and_no_other_does(pool):
    (block,) = pool.take(1)
    pool.hold([block])
    pool.release([block])
    assert (block.ref_count, pool.empty_blocks) == (1, [])
    pool.release([block])
    assert (block.ref_count, pool.empty_blocks) == (0, [block])
    assert ids(pool.free_blocks()) == [1, 2, 3, 4, 5, 6, 7]


def test_a_block_that_is_named_more_often_than_it_is_held_frees_nothing(pool):
    one, two = pool.take(2)
    pool.hold([two])
    refused(pool, kvcore.DoubleFreeError, "block 1 ", lambda: pool.release([two, one, two, one]))
    refused(pool, kvcore.DoubleFreeError, "block 7 ", lambda: pool.release([pool.blocks[7]]))
    assert (one.ref_count, two.ref_count) == (1, 2)
    pool.release([two, one, two])
    assert ids(pool.free_blocks())[:2] == [2, 1]


def test_a_release_of_content_and_of_none_goes_each_its_way(pool):
    blocks = [*published(pool, 1), *pool.take(1), *published(pool, 2), *pool.take(1)]
    pool.release(blocks)
    assert ids(pool.free_blocks()) == [4, 2, 5, 6, 7, 1, 3]


def test_one_block_is_taken_and_released_as_many_are(pool):
    (one,) = published(pool, 1)
    pool.release({one: 1}.keys())
    (two,) = pool.take(1)
    pool.release({two: 1}.keys())
    assert pool.peak_used_blocks == 1
    pool.hold([one])
    refused(pool, kvcore.InvalidArgumentError, "got the bool True", lambda: pool.take(True))
    assert pool.take(np.int64(1)) == [two]
    assert (pool.peak_used_blocks, pool.num_free_blocks) == (2, 5)


def test_the_peak_is_the_most_that_were_ever_held_at_once(pool):
    """Three are held; what came back empty is taken again beside what a hit has revived."""
    (one,) = published(pool, 1)
    blocks = pool.take(2)
    pool.release([one, *blocks])
    pool.hold([one])
    for used in (2, 3):
        pool.take(1)
        assert (pool.num_used_blocks, pool.peak_used_blocks) == (used, 3)
    (other,) = published(pool, 2)
    pool.release([other])
    pool.release(pool.take(1))
    pool.hold([other])
    assert pool.peak_used_blocks == 4
    pool.take(1)
    assert pool.peak_used_blocks == 5


class Full(list):
    """A list that finds no memory to grow."""

    def __iadd__(self, more):
        raise MemoryError


@pytest.mark.source_build  # compiled code lets a list grow without asking its class
@pytest.mark.parametrize("call", ["release", "drop", "advance"])
def test_a_release_that_finds_no_memory_frees_nothing(pool, call):
    plain = pool.take(2)
    pool.empty_blocks = Full(pool.empty_blocks)
    before = pool_view(pool)
    with pytest.raises(MemoryError):
        getattr(pool, call)(*([1, plain] if call == "advance" else [plain]))
    assert (pool_view(pool), pool.step) == (before, 0)


# Publish.


def test_a_run_of_blocks_can_be_hit_as_far_as_it_agrees(pool):
    published(pool, 1, 2, 3)
    for prompt, found in (([1, 2, 3, 4], [1, 2, 3]), ([1, 2, 9], [1, 2]), ([2], [])):
        packed = kvcore.pack(prompt).tobytes()
        assert ids(pool.match(b"n", packed, len(prompt))) == found
        assert pool.match(b"other", packed, len(prompt)) == []
        path = pool.path(b"n", packed, len(prompt), 0)
        assert [block.block_id for block in path] == found


def test_a_run_goes_on_below_its_parent(pool):
    first = published(pool, 1)
    second = pool.take(1)
    pool.publish(second, b"ignored", first[0], [token(2)])
    assert ids(pool.match(b"n", token(1) + token(2), 2)) == [1, 2]


def test_what_cannot_be_published_is_named(pool):
    (done,) = published(pool, 1)
    one, two = pool.take(2)
    free = pool.blocks[7]
    state, argument = kvcore.BlockStateError, kvcore.InvalidArgumentError
    for error, message, blocks, parent, contents in (
        (state, r"held, unpublished.*Block\(7,", [free], None, [token(1)]),
        (state, r"held, unpublished.*Block\(1,", [done], None, [token(1)]),
        (state, "each block once", [one, two, one], None, [token(1)] * 3),
        (state, "each block once", [one, one], None, [token(1)] * 2),
        (state, r"published parent.*Block\(3,", [one], two, [token(1)]),
        (argument, "each of 2 blocks, got 1", [one, two], None, [token(1)]),
        (argument, "each of 1 blocks, got 2", [one], None, [token(1)] * 2),
        (argument, "wanted 4 bytes, got 3", [one, two], None, [token(1), token(2)[:3]]),
        (kvcore.ForeignBlockError, r"Block\(0,", [pool.blocks[0]], None, [token(1)]),
        (kvcore.ForeignBlockError, r"Block\(0,", [one], pool.blocks[0], [token(1)]),
    ):
        refused(
            pool,
            error,
            message,
            lambda b=blocks, p=parent, c=contents: pool.publish(b, b"n", p, c),
        )


def test_a_parent_of_another_group_is_refused():
    pool = kvcore.BlockPool(8, 1, 2)
    one, two, three = pool.take(3)
    pool.publish([one], b"n", None, [token(1)])
    refused(
        pool,
        kvcore.BlockStateError,
        r"parent.*Block\(1,",
        lambda: pool.publish([two], b"n", one, [token(1) * 2], 1),
    )
    refused(
        pool,
        kvcore.InvalidArgumentError,
        "wanted 8 bytes, got 4",
        lambda: pool.publish([two], b"n", None, [token(1)], 1),
    )
    pool.publish([two], b"n", None, [token(1) + token(2)], 1)
    refused(
        pool,
        kvcore.BlockStateError,
        r"parent.*Block\(2,",
        lambda: pool.publish([three], b"n", two, [token(3)], 0),
    )
    pool.publish([three], b"n", two, [token(3) + token(4)], 1)
    assert (one.group, two.group, three.group) == (0, 1, 1)
    assert pool.match(b"n", token(1), 1) == [one]  # the first group, if none is named
    assert ids(pool.match(b"n", kvcore.pack([1, 2, 3, 4]).tobytes(), 2, 1)) == [2, 3]


def test_a_long_run_is_published_and_found_whole():
    pool = kvcore.BlockPool(400, 1)
    blocks = published(pool, *range(300))
    assert pool.match(b"n", kvcore.pack(range(300)).tobytes(), 300) == blocks


def test_content_may_be_longer_than_its_tokens(pool):
    (block,) = pool.take(1)
    pool.publish([block], b"n", None, [token(1) + b"item"])
    assert pool.match(b"n", token(1), 1) == []
    assert pool.match(b"n", token(1), 1, 0, [b"item"]) == [block]
    assert pool.path(b"n", token(1), 1, 0, [b"item"]) == [block]


def test_publishing_is_undone_without_a_trace():
    log = kvcore.EventLog([1], "xxh3-128")
    pool = kvcore.BlockPool(8, 1, log=log)
    first = published(pool, 1)
    before, mark = pool_view(pool), pool.last_event
    assert mark == 1
    more = pool.take(2)
    pool.publish(more, b"n", first[0], [token(2), token(3)])
    pool.keep(more[0], [(1, 9)])
    assert pool.last_event == 3
    pool.unpublish([*more, pool.blocks[7]], mark)
    pool.release(more[::-1])
    after = pool_view(pool)
    assert pool.last_event == 1
    assert [event.number for event in log.take()] == [1]
    for counter in ("allocated", "peak"):
        del before[counter], after[counter]
    assert after == before


# Forget, keep, time.


def test_a_forgotten_block_is_reused_first_if_it_is_free_and_stays_held_if_it_is_not(pool):
    free, held, bystander = published(pool, 1)[0], published(pool, 2)[0], published(pool, 3)[0]
    pool.release([bystander, free])
    pool.forget([free, held])
    assert ids(pool.free_blocks()) == [1, 4, 5, 6, 7, 3]
    assert (free.node, held.node, held.ref_count) == (None, None, 1)
    assert (free.prev_free, free.next_free) == (None, None)
    assert pool.num_cached_blocks == 1
    pool.forget([free, held])  # once more changes nothing
    assert ids(pool.free_blocks()) == [1, 4, 5, 6, 7, 3]


def test_a_block_that_is_forgotten_twice_is_free_once(pool):
    free, held = published(pool, 1)[0], published(pool, 2)[0]
    pool.release([free])
    pool.forget([free, held, free, held])
    assert ids(pool.free_blocks()) == [1, 3, 4, 5, 6, 7]
    assert (pool.num_free_blocks, pool.num_cached_blocks) == (6, 0)


def test_a_forgotten_block_is_kept_no_longer(pool):
    on_shelf, held = published(pool, 1)[0], published(pool, 2)[0]
    for block in (on_shelf, held):
        pool.keep(block, [(1, 9)])
    pool.release([on_shelf])
    pool.forget([on_shelf, held])
    assert (pool.shelf.kept, pool.shelf.num_free, pool.num_free_blocks) == ({}, 0, 6)
    pool.release([held])
    assert ids(pool.free_blocks()) == [2, 1, 3, 4, 5, 6, 7]


def test_what_is_forgotten_and_released_at_once_is_empty_and_free(pool):
    lost, other, empty = published(pool, 1)[0], published(pool, 2)[0], pool.take(1)[0]
    pool.forget([lost], [other, lost, empty])
    assert ids(pool.free_blocks()) == [3, 1, 4, 5, 6, 7, 2]
    refused(pool, kvcore.DoubleFreeError, "block 1 ", lambda: pool.forget([other], [lost]))


def test_only_a_held_published_block_is_kept(pool):
    (block,) = published(pool, 1)
    (plain,) = pool.take(1)
    for wrong in (plain, pool.blocks[7]):
        message = rf"held, published.*Block\({wrong.block_id},"
        refused(pool, kvcore.BlockStateError, message, lambda w=wrong: pool.keep(w, [(1, 9)]))
    pool.release([block])
    refused(pool, kvcore.BlockStateError, "held", lambda: pool.keep(block, [(1, 9)]))
    refused(
        pool, kvcore.ForeignBlockError, r"Block\(0,", lambda: pool.keep(pool.blocks[0], [(1, 9)])
    )


def test_time_takes_blocks_from_the_shelf_and_releases_in_one_step(pool):
    kept, leased, empty = published(pool, 1)[0], published(pool, 2)[0], pool.take(1)[0]
    pool.keep(kept, [(1, 5)])
    pool.release([kept])
    pool.advance(4)
    assert (pool.step, ids(pool.shelf)) == (4, [1])
    pool.advance(1, [leased, empty])
    assert (pool.step, ids(pool.shelf)) == (5, [])
    assert ids(pool.free_blocks()) == [3, 4, 5, 6, 7, 1, 2]
    refused(pool, kvcore.DoubleFreeError, "block 1 ", lambda: pool.advance(1, [kept]))
    assert pool.step == 5


# Clear.


@pytest.mark.parametrize("canonical", [False, True])
def test_clearing_forgets_all_content_and_nothing_else(canonical):
    log = kvcore.EventLog([1], "xxh3-128")
    pool = kvcore.BlockPool(8, 1, log=log)
    held, idle, kept = published(pool, 1)[0], published(pool, 2)[0], published(pool, 3)[0]
    pool.keep(kept, [(1, 9)])
    pool.keep(held, [(1, 9)])
    twin = published(pool, 2)
    pool.release([kept, idle, *twin])
    log.take()
    assert pool.clear(canonical_order=canonical) == 4
    order = [2, 3, 4, 5, 6, 7] if canonical else [5, 6, 7, 2, 4, 3]
    assert ids(pool.free_blocks()) == order
    assert (held.ref_count, held.node) == (1, None)
    for block in pool.blocks:
        assert (block.node, block.prev_copy, block.next_copy) == (None, None, None)
    assert (pool.num_cached_blocks, pool.num_free_blocks) == (0, 6)
    assert (pool.shelf.kept, pool.shelf.num_free, pool.free_queue.length) == ({}, 0, 0)
    assert list(pool.trees[0].roots()) == []
    for block in pool.blocks[1:]:
        assert (block.prev_free, block.next_free) == (None, None)
    assert log.take() == (kvcore.AllCleared(4),)
    assert pool.clear() == 0
    assert ids(pool.take(6)) == order


# Events.


def test_a_content_is_removed_with_its_last_copy_however_many_go_at_once():
    log = kvcore.EventLog([1], "xxh3-128")
    pool = kvcore.BlockPool(4, 1, log=log)
    one, other, third = published(pool, 1), published(pool, 1), published(pool, 1)
    (stored,) = log.take()
    pool.release([*one, *other])
    pool.take(2)
    assert log.take() == ()
    pool.release(third)
    pool.take(1)
    (removed,) = log.take()
    assert removed == kvcore.BlockRemoved(2, 0, stored.name)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_copies_that_go_together_are_one_removal(count):
    log = kvcore.EventLog([1], "xxh3-128")
    pool = kvcore.BlockPool(6, 1, log=log)
    for _ in range(count):
        pool.release(published(pool, 1))  # the free ones without content go first
    log.take()
    pool.take(5)
    assert [type(event) for event in log.take()] == [kvcore.BlockRemoved]


def test_forgetting_tells_who_reads_the_events():
    log = kvcore.EventLog([1], "xxh3-128")
    pool = kvcore.BlockPool(5, 1, log=log)
    blocks = published(pool, 1, 2)
    stored = log.take()
    pool.forget(blocks[::-1])
    assert [event.name for event in log.take()] == [stored[1].name, stored[0].name]


def test_lifetimes_are_noted_where_they_begin_and_end(pool):
    pool.lifetimes = kvcore.LifetimeRecorder(8)
    pool.advance(1)
    (block,) = published(pool, 1)
    pool.advance(2)
    pool.release([block])
    pool.advance(4)
    pool.hold([block])
    pool.release([block])
    pool.advance(8)
    pool.take(7)
    stats = pool.lifetimes.stats()
    assert (stats.reuse_gap.count, stats.reuse_gap.total) == (1, 4)
    assert (stats.idle_before_eviction.count, stats.idle_before_eviction.total) == (1, 8)
    assert (stats.lifetime.count, stats.lifetime.total) == (1, 14)


# What trusts its caller.


def test_found_blocks_are_revived_and_dropped_like_held_and_released_ones(pool):
    other = kvcore.BlockPool(8, 1)
    for each, hold, release in (
        (pool, pool.hold, pool.release),
        (other, other.revive, other.drop),
    ):
        blocks = published(each, 1, 2, 3)
        plain = each.take(1)
        each.keep(blocks[2], [(1, 9)])
        each.release(blocks[1:])
        each.lifetimes = kvcore.LifetimeRecorder(8)
        each.advance(2)
        hold([blocks[2], blocks[0], blocks[1]])
        release([blocks[1], blocks[0], plain[0], blocks[2]])
        release([blocks[0]])
    assert pool_view(pool) == pool_view(other)
    assert pool.lifetimes.stats() == other.lifetimes.stats()
    assert other.lifetimes.stats().reuse_gap.count == 2
    assert ids(other.free_blocks()) == [4, 5, 6, 7, 2, 1, 3]


def test_a_block_that_nobody_holds_cannot_be_dropped(pool):
    one, two = pool.take(2)
    pool.release([two])
    refused(pool, kvcore.DoubleFreeError, r"Block\(2,", lambda: pool.drop([one, two]))


def test_blocks_can_change_hands_in_one_step(pool):
    idle, kept, leaving = published(pool, 1)[0], published(pool, 2)[0], published(pool, 3)[0]
    plain, spare, more = pool.take(3)
    pool.keep(kept, [(1, 9)])
    pool.release([idle, kept, more])
    new = pool.next_blocks(3)
    assert ids(new) == [6, 7, 1]
    pool.exchange(new, [leaving, plain, spare])
    assert [block.ref_count for block in new] == [1, 1, 1]
    assert ids(pool.free_blocks()) == [5, 4, 3, 2]
    assert (pool.num_allocated_blocks, pool.num_evicted_blocks) == (9, 1)
    assert pool.peak_used_blocks == 6
    assert pool.match(b"n", token(1), 1) == []
    refused(
        pool,
        kvcore.DoubleFreeError,
        "block 2 ",
        lambda: pool.exchange(pool.next_blocks(1), [kept]),
    )


def test_blocks_that_come_back_in_a_step_are_counted_as_used_until_it_ends():
    """Room is taken before it is given back: 5 are held, 2 more are taken, then 4 come back."""
    pool = kvcore.BlockPool(9, 1)
    leaving = [*published(pool, 1), *pool.take(3)]
    pool.take(1)
    pool.exchange(pool.next_blocks(2), leaving)
    assert pool.peak_used_blocks == 7
    assert pool.num_free_blocks == 5


def test_blocks_are_the_same_whether_they_are_looked_at_before_or_after():
    for looked_at_first in (False, True):
        pool = kvcore.BlockPool(8, 1)
        if looked_at_first:
            assert len(pool.blocks) == 8
        taken = pool.take(3)
        assert [pool.blocks[number] for number in (1, 2, 3)] == taken
        assert len(pool.blocks) == 8
        assert pool.null is pool.blocks[0]
        pool.release(taken[:2])
        assert ids(pool.take(4)) == [2, 1, 4, 5]
        assert pool.num_free_blocks == 2
        assert ids(pool.next_blocks(2)) == ids(pool.free_blocks()) == [6, 7]
