"""Compare routers over many replicas without networks: `python -m tests.model.cluster.simulate`.

Decides: how time passes. Each replica has a real allocator, publishes its events through the real
encoder, and the router asks the real index; only the network is a number: tokens computed a second,
and seconds a token that is sampled. A replica computes one prompt after the other, in the order of
their arrival; what has its first token decodes beside.

For a while some replicas may be cut off: their batches are lost, and come again when they are back,
as a snapshot.

Does not know: sockets, torch.
"""

import argparse
import heapq
import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import count
from statistics import median, quantiles
from typing import get_args

import kvcore
from kvcore import wire
from model.cluster.router import Policy, Router, Ticket

_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is simulated.

    Attributes:
        num_replicas: replicas.
        num_blocks: blocks of each.
        num_requests: requests in all.
        rate: requests a second, at random times.
        num_prefixes: different beginnings; half of all requests fall on a tenth of them.
        prefix_tokens: tokens of a beginning.
        own_tokens: tokens of a request's own, after it.
        new_tokens: tokens sampled for a request.
        prefill_rate: tokens of prompts that a replica computes a second.
        token_s: seconds for a sampled token.
        num_cut_off: replicas that are cut off in the second quarter of the time.
        seed: of the arrivals.
    """

    num_replicas: int = 64
    num_blocks: int = 1500
    num_requests: int = 20_000
    rate: float = 1000.0
    num_prefixes: int = 640
    prefix_tokens: int = 1024
    own_tokens: int = 64
    new_tokens: int = 64
    prefill_rate: float = 20_000.0
    token_s: float = 0.01
    num_cut_off: int = 0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of it.

    Attributes:
        hit_rate: tokens of prompts that were not computed, of all.
        ttft_ms, ttft_p95_ms: from arrival to the first token: median, and what one in 20 exceeds.
        decision_us, decision_p99_us: of the processor, for one decision.
        index_contents: different blocks in the index at the end.
        index_held: blocks, counted for each replica.
        num_wrong: decisions for a replica that then had less of the prompt than was expected.
    """

    hit_rate: float
    ttft_ms: float
    ttft_p95_ms: float
    decision_us: float
    decision_p99_us: float
    index_contents: int
    index_held: int
    num_wrong: int


class _Replica:
    """A cache, what it tells, and when its processor is free."""

    def __init__(self, name: str, load: Load, index: wire.Index) -> None:
        self.name = name
        self.kv = kvcore.KVCacheManager(load.num_blocks, _BLOCK_SIZE, record_events="xxh3-128")
        self.free_at = 0.0
        self.is_cut_off = False
        self._encoder = wire.Encoder(self.kv.groups, form="array")
        self._history = wire.History(1, 1 << 20, self._encoder.snapshot(self.kv.snapshot()))
        self._follower = wire.Follower(name, index)

    def publish(self) -> None:
        """Tell what has changed, if the network is there."""
        events = self.kv.events.take() if self.kv.events is not None else ()
        payload = self._encoder.batch(events)
        if payload is None:
            return
        sent = self._history.add(payload)
        if not self.is_cut_off and self._follower.live(sent.sequence, wire.decode(payload)):
            self._catch_up()

    def _catch_up(self) -> None:
        wanted = self._history.since(self._follower.ask())
        if wanted is None:
            self._history.rebase(self._encoder.snapshot(self.kv.snapshot()))
            wanted = self._history.anew() or []
        for sent in wanted:
            self._follower.replayed(sent.sequence, wire.decode(sent.payload))
        self._follower.replay_ended()


class _Simulation:
    """One policy under one load."""

    def __init__(self, load: Load, policy: Policy) -> None:
        self.load = load
        self.index = wire.Index()
        self.router = Router(
            lambda tokens, _: self.index.match(tokens), policy, block_size=_BLOCK_SIZE,
            seed=load.seed,
        )  # fmt: skip
        self.replicas = {
            name: _Replica(name, load, self.index)
            for name in [f"replica-{number}" for number in range(load.num_replicas)]
        }
        for name in self.replicas:
            self.router.add(name)
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._number = count()
        self.waited: list[float] = []
        self.decided: list[int] = []
        self.num_hit = self.num_tokens = self.num_wrong = 0

    def run(self) -> Outcome:
        """Let all requests come and go. O(their tokens)."""
        load = self.load
        rng = random.Random(load.seed)  # arrivals
        prefixes = [
            rng.choices(range(100_000), k=load.prefix_tokens) for _ in range(load.num_prefixes)
        ]
        often = load.num_prefixes // 10
        weights = [9.0] * often + [1.0] * (load.num_prefixes - often)
        now = 0.0
        for _ in range(load.num_requests):
            now += rng.expovariate(load.rate)
            own = rng.choices(range(100_000), k=load.own_tokens)
            prompt = [*rng.choices(prefixes, weights)[0], *own]
            self.at(now, lambda at, prompt=prompt: self.arrive(at, prompt))  # type: ignore[misc]
        for share, is_cut_off in ((0.25, True), (0.5, False)):
            self.at(now * share, lambda _, cut=is_cut_off: self.isolate(cut))  # type: ignore[misc]
        while self._events:
            moment, _, happens = heapq.heappop(self._events)
            happens(moment)
        ends, stats = quantiles(self.waited, n=20), self.index.stats()
        return Outcome(
            hit_rate=self.num_hit / self.num_tokens,
            ttft_ms=1e3 * median(self.waited),
            ttft_p95_ms=1e3 * ends[-1],
            decision_us=median(self.decided) / 1e3,
            decision_p99_us=quantiles(self.decided, n=100)[-1] / 1e3,
            index_contents=stats.num_contents,
            index_held=stats.num_held,
            num_wrong=self.num_wrong,
        )

    def at(self, moment: float, happens: Callable[[float], None]) -> None:
        """Let something happen."""
        heapq.heappush(self._events, (moment, next(self._number), happens))

    def isolate(self, is_cut_off: bool) -> None:  # it is what happens
        """Take some replicas' words from the router, or give them back."""
        for replica in list(self.replicas.values())[: self.load.num_cut_off]:
            replica.is_cut_off = is_cut_off

    def arrive(self, now: float, prompt: list[int]) -> None:
        """A request comes: the router decides, and its replica computes it when it can."""
        begin = time.thread_time_ns()
        ticket = self.router.choose(prompt)
        self.decided.append(time.thread_time_ns() - begin)
        replica = self.replicas[ticket.replica]
        self.compute(now, now, prompt, ticket, replica)

    def compute(
        self, now: float, came: float, prompt: list[int], ticket: Ticket, replica: _Replica
    ) -> None:
        """Compute a prompt as soon as the replica is free and has room."""
        load = self.load
        if replica.free_at > now:
            self.at(replica.free_at, lambda at: self.compute(at, came, prompt, ticket, replica))
            return
        seq = replica.kv.open(prompt)
        found = seq.num_cached_tokens
        try:
            replica.kv.reserve(seq, len(prompt) + load.new_tokens - found)
        except kvcore.OutOfBlocksError:
            replica.kv.close(seq)
            later = now + load.token_s
            self.at(later, lambda at: self.compute(at, came, prompt, ticket, replica))
            return
        self.num_hit += found
        self.num_tokens += len(prompt)
        self.num_wrong += found + _BLOCK_SIZE < ticket.num_expected
        done = replica.free_at = now + (len(prompt) - found) / load.prefill_rate

        def begins(at: float) -> None:
            replica.kv.commit(seq, len(prompt) - found)
            replica.publish()
            ticket.has_begun()
            self.waited.append(at - came)

        def ends(_: float) -> None:
            replica.kv.close(seq)
            ticket.end()

        self.at(done, begins)
        self.at(done + load.new_tokens * load.token_s, ends)


def simulate(load: Load, policy: Policy) -> Outcome:
    """Return what comes of a load under a policy. O(tokens of all requests)."""
    return _Simulation(load, policy).run()


def main(arguments: list[str] | None = None) -> int:
    """Simulate and print a line a policy."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.model.cluster.simulate",
        description="Compare routers without a network.",
    )
    for name, default in asdict(Load()).items():
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=type(default), default=default, metavar="N")
    parser.add_argument("--policy", nargs="+", choices=get_args(Policy), default=get_args(Policy))
    said = vars(parser.parse_args(arguments))
    policies = said.pop("policy")
    for policy in policies:
        outcome = simulate(Load(**said), policy)
        sys.stdout.write(json.dumps({"policy": policy, **asdict(outcome)}) + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
