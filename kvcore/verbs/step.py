"""How sequences go forward: room, then computed and told tokens, then what that makes visible.

One sequence, or all of a step together, with all their layer groups: all or nothing. What can fail
is asked and allocated first, then the pool changes, and then only what is there already is set.
What others can see, and what a window gives back, follows from the settled tokens alone: those that
are both computed and told.

The steady state of an engine is decoding, where 15 of 16 tokens add no block: such a token costs a
comparison and two counts here, whatever the layer groups are. Decoders, chunks of prompts and
drafts are one step; what is more than counting is done for all that need it together. That the
sequences are open ones of one pool, each named once, the manager has seen to.
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
    """Give a sequence room for so many tokens, or nothing. O(groups + new blocks).

    Returns:
        For each group the ids that were appended.

    Raises:
        OutOfBlocksError: too few blocks are free.
    """
    if len(seq.tables) == 1:
        return (_grow_table(pool, seq.tables[0], num_tokens),)
    return _grow_tables(pool, seq, num_tokens)


def _grow_table(pool: BlockPool, table: BlockTable, num_tokens: int) -> tuple[BlockId, ...]:
    """Give a table room for so many tokens, or nothing; return the ids that were appended."""
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
    """Let the pool know which new blocks are another group's than the first. Cannot fail."""
    if pool.is_uneven:
        for blocks, group in assigned:
            pool.assign(blocks, group)


def commit(pool: BlockPool, seq: KVSequence, num_tokens: int) -> bool:
    """Count more tokens as computed; publish what is settled, give back what nobody sees any more.

    O(blocks filled and given back). Raises like `committable`.

    Returns:
        Whether anything was published or given back.
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
    """Let tokens join, be computed and have room, for every sequence of a step or for none.

    O(sequences + blocks filled, taken and given back).

    Args:
        pool: the pool of all.
        seqs: each once.
        computed: for each how many of its next tokens were computed.
        joined: what joins, one's tokens after another's; None: it is expected.
        joining: for each how many of them are its own.
        reserved: for each the room after the computed ones; None: for all that it has.
        longest: the most tokens that any may have, and have room for.
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
    """Note up to where a sequence whose limits are known only counts as it decodes. Cannot fail."""
    if seq.num_computed_tokens == len(seq.packed) - 1 and not seq.num_unknown_tokens:
        seq.fast_decode_limit = min(seq.num_reserved_tokens, seq.next_boundary)


def _leave_step(
    seqs: list[KVSequence],
    joining: list[int],
    due: list[int],
    computed: list[int],
    is_unknown: bool,  # noqa: FBT001  # of our own
) -> None:
    """Undo what `step` has done to some sequences: what joined, and what only counted."""
    moved = set(due)
    for index, seq in enumerate(seqs):
        if is_unknown:
            seq.num_unknown_tokens -= joining[index]
        else:
            del seq.packed[len(seq.packed) - joining[index] :]
        if index not in moved:
            seq.num_computed_tokens -= computed[index]


def resolve(pool: BlockPool, seq: KVSequence, packed: array[int]) -> None:
    """Let a sequence know which tokens its first expected ones are.

    O(tokens + blocks filled and given back).
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
    """Let every sequence of a step know which tokens its first expected ones are, or none.

    O(sequences + blocks filled and given back).
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
    """Let every sequence have computed all that it has, and a token join, with room; or none.

    What `step` does where all are such, in a loop that counts nothing else: 0.6 of its price in
    Python, 0.9 compiled. O(sequences + blocks filled, taken and given back).
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
    """Do for some sequences of a decode step what is more than counting, or for none."""
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
    """Do what `_move` does for a decode step, where one group of full attention is all there is.

    Spelled out: a fifth less for a whole decode step. `due` are the places of those that are meant;
    each has no terms, and room for all its tokens but the last. O(len(due) + blocks filled).

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
    """Let some sequences of a step have computed more, and have room; all of it or nothing.

    O(sequences that are due + blocks).

    Args:
        pool: the pool of all.
        running: the sequences of a step.
        due: the places of those that are meant.
        counts: for each of them how many of its next tokens are computed; it has them, and room
            for them.
        totals: for each that is due, for how many tokens it is to have room.
        longest: the most tokens that any may have room for.

    Returns:
        What was appended.

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
    """Say whether the only table has no room for the last token; it has for all before. O(1)."""
    table = seq.tables[0]
    return len(seq.packed) > len(table.blocks) * table.block_size


def _num_missing(seqs: Sequence[KVSequence], totals: Sequence[int]) -> int:
    """Return how many blocks all tables lack to hold so many tokens each. O(sequences)."""
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
    """Let tables have new blocks, and note which. `_shrink_all` undoes what is noted."""
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
    """Take back from tables what is noted. Cannot fail."""
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
    """Publish what is settled, and find what nobody sees any more; note both. O(published)."""
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
    """Return what stands in blocks of a sequence, from number `first` to `stop - 1`. O(tokens)."""
    if seq.items:
        return block_contents(seq.packed, seq.items, first, stop, size)
    return slices(seq.packed, first * size, stop * size, size)


def _before(passed: Sequence[tuple[BlockTable, int]]) -> list[Block]:
    """Return the blocks that tables give back, in the order of release. O(blocks)."""
    if len(passed) == 1:
        table, kept = passed[0]
        return table.before(kept)
    return [block for table, kept in passed for block in table.before(kept)]


def _set(seq: KVSequence, computed: int, settled: int) -> None:
    """Set what the pool knows already. Cannot fail. O(groups)."""
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
    """Publish the first `full` blocks of a sequence's table that are not, and keep them. O(new)."""
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
    """Keep a published block, which begins at token `start`, as its sequence terms. O(terms)."""
    terms = retention_terms(seq.retention, start, seq.opened_at, pool.step)
    if terms:
        pool.keep(block, terms)
