"""Busy steps (W12) and the slowest calls (W10).

W12: 260 requests decode, two prompts of 700 tokens are computed in the same step, and the two that
have run for longest end. As many run in every step, as long as in the step before, and the pool is
full of idle content.

W10: a trace of agents on a pool of a million blocks, ours made at once, with the collector kept
away from what exists then; every call is timed, and what is read is the median, the 99th percentile
and the slowest of each kind. Then single calls that a median hides and a user meets.
"""

import random
from itertools import repeat
from time import thread_time_ns

from tests.bench.allocator.ours import OurCache
from tests.bench.allocator.peers import able, needs_of
from tests.bench.allocator.prompts import given, random_tokens
from tests.bench.allocator.requests import (
    BLOCK_SIZE,
    SMALL_CHAT,
    beside,
    fill_cache,
    play,
    probe,
)
from tests.bench.allocator.trace import AGENTS, chat_trace
from tests.bench.measure import Case, Round, ran_ns, settled

_PROMPT, _BEGINNING, _STEPS = 700, 2, 8
_QUANTILES = (("The median", 0.5), ("The 99th percentile", 0.99), ("The slowest", 1.0))
_VERBS = ("open", "reserve", "commit", "append", "close")


def w12(subjects, *, quick):
    for windows in ((),) if quick else ((), (512,)):
        for how in ("step", "requests"):
            yield _mixed_case(subjects, 260, windows, how, quick=quick)


def _mixed_case(subjects, count, windows, how, *, quick):
    num_rounds = 3 if quick else 7
    options = {"windows": windows, "how": how}
    rng = random.Random(12)
    # Two begin in every step, so that the oldest has decoded for as many steps as half of them.
    running = [random_tokens(rng, _PROMPT + (count - index) // 2) for index in range(count)]
    num_steps = (num_rounds + 1) * _STEPS
    prompts = [[random_tokens(rng, _PROMPT) for _ in range(_BEGINNING)] for _ in range(num_steps)]
    steps = [random_tokens(rng, count).tolist() for _ in range(num_steps + 1)]
    needed = (count + 2 * _BEGINNING) * ((_PROMPT + count // 2 + num_steps) // BLOCK_SIZE + 2)
    needed *= 1 + len(windows)
    content = [random_tokens(rng, 256) for _ in range(2 * needed // BLOCK_SIZE)]
    runs = []
    for subject in able(subjects, *needs_of(options)):
        cache = subject.peer.make_cache(2 * needed + 1, BLOCK_SIZE, **options)
        fill_cache(cache, subject, content)
        requests = [cache.start(given(prompt, subject)) for prompt in running]
        cache.decode(requests, steps[0])
        runs.append((subject, _mixing(subject, cache, requests, prompts, steps[1:])))
    return Case(
        group="W12",
        name=f"{count} requests decode, {_BEGINNING} prompts of {_PROMPT} tokens begin, "
        f"{_BEGINNING} requests end{beside(options)}.",
        runs=runs,
        rounds=num_rounds,
        per=(count, "request-step"),
        queried=_PROMPT + 1,
        possible=_PROMPT,
        wanted=_PROMPT // BLOCK_SIZE * BLOCK_SIZE,
    )


def _mixing(subject, cache, running, prompts, steps):
    """Measure a round of steps; its hits are what another then finds of a prompt computed in it.

    Of the last step but one: the KV of the last may not be there yet.
    """
    todo = iter(list(zip(prompts, steps, strict=True)))

    def measure():
        now = [next(todo) for _ in range(_STEPS)]
        calls = [([given(prompt, subject) for prompt in new], tokens) for new, tokens in now]
        mixed, finish = cache.mixed, cache.finish
        begin = thread_time_ns()
        for new, tokens in calls:
            begun = mixed(running, tokens, new)
            for request in running[:_BEGINNING]:
                finish(request)
            del running[:_BEGINNING]
            running.extend(begun)
        cost = ran_ns(begin) / _STEPS
        return Round(cost, probe(cache, subject, now[-2][0][0]))

    return measure


def w10(subjects, *, quick):
    num_blocks = 4_096 if quick else 1_000_000
    trace = chat_trace(5, SMALL_CHAT if quick else AGENTS)
    everyone = able(subjects)
    played = [(one, _play_timed(one, trace, num_blocks)) for one in everyone]
    for kind in played[0][1]:
        yield from _quantiles(
            f"`{kind}` of a trace of agents", [(s, t[kind]) for s, t in played], quick=quick
        )
    ours = everyone[0]
    for verb, times in _verb_times(ours, trace, num_blocks).items():
        if times and not quick:
            yield from _quantiles(f"kvcore's `{verb}`, request by request", [(ours, times)])
    for size in (4_096,) if quick else (100_000, 1_000_000):
        for count in (8,) if quick else (1, 256):
            for how in ("step",) if quick else ("step", "requests"):
                yield _slide_case(subjects, size, count, how, quick=quick)
    for prefault, how in ((True, "made before"), (False, "made when needed")):
        runs = [(one, _filling(one, num_blocks, prefault=prefault)) for one in everyone]
        name = f"The slowest of the prompts of 4,096 tokens that fill a new pool, blocks {how}."
        yield Case("W10", name, runs, 1, 0)
    if quick:
        return
    prompt = random_tokens(random.Random(11), 4096)
    for name, call, is_full in (
        ("A prompt of 4,096 tokens in a new pool", lambda c, s: c.start(given(prompt, s)), False),
        ("`reset` of a new pool", lambda c, _: c.reset(), False),
        ("`reset` of a full pool", lambda c, _: c.reset(), True),
        ("Reading the counters of a full pool", lambda c, _: c.num_hit_tokens(), True),
    ):
        needs = ("reset",) if "reset" in name else ()
        runs = [(one, _once(one, num_blocks, call, is_full)) for one in able(subjects, *needs)]
        yield Case("W10", f"{name} of {num_blocks:,} blocks.", runs, 1 if is_full else 3, 0)


def _quantiles(what, found, *, quick=False):
    """A case for each quantile of the sorted times of each subject."""
    for name, share in _QUANTILES[-1:] if quick else _QUANTILES:
        runs = []
        for subject, times in found:
            cost = times[round(share * (len(times) - 1))]
            runs.append((subject, lambda cost=cost: Round(cost)))
        yield Case("W10", f"{name} {what}.", runs, 1, 0)


def _ready(subject, num_blocks, **options):
    """A cache for an engine that must not pause."""
    prefault = {"prefault": True} if subject.is_ours else {}
    return subject.peer.make_cache(num_blocks, BLOCK_SIZE, **options, **prefault)


def _play_timed(subject, trace, num_blocks):
    """The sorted times of each kind of call."""
    cache = _ready(subject, num_blocks)
    calls = {name: getattr(cache, name) for name in ("start", "decode", "finish")}
    times = {name: [] for name in calls}
    for name, call in calls.items():
        setattr(cache, name, _timed(call, times[name]))
    with settled():
        play(cache, trace, [given(turn.prompt, subject) for turn in trace.turns])
    return {name: sorted(each) for name, each in times.items()}


def _verb_times(subject, trace, num_blocks):
    cache = OurCache(num_blocks, BLOCK_SIZE, how="requests", prefault=True)
    times = {verb: [] for verb in _VERBS}
    cache.manager = _Timing(cache.manager, times)
    cache.finish = cache.manager.close
    with settled():
        play(cache, trace, [given(turn.prompt, subject) for turn in trace.turns])
    return {verb: sorted(each) for verb, each in times.items()}


class _Timing:
    """A manager whose verbs note how long they took."""

    def __init__(self, manager, times):
        for verb, each in times.items():
            setattr(self, verb, _timed(getattr(manager, verb), each))


def _timed(call, times):
    def timed(*arguments):
        begin = thread_time_ns()
        answer = call(*arguments)
        times.append(ran_ns(begin))
        return answer

    return timed


def _slide_case(subjects, num_blocks, count, how, *, quick):
    options = {"windows": (64,), "caching": False, "how": how}
    runs = [
        (one, _sliding(one, num_blocks, count, options))
        for one in able(subjects, *needs_of(options), "caching")
    ]
    return Case(
        group="W10",
        name=f"The slowest of 16 steps in which the windows of {count} requests move; nothing is "
        f"cached in a pool of {num_blocks:,} blocks{beside(options)}.",
        runs=runs,
        rounds=2 if quick else 5,
        per=(count, "request-step"),
    )


def _sliding(subject, num_blocks, count, options):
    """Every block was held once: whatever an allocator keeps of free blocks is at its longest."""
    rng = random.Random(10)
    cache = _ready(subject, num_blocks, **options)
    fill_cache(cache, subject, [random_tokens(rng, num_blocks // 3 * BLOCK_SIZE)])
    requests = [cache.start(given(random_tokens(rng, 128), subject)) for _ in range(count)]

    def measure():
        slowest = 0
        for _ in repeat(None, BLOCK_SIZE):
            tokens = random_tokens(rng, count).tolist()
            begin = thread_time_ns()
            cache.decode(requests, tokens)
            slowest = max(slowest, ran_ns(begin))
        return Round(slowest)

    return measure


def _filling(subject, num_blocks, *, prefault):
    def measure():
        rng = random.Random(13)
        make = _ready if prefault else lambda one, count: one.peer.make_cache(count, BLOCK_SIZE)
        cache = make(subject, num_blocks)
        slowest = 0
        with settled():
            for _ in range((num_blocks - 1) // (4096 // BLOCK_SIZE)):
                prompt = given(random_tokens(rng, 4096), subject)
                begin = thread_time_ns()
                cache.start(prompt)
                slowest = max(slowest, ran_ns(begin))
        return Round(slowest)

    return measure


def _once(subject, num_blocks, call, is_full):
    def measure():
        rng = random.Random(11)
        cache = _ready(subject, num_blocks)
        for _ in range(num_blocks // 256 if is_full else 0):
            fill_cache(cache, subject, [random_tokens(rng, 256 * BLOCK_SIZE)])
        with settled():
            begin = thread_time_ns()
            call(cache, subject)
            return Round(ran_ns(begin))

    return measure
