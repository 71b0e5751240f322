"""The pool by example: seven blocks, one token a block, ids by hand."""

import numpy as np
import pytest

import kvcore
from tests.kvcore.pools import ids, published, refused, token
from tests.kvcore.views import pool_view

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


# Take.


def test_more_than_there_is_cannot_be_taken(pool):
    pool.release(published(pool, 1, 2))
    held = pool.take(1)
    refused(pool, kvcore.OutOfBlocksError, "needed 7.* 6 available", lambda: pool.take(7))
    refused(pool, kvcore.InvalidArgumentError, "num_blocks.*-1", lambda: pool.take(-1))
    assert ids(pool.take(6)) == [4, 5, 6, 7, 1, 2]
    refused(pool, kvcore.OutOfBlocksError, "needed 1.* 0 available", lambda: pool.take(1))
    assert ids(held) == [3]


# Hold.


def test_what_is_held_can_be_kept_with_the_same_call(pool):
    (block,) = published(pool, 1)
    pool.release([block])
    pool.hold([block], [(block, ((3, 9),))])
    assert pool.idle_blocks.kept == {1: ((3, 9),)}


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


# Release.


def test_a_block_that_is_named_more_often_than_it_is_held_frees_nothing(pool):
    one, two = pool.take(2)
    pool.hold([two])
    refused(pool, kvcore.DoubleFreeError, "block 1 ", lambda: pool.release([two, one, two, one]))
    refused(pool, kvcore.DoubleFreeError, "block 7 ", lambda: pool.release([pool.blocks[7]]))
    assert (one.ref_count, two.ref_count) == (1, 2)
    pool.release([two, one, two])
    assert ids(pool.free_blocks())[:2] == [2, 1]


def test_a_release_behind_a_shared_block_is_refused_as_a_whole(pool):
    """The blocks before it are counted in a loop of their own."""
    alone, shared, last = pool.take(3)
    stranger = kvcore.BlockPool(8, 1).take(1)[0]
    pool.hold([shared])
    for more, error in [
        ([stranger], kvcore.ForeignBlockError),
        ([pool.blocks[7]], kvcore.DoubleFreeError),
        ([shared, shared], kvcore.DoubleFreeError),
        ([last, alone], kvcore.DoubleFreeError),
    ]:
        blocks = [alone, shared, *more]
        refused(pool, error, "block ", lambda blocks=blocks: pool.release(blocks))
        if error is kvcore.DoubleFreeError:  # `give_back` trusts its caller that blocks are its own
            refused(pool, error, "block ", lambda blocks=blocks: pool.give_back(blocks))
            refused(pool, error, "block ", lambda blocks=blocks: pool.give_back(blocks[::-1]))
    pool.release([alone, shared, last])
    assert ids(pool.free_blocks()) == [3, 1, 4, 5, 6, 7]


def test_blocks_of_all_kinds_are_given_back_in_any_order(pool):
    """With and without content, with and without another holder."""
    one, two = published(pool, 1, 2)
    three, four, five = pool.take(3)
    pool.hold([two])
    pool.hold([four])
    pool.give_back([one, two, three, four, five])
    assert (pool.num_used_blocks, two.ref_count, four.ref_count) == (2, 1, 1)
    assert ids(pool.free_blocks()) == [5, 3, 6, 7, 1]
    pool.give_back([two, four])
    assert ids(pool.free_blocks()) == [4, 5, 3, 6, 7, 1, 2]


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


class Full(list):
    """A list that finds no memory to grow."""

    def __iadd__(self, more):
        raise MemoryError


@pytest.mark.source_build  # compiled code lets a list grow without asking its class
@pytest.mark.parametrize("call", ["release", "tick"])
def test_a_release_that_finds_no_memory_frees_nothing(pool, call):
    plain = pool.take(2)
    pool.empty_blocks = Full(pool.empty_blocks)
    before = pool_view(pool)
    with pytest.raises(MemoryError):
        getattr(pool, call)(*([1, plain] if call == "tick" else [plain]))
    assert (pool_view(pool), pool.step) == (before, 0)


# Forget, keep, time.


def test_a_forgotten_block_is_reused_first_if_it_is_free_and_stays_held_if_it_is_not(pool):
    free, held, bystander = published(pool, 1)[0], published(pool, 2)[0], published(pool, 3)[0]
    pool.release([bystander, free])
    pool.forget([free, held])
    assert ids(pool.free_blocks()) == [1, 4, 5, 6, 7, 3]
    assert (free.node, held.node, held.ref_count) == (None, None, 1)
    assert free.next_free is None
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
    assert (pool.idle_blocks.kept, pool.idle_blocks.num_shelved, pool.num_free_blocks) == ({}, 0, 6)
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
    pool.tick(4)
    assert (pool.step, ids(pool.idle_blocks.shelved())) == (4, [1])
    pool.tick(1, [leased, empty])
    assert (pool.step, ids(pool.idle_blocks.shelved())) == (5, [])
    assert ids(pool.free_blocks()) == [3, 4, 5, 6, 7, 1, 2]
    refused(pool, kvcore.DoubleFreeError, "block 1 ", lambda: pool.tick(1, [kept]))
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
    order = [2, 3, 4, 5, 6, 7] if canonical else [2, 4, 3, 5, 6, 7]
    assert ids(pool.free_blocks()) == order
    assert (held.ref_count, held.node) == (1, None)
    for block in pool.blocks:
        assert (block.node, block.prev_copy, block.next_copy) == (None, None, None)
    assert (pool.num_cached_blocks, pool.num_free_blocks) == (0, 6)
    assert (pool.idle_blocks.kept, pool.idle_blocks.num_shelved, pool.idle_blocks.queue.length) == (
        {},
        0,
        0,
    )
    assert list(pool.trees[0].roots()) == []
    for block in pool.blocks[1:]:
        assert (block.prev_free, block.next_free) == (None, None)
    assert log.take() == (kvcore.AllCleared(4),)
    assert pool.clear() == 0
    assert ids(pool.take(6)) == order


# Change hands.


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


# Layer groups whose blocks have other sizes.


def lets_go(pool, blocks):
    pool.release(blocks)


def is_cleared(pool, blocks):
    pool.release(blocks)
    assert pool.clear() == 2


def is_forgotten(pool, blocks):
    pool.release(blocks)
    pool.forget(blocks)


def is_forgotten_at_once(pool, blocks):
    pool.forget(blocks, blocks)


@pytest.mark.parametrize("end", [lets_go, is_cleared, is_forgotten, is_forgotten_at_once])
def test_a_block_that_is_taken_again_counts_as_one_of_the_first_group(end):
    pool = kvcore.BlockPool(3, 1, 2)
    blocks = pool.take(2)
    contents = [token(1) + token(2), token(3) + token(4)]
    pool.publish(blocks, b"n", None, contents, 1)
    assert pool.num_used_slots == 4
    end(pool, blocks)
    assert pool.num_used_slots == 0
    for count in (1, 2):
        (block,) = pool.take(1)
        assert (block.group, pool.num_used_slots) == (0, count)
    pool.assign(pool.blocks[1:], 1)
    assert pool.num_used_slots == 4
