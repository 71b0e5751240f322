"""Leases: blocks that a device or a transfer is still reading or writing.

A lease holds the blocks of a sequence for a step in flight on the GPU, a transfer in or a transfer
out. None of them is reused before the lease ends, whatever happens to the sequence in the meantime.
Leases are counted: two transfers of one block are two leases. A completion that is late, repeated
or unknown changes nothing and returns False. A lease may have a deadline in steps, after which the
manager's `tick` ends it. The caller defines what a step is.

The blocks of a load belong to no sequence yet: its lease alone holds them, and `Lease.load`
describes them.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from types import TracebackType
from typing import NoReturn, final

from kvcore.block import Block, BlockId
from kvcore.errors import InvalidArgumentError, MisuseError
from kvcore.eviction.deadlines import Deadlines
from kvcore.identity.multimodal import MultimodalItem
from kvcore.pool import BlockPool
from kvcore.sequence import KVSequence


@final
class Load:
    """The blocks for KV that is loaded from outside: the first tokens of a sequence.

    Attributes:
        seq: the sequence that the KV is for.
        num_tokens: the number of its computed tokens after the load.
        first_blocks: for each layer group the index of its first loaded block in the block table:
            it holds the tokens from `first_blocks[group] * block_size` on.
        blocks: for each group its blocks, in order.
        packed: the tokens of the loaded KV.
        items: the multimodal items of the loaded KV.
    """

    __slots__ = ("blocks", "first_blocks", "items", "num_tokens", "packed", "seq")

    def __init__(
        self,
        seq: KVSequence,
        first_blocks: tuple[int, ...],
        blocks: Sequence[list[Block]],
        packed: array[int],
        items: tuple[MultimodalItem, ...],
    ) -> None:
        self.seq = seq
        self.num_tokens = len(packed)
        self.first_blocks = first_blocks
        self.blocks = blocks
        self.packed = packed
        self.items = items

    @property
    def block_ids(self) -> tuple[tuple[BlockId, ...], ...]:
        """For each layer group the ids of the blocks that are to be filled. O(those)."""
        return tuple([tuple([block.block_id for block in run]) for run in self.blocks])

    def __repr__(self) -> str:
        return f"Load({self.num_tokens} tokens of {self.seq!r}, {self.block_ids})"


@final
class Lease:
    """Blocks that are not reused before the lease ends. A context manager: it ends at the exit.

    Attributes:
        lease_id: counts the leases of its manager from 0.
        kind: the kind of holder, such as "step", "load" or "store".
        owner: a name of the holder, for reports.
        deadline: the step at which it ends by itself, or None.
        is_active: False once it has ended.
        blocks: the leased blocks, in the order of their release.
        load: the load that the blocks were taken for; None: they are blocks of a sequence.
    """

    __slots__ = ("_book", "blocks", "deadline", "is_active", "kind", "lease_id", "load", "owner")

    def __init__(
        self,
        book: LeaseBook,
        lease_id: int,
        kind: str,
        owner: str,
        deadline: int | None,
        blocks: list[Block],
        load: Load | None,
    ) -> None:
        self._book = book
        self.lease_id = lease_id
        self.kind = kind
        self.owner = owner
        self.deadline = deadline
        self.blocks = blocks
        self.load = load
        self.is_active = True

    @property
    def num_exclusive_blocks(self) -> int:
        """The number of its blocks that nothing else holds, free at its end; then 0. O(blocks)."""
        return sum([block.ref_count == 1 for block in self.blocks]) if self.is_active else 0

    def end(self) -> bool:
        """End the lease; blocks without another holder become free. O(blocks).

        Returns:
            True if it was active; False changes nothing.
        """
        return self._book.end(self.lease_id)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    def __copy__(self) -> NoReturn:
        raise MisuseError(f"{self!r} is a handle: use the original, not a copy")

    def __reduce__(self) -> NoReturn:
        raise MisuseError(f"{self!r} is a handle: it cannot be pickled")

    def __repr__(self) -> str:
        state = "active" if self.is_active else "ended"
        return f"Lease({self.lease_id}, {self.kind!r}, {state}, {len(self.blocks)} blocks)"


@final
class LeaseBook:
    """A manager's leases, and its count of steps.

    Attributes:
        active: the leases that have not ended, by id.
    """

    __slots__ = ("_deadlines", "_next_id", "_pool", "active")

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.active: dict[int, Lease] = {}
        self._deadlines: Deadlines[Lease] = Deadlines()
        self._next_id = 0

    def begin(self, blocks: Sequence[Block], kind: str, owner: str, max_steps: int | None) -> Lease:
        """Hold blocks until the lease ends. O(blocks).

        Raises:
            InvalidArgumentError: `kind` or `owner` is no string.
        """
        return self._begin(list(blocks), kind, owner, max_steps, None, [])

    def begin_load(
        self,
        new: list[Block],
        blocks: list[Block],
        load: Load,
        owner: str,
        max_steps: int | None,
    ) -> Lease:
        """Take blocks for a load, and hold them until the lease ends. O(blocks).

        Args:
            new: the result of `BlockPool.next_blocks`.
            blocks: the same blocks in the order of their release.
            load: the load that they are for.
            owner: a name of the holder, for reports.
            max_steps: as for `begin`.

        Raises:
            InvalidArgumentError: `owner` is no string.
        """
        return self._begin(blocks, "load", owner, max_steps, load, new)

    def _begin(
        self,
        blocks: list[Block],
        kind: str,
        owner: str,
        max_steps: int | None,
        load: Load | None,
        new: list[Block],
    ) -> Lease:
        for name, text in (("kind", kind), ("owner", owner)):
            if not isinstance(text, str):
                raise InvalidArgumentError(f"{name}: wanted a string, got {type(text).__name__}")
        deadline = None if max_steps is None else self._pool.step + max_steps
        lease = Lease(self, self._next_id, kind, owner, deadline, blocks, load)
        self.active[lease.lease_id] = lease
        try:
            if deadline is not None:
                self._deadlines.add(lease, deadline)
            if load is None:
                self._pool.revive(blocks)
            else:
                self._pool.hand_out(new)
        except BaseException:
            self._drop(lease)
            raise
        self._count(blocks)
        self._next_id += 1
        return lease

    def end(self, lease_id: object) -> bool:
        """End a lease by its id, as a completion from outside does. O(its blocks).

        Returns:
            True if it was active. Late, second and unknown completions return False and change
            nothing.
        """
        if type(lease_id) is not int or lease_id not in self.active:
            return False
        lease = self.active[lease_id]
        self._pool.give_back(lease.blocks)
        self.forget((lease,))
        return True

    def is_active(self, lease: Lease) -> bool:
        """Say whether a lease that was begun here has not ended. O(1).

        Raises:
            InvalidArgumentError: not a lease of this manager.
        """
        known: object = lease  # callers are not all typed
        if type(known) is not Lease or known._book is not self:  # noqa: SLF001  # its own
            raise InvalidArgumentError(f"lease: wanted a lease of this manager, got {lease!r}")
        return self.active.get(lease.lease_id) is lease

    def due(self, step: int) -> tuple[Lease, ...]:
        """Return the leases whose deadline has come at `step`, oldest first. O(those * log)."""
        return tuple(sorted(self._deadlines.due(step), key=_age))

    def forget(self, ended: tuple[Lease, ...]) -> None:
        """Note that leases have ended and their blocks are released. Cannot fail. O(blocks)."""
        for lease in ended:
            lease.is_active = False
            self._uncount(lease.blocks)
            self._drop(lease)

    def _drop(self, lease: Lease) -> None:
        """Remove a lease from the active ones. Cannot fail. O(log deadlines)."""
        del self.active[lease.lease_id]
        if lease.deadline is not None:
            self._deadlines.drop(lease, lease.deadline)

    def _count(self, blocks: list[Block]) -> None:
        """Count the holder that each block has just gained as a lease. Cannot fail. O(blocks)."""
        for block in blocks:
            count = block.num_leases = block.num_leases + 1
            if count == block.ref_count:
                self._pool.num_deferred_blocks += 1

    def _uncount(self, blocks: list[Block]) -> None:
        """Count a lease of each block less, after its release. Cannot fail. O(blocks).

        A block counts as deferred while it has leases and no more holders than leases. Between a
        release and this call it can have fewer.
        """
        for block in blocks:
            count = block.num_leases
            block.num_leases = count - 1
            if block.ref_count == count or (block.ref_count == 0 and count == 1):
                self._pool.num_deferred_blocks -= 1

    def counts(self) -> dict[str, int]:
        """Return how many leases of each kind are active. O(active leases)."""
        return dict(Counter([lease.kind for lease in self.active.values()]))

    def num_deferred_blocks(self) -> int:
        """Return the number of blocks held by leases alone; they become free when those end.

        O(1).
        """
        return self._pool.num_deferred_blocks


def _age(lease: Lease) -> int:
    return lease.lease_id
