"""The state of a pool and its requests, frame by frame, for the page that shows them.

Decides: the frames, live and recorded alike; docs/reference/trace-format.md spells them. A
frame has the changes since the one before it. The first one, and every one with `is_whole`, begins
from nothing.

Invariants: frames in order give, at each of them, the tables of the running requests as they were;
which free blocks hold content is exact where `looks_closely`, and otherwise presumed of a block
that has just been released, until the next look that is close; `fold` of two frames has the changes
of both, one after the other. Memory is bounded: `FrameLog` folds neighbours when there are too
many. Looking changes nothing.

Does not know: torch, text, clocks, the page.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import kvcore
from model.control.request import Request
from model.control.step import SchedulerStats
from model.control.tier_transfers import TierTransfers

VERSION = 1
Runs: TypeAlias = "array[int]"
"""Pairs or triples of numbers, each for blocks that follow one another."""


def tier_counts(schedule: Schedule) -> dict[str, tuple[int, int]]:
    """Return by tier name the copies that it has, and those that were loaded. O(tiers)."""
    tiers = () if schedule.tiers is None else schedule.tiers.tiers.tiers
    return {tier.name: (tier.stats.num_records, tier.stats.num_hits) for tier in tiers}


class Schedule(Protocol):
    """The part of a scheduler that frames show."""

    @property
    def stats(self) -> SchedulerStats:
        """The scheduler's counters."""
        ...

    @property
    def tiers(self) -> TierTransfers | None:
        """The tiers behind its pool; None: there are none."""
        ...

    @property
    def running(self) -> tuple[Request, ...]:
        """The running requests."""
        ...

    @property
    def waiting(self) -> tuple[Request, ...]:
        """The waiting and preempted requests."""
        ...


@dataclass(frozen=True, slots=True)
class Beginning:
    """The fixed facts of a request that is seen for the first time."""

    num_prompt_tokens: int
    sample: int


@dataclass(slots=True)
class Frame:
    """The changes of a pool and its requests since the frame before.

    Attributes:
        time_s: the time since the first frame.
        is_whole: True if everything before it is to be forgotten.
        counts: the counts of this moment, by name.
        begun: requests seen for the first time, by id.
        labels: the labels of requests that have just got one.
        statuses: requests whose status has changed: "waiting", "running", "preempted", or the
            reason why they have ended.
        progress: tokens computed and tokens in all, of requests for which one has changed.
        tables: for a request and a layer group, the first entry from which its table differs, and
            its entries from there on: pairs of a first block and a count; 0 stands for null blocks.
        cached: blocks that are free with content now (1), or not any more (0): triples of a first
            block, a count, and that.
        hits: likewise the hits of blocks since they got their content.
    """

    time_s: float
    is_whole: bool = False
    counts: dict[str, int] = field(default_factory=dict)
    begun: dict[int, Beginning] = field(default_factory=dict)
    labels: dict[int, str] = field(default_factory=dict)
    statuses: dict[int, str] = field(default_factory=dict)
    progress: dict[int, tuple[int, int]] = field(default_factory=dict)
    tables: dict[tuple[int, int], tuple[int, Runs]] = field(default_factory=dict)
    cached: Runs = field(default_factory=lambda: array("I"))
    hits: Runs = field(default_factory=lambda: array("I"))

    @property
    def size(self) -> int:
        """The size of its tables and lists, in numbers. O(tables)."""
        size = len(self.begun) + len(self.labels) + len(self.statuses) + len(self.progress)
        size += len(self.cached) + len(self.hits) + len(self.tables)
        return size + sum([len(runs) for _, runs in self.tables.values()])

    def document(self) -> dict[str, object]:
        """Return it in the trace format, for JSON; empty parts are left out. O(size)."""
        begun = [part for n, b in self.begun.items() for part in (n, b.num_prompt_tokens, b.sample)]
        tables = [
            [number, group, first, runs.tolist()]
            for (number, group), (first, runs) in self.tables.items()
        ]
        parts: dict[str, object] = {
            "whole": self.is_whole,
            "counts": self.counts,
            "begun": begun,
            "labels": [part for pair in self.labels.items() for part in pair],
            "status": [part for pair in self.statuses.items() for part in pair],
            "progress": [part for n, both in self.progress.items() for part in (n, *both)],
            "tables": tables,
            "cached": self.cached.tolist(),
            "hits": self.hits.tolist(),
        }
        return {"t": round(self.time_s, 6)} | {name: part for name, part in parts.items() if part}


def fold(first: Frame, then: Frame) -> Frame:
    """Return one frame with the changes of two, one after the other. O(size of both).

    A request that begins in the first and ends in the second leaves no trace.
    """
    if then.is_whole:
        return then
    short = {n for n in first.begun if then.statuses.get(n, "running") not in _UNFINISHED}
    tables = dict(first.tables)
    for place, (entry, runs) in then.tables.items():
        start, before = tables.get(place, (entry, _NOTHING))
        if entry > start:
            tables[place] = (start, _pair_runs(_ids(before)[: entry - start] + _ids(runs)))
        else:
            tables[place] = (entry, runs)
    return Frame(
        then.time_s,
        first.is_whole,
        then.counts,
        {n: one for n, one in (first.begun | then.begun).items() if n not in short},
        {n: one for n, one in (first.labels | then.labels).items() if n not in short},
        {n: one for n, one in (first.statuses | then.statuses).items() if n not in short},
        {n: one for n, one in (first.progress | then.progress).items() if n not in short},
        {place: one for place, one in tables.items() if place[0] not in short},
        _triple_runs(_values(first.cached) | _values(then.cached)),
        _triple_runs(_values(first.hits) | _values(then.hits)),
    )


class FrameLog:
    """Frames of a run of any length, in bounded memory: neighbours are folded as it grows.

    Attributes:
        frames: the kept frames, in order.
    """

    def __init__(self, max_size: int = 400_000) -> None:
        self.frames: list[Frame] = []
        self._max_size = max_size
        self._size = 0
        self._stride = 1  # number of frames that are folded into one
        self._num_folded = 0  # in the last one

    def add(self, frame: Frame) -> None:
        """Keep a frame. O(size); now and then O(max_size)."""
        if self.frames and self._num_folded < self._stride:
            last = self.frames.pop()
            self._size -= last.size + 1
            frame = fold(last, frame)
        else:
            self._num_folded = 0
        self._num_folded += 1
        self.frames.append(frame)
        self._size += frame.size + 1
        while self._size > self._max_size and len(self.frames) > 2:
            self._halve()

    def _halve(self) -> None:
        old = self.frames
        self.frames = [fold(*old[i : i + 2]) for i in range(0, len(old) - 1, 2)]
        if len(old) % 2:
            self.frames.append(old[-1])
        else:
            self._num_folded += self._stride
        self._stride *= 2
        self._size = sum([frame.size + 1 for frame in self.frames])


@dataclass(slots=True)
class _Seen:
    """A request as it was at the last look."""

    request: Request
    beginning: Beginning
    status: str
    progress: tuple[int, int]
    sequence: kvcore.KVSequence | None
    tables: list[array[int]]
    label: str = ""
    is_named: bool = False


@dataclass(frozen=True, slots=True)
class _Change:
    number: int
    group: int
    first: int
    ids: array[int]
    num_hit: int


class PoolFrames:
    """An observer of a pool and its requests, which returns their changes at each look.

    Args:
        kv: the pool.
        schedule: its requests.
        label: returns a request's label, once it has blocks; None: there are no labels.
        ended: called with each request that is no longer seen; None: not called.
    """

    def __init__(
        self,
        kv: kvcore.KVCacheManager,
        schedule: Schedule,
        *,
        label: Callable[[Request], str] | None = None,
        ended: Callable[[Request], None] | None = None,
    ) -> None:
        self._kv = kv
        self._schedule = schedule
        self._label = label
        self._ended = ended
        self._seen: dict[int, _Seen] = {}
        self._holders = array("I", bytes(4 * kv.num_blocks))  # tables that a block stands in
        self._cached = bytearray(kv.num_blocks)
        self._hits = array("I", bytes(4 * kv.num_blocks))
        self._num_output = 0
        self._changes: list[_Change] = []
        self._left: dict[int, int] = {}
        self._tables: dict[tuple[int, int], tuple[int, array[int]]] = {}
        self._now_cached: dict[int, int] = {}  # what this look has changed
        self._now_hits: dict[int, int] = {}
        self._last: Frame | None = None

    def head(self) -> dict[str, object]:
        """Return the constants: sizes and layer groups. O(groups)."""
        return {
            "version": VERSION,
            "num_blocks": self._kv.num_blocks,
            "groups": [
                {"kind": type(group).__name__, "block_size": group.block_size}
                for group in self._kv.groups
            ],
        }

    def look(self, time_s: float, *, looks_closely: bool = True) -> Frame:
        """Return the changes since the last look; the first is whole.

        O(blocks of the running requests + changes), and with `looks_closely` O(num_blocks).

        Args:
            time_s: the time since the first look.
            looks_closely: ask the pool which free blocks hold content.
        """
        frame = Frame(time_s, is_whole=self._last is None)
        requests = (*self._schedule.running, *self._schedule.waiting)
        unfinished = {request.request_id: request for request in requests}
        for number in list(self._seen):
            if unfinished.get(number) is not self._seen[number].request:
                self._let_go(self._seen.pop(number), frame)
        for request in requests:
            self._look_at(request, frame)
        self._look_for_content(self._settle(), looks_closely=looks_closely)
        frame.tables = {
            place: (first, _pair_runs(ids)) for place, (first, ids) in self._tables.items()
        }
        frame.cached, frame.hits = _triple_runs(self._now_cached), _triple_runs(self._now_hits)
        self._tables, self._now_cached, self._now_hits = {}, {}, {}
        stats = self._schedule.stats
        frame.counts = {
            "used": self._kv.num_usable_blocks - self._kv.num_free_blocks,
            "running": len(self._schedule.running),
            "waiting": len(self._schedule.waiting),
            "prompt": stats.num_prompt_tokens,
            "hit": stats.num_hit_tokens,
            "output": self._num_output,
            "evicted": self._kv.num_evicted_blocks,
            "preemptions": stats.num_preemptions,
            "steps": stats.num_steps,
        }
        for name, (copies, hits) in tier_counts(self._schedule).items():
            frame.counts |= {f"{name} copies": copies, f"{name} hits": hits}
        self._last = frame
        return frame

    def whole(self) -> Frame | None:
        """Return the state of the last look as a whole frame; None before the first.

        O(num_blocks + tables).
        """
        if self._last is None:
            return None
        seen = self._seen
        return Frame(
            self._last.time_s,
            True,  # noqa: FBT003  # a field of a record
            self._last.counts,
            {number: one.beginning for number, one in seen.items()},
            {number: one.label for number, one in seen.items() if one.label},
            {number: one.status for number, one in seen.items()},
            {number: one.progress for number, one in seen.items()},
            {
                (number, group): (0, _pair_runs(ids))
                for number, one in seen.items()
                for group, ids in enumerate(one.tables)
                if ids
            },
            _triple_runs({n: 1 for n, state in enumerate(self._cached) if state}),
            _triple_runs({n: count for n, count in enumerate(self._hits) if count}),
        )

    def _look_at(self, request: Request, frame: Frame) -> None:
        number = request.request_id
        one = self._seen.get(number)
        if one is None:
            beginning = Beginning(request.num_prompt_tokens, request.sample)
            one = _Seen(request, beginning, "", (0, 0), None, [array("I") for _ in self._kv.groups])
            self._seen[number] = one
            frame.begun[number] = beginning
        status = request.status.value
        if status != one.status:
            frame.statuses[number] = one.status = status
        computed = one.progress[0]
        progress = (request.num_computed_tokens, request.num_tokens)
        if progress != one.progress:
            had = max(one.progress[1], request.num_prompt_tokens)
            self._num_output += max(0, progress[1] - had)
            frame.progress[number] = one.progress = progress
        sequence = request.sequence
        is_new = sequence is not one.sequence
        if is_new:
            self._clear(one, computed)
            one.sequence = sequence
        if sequence is not None:
            self._look_at_tables(one, sequence, sequence.num_cached_tokens if is_new else 0)
            if self._label is not None and not one.is_named and one.tables[0]:
                one.is_named = True
                one.label = self._label(request)
                if one.label:
                    frame.labels[number] = one.label

    def _look_at_tables(self, one: _Seen, sequence: kvcore.KVSequence, num_hit: int) -> None:
        """Note the tables that have changed; the blocks of states are shown as one more."""
        for group, table in enumerate(sequence.tables):
            if table.block_ids != one.tables[group]:
                num_entries = num_hit // table.block_size
                self._change(one, group, table.block_ids[:], num_hit=num_entries)
        if sequence.state is not None:
            blocks = array("I", [block.block_id for block in sequence.state.blocks()])
            if blocks != one.tables[-1]:
                self._change(one, len(one.tables) - 1, blocks)

    def _let_go(self, one: _Seen, frame: Frame) -> None:
        request, reason = one.request, one.request.finish_reason
        number, total = request.request_id, request.num_tokens
        frame.statuses[number] = "aborted" if reason is None else reason.value
        frame.progress[number] = (0, total)
        # The last token of a text is never computed.
        self._clear(one, total - 1 if total > request.num_prompt_tokens else one.progress[0])
        self._num_output += max(0, total - max(one.progress[1], request.num_prompt_tokens))
        if self._ended is not None:
            self._ended(request)

    def _clear(self, one: _Seen, num_computed: int) -> None:
        """Note that a request has released its blocks, `num_computed` tokens of them written."""
        for group, ids in enumerate(one.tables):
            if ids:
                num_full = num_computed // self._kv.groups[group].block_size
                self._change(one, group, array("I"), num_full=num_full)

    def _change(
        self, one: _Seen, group: int, ids: array[int], *, num_hit: int = 0, num_full: int = 2**32
    ) -> None:
        """Note a table that has changed.

        Args:
            one: the request with the table.
            group: of the KV cache.
            ids: the new table.
            num_hit: number of its first entries that were prefix cache hits.
            num_full: number of full blocks in the old table; those without a holder are presumed
                to stay cached.
        """
        before = one.tables[group]
        first = _first_difference(before, ids)
        for place, block_id in enumerate(before[first:], first):
            self._holders[block_id] -= 1
            self._left[block_id] = int(place < num_full and self._kv.enable_caching)
        one.tables[group] = ids
        self._changes.append(_Change(one.request.request_id, group, first, ids, num_hit))

    def _settle(self) -> dict[int, int]:
        """Count the holders of every changed block; return the blocks without any.

        Returns:
            For each such block 1 if it is presumed to hold content, else 0.
        """
        for change in self._changes:
            new = change.ids[change.first :]
            for block_id in new:
                self._holders[block_id] += 1
                if self._cached[block_id]:
                    self._cached[block_id] = self._now_cached[block_id] = 0
            self._count_hits(change)
            place = (change.number, change.group)
            start, known = self._tables.get(place, (change.first, _NOTHING))
            self._tables[place] = (
                min(start, change.first),
                known[: max(0, change.first - start)] + new,
            )
        left, self._left, self._changes = self._left, {}, []
        return {n: state for n, state in left.items() if n and not self._holders[n]}

    def _count_hits(self, change: _Change) -> None:
        """Count the new entries of a table that were hits; blocks handed out anew have none."""
        first, hits = change.first, self._hits
        for block_id in change.ids[first : change.num_hit]:
            if block_id != kvcore.NULL_BLOCK:
                hits[block_id] += 1
                self._now_hits[block_id] = hits[block_id]
        for block_id in change.ids[max(first, change.num_hit) :]:
            if hits[block_id] and self._holders[block_id] == 1:
                hits[block_id] = self._now_hits[block_id] = 0

    def _look_for_content(self, released: dict[int, int], *, looks_closely: bool) -> None:
        """Note which free blocks hold content, presumed or as the pool says."""
        if not looks_closely:
            for block_id, state in released.items():
                if self._cached[block_id] != state:
                    self._cached[block_id] = self._now_cached[block_id] = state
            return
        states = kvcore.pool_map(self._kv).translate(_IS_CACHED)
        for start in range(0, len(states), _PIECE):
            piece = states[start : start + _PIECE]
            if piece != self._cached[start : start + _PIECE]:
                for block_id, state in enumerate(piece, start):
                    if state != self._cached[block_id]:
                        self._cached[block_id] = self._now_cached[block_id] = state


_UNFINISHED = ("waiting", "running", "preempted")
_PIECE = 256
_NOTHING: Runs = array("I")
_IS_CACHED = bytes([state == kvcore.CACHED for state in range(256)])


def _first_difference(one: array[int], other: array[int]) -> int:
    """Return the first entry in which two tables differ. O(the shorter one)."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while high - low > 1:  # they agree before `low`, and differ before `high`
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low


def _pair_runs(ids: array[int]) -> Runs:
    """Return pairs of a first id and a count: consecutive ids, or null blocks. O(ids)."""
    found = array("I")
    start, count = 0, 0
    for block_id in ids:
        if count and block_id == (start + count if start else 0):
            count += 1
            continue
        if count:
            found.extend((start, count))
        start, count = block_id, 1
    if count:
        found.extend((start, count))
    return found


def _ids(runs: Runs) -> array[int]:
    """Return the ids of pairs. O(ids)."""
    found = array("I")
    for start, count in zip(runs[::2], runs[1::2], strict=True):
        found.extend(range(start, start + count) if start else bytes(count))
    return found


def _triple_runs(values: dict[int, int]) -> Runs:
    """Return triples of a first block, a count and the value of all of these. O(n log n)."""
    found = array("I")
    start, count, same = 0, 0, 0
    for block_id, value in sorted(values.items()):
        if count and block_id == start + count and value == same:
            count += 1
            continue
        if count:
            found.extend((start, count, same))
        start, count, same = block_id, 1, value
    if count:
        found.extend((start, count, same))
    return found


def _values(runs: Runs) -> dict[int, int]:
    """Return the values of triples, by block. O(blocks)."""
    return {
        block_id: value
        for start, count, value in zip(runs[::3], runs[1::3], runs[2::3], strict=True)
        for block_id in range(start, start + count)
    }
