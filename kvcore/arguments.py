"""Argument checks: what every public call does first.

An argument that is an integer in spirit (any type with `__index__`, so numpy's too) becomes a
plain `int`; anything else, a bool included, is an `InvalidArgumentError` that names the argument,
what was wanted and what came. What is true or false is a bool and nothing else: 0 and "no" would
mean the same to an `if`, and not to a reader.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Final, Protocol, SupportsIndex, TypeVar

from kvcore.errors import InvalidArgumentError

_Item = TypeVar("_Item")

MAX_COUNT: Final = 2**62
"""The largest number of tokens, blocks or steps that a call accepts."""


class Flag(Protocol):
    """True or False: what only a bool has, so a type checker refuses an int.

    Compiled code would check an argument of type `bool` itself, before `as_bool` can name it.
    """

    def __and__(self, other: bool, /) -> bool:
        """Do what a bool does."""


def as_bool(name: str, value: object) -> bool:
    """Return `value`, which is True or False. O(1).

    Raises:
        InvalidArgumentError: anything else.
    """
    if value is True or value is False:
        return value is True
    raise InvalidArgumentError(
        f"{name}: wanted True or False, got {type(value).__name__} {value!r}"
    )


def as_int(name: str, value: object, minimum: int, maximum: int | None = None) -> int:
    """Return `value` as an int within [minimum, maximum]; None: at most `MAX_COUNT`. O(1).

    Raises:
        InvalidArgumentError: not an integer, or out of range.
    """
    if type(value) is int:
        if minimum <= value <= (MAX_COUNT if maximum is None else maximum):
            return value
        number = value
    else:
        if isinstance(value, bool):
            raise InvalidArgumentError(f"{name}: wanted an integer, got the bool {value}")
        try:
            number = operator.index(value)  # type: ignore[arg-type]  # the call is the check
        except TypeError:
            raise InvalidArgumentError(
                f"{name}: wanted an integer, got {type(value).__name__} {value!r}"
            ) from None
    most = MAX_COUNT if maximum is None else maximum
    if not minimum <= number <= most:
        is_open = maximum is None and number < minimum
        wanted = f"at least {minimum}" if is_open else f"{minimum} to {most}"
        # Python refuses to print integers of thousands of digits.
        came = str(number) if number.bit_length() < 1024 else f"one of {number.bit_length()} bits"
        raise InvalidArgumentError(f"{name}: wanted {wanted}, got {came}")
    return number


def check_several(name: str, values: object) -> None:
    """Raise where an argument is nothing that can be gone through. O(1)."""
    if not hasattr(values, "__iter__"):
        raise InvalidArgumentError(f"{name}: wanted a sequence, got {type(values).__name__}")


def as_list(name: str, values: Iterable[_Item]) -> list[_Item]:
    """Return what can be gone through as a new list. O(values).

    Raises:
        InvalidArgumentError: it cannot be gone through.
    """
    check_several(name, values)
    return list(values)


def as_counts(name: str, numbers: SupportsIndex | Sequence[SupportsIndex], count: int) -> list[int]:
    """Return numbers of a step as ints, or one number `count` times. O(count).

    Raises:
        InvalidArgumentError: one is no integer or out of range, or there are not `count` of them.
    """
    if type(numbers) is int and 0 <= numbers <= MAX_COUNT:
        return [numbers] * count
    if not hasattr(numbers, "__iter__"):
        return [as_int(name, numbers, 0)] * count
    if type(numbers) is list and len(numbers) == count == [*map(type, numbers)].count(int):
        # In C, because a step has hundreds. What is 1 everywhere needs no second look.
        given: list[int] = numbers.copy()
        if given.count(1) == count or (min(given) >= 0 and sum(given) <= MAX_COUNT):
            return given
    found = [
        number if type(number) is int and 0 <= number <= MAX_COUNT else as_int(name, number, 0)
        for number in numbers
    ]
    if len(found) != count:
        raise InvalidArgumentError(
            f"{name}: wanted one for each of {count} sequences, got {len(found)}"
        )
    return found


def check_sum(tokens: list[int], counts: list[int]) -> None:
    """Raise where there are not as many tokens as the sequences take."""
    if len(tokens) != sum(counts):
        raise InvalidArgumentError(f"tokens: wanted {sum(counts)} in all, got {len(tokens)}")
