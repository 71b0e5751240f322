"""Rewinding sequences: truncation, closing, and invalid KV after a failed transfer.

A sequence releases its blocks tail first, and the tails of all groups before the heads of any: the
blocks reused first are then those that the fewest prefixes need. These functions find the blocks,
the pool releases them, and then the tables are cut.

If committed KV is invalid, everything that may depend on it is invalid too: the blocks of every
sequence with the same tokens so far and one more, and every published block with that prefix. None
of them can be hit any more, and every sequence that holds one is set back to the tokens before it.
All checks come first and all changes afterwards.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import final

from kvcore.block import Block, Node
from kvcore.identity.block_hash import block_contents
from kvcore.identity.multimodal import (
    MultimodalItem,
    cut_encoded,
    cut_items,
    decode_items,
    encode_items,
)
from kvcore.identity.tokens import BYTES_PER_TOKEN
from kvcore.pool import BlockPool
from kvcore.sequence import KVSequence
from kvcore.tables.ends import sort_out, trailing_blocks
from kvcore.tables.groups import first_kept_block
from kvcore.verbs.states import (
    find_resume,
    is_held,
    publish_kept,
    resume,
    state_after,
    states_until,
    without,
)


def blocks_to_lease(seq: KVSequence, num_tokens: int | None, *, is_step: bool) -> list[Block]:
    """Return the blocks of a sequence for a lease, in the order of release. O(num_blocks).

    Every one that it holds, or only those of its first `num_tokens` tokens. States come first;
    those that are not written yet are for a step alone.
    """
    runs: list[tuple[int, int, list[Block]]] = []
    for table in seq.tables:
        stop = len(table.blocks)
        if num_tokens is not None:
            stop = min(stop, -(-num_tokens // table.block_size))
        runs.append((table.num_null, table.block_size, table.blocks[table.num_null : stop]))
    states = states_until(seq, num_tokens)
    if seq.state is not None and not is_step and seq.state.write is not seq.state.read:
        states = [block for block in states if block not in seq.state.write]
    return states + tail_first(runs)


def leaving(seq: KVSequence, num_tokens: int) -> list[Block]:
    """Return the blocks that the first `num_tokens` tokens do not need, tail first.

    O(blocks returned).
    """
    if len(seq.tables) == 1:
        only = seq.tables[0]
        keep = -(-num_tokens // only.block_size)
        left = only.blocks[max(keep, only.num_null) :]  # as in `beyond`
        left.reverse()
        return left
    runs: list[tuple[int, int, list[Block]]] = []
    for table in seq.tables:
        left = table.beyond(-(-num_tokens // table.block_size))
        runs.append((len(table.blocks) - len(left), table.block_size, left))
    return tail_first(runs)


def cut_tables(seq: KVSequence, num_tokens: int) -> None:
    """Remove the blocks of `leaving`, which are released, from the tables. Cannot fail."""
    seq.num_reserved_tokens = seq.next_boundary = seq.fast_decode_limit = 0
    for table in seq.tables:
        table.cut(-(-num_tokens // table.block_size))


def cut(pool: BlockPool, seq: KVSequence, num_tokens: int) -> None:
    """Keep a sequence's first `num_tokens` tokens, and the blocks that they need. O(released)."""
    computed = computed_after_cut(seq, num_tokens)
    state: list[Block] = []
    if seq.state is not None:
        computed, state = find_resume(pool, seq, computed)
    kept = num_tokens if computed == min(num_tokens, seq.num_computed_tokens) else computed
    num_known = min(num_tokens, len(seq.packed))
    items = cut_items(seq.items, num_known)
    seq.packed.append(0)  # an exported buffer view raises here
    seq.packed.pop()
    if seq.state is None:
        pool.give_back(leaving(seq, kept))
    else:
        _go_back(pool, seq, computed, state, leaving(seq, kept))
    cut_tables(seq, kept)
    del seq.packed[num_known:]
    seq.num_unknown_tokens = num_tokens - num_known
    seq.items = items
    pool.num_computed_tokens -= seq.num_computed_tokens - computed
    seq.num_computed_tokens = computed
    seq.num_cached_tokens = min(seq.num_cached_tokens, computed)
    seq.cut_hashes(num_known)


def close_states(pool: BlockPool, seq: KVSequence) -> list[Block]:
    """Publish the state that a sequence has kept, and release all its blocks; or nothing.

    Returns:
        The blocks of the last state of the sequence, if it can be found.
    """
    last_event = pool.last_event
    published = publish_kept(pool, seq)
    try:
        settled = seq.num_settled_tokens
        end = settled if seq.ends is None else seq.ends.last_hit(settled)
        last = state_after(pool, seq, end)
        pool.give_back(states_until(seq, None) + leaving(seq, 0))
    except BaseException:
        pool.unpublish(published, last_event)
        raise
    if seq.state is not None:
        seq.state.forget()
    return last


def close(pool: BlockPool, seq: KVSequence) -> None:
    """Release all blocks of a sequence, which ends; or nothing. O(num_blocks)."""
    if seq.ends is not None:
        close_with_ends(pool, seq)
    elif seq.state is not None:
        close_states(pool, seq)
    else:
        pool.give_back(leaving(seq, 0))
    for table in seq.tables:
        table.cut(0)
    pool.num_computed_tokens -= seq.num_computed_tokens
    seq.owner = None


def close_with_ends(pool: BlockPool, seq: KVSequence) -> None:
    """Release all blocks of a sequence, whose end becomes known if it has computed anything.

    All or nothing. O(num_blocks), and O(tokens) with states.
    """
    needed: list[Block] = []
    spare: list[Block] = []
    ends, idle = seq.ends, pool.idle_blocks
    for table in seq.tables:
        if table.forgets and ends is not None:
            more_needed, more_spare, own = sort_out(
                table,
                ends,
                seq.num_settled_tokens,
                table.num_null,
                only_branches=idle.only_branches,
            )
            known = trailing_blocks(table)
            needed += more_needed + [block for block in own if block in known]
            needed += table.blocks[table.num_null : table.num_published]
            spare += more_spare
    if seq.state is None:
        pool.give_back(leaving(seq, 0))
    else:
        needed += close_states(pool, seq)
    if ends is not None and seq.num_computed_tokens > seq.num_cached_tokens:
        idle.sort_out(needed, spare, ends.num_known)
        idle.tell(ends.num_ended)
        ends.num_ended = 0  # those of its forks are the same


def _go_back(
    pool: BlockPool, seq: KVSequence, computed: int, pieces: list[Block], released: list[Block]
) -> None:
    """Release blocks, and all states but the one after the computed tokens; or nothing."""
    state = seq.state
    if state is None:
        return
    if computed == seq.num_computed_tokens:
        spare = [] if state.write is state.read else state.write
        pool.give_back(spare + released)
        state.write = [] if spare else state.write
        return
    new = [] if is_held(state, pieces) else pieces
    if new:
        pool.revive(new)
    try:
        pool.give_back(without(state, pieces) + released)
    except BaseException:
        pool.give_back(new)
        raise
    resume(state, pieces)


def tail_first(runs: Sequence[tuple[int, int, list[Block]]]) -> list[Block]:
    """Order runs of blocks, (first place, block size, blocks) for each group, by where they end.

    The tails of all groups come before the heads of any: what is reused first is what the fewest
    prefixes need. Of blocks that end together that of the last group comes first. O(blocks).
    """
    first, size, blocks = runs[0]
    if len(runs) == 1:
        return blocks[::-1]
    ends_together = {(width, start + len(run)) for start, width, run in runs}
    if len(ends_together) == 1:
        return _dealt(runs)
    found = blocks[::-1]
    ends = [(first + n) * size for n in range(len(found), 0, -1)]
    for first, width, blocks in runs[1:]:
        if blocks:
            found, ends = _merged(found, ends, first, width, blocks)
    return found


def _dealt(runs: Sequence[tuple[int, int, list[Block]]]) -> list[Block]:
    """Order runs of blocks of one size that all end at one place, as one deals cards. O(blocks).

    The result is that of `_merged`, in an eighth of its time in Python: slices are moved at once.
    """
    found: list[Block] = []
    stop = runs[0][0] + len(runs[0][2])
    for start in sorted({first for first, _, _ in runs}, reverse=True):
        there = [(first, blocks) for first, _, blocks in reversed(runs) if first <= start]
        part = there[0][1][start - there[0][0] : stop - there[0][0]] * len(there)
        for number, (first, blocks) in enumerate(there):
            part[number :: len(there)] = blocks[start - first : stop - first][::-1]
        found += part
        stop = start
    return found


def _merged(
    one: list[Block], ends: list[int], first: int, size: int, blocks: list[Block]
) -> tuple[list[Block], list[int]]:
    """Merge blocks that end at `ends`, the last first, with the run of a later group. O(blocks)."""
    found: list[Block] = []
    found_ends: list[int] = []
    place = len(blocks)
    end = (first + place) * size
    for index, its_end in enumerate(ends):
        while place and end >= its_end:
            place -= 1
            found.append(blocks[place])
            found_ends.append(end)
            end -= size
        if not place:
            return found + one[index:], found_ends + ends[index:]
        found.append(one[index])
        found_ends.append(its_end)
    for left in range(place - 1, -1, -1):
        found.append(blocks[left])
        found_ends.append((first + left + 1) * size)
    return found, found_ends


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


@final
class InvalidPrefix:
    """A prefix whose KV after the first `start` tokens is invalid.

    Attributes:
        namespace_key: its encoded namespace.
        packed: its tokens, more than `start`.
        items: its multimodal items.
        start: the number of tokens with valid KV.
    """

    __slots__ = ("items", "namespace_key", "packed", "start")

    def __init__(
        self,
        namespace_key: bytes | None,
        packed: array[int],
        items: tuple[MultimodalItem, ...],
        start: int,
    ) -> None:
        self.namespace_key = namespace_key
        self.packed = packed
        self.items = items
        self.start = start


def invalidate_from(
    pool: BlockPool, seq: KVSequence, num_tokens: int, sequences: Sequence[KVSequence]
) -> tuple[KVSequence, ...]:
    """Invalidate the KV of a sequence after `num_tokens` tokens, and all that depends on it.

    O(all tokens and blocks of the sequences and of the content below).

    Returns:
        The sequences that were set back.
    """
    prefixes: list[InvalidPrefix] = []
    valid_up_to: dict[Block, int] = {}
    _computed_from(seq, num_tokens, valid_up_to, prefixes)
    _add_invalid(pool, valid_up_to, prefixes, sequences)
    return _take_from_all(pool, valid_up_to, sequences, [])


def invalidate_blocks(
    pool: BlockPool,
    blocks: Sequence[Block],
    sequences: Sequence[KVSequence],
    leased: Sequence[Block] = (),
) -> tuple[KVSequence, ...]:
    """Invalidate the content of blocks, and all that may depend on it.

    Then release each leased block. O(all tokens and blocks of the sequences and of the
    content above and below).

    Returns:
        The sequences that were set back.
    """
    nodes = {block.node for block in blocks if block.node is not None}
    valid_up_to: dict[Block, int] = {}
    prefixes: list[InvalidPrefix] = []
    for block in blocks:
        node = block.node
        if node is not None:
            valid_up_to[block] = 0
            if node.parent not in nodes:  # that one covers all nodes below it
                prefixes.append(_invalid_prefix(node, pool.block_sizes[block.group]))
    bad = dict.fromkeys(blocks, 0)
    for seq in sequences:
        start = _first_invalid(seq, bad)
        if start < seq.num_computed_tokens:
            _computed_from(seq, start, valid_up_to, prefixes)
    _add_invalid(pool, valid_up_to, prefixes, sequences)
    return _take_from_all(pool, valid_up_to, sequences, leased)


def _computed_from(
    seq: KVSequence, num_tokens: int, valid_up_to: dict[Block, int], prefixes: list[InvalidPrefix]
) -> None:
    """Mark the blocks of a sequence as valid up to `num_tokens`, and list the invalid prefix."""
    for table in seq.tables:
        present = max(num_tokens // table.block_size, table.num_null)
        stop = -(-seq.num_computed_tokens // table.block_size)
        _add(valid_up_to, table.blocks[present:stop], num_tokens)
    if seq.state is not None and num_tokens < seq.num_computed_tokens:
        _add(valid_up_to, seq.state.read, num_tokens)
        if seq.state.kept_at > num_tokens:
            _add(valid_up_to, seq.state.kept, num_tokens)
    if num_tokens < seq.num_settled_tokens:  # other sequences share only known tokens
        prefixes.append(InvalidPrefix(seq.namespace_key, seq.packed, seq.items, num_tokens))


def _add(valid_up_to: dict[Block, int], blocks: Sequence[Block], num_tokens: int) -> None:
    for block in blocks:
        valid_up_to[block] = min(num_tokens, valid_up_to.get(block, num_tokens))


def _invalid_prefix(node: Node, size: int) -> InvalidPrefix:
    """Return the prefix that ends with the invalid content of a node. O(its tokens)."""
    while node.is_piece() and node.parent is not None:
        node = node.parent
    contents: list[bytes] = []
    while node.parent is not None:
        contents.append(node.tokens)
        node = node.parent
    contents.reverse()
    width = size * BYTES_PER_TOKEN
    packed = array("I", b"".join([content[:width] for content in contents]))
    items = decode_items([content[width:] for content in contents], size)
    return InvalidPrefix(node.tokens, packed, items, len(packed) - size)


def _add_invalid(
    pool: BlockPool,
    valid_up_to: dict[Block, int],
    prefixes: Sequence[InvalidPrefix],
    sequences: Sequence[KVSequence],
) -> None:
    """Mark all blocks with a prefix that is longer than the valid part of an invalid one.

    One token more is enough: a fork may have copied that token and continued differently in the
    same block.
    """
    for prefix in prefixes:
        for seq in sequences:
            if _has_settled(seq, prefix):
                _computed_from(seq, prefix.start, valid_up_to, [])
        for number in range(len(pool.trees)):
            for node in _nodes_past(pool, prefix, number):
                for below in [node, *node.descendants()]:
                    _add(valid_up_to, below.copies(), prefix.start)


def _has_settled(seq: KVSequence, prefix: InvalidPrefix) -> bool:
    """Return whether a sequence has settled the valid tokens of a prefix and the next one."""
    count = prefix.start + 1
    return (
        seq.num_settled_tokens >= count
        and seq.namespace_key == prefix.namespace_key
        and seq.packed[:count] == prefix.packed[:count]
        and cut_items(seq.items, count) == cut_items(prefix.items, count)
    )


def _nodes_past(pool: BlockPool, prefix: InvalidPrefix, number: int) -> list[Node]:
    """Return the first nodes of a group that continue a prefix past its valid tokens."""
    if prefix.namespace_key is None:
        return []
    size = pool.block_sizes[number]
    place = prefix.start // size
    contents = block_contents(prefix.packed, prefix.items, 0, place, size)
    above = pool.trees[number].find(prefix.namespace_key, contents)
    if above is None:
        return []
    rows = prefix.start + 1 - place * size
    tokens = prefix.packed[place * size : prefix.start + 1].tobytes()
    (items,) = encode_items(cut_items(prefix.items, prefix.start + 1), place, place + 1, size)
    width = size * BYTES_PER_TOKEN
    return [
        node
        for node in above.child_nodes()
        if node.tokens.startswith(tokens) and cut_encoded(node.tokens[width:], rows) == items
    ]


def _take_from_all(
    pool: BlockPool,
    valid_up_to: dict[Block, int],
    sequences: Sequence[KVSequence],
    leased: Sequence[Block],
) -> tuple[KVSequence, ...]:
    """Remove the content of blocks, and set back every sequence that has computed one of them.

    Then release each leased block. All or nothing. Returns those sequences.
    """
    targets = _targets(pool, valid_up_to, sequences)
    set_back = tuple([seq for seq, _, _ in targets])
    by_id = {block.block_id: block for block in valid_up_to}
    if pool.watcher is not None and any(block.node is not None for block in by_id.values()):
        pool.watcher.cleared()
    released: list[Block] = []
    new: list[Block] = []
    try:
        for seq, computed, state in targets:
            released += leaving(seq, computed)
            if seq.state is not None:
                released += without(seq.state, state)
                if not is_held(seq.state, state):
                    pool.revive(state)
                    new += state
        pool.forget([by_id[number] for number in sorted(by_id)], [*released, *leased])
    except BaseException:
        pool.give_back(new)
        raise
    for seq, computed, state in targets:
        if seq.state is not None:
            resume(seq.state, state)
        cut_tables(seq, computed)
        for table in seq.tables:
            table.num_published = min(table.num_published, computed // table.block_size)
            table.trailing = ()
        pool.num_computed_tokens -= seq.num_computed_tokens - computed
        seq.num_computed_tokens = computed
        seq.num_cached_tokens = min(seq.num_cached_tokens, computed)
        seq.cut_hashes(computed)
    return set_back


def _targets(
    pool: BlockPool, valid_up_to: dict[Block, int], sequences: Sequence[KVSequence]
) -> list[tuple[KVSequence, int, list[Block]]]:
    """Return the sequences to set back, with the tokens that stay computed and their state."""
    targets: list[tuple[KVSequence, int, list[Block]]] = []
    starts = [(seq, _first_invalid(seq, valid_up_to)) for seq in sequences]
    for seq, start in starts:
        if start < seq.num_computed_tokens:
            computed, state = _computed_before(seq, valid_up_to, start), list[Block]()
            if seq.state is not None:
                computed, state = find_resume(pool, seq, computed, valid_up_to)
            targets.append((seq, computed, state))
    return targets


def _first_invalid(seq: KVSequence, valid_up_to: dict[Block, int]) -> int:
    """Return the number of valid computed tokens of a sequence.

    O(num_blocks).
    """
    first = seq.num_computed_tokens
    for table in seq.tables:
        for place in range(table.num_null, len(table.blocks)):
            until = valid_up_to.get(table.blocks[place])
            if until is not None:
                first = min(first, max(until, place * table.block_size))
                break
    state = seq.state
    if state is not None:
        both = ((state.read, seq.num_computed_tokens), (state.kept, state.kept_at))
        for pieces, length in both:
            if not valid_up_to.keys().isdisjoint(pieces):
                first = min(first, length - 1)
    return first


def _computed_before(seq: KVSequence, valid_up_to: dict[Block, int], start: int) -> int:
    """Return the computed tokens that a sequence keeps, if they are valid up to `start`.

    A partly valid block stays if it has no other holder and cannot be hit. O(groups).
    """
    computed = start
    lowered = True
    while lowered:
        lowered = False
        for table in seq.tables:
            full, rest = divmod(computed, table.block_size)
            if rest and full >= table.num_null:
                block = table.blocks[full]
                if block.ref_count > 1 or (block.node is not None and block not in valid_up_to):
                    computed -= rest
                    lowered = True
    return computed_in_sight(seq, computed)
