"""Promises of a tier below the GPU: `check_tier(MyAdapter)`.

A tier keeps copies of KV by content: in host memory, on a disk, or elsewhere. An adapter maps a few
verbs to the calls that an engine makes, and names the faults that it can cause. A run draws stores,
loads, restarts and faults from a seed, keeps a ghost of every content, and checks:

- P37: a load brings the content of its key, in this layout and since the last
  reset, or it is a miss; misses of damaged copies are counted;
- P38: a copy is found only when all its bytes are stored; a job reads or writes its rows only until
  it ends, and it ends once;
- P39: the bytes on the device stay within the capacity, over restarts too;
- P24: what was stored is found and served until as many others as have room came after it;
- P41: every job ends.

It needs no Hypothesis, no threads and no clock: one seed is one run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from mmap import mmap
from random import Random
from typing import Any, Final, NamedTuple, Protocol

from kvcore.testing.errors import CrashError, PropertyError

_NUM_STEPS: Final = 80
_NUM_ROWS: Final = 12
_ROW_BYTES: Final = 4096
_FAULTS: Final = ("flip", "tear", "swap", "fill", "kill")
_OPTIONAL: Final = (*_FAULTS, "reset")
_READS: Final = ("find", "ended", "num_faults", "stop")  # after which no bytes are counted


class Move(NamedTuple):
    """A content and the row of the host memory that it is copied from or to.

    Attributes:
        key: 32 bytes.
        row: its number.
    """

    key: bytes
    row: int


class Ended(NamedTuple):
    """The end of a job.

    Attributes:
        job: its number.
        keys: the keys that were moved; all others of the job were not.
    """

    job: int
    keys: Collection[bytes]


class KilledError(BaseException):
    """The process has died, as `kill` had ordered: for an adapter to raise."""


class Tiering(Protocol):
    """The verbs of a tier. Called single-threaded; a new adapter has an empty device.

    The engine has a host memory of rows, each of which holds one content. A job copies some rows to
    the tier or from it. An adapter whose tier has threads waits for them in `advance` and `find`.

    These are optional, and a run uses those that the adapter has:

    - `reset()`: the weights have changed: nothing stored before is right any more;
    - `num_faults()`: how many damaged copies the tier has noticed so far;
    - `flip(key)`: one bit of the device's copy of a content flips; without a copy, nothing happens;
    - `swap(key, other)`: the device's copies of two contents change places;
    - `tear()`: between two processes, the device loses the end of what was written last;
    - `fill(is_full)`: the device has no space from now on, or has it again;
    - `kill(num_writes, share)`: the process dies in the write after the next `num_writes`, of which
      that share is carried out: the verb that writes it raises `KilledError`.

    Attributes:
        survives: True if copies outlive the process.
        layouts: names of configurations whose bytes differ, such as of other weights, layouts of
            blocks, or numbers of ranks. At least one.
    """

    survives: bool
    layouts: Sequence[str]

    def start(self, capacity_bytes: int, memory: mmap, row_bytes: int, layout: str) -> int:
        """Start a process; the device keeps what earlier processes left on it.

        Args:
            capacity_bytes: the most bytes that the tier may take up on the device.
            memory: the rows, one after another.
            row_bytes: the size of each.
            layout: one of `layouts`.

        Returns:
            The least number of contents that it has room for.
        """

    def find(self, key: bytes) -> bool:
        """Return whether a load would bring this content now."""

    def store(self, job: int, moves: Sequence[Move]) -> None:
        """Begin to copy rows to the tier."""

    def load(self, job: int, moves: Sequence[Move]) -> None:
        """Begin to copy contents into rows."""

    def advance(self) -> bool:
        """Carry out a part of what was begun; return False if nothing was left."""

    def ended(self) -> Sequence[Ended]:
        """Return the jobs that have ended since the last call."""

    def drain(self) -> None:
        """End all jobs, carried out or not: no row is touched afterwards."""

    def stop(self) -> None:
        """End the process in order; jobs that have not ended are lost."""

    def used_bytes(self) -> int:
        """Return the bytes that the tier takes up on the device, measured there."""


def check_tier(
    make: Callable[[], Tiering],
    seeds: Iterable[int] = range(200),
    *,
    faults: Collection[str] | None = None,
    known: Collection[str] = (),
) -> dict[str, int]:
    """Run a tier beside a ghost of its contents. Some milliseconds a seed.

    Args:
        make: makes an adapter, such as its class.
        seeds: a run each.
        faults: the optional verbs that are used, and "restart" and "layout"; None: all.
        known: properties that are not checked, such as "P39".

    Returns:
        The counts of the events that were seen.

    Raises:
        PropertyError: a promise is broken; it carries the shortest program of all failing seeds.
        CrashError: a call that was in order raised.
    """
    names = ("stores", "loads", "hits", "misses", "restart", "layout", *_OPTIONAL)
    seen = dict.fromkeys(names, 0)
    shortest: PropertyError | CrashError | None = None
    for seed in seeds:
        run = _Run(make(), Random(seed), seen, faults, known)  # noqa: S311  # nothing is secret
        try:
            run.run()
        except (PropertyError, CrashError) as error:
            if shortest is None or len(error.program) < len(shortest.program):
                shortest = error
    if shortest is not None:
        raise shortest
    return seen


@dataclass
class _Job:
    """A job under way, begun at `tick`, when the tier had noticed `num_noticed` damaged copies."""

    moves: list[Move]
    is_store: bool
    tick: int
    num_noticed: int
    fresh: set[bytes] = field(default_factory=set)  # of a store: what the tier did not have
    found: set[bytes] = field(default_factory=set)  # of a load


class _Run:
    """One seed."""

    def __init__(
        self,
        tier: Tiering,
        draw: Random,
        seen: dict[str, int],
        faults: Collection[str] | None,
        known: Collection[str],
    ) -> None:
        self.tier, self.draw, self.seen, self.known = tier, draw, seen, known
        has = [name for name in _OPTIONAL if hasattr(tier, name)]
        has += ["restart"] if tier.survives or draw.random() < 0.2 else []
        has += ["layout"] if len(tier.layouts) > 1 else []
        allowed = [name for name in has if faults is None or name in faults]
        self.swarm = [name for name in allowed if draw.random() < 0.4]
        self.program: list[str] = []
        self.keys = [draw.randbytes(32) for _ in range(draw.choice((6, 12, 40)))]
        self.memory = mmap(-1, _NUM_ROWS * _ROW_BYTES)
        self.before = bytes(self.memory)
        self.jobs: dict[int, _Job] = {}
        self.num_jobs = self.epoch = self.room = 0
        self.layout = tier.layouts[0]
        self.capacity_bytes = 0
        self.stored: dict[bytes, set[str]] = {}  # since the reset: in which layouts, maybe
        self.since: dict[bytes, int] = {}  # what is there for certain: since when
        self.damaged: dict[bytes, int] = {}  # what is there and not right, maybe: since when
        self.early: set[bytes] = set()  # of those: found while they are stored
        self.used: list[bytes] = []  # in the order of stores and loads
        self.is_full = self.is_doomed = False

    def run(self) -> None:
        """Run to the end.

        Raises:
            PropertyError: a promise is broken.
            CrashError: a call raised.
        """
        self._start()
        for _ in range(_NUM_STEPS):
            try:
                self._act()
            except KilledError:
                self._say("# the process dies")
                self._restart()
        if self.is_full:
            self._fill(is_full=False)
        try:
            self._finish()
            self._load(self.keys[:4])
            self._finish()
        except KilledError:
            self._restart()
            self._finish()
        self._call("stop")

    def _act(self) -> None:
        chance = self.draw.random()
        if chance < 0.35:
            self._store()
        elif chance < 0.55:
            likely = [*self.stored] if len(self.stored) > 4 and chance < 0.5 else self.keys
            self._load(self.draw.sample(likely, self.draw.randint(1, 4)))
        elif chance < 0.85:
            self._advance()
        elif chance < 0.9:
            self._call("drain")
            self._take_ended(is_drained=True)
            self._check_over()
        elif self.swarm:
            self._fault(self.draw.choice(self.swarm))

    def _fault(self, name: str) -> None:
        self.seen[name] += 1
        if name in ("flip", "swap"):
            moving = {move.key for job in self.jobs.values() for move in job.moves}
            there = [key for key in self.since if key not in moving]
            if len(there) > 1:
                self._damage(name, self.draw.sample(there, 1 if name == "flip" else 2))
        elif name == "fill":
            self._fill(is_full=not self.is_full)
        elif name == "kill":
            self.is_doomed = True
            self._call("kill", self.draw.randint(0, 6), self.draw.choice((0.0, 0.5, 1.0)))
        elif name == "reset":
            if self.is_doomed:  # a reset that a death cuts short is not one
                return
            self._finish()
            self.epoch += 1
            self.since, self.stored, self.damaged = {}, {}, {}
            self._call("reset")
        else:
            self._call("stop")
            if name == "tear":
                self.since, self.damaged = {}, dict.fromkeys(self.stored, 0)
                self._call("tear")
            elif name == "layout":
                self.layout = self.draw.choice(self.tier.layouts)
                self.since = {}
            self._restart()

    def _damage(self, name: str, keys: list[bytes]) -> None:
        for key in keys:
            self.damaged[key] = self.since.pop(key)
        self._call(name, *keys)

    def _fill(self, *, is_full: bool) -> None:
        self.is_full = is_full
        self.since = {}
        self._call("fill", is_full)

    # Processes

    def _start(self) -> None:
        if not self.capacity_bytes or self.draw.random() < 0.2:
            self.capacity_bytes = self.draw.choice((9, 12, 20, 40)) * (_ROW_BYTES + 512)
            self.since = {}  # what stays is the tier's choice
        given = (self.capacity_bytes, self.memory, _ROW_BYTES, self.layout)
        self.room = self._call("start", *given)

    def _restart(self) -> None:
        self.jobs.clear()
        self.is_doomed = False
        if self.is_full:
            self._fill(is_full=False)
        if not self.tier.survives:
            self.since, self.stored = {}, {}
        self.before = bytes(self.memory)
        self._start()

    # Jobs

    def _begin(self, keys: list[bytes], *, is_store: bool) -> _Job | None:
        """Choose rows; None: too few are free."""
        taken = {move.row for job in self.jobs.values() for move in job.moves}
        rows = [row for row in range(_NUM_ROWS) if row not in taken]
        if len(rows) < len(keys):
            return None
        moves = [*map(Move, keys, self.draw.sample(rows, len(keys)))]
        self.num_jobs += 1
        tick = min([job.tick for job in self.jobs.values()], default=len(self.used))
        self.used += keys
        return _Job(moves, is_store, tick, self._num_noticed())

    def _num_noticed(self) -> int:
        return self._call("num_faults") if hasattr(self.tier, "num_faults") else -1

    def _store(self) -> None:
        keys = self.draw.sample(self.keys, self.draw.randint(1, 4))
        job = self._begin(keys, is_store=True)
        if job is None:
            return
        for key, row in job.moves:
            if not self._find(key):
                job.fresh.add(key)
            self.stored.setdefault(key, set()).add(self.layout)
            self._write(row, self._payload(key))
        self.jobs[self.num_jobs] = job
        self.seen["stores"] += 1
        self._call("store", self.num_jobs, job.moves)

    def _load(self, keys: list[bytes]) -> None:
        job = self._begin(keys, is_store=False)
        if job is None:
            return
        for key, row in job.moves:
            self._write(row, b"\xee" * _ROW_BYTES)
            if self._find(key):
                job.found.add(key)
                if any(key in other.fresh for other in self.jobs.values()):
                    self.since.setdefault(key, job.tick)
                    self.early.add(key)
        self.jobs[self.num_jobs] = job
        self.seen["loads"] += 1
        self._call("load", self.num_jobs, job.moves)

    def _find(self, key: bytes) -> bool:
        is_found: bool = self._call("find", key)
        if is_found and self.layout not in self.stored.get(key, ()):
            where = "in this layout" if key in self.stored else "since the last reset"
            self._broken("P37", f"{self._name(key)} is found, and was not stored {where}")
        if not is_found and self._has_room(key, self.since.get(key)):
            if key in self.early:
                self._broken("P38", f"{self._name(key)} was found before it was there")
            self._broken("P24", f"{self._name(key)} was stored, and is not found")
        return is_found

    def _has_room(self, key: bytes, since: int | None) -> bool:
        """Return True if a key that is there since `since` (None: it is not) must still be there.

        It must while at most `room` keys, itself included, were stored or loaded since then.
        """
        return since is not None and len({*self.used[since:]} - {key}) < self.room

    def _advance(self) -> bool:
        has_moved: bool = self._call("advance")
        self._take_ended()
        return has_moved

    def _finish(self) -> None:
        """Let all jobs end."""
        bound = 50 + 10 * sum(len(job.moves) for job in self.jobs.values())
        while self._advance():
            bound -= 1
            if not bound:
                self._broken("P41", f"jobs that never end: {[*self.jobs]}")
        self._check_over()

    def _check_over(self) -> None:
        if self.jobs:
            self._broken("P41", f"nothing is left to do, and jobs have not ended: {[*self.jobs]}")
            self.jobs.clear()

    def _take_ended(self, *, is_drained: bool = False) -> None:
        for end in self._call("ended"):
            job = self.jobs.pop(end.job, None)
            if job is None:
                self._broken("P38", f"job {end.job} ends, and is not under way")
                continue
            if not {*end.keys} <= {move.key for move in job.moves}:
                self._broken("P38", f"job {end.job} has moved what it was not asked for")
            if job.is_store:
                self._stored(job, end)
            else:
                self._loaded(job, end, is_drained=is_drained)
        self.before = bytes(self.memory)

    def _stored(self, job: _Job, end: Ended) -> None:
        for key, row in job.moves:
            if key in end.keys and key in job.fresh and not self.is_full:
                self.since[key] = job.tick
                self.damaged.pop(key, None)
                self.early.discard(key)
            self._write(row, b"\xdd" * _ROW_BYTES)  # the engine uses it for something else

    def _loaded(self, job: _Job, end: Ended, *, is_drained: bool) -> None:
        noticed, is_first = self._num_noticed(), not is_drained
        for key, row in job.moves:
            if key in end.keys:
                self.seen["hits"] += 1
                data = self.memory[row * _ROW_BYTES : (row + 1) * _ROW_BYTES]
                if data != self._payload(key):
                    self._broken(*self._what(key, data))
                continue
            self.seen["misses"] += 1
            if not is_first or key not in job.found:
                is_first = False  # what follows a miss in a job need not be loaded
            elif self._has_room(key, self.since.get(key)):
                self._broken("P38", f"{self._name(key)} was found, and the load did not bring it")
            elif self._has_room(key, self.damaged.get(key)) and noticed == job.num_noticed != -1:
                self._broken("P37", f"{self._name(key)} is damaged, and that is not counted")

    def _what(self, key: bytes, data: bytes) -> tuple[str, str]:
        """Return the property that these bytes break, and what they are."""
        name = self._name(key)
        if data == b"\xdd" * _ROW_BYTES:
            return "P38", f"{name} has what came into its row after the store had ended"
        if data == b"\xee" * _ROW_BYTES:
            return "P38", f"{name} counts as loaded, and its row was not written"
        for other in self.keys:
            for layout in self.tier.layouts:
                for epoch in range(self.epoch + 1):
                    if data == _payload(other, layout, epoch):
                        where = f"{self._name(other)} in the layout {layout!r}"
                        when = " before the reset" if epoch < self.epoch else ""
                        return "P37", f"{name} in {self.layout!r} brings {where}{when}"
        right = self._payload(key)
        count = sum(a != b for a, b in zip(data, right, strict=True))
        return "P37", f"{name} is served with {count} wrong bytes"

    # The ghost

    def _payload(self, key: bytes) -> bytes:
        return _payload(key, self.layout, self.epoch)

    def _name(self, key: bytes) -> str:
        return f"k{self.keys.index(key)}"

    def _write(self, row: int, data: bytes) -> None:
        self.memory[row * _ROW_BYTES : (row + 1) * _ROW_BYTES] = data
        self.before = bytes(self.memory)

    def _check_rows(self) -> None:
        """Only loads under way write, and only to their rows."""
        if self.before == self.memory[:]:
            return
        targets = {move.row for job in self.jobs.values() if not job.is_store for move in job.moves}
        for row in {*range(_NUM_ROWS)} - targets:
            span = slice(row * _ROW_BYTES, (row + 1) * _ROW_BYTES)
            if self.before[span] != self.memory[span]:
                self._broken("P38", f"row {row} is written, and no load has it")
        self.before = bytes(self.memory)

    def _call(self, verb: str, *given: object) -> Any:  # noqa: ANN401  # each verb has its own
        self._say(f"tier.{verb}({', '.join(map(self._told, given))})")
        try:
            answer = getattr(self.tier, verb)(*given)
            used: int = 0 if verb in _READS else self.tier.used_bytes()
        except Exception as error:
            message = f"{verb} raised {type(error).__name__}: {error}"
            raise CrashError(message, "\n".join(self.program)) from error
        if verb in _READS and answer:
            self.program[-1] += f"  # {[end.job for end in answer] if verb == 'ended' else answer}"
        self._check_rows()
        if used > self.capacity_bytes:
            self._broken("P39", f"{used:,} bytes with a capacity of {self.capacity_bytes:,}")
        return answer

    def _told(self, given: object) -> str:
        if isinstance(given, mmap):
            return "memory"
        if isinstance(given, bytes):
            return self._name(given)
        if isinstance(given, list):
            return f"[{', '.join([f'Move({self._name(key)}, {row})' for key, row in given])}]"
        return repr(given)

    def _say(self, line: str) -> None:
        self.program.append(f"    {line}")

    def _broken(self, prop: str, message: str) -> None:
        if prop not in self.known:
            raise PropertyError(prop, message, "\n".join(self.program))


def _payload(key: bytes, layout: str, epoch: int) -> bytes:
    return Random(f"{key.hex()} {layout} {epoch}").randbytes(_ROW_BYTES)  # noqa: S311
