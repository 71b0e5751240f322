"""The batches that a publisher has sent and can send again, and its last snapshot.

Batches are numbered without a gap from a first number on. By default that is the time, in
microseconds, so a publisher that starts again begins above all that it ever sent: a reader sees a
gap, asks, and is answered with a snapshot. (One that began at 0 again would seem to repeat itself.)

The buffer keeps the newest batches, up to a number of bytes and always one. A reader that asks for
older ones gets the last snapshot, which clears what was before, and every batch after it. So a
snapshot serves every reader until the buffer has moved past it, and a cache that was empty at the
beginning needs none at first. With `keep_base` the buffer never moves past the last snapshot: it
grows beyond its limit until the next one (`rebase`), and `is_base_old` says when that is due. This
knows nothing of sockets.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple


class Sent(NamedTuple):
    """A batch with its number."""

    sequence: int
    payload: bytes


class History:
    """The batches of one publisher.

    Args:
        first: the number of the first batch.
        replay_bytes: how much to keep.
        base: a payload that says, all anew, what can be hit before the first batch.
        keep_base: keep the last snapshot and every batch after it, so that every request can be
            answered at any time.

    Attributes:
        last: the number of the newest batch, `first - 1` before there is one.
    """

    __slots__ = ("_base", "_keep_base", "_kept", "_kept_bytes", "_replay_bytes", "_tail_bytes",
                 "last")  # fmt: skip

    def __init__(
        self, first: int, replay_bytes: int, base: bytes, *, keep_base: bool = False
    ) -> None:
        self.last = first - 1
        self._replay_bytes = replay_bytes
        self._keep_base = keep_base
        self._kept: deque[Sent] = deque()
        self._kept_bytes = 0
        self._tail_bytes = 0  # of the batches after the snapshot
        self._base: Sent | None = Sent(first - 1, base)

    @property
    def is_base_old(self) -> bool:
        """True if a history that keeps its snapshot should be given a new one (`rebase`). O(1).

        True once the batches after the snapshot exceed both half of `replay_bytes` and the size of
        the snapshot: snapshots add at most as many bytes as the batches themselves have.
        """
        if not self._keep_base or self._base is None:
            return False
        return self._tail_bytes > max(self._replay_bytes // 2, len(self._base.payload))

    def add(self, payload: bytes, *, anew: bool = False) -> Sent:
        """Number a batch and keep it. O(batches that have to go).

        Args:
            payload: the batch.
            anew: it clears what was before it, and says all that there is.
        """
        self.last += 1
        sent = Sent(self.last, payload)
        self._kept.append(sent)
        self._kept_bytes += len(payload)
        self._tail_bytes += len(payload)
        if anew:
            self._base = sent
            self._tail_bytes = 0
        self._trim()
        return sent

    def rebase(self, payload: bytes) -> None:
        """Take a snapshot of the moment after the newest batch. O(batches that have to go)."""
        self._base = Sent(self.last, payload)
        self._tail_bytes = 0
        self._trim()

    def _trim(self) -> None:
        """Drop the oldest batches that exceed the limit."""
        while self._kept_bytes > self._replay_bytes and len(self._kept) > 1:
            if self._base is not None and self._base.sequence < self._kept[0].sequence:
                if self._keep_base:
                    return
                self._base = None
            self._kept_bytes -= len(self._kept.popleft().payload)

    def since(self, sequence: int) -> list[Sent] | None:
        """Return the batches from a number on, or a snapshot and those after it. O(batches).

        A number that is still to come gets the snapshot too: its reader does not know us. None:
        the batches are gone and so is the snapshot; another is needed (`rebase`).
        """
        if self.last - len(self._kept) < sequence <= self.last + 1:
            return [sent for sent in self._kept if sent.sequence >= sequence]
        return self.anew()

    def anew(self) -> list[Sent] | None:
        """Return the last snapshot and what came after it, or None. O(batches)."""
        base = self._base
        if base is None:
            return None
        return [base, *[sent for sent in self._kept if sent.sequence > base.sequence]]
