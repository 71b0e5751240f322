"""The server of copies: answers peers that ask for contents of this process's tiers.

Decides: who is answered, and with what. Served is what the tiers that keep copies have, by content:
whole, or not at all. A question never changes a tier, whatever it says; a content with a salt is
neither named nor served. A peer proves that it knows the secret, and has the same meaning, before
it hears anything. A peer that reads copies itself (`memory.py`) has a place in memory that is
shared for that: one copy stands there, from the answer until the peer has read it.

Invariants: an answer is sent only if no tier was cleared while it was read; a peer that sends
anything else than the link wants loses its connection, and so does one that does not read.
Connections are bounded: one that has shown nothing yet gives way, the oldest first.

Does not know: the pool, blocks; what is there changes on other threads at any time.
"""

from __future__ import annotations

import hmac
import logging
import math
import os
import socket
import threading
import time
from dataclasses import dataclass
from typing import Final, final

from kvcore.tiers.link import (
    AGREED,
    ANSWER,
    HELLO,
    MAGIC,
    MAX_NEWS,
    NO_MEMORY,
    NONCE_BYTES,
    OTHER_MEANING,
    OTHER_SECRET,
    PROCESS_BYTES,
    QUESTION,
    READ,
    TO_ASK,
    TO_HEAR,
    TO_READ,
    WELCOME,
    Channel,
    LinkError,
    TcpChannel,
    encode_memory,
    encode_news,
    parse_address,
    proof,
)
from kvcore.tiers.memory import MemoryLink, SharedMemory
from kvcore.tiers.record import (
    DEAD,
    DEAD_OFFSET,
    Header,
    Key,
    checksum_of,
    group_of,
    is_private,
)
from kvcore.tiers.tier import Changes, KeepingTier, TierError
from kvcore.tiers.tier_manager import TierManager

_HANDSHAKE_S: Final = 2.0
_SEND_S: Final = 10.0
_HEARTBEAT_S: Final = 1.0
_MAX_CONNECTIONS: Final = 64
_MAX_READERS: Final = 4  # each has room for the largest copy
_POLL_S: Final = 200e-6
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class PeerServerStats:
    """The counters of a server.

    Attributes:
        num_connections: connections that there are now.
        num_served: copies that were sent.
        num_read: those of them that a peer has read out of memory.
        served_bytes: their bytes.
        num_missing: questions for what is not there.
        num_refused: connections that were refused: another secret, or another meaning.
    """

    num_connections: int = 0
    num_served: int = 0
    num_read: int = 0
    served_bytes: int = 0
    num_missing: int = 0
    num_refused: int = 0


@final
class PeerServer:
    """Serves the copies of a manager's tiers to peers.

    Args:
        manager: whose tiers; those that keep copies.
        secret: what peers have to know; empty: nothing, so listen on a loopback address.
        memory: has copies be read by those peers that can; None: all copies are sent.

    Attributes:
        stats: its counters.
        address: HOST:PORT where it listens; empty before `listen`.
    """

    def __init__(
        self, manager: TierManager, secret: bytes = b"", memory: MemoryLink | None = None
    ) -> None:
        self.stats = PeerServerStats()
        self.address = ""
        self.manager = manager
        self.secret = secret
        self.process = os.urandom(PROCESS_BYTES)
        self.tiers = manager.keeping
        self._lock = threading.Lock()
        self._channels: dict[Channel, bool] = {}  # in order; whether it has shown the secret
        self._listener: socket.socket | None = None
        self._link = memory
        self._memory: SharedMemory | None = None
        self._places: list[int] = []  # of that memory which no peer has

    def share(self) -> None:
        """Share memory for peers that read, if that is wanted and works. `listen` calls it."""
        if self._link is None:
            return
        groups = range(len(self.manager.kv.groups))
        largest = max([self.manager.copy_bytes(group) for group in groups])
        try:
            memory = self._link.share(_MAX_READERS * largest)
        except LinkError:
            _log.warning("%s does not work here: copies are sent over TCP", self._link.name)
            return
        with self._lock:
            self._memory = memory
            self._places = [number * largest for number in range(_MAX_READERS)]

    def take_place(self) -> tuple[SharedMemory, int] | None:
        """Return the shared memory and a free place in it; None: no place is free. O(1)."""
        with self._lock:
            if self._memory is None or not self._places:
                return None
            return self._memory, self._places.pop()

    def free_place(self, place: int) -> None:
        """A place may be taken by another peer. O(1)."""
        with self._lock:
            self._places.append(place)

    def listen(self, address: str) -> None:
        """Accept peers on threads of its own.

        Args:
            address: HOST:PORT; port 0 takes a free one.

        Raises:
            InvalidArgumentError: no address.
            TierError: it cannot listen there.
        """
        host, port = parse_address("serve_kv", address)
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            listener = socket.create_server(found[4][:2], family=found[0])
        except OSError as error:
            is_known = (error.errno or 0) > 0  # those of names are negative
            reason = os.strerror(error.errno or 0) if is_known else error.strerror
            raise TierError(f"serve_kv: cannot listen on {address}: {reason}") from None
        host = f"[{host}]" if ":" in host else host
        self.address = f"{host}:{listener.getsockname()[1]}"
        self._listener = listener
        threading.Thread(
            target=self._accept, args=(listener,), name="kv peers", daemon=True
        ).start()

    def close(self) -> None:
        """Answer nobody any more. O(connections)."""
        with self._lock:
            listener, self._listener = self._listener, None
            channels = [*self._channels]
            memory, self._memory = self._memory, None
        if listener is not None:
            listener.close()
        for channel in channels:
            channel.close()
        if memory is not None:
            memory.close()

    def _accept(self, listener: socket.socket) -> None:
        self.share()
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return  # closed
            channel = TcpChannel(connection)
            with self._lock:
                gone = self._make_way()
                is_welcome = self._listener is not None and len(self._channels) < _MAX_CONNECTIONS
                if is_welcome:
                    self._channels[channel] = False
                    self.stats.num_connections = len(self._channels)
            if gone is not None:
                gone.close()
            if is_welcome:
                threading.Thread(
                    target=self._serve, args=(channel,), name="kv peer", daemon=True
                ).start()
            else:
                channel.close()

    def _make_way(self) -> Channel | None:
        """Where all connections are taken, return one that is to end, if there is one."""
        if len(self._channels) < _MAX_CONNECTIONS:
            return None
        silent = next((one for one, has_shown in self._channels.items() if not has_shown), None)
        if silent is not None:
            del self._channels[silent]
        return silent

    def has_shown(self, channel: Channel) -> None:
        """A connection has shown the secret: it gives way to no other one. O(1)."""
        with self._lock:
            if channel in self._channels:
                self._channels[channel] = True

    def _serve(self, channel: TcpChannel) -> None:
        """Answer one connection until it ends."""
        session = PeerSession(self)
        try:
            session.run(channel)
        except (OSError, LinkError):
            pass  # it has gone, or is none of ours
        finally:
            session.close()
            channel.close()
            with self._lock:
                self._channels.pop(channel, None)
                self.stats.num_connections = len(self._channels)


@final
class PeerSession:
    """What one connection is told, without the connection.

    Attributes:
        welcome: what is sent first.
        purpose: of the connection, once `agree` has agreed; 0 before.
        is_read: whether the last copy is in memory, to be read.
    """

    def __init__(self, server: PeerServer) -> None:
        self.purpose = 0
        self.is_read = False
        self._server = server
        self._nonce = os.urandom(NONCE_BYTES)
        self.welcome = WELCOME.pack(MAGIC, self._nonce)
        self._number = 0
        self._watched: list[tuple[KeepingTier, Changes]] = []
        self._news = threading.Event()
        self._waiting: list[tuple[Key, bool]] = []
        self._epochs: list[int] = []  # of the tiers, at the last news
        self._place: tuple[SharedMemory, int] | None = None

    def run(self, channel: Channel) -> None:
        """Answer a connection until it ends.

        Raises:
            LinkError, OSError: it has ended.
        """
        deadline_s = time.monotonic() + _HANDSHAKE_S
        channel.send([self.welcome], deadline_s)
        answer = self.agree(channel.receive(HELLO.size, deadline_s))
        if self.purpose:
            self._server.has_shown(channel)
        channel.send([answer], deadline_s)
        while self.purpose == TO_HEAR:
            channel.send([self.news()], time.monotonic() + _SEND_S)
            if not self._waiting:
                self._news.wait(_HEARTBEAT_S)
        while self.purpose == TO_ASK:
            pieces = self.copy(channel.receive(QUESTION.size, math.inf))
            channel.send(pieces, time.monotonic() + _SEND_S)
        while self.purpose == TO_READ and self._place is not None:
            pieces = self.copy(channel.receive(QUESTION.size, math.inf))
            deadline_s = time.monotonic() + _SEND_S
            channel.send(pieces, deadline_s)
            if self.is_read:
                self._wait_for_read(channel, self._place[0], deadline_s)

    def _wait_for_read(self, channel: Channel, memory: SharedMemory, deadline_s: float) -> None:
        """Wait until the peer has read its copy."""
        while True:
            try:
                channel.receive(len(READ), min(time.monotonic() + _POLL_S, deadline_s))
            except LinkError as error:
                if error.fault != "late" or time.monotonic() >= deadline_s:
                    raise
                memory.progress()
            else:
                return

    def agree(self, hello: bytes | bytearray) -> bytes:
        """Return the answer to a hello; `purpose` is set if it is agreed. O(copies).

        Raises:
            LinkError: it is no hello.
        """
        magic, purpose, nonce, meaning, shown = HELLO.unpack(hello)
        if magic != MAGIC or purpose not in (TO_HEAR, TO_ASK, TO_READ):
            raise LinkError("foreign")
        server = self._server
        said = bytes([purpose]) + meaning
        status = AGREED if meaning == server.manager.meaning else OTHER_MEANING
        if not hmac.compare_digest(
            shown, proof(server.secret, b"client", self._nonce, nonce, said)
        ):
            status = OTHER_SECRET
        memory = b""
        if status != AGREED:
            server.stats.num_refused += 1
        elif purpose == TO_READ:
            self._place = server.take_place()
            if self._place is None:
                status = NO_MEMORY
            else:
                memory = encode_memory(self._place[1], self._place[0].describe())
        if status == AGREED:
            self.purpose = purpose
            self._number = int.from_bytes(nonce[:8], "little")
            if purpose == TO_HEAR:
                self._watch([tier.epoch for tier in server.tiers])
        if status == OTHER_SECRET:  # it learns nothing
            return bytes([status]).ljust(ANSWER.size, b"\0")
        about = bytes([status]) + server.process
        return about + proof(server.secret, b"server", nonce, self._nonce, about) + memory

    def news(self) -> bytes:
        """Return what has changed since the last call. O(changes)."""
        tiers = self._server.tiers
        self._news.clear()
        epochs = [tier.epoch for tier in tiers]
        is_new = epochs != self._epochs  # what was told before may be wrong
        if is_new:
            self._waiting = []
            self._watch(epochs)
        changed: dict[Key, None] = {}
        for _, changes in self._watched:
            changed.update(dict.fromkeys(changes.take()))
        for key in changed:
            if not is_private(key):
                self._waiting.append((key, any(tier.contains(key) for tier in tiers)))
        told, self._waiting = self._waiting[:MAX_NEWS], self._waiting[MAX_NEWS:]
        came = [key for key, is_there in told if is_there]
        went = [key for key, is_there in told if not is_there]
        return encode_news(came, went, is_new=is_new)

    def _watch(self, epochs: list[int]) -> None:
        """Have all that is there be news, after these epochs. O(copies)."""
        self._unwatch()
        self._epochs = epochs
        self._watched = [(tier, tier.watch(self._news)) for tier in self._server.tiers]

    def copy(self, question: bytes | bytearray) -> list[bytes | memoryview]:
        """Return the answer to a question: a record, or one that is marked as not there.

        Where the peer reads, the payload is not in the answer, but in memory. O(its bytes).
        """
        number, asked, length = QUESTION.unpack(question)
        server, key = self._server, Key(asked)
        payload = self._find(key, length)
        found = payload is not None
        content = memoryview(b"") if payload is None else payload
        header = Header(
            key, server.manager.meaning, 0, self._number, number, len(content), checksum_of(content)
        )
        head = bytearray(header.encode())
        server.stats.num_served += found
        server.stats.num_missing += not found
        server.stats.served_bytes += len(content)
        if not found:
            head[DEAD_OFFSET : DEAD_OFFSET + 1] = DEAD
        self.is_read = found and self._place is not None
        if self._place is not None:
            memory, place = self._place
            memory.write(place, content)
            server.stats.num_read += found
            content = memoryview(b"")
        return [bytes(head), content]

    def _find(self, key: Key, length: int) -> memoryview | None:
        """Return a copy, if it may be served and has the length that is asked for."""
        manager, tiers = self._server.manager, self._server.tiers
        group = group_of(key)
        if is_private(key) or group >= len(manager.kv.groups):
            return None
        if length != manager.copy_bytes(group):  # a tier would take its own record for a wrong one
            return None
        epochs = [tier.epoch for tier in tiers]
        for tier in tiers:
            payload = tier.get(key, length)
            if payload is not None and epochs == [tier.epoch for tier in tiers]:
                return payload
        return None

    def close(self) -> None:
        """Watch the tiers no more, and give the place back. O(watchers)."""
        self._unwatch()
        place, self._place = self._place, None
        if place is not None:
            self._server.free_place(place[1])

    def _unwatch(self) -> None:
        for tier, changes in self._watched:
            tier.unwatch(changes)
