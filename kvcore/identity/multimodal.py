"""Multimodal items: images, audio and prompt embeddings, each over a range of positions.

The KV of a block depends on the inputs at its positions, and under an image the token ids are only
placeholders. So the identity of a block is its tokens and, for every item that overlaps it: the
content of the item, the rows that lie in the block and their places, and the mask of those rows. If
an item cannot be described this way, open its request with `namespace=None`: it is not cached.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvcore.arguments import as_int
from kvcore.errors import InvalidArgumentError

_HEAD: Final = struct.Struct("<IQIBI")
"""The head before the content of an encoded item; see `encode_items`."""


@dataclass(frozen=True, slots=True)
class MultimodalItem:
    """One image, audio clip or run of prompt embeddings.

    Attributes:
        content: its full identity: a digest of the data with its shape and type, or the data
            itself. Never shorten the digest: a collision would share the KV of another input.
        start: the position of its first row in the sequence.
        length: the number of positions; at least 1.
        mask: for each row one byte, 1 where the row is an embedding and 0 where the token itself
            is embedded; None: every row is.

    Raises:
        InvalidArgumentError: a field has the wrong type or is out of range.
    """

    content: bytes
    start: int
    length: int
    mask: bytes | None = None

    def __post_init__(self) -> None:
        if type(self.content) is not bytes:
            raise InvalidArgumentError(f"content: wanted bytes, got {type(self.content).__name__}")
        if not self.content:
            raise InvalidArgumentError("content: wanted at least one byte, got none")
        object.__setattr__(self, "start", as_int("start", self.start, 0, 2**63 - 1))
        object.__setattr__(self, "length", as_int("length", self.length, 1, 2**32 - 1))
        if self.mask is None:
            return
        if type(self.mask) is not bytes:
            raise InvalidArgumentError(f"mask: wanted bytes, got {type(self.mask).__name__}")
        if len(self.mask) != self.length or set(self.mask) - {0, 1}:
            raise InvalidArgumentError(
                f"mask: wanted {self.length} bytes of 0 or 1, got {self.mask!r}"
            )


def as_items(items: Sequence[MultimodalItem]) -> tuple[MultimodalItem, ...]:
    """Return items as a tuple. O(items).

    Raises:
        InvalidArgumentError: an entry is not a `MultimodalItem`. Subclasses are refused too: they
            may mean more than their fields say, and would share blocks that they should not.
    """
    try:
        checked = tuple(items)
    except TypeError:
        raise InvalidArgumentError(
            f"items: wanted a sequence of MultimodalItem, got {type(items).__name__}"
        ) from None
    for item in checked:
        if type(item) is not MultimodalItem:
            raise InvalidArgumentError(f"items: wanted MultimodalItem, got {type(item).__name__}")
    return checked


def check_items(
    items: tuple[MultimodalItem, ...], first: int, num_tokens: int
) -> tuple[MultimodalItem, ...]:
    """Return items if they lie in order, apart, and from `first` to `num_tokens`. O(items).

    Raises:
        InvalidArgumentError: they do not.
    """
    for item in items:
        if item.start < first or item.start + item.length > num_tokens:
            raise InvalidArgumentError(
                f"items: wanted them apart, in order and within positions {first} to "
                f"{num_tokens - 1}, got one from {item.start} to {item.start + item.length - 1}"
            )
        first = item.start + item.length
    return items


def cut_items(items: tuple[MultimodalItem, ...], num_tokens: int) -> tuple[MultimodalItem, ...]:
    """Return the parts of items within the first `num_tokens` tokens. O(items)."""
    left: list[MultimodalItem] = []
    for item in items:
        length = min(item.length, num_tokens - item.start)
        if length == item.length:
            left.append(item)
        elif length > 0:
            mask = None if item.mask is None else item.mask[:length]
            left.append(MultimodalItem(item.content, item.start, length, mask))
    return tuple(left)


def encode_items(
    items: Sequence[MultimodalItem], first: int, stop: int, block_size: int
) -> list[bytes]:
    """Return, for the blocks from number `first` to `stop - 1`, what reaches into each.

    Canonical bytes, empty where nothing does. For each item, little-endian: the place of its first
    row in the block (4 bytes), which of its rows that is (8), how many rows (4), whether a mask
    follows (1), the size of the content (4), the content, the mask's bytes for those rows.
    O(blocks + items + blocks that items reach into).

    Args:
        items: in order and apart.
        first: the number of the first block.
        stop: one past the last.
        block_size: tokens a block.
    """
    encoded = [b""] * (stop - first)
    for item in items:
        end = item.start + item.length
        for number in range(max(first, item.start // block_size), min(stop, -(-end // block_size))):
            begin = number * block_size
            low, high = max(begin, item.start), min(begin + block_size, end)
            row = low - item.start
            masked = item.mask is not None
            head = _HEAD.pack(low - begin, row, high - low, masked, len(item.content))
            mask = b"" if item.mask is None else item.mask[row : row + high - low]
            encoded[number - first] += b"".join((head, item.content, mask))
    return encoded


def decode_items(encoded: Sequence[bytes], block_size: int) -> tuple[MultimodalItem, ...]:
    """Return the items of which `encode_items` made these bytes, for blocks from number 0 on.

    Items that reach beyond them are cut off. O(blocks + rows).
    """
    items: list[MultimodalItem] = []
    for number, block in enumerate(encoded):
        start = 0
        while start < len(block):
            place, row, count, masked, size = _HEAD.unpack_from(block, start)
            content = start + _HEAD.size
            start = content + size + count * masked
            mask = block[content + size : start] if masked else None
            if row:  # it goes on from the block before
                before = items.pop()
                mask = None if before.mask is None else before.mask + (mask or b"")
                items.append(MultimodalItem(before.content, before.start, row + count, mask))
            else:
                first = number * block_size + place
                items.append(MultimodalItem(block[content : content + size], first, count, mask))
    return tuple(items)


def cut_encoded(encoded: bytes, num_rows: int) -> bytes:
    """Return what `encode_items` would have given for a block of `num_rows` tokens. O(items).

    Args:
        encoded: the items of one block.
        num_rows: the number of its first tokens to look at.
    """
    kept: list[bytes] = []
    start = 0
    while start < len(encoded):
        place, row, count, masked, size = _HEAD.unpack_from(encoded, start)
        content = start + _HEAD.size
        mask = content + size
        start = mask + count * masked
        if place < num_rows:
            count = min(count, num_rows - place)
            head = _HEAD.pack(place, row, count, masked, size)
            kept += [head, encoded[content:mask], encoded[mask : mask + count * masked]]
    return b"".join(kept)
