"""Whole steps as rules: decoders, chunks and drafts together, and engines that run ahead."""

import functools

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

import kvcore
from tests.kvcore.machines.checks import SEQUENCES
from tests.kvcore.machines.loads import LoadRules
from tests.kvcore.machines.refusal import refused

MOVES = st.tuples(
    st.lists(st.integers(0, 2), max_size=4),  # what joins
    st.integers(0, 9),  # how much was computed
    st.integers(0, 9),  # room for the next pass
)

TURNS = st.tuples(
    st.sampled_from([1, 1, 1, 0, 2, 3]),  # how many join
    st.sampled_from([1, 1, 1, 0, 2, 3, 5]),  # how many are left to be computed
    st.integers(0, 6),  # room for the next pass
)
FORMS = (
    "told",
    "decoder",
    "decoder",
    "told for all",
    "later",
    "read",
    "decode",
    "decode",
    "make room",
    "commit",
)


class StepRules(LoadRules):
    """The verbs of whole steps, with sequences in every state."""

    @precondition(lambda self: self.live)
    @rule(
        moves=st.lists(MOVES, min_size=1, max_size=4),
        first=st.integers(0, 3),
        is_told=st.booleans(),
        room_for_all=st.booleans(),
    )
    def mixed_step(self, moves, first, is_told, room_for_all):
        """Any sequences go forward by any numbers, in one call."""
        step = [e for e in self.live[first:] if len(e[1].all_tokens()) < 36][: len(moves)]
        moves = [
            (self.joins(e, joins, is_told), computed, room)
            for e, (joins, computed, room) in zip(step, moves, strict=False)
        ]
        moves = [
            (joins, min(c, self.most(e, joins)), room)
            for e, (joins, c, room) in zip(step, moves, strict=True)
        ]
        self.go(step, moves, is_told=is_told, room_for_all=room_for_all)

    @staticmethod
    def joins(entry, joins, is_told):
        """Known tokens cannot follow expected ones."""
        return [] if is_told and entry[1].future else joins

    def most(self, entry, joins):
        """How much of a sequence can have been computed, once these have joined."""
        naive = entry[1]
        length = len(naive.all_tokens()) + len(joins)
        return max(0, min(length, self.naive.room(naive)) - naive.computed)

    def go(self, step, moves, *, is_told, room_for_all=False):
        """One step; returns whether there was room for it."""
        reals = [real for real, _, _ in step]
        lengths = [
            len(e[1].all_tokens()) + len(joins)
            for e, (joins, _, _) in zip(step, moves, strict=True)
        ]
        totals = [
            length if room_for_all else e[1].computed + computed + room
            for e, (_, computed, room), length in zip(step, moves, lengths, strict=True)
        ]
        joining = [token for joins, _, _ in moves for token in joins]
        call = functools.partial(
            self.kv.step,
            reals,
            [computed for _, computed, _ in moves],
            joining if is_told else None,
            num_joining=[len(joins) for joins, _, _ in moves],
            num_reserved=None if room_for_all else [room for _, _, room in moves],
        )
        errors = self.errors(step, totals)
        if any(map(self.too_long, lengths)):
            errors.append(kvcore.SequenceTooLongError)
        if errors:
            refused("P13", tuple(errors), self.view, call)
            return False
        for (_, naive, _), (joins, _, _) in zip(step, moves, strict=True):
            (naive.tokens if is_told else naive.future).extend(joins)
        for entry, (_, computed, _) in zip(step, moves, strict=True):
            self.write(entry, computed)
        self.deliver(step, call())
        for (_, naive, _), total in zip(step, totals, strict=True):
            self.naive.reserve(naive, total - naive.computed)
        for (_, naive, _), (_, computed, _) in zip(step, moves, strict=True):
            self.naive.commit(naive, computed)
        self.agree()
        return True

    @precondition(lambda self: self.live)
    @rule(
        forms=st.lists(st.sampled_from(FORMS), min_size=3, max_size=9),
        moves=st.lists(TURNS, min_size=1, max_size=4),
        begins=st.integers(0, 3),
        token=st.integers(0, 2),
    )
    def serve(self, forms, moves, begins, token):
        """Steps of an engine, each in another form, for one or two sequences."""
        while len(self.live) > 2 and len(self.naive.pool.order()) < 2 * len(self.groups):
            self.end(self.live[-1])
        for entry in self.live[:begins]:
            self.run(entry)
        for turn, form in enumerate(forms):
            step = [e for e in self.live[:2] if len(e[1].all_tokens()) < 36]
            tokens = [turn % 3, 0, token, 1, 2]
            mine = [moves[(turn + place) % len(moves)] for place in range(len(step))]
            if form == "decoder":  # with room for drafts, often
                mine = [(1, 1, room) for _, _, room in mine]
            joining = [
                self.joins(entry, tokens[:joins], is_told=form != "later")
                for entry, (joins, _, _) in zip(step, mine, strict=True)
            ]
            most = [
                max(0, self.most(entry, [] if form == "commit" else joins) - left)
                for entry, joins, (_, left, _) in zip(step, joining, mine, strict=True)
            ]
            rooms = [room for _, _, room in mine]
            if form == "decode":
                self.decode_all(step, tokens[: len(step)])
            elif form == "read":
                self.read(step, 1 + turn % 3)
            elif form == "make room":
                self.reserve_all(step, rooms)
            elif form == "commit":
                self.commit_all(step, most)
            else:
                going = list(zip(joining, most, rooms, strict=True))
                is_told, for_all = form != "later", form == "told for all"
                self.go(step, going, is_told=is_told, room_for_all=for_all)

    @precondition(lambda self: self.live)
    @rule(token=st.integers(0, 2), steps=st.integers(1, 6))
    def decode_at_once(self, token, steps):
        """Whole decode steps in one call each, of everything that has room for what it has."""
        for _ in range(steps):
            fits = [min(40, self.naive.room(e[1])) for e in self.told()]
            step = [
                e for e, most in zip(self.told(), fits, strict=True) if 0 < len(e[1].tokens) <= most
            ]
            if not self.decode_all(step, [token] * len(step)):
                return

    def decode_all(self, step, tokens):
        """A decode step in one call, or its refusal: a token is unknown or has no room."""
        reals = [real for real, _, _ in step]
        todo = [len(naive.tokens) - naive.computed for _, naive, _ in step]
        errors = self.errors(step, [len(naive.tokens) + 1 for _, naive, _ in step])
        if any(naive.future for _, naive, _ in step):
            errors.append(kvcore.UnknownTokensError)
        if any(self.naive.room(naive) < len(naive.tokens) for _, naive, _ in step):
            errors.append(kvcore.NotReservedError)
        decode = functools.partial(self.kv.decode_step, reals, tokens)
        if errors:
            refused("P13", tuple(errors), self.view, decode)
            return False
        for entry, count in zip(step, todo, strict=True):
            self.write(entry, count)
        self.deliver(step, decode())
        for (_, naive, _), count in zip(step, todo, strict=True):
            self.naive.reserve(naive, count + 1)
        for (_, naive, _), count, token in zip(step, todo, tokens, strict=True):
            self.naive.commit(naive, count)
            naive.tokens.append(token)
        self.agree()
        return True

    def reserve_all(self, step, rooms):
        """Room after the computed tokens of each, in one call."""
        reals = [real for real, _, _ in step]
        reserve = functools.partial(self.kv.reserve_step, reals, rooms)
        totals = [naive.computed + room for (_, naive, _), room in zip(step, rooms, strict=True)]
        errors = self.errors(step, totals)
        if errors:
            refused("P13", tuple(errors), self.view, reserve)
            return
        self.deliver(step, reserve())
        for (_, naive, _), room in zip(step, rooms, strict=True):
            self.naive.reserve(naive, room)
        self.agree()

    def commit_all(self, step, counts):
        """The next tokens of each are computed, told or not."""
        for entry, count in zip(step, counts, strict=True):
            self.write(entry, count)
        self.kv.commit_step([real for real, _, _ in step], counts)
        for (_, naive, _), count in zip(step, counts, strict=True):
            self.naive.commit(naive, count)
        self.agree()

    def errors(self, step, totals):
        """Why there cannot be room for so many tokens of each, in all."""
        missing = [
            sum(self.naive.missing(naive, total - naive.computed))
            for (_, naive, _), total in zip(step, totals, strict=True)
        ]
        errors = [kvcore.SequenceTooLongError] * any(map(self.too_long, totals))
        return errors + [kvcore.OutOfBlocksError] * (sum(missing) > len(self.naive.pool.order()))

    @staticmethod
    def deliver(step, growths):
        """The runner is told what has joined its tables."""
        for growth in growths:
            step[growth.index][2][growth.group].extend(growth.block_ids)

    @precondition(lambda self: any(entry[1].future for entry in self.live))
    @rule(most=st.integers(1, 3), is_wrong=st.booleans())
    def read_a_step(self, most, is_wrong):
        """What a step has sampled is read: one answer for all that it had, or for none."""
        step = [entry for entry in self.live if entry[1].future]
        self.read(step, most, is_wrong=is_wrong)

    def read(self, step, most, *, is_wrong=False):
        reals = [real for real, _, _ in step]
        told = [naive.future[:most] for _, naive, _ in step]
        counts = [len(tokens) for tokens in told]
        flat = [token for tokens in told for token in tokens]
        starts = [len(naive.tokens) for _, naive, _ in step]
        if is_wrong:
            late = [*starts[:-1], starts[-1] + 1]
            call = functools.partial(
                self.kv.resolve_step, reals, flat, num_resolved=counts, starts=late
            )
            refused("P27", kvcore.NotExpectedError, self.view, call)
            more = [*counts[:-1], len(step[-1][1].future) + 1]
            flat_more = [0] * sum(more)
            call = functools.partial(self.kv.resolve_step, reals, flat_more, num_resolved=more)
            refused("P27", kvcore.NotExpectedError, self.view, call)
        self.kv.resolve_step(reals, flat, num_resolved=counts, starts=starts)
        for (_, naive, _), count in zip(step, counts, strict=True):
            self.naive.resolve(naive, count)
        self.agree()

    @precondition(lambda self: self.live)
    @rule(token=st.integers(0, 2), steps=st.integers(1, 7), depth=st.integers(1, 2))
    def run_ahead(self, token, steps, depth):
        """An engine sends steps before it has read the tokens of those that it sent before."""
        step = [
            e for e in self.live if 0 < len(e[1].all_tokens()) <= min(30, self.naive.room(e[1]))
        ]
        for _ in range(steps if step else 0):
            todo = [len(e[1].all_tokens()) - e[1].computed for e in step]
            moves = [([token], count, 1) for count in todo]
            if not self.go(step, moves, is_told=False):
                return
            if all(len(e[1].future) > depth for e in step):
                self.read(step, 1, is_wrong=len(step) > 1)

    @rule(entry=SEQUENCES, drafts=st.integers(1, 4), accepted=st.integers(0, 4))
    def verify_later(self, entry, drafts, accepted):
        """Drafts are computed before anybody knows them; some are told, the rest is cut."""
        real, naive, _ = entry
        if not real.is_open or naive.future or len(naive.tokens) > 30:
            return
        self.expect(entry, [1] * drafts)
        self.run(entry)
        self.agree()
        self.resolve(entry, min(accepted, len(naive.future)))
        self.agree()
        self.truncate(entry, len(naive.tokens))
