"""Free blocks that hold content, in the order in which they will be reused.

A doubly linked list through the blocks themselves, between two sentinels: every operation is O(1)
and allocates nothing, also the removal from the middle that a prefix hit on a free block needs
(the structure of vLLM's `FreeKVCacheBlockQueue`). The front is reused next. What goes where is the
pool's decision; the queue knows nothing of content or ref counts, but it refuses a block that is
in it already, one that is not, and taking from an empty queue. The calls for runs of blocks trust
their caller, and cannot fail. A block that was taken out remembers before whom it stood, so a
removal can be undone, the last one first (Knuth's dancing links).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

from kvcore.block import Block
from kvcore.errors import BlockStateError


@final
class FreeQueue:
    """Free blocks, least recently used first.

    Attributes:
        length: the number of blocks.
    """

    __slots__ = ("_head", "_tail", "length")

    def __init__(self) -> None:
        # Sentinels have neighbours for good, so no operation has an edge case; their id is never
        # a block's, and `pop_front` can never return one.
        self._head = Block(-1)
        self._tail = Block(-2)
        self._head.next_free = self._tail
        self._tail.prev_free = self._head
        self.length = 0

    def __len__(self) -> int:
        """Return the number of blocks. O(1)."""
        return self.length

    def __iter__(self) -> Iterator[Block]:
        """Yield the free blocks, the one reused next first. O(len)."""
        block = self._head.next_free
        while block is not None and block is not self._tail:
            yield block
            block = block.next_free

    def push_back(self, block: Block) -> None:
        """Append `block`. O(1).

        Raises:
            BlockStateError: it is in a queue already.
        """
        before = self._tail.prev_free
        if before is None or block.next_free is not None:
            raise BlockStateError(f"push_back: wanted a block that is not free, got {block!r}")
        block.prev_free, block.next_free = before, self._tail
        before.next_free = self._tail.prev_free = block
        self.length += 1

    def pop_front(self) -> Block:
        """Remove the first block. O(1).

        Raises:
            BlockStateError: the queue is empty.
        """
        block = self._head.next_free
        if block is None or block is self._tail:
            raise BlockStateError("pop_front: wanted a free block, the queue is empty")
        self.remove(block)
        return block

    def remove(self, block: Block) -> None:
        """Remove `block`. O(1).

        Raises:
            BlockStateError: it is not in a queue.
        """
        before, after = block.prev_free, block.next_free
        if before is None or after is None:
            raise BlockStateError(f"remove: wanted a block in the free queue, got {block!r}")
        before.next_free = after
        after.prev_free = before
        block.prev_free, block.next_free = after, None
        self.length -= 1

    def put_back(self, block: Block) -> None:
        """Undo the removal of a block. Cannot fail. O(1).

        Later changes of this queue must be undone before, the last one first.
        """
        after = block.prev_free or self._tail
        before = after.prev_free or self._head
        block.prev_free, block.next_free = before, after
        before.next_free = after.prev_free = block
        self.length += 1

    def clear(self) -> None:
        """Remove every block. Cannot fail. O(len)."""
        head, tail = self._head, self._tail
        block = head.next_free
        while block is not None and block is not tail:
            after = block.next_free
            block.prev_free = block.next_free = None
            block = after
        head.next_free, tail.prev_free = tail, head
        self.length = 0

    def first(self, count: int) -> list[Block]:
        """Return the first blocks, at most `count`; changes nothing. O(count)."""
        found: list[Block] = []
        block = self._head
        for number in range(min(count, self.length)):  # noqa: B007  # compiled, `_` is an object
            block = block.next_free or block
            found.append(block)
        return found

    def cut_front(self, blocks: list[Block]) -> None:
        """Remove the blocks that `first` returned.

        O(1): the caller clears their links, because it changes other fields of each block too.
        """
        if blocks:
            head = self._head
            after = blocks[-1].next_free or self._tail
            head.next_free = after
            after.prev_free = head
            self.length -= len(blocks)

    def remove_run(self, blocks: list[Block]) -> None:
        """Remove distinct blocks. O(len(blocks)).

        The blocks of a prefix stand next to each other, its first block last. Of neighbours only
        the outer links are joined: two thirds of the time of `remove` for each.
        """
        if not blocks:
            return
        head, tail = self._head, self._tail
        before, after = blocks[0], blocks[0].next_free or tail
        for block in blocks:
            if block is not before:
                before.next_free, after.prev_free = after, before
                after = block.next_free or tail
            before = block.prev_free or head
            block.prev_free, block.next_free = after, None
        before.next_free, after.prev_free = after, before
        self.length -= len(blocks)

    def push_run(self, blocks: list[Block]) -> None:
        """Append distinct blocks that are in no queue. O(len(blocks))."""
        tail = self._tail
        last = tail.prev_free or self._head
        for block in blocks:
            block.prev_free = last
            last.next_free = block
            last = block
        last.next_free = tail
        tail.prev_free = last
        self.length += len(blocks)
