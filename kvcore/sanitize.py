"""A shadow of every slot of a KV cache: what an engine's steps write and read, checked as they go.

The engine notes, for each sequence of a step, the slots that kernels write and the table that
they read (`wrote`, `reads`), and which blocks it copies or fills from elsewhere
(`copied`, `filled`, `loaded`). The shadow knows of every slot whether it was written, by which
sequence and for which token, and compares all of it with the sequence's own tables. What is wrong
is a `SanitizerError` that names it and shows the last calls.

Invariants: a slot that is read was written, for the reader's own token at that position; a slot
that is written belongs to the writer, is not shared, and is not computed already; tables and slots
given to a kernel are those of the sequence. A block's slots count as never written from the moment
at which another sequence, or another place of a sequence, has it.

It does not know what a kernel really does: `take_fresh` returns the blocks to poison, and the owner
of the memory checks the result, as docs/how-to/find-a-wrong-access.md describes.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from kvcore.errors import KVCoreError
from kvcore.lease import Lease, Load
from kvcore.reports import CopyOrder
from kvcore.sequence import KVSequence

UNKNOWN = -1
"""A token whose id is still unknown on the host."""


class SanitizerError(KVCoreError):
    """KV memory is used wrongly.

    Attributes:
        kind: "unwritten", "foreign", "freed", "shared", "double", "misplaced", "null", "table",
            "length", or "kernel" for errors found in the memory itself.
        message: the error, and its place.
        calls: the last calls of the shadow, oldest first.
    """

    def __init__(self, kind: str, message: str, calls: tuple[str, ...] = ()) -> None:
        super().__init__(kind, message)
        self.kind = kind
        self.message = message
        self.calls = calls

    def __str__(self) -> str:
        shown = "\n".join(f"    {call}" for call in self.calls)
        return f"{self.kind}: {self.message}\n\nThe last calls:\n\n{shown}"


@dataclass(slots=True)
class _Shadow:
    """The known state of one block: its writer (None: copied in a fork) and its slots' tokens."""

    group: int
    index: int
    writer: KVSequence | None
    tokens: list[int | None] = field(default_factory=list)


@dataclass(slots=True)
class _StateShadow:
    """The known state of one piece of a recurrent state: its writer and the tokens before it."""

    piece: int
    writer: KVSequence
    num_tokens: int
    packed: array[int]


class Shadow:
    """The shadow of one pool.

    Args:
        max_calls: the number of last calls that an error shows.
    """

    def __init__(self, max_calls: int = 40) -> None:
        self._blocks: dict[int, _Shadow] = {}
        self._states: dict[int, _StateShadow] = {}
        self._names: dict[KVSequence, str] = {}
        self._verified: dict[tuple[KVSequence, int], int] = {}
        self._calls: deque[str] = deque(maxlen=max_calls)
        self._fresh: list[int] = []
        self._num_named = 0

    def wrote(self, seq: KVSequence, start: int, slots: Sequence[int], *, group: int = 0) -> None:
        """Note that a step writes the KV of the tokens from `start` on into these slots. O(slots).

        Raises:
            SanitizerError: misplaced, null, foreign, freed, shared or double.
        """
        self._note(f"{self._name(seq)} writes {start}..{start + len(slots) - 1} {_span(slots)}")
        table = seq.tables[group]
        ids, size = table.block_ids, table.block_size
        known, computed = seq.packed, seq.num_computed_tokens
        for position, slot in enumerate(slots, start):
            index, offset = divmod(position, size)
            block_id = ids[index] if index < len(ids) else None
            if slot < 0 or block_id is None or slot != block_id * size + offset:
                self._wrong_slot(seq, position, slot, group)
            if block_id == 0:
                self._fail("null", f"{self._name(seq)} writes position {position} into block 0")
            shadow = self._blocks.get(block_id)
            if position < computed:
                self._computed_already(seq, position, block_id, group)
            if shadow is None or not self._is_at(shadow, seq, group, index):
                shadow = self._take_over(seq, block_id, group, index, size)
            shadow.tokens[offset] = known[position] if position < len(known) else UNKNOWN

    def reads(
        self,
        seq: KVSequence,
        length: int,
        block_ids: Sequence[int],
        *,
        group: int = 0,
        first: int = 0,
    ) -> None:
        """Check a step that reads the KV of the tokens `first` to `length` - 1 through this table.

        Blocks that were checked are not checked again: O(blocks), and O(tokens) of the new ones.

        Raises:
            SanitizerError: table, null, unwritten, foreign or length.
        """
        self._note(f"{self._name(seq)} reads {first}..{length - 1} through {_span(block_ids)}")
        table = seq.tables[group]
        ids, size = table.block_ids, table.block_size
        needed = -(-length // size)
        if length > seq.num_tokens:
            what = f"{self._name(seq)} has {seq.num_tokens} tokens, and {length} are read"
            self._fail("length", what)
        if needed > len(block_ids) or needed > len(ids):
            self._fail("table", f"{self._name(seq)} needs {needed} blocks: {_span(block_ids)}")
        start = first // size
        for index in range(start, needed):
            if block_ids[index] != ids[index]:
                self._wrong_entry(seq, index, block_ids[index], group)
        seen = self._verified.get((seq, group), 0)
        checked = min(seen, seq.num_computed_tokens // size, length // size)
        for index in range(max(start, checked), needed):
            stop = min(size, length - index * size)
            self._check_block(seq, index, ids[index], max(0, first - index * size), stop)
        self._verified[seq, group] = length // size

    def advanced(
        self, seq: KVSequence, reads: Sequence[int], writes: Sequence[int], num_tokens: int
    ) -> None:
        """Check a step that reads a recurrent state, and writes the one after `num_tokens` more.

        `reads` is empty where the step starts from zeros. O(blocks of a state + tokens).

        Raises:
            SanitizerError: table, unwritten, foreign, shared or length.
        """
        computed = seq.num_computed_tokens
        self._note(f"{self._name(seq)} reads state {_span(reads)} and writes {_span(writes)}")
        own_reads, own_writes = seq.state_blocks
        for given, wanted in ((reads, own_reads), (writes, own_writes)):
            if list(given) != list(wanted):
                what = f"the state of {self._name(seq)} is {_span(given)}, wanted {_span(wanted)}"
                self._fail("table", what)
        if computed + num_tokens > seq.num_tokens:
            what = f"{self._name(seq)} has {seq.num_tokens} tokens"
            self._fail("length", f"{what}, and its state is to see {computed + num_tokens}")
        for piece, block_id in enumerate(reads):
            self._check_state(seq, piece, block_id)
        for piece, block_id in enumerate(writes):
            for other in self._names:
                if other is not seq and block_id in _state_ids(other):
                    what = f"block {block_id} is written by {self._name(seq)}"
                    self._fail("shared", f"{what}, and {self._name(other)} has it too")
            if block_id not in reads:
                self._fresh.append(block_id)
            self._blocks.pop(block_id, None)
            known = seq.packed[: computed + num_tokens]
            self._states[block_id] = _StateShadow(piece, seq, computed + num_tokens, known)

    def _check_state(self, seq: KVSequence, piece: int, block_id: int) -> None:
        where = f"block {block_id} of the state of {self._name(seq)}"
        held = self._states.get(block_id)
        if held is None or block_id in self._blocks:
            self._fail("unwritten", f"{where} was never written as a state")
        by = self._name(held.writer)
        if (held.piece, held.num_tokens) != (piece, seq.num_computed_tokens):
            what = f"{where} is piece {held.piece} after {held.num_tokens} tokens, written by {by}"
            self._fail("foreign", f"{what}; wanted {piece} after {seq.num_computed_tokens}")
        both = min(len(held.packed), len(seq.packed))
        if held.packed[:both] != seq.packed[:both]:
            self._fail("foreign", f"{where} has seen other tokens; written by {by}")

    def copied(self, orders: Iterable[CopyOrder]) -> None:
        """Note that the blocks of a fork were copied, before either side goes on. O(tokens copied).

        Raises:
            SanitizerError: the source was never written, or a sequence has the destination.
        """
        for order in orders:
            self._note(f"copies {order.num_tokens} tokens from {order.src} to {order.dst}")
            source = self._blocks.get(order.src)
            if source is None:
                self._fail("unwritten", f"block {order.src} is copied, and was never written")
            for other in self._holders(order.dst, order.group):
                what = f"block {order.dst} is copied to"
                self._fail("foreign", f"{what}, and {self._name(other)} has it")
            tokens: list[int | None] = [None] * len(source.tokens)
            tokens[: order.num_tokens] = source.tokens[: order.num_tokens]
            self._blocks[order.dst] = _Shadow(source.group, source.index, None, tokens)

    def filled(self, seq: KVSequence, block_ids: Iterable[int], *, group: int = 0) -> None:
        """Note blocks that were filled from elsewhere: a transfer, the host. O(their tokens).

        Raises:
            SanitizerError: a block is not the sequence's.
        """
        table = seq.tables[group]
        ids, size, known = list(table.block_ids), table.block_size, seq.packed
        for block_id in block_ids:
            self._note(f"{self._name(seq)} is filled in block {block_id}")
            if block_id not in ids:
                self._wrong_entry(seq, None, block_id, group)
            index = ids.index(block_id)
            tokens: list[int | None] = list(known[index * size : (index + 1) * size])
            tokens += [None] * (size - len(tokens))
            self._blocks[block_id] = _Shadow(group, index, seq, tokens)

    def loaded(self, lease: Lease) -> None:
        """Note that the blocks of a load are filled. O(their tokens).

        Raises:
            SanitizerError: the load has ended, or a sequence has a block already.
        """
        load = lease.load
        if load is None:
            return
        seq = load.seq
        for group, ids in enumerate(load.block_ids):
            if group == len(seq.tables):
                self._load_state(seq, ids, load)
                continue
            size = seq.tables[group].block_size
            for index, block_id in enumerate(ids, load.first_blocks[group]):
                self._note(f"{self._name(seq)} is loaded into block {block_id}")
                if not lease.is_active:
                    self._fail("freed", f"block {block_id} is loaded, and its load has ended")
                for other in self._holders(block_id, group):
                    what = f"block {block_id} is loaded"
                    self._fail("foreign", f"{what}, and {self._name(other)} has it")
                tokens: list[int | None] = list(load.packed[index * size : (index + 1) * size])
                tokens += [None] * (size - len(tokens))
                self._blocks[block_id] = _Shadow(group, index, seq, tokens)

    def _load_state(self, seq: KVSequence, ids: Sequence[int], load: Load) -> None:
        for piece, block_id in enumerate(ids):
            self._note(f"{self._name(seq)} is loaded a state into block {block_id}")
            self._blocks.pop(block_id, None)
            self._states[block_id] = _StateShadow(piece, seq, load.num_tokens, load.packed)

    def take_fresh(self) -> list[int]:
        """Return the blocks that a sequence has begun to write since the last call, and forget."""
        fresh, self._fresh = self._fresh, []
        return fresh

    def fail_kernel(self, message: str) -> NoReturn:
        """Raise an error that was found in the memory itself."""
        self._fail("kernel", message)

    def name_of(self, seq: KVSequence) -> str:
        """Return the name that the list of calls in an error gives a sequence. O(1)."""
        return self._name(seq)

    def whose(self, block_id: int) -> str:
        """Return in words which sequence has a block, or else which one wrote it last.

        O(sequences * blocks of each).
        """
        for seq in self._names:
            if any(block_id in table.block_ids for table in seq.tables):
                return self._name(seq)
            if block_id in _state_ids(seq):
                return self._name(seq)
        shadow = self._blocks.get(block_id)
        if shadow is None:
            return "no sequence, never written"
        by = "a copy" if shadow.writer is None else self._name(shadow.writer)
        return f"no sequence, last written by {by}"

    def _check_block(
        self, seq: KVSequence, index: int, block_id: int, start: int, stop: int
    ) -> None:
        where = f"block {block_id} of {self._name(seq)}"
        if block_id == 0:
            self._fail("null", f"{self._name(seq)} reads block 0 at entry {index}")
        shadow = self._blocks.get(block_id)
        if shadow is None:
            self._fail("unwritten", f"{where} was never written")
        size, known = len(shadow.tokens), seq.packed
        for offset in range(start, stop):
            held, position = shadow.tokens[offset], index * size + offset
            if held is None:
                self._fail("unwritten", f"{where} is read at position {position}: never written")
            wanted = known[position] if position < len(known) else UNKNOWN
            if UNKNOWN not in {held, wanted} and held != wanted:
                what = f"{where} holds token {held} at position {position}, wanted {wanted}"
                by = "a copy" if shadow.writer is None else self._name(shadow.writer)
                self._fail("foreign", f"{what}; written by {by}")

    def _take_over(
        self, seq: KVSequence, block_id: int, group: int, index: int, size: int
    ) -> _Shadow:
        """Make a block with another writer the sequence's own, unless it has other holders."""
        for other in self._holders(block_id, group):
            if other is not seq:
                what = f"block {block_id} is written by {self._name(seq)}"
                self._fail("shared", f"{what}, and {self._name(other)} has it too")
        before = self._blocks.get(block_id)
        if before is not None and (before.writer, before.group, before.index) == (
            None,
            group,
            index,
        ):
            before.writer = seq  # the copy that was made for it
            return before
        shadow = _Shadow(group, index, seq, [None] * size)
        self._blocks[block_id] = shadow
        self._fresh.append(block_id)
        return shadow

    def _computed_already(self, seq: KVSequence, position: int, block_id: int, group: int) -> None:
        others = [other for other in self._holders(block_id, group) if other is not seq]
        what = f"{self._name(seq)} writes position {position}, which is computed already"
        if others:
            names = ", ".join(self._name(other) for other in others)
            self._fail("shared", f"{what}, into block {block_id}, which {names} has too")
        self._fail("double", f"{what}, into block {block_id}")

    def _wrong_slot(self, seq: KVSequence, position: int, slot: int, group: int) -> NoReturn:
        table = seq.tables[group]
        size = table.block_size
        block_id = slot // size
        ids, index = table.block_ids, position // size
        wanted = ids[index] if index < len(ids) else None
        where = f"{self._name(seq)} writes position {position} into slot {slot} of block {block_id}"
        if slot < 0 or block_id == 0:
            self._fail("null", f"{where}: no slot for KV")
        self._fail(self._standing(seq, block_id, group), f"{where}, wanted block {wanted}")

    def _wrong_entry(
        self, seq: KVSequence, index: int | None, block_id: int, group: int
    ) -> NoReturn:
        kind = self._standing(seq, block_id, group)
        kind = "table" if kind == "misplaced" else kind
        wanted = seq.tables[group].block_ids[index] if index is not None else "one of its own"
        where = f"entry {index} of the table of {self._name(seq)} is {block_id}"
        self._fail(kind, f"{where}, wanted {wanted}")

    def _standing(self, seq: KVSequence, block_id: int, group: int) -> str:
        """Classify a block that is not in its place: the sequence's own, another's, or free."""
        holders = self._holders(block_id, group)
        if seq in holders:
            return "misplaced"
        return "foreign" if holders else "freed"

    def _holders(self, block_id: int, group: int) -> list[KVSequence]:
        """Return the known sequences whose tables name a block. O(sequences * blocks of each)."""
        return [
            seq
            for seq in self._names
            for table in seq.tables[group : group + 1]
            if block_id in table.block_ids
        ]

    @staticmethod
    def _is_at(shadow: _Shadow, seq: KVSequence, group: int, index: int) -> bool:
        return shadow.writer is seq and shadow.index == index and shadow.group == group

    def _name(self, seq: KVSequence) -> str:
        if seq not in self._names:
            if self._num_named % 64 == 63:
                self._forget_closed()
            self._names[seq] = f"s{self._num_named}"
            self._num_named += 1
        return self._names[seq]

    def _forget_closed(self) -> None:
        """Forget sequences without a block: they are closed, or begin anew."""
        gone = {
            seq
            for seq in self._names
            if not any(len(t.block_ids) for t in seq.tables) and not _state_ids(seq)
        }
        self._names = {seq: name for seq, name in self._names.items() if seq not in gone}
        self._verified = {key: n for key, n in self._verified.items() if key[0] not in gone}

    def _note(self, call: str) -> None:
        self._calls.append(call)

    def _fail(self, kind: str, message: str) -> NoReturn:
        raise SanitizerError(kind, message, tuple(self._calls))


def _state_ids(seq: KVSequence) -> list[int]:
    """Return the blocks of all states of a sequence."""
    return [] if seq.state is None else [block.block_id for block in seq.state.blocks()]


def _span(numbers: Sequence[int]) -> str:
    """Return a few numbers as text, or their ends."""
    if len(numbers) <= 6:
        return str([*numbers])
    return f"[{numbers[0]}, {numbers[1]}, ... {numbers[-1]}]"
