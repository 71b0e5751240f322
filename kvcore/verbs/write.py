"""Block tables and slot mappings of a step, written into buffers of the engine.

Decides which rows are written: all by `write_rows`, only those that changed by `StepTables`.
Nothing here changes a sequence, and nothing is written where an argument is refused.

Does not know: tensors, and what the rows are for.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import NoReturn, SupportsIndex, final

from kvcore.arguments import as_int, as_list
from kvcore.errors import InvalidArgumentError, NotReservedError, StaleSequenceError
from kvcore.sequence import KVSequence
from kvcore.tables.block_table import BlockTable
from kvcore.tables.slots import (
    check_width,
    checked_view,
    int_view,
    put_ints,
    row_view,
    slot_of,
    slots_of,
)


@final
class StepTables:
    """The block tables of one layer group in a buffer of the engine, a row for each sequence.

    A row stays where it is while the list of sequences is the same, so a captured graph may read
    the buffer. Entries outside a window may be out of date; behind the end of a table stand zeros.

    Args:
        allocate: returns a writable, contiguous buffer of int32 or int64 with at least as many rows
            and entries a row as it is asked for, `allocate(num_rows, num_entries)`; called again
            when the sequences need more, for at least twice as many.
        group: the layer group.

    Attributes:
        lengths: for each row the number of entries that are in use.
    """

    __slots__ = (
        "_allocate",
        "_bytes",
        "_changes",
        "_group",
        "_num_rows",
        "_seqs",
        "_stride",
        "_tables",
        "_view",
        "lengths",
    )

    def __init__(self, allocate: Callable[[int, int], object], group: SupportsIndex = 0) -> None:
        self._allocate = allocate
        self._group = as_int("group", group, 0)
        self._seqs: list[KVSequence] = []
        self._tables: list[BlockTable] = []
        self._changes: list[int] = []
        self.lengths: list[int] = []
        self._num_rows = self._stride = 0
        self._make_room(8, 16)

    def update(self, seqs: Sequence[KVSequence]) -> bool:
        """Write the rows that changed since the last call; row `i` is for sequence `i`.

        O(sequences + entries of the tables that changed), and with other sequences than before also
        O(bytes of the rows). For a sequence that only counts this is a comparison.

        Returns:
            True if the list of sequences is another one than before.

        Raises:
            StaleSequenceError: a sequence is closed.
            InvalidArgumentError: not a sequence, no such group, or `allocate` returned a buffer
                that does not fit.
        """
        running = seqs.copy() if type(seqs) is list else as_list("seqs", seqs)
        is_other = running != self._seqs
        if is_other:
            self._arrange(running)
        try:
            self._write_due(running)
        except BaseException:
            self._forget()
            raise
        return is_other

    def _forget(self) -> None:
        """Take no row for written, as after an error."""
        self._seqs = []
        self._tables = []
        self._changes = []

    def _write_due(self, running: list[KVSequence]) -> None:
        """Write the rows whose tables changed."""
        changes = [table.num_changes for table in self._tables]
        if changes == self._changes:
            return
        due = [row for row, number in enumerate(changes) if number != self._changes[row]]
        for row in due:
            if not running[row].is_open:
                raise StaleSequenceError(f"seqs: {running[row]!r} is closed")
        longest = max([len(self._tables[row].blocks) for row in due])
        if longest > self._stride:
            self._make_room(self._num_rows, max(longest, 2 * self._stride))
            due = list(range(len(changes)))
        for row in due:
            self._write(row, self._tables[row].block_ids)
        self._changes = changes

    def _write(self, row: int, block_ids: array[int]) -> None:
        """Write the entries of a row, and zeros over entries that were in use. O(entries)."""
        count = len(block_ids)
        begin = row * self._stride
        if self._view.itemsize == 4:
            self._bytes[4 * begin : 4 * (begin + count)] = memoryview(block_ids).cast("B")
        else:
            put_ints(self._view, begin, block_ids)
        if count < self.lengths[row]:
            put_ints(self._view, begin + count, array("i", [0]) * (self.lengths[row] - count))
        self.lengths[row] = count

    def _arrange(self, seqs: list[KVSequence]) -> None:
        """Move the rows of known sequences to their new places, in runs; other rows are due."""
        for seq in seqs:
            if not isinstance(seq, KVSequence):
                raise InvalidArgumentError(f"seqs: wanted KVSequence, got {type(seq).__name__}")
            if not seq.is_open:
                raise StaleSequenceError(f"seqs: {seq!r} is closed")
            as_int("group", self._group, 0, len(seq.tables) - 1)
        tables = [seq.tables[self._group] for seq in seqs]
        if len(seqs) > self._num_rows:
            self._make_room(max(len(seqs), 2 * self._num_rows), self._stride)
        places = {seq: row for row, seq in enumerate(self._seqs)}
        sources = [places.get(seq, -1) for seq in seqs]
        width = self._stride * self._view.itemsize
        before = bytes(self._bytes[: len(self._seqs) * width])
        old, lengths = self._changes, self.lengths
        self._forget()
        row = 0
        while row < len(sources):
            source = sources[row]
            stop = row + 1
            while source >= 0 and stop < len(sources) and sources[stop] == source + stop - row:
                stop += 1
            if source >= 0 and source != row:
                rows = before[source * width : (source + stop - row) * width]
                self._bytes[row * width : stop * width] = rows
            row = stop
        self._changes = [-1 if source < 0 else old[source] for source in sources]
        # Of a row without a source every entry may have been in use.
        self.lengths = [self._stride if source < 0 else lengths[source] for source in sources]
        self._tables = tables
        self._seqs = seqs

    def _make_room(self, num_rows: int, num_entries: int) -> None:
        """Have a larger buffer; all rows are due."""
        out = self._allocate(num_rows, num_entries)
        view = checked_view("allocate", out, (4, 8))
        if view.ndim != 2:
            raise InvalidArgumentError(f"allocate: wanted two dimensions, got {view.ndim}")
        self._view, self._stride = row_view("allocate", view, None, num_rows, num_entries)
        self._bytes = self._view.cast("B")
        self._num_rows = num_rows
        self._view = self._bytes.cast("i" if self._view.itemsize == 4 else "q")
        self._bytes[:] = bytes(len(self._bytes))
        self._changes = [-1] * len(self._changes)
        self.lengths = [0] * len(self.lengths)


def write_rows(
    seqs: Sequence[KVSequence],
    counts: list[int] | None,
    group: int,
    block_tables: object,
    slot_mapping: object,
    row_stride: int | None,
) -> None:
    """Write the block tables and the slot mapping of a step, or nothing.

    O(blocks + slots).

    Args:
        seqs: open sequences.
        counts: for each, the number of tokens that the step computes; None: one.
        group: the layer group.
        block_tables: a buffer of int32 or int64, a row for each sequence.
        slot_mapping: a buffer of int32 or int64.
        row_stride: entries from one row to the next; None: `block_tables` has two dimensions.

    Raises:
        NotReservedError: a sequence has no block for one of its tokens.
        InvalidArgumentError: a buffer does not fit, there is not one count for each, or `counts`
            is None and a sequence has more than one token to compute.
    """
    if counts is not None and len(counts) != len(seqs):
        raise InvalidArgumentError(
            f"counts: wanted one for each of {len(seqs)} sequences, got {len(counts)}"
        )
    slots = _slots(seqs, counts, group)
    tables = [seq.tables[group].block_ids for seq in seqs]
    longest = max(map(len, tables), default=0)
    rows, stride = row_view("block_tables", block_tables, row_stride, len(tables), longest)
    room = (len(tables) - 1) * stride + len(tables[-1]) if tables else 0
    if row_stride is not None and room > len(rows):
        raise InvalidArgumentError(f"block_tables: wanted room for {room} entries, got {len(rows)}")
    view = int_view("slot_mapping", slot_mapping, (4, 8), len(slots))
    check_width("slot_mapping", view, slots)
    put_ints(view, 0, slots)
    for index, block_ids in enumerate(tables):
        put_ints(rows, index * stride, block_ids)


def write_states(seqs: Sequence[KVSequence], reads: object, writes: object) -> None:
    """Write for each sequence which state its next step reads, and where it writes the next one.

    A row for each sequence, with as many block ids as a state has; a row of -1 in `reads` stands
    for zeros. Nothing is written where an argument is refused. O(sequences * blocks of a state).

    Args:
        seqs: open sequences with blocks for their next state.
        reads: a writable, contiguous buffer of int32 or int64: [at least the rows, one by one].
        writes: another one.

    Raises:
        StaleSequenceError: a sequence is closed.
        NotReservedError: a sequence has no blocks for its next state: call `reserve` first.
        InvalidArgumentError: no group keeps recurrent states, or a buffer does not fit.
    """
    before, after = array("q"), array("q")
    for seq in as_list("seqs", seqs):
        if not isinstance(seq, KVSequence):
            raise InvalidArgumentError(f"seqs: wanted KVSequence, got {type(seq).__name__}")
        read, written = seq.state_blocks
        before.extend(read or [-1] * len(written))
        after.extend(written)
    views = [int_view("reads", reads, (4, 8), len(before))]
    views.append(int_view("writes", writes, (4, 8), len(after)))
    put_ints(views[0], 0, before)
    put_ints(views[1], 0, after)


def _slots(seqs: Sequence[KVSequence], counts: list[int] | None, group: int) -> array[int]:
    """Return the slots of the tokens of a step, one sequence after another. O(slots)."""
    slots = array("q")
    for index, seq in enumerate(seqs):
        table = seq.tables[group]
        start = seq.num_computed_tokens
        stop = start + 1 if counts is None else start + counts[index]
        if stop > len(table.blocks) * table.block_size:
            _refuse_slots(seq, table, None if counts is None else counts[index])
        if counts is not None:
            slots.extend(slots_of(table.block_ids, start, stop, table.block_size))
        elif len(seq.packed) + seq.num_unknown_tokens > stop:
            raise InvalidArgumentError(
                f"counts: wanted the number of tokens that this step computes for each sequence, "
                f"got None; {seq!r} has {seq.num_tokens - start} tokens to compute"
            )
        else:
            slots.append(slot_of(table.block_ids, start, table.block_size))
    return slots


def _refuse_slots(seq: KVSequence, table: BlockTable, count: int | None) -> NoReturn:
    """Raise: a table has no blocks for `count` more tokens; None: for one."""
    if count is None:
        raise NotReservedError(f"{seq!r} has no block for its next token: call reserve first")
    room = len(table.blocks) * table.block_size - seq.num_computed_tokens
    count = as_int("counts", count, 0)  # what is beyond may be too long to print
    raise NotReservedError(
        f"counts: {seq!r} has blocks for {room} tokens after the computed ones, got {count}"
    )
