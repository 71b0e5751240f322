"""W1, W2 and W6: the pool alone.

W1 takes one block and frees it, in steady state; W2 takes and frees 64 to 8,192 at once; both with
caching on and nothing cached. W6 makes a pool of a million blocks, and counts the bytes a block
costs when the pool is empty and when every block has held a prompt's tokens.
"""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import repeat
from time import thread_time_ns

from kvcore.bench.measure import Case, Round, Run, ran_ns
from kvcore.bench.peer import PLAIN, Options, Release, Subject, Take, Workload
from kvcore.bench.prompts import in_format, random_tokens, seeded

BLOCK_SIZE = 16
_POOL_BLOCKS = 16_384


def w1(subjects: list[Subject], *, quick: bool) -> Iterator[Case]:
    """Yield W1: microseconds for one block taken and freed."""
    repeats = 1_000 if quick else 20_000
    yield _take_and_release("W1", subjects, 1, repeats, num_rounds=3 if quick else 9)


def w2(subjects: list[Subject], *, quick: bool) -> Iterator[Case]:
    """Yield W2: microseconds for taking and freeing several blocks at once."""
    for count in (64, 256, 1024) if quick else (64, 256, 1024, 8192):
        repeats = (2_048 if quick else 32_768) // count
        yield _take_and_release("W2", subjects, count, repeats, num_rounds=3 if quick else 9)


def w6(subjects: list[Subject], *, quick: bool) -> Iterator[Case]:
    """Yield W6: milliseconds to make a pool, then its bytes a block, empty and full."""
    num_blocks = 8_192 if quick else 1_000_000
    able = once_each(subjects, "W6")
    rounds = 2 if quick else 5
    make = [Run(subject, _making(subject, num_blocks)) for subject in able]
    made = [
        Run(subject, _making(subject, num_blocks, prefault=subject.is_ours)) for subject in able
    ]
    yield Case("W6", f"make {num_blocks:,} blocks (ours: later)", "ms", make, rounds, 0)
    yield Case("W6", f"make {num_blocks:,} blocks, all of them", "ms", made, rounds, 0)
    for name, fill in (("empty", False), ("full", True)):
        weigh = [Run(subject, weighing(subject, num_blocks, fill=fill)) for subject in able]
        yield Case("W6", f"{num_blocks:,} blocks, {name}", "bytes/block", weigh, 1, 0)


def once_each(
    subjects: list[Subject], workload: Workload, options: Options = PLAIN
) -> list[Subject]:
    """Return the subjects that can do a workload in which prompts have no form."""
    return [
        subject
        for subject in subjects
        if subject.can(workload, options) and (not subject.is_ours or subject.tokens != "list")
    ]


def _take_and_release(
    workload: Workload, subjects: list[Subject], count: int, repeats: int, num_rounds: int
) -> Case:
    runs = [
        Run(subject, _taking(*subject.make_pool(_POOL_BLOCKS, BLOCK_SIZE), count, repeats))
        for subject in once_each(subjects, workload)
    ]
    name = f"{count:,} block{'s' if count > 1 else ''}"
    return Case(workload, name, "us", runs, num_rounds)


def _taking(take: Take, release: Release, count: int, repeats: int) -> Callable[[], Round]:
    def measure() -> Round:
        begin = thread_time_ns()
        for _ in repeat(None, repeats):
            release(take(count))
        return Round(ran_ns(begin) / repeats / 1e3)

    return measure


def _making(subject: Subject, num_blocks: int, *, prefault: bool = False) -> Callable[[], Round]:
    options: Options = {"prefault": True} if prefault else {}

    def measure() -> Round:
        gc.collect()  # the one before: linked lists are cycles
        begin = thread_time_ns()
        cache = subject.peer.make_cache(num_blocks, BLOCK_SIZE, **options)
        cost = ran_ns(begin) / 1e6
        del cache
        return Round(cost)

    return measure


def weighing(
    subject: Subject, num_blocks: int, *, fill: bool, block_size: int = BLOCK_SIZE
) -> Callable[[], Round]:
    """Return what counts the bytes a block of a new cache, or of one full of content."""

    def measure() -> Round:
        gc.collect()
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            cache = subject.make_cache(num_blocks, block_size)
            if fill:
                rng = seeded(6)
                for _ in range(num_blocks // 256):
                    prompt = in_format(random_tokens(rng, 256 * block_size), subject.tokens)
                    cache.finish(cache.start(prompt))
                    del prompt
            gc.collect()
            return Round((tracemalloc.get_traced_memory()[0] - before) / num_blocks)
        finally:
            tracemalloc.stop()

    return measure
