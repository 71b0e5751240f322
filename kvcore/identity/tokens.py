"""Token ids, packed: 4 bytes each, unsigned, native byte order.

A sequence keeps its tokens in an `array("I")`; a block's content is the `bytes` of a slice of it.
Packed input (any one-dimensional buffer of uint32) is copied as it is; other sequences of
integers cost a conversion a token. This file knows nothing of blocks.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Final, Protocol, SupportsIndex

from kvcore.errors import InvalidArgumentError

BYTES_PER_TOKEN: Final = 4
AT_ONCE: Final = 16
MAX_TOKEN: Final = 2**32 - 1


class TokenArray(Protocol):
    """An array of token ids: the methods that arrays of NumPy and tensors of torch share.

    A `str` has no `tolist`, so it is none.
    """

    def __len__(self) -> int:
        """Return the number of tokens."""

    def __iter__(self) -> Iterator[SupportsIndex]:
        """Iterate over the tokens."""

    def tolist(self) -> object:
        """Return them as a list."""


Tokens = Sequence[int] | memoryview | TokenArray
"""A sequence of ints in [0, 2**32), or a buffer of uint32 (array, numpy, memoryview)."""

_UINT32_FORMATS: Final = frozenset({"I", "@I", "=I", "L", "@L", "=L"})


def pack(tokens: Tokens, name: str = "tokens") -> array[int]:
    """Copy token ids into a new `array("I")`. O(len(tokens)).

    A buffer whose items are uint32 is copied by memory. `bytes` are refused: they could mean
    packed tokens or one token a byte; `memoryview(data).cast("I")` says the first. A bool is an
    int: to find one among the tokens of a list would cost more than to pack them all.

    Raises:
        InvalidArgumentError: not a sequence of integers in [0, 2**32).
    """
    kind = type(tokens)
    if kind is array and tokens.typecode == "I":  # type: ignore[union-attr]  # it is an array
        return tokens[:]  # type: ignore[index,return-value]
    packed = array("I")
    if isinstance(tokens, (str, bytes, bytearray, Mapping)) or not hasattr(tokens, "__getitem__"):
        raise InvalidArgumentError(
            f"{name}: wanted a sequence of token ids or a buffer of uint32, "
            f"got {type(tokens).__name__}"
        )
    view = None if kind is list else _uint32_view(tokens, name)
    length = len(tokens) if kind is list else 0
    try:
        if kind is list:
            packed.fromlist(tokens)  # type: ignore[arg-type]  # a third of what `extend` costs
        elif view is not None:
            packed.frombytes(view.tobytes())
        else:
            # An array of another type is a sequence of ints too.
            packed.extend(iter(tokens))  # type: ignore[arg-type]
    except OverflowError:
        raise InvalidArgumentError(
            f"{name}: wanted token ids in [0, 2**32), got one outside"
        ) from None
    except (TypeError, ValueError):
        raise InvalidArgumentError(f"{name}: wanted integer token ids, got another type") from None
    except RuntimeError as error:
        if kind is not list or len(tokens) == length:
            raise  # the caller's own: `from None` would hide why
        raise InvalidArgumentError(
            f"{name}: wanted a list of ints, got one that changes while it is read"
        ) from error
    return packed


def slices(packed: array[int], start: int, stop: int, width: int) -> list[bytes]:
    """Return the tokens from `start` to `stop - 1` in pieces of `width`, as bytes. O(stop - start).

    `stop - start` is a multiple of `width`.
    """
    data = packed[start:stop].tobytes()
    if stop - start == width:
        return [data]
    size = width * BYTES_PER_TOKEN
    at, many = 0, AT_ONCE * size
    found: list[bytes] = []
    if many <= len(data):
        cut = cutter(size)
        while at + many <= len(data):
            found += cut.unpack_from(data, at)
            at += many
    while at < len(data):
        found.append(data[at : at + size])
        at += size
    return found


@cache
def cutter(size: int) -> struct.Struct:
    """Return what cuts `AT_ONCE` pieces at once, at a third of the price of a slice each."""
    return struct.Struct(f"{size}s" * AT_ONCE)


def _uint32_view(tokens: Tokens, name: str) -> memoryview | None:
    """Return a view of `tokens` if it is a buffer of uint32, else None."""
    if isinstance(tokens, (list, tuple, range)):
        return None
    try:
        view = memoryview(tokens)  # type: ignore[arg-type]  # the call is the check
    except (TypeError, ValueError):
        return None
    if view.ndim != 1:
        raise InvalidArgumentError(f"{name}: wanted one dimension, got {view.ndim}")
    if view.itemsize == BYTES_PER_TOKEN and view.format in _UINT32_FORMATS:
        return view
    return None
