"""A map of the pool: which blocks are held, cached or empty.

Reading it changes nothing, and costs O(held and cached blocks): blocks that were never used are not
created for it. The map is exact between two calls of the manager. Nothing is stored, and no call of
the manager does work for it.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from typing import Final, SupportsIndex

from kvcore.arguments import as_int
from kvcore.block import NULL_BLOCK, Node
from kvcore.identity.namespace import Namespace, decode_namespace
from kvcore.identity.tokens import BYTES_PER_TOKEN
from kvcore.manager import KVCacheManager
from kvcore.sequence import KVSequence

EMPTY: Final = 0
"""Free, and nothing is lost when it is handed out. The null block counts as empty."""
CACHED: Final = 1
"""Free, and it holds content that can be hit until it is handed out."""
HELD: Final = 2
"""Held by a sequence or a lease."""


@dataclass(frozen=True, slots=True)
class BlockReport:
    """One block at one moment.

    Attributes:
        block_id: its id.
        state: EMPTY, CACHED or HELD.
        num_holders: the number of sequences and leases that hold it.
        sequences: the sequences among them, oldest first.
        can_be_hit: True if a sequence with the same prefix would share it.
        group: the layer group of its content; 0 if it has none.
        start: the position of its first token.
        tokens: its known tokens, those without KV included; of a piece of a recurrent state that is
            published the last ones that it has seen, and of another piece none.
        namespace: its namespace; None: it is not shared.
    """

    block_id: int
    state: int
    num_holders: int
    sequences: tuple[KVSequence, ...]
    can_be_hit: bool
    group: int
    start: int
    tokens: tuple[int, ...]
    namespace: Namespace | None


_NOTHING: Final = BlockReport(
    NULL_BLOCK,
    EMPTY,
    0,
    (),
    can_be_hit=False,
    group=0,
    start=0,
    tokens=(),
    namespace=None,
)


def pool_map(manager: KVCacheManager) -> bytes:
    """Return the state of every block, a byte each, by id: EMPTY, CACHED or HELD.

    O(num_blocks) to fill the bytes, O(blocks held or cached) to look at blocks.
    """
    states = bytearray(manager.num_blocks)
    for block in manager.pool.idle_blocks:
        states[block.block_id] = CACHED
    for seq in manager.sequences.values():
        for table in seq.tables:
            for block_id in table.block_ids[table.num_null :]:
                states[block_id] = HELD
        for block in () if seq.state is None else seq.state.blocks():
            states[block.block_id] = HELD
    for lease in manager.leases.active.values():
        for block in lease.blocks:
            states[block.block_id] = HELD
    return bytes(states)


def describe_block(manager: KVCacheManager, block_id: SupportsIndex) -> BlockReport:
    """Return the holders, the content and the namespace of a block. O(blocks held).

    Raises:
        InvalidArgumentError: there is no such block.
    """
    number = as_int("block_id", block_id, 0, manager.num_blocks - 1)
    block = manager.pool.made_block(number)
    if block is None or (block.node is None and block.ref_count == 0):
        return replace(_NOTHING, block_id=number)
    holders: list[KVSequence] = []
    group, place = 0, 0
    for seq in manager.sequences.values():
        for index, table in enumerate(seq.tables):
            if number in table.block_ids:
                holders.append(seq)
                group, place = index, table.block_ids.index(number)
        if seq.state is not None and block in seq.state.blocks():
            holders.append(seq)
            group = seq.state.number
    namespace: Namespace | None = None
    tokens: tuple[int, ...] = ()
    node = block.node
    while node is not None and node.is_piece():
        node = node.parent
    if node is not None:
        group, place = block.group, _depth(node) - 1
        size = manager.groups[group].block_size
        tokens = tuple(array("I", node.tokens[: size * BYTES_PER_TOKEN]))
        namespace = decode_namespace(node.root().tokens)
    elif holders:
        size = manager.groups[group].block_size
        if group < len(holders[0].tables):
            tokens = tuple(holders[0].packed[place * size : (place + 1) * size])
        key = holders[0].namespace_key
        namespace = None if key is None else decode_namespace(key)
    return BlockReport(
        number,
        HELD if block.ref_count else CACHED,
        block.ref_count,
        tuple(holders),
        can_be_hit=block.node is not None,
        group=group,
        start=place * manager.groups[group].block_size,
        tokens=tokens,
        namespace=namespace,
    )


def _depth(node: Node) -> int:
    """Count the contents from the root to a node, itself included and the root not."""
    count = 0
    while node.parent is not None:
        node = node.parent
        count += 1
    return count
