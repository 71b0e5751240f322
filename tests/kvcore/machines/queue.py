"""The free queue against a list."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

import kvcore
from tests.kvcore.machines.refusal import refused
from tests.kvcore.naive import NaiveQueue
from tests.kvcore.views import expect


class FreeQueueMachine(RuleBasedStateMachine):
    """The free queue against a list."""

    make_queue = kvcore.FreeQueue

    def __init__(self):
        super().__init__()
        self.queue = self.make_queue()
        self.naive = NaiveQueue()
        self.blocks = [kvcore.Block(block_id) for block_id in range(1, 9)]

    def view(self):
        return [block.block_id for block in self.queue], len(self.queue)

    @rule(number=st.integers(0, 7))
    def push(self, number):
        block = self.blocks[number]
        if block.block_id in self.naive.items:
            refused("P3", kvcore.BlockStateError, self.view, lambda: self.queue.push_back(block))
            return
        self.queue.push_back(block)
        self.naive.push_back(block.block_id)

    @rule()
    def pop(self):
        if not self.naive.items:
            refused("P1", kvcore.BlockStateError, self.view, self.queue.pop_front)
            return
        expect("P15", self.queue.pop_front().block_id, self.naive.pop_front(), "the block popped")

    @rule(numbers=st.lists(st.integers(0, 7), unique=True))
    def push_some(self, numbers):
        blocks = [self.blocks[n] for n in numbers if n + 1 not in self.naive.items]
        self.queue.push_run(blocks)
        for block in blocks:
            self.naive.push_back(block.block_id)

    @rule(numbers=st.lists(st.integers(0, 7), unique=True))
    def remove_some(self, numbers):
        blocks = [self.blocks[n] for n in numbers if n + 1 in self.naive.items]
        self.queue.remove_run(blocks)
        for block in blocks:
            self.naive.remove(block.block_id)

    @rule(count=st.integers(0, 9))
    def cut_front(self, count):
        first = self.queue.first(count)
        expect("P15", [block.block_id for block in first], self.naive.items[:count], "the first")
        self.queue.cut_front(first)
        for block in first:  # left to the caller
            block.prev_free = block.next_free = None
        del self.naive.items[:count]

    @rule(number=st.integers(0, 7))
    def remove(self, number):
        block = self.blocks[number]
        if block.block_id not in self.naive.items:
            refused("P3", kvcore.BlockStateError, self.view, lambda: self.queue.remove(block))
            return
        self.queue.remove(block)
        self.naive.remove(block.block_id)

    @invariant()
    def agree(self):
        expect("P15", [block.block_id for block in self.queue], self.naive.items, "the order")
        expect("P1", len(self.queue), len(self.naive.items), "the counter")
        linked = {block.block_id for block in self.blocks if block.next_free}
        expect("P1", linked, set(self.naive.items), "the blocks that have neighbours")
        backwards = []
        block = self.queue._tail.prev_free
        while block is not self.queue._head:
            backwards.insert(0, block.block_id)
            block = block.prev_free
        expect("P1", backwards, self.naive.items, "the order, walked backwards")
