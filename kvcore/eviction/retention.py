"""Retention: keep published blocks in the cache longer than the LRU order would.

A sequence may give ranges of its tokens a priority, without end or for a number of steps. Retention
holds for whole prefixes: a block has at least the priority of every later block of the sequence,
because content without its prefix cannot be hit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvcore.arguments import as_int
from kvcore.errors import InvalidArgumentError

FOREVER = 2**63 - 1
"""The deadline of a term without end."""


@dataclass(frozen=True, slots=True)
class Retention:
    """Keep the blocks of a range of tokens in the cache longer than others.

    Attributes:
        start: the first position.
        stop: one past the last.
        priority: 1 or more; blocks without a priority are reused first, then the lowest.
        max_steps: the number of steps from the opening of the sequence; None: no end.

    Raises:
        InvalidArgumentError: a field is out of range.
    """

    start: int
    stop: int
    priority: int = 1
    max_steps: int | None = None

    def __post_init__(self) -> None:
        start = as_int("start", self.start, 0)
        object.__setattr__(self, "start", start)
        object.__setattr__(self, "stop", as_int("stop", self.stop, start + 1))
        object.__setattr__(self, "priority", as_int("priority", self.priority, 1, 2**31 - 1))
        if self.max_steps is not None:
            object.__setattr__(self, "max_steps", as_int("max_steps", self.max_steps, 1, 2**62))


def check_retention(retention: Sequence[Retention]) -> tuple[Retention, ...]:
    """Return retention as a tuple.

    Raises:
        InvalidArgumentError: an entry is not a `Retention`.
    """
    try:
        checked = tuple(retention)
    except TypeError:
        raise InvalidArgumentError(
            f"retain: wanted a sequence of Retention, got {type(retention).__name__}"
        ) from None
    for asked in checked:
        if type(asked) is not Retention:
            raise InvalidArgumentError(f"retain: wanted Retention, got {type(asked).__name__}")
    return checked


RetentionTerm = tuple[int, int]
"""A priority, and the step at which it ends."""


def retention_terms(
    retention: Sequence[Retention], start: int, opened_at: int, now: int
) -> tuple[RetentionTerm, ...]:
    """Return the terms of a block that begins at token `start`. O(len(retention)).

    They come from all ranges that end after `start` and have not expired.
    """
    found: list[RetentionTerm] = []
    for asked in retention:
        deadline = FOREVER if asked.max_steps is None else opened_at + asked.max_steps
        if asked.stop > start and deadline > now:
            found.append((asked.priority, deadline))
    return tuple(found)
