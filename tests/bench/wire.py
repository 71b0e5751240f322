"""`python -m tests.bench wire`: what publishing KV events and asking an index costs.

Decode steps in a cache so full that what is stored evicts: without events, with events that are
taken, with events that are published to two readers. The step's own time is that of its thread;
the process's is that of all threads, ZeroMQ's included.
"""

import random
import time
import tracemalloc
from array import array
from contextlib import ExitStack

import zmq

from kvcore import KVCacheManager, wire
from kvcore.wire.encoder import Encoder
from tests.bench.measure import Case, Round, Row, Subject, measure, ran_ns, spread

HEADINGS = {
    "publish": "A decode step of 256 requests in a full cache; ratios are over publishing.",
    "snapshot": "What a router that has just come is sent.",
    "index": "What a router keeps of the caches of replicas that share beginnings, and asks it.",
}
_BLOCK_SIZE, _RUNNING, _STEPS, _PROMPT = 16, 256, 64, 1024


def add_flags(parser):
    pass


def rows(options):
    with ExitStack() as stack:
        yield from _publishing(stack, quick=options.quick)
    yield from _asking(8 if options.quick else 64, 500 if options.quick else 4000)


def _publishing(stack, *, quick):
    kinds = {
        "events published": _Decoding("xxh3-128", stack),
        "events taken": _Decoding("xxh3-128"),
        "no events": _Decoding(None),
    }
    for clock, name in (
        (time.thread_time_ns, "The thread that steps."),
        (time.process_time_ns, "All threads of the process."),
    ):
        runs = [
            (Subject(what, None, is_ours=what == "events published"), one.timed(clock))
            for what, one in kinds.items()
        ]
        case = Case("publish", name, runs, 2 if quick else 9, per=(_RUNNING, "request-step"))
        yield from measure(case)
    kv = kinds["events taken"].kv
    begin = time.thread_time_ns()
    snapshot = kv.snapshot()
    taken = ran_ns(begin)
    count = sum(len(run.block_hashes) for run in snapshot.stored)
    begin = time.thread_time_ns()
    payload = Encoder(kv.groups).snapshot(snapshot)
    encoded = ran_ns(begin)
    for name, cost, unit in (
        (f"A snapshot of {count:,} blocks is taken by the thread that steps.", taken, "ns"),
        ("It is encoded by the publisher's thread.", encoded, "ns"),
        ("Its length.", len(payload), "bytes"),
    ):
        yield _row("snapshot", name, [cost], unit, (count, "block"))


def _row(group, name, costs, unit, per=None):
    return Row(group, name, "kvcore.wire", unit, spread(costs), per)


class _Decoding:
    """Running requests of a full cache; where there is a stack, its publisher and two readers."""

    def __init__(self, events, stack=None):
        self.kv = KVCacheManager(20_000, _BLOCK_SIZE, record_events=events)
        self._rng = rng = random.Random(1)
        for _ in range(500):
            _compute(self.kv, rng.choices(range(50_000), k=640), close=True)
        self._running = [
            _compute(self.kv, rng.choices(range(50_000), k=256 + place % _BLOCK_SIZE))
            for place in range(_RUNNING)
        ]
        self._publish = self.kv.events.take if events else lambda: None
        if stack is not None:
            opened = stack.enter_context(
                wire.Publisher(self.kv, "tcp://127.0.0.1:*", "tcp://127.0.0.1:*")
            )
            context = stack.enter_context(zmq.Context())
            for _ in range(2):
                reader = stack.enter_context(context.socket(zmq.SUB))
                reader.linger = 0
                reader.subscribe(b"")
                reader.connect(opened.endpoint)
            time.sleep(0.2)
            self._publish = opened.publish
        self._publish()

    def timed(self, clock):
        def run():
            steps = [self._rng.choices(range(50_000), k=_RUNNING) for _ in range(_STEPS)]
            begin = clock()
            for tokens in steps:
                self.kv.decode_step(self._running, tokens)
                self._publish()
            if clock is time.process_time_ns:
                time.sleep(0.2)  # the publisher's threads come to rest
            return Round((clock() - begin) / _STEPS)

        return run


def _compute(kv, tokens, *, close=False):
    seq = kv.open(array("I", tokens))
    kv.reserve(seq, len(tokens) - seq.num_computed_tokens)
    kv.commit(seq, len(tokens) - seq.num_computed_tokens)
    if close:
        kv.close(seq)
    return seq


def _asking(num_publishers, num_blocks):
    rng = random.Random(2)
    stems = [rng.choices(range(50_000), k=_PROMPT) for _ in range(32)]
    payloads = [_cached(rng, stems, num_blocks) for _ in range(num_publishers)]
    index = wire.Index()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for place, payload in enumerate(payloads):
        index.apply(f"replica-{place}", wire.decode(payload))
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    again = wire.Index()
    batches = [wire.decode(payload) for payload in payloads]
    begin = time.thread_time_ns()
    for place, batch in enumerate(batches):
        again.apply(f"replica-{place}", batch)
    applied = ran_ns(begin)
    stats = index.stats()
    held = f"{num_publishers} replicas that hold {stats.num_held:,} blocks"
    different = (stats.num_contents, "different block")
    yield _row("index", f"Memory of the index of {held}.", [grown], "bytes", different)
    yield _row("index", f"It is told of {held}.", [applied], "ns", (stats.num_held, "block"))
    for what, prompts in (
        ("many replicas hold", [stem[:1000] for stem in stems]),
        ("no replica holds", [rng.choices(range(50_000), k=1000) for _ in range(32)]),
    ):
        costs = []
        for _ in range(20):
            begin = time.thread_time_ns()
            for prompt in prompts:
                index.match(prompt)
            costs.append(ran_ns(begin) / len(prompts))
        yield _row("index", f"It is asked for a prompt of 1,000 tokens that {what}.", costs, "ns")


def _cached(rng, stems, num_blocks):
    """What a cache would publish that has served prompts with common beginnings."""
    kv = KVCacheManager(num_blocks + 1, _BLOCK_SIZE, record_events="xxh3-128")
    free = num_blocks * _BLOCK_SIZE
    while free > 2 * _PROMPT:
        tokens = [*rng.choice(stems)[: rng.randrange(_PROMPT)], *rng.choices(range(50_000), k=500)]
        _compute(kv, tokens, close=True)
        free -= 512
    return Encoder(kv.groups).snapshot(kv.snapshot())
