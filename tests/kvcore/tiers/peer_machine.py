"""Two managers with tiers, of which one is a peer of the other over a faulty link.

The ghosts are those of `machine.py`, one for each; beside them stands what a peer may be asked for.
"""

import os
from functools import partial

from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from kvcore import tiers
from kvcore.tiers import PeerServer, PeerSession, link
from kvcore.tiers.tier import read_each
from tests.kvcore.tiers import faulty_memory
from tests.kvcore.tiers.faulty_disk import BrokenError
from tests.kvcore.tiers.faulty_link import FAULTS, FaultyLink
from tests.kvcore.tiers.machine import (
    GROUPS,
    NUM_BYTES,
    PROMPTS,
    SALTS,
    SIZE,
    TierMachine,
    Watched,
)

SECRET = b"what both of them know"


class WatchedPeer(Watched):
    """A peer, and the ghost beside it."""

    def begin_read(self, keys, targets):
        return partial(read_each, self, keys, targets)

    def get(self, key, length):
        is_there, faults = self.tier.contains(key), self.tier.stats.faults.total()
        machine, num_read = self.machine, self.tier.num_by_transport["nixl"]
        machine.shared.has_failed = False
        may_come = machine.may_come(key)
        payload = self.tier.get(key, length)
        has_failed = machine.shared.has_failed
        if has_failed and self.tier.stats.faults.total() == faults:
            raise BrokenError("P37: memory of a peer could not be read, and that is not counted")
        if has_failed and may_come and is_there and payload is None:
            raise BrokenError("P24: a copy was lost because memory of a peer could not be read")
        machine.had_failed |= self.tier.stats.faults.total() != faults
        could_be_read = machine.reads and may_come and not machine.had_failed
        is_read = self.tier.num_by_transport["nixl"] > num_read
        if could_be_read and payload is not None and not is_read:
            raise BrokenError("P24: a copy was sent that could have been read")
        if payload is not None and bytes(payload) != self.machine.true_payloads.get(key):
            raise BrokenError("P37: a peer's answer was believed, and is of something else")
        if payload is not None and key in self.machine.forgotten:
            raise BrokenError("P37: a peer was asked for what was forgotten by a reset")
        if payload is None and is_there and self.tier.stats.faults.total() == faults:
            raise BrokenError("P37: a peer did not serve a copy, and that is not counted")
        return payload

    def clear(self):
        self.machine.forgotten |= self.tier._known
        self.tier.clear()


class PeerMachine(TierMachine):
    """Prompts on both sides, resets, restarts, and answers that go wrong, in any order."""

    peer_tier = tiers.PeerTier

    @initialize(
        groups=st.sampled_from(GROUPS),
        host=st.booleans(),
        records=st.integers(1, 3),
        segments=st.sampled_from([9, 14]),
        reads=st.booleans(),
    )
    def begin(self, groups, host, records, segments, reads=False):
        self.other = TierMachine()
        self.other.begin(groups, not host, records, 14)
        self.shared, self.reads = faulty_memory.FaultyMemoryLink(), reads
        self.link = FaultyLink(self.other, SECRET, self.shared if reads else None)
        self.forgotten = set()  # may not be asked for from this process of the other
        self.resets_late = False
        self.num_new = 100  # tokens that no other prompt has
        super().begin(groups, host, records, segments)

    def further_tiers(self):
        self.forgotten = set()
        self.link.end_all()
        made = self.peer_tier(
            "127.0.0.1:1",
            secret=SECRET,
            connect=self.link.connect,
            memory=self.shared,
            has_thread=False,
        )
        self.had_failed = False
        self.peer = WatchedPeer(made, self)
        return [self.peer]

    @rule(tokens=PROMPTS, salt=st.sampled_from(SALTS), hears=st.booleans())
    def the_other_serves(self, tokens, salt, hears):
        """The other process computes a prompt and stores it; this one hears of it, or not yet."""
        self.other.tiers.tiers[0].meanwhile = None
        self.other.serve(tokens, salt, stores=True)
        if hears:
            self.hear()

    def may_come(self, key):
        """Whether nothing but its memory can keep the other from serving a copy."""
        tiers_there = self.other.tiers.tiers
        return (
            not self.link.faults
            and self.link.server is not None
            and self.link.server.manager is self.other.tiers
            and self.peer.tier._process == self.link.server.process
            and tiers_there[0].meanwhile is None
            and any(key in one.tier._entries for one in tiers_there)
            and not self.other.disk.read_faults
        )

    @rule(faults=st.lists(st.sampled_from([None, None, *faulty_memory.FAULTS]), max_size=4))
    def the_memory_misbehaves(self, faults):
        self.shared.faults = faults

    @rule(
        length=st.integers(SIZE, 15),
        salt=st.sampled_from([b"", b"", b"tenant"]),
        of_link=st.lists(st.sampled_from([None, None, *FAULTS]), max_size=3),
        of_memory=st.lists(st.sampled_from([None, *faulty_memory.FAULTS]), max_size=3),
    )
    def a_new_prompt_comes_from_the_other(self, length, salt, of_link, of_memory):
        """It has computed what this process has never seen, and faults come while it is loaded."""
        self.num_new += 1
        tokens = [self.num_new] * length
        self.link.faults, self.shared.faults = [], []
        self.the_other_serves(tokens, salt, hears=True)
        self.link.faults, self.shared.faults = of_link, of_memory
        self.serve(tokens, salt, stores=False)

    @rule()
    def hear(self):
        self.peer.tier._resets.clear()  # here they all come at once
        before, process = self.peer.tier._news, self.peer.tier._process
        self.peer.hear()
        news = self.peer.tier._news
        if self.peer.tier._process != process:
            self.forgotten = set()
        if news is not before:
            self.had_failed = False
        if news is not None and not news.had_faults:  # else what it said may come late, or twice
            others = {key for tier in self.other.tiers.tiers for key in tier.tier._entries}
            if not self.peer._known <= others:
                raise BrokenError("P21: a peer is believed to have what it has not")

    @rule(faults=st.lists(st.sampled_from([None, None, *FAULTS]), max_size=4))
    def the_link_misbehaves(self, faults):
        self.link.faults = faults

    @rule(late=st.booleans())
    def the_other_resets(self, late):
        """Now, or when a load here has read all and has not ended."""
        if late:
            self.resets_late = True
        else:
            self.other.reset()

    @rule(tokens=PROMPTS)
    def the_other_fails_a_step(self, tokens):
        self.other.tiers.tiers[0].meanwhile = None
        self.other.a_step_fails(tokens, b"")

    @rule()
    def the_other_resets_while_it_answers(self):
        self.other.tiers.tiers[0].meanwhile = self.other.reset

    @rule(weights=st.sampled_from("aab"), kind=st.sampled_from(["closed", "killed"]))
    def the_other_restarts(self, weights, kind):
        self.other.restart(kind, weights, 1, 0)

    @rule(is_known=st.booleans(), is_same=st.booleans(), purpose=st.sampled_from([1, 2]))
    def a_stranger_asks(self, is_known, is_same, purpose):
        """A process connects to the other one and asks for anything that there might be."""
        manager = self.other.tiers
        manager.tiers[0].meanwhile = None
        session = PeerSession(PeerServer(manager, SECRET))
        _, theirs = link.WELCOME.unpack(session.welcome)
        nonce, meaning = os.urandom(32), manager.meaning if is_same else bytes(32)
        said = bytes([purpose]) + meaning
        shown = link.proof(SECRET if is_known else b"another", b"client", theirs, nonce, said)
        answer = session.agree(link.HELLO.pack(link.MAGIC, purpose, nonce, meaning, shown))
        if not (is_known and is_same):
            if session.purpose:
                raise BrokenError("P37: a process of another meaning or secret is served")
            if not is_known and any(answer[1:]):
                raise BrokenError("P37: a process without the secret learns something")
            return
        held = [{*tier.tier._entries} for tier in manager.tiers]
        for key in self.other.true_payloads if purpose == link.TO_ASK else ():
            for length in (NUM_BYTES, 2 * NUM_BYTES, 0, 1 << 40):
                _, payload = session.copy(link.QUESTION.pack(1, key, length))
                if len(payload) and key[3] & 128:
                    raise BrokenError("P37: a peer serves a content with a salt")
        if held != [{*tier.tier._entries} for tier in manager.tiers]:
            raise BrokenError("P24: a question of a peer has removed records")
        session.close()

    def end(self, seq, job, runs, closes, twice):
        if runs and self.resets_late:
            self.resets_late, before = False, self.link.num_cleared
            self.run(job)
            self.other.reset()
            self.hear()
            if self.link.num_cleared != before and self.tiers.finish_load(job):
                raise BrokenError("P38: a load joined after its peer had forgotten all")
        super().end(seq, job, runs, closes, twice)

    def teardown(self):
        super().teardown()
        if hasattr(self, "other"):
            self.other.finish_all()
