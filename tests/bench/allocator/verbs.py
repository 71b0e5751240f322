"""Calls that only kvcore has (W14), and what sliding windows add to a decode step (W15)."""

import random
import sys
from array import array
from itertools import repeat
from pathlib import Path
from time import thread_time_ns

import kvcore
from tests.bench.allocator.ours import OurCache
from tests.bench.allocator.peers import able
from tests.bench.allocator.prompts import random_tokens
from tests.bench.allocator.requests import BLOCK_SIZE
from tests.bench.measure import Case, Round, Row, Spread, Subject, ran_ns

_HOME = str(Path(kvcore.__file__).parent)
_STEPS = {"step": "`decode_step`", "ahead": "an asynchronous step"}
_WINDOWS = {"no window": (), "1 window": (1024,), "2 windows": (512, 1024)}


def w14(subjects, *, quick):
    """Calls of kvcore that no other allocator has."""
    ours = able(subjects)[:1]
    rounds = 2 if quick else 7
    count = 256
    for length in (1024,) if quick else (1024, 16_384):
        yield Case(
            group="W14",
            name=f"`write_step` writes the block tables and slots of {count} requests of "
            f"{length:,} tokens.",
            runs=[(subject, _writing(count, length)) for subject in ours],
            rounds=rounds,
            per=(count, "row"),
        )
        yield Case(
            group="W14",
            name=f"`StepTables.update` after {count} requests of {length:,} tokens decoded one.",
            runs=[(subject, _updating(count, length)) for subject in ours],
            rounds=rounds,
            per=(count, "row"),
        )
    for sharers in (0, 64) if quick else (0, 1, 64):
        yield Case(
            group="W14",
            name=f"`close` of a request of 4,096 tokens that {sharers} open ones share.",
            runs=[(subject, _closing(sharers)) for subject in ours],
            rounds=rounds,
            per=(4096 // BLOCK_SIZE, "block"),
        )
    for leases in (0, 10_000):
        yield Case(
            group="W14",
            name=f"`plan` for a prompt of 1,024 tokens while {leases:,} leases hold a block each.",
            runs=[(subject, _planning(leases)) for subject in ours],
            rounds=rounds,
        )


def _decoding(count, length, num_steps, **options):
    """Return a cache, and its requests after a step; a step moves one of 16 to another block."""
    rng = random.Random(14)
    entries = (length + num_steps) // BLOCK_SIZE + 2
    num_groups = 1 + len(options.get("windows", ()))
    cache = OurCache(count * entries * num_groups + 1, BLOCK_SIZE, **options)
    seqs = [cache.start(random_tokens(rng, length - row % BLOCK_SIZE)) for row in range(count)]
    cache.decode(seqs, [1] * count)
    return cache, seqs, entries


def _updating(count, length):
    cache, seqs, _ = _decoding(count, length, 256)
    tables = kvcore.StepTables(
        lambda rows, width: memoryview(bytearray(4 * rows * width)).cast("i", (rows, width))
    )
    tables.update(seqs)

    def measure():
        spent = 0
        for _ in repeat(None, 16):
            cache.decode(seqs, [1] * count)
            begin = thread_time_ns()
            tables.update(seqs)
            spent += ran_ns(begin)
        return Round(spent / 16)

    return measure


def _writing(count, length):
    cache, seqs, stride = _decoding(count, length, 0)
    tables, slots = array("i", bytes(4 * stride * count)), array("q", bytes(8 * count))
    write = cache.manager.write_step

    def measure():
        begin = thread_time_ns()
        for _ in repeat(None, 16):
            write(seqs, tables, slots, row_stride=stride)
        return Round(ran_ns(begin) / 16)

    return measure


def _closing(sharers):
    cache = OurCache(2048, BLOCK_SIZE)
    prompt = random_tokens(random.Random(15), 4096 + 1)
    for _ in range(sharers):
        cache.start(prompt)

    def measure():
        cost = 0
        for _ in repeat(None, 16):
            seq = cache.start(prompt)
            begin = thread_time_ns()
            cache.finish(seq)
            cost += ran_ns(begin)
        return Round(cost / 16)

    return measure


def _planning(leases):
    cache = OurCache(leases + 1024, BLOCK_SIZE)
    rng = random.Random(16)
    for _ in range(leases):
        seq = cache.start(random_tokens(rng, BLOCK_SIZE))
        cache.manager.lease(seq)
        cache.finish(seq)
    prompt = random_tokens(rng, 1024)

    def measure():
        begin = thread_time_ns()
        for _ in repeat(None, 4):
            cache.manager.plan(prompt)
        return Round(ran_ns(begin) / 4)

    return measure


def w15(subjects, *, quick):
    """Time of steps with and without windows; then rows of bytecodes, if kvcore is not compiled."""
    rounds = 2 if quick else 7
    for how, name in _STEPS.items():
        yield Case(
            group="W15",
            name=f"256 requests decode by {name}: full attention alone, and windows beside it.",
            runs=[
                (Subject(label, None, is_ours=not windows), _stepping(how, windows, rounds))
                for label, windows in _WINDOWS.items()
            ],
            rounds=rounds,
            per=(256, "request-step"),
        )
    if kvcore.build == "compiled":
        return
    count = 64
    for how, name in _STEPS.items():
        alone = 0
        for label, windows in _WINDOWS.items():
            step = _stepping(how, windows, 1, count)
            step()
            found = codes_run(step) / BLOCK_SIZE
            alone = alone or found
            yield Row(
                group="W15",
                case=f"{count} requests decode by {name}, {label} beside full attention.",
                subject="kvcore",
                unit="bytecodes",
                cost=Spread(found, found, found),
                per=(count, "request-step"),
                rates={"times full attention alone": found / alone} if windows else {},
            )


def _stepping(how, windows, rounds, count=256):
    cache, seqs, _ = _decoding(count, 1296, BLOCK_SIZE * (rounds + 2), windows=windows, how=how)
    tokens = [1] * count

    def measure():
        begin = thread_time_ns()
        for _ in repeat(None, BLOCK_SIZE):
            cache.decode(seqs, tokens)
        return Round(ran_ns(begin) / BLOCK_SIZE)

    return measure


def codes_run(call, *args):
    """How many bytecodes of kvcore a call executes."""
    count = 0

    def local(frame, event, _):
        nonlocal count
        count += event == "opcode"
        return local

    def enter(frame, event, _):
        if not frame.f_code.co_filename.startswith(_HOME):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return local

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        call(*args)
    finally:
        sys.settrace(before)
    return count
