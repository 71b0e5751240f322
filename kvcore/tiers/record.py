"""Records: the form in which a copy of KV leaves the pool, byte for byte.

A segment is a file: a header of 32 bytes, then records one behind the other, each a header of 128
bytes and the payload. All integers are little-endian.

    segment   "KVTSEGM1" | version u32 | 0 u32 | number of the segment u64 | xxh3-64 of these 24
    record    "KVTR" | layer group u32 | priority u32 | 255: evicted, else 0 u8 | 0 u24
              | its segment u64 | number of the record u64 | length u64 | block hash 32
              | digest of meaning 32 | xxh3-128 of the payload 16
              | xxh3-64 of the header up to here, as it was before an eviction u64

An eviction writes one byte, because a longer write may be torn by a crash, and a header that is not
whole hides all records behind it.

A record is what it says or it is nothing: its header must be whole, name the segment in which it
stands, fit the key and the meaning that are asked for, and the payload must have the length and
the checksum of the header.

Does not know: files, what a payload means.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NewType

import xxhash

from kvcore.errors import InvalidArgumentError

VERSION: Final = 1

_SEGMENT: Final = struct.Struct("<8sIIQQ")
_RECORD: Final = struct.Struct("<4sIIIQQQ32s32s16sQ")
_SEGMENT_MAGIC: Final = b"KVTSEGM1"
_RECORD_MAGIC: Final = b"KVTR"
SEGMENT_BYTES: Final = _SEGMENT.size
RECORD_BYTES: Final = _RECORD.size
_PRIVATE_BIT: Final = 31
_SUM_BYTES: Final = 8  # the checksum at the end of a header
DEAD_OFFSET: Final = 12
DEAD: Final = b"\xff"  # no single bit that flips makes it of a 0

Key = NewType("Key", bytes)
"""What a copy is of: the layer group, 4 bytes, and the block hash, 32 bytes of sha256.

The highest bit of the group is set where the namespace has a salt: such copies stay in the process.
"""

Meaning = NewType("Meaning", bytes)
"""What the bytes of a payload mean: 32 bytes, from `meaning_of`."""

Fault = Literal[
    "torn", "corrupted", "short", "stale", "foreign", "full", "failed", "late", "gone", "refused"
]
"""Why a record was not served or not written.

torn: its bytes end too early, or were never written. corrupted: a checksum does not fit. short: it
has another length than asked for. stale: it belongs to another place or content. foreign: its
payload means something else. full: the device has no space. failed: the device reports an error.
Of a peer: late: it did not answer in time. gone: it had the record, and has it no more. refused:
the two processes have different secrets.
"""


def key_of(group: int, block_hash: bytes, *, is_private: bool = False) -> Key:
    """Return the key of a content: its layer group, and its block hash with sha256. O(1).

    Args:
        group: the number of the layer group.
        block_hash: 32 bytes.
        is_private: its namespace has a salt.
    """
    return Key((group | is_private << _PRIVATE_BIT).to_bytes(4, "little") + block_hash)


def is_private(key: Key) -> bool:
    """Return whether a content must not leave the process: its namespace has a salt. O(1)."""
    return key[3] >= 1 << (_PRIVATE_BIT - 24)


def group_of(key: Key) -> int:
    """Return the number of a key's layer group. O(1)."""
    return int.from_bytes(key[:4], "little") & ~(1 << _PRIVATE_BIT)


def meaning_of(fields: Mapping[str, str | int]) -> Meaning:
    """Return the digest of what payloads mean: weights, layout, dtype, rank. O(fields).

    Two caches exchange copies exactly if their fields are equal.

    Raises:
        InvalidArgumentError: a name or a value has another type.
    """
    pieces: list[bytes] = [b"KVM1"]
    for name in sorted(fields):
        value = fields[name]
        if type(name) is not str or type(value) not in (str, int):
            raise InvalidArgumentError(f"meaning: wanted text and numbers, got {name!r}: {value!r}")
        for part in (name, type(value).__name__, str(value)):
            encoded = part.encode()
            pieces += [struct.pack("<I", len(encoded)), encoded]
    return Meaning(hashlib.sha256(b"".join(pieces)).digest())


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a record.

    Attributes:
        key: what the payload is a copy of.
        meaning: what its bytes mean.
        priority: of its retention; 0: none.
        segment: the number of the segment that it stands in.
        number: counts the records of a tier; of two with one key the later counts.
        length: bytes of the payload.
        checksum: of the payload.
        is_dead: it was evicted; one byte of its header was written to say so.
    """

    key: Key
    meaning: Meaning
    priority: int
    segment: int
    number: int
    length: int
    checksum: bytes
    is_dead: bool = False

    def encode(self) -> bytes:
        """Return its 128 bytes. O(1)."""
        head = _RECORD.pack(
            _RECORD_MAGIC,
            int.from_bytes(self.key[:4], "little"),
            self.priority,
            0,
            self.segment,
            self.number,
            self.length,
            self.key[4:],
            self.meaning,
            self.checksum,
            0,
        )
        return _sealed(head)


def decode_header(data: bytes) -> Header | Fault:
    """Return the header that the bytes begin with, or why there is none. O(1)."""
    if len(data) < RECORD_BYTES:
        return "torn"
    head = data[:RECORD_BYTES]
    if not any(head):
        return "torn"
    is_dead = head[DEAD_OFFSET : DEAD_OFFSET + 1] == DEAD
    if is_dead:
        head = head[:DEAD_OFFSET] + b"\0" + head[DEAD_OFFSET + 1 :]
    fields = _RECORD.unpack(head)
    if fields[0] != _RECORD_MAGIC or _sealed(head) != head:
        return "corrupted"
    _, group, priority, _, segment, number, length, block_hash, meaning, checksum, _ = fields
    key = Key(group.to_bytes(4, "little") + block_hash)
    about = segment, number, length, checksum, is_dead
    return Header(key, Meaning(meaning), priority, *about)


def fault_of(
    head: bytes | bytearray | memoryview, payload: Sequence[memoryview], wanted: Header
) -> Fault | None:
    """Return why a header and the pieces of a payload are not this record; None: they are.

    O(bytes).
    """
    found = decode_header(bytes(head))
    if not isinstance(found, Header):
        return found
    if found.meaning != wanted.meaning:
        return "foreign"
    if found != wanted:
        return "stale"
    if sum(map(len, payload)) < wanted.length:
        return "torn"
    return None if checksum_of(*payload) == wanted.checksum else "corrupted"


def checksum_of(*pieces: bytes | memoryview) -> bytes:
    """Return the checksum of a payload: 16 bytes of xxh3-128. O(bytes)."""
    found = xxhash.xxh3_128()
    for piece in pieces:
        found.update(piece)
    return found.digest()


def encode_segment(number: int) -> bytes:
    """Return the header of a segment. O(1)."""
    return _sealed(_SEGMENT.pack(_SEGMENT_MAGIC, VERSION, 0, number, 0))


def segment_version(data: bytes, number: int) -> int | Fault:
    """Return the version of the segment that begins with these bytes, or what is wrong. O(1)."""
    if len(data) < SEGMENT_BYTES or not any(data[:SEGMENT_BYTES]):
        return "torn"
    head = data[:SEGMENT_BYTES]
    magic, version, _, found, _ = _SEGMENT.unpack(head)
    if magic != _SEGMENT_MAGIC or _sealed(head) != head:
        return "corrupted"
    return int(version) if found == number else "stale"


def _sealed(head: bytes) -> bytes:
    """Return a header with its checksum in its last bytes."""
    body = head[:-_SUM_BYTES]
    return body + xxhash.xxh3_64_intdigest(body).to_bytes(_SUM_BYTES, "little")
