"""Whole steps: one call for all sequences that run, and for all of them or none.

The steady state of an engine is decoding, where 15 of 16 tokens add no block: such a token costs a
comparison and two counts here.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import islice
from typing import SupportsIndex

from kvcore.advance import advance_all, advance_decodes, committable
from kvcore.arguments import as_int
from kvcore.block_table import BlockTable
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
        counts = [as_int("num_tokens", number, 0) for number in num_tokens]
        running = self._checked_step(seqs, counts)
        places: list[tuple[int, int]] = []
        wanted: list[tuple[BlockTable, int]] = []
        for index, seq in enumerate(running):
            room = seq.num_computed_tokens + counts[index]
            self._check_length(room)
            for group, table in enumerate(seq.tables):
                count = table.num_missing(room)
                if count:
                    places.append((index, group))
                    wanted.append((table, count))
        return advance_all(self.pool, (), wanted, places) if wanted else ()

    def commit_step(self, seqs: Sequence[KVSequence], num_tokens: Sequence[SupportsIndex]) -> None:
        """State for every sequence of a step that the KV of its next tokens is written.

        All or none; otherwise as `commit` for each in turn, and with its errors.
        """
        counts = [as_int("num_tokens", number, 0) for number in num_tokens]
        running = self._checked_step(seqs, counts)
        given = zip(running, counts, strict=True)
        advance_all(self.pool, [(seq, committable(seq, count)) for seq, count in given])

    def decode_step(self, seqs: Sequence[KVSequence], tokens: Tokens) -> tuple[Growth, ...]:
        """Take every sequence of a decode step from one forward pass to the next, or none.

        The forward pass has written the KV of all tokens that each sequence has: they are
        committed. A sampled token joins each, and gets room; the room is taken first. The same as
        `append`, `reserve` and `commit` of each, in one call. O(sequences + new blocks); a sequence
        that fills no block costs a comparison and two counts.

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
            growths = self._fill(running, due) if due else ()
        except BaseException:
            for seq in islice(running, index):
                seq.packed.pop()
                if len(seq.packed) < seq.stop:
                    seq.num_computed_tokens = len(seq.packed) - 1
            raise
        return growths

    def _fill(self, seqs: list[KVSequence], due: list[int]) -> tuple[Growth, ...]:
        """Do for some sequences of a decode step what is more than counting, or for none."""
        longest = self.max_model_len
        is_plain = self._is_plain
        for index in due:
            seq = seqs[index]
            if longest is not None and len(seq.packed) > longest:
                self._check_length(len(seq.packed))
            if seq.wishes:
                is_plain = False
        if is_plain:
            growths = advance_decodes(self.pool, seqs, due)
        else:
            growths = self._fill_groups(seqs, due)
        for index in due:
            seqs[index].find_stop(longest)
        return growths

    def _fill_groups(self, seqs: list[KVSequence], due: list[int]) -> tuple[Growth, ...]:
        """Do what `advance_decodes` does, for any groups and wishes."""
        places: list[tuple[int, int]] = []
        wanted: list[tuple[BlockTable, int]] = []
        targets: list[tuple[KVSequence, int]] = []
        for index in due:
            seq = seqs[index]
            length = len(seq.packed)
            targets.append((seq, committable(seq, length - 1 - seq.num_computed_tokens)))
            for group, table in enumerate(seq.tables):
                count = table.num_missing(length)
                if count:
                    places.append((index, group))
                    wanted.append((table, count))
        return advance_all(self.pool, targets, wanted, places)

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
