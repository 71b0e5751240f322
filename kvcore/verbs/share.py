"""Shared blocks: prefix cache look-ups, forks, and the common blocks of sequences.

Each function handles all layer groups together. Checks and allocations come first, then the pool
changes, and then only existing fields are set: an exception leaves everything unchanged. The
manager has already checked the arguments.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final, SupportsIndex, cast

from kvcore.arguments import as_int
from kvcore.block import Block
from kvcore.content_tree import find_pieces
from kvcore.errors import InvalidArgumentError
from kvcore.eviction.retention import RetentionTerm, retention_terms
from kvcore.identity.multimodal import MultimodalItem, as_items, check_items, encode_items
from kvcore.identity.namespace import DEFAULT_NAMESPACE, Namespace, encode_namespace
from kvcore.identity.tokens import Tokens, pack
from kvcore.pool import BlockPool
from kvcore.reports import CopyOrder, Plan
from kvcore.sequence import KVSequence, check_length
from kvcore.tables.block_table import BlockTable
from kvcore.tables.state_table import StateTable
from kvcore.verbs.ends import Sight, learn_ends
from kvcore.verbs.peaks import blocks_to_take, num_state_blocks
from kvcore.verbs.states import find_resume, states_until

_DEFAULT_KEY: Final = encode_namespace(DEFAULT_NAMESPACE)


def describe(
    tokens: Tokens,
    namespace: Namespace | None,
    items: Sequence[MultimodalItem],
    longest: int | None,
) -> tuple[array[int], bytes | None, tuple[MultimodalItem, ...]]:
    """Check the arguments of a new sequence; return its tokens, namespace key and items.

    O(len(tokens)).

    Raises:
        InvalidArgumentError: no tokens, not token ids, not a namespace, or items that overlap
            or reach beyond the tokens.
        SequenceTooLongError: more tokens than `longest`.
    """
    key = None
    if namespace is DEFAULT_NAMESPACE:
        key = _DEFAULT_KEY
    elif namespace is not None:
        # A subclass may mean more than its fields say, and would share what it should not.
        if type(namespace) is not Namespace:
            raise InvalidArgumentError(
                f"namespace: wanted a Namespace or None, got {type(namespace).__name__}"
            )
        key = encode_namespace(namespace)
    # The usual case of `pack`, without its call.
    is_packed = type(tokens) is array and tokens.typecode == "I"
    packed: array[int] = tokens[:] if is_packed else pack(tokens)  # type: ignore[index,assignment]
    if not packed:
        raise InvalidArgumentError("tokens: wanted at least one token, got none")
    if longest is not None:
        check_length(len(packed), longest)
    if not items and type(items) is tuple:
        return packed, key, ()
    return packed, key, check_items(as_items(items), 0, len(packed))


def share_cached(
    pool: BlockPool, seq: KVSequence, recompute: int, sight: Sight | None
) -> list[Block]:
    """Fill the tables of a new, cached sequence with its longest cached prefix. O(its blocks).

    The last `recompute` tokens of what is cached are not hits. `sight` gets what is seen on the
    way; None: there are no windows and no states.

    Returns:
        The blocks of the tables; the sequence does not hold them yet.
    """
    key = seq.namespace_key or b""
    only = seq.tables[0]
    if len(seq.tables) == 1 and not only.forgets and seq.state is None:
        if seq.items or recompute:
            hits = find_blocks(pool, only.block_size, key, seq.packed, seq.items, recompute)
        else:
            longest = (len(seq.packed) - 1) // only.block_size
            hits = pool.match(key, seq.packed.tobytes(), longest) if longest else []
        if hits:
            only.start(pool.null, 0, hits)
            seq.num_computed_tokens = seq.num_cached_tokens = len(hits) * only.block_size
        return hits
    hits = []
    sight = Sight() if sight is None else sight
    cached, found, junction = find_prefix(
        pool, seq.tables, seq.state, key, seq.packed, seq.items, recompute, sight
    )
    learn_ends(pool, seq, sight, cached)
    if seq.state is not None:
        ends = [*seq.state.wanted, junction, *sight.branches]
        seq.state.begin(len(seq.packed), cached, ends)
        seq.state.read = found[-1]
        hits += found[-1]
    if cached:
        for index, table in enumerate(seq.tables):
            blocks = found[index]
            table.start(pool.null, cached // table.block_size - len(blocks), blocks)
            hits += blocks
        seq.num_computed_tokens = seq.num_cached_tokens = cached
    return hits


def find_prefix(
    pool: BlockPool,
    tables: Sequence[BlockTable],
    state: StateTable | None,
    namespace_key: bytes,
    packed: array[int],
    items: Sequence[MultimodalItem],
    recompute: int,
    sight: Sight,
) -> tuple[int, list[list[Block]], int]:
    """Return the longest prefix that every group can serve, and the blocks that serve it.

    At most all tokens but the last. Holds nothing. O(groups * blocks of the prefix).
    With `recompute` what is cached may end with the last token, and the prefix ends before it.

    Args:
        pool: the pool to search.
        tables: one of each group with attention; their blocks are not read.
        state: that of the group with recurrent states; its blocks are not read.
        namespace_key: the encoded namespace.
        packed: the tokens.
        items: content that is not tokens.
        recompute: the number of tokens after the prefix that each group with attention must have
            cached as well.
        sight: gets what is seen on the way.

    Returns:
        Its length in tokens; for each group the blocks it needs, those that are visible from its
        end; and the length of the prefix that all groups with attention can serve.
    """
    if len(tables) == 1 and not tables[0].forgets and state is None:
        size = tables[0].block_size
        blocks = find_blocks(pool, size, namespace_key, packed, items, recompute)
        return len(blocks) * size, [blocks], len(blocks) * size
    content = packed.tobytes()
    longest = _longest_look_up(packed, recompute)
    paths = sight.paths
    for number, table in enumerate(tables):
        size = table.block_size
        encoded = _items_by_block(items, size, longest)
        if table.forgets:
            path = pool.path(namespace_key, content, longest // size, number, encoded)
        else:
            whole = pool.match(namespace_key, content, longest // size, number, encoded)
            path = cast("list[Block | None]", whole)
        if not path:
            return 0, [[] for _ in pool.trees], 0
        sight.add(path, longest, size)
        longest = min(longest, len(path) * size)  # no group has to look beyond
    longest = junction = longest_servable(tables, paths, longest, pool.common_size)
    if recompute:
        rest = max(0, longest - recompute)
        longest = junction = longest_servable(tables, paths, rest, pool.common_size)
    path = []
    if state is not None:
        size = state.block_size
        encoded = _items_by_block(items, size, longest)
        path = pool.path(namespace_key, content, longest // size, state.number, encoded)
        longest = min(longest, len(path) * size)
        together = [*tables, state.lookup]
        longest = longest_servable(together, [*paths, path], longest, pool.common_size)
        paths.append(path)
    needed: list[list[Block]] = []
    for index, table in enumerate(tables):
        seen = paths[index][table.first_kept(longest) : longest // table.block_size]
        needed.append([block for block in seen if block is not None])
    if state is not None:
        last = path[longest // state.block_size - 1] if longest else None
        needed.append([] if last is None else find_pieces(last, state.group.num_blocks))
    return longest, needed, junction


def longest_servable(
    tables: Sequence[BlockTable], paths: list[list[Block | None]], longest: int, step: int
) -> int:
    """Return the longest prefix, in tokens, that every group has the blocks for. O(blocks).

    Lengths are tried from the longest down, so the result is the longest common prefix of all
    groups. After a gap that a group would see, the search continues with the length that ends
    before the gap: every longer prefix sees the gap too.

    Args:
        tables: one of each group.
        paths: for each group the block of every node along the prefix, None where it has none;
            where attention is full, up to the first gap.
        longest: the longest prefix wanted, within all paths.
        step: the least common multiple of the groups' block sizes.
    """
    sound = [len(path) for path in paths]  # from here to where the prefix ends there is no gap
    longest -= longest % step
    while longest:
        shorter = longest
        for number, table in enumerate(tables):
            if table.forgets:
                path, first = paths[number], table.first_kept(longest)
                place = min(sound[number], longest // table.block_size)
                while place > first and path[place - 1] is not None:
                    place -= 1
                sound[number] = place
                if place > first:
                    shorter = min(shorter, (place - 1) * table.block_size)
        if shorter == longest:
            break
        longest = shorter - shorter % step
    return longest


def planned(
    pool: BlockPool,
    tables: Sequence[BlockTable],
    state: StateTable | None,
    packed: array[int],
    key: bytes | None,
    items: tuple[MultimodalItem, ...],
    chunk: int | None,
    external: int,
    recompute: int,
    *,
    is_blind: bool,
) -> Plan:
    """Return the blocks that a new sequence would hit and take. Changes nothing.

    `key` is its namespace key, None if it is not cached; `is_blind`: without a look-up. The KV of
    `external` tokens is loaded, and the others are computed in steps of `chunk` tokens. The cost of
    `find_prefix` and `blocks_to_take`.
    """
    cached = 0
    hits: list[list[Block]] = []
    if key is not None and not is_blind:
        cached, hits, _ = find_prefix(pool, tables, state, key, packed, items, recompute, Sight())
    num_new = blocks_to_take(tables, hits[: len(tables)], cached, len(packed), chunk, external)
    if state is not None:
        is_revived = any(block.ref_count == 0 for block in hits[-1]) if hits else False
        if key is None or is_revived:  # none is published; or the one that is found is free later
            num_new += state.group.num_blocks
        else:
            num_new += num_state_blocks(state.group, len(packed), cached, external, chunk)
    return Plan(
        num_cached_tokens=cached,
        num_new_blocks=num_new,
        num_revived_blocks=sum([b.ref_count == 0 for blocks in hits for b in blocks]),
        num_free_blocks=pool.num_free_blocks,
        num_deferred_blocks=pool.num_deferred_blocks,
        found=hits,
    )


def find_blocks(
    pool: BlockPool,
    size: int,
    namespace_key: bytes,
    packed: array[int],
    items: Sequence[MultimodalItem],
    recompute: int,
) -> list[Block]:
    """Do what `find_prefix` does for one group of full attention. O(blocks)."""
    longest = _longest_look_up(packed, recompute)
    encoded = _items_by_block(items, size, longest) if items else None
    hits = pool.match(namespace_key, packed.tobytes(), longest // size, 0, encoded)
    if recompute:
        del hits[max(0, len(hits) * size - recompute) // size :]
    return hits


def _longest_look_up(packed: array[int], recompute: int) -> int:
    """Return how many tokens are looked up, so that the last one is not a hit. O(1)."""
    return len(packed) if recompute else len(packed) - 1


def kept_hits(pool: BlockPool, seq: KVSequence) -> list[tuple[Block, tuple[RetentionTerm, ...]]]:
    """Return the retention terms of the hits of a new sequence. O(hits * terms)."""
    kept: list[tuple[Block, tuple[RetentionTerm, ...]]] = []
    found: list[tuple[int, Block]] = []
    for table in seq.tables:
        known = range(table.num_null, len(table.blocks))
        found += [(place * table.block_size, table.blocks[place]) for place in known]
    if seq.state is not None:
        start = seq.num_computed_tokens - seq.state.block_size
        found += [(start, block) for block in seq.state.read]
    for start, block in found:
        terms = retention_terms(seq.retention, start, seq.opened_at, pool.step)
        if terms:
            kept.append((block, pool.idle_blocks.merged_terms(block, terms)))
    return kept


def _items_by_block(
    items: Sequence[MultimodalItem], size: int, num_tokens: int
) -> list[bytes] | None:
    """Return the encoded items of every whole block, None if there are no items at all."""
    return encode_items(items, 0, num_tokens // size, size) if items else None


def share_computed(pool: BlockPool, parent: KVSequence, child: KVSequence) -> tuple[CopyOrder, ...]:
    """Share the settled tokens of a sequence with a new one, or nothing. O(num_blocks).

    Args:
        pool: the pool of both.
        parent: the sequence to share with.
        child: a new sequence with the same known tokens and empty tables.

    Returns:
        The copies into the child's new blocks: one for each group whose last is half full.

    Raises:
        OutOfBlocksError: too few blocks are free for those.
    """
    computed = parent.num_settled_tokens
    state: list[Block] = []
    if parent.state is not None:
        computed, state = find_resume(pool, parent, computed)
    half_full = [table for table in parent.tables if computed % table.block_size]
    own = pool.next_blocks(len(half_full))
    held: list[Block] = state[:]
    child.num_computed_tokens = computed
    child.retention, child.opened_at = parent.retention, parent.opened_at
    child.ends = parent.ends
    orders: list[CopyOrder] = []
    for number, (table, own_table) in enumerate(zip(parent.tables, child.tables, strict=True)):
        full, rest = divmod(computed, table.block_size)
        num_null = min(table.num_null, full)
        shared = table.blocks[num_null:full]
        held += shared
        own_table.start(pool.null, num_null, shared)
        own_table.num_published = min(table.num_published, full)
        if rest:
            copy = own[len(orders)]
            own_table.grow([copy])
            orders.append(CopyOrder(table.blocks[full].block_id, copy.block_id, rest, number))
    found = tuple(orders)
    pool.revive(held)
    try:
        pool.hand_out(own)
    except BaseException:
        pool.give_back(held)  # the parent holds them too, so none becomes free
        raise
    for block, order in zip(own, found, strict=True):
        pool.assign((block,), order.group)
    for table in parent.tables:
        table.trailing = ()  # the end of the child may need these longer than the parent's
    mine, its = parent.state, child.state
    if mine is not None and its is not None:
        its.prompt, its.wanted, its.read = mine.prompt, mine.wanted, state
        if mine.write is mine.read:  # it has another holder now, so the next is written elsewhere
            mine.write = []
            parent.num_reserved_tokens = parent.next_boundary = parent.fast_decode_limit = 0
    pool.num_computed_tokens += computed
    return found


def num_exclusive(seq: KVSequence) -> int:
    """Count the blocks that only this sequence holds. O(num_blocks)."""
    held = [block for table in seq.tables for block in table.blocks[table.num_null :]]
    return sum([block.ref_count == 1 for block in held + states_until(seq, None)])


def num_shared(seq: KVSequence, group: SupportsIndex) -> int:
    """Return the number of leading blocks of a group that have other holders. O(those).

    Raises:
        InvalidArgumentError: no such group.
    """
    table = seq.tables[as_int("group", group, 0, len(seq.tables) - 1)]
    count = 0
    for block in table.blocks[table.num_null :]:
        if block.ref_count < 2:
            break
        count += 1
    return count


def num_common(seqs: Sequence[KVSequence], group: SupportsIndex) -> int:
    """Return the number of leading blocks that sequences share, without null. O(blocks shared).

    Raises:
        InvalidArgumentError: no sequences, or no such group.
    """
    if not seqs:
        raise InvalidArgumentError("seqs: wanted at least one sequence, got none")
    number = as_int("group", group, 0, len(seqs[0].tables) - 1)
    tables = [seq.tables[number] for seq in seqs]
    first, *others = [table.block_ids for table in tables]
    count = 0 if tables[0].num_null else len(first)
    for block_ids in others:
        both = range(min(count, len(block_ids)))
        count = next((i for i in both if first[i] != block_ids[i]), len(both))
    return count
