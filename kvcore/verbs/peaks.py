"""The most blocks that a sequence holds while it is computed step by step.

Layer groups reach their peaks at different moments: full attention at the end, a window or a chunk
just before it releases blocks. The result is the exact maximum of the sum over all groups: a
sequence alone, in steps of at most `chunk` tokens each, holds that many blocks at some moment and
never more.

The blocks of windows and chunks repeat with the common period of these groups, and full attention
only grows. So only the moments of the last period are examined, and of these only those before a
release.

Does not know how many blocks are free.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from math import lcm
from typing import SupportsIndex

from kvcore.arguments import as_int
from kvcore.block import Block
from kvcore.sequence import KVSequence
from kvcore.tables.block_table import BlockTable
from kvcore.tables.groups import (
    LayerGroup,
    RecurrentState,
    attention_groups,
    resolve_groups,
    state_group,
)


def peak_blocks(
    num_tokens: SupportsIndex,
    block_size: SupportsIndex,
    *,
    groups: Sequence[LayerGroup] | None = None,
    chunk: SupportsIndex | None = None,
    num_external: SupportsIndex = 0,
) -> int:
    """Return the most blocks that a sequence alone holds at once while it is computed.

    A pool with that many usable blocks is sufficient, and a smaller one is not. More tokens or
    longer chunks never need fewer blocks. O(groups), and with windows or chunks
    O(groups * blocks that their groups release in one common period).

    Args:
        num_tokens: the length of the sequence.
        block_size: tokens a block, for groups that have no block size.
        groups: the layer groups; None: one of full attention.
        chunk: the most tokens computed in one step; None: all of them.
        num_external: the number of first tokens whose KV is loaded instead of computed.

    Raises:
        InvalidArgumentError: an argument is out of range.
    """
    total = as_int("num_tokens", num_tokens, 0)
    start = as_int("num_external", num_external, 0, total)
    size = as_int("block_size", block_size, 1, 2**20)
    width = total if chunk is None else as_int("chunk", chunk, 1)
    resolved = resolve_groups(groups, size)
    tables = [BlockTable(group) for group in attention_groups(resolved)]
    lengths = [-(-start // table.block_size) for table in tables]
    most = most_held(tables, lengths, [[] for _ in tables], start, total, width)
    state = state_group(resolved)
    if state is None or not total:
        return most
    return most + num_state_blocks(state, total, 0, start, None if chunk is None else width)


def num_state_blocks(
    group: RecurrentState, total: int, cached: int, external: int, chunk: int | None
) -> int:
    """Return the most blocks taken for states of a sequence at once. O(1).

    A pass that ends before the last one may publish its state, and so may a load: then the next
    pass reads that state and writes another. The arguments are those of `blocks_to_take`.
    """
    size = group.block_size
    start = max(cached, external)
    is_inside = chunk is not None and (total - 1) // size * size > start
    is_loaded = cached < external < total and external % size == 0
    return group.num_blocks * (2 if is_inside or is_loaded else 1)


def blocks_to_take(
    tables: Sequence[BlockTable],
    hits: Sequence[Sequence[Block]],
    cached: int,
    total: int,
    chunk: int | None,
    external: int,
) -> int:
    """Return the most free blocks that a new sequence holds at once, beside the hits it revives.

    Like `peak_blocks`; releasing a hit that has other holders frees no block.

    Args:
        tables: one of each layer group; their blocks are not read.
        hits: for each the cached blocks, up to the last of the prefix; empty for none.
        cached: the number of cached tokens.
        total: the number of all tokens.
        chunk: the most tokens computed in one step; None: all of them.
        external: the number of tokens whose KV is loaded, if fewer are cached.
    """
    lengths = [cached // table.block_size for table in tables]
    shared: list[list[int]] = [[] for _ in tables]
    revived = 0
    for number, blocks in enumerate(hits):
        first = lengths[number] - len(blocks)
        places = [first + n for n, block in enumerate(blocks) if block.ref_count]
        shared[number] = places
        revived += len(blocks) - len(places)
    width = total if chunk is None else chunk
    if external <= cached:
        return most_held(tables, lengths, shared, cached, total, width) - revived
    loaded = _num_loaded(tables, cached, external)
    lengths = [-(-external // table.block_size) for table in tables]
    later = most_held(tables, lengths, shared, external, total, width)
    return max(loaded, later - revived)


def blocks_still_taken(seq: KVSequence, total: int, chunk: int | None, external: int) -> int:
    """Return the most free blocks that an open sequence still takes until `total` are computed.

    In steps of at most `chunk` tokens, whose ids become known as late as they do now. Released
    blocks are reused first, unless they have other holders. If fewer than `external` tokens are
    computed, their KV is loaded before. O(groups) if the blocks are reserved or `chunk` is None;
    otherwise like `peak_blocks`, plus O(blocks in the windows).
    """
    if external > seq.num_computed_tokens:
        return _taken_with_a_load(seq, max(total, external), chunk, external)
    tables = seq.tables
    missing = sum([table.num_missing(total) for table in tables])
    states = _states_still_taken(seq, total, chunk)
    if chunk is None or missing == 0:
        return missing + states
    shared: list[list[int]] = []
    held = 0
    for table in tables:
        places: list[int] = []
        if table.forgets:
            known = range(table.num_null, len(table.blocks))
            places = [place for place in known if table.blocks[place].ref_count > 1]
        shared.append(places)
        held += len(table.blocks) - table.num_null - len(places)
    settled = seq.num_settled_tokens
    width = chunk + seq.num_computed_tokens - settled
    lengths = [len(table.blocks) for table in tables]
    return max(0, most_held(tables, lengths, shared, settled, total, width) - held) + states


def _states_still_taken(seq: KVSequence, total: int, chunk: int | None) -> int:
    """Return the most free blocks that the states of an open sequence still take. O(log)."""
    state = seq.state
    if state is None or total <= seq.num_computed_tokens:
        return 0
    missing = state.num_missing()
    if chunk is None or total == seq.num_computed_tokens + 1:
        return missing  # there is one step
    more = 0
    if state.write and state.write[0].ref_count > 1:  # a lease keeps it from being replaced
        more += state.group.num_blocks
    if seq.namespace_key is not None and state.next_kept(seq.num_computed_tokens) < total:
        more += state.group.num_blocks
    return missing + more


def _taken_with_a_load(seq: KVSequence, total: int, chunk: int | None, external: int) -> int:
    """Do what `blocks_still_taken` does after a load. O(blocks) in addition."""
    tables, computed = seq.tables, seq.num_computed_tokens
    shared: list[list[int]] = []
    held = 0
    for table in tables:
        known = range(table.num_null, len(table.blocks))
        places = [place for place in known if table.blocks[place].ref_count > 1]
        held += len(known) - len(places)
        shared.append([place for place in places if place < computed // table.block_size])
    lengths = [-(-external // table.block_size) for table in tables]
    width = total if chunk is None else chunk
    later = most_held(tables, lengths, shared, external, total, width)
    pieces = 0 if seq.state is None else 2 * seq.state.group.num_blocks
    return max(_num_loaded(tables, computed, external), later - held) + pieces


def _num_loaded(tables: Sequence[BlockTable], computed: int, external: int) -> int:
    """Return the number of blocks that a load takes. O(groups)."""
    return sum(
        [
            -(-external // table.block_size) - table.first_loaded(computed, external)
            for table in tables
        ]
    )


def most_held(
    tables: Sequence[BlockTable],
    lengths: Sequence[int],
    shared: Sequence[Sequence[int]],
    start: int,
    stop: int,
    width: int,
) -> int:
    """Return the most blocks held at one moment, without those of other holders.

    Args:
        tables: of a sequence, one a group; only what their groups see is read.
        lengths: the number of entries of each at the beginning.
        shared: the places in each, in order, of blocks that others hold too.
        start: the number of settled tokens at the beginning.
        stop: the number of settled tokens in the end.
        width: the most tokens of room beyond the settled ones; never beyond the end.
    """
    last = max(start, stop - width)  # from here on nothing is taken any more
    sizes = [lcm(table.block_size, table.chunk or 1) for table in tables if table.forgets]
    first = last - lcm(*sizes) + 1  # before the last period nothing is held that is not held later
    most, settled = 0, start
    while True:
        kept = [table.first_kept(settled) for table in tables]
        passing = min([table.next_pass(kept[n]) for n, table in enumerate(tables)])
        moment = min(passing - 1, last)
        room = min(moment + width, stop)
        held = 0
        for number, table in enumerate(tables):
            held += max(lengths[number], -(-room // table.block_size)) - kept[number]
            places = shared[number]
            held -= len(places) - bisect_left(places, kept[number])
        most = max(most, held)
        if moment == last:
            return most
        settled = max(passing, first)
