"""The pool alone (W1, W2, W6), and other block sizes (W11)."""

import gc
import random
import tracemalloc
from itertools import repeat
from time import thread_time_ns

from tests.bench.allocator.peers import able
from tests.bench.allocator.prompts import given, random_tokens
from tests.bench.allocator.requests import BLOCK_SIZE, life_case
from tests.bench.measure import Case, Round, ran_ns

_POOL_BLOCKS = 16_384


def w1(subjects, *, quick):
    yield _taking(subjects, "W1", 1, 1_000 if quick else 20_000, quick=quick)


def w2(subjects, *, quick):
    for count in (64, 1024) if quick else (64, 256, 1024, 8192):
        yield _taking(subjects, "W2", count, (2_048 if quick else 32_768) // count, quick=quick)


def _taking(subjects, group, count, repeats, *, quick):
    def run(take, release):
        def measure():
            begin = thread_time_ns()
            for _ in repeat(None, repeats):
                release(take(count))
            return Round(ran_ns(begin) / repeats)

        return measure

    name = "1 block is" if count == 1 else f"{count:,} blocks are"
    return Case(
        group=group,
        name=f"{name} taken and freed; caching is on and nothing is cached.",
        runs=[
            (subject, run(*subject.peer.make_pool(_POOL_BLOCKS, BLOCK_SIZE)))
            for subject in able(subjects, "pool")
        ],
        rounds=3 if quick else 9,
        per=(count, "block"),
    )


def w6(subjects, *, quick):
    num_blocks = 8_192 if quick else 1_000_000
    rounds = 2 if quick else 5
    for options, how in (({}, "each when it is first needed"), ({"prefault": True}, "all at once")):
        runs = [
            (subject, _making(subject, num_blocks, options if subject.is_ours else {}))
            for subject in able(subjects)
        ]
        name = f"A pool of {num_blocks:,} blocks is made; kvcore makes them {how}."
        yield Case("W6", name, runs, rounds, 0, per=(num_blocks, "block"))
    for what, fill in (("nothing is", False), ("all are", True)):
        runs = [(subject, _weighing(subject, num_blocks, fill=fill)) for subject in able(subjects)]
        name = f"Memory of a block in a pool of {num_blocks:,} of which {what} cached."
        yield Case("W6", name, runs, 1, 0, unit="bytes")


def w11(subjects, *, quick):
    for size in (32, 64):
        for share in (0, 100):
            length = 256 if quick else 4096
            yield life_case(subjects, "W11", length, share, 256, quick=quick, block_size=size)
    num_blocks = 8_192 if quick else 100_000
    for size in (16, 64):
        runs = [
            (subject, _weighing(subject, num_blocks, fill=True, block_size=size))
            for subject in able(subjects)
        ]
        name = f"Memory of a cached block of {size} tokens."
        yield Case("W11", name, runs, 1, 0, unit="bytes")


def _making(subject, num_blocks, options):
    def measure():
        gc.collect()  # the one before: linked lists are cycles
        begin = thread_time_ns()
        cache = subject.peer.make_cache(num_blocks, BLOCK_SIZE, **options)
        cost = ran_ns(begin)
        del cache
        return Round(cost)

    return measure


def _weighing(subject, num_blocks, *, fill, block_size=BLOCK_SIZE):
    def measure():
        gc.collect()
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            cache = subject.peer.make_cache(num_blocks, block_size)
            rng = random.Random(6)
            for _ in range(num_blocks // 256 if fill else 0):
                cache.finish(cache.start(given(random_tokens(rng, 256 * block_size), subject)))
            gc.collect()
            return Round((tracemalloc.get_traced_memory()[0] - before) / num_blocks)
        finally:
            tracemalloc.stop()

    return measure
