"""What a sequence finds of its prefix, what it publishes, and what a cut leaves of it.

The steps behind the manager's verbs that go through all layer groups together. Each asks and
allocates first, then lets the pool change, which is the last that can fail, and then only sets what
is there already: an exception anywhere leaves all as it was. What a call is for, and whether it is
allowed, the manager has decided.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import islice

from kvcore.block import Block, BlockId
from kvcore.block_table import BlockTable
from kvcore.errors import InvalidArgumentError, NotReservedError
from kvcore.groups import FullAttention, LayerGroup, first_kept_block, longest_servable
from kvcore.hashing import block_contents
from kvcore.items import Item, encode_items
from kvcore.pool import BlockPool
from kvcore.reports import CopyOrder, Growth
from kvcore.retention import Wish, wishes_for
from kvcore.sequence import KVSequence


def find_prefix(
    pool: BlockPool,
    groups: Sequence[LayerGroup],
    namespace_key: bytes,
    packed: array[int],
    items: Sequence[Item],
) -> tuple[int, list[list[Block]]]:
    """Return the longest prefix that every group can serve, and the blocks that serve it.

    At most all tokens but the last. Holds nothing. O(groups * blocks of the prefix).

    Returns:
        Its length in tokens; for each group the blocks it needs, those that are visible from its
        end.
    """
    content = packed.tobytes()
    longest = len(packed) - 1
    if len(groups) == 1 and isinstance(groups[0], FullAttention):
        size = groups[0].block_size
        encoded = _items_by_block(items, size, longest)
        blocks = pool.match(namespace_key, content, longest // size, 0, encoded)
        return len(blocks) * size, [blocks]
    paths: list[list[Block | None]] = []
    for number, group in enumerate(groups):
        size = group.block_size
        encoded = _items_by_block(items, size, longest)
        paths.append(pool.path(namespace_key, content, longest // size, number, encoded))
    cached = longest_servable(groups, paths, longest)
    needed: list[list[Block]] = []
    for group, path in zip(groups, paths, strict=True):
        size = group.block_size
        window = path[first_kept_block(group, size, cached) : cached // size]
        needed.append([block for block in window if block is not None])
    return cached, needed


def grow(
    pool: BlockPool,
    wanted: Sequence[tuple[BlockTable, int]],
    places: Sequence[tuple[int, int]] = (),
) -> tuple[tuple[tuple[BlockId, ...], ...], tuple[Growth, ...]]:
    """Append so many new blocks to each table, or to none. O(new blocks).

    Returns:
        For each table the ids that were appended; and the same as growths, where `places` says for
        each table which sequence and which group it belongs to.

    Raises:
        OutOfBlocksError: too few blocks are free for all of them.
    """
    total = sum([count for _, count in wanted])
    new = iter(pool.next_blocks(total))
    lengths = [len(table.blocks) for table, _ in wanted]
    try:
        for table, count in wanted:
            table.grow(list(islice(new, count)))
        appended = tuple(
            [
                tuple([block.block_id for block in table.beyond(length)])
                for (table, _), length in zip(wanted, lengths, strict=True)
            ]
        )
        growths = tuple([Growth(*place, ids) for place, ids in zip(places, appended, strict=False)])
        pool.take(total)
    except BaseException:
        for (table, _), length in zip(wanted, lengths, strict=True):
            table.cut(length)
        raise
    return appended, growths


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


def advance_to(pool: BlockPool, seq: KVSequence, computed: int) -> None:
    """Set how much is computed; publish what that fills, give back what nobody sees any more.

    O(blocks filled and given back).
    """
    advance_all(pool, [(seq, computed)])


def advance_all(pool: BlockPool, targets: Sequence[tuple[KVSequence, int]]) -> None:
    """Set how much of each sequence is computed, or of none; otherwise like `advance_to`.

    O(sequences + blocks filled and given back).
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
    if filled or passed:
        _publish_and_release(pool, filled, passed)
    for seq, computed in targets:
        seq.num_computed_tokens = computed
    for seq, number, full in filled:
        seq.tables[number].num_published = full
    for table, kept in passed:
        table.forget(pool.blocks[0], kept)


def _publish_and_release(
    pool: BlockPool,
    filled: Sequence[tuple[KVSequence, int, int]],
    passed: Sequence[tuple[BlockTable, int]],
) -> None:
    """Let the pool know what is full now, (sequence, group, blocks), and out of sight; or neither.

    Published blocks are kept as their sequences wish.
    """
    last_event = pool.last_event
    published: list[Block] = []
    try:
        for seq, number, full in filled:
            table = seq.tables[number]
            first, size = table.num_published, table.block_size
            blocks = table.blocks[first:full]
            published += blocks
            contents = block_contents(seq.packed, seq.items, first, full, size)
            parent = table.blocks[first - 1] if first else None
            pool.publish(blocks, seq.namespace_key or b"", parent, contents, number)
            for index, block in enumerate(blocks if seq.wishes else (), first):
                keep(pool, seq, block, index * size)
        if passed:
            pool.release([block for table, kept in passed for block in table.before(kept)])
    except BaseException:
        pool.unpublish(published, last_event)
        raise


def kept_hits(pool: BlockPool, seq: KVSequence) -> list[tuple[Block, tuple[Wish, ...]]]:
    """Return how the hits of a new sequence are to be kept, as it wishes. O(hits * wishes)."""
    kept: list[tuple[Block, tuple[Wish, ...]]] = []
    for table in seq.tables:
        for place in range(table.num_null, len(table.blocks)):
            start = place * table.block_size
            wishes = wishes_for(seq.wishes, start, seq.opened_at, pool.step)
            if wishes:
                kept.append((table.blocks[place], pool.shelf.front(table.blocks[place], wishes)))
    return kept


def keep(pool: BlockPool, seq: KVSequence, block: Block, start: int) -> None:
    """Keep a published block, which begins at token `start`, as its sequence wishes. O(wishes)."""
    wishes = wishes_for(seq.wishes, start, seq.opened_at, pool.step)
    if wishes:
        pool.keep(block, wishes)


def _items_by_block(items: Sequence[Item], size: int, num_tokens: int) -> list[bytes] | None:
    """Return the encoded items of every whole block, None if there are no items at all."""
    return encode_items(items, 0, num_tokens // size, size) if items else None


def share_computed(pool: BlockPool, parent: KVSequence, child: KVSequence) -> tuple[CopyOrder, ...]:
    """Give a new sequence all that another has computed, or nothing. O(num_blocks).

    Args:
        pool: the pool of both.
        parent: the sequence to share with.
        child: a sequence with the same tokens and empty tables, that nobody knows yet.

    Returns:
        What has to be copied into the blocks of its own: one for each group whose last is half
        full.

    Raises:
        OutOfBlocksError: too few blocks are free for those.
    """
    computed = parent.num_computed_tokens
    half_full = [table for table in parent.tables if computed % table.block_size]
    own = pool.next_blocks(len(half_full))
    held: list[Block] = []
    child.num_computed_tokens = parent.num_computed_tokens
    child.wishes, child.opened_at = parent.wishes, parent.opened_at
    orders: list[CopyOrder] = []
    for number, (mine, its) in enumerate(zip(parent.tables, child.tables, strict=True)):
        full, rest = divmod(computed, mine.block_size)
        shared = mine.blocks[mine.num_null : full]
        held += shared
        its.start(pool.blocks[0], mine.num_null, shared)
        its.num_published = mine.num_published
        if rest:
            copy = own[len(orders)]
            its.grow([copy])
            orders.append(CopyOrder(mine.blocks[full].block_id, copy.block_id, rest, number))
    found = tuple(orders)
    pool.hold(held)
    try:
        pool.take(len(own))
    except BaseException:
        pool.release(held)  # the parent holds them too, so none becomes free
        raise
    return found


def computed_after_cut(seq: KVSequence, num_tokens: int) -> int:
    """Return how many tokens are still computed when a sequence is cut to `num_tokens`.

    Fewer than are kept where the cut goes through a block that must not be written again, and none
    where a group has given back what a query at the cut would see. O(groups).
    """
    computed = min(num_tokens, seq.num_computed_tokens)
    if computed == seq.num_computed_tokens:
        return computed
    lowered = True
    while lowered:
        lowered = False
        for table in seq.tables:
            full, rest = divmod(computed, table.block_size)
            if rest and (table.blocks[full].node is not None or table.blocks[full].ref_count > 1):
                computed -= rest
                lowered = True
    return computed_in_sight(seq, computed)


def computed_in_sight(seq: KVSequence, computed: int) -> int:
    """Return `computed`, or 0 where a group has given back what the next query would see."""
    for table in seq.tables:
        if table.num_null > first_kept_block(table.group, table.block_size, computed):
            return 0
    return computed
