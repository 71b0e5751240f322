"""Which block is reused next, how many are held, and what trusts its caller."""

import itertools

import pytest

import kvcore
from kvcore.block import Block
from kvcore.eviction.idle_blocks import IdleBlocks
from tests.kvcore.pools import ids, published, refused
from tests.kvcore.views import pool_view


def test_what_is_taken_next_is_told_and_stays_where_it_is(pool):
    pool.release(published(pool, 1, 2, 3)[::-1])
    before = pool_view(pool)
    for count in range(8):
        told = pool.next_blocks(count)
        assert ids(told) == [4, 5, 6, 7, 3, 2, 1][:count]
    assert pool_view(pool) == before
    refused(pool, kvcore.OutOfBlocksError, "needed 8.* 7 available", lambda: pool.next_blocks(8))


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


def waiting(count):
    """As many blocks, and where they wait: what holds the end of a prompt goes before its begin."""
    blocks = [Block(number) for number in range(count)]
    idle = IdleBlocks()
    idle.push_run(blocks)
    return blocks, idle


def test_what_a_block_is_kept_for_has_nothing_in_it_that_adds_nothing():
    (block,), idle = waiting(1)
    assert idle.merged_terms(block, [(1, 9), (2, 5), (3, 5), (3, 5), (0, 9)]) == ((3, 5), (1, 9))


def looked_up(idle, blocks):
    """These are found and held."""
    for block in blocks:
        block.ref_count = 1
    idle.find_run(blocks)


def given_back(idle, blocks):
    for block in blocks:
        block.ref_count = 0
    idle.push_run(blocks)


@pytest.mark.parametrize(
    ("back", "wanted"),
    [
        ([1, 2, 3], [0, 1, 2, 3, 4]),
        ([2, 1, 3], [0, 1, 2, 3, 4]),
        ([1, 3], [0, 4, 1, 3]),
        ([1, 2, 5, 3], [0, 4, 1, 2, 5, 3]),
        ([1, 5, 3], [0, 4, 1, 5, 3]),
        ([2, 3], [0, 4, 2, 3]),
    ],
    ids=["all", "turned", "its ends", "another too", "another for one", "all but the first"],
)
def test_what_was_found_goes_back_to_its_place_if_all_of_it_comes_and_nothing_else(back, wanted):
    blocks, idle = waiting(5)
    blocks.append(Block(5))
    blocks[5].ref_count = 1
    looked_up(idle, blocks[3:0:-1])
    given_back(idle, [blocks[number] for number in back])
    assert ids(idle.first(6)) == wanted


@pytest.mark.parametrize(
    "found",
    [*itertools.permutations([0, 2, 3]), *itertools.permutations([1, 2, 4]), (0, 1, 2, 3, 4)],
)
@pytest.mark.parametrize("kept", [(), (2,), (2, 4, 0), (0, 1, 2, 3, 4)])
def test_wherever_it_stood_and_whatever_it_is_kept_for(found, kept):
    """In any order, in one stretch or several, on a shelf or not."""
    blocks = [Block(number) for number in range(5)]
    idle = IdleBlocks()
    for number in kept:
        idle.keep(blocks[number], [(1 + number % 2, 9)])
    idle.push_run(blocks)
    before = ids(idle)
    for _ in range(2):
        looked_up(idle, [blocks[number] for number in found])
        assert ids(idle) == [number for number in before if number not in found]
        given_back(idle, [blocks[number] for number in sorted(found)])
        assert (ids(idle), idle.num_shelved) == (before, len(kept))
    idle.remove_run(blocks)
    assert (ids(idle), idle.num_shelved, idle.queue.length) == ([], 0, 0)


def test_however_many_were_found():
    blocks, idle = waiting(300)
    looked_up(idle, blocks[1:299])
    given_back(idle, blocks[298:0:-1])
    assert ids(idle) == list(range(300))


@pytest.mark.parametrize("change", ["kept", "over", "another"])
def test_what_is_kept_for_something_else_since_does_not_go_back(change):
    blocks = [Block(number) for number in range(4)]
    idle = IdleBlocks()
    idle.keep(blocks[1], [(1, 5)])
    idle.push_run(blocks)
    looked_up(idle, blocks[1::-1])
    if change == "kept":
        idle.keep(blocks[0], [(2, 9)])
        wanted = [2, 3, 1, 0]
    elif change == "over":
        idle.expire(5)
        wanted = [2, 3, 0, 1]
    else:
        looked_up(idle, [blocks[2]])
        given_back(idle, [blocks[2]])
        wanted = [2, 3, 0, 1]
    given_back(idle, blocks[:2])
    assert ids(idle) == wanted


def test_the_same_wish_once_more_changes_nothing():
    blocks = [Block(number) for number in range(3)]
    idle = IdleBlocks()
    idle.keep(blocks[1], [(1, 5)])
    idle.push_run(blocks)
    looked_up(idle, blocks[:2])
    idle.keep(blocks[1], [(1, 4)])
    given_back(idle, blocks[:2])
    assert ids(idle) == [0, 2, 1]


class FullAt(dict):
    """Has no room for a new key beyond a number of keys."""

    most = 3

    def setdefault(self, key, value=None):
        if key not in self and len(self) == self.most:
            raise MemoryError
        return super().setdefault(key, value)


def test_room_for_wishes_is_made_for_all_blocks_or_for_none():
    blocks, idle = waiting(6)
    idle.kept = FullAt({0: ((1, 9),), 5: ((2, 7),)})
    changes = [(block, ((3, 9),)) for block in blocks]
    with pytest.raises(MemoryError):
        idle.prepare_terms(changes)
    assert idle.kept == {0: ((1, 9),), 5: ((2, 7),)}
    idle.kept.most = 6
    idle.prepare_terms(changes)
    assert idle.kept == {0: ((1, 9),), 1: (), 2: (), 3: (), 4: (), 5: ((2, 7),)}


@pytest.mark.parametrize("end", [9, 9_000_000])
def test_a_wish_that_another_of_its_deadline_outdoes_still_ends_then(end):
    block = Block(0)
    idle = IdleBlocks()
    idle.keep(block, [(1, end + 1 - 1)])  # another int, of that value
    idle.keep(block, [(3, end)])
    assert idle.kept == {0: ((3, end),)}
    idle.expire(end - 1)
    assert idle.kept == {0: ((3, end),)}
    idle.expire(end)
    assert idle.kept == {}


@pytest.mark.parametrize(
    "wishes", [([(3, 5)], [(1, 5)]), ([(4, 5), (1, 9)], [(3, 5), (1, 9)])], ids=["falls", "stays"]
)
def test_of_what_ends_together_the_weaker_goes_first_whichever_waited_first(wishes):
    blocks = [Block(0), Block(1)]
    idle = IdleBlocks()
    for block, some in zip(blocks, wishes, strict=True):
        idle.keep(block, some)
    idle.push_run(blocks)
    idle.expire(5)
    assert ids(idle) == [1, 0]


def test_what_goes_back_to_a_shelf_is_counted_on_that_one():
    block = Block(0)
    idle = IdleBlocks()
    idle.keep(block, [(3, 5), (1, 9)])
    idle.push_run([block])
    looked_up(idle, [block])
    given_back(idle, [block])
    assert {priority: len(shelf) for priority, shelf in idle._shelves.items()} == {3: 1, 1: 0}
