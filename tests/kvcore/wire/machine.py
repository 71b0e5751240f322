"""Two publishers, a network that loses, repeats and delays, and an index that must tell the truth.

What a publisher holds is read from the snapshot of its manager, once for each batch that it sends.
After every step, what is known of a publisher must be its state after the last batch that was
applied, whatever was lost or came late. Beside the index stands a fold of the decoded events by
their names alone, for every layer group.
"""

import itertools
import math
from dataclasses import dataclass, field, fields, replace
from functools import cache

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
    "states": (kvcore.FullAttention(), kvcore.RecurrentState(2)),
    "six before four": (kvcore.SlidingWindow(7, 3 * SIZE), kvcore.FullAttention(2 * SIZE)),
    "unequal windows": (
        kvcore.SlidingWindow(3, SIZE), kvcore.SlidingWindow(7, 2 * SIZE), kvcore.FullAttention(),
    ),
}  # fmt: skip
PROMPTS = st.builds(
    lambda zeros, ones: [0] * zeros + [1] * ones, st.integers(1, 8), st.integers(0, 4)
)
ITEMS = st.sampled_from([
    (), (), (kvcore.MultimodalItem(b"cat", 1, 2),), (kvcore.MultimodalItem(b"dog", 1, 2),),
    (kvcore.MultimodalItem(b"cat", 1, 3, b"\x01\x00\x01"), kvcore.MultimodalItem(b"a film", 5, 2)),
])  # fmt: skip
WHO = st.sampled_from(["a", "a", "b"])
FATES = st.sampled_from(["arrives", "waits", "lost", "not sent"])


class IndexDiffersError(AssertionError):
    """The index does not say what is true."""


class Names:
    """The fold of decoded events by names alone, and the groups that they were of.

    `newest` has the time of the batch that was applied last, of each publisher that is known.
    """

    def __init__(self):
        self.held, self.groups, self.newest = {}, {}, {}

    def apply(self, publisher, batch):
        self.newest[publisher] = batch.time
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
        for known in (self.held, self.groups, self.newest):
            known.pop(publisher, None)


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
class Count:
    """One life of a publisher: from its start to the next.

    Attributes:
        plain: it numbers from 0 and has no snapshot, as engines' own.
        idle: its history always has a snapshot, as that of a publisher that cannot be woken.
        keeps_all: all that it tells can be had, whatever is lost.
        states: what it held after each batch, by the batch's number.
    """

    plain: bool
    idle: bool
    keeps_all: bool = field(default=False, init=False)
    history: wire.History = field(default=None, init=False)
    states: dict = field(default_factory=dict, init=False)
    names: set = field(default_factory=set, init=False)

    def held(self):
        """What it may tell of: group and name."""
        return frozenset(self.names)


@dataclass
class Life(Count):
    """That of one with a cache."""

    kv: kvcore.KVCacheManager
    encoder: wire.Encoder
    salted: bool
    running: list = field(default_factory=list)

    def held(self):
        form = self.encoder._spell
        return frozenset([
            (run.group, name)
            for run in self.kv.snapshot().stored
            if self.salted or not kvcore.decode_namespace(run.namespace_key).salt
            for name in form(run.block_hashes)
        ])  # fmt: skip


class Channel(RuleBasedStateMachine):
    """A network between two publishers and their followers: it loses, repeats and delays.

    A machine says what a publisher's life is like (`begin`, `publish`, and `snapshot` for a payload
    that says all), and what else must hold (`compare`).
    """

    make_history = wire.History
    make_follower = wire.Follower

    def follow(self, *indexes):
        """Begin with two followers that bring some indexes up to date, and no lives yet."""
        self.time = itertools.count(1)
        self.names = Names()
        both = Both(*indexes, self.names)
        self.lives, self.flying, self.seen = {}, {}, {}
        self.late = {"a": [], "b": []}  # sent by a life before, and not heard yet, or again
        self.is_new = set()  # whose new life has not been heard
        self.origins = {}  # by the time of a batch, whose it is: life and number
        self.checked = {}
        self.wanted = {}  # from which batch on a publisher was asked
        self.answers = {}  # what it has answered, which may come later
        self.followers = {who: self.make_follower(who, both) for who in ("a", "b")}

    def live(self, who, life, first, kept, base):
        """Let a publisher's life begin; `base` says what it holds."""
        self.flying[who], self.seen[who] = [], []
        self.lives[who] = life
        life.keeps_all = not life.plain or kept == 10**6
        life.history = self.make_history(first, kept, base, keep_base=life.idle)
        self.note_snapshot(life, base)

    def note_snapshot(self, life, base):
        self.expect(wire.decode(base).begins_anew, life, "a snapshot that clears nothing", base)
        self.note(life, life.history.last, base)

    def note(self, life, sequence, payload):
        """Remember the state after a batch, and whose the batch is."""
        life.states[sequence] = life.held()
        self.origins[wire.decode(payload).time] = life, sequence

    def send(self, who, payload, *, anew=False):
        life = self.lives[who]
        sent = life.history.add(payload, anew=anew)
        self.flying[who].append(sent)
        self.note(life, sent.sequence, payload)
        if life.history.is_base_old:
            self.rebase(life)

    def rebase(self, life):
        base = self.snapshot(life)
        life.history.rebase(base)
        self.note_snapshot(life, base)

    def fare(self, who, fate):
        """What was sent last arrives with all before it, or is lost, or waits."""
        if fate == "lost" and self.flying[who]:
            self.flying[who].pop()
        while fate == "arrives" and self.flying[who]:
            self.hear(who, self.flying[who].pop(0))

    @rule(who=WHO, data=st.data())
    def restart(self, who, data):
        """A publisher takes its own place; what it sent before may still come."""
        self.late[who] = [*self.seen[who], *self.flying[who]][-4:]
        self.begin(who, data)
        self.is_new.add(who)

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

    @precondition(lambda self: any(self.late.values()))
    @rule(who=WHO, place=st.integers(0, 3))
    def come_late(self, who, place):
        if self.late[who]:
            self.take(who, self.late[who].pop(place % len(self.late[who])))

    @rule(who=WHO)
    def ask(self, who, is_reconnected=False):
        """As a subscriber does when it has heard nothing, or no answer, for a while."""
        known, lacks = self.followers[who].next, self.followers[who].lacks
        self.wanted[who] = self.followers[who].ask(is_reconnected=is_reconnected)
        from_where = 0 if known is None or lacks else max(0, known - 1)
        self.expect(self.wanted[who] == from_where, who, "asked from", (self.wanted[who], known))
        self.answers.pop(who, None)  # it comes too late

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

        What is lost by that stays unknown until everything is asked for, and then where a publisher
        has no snapshot.
        """
        if self.followers[who].asking:
            self.wanted.pop(who, None)
            self.answers.pop(who, None)
            asks = self.followers[who].replay_ended(answered=False)
            position = self.position(who)  # it may be a life before's, that was waited for
            if position and position[0].plain:
                position[0].keeps_all = False
            if asks:
                self.ask(who)

    def found(self, who, sequence):
        life = self.lives[who]
        if life.plain:
            return [sent for sent in life.history._kept if sent.sequence >= sequence]
        found = life.history.since(sequence)
        if found is None:
            self.expect(not life.idle, who, "no answer while it is idle", sequence)
            self.publish(who)
            self.rebase(life)
            found = life.history.since(sequence)
        return found

    def hear(self, who, sent):
        self.seen[who] = [*self.seen[who][-5:], sent]
        if who in self.is_new:
            self.is_new.discard(who)
            if sent.sequence == self.followers[who].next:  # its number alone would not tell
                self.ask(
                    who, is_reconnected=True
                )  # as a subscriber does when its connection was made anew
        self.take(who, sent)

    def take(self, who, sent):
        """Give a batch to the follower, and compare what that does with what it should."""
        follower, batch = self.followers[who], wire.decode(sent.payload)
        before, was_asking, stats = self.position(who), follower.asking, replace(follower.stats)
        asks = follower.live(sent.sequence, batch)
        done = asks, self.position(who), num_changed(stats, follower.stats)
        life, number = self.origins[batch.time]
        if was_asking:
            self.expect(done == (False, before, {}), who, "an answer was awaited", done)
        elif before is not None and before[0] is life:
            if number <= before[1]:
                wanted = False, before, {"num_repeated": 1}
            elif number == before[1] + 1 or batch.begins_anew:
                wanted = False, (life, number), {"num_batches": 1}
            else:
                wanted = True, before, {"num_gaps": 1}
            self.expect(done == wanted, who, f"{number} after {before[1]}", done)
        elif before is not None and self.lives[who] is before[0]:
            self.expect(done[1] == before, who, f"{number} of a life before", done)
        if asks:
            self.ask(who)

    def position(self, who):
        """The life and the number of the batch that was applied last; None: nothing is known."""
        newest = self.names.newest.get(who)
        return None if newest is None else self.origins[newest]

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
        if hasattr(self, "lives"):
            self.settle()

    @invariant()
    def what_is_known_was_so_after_the_batch_that_was_applied_last(self):
        """A plain life's beginning may be lost: then less is known than it held."""
        for who in getattr(self, "lives", ()):
            told, position = self.names.held.get(who, set()), self.position(who)
            if self.checked.get(who) == (position, len(told)):
                continue
            self.checked[who] = position, len(told)
            life, number = position or (self.lives[who], None)
            state = frozenset() if number is None else life.states[number]
            is_all = number is None or self.has_all(who, life)
            self.expect(
                told == state if is_all else told <= state, who, f"after {number}", told ^ state
            )
            self.compare(who, life, state, is_all=is_all)

    def has_all(self, who, life):
        """Whether all that a life has told was had."""
        follower = self.followers[who]
        return life.keeps_all and not (follower.lacks or (life.plain and follower.stats.num_lost))

    def check(self, who, life):
        """What is known of a publisher is what it holds now."""
        true = life.held()
        told = self.names.held.get(who, set())
        is_all = self.has_all(who, life)
        self.expect(told == true if is_all else told <= true, who, "other names", told ^ true)
        self.compare(who, life, true, is_all=is_all)

    def compare(self, who, life, true, *, is_all):
        """Say whether what is known of a publisher is true in other ways too."""

    @staticmethod
    def expect(holds, who, what, seen):
        if not holds:
            raise IndexDiffersError(f"{who}: {what}: {seen}")


class StreamMachine(Channel):
    """Publishers of caches, and an index of what they hold."""

    make_encoder = wire.Encoder
    make_index = wire.Index

    @initialize(data=st.data())
    def start(self, data):
        self.index = self.make_index()
        self.follow(self.index)
        self.prompts = []
        for who in ("a", "b"):
            self.begin(who, data)

    def begin(self, who, data):
        plain = data.draw(st.booleans(), label="plain")
        idle = not plain and data.draw(st.booleans(), label="idle")
        salted = data.draw(st.booleans(), label="salted")
        groups = LAYOUTS[data.draw(st.sampled_from([*LAYOUTS]), label="layout")]
        kv = kvcore.KVCacheManager(
            data.draw(st.integers(8, 14), label="blocks"), SIZE, groups=groups,
            record_events="xxh3-128",
        )  # fmt: skip
        kv.events.max_hashes = data.draw(st.sampled_from([100, 4]), label="patience")
        encoder = self.make_encoder(
            kv.groups, publish_salted=salted, clock=lambda: float(next(self.time)),
            form=data.draw(st.sampled_from(["map", "array"]), label="form"),
            hash_form=data.draw(st.sampled_from(["u64", "bytes"]), label="names"),
        )  # fmt: skip
        kept = data.draw(st.sampled_from([1, 400, 10**6]), label="kept bytes")
        first = 0 if plain else next(self.time) * 1000
        life = Life(plain, idle, kv, encoder, salted)
        self.live(who, life, first, kept, self.snapshot(life))

    @staticmethod
    def snapshot(life):
        return life.encoder.snapshot(life.kv.snapshot())

    # What happens to a cache.

    @rule(
        who=WHO, tokens=PROMPTS, space=st.sampled_from(SPACES), close=st.booleans(), fate=FATES,
        items=ITEMS,
    )  # fmt: skip
    def serve(self, who, tokens, space, close, fate, items=()):
        """A request comes, is computed, and perhaps ends; what it changed is told, and fares so."""
        self.compute(who, tokens, space, close, items)
        if fate != "not sent":
            self.publish(who)
        self.fare(who, fate)

    def compute(self, who, tokens, space, close, items):
        life = self.lives[who]
        items = tuple([item for item in items if item.start + item.length <= len(tokens)])
        self.prompts = [*self.prompts[-7:], (tokens, space, items)]
        seq = life.kv.open(tokens, namespace=space, items=items)
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
            self.send(who, self.snapshot(life), anew=True)
        elif (payload := life.encoder.batch(events)) is not None:
            self.send(who, payload)

    # What must hold.

    @invariant()
    def a_name_is_held_or_not(self):
        if hasattr(self, "index"):
            stats = self.index.stats()
            if not 0 <= stats.num_contents <= stats.num_held:
                raise IndexDiffersError(f"counters: {stats}")

    def compare(self, who, life, true, *, is_all):
        """The index says what is true, or less where not all could be had."""
        is_less = not (is_all and self.is_rooted(life))
        indexed = [g for g, kind in enumerate(life.kv.groups)
                   if not isinstance(kind, kvcore.ChunkedLocal)]  # fmt: skip
        held = self.index.held_hashes(who)
        truly = {name for group, name in true if group in indexed}
        right = held <= truly if is_less else held == truly
        self.expect(right, who, "other contents", held ^ truly)
        indexed = [group for group in indexed if group in self.names.groups.get(who, ())]
        for prompt in self.prompts:
            longest = self.truth(life, true, indexed, prompt)
            tokens, space, items = prompt
            found = self.index.match(tokens, namespace=space, items=items).get(who, 0)
            right = found <= longest if is_less else found == longest
            self.expect(right, who, f"a prefix of {prompt}", (found, longest))

    @staticmethod
    def is_rooted(life):
        """Whether a group of full attention says what each block of a window follows."""
        sizes = {True: set(), False: set()}
        for group in life.kv.groups:
            sizes[isinstance(group, kvcore.FullAttention)].add(group.block_size)
        return sizes[False] <= sizes[True]

    def truth(self, life, true, indexed, prompt):
        """The longest prefix of which every group holds what it still sees, by names alone."""
        tokens, space, items = prompt
        groups = [life.kv.groups[group] for group in indexed]
        step = math.lcm(*[group.block_size for group in groups])
        for length in range(len(tokens) // step * step, 0, -step):
            seen = []
            for number, group in zip(indexed, groups, strict=True):
                named = names_of(tuple(tokens), group.block_size, space, items)
                names = life.encoder._spell(named)[: length // group.block_size]
                first = min(group.first_visible(length) // group.block_size, len(names) - 1)
                seen += [(number, name) in true for name in names[first:]]
            if seen and all(seen):
                return length
        return 0


class CountMachine(Channel):
    """Publishers that hold a few names, so that what their numbers do is all there is to it."""

    @initialize(data=st.data())
    def start(self, data):
        self.follow()
        for who in ("a", "b"):
            self.begin(who, data)

    def begin(self, who, data):
        plain = data.draw(st.booleans(), label="plain")
        idle = not plain and data.draw(st.booleans(), label="idle")
        kept = data.draw(st.sampled_from([1, 120, 10**6]), label="kept bytes")
        first = 0 if plain else next(self.time) * 1000
        life = Count(plain, idle)
        self.live(who, life, first, kept, self.snapshot(life))

    def snapshot(self, life):
        return self.encoded(wire.Cleared(), *[stored(name) for _, name in sorted(life.names)])

    def encoded(self, *events):
        return wire.encode(float(next(self.time)), events, 0, "map")

    @rule(who=WHO, name=st.integers(0, 5), fate=FATES)
    def change(self, who, name, fate):
        """A name comes or goes, and fares so."""
        names = self.lives[who].names
        names ^= {(0, name)}
        event = stored(name) if (0, name) in names else wire.Removed([name], group_idx=0)
        self.send(who, self.encoded(event))
        self.fare(who, fate)

    @rule(who=WHO, fate=FATES, anew=st.booleans())
    def clear(self, who, fate, anew):
        """All goes, or all is told anew because something was not told."""
        life = self.lives[who]
        life.names = {(0, 9)} if anew else set()
        self.send(who, self.snapshot(life), anew=anew)
        self.fare(who, fate)

    def publish(self, who):
        """All is told already."""


def stored(name):
    return wire.Stored([name], None, [name], 1, group_idx=0)


def num_changed(before, after):
    """Which counters have grown, and by how much."""
    return {
        each.name: grown
        for each in fields(before)
        if (grown := getattr(after, each.name) - getattr(before, each.name))
    }


@cache
def names_of(tokens, size, space, items):
    return kvcore.block_hashes(tokens, size, namespace=space, items=items)
