"""W3, W4 and W5: requests over a cache.

W3 is the life of one request, prompt in to blocks out, in a pool full of idle cached content, so
that each new block evicts one. W4 is one decode step of many running requests, each appending a
token and publishing its block when that is full; the pool is full of idle content here too. W5
plays a chat trace (`trace.py`) in a pool that evicts, and subtracts what the driver costs.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from time import thread_time_ns

from kvcore.bench.measure import Case, Round, Run, ran_ns, settled
from kvcore.bench.ours import EmptyCache
from kvcore.bench.peer import PLAIN, Cache, Options, Subject, Tokens, Workload
from kvcore.bench.pools import BLOCK_SIZE, once_each
from kvcore.bench.prompts import in_format, random_tokens, seeded, shared_prompts
from kvcore.bench.trace import ChatShape, Trace, chat_trace

# Prompt length: how many of them in a round.
_PER_ROUND = {20: 256, 256: 64, 1024: 32, 4096: 16, 32_768: 4, 131_072: 1}
_SHARES = (0, 50, 100)
_LEAST_POOL = 16_384
_DECODE_STEPS = BLOCK_SIZE  # each request fills one block in a round
_WITNESS = 1  # the request whose prompt is one token past a block


def w3(subjects: list[Subject], *, quick: bool) -> Iterator[Case]:
    """Yield W3: microseconds for the life of one request."""
    able = able_subjects(subjects, "W3")
    for length in (20, 256, 1024) if quick else _PER_ROUND:
        for fill in dict.fromkeys((length, 256) if quick else (length, 256, 32)):
            for share in _SHARES:
                yield life_case(able, length, share, fill, quick=quick)


def life_case(
    subjects: list[Subject],
    length: int,
    share: int,
    fill: int,
    *,
    quick: bool = False,
    workload: Workload = "W3",
    block_size: int = BLOCK_SIZE,
    options: Options = PLAIN,
) -> Case:
    """Return one case of W3, or of a workload that differs in what the cache is.

    Args:
        subjects: what is measured.
        length: tokens of a prompt.
        share: how much of it all prompts have in common, in %.
        fill: tokens of the prompts that the pool was filled with.
        quick: fewer of them, in a smaller pool.
        workload: which one it is a case of.
        block_size: tokens a block.
        options: what the cache has beside.
    """
    num_rounds, per_round = (2, 8) if quick else (7, _PER_ROUND[length])
    rng = seeded(length * 1000 + share * 7 + fill)
    prompts = shared_prompts(rng, length, share, num_rounds + 1, per_round)
    num_groups = 1 + len(options.get("windows", ()))
    blocks = -(-length // block_size)
    # Enough idle content for every round to evict: rounds + 1 and the first prompt, and some.
    num_blocks = max(1 if quick else _LEAST_POOL, (num_rounds + 2) * per_round * blocks)
    content = [random_tokens(rng, fill) for _ in range(num_blocks // max(1, fill // block_size))]
    runs: list[Run] = []
    for subject in subjects:
        cache = subject.make_cache(num_groups * num_blocks + 1, block_size, options=options)
        fill_cache(cache, subject, [*content, prompts.first])
        rounds = [[in_format(each, subject.tokens) for each in some] for some in prompts.rounds]
        runs.append(Run(subject, _living(cache, rounds, events=options.get("events", False))))
    return Case(
        workload=workload,
        name=f"{_short(length)} tokens, {share} % shared, {_named(block_size, options, fill)}",
        unit="us",
        runs=runs,
        num_rounds=num_rounds,
        num_queried_tokens=length * per_round,
        num_possible_hits=min(prompts.num_shared, length - 1) * per_round,
        num_wanted_hits=prompts.hits(block_size) * per_round,
    )


def w4(subjects: list[Subject], *, quick: bool) -> Iterator[Case]:
    """Yield W4: milliseconds for one decode step, over the steps in which each fills a block."""
    for count in (32, 64) if quick else (256, 1024):
        yield decode_case(once_each(subjects, "W4"), count, num_rounds=2 if quick else 7)


def decode_case(
    subjects: list[Subject],
    count: int,
    num_rounds: int,
    *,
    workload: Workload = "W4",
    options: Options = PLAIN,
) -> Case:
    """Return one case of W4, or of W7 or W9: `count` running requests of 256 tokens and some.

    Where there are windows they have 256 tokens more than the widest, so that all windows move.
    """
    rng = seeded(count)
    length = 256 + max(options.get("windows", ()), default=0)
    prompts = [random_tokens(rng, length + index % BLOCK_SIZE) for index in range(count)]
    num_steps = (num_rounds + 1) * _DECODE_STEPS
    steps = [random_tokens(rng, count).tolist() for _ in range(num_steps)]
    # Twice what the requests need in the end, half of it idle content.
    needed = count * (-(-(length + BLOCK_SIZE + num_steps) // BLOCK_SIZE) + 1)
    needed *= 1 + len(options.get("windows", ()))
    content = [random_tokens(rng, 256) for _ in range(2 * needed // BLOCK_SIZE)]
    runs: list[Run] = []
    for subject in subjects:
        cache = subject.make_cache(2 * needed + 1, BLOCK_SIZE, decodes=True, options=options)
        fill_cache(cache, subject, content)
        requests = [cache.start(in_format(prompt, subject.tokens)) for prompt in prompts]
        runs.append(Run(subject, _Decoding(subject, cache, requests, prompts[_WITNESS], steps)))
    return Case(
        workload=workload,
        name=f"{count:,} running{beside(options)}",
        unit="ms",
        runs=runs,
        num_rounds=num_rounds,
        num_queried_tokens=_DECODE_STEPS,
        num_possible_hits=_DECODE_STEPS,
        num_wanted_hits=_DECODE_STEPS,
    )


def w5(subjects: list[Subject], *, quick: bool) -> Iterator[Case]:
    """Yield W5: seconds for the whole chat trace, net of the driver."""
    yield chat_case(subjects, "W5", PLAIN, quick=quick)


def chat_case(
    subjects: list[Subject],
    workload: Workload,
    options: Options,
    *,
    quick: bool,
    block_size: int = BLOCK_SIZE,
) -> Case:
    """Return the case of W5, or of W9: seconds for the whole chat trace, net of the driver."""
    shape = ChatShape(num_requests=60, num_open=20, max_running=8) if quick else ChatShape()
    num_blocks = 2048 if quick else 32_768 * BLOCK_SIZE // block_size
    of_size = "" if block_size == BLOCK_SIZE else f" of {block_size}"
    shape_of_pool = (num_blocks, block_size)
    trace = chat_trace(5, shape)
    able = able_subjects(subjects, workload, options)
    prompts = {
        wanted: [in_format(turn.prompt, wanted) for turn in trace.turns]
        for wanted in dict.fromkeys([subject.tokens for subject in able])
    }
    runs = [
        Run(subject, _chatting(subject, trace, prompts[subject.tokens], shape_of_pool, options))
        for subject in able
    ]
    return Case(
        workload=workload,
        name=f"{len(trace.turns):,} requests, {num_blocks:,} blocks{of_size}{beside(options)}",
        unit="s",
        runs=runs,
        num_rounds=2 if quick else 5,
        num_warm_up=0,
        num_queried_tokens=trace.num_prompt_tokens,
        num_possible_hits=trace.num_shareable_tokens,
    )


def fill_cache(cache: Cache, subject: Subject, prompts: Sequence[array[int]]) -> None:
    """Start and finish prompts one after the other."""
    for prompt in prompts:
        cache.finish(cache.start(in_format(prompt, subject.tokens)))


def play(cache: Cache, trace: Trace, prompts: Sequence[Tokens]) -> float:
    """Drive a cache through a trace; return the seconds it took, the driver included."""
    start, decode, finish = cache.start, cache.decode, cache.finish
    running: list[object] = []
    begin = thread_time_ns()
    for step in trace.steps:
        for turn in step.started:
            running.append(start(prompts[turn]))  # noqa: PERF401  # the driver is as it is
        decode(running, step.tokens)
        for place in step.finished:
            finish(running.pop(place))
    return ran_ns(begin) / 1e9


def able_subjects(
    subjects: list[Subject], workload: Workload, options: Options = PLAIN
) -> list[Subject]:
    """Return the subjects that can do a workload with these options."""
    return [subject for subject in subjects if subject.can(workload, options)]


def _living(
    cache: Cache, rounds: list[list[Tokens]], *, events: bool = False
) -> Callable[[], Round]:
    start, finish = cache.start, cache.finish
    pending = iter(rounds)

    def measure() -> Round:
        prompts = next(pending)
        before = cache.num_hit_tokens()
        begin = thread_time_ns()
        for prompt in prompts:
            finish(start(prompt))
            if events:
                cache.take_events()
        cost = ran_ns(begin) / len(prompts) / 1e3
        return Round(cost, cache.num_hit_tokens() - before)

    return measure


class _Decoding:
    """Measures a round of steps; its hits are what another then finds of one request's.

    Of a request that is one token past a block: the KV of the newest token may not be there yet.
    """

    def __init__(
        self,
        subject: Subject,
        cache: Cache,
        requests: list[object],
        witness: array[int],
        steps: list[list[int]],
    ) -> None:
        self._subject = subject
        self._cache = cache
        self._requests = requests
        self._written = witness[:]
        self._steps = iter(steps)

    def __call__(self) -> Round:
        steps = [next(self._steps) for _ in range(_DECODE_STEPS)]
        decode, requests = self._cache.decode, self._requests
        begin = thread_time_ns()
        for tokens in steps:
            decode(requests, tokens)
        cost = ran_ns(begin) / len(steps) / 1e6
        full_before = len(self._written) // BLOCK_SIZE * BLOCK_SIZE
        self._written.extend([tokens[_WITNESS] for tokens in steps])
        hits_before = self._cache.num_hit_tokens()
        probe = in_format(self._written + array("I", [0]), self._subject.tokens)
        self._cache.finish(self._cache.start(probe))
        hits = self._cache.num_hit_tokens() - hits_before
        return Round(cost, max(0, hits - full_before))


def _chatting(
    subject: Subject,
    trace: Trace,
    prompts: Sequence[Tokens],
    shape_of_pool: tuple[int, int],
    options: Options,
) -> Callable[[], Round]:
    def measure() -> Round:
        cache = subject.make_cache(*shape_of_pool, decodes=True, options=options)
        with settled():
            gross = play(cache, trace, prompts)
            driver = play(EmptyCache(), trace, prompts)
        return Round(max(1e-9, gross - driver), cache.num_hit_tokens())

    return measure


def _short(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens >= 1024 else str(tokens)


def beside(options: Options) -> str:
    """Say what a cache has beside one group of full attention."""
    windows = [str(span) for span in options.get("windows", ())]
    found = [f", window {' + '.join(windows)}"] if windows else []
    found += [", events"] if options.get("events") else []
    found += [", by request"] if options.get("by_request") else []
    found += [", by step"] if options.get("by_step") else []
    return "".join(found)


def _named(block_size: int, options: Options, fill: int) -> str:
    """Say what is special about a case of a request's life."""
    if block_size != BLOCK_SIZE:
        return f"blocks of {block_size}"
    return beside(options)[2:] or f"pool of {_short(fill)}"
