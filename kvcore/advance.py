"""How sequences go forward: room, then computed and told tokens, then what that makes visible.

Many sequences and all layer groups together, all or nothing: what can fail is asked and allocated
first, then the pool changes, and then only what is there already is set. What others can see, and
what a window gives back, follows from the settled tokens alone: those that are both computed and
told. What a call is for, and whether it is allowed, the manager has decided.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcore.block import Block, BlockId
from kvcore.block_table import BlockTable
from kvcore.errors import InvalidArgumentError, NotReservedError
from kvcore.groups import serves
from kvcore.names import block_contents
from kvcore.pool import BlockPool
from kvcore.reports import Growth
from kvcore.retention import wishes_for
from kvcore.sequence import KVSequence
from kvcore.tokens import slices


def grow(pool: BlockPool, table: BlockTable, num_tokens: int) -> tuple[BlockId, ...]:
    """Give a table room for so many tokens, or nothing. O(new blocks).

    Returns:
        The ids that were appended.

    Raises:
        OutOfBlocksError: too few blocks are free.
    """
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


def grow_groups(
    pool: BlockPool, seq: KVSequence, num_tokens: int
) -> tuple[tuple[BlockId, ...], ...]:
    """Do what `grow` does, for all groups of a sequence. O(groups + new blocks)."""
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


def committable(seq: KVSequence, num_tokens: int) -> int:
    """Return how many tokens are computed once `num_tokens` more are. O(groups).

    Raises:
        InvalidArgumentError: more than the sequence has.
        NotReservedError: more than it has room for.
    """
    computed = seq.num_computed_tokens + num_tokens
    if computed > len(seq.packed) + seq.num_untold_tokens:
        raise InvalidArgumentError(
            f"num_tokens: wanted at most the {seq.num_tokens - seq.num_computed_tokens} "
            f"tokens that are not computed, got {num_tokens}"
        )
    for table in seq.tables:
        room = len(table.blocks) * table.block_size
        if computed > room:
            raise NotReservedError(f"commit: {computed} tokens computed, room for {room}")
    return computed


def advance(pool: BlockPool, seq: KVSequence, num_tokens: int) -> bool:
    """Count more tokens as computed; publish what is settled, give back what nobody sees any more.

    O(blocks filled and given back). Raises like `committable`.

    Returns:
        Whether anything was published or given back.
    """
    computed = committable(seq, num_tokens)
    settled = min(computed, len(seq.packed))
    key = seq.namespace_key
    if len(seq.tables) == 1 and not seq.tables[0].forgets and not seq.wishes:
        table = seq.tables[0]  # nothing can fail after the one run that is published
        full = settled // table.block_size
        is_due = full > table.num_published and key is not None
        if is_due and key is not None:
            _publish(pool, seq, key, 0, full)
            table.num_published = full
        seq.num_computed_tokens = computed
        seq.stop = 0
        return is_due
    last_event = pool.last_event
    published: list[Block] = []
    passed: list[tuple[BlockTable, int]] = []
    try:
        _settle(pool, seq, settled, published, passed)
        released = _before(passed)
        if released:
            pool.release(released)
    except BaseException:
        pool.unpublish(published, last_event)
        raise
    _set(seq, computed, settled)
    for table, kept in passed:
        table.forget(pool.null, kept)
    return bool(published or passed)


def advance_step(
    pool: BlockPool,
    seqs: Sequence[KVSequence],
    places: Sequence[int],
    computed: Sequence[int],
    totals: Sequence[int],
) -> tuple[Growth, ...]:
    """Give sequences room, and set how much of each is computed; all of it or nothing.

    Otherwise like `grow`, and then `advance`. O(sequences + blocks).

    Args:
        pool: the pool of all.
        seqs: each once.
        places: by what number each is known to the caller.
        computed: for each how many of its tokens are computed now; it has them, and room for them.
        totals: for each for how many tokens it is to have room.

    Returns:
        What was appended.

    Raises:
        OutOfBlocksError: too few blocks are free for all tables.
    """
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
            _grow_all(seqs, places, totals, new, growths, assigned)
        for index, seq in enumerate(seqs):
            count = len(seq.packed)
            count = min(count, computed[index])
            settled.append(count)
            if count >= seq.due:
                _settle(pool, seq, count, published, passed)
        answer = tuple(growths)
        if passed:
            pool.exchange(new, _before(passed))
        elif num_new:
            pool.hand_out(new)
    except BaseException:
        pool.unpublish(published, last_event)
        _shrink_all(seqs, places, growths)
        raise
    _assign(pool, assigned)
    for index, seq in enumerate(seqs):
        _set(seq, computed[index], settled[index])
    for table, kept in passed:
        table.forget(pool.null, kept)
    return answer


def advance_decodes(
    pool: BlockPool, seqs: Sequence[KVSequence], due: Sequence[int]
) -> tuple[Growth, ...]:
    """Let sequences be computed to their last token but one, and have room for that; or nothing.

    `advance_step`, spelled out where one group of full attention is all there is: a fifth less for
    a whole decode step. O(len(due) + blocks filled).

    Args:
        pool: the pool of all.
        seqs: a step's, without wishes; each has room for all its tokens but the last.
        due: the places of those that are meant.

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
                _publish(pool, seq, seq.namespace_key, 0, full)
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
    for number, table in enumerate(seq.tables):
        if key is not None and settled >= (table.num_published + 1) * table.block_size:
            full = settled // table.block_size
            published += table.blocks[table.num_published : full]
            _publish(pool, seq, key, number, full)
        if table.forgets:
            kept = table.first_kept(settled)
            if kept > table.num_null:
                passed.append((table, kept))


def _before(passed: Sequence[tuple[BlockTable, int]]) -> list[Block]:
    """Return the blocks that tables give back, in the order of release. O(blocks)."""
    if len(passed) == 1:
        table, kept = passed[0]
        return table.before(kept)
    return [block for table, kept in passed for block in table.before(kept)]


def _set(seq: KVSequence, computed: int, settled: int) -> None:
    """Set what the pool knows already. Cannot fail. O(groups)."""
    seq.num_computed_tokens = computed
    seq.stop = 0
    if settled < seq.due:
        return
    if seq.namespace_key is not None:
        for table in seq.tables:
            table.num_published = settled // table.block_size


def _publish(pool: BlockPool, seq: KVSequence, key: bytes, number: int, full: int) -> None:
    """Publish the first `full` blocks of a sequence's table that are not, and keep them. O(new)."""
    table = seq.tables[number]
    first, size = table.num_published, table.block_size
    blocks = table.blocks[first:full]
    above = table.blocks[first - 1].node if first else None
    if seq.items:
        contents = block_contents(seq.packed, seq.items, first, full, size)
    else:
        contents = slices(seq.packed, first * size, full * size, size)
    passing = b""
    if table.forgets and pool.is_uneven:
        hits = pool.common_size
        passing = bytes([not serves(table.group, p, hits) for p in range(first, full)])
    pool.attach(blocks, key, above, contents, number, passing)
    if seq.wishes:
        for index, block in enumerate(blocks, first):
            keep(pool, seq, block, index * size)


def keep(pool: BlockPool, seq: KVSequence, block: Block, start: int) -> None:
    """Keep a published block, which begins at token `start`, as its sequence wishes. O(wishes)."""
    wishes = wishes_for(seq.wishes, start, seq.opened_at, pool.step)
    if wishes:
        pool.keep(block, wishes)
