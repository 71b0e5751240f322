"""Requests over a cache: a whole life (W3, W7, W8, W11), decode steps (W4, W7, W9, W13), traces.

Pools are full of idle content, so that each new block evicts one, and every cache is asked
afterwards what it hits: a fast allocator that forgets is seen.
"""

import random
from array import array
from time import thread_time_ns

from tests.bench.allocator.ours import EmptyCache
from tests.bench.allocator.peers import able, needs_of
from tests.bench.allocator.prompts import given, random_tokens, shared_prompts
from tests.bench.allocator.trace import AGENTS, ChatShape, chat_trace
from tests.bench.measure import Case, Round, ran_ns, settled

BLOCK_SIZE = 16
SMALL_CHAT = ChatShape(num_requests=60, num_open=20, max_running=8)
MIXED = "prompts of 20 to 4,096 tokens"
_MIX = (20, 100, 256, 700, 2000, 4096)
_PER_ROUND = {20: 256, 256: 64, 1024: 32, 4096: 16, 32_768: 4, 131_072: 1}
_LEAST_POOL = 16_384
_STEPS = BLOCK_SIZE  # of a round: each request fills one block
_WITNESS = 1  # the request whose prompt is one token past a block


def w3(subjects, *, quick):
    """The life of a prompt: pools of one length, of small ones, and of all lengths."""
    for length in (256,) if quick else _PER_ROUND:
        for fill in dict.fromkeys((MIXED,) if quick else (length, 256, 32, MIXED)):
            for share in (0, 100) if quick else (0, 50, 100):
                yield life_case(subjects, "W3", length, share, fill, quick=quick)


def w4(subjects, *, quick):
    for count in (256,) if quick else (256, 1024):
        yield decode_case(subjects, "W4", count, quick=quick)


def w5(subjects, *, quick):
    shapes = {"chat": (ChatShape(), 32_768), "agents": (AGENTS, 32_768)}
    for name, (shape, num_blocks) in shapes.items():
        if quick and name == "agents":
            continue
        yield trace_case(subjects, "W5", name, shape, num_blocks, quick=quick)


def w7(subjects, *, quick):
    for windows in ((1024,), (512, 1024)):
        for length in () if quick else (256, 4096, 32_768):
            for share in (0, 100):
                yield life_case(subjects, "W7", length, share, length, quick=quick, windows=windows)
        for how in ("step",) if quick else ("step", "whole"):
            yield decode_case(subjects, "W7", quick=quick, windows=windows, how=how)


def w8(subjects, *, quick):
    for hashing in ("xxh3", "sha256"):
        options = {"events": True, "hashing": hashing}
        for length in (256,) if quick else (256, 4096, 32_768):
            yield life_case(subjects, "W8", length, 0, length, quick=quick, **options)


def w9(subjects, *, quick):
    for windows in ((),) if quick else ((), (1024,)):
        yield decode_case(subjects, "W9", quick=quick, how="requests", windows=windows)
    for size in () if quick else (BLOCK_SIZE, 256):
        num_blocks = 32_768 * BLOCK_SIZE // size
        yield trace_case(
            subjects,
            "W9",
            "chat",
            ChatShape(),
            num_blocks,
            quick=quick,
            block_size=size,
            how="requests",
        )


def w13(subjects, *, quick):
    for windows in ((), (1024,), (512, 1024)):
        yield decode_case(subjects, "W13", quick=quick, how="ahead", windows=windows)


def life_case(subjects, group, length, share, fill, *, quick, block_size=BLOCK_SIZE, **options):
    """Prompts of `length` tokens come and go in a pool that prompts of `fill` tokens filled."""
    num_rounds, per_round = (2, 8) if quick else (7, _PER_ROUND[length])
    rng = random.Random(f"{length} {share} {fill}")
    prompts = shared_prompts(rng.random(), length, share, num_rounds + 1, per_round)
    blocks = -(-length // block_size)
    # Enough idle content for every round to evict: rounds + 1 and the first prompt, and some.
    num_blocks = max(1 if quick else _LEAST_POOL, (num_rounds + 2) * per_round * blocks)
    content = _content(rng, fill, num_blocks, block_size)
    runs = []
    has_lists = group == "W3"
    for subject in able(subjects, *needs_of(options), lists=has_lists):
        groups = 1 + len(options.get("windows", ()))
        cache = subject.peer.make_cache(groups * num_blocks + 1, block_size, **options)
        fill_cache(cache, subject, [*content, prompts.first])
        rounds = [[given(each, subject) for each in some] for some in prompts.rounds]
        runs.append((subject, _living(cache, rounds, has_events=options.get("events", False))))
    pool = fill if fill == MIXED else f"prompts of {fill:,} tokens"
    return Case(
        group=group,
        name=f"A prompt of {length:,} tokens, {share} % of it cached, comes and goes; "
        f"the pool is full of {pool}{beside(options, block_size)}.",
        runs=runs,
        rounds=num_rounds,
        per=(blocks, "block"),
        queried=length * per_round,
        possible=min(prompts.num_shared, length - 1) * per_round,
        wanted=prompts.hits(block_size) * per_round,
    )


def _content(rng, fill, num_blocks, block_size):
    """Prompts that fill so many blocks."""
    content, left = [], num_blocks
    while left > 0:
        length = rng.choice(_MIX) if fill == MIXED else fill
        content.append(random_tokens(rng, length))
        left -= max(1, length // block_size)
    return content


def fill_cache(cache, subject, prompts):
    for prompt in prompts:
        cache.finish(cache.start(given(prompt, subject)))


def _living(cache, rounds, *, has_events):
    start, finish = cache.start, cache.finish
    pending = iter(rounds)

    def measure():
        prompts = next(pending)
        before = cache.num_hit_tokens()
        begin = thread_time_ns()
        for prompt in prompts:
            finish(start(prompt))
            if has_events:
                cache.take_events()
        return Round(ran_ns(begin) / len(prompts), cache.num_hit_tokens() - before)

    return measure


def decode_case(subjects, group, count=256, *, quick, **options):
    """`count` running requests of 256 tokens and some; of more than the widest window's."""
    num_rounds = 3 if quick else 7
    rng = random.Random(count)
    length = 256 + max(options.get("windows", ()), default=0)
    prompts = [random_tokens(rng, length + index % BLOCK_SIZE) for index in range(count)]
    num_steps = (num_rounds + 1) * _STEPS
    steps = [random_tokens(rng, count).tolist() for _ in range(num_steps)]
    # Twice what the requests need in the end, half of it idle content.
    needed = count * (-(-(length + BLOCK_SIZE + num_steps) // BLOCK_SIZE) + 1)
    needed *= 1 + len(options.get("windows", ()))
    content = _content(rng, 256, 2 * needed, BLOCK_SIZE)
    runs = []
    for subject in able(subjects, *needs_of(options)):
        cache = subject.peer.make_cache(2 * needed + 1, BLOCK_SIZE, **options)
        fill_cache(cache, subject, content)
        requests = [cache.start(given(prompt, subject)) for prompt in prompts]
        runs.append((subject, _Decoding(subject, cache, requests, prompts[_WITNESS], steps)))
    return Case(
        group=group,
        name=f"{count:,} requests decode a token each{beside(options)}.",
        runs=runs,
        rounds=num_rounds,
        per=(count, "request-step"),
        queried=_STEPS,
        possible=_STEPS,
        wanted=_STEPS,
    )


class _Decoding:
    """Measures a round of steps; its hits are what another then finds of one request's.

    Of a request that is one token past a block: the KV of the newest token may not be there yet.
    """

    def __init__(self, subject, cache, requests, witness, steps):
        self._subject, self._cache, self._requests = subject, cache, requests
        self._written = witness[:]
        self._steps = iter(steps)

    def __call__(self):
        steps = [next(self._steps) for _ in range(_STEPS)]
        decode, requests = self._cache.decode, self._requests
        begin = thread_time_ns()
        for tokens in steps:
            decode(requests, tokens)
        cost = ran_ns(begin) / len(steps)
        full_before = len(self._written) // BLOCK_SIZE * BLOCK_SIZE
        self._written.extend([tokens[_WITNESS] for tokens in steps])
        hits = probe(self._cache, self._subject, self._written)
        return Round(cost, max(0, hits - full_before))


def probe(cache, subject, tokens):
    """How many tokens of a prompt that begins so are cached."""
    before = cache.num_hit_tokens()
    cache.finish(cache.start(given(tokens + array("I", [0]), subject)))
    return cache.num_hit_tokens() - before


def trace_case(
    subjects, group, name, shape, num_blocks, *, quick, block_size=BLOCK_SIZE, **options
):
    """A whole trace, net of what its driver takes."""
    if quick:
        shape, num_blocks = SMALL_CHAT, 2048
    trace = chat_trace(5, shape)
    runs = []
    for subject in able(subjects, *needs_of(options), lists=group == "W5" and not quick):
        prompts = [given(turn.prompt, subject) for turn in trace.turns]
        runs.append((subject, _playing(subject, trace, prompts, num_blocks, block_size, options)))
    return Case(
        group=group,
        name=f"A trace of {name}: {len(trace.turns):,} requests over {num_blocks:,} blocks; a "
        f"cache without end would hit {trace.num_shareable_tokens / trace.num_prompt_tokens:.1%}"
        f"{beside(options, block_size)}.",
        runs=runs,
        rounds=2 if quick else 5,
        warm_up=0,
        per=(len(trace.turns), "request"),
        queried=trace.num_prompt_tokens,
        possible=trace.num_shareable_tokens,
    )


def _playing(subject, trace, prompts, num_blocks, block_size, options):
    def measure():
        cache = subject.peer.make_cache(num_blocks, block_size, **options)
        with settled():
            cost = play(cache, trace, prompts) - play(EmptyCache(), trace, prompts)
        return Round(max(1, cost), cache.num_hit_tokens())

    return measure


def play(cache, trace, prompts):
    """Drive a cache through a trace; the nanoseconds it took, the driver included."""
    start, decode, finish = cache.start, cache.decode, cache.finish
    running = []
    begin = thread_time_ns()
    for step in trace.steps:
        for turn in step.started:
            running.append(start(prompts[turn]))  # noqa: PERF401  # the driver is as it is
        decode(running, step.tokens)
        for place in step.finished:
            finish(running.pop(place))
    return ran_ns(begin)


def beside(options, block_size=BLOCK_SIZE):
    """What a cache has beside one group of full attention, in words."""
    windows = " and ".join(map(str, options.get("windows", ())))
    return "".join([
        f"; sliding windows of {windows} beside" if windows else "",
        f"; events named by {options['hashing']} are taken" if options.get("events") else "",
        f"; blocks of {block_size} tokens" if block_size != BLOCK_SIZE else "",
        {"requests": "; by calls for each request", "whole": "; by `step`"}.get(
            options.get("how"), ""
        ),
    ])  # fmt: skip
