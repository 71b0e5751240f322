"""Whole steps as rules: decoders, chunks and drafts together, and engines that run ahead."""

import functools

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

import kvcore
from tests.kvcore.machines.checks import SEQUENCES
from tests.kvcore.machines.loads import LoadRules
from tests.kvcore.machines.refusal import refused

MOVES = st.tuples(
    st.integers(0, 3),  # how many expected tokens are read
    st.lists(st.integers(0, 2), max_size=4),  # what joins, if all of them are
    st.integers(0, 9),  # how much was computed
    st.lists(st.integers(0, 2), max_size=2),  # what is expected then
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
    "ahead",
    "ahead",
    "some ahead",
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
        room_for_all=st.booleans(),
    )
    def mixed_step(self, moves, first, room_for_all):
        """Any sequences go forward by any numbers: some read, some compute, some do both."""
        step = [e for e in self.live[first:] if len(e[1].all_tokens()) < 36][: len(moves)]
        going = []
        for entry, (told, joins, computed, later, room) in zip(step, moves, strict=False):
            read = min(told, len(entry[1].future))
            known = self.joins(entry, joins, read)
            going.append((read, known, min(computed, self.most(entry, known)), later, room))
        self.go(step, going, room_for_all=room_for_all)

    @staticmethod
    def joins(entry, joins, told):
        """Known tokens join only where all expected ones are read."""
        return joins if told == len(entry[1].future) else []

    def most(self, entry, joins):
        """How much of a sequence can have been computed, once these have joined."""
        naive = entry[1]
        length = len(naive.all_tokens()) + len(joins)
        return max(0, min(length, self.naive.room(naive)) - naive.computed)

    def go(self, step, moves, *, room_for_all=False):
        """One step; returns whether there was room for it."""
        known = [
            [*naive.future[:told], *joins]
            for (_, naive, _), (told, joins, *_) in zip(step, moves, strict=True)
        ]

        def each(numbers):
            """One number for all where that says the same, in half of the steps."""
            return numbers[0] if len({*numbers}) == 1 and sum(map(len, known)) % 2 else numbers

        call = functools.partial(
            self.kv.step,
            [real for real, _, _ in step],
            each([computed for _, _, computed, _, _ in moves]),
            [token for tokens in known for token in tokens],
            num_known=each([len(tokens) for tokens in known]),
            num_expected=each([len(later) for *_, later, _ in moves]),
            num_reserved=None if room_for_all else each([room for *_, room in moves]),
        )
        return self.take(step, moves, call, [], room_for_all=room_for_all)

    def take(self, step, moves, call, errors, *, room_for_all):
        """A step as the verbs of each sequence would do it, room first; or its refusal."""
        lengths = [
            len(naive.all_tokens()) + len(joins) + len(later)
            for (_, naive, _), (_, joins, _, later, _) in zip(step, moves, strict=True)
        ]
        totals = [
            length if room_for_all else naive.computed + computed + room
            for (_, naive, _), (_, _, computed, _, room), length in zip(
                step, moves, lengths, strict=True
            )
        ]
        errors += self.errors(step, totals)
        if any(map(self.too_long, lengths)):
            errors.append(kvcore.SequenceTooLongError)
        if errors:
            refused("P13", tuple(errors), self.view, call)
            return False
        for entry, (told, joins, computed, later, _) in zip(step, moves, strict=True):
            naive = entry[1]
            naive.tokens += [*naive.future[:told], *joins]
            naive.future[:told] = []
            self.write(entry, computed)
            naive.future += later
        self.deliver(step, call())
        for (_, naive, _), total in zip(step, totals, strict=True):
            self.naive.reserve(naive, total - naive.computed)
        with self.naive.together():
            for (_, naive, _), (_, _, computed, _, _) in zip(step, moves, strict=True):
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
        """Steps of an engine, each in another form, for a few sequences."""
        while len(self.live) > 3 and len(self.naive.pool.order()) < 2 * len(self.groups):
            self.end(self.live[-1])
        for entry in self.live[:begins]:
            self.run(entry)
        for turn, form in enumerate(forms):
            step = [e for e in self.live[:3] if len(e[1].all_tokens()) < 36]
            tokens = [turn % 3, 0, token, 1, 2]
            mine = [moves[(turn + place) % len(moves)] for place in range(len(step))]
            if form == "decode":
                self.decode_all(step, tokens)
            elif form == "read":
                self.read(step, 1 + turn % 3)
            elif form == "make room":
                self.reserve_all(step, [room for _, _, room in mine])
            elif form == "commit":
                counts = [
                    max(0, self.most(e, []) - left)
                    for e, (_, left, _) in zip(step, mine, strict=True)
                ]
                self.commit_all(step, counts)
            else:
                going = [
                    self.turn(entry, form, place, tokens, mine[place])
                    for place, entry in enumerate(step)
                ]
                self.go(step, going, room_for_all=form == "told for all")

    def turn(self, entry, form, place, tokens, move):
        """What one sequence does in a step of a form: read, join, compute, expect and reserve."""
        joins, left, room = move
        if form == "later":
            return 0, [], max(0, self.most(entry, []) - left), tokens[:joins], room
        if form == "decoder":  # with room for drafts, often
            joins, left = 1, 1
        told, later = min(joins, len(entry[1].future)), []
        if form == "ahead" or (form == "some ahead" and (place or left)):
            told, joins, later = min(1, len(entry[1].future)), 1, tokens[1:2]
        known = self.joins(entry, tokens[: max(0, joins - told)], told)
        most = self.most(entry, known)
        count = min(1, most) if later else max(0, most - left)
        return told, known, count, later, room

    @precondition(lambda self: self.live)
    @rule(token=st.integers(0, 2), steps=st.integers(1, 6))
    def decode_at_once(self, token, steps):
        """Whole decode steps in one call each, of everything that has room for what it has."""
        for _ in range(steps):
            step = [
                e for e in self.live if 0 < len(e[1].all_tokens()) <= min(40, self.naive.room(e[1]))
            ]
            if not self.decode_all(step, [token] * len(step)):
                return

    def decode_all(self, step, tokens):
        """A decode step in one call, or its refusal: a token has no room."""
        moves = []
        for (_, naive, _), token in zip(step, tokens, strict=False):
            told = min(1, len(naive.future))
            todo = len(naive.all_tokens()) - naive.computed
            moves.append((told, [] if told else [token], todo, [], 0))
        known = [
            naive.future[0] if told else joins[0]
            for (_, naive, _), (told, joins, *_) in zip(step, moves, strict=True)
        ]
        errors = [
            kvcore.NotReservedError
            for _, naive, _ in step
            if self.naive.room(naive) < len(naive.all_tokens())
        ]
        decode = functools.partial(self.kv.decode_step, [real for real, _, _ in step], known)
        return self.take(step, moves, decode, errors, room_for_all=True)

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
        with self.naive.together():
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
        with self.naive.together():
            for (_, naive, _), count in zip(step, counts, strict=True):
                self.naive.resolve(naive, count)
        self.agree()

    @precondition(lambda self: self.live)
    @rule(
        token=st.integers(0, 2),
        steps=st.integers(1, 9),
        depth=st.integers(1, 2),
        room=st.integers(0, 3),
    )
    def run_ahead(self, token, steps, depth, room):
        """An engine sends steps before it has read the tokens of those that it sent before."""
        step = [
            e for e in self.live if 0 < len(e[1].all_tokens()) <= min(30, self.naive.room(e[1]))
        ]
        for _ in range(steps if step else 0):
            moves = []
            for _, naive, _ in step:
                told = int(len(naive.future) >= depth)
                todo = len(naive.all_tokens()) - naive.computed
                moves.append((told, [], todo, [token], max(1, room)))
            if not self.go(step, moves):
                return

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
