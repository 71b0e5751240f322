"""Host memory as a second pool of blocks, and what moves blocks between the two pools.

Decides: which blocks of host memory hold which copy, and when they may be used again. Every copy on
its way between the device and a tier lies in such blocks; a host tier keeps them.

Invariants: a block of host memory belongs to one copy; it is free again once no job holds the copy
and no tier keeps it.

Does not know: keys, tiers, tensors. Safe for several threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol, final, runtime_checkable

import xxhash

Wait = Callable[[], Sequence[int]]
"""Waits for a move, and returns the sum of each block."""


class BlockMover(Protocol):
    """Reads and writes whole blocks of the KV cache; called on the thread that runs a job.

    What it reads was computed by steps sent before the job was begun, and what it writes is read
    by steps that are sent after `run` has returned: on a GPU it has to see to both.
    """

    def read_block(self, block_id: int) -> bytes | bytearray | memoryview:
        """Return the bytes of a block; they are copied before the next call."""
        ...

    def write_block(self, block_id: int, data: memoryview) -> None:
        """Write the bytes of a block; when it returns, they are there."""
        ...


@runtime_checkable
class HostMover(Protocol):
    """Moves many blocks at once between the KV cache and host memory, which it allocates.

    A move has ended when the function that its call has returned has returned, which may be called
    again, and on any thread; then as of `BlockMover`. Moves of one direction are carried out in
    order. Sums tell whether the bytes of a block have changed since they came: of this process
    alone, so they may be quick rather than strong.
    """

    def allocate(self, num_blocks: int) -> memoryview:
        """Allocate blocks of host memory, one behind the other. Again only after `free`.

        Raises:
            MemoryError: there is too little.
        """
        ...

    def store(self, block_ids: Sequence[int], host_ids: Sequence[int]) -> Wait:
        """Begin to copy blocks to blocks of host memory, and to sum each."""
        ...

    def load(self, host_ids: Sequence[int], block_ids: Sequence[int]) -> Wait:
        """Begin to copy blocks of host memory to blocks, and to sum each as it has arrived."""
        ...

    def sums(self, host_ids: Sequence[int]) -> Sequence[int]:
        """Return the sums of blocks where they are in host memory."""
        ...

    def free(self) -> None:
        """Free the host memory, after the moves that are under way. Later moves raise."""
        ...


@final
class OneByOne:
    """A `HostMover` that moves with a `BlockMover`, a block at a time.

    Args:
        mover: reads and writes blocks; None: there are none, only host memory.
        block_bytes: bytes of a block.
    """

    def __init__(self, mover: BlockMover | None, block_bytes: int) -> None:
        self._mover = mover
        self._size = block_bytes
        self._memory = memoryview(b"")

    def allocate(self, num_blocks: int) -> memoryview:
        """Allocate blocks of host memory, one behind the other."""
        self._memory = memoryview(bytearray(num_blocks * self._size))
        return self._memory

    def store(self, block_ids: Sequence[int], host_ids: Sequence[int]) -> Wait:
        """Copy blocks to blocks of host memory, and sum each. O(bytes)."""
        if self._mover is not None:
            for block_id, host_id in zip(block_ids, host_ids, strict=True):
                self._at(host_id)[:] = self._mover.read_block(block_id)
        found = self.sums(host_ids)
        return lambda: found

    def load(self, host_ids: Sequence[int], block_ids: Sequence[int]) -> Wait:
        """Copy blocks of host memory to blocks, and sum each. O(bytes)."""
        if self._mover is not None:
            for block_id, host_id in zip(block_ids, host_ids, strict=True):
                self._mover.write_block(block_id, self._at(host_id))
        found = self.sums(host_ids)
        return lambda: found

    def sums(self, host_ids: Sequence[int]) -> Sequence[int]:
        """Return the sums of blocks of host memory. O(bytes)."""
        return [xxhash.xxh3_64_intdigest(self._at(host_id)) for host_id in host_ids]

    def free(self) -> None:
        """Free the host memory, which goes with the last view of it."""

    def _at(self, host_id: int) -> memoryview:
        return self._memory[host_id * self._size : (host_id + 1) * self._size]


@dataclass(slots=True, eq=False)
class HostCopy:
    """A copy in host memory.

    Attributes:
        ids: its blocks there, in order.
        sums: the sum of each, as it came; empty: not known yet.
        number: counts the copies of a tier.
        num_holds: jobs that read or write it.
        is_kept: True while a tier has it.
    """

    ids: tuple[int, ...]
    sums: tuple[int, ...] = ()
    number: int = 0
    num_holds: int = 1
    is_kept: bool = False


@final
class HostBlocks:
    """Blocks of host memory.

    Args:
        mover: allocates them, and moves their bytes.
        num_blocks: how many there are.
        block_bytes: bytes of each.
    """

    def __init__(self, mover: HostMover, num_blocks: int, block_bytes: int) -> None:
        self.mover = mover
        self.block_bytes = block_bytes
        self._memory = mover.allocate(num_blocks).cast("B")
        self._num_blocks = num_blocks
        self._num_used = 0  # those from there on were never taken
        self._free: list[int] = []
        self._lock = threading.Lock()

    def take(self, sizes: Sequence[int]) -> list[HostCopy]:
        """Take blocks for copies of these numbers of blocks, which are held. O(blocks).

        Their ids rise from copy to copy, so that copies that lie together move together.

        Returns:
            The copies; none if too few blocks are free.
        """
        count = sum(sizes)
        with self._lock:
            new = max(0, count - len(self._free))
            if new > self._num_blocks - self._num_used:
                return []
            ids = self._free[len(self._free) - (count - new) :]
            del self._free[len(self._free) - (count - new) :]
            ids += range(self._num_used, self._num_used + new)
            self._num_used += new
        rising = iter(sorted(ids))
        return [HostCopy(tuple(islice(rising, size))) for size in sizes]

    def hold(self, copy: HostCopy) -> None:
        """Hold a copy that a tier keeps, or another job holds: its bytes stay. O(1)."""
        with self._lock:
            copy.num_holds += 1

    def release(self, copy: HostCopy) -> None:
        """Hold a copy no more. O(its blocks)."""
        with self._lock:
            copy.num_holds -= 1
            self._end(copy)

    def keep(self, copy: HostCopy, *, is_kept: bool) -> None:
        """Note that a tier has a copy, or has it no more. O(its blocks)."""
        with self._lock:
            copy.is_kept = is_kept
            self._end(copy)

    def _end(self, copy: HostCopy) -> None:
        if not copy.num_holds and not copy.is_kept:
            self._free += copy.ids
            copy.ids = ()

    def views(self, copy: HostCopy) -> list[memoryview]:
        """Return the memory of each block of a copy that is held. O(its blocks)."""
        size = self.block_bytes
        return [self._memory[host_id * size : (host_id + 1) * size] for host_id in copy.ids]

    def payload(self, copy: HostCopy) -> memoryview:
        """Return the bytes of a copy: its memory if that is one block. O(bytes) otherwise."""
        views = self.views(copy)
        return views[0] if len(views) == 1 else memoryview(b"".join(views))

    def fill(self, copy: HostCopy, payload: memoryview) -> None:
        """Write the bytes of a copy. O(bytes)."""
        size = self.block_bytes
        for number, view in enumerate(self.views(copy)):
            view[:] = payload[number * size : (number + 1) * size]

    def is_right(self, copy: HostCopy) -> bool:
        """Return whether the bytes of a copy are still those that came. O(bytes)."""
        return tuple(self.mover.sums(copy.ids)) == copy.sums
