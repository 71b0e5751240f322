"""Whole steps: one call for all sequences that run, and for all of them or none.

The steady state of an engine is decoding, where 15 of 16 tokens add no block: such a token costs a
comparison and two counts here, whatever the layer groups are. Decoders, chunks of prompts and
drafts are one step; what is more than counting is done for all that need it together.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import islice
from typing import SupportsIndex

from kvcore.advance import advance_decodes, advance_step, committable
from kvcore.arguments import as_int
from kvcore.errors import InvalidArgumentError, NotReservedError
from kvcore.reports import Growth
from kvcore.sequence import KVSequence
from kvcore.slots import int_view, put_ints, slot_of
from kvcore.state import CacheState
from kvcore.tokens import Tokens, pack


class StepVerbs(CacheState):
    """The verbs of a cache that take a whole step."""

    def reserve_step(
        self, seqs: Sequence[KVSequence], num_tokens: Sequence[SupportsIndex]
    ) -> tuple[Growth, ...]:
        """Make room for the next tokens of every sequence of a step, or of none.

        O(sequences + new blocks); a sequence that needs no block costs a comparison.

        Args:
            seqs: open sequences, each once.
            num_tokens: for each, how many tokens after its computed ones.

        Returns:
            What was appended, in the order of the sequences; those that grew alone.

        Raises:
            OutOfBlocksError: too few blocks are free for all of them.
            InvalidArgumentError: a sequence twice, or not one number for each.
            SequenceTooLongError: the room would reach past `max_model_len`.
        """
        counts = _counts("num_tokens", num_tokens)
        running = self._checked_step(seqs, counts)
        growing: list[int] = []
        totals: list[int] = []
        for index, seq in enumerate(running):
            total = seq.num_computed_tokens + counts[index]
            if total > seq.room:
                self._check_length(total)
                growing.append(index)
                totals.append(total)
        if not growing:
            return ()
        return self._move(running, growing, [0] * len(running), totals)

    def commit_step(self, seqs: Sequence[KVSequence], num_tokens: Sequence[SupportsIndex]) -> None:
        """State for every sequence of a step that the KV of its next tokens is written.

        All or none; otherwise as `commit` for each in turn, and with its errors.
        """
        counts = _counts("num_tokens", num_tokens)
        running = self._checked_step(seqs, counts)
        due: list[int] = []
        for index, seq in enumerate(running):
            computed = seq.num_computed_tokens + counts[index]
            length = len(seq.packed) + seq.num_untold_tokens
            if not (computed < seq.due and computed <= seq.room and computed <= length):
                committable(seq, counts[index])
                due.append(index)
        if due:
            self._move(running, due, counts, [0] * len(due))
        due.append(len(running))
        place = 0
        for index, seq in enumerate(running):
            if index == due[place]:
                place += 1
            else:
                seq.num_computed_tokens += counts[index]
                seq.stop = 0

    def step(
        self,
        seqs: Sequence[KVSequence],
        num_computed: Sequence[SupportsIndex],
        tokens: Tokens | None,
        *,
        num_joining: Sequence[SupportsIndex] | None = None,
        room: Sequence[SupportsIndex] | None = None,
    ) -> tuple[Growth, ...]:
        """Take every sequence of a step from one forward pass to the next, or none of them.

        For each sequence, in this order: tokens join its end; the KV of its next tokens is written,
        and is committed; room is made for what the next pass computes, before anything is given
        back. A decoder computes one token and one joins; a chunk of a prompt computes many and none
        joins; of drafts as many are computed as were accepted, and the sampled token, and they
        join. The same as `extend`, `commit` and `reserve` of each. O(sequences + blocks filled,
        taken and given back); a sequence that fills no block and needs none costs a comparison and
        two counts.

        Args:
            seqs: open sequences, each once.
            num_computed: for each how many of its next tokens were computed; within the room that
                it has.
            tokens: what joins, one sequence's tokens after another's; None: they are only expected,
                and told later.
            num_joining: for each how many of them are its own; None: one each.
            room: for each how many tokens after the computed ones to make room for; None: for all
                that it has.

        Returns:
            What was appended to their tables, in the order of the sequences; those that grew alone.

        Raises:
            OutOfBlocksError: too few blocks are free for all of them.
            NotReservedError: more tokens are computed than there was room for.
            InvalidArgumentError: a sequence twice, not one number for each, more tokens computed
                than there are, or not as many tokens as join.
            SequenceTooLongError: tokens or room would reach past `max_model_len`.
            UntoldTokensError: known tokens would follow expected ones.
        """
        computed = _counts("num_computed", num_computed)
        joined = None if tokens is None else pack(tokens).tolist()
        joining = _counts("num_joining", num_joining, len(computed))
        rooms = None if room is None else _counts("room", room)
        running = self._checked_step(seqs, computed)
        _check_lengths(len(running), joining, rooms)
        _check_sum(joined, joining)
        due: list[int] = []
        totals: list[int] = []
        index = start = 0
        try:
            for index, seq in enumerate(running):
                packed = seq.packed
                done = seq.num_computed_tokens + computed[index]
                more = joining[index]
                if more == 1 and joined is not None:
                    if seq.num_untold_tokens:
                        self._check_told(seq)
                    packed.append(joined[start])
                    start += 1
                elif joined is None:
                    seq.num_untold_tokens += more
                elif more:
                    self._check_told(seq)
                    packed.fromlist(joined[start : start + more])
                    start += more
                length = len(packed) + seq.num_untold_tokens
                total = length if rooms is None else done + rooms[index]
                if (
                    done <= length <= seq.room
                    and total <= seq.room
                    and (done < seq.due or len(packed) < seq.due)
                ):
                    seq.num_computed_tokens = done
                    seq.stop = 0
                else:
                    due.append(index)
                    totals.append(total)
            index = len(running)
            if not due:
                return ()
            for place, number in enumerate(due):
                self._check_length(max(running[number].num_tokens, totals[place]))
                committable(running[number], computed[number])
            return self._move(running, due, computed, totals)
        except BaseException:
            self._take_back(running[:index], joining, due, computed, joined is None)
            raise

    def tell_step(
        self,
        seqs: Sequence[KVSequence],
        tokens: Tokens,
        *,
        num_told: Sequence[SupportsIndex] | None = None,
        starts: Sequence[SupportsIndex] | None = None,
    ) -> None:
        """Say for every sequence which tokens its first expected ones are; for all or for none.

        As `tell` for each in turn, and with its errors. O(sequences + blocks filled and given
        back).

        Args:
            seqs: open sequences, each once.
            tokens: one sequence's tokens after another's.
            num_told: for each how many of them are its own; None: one each.
            starts: for each the position of its first one, where the caller knows them.
        """
        told = pack(tokens).tolist()
        counts = _counts("num_told", num_told, len(told))
        firsts = None if starts is None else _counts("starts", starts)
        running = self._checked_step(seqs, counts)
        _check_lengths(len(running), firsts)
        _check_sum(told, counts)
        for index, seq in enumerate(running):
            self._check_expected(seq, counts[index], None if firsts is None else firsts[index])
        due: list[int] = []
        index = start = 0
        try:
            for index, seq in enumerate(running):
                more = counts[index]
                if more == 1:
                    seq.packed.append(told[start])
                else:
                    seq.packed.fromlist(told[start : start + more])
                seq.num_untold_tokens -= more
                start += more
                if len(seq.packed) >= seq.due and seq.num_computed_tokens >= seq.due:
                    due.append(index)
            index = len(running)
            if due:
                self._move(running, due, [0] * len(running), [0] * len(due))
        except BaseException:
            for number in range(index):
                seq = running[number]
                del seq.packed[len(seq.packed) - counts[number] :]
                seq.num_untold_tokens += counts[number]
            raise

    def decode_step(self, seqs: Sequence[KVSequence], tokens: Tokens) -> tuple[Growth, ...]:
        """Take every sequence of a decode step from one forward pass to the next, or none.

        The forward pass has written the KV of all tokens that each sequence has: they are
        committed. A sampled token joins each, and gets room; the room is taken first. What `step`
        does where all have computed all that they have, in a loop that counts nothing else: 0.6
        of its price in Python, 0.9 compiled. O(sequences + new blocks).

        Args:
            seqs: open sequences, each once.
            tokens: for each the token that was sampled.

        Returns:
            What was appended to their tables, in the order of the sequences; those that grew alone.

        Raises:
            OutOfBlocksError: too few blocks are free for all of them.
            NotReservedError: a sequence has tokens without room, so nobody can have computed them.
            InvalidArgumentError: a sequence twice, or not one token id for each.
            SequenceTooLongError: a sequence has `max_model_len` tokens already.
            UntoldTokensError: a sequence expects tokens that are not told yet.
        """
        sampled = pack(tokens).tolist()
        running = self._checked_step(seqs, sampled)
        due: list[int] = []
        index = 0
        try:
            for index, seq in enumerate(running):
                length = len(seq.packed)
                if length < seq.stop:
                    seq.packed.append(sampled[index])
                    seq.num_computed_tokens = length
                else:
                    due.append(index)
                    seq.packed.append(sampled[index])
            index = len(running)
            growths = self._decode(running, due) if due else ()
        except BaseException:
            for seq in islice(running, index):
                seq.packed.pop()
                if len(seq.packed) < seq.stop:
                    seq.num_computed_tokens = len(seq.packed) - 1
            raise
        return growths

    def _decode(self, seqs: list[KVSequence], due: list[int]) -> tuple[Growth, ...]:
        """Do for some sequences of a decode step what is more than counting, or for none."""
        longest = self.max_model_len
        is_plain = self._is_plain
        for index in due:
            seq = seqs[index]
            length = len(seq.packed)
            if length - 1 > seq.room or seq.num_untold_tokens:
                self._check_told(seq)
                committable(seq, length - 1 - seq.num_computed_tokens)
            if longest is not None and length > longest:
                self._check_length(length)
            if seq.wishes:
                is_plain = False
        if is_plain:
            growths = advance_decodes(self.pool, seqs, due)
            for index in due:
                seqs[index].find_limits(longest)
        else:
            computed = [0] * len(seqs)
            for index in due:
                computed[index] = len(seqs[index].packed) - 1 - seqs[index].num_computed_tokens
            growths = self._move(seqs, due, computed, [len(seqs[i].packed) for i in due])
        for index in due:
            seq = seqs[index]
            seq.stop = min(seq.room, seq.due)
        return growths

    def _move(
        self, seqs: list[KVSequence], due: list[int], computed: list[int], totals: list[int]
    ) -> tuple[Growth, ...]:
        """Let some sequences of a step, those at `due`, have computed more, and have room.

        `computed` has a number for each of the step, `totals` for each of those that are due.
        """
        moving = [seqs[index] for index in due]
        done = [seqs[index].num_computed_tokens + computed[index] for index in due]
        growths = advance_step(self.pool, moving, due, done, totals)
        for seq in moving:
            seq.find_limits(self.max_model_len)
        return growths

    @staticmethod
    def _take_back(
        seqs: list[KVSequence],
        joining: list[int],
        due: list[int],
        computed: list[int],
        is_untold: bool,  # noqa: FBT001  # of our own
    ) -> None:
        """Undo what `step` has done to some sequences: what joined, and what only counted."""
        moved = set(due)
        for index, seq in enumerate(seqs):
            if is_untold:
                seq.num_untold_tokens -= joining[index]
            else:
                del seq.packed[len(seq.packed) - joining[index] :]
            if index not in moved:
                seq.num_computed_tokens -= computed[index]

    def write_step(
        self,
        seqs: Sequence[KVSequence],
        block_tables: object,
        slot_mapping: object,
        *,
        row_stride: SupportsIndex,
        group: SupportsIndex = 0,
    ) -> None:
        """Write a decode step's block tables and slots into buffers of the caller. O(blocks).

        Args:
            seqs: open sequences, each with room for the token after its computed ones.
            block_tables: a writable, contiguous buffer of int32 or int64: row `i` begins at entry
                `i * row_stride` and gets the table of sequence `i`; what follows in the row is
                untouched.
            slot_mapping: a writable, contiguous buffer of int64: [at least len(seqs)]; the slot of
                each sequence's next token.
            row_stride: entries from one row to the next.
            group: which layer group.

        Raises:
            NotReservedError: a sequence has no room for its next token.
            InvalidArgumentError: a row is longer than `row_stride`, or a buffer does not fit.
                Nothing is written then.
        """
        stride = as_int("row_stride", row_stride, 1)
        number = as_int("group", group, 0, len(self.groups) - 1)
        slots = array("q")
        tables: list[array[int]] = []
        for seq in seqs:
            self._check_open(seq)
            table = seq.tables[number]
            position = seq.num_computed_tokens
            if position >= len(table.blocks) * table.block_size:
                raise NotReservedError(f"{seq!r} has no room for its next token")
            if len(table.block_ids) > stride:
                raise InvalidArgumentError(
                    f"row_stride: wanted at least {len(table.block_ids)}, got {stride}"
                )
            slots.append(slot_of(table.block_ids, position, table.block_size))
            tables.append(table.block_ids)
        room = (len(tables) - 1) * stride + len(tables[-1]) if tables else 0
        rows = int_view("block_tables", block_tables, (4, 8), room)
        put_ints(int_view("slot_mapping", slot_mapping, (8,), len(slots)), 0, slots)
        for index, block_ids in enumerate(tables):
            put_ints(rows, index * stride, block_ids)


def _counts(name: str, numbers: Sequence[SupportsIndex] | None, otherwise: int = 0) -> list[int]:
    """Return numbers of a step as ints; for None so many ones. O(numbers).

    Raises:
        InvalidArgumentError: one is no integer, or negative.
    """
    if numbers is None:
        return [1] * otherwise
    return [
        number if type(number) is int and number >= 0 else as_int(name, number, 0)
        for number in numbers
    ]


def _check_lengths(wanted: int, *lists: list[int] | None) -> None:
    """Raise where a list that is given has not one number for each sequence."""
    for numbers in lists:
        if numbers is not None and len(numbers) != wanted:
            raise InvalidArgumentError(
                f"wanted one number for each of {wanted} sequences, got {len(numbers)}"
            )


def _check_sum(tokens: list[int] | None, counts: list[int]) -> None:
    """Raise where there are not as many tokens as the sequences take."""
    if tokens is not None and len(tokens) != sum(counts):
        raise InvalidArgumentError(f"tokens: wanted {sum(counts)} in all, got {len(tokens)}")
