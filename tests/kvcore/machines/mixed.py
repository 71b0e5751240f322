"""Steps, their halves and single verbs on the same sequences, one after another, some refused.

A step that only counts relies on what every other verb has left: each kind of call follows each
other kind here, on sequences that decode, and a step that is refused has some that were counted.
"""

import functools
import math

from hypothesis import strategies as st
from hypothesis.stateful import rule

import kvcore
from tests.kvcore.machines.outlook import OutlookRules
from tests.kvcore.machines.refusal import refused
from tests.kvcore.machines.requests import GROUPS, NAMESPACES
from tests.kvcore.views import expect

SINGLE = {
    "commit": lambda m, entry, number: m.write_and_commit(entry, 1 + number // 3),
    "append": lambda m, entry, number: m.append(entry, [number % 3]),
    "extend": lambda m, entry, number: m.append(entry, [number % 3] * 2),
    "reserve": lambda m, entry, number: m.reserve(entry, number),
    "truncate": lambda m, entry, number: m.cut_by(entry, number // 2),
    "expect": lambda m, entry, number: m.expect(entry, [number % 3] * (1 + number // 3)),
    "resolve": lambda m, entry, number: m.resolve(entry, 1 + number // 3),
    "close": lambda m, entry, number: m.end(entry),
}
TURNS = st.tuples(
    st.sampled_from(["decode", "decode", "send", "read"]),  # what all do
    st.sampled_from(["none", "step", "half"]),  # what is refused then
    st.sampled_from(["nothing", *SINGLE, "fork"]),  # and what one does
    st.integers(0, 5),
)


class MixedRules(OutlookRules):
    """Any verbs, in the order in which no engine would call them."""

    @rule(
        anew=st.none()
        | st.tuples(st.integers(0, len(GROUPS) - 1), st.sampled_from([None, 13, 16])),
        lengths=st.lists(st.integers(1, 9), min_size=1, max_size=2),
        turns=st.lists(TURNS, min_size=4, max_size=12),
    )
    def mix(self, anew, lengths, turns):
        """Some sequences decode, and meet every kind of call and of refusal.

        Among all that there is, or in a pool with plenty of room, of a layout and a longest length.
        """
        machine = self
        if anew is not None:
            machine = type(self)()
            machine.start(40, anew[0], caching=True, events=False, longest=anew[1])
        machine.mix_turns(lengths, turns)

    @rule(
        layout=st.integers(0, len(GROUPS) - 1),
        prompt=st.integers(1, 9),
        answer=st.integers(1, 12),
        is_ahead=st.booleans(),
    )
    def answer_a_turn(self, layout, prompt, answer, is_ahead):
        """P24: the next turn of a conversation finds the last full block of the answer."""
        machine = type(self)()
        machine.start(40, layout, caching=True, events=False)
        entry = machine.begin([0] * prompt, NAMESPACES["default"], packed=False)
        machine.run(entry)
        for token in range(answer):
            if is_ahead and machine.most(entry, []):
                machine.take_step([entry], "send", token)
                machine.take_step([entry], "read", token)
            else:
                machine.take_step([entry], "decode", token)
        machine.end(entry)
        whole = math.lcm(*[size for _, _, size in machine.groups])
        wanted = entry[1].computed // whole * whole
        again = machine.begin([*entry[1].tokens, 1, 2], NAMESPACES["default"], packed=False)
        expect("P24", again[0].num_cached_tokens, wanted, "what the next turn finds")

    def mix_turns(self, lengths, turns):
        if len(self.naive.pool.order()) < 4 * len(self.groups):
            self.close_all()
        begun = [self.begin([n] * length, NAMESPACES["default"], packed=False)
                 for n, length in enumerate(lengths)]  # fmt: skip
        for entry in begun:
            self.run(entry)
        for form, refusal, call, number in turns:
            begun = [e for e in begun if e[0].is_open and len(e[1].all_tokens()) < 30]
            if not begun:
                return
            self.take_step(begun, form, number)
            if refusal != "none":
                self.refuse_a_step(begun, number, is_half=refusal == "half")
            entry = begun[number % len(begun)]
            if call == "fork":
                child = self.fork(entry)
                begun += [child] * (child is not entry)  # there was room
            elif call in SINGLE:
                SINGLE[call](self, entry, number)
                self.agree()
        for entry in begun:
            if entry[0].is_open:
                self.end(entry)

    def take_step(self, begun, form, number):
        """Take a step of all: a whole one, or half of an asynchronous one."""
        token = number % 3
        if form == "decode":
            self.decode_all(begun, [token] * len(begun))
        elif form == "read":
            self.go(begun, [(1, [], 0, [], 0) if e[1].future else (0, [token], 0, [], 0)
                            for e in begun])  # fmt: skip
        else:
            step = [e for e in begun if self.most(e, [])]
            self.go(step, [(0, [], 1, [token], 0) for _ in step])

    def cut_by(self, entry, count):
        self.truncate(entry, max(0, len(entry[1].all_tokens()) - count))

    def refuse_a_step(self, begun, number, *, is_half):
        """A step of those that decode, and of one that cannot: nothing is done for any of them.

        The other one has no blocks, or, where tokens are read, no length left for one more.
        """
        reading = [e for e in begun if e[1].future] if is_half and self.longest else []
        step = reading or [e for e in begun if self.most(e, [])]
        length = self.longest if reading else 1 + number
        other = self.begin([5] * length, None, packed=False)
        step.insert(number % (len(step) + 1), other)
        reals = [real for real, _, _ in step]
        known = [naive.future[0] if naive.future else number % 3 for _, naive, _ in step]
        if reading:
            call = functools.partial(self.kv.step, reals, 0, known, num_reserved=0)
        elif is_half:
            call = functools.partial(
                self.kv.step, reals, 1, (), num_known=0, num_expected=1, num_reserved=0
            )
        else:
            call = functools.partial(self.kv.decode_step, reals, known)
        errors = kvcore.NotReservedError, kvcore.SequenceTooLongError, kvcore.OutOfBlocksError
        refused("P4", errors, self.view, call)
        self.end(other)
