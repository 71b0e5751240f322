"""Namespaces, which say who may share a block, and their canonical encoding.

A prefix hit compares the encoding whole, so identity is exact:

    "KVN1" | fields of the namespace

A field is (tag, length, value): 1 byte, 4 bytes little-endian, and the bytes; a number is 8 bytes.
Fields stand in ascending order of their tags and one that has its default is left out, so equal
values give equal bytes in every process, and `decode_namespace(encode_namespace(x)) == x` proves
that different values give different bytes. `identity/block_hash.py` hashes blocks.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from kvcore.arguments import as_int
from kvcore.errors import InvalidArgumentError

_NAMESPACE_MAGIC: Final = b"KVN1"
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
        lora_version: the version of the adapter behind that name.
        weight_epoch: the version of the base weights that computed the KV.

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


def has_salt(namespace_key: bytes) -> bool:
    """Return whether an encoded namespace has a salt, which is its first field. O(1)."""
    return namespace_key[4:5] == bytes([_TAG_SALT])


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


def _field(tag: int, value: bytes) -> bytes:
    return struct.pack("<BI", tag, len(value)) + value
