"""What is published is found, what cannot be is named, and events say what is lost."""

import pytest

import kvcore
from tests.kvcore.pools import ids, published, refused, token
from tests.kvcore.views import pool_view


def test_a_run_of_blocks_can_be_hit_as_far_as_it_agrees(pool):
    published(pool, 1, 2, 3)
    for prompt, found in (
        ([1, 2, 3, 4], [1, 2, 3]),
        ([1, 2, 9], [1, 2]),
        ([1, 9, 2, 3], [1]),
        ([2], []),
    ):
        packed = kvcore.pack(prompt).tobytes()
        assert ids(pool.match(b"n", packed, len(prompt))) == found
        assert pool.match(b"other", packed, len(prompt)) == []
        path = pool.path(b"n", packed, len(prompt), 0)
        assert [block.block_id for block in path] == found


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
    pool.hold(blocks)
    assert {block.ref_count for block in blocks} == {2}


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
    assert pool.last_event == 2
    pool.unpublish([*more, pool.blocks[7]], mark)
    pool.release(more[::-1])
    after = pool_view(pool)
    assert pool.last_event == 1
    assert [event.number for event in log.take()] == [1]
    for counter in ("allocated", "peak"):
        del before[counter], after[counter]
    assert after == before


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
    assert removed == kvcore.BlocksRemoved(2, 0, stored.block_hashes)


def test_what_goes_with_a_copy_of_what_stays_is_removed():
    log = kvcore.EventLog([1], "xxh3-128")
    pool = kvcore.BlockPool(4, 1, log=log)
    copy, _, only = published(pool, 1), published(pool, 1), published(pool, 2)
    stored = log.take()
    pool.release(copy)
    pool.release(only)
    assert ids(pool.take(2)) == [1, 3]
    assert [event.block_hashes for event in log.take()] == [stored[-1].block_hashes]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_copies_that_go_together_are_one_removal(count):
    log = kvcore.EventLog([1], "xxh3-128")
    pool = kvcore.BlockPool(6, 1, log=log)
    for _ in range(count):
        pool.release(published(pool, 1))  # the free ones without content go first
    log.take()
    pool.take(5)
    assert [type(event) for event in log.take()] == [kvcore.BlocksRemoved]


def test_forgetting_tells_who_reads_the_events():
    log = kvcore.EventLog([1], "xxh3-128")
    pool = kvcore.BlockPool(5, 1, log=log)
    blocks = published(pool, 1, 2)
    (stored,) = log.take()
    pool.forget(blocks[::-1])
    assert log.take() == (kvcore.BlocksRemoved(2, 0, stored.block_hashes[::-1]),)


def test_what_is_published_below_a_parent_has_its_namespace():
    log = kvcore.EventLog([1], "xxh3-128")
    pool = kvcore.BlockPool(5, 1, log=log)
    (first,) = published(pool, 1)
    more = pool.take(1)
    pool.publish(more, b"ignored", first, [token(2)])
    stored, below = log.take()
    assert (stored.namespace_key, below.namespace_key) == (b"n", b"n")
    assert below.parent == stored.block_hashes[0]


def told_of_a_run_around_a_copy(tree):
    """What is told where a path with a hole in it is published anew, and more below it.

    Returns how many names each event has, and whether they fold to what a snapshot says.
    """
    log = kvcore.EventLog([1], "xxh3-128")
    pool = kvcore.BlockPool(6, 1, log=log)
    pool.trees = (tree(1, 0, log),)
    pool.release(published(pool, 1, 2)[:1])
    pool.take(4)  # the first one's content is gone, what follows it is held
    pool.release(pool.blocks[3:])
    before = log.take()
    published(pool, 1, 2, 3)  # new, a copy of the second, new
    told = log.take()
    held = log.snapshot([(0, root) for root in pool.trees[0].roots()])
    return [len(event.block_hashes) for event in told], kvcore.fold(
        [*before, *told]
    ) == kvcore.fold((), held)


def test_a_run_of_events_is_broken_by_a_copy_in_its_middle():
    assert told_of_a_run_around_a_copy(kvcore.ContentTree) == ([1, 1], True)


@pytest.mark.source_build
def test_events_that_join_runs_across_a_copy_are_seen():
    """The machines meet this too seldom for a hunt, so the bug is planted here."""

    class JoiningTree(kvcore.ContentTree):
        def _note_stored(self, log, blocks, namespace_key):
            new = [block.node for block in blocks if block.node.first_copy is block]
            log.stored(new, namespace_key, self._group)

    assert told_of_a_run_around_a_copy(JoiningTree) == ([2], False)
