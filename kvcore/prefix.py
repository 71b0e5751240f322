"""What a sequence finds of its prefix, what it publishes, and what a cut leaves of it.

The steps behind the manager's verbs that go through all layer groups together. Each asks and
allocates first, then lets the pool change, which is the last that can fail, and then only sets what
is there already: an exception anywhere leaves all as it was. What a call is for, and whether it is
allowed, the manager has decided.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from math import lcm

from kvcore.block import Block, BlockId
from kvcore.block_table import BlockTable
from kvcore.errors import InvalidArgumentError, NotReservedError
from kvcore.groups import FullAttention, LayerGroup, first_kept_block, longest_servable
from kvcore.hashing import block_contents
from kvcore.items import Item, cut_items, encode_items
from kvcore.pool import BlockPool
from kvcore.release import cut_tables, leaving
from kvcore.reports import CopyOrder, Growth
from kvcore.retention import Wish, wishes_for
from kvcore.sequence import KVSequence
from kvcore.tokens import slices


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


def grow(pool: BlockPool, table: BlockTable, num_tokens: int) -> tuple[BlockId, ...]:
    """Give a table room for so many tokens, or nothing. O(new blocks).

    Returns:
        The ids that were appended.

    Raises:
        OutOfBlocksError: too few blocks are free.
    """
    count = table.num_missing(num_tokens)
    if not count:
        return ()
    length = len(table.blocks)
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


def advance_to(pool: BlockPool, seq: KVSequence, computed: int) -> None:
    """Set how much is computed; publish what that fills, give back what nobody sees any more.

    O(blocks filled and given back).
    """
    table = seq.tables[0]
    if len(seq.tables) > 1 or table.forgets or seq.wishes:
        advance_all(pool, [(seq, computed)])
        return
    full = computed // table.block_size
    if full > table.num_published and seq.namespace_key is not None:
        _publish(pool, seq, seq.namespace_key, 0, full)
        table.num_published = full
    seq.num_computed_tokens = computed
    seq.stop = 0


def advance_all(
    pool: BlockPool,
    targets: Sequence[tuple[KVSequence, int]],
    wanted: Sequence[tuple[BlockTable, int]] = (),
    places: Sequence[tuple[int, int]] = (),
) -> tuple[Growth, ...]:
    """Give tables room, and set how much of sequences is computed; all of it or nothing.

    Otherwise like `grow`, and then `advance_to`. O(sequences + blocks).

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
    start = 0
    try:
        for index, (table, count) in enumerate(wanted):
            appended = table.grow(new[start : start + count])
            growths.append(Growth(*places[index], appended))
            start += count
        for seq, number, full in filled:
            table = seq.tables[number]
            published += table.blocks[table.num_published : full]
            _publish(pool, seq, seq.namespace_key or b"", number, full)
        released = [block for table, kept in passed for block in table.before(kept)]
        answer = tuple(growths)
        pool.hand_out(new, released)
    except BaseException:
        pool.unpublish(published, last_event)
        for (table, _), length in zip(wanted, lengths, strict=True):
            table.cut(length)
        raise
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
        its.start(pool.null, mine.num_null, shared)
        its.num_published = mine.num_published
        if rest:
            copy = own[len(orders)]
            its.grow([copy])
            orders.append(CopyOrder(mine.blocks[full].block_id, copy.block_id, rest, number))
    found = tuple(orders)
    pool.revive(held)
    try:
        pool.hand_out(own)
    except BaseException:
        pool.drop(held)  # the parent holds them too, so none becomes free
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
    return _computed_in_sight(seq, computed)


def _computed_in_sight(seq: KVSequence, computed: int) -> int:
    """Return `computed`, or 0 where a group has given back what the next query would see."""
    for table in seq.tables:
        if table.num_null > first_kept_block(table.group, table.block_size, computed):
            return 0
    return computed


def distrust_from(
    pool: BlockPool, seq: KVSequence, num_tokens: int, sequences: Sequence[KVSequence]
) -> tuple[KVSequence, ...]:
    """Take back what a sequence says it computed after `num_tokens` tokens, from everybody.

    Distrusted is every sequence that has the same tokens so far and one more: it may have hit the
    bad blocks, or be a fork with a copy of a half-full one. So are their blocks from there on, and
    every published block that spells one of their prefixes further: which of those were computed
    on top of bad ones nobody knows any more.
    O(all tokens and blocks of the sequences and of the content below).

    Returns:
        The sequences that were set back.
    """
    suspects = [seq]
    if num_tokens < seq.num_computed_tokens:
        suspects = [other for other in sequences if _agree(seq, other, num_tokens + 1)]
    doubtful = [block for suspect in suspects for block in _doubtful(suspect, num_tokens)]
    return _take_from_all(pool, doubtful, sequences)


def _agree(one: KVSequence, other: KVSequence, num_tokens: int) -> bool:
    """Say whether two sequences have computed the same first tokens for the same namespace."""
    return (
        other.num_computed_tokens >= num_tokens
        and other.namespace_key == one.namespace_key
        and other.packed[:num_tokens] == one.packed[:num_tokens]
        and cut_items(other.items, num_tokens) == cut_items(one.items, num_tokens)
    )


def _doubtful(seq: KVSequence, num_tokens: int) -> list[Block]:
    """Return a sequence's blocks from `num_tokens` on, and all that spell its prefix further."""
    found: list[Block] = []
    for table in seq.tables:
        first = num_tokens // table.block_size
        present = max(first, table.num_null)
        found += table.blocks[present : -(-seq.num_computed_tokens // table.block_size)]
        node = table.blocks[present].node if present < table.num_published else None
        for _ in range(present - first):  # up to the first that is gone from the table
            node = None if node is None else node.parent
        if node is not None:
            for below in [node, *node.descendants()]:
                found += below.copies()
    return found


def _has_any(seq: KVSequence, numbers: set[int]) -> bool:
    return any(not numbers.isdisjoint(table.block_ids) for table in seq.tables)


def _take_from_all(
    pool: BlockPool, doubtful: Sequence[Block], sequences: Sequence[KVSequence]
) -> tuple[KVSequence, ...]:
    """Take the content of blocks away, and set back every sequence that has one of them.

    All or nothing. Returns those sequences.
    """
    numbers: set[int] = {block.block_id for block in doubtful}
    set_back = tuple([seq for seq in sequences if _has_any(seq, numbers)])
    targets = [(seq, _computed_before(seq, numbers)) for seq in set_back]
    released: list[Block] = []
    for seq, computed in targets:
        released += leaving(seq, computed)
    pool.forget([pool.blocks[number] for number in sorted(numbers)], released)
    for seq, computed in targets:
        cut_tables(seq, computed)
        seq.num_computed_tokens = computed
        seq.num_cached_tokens = min(seq.num_cached_tokens, computed)
        seq.cut_names(computed)
    return set_back


def _computed_before(seq: KVSequence, doubtful: set[int]) -> int:
    """Return how much of a sequence stands before its first block in doubt. O(num_blocks)."""
    computed = seq.num_computed_tokens
    for table in seq.tables:
        for place, block_id in enumerate(table.block_ids):
            if block_id in doubtful:
                computed = min(computed, place * table.block_size)
                break
    # A whole number of blocks of every group: what is left in part may be shared.
    computed -= computed % lcm(*[table.block_size for table in seq.tables])
    return _computed_in_sight(seq, computed)
