"""`python -m kvcore.wire.bench [--quick]`: what publishing and asking cost.

Rounds take turns, so that what slows the machine slows all. The step's own time is that of its
thread; the process's is that of all threads, ZeroMQ's included.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import tracemalloc
from array import array
from collections.abc import Callable
from contextlib import ExitStack
from statistics import median
from typing import Final

import zmq

from kvcore import KVCacheManager, KVSequence, Snapshot
from kvcore.wire.encoder import Encoder
from kvcore.wire.index import Index
from kvcore.wire.messages import decode
from kvcore.wire.publisher import Publisher

_BLOCK_SIZE: Final = 16
_RUNNING: Final = 256
_STEPS: Final = 64
_PROMPT: Final = 1024


def main(arguments: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m kvcore.wire.bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small cases, few rounds")
    quick = parser.parse_args(arguments).quick
    _steps(num_rounds=2 if quick else 9)
    _questions(num_publishers=8 if quick else 64, num_blocks=500 if quick else 4000)
    return 0


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


class _Decoding:
    """Decode steps of running requests, in a cache so full that what is stored evicts."""

    def __init__(self, publish: Callable[[KVCacheManager], Callable[[], None]], kind: str) -> None:
        events = None if kind == "no events" else "xxh3-128"
        self.kv = KVCacheManager(20_000, _BLOCK_SIZE, record_events=events)  # type: ignore[arg-type]
        rng = random.Random(1)  # noqa: S311  # tokens
        for _ in range(500):
            _compute(self.kv, rng.choices(range(50_000), k=640), close=True)
        self._running = [
            _compute(self.kv, rng.choices(range(50_000), k=256 + place % _BLOCK_SIZE))
            for place in range(_RUNNING)
        ]
        self._rng = rng
        self._publish = publish(self.kv)
        self._publish()

    def round(self) -> tuple[float, float]:
        """Return the microseconds of a step, by its thread and by the process."""
        steps = [self._rng.choices(range(50_000), k=_RUNNING) for _ in range(_STEPS)]
        thread, process = time.thread_time_ns(), time.process_time_ns()
        for tokens in steps:
            self.kv.decode_step(self._running, tokens)
            self._publish()
        spent = time.thread_time_ns() - thread
        time.sleep(0.2)  # the publisher's threads come to rest
        return spent / _STEPS / 1e3, (time.process_time_ns() - process) / _STEPS / 1e3


def _compute(kv: KVCacheManager, tokens: list[int], *, close: bool = False) -> KVSequence:
    seq = kv.open(array("I", tokens))
    kv.reserve(seq, len(tokens) - seq.num_computed_tokens)
    kv.commit(seq, len(tokens) - seq.num_computed_tokens)
    if close:
        kv.close(seq)
    return seq


def _steps(num_rounds: int) -> None:
    """Print what events and their publishing add to a decode step."""
    with ExitStack() as stack:
        context = stack.enter_context(zmq.Context())

        def published(kv: KVCacheManager) -> Callable[[], None]:
            opened = stack.enter_context(Publisher(kv, "tcp://127.0.0.1:*", "tcp://127.0.0.1:*"))
            for _ in range(2):
                reader = stack.enter_context(context.socket(zmq.SUB))
                reader.linger = 0
                reader.subscribe(b"")
                reader.connect(opened.endpoint)
            time.sleep(0.2)
            return opened.publish

        def dropped(kv: KVCacheManager) -> Callable[[], None]:
            log = kv.events

            def drop() -> None:
                if log is not None:
                    log.take()

            return drop

        kinds = {
            "no events": _Decoding(dropped, "no events"),
            "events taken": _Decoding(dropped, "events taken"),
            "published": _Decoding(published, "published"),
        }
        rounds: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
        for number in range(num_rounds + 1):
            for kind, decoding in kinds.items():
                spent = decoding.round()
                if number:
                    rounds[kind].append(spent)
        own = {kind: median([each[0] for each in found]) for kind, found in rounds.items()}
        full = {kind: median([each[1] for each in found]) for kind, found in rounds.items()}
        _say(f"a decode step of {_RUNNING} requests, allocator alone, us of CPU:")
        for kind in kinds:
            _say(f"  {kind:14} {own[kind]:8.0f} by its thread {full[kind]:8.0f} by the process")
        added = full["published"] - full["no events"]
        waited = own["published"] - own["no events"]
        _say(f"  publishing adds {waited:.0f} us to the step's thread, {added:.0f} us in all;")
        _say(f"  10 % of a step that takes {added / 100:.1f} ms")
        _snapshot(kinds["events taken"].kv)


def _snapshot(kv: KVCacheManager) -> None:
    """Print what a snapshot costs the thread that owns the cache, and the publisher's."""
    begin = time.thread_time_ns()
    snapshot: Snapshot = kv.snapshot()
    taken = time.thread_time_ns() - begin
    count = sum(len(run.block_hashes) for run in snapshot.stored)
    begin = time.thread_time_ns()
    payload = Encoder(kv.groups).snapshot(snapshot)
    spelled = time.thread_time_ns() - begin
    _say(
        f"a snapshot of {count:,} blocks: {taken / 1e6:.1f} ms by the owner's thread, "
        f"{spelled / 1e6:.1f} ms by the publisher's, {len(payload) / count:.0f} bytes a block"
    )


def _questions(num_publishers: int, num_blocks: int) -> None:
    """Print what an index of caches that share some prefixes costs to keep and to ask."""
    rng = random.Random(2)  # noqa: S311  # tokens
    stems = [rng.choices(range(50_000), k=_PROMPT) for _ in range(32)]
    payloads = [_cached(rng, stems, num_blocks) for _ in range(num_publishers)]
    index = Index()
    batches = [decode(payload) for payload in payloads]
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for place, payload in enumerate(payloads):
        index.apply(f"replica-{place}", decode(payload))
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    again = Index()
    begin = time.thread_time_ns()
    for place, batch in enumerate(batches):
        again.apply(f"replica-{place}", batch)
    applied = time.thread_time_ns() - begin
    stats = index.stats()
    _say(
        f"an index of {num_publishers} publishers that hold {stats.num_held:,} blocks, "
        f"{stats.num_contents:,} different: {grown / stats.num_contents:.0f} bytes a different "
        f"block, {applied / stats.num_held / 1e3:.1f} us to apply one"
    )
    for what, prompts in {
        "that many hold": [[*stem[:1000]] for stem in stems],
        "without holders": [rng.choices(range(50_000), k=1000) for _ in range(32)],
    }.items():
        taken: list[float] = []
        for _ in range(20):
            begin = time.thread_time_ns()
            for prompt in prompts:
                index.match(prompt)
            taken.append((time.thread_time_ns() - begin) / len(prompts) / 1e3)
        holders = median([len(index.match(prompt)) for prompt in prompts])
        _say(
            f"  a question of 1,000 tokens {what} ({holders:.0f} publishers): "
            f"{median(taken):.0f} us, {max(taken):.0f} us in the slowest of 20 rounds"
        )


def _cached(rng: random.Random, stems: list[list[int]], num_blocks: int) -> bytes:
    """Return what a cache would publish that has served prompts with common beginnings."""
    kv = KVCacheManager(num_blocks + 1, _BLOCK_SIZE, record_events="xxh3-128")
    free = num_blocks * _BLOCK_SIZE
    while free > 2 * _PROMPT:
        tokens = [*rng.choice(stems)[: rng.randrange(_PROMPT)], *rng.choices(range(50_000), k=500)]
        _compute(kv, tokens, close=True)
        free -= 512
    return Encoder(kv.groups).snapshot(kv.snapshot())


if __name__ == "__main__":
    raise SystemExit(main())
