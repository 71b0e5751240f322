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

from array import array
from collections.abc import Sequence
from itertools import islice

from kvcore.block import Block, BlockId
from kvcore.eviction.retention import retention_terms
from kvcore.identity.block_hash import block_contents
from kvcore.identity.tokens import slices
from kvcore.pool import BlockPool
from kvcore.reports import Growth
from kvcore.sequence import (
    KVSequence,
    check_all_known,
    check_expected,
    check_length,
    committable,
)
from kvcore.tables.block_table import BlockTable
from kvcore.tables.groups import serves


def grow(pool: BlockPool, seq: KVSequence, num_tokens: int) -> tuple[tuple[BlockId, ...], ...]:
    """Reserve blocks for the first `num_tokens` tokens, or none. O(groups + new blocks).

    Returns:
        For each group the appended block ids.

    Raises:
        OutOfBlocksError: too few blocks are free.
    """
    if len(seq.tables) == 1:
        return (_grow_table(pool, seq.tables[0], num_tokens),)
    return _grow_tables(pool, seq, num_tokens)


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


def _grow_tables(
    pool: BlockPool, seq: KVSequence, num_tokens: int
) -> tuple[tuple[BlockId, ...], ...]:
    """Do what `_grow_table` does for all groups of a sequence together."""
    lengths = [len(table.blocks) for table in seq.tables]
    missing = [table.num_missing(num_tokens) for table in seq.tables]
    new = pool.next_blocks(sum(missing))
    appended: list[tuple[BlockId, ...]] = []
    assigned: list[tuple[list[Block], int]] = []
    start = 0
    try:
        for group, table in enumerate(seq.tables):
            own = new[start : start + missing[group]]
            appended.append(table.grow(own))
            if group:
                assigned.append((own, group))
            start += missing[group]
        answer = tuple(appended)
        pool.hand_out(new)
    except BaseException:
        for table, length in zip(seq.tables, lengths, strict=True):
            table.cut(length)
        raise
    _assign(pool, assigned)
    return answer


def _assign(pool: BlockPool, assigned: Sequence[tuple[list[Block], int]]) -> None:
    """Assign new blocks to the layer groups after the first one. Cannot fail."""
    if pool.is_uneven:
        for blocks, group in assigned:
            pool.assign(blocks, group)


def commit(pool: BlockPool, seq: KVSequence, num_tokens: int) -> bool:
    """Commit tokens: publish settled blocks and release blocks that left every window.

    O(blocks filled and released). Raises like `committable`.

    Returns:
        Whether any block was published or released.
    """
    computed, settled = seq.num_computed_tokens + num_tokens, len(seq.packed)
    table = seq.tables[0]
    if computed > settled or computed > len(table.blocks) * table.block_size or len(seq.tables) > 1:
        committable(seq, num_tokens)
    settled = min(settled, computed)
    key = seq.namespace_key
    if len(seq.tables) == 1 and not table.forgets and not seq.retention:
        # Nothing can fail after the one run that is published.
        full = settled // table.block_size
        is_due = full > table.num_published and key is not None
        if is_due and key is not None:
            contents = _contents(seq, table.num_published, full, table.block_size)
            _publish(pool, seq, key, 0, full, contents)
            table.num_published = full
        seq.num_computed_tokens = computed
        seq.fast_decode_limit = 0
        pool.num_computed_tokens += num_tokens
        return is_due
    last_event = pool.last_event
    published: list[Block] = []
    passed: list[tuple[BlockTable, int]] = []
    try:
        _settle(pool, seq, settled, published, passed)
        released = _before(passed)
        if released:
            pool.give_back(released)
    except BaseException:
        pool.unpublish(published, last_event)
        raise
    _set(seq, computed, settled)
    pool.num_computed_tokens += num_tokens
    for table, kept in passed:
        table.forget(pool.null, kept)
    return bool(published or passed)


def reserve_step(
    pool: BlockPool, seqs: list[KVSequence], counts: list[int], longest: int | None
) -> tuple[Growth, ...]:
    """Make room for the next tokens of every sequence of a step, or of none.

    O(sequences + new blocks).
    """
    growing: list[int] = []
    totals: list[int] = []
    for index, seq in enumerate(seqs):
        total = seq.num_computed_tokens + counts[index]
        if total > seq.num_reserved_tokens:
            check_length(total, longest)
            growing.append(index)
            totals.append(total)
    if not growing:
        return ()
    return _move(pool, seqs, growing, [0] * len(seqs), totals, longest)


def commit_step(
    pool: BlockPool, seqs: list[KVSequence], counts: list[int], longest: int | None
) -> None:
    """Count the next tokens of every sequence of a step as computed, or of none.

    O(sequences + blocks filled and given back). Raises like `committable`.
    """
    due: list[int] = []
    total = sum(counts)
    for index, seq in enumerate(seqs):
        computed = seq.num_computed_tokens + counts[index]
        length = len(seq.packed) + seq.num_unknown_tokens
        if not (computed < seq.next_boundary and computed <= length):
            committable(seq, counts[index])
            due.append(index)
    if due:
        _move(pool, seqs, due, counts, [0] * len(due), longest)
    due.append(len(seqs))
    place = 0
    for index, seq in enumerate(seqs):
        if index == due[place]:
            place += 1
        else:
            seq.num_computed_tokens += counts[index]
            seq.fast_decode_limit = 0
    pool.num_computed_tokens += total


def step(
    pool: BlockPool,
    seqs: list[KVSequence],
    computed: list[int],
    joined: list[int] | None,
    joining: list[int],
    reserved: list[int] | None,
    longest: int | None,
) -> tuple[Growth, ...]:
    """Append, commit and reserve tokens of every sequence of a step, or of none.

    O(sequences + blocks filled, taken and released).

    Args:
        pool: the pool of all.
        seqs: each once.
        computed: for each the number of next tokens that were computed.
        joined: the tokens to append, one sequence after another; None: expected tokens.
        joining: for each the number of tokens to append.
        reserved: for each the number of tokens to reserve after the computed ones; None: all.
        longest: the most tokens that a sequence may have or reserve.
    """
    due: list[int] = []
    totals: list[int] = []
    all_computed = sum(computed)
    index = start = 0
    try:
        for index, seq in enumerate(seqs):
            length = len(seq.packed)
            count, more = computed[index], joining[index]
            if (  # a decoder, as `decode_step` counts it
                length < seq.fast_decode_limit
                and count == more == 1
                and joined is not None
                and (reserved is None or reserved[index] < 2)
            ):
                seq.packed.append(joined[start])
                start += 1
                seq.num_computed_tokens = length
                continue
            if joined is None:
                seq.num_unknown_tokens += more
            elif more:
                check_all_known(seq)
                seq.packed.fromlist(joined[start : start + more])
                start += more
            length = len(seq.packed) + seq.num_unknown_tokens
            done = seq.num_computed_tokens + count
            total = length if reserved is None else done + reserved[index]
            if (
                done <= length <= seq.num_reserved_tokens
                and total <= seq.num_reserved_tokens
                and (done < seq.next_boundary or len(seq.packed) < seq.next_boundary)
            ):
                seq.num_computed_tokens = done
                seq.fast_decode_limit = 0
            else:
                due.append(index)
                totals.append(total)
        index = len(seqs)
        if not due:
            pool.num_computed_tokens += all_computed
            return ()
        for place, number in enumerate(due):
            check_length(max(seqs[number].num_tokens, totals[place]), longest)
            committable(seqs[number], computed[number])
        growths = _move(pool, seqs, due, computed, totals, longest)
    except BaseException:
        _leave_step(seqs[:index], joining, due, computed, joined is None)
        raise
    pool.num_computed_tokens += all_computed
    for number in due:
        _find_stop(seqs[number])
    return growths


def _find_stop(seq: KVSequence) -> None:
    """Set the length below which a decode step of a sequence only counts. Cannot fail."""
    if seq.num_computed_tokens == len(seq.packed) - 1 and not seq.num_unknown_tokens:
        seq.fast_decode_limit = min(seq.num_reserved_tokens, seq.next_boundary)


def _leave_step(
    seqs: list[KVSequence],
    joining: list[int],
    due: list[int],
    computed: list[int],
    is_unknown: bool,  # noqa: FBT001  # of our own
) -> None:
    """Undo the appended and the counted tokens of `step`."""
    moved = set(due)
    for index, seq in enumerate(seqs):
        if is_unknown:
            seq.num_unknown_tokens -= joining[index]
        else:
            del seq.packed[len(seq.packed) - joining[index] :]
        if index not in moved:
            seq.num_computed_tokens -= computed[index]


def resolve(pool: BlockPool, seq: KVSequence, packed: array[int]) -> None:
    """Set the ids of the first expected tokens of a sequence.

    O(tokens + blocks filled and released).
    """
    length = len(seq.packed)
    seq.packed.extend(packed)
    try:
        commit(pool, seq, 0)
    except BaseException:
        del seq.packed[length:]
        raise
    seq.num_unknown_tokens -= len(packed)


def resolve_step(
    pool: BlockPool,
    seqs: list[KVSequence],
    known: list[int],
    counts: list[int],
    firsts: list[int] | None,
    longest: int | None,
) -> None:
    """Set the ids of the first expected tokens of every sequence, or of none.

    O(sequences + blocks filled and released).
    """
    for index, seq in enumerate(seqs):
        check_expected(seq, counts[index], None if firsts is None else firsts[index])
    due: list[int] = []
    index = start = 0
    try:
        for index, seq in enumerate(seqs):
            more = counts[index]
            if more == 1:
                seq.packed.append(known[start])
            else:
                seq.packed.fromlist(known[start : start + more])
            seq.num_unknown_tokens -= more
            start += more
            if (
                len(seq.packed) >= seq.next_boundary
                and seq.num_computed_tokens >= seq.next_boundary
            ):
                due.append(index)
        index = len(seqs)
        if due:
            _move(pool, seqs, due, [0] * len(seqs), [0] * len(due), longest)
    except BaseException:
        for number in range(index):
            seq = seqs[number]
            del seq.packed[len(seq.packed) - counts[number] :]
            seq.num_unknown_tokens += counts[number]
        raise


def decode_step(
    pool: BlockPool, seqs: list[KVSequence], sampled: list[int], longest: int | None
) -> tuple[Growth, ...]:
    """Commit all tokens of every sequence and append one with a reserved slot; or none.

    The special case of `step` for decoding, in a shorter loop: 0.6 of its time in Python, 0.9
    compiled. O(sequences + blocks filled, taken and released).
    """
    due: list[int] = []
    index = 0
    try:
        for index, seq in enumerate(seqs):
            length = len(seq.packed)
            if length < seq.fast_decode_limit:
                seq.packed.append(sampled[index])
                seq.num_computed_tokens = length
            else:
                due.append(index)
                seq.packed.append(sampled[index])
        index = len(seqs)
        growths = _decode(pool, seqs, due, longest) if due else ()
    except BaseException:
        for seq in islice(seqs, index):
            seq.packed.pop()
            if len(seq.packed) < seq.fast_decode_limit:
                seq.num_computed_tokens = len(seq.packed) - 1
        raise
    pool.num_computed_tokens += len(seqs) - len(due)
    return growths


def _decode(
    pool: BlockPool, seqs: list[KVSequence], due: list[int], longest: int | None
) -> tuple[Growth, ...]:
    """Handle the sequences of a decode step that need more than counting, or none."""
    is_plain = True
    newly = 0
    for index in due:
        seq = seqs[index]
        length = len(seq.packed)
        if length - 1 > seq.num_reserved_tokens or seq.num_unknown_tokens:
            check_all_known(seq)
            committable(seq, length - 1 - seq.num_computed_tokens)
        if longest is not None and length > longest:
            check_length(length, longest)
        newly += length - 1 - seq.num_computed_tokens
        if seq.retention or len(seq.tables) > 1 or seq.tables[0].forgets:
            is_plain = False
    if is_plain:
        growths = _decode_plain(pool, seqs, due)
        for index in due:
            seqs[index].find_limits(longest)
    else:
        computed = [0] * len(seqs)
        for index in due:
            computed[index] = len(seqs[index].packed) - 1 - seqs[index].num_computed_tokens
        totals = [len(seqs[index].packed) for index in due]
        growths = _move(pool, seqs, due, computed, totals, longest)
    pool.num_computed_tokens += newly
    for index in due:
        _find_stop(seqs[index])
    return growths


def _decode_plain(
    pool: BlockPool, seqs: Sequence[KVSequence], due: Sequence[int]
) -> tuple[Growth, ...]:
    """Do what `_move` does for a decode step with one group of full attention.

    Written out because it saves a fifth of a whole decode step. `due` are the places of the
    sequences; each has no retention, and blocks for all its tokens but the last.
    O(len(due) + blocks filled).

    Raises:
        OutOfBlocksError: too few blocks are free for all.
    """
    growing = [index for index in due if _lacks_a_block(seqs[index])]
    new = pool.next_blocks(len(growing))
    last_event = pool.last_event
    published: list[Block] = []
    growths: list[Growth] = []
    try:
        for place, index in enumerate(growing):
            growths.append(Growth(index, 0, seqs[index].tables[0].grow([new[place]])))
        for index in due:
            seq = seqs[index]
            table = seq.tables[0]
            full = (len(seq.packed) - 1) // table.block_size
            if full > table.num_published and seq.namespace_key is not None:
                published += table.blocks[table.num_published : full]
                contents = _contents(seq, table.num_published, full, table.block_size)
                _publish(pool, seq, seq.namespace_key, 0, full, contents)
        answer = tuple(growths)
        pool.hand_out(new)
    except BaseException:
        pool.unpublish(published, last_event)
        for index in growing:
            table = seqs[index].tables[0]
            table.cut((len(seqs[index].packed) - 1) // table.block_size)
        raise
    for index in due:
        seq = seqs[index]
        seq.num_computed_tokens = len(seq.packed) - 1
        if seq.namespace_key is not None:
            seq.tables[0].num_published = seq.num_computed_tokens // seq.tables[0].block_size
    return answer


def _move(
    pool: BlockPool,
    running: list[KVSequence],
    due: list[int],
    counts: list[int],
    totals: list[int],
    longest: int | None,
) -> tuple[Growth, ...]:
    """Commit and reserve tokens of some sequences of a step, all or nothing.

    O(sequences in `due` + blocks).

    Args:
        pool: the pool of all.
        running: the sequences of a step.
        due: the places of the sequences to change.
        counts: for each sequence of the step the number of computed tokens to add; they exist
            and have blocks.
        totals: for each sequence in `due` the number of tokens to have blocks for.
        longest: the most tokens that a sequence may reserve.

    Returns:
        The appended blocks.

    Raises:
        OutOfBlocksError: too few blocks are free for all tables.
    """
    seqs = [running[index] for index in due]
    computed = [running[index].num_computed_tokens + counts[index] for index in due]
    num_new = _num_missing(seqs, totals)
    new = pool.next_blocks(num_new) if num_new else []
    last_event = pool.last_event
    settled: list[int] = []
    published: list[Block] = []
    passed: list[tuple[BlockTable, int]] = []
    growths: list[Growth] = []
    assigned: list[tuple[list[Block], int]] = []
    try:
        if num_new:
            _grow_all(seqs, due, totals, new, growths, assigned)
        for index, seq in enumerate(seqs):
            count = len(seq.packed)
            count = min(count, computed[index])
            settled.append(count)
            if count >= seq.next_boundary:
                _settle(pool, seq, count, published, passed)
        answer = tuple(growths)
        if passed:
            pool.exchange(new, _before(passed))
        elif num_new:
            pool.hand_out(new)
    except BaseException:
        pool.unpublish(published, last_event)
        _shrink_all(seqs, due, growths)
        raise
    _assign(pool, assigned)
    for index, seq in enumerate(seqs):
        _set(seq, computed[index], settled[index])
    for table, kept in passed:
        table.forget(pool.null, kept)
    for seq in seqs:
        seq.find_limits(longest)
    return answer


def _lacks_a_block(seq: KVSequence) -> bool:
    """Return whether the only table lacks a block for the last token. O(1)."""
    table = seq.tables[0]
    return len(seq.packed) > len(table.blocks) * table.block_size


def _num_missing(seqs: Sequence[KVSequence], totals: Sequence[int]) -> int:
    """Return the number of blocks that all tables lack for `totals` tokens. O(sequences)."""
    missing = 0
    for index, seq in enumerate(seqs):
        for table in seq.tables:
            count = -(-totals[index] // table.block_size) - len(table.blocks)
            if count > 0:
                missing += count
    return missing


def _grow_all(
    seqs: Sequence[KVSequence],
    places: Sequence[int],
    totals: Sequence[int],
    new: list[Block],
    growths: list[Growth],
    assigned: list[tuple[list[Block], int]],
) -> None:
    """Append new blocks to tables, and list them in `growths`. `_shrink_all` undoes it."""
    start = 0
    for index, seq in enumerate(seqs):
        for group, table in enumerate(seq.tables):
            count = -(-totals[index] // table.block_size) - len(table.blocks)
            if count > 0:
                own = new[start : start + count]
                growth = Growth(places[index], group, ())
                growths.append(growth)
                growth.block_ids = table.grow(own)
                if group:
                    assigned.append((own, group))
                start += count


def _shrink_all(
    seqs: Sequence[KVSequence], places: Sequence[int], growths: Sequence[Growth]
) -> None:
    """Remove the blocks of `growths` from the tables. Cannot fail."""
    at = 0
    for growth in growths:
        while places[at] != growth.index:
            at += 1
        table = seqs[at].tables[growth.group]
        table.cut(len(table.blocks) - len(growth.block_ids))


def _settle(
    pool: BlockPool,
    seq: KVSequence,
    settled: int,
    published: list[Block],
    passed: list[tuple[BlockTable, int]],
) -> None:
    """Publish settled blocks, and list those outside the windows. O(published)."""
    key = seq.namespace_key
    contents: list[bytes] = []
    cut = (0, 0, 0)  # where they begin, where they end, and the size of a block
    for number, table in enumerate(seq.tables):
        if key is not None and settled >= (table.num_published + 1) * table.block_size:
            full = settled // table.block_size
            run = (table.num_published, full, table.block_size)
            if run != cut:
                contents, cut = _contents(seq, *run), run
            published += table.blocks[table.num_published : full]
            _publish(pool, seq, key, number, full, contents)
        if table.forgets:
            kept = table.first_kept(settled)
            if kept > table.num_null:
                passed.append((table, kept))


def _contents(seq: KVSequence, first: int, stop: int, size: int) -> list[bytes]:
    """Return the contents of the blocks `first` to `stop - 1` of a sequence. O(tokens)."""
    if seq.items:
        return block_contents(seq.packed, seq.items, first, stop, size)
    return slices(seq.packed, first * size, stop * size, size)


def _before(passed: Sequence[tuple[BlockTable, int]]) -> list[Block]:
    """Return the blocks that tables release, in order. O(blocks)."""
    if len(passed) == 1:
        table, kept = passed[0]
        return table.before(kept)
    return [block for table, kept in passed for block in table.before(kept)]


def _set(seq: KVSequence, computed: int, settled: int) -> None:
    """Set the fields of a sequence after the pool has changed. Cannot fail. O(groups)."""
    seq.num_computed_tokens = computed
    seq.fast_decode_limit = 0
    if settled < seq.next_boundary:
        return
    if seq.namespace_key is not None:
        for table in seq.tables:
            table.num_published = settled // table.block_size


def _publish(
    pool: BlockPool, seq: KVSequence, key: bytes, number: int, full: int, contents: list[bytes]
) -> None:
    """Publish the unpublished ones of the first `full` blocks of a table. O(new)."""
    table = seq.tables[number]
    first, size = table.num_published, table.block_size
    blocks = table.blocks[first:full]
    above = table.blocks[first - 1].node if first else None
    passing = b""
    if table.forgets and pool.is_uneven:
        hits = pool.common_size
        passing = bytes([not serves(table.group, p, hits) for p in range(first, full)])
    pool.attach(blocks, key, above, contents, number, passing)
    if seq.retention:
        for index, block in enumerate(blocks, first):
            keep(pool, seq, block, index * size)


def keep(pool: BlockPool, seq: KVSequence, block: Block, start: int) -> None:
    """Apply the retention of a sequence to a published block at token `start`. O(terms)."""
    terms = retention_terms(seq.retention, start, seq.opened_at, pool.step)
    if terms:
        pool.keep(block, terms)
