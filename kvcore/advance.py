"""How sequences go forward: room, then computed tokens, then what that makes visible.

Many sequences and all layer groups together, all or nothing: what can fail is asked and allocated
first, then the pool changes, and then only what is there already is set. What a call is for, and
whether it is allowed, the manager has decided.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcore.block import Block, BlockId
from kvcore.block_table import BlockTable
from kvcore.errors import InvalidArgumentError, NotReservedError
from kvcore.groups import first_kept_block
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


def committable(seq: KVSequence, num_tokens: int) -> int:
    """Return how many tokens are computed once `num_tokens` more are. O(groups).

    Raises:
        InvalidArgumentError: more than the sequence has.
        NotReservedError: more than it has room for.
    """
    computed = seq.num_computed_tokens + num_tokens
    if computed > len(seq.packed):
        raise InvalidArgumentError(
            f"num_tokens: wanted at most the {len(seq.packed) - seq.num_computed_tokens} "
            f"tokens that are not computed, got {num_tokens}"
        )
    for table in seq.tables:
        room = len(table.blocks) * table.block_size
        if computed > room:
            raise NotReservedError(f"commit: {computed} tokens computed, room for {room}")
    return computed


def advance(pool: BlockPool, seq: KVSequence, num_tokens: int) -> None:
    """Count more tokens as computed; publish what that fills, give back what nobody sees any more.

    O(blocks filled and given back). Raises like `committable`.
    """
    computed = seq.num_computed_tokens + num_tokens
    table = seq.tables[0]
    full, size = table.num_published, table.block_size
    if (
        len(seq.tables) > 1
        or table.forgets
        or seq.wishes
        or not computed <= len(seq.packed)
        or not computed <= len(table.blocks) * size
    ):
        advance_all(pool, [(seq, committable(seq, num_tokens))])
        return
    if computed >= (full + 1) * size and seq.namespace_key is not None:
        full = computed // size
        _publish(pool, seq, seq.namespace_key, 0, full)
        table.num_published = full
    seq.num_computed_tokens = computed
    seq.stop = 0


def advance_decodes(
    pool: BlockPool, seqs: Sequence[KVSequence], due: Sequence[int]
) -> tuple[Growth, ...]:
    """Let sequences be computed to their last token but one, and have room for that; or nothing.

    What `advance_all` does with more calls and objects, where one group of full attention is all
    there is. O(len(due) + blocks filled).

    Args:
        pool: the pool of all.
        seqs: a step's, without wishes.
        due: the places of those that are meant.

    Raises:
        NotReservedError: one has tokens without room, so nobody can have computed them.
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
    """Say whether the only table has no room for the last token; it has for all before. O(1).

    Raises:
        NotReservedError: it has not.
    """
    table = seq.tables[0]
    missing = len(seq.packed) - len(table.blocks) * table.block_size
    if missing > 1:
        committable(seq, len(seq.packed) - 1 - seq.num_computed_tokens)
    return missing > 0


def advance_all(
    pool: BlockPool,
    targets: Sequence[tuple[KVSequence, int]],
    wanted: Sequence[tuple[BlockTable, int]] = (),
    places: Sequence[tuple[int, int]] = (),
) -> tuple[Growth, ...]:
    """Give tables room, and set how much of sequences is computed; all of it or nothing.

    Otherwise like `grow`, and then `advance`. O(sequences + blocks).

    Args:
        pool: the pool of all.
        targets: sequences, each once, and how many of their tokens are computed now.
        wanted: tables, each once, and how many blocks each is to get.
        places: for each of these the sequence and the group that it belongs to, by number.

    Returns:
        What was appended.

    Raises:
        OutOfBlocksError: too few blocks are free for all tables.
    """
    filled: list[tuple[KVSequence, int, int]] = []
    passed: list[tuple[BlockTable, int]] = []
    for seq, computed in targets:
        for number, table in enumerate(seq.tables):
            full = computed // table.block_size
            if full > table.num_published and seq.namespace_key is not None:
                filled.append((seq, number, full))
            if table.forgets:
                kept = first_kept_block(table.group, table.block_size, computed)
                if kept > table.num_null:
                    passed.append((table, kept))
    growths = _change_pool(pool, filled, passed, wanted, places)
    for seq, computed in targets:
        seq.num_computed_tokens = computed
        seq.stop = 0
    for seq, number, full in filled:
        seq.tables[number].num_published = full
    for table, kept in passed:
        table.forget(pool.null, kept)
    return growths


def _change_pool(
    pool: BlockPool,
    filled: Sequence[tuple[KVSequence, int, int]],
    passed: Sequence[tuple[BlockTable, int]],
    wanted: Sequence[tuple[BlockTable, int]],
    places: Sequence[tuple[int, int]],
) -> tuple[Growth, ...]:
    """Let the pool know what is full now, out of sight, and wanted; or nothing of it.

    Published blocks are kept as their sequences wish.
    """
    new = pool.next_blocks(sum([count for _, count in wanted]))
    lengths = [len(table.blocks) for table, _ in wanted]
    last_event = pool.last_event
    published: list[Block] = []
    growths: list[Growth] = []
    assigned: list[tuple[list[Block], int]] = []
    start = 0
    try:
        for index, (table, count) in enumerate(wanted):
            appended = table.grow(new[start : start + count])
            growths.append(Growth(*places[index], appended))
            if pool.is_uneven:
                assigned.append((new[start : start + count], places[index][1]))
            start += count
        for seq, number, full in filled:
            table = seq.tables[number]
            published += table.blocks[table.num_published : full]
            _publish(pool, seq, seq.namespace_key or b"", number, full)
        released = [block for table, kept in passed for block in table.before(kept)]
        answer = tuple(growths)
        pool.exchange(new, released)
    except BaseException:
        pool.unpublish(published, last_event)
        for (table, _), length in zip(wanted, lengths, strict=True):
            table.cut(length)
        raise
    for blocks, group in assigned:
        pool.assign(blocks, group)
    return answer


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
    pool.attach(blocks, key, above, contents, number)
    if seq.wishes:
        for index, block in enumerate(blocks, first):
            keep(pool, seq, block, index * size)


def keep(pool: BlockPool, seq: KVSequence, block: Block, start: int) -> None:
    """Keep a published block, which begins at token `start`, as its sequence wishes. O(wishes)."""
    wishes = wishes_for(seq.wishes, start, seq.opened_at, pool.step)
    if wishes:
        pool.keep(block, wishes)
