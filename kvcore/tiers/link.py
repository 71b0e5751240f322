"""The link between a process that serves copies of KV and one that asks: messages, byte for byte.

A connection begins with a handshake, and is then for one thing: to hear which copies there are, to
ask for them, or to ask for them and read them out of memory of the server (`memory.py`). All
integers are little-endian.

    welcome   server: "KVPEER01" | nonce 32
    hello     client: "KVPEER01" | 1: to hear, 2: to ask, 3: to ask and read u8 | nonce 32
              | digest of meaning 32 | proof 32
    answer    server: 0: agreed, 1: another meaning, 2: another secret, 3: no memory to read u8
              | its process 16 | proof 32
    memory    server, where the client is to read: where its copies will stand u64 | bytes of what
              describes the memory u32 | xxh3-64 of that u64; then that
    news      server: 1: forget all before u8 | keys that came u32 | keys that went u32
              | xxh3-64 of the keys u64; then the keys, 36 bytes each
    question  client: its number u64 | key 36 | length u64
    copy      server: the header of a record (`record.py`), then its payload; the segment is the
              number that the connection has from the nonce of the client, the number of the record
              is that of the question; a record marked as evicted has no payload: it is not there.
              Where the client reads, the payload is in the memory, until:
    read      client: 1 u8

A proof is an HMAC with sha256 of both nonces, of what its side has said and of its role, under the
secret that both processes share. Nothing of the server but a nonce is sent before the proof of the
client fits, and no key before the meanings are equal. Messages are neither encrypted nor signed.

Does not know: tiers, what a payload means.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import math
import re
import socket
import struct
import time
from collections.abc import Sequence
from typing import Final, Protocol, final

import xxhash

from kvcore.errors import InvalidArgumentError
from kvcore.tiers.record import Fault, Key

MAGIC: Final = b"KVPEER01"
WELCOME: Final = struct.Struct("<8s32s")
HELLO: Final = struct.Struct("<8sB32s32s32s")
ANSWER: Final = struct.Struct("<B16s32s")
NEWS: Final = struct.Struct("<BIIQ")
MEMORY: Final = struct.Struct("<QIQ")
QUESTION: Final = struct.Struct("<Q36sQ")
READ: Final = b"\1"
NONCE_BYTES: Final = 32
PROCESS_BYTES: Final = 16
KEY_BYTES: Final = 36
MAX_NEWS: Final = 65_536
"""The most keys in a message."""
_MAX_DESCRIPTION_BYTES: Final = 1 << 20

TO_HEAR: Final = 1
TO_ASK: Final = 2
TO_READ: Final = 3
AGREED: Final = 0
OTHER_MEANING: Final = 1
OTHER_SECRET: Final = 2
NO_MEMORY: Final = 3

_ADDRESS: Final = re.compile(r"(?:\[([0-9a-fA-F:.%]+)\]|([^\s:\[\]]+)):(\d{1,5})")
_MAX_PORT: Final = 65_535


class LinkError(Exception):
    """A peer has not done what the link wants; `fault` says what."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault)
        self.fault: Fault = fault


class Channel(Protocol):
    """A connection: bytes in order, or an error. A deadline is a time of `time.monotonic`."""

    def send(self, pieces: Sequence[bytes | memoryview], deadline_s: float) -> None:
        """Send pieces one behind the other.

        Raises:
            LinkError: "late".
            OSError: the connection is gone.
        """
        ...

    def receive(self, size: int, deadline_s: float) -> bytearray:
        """Return the next `size` bytes.

        Raises:
            LinkError: "late", or "torn": the connection ended before.
            OSError: the connection is gone.
        """
        ...

    def close(self) -> None:
        """End the connection; a call that waits on another thread fails. Must not raise."""
        ...


def proof(secret: bytes, role: bytes, *said: bytes) -> bytes:
    """Return what only those who know the secret can say: 32 bytes. O(bytes)."""
    return hmac.new(secret, role + b"".join(said), hashlib.sha256).digest()


def encode_news(came: Sequence[Key], went: Sequence[Key], *, is_new: bool) -> bytes:
    """Return a message of news. O(keys)."""
    keys = b"".join([*came, *went])
    head = NEWS.pack(is_new, len(came), len(went), xxhash.xxh3_64_intdigest(keys))
    return head + keys


def receive_news(channel: Channel, deadline_s: float) -> tuple[bool, list[Key], list[Key]]:
    """Return whether to forget all before, the keys that came and those that went. O(keys).

    Raises:
        LinkError, OSError: there are none before the deadline, or they are wrong.
    """
    is_new, came, went, checksum = NEWS.unpack(channel.receive(NEWS.size, deadline_s))
    if came + went > MAX_NEWS:
        raise LinkError("corrupted")
    data = bytes(channel.receive((came + went) * KEY_BYTES, deadline_s))
    if xxhash.xxh3_64_intdigest(data) != checksum:
        raise LinkError("corrupted")
    keys = [Key(data[at : at + KEY_BYTES]) for at in range(0, len(data), KEY_BYTES)]
    return bool(is_new), keys[:came], keys[came:]


def encode_memory(offset: int, description: bytes) -> bytes:
    """Return the message that says where copies will stand. O(len(description))."""
    checksum = xxhash.xxh3_64_intdigest(description)
    return MEMORY.pack(offset, len(description), checksum) + description


def receive_memory(channel: Channel, deadline_s: float) -> tuple[int, bytes]:
    """Return where copies will stand, and what describes the memory. O(bytes).

    Raises:
        LinkError, OSError: it does not come before the deadline, or is wrong.
    """
    offset, size, checksum = MEMORY.unpack(channel.receive(MEMORY.size, deadline_s))
    if size > _MAX_DESCRIPTION_BYTES:
        raise LinkError("corrupted")
    description = bytes(channel.receive(size, deadline_s))
    if xxhash.xxh3_64_intdigest(description) != checksum:
        raise LinkError("corrupted")
    return offset, description


def parse_address(name: str, text: str) -> tuple[str, int]:
    """Return the host and the port of HOST:PORT; an IPv6 address stands in brackets. O(1).

    Raises:
        InvalidArgumentError: the text is not that; it begins with `name`.
    """
    match = _ADDRESS.fullmatch(text)
    if match is None or int(match[3]) > _MAX_PORT:
        raise InvalidArgumentError(f"{name}: wanted HOST:PORT, got {text!r}")
    return match[1] or match[2], int(match[3])


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine and no network reaches it. O(1)."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@final
class TcpChannel:
    """A connection over TCP."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    @classmethod
    def connect(cls, address: tuple[str, int], deadline_s: float) -> TcpChannel:
        """Return a connection to an address.

        Raises:
            OSError: nothing answers there.
        """
        return cls(socket.create_connection(address, max(0.001, deadline_s - time.monotonic())))

    def send(self, pieces: Sequence[bytes | memoryview], deadline_s: float) -> None:
        """See `Channel.send`."""
        for piece in pieces:
            left = memoryview(piece)
            while left:
                self._wait(deadline_s)
                try:
                    left = left[self._socket.send(left) :]
                except TimeoutError:
                    raise LinkError("late") from None

    def receive(self, size: int, deadline_s: float) -> bytearray:
        """See `Channel.receive`."""
        data = bytearray(size)
        left = memoryview(data)
        while left:
            self._wait(deadline_s)
            try:
                count = self._socket.recv_into(left)
            except TimeoutError:
                raise LinkError("late") from None
            if not count:
                raise LinkError("torn")
            left = left[count:]
        return data

    def close(self) -> None:
        """See `Channel.close`."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _wait(self, deadline_s: float) -> None:
        """Let the next call wait until the deadline at most."""
        if deadline_s == math.inf:
            self._socket.settimeout(None)
            return
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise LinkError("late")
        self._socket.settimeout(left_s)
