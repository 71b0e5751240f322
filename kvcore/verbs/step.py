"""Forward steps of sequences: reserve blocks, commit tokens, publish full blocks, slide windows.

Each function handles one sequence, or all sequences of a step together, with all layer groups: all
or nothing. Checks and allocations come first, then the pool changes, and then only existing fields
are set. Publication and the release of blocks outside a window depend only on the settled tokens:
those that are both computed and known.

In the steady state of an engine, decoding, 15 of 16 tokens need no new block: such a token costs
one comparison and two additions here, for any layer groups. Decoding, chunked prefill and draft
tokens share one step; sequences that need more than counting are handled together. The manager has
already checked that the sequences are open, distinct and share one pool.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any, final

from kvcore.block import Block, BlockId
from kvcore.eviction.retention import retention_terms
from kvcore.identity.block_hash import block_contents
from kvcore.identity.tokens import slices
from kvcore.pool import BlockPool
from kvcore.reports import Growth
from kvcore.sequence import KVSequence, check_computed, check_length
from kvcore.tables.block_table import BlockTable
from kvcore.tables.ends import AT_ONCE, Ends, sort_out
from kvcore.tables.groups import serves
from kvcore.verbs.states import StateMove, only_branches_of_states


def grow(
    pool: BlockPool, seq: KVSequence, num_tokens: int, longest: int | None
) -> tuple[tuple[BlockId, ...], ...]:
    """Reserve blocks for the first `num_tokens` tokens, or none. O(groups + new blocks).

    Returns:
        For each group the appended block ids.

    Raises:
        OutOfBlocksError: too few blocks are free.
    """
    if len(seq.tables) == 1 and seq.state is None:
        appended_ids = _grow_table(pool, seq.tables[0], num_tokens)
        if seq.num_reserved_tokens:  # it was known
            seq.find_limits(longest)
        return (appended_ids,)
    change = _Change(pool, [seq], [0])
    change.totals.append(num_tokens)
    change.add_states(0, len(seq.packed), seq.num_computed_tokens)
    change.take(sum([table.num_missing(num_tokens) for table in seq.tables]))
    appended: list[tuple[BlockId, ...]] = [()] * len(pool.trees)
    try:
        for growth in change.grow():
            appended[growth.group] = growth.block_ids
        answer = tuple(appended)
        pool.hand_out(change.new)
    except BaseException:
        change.undo()
        raise
    change.settle()
    seq.find_limits(longest)
    return answer


def _grow_table(pool: BlockPool, table: BlockTable, num_tokens: int) -> tuple[BlockId, ...]:
    """Reserve blocks of one table for `num_tokens` tokens, or none; return the new ids."""
    length = len(table.blocks)
    count = -(-num_tokens // table.block_size) - length
    if count <= 0:
        return ()
    new = pool.next_blocks(count)
    try:
        appended = table.grow(new)
        pool.hand_out(new)
    except BaseException:
        table.cut(length)
        raise
    return appended


def commit(pool: BlockPool, seq: KVSequence, num_tokens: int, longest: int | None) -> None:
    """Commit tokens: publish settled blocks and release blocks that left every window.

    O(blocks filled and released). Raises like `check_computed`.
    """
    table = seq.tables[0]
    computed, settled = seq.num_computed_tokens + num_tokens, len(seq.packed)
    is_many = len(seq.tables) > 1 or seq.state is not None
    if computed > settled or computed > len(table.blocks) * table.block_size or is_many:
        check_computed(seq, computed, settled + seq.num_unknown_tokens)
    key = seq.namespace_key
    is_due = False
    if is_many or table.forgets or seq.retention:
        _settle_one(pool, seq, computed)
    else:  # nothing can fail after the one run that is published
        full = min(settled, computed) // table.block_size
        is_due = full > table.num_published and key is not None
        if is_due and key is not None:
            contents = _contents(seq, table.num_published, full, table.block_size)
            blocks = table.blocks[table.num_published : full]
            _publish(pool, seq, key, 0, blocks, contents)
            table.num_published = full
    seq.num_computed_tokens = computed
    seq.fast_decode_limit = 0
    pool.num_computed_tokens += num_tokens
    if not is_due or seq.next_boundary:  # a prompt that is computed at once needs no limits
        seq.find_limits(longest)


def _settle_one(pool: BlockPool, seq: KVSequence, computed: int) -> None:
    """Publish and release what is due once the first `computed` tokens are computed, or nothing."""
    change = _Change(pool, [seq], [0])
    change.dones.append(computed)
    change.totals.append(computed)
    change.add_states(0, len(seq.packed), computed)
    try:
        change.publish()
        released = change.released()
        if released:
            pool.give_back(released)
    except BaseException:
        change.undo()
        raise
    change.settle()


def resolve(pool: BlockPool, seq: KVSequence, tokens: list[int], longest: int | None) -> None:
    """Set the ids of the first expected tokens. O(tokens + blocks filled and released)."""
    _advance(pool, [seq], [0], Moves(tokens, [len(tokens)], [0], [0], [0]), longest)


@final
class Moves:
    """The changes of a step to each of its sequences, in the order in which they happen.

    Attributes:
        tokens: the token ids that became known, one sequence after another.
        known: for each sequence the number of them: they resolve its expected tokens, and the rest
            is appended.
        computed: for each the number of next tokens that were computed; None: all that it had.
        expected: for each the number of expected tokens to append.
        reserved: for each the number of tokens after the computed ones to reserve blocks for; None:
            all that it then has.
    """

    __slots__ = ("computed", "expected", "known", "reserved", "tokens")

    def __init__(
        self,
        tokens: list[int],
        known: list[int],
        computed: list[int] | None,
        expected: list[int],
        reserved: list[int] | None,
    ) -> None:
        self.tokens: list[Any] = tokens  # compiled code would take each `int` out of its object
        self.known = known
        self.computed = computed
        self.expected = expected
        self.reserved = reserved

    def is_room_alone(self) -> bool:
        """Return whether nothing is known, computed or expected. O(sequences), in C."""
        return not (
            self.tokens or self.computed is None or any(self.computed) or any(self.expected)
        )

    def is_half_decode(self) -> bool:
        """Return whether a step without room is one of two that give each a token.

        By the first a token is computed and one is expected, by the second that one is known.
        O(sequences), in C.
        """
        computed, count = self.computed, len(self.known)
        if computed is None or not count:
            return False
        first = computed[0]
        return (
            first < 2
            and self.known[0] == 1 - first
            and self.known.count(1 - first) == computed.count(first) == count
            and self.expected.count(first) == count
        )


def step(
    pool: BlockPool, seqs: list[KVSequence], moves: Moves, longest: int | None
) -> tuple[Growth, ...]:
    """Move every sequence of a step, or none of them.

    A decoding sequence has one token that is not computed, before the step and after it: one token
    became known and one is computed. Inside its block and its room it is only counted.
    O(sequences + blocks filled, taken and released).

    Args:
        pool: the pool of all.
        seqs: each once.
        moves: the changes of the step to each of them.
        longest: the most tokens that a sequence may have or reserve.
    """
    if moves.reserved is not None and moves.is_room_alone():
        rooms = zip(seqs, moves.reserved, strict=True)
        ends = [seq.num_computed_tokens + room for seq, room in rooms]
        due = [place for place, seq in enumerate(seqs) if ends[place] > seq.num_reserved_tokens]
        return _advance(pool, seqs, due, moves, longest) if due else ()
    if moves.reserved is not None and not any(moves.reserved) and moves.is_half_decode():
        return _half_decode(pool, seqs, moves, longest)
    ahead = int(1 in moves.expected)  # the expected tokens of a sequence that decodes
    others = _others(seqs, moves, ahead)
    limits = [seqs[place].fast_decode_limit for place in others]
    due = []
    index = 0
    try:
        tokens = _one_each(seqs, moves, others) if others else moves.tokens
        for index, seq in enumerate(seqs):
            done = seq.num_computed_tokens
            if done < seq.fast_decode_limit and seq.num_unknown_tokens == ahead:
                seq.packed.append(tokens[index])
                seq.num_computed_tokens = done + 1
            else:
                due.append(index)
        index = len(seqs)
        growths = _advance(pool, seqs, due, moves, longest) if due else ()
    except BaseException:
        for place in set(range(index)).difference(due):
            seqs[place].packed.pop()
            seqs[place].num_computed_tokens -= 1
        for number, place in enumerate(others):
            seqs[place].fast_decode_limit = limits[number]
        raise
    pool.num_computed_tokens += index - len(due)
    return growths


def _half_decode(
    pool: BlockPool, seqs: list[KVSequence], moves: Moves, longest: int | None
) -> tuple[Growth, ...]:
    """Do what `step` does for a step that `is_half_decode`. O(sequences + blocks filled).

    Either half leaves as many tokens to compute as there were, so the limits stay valid.
    """
    tokens = moves.tokens
    due: list[int] = []
    index = 0
    try:
        if tokens:
            for index, seq in enumerate(seqs):
                limit = seq.fast_decode_limit
                if 0 < limit >= seq.num_computed_tokens and seq.num_unknown_tokens == 1:
                    seq.packed.append(tokens[index])
                    seq.num_unknown_tokens = 0
                else:
                    due.append(index)
        else:
            for index, seq in enumerate(seqs):
                done = seq.num_computed_tokens
                if done < seq.fast_decode_limit and seq.num_unknown_tokens == 0:
                    seq.num_computed_tokens = done + 1
                    seq.num_unknown_tokens = 1
                else:
                    due.append(index)
        index = len(seqs)
        growths = _advance(pool, seqs, due, moves, longest) if due else ()
    except BaseException:
        counted = [seqs[place] for place in set(range(index)).difference(due)]
        _undo_half(counted, num_known=int(len(tokens) > 0))
        raise
    if not tokens:
        pool.num_computed_tokens += index - len(due)
    return growths


def _undo_half(seqs: list[KVSequence], num_known: int) -> None:
    """Undo the counting of `_half_decode`. Cannot fail."""
    for seq in seqs:
        del seq.packed[len(seq.packed) - num_known :]
        seq.num_computed_tokens -= 1 - num_known
        seq.num_unknown_tokens = num_known


def _others(seqs: list[KVSequence], moves: Moves, ahead: int) -> list[int]:
    """Return the places of the sequences that do not decode. O(sequences), mostly in C.

    A sequence decodes if one token became known and one is computed, and it expects `ahead` tokens.
    """
    count = len(seqs)
    others: set[int] = set()
    columns = [(moves.known, 1), (moves.expected, ahead)]
    if moves.computed is not None:
        columns.append((moves.computed, 1))
    room = 1
    if moves.reserved is not None:
        room = 1 if 1 in moves.reserved else max(moves.reserved, default=0)
        columns.append((moves.reserved, room))
    for numbers, plain in columns:
        if numbers.count(plain) < count:
            others.update([place for place, number in enumerate(numbers) if number != plain])
    if room > 1:
        for place, seq in enumerate(seqs):
            if seq.num_computed_tokens + room > seq.fast_decode_limit:
                others.add(place)
    return sorted(others)


def _one_each(seqs: list[KVSequence], moves: Moves, others: list[int]) -> list[Any]:
    """Return a token for each sequence that decodes, at its place; no other will be counted."""
    tokens = moves.tokens[:]
    for place in others:
        seqs[place].fast_decode_limit = 0
        tokens[place : place + moves.known[place]] = [0]
    return tokens


def _advance(
    pool: BlockPool, seqs: list[KVSequence], due: list[int], moves: Moves, longest: int | None
) -> tuple[Growth, ...]:
    """Move the sequences of a step at the places `due`, in order; all or nothing.

    O(sequences in `due` + blocks).

    Returns:
        The appended blocks.

    Raises:
        OutOfBlocksError: too few blocks are free for all tables.
    """
    change = _Change(pool, [seqs[place] for place in due], due)
    num_new = change.plan(moves, longest)
    if change.seqs[0].state is not None:
        change.plan_states(moves.known)
        change.take(num_new)
    elif num_new:
        change.new = pool.next_blocks(num_new)
    try:
        change.join(moves)
        growths = change.grow()
        change.publish()
        if change.passed or change.states:
            pool.exchange(change.new, change.released())
        elif change.new:
            pool.hand_out(change.new)
    except BaseException:
        change.undo()
        raise
    change.complete(moves, longest)
    return growths


@final
class _Change:
    """A step of some sequences: planned, made, and then complete or undone.

    Attributes:
        pool: the pool of all.
        seqs: the sequences.
        places: their places in the step.
        lengths: for each the number of tokens that were known before.
        dones: for each the number of tokens that are computed then.
        totals: for each the number of tokens that have blocks then.
        new: the blocks to append, in the order of the sequences.
        passed: tables, and the number of entries that leave their windows.
        states: for each sequence what happens to its recurrent states; empty without such a group.
    """

    __slots__ = (
        "_growths",
        "_last_event",
        "_published",
        "_settled",
        "_sorted",
        "_trailing",
        "dones",
        "lengths",
        "new",
        "passed",
        "places",
        "pool",
        "seqs",
        "states",
        "totals",
    )

    def __init__(self, pool: BlockPool, seqs: list[KVSequence], places: list[int]) -> None:
        self.pool = pool
        self.seqs = seqs
        self.places = places
        self.lengths: list[int] = []
        self.dones: list[int] = []
        self.totals: list[int] = []
        self.new: list[Block] = []
        self.passed: list[tuple[BlockTable, int]] = []
        self.states: list[StateMove] = []
        self._growths: list[Growth] = []
        self._published: list[Block] = []
        self._settled: list[tuple[BlockTable, int]] = []
        self._sorted: list[tuple[list[Block], list[Block], int]] = []
        self._trailing: list[tuple[BlockTable, tuple[Block, ...]]] = []
        self._last_event = pool.last_event

    def plan(self, moves: Moves, longest: int | None) -> int:
        """Check the moves, and count the blocks that tables need. Changes nothing. O(sequences)."""
        known, computed = moves.known, moves.computed
        expected, reserved = moves.expected, moves.reserved
        lengths, dones, totals = self.lengths, self.dones, self.totals
        num_new = 0
        for index, seq in enumerate(self.seqs):  # compiled, a strict `zip` makes a tuple each
            place = self.places[index]
            length = len(seq.packed)
            before = length + seq.num_unknown_tokens
            here = length + known[place]
            if before > here:  # noqa: PLR1730  # a call costs more, for each block
                here = before
            done = before if computed is None else seq.num_computed_tokens + computed[place]
            total = most = here + expected[place]
            if reserved is not None:
                total = done + reserved[place]
            if longest is not None:
                check_length(max(most, total), longest)
            if done > here or done > seq.num_reserved_tokens:
                check_computed(seq, done, here)
            if total > seq.num_reserved_tokens:
                for table in seq.tables:
                    count = -(-total // table.block_size) - len(table.blocks)
                    if count > 0:
                        num_new += count
            lengths.append(length)
            dones.append(done)
            totals.append(total)
        return num_new

    def plan_states(self, known: list[int]) -> None:
        """Plan what happens to the states of all sequences. Changes nothing. O(sequences)."""
        for index, place in enumerate(self.places):
            self.add_states(index, self.lengths[index] + known[place], self.dones[index])

    def add_states(self, index: int, known: int, done: int) -> None:
        """Plan what happens to the states of a sequence, if it has any. Changes nothing."""
        seq = self.seqs[index]
        if seq.state is not None:
            total = self.totals[index]
            only_branches = only_branches_of_states(self.pool, seq)
            move = StateMove(seq, seq.state, known, done, total, only_branches=only_branches)
            self.states.append(move)

    def take(self, num_new: int) -> None:
        """Find `num_new` blocks for tables, and those for states. Changes nothing. O(blocks).

        Raises:
            OutOfBlocksError: too few blocks are free, even if no state is kept.
        """
        optional = 0
        for move in self.states:
            num_new += move.num_new
            if move.is_optional:
                optional += move.num_new
        if optional and num_new > self.pool.num_free_blocks:
            num_new -= optional
            for move in self.states:
                move.do_without()
        self.new = self.pool.next_blocks(num_new)

    def join(self, moves: Moves) -> None:
        """Append the tokens that became known. `undo` undoes it. O(sequences + tokens)."""
        known, tokens = moves.known, moves.tokens
        are_plain = len(tokens) == len(known) == known.count(1)
        starts = known if are_plain else list(accumulate(known, initial=0))
        for index, seq in enumerate(self.seqs):
            place = self.places[index]
            if are_plain:
                seq.packed.append(tokens[place])
            elif known[place]:
                start = starts[place]
                seq.packed.fromlist(tokens[start : start + known[place]])

    def grow(self) -> tuple[Growth, ...]:
        """Append the new blocks to the tables. `undo` undoes it. O(sequences + blocks)."""
        if not self.new:
            return ()
        new, totals, growths = self.new, self.totals, self._growths
        start = 0
        for index, seq in enumerate(self.seqs):
            total = totals[index]
            if self.states and self.states[index].num_new:
                move = self.states[index]
                move.new = new[start : start + move.num_new]
                start += move.num_new
                ids = tuple([block.block_id for block in move.new])
                growths.append(Growth(self.places[index], len(seq.tables), ids))
            if total <= seq.num_reserved_tokens:
                continue
            for group, table in enumerate(seq.tables):
                count = -(-total // table.block_size) - len(table.blocks)
                if count > 0:
                    growth = Growth(self.places[index], group, ())
                    growths.append(growth)
                    growth.block_ids = table.grow(new[start : start + count])
                    start += count
        return tuple(growths)

    def publish(self) -> None:
        """Publish settled blocks, and find those outside the windows. `undo` undoes it."""
        dones, published = self.dones, self._published
        for index, seq in enumerate(self.seqs):
            settled = len(seq.packed)
            if dones[index] < settled:  # noqa: PLR1730
                settled = dones[index]
            if settled < seq.next_boundary:
                continue
            key = seq.namespace_key
            contents: list[bytes] = []
            first = size = -1  # of the contents
            for group, table in enumerate(seq.tables):
                full = settled // table.block_size
                if full > table.num_published and key is not None:
                    if first != table.num_published or size != table.block_size:
                        first, size = table.num_published, table.block_size
                        contents = _contents(seq, first, full, size)
                    blocks = table.blocks[first:full]
                    published += blocks
                    self._settled.append((table, full))
                    _publish(self.pool, seq, key, group, blocks, contents)
                if table.forgets:
                    self._pass(table, seq.ends, settled)
        if self.states:
            self._publish_states()

    def _publish_states(self) -> None:
        """Publish the states that are due, and sort those that are left. `undo` undoes it."""
        published = self._published
        for index, move in enumerate(self.states):
            published += move.published
            move.publish(self.pool, self.new)
            ends = self.seqs[index].ends
            if ends is not None and (move.needed or move.spare):
                self._sorted.append((move.needed, move.spare, ends.num_known))

    def _pass(self, table: BlockTable, ends: Ends | None, settled: int) -> None:
        """Find the blocks that leave a window, and what needs them. Changes nothing. O(those)."""
        kept = table.first_kept(settled)
        if kept <= table.num_null:
            return
        self.passed.append((table, kept))
        if ends is None:
            return
        trailing = table.trailing + tuple(table.before(kept))
        if len(trailing) >= AT_ONCE:
            only_branches = self.pool.idle_blocks.only_branches
            needed, spare, trailing = sort_out(
                table, ends, settled, kept, only_branches=only_branches
            )
            self._sorted.append((needed, spare, ends.num_known))
        self._trailing.append((table, trailing))

    def released(self) -> list[Block]:
        """Return the blocks that tables release, in order. O(blocks)."""
        if len(self.passed) == 1 and not self.states:
            table, kept = self.passed[0]
            return table.before(kept)
        passed = [block for table, kept in self.passed for block in table.before(kept)]
        return passed + [b for move in self.states for pieces in move.released for b in pieces]

    def undo(self) -> None:
        """Leave everything as it was. Cannot fail."""
        self.pool.unpublish(self._published, self._last_event)
        places = dict(zip(self.places, self.seqs, strict=True))
        for growth in self._growths:
            tables = places[growth.index].tables
            if growth.group < len(tables):
                table = tables[growth.group]
                table.cut(len(table.blocks) - len(growth.block_ids))
        for index, length in enumerate(self.lengths):
            packed = self.seqs[index].packed
            if len(packed) > length:
                del packed[length:]

    def settle(self) -> None:
        """Let blocks and tables know what has become of them. Cannot fail."""
        if self.pool.is_uneven:
            self._assign()
        for table, full in self._settled:
            table.num_published = full
        for table, kept in self.passed:
            table.forget(self.pool.null, kept)
        for table, trailing in self._trailing:
            table.trailing = trailing
        for move in self.states:
            move.apply(self.pool)
        for needed, spare, num_known in self._sorted:
            self.pool.idle_blocks.sort_out(needed, spare, num_known)

    def complete(self, moves: Moves, longest: int | None) -> None:
        """Set everything of the sequences, after the pool has changed. Cannot fail."""
        self.settle()
        known, expected, totals = moves.known, moves.expected, self.totals
        newly = 0
        for index, seq in enumerate(self.seqs):
            place, done, length = self.places[index], self.dones[index], len(seq.packed)
            unknown = seq.num_unknown_tokens
            if unknown or expected[place]:
                unknown = max(0, unknown - known[place]) + expected[place]
                seq.num_unknown_tokens = unknown
            newly += done - seq.num_computed_tokens
            seq.num_computed_tokens = done
            is_due = totals[index] > seq.num_reserved_tokens or done >= seq.next_boundary <= length
            if is_due or self.states:
                seq.find_limits(longest)
            limit = seq.num_reserved_tokens
            if seq.next_boundary < limit:  # noqa: PLR1730
                limit = seq.next_boundary
            seq.fast_decode_limit = limit - 1 if length + unknown - done == 1 else 0
        self.pool.num_computed_tokens += newly

    def _assign(self) -> None:
        """Assign new blocks to the layer groups after the first one. Cannot fail."""
        places = dict(zip(self.places, self.seqs, strict=True))
        for growth in self._growths:
            if 0 < growth.group < len(places[growth.index].tables):
                blocks = places[growth.index].tables[growth.group].blocks
                self.pool.assign(blocks[len(blocks) - len(growth.block_ids) :], growth.group)


def _contents(seq: KVSequence, first: int, stop: int, size: int) -> list[bytes]:
    """Return the contents of the blocks `first` to `stop - 1` of a sequence. O(tokens)."""
    if seq.items:
        return block_contents(seq.packed, seq.items, first, stop, size)
    return slices(seq.packed, first * size, stop * size, size)


def _publish(
    pool: BlockPool,
    seq: KVSequence,
    key: bytes,
    number: int,
    blocks: list[Block],
    contents: list[bytes],
) -> None:
    """Publish the next blocks of a table that are not published. O(blocks)."""
    table = seq.tables[number]
    first, size = table.num_published, table.block_size
    above = table.blocks[first - 1].node if first else None
    passing = b""
    if table.forgets and pool.is_uneven:
        hits = pool.common_size
        places = range(first, first + len(blocks))
        passing = bytes([not serves(table.group, place, hits) for place in places])
    pool.attach(blocks, key, above, contents, number, passing)
    if seq.retention:
        for index, block in enumerate(blocks, first):
            keep(pool, seq, block, index * size)


def keep(pool: BlockPool, seq: KVSequence, block: Block, start: int) -> None:
    """Apply the retention of a sequence to a published block at token `start`. O(terms)."""
    terms = retention_terms(seq.retention, start, seq.opened_at, pool.step)
    if terms:
        pool.keep(block, terms)
