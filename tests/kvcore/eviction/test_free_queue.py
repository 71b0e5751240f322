"""The free queue by example, and what it refuses."""

import pytest

import kvcore


@pytest.fixture
def queue():
    queue = kvcore.FreeQueue()
    for number in range(1, 5):
        queue.push_back(kvcore.Block(number))
    return queue


def ids(queue):
    return [block.block_id for block in queue]


def test_a_block_that_waits_already_is_refused(queue):
    waiting = next(iter(queue))
    empty = kvcore.Block(9)
    empty.next_free = empty  # free without content: how the pool marks it
    for block in (waiting, empty):
        with pytest.raises(kvcore.BlockStateError, match=f"push_back.*Block\\({block.block_id},"):
            queue.push_back(block)
    assert (ids(queue), len(queue)) == ([1, 2, 3, 4], 4)


def test_a_block_that_does_not_wait_here_is_refused(queue):
    held = kvcore.Block(8)
    empty = kvcore.Block(9)
    empty.next_free = empty
    for block in (held, empty):
        with pytest.raises(kvcore.BlockStateError, match=f"remove.*Block\\({block.block_id},"):
            queue.remove(block)
    assert (ids(queue), len(queue)) == ([1, 2, 3, 4], 4)


def test_the_ends_of_a_queue_are_never_taken_for_blocks():
    queue = kvcore.FreeQueue()
    assert (queue._head.block_id, queue._tail.block_id) == (-1, -2)


def test_broken_links_are_an_error_and_no_endless_walk(queue):
    queue._tail.prev_free = None
    with pytest.raises(kvcore.BlockStateError):
        queue.push_back(kvcore.Block(5))
    queue._head.next_free = None
    assert ids(queue) == []
    with pytest.raises(kvcore.BlockStateError, match="queue is empty"):
        queue.pop_front()


# Runs of blocks.


def test_of_many_no_more_are_named_than_asked_for():
    queue = kvcore.FreeQueue()
    queue.push_run([kvcore.Block(number) for number in range(1, 500)])
    assert [block.block_id for block in queue.first(400)] == list(range(1, 401))


@pytest.mark.parametrize("run", [[], [1], [4], [2, 3], [3, 2], [4, 1], [1, 2, 3, 4], [4, 3, 2, 1]])
def test_a_run_leaves_from_anywhere_and_comes_back_in_its_order(queue, run):
    named = {block.block_id: block for block in queue}
    blocks = [named[number] for number in run]
    rest = [number for number in (1, 2, 3, 4) if number not in run]
    queue.remove_run(blocks)
    assert (ids(queue), len(queue)) == (rest, len(rest))
    assert all(block.next_free is None for block in blocks)
    for block in reversed(blocks):
        queue.put_back(block)
    assert (ids(queue), len(queue)) == ([1, 2, 3, 4], 4)
    queue.remove_run(blocks)
    assert backwards(queue) == rest[::-1]
    queue.push_run(blocks)
    assert (ids(queue), len(queue)) == (rest + run, 4)
    assert backwards(queue) == (rest + run)[::-1]


def backwards(queue):
    found, block = [], queue._tail.prev_free
    while block is not queue._head:
        found.append(block.block_id)
        block = block.prev_free
    return found
