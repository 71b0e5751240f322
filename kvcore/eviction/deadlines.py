"""Deadlines: which of many things end by a given time, without a look at the others.

Kept blocks and leases have them, in thousands, and time passes at every step of an engine. Things
of one deadline stand together, and the deadlines in order. What they are and what happens then is
not known here. Nothing here reads a clock, and the order of answers is that of the calls.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Generic, TypeVar, final

Thing = TypeVar("Thing")


@final
class Deadlines(Generic[Thing]):
    """Things, each with one or several deadlines.

    To add and to drop moves a part of a list of the deadlines in memory, but not of the things.
    """

    __slots__ = ("_at", "_order")

    def __init__(self) -> None:
        self._at: dict[int, dict[Thing, None]] = {}
        self._order: list[int] = []  # the keys of the other, the earliest first

    def add(self, thing: Thing, deadline: int) -> None:
        """Note a deadline of a thing, or change nothing. O(log deadlines)."""
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
        """Forget a deadline of a thing, if it is known. Cannot fail. O(log deadlines)."""
        at = self._at.get(deadline)
        if at is not None and thing in at:
            del at[thing]
            if not at:
                del self._at[deadline]
                del self._order[bisect_left(self._order, deadline)]

    def due(self, now: int) -> list[Thing]:
        """Return the things of which a deadline has come, each once; changes nothing. O(those)."""
        found: dict[Thing, None] = {}
        for deadline in self._order:
            if deadline > now:
                break
            found.update(self._at[deadline])
        return list(found)

    def clear(self) -> None:
        """Forget all. Cannot fail."""
        self._at.clear()
        self._order.clear()
