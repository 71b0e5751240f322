"""Events of copies in tiers: an index counts them, and never more than pool and tiers have."""

import math
from types import SimpleNamespace

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, run_state_machine_as_test

import kvcore
from kvcore import wire
from kvcore.tiers.tier import IndexedTier
from kvcore.wire.encoder import CopiesChanged, Encoder
from tests.kvcore.sabotage.registry import _with_edit, same_draws
from tests.kvcore.tiers.machine import GROUPS, SALTS, TierMachine, key_of, prompt
from tests.kvcore.views import PropertyError, expect
from tests.kvcore.wire.machine import StreamMachine


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

    def join(self, timeout_s):
        """Nothing."""

    def time_s(self):
        return 1.0


class Told(TierMachine):
    """The tier machine, and an index that hears of it after every rule."""

    record_events = "sha256"
    layouts = (*GROUPS, GROUPS[-1])  # the last one keeps states

    @initialize(layout=st.integers(0, len(GROUPS)), host=st.booleans(), records=st.integers(1, 3))
    def begin(self, layout, host, records):
        super().begin(self.layouts[layout % len(self.layouts)], host, records, 14)

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
        """Whether pool and tiers have, of each group, what a hit of these first tokens needs."""
        cached = {(run.group, name) for run in self.kv.snapshot().stored
                  for name in run.block_hashes}  # fmt: skip
        for number, group in enumerate(self.kv.groups):
            size = group.block_size
            hashes = kvcore.block_hashes(
                tokens[:end], size, namespace=namespace, algorithm="sha256"
            )
            first = min(group.first_visible(end) // size, len(hashes) - 1)
            for name in hashes[first:]:
                key = key_of(number, name, namespace)
                is_in_a_tier = any(tier.contains(key) for tier in self.tiers.tiers)
                if not (is_in_a_tier or (number, name) in cached):
                    return False
        return True

    @invariant()
    def the_index_has_what_pool_and_tiers_have(self):
        self.hear()
        step = math.lcm(*[group.block_size for group in self.kv.groups])
        for fork in (0, 1, 4, 15):
            for salt in SALTS:
                namespace, tokens = kvcore.Namespace(salt=salt), prompt(14, fork)
                found = self.index.match(tokens, namespace=namespace).get("p", 0)
                cached = self.kv.plan([*tokens, 0], namespace=namespace).num_cached_tokens
                if StreamMachine.is_rooted(self):
                    expect("P21", found >= cached, True, "whether what the pool has is found")
                ends = range(step, found + 1, step) if len(self.kv.groups) == 1 else [found]
                for end in ends if found else ():
                    has = self.has(tokens, namespace, end)
                    expect("P21", has, True, f"whether {end} tokens are there, which are promised")

    @invariant()
    def a_tier_has_one_watcher(self):
        """One that stays when another takes its place notes every key, and nothing takes it."""
        for tier in self.tiers.keeping:
            expect("P39", len(tier._watchers), 1, "the watchers of a tier")

    def teardown(self):
        if hasattr(self, "tiers"):
            self.publisher.close()
            for tier in self.tiers.keeping:
                expect("P39", len(tier._watchers), 0, "the watchers of a closed publisher")
        super().teardown()


HUNT = settings(
    max_examples=200, stateful_step_count=15, derandomize=True, database=None,
    phases=[Phase.generate], report_multiple_bugs=False, print_blob=False, deadline=None,
)  # fmt: skip
PLANTED = {  # by name: the property, and the edit; found with all rules and no chosen seed
    "a_copy_that_goes_takes_the_caches_with_it": (
        "P21", wire.Index, "_apply_copies", "and not where & _CACHE:", ":",
    ),
    "copies_that_go_are_not_told": (
        "P21", wire.Publisher, "_take_copies", "changed = changes.take()",
        "changed = {k: there for k, there in changes.take().items() if there}",
    ),
    "a_prefix_is_promised_whose_state_is_not_there": (
        "P21", wire.Index, "_apply", "elif kind == STATE_KIND:", "elif False:",
    ),
    "a_prefix_is_promised_whose_state_has_gone": (
        "P21", wire.Index, "_apply", "elif event.group_idx in known.bits:",
        "elif event.group_idx in known.bits and not known.bits[event.group_idx] & self._windows:",
    ),
    "a_watcher_stays_when_another_takes_its_place": (
        "P39", wire.Publisher, "_snapshot", "tier.unwatch(changes)", "pass",
    ),
    "a_watcher_stays_when_its_publisher_is_closed": (
        "P39", wire.Publisher, "close", "tier.unwatch(changes)", "pass",
    ),
    "a_tier_takes_a_watcher_out_of_no_list": (
        "P39", IndexedTier, "unwatch", "if one is not changes", "if True",
    ),
}  # fmt: skip


@pytest.mark.machine
def test_an_index_never_counts_what_neither_pool_nor_tiers_have():
    run_state_machine_as_test(
        Told, settings=settings(max_examples=15, stateful_step_count=15, deadline=None)
    )


@pytest.mark.source_build
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_of_copies_is_caught_for_the_right_reason(name, monkeypatch):
    prop, owner, function, old, new = PLANTED[name]
    original = getattr(owner, function)
    monkeypatch.setattr(original, "__code__", _with_edit(name, original, old, new).__code__)
    with pytest.raises(PropertyError) as caught, same_draws():
        run_state_machine_as_test(type(name, (Told,), {}), settings=HUNT)
    assert caught.value.prop == prop


def test_what_has_left_the_pool_and_is_in_a_tier_is_counted_until_that_has_evicted_it():
    life = Told()
    life.begin(0, True, 3)
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
