"""Recurrent states in each verb: what a step does with them, and where a sequence can resume.

A state exists only where a pass ended, so it is published there or nowhere, and a sequence that is
cut goes back to the last state that still exists: one that it has kept, one in the prefix cache, or
the zeros before its first token. Each function finds and checks first; then the pool changes, and
then only existing fields are set.
"""

from __future__ import annotations

from collections.abc import Container
from typing import final

from kvcore.block import Block
from kvcore.content_tree import find_pieces
from kvcore.eviction.retention import retention_terms
from kvcore.identity.block_hash import block_contents
from kvcore.identity.multimodal import encode_items
from kvcore.pool import BlockPool
from kvcore.sequence import KVSequence
from kvcore.tables.groups import first_kept_block
from kvcore.tables.state_table import StateTable, is_writable, piece_keys


@final
class StateMove:
    """The changes of one sequence's states in a step: planned, then applied or dropped.

    Attributes:
        num_new: the number of blocks to take for the state that the next step writes.
        is_optional: True if the step can do without them; then no state is kept.
        new: those blocks, once they are taken.
        published: the blocks of the states to publish.
        released: the states that the sequence does not hold afterwards.
        needed: of these the blocks that a known end needs, if they can be found.
        spare: those that no known end needs.
    """

    __slots__ = (
        "_due",
        "_kept",
        "_kept_at",
        "_left",
        "_only_branches",
        "_own_end",
        "_read",
        "_seq",
        "_table",
        "_trailing_at",
        "_write",
        "is_optional",
        "needed",
        "new",
        "num_new",
        "published",
        "released",
        "spare",
    )  # fmt: skip

    def __init__(
        self,
        seq: KVSequence,
        table: StateTable,
        known: int,
        done: int,
        total: int,
        *,
        only_branches: bool,
    ) -> None:
        """Plan a step after which `known` tokens are known and `done` are computed.

        There is to be room for `total` tokens then. `only_branches`: expected ends do not count.
        Changes nothing. O(log boundaries).
        """
        self._seq = seq
        self._only_branches = only_branches
        self._table = table
        self._read, self._write = table.read, table.write
        self._kept, self._kept_at = table.kept, table.kept_at
        self._due: list[tuple[list[Block], int]] = []
        self.num_new = 0
        self.is_optional = False
        self.new: list[Block] = []
        self.published: list[Block] = []
        is_known = self._kept_at <= known and seq.namespace_key is not None
        if self._kept and is_known and table.is_wanted(self._kept_at):
            self._publish(self._kept, self._kept_at)  # its last token was unknown until now
        if done > seq.num_computed_tokens:
            self._advance(known, done)
        if total > done and not self._write:
            self._reserve()
        self._own_end = min(known, done) // table.block_size * table.block_size
        self._trailing_at = table.trailing_at
        self._left = 0
        if 0 < table.trailing_at < self._own_end:
            self._left, self._trailing_at = table.trailing_at, 0
        self.released: list[list[Block]] = []
        self.needed: list[Block] = []
        self.spare: list[Block] = []
        if table.read is not self._read:
            self._release(table.read, seq.num_computed_tokens)
        if table.kept is not table.read and table.kept is not self._kept:
            self._release(table.kept, table.kept_at)

    def _advance(self, known: int, done: int) -> None:
        """Read what the step has written, and find where the next one may write."""
        table = self._table
        size = table.block_size
        self._read, self._write = self._write, []
        is_end = done % size == 0 and self._seq.namespace_key is not None
        if is_end and known >= done and table.is_wanted(done):
            self._publish(self._read, done)
        elif is_end and (done >= table.prompt or table.is_wanted(done)):
            if is_writable(self._kept):
                self._write = self._kept
            self._kept, self._kept_at = self._read, done
        elif is_writable(self._read):
            self._write = self._read

    def _publish(self, pieces: list[Block], num_tokens: int) -> None:
        self._due.append((pieces, num_tokens))
        self.published += pieces
        if self._kept is pieces or num_tokens > self._kept_at:
            self._kept, self._kept_at = [], 0
        if self._write is pieces:
            self._write = []

    def _reserve(self) -> None:
        """Find where the next step writes: over the state that it reads, or to new blocks."""
        is_due = any(pieces is self._read for pieces, _ in self._due)
        if is_writable(self._read) and not is_due:
            if self._read is not self._kept:
                self._write = self._read
                return
            self.is_optional = True
        self.num_new = self._table.group.num_blocks

    def _release(self, pieces: list[Block], num_tokens: int) -> None:
        """Release a state that the sequence had, unless it has another role from now on."""
        is_needed = pieces is self._read or pieces is self._write or pieces is self._kept
        if pieces and not is_needed:
            self.released.append(pieces)
            if num_tokens == self._own_end:
                self._trailing_at = num_tokens
            else:
                self._sort_out(pieces, num_tokens)

    def _sort_out(self, pieces: list[Block], num_tokens: int) -> None:
        """Find out whether a known end needs a state that is released. O(ends)."""
        ends = self._seq.ends
        if ends is not None and num_tokens in ends.lengths(only_branches=self._only_branches):
            self.needed += pieces
        elif ends is not None:
            self.spare += pieces

    def do_without(self) -> None:
        """Keep no state, where blocks for the next one are optional and not there."""
        if self.is_optional:
            self._write, self._kept, self._kept_at = self._read, [], 0
            self.num_new = 0
            self.is_optional = False

    def publish(self, pool: BlockPool, taken: Container[Block]) -> None:
        """Publish the states that are due and not cached yet. All or nothing. O(tokens).

        `taken`: the blocks that the step takes; what they have cached is evicted after this.
        """
        for pieces, num_tokens in self._due:
            publish_state(pool, self._seq, self._table, pieces, num_tokens, taken)
        if self._left:
            self._sort_out(state_after(pool, self._seq, self._left), self._left)

    def apply(self, pool: BlockPool) -> None:
        """Set the fields of the table. Cannot fail."""
        table = self._table
        if self.new:
            self._write = self.new
            pool.assign(self.new, table.number)
        table.read, table.write = self._read, self._write
        table.kept, table.kept_at = self._kept, self._kept_at
        table.trailing_at = self._trailing_at


def only_branches_of_states(pool: BlockPool, seq: KVSequence) -> bool:
    """Return whether expected ends do not count for the states of a sequence. O(1).

    They do with `recompute`: then no hit ends where the sequence ends, but at the end of its prompt
    or before that.
    """
    ends = seq.ends
    return pool.idle_blocks.only_branches_of_states and (ends is None or ends.recompute == 0)


def publish_state(
    pool: BlockPool,
    seq: KVSequence,
    table: StateTable,
    pieces: list[Block],
    num_tokens: int,
    taken: Container[Block] = (),
) -> None:
    """Let the state after `num_tokens` tokens be found, unless there is one already. O(tokens).

    The tokens are known, and a multiple of the block size. One in blocks that are `taken` for
    something else is there no more. All or nothing.
    """
    size = table.block_size
    key = seq.namespace_key or b""
    contents = block_contents(seq.packed, seq.items, 0, num_tokens // size, size)
    node = pool.trees[table.number].find(key, contents)
    if node is not None and node.last_copy is not None and node.last_copy not in taken:
        return
    contents += piece_keys(len(pieces))
    pool.attach(pieces, key, None, contents, table.number)
    if seq.retention:
        terms = retention_terms(seq.retention, num_tokens - size, seq.opened_at, pool.step)
        for block in pieces if terms else ():
            pool.keep(block, terms)


def publish_kept(pool: BlockPool, seq: KVSequence) -> list[Block]:
    """Publish the state that a sequence has kept, before it ends; return its blocks. O(tokens)."""
    table = seq.state
    if table is None or not table.kept or seq.namespace_key is None:
        return []
    if table.kept_at > len(seq.packed):
        return []
    publish_state(pool, seq, table, table.kept, table.kept_at)
    return table.kept


def state_after(pool: BlockPool, seq: KVSequence, num_tokens: int) -> list[Block]:
    """Return the blocks of the state after some settled tokens, none if it is not found. O(tokens).

    They are those of another sequence, if that has published the state before.
    """
    table = seq.state
    if table is None or seq.namespace_key is None:
        return []
    size = table.block_size
    contents = block_contents(seq.packed, seq.items, 0, num_tokens // size, size)
    node = pool.trees[table.number].find(seq.namespace_key, contents)
    first = None if node is None else node.last_copy
    return [] if first is None else find_pieces(first, table.group.num_blocks)


def drop_kept(pool: BlockPool, seq: KVSequence) -> int:
    """Release the state that a sequence has kept; return the blocks that this frees. O(pieces)."""
    table = seq.state
    if table is None or not table.kept:
        return 0
    free = pool.num_free_blocks
    if table.kept is not table.read:
        pool.give_back(table.kept)
    table.kept, table.kept_at = [], 0
    seq.num_reserved_tokens = seq.next_boundary = seq.fast_decode_limit = 0
    return pool.num_free_blocks - free


def states_until(seq: KVSequence, num_tokens: int | None) -> list[Block]:
    """Return the blocks of the states of a sequence, in the order of release. O(those).

    All of them, or none where only its first `num_tokens` tokens count and it has computed more.
    """
    table = seq.state
    if table is None or (num_tokens is not None and num_tokens < seq.num_computed_tokens):
        return []
    return table.blocks()


def find_resume(
    pool: BlockPool, seq: KVSequence, limit: int, invalid: Container[Block] = ()
) -> tuple[int, list[Block]]:
    """Return where a sequence with states can resume, and the state there. O(limit).

    Args:
        pool: the pool.
        seq: the sequence; it has computed at least `limit` tokens.
        limit: the most tokens that can stay computed.
        invalid: the blocks of states that must not be used.

    Returns:
        A number of tokens, and the state after them: one that the sequence holds, or one of the
        prefix cache that it does not hold yet.
    """
    table = seq.state
    if table is None or not limit:
        return limit, []
    if limit == seq.num_computed_tokens and not _meets(table.read, invalid):
        return limit, table.read
    number, found = 0, list[Block]()
    if table.kept and table.kept_at <= limit and not _meets(table.kept, invalid):
        number, found = table.kept_at, table.kept
    cached, pieces = _find_state(pool, seq, table, min(limit, len(seq.packed)), invalid)
    if cached > number:
        number, found = cached, pieces
    for its in seq.tables:
        if its.num_null > first_kept_block(its.group, its.block_size, number):
            number = 0
    return (number, found) if number else (0, [])


def _find_state(
    pool: BlockPool, seq: KVSequence, table: StateTable, limit: int, invalid: Container[Block]
) -> tuple[int, list[Block]]:
    """Return the last state in the prefix cache of at most `limit` tokens of a sequence."""
    size = table.block_size
    if seq.namespace_key is None:
        return 0, []
    count = limit // size
    encoded = encode_items(seq.items, 0, count, size) if seq.items else None
    content = seq.packed[: count * size].tobytes()
    path = pool.path(seq.namespace_key, content, count, table.number, encoded)
    for place in range(len(path) - 1, -1, -1):
        block = path[place]
        if block is not None:
            pieces = find_pieces(block, table.group.num_blocks)
            if not _meets(pieces, invalid):
                return (place + 1) * size, pieces
    return 0, []


def _meets(pieces: list[Block], invalid: Container[Block]) -> bool:
    """Return whether a state has one of these blocks. O(pieces)."""
    return any(block in invalid for block in pieces)


def is_held(table: StateTable, pieces: list[Block]) -> bool:
    """Return whether a table holds this state. O(1)."""
    return bool(pieces) and pieces[0] in [one[0] for one in table.lists()]


def without(table: StateTable, pieces: list[Block]) -> list[Block]:
    """Return the blocks of a table but those of one state, in the order of release. O(blocks)."""
    return [b for one in table.lists() if not pieces or one[0] is not pieces[0] for b in one]


def resume(table: StateTable, pieces: list[Block]) -> None:
    """Read this state next, and hold no other. Cannot fail."""
    table.forget()
    table.read = pieces
