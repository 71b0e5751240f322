"""What a sequence finds of its prefix, what it publishes, and what a cut leaves of it.

The steps behind the manager's verbs that go through all layer groups together. They change the pool
and the tables only after everything that could fail has been asked; what a call is for, and whether
it is allowed, the manager has decided.
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
from kvcore.reports import CopyOrder
from kvcore.retention import wishes_for
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


def grow(pool: BlockPool, wanted: Sequence[tuple[BlockTable, int]]) -> list[tuple[BlockId, ...]]:
    """Append so many new blocks to each table, or to none. O(new blocks).

    Returns:
        For each table the ids that were appended.

    Raises:
        OutOfBlocksError: too few blocks are free for all of them.
    """
    taken = pool.take(sum([count for _, count in wanted]))
    appended: list[tuple[BlockId, ...]] = []
    start = 0
    for table, count in wanted:
        new = taken[start : start + count]
        table.grow(new)
        appended.append(tuple([block.block_id for block in new]))
        start += count
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
    seq.num_computed_tokens = computed
    for number, table in enumerate(seq.tables):
        size = table.block_size
        full = computed // size
        if full > table.num_published and seq.namespace_key is not None:
            first = table.num_published
            blocks = table.blocks[first:full]
            parent = table.blocks[first - 1] if first else None
            contents = block_contents(seq.packed, seq.items, first, full, size)
            pool.publish(blocks, seq.namespace_key, parent, contents, number)
            table.num_published = full
            if seq.wishes:
                for index, block in enumerate(blocks, first):
                    keep(pool, seq, block, index * size)
        if table.forgets:
            kept = first_kept_block(table.group, size, computed)
            if kept > table.num_null:
                pool.release(table.forget(pool.blocks[0], kept))


def keep(pool: BlockPool, seq: KVSequence, block: Block, start: int) -> None:
    """Keep a published block, which begins at token `start`, as its sequence wishes. O(wishes)."""
    wishes = wishes_for(seq.wishes, start, seq.opened_at, pool.step)
    if wishes:
        pool.keep(block, wishes)


def _items_by_block(items: Sequence[Item], size: int, num_tokens: int) -> list[bytes] | None:
    """Return the encoded items of every whole block, None if there are no items at all."""
    return encode_items(items, 0, num_tokens // size, size) if items else None


def share_computed(
    pool: BlockPool, parent: KVSequence, child: KVSequence, own: Sequence[Block]
) -> tuple[CopyOrder, ...]:
    """Give a new sequence all that another has computed. O(num_blocks).

    Args:
        pool: the pool of both.
        parent: the sequence to share with.
        child: a sequence with the same tokens and empty tables.
        own: one taken block for each group whose last block is half full.

    Returns:
        What has to be copied into those.
    """
    child.num_computed_tokens = parent.num_computed_tokens
    child.wishes, child.opened_at = parent.wishes, parent.opened_at
    orders: list[CopyOrder] = []
    for number, (mine, its) in enumerate(zip(parent.tables, child.tables, strict=True)):
        full, rest = divmod(parent.num_computed_tokens, mine.block_size)
        shared = mine.blocks[mine.num_null : full]
        pool.hold(shared)
        its.start(pool.blocks[0], mine.num_null, shared)
        its.num_published = mine.num_published
        if rest:
            copy = own[len(orders)]
            its.grow([copy])
            orders.append(CopyOrder(mine.blocks[full].block_id, copy.block_id, rest, number))
    return tuple(orders)


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
    numbers: set[int] = {block.block_id for block in doubtful}
    for number in sorted(numbers):
        pool.forget(pool.blocks[number])
    set_back = [other for other in sequences if _has_any(other, numbers)]
    for other in set_back:
        _compute_again(pool, other, numbers)
    return tuple(set_back)


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


def _compute_again(pool: BlockPool, seq: KVSequence, doubtful: set[int]) -> None:
    """Set a sequence back to before the first of its blocks that is in doubt. O(num_blocks)."""
    computed = seq.num_computed_tokens
    for table in seq.tables:
        for place, block_id in enumerate(table.block_ids):
            if block_id in doubtful:
                computed = min(computed, place * table.block_size)
                break
    # A whole number of blocks of every group: what is left in part may be shared.
    computed -= computed % lcm(*[table.block_size for table in seq.tables])
    computed = _computed_in_sight(seq, computed)
    release_from(pool, seq, computed)
    seq.num_computed_tokens = computed
    seq.num_cached_tokens = min(seq.num_cached_tokens, computed)
    seq.cut_names(computed)


def blocks_tail_first(seq: KVSequence, num_tokens: int | None = None) -> list[Block]:
    """Return the blocks of a sequence in the order of release. O(num_blocks).

    Every one that it holds, or only those of its first `num_tokens` tokens.
    """
    runs: list[tuple[int, int, list[Block]]] = []
    for table in seq.tables:
        stop = len(table.blocks)
        if num_tokens is not None:
            stop = min(stop, -(-num_tokens // table.block_size))
        runs.append((table.num_null, table.block_size, table.blocks[table.num_null : stop]))
    return _tail_first(runs)


def release_from(pool: BlockPool, seq: KVSequence, num_tokens: int) -> None:
    """Give back every block that the first `num_tokens` tokens do not need, tail first.

    O(blocks released), with several groups O(n log n).
    """
    runs: list[tuple[int, int, list[Block]]] = []
    for table in seq.tables:
        length = len(table.blocks)
        left = table.cut(-(-num_tokens // table.block_size))
        runs.append((length - len(left), table.block_size, left))
    pool.release(_tail_first(runs))


def _tail_first(runs: Sequence[tuple[int, int, list[Block]]]) -> list[Block]:
    """Order runs of blocks, (first place, block size, blocks) for each group, by where they end.

    The tails of all groups come before the heads of any: what is reused first is what the fewest
    prefixes need.
    """
    if len(runs) == 1:
        return runs[0][2][::-1]
    placed = [
        ((first + index + 1) * size, number, block)
        for number, (first, size, blocks) in enumerate(runs)
        for index, block in enumerate(blocks)
    ]
    placed.sort(key=lambda entry: (entry[0], entry[1]), reverse=True)
    return [block for _, _, block in placed]
