"""What can be seen of a pool or a manager, as plain values: to compare with, and to compare twice.

A `PropertyError` is what a state machine raises when it sees a property broken; like
`kvcore.InvariantError` it names the property, so that a planted bug can be shown to be caught for
the right reason.
"""

from kvcore.inspect.invariants import copies


class PropertyError(AssertionError):
    def __init__(self, prop, message):
        super().__init__(f"{prop}: {message}")
        self.prop = prop


def expect(prop, got, wanted, what):
    if got != wanted:
        raise PropertyError(prop, f"{what}: wanted {wanted!r}, got {got!r}")


def spelled(node):
    """A node as (namespace key, packed prefix), read from its path."""
    pieces = []
    while node.parent is not None:
        pieces.append(node.tokens)
        node = node.parent
    return node.tokens, b"".join(reversed(pieces))


def pool_view(pool):
    """Everything a pool decides from: refs, order, content and the order of copies, counters."""
    return {
        "refs": [block.ref_count for block in pool.blocks],
        "order": [block.block_id for block in pool.free_blocks()],
        "free": pool.num_free_blocks,
        "content": [None if block.node is None else spelled(block.node) for block in pool.blocks],
        "copies": {
            (number, *spelled(node)): [block.block_id for block in copies(node)]
            for number, tree in enumerate(pool.trees)
            for node in tree.nodes()
        },
        "kept": dict(pool.idle_blocks.kept),
        "cached": pool.num_cached_blocks,
        "slots": pool.num_used_slots,
        "evicted": pool.num_evicted_blocks,
        "allocated": pool.num_allocated_blocks,
        "peak": pool.peak_used_blocks,
    }


def state_view(state):
    """The states of a sequence, and which of them are one."""
    lists = [[block.block_id for block in one] for one in (state.read, state.write, state.kept)]
    return lists, state.write is state.read, state.kept is state.read, state.kept_at, state.wanted


def sequence_view(seq):
    return {
        "states": None if seq.state is None else state_view(seq.state),
        "tokens": seq.tokens,
        "tables": seq.block_tables,
        "null": [table.num_null for table in seq.tables],
        "published": [table.num_published for table in seq.tables],
        "namespace": seq.namespace_key,
        "computed": seq.num_computed_tokens,
        "unknown": seq.num_unknown_tokens,
        "cached": seq.num_cached_tokens,
        "open": seq.is_open,
    }


def limits_view(seq):
    """Up to where steps only count: no caller sees it, and a refused call leaves it too."""
    return seq.num_reserved_tokens, seq.next_boundary, seq.fast_decode_limit


def manager_view(manager):
    return {
        "pool": pool_view(manager.pool),
        "sequences": {key: sequence_view(seq) for key, seq in manager.sequences.items()},
        "limits": {key: limits_view(seq) for key, seq in manager.sequences.items()},
        "leases": {key: repr(lease) for key, lease in manager.leases.active.items()},
        "step": manager.pool.step,
        "stats": manager.stats(),
    }
