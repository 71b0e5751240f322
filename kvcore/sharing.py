"""What a new sequence shares: the prefix that it finds in the cache, or all that a parent has.

All layer groups together. What can fail is asked and allocated first, then the pool changes, and
then only what is there already is set: an exception anywhere leaves all as it was. What a call is
for, and whether it is allowed, the manager has decided.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

from kvcore.block import Block
from kvcore.errors import InvalidArgumentError
from kvcore.forward import check_length
from kvcore.groups import FullAttention, LayerGroup, first_kept_block, longest_servable
from kvcore.hashing import DEFAULT_NAMESPACE, Namespace, encode_namespace
from kvcore.items import Item, as_items, check_items, encode_items
from kvcore.pool import BlockPool
from kvcore.reports import CopyOrder
from kvcore.retention import Wish, wishes_for
from kvcore.sequence import KVSequence
from kvcore.tokens import Tokens, pack

_DEFAULT_KEY: Final = encode_namespace(DEFAULT_NAMESPACE)


def describe(
    tokens: Tokens, namespace: Namespace | None, items: Sequence[Item], longest: int | None
) -> tuple[array[int], bytes | None, tuple[Item, ...]]:
    """Check what a new sequence is to hold; return its tokens, its namespace's key, its items.

    O(len(tokens)).

    Raises:
        InvalidArgumentError: no tokens, not token ids, not a namespace, or items that overlap
            or reach beyond the tokens.
        SequenceTooLongError: more tokens than `longest`.
    """
    # A subclass may mean more than its fields say, and would share what it should not.
    if namespace is not None and type(namespace) is not Namespace:
        raise InvalidArgumentError(
            f"namespace: wanted a Namespace or None, got {type(namespace).__name__}"
        )
    packed = pack(tokens)
    if not packed:
        raise InvalidArgumentError("tokens: wanted at least one token, got none")
    check_length(len(packed), longest)
    key = None
    if namespace is not None:
        is_default = namespace is DEFAULT_NAMESPACE
        key = _DEFAULT_KEY if is_default else encode_namespace(namespace)
    if type(items) is tuple and not items:
        return packed, key, ()
    return packed, key, check_items(as_items(items), 0, len(packed))


def share_cached(pool: BlockPool, groups: Sequence[LayerGroup], seq: KVSequence) -> list[Block]:
    """Fill the tables of a new, cached sequence with its longest cached prefix. O(its blocks).

    Returns:
        The blocks of the tables; the sequence does not hold them yet.
    """
    key = seq.namespace_key or b""
    only = seq.tables[0]
    if len(seq.tables) == 1 and not only.forgets:
        if seq.items:
            hits = find_blocks(pool, only.block_size, key, seq.packed, seq.items)
        else:
            longest = (len(seq.packed) - 1) // only.block_size
            hits = pool.match(key, seq.packed.tobytes(), longest)
        if hits:
            only.start(pool.null, 0, hits)
            seq.num_computed_tokens = seq.num_cached_tokens = len(hits) * only.block_size
        return hits
    hits = []
    cached, found = find_prefix(pool, groups, key, seq.packed, seq.items)
    for table, blocks in zip(seq.tables, found, strict=True):
        table.start(pool.null, cached // table.block_size - len(blocks), blocks)
        hits += blocks
    seq.num_computed_tokens = seq.num_cached_tokens = cached
    return hits


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
    if len(groups) == 1 and isinstance(groups[0], FullAttention):
        size = groups[0].block_size
        blocks = find_blocks(pool, size, namespace_key, packed, items)
        return len(blocks) * size, [blocks]
    content = packed.tobytes()
    longest = len(packed) - 1
    paths: list[list[Block | None]] = []
    for number, group in enumerate(groups):
        size = group.block_size
        encoded = _items_by_block(items, size, longest)
        paths.append(pool.path(namespace_key, content, longest // size, number, encoded))
        if not paths[-1]:
            return 0, [[] for _ in groups]
    cached = longest_servable(groups, paths, longest)
    needed: list[list[Block]] = []
    for group, path in zip(groups, paths, strict=True):
        size = group.block_size
        window = path[first_kept_block(group, size, cached) : cached // size]
        needed.append([block for block in window if block is not None])
    return cached, needed


def find_blocks(
    pool: BlockPool, size: int, namespace_key: bytes, packed: array[int], items: Sequence[Item]
) -> list[Block]:
    """Do what `find_prefix` does where one group of full attention is all there is. O(blocks)."""
    longest = len(packed) - 1
    encoded = _items_by_block(items, size, longest) if items else None
    return pool.match(namespace_key, packed.tobytes(), longest // size, 0, encoded)


def kept_hits(pool: BlockPool, seq: KVSequence) -> list[tuple[Block, tuple[Wish, ...]]]:
    """Return how the hits of a new sequence are to be kept, as it wishes. O(hits * wishes)."""
    kept: list[tuple[Block, tuple[Wish, ...]]] = []
    for table in seq.tables:
        for place in range(table.num_null, len(table.blocks)):
            start = place * table.block_size
            wishes = wishes_for(seq.wishes, start, seq.opened_at, pool.step)
            if wishes:
                kept.append(
                    (table.blocks[place], pool.idle_blocks.front(table.blocks[place], wishes))
                )
    return kept


def _items_by_block(items: Sequence[Item], size: int, num_tokens: int) -> list[bytes] | None:
    """Return the encoded items of every whole block, None if there are no items at all."""
    return encode_items(items, 0, num_tokens // size, size) if items else None


def share_computed(pool: BlockPool, parent: KVSequence, child: KVSequence) -> tuple[CopyOrder, ...]:
    """Give a new sequence all that another has settled, or nothing. O(num_blocks).

    Args:
        pool: the pool of both.
        parent: the sequence to share with.
        child: a sequence with the same told tokens and empty tables, that nobody knows yet.

    Returns:
        What has to be copied into the blocks of its own: one for each group whose last is half
        full.

    Raises:
        OutOfBlocksError: too few blocks are free for those.
    """
    computed = parent.num_settled_tokens
    half_full = [table for table in parent.tables if computed % table.block_size]
    own = pool.next_blocks(len(half_full))
    held: list[Block] = []
    child.num_computed_tokens = computed
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
        pool.give_back(held)  # the parent holds them too, so none becomes free
        raise
    for block, order in zip(own, found, strict=True):
        pool.assign((block,), order.group)
    return found
