"""Who may share a block (namespaces), and what a block is called outside (names).

A prefix hit never looks at anything in this file but the encoding of a namespace, which is
compared whole: identity is exact. A *name* is derived, for the world outside the process (events,
other tiers, routers), and computed only when asked for:

    root     = H("KVN1" | fields of the namespace)
    name[i]  = H("KVB1" | size of name[i-1] | name[i-1] | number of tokens | tokens | items)

Integers are little-endian: 1 byte for a tag or a name's size, 4 for a length or a token, 8 for a
number. A field is (tag, length, value); fields stand in ascending order of their tags and one that
has its default is left out, so equal values give equal bytes in every process, and
`decode_namespace(encode_namespace(x)) == x` proves that different values give different bytes.
Items are encoded as `items.py` says; text has none.
H is xxh3-128, or sha256 where a name leaves the trust domain.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, NewType

import xxhash

from kvcore.arguments import as_int
from kvcore.errors import InvalidArgumentError
from kvcore.items import Item, encode_items
from kvcore.tokens import BYTES_PER_TOKEN, slices

BlockHash = NewType("BlockHash", bytes)
"""A block's name: 16 bytes of xxh3-128 or 32 bytes of sha256."""

NameAlgorithm = Literal["xxh3-128", "sha256"]

_NAMESPACE_MAGIC: Final = b"KVN1"
_BLOCK_MAGIC: Final = b"KVB1"
_TAG_SALT: Final = 1
_TAG_LORA_NAME: Final = 2
_TAG_LORA_VERSION: Final = 3
_TAG_WEIGHT_EPOCH: Final = 4
_MAX_U64: Final = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Namespace:
    """Everything beside the tokens that a block's content depends on.

    Two requests share blocks exactly when their namespaces are equal.

    Attributes:
        salt: a tenant's secret; requests with different salts never meet.
        lora_name: the adapter, or None for the base model (an adapter named "" is another thing).
        lora_version: which content that adapter name stands for now.
        weight_epoch: which version of the base weights computed the KV.

    Raises:
        InvalidArgumentError: a field has the wrong type or is out of range.
    """

    salt: bytes = b""
    lora_name: str | None = None
    lora_version: int = 0
    weight_epoch: int = 0

    def __post_init__(self) -> None:
        # Exact types: a subclass may compare or encode as something it is not.
        if type(self.salt) is not bytes:
            raise InvalidArgumentError(f"salt: wanted bytes, got {type(self.salt).__name__}")
        if self.lora_name is not None and type(self.lora_name) is not str:
            raise InvalidArgumentError(
                f"lora_name: wanted str or None, got {type(self.lora_name).__name__}"
            )
        if self.lora_name is not None:
            try:
                self.lora_name.encode()
            except UnicodeEncodeError:
                raise InvalidArgumentError(
                    f"lora_name: wanted text that UTF-8 can encode, got {self.lora_name!r}"
                ) from None
        # Any integer type is normalised, so that equal values are equal bytes.
        for name in ("lora_version", "weight_epoch"):
            number = as_int(name, getattr(self, name), 0, _MAX_U64)
            object.__setattr__(self, name, number)
        if self.lora_name is None and self.lora_version:
            raise InvalidArgumentError(
                f"lora_version: wanted 0 without a lora_name, got {self.lora_version}"
            )


DEFAULT_NAMESPACE: Final = Namespace()


def encode_namespace(namespace: Namespace) -> bytes:
    """Return the canonical bytes of a namespace. O(size of its fields)."""
    fields = [_NAMESPACE_MAGIC]
    if namespace.salt:
        fields.append(_field(_TAG_SALT, namespace.salt))
    if namespace.lora_name is not None:
        fields.append(_field(_TAG_LORA_NAME, namespace.lora_name.encode()))
    if namespace.lora_version:
        fields.append(_field(_TAG_LORA_VERSION, struct.pack("<Q", namespace.lora_version)))
    if namespace.weight_epoch:
        fields.append(_field(_TAG_WEIGHT_EPOCH, struct.pack("<Q", namespace.weight_epoch)))
    return b"".join(fields)


def decode_namespace(data: bytes) -> Namespace:
    """Return the namespace that `encode_namespace` turned into `data`.

    Raises:
        InvalidArgumentError: not such bytes (another version, cut short, not canonical).
    """
    if data[:4] != _NAMESPACE_MAGIC:
        raise InvalidArgumentError(f"data: wanted it to begin with KVN1, got {data[:4]!r}")
    fields: dict[int, bytes] = {}
    position = 4
    while position < len(data):
        head = data[position : position + 5]
        tag, length = struct.unpack("<BI", head) if len(head) == 5 else (0, 0)
        value = data[position + 5 : position + 5 + length]
        if not _TAG_SALT <= tag <= _TAG_WEIGHT_EPOCH or len(value) != length:
            raise InvalidArgumentError(f"data: no whole field at byte {position}")
        fields[tag] = value
        position += 5 + length
    try:
        name = fields.get(_TAG_LORA_NAME)
        namespace = Namespace(
            salt=fields.get(_TAG_SALT, b""),
            lora_name=None if name is None else name.decode(),
            lora_version=struct.unpack("<Q", fields.get(_TAG_LORA_VERSION, bytes(8)))[0],
            weight_epoch=struct.unpack("<Q", fields.get(_TAG_WEIGHT_EPOCH, bytes(8)))[0],
        )
    except (struct.error, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"data: a field does not decode: {error}") from None
    if encode_namespace(namespace) != data:
        raise InvalidArgumentError("data: wanted the canonical encoding, got another")
    return namespace


def digest(data: bytes, algorithm: NameAlgorithm) -> BlockHash:
    """Return the digest that names `data`: 16 bytes for xxh3-128, 32 for sha256. O(len(data)).

    Raises:
        InvalidArgumentError: an unknown algorithm.
    """
    if algorithm == "xxh3-128":
        return BlockHash(xxhash.xxh3_128_digest(data))
    if algorithm == "sha256":
        return BlockHash(hashlib.sha256(data).digest())
    raise InvalidArgumentError(f"algorithm: wanted 'xxh3-128' or 'sha256', got {algorithm!r}")


def encode_block(parent: bytes, content: bytes, block_size: int) -> bytes:
    """Return the bytes that a block's name is the digest of.

    Args:
        parent: the name of what stands before it.
        content: its tokens in native byte order, 4 bytes each, then its encoded items.
        block_size: how many tokens that is.
    """
    if sys.byteorder == "big":
        swapped = array("I", content[: block_size * BYTES_PER_TOKEN])
        swapped.byteswap()
        content = swapped.tobytes() + content[block_size * BYTES_PER_TOKEN :]
    head = struct.pack("<B", len(parent)) + parent + struct.pack("<I", block_size)
    return b"".join((_BLOCK_MAGIC, head, content))


def names_after(
    parent: bytes, contents: Sequence[bytes], block_size: int, algorithm: NameAlgorithm
) -> list[BlockHash]:
    """Return the names of contents that follow each other, the first after `parent`. O(tokens).

    `digest(encode_block(...))` of each in turn, in one loop: an eighth of a microsecond a block in
    place of half a one (compiled).

    Raises:
        InvalidArgumentError: an unknown algorithm.
    """
    names: list[BlockHash] = []
    if sys.byteorder == "big" or algorithm != "xxh3-128":
        for content in contents:
            parent = digest(encode_block(parent, content, block_size), algorithm)
            names.append(BlockHash(parent))
        return names
    head = _BLOCK_MAGIC + struct.pack("<B", len(parent))
    size = struct.pack("<I", block_size)
    for content in contents:
        parent = xxhash.xxh3_128_digest(head + parent + size + content)
        names.append(BlockHash(parent))
    return names


class NameChain:
    """The names of a sequence's full blocks, extended and cut together with its tokens.

    Args:
        namespace_key: `encode_namespace(...)` of the sequence's namespace.
        block_size: tokens a block.
        algorithm: "xxh3-128", or "sha256" for names that leave the trust domain.

    Raises:
        InvalidArgumentError: an unknown algorithm.
    """

    __slots__ = ("_block_size", "_names", "_root", "algorithm")

    def __init__(self, namespace_key: bytes, block_size: int, algorithm: NameAlgorithm) -> None:
        self.algorithm: NameAlgorithm = algorithm
        self._block_size = block_size
        self._root = digest(namespace_key, algorithm)
        self._names: list[BlockHash] = []

    def names(
        self, tokens: array[int], num_blocks: int, items: Sequence[Item] = ()
    ) -> tuple[BlockHash, ...]:
        """Return the names of the first `num_blocks` blocks. O(blocks not named before)."""
        size = self._block_size
        first = len(self._names)
        parent = self._names[-1] if first else self._root
        contents = block_contents(tokens, items, first, max(first, num_blocks), size)
        self._names += names_after(parent, contents, size, self.algorithm)
        return tuple(self._names[:num_blocks])

    def cut(self, num_blocks: int) -> None:
        """Forget every name after the first `num_blocks`: their tokens may change."""
        del self._names[num_blocks:]


def block_contents(
    tokens: array[int], items: Sequence[Item], first: int, stop: int, block_size: int
) -> list[bytes]:
    """Return what stands in the blocks from number `first` to `stop - 1`. O(their tokens)."""
    contents = slices(tokens, first * block_size, stop * block_size, block_size)
    if items:
        extra = encode_items(items, first, stop, block_size)
        return [content + more for content, more in zip(contents, extra, strict=True)]
    return contents


def _field(tag: int, value: bytes) -> bytes:
    return struct.pack("<BI", tag, len(value)) + value
