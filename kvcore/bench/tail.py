"""W10: the slowest calls, which a median hides and a user meets.

A trace of agents is played once on a pool of a million blocks, ours made at once, with the
collector kept away from what exists then; every call is timed, and what is read is the median, the
99th percentile and the slowest of each kind. The same is read of each verb of ours, driven request
by request. Then single calls: one step in which windows move in a pool where nothing is cached, the
requests that fill a fresh pool, a reset of a fresh pool and of a full one, and the counters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import repeat
from time import thread_time_ns
from typing import cast

import kvcore
from kvcore.bench.measure import Case, Round, Run, ran_ns, settled
from kvcore.bench.ours import OurCache
from kvcore.bench.peer import PLAIN, Cache, Options, Subject, Tokens
from kvcore.bench.pools import BLOCK_SIZE, once_each
from kvcore.bench.prompts import in_format, random_tokens, seeded
from kvcore.bench.requests import play
from kvcore.bench.trace import AGENTS, ChatShape, Trace, chat_trace

_KINDS = ("start", "decode", "finish")
_QUANTILES = (("median", 0.5), ("99 %", 0.99), ("slowest", 1.0))


def w10(subjects: list[Subject], *, quick: bool) -> Iterator[Case]:
    """Yield W10: microseconds for one call."""
    able = once_each(subjects, "W10")
    shape = ChatShape(num_requests=60, num_open=20, max_running=8) if quick else AGENTS
    num_blocks = 4_096 if quick else 1_000_000
    trace = chat_trace(5, shape)
    played = [_Played(subject, trace, num_blocks) for subject in able]
    for kind in _KINDS:
        for name, share in _QUANTILES:
            runs = [Run(each.subject, each.reading(kind, share)) for each in played]
            yield Case("W10", f"{kind}, {name}", "us", runs, 1, 0)
    for subject in able:
        if subject.is_ours:
            yield from _verb_cases(subject, trace, num_blocks)
    for size in (4_096,) if quick else (100_000, 1_000_000):
        for count in (1, 8 if quick else 256):
            for by_request in (False, True):
                yield _slide_case(subjects, size, count, by_request, 2 if quick else 5)
    for name, prefault in (("made before", True), ("made then", False)):
        runs = [Run(subject, _filling(subject, num_blocks, prefault=prefault)) for subject in able]
        yield Case("W10", f"fill a fresh pool, slowest 4k, blocks {name}", "us", runs, 1, 0)
    calls: list[tuple[str, Callable[[Cache, Tokens], object], bool]] = [
        ("4k tokens into a fresh pool", lambda cache, prompt: cache.start(prompt), False),
        ("reset of a fresh pool", lambda cache, _: cache.reset(), False),
        ("reset of a full pool", lambda cache, _: cache.reset(), True),
        ("reading the counters, full", lambda cache, _: cache.num_hit_tokens(), True),
    ]
    for name, call, is_full in calls:
        runs = [Run(subject, _once(subject, num_blocks, call, is_full=is_full)) for subject in able]
        yield Case("W10", name, "us", runs, 1 if is_full else 3, 0)


class _Timed:
    """A manager, and how long each call of the verbs of one request took."""

    verbs = ("open", "reserve", "commit", "append", "close")

    def __init__(self, manager: kvcore.KVCacheManager) -> None:
        self.times: dict[str, list[int]] = {verb: [] for verb in self.verbs}
        for verb in self.verbs:
            setattr(self, verb, self._timing(getattr(manager, verb), self.times[verb]))

    @staticmethod
    def _timing(
        call: Callable[..., kvcore.KVSequence], times: list[int]
    ) -> Callable[..., kvcore.KVSequence]:
        def timed(*arguments: object) -> kvcore.KVSequence:
            begin = thread_time_ns()
            answer = call(*arguments)
            times.append(ran_ns(begin))
            return answer

        return timed


def _verb_cases(subject: Subject, trace: Trace, num_blocks: int) -> Iterator[Case]:
    """Yield what each verb of ours takes where the trace is driven request by request."""
    cache = OurCache(num_blocks, BLOCK_SIZE, by_request=True, prefault=True)
    timed = _Timed(cache.manager)
    cache.manager = cast("kvcore.KVCacheManager", timed)
    prompts = [in_format(turn.prompt, subject.tokens) for turn in trace.turns]
    with settled():
        play(cast("Cache", cache), trace, prompts)
    for verb, times in timed.times.items():
        times.sort()
        for name, share in _QUANTILES:
            cost = times[round(share * (len(times) - 1))] / 1e3
            run = Run(subject, lambda cost=cost: Round(cost))  # type: ignore[misc]  # bound now
            yield Case("W10", f"`{verb}`, {name}", "us", [run], 1, 0)


class _Played:
    """The times of every call of a trace, once it has been played."""

    def __init__(self, subject: Subject, trace: Trace, num_blocks: int) -> None:
        self.subject = subject
        self._trace = trace
        self._num_blocks = num_blocks
        self._times: dict[str, list[int]] = {}

    def reading(self, kind: str, share: float) -> Callable[[], Round]:
        """Return what says which time so large a share of the calls of a kind do not exceed."""

        def measure() -> Round:
            if not self._times:
                self._play()
            times = self._times[kind]
            return Round(times[round(share * (len(times) - 1))] / 1e3)

        return measure

    def _play(self) -> None:
        subject, trace = self.subject, self._trace
        cache = _ready(subject, self._num_blocks)
        times: dict[str, list[int]] = {kind: [] for kind in _KINDS}
        clock = thread_time_ns
        running: list[object] = []
        with settled():
            for step in trace.steps:
                for turn in step.started:
                    prompt = in_format(trace.turns[turn].prompt, subject.tokens)
                    begin = clock()
                    running.append(cache.start(prompt))
                    times["start"].append(ran_ns(begin))
                begin = clock()
                cache.decode(running, step.tokens)
                times["decode"].append(ran_ns(begin))
                for place in step.finished:
                    request = running.pop(place)
                    begin = clock()
                    cache.finish(request)
                    times["finish"].append(ran_ns(begin))
        self._times = {kind: sorted(spent) for kind, spent in times.items()}


def _ready(subject: Subject, num_blocks: int, options: Options = PLAIN) -> Cache:
    """Return a cache for an engine that must not pause."""
    given: Options = {**options, "prefault": True} if subject.is_ours else options
    return subject.peer.make_cache(num_blocks, BLOCK_SIZE, **given)


def _slide_case(
    subjects: list[Subject],
    num_blocks: int,
    count: int,
    by_request: bool,  # noqa: FBT001  # one private caller
    num_rounds: int,
) -> Case:
    options = Options(windows=(64,), caching=False)
    if by_request:
        options["by_request"] = True
    able = once_each(subjects, "W10", options)
    runs = [Run(subject, _sliding(subject, num_blocks, count, options)) for subject in able]
    name = "1 window moves" if count == 1 else f"{count} windows move"
    name += f"{', by request' if by_request else ''}, {num_blocks:,} blocks"
    return Case("W10", name, "us", runs, num_rounds)


def _filling(subject: Subject, num_blocks: int, *, prefault: bool) -> Callable[[], Round]:
    """Return what times the slowest of the requests that fill a new cache's last block but few."""

    def measure() -> Round:
        rng = seeded(13)
        cache = (
            _ready(subject, num_blocks)
            if prefault
            else subject.peer.make_cache(num_blocks, BLOCK_SIZE)
        )
        held: list[object] = []
        slowest = 0
        with settled():
            for _ in range((num_blocks - 1) // (4096 // BLOCK_SIZE)):
                prompt = in_format(random_tokens(rng, 4096), subject.tokens)
                begin = thread_time_ns()
                held.append(cache.start(prompt))
                slowest = max(slowest, ran_ns(begin))
        return Round(slowest / 1e3)

    return measure


def _sliding(
    subject: Subject, num_blocks: int, count: int, options: Options
) -> Callable[[], Round]:
    """Return what times the step in which all requests' windows move, where nothing is cached.

    Every block was held once, so whatever an allocator keeps of free blocks is as long as it gets.
    """
    rng = seeded(10)
    cache = _ready(subject, num_blocks, options)
    half = in_format(random_tokens(rng, num_blocks // 3 * BLOCK_SIZE), subject.tokens)
    cache.finish(cache.start(half))
    prompts = [random_tokens(rng, 128) for _ in range(count)]
    requests = [cache.start(in_format(prompt, subject.tokens)) for prompt in prompts]

    def measure() -> Round:
        slowest = 0
        for _ in repeat(None, BLOCK_SIZE):
            tokens = random_tokens(rng, count).tolist()
            begin = thread_time_ns()
            cache.decode(requests, tokens)
            slowest = max(slowest, ran_ns(begin))
        return Round(slowest / 1e3)

    return measure


def _once(
    subject: Subject, num_blocks: int, call: Callable[[Cache, Tokens], object], *, is_full: bool
) -> Callable[[], Round]:
    """Return what times one call on a new cache, which is full of content or not."""

    def measure() -> Round:
        rng = seeded(11)
        cache = _ready(subject, num_blocks)
        if is_full:
            for _ in range(num_blocks // 256):
                prompt = in_format(random_tokens(rng, 256 * BLOCK_SIZE), subject.tokens)
                cache.finish(cache.start(prompt))
        prompt = in_format(random_tokens(rng, 4096), subject.tokens)
        with settled():
            begin = thread_time_ns()
            call(cache, prompt)
            return Round(ran_ns(begin) / 1e3)

    return measure
