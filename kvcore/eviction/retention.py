"""Retention: wishes that published blocks be reused later than least recently used would have it.

A sequence may ask for ranges of its tokens to be kept with a priority, for ever or for a number of
steps. The wish holds for whole paths: a block is kept at least as strongly as any block after it in
the sequence, because content without what stands before it is worth nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvcore.arguments import as_int
from kvcore.errors import InvalidArgumentError

FOREVER = 2**63 - 1
"""The deadline of what has none."""


@dataclass(frozen=True, slots=True)
class Retention:
    """A wish: keep the blocks of a range of tokens longer than others.

    Attributes:
        start: the first position.
        stop: one past the last.
        priority: 1 or more; what has none is reused first, then the lowest.
        max_steps: for how many steps from the opening of the sequence; None: for ever.

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
    """Return wishes as a tuple.

    Raises:
        InvalidArgumentError: something else than a `Retention` is among them.
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
"""A priority, and the step from which it holds no longer."""


def retention_terms(
    retention: Sequence[Retention], start: int, opened_at: int, now: int
) -> tuple[RetentionTerm, ...]:
    """Return what holds for a block that begins at token `start`. O(wishes).

    All wishes that reach into it or beyond it and whose time is not over.
    """
    found: list[RetentionTerm] = []
    for asked in retention:
        deadline = FOREVER if asked.max_steps is None else opened_at + asked.max_steps
        if asked.stop > start and deadline > now:
            found.append((asked.priority, deadline))
    return tuple(found)
