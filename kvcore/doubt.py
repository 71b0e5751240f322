"""Who is set back when KV that was committed turns out never to have arrived.

A failed load is in doubt with all that may have been built on it: the blocks of every sequence that
has the same tokens so far and one more, and every published block that spells one of them, whoever
computed it. Nothing of that can be hit any more, and every sequence that holds a block of it falls
back to before it. All is found out first and changed afterwards. It knows nothing of why a load
failed.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm

from kvcore.block import Block, Node
from kvcore.items import cut_encoded, cut_items, encode_items
from kvcore.pool import BlockPool
from kvcore.prefix import computed_in_sight
from kvcore.release import cut_tables, leaving
from kvcore.sequence import KVSequence
from kvcore.tokens import BYTES_PER_TOKEN


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
    if num_tokens < seq.num_settled_tokens:
        suspects = [other for other in sequences if _agree(seq, other, num_tokens + 1)]
    doubtful = [block for suspect in suspects for block in _doubtful(pool, suspect, num_tokens)]
    return _take_from_all(pool, doubtful, sequences)


def _agree(one: KVSequence, other: KVSequence, num_tokens: int) -> bool:
    """Say whether two sequences have computed the same first tokens for the same namespace."""
    return (
        other.num_settled_tokens >= num_tokens
        and other.namespace_key == one.namespace_key
        and other.packed[:num_tokens] == one.packed[:num_tokens]
        and cut_items(other.items, num_tokens) == cut_items(one.items, num_tokens)
    )


def _doubtful(pool: BlockPool, seq: KVSequence, num_tokens: int) -> list[Block]:
    """Return a sequence's blocks from `num_tokens` on, and all that spell its prefix further.

    A token further is enough: a fork may have copied that one and gone another way in the same
    block.
    """
    found: list[Block] = []
    for number, table in enumerate(seq.tables):
        first = num_tokens // table.block_size
        present = max(first, table.num_null)
        found += table.blocks[present : -(-seq.num_computed_tokens // table.block_size)]
        if num_tokens >= seq.num_settled_tokens:
            continue  # nobody else can have what is not told
        above = _content_before(pool, seq, number, first)
        if above is not None:
            for node in _spelling(above, seq, num_tokens + 1, table.block_size):
                for below in [node, *node.descendants()]:
                    found += below.copies()
    return found


def _content_before(pool: BlockPool, seq: KVSequence, number: int, place: int) -> Node | None:
    """Return the node of a sequence's first `place` blocks in one group, None if there is none."""
    table = seq.tables[number]
    if seq.namespace_key is None:
        return None
    if place == 0:
        return pool.trees[number].root(seq.namespace_key)
    known = max(place - 1, table.num_null)  # those before it are gone from the table
    node = table.blocks[known].node
    for _ in range(known - (place - 1)):
        node = None if node is None else node.parent
    return node


def _spelling(above: Node, seq: KVSequence, num_tokens: int, size: int) -> list[Node]:
    """Return the nodes right below one that hold a sequence's next tokens, to `num_tokens`."""
    place = (num_tokens - 1) // size
    rows = num_tokens - place * size
    tokens = seq.packed[place * size : num_tokens].tobytes()
    (items,) = encode_items(cut_items(seq.items, num_tokens), place, place + 1, size)
    width = size * BYTES_PER_TOKEN
    return [
        node
        for node in above.child_nodes()
        if node.tokens.startswith(tokens) and cut_encoded(node.tokens[width:], rows) == items
    ]


def _has_any(seq: KVSequence, numbers: set[int]) -> bool:
    return any(not numbers.isdisjoint(table.block_ids) for table in seq.tables)


def _take_from_all(
    pool: BlockPool, doubtful: Sequence[Block], sequences: Sequence[KVSequence]
) -> tuple[KVSequence, ...]:
    """Take the content of blocks away, and set back every sequence that has one of them.

    All or nothing. Returns those sequences.
    """
    known = {block.block_id: block for block in doubtful}
    numbers: set[int] = set(known)
    set_back = tuple([seq for seq in sequences if _has_any(seq, numbers)])
    targets = [(seq, _computed_before(seq, numbers)) for seq in set_back]
    released: list[Block] = []
    for seq, computed in targets:
        released += leaving(seq, computed)
    pool.forget([known[number] for number in sorted(known)], released)
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
    return computed_in_sight(seq, computed)
