"""What a tier is: a place with a capacity in bytes that keeps copies of KV by content.

Invariants of every tier: `get` returns exactly the bytes that were put for that key and meaning, or
None; the bytes that it takes up never exceed its capacity; its eviction order is LRU, and lower
priorities go first; whatever was put before the last `clear` is never returned again. A fault of
the device is a miss, and is counted by its kind; it never raises.

Does not know: blocks, sequences, the pool.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, Protocol, SupportsIndex, TypeVar, final

from kvcore.arguments import as_int
from kvcore.errors import KVCoreError
from kvcore.tiers.host_blocks import HostBlocks, HostCopy
from kvcore.tiers.record import Fault, Key, Meaning

_Entry = TypeVar("_Entry")  # what a tier knows of a copy: where it is, and its checksum

_MOST_TOUCHED: Final = 65_536  # uses that wait; the oldest are forgotten


class TierError(KVCoreError):
    """A tier cannot start: the folder, its owner, its version or the capacity does not allow it."""


class TierInUseError(TierError):
    """A tier cannot start: another process has its folder."""


@dataclass(slots=True)
class TierStats:
    """The counters of one tier. Read them; the tier writes them.

    Attributes:
        num_records: copies that it has now.
        used_bytes: bytes that it takes up now.
        capacity_bytes: the most that it may take up; less than was asked for while its device is
            full.
        num_hits: copies that were returned.
        num_stored: copies that were written.
        num_evicted: copies that gave way to others.
        read_bytes: bytes of the copies returned.
        written_bytes: bytes of the copies written.
        faults: the number of records that were not served or not written, by kind.
        is_enabled: False while its device fails, or is full and holds none: then nothing is found.
    """

    num_records: int = 0
    used_bytes: int = 0
    capacity_bytes: int = 0
    num_hits: int = 0
    num_stored: int = 0
    num_evicted: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    faults: Counter[Fault] = field(default_factory=Counter)
    is_enabled: bool = True


class Tier(Protocol):
    """Keeps copies by content. `contains` may be called from any thread, and so may the others.

    Attributes:
        name: for reports.
        medium: what KV events call it, as vLLM's do.
        keeps: whether it takes copies; False of one that is only read, such as a peer.
        in_blocks: whether its copies lie in blocks of host memory, as a `HostTier`'s do.
        stats: its counters.
        epoch: how often it was cleared.
    """

    name: str
    medium: str
    keeps: bool
    in_blocks: bool
    stats: TierStats
    epoch: int

    def start(self, meaning: Meaning, largest: int) -> None:
        """Find what is there already; payloads have at most `largest` bytes. Called once.

        Raises:
            TierError: it cannot start.
        """
        ...

    def contains(self, key: Key) -> bool:
        """Return whether it has a copy; does no input or output. O(1)."""
        ...

    def touch(self, key: Key) -> None:
        """Note that a content was used elsewhere; does no input or output. O(1)."""
        ...

    def get(self, key: Key, length: int) -> memoryview | None:
        """Return the payload, checked, if it has `length` bytes; None: a miss. O(length)."""
        ...

    def probe(self, blocks: HostBlocks, copies: Sequence[HostCopy]) -> int:
        """Move copies as a load does, to be measured, at most into these blocks; their bytes."""
        ...

    def begin_read(
        self, keys: Sequence[Key], targets: Sequence[Sequence[memoryview]]
    ) -> Callable[[], Sequence[bool]]:
        """Begin to read copies into memory that has the bytes of each.

        Returns:
            A function that waits, and returns which copies have come, checked as by `get`.
        """
        ...

    def put(self, key: Key, payload: memoryview, priority: int, epoch: int) -> bool:
        """Keep a copy; whether it has one now. One of an earlier epoch is refused. O(length)."""
        ...

    def mark(self) -> int:
        """Return the moment, for `forget`: copies that come from now on are later. O(1)."""
        ...

    def forget(self, since: int, keys: Collection[Key]) -> None:
        """Forget the copies that came since a moment or have these keys. Must not raise.

        Those on their way are refused, as by `clear`. O(copies).
        """
        ...

    def clear(self) -> None:
        """Forget all copies, and those that are on their way. Must not raise."""
        ...

    def close(self) -> None:
        """Let go of the device; what is complete is found by the next start. Must not raise."""
        ...


class KeepingTier(Tier, Protocol):
    """A tier that takes copies, and says what comes and goes: one whose `keeps` is True."""

    def watch(self, news: threading.Event) -> Changes:
        """Return what is there now as changes, to which later ones are added. O(copies).

        Args:
            news: is set by each change.
        """
        ...

    def unwatch(self, changes: Changes) -> None:
        """Note no further changes. O(watchers)."""
        ...


class ReadingTier(Protocol):
    """A tier that returns one copy after the other."""

    def get(self, key: Key, length: int) -> memoryview | None:
        """Return a copy, or None, as `Tier.get` does."""
        ...


def read_each(
    tier: ReadingTier, keys: Sequence[Key], targets: Sequence[Sequence[memoryview]]
) -> list[bool]:
    """Read copies as `Tier.begin_read` says, one after the other. O(bytes)."""
    found: list[bool] = []
    for key, target in zip(keys, targets, strict=True):
        payload = tier.get(key, sum(map(len, target)))
        found.append(payload is not None)
        if payload is not None:
            begin = 0
            for piece in target:
                piece[:] = payload[begin : begin + len(piece)]
                begin += len(piece)
    return found


@final
class Changes:
    """The keys that have come to a tier and gone since they were last taken, from any thread.

    A copy that has come and gone, or gone and come, in between is no change.

    Args:
        keys: those that are there.
        news: is set by each change.
    """

    def __init__(self, keys: Iterable[Key], news: threading.Event) -> None:
        self._changed = dict.fromkeys(keys, True)
        self._lock = threading.Lock()
        self._news = news

    def note(self, key: Key, *, is_there: bool) -> None:
        """Note that a copy has come or gone. O(1)."""
        with self._lock:
            if self._changed.pop(key, None) is None:
                self._changed[key] = is_there
        self._news.set()

    def clear(self, keys: Iterable[Key]) -> None:
        """Note that all copies have gone, which are these. O(keys)."""
        with self._lock:
            gone = [key for key, is_there in self._changed.items() if not is_there]
            gone += [key for key in keys if key not in self._changed]
            self._changed = dict.fromkeys(gone, False)
        self._news.set()

    def take(self) -> dict[Key, bool]:
        """Return each changed key, and whether it is there now. O(1)."""
        with self._lock:
            taken, self._changed = self._changed, {}
        return taken


@final
class EvictionOrder:
    """Keys in the order of their eviction: the lowest priority first, and LRU within it."""

    __slots__ = ("_priorities", "_queues", "_touched")

    def __init__(self) -> None:
        self._queues: dict[int, OrderedDict[Key, None]] = {}
        self._priorities: dict[Key, int] = {}
        self._touched: deque[Key] = deque(maxlen=_MOST_TOUCHED)

    def add(self, key: Key, priority: int) -> None:
        """Append a new key. O(1)."""
        self._settle()
        self._priorities[key] = priority
        self._queues.setdefault(priority, OrderedDict())[key] = None

    def touch(self, key: Key) -> None:
        """Note that a key was used, from any thread, whether it is here or not. O(1)."""
        self._touched.append(key)

    def remove(self, key: Key) -> None:
        """Remove a key. O(1)."""
        priority = self._priorities.pop(key)
        queue = self._queues[priority]
        del queue[key]
        if not queue:
            del self._queues[priority]

    def oldest(self) -> Key:
        """Return the key to evict next; there is one. O(priorities + touched since)."""
        self._settle()
        return next(iter(self._queues[min(self._queues)]))

    def clear(self) -> None:
        """Remove all keys. O(1)."""
        self._queues, self._priorities = {}, {}
        self._touched.clear()

    def _settle(self) -> None:
        """Move what was touched behind the others, in the order of the touches."""
        while self._touched:
            key = self._touched.popleft()
            if key in self._priorities:
                self._queues[self._priorities[key]].move_to_end(key)


class IndexedTier(Generic[_Entry]):
    """The index that a tier keeps of its copies: their entries, eviction order and counters.

    Its methods beside those of `Tier` and `watch` are called with the lock held.
    """

    keeps = True
    in_blocks = False

    def __init__(self, name: str, capacity_bytes: SupportsIndex) -> None:
        self.name = name
        self.stats = TierStats(capacity_bytes=as_int("capacity_bytes", capacity_bytes, 1))
        self.epoch = 0
        self._next_number = 1  # of the copy that comes next
        self._entries: dict[Key, _Entry] = {}
        self._order = EvictionOrder()
        self._lock = threading.Lock()
        self._watchers: tuple[Changes, ...] = ()

    def watch(self, news: threading.Event) -> Changes:
        """See `KeepingTier.watch`."""
        with self._lock:
            changes = Changes(self._entries, news)
            self._watchers += (changes,)
        return changes

    def unwatch(self, changes: Changes) -> None:
        """See `KeepingTier.unwatch`."""
        with self._lock:
            self._watchers = tuple([one for one in self._watchers if one is not changes])

    def contains(self, key: Key) -> bool:
        """See `Tier.contains`."""
        return key in self._entries

    def touch(self, key: Key) -> None:
        """See `Tier.touch`."""
        self._order.touch(key)

    def mark(self) -> int:
        """See `Tier.mark`."""
        return self._next_number

    def _insert(self, key: Key, entry: _Entry, priority: int) -> None:
        """Let a copy be found; its key is new. O(1)."""
        self._entries[key] = entry
        self._order.add(key, priority)
        self.stats.num_records = len(self._entries)
        for watcher in self._watchers:
            watcher.note(key, is_there=True)

    def _remove(self, key: Key) -> _Entry:
        """Let a copy be found no more; return its entry. O(1)."""
        entry = self._entries.pop(key)
        self._order.remove(key)
        self.stats.num_records = len(self._entries)
        for watcher in self._watchers:
            watcher.note(key, is_there=False)
        return entry

    def _remove_all(self) -> None:
        """Let no copy be found. O(1), O(copies) where changes are watched."""
        for watcher in self._watchers:
            watcher.clear(self._entries)
        self._entries = {}
        self._order.clear()
        self.stats.num_records = 0

    def _note_hit(self, key: Key, length: int) -> None:
        """Count a copy of `length` bytes that is returned, as the one used last."""
        self._order.touch(key)
        self.stats.num_hits += 1
        self.stats.read_bytes += length

    def _note_stored(self, length: int) -> None:
        """Count a copy of `length` bytes that was written."""
        self.stats.num_stored += 1
        self.stats.written_bytes += length
