"""Leases: blocks that something outside is still reading or writing.

A step in flight on the GPU, a transfer in, a transfer out: for each, a lease holds the blocks that
a sequence has now, so none of them is handed out before it ends, whatever happens to the sequence
in the meantime. Leases are counted, never a flag: two transfers of one block are two leases. A
completion that comes late, twice or from nowhere changes nothing and says so. A lease may have a
deadline in steps, after which the manager's `tick` ends it. Time is what the caller says it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from types import TracebackType
from typing import NoReturn, SupportsIndex, final

from kvcore.arguments import as_int
from kvcore.block import Block
from kvcore.deadlines import Deadlines
from kvcore.errors import InvalidArgumentError, MisuseError
from kvcore.pool import BlockPool


@final
class Lease:
    """Blocks that stay where they are until it ends. A context manager: it ends at the exit.

    Attributes:
        lease_id: counts the leases of its manager from 0.
        kind: what holds them, such as "step", "load" or "store".
        owner: who, for whoever reads a report.
        deadline: the step at which it ends by itself, or None.
        is_active: False once it has ended.
        blocks: what it holds, in the order in which it will be released.
    """

    __slots__ = ("_book", "blocks", "deadline", "is_active", "kind", "lease_id", "owner")

    def __init__(
        self,
        book: LeaseBook,
        lease_id: int,
        kind: str,
        owner: str,
        deadline: int | None,
        blocks: list[Block],
    ) -> None:
        self._book = book
        self.lease_id = lease_id
        self.kind = kind
        self.owner = owner
        self.deadline = deadline
        self.blocks = blocks
        self.is_active = True

    @property
    def num_exclusive_blocks(self) -> int:
        """How many of its blocks nothing else holds: free when it ends; 0 then. O(blocks)."""
        return sum([block.ref_count == 1 for block in self.blocks]) if self.is_active else 0

    def end(self) -> bool:
        """End it; the blocks that nobody else holds are free now. O(blocks).

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
        raise MisuseError(f"{self!r} is a handle: wanted the one that was begun, not a copy")

    def __reduce__(self) -> NoReturn:
        raise MisuseError(f"{self!r} is a handle: its blocks are of this process alone")

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

    def begin(
        self, blocks: Sequence[Block], kind: str, owner: str, max_steps: SupportsIndex | None
    ) -> Lease:
        """Hold blocks until the lease ends. O(blocks).

        Raises:
            InvalidArgumentError: `kind` or `owner` is no string, or `max_steps` is below 1.
        """
        for name, text in (("kind", kind), ("owner", owner)):
            if not isinstance(text, str):
                raise InvalidArgumentError(f"{name}: wanted a string, got {type(text).__name__}")
        deadline = (
            None if max_steps is None else self._pool.step + as_int("max_steps", max_steps, 1)
        )
        lease = Lease(self, self._next_id, kind, owner, deadline, list(blocks))
        self.active[lease.lease_id] = lease
        try:
            if deadline is not None:
                self._deadlines.add(lease, deadline)
            self._pool.revive(lease.blocks)
        except BaseException:
            self._drop(lease)
            raise
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

    def is_its_own(self, lease: Lease) -> bool:
        """Say whether a lease, active or not, was begun here. O(1)."""
        return lease._book is self  # noqa: SLF001  # its own

    def due(self, step: int) -> tuple[Lease, ...]:
        """Return the leases whose deadline has come at `step`, oldest first. O(those * log)."""
        return tuple(sorted(self._deadlines.due(step), key=_age))

    def forget(self, ended: tuple[Lease, ...]) -> None:
        """Note that leases have ended and their blocks are released. Cannot fail. O(leases)."""
        for lease in ended:
            lease.is_active = False
            self._drop(lease)

    def _drop(self, lease: Lease) -> None:
        """Let a lease be none of the active ones. Cannot fail. O(log deadlines)."""
        del self.active[lease.lease_id]
        if lease.deadline is not None:
            self._deadlines.drop(lease, lease.deadline)

    def counts(self) -> dict[str, int]:
        """Return how many leases of each kind are active. O(active leases)."""
        return dict(Counter([lease.kind for lease in self.active.values()]))

    def num_deferred_blocks(self) -> int:
        """Return how many blocks are held by leases alone: free as soon as those end.

        O(leased blocks).
        """
        leased: Counter[Block] = Counter()
        for lease in self.active.values():
            leased.update(lease.blocks)
        return sum([block.ref_count == count for block, count in leased.items()])


def _age(lease: Lease) -> int:
    return lease.lease_id
