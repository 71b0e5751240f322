"""Deadlines: find the things that have expired without examining the others.

Thousands of retained blocks and leases may have deadlines, and time advances at every step of an
engine. Things with the same deadline are grouped, and the deadlines are sorted. No clock is read,
and answers have the order of the calls.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Generic, TypeVar, final

Thing = TypeVar("Thing")


@final
class Deadlines(Generic[Thing]):
    """Things, each with one or several deadlines.

    Adding and dropping move part of the list of deadlines in memory, but not of the things.
    """

    __slots__ = ("_at", "_order")

    def __init__(self) -> None:
        self._at: dict[int, dict[Thing, None]] = {}
        self._order: list[int] = []  # the keys of the other, the earliest first

    def add(self, thing: Thing, deadline: int) -> None:
        """Add a deadline of a thing, or change nothing. O(log deadlines)."""
        at = self._at.get(deadline)
        if at is not None:
            at[thing] = None
            return
        self._at[deadline] = {thing: None}
        try:
            insort(self._order, deadline)
        except BaseException:
            del self._at[deadline]
            raise

    def drop(self, thing: Thing, deadline: int) -> None:
        """Remove a deadline of a thing, if it exists. Cannot fail. O(log deadlines)."""
        at = self._at.get(deadline)
        if at is not None and thing in at:
            del at[thing]
            if not at:
                del self._at[deadline]
                del self._order[bisect_left(self._order, deadline)]

    def due(self, now: int) -> list[Thing]:
        """Return the things with an expired deadline, each once; changes nothing. O(those)."""
        found: dict[Thing, None] = {}
        for deadline in self._order:
            if deadline > now:
                break
            found.update(self._at[deadline])
        return list(found)

    def clear(self) -> None:
        """Remove all deadlines. Cannot fail."""
        self._at.clear()
        self._order.clear()
