"""The peer tier: copies that another process has, asked for by content over a link.

Decides: what is known of the peer, when it is asked, and what of its answers is believed. A thread
hears from the peer which contents it has, so `contains` asks nobody; a copy is asked for when a
load reads it, on the thread of the load. A question has its key, its length and a number; an answer
is believed if its header is whole and says the same key, meaning, length and number, and if the
payload has the checksum of the header. Everything else is a miss, and is counted; an answer that
does not fit its question ends the connection, so what comes late is never read. Where both sides
can, the payload is read out of the peer's memory (`memory.py`). Whatever fails there, the same
question is asked again over the link, and so are all others until there is a new connection for
news.

Invariants: every wait has a deadline; nothing is asked of a process that has not shown the same
secret and meaning; a content with a salt is never asked for; what the peer had before `clear` is
not asked for until the peer is another process. When the peer forgets all, because its contents
have proved invalid, the epoch changes here too, so loads that run do not join.

A peer is only read: nothing is stored there. docs/how-to/transfers.md is for users.
"""

from __future__ import annotations

import hmac
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import islice
from typing import Final, final

from kvcore.tiers.host_blocks import HostBlocks, HostCopy
from kvcore.tiers.link import (
    AGREED,
    ANSWER,
    HELLO,
    MAGIC,
    NO_MEMORY,
    NONCE_BYTES,
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
    parse_address,
    proof,
    receive_memory,
    receive_news,
)
from kvcore.tiers.memory import MemoryLink, MemoryReader
from kvcore.tiers.record import (
    RECORD_BYTES,
    Fault,
    Header,
    Key,
    Meaning,
    checksum_of,
    decode_header,
    is_private,
)
from kvcore.tiers.tier import TierStats, read_each

_HANDSHAKE_S: Final = 2.0
_SILENCE_S: Final = 5.0  # without news: the peer says every second that it is there
_ANSWER_S: Final = 1.0
_SLOWEST_BYTES_PER_S: Final = 20e6
_RETRIES_S: Final = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_MAX_KEYS: Final = 1 << 20  # that are known of one peer: 130 MB
_MAX_FAILURES: Final = 3
_PROBED: Final = 8  # copies
_MAX_PAUSE_S: Final = 300.0
_MAX_RESETS: Final = 8  # in the time below: each ends all loads that run here
_RESETS_S: Final = 60.0
_log = logging.getLogger(__name__)

Connect = Callable[[float], Channel]
"""Connects to the peer, before a deadline; raises OSError or LinkError."""


class _NoMemoryError(LinkError):
    """The peer shares no memory, or has no place there: its copies have to be sent."""


@final
class PeerTier:
    """The copies of a process that serves them at an address.

    Args:
        address: HOST:PORT.
        secret: what the two processes share; empty: nothing.
        connect: another link than TCP; None: TCP.
        memory: reads the peer's memory, where the peer shares it; None: copies come over the link.
        has_thread: whether a thread of its own hears the news; False: `hear` is called instead.

    Attributes:
        name: "peer HOST:PORT".
        keeps, in_blocks: False.
        stats: its counters; `is_enabled` says whether the peer is there now.
        epoch: how often it was cleared, here or there.
        num_by_transport: its hits, by what carried them: "tcp", or "nixl" where they were read out
            of the peer's memory.

    Raises:
        InvalidArgumentError: no address.
    """

    keeps, in_blocks, medium = False, False, "REMOTE"

    def __init__(
        self,
        address: str,
        *,
        secret: bytes = b"",
        connect: Connect | None = None,
        memory: MemoryLink | None = None,
        has_thread: bool = True,
    ) -> None:
        at = parse_address("peer", address)
        self.name = f"peer {address}"
        self.stats = TierStats(is_enabled=False)
        self.epoch = 0
        self.num_by_transport = {"tcp": 0, "nixl": 0}
        self._secret = secret
        self._connect: Connect = connect or (lambda deadline_s: TcpChannel.connect(at, deadline_s))
        self._has_thread = has_thread
        self._meaning = Meaning(b"")
        self._known: set[Key] = set()
        self._refused: set[Key] = set()  # what this process of the peer had before a `clear`
        self._process = b""  # which process of the peer `_known` is of
        self._news: Channel | None = None
        self._copies: Channel | None = None
        self._link = memory
        self._reader: MemoryReader | None = None
        self._reads = False  # whether the reader is to be used
        self._place: int | None = None  # in the peer's memory; None: its copies are sent
        self._largest = 0
        self._session = self._number = 0  # of the connection for copies
        self._num_failures = self._num_losses = 0
        self._said: Fault | None = None
        self._resets: deque[float] = deque(maxlen=_MAX_RESETS + 1)  # times of the last ones
        self._lock = threading.Lock()  # held while what is known changes
        self._asking = threading.Lock()  # one question at a time
        self._closed = threading.Event()

    def start(self, meaning: Meaning, largest: int) -> None:
        """See `Tier.start`. The peer may come later."""
        self._meaning, self._largest = meaning, largest
        if self._has_thread:
            threading.Thread(target=self._run, name=self.name, daemon=True).start()

    def contains(self, key: Key) -> bool:
        """See `Tier.contains`: as far as the peer has said."""
        return key in self._known

    def touch(self, key: Key) -> None:
        """See `Tier.touch`; the peer notes its own uses."""

    def probe(self, blocks: HostBlocks, copies: Sequence[HostCopy]) -> int:
        """Read some copies of a block, as `Tier.probe` wants."""
        with self._lock:
            keys = [*islice(self._known, min(_PROBED, len(copies)))]
        found = [self.get(key, blocks.block_bytes) for key in keys]
        return sum([len(payload) for payload in found if payload is not None])

    def begin_read(
        self, keys: Sequence[Key], targets: Sequence[Sequence[memoryview]]
    ) -> Callable[[], Sequence[bool]]:
        """Begin to read copies: one after the other, when they are waited for."""
        return partial(read_each, self, keys, targets)

    def put(self, key: Key, payload: memoryview, priority: int, epoch: int) -> bool:
        """See `Tier.put`: nothing is stored at a peer."""
        del key, payload, priority, epoch
        return False

    def get(self, key: Key, length: int) -> memoryview | None:
        """See `Tier.get`. Waits a second at most, and the time of 20 MB a second.

        Twice that, where the peer's memory cannot be read.
        """
        with self._asking:
            if key not in self._known:
                return None
            try:
                payload = self._read(key, length) if self._reads else self._ask(key, length)
            except (OSError, LinkError) as error:
                self._end_copies()
                self._note(error)
                self._forget(key)
                self._num_failures += 1
                if self._num_failures >= _MAX_FAILURES:
                    self._num_losses += 1
                    self._lose()
                return None
            self._num_failures = self._num_losses = 0
            if payload is None:
                self.stats.faults["gone"] += 1
                self._forget(key)
                return None
            self.stats.num_hits += 1
            self.num_by_transport["tcp" if self._place is None else "nixl"] += 1
            self.stats.read_bytes += length
            return payload

    def mark(self) -> int:
        """See `Tier.mark`: nothing comes to a peer from here."""
        return 0

    def forget(self, since: int, keys: Collection[Key]) -> None:
        """See `Tier.forget`. O(keys)."""
        del since
        with self._lock:
            self.epoch += 1
            self._refused.update(keys)
            self._replace(self._known.difference(keys))

    def clear(self) -> None:
        """See `Tier.clear`. O(what the peer has)."""
        with self._lock:
            self.epoch += 1
            self._refused |= self._known
            self._replace(set())

    def close(self) -> None:
        """See `Tier.close`."""
        self._closed.set()
        self._lose()
        self._end_copies()
        self._close_reader()

    # News

    def hear(self) -> bool:
        """Connect if there is no connection, and hear news once; whether there were any.

        Blocks for as long as the peer says nothing, 5 s at most.
        """
        try:
            news = self._news
            if news is None:
                self._make_reader()
                news, process, _ = self._open(TO_HEAR)
                self._begin(news, process)
            self._apply(*receive_news(news, time.monotonic() + _SILENCE_S))
        except (OSError, LinkError) as error:
            if not self._closed.is_set():
                self._note(error)
                self._lose()
            return False
        return True

    def _run(self) -> None:
        """Hear news until it is closed; where the peer is not there, try again and again."""
        failures = 0
        while not self._closed.is_set():
            if self.hear():
                failures = 0
            else:
                self._closed.wait(self._pause_s(failures))
                failures += 1

    def _pause_s(self, failures: int) -> float:
        """Seconds to wait before connecting again after this many consecutive failures. O(1)."""
        pause_s = _RETRIES_S[min(failures, len(_RETRIES_S) - 1)]
        if self._num_losses:  # it says what it has, and does not serve it, or forgets it
            pause_s = max(pause_s, min(2.0**self._num_losses, _MAX_PAUSE_S))
        return pause_s

    def _begin(self, news: Channel, process: bytes) -> None:
        """A connection for news is there, of the process that was known or of another one."""
        with self._lock:
            if process != self._process:
                self._refused = set()
            self._process, self._news, self._num_failures = process, news, 0
            self._reads = self._reader is not None
            self._replace(set())
            self.stats.is_enabled = True
        self._said = None
        if self._closed.is_set():
            self._lose()

    def _apply(self, is_new: bool, came: list[Key], went: list[Key]) -> None:  # noqa: FBT001
        with self._lock:
            if self._news is None:
                return
            if is_new:
                self.epoch += 1
                self._replace(set())
            room = _MAX_KEYS - len(self._known)
            wanted = [key for key in came[:room] if key not in self._refused]
            self._known.update([key for key in wanted if not is_private(key)])
            self._known.difference_update(went)
            self.stats.num_records = len(self._known)
        if is_new:
            self._note_reset()

    def _note_reset(self) -> None:
        """The peer has forgotten all; if it does so too often, it is left alone for a while.

        Raises:
            LinkError: it does.
        """
        now_s = time.monotonic()
        self._resets.append(now_s)
        is_often = len(self._resets) > _MAX_RESETS
        if is_often and now_s - self._resets[-1 - _MAX_RESETS] < _RESETS_S:
            self._num_losses += 1
            raise LinkError("stale")

    def _replace(self, known: set[Key]) -> None:
        self._known = known
        self.stats.num_records = len(known)

    def _forget(self, key: Key) -> None:
        with self._lock:
            self._known.discard(key)
            self.stats.num_records = len(self._known)

    def _lose(self) -> None:
        """End the connection for news: nothing is known of the peer until there is another."""
        with self._lock:
            news, self._news = self._news, None
            self._replace(set())
            self.stats.is_enabled = False
        if news is not None:
            news.close()

    # Copies

    def _make_reader(self) -> None:
        """Make what reads memory, if it is wanted and there is none; O(a second) with NIXL."""
        if self._link is None or self._reader is not None:
            return
        try:
            reader = self._link.reader(self._largest)
        except LinkError:
            _log.warning(
                "%s: %s does not work here, so copies are sent", self.name, self._link.name
            )
            self._link = None
            return
        with self._lock:
            self._reader = reader
        if self._closed.is_set():
            self._close_reader()

    def _close_reader(self) -> None:
        with self._lock:
            reader, self._reader, self._reads = self._reader, None, False
        if reader is not None:
            reader.close()

    def _read(self, key: Key, length: int) -> memoryview | None:
        """Read a copy out of the peer's memory, or if that fails ask for it; see `_ask`."""
        try:
            return self._ask(key, length, TO_READ)
        except _NoMemoryError:
            self._reads = False
        except (OSError, LinkError) as error:
            fault = _fault_of(error)
            self.stats.faults[fault] += 1
            _log.warning("%s: memory cannot be read (%s): copies are sent", self.name, fault)
            self._close_reader()
        self._end_copies()
        return self._ask(key, length)

    def _ask(self, key: Key, length: int, purpose: int = TO_ASK) -> memoryview | None:
        """Ask for a copy; None: the peer does not have it any more.

        Raises:
            LinkError, OSError: there is no answer, or none that may be believed.
        """
        deadline_s = time.monotonic() + _ANSWER_S + length / _SLOWEST_BYTES_PER_S
        epoch = self.epoch
        if self._copies is not None and (self._place is None) == (purpose == TO_READ):
            self._end_copies()
        channel = self._copies or self._open_copies(purpose)
        self._number += 1
        channel.send([QUESTION.pack(self._number, key, length)], deadline_s)
        header = decode_header(bytes(channel.receive(RECORD_BYTES, deadline_s)))
        if not isinstance(header, Header):
            raise LinkError(header)
        if header.meaning != self._meaning:
            raise LinkError("foreign")
        if (header.key, header.segment, header.number) != (key, self._session, self._number):
            raise LinkError("stale")
        if header.is_dead:
            return None
        if header.length != length:
            raise LinkError("short")
        payload = self._receive(channel, length, deadline_s)
        if checksum_of(payload) != header.checksum:
            raise LinkError("corrupted")
        if epoch != self.epoch:
            raise LinkError("stale")
        return payload

    def _receive(self, channel: Channel, length: int, deadline_s: float) -> memoryview:
        """Return the payload that belongs to the header that has come."""
        if self._place is None:
            return memoryview(channel.receive(length, deadline_s))
        reader = self._reader
        if reader is None:  # closed meanwhile
            raise LinkError("failed")
        payload = reader.read(self._place, length, deadline_s)
        channel.send([READ], deadline_s)
        return payload

    def _open_copies(self, purpose: int) -> Channel:
        """Return a connection for copies, which ends if this raises, as `_open` does."""
        channel, process, nonce = self._open(purpose)
        self._copies, self._place = channel, None
        if process != self._process:
            raise LinkError("stale")
        if purpose == TO_READ:
            self._place = self._attach(channel)
        self._session = int.from_bytes(nonce[:8], "little")
        return channel

    def _attach(self, channel: Channel) -> int:
        """Have the reader read what the peer shares; return where its copies will stand there."""
        place, description = receive_memory(channel, time.monotonic() + _HANDSHAKE_S)
        reader = self._reader
        if reader is None:
            raise LinkError("failed")
        reader.attach(description)
        return place

    def _open(self, purpose: int) -> tuple[Channel, bytes, bytes]:
        """Return a connection, which process of the peer has it, and our nonce.

        Raises:
            LinkError, OSError: there is none, or the peer has another secret or meaning.
        """
        deadline_s = time.monotonic() + _HANDSHAKE_S
        channel = self._connect(deadline_s)
        try:
            return channel, *self._agree(channel, purpose, deadline_s)
        except BaseException:
            channel.close()
            raise

    def _agree(self, channel: Channel, purpose: int, deadline_s: float) -> tuple[bytes, bytes]:
        """Do the handshake: show the secret and the meaning, and see those of the peer."""
        magic, theirs = WELCOME.unpack(channel.receive(WELCOME.size, deadline_s))
        if magic != MAGIC:
            raise LinkError("foreign")
        nonce = os.urandom(NONCE_BYTES)
        what = bytes([purpose]) + self._meaning
        mine = proof(self._secret, b"client", theirs, nonce, what)
        channel.send([HELLO.pack(MAGIC, purpose, nonce, self._meaning, mine)], deadline_s)
        answer = bytes(channel.receive(ANSWER.size, deadline_s))
        status, process, shown = ANSWER.unpack(answer)
        wanted = proof(self._secret, b"server", nonce, theirs, answer[: 1 + PROCESS_BYTES])
        if not hmac.compare_digest(shown, wanted):
            raise LinkError("refused")
        if status == NO_MEMORY:
            raise _NoMemoryError("refused")
        if status != AGREED:
            raise LinkError("foreign")
        return process, nonce

    def _end_copies(self) -> None:
        channel, self._copies = self._copies, None
        if channel is not None:
            channel.close()

    def _note(self, error: OSError | LinkError) -> None:
        """Count why there was no answer; say it once, where the peer can never be of use."""
        fault = _fault_of(error)
        self.stats.faults[fault] += 1
        if fault in _LASTING and fault != self._said:
            self._said = fault
            _log.warning("%s: %s", self.name, _LASTING[fault])


def _fault_of(error: OSError | LinkError) -> Fault:
    return error.fault if isinstance(error, LinkError) else "failed"


_LASTING: Final[dict[Fault, str]] = {
    "foreign": "it has other weights, another layout or another version; nothing is loaded from it",
    "refused": "it has another secret; nothing is loaded from it",
}
