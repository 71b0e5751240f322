"""The record of every step: a recorder, which is a `StepWatch`, and the text of a trace.

A recorder can look at the pool too, in every step: `python -m model.view` shows that of a trace.
The time that looking takes is not on its clock. However long a run is, the memory for the pool's
record is bounded: neighbouring looks are folded into one, and of tokens the first million is kept.

Invariants: the phases of a step follow one another without gaps inside it; steps never overlap;
times come from one monotonic clock; a step that raised is not recorded. Nothing is kept, counted
or timed for an engine that is not recorded.

On a GPU a pass returns before it is done: there `forward` is the time to launch it, and the wait
for it falls into the phase that first needs a result.

Does not know: torch, how a step is computed, which program reads the file.
"""

import json
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol, TextIO

import kvcore
from model.control.pool_frames import FrameLog, PoolFrames, Schedule, tier_counts
from model.control.request import Request
from model.control.step import COMMIT, SCHEDULE, Step

TRACE_BEGINS = '{"displayTimeUnit": "ms", "traceEvents": ['
"""The first characters of a trace file."""

MAX_TEXT_TOKENS = 1_000_000
"""Tokens kept of finished requests, the first ones."""
_CLOSE_SHARE = 10  # looking at every block takes at most 1/_CLOSE_SHARE of the time


class DeviceClock(Protocol):
    """A clock that knows when a device worked on the passes sent to it."""

    def open(self) -> AbstractContextManager[object]:
        """Make a range of all that the body sends to the device; ranges count from 0."""
        ...

    def spans(self) -> Mapping[int, tuple[int, int]]:
        """Return the begin and end of each range, in nanoseconds of `time.perf_counter_ns`."""
        ...


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step. Times in nanoseconds of `time.perf_counter_ns`; counts as they were at its end.

    Attributes:
        begin_ns: the time at which it began.
        laps: each phase with the time at which it ended, in order.
        num_decode_tokens: tokens computed for requests that had one token to compute, with their
            drafts.
        num_prefill_tokens: all others.
        num_used_blocks: blocks held when the step was planned, those for the step included.
        num_running: requests that run.
        num_waiting: requests that do not, preempted ones included.
        num_preemptions: since the scheduler was made.
        num_hit_tokens: likewise.
        num_evicted_blocks: likewise, of the pool.
        tiers: for each tier by its name the copies that it has, and those that were loaded.
    """

    begin_ns: int
    laps: tuple[tuple[str, int], ...]
    num_decode_tokens: int
    num_prefill_tokens: int
    num_used_blocks: int
    num_running: int
    num_waiting: int
    num_preemptions: int
    num_hit_tokens: int
    num_evicted_blocks: int
    tiers: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def end_ns(self) -> int:
        """The time at which it was over. O(1)."""
        return self.laps[-1][1]

    @property
    def elapsed_ns(self) -> int:
        """The time that it took. O(1)."""
        return self.end_ns - self.begin_ns

    def phases(self) -> list[tuple[str, int, int]]:
        """Return each phase with its begin and end, in nanoseconds. O(phases)."""
        begins = (self.begin_ns, *[end for _, end in self.laps])
        return [(name, begin, end) for (name, end), begin in zip(self.laps, begins, strict=False)]


class StepRecorder:
    """A watch that keeps a record of every step. O(num_running + num_waiting) a step.

    Args:
        kv: the cache; its occupancy is noted when a step is planned.
        schedule: the planner of the steps.

    Attributes:
        steps: the recorded steps, in order.
        num_usable_blocks: of the cache.
        before: the cache's counters when the recording began.
        num_preemptions_before: likewise, of the scheduler.
    """

    def __init__(self, kv: kvcore.KVCacheManager, schedule: Schedule) -> None:
        self.steps: list[StepRecord] = []
        self.num_usable_blocks = kv.num_usable_blocks
        self.before = kv.stats()
        self.num_preemptions_before = schedule.stats.num_preemptions
        self._kv = kv
        self._schedule = schedule
        self._begin_ns = 0
        self._laps: list[tuple[str, int]] = []
        self._tokens = (0, 0)
        self._num_used_blocks = 0
        self._pool: _PoolRecording | None = None
        self._device: DeviceClock | None = None
        self._sent: list[tuple[str, int]] = []

    def record_device(self, clock: DeviceClock) -> None:
        """Record from now on when the device works on what a step sends to it. O(1).

        It costs what the clock does; what the host does of a step takes longer then.
        """
        self._device = clock

    def device_spans(self) -> list[tuple[str, int, int]]:
        """Return the phases with the times at which the device began and ended them."""
        spans = {} if self._device is None else self._device.spans()
        return [
            (phase, spans[number][0] - paused, spans[number][1] - paused)
            for number, (phase, paused) in enumerate(self._sent)
            if number in spans
        ]

    def record_pool(self, decode: Callable[[Sequence[int]], str]) -> None:
        """Record what the pool looks like in every step from now on, for `model.view`. O(1).

        A step costs O(blocks of the running requests) more then, which its times leave out.

        Args:
            decode: tokens to text, to show what a block holds.
        """
        self._pool = _PoolRecording(self._kv, self._schedule, decode)

    def pool_document(self) -> dict[str, object] | None:
        """Return the record of the pool (docs/reference/trace-format.md); None: none was made.

        O(the size of the record).
        """
        if self._pool is None:
            return None
        return self._pool.document(self.steps[0].begin_ns if self.steps else self._now())

    def _now(self) -> int:
        return time.perf_counter_ns() - self._paused()

    def _paused(self) -> int:
        return 0 if self._pool is None else self._pool.elapsed_ns

    def cache_stats(self) -> kvcore.Stats:
        """Return the cache's counters now. O(num_blocks)."""
        return self._kv.stats()

    def begin(self) -> None:
        """Start the clock of a step; one that has not ended is forgotten. O(1)."""
        self._laps = []
        self._begin_ns = self._now()

    def scheduled(self, step: Step) -> None:
        """Note what was planned. O(num_chunks)."""
        self.done(SCHEDULE)
        decodes = sum(
            [
                chunk.num_tokens if chunk.drafts else chunk.num_tokens == 1 and chunk.samples
                for chunk in step.chunks
            ]
        )
        self._tokens = (decodes, step.num_tokens - decodes)
        self._num_used_blocks = self._kv.num_usable_blocks - self._kv.num_free_blocks
        if self._pool is not None:
            self._pool.look(self._laps[-1][1])

    def done(self, phase: str) -> None:
        """Note the end of a phase. O(1)."""
        self._laps.append((phase, self._now()))

    def on_device(self, phase: str) -> AbstractContextManager[object]:
        """Note what the device does of a phase, if that is wanted. O(1)."""
        if self._device is None:
            return nullcontext()
        self._sent.append((phase, self._paused()))
        return self._device.open()

    def end(self) -> None:
        """Note the end of the step. O(num_running + num_waiting)."""
        self.done(COMMIT)
        stats = self._schedule.stats
        self.steps.append(
            StepRecord(
                begin_ns=self._begin_ns,
                laps=tuple(self._laps),
                num_decode_tokens=self._tokens[0],
                num_prefill_tokens=self._tokens[1],
                num_used_blocks=self._num_used_blocks,
                num_running=len(self._schedule.running),
                num_waiting=len(self._schedule.waiting),
                num_preemptions=stats.num_preemptions,
                num_hit_tokens=stats.num_hit_tokens,
                num_evicted_blocks=self._kv.num_evicted_blocks,
                tiers=tier_counts(self._schedule),
            )
        )


class _PoolRecording:
    """An observer of a pool while it is used, and its record.

    Attributes:
        elapsed_ns: the time of all looks.
    """

    def __init__(
        self,
        kv: kvcore.KVCacheManager,
        schedule: Schedule,
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        self.elapsed_ns = 0
        self._log = FrameLog()
        self._frames = PoolFrames(kv, schedule, ended=self._keep)
        self._schedule = schedule
        self._decode = decode
        self._texts: dict[int, array[int]] = {}
        self._num_tokens = 0
        self._began_ns = time.perf_counter_ns()
        self._close_ns = 0

    def look(self, now_ns: int) -> None:
        """Note what has changed; a close look only while those take little of the time."""
        begin_ns = time.perf_counter_ns()
        is_close = self._close_ns * _CLOSE_SHARE <= begin_ns - self._began_ns
        self._log.add(self._frames.look(now_ns / 1e9, looks_closely=is_close))
        took_ns = time.perf_counter_ns() - begin_ns
        self.elapsed_ns += took_ns
        self._close_ns += took_ns if is_close else 0

    def document(self, origin_ns: int) -> dict[str, object]:
        """Return the whole recording, with times from an origin."""
        now_ns = time.perf_counter_ns() - self.elapsed_ns
        self._log.add(self._frames.look(now_ns / 1e9))
        texts = dict(self._texts)
        for request in (*self._schedule.running, *self._schedule.waiting):
            texts[request.request_id] = request.tokens
        words = sorted({token for tokens in texts.values() for token in tokens})
        frames = [frame.document() for frame in self._log.frames]
        for frame, kept in zip(frames, self._log.frames, strict=True):
            frame["t"] = round(max(0.0, kept.time_s - origin_ns / 1e9), 6)
        return {
            **self._frames.head(),
            "frames": frames,
            "texts": {str(number): tokens.tolist() for number, tokens in texts.items()},
            "words": {str(token): self._decode([token]) for token in words},
        }

    def _keep(self, request: Request) -> None:
        self._num_tokens += request.num_tokens
        if self._num_tokens <= MAX_TEXT_TOKENS:
            self._texts[request.request_id] = request.tokens


def write_trace(out: TextIO, recorder: StepRecorder) -> None:
    """Write a trace that chrome://tracing and ui.perfetto.dev open. O(steps).

    Steps and their phases are complete events ("X") of one thread, nested; blocks, requests, tokens
    and the copies in tiers are counters ("C"), of which each holds until the next. Times are
    microseconds from the first step's begin, to the nanosecond; events stand in the order of their
    times, a step before its phases. The times of the device are a separate thread, behind
    them. The record of the pool stands behind the events, where trace viewers do not look.
    """
    steps, num_usable_blocks = recorder.steps, recorder.num_usable_blocks
    origin = steps[0].begin_ns if steps else 0
    events: list[dict[str, object]] = [
        {"ph": "M", "pid": 0, "tid": 0, "name": "process_name", "args": {"name": "model"}},
        {"ph": "M", "pid": 0, "tid": 0, "name": "thread_name", "args": {"name": "steps"}},
    ]
    for number, step in enumerate(steps):
        events += _step_events(number, step, origin, num_usable_blocks)
    on_device = recorder.device_spans()
    if on_device:
        name = {"name": "device"}
        events.append({"ph": "M", "pid": 0, "tid": 1, "name": "thread_name", "args": name})
    events += [_span_event(1, origin, *span, {}) for span in on_device]
    out.write(f"{TRACE_BEGINS}\n")
    out.write(",\n".join(map(json.dumps, events)))
    out.write("\n]")
    pool = recorder.pool_document()
    if pool is not None:
        out.write(',\n"kvcore": ')
        out.write(json.dumps(pool, separators=(",", ":")))
    out.write("}\n")


def _step_events(
    number: int, step: StepRecord, origin: int, num_usable_blocks: int
) -> list[dict[str, object]]:
    counts: dict[str, object] = {
        "step": number,
        "decode tokens": step.num_decode_tokens,
        "prefill tokens": step.num_prefill_tokens,
        "preemptions": step.num_preemptions,
        "hit tokens": step.num_hit_tokens,
        "evicted blocks": step.num_evicted_blocks,
    }
    spans = [("step", step.begin_ns, step.end_ns, counts)]
    spans += [(name, begin, end, {}) for name, begin, end in step.phases()]
    events = [_span_event(0, origin, *span) for span in spans]
    used = step.num_used_blocks
    planned = (step.laps[0][1] - origin) / 1000
    ended = (step.end_ns - origin) / 1000
    tokens = {"decode": step.num_decode_tokens, "prefill": step.num_prefill_tokens}
    counters = [
        ("blocks", planned, {"used": used, "free": num_usable_blocks - used}),
        ("tokens", planned, tokens),
        ("requests", ended, {"running": step.num_running, "waiting": step.num_waiting}),
    ]
    if step.tiers:
        for name, place in (("copies in tiers", 0), ("copies loaded", 1)):
            counters.append((name, ended, {tier: both[place] for tier, both in step.tiers.items()}))
    events += [
        {"ph": "C", "pid": 0, "name": name, "ts": when, "args": values}
        for name, when, values in counters
    ]
    return sorted(events, key=_time)


def _span_event(
    thread: int, origin: int, name: str, begin: int, end: int, args: dict[str, object]
) -> dict[str, object]:
    return {
        "ph": "X",
        "pid": 0,
        "tid": thread,
        "name": name,
        "ts": (begin - origin) / 1000,
        "dur": (end - begin) / 1000,
        "args": args,
    }


def _time(event: dict[str, object]) -> float:
    when = event["ts"]
    return when if isinstance(when, float) else 0.0
