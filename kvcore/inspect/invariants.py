"""`check(manager)`: the properties of the allocator, recomputed from nothing.

Each function states one property, takes a manager at rest (between two calls) and raises
`InvariantError` with the property's number. They trust no counter and no shortcut: lengths are
counted, references are counted over the live tables, content is spelled from the path. Properties
that speak of two moments (atomicity, order, delivery) cannot be seen in one state: the state
machines of the test suite check those.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from math import lcm
from typing import Final, NoReturn

from kvcore.block import Block, Node
from kvcore.content_tree import ContentTree, find_pieces
from kvcore.errors import InvariantError
from kvcore.events import fold
from kvcore.identity.block_hash import block_contents
from kvcore.identity.tokens import BYTES_PER_TOKEN
from kvcore.manager import KVCacheManager
from kvcore.sequence import KVSequence
from kvcore.tables.block_table import BlockTable
from kvcore.tables.groups import attention_groups, first_kept_block, state_group
from kvcore.tables.state_table import StateTable


def partition(manager: KVCacheManager) -> None:
    """P1: every block but the null block is either held, or in the free queue exactly once."""
    pool = manager.pool
    queued = Counter(id(block) for block in _walk_queue(manager))
    num_queued = sum(queued.values())
    if num_queued != pool.num_free_blocks:
        _fail("P1", f"{num_queued} blocks in the queue, its counter says {pool.num_free_blocks}")
    for queue in (pool.idle_blocks.spare, pool.idle_blocks.queue):
        idle = sum(1 for _ in queue)
        length = queue.__len__()  # `len` refuses one below zero
        if idle != length:
            _fail("P1", f"{idle} idle blocks in the queue, its length says {length}")
    for block_id, block in enumerate(pool.blocks):
        if block.block_id != block_id:
            _fail("P1", f"block {block_id} believes to be {block.block_id}")
        times = queued.pop(id(block), 0)
        wanted = 1 if block_id and block.ref_count == 0 else 0
        if times != wanted:
            _fail("P1", f"{block!r} is {times} times in the free queue, wanted {wanted}")
    if queued:
        _fail("P1", "the free queue has a block that is not the pool's")


def ref_counts(manager: KVCacheManager) -> None:
    """P2: a block's ref count is the number of its places in live tables and leases.

    Its count of leases is the number of its places in leases.
    """
    held = Counter(id(block) for _, table in _tables(manager) for block in _owned(table))
    held.update([id(block) for _, state in _states(manager) for block in state.blocks()])
    leases = Counter(id(b) for lease in manager.leases.active.values() for b in lease.blocks)
    held.update(leases)
    for block in manager.pool.blocks:
        if block.ref_count != held[id(block)]:
            _fail("P2", f"{block!r} has {held[id(block)]} places in live tables and leases")
        if block.num_leases != leases[id(block)]:
            _fail("P2", f"{block!r} has {leases[id(block)]} leases, it says {block.num_leases}")


def quiescence(manager: KVCacheManager) -> None:
    """P5: with no sequence open and nothing in flight, every block is free."""
    pool = manager.pool
    idle = not manager.sequences and not manager.leases.active
    if idle and pool.num_free_blocks != pool.num_usable_blocks:
        _fail(
            "P5",
            f"no sequence is open, {pool.num_free_blocks} of "
            f"{pool.num_usable_blocks} blocks are free",
        )


def index(manager: KVCacheManager) -> None:
    """P6: a block says it holds a content exactly when a tree lists it there.

    The trees themselves are sound: parents and children agree, no node is empty with nothing below.
    """
    listed: dict[int, Node] = {}
    used: set[int] = set()
    for number, tree in enumerate(manager.pool.trees):
        for root in tree.roots():
            _check_root(root)
        _check_no_loop(tree)
        for node in tree.nodes():
            is_short = len(node.tokens) < manager.groups[number].block_size * BYTES_PER_TOKEN
            if is_short and not node.is_piece():
                _fail("P6", f"a node has {len(node.tokens)} bytes of tokens")
            _check_node(node)
            used.add(id(node))
            for block in copies(node):
                if id(block) in listed or block.group != number:
                    _fail("P6", f"{block!r} is listed twice, or for another group")
                listed[id(block)] = node
    for block in manager.pool.blocks[1:]:
        if block.node is not listed.pop(id(block), None):
            _fail("P6", f"{block!r} and the tree disagree on what it holds")
    if listed:
        _fail("P6", "a tree lists a block that cannot be owned")
    _check_own_nodes(manager.pool.blocks, used)


def _check_no_loop(tree: ContentTree) -> None:
    """Raise where a node stands in two places, so that a walk might never end. O(nodes)."""
    known: set[int] = set()
    pending = list(tree.roots())
    while pending:
        node = pending.pop()
        if id(node) in known:
            _fail("P6", f"a node with {len(node.tokens)} bytes of tokens stands in two places")
        known.add(id(node))
        pending += node.child_nodes()


def visibility(manager: KVCacheManager) -> None:
    """P9: published is exactly what is settled: whole blocks, from the first token on."""
    for seq, table in _tables(manager):
        cached = seq.namespace_key is not None
        wanted = seq.num_settled_tokens // table.block_size if cached else 0
        published = [block.node is not None for block in _owned(table)]
        if table.num_published != wanted or published != [
            place < wanted for place in range(table.num_null, len(table.blocks))
        ]:
            _fail("P9", f"{seq!r}: wanted its first {wanted} blocks published, got {published}")


def identity(manager: KVCacheManager) -> None:
    """P10: the path of a sequence's published block spells the sequence's own tokens."""
    for seq, table in _tables(manager):
        above: Node | None = None
        for place in range(table.num_null, table.num_published):
            node = table.blocks[place].node
            end = (place + 1) * table.block_size
            if node is None:
                _fail("P10", f"{seq!r}: {table.blocks[place]!r} is not published")
            if above is not None and node.parent is not above:
                _fail("P10", f"{seq!r}: {table.blocks[place]!r} follows other content")
            (content,) = block_contents(seq.packed, seq.items, place, place + 1, table.block_size)
            if node.tokens != content or (
                above is None and not _spells(node, seq, table.block_size, end)
            ):
                _fail("P10", f"{seq!r}: {table.blocks[place]!r} does not hold its tokens")
            above = node


def capacity(manager: KVCacheManager) -> None:
    """P13: free and used add up, and the numbers that callers plan with are the true ones."""
    pool = manager.pool
    free = sum(1 for _ in _walk_queue(manager))
    if not free == pool.num_free_blocks == manager.num_free_blocks:
        _fail("P13", f"{free} blocks are free, the manager says {manager.num_free_blocks}")
    if pool.num_used_blocks + free != pool.num_usable_blocks:
        _fail("P13", f"{pool.num_used_blocks} used and {free} free of {pool.num_usable_blocks}")
    slots = sum([pool.block_sizes[b.group] for b in pool.blocks if b.ref_count])
    if slots != pool.num_used_slots:
        _fail("P13", f"{slots} slots are used, the pool says {pool.num_used_slots}")
    for block in pool.blocks if pool.is_uneven else ():
        if block.ref_count == 0 and block.node is None and block.group != 0:
            _fail("P13", f"{block!r} is empty and free, and counts for group {block.group}")
    cached = sum([block.node is not None for block in pool.blocks])
    if cached != pool.num_cached_blocks:
        _fail("P13", f"{cached} blocks hold content, the pool says {pool.num_cached_blocks}")
    computed = sum([seq.num_computed_tokens for seq in manager.sequences.values()])
    if computed != pool.num_computed_tokens:
        _fail("P13", f"{computed} tokens are computed, the pool says {pool.num_computed_tokens}")
    if pool.num_used_blocks > pool.peak_used_blocks:
        _fail("P13", f"{pool.num_used_blocks} used, the peak is {pool.peak_used_blocks}")


def coverage(manager: KVCacheManager) -> None:
    """P14: lengths are in order and within their caps; a table covers what is computed."""
    longest = manager.max_model_len
    for seq, table in _tables(manager):
        room = len(table.blocks) * table.block_size
        if not 0 <= seq.num_cached_tokens <= seq.num_computed_tokens <= seq.num_tokens:
            _fail("P14", f"{seq!r}: its lengths are out of order")
        if seq.num_computed_tokens > room:
            _fail("P14", f"{seq!r}: room for {room} tokens")
        edge = (
            (table.num_published + 1) * table.block_size if seq.namespace_key else seq.next_boundary
        )
        kept = first_kept_block(table.group, table.block_size, max(0, seq.next_boundary - 1))
        is_late = seq.next_boundary > edge or (seq.next_boundary > 0 and kept > table.num_null)
        if (
            seq.num_reserved_tokens > room
            or is_late
            or seq.fast_decode_limit >= max(1, min(seq.num_reserved_tokens, seq.next_boundary))
        ):
            _fail("P14", f"{seq!r}: a step would pass over the end of a block")
        is_decoding = seq.num_computed_tokens == seq.num_tokens - 1
        if seq.fast_decode_limit and not is_decoding:
            _fail("P14", f"{seq!r}: a decode step would count more than one token")
        if longest is not None and (
            seq.num_tokens > longest or len(table.blocks) > -(-longest // table.block_size)
        ):
            _fail("P14", f"{seq!r}: max_model_len is {longest}")


def tables(manager: KVCacheManager) -> None:
    """P18: a live table names blocks that its sequence holds, each once, null ones first."""
    blocks = manager.pool.blocks
    for seq in manager.sequences.values():
        names = [block.block_id for table in seq.tables for block in _owned(table)]
        if seq.state is not None:
            names += [block.block_id for block in seq.state.blocks()]
        if len(set(names)) != len(names):
            _fail("P18", f"{seq!r}: a block stands twice in its tables: {seq.block_tables}")
    for seq, table in _tables(manager):
        if [block.block_id for block in table.blocks] != list(table.block_ids):
            _fail("P18", f"{seq!r}: its blocks and its block ids differ")
        if any(block is not blocks[0] for block in table.blocks[: table.num_null]):
            _fail("P18", f"{seq!r}: its first {table.num_null} entries are not all null")
        for block in _owned(table):
            ours = 0 < block.block_id < len(blocks) and blocks[block.block_id] is block
            if not ours or block.ref_count < 1:
                _fail("P18", f"{seq!r}: {block!r} is not held, or not the pool's")


def leased(manager: KVCacheManager) -> None:
    """P17: no block of an active lease is free, and no lease outlives its deadline."""
    for lease in manager.leases.active.values():
        if lease.deadline is not None and lease.deadline <= manager.pool.step:
            _fail("P17", f"{lease!r} is past its deadline")
        for block in lease.blocks:
            if block.ref_count < 1 or block.next_free is not None:
                _fail("P17", f"{block!r} is free under {lease!r}")


def deferred(manager: KVCacheManager) -> None:
    """P20: the number of blocks that leases alone hold is the true one."""
    leases = Counter(b for lease in manager.leases.active.values() for b in lease.blocks)
    count = sum([block.ref_count == times for block, times in leases.items()])
    if count != manager.pool.num_deferred_blocks:
        _fail("P20", f"leases alone hold {count} blocks, not {manager.pool.num_deferred_blocks}")


def arriving(manager: KVCacheManager) -> None:
    """P30: the blocks of a load are held by its lease alone, and cannot be hit.

    They are the blocks that later queries see and the last full block, or fewer.
    """
    for lease in manager.leases.active.values():
        load = lease.load
        if load is None:
            continue
        blocks = [block for run in load.blocks for block in run]
        if sorted(map(id, blocks)) != sorted(map(id, lease.blocks)):
            _fail("P30", f"{lease!r} holds other blocks than those of {load!r}")
        for block in blocks:
            if block.node is not None or block.ref_count != 1:
                _fail("P30", f"{block!r} waits for {load!r}, and is another's or can be found")
        for number, group in enumerate(attention_groups(manager.groups)):
            first, size = load.first_blocks[number], group.block_size
            left = (first + len(load.blocks[number])) * size - load.num_tokens
            if first < first_kept_block(group, size, load.num_tokens) or not 0 <= left < size:
                _fail("P30", f"{load!r}: its blocks of group {number} begin or end elsewhere")


def folded(manager: KVCacheManager) -> None:
    """P21: folding the snapshot gives what can be hit, a parent named before its children."""
    if manager.events is None:
        return
    snapshot = manager.snapshot()
    contents = sum(
        node.first_copy is not None and not node.is_piece()
        for tree in manager.pool.trees
        for node in tree.nodes()
    )
    if len(fold((), snapshot)) != contents:
        _fail(
            "P21", f"{contents} contents can be hit, the snapshot names {len(fold((), snapshot))}"
        )
    for tree in manager.pool.trees:
        for node in tree.nodes():
            if (
                node.block_hash is not None
                and not node.is_piece()
                and node.parent is not None
                and node.parent.block_hash is None
            ):
                _fail("P21", "a content has a name and its parent has none")


def shelved(manager: KVCacheManager) -> None:
    """P15: what is kept is published and in time; what waits on the shelf is free and kept."""
    pool = manager.pool
    idle = pool.idle_blocks
    waiting = list(idle.shelved())
    if len(waiting) != idle.num_shelved:
        _fail("P15", f"{len(waiting)} kept blocks wait, their counter says {idle.num_shelved}")
    for block in waiting:
        if block.ref_count or block.block_id not in idle.kept:
            _fail("P15", f"{block!r} waits on a shelf, held or not kept")
    for block_id, terms in idle.kept.items():
        block = pool.blocks[block_id]
        if block.node is None or not terms or any(end <= pool.step for _, end in terms):
            _fail("P15", f"{block!r} is kept without content, or past its deadline")


def settled(manager: KVCacheManager) -> None:
    """P19: what a query after the committed tokens can see is still there."""
    for seq, table in _tables(manager):
        kept = first_kept_block(table.group, table.block_size, seq.num_settled_tokens)
        if table.num_null > kept:
            _fail("P19", f"{seq!r}: gave back {table.num_null} blocks, {kept} are out of sight")


def told(manager: KVCacheManager) -> None:
    """P27: expected tokens publish no block, have no hash and move no window."""
    for seq, table in _tables(manager):
        length = len(seq.packed)
        kept = first_kept_block(table.group, table.block_size, length)
        if seq.num_unknown_tokens < 0 or seq.num_tokens != length + seq.num_unknown_tokens:
            _fail("P27", f"{seq!r}: {length} tokens known, {seq.num_unknown_tokens} expected")
        if table.num_published * table.block_size > length or table.num_null > kept:
            _fail("P27", f"{seq!r}: {table.num_published} blocks published, {length} tokens known")
        if any(item.start + item.length > length for item in seq.items):
            _fail("P27", f"{seq!r}: an item reaches beyond the known tokens")


def copies(node: Node) -> list[Block]:
    """Return the blocks that hold a node's content, oldest first. O(copies).

    Raises:
        InvariantError: P11, the chain of copies is broken.
    """
    found: list[Block] = []
    seen: set[int] = set()
    block, before = node.first_copy, None
    while block is not None:
        if block.node is not node or block.prev_copy is not before or id(block) in seen:
            _fail("P11", f"{block!r} stands wrong among the copies of its content")
        found.append(block)
        seen.add(id(block))
        block, before = block.next_copy, block
    if node.last_copy is not before:
        _fail("P11", "the last copy of a content is not the end of its chain")
    return found


def chains(manager: KVCacheManager) -> None:
    """P11: of several copies each is reachable: evicting one leaves the others."""
    for tree in manager.pool.trees:
        for node in tree.nodes():
            copies(node)


def useful(manager: KVCacheManager) -> None:
    """P29: a free block keeps its content only where a hit of some length can use it."""
    whole = lcm(*[group.block_size for group in manager.groups])
    for group, tree in zip(manager.groups, manager.pool.trees, strict=True):
        ends = {id(root): 0 for root in tree.roots()}
        for node in tree.nodes():
            if node.is_piece():
                continue  # further pieces are idle only beside the first, or next in line
            end = ends[id(node)] = ends[id(node.parent)] + group.block_size
            shortest_hit = -(-end // whole) * whole
            if first_kept_block(group, group.block_size, shortest_hit) * group.block_size >= end:
                for block in copies(node):
                    if block.ref_count == 0:
                        _fail("P29", f"{block!r} is free and holds content that no hit can use")


def whole_states(manager: KVCacheManager) -> None:
    """P32: a state that can be found has all its pieces, at the end of a block.

    They are blocks of different contents with the same holders, in the order of their reuse.
    """
    group = state_group(manager.groups)
    if group is None:
        return
    for node in manager.pool.trees[-1].nodes():
        if node.first_copy is None or node.is_piece():
            continue
        if node.first_copy is not node.last_copy:
            _fail("P32", "a state is published twice for the same tokens")
        pieces = find_pieces(node.first_copy, group.num_blocks)
        holders = {(block.ref_count, block.num_leases) for block in pieces}
        if len(set(pieces)) != group.num_blocks or len(holders) != 1:
            _fail("P32", f"a state has {len(pieces)} of {group.num_blocks} pieces, or halves")


def states(manager: KVCacheManager) -> None:
    """P33: where a step writes a state nothing else reads: no other holder, and not published.

    P34: the state that it reads is the one after the computed tokens.
    """
    for seq, state in _states(manager):
        num_blocks = state.group.num_blocks
        if any(len(pieces) != num_blocks for pieces in state.lists()):
            _fail("P18", f"{seq!r}: wanted states of {num_blocks} blocks, got {state.lists()}")
        for block in state.write:
            if block.node is not None or block.ref_count - block.num_leases != 1:
                _fail("P33", f"{seq!r} would write {block!r}, which is published or shared")
        if bool(state.read) is not (seq.num_computed_tokens > 0):
            _fail("P34", f"{seq!r} reads a state of {len(state.read)} blocks")
        if state.kept and not 0 < state.kept_at <= seq.num_computed_tokens:
            _fail("P34", f"{seq!r} keeps a state after {state.kept_at} tokens")
        for pieces, length in ((state.read, seq.num_computed_tokens), (state.kept, state.kept_at)):
            if pieces and pieces[0].node is not None:
                _check_state(seq, state, pieces, length)
        is_replaced = bool(state.write) and state.write is state.read
        if not is_replaced and seq.next_boundary > seq.num_computed_tokens + 1:
            _fail("P34", f"{seq!r}: a step would only be counted, and its state is another")


def _check_state(seq: KVSequence, state: StateTable, pieces: list[Block], length: int) -> None:
    """Check that a published state is that of the first `length` tokens of a sequence."""
    size = state.block_size
    node = pieces[0].node
    if length % size or node is None or length > len(seq.packed):
        _fail("P31", f"{seq!r}: a state inside a block, or of unknown tokens, can be found")
    if not _spells(node, seq, size, length):
        _fail("P31", f"{seq!r}: the state after {length} tokens is published for others")


def first_to_go(manager: KVCacheManager) -> None:
    """P42: blocks that no known end needs are reused before others, but for retained ones.

    Blocks without content have no end.
    """
    idle = manager.pool.idle_blocks
    spare = {id(block) for block in idle.spare}
    for block in manager.pool.blocks:
        goes_first = block.last_end < 0 and block.ref_count == 0
        goes_first = goes_first and block.block_id not in idle.kept
        if (id(block) in spare) is not goes_first:
            _fail("P42", f"{block!r}, last needed by end {block.last_end}, waits in another place")
        if block.node is None and block.last_end:
            _fail("P42", f"{block!r} is empty, and end {block.last_end} is said to need it")
        if block.last_end > idle.num_ends:
            _fail("P42", f"{block!r} is needed by end {block.last_end} of {idle.num_ends}")


PROPERTIES: Final[dict[str, Callable[[KVCacheManager], None]]] = {
    "P1": partition,
    "P2": ref_counts,
    "P5": quiescence,
    "P6": index,
    "P9": visibility,
    "P10": identity,
    "P11": chains,
    "P13": capacity,
    "P14": coverage,
    "P15": shelved,
    "P17": leased,
    "P18": tables,
    "P19": settled,
    "P20": deferred,
    "P21": folded,
    "P27": told,
    "P29": useful,
    "P30": arriving,
    "P32": whole_states,
    "P33": states,
    "P42": first_to_go,
}
"""The properties that one state can show, by number."""


def check(manager: KVCacheManager) -> None:
    """Check every property of `PROPERTIES`. O(num_blocks + tokens of the open sequences).

    Raises:
        InvariantError: the first that does not hold.
    """
    for holds in PROPERTIES.values():
        holds(manager)


def _walk_queue(manager: KVCacheManager) -> list[Block]:
    """Walk the free queue, stopping at a loop."""
    walked: list[Block] = []
    for block in manager.pool.free_blocks():
        walked.append(block)
        if len(walked) > len(manager.pool.blocks):
            _fail("P1", "the free queue runs in a circle")
    return walked


def _tables(manager: KVCacheManager) -> Iterator[tuple[KVSequence, BlockTable]]:
    """Yield every table of every open sequence."""
    for seq in manager.sequences.values():
        for table in seq.tables:
            yield seq, table


def _states(manager: KVCacheManager) -> Iterator[tuple[KVSequence, StateTable]]:
    """Yield the states of every open sequence that has some."""
    for seq in manager.sequences.values():
        if seq.state is not None:
            yield seq, seq.state


def _owned(table: BlockTable) -> list[Block]:
    """Return the blocks that a table holds."""
    return table.blocks[table.num_null :]


def _spells(node: Node, seq: KVSequence, size: int, num_tokens: int) -> bool:
    """Say whether a path from a root is the sequence's namespace and first tokens."""
    pieces: list[bytes] = []
    while node.parent is not None:
        pieces.append(node.tokens)
        node = node.parent
    wanted = block_contents(seq.packed, seq.items, 0, num_tokens // size, size)
    return node.tokens == seq.namespace_key and pieces[::-1] == wanted


def _check_own_nodes(blocks: Sequence[Block], used: set[int]) -> None:
    """Check that blocks know whether their own nodes stand in a tree, as those of these ids do."""
    for block in blocks:
        if (block.parent is None) is (id(block) in used):
            _fail("P6", f"{block!r} and the trees disagree on whether its own node is in use")


def _check_root(root: Node) -> None:
    """Check that a root is one, and its children."""
    if root.parent is not None or root.first_copy is not None:
        _fail("P6", "a root has a parent or a block")
    _check_node(root)


def _check_node(node: Node) -> None:
    """Check that a node's links to its children hold, and that it is there for a reason."""
    children, last = node.children, node.last_child
    if node.first_copy is None and not node.has_children():
        _fail("P6", "a node has neither a block nor anything below it")
    if children is None:
        listed: list[tuple[bytes, Node]] = [] if last is None else [(last.tokens, last)]
    else:
        listed = list(children.items())
        strange = last is not None and children.get(last.tokens) is not last
        if len(listed) < 2 or strange:
            _fail("P6", f"a node with {len(listed)} children has lost track of them")
    for tokens, child in listed:
        if child.parent is not node or child.tokens != tokens:
            _fail("P6", "a node and its child disagree")


def _fail(prop: str, message: str) -> NoReturn:
    raise InvariantError(prop, message)
