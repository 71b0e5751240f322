"""The free queue, broken."""

import kvcore
from tests.kvcore import machines
from tests.kvcore.sabotage.registry import sabotage


@sabotage(machines.FreeQueueMachine, "P1", rows=(3,))
class queue_counts_wrong_after_removal(kvcore.FreeQueue):
    def remove(self, block):
        super().remove(block)
        self.length += 1


@sabotage(machines.FreeQueueMachine, "P1", "P3", rows=(2,))
class queue_hands_out_its_sentinel(kvcore.FreeQueue):
    def pop_front(self):
        block = self._head.next_free
        if block is self._tail:
            return block
        return super().pop_front()


@sabotage(machines.FreeQueueMachine, "P3", "P1", rows=(2, 4))
class queue_takes_a_block_twice(kvcore.FreeQueue):
    def push_back(self, block):
        block.prev_free = block.next_free = None
        super().push_back(block)


@sabotage(machines.FreeQueueMachine, "P15")
class queue_reuses_the_newest(kvcore.FreeQueue):
    def push_back(self, block):
        others = list(self)
        super().push_back(block)
        for other in others:  # to behind it
            self.remove(other)
            super().push_back(other)


@sabotage(machines.FreeQueueMachine, "P1")
class queue_forgets_the_way_back(kvcore.FreeQueue):
    def remove(self, block):
        after, before = block.next_free, block.prev_free
        super().remove(block)
        if before is not self._head:
            after.prev_free = self._head
