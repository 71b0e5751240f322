"""Lives of requests as rules: what engines do with the verbs, again and again.

A sequence of verbs that random choice would rarely put together is one rule here, so that a bug
which needs it is found in every run.
"""

from hypothesis import strategies as st
from hypothesis.stateful import multiple, precondition, rule

import kvcore
from tests.kvcore.machines.chats import ChatRules
from tests.kvcore.machines.checks import LEASES, SEQUENCES
from tests.kvcore.machines.mixed import MixedRules
from tests.kvcore.machines.requests import (
    BLOCK_SIZE,
    NAMESPACES,
    PICTURES,
    PLACEHOLDER,
    PROMPTS,
    RETENTIONS,
    SALTS,
    neighbours,
    with_image,
)
from tests.kvcore.machines.verbs import opened
from tests.kvcore.views import expect


class ManagerMachine(ChatRules, MixedRules):
    """The manager against lists, and against a ghost of the KV memory."""

    @rule(entry=SEQUENCES)
    def run(self, entry):
        """What an engine does most: room for everything, compute it, commit it."""
        real, naive, _ = entry
        if real.is_open:
            todo = len(naive.all_tokens()) - naive.computed
            self.reserve(entry, todo)
            self.write_and_commit(entry, todo)

    @rule(target=SEQUENCES, prompt=PROMPTS, name=st.sampled_from(SALTS))
    def twins(self, prompt, name):
        """Two requests with one prompt in one step: both compute it, both keep their copies."""
        pair = [self.begin(prompt, NAMESPACES[name], packed=False) for _ in range(2)]
        pair = [entry for entry in pair if entry is not None]
        for entry in pair:
            self.run(entry)
        for real, naive, _ in pair:  # each sends its own copy away
            lease = self.kv.lease(real, "store")
            self.naive.lease(naive, None)
            self.agree()
            self.end_lease(lease, by_id=False)
        return multiple(*pair)

    @rule(prompt=PROMPTS, retain=RETENTIONS, steps=st.integers(0, 2), later=st.integers(0, 8))
    def keep_for_later(self, prompt, retain, steps, later):
        """A request comes, is to be kept, and goes; so does a later one; time passes."""
        entry = self.begin(prompt, kvcore.Namespace(), packed=False, retain=retain)
        if entry is None:
            return
        self.run(entry)
        self.end(entry)
        self.agree()
        other = self.begin([6] * (later + 1), kvcore.Namespace(), packed=False)
        self.run(other)
        self.end(other)
        self.agree()
        self.tick(steps)

    @rule(
        prompt=PROMPTS,
        retain=RETENTIONS,
        steps=st.integers(0, 2),
        token=st.integers(0, 2),
        later=st.integers(0, 3),
    )
    def fork_what_is_kept(self, prompt, retain, steps, token, later):
        """A beam splits off what is to be kept for a while, goes on, and both go."""
        entry = self.begin(prompt, kvcore.Namespace(), packed=False, retain=retain)
        if entry is None:
            return
        self.run(entry)
        self.tick(steps)
        self.agree()
        child = self.fork(entry)
        self.append(child, [token] * 5)
        self.run(child)
        self.end(child)
        if child is not entry:  # there was room
            self.end(entry)
        self.agree()
        self.tick(later)
        self.agree()
        self.press(2)

    @rule(entry=SEQUENCES, keep=st.integers(0, 12), token=st.integers(0, 2))
    def edit(self, entry, keep, token):
        """A turn is taken back and goes on differently, which is where names go stale."""
        if entry[0].is_open:
            self.truncate(entry, min(keep, len(entry[1].all_tokens())))
            self.agree()
            self.append(entry, [token] * 5)
            self.run(entry)

    @rule(entry=SEQUENCES, drafts=st.integers(1, 5), accepted=st.integers(0, 5))
    def speculate(self, entry, drafts, accepted):
        """Drafts join, some are accepted, the rest leave without a trace."""
        real, naive, _ = entry
        if real.is_open and naive.computed == len(naive.tokens) and not naive.future:
            self.append(entry, [1] * drafts)
            self.reserve(entry, len(naive.tokens) - naive.computed)
            most = min(len(naive.tokens), self.naive.room(naive)) - naive.computed
            self.write_drafts(entry, drafts)
            self.write_and_commit(entry, min(accepted, most))
            self.truncate(entry, naive.computed)

    @rule(target=SEQUENCES, entry=SEQUENCES, keep=st.integers(0, 9), token=st.integers(0, 2))
    def diverge(self, entry, keep, token):
        """A beam splits off and goes another way; the one it left must not notice."""
        child = self.fork(entry)
        self.agree()
        self.edit(child, keep, token)
        return child

    @rule(target=LEASES, entry=SEQUENCES, steps=st.integers(0, 2))
    def close_in_flight(self, entry, steps):
        """A sequence ends while two transfers of its blocks run; one of them is done first."""
        real, naive, _ = entry
        if not real.is_open:
            return multiple()
        self.run(entry)
        pair = [self.kv.lease(real, "store", max_steps=steps or None) for _ in range(2)]
        for _ in pair:
            self.naive.lease(naive, steps or None)
        self.end(entry)
        self.agree()
        self.end_lease(pair[0], by_id=True)
        return pair[1]

    @rule(target=SEQUENCES, entry=SEQUENCES)
    def preempt(self, entry):
        """A running request gives up its blocks and comes again, which is no hit."""
        if not entry[0].is_open:
            return multiple()
        self.end(entry)
        self.agree()
        tokens, namespace = entry[1].tokens or [0], entry[1].namespace
        return opened(self.begin(tokens, namespace, packed=False, resumed=True))

    @rule(
        target=SEQUENCES,
        length=st.integers(5, 13),
        picture=PICTURES,
        name=st.sampled_from(SALTS),
        stays=st.booleans(),
    )
    def meet_the_neighbours(self, length, picture, name, stays):
        """The same token ids under another image, salt, adapter, version or epoch, or under none.

        Both must be right: that nothing is shared which differs, and that all is which does not.
        """
        prompt = [PLACEHOLDER] * length
        entry = self.begin(with_image(prompt, picture), NAMESPACES[name], packed=False)
        self.run(entry)
        self.agree()
        for other, other_name in neighbours(prompt, name, picture):
            self.end(self.begin(other, NAMESPACES[other_name], packed=False))
        if stays:
            return entry
        self.end(entry)
        return multiple()

    def press(self, blocks):
        """Requests that nobody can hit take all empty blocks and some with content, and go."""
        contents = [self.naive.pool.content_of(b) for b in self.naive.pool.order()]
        wanted = min(contents.count(None) + blocks, len(contents)) // len(self.groups)
        passing = []
        while wanted > 0:
            passing.append(self.begin([7], None, packed=False))
            self.reserve(passing[-1], min(wanted, 3) * BLOCK_SIZE)
            wanted -= 3
        for entry in passing:
            self.end(entry)

    @rule(prompt=PROMPTS, blocks=st.integers(0, 5), again=st.booleans())
    def come_back_under_pressure(self, prompt, blocks, again):
        """A request ends, others take some of its blocks, and parts of it come again."""
        for _ in range(1 + again):
            entry = self.begin(prompt, kvcore.Namespace(), packed=False)
            if entry is None:
                return
            self.run(entry)
            self.agree()
            self.end(entry)
            self.press(blocks)
        for length in range(BLOCK_SIZE, len(prompt), BLOCK_SIZE):
            self.end(self.begin([*prompt[:length], 8], kvcore.Namespace(), packed=False))

    @rule(
        prompt=PROMPTS,
        name=st.sampled_from(SALTS),
        stage=st.sampled_from(["looked up", "reserved", "written", "partly committed"]),
        part=st.integers(1, 9),
    )
    def abort(self, prompt, name, stage, part):
        """A request ends in the middle of everything; nobody holds more than before it came."""
        before = [block.ref_count for block in self.kv.pool.blocks]
        entry = self.begin(prompt, NAMESPACES[name], packed=False)
        if entry is None:
            return
        todo = len(prompt) - entry[1].computed
        if stage != "looked up":
            self.reserve(entry, todo + part)
            self.reserve(entry, todo)
        if stage in {"written", "partly committed"}:
            self.write_drafts(entry, todo)
        if stage == "partly committed":
            most = min(len(prompt), self.naive.room(entry[1])) - entry[1].computed
            self.write_and_commit(entry, min(part, most))
        self.agree()
        self.end(entry)
        after = [block.ref_count for block in self.kv.pool.blocks]
        expect("P5", after, before, "holders after an abort")

    @rule(token=st.integers(3, 5), length=st.sampled_from([4, 5, 8, 9]))
    def churn(self, token, length):
        """Requests that share nothing come until the pool is full, and go again."""
        begun = []
        fits = True
        while fits:
            prompt = [token + 3 * len(begun)] * length
            entry = self.begin(prompt, kvcore.Namespace(), packed=False)
            begun.append(entry)
            fits = self.naive.can_reserve(entry[1], length - entry[1].computed)
            self.run(entry)
        self.agree()
        for entry in begun:
            self.end(entry)

    @rule(
        token=st.integers(0, 2),
        room=st.integers(1, 3),
        steps=st.integers(0, 8),
        aborts=st.booleans(),
    )
    def decode(self, token, room, steps, aborts):
        """Everybody who can runs on, step after step, perhaps until the pool is full."""
        for entry in self.told():
            if 0 < len(entry[1].tokens) == entry[1].computed:
                self.append(entry, [token])
        for _ in range(steps):
            self.step(token, room, aborts=False)
        self.step(token, room, aborts)

    @rule(
        target=SEQUENCES,
        prompt=PROMPTS,
        kept=st.integers(0, 12),
        forks=st.booleans(),
        leaves=st.booleans(),
    )
    def fail_a_load_that_others_use(self, prompt, kept, forks, leaves):
        """KV was loaded, somebody has hit it or split off, and it turns out never to have come."""
        loader = self.begin(prompt, kvcore.Namespace(), packed=False)
        if loader is None:
            return multiple()
        self.run(loader)
        other = self.fork(loader) if forks else self.begin(prompt, kvcore.Namespace(), packed=False)
        if other is loader:  # no room for a fork
            return multiple()
        self.append(other, [2] * BLOCK_SIZE)
        self.run(other)
        self.agree()
        if leaves:
            self.end(other)
        self.fail_load(loader, min(kept, loader[1].computed))
        self.agree()
        self.end(loader)
        for length in range(len(other[1].tokens)):
            self.end(self.begin([*other[1].tokens[:length], 8], other[1].namespace, packed=False))
        return multiple() if leaves else other

    @rule(entry=SEQUENCES, canonical=st.booleans())
    def reset_in_flight(self, entry, canonical):
        """The weights change while a sequence runs and a transfer of its blocks goes on."""
        if not entry[0].is_open:
            return
        lease = self.kv.lease(entry[0], "store")
        self.naive.lease(entry[1], None)
        self.reset(0, canonical)
        self.agree()
        self.append(entry, [2] * 5)
        self.run(entry)
        self.agree()
        self.end_lease(lease, by_id=True)

    @precondition(lambda self: self.live)
    @rule()
    def close_all(self):
        for entry in list(self.live):
            self.end(entry)
        for number in list(self.naive.leases):
            self.kv.leases.end(number)
            self.naive.end_lease(number)
        expect("P5", self.kv.num_free_blocks, self.kv.num_usable_blocks, "free blocks at rest")
