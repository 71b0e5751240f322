"""Events of copies in tiers: an index counts them, and never more than pool and tiers have."""

from types import SimpleNamespace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, run_state_machine_as_test

import kvcore
from kvcore import wire
from kvcore.wire.encoder import CopiesChanged, Encoder
from tests.kvcore.tiers.machine import SALTS, SIZE, TierMachine, key_of, prompt


class Immediate:
    """A transport without sockets and threads: what is sent is kept."""

    is_running = True

    def __init__(self):
        self.payloads = []

    def publish(self, endpoint):
        send = lambda frames: self.payloads.append(frames[2])  # noqa: E731
        return SimpleNamespace(address=endpoint, send=send)

    def start(self, name, run):
        """Nothing: the test sends."""

    def wake(self):
        """Nothing."""

    def time_s(self):
        return 1.0


class Told(TierMachine):
    """The tier machine, and an index that hears of it after every rule."""

    record_events = "sha256"

    @initialize(host=st.booleans(), records=st.integers(1, 3))
    def begin(self, host, records):
        super().begin(None, host, records, 14)

    def start(self, weights, capacity):
        super().start(weights, capacity)
        self.transport, self.index = Immediate(), wire.Index()
        self.publisher = wire.Publisher(
            self.kv, "here", publish_salted=True, transport=self.transport, tiers=self.tiers.keeping
        )
        self.index.apply("p", wire.decode(self.publisher._history.anew()[0].payload))

    def hear(self):
        self.publisher.publish()
        while self.publisher._queue:
            self.publisher._send(self.publisher._queue.popleft())
        for payload in self.transport.payloads:
            self.index.apply("p", wire.decode(payload))
        self.transport.payloads.clear()

    def has(self, tokens, namespace, end):
        """Whether the pool or a tier has the block that ends there."""
        hashes = kvcore.block_hashes(tokens[:end], SIZE, namespace=namespace, algorithm="sha256")
        key = key_of(0, hashes[-1], namespace)
        cached = self.kv.plan([*tokens[:end], 0], namespace=namespace).num_cached_tokens
        return cached == end or any(tier.contains(key) for tier in self.tiers.tiers)

    @invariant()
    def the_index_has_what_pool_and_tiers_have(self):
        self.hear()
        for fork in (0, 1, 4, 15):
            for salt in SALTS:
                namespace, tokens = kvcore.Namespace(salt=salt), prompt(14, fork)
                found = self.index.match(tokens, namespace=namespace).get("p", 0)
                cached = self.kv.plan([*tokens, 0], namespace=namespace).num_cached_tokens
                assert found >= cached
                whole = self.kv.plan([*tokens, 0], namespace=namespace, num_external=0)
                assert all(
                    end <= whole.num_cached_tokens or self.has(tokens, namespace, end)
                    for end in range(SIZE, found + 1, SIZE)
                )


def test_an_index_never_counts_what_neither_pool_nor_tiers_have():
    run_state_machine_as_test(
        Told, settings=settings(max_examples=12, stateful_step_count=15, deadline=None)
    )


def test_what_has_left_the_pool_and_is_in_a_tier_is_counted_until_that_has_evicted_it():
    life = Told()
    life.begin(True, 3)
    life.serve(prompt(15, 0), b"", stores=True)
    life.hear()
    life.churn([1, 2])  # the pool has other things to keep
    assert life.kv.plan(prompt(15, 0)).num_cached_tokens < 14
    life.hear()
    assert life.index.match(prompt(15, 0)) == {"p": 14}
    late = wire.Index()  # of a reader that begins with a snapshot
    life.publisher._snapshot_wanted = True
    life.hear()
    late.apply("p", wire.decode(life.publisher._history.anew()[0].payload))
    assert late.stats().num_passed_over == 0
    for fork in range(1, 9):
        life.churn([fork, fork + 1])
    assert not life.has(prompt(15, 0), kvcore.DEFAULT_NAMESPACE, 14)
    life.hear()
    assert life.index.match(prompt(15, 0)).get("p", 0) < 14
    life.reset()
    life.hear()
    assert life.index.match(prompt(15, 0)) == {}


def test_copies_are_told_as_vllm_tells_them_and_those_with_a_salt_are_not():
    names = [(0, bytes([number] * 32)) for number in range(3)]
    event = CopiesChanged("CPU", dict(zip(names, [True, True, False], strict=True)), {names[1]})
    encoder = Encoder([kvcore.FullAttention()], hash_form="bytes", clock=lambda: 1.0)
    stored, removed = wire.decode(encoder.batch([event])).events
    assert stored == wire.Stored([names[0][1]], None, [], 0, medium="CPU", group_idx=0)
    assert removed == wire.Removed([names[2][1]], "CPU", 0)
