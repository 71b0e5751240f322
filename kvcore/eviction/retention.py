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


def check_wishes(wishes: Sequence[Retention]) -> tuple[Retention, ...]:
    """Return wishes as a tuple.

    Raises:
        InvalidArgumentError: something else than a `Retention` is among them.
    """
    try:
        checked = tuple(wishes)
    except TypeError:
        raise InvalidArgumentError(
            f"retain: wanted a sequence of Retention, got {type(wishes).__name__}"
        ) from None
    for wish in checked:
        if type(wish) is not Retention:
            raise InvalidArgumentError(f"retain: wanted Retention, got {type(wish).__name__}")
    return checked


Wish = tuple[int, int]
"""A priority, and the step from which it holds no longer."""


def wishes_for(
    wishes: Sequence[Retention], start: int, opened_at: int, now: int
) -> tuple[Wish, ...]:
    """Return what holds for a block that begins at token `start`. O(wishes).

    All wishes that reach into it or beyond it and whose time is not over.
    """
    found: list[Wish] = []
    for wish in wishes:
        deadline = FOREVER if wish.max_steps is None else opened_at + wish.max_steps
        if wish.stop > start and deadline > now:
            found.append((wish.priority, deadline))
    return tuple(found)
