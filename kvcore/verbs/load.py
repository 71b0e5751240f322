"""KV from outside: room for the first tokens of a sequence, and their arrival.

Another host, a disk or a host's memory has the KV of a prefix. What a sequence computes block by
block leaves the blocks that a window has passed behind; what arrives at once never has them: a
group has room for what a query after the prefix sees, and for the last full block, below which
the next one's content hangs. All before that are null entries.

While it is under way the blocks belong to a lease, and the sequence stays what it was: it may be
cut, forked, computed further or closed, and a load that fails leaves nothing to undo. When all has
arrived it joins the sequence, if it still fits there: the tokens are the same, and every group has,
from the sequence or from the load, what it has to see. Then it is computed like any other: others
find it, and what is out of sight is given back.
"""

from __future__ import annotations

from kvcore.block import Block
from kvcore.errors import InvalidArgumentError
from kvcore.identity.block_hash import block_contents
from kvcore.identity.multimodal import cut_items
from kvcore.lease import Lease, LeaseBook, Load
from kvcore.pool import BlockPool
from kvcore.sequence import KVSequence
from kvcore.tables.groups import serves
from kvcore.verbs.rewind import tail_first
from kvcore.verbs.step import keep


def begin(
    pool: BlockPool,
    book: LeaseBook,
    seq: KVSequence,
    num_tokens: int,
    owner: str,
    max_steps: int | None,
) -> Lease:
    """Take blocks for the KV of a sequence's first `num_tokens` tokens, or none.

    They are told, and not all computed. O(new blocks + tokens copied).

    Raises:
        OutOfBlocksError: too few blocks are free.
        InvalidArgumentError: `owner` is no string.
    """
    computed = seq.num_computed_tokens
    firsts = tuple([table.first_loaded(computed, num_tokens) for table in seq.tables])
    stops = [-(-num_tokens // table.block_size) for table in seq.tables]
    new = pool.next_blocks(sum(stops) - sum(firsts))
    blocks: list[list[Block]] = []
    runs: list[tuple[int, int, list[Block]]] = []
    start = 0
    for number, table in enumerate(seq.tables):
        stop = start + stops[number] - firsts[number]
        blocks.append(new[start:stop])
        runs.append((firsts[number], table.block_size, new[start:stop]))
        start = stop
    items = cut_items(seq.items, num_tokens)
    load = Load(seq, firsts, blocks, seq.packed[:num_tokens], items)
    lease = book.begin_load(new, tail_first(runs), load, owner, max_steps)
    for number, run in enumerate(blocks):
        pool.assign(run, number)
    return lease


def join(pool: BlockPool, book: LeaseBook, lease: Lease, longest: int | None) -> bool:
    """Let what has arrived be a sequence's, and end its lease; or only end it. All or nothing.

    O(blocks of the prefix).

    Args:
        pool: the pool of both.
        book: whose lease it is.
        lease: what `begin` has returned; it may have ended.
        longest: the most tokens that a sequence may have.

    Returns:
        Whether the sequence has it.

    Raises:
        InvalidArgumentError: not such a lease.
    """
    is_active = book.is_active(lease)
    load = lease.load
    if load is None:
        raise InvalidArgumentError(f"lease: wanted one of `begin_load`, got {lease!r}")
    if not is_active:
        return False
    seq = load.seq
    if not _fits(load):
        book.end(lease.lease_id)
        return False
    kept = [table.first_kept(load.num_tokens) for table in seq.tables]
    entries = [_entries(pool, load, number, first) for number, first in enumerate(kept)]
    released = _released(lease, load)
    last_event = pool.last_event
    published: list[Block] = []
    try:
        if seq.namespace_key is not None:
            for number, blocks in enumerate(entries):
                _publish(pool, load, number, blocks, published)
        if released:
            pool.give_back(released)
    except BaseException:
        pool.unpublish(published, last_event)
        raise
    pool.num_computed_tokens += load.num_tokens - seq.num_computed_tokens
    _set(load, entries, kept)
    book.forget((lease,))
    seq.find_limits(longest)
    return True


def _fits(load: Load) -> bool:
    """Say whether a sequence, with what was loaded, has all that a query after it sees. O(tokens).

    It has computed less, and has the tokens that the KV is of.
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
    """Return what a table has once the load has joined it. O(blocks of the prefix).

    `kept` null entries, the full blocks that the sequence has computed, and what was loaded.
    """
    table = load.seq.tables[number]
    own = load.seq.num_computed_tokens // table.block_size
    loaded = load.blocks[number][max(0, own - load.first_blocks[number]) :]
    return [pool.null] * kept + table.blocks[kept:own] + loaded


def _released(lease: Lease, load: Load) -> list[Block]:
    """Return what is given back when a load joins, in the order of release. O(blocks).

    What was loaded and is computed meanwhile, what the sequence has after its last full block, and
    what is out of sight.
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


def _publish(
    pool: BlockPool, load: Load, number: int, entries: list[Block], published: list[Block]
) -> None:
    """Publish what a load makes full of a table's entries, and note it. O(tokens).

    What nobody ever had of it is the content of no block, as if a window had moved on.
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
    """Set what the pool knows already. Cannot fail. O(groups)."""
    seq = load.seq
    is_cached = seq.namespace_key is not None
    for number, table in enumerate(seq.tables):
        full = load.num_tokens // table.block_size
        table.renew(entries[number], kept[number], full if is_cached else 0)
    seq.num_computed_tokens = load.num_tokens
    seq.fast_decode_limit = 0  # what a whole step counts up to is not known of these tables yet
