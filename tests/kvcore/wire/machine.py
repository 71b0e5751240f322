"""Two publishers, a network that loses, repeats and delays, and an index that must tell the truth.

What a publisher holds is read from its manager: `names_held` folds its snapshot. Beside the index
stands a fold of the decoded events by their names alone, for every layer group.
"""

import itertools
import math
from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import kvcore
from kvcore import wire

SPACES = (
    kvcore.Namespace(),
    kvcore.Namespace(lora_name="sql"),
    kvcore.Namespace(salt=b"tenant"),
    kvcore.Namespace(lora_name="sql", lora_version=2),
)
SIZE = 2
LAYOUTS = {
    "full": None,
    "window": (kvcore.FullAttention(), kvcore.SlidingWindow(3)),
    "windows first": (kvcore.SlidingWindow(2), kvcore.SlidingWindow(6), kvcore.FullAttention()),
    "larger blocks": (kvcore.FullAttention(), kvcore.SlidingWindow(5, 2 * SIZE)),
    "window alone": (kvcore.SlidingWindow(4),),
    "chunks": (kvcore.FullAttention(), kvcore.ChunkedLocal(4)),
    "two full": (kvcore.FullAttention(), kvcore.FullAttention(2 * SIZE)),
}
PROMPTS = st.builds(
    lambda zeros, ones: [0] * zeros + [1] * ones, st.integers(1, 8), st.integers(0, 4)
)
WHO = st.sampled_from(["a", "a", "b"])
FATES = st.sampled_from(["arrives", "waits", "lost", "not sent"])


class IndexDiffersError(AssertionError):
    """The index does not say what is true."""


class Names:
    """The fold of decoded events by names alone, and the groups that they were of."""

    def __init__(self):
        self.held, self.groups = {}, {}

    def apply(self, publisher, batch):
        held = self.held.setdefault(publisher, set())
        groups = self.groups.setdefault(publisher, set())
        for event in batch.events:
            if isinstance(event, wire.Stored):
                held.update((event.group_idx, name) for name in event.block_hashes)
                groups.add(event.group_idx)
            elif isinstance(event, wire.Removed):
                held.difference_update((event.group_idx, name) for name in event.block_hashes)
            else:
                held.clear()
                groups.clear()

    def forget(self, publisher):
        self.held.pop(publisher, None)
        self.groups.pop(publisher, None)


class Both:
    """Passes everything to several indexes."""

    def __init__(self, *indexes):
        self.indexes = indexes

    def apply(self, publisher, batch):
        for index in self.indexes:
            index.apply(publisher, batch)

    def forget(self, publisher):
        for index in self.indexes:
            index.forget(publisher)


@dataclass
class Life:
    """One life of a publisher: from its start to the next.

    `plain` ones number from 0 and have no snapshot, as engines' own.
    """

    kv: kvcore.KVCacheManager
    encoder: wire.Encoder
    history: wire.History
    plain: bool
    salted: bool
    running: list = field(default_factory=list)


class StreamMachine(RuleBasedStateMachine):
    make_encoder = wire.Encoder
    make_history = wire.History
    make_follower = wire.Follower
    make_index = wire.Index

    @initialize(data=st.data())
    def start(self, data):
        self.time = itertools.count(1)
        self.index, self.names = self.make_index(), Names()
        both = Both(self.index, self.names)
        self.lives, self.flying, self.seen = {}, {}, {}
        self.followers = {}
        self.wanted = {}  # from which batch on a publisher was asked
        self.answers = {}  # what it has answered, which may come later
        for who in ("a", "b"):
            self.followers[who] = self.make_follower(who, both)
            self.begin(who, data)
        self.prompts = []

    def begin(self, who, data):
        plain = data.draw(st.booleans(), label="plain")
        salted = data.draw(st.booleans(), label="salted")
        groups = LAYOUTS[data.draw(st.sampled_from([*LAYOUTS]), label="layout")]
        kv = kvcore.KVCacheManager(
            data.draw(st.integers(8, 14), label="blocks"), SIZE, groups=groups,
            record_events="xxh3-128",
        )  # fmt: skip
        kv.events.max_names = data.draw(st.sampled_from([100, 4]), label="patience")
        encoder = self.make_encoder(
            kv.groups, publish_salted=salted, clock=lambda: float(next(self.time)),
            form=data.draw(st.sampled_from(["map", "array"]), label="form"),
            names=data.draw(st.sampled_from(["u64", "bytes"]), label="names"),
        )  # fmt: skip
        kept = data.draw(st.sampled_from([1, 400, 10**6]), label="kept bytes")
        first = 0 if plain else next(self.time) * 1000
        history = self.make_history(first, kept, encoder.snapshot(kv.snapshot()))
        self.lives[who] = Life(kv, encoder, history, plain, salted)
        self.flying[who], self.seen[who] = [], []

    # What happens to a cache.

    @rule(who=WHO, tokens=PROMPTS, space=st.sampled_from(SPACES), close=st.booleans(), fate=FATES)
    def serve(self, who, tokens, space, close, fate):
        """A request comes, is computed, and perhaps ends; what it changed is told, and fares so."""
        self.compute(who, tokens, space, close)
        if fate != "not sent":
            self.publish(who)
        if fate == "lost" and self.flying[who]:
            self.flying[who].pop()
        while fate == "arrives" and self.flying[who]:
            self.hear(who, self.flying[who].pop(0))

    def compute(self, who, tokens, space, close):
        life = self.lives[who]
        self.prompts = [*self.prompts[-7:], (tokens, space)]
        seq = life.kv.open(tokens, namespace=space)
        try:
            life.kv.reserve(seq, len(tokens) - seq.num_computed_tokens)
        except kvcore.OutOfBlocksError:
            life.kv.close(seq)
            return
        life.kv.commit(seq, len(tokens) - seq.num_computed_tokens)
        life.running.append(seq)
        if close:
            self.finish(who)

    @precondition(lambda self: any(life.running for life in self.lives.values()))
    @rule(who=WHO)
    def finish(self, who):
        life = self.lives[who]
        if life.running:
            life.kv.close(life.running.pop(0))

    @rule(who=WHO)
    def reset(self, who):
        self.lives[who].kv.reset()

    @rule(who=WHO)
    def publish(self, who):
        life = self.lives[who]
        events = life.kv.events.take()
        if events and isinstance(events[0], kvcore.EventsLost):
            payload = life.encoder.snapshot(life.kv.snapshot())
            self.flying[who].append(life.history.add(payload, anew=True))
            return
        payload = life.encoder.batch(events)
        if payload is not None:
            self.flying[who].append(life.history.add(payload))

    @rule(who=WHO, data=st.data())
    def restart(self, who, data):
        self.begin(who, data)

    # What the network does.

    @precondition(lambda self: any(self.flying.values()))
    @rule(who=WHO, place=st.integers(0, 3))
    def deliver(self, who, place):
        if self.flying[who]:
            self.hear(who, self.flying[who].pop(place % len(self.flying[who])))

    @precondition(lambda self: any(self.flying.values()))
    @rule(who=WHO, place=st.integers(0, 3))
    def lose(self, who, place):
        if self.flying[who]:
            self.flying[who].pop(place % len(self.flying[who]))

    @precondition(lambda self: any(self.seen.values()))
    @rule(who=WHO, place=st.integers(0, 5))
    def repeat(self, who, place):
        if self.seen[who]:
            self.hear(who, self.seen[who][place % len(self.seen[who])])

    @rule(who=WHO)
    def ask(self, who):
        """As a subscriber does when it has heard nothing, or no answer, for a while."""
        known = self.followers[who].next
        self.wanted[who] = self.followers[who].ask()
        from_where = 0 if known is None else max(0, known - 1)
        self.expect(self.wanted[who] == from_where, who, "asked from", (self.wanted[who], known))
        self.answers.pop(who, None)  # it comes too late, and meets nobody

    @precondition(lambda self: self.wanted)
    @rule(who=WHO)
    def compose(self, who):
        """A publisher answers, and much may happen until the answer comes."""
        if who in self.wanted and who not in self.answers:
            self.answers[who] = self.found(who, self.wanted[who])

    @precondition(lambda self: self.wanted)
    @rule(who=WHO, cut=st.integers(0, 6))
    def answer(self, who, cut):
        """An answer comes; of a long one only the beginning may arrive."""
        if who not in self.wanted:
            return
        self.compose(who)
        del self.wanted[who]
        follower = self.followers[who]
        for sent in self.answers.pop(who):
            cut -= 1
            if cut == 0:
                return
            if follower.replayed(sent.sequence, wire.decode(sent.payload)):
                self.ask(who)
                return
        if follower.replay_ended():
            self.ask(who)

    @rule(who=WHO)
    def give_up(self, who):
        """As a subscriber does when no answer comes, however often it asks.

        What is lost by that stays unknown where there is a snapshot too, until that is due.
        """
        if self.lives[who].plain and self.followers[who].asking:
            self.wanted.pop(who, None)
            self.answers.pop(who, None)
            if self.followers[who].replay_ended(answered=False):
                self.ask(who)

    def found(self, who, sequence):
        life = self.lives[who]
        if life.plain:
            return [sent for sent in life.history._kept if sent.sequence >= sequence]
        found = life.history.since(sequence)
        if found is None:
            self.publish(who)
            life.history.rebase(life.encoder.snapshot(life.kv.snapshot()))
            found = life.history.since(sequence)
        return found

    def hear(self, who, sent):
        self.seen[who] = [*self.seen[who][-5:], sent]
        if self.followers[who].live(sent.sequence, wire.decode(sent.payload)):
            self.ask(who)

    # What must hold.

    @rule()
    def settle(self):
        """All arrives, and what was lost is asked for: then the index says what is true."""
        for who, life in self.lives.items():
            self.publish(who)
            while self.flying[who]:
                self.hear(who, self.flying[who].pop(0))
            self.ask(who)
            for _ in range(20):
                self.answer(who, 0)
                if who not in self.wanted:
                    break
            else:
                raise IndexDiffersError(f"{who} is asked for ever")
            self.check(who, life)

    def teardown(self):
        if hasattr(self, "prompts"):
            self.settle()

    @invariant()
    def a_name_is_held_or_not(self):
        if hasattr(self, "names"):
            stats = self.index.stats()
            if not 0 <= stats.num_contents <= stats.num_held:
                raise IndexDiffersError(f"counters: {stats}")

    def check(self, who, life):
        form = life.encoder._spell
        true = set()
        for run in life.kv.snapshot().stored:
            if life.salted or not kvcore.decode_namespace(run.namespace_key).salt:
                true.update((run.group, name) for name in form(run.names))
        told = self.names.held.get(who, set())
        indexed = [g for g, kind in enumerate(life.kv.groups)
                   if not isinstance(kind, kvcore.ChunkedLocal)]  # fmt: skip
        held = self.index.held_names(who)
        truly = {name for group, name in true if group in indexed}
        if life.plain:
            self.expect(told <= true, who, "names that it does not hold", told - true)
        else:
            self.expect(told == true, who, "other names", told ^ true)
        if life.plain or not self.is_rooted(life):
            self.expect(held <= truly, who, "contents that it does not hold", held - truly)
        else:
            self.expect(held == truly, who, "other contents", held ^ truly)
        indexed = [group for group in indexed if group in self.names.groups.get(who, ())]
        for tokens, space in self.prompts:
            longest = self.truth(life, true, indexed, tokens, space)
            found = self.index.match(tokens, namespace=space).get(who, 0)
            is_less = life.plain or not self.is_rooted(life)
            right = found <= longest if is_less else found == longest
            self.expect(right, who, f"a prefix of {tokens} in {space}", (found, longest))

    @staticmethod
    def is_rooted(life):
        """Whether a group of full attention says what each block of a window follows."""
        sizes = {True: set(), False: set()}
        for group in life.kv.groups:
            sizes[isinstance(group, kvcore.FullAttention)].add(group.block_size)
        return sizes[False] <= sizes[True]

    def truth(self, life, true, indexed, tokens, space):
        """The longest prefix of which every group holds what it still sees, by names alone."""
        groups = [life.kv.groups[group] for group in indexed]
        step = math.lcm(*[group.block_size for group in groups])
        for length in range(len(tokens) // step * step, 0, -step):
            seen = []
            for number, group in zip(indexed, groups, strict=True):
                names = life.encoder._spell(
                    kvcore.block_names(tokens[:length], group.block_size, namespace=space)
                )
                first = min(group.first_visible(length) // group.block_size, len(names) - 1)
                seen += [(number, name) in true for name in names[first:]]
            if seen and all(seen):
                return length
        return 0

    @staticmethod
    def expect(holds, who, what, seen):
        if not holds:
            raise IndexDiffersError(f"{who}: {what}: {seen}")
