"""`check(manager)`: the properties of the allocator, recomputed from nothing.

Each function states one property, takes a manager at rest (between two calls) and raises
`InvariantError` with the property's number. They trust no counter and no shortcut: lengths are
counted, references are counted over the live tables, content is spelled from the path. Properties
that speak of two moments (atomicity, order, delivery) cannot be seen in one state: the state
machines of the test suite check those.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Final, NoReturn

from kvcore.block import Block, Node
from kvcore.errors import InvariantError
from kvcore.manager import KVCacheManager
from kvcore.tokens import BYTES_PER_TOKEN


def partition(manager: KVCacheManager) -> None:
    """P1: every block but the null block is either held, or in the free queue exactly once."""
    pool = manager.pool
    queued = Counter(id(block) for block in _walk_queue(manager))
    if sum(queued.values()) != pool.num_free_blocks:
        _fail(
            "P1",
            f"{sum(queued.values())} blocks in the queue, its counter says {pool.num_free_blocks}",
        )
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
    """P2: a block's ref count is the number of its places in live tables."""
    held = Counter(id(block) for seq in manager.sequences.values() for block in seq.blocks)
    for block in manager.pool.blocks:
        if block.ref_count != held[id(block)]:
            _fail("P2", f"{block!r} has {held[id(block)]} places in live tables")


def quiescence(manager: KVCacheManager) -> None:
    """P5: with no sequence open, every block is free."""
    pool = manager.pool
    if not manager.sequences and pool.num_free_blocks != pool.num_usable_blocks:
        _fail(
            "P5",
            f"no sequence is open, {pool.num_free_blocks} of "
            f"{pool.num_usable_blocks} blocks are free",
        )


def index(manager: KVCacheManager) -> None:
    """P6: a block says it holds a content exactly when the tree lists it there.

    The tree itself is sound: parents and children agree, no node is empty with nothing below it.
    """
    listed: dict[int, Node] = {}
    for root in manager.pool.tree.roots():
        if root.parent is not None or root.first_copy is not None:
            _fail("P6", "a root has a parent or a block")
        _check_node(root)
    for node in manager.pool.tree.nodes():
        if len(node.tokens) != manager.block_size * BYTES_PER_TOKEN:
            _fail("P6", f"a node has {len(node.tokens)} bytes of tokens")
        _check_node(node)
        for block in copies(node):
            if id(block) in listed:
                _fail("P6", f"{block!r} is listed twice in the tree")
            listed[id(block)] = node
    for block in manager.pool.blocks[1:]:
        if block.node is not listed.pop(id(block), None):
            _fail("P6", f"{block!r} and the tree disagree on what it holds")
    if listed:
        _fail("P6", "the tree lists a block that cannot be owned")


def visibility(manager: KVCacheManager) -> None:
    """P9: published is exactly what is committed: whole blocks, from the first token on."""
    for seq in manager.sequences.values():
        cached = seq.namespace_key is not None
        wanted = seq.num_computed_tokens // manager.block_size if cached else 0
        published = [block.node is not None for block in seq.blocks]
        if seq.num_published_blocks != wanted or published != [
            index < wanted for index in range(len(published))
        ]:
            _fail("P9", f"{seq!r}: wanted its first {wanted} blocks published, got {published}")


def identity(manager: KVCacheManager) -> None:
    """P10: the path of a sequence's published block spells the sequence's own tokens."""
    size = manager.block_size
    for seq in manager.sequences.values():
        above: Node | None = None
        for number, block in enumerate(seq.blocks[: seq.num_published_blocks]):
            node = block.node
            tokens = seq.packed[number * size : (number + 1) * size].tobytes()
            if node is None or node.tokens != tokens:
                _fail("P10", f"{seq!r}: {block!r} does not hold its tokens")
            parent = node.parent
            if number == 0:
                at_root = parent is not None and parent.parent is None
                if not at_root or parent is None or parent.tokens != seq.namespace_key:
                    _fail("P10", f"{seq!r}: its first block is in another namespace")
            elif parent is not above:
                _fail("P10", f"{seq!r}: {block!r} follows other content")
            above = node


def capacity(manager: KVCacheManager) -> None:
    """P13: free and used add up, and the numbers that callers plan with are the true ones."""
    pool = manager.pool
    free = sum(1 for _ in _walk_queue(manager))
    if not free == pool.num_free_blocks == manager.num_free_blocks:
        _fail("P13", f"{free} blocks are free, the manager says {manager.num_free_blocks}")
    if pool.num_used_blocks + free != pool.num_usable_blocks:
        _fail("P13", f"{pool.num_used_blocks} used and {free} free of {pool.num_usable_blocks}")
    if pool.num_used_blocks > pool.peak_used_blocks:
        _fail("P13", f"{pool.num_used_blocks} used, the peak is {pool.peak_used_blocks}")


def coverage(manager: KVCacheManager) -> None:
    """P14: lengths are in order and within their caps; a table covers what is computed."""
    for seq in manager.sequences.values():
        room = len(seq.blocks) * manager.block_size
        if not 0 <= seq.num_cached_tokens <= seq.num_computed_tokens <= seq.num_tokens:
            _fail("P14", f"{seq!r}: its lengths are out of order")
        if seq.num_computed_tokens > room:
            _fail("P14", f"{seq!r}: room for {room} tokens")
        longest = manager.max_model_len
        if longest is not None and (
            seq.num_tokens > longest or len(seq.blocks) > -(-longest // manager.block_size)
        ):
            _fail("P14", f"{seq!r}: max_model_len is {longest}")


def tables(manager: KVCacheManager) -> None:
    """P18: a live table names blocks that its sequence holds, each once, never the null block."""
    blocks = manager.pool.blocks
    for seq in manager.sequences.values():
        if [block.block_id for block in seq.blocks] != list(seq.block_ids):
            _fail("P18", f"{seq!r}: its blocks and its block ids differ")
        if len(set(seq.block_ids)) != len(seq.block_ids):
            _fail("P18", f"{seq!r}: a block stands twice in its table: {seq.block_table}")
        for block in seq.blocks:
            ours = 0 < block.block_id < len(blocks) and blocks[block.block_id] is block
            if not ours or block.ref_count < 1:
                _fail("P18", f"{seq!r}: {block!r} is not held, or not the pool's")


def copies(node: Node) -> list[Block]:
    """Return the blocks that hold a node's content, oldest first. O(copies).

    Raises:
        InvariantError: P11, the chain of copies is broken.
    """
    found: list[Block] = []
    block, before = node.first_copy, None
    while block is not None:
        if block.node is not node or block.prev_copy is not before or block in found:
            _fail("P11", f"{block!r} stands wrong among the copies of its content")
        found.append(block)
        block, before = block.next_copy, block
    if node.last_copy is not before:
        _fail("P11", "the last copy of a content is not the end of its chain")
    return found


def chains(manager: KVCacheManager) -> None:
    """P11: of several copies each is reachable: evicting one leaves the others."""
    for node in manager.pool.tree.nodes():
        copies(node)


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
    "P18": tables,
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
    for block in manager.pool.free_queue:
        walked.append(block)
        if len(walked) > len(manager.pool.blocks):
            _fail("P1", "the free queue runs in a circle")
    return walked


def _check_node(node: Node) -> None:
    """Check that a node's links to its children hold, and that it is there for a reason."""
    children, last = node.children, node.last_child
    if node.first_copy is None and last is None:
        _fail("P6", "a node has neither a block nor anything below it")
    if children is None:
        listed: list[tuple[bytes, Node]] = [] if last is None else [(last.tokens, last)]
    else:
        listed = list(children.items())
        if len(listed) < 2 or last is None or children.get(last.tokens) is not last:
            _fail("P6", f"a node with {len(listed)} children has lost track of them")
    for tokens, child in listed:
        if child.parent is not node or child.tokens != tokens:
            _fail("P6", "a node and its child disagree")


def _fail(prop: str, message: str) -> NoReturn:
    raise InvariantError(prop, message)
