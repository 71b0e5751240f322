"""Where our own time goes: each verb of a request's life, then each function.

The first part times the calls one by one (about 0.05 us of clock in each), takes the median over
requests and divides by the blocks they handle; the collector has a column of its own. It works on
both builds. The second is cProfile, which sees the functions of the Python build alone and makes
short ones look dearer than they are: read its order, not its numbers.
"""

from __future__ import annotations

import cProfile
import gc
import pstats
from array import array
from collections.abc import Callable, Iterator
from statistics import median
from time import perf_counter_ns

import kvcore
from kvcore.bench.measure import settled
from kvcore.bench.ours import OurCache, our_subjects
from kvcore.bench.pools import BLOCK_SIZE
from kvcore.bench.prompts import random_tokens, seeded, shared_prompts
from kvcore.bench.report import build
from kvcore.bench.requests import play
from kvcore.bench.trace import ChatShape, chat_trace

_VERBS = ("pack", "open", "reserve", "commit", "close")
_MAX_FUNCTIONS = 14


def profile(*, quick: bool) -> Iterator[str]:
    """Yield the lines of the report."""
    yield f"kvcore {kvcore.__version__}, build: {build()}"
    yield ""
    yield "W3, ns a block of the prompt (the 20-token prompt: ns a request); pool full of 256-token"
    yield "prompts. `open` packs, matches and holds; `pack` alone is in it too."
    columns = "".join(f"{verb:>10}" for verb in (*_VERBS, "life", "collector"))
    yield f"{'case':<26}{columns}"
    for length in (20, 256, 1024) if quick else (20, 256, 1024, 4096, 32_768):
        for share in (0, 50, 100):
            yield _verbs_of(length, share, 3 if quick else 40)
    yield ""
    yield "W4, ns a request and step"
    for count in (64,) if quick else (256, 1024):
        yield _decode_of(count, 16 if quick else 64)
    for title, setup in _functions(quick=quick):
        yield ""
        yield from _functions_of(title, setup())


def _full_cache(num_blocks: int, first: array[int]) -> OurCache:
    """Return a cache full of 256-token prompts, and then `first`."""
    cache = OurCache(num_blocks + 1, BLOCK_SIZE)
    rng = seeded(3)
    for _ in range(num_blocks // BLOCK_SIZE):
        cache.finish(cache.start(random_tokens(rng, 256)))
    cache.finish(cache.start(first))
    return cache


class _CollectorClock:
    """Counts the nanoseconds that the garbage collector takes while it is in `gc.callbacks`."""

    def __init__(self) -> None:
        self.spent_ns = 0
        self._begin = 0

    def __call__(self, phase: str, info: dict[str, int]) -> None:  # noqa: ARG002  # as gc calls it
        if phase == "start":
            self._begin = perf_counter_ns()
        else:
            self.spent_ns += perf_counter_ns() - self._begin


def _verbs_of(length: int, share: int, repeats: int) -> str:
    """Time each verb over `repeats` requests; return a line of the table."""
    prompts = shared_prompts(seeded(length + share), length, share, 1, repeats)
    blocks = -(-length // BLOCK_SIZE)
    manager = _full_cache(max(400, blocks) * (repeats + 2), prompts.first).manager
    spent: list[list[int]] = [[] for _ in _VERBS]
    clock = perf_counter_ns
    collector = _CollectorClock()
    with settled():
        gc.callbacks.append(collector)
        for prompt in prompts.rounds[0]:
            times = [clock()]
            kvcore.pack(prompt)
            times.append(clock())
            seq = manager.open(prompt)
            times.append(clock())
            todo = length - seq.num_computed_tokens
            manager.reserve(seq, todo)
            times.append(clock())
            manager.commit(seq, todo)
            times.append(clock())
            manager.close(seq)
            times.append(clock())
            for index, verb in enumerate(spent):
                verb.append(times[index + 1] - times[index])
        gc.callbacks.remove(collector)
    per = blocks if length >= 256 else 1
    verbs = [median(verb) / per for verb in spent]
    columns = (*verbs, sum(verbs[1:]), collector.spent_ns / repeats / per)
    return f"{f'{length} tokens, {share} %':<26}" + "".join(f"{time:>10.0f}" for time in columns)


def _decode_of(count: int, num_steps: int) -> str:
    """Time the three calls of a decode step; return a line."""
    rng = seeded(count)
    prompts = [random_tokens(rng, 256 + index % BLOCK_SIZE) for index in range(count)]
    manager = _full_cache(count * (18 + num_steps // BLOCK_SIZE), prompts[0]).manager
    seqs = [manager.open(prompt) for prompt in prompts]
    for seq in seqs:
        todo = seq.num_tokens - seq.num_computed_tokens
        manager.reserve(seq, todo)
        manager.commit(seq, todo)
    steps = [random_tokens(rng, count).tolist() for _ in range(num_steps)]
    ones = [1] * count
    clock = perf_counter_ns
    spent: list[list[int]] = [[], [], []]
    with settled():
        for tokens in steps:
            times = [clock()]
            for seq, token in zip(seqs, tokens, strict=True):
                manager.append(seq, token)
            times.append(clock())
            manager.reserve_step(seqs, ones)
            times.append(clock())
            manager.commit_step(seqs, ones)
            times.append(clock())
            for index, call in enumerate(spent):
                call.append(times[index + 1] - times[index])
    append, reserve, commit = (median(call) / count for call in spent)
    total = append + reserve + commit
    return (
        f"{f'{count} running':<26}append {append:.0f}, reserve_step {reserve:.0f}, "
        f"commit_step {commit:.0f}, step {total:.0f}"
    )


def _functions(*, quick: bool) -> Iterator[tuple[str, Callable[[], Callable[[], None]]]]:
    """Yield what cProfile looks at: a title, and what prepares it and returns what is profiled."""

    def life(share: int, repeats: int) -> Callable[[], Callable[[], None]]:
        def prepare() -> Callable[[], None]:
            prompts = shared_prompts(seeded(share), 4096, share, 1, repeats)
            cache = _full_cache((repeats + 2) * 256, prompts.first)

            def run() -> None:
                for prompt in prompts.rounds[0]:
                    cache.finish(cache.start(prompt))

            return run

        return prepare

    def chat() -> Callable[[], None]:
        shape = ChatShape(num_requests=60, num_open=20, max_running=8) if quick else ChatShape()
        trace = chat_trace(5, shape)
        cache = our_subjects()[0].make_cache(2048 if quick else 32_768, BLOCK_SIZE)
        prompts = [turn.prompt for turn in trace.turns]

        def run() -> None:
            play(cache, trace, prompts)

        return run

    yield "W3, 4k tokens, 0 % shared: functions by own time", life(0, 4 if quick else 60)
    yield "W3, 4k tokens, 100 % shared: functions by own time", life(100, 4 if quick else 60)
    yield "W5: functions by own time", chat


def _functions_of(title: str, run: Callable[[], None]) -> Iterator[str]:
    """Profile a call; yield its functions, the one with most own time first."""
    profiler = cProfile.Profile()
    profiler.runcall(run)
    stats = pstats.Stats(profiler).stats  # type: ignore[attr-defined]  # documented, not declared
    total = sum(entry[2] for entry in stats.values())
    yield title
    yield f"{'own %':>7}{'calls':>10}{'us a call':>11}  function"
    ordered = sorted(stats.items(), key=lambda entry: -entry[1][2])
    for (file, number, name), (_, calls, own, _, _) in ordered[:_MAX_FUNCTIONS]:
        where = name if file == "~" else f"{file.rpartition('/')[2]}:{number} {name}"
        yield f"{100 * own / total:>7.1f}{calls:>10}{own / calls * 1e6:>11.3f}  {where}"
