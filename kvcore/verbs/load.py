"""Loads: KV of a prefix from another host, a disk or host memory.

A sequence that computes its tokens allocates the blocks that its windows pass; a load does not.
Each group gets blocks for the tokens that later queries see, and for the last full block, because
the next content is its child in the tree. All entries before are null.

During the load its blocks belong to a lease, and the sequence is unchanged: it may be truncated,
forked, computed further or closed, and a failed load leaves nothing to undo. When the KV has
arrived, the blocks join the sequence if they still fit: the tokens are the same, and the sequence
and the load together have all blocks that later queries see. Then the loaded blocks are like
computed ones: other sequences can hit them, and blocks outside the windows are released.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from kvcore.block import Block
from kvcore.errors import InvalidArgumentError
from kvcore.identity.block_hash import block_contents
from kvcore.identity.multimodal import cut_items
from kvcore.lease import Lease, LeaseBook, Load
from kvcore.pool import BlockPool
from kvcore.sequence import KVSequence
from kvcore.tables.ends import sort_out
from kvcore.tables.groups import serves
from kvcore.verbs.rewind import tail_first
from kvcore.verbs.states import publish_state, resume, states_until
from kvcore.verbs.step import keep

_block_id = attrgetter("block_id")


def begin(
    pool: BlockPool,
    book: LeaseBook,
    seq: KVSequence,
    num_tokens: int,
    owner: str,
    max_steps: int | None,
) -> Lease:
    """Take blocks for the KV of a sequence's first `num_tokens` tokens, or none.

    The tokens are known, and not all are computed. O(new blocks + tokens copied).

    Raises:
        OutOfBlocksError: too few blocks are free.
        InvalidArgumentError: `owner` is no string.
    """
    computed = seq.num_computed_tokens
    firsts = tuple([table.first_loaded(computed, num_tokens) for table in seq.tables])
    stops = [-(-num_tokens // table.block_size) for table in seq.tables]
    pieces = 0 if seq.state is None else seq.state.group.num_blocks
    new = pool.next_blocks(sum(stops) - sum(firsts) + pieces)
    rising = sorted(new, key=_block_id)  # what lies together moves together
    blocks: list[list[Block]] = []
    runs: list[tuple[int, int, list[Block]]] = []
    start = 0
    for number, table in enumerate(seq.tables):
        stop = start + stops[number] - firsts[number]
        blocks.append(rising[start:stop])
        runs.append((firsts[number], table.block_size, rising[start:stop]))
        start = stop
    if seq.state is not None:
        firsts = (*firsts, (num_tokens - 1) // seq.state.block_size)
        blocks.append(rising[start:])
    items = cut_items(seq.items, num_tokens)
    load = Load(seq, firsts, blocks, seq.packed[:num_tokens], items)
    ordered = rising[len(new) - pieces :] + tail_first(runs)
    lease = book.begin_load(new, ordered, load, owner, max_steps)
    for number, run in enumerate(blocks):
        pool.assign(run, number)
    return lease


def join(pool: BlockPool, book: LeaseBook, lease: Lease, longest: int | None) -> bool:
    """Give the loaded blocks to the sequence if they fit, and end the lease. All or nothing.

    O(blocks of the prefix).

    Args:
        pool: the pool of both.
        book: the leases.
        lease: the result of `begin`; it may have ended.
        longest: the most tokens that a sequence may have.

    Returns:
        True if the sequence has the loaded tokens.

    Raises:
        InvalidArgumentError: not such a lease.
    """
    is_active = book.is_active(lease)
    load = lease.load
    if load is None:
        raise InvalidArgumentError(f"lease: wanted a lease of begin_load, got {lease!r}")
    if not is_active:
        return False
    seq = load.seq
    if not _fits(load):
        book.end(lease.lease_id)
        return False
    kept = [table.first_kept(load.num_tokens) for table in seq.tables]
    entries = [_entries(pool, load, number, first) for number, first in enumerate(kept)]
    released = states_until(seq, None) + _released(lease, load)
    only_branches = pool.idle_blocks.only_branches
    needed, spare = _sorted_out(seq, load.num_tokens, kept, only_branches=only_branches)
    last_event = pool.last_event
    published: list[Block] = []
    try:
        if seq.namespace_key is not None:
            for number, blocks in enumerate(entries):
                _publish(pool, load, number, blocks, published)
            if seq.state is not None and load.num_tokens % seq.state.block_size == 0:
                published += load.blocks[-1]
                publish_state(pool, seq, seq.state, load.blocks[-1], load.num_tokens)
        if released:
            pool.give_back(released)
    except BaseException:
        pool.unpublish(published, last_event)
        raise
    pool.num_computed_tokens += load.num_tokens - seq.num_computed_tokens
    _set(load, entries, kept)
    if seq.ends is not None:
        pool.idle_blocks.sort_out(needed, spare, seq.ends.num_known)
    book.forget((lease,))
    seq.find_limits(longest)
    return True


def _fits(load: Load) -> bool:
    """Return whether a load still fits its sequence. O(tokens).

    The sequence has computed fewer tokens, has the loaded tokens, and has together with the load
    all blocks that later queries see.
    """
    seq, num_tokens = load.seq, load.num_tokens
    computed = seq.num_computed_tokens
    if not seq.is_open or computed >= num_tokens or seq.packed[:num_tokens] != load.packed:
        return False
    for number, table in enumerate(seq.tables):
        if load.first_blocks[number] > table.first_loaded(computed, num_tokens):
            return False
    return cut_items(seq.items, num_tokens) == load.items


def _entries(pool: BlockPool, load: Load, number: int, kept: int) -> list[Block]:
    """Return the entries of a table after the load. O(blocks of the prefix).

    `kept` null entries, the full blocks that the sequence has computed, and the loaded blocks.
    """
    table = load.seq.tables[number]
    own = load.seq.num_computed_tokens // table.block_size
    loaded = load.blocks[number][max(0, own - load.first_blocks[number]) :]
    return [pool.null] * kept + table.blocks[kept:own] + loaded


def _released(lease: Lease, load: Load) -> list[Block]:
    """Return the blocks to release when a load joins, in order. O(blocks).

    Loaded blocks that were computed meanwhile, the blocks of the sequence after its last full one,
    and blocks outside the windows.
    """
    seq = load.seq
    left: set[Block] = set()
    beyond: list[tuple[int, int, list[Block]]] = []
    passed: list[Block] = []
    for number, table in enumerate(seq.tables):
        own = seq.num_computed_tokens // table.block_size
        left.update(load.blocks[number][: max(0, own - load.first_blocks[number])])
        beyond.append((max(own, table.num_null), table.block_size, table.beyond(own)))
        passed += table.before(min(own, table.first_kept(load.num_tokens)))
    return [block for block in lease.blocks if block in left] + tail_first(beyond) + passed


def _sorted_out(
    seq: KVSequence, num_tokens: int, kept: Sequence[int], *, only_branches: bool
) -> tuple[list[Block], list[Block]]:
    """Return the blocks outside the windows that a known end needs, and the others. O(those)."""
    needed: list[Block] = []
    spare: list[Block] = []
    for number, table in enumerate(seq.tables):
        if seq.ends is not None and table.forgets:
            last = min(kept[number], table.num_published)
            more_needed, more_spare, _ = sort_out(
                table, seq.ends, num_tokens, last, only_branches=only_branches
            )
            needed += more_needed
            spare += more_spare
    return needed, spare


def _publish(
    pool: BlockPool, load: Load, number: int, entries: list[Block], published: list[Block]
) -> None:
    """Publish the blocks of a table that a load fills, and list them. O(tokens).

    Contents before the loaded blocks get no block, as if a window had moved on.
    """
    seq = load.seq
    table = seq.tables[number]
    size = table.block_size
    own, full = seq.num_computed_tokens // size, load.num_tokens // size
    if full == own:
        return
    first = max(own, load.first_blocks[number])
    blocks = entries[first:full]
    contents = block_contents(seq.packed, seq.items, own, full, size)
    passing = b""
    if table.forgets and pool.is_uneven:
        hits = pool.common_size
        passing = bytes([not serves(table.group, place, hits) for place in range(first, full)])
    published += blocks
    above = table.blocks[own - 1].node if own else None
    pool.attach(blocks, seq.namespace_key or b"", above, contents, number, passing)
    for place, block in enumerate(blocks, first):
        keep(pool, seq, block, place * size)


def _set(load: Load, entries: list[list[Block]], kept: list[int]) -> None:
    """Set the fields of a sequence after the pool has changed. Cannot fail. O(groups)."""
    seq = load.seq
    is_cached = seq.namespace_key is not None
    for number, table in enumerate(seq.tables):
        full = load.num_tokens // table.block_size
        table.renew(entries[number], kept[number], full if is_cached else 0)
    if seq.state is not None:
        resume(seq.state, load.blocks[-1])
    seq.num_computed_tokens = load.num_tokens
    seq.fast_decode_limit = 0  # unknown for the new tables
