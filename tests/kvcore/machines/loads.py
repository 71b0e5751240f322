"""Loads as rules: KV from outside, under way while everything else goes on."""

import functools

from hypothesis import strategies as st
from hypothesis.stateful import multiple, rule

import kvcore
from tests.kvcore.machines.checks import LEASES, SEQUENCES
from tests.kvcore.machines.refusal import refused
from tests.kvcore.machines.requests import PROMPTS, RETENTIONS, lowered
from tests.kvcore.machines.verbs import ManagerVerbs
from tests.kvcore.views import expect

MEANWHILE = {
    "nothing": lambda m, e, n: None,
    "computes all": lambda m, e, n: m.run(e),
    "computes a part": lambda m, e, n: m.compute(e, n),
    "is cut": lambda m, e, n: m.truncate(e, min(n, len(e[1].tokens))),
    "goes another way": lambda m, e, n: m.come_back(e, n, other=2),
    "comes back to it": lambda m, e, n: m.come_back(e, n),
    "is set back": lambda m, e, n: m.fail_load(e, min(n, e[1].computed)),
    "is reset": lambda m, e, n: m.reset(0, canonical=False),
    "ends": lambda m, e, n: m.end(e),
}
"""What a sequence does while its load is under way."""


class LoadRules(ManagerVerbs):
    """A load begins, its sequence goes on or ends, and it arrives, in time or not at all."""

    @rule(target=LEASES, entry=SEQUENCES, more=st.integers(0, 20), steps=st.integers(0, 3))
    def begin_load(self, entry, more, steps):
        """Room for the next tokens, of which nothing has to be computed."""
        real, naive, _ = entry
        if not real.is_open:
            return multiple()
        length = naive.computed + more
        begin = functools.partial(self.kv.begin_load, real, length, max_steps=steps or None)
        if not more or length > len(naive.tokens):
            refused("P3", kvcore.InvalidArgumentError, self.view, begin)
            return multiple()
        wanted = self.naive.to_load(naive, length)
        missing = self.kv.num_missing_blocks(real, 0, num_external=length)
        expect("P13", missing, len(wanted), "the blocks that a load takes")
        if missing > len(self.naive.pool.order()):
            refused("P13", kvcore.OutOfBlocksError, self.view, begin)
            return multiple()
        lease = begin()
        self.naive.begin_load(naive, length, steps or None)
        blocks = self.naive.loads[lease.lease_id][2]
        loaded = {
            (number, first + index): block_id
            for number, first in enumerate(lease.load.first_blocks)
            for index, block_id in enumerate(lease.load.block_ids[number])
        }
        expect("P30", loaded, blocks, "the blocks to be filled")
        return lease

    def arrive(self, lease):
        """The KV that somebody else has computed for these very tokens is written."""
        naive, tokens, blocks = self.naive.loads[lease.lease_id]
        for (number, place), block_id in blocks.items():
            size = self.groups[number][2]
            for position in range(place * size, min((place + 1) * size, len(tokens))):
                content = (number, tuple(tokens[: position + 1]), self.origin(naive))
                self.memory[block_id, position % size] = content

    @rule(lease=LEASES)
    def commit_load(self, lease):
        """All has arrived: for a sequence that still wants it, for another one, or twice."""
        if lease.load is None:
            commit = functools.partial(self.kv.commit_load, lease)
            refused("P3", kvcore.InvalidArgumentError, self.view, commit)
            return
        before = None if lease.is_active else self.view()
        if lease.is_active:
            self.arrive(lease)
        entry = next((entry for entry in self.live if entry[0] is lease.load.seq), None)
        fulls = [] if entry is None else [entry[1].computed // size for _, _, size in self.groups]
        has_joined = self.kv.commit_load(lease)
        wanted = self.naive.commit_load(lease.lease_id, [naive for _, naive, _ in self.live])
        expect("P30", has_joined, wanted, "whether a load has joined its sequence")
        if before is not None:
            expect("P17", self.view(), before, "state after a late completion")
        if has_joined:
            for number, own in enumerate(fulls):
                first, ids = lease.load.first_blocks[number], lease.load.block_ids[number]
                told = entry[2][number]
                told[own:] = [0] * (first - own) + list(ids[max(0, own - first) :])

    @rule(
        target=SEQUENCES,
        prompt=PROMPTS,
        left=st.integers(0, 5),
        retain=RETENTIONS,
        chunk=st.integers(1, 9),
        meanwhile=st.sampled_from(["nothing", *MEANWHILE]),
        known=st.sampled_from([0, 0, 3, 4, 5, 8]),
        number=st.sampled_from([0, 0, 1, 3, 4, 5, 7, 8, 12]),
    )
    def load_a_prefix(self, prompt, left, retain, chunk, meanwhile, known, number):
        """What an engine does: plan, load all but the end of a prompt, compute that.

        And what may come between the begin of the load and its end.
        """
        length = len(prompt) - left
        if length < 1 or self.too_long(len(prompt)):
            return multiple()
        plain, _ = lowered(prompt)
        plan = self.kv.plan(plain, num_external=length)
        chunked = self.kv.plan(plain, num_external=length, chunk=chunk)
        free = self.kv.num_free_blocks
        entry = self.begin(prompt, kvcore.Namespace(), packed=False, retain=retain)
        real, naive, _ = entry
        revived = free - self.kv.num_free_blocks
        expect("P13", plan.num_cached_tokens, naive.computed, "cached tokens planned")
        self.check_outlook(real, len(prompt), length, chunk, (plan, chunked), revived)
        self.compute(entry, known)
        lease = self.begin_load(entry, max(0, length - naive.computed), 0)
        if not isinstance(lease, kvcore.Lease):  # nothing is left to be loaded, or there is no room
            return entry
        self.agree()
        MEANWHILE[meanwhile](self, entry, number)
        self.agree()
        self.commit_load(lease)
        self.agree()
        if real.is_open:
            self.run(entry)
        return entry

    def compute(self, entry, count):
        """Some of it is computed here."""
        self.reserve(entry, count)
        naive = entry[1]
        most = min(len(naive.tokens), self.naive.room(naive)) - naive.computed
        self.write_and_commit(entry, min(count, most))

    def come_back(self, entry, keep, other=None):
        """Tokens are taken back, and the same ones join again, or as many others."""
        tokens = entry[1].tokens[keep:]
        tokens = tokens if other is None else [other] * len(tokens)
        self.truncate(entry, min(keep, len(entry[1].tokens)))
        if tokens and not any(isinstance(token, tuple) for token in tokens):
            self.append(entry, tokens)

    def check_outlook(self, real, total, length, chunk, plans, revived):
        """P13: a plan for a prompt that is loaded says what its sequence then says."""
        left = total - real.num_computed_tokens
        for plan, width in zip(plans, (None, chunk), strict=True):
            missing = self.kv.num_missing_blocks(real, left, chunk=width, num_external=length)
            expect("P13", plan.num_new_blocks, missing, f"blocks with a load, chunks of {width}")
            expect("P13", plan.num_revived_blocks, revived, "revived blocks planned")
