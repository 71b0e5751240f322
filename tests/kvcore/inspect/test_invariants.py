"""`check` sees every kind of damage, and says which property it breaks."""

import pytest

import kvcore


@pytest.fixture
def kv():
    """A manager with two sequences that share, copies, free content and a branch."""
    kv = kvcore.KVCacheManager(20, 2)
    for tokens in ([1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 7, 8, 9], [1, 2, 3, 4, 5, 6, 7]):
        seq = kv.open(tokens)
        kv.reserve(seq, len(tokens) - seq.num_computed_tokens)
        kv.commit(seq, len(tokens) - seq.num_computed_tokens)
    twins = [kv.open([8, 8, 8]), kv.open([8, 8, 8])]
    for twin in twins:
        kv.reserve(twin, 3)
        kv.commit(twin, 3)
    kv.close(kv.sequences[1])
    kv.close(kv.sequences[3])
    kvcore.check(kv)
    return kv


def unlink_from_queue(kv):
    block = next(iter(kv.pool.idle_blocks.queue))
    block.prev_free.next_free, block.next_free.prev_free = block.next_free, block.prev_free


def close_the_queue_to_a_circle(kv):
    blocks = list(kv.pool.idle_blocks.queue)
    blocks[-1].next_free = blocks[0]


def queue_a_stranger(kv):
    kv.pool.idle_blocks.queue.push_back(kvcore.Block(3))


def swap_children(kv):
    root = next(kv.pool.trees[0].roots())
    node = root.children[kvcore.pack([1, 2]).tobytes()]
    node.children[b"12345678"] = node.children.pop(kvcore.pack([7, 8]).tobytes())


def publish_a_stranger(kv):
    stranger = kvcore.Block(3)
    kv.pool.trees[0].attach([stranger], kv.sequences[0].namespace_key, None, [bytes(8)])


def attach_an_empty_node(kv):
    block = kvcore.Block(3)
    kv.pool.trees[0].attach([block], kv.sequences[0].namespace_key, None, [bytes(8)])
    block.node.first_copy = None


def drop_the_null_blocks_guard(kv):
    kv.pool.idle_blocks.queue.push_back(kv.pool.blocks[0])


def set_on(owner, name, change):
    def damage(kv):
        target = owner(kv)
        setattr(target, name, change(getattr(target, name)))

    damage.__name__ = f"{name}_of_{owner.__name__}"
    return damage


def first_sequence(kv):
    return kv.sequences[0]


def first_table(kv):
    return kv.sequences[0].tables[0]


def held_block(kv):
    return kv.sequences[0].tables[0].blocks[0]


def blank_block(kv):
    return next(block for block in kv.pool.blocks[1:] if block.node is None)


def pool(kv):
    return kv.pool


def queue(kv):
    return kv.pool.idle_blocks.queue


def twin_node(kv):
    return kv.sequences[4].tables[0].blocks[0].node


def change_a_block_id(kv):
    kv.sequences[0].tables[0].block_ids[0] += 1


def repeat_a_block(kv):
    table = kv.sequences[0].tables[0]
    table.grow(table.blocks[:1])
    table.blocks[0].ref_count += 1


def hold_the_null_block(kv):
    kv.sequences[0].tables[0].grow(kv.pool.blocks[:1])
    kv.pool.blocks[0].ref_count = 1


def forget_a_block_in_sight(kv):
    table = kv.sequences[0].tables[0]
    gone = table.before(1)
    table.forget(kv.pool.blocks[0], 1)
    kv.pool.release(gone)


def say_null_of_a_held_block(kv):
    kv.sequences[0].tables[0].num_null = 1


def forget_the_sequences(kv):
    kv.sequences.clear()
    for block in kv.pool.blocks:
        block.ref_count = 0


def put_a_node_below_itself(kv):
    upper, lower = [block.node for block in kv.sequences[0].tables[0].blocks[:2]]
    lower.children, lower.last_child = None, upper


DAMAGE = [
    (unlink_from_queue, "P1"),
    (close_the_queue_to_a_circle, "P1"),
    (queue_a_stranger, "P1"),
    (drop_the_null_blocks_guard, "P1"),
    (set_on(queue, "length", lambda n: n + 1), "P1"),
    (set_on(held_block, "block_id", lambda n: n + 1), "P1"),
    (set_on(held_block, "ref_count", lambda n: 0), "P1"),
    (set_on(held_block, "ref_count", lambda n: n + 1), "P2"),
    (set_on(held_block, "node", lambda n: None), "P11"),
    (set_on(blank_block, "parent", lambda n: kvcore.Node(None, b"")), "P6"),
    (swap_children, "P6"),
    (publish_a_stranger, "P6"),
    (attach_an_empty_node, "P6"),
    (put_a_node_below_itself, "P6"),
    (set_on(twin_node, "first_copy", lambda b: b.next_copy), "P11"),
    (set_on(twin_node, "last_copy", lambda b: b.prev_copy), "P11"),
    (set_on(twin_node, "tokens", lambda t: t[:4]), "P6"),
    (set_on(first_table, "num_published", lambda n: n - 1), "P9"),
    (set_on(first_sequence, "num_computed_tokens", lambda n: n - 2), "P9"),
    (set_on(first_sequence, "packed", lambda p: kvcore.pack([9, *p[1:]])), "P10"),
    (set_on(first_sequence, "namespace_key", lambda k: b"other"), "P10"),
    (set_on(pool, "peak_used_blocks", lambda n: n - 19), "P13"),
    (set_on(pool, "num_used_blocks", lambda n: n - 1), "P1"),
    (set_on(first_sequence, "num_cached_tokens", lambda n: 99), "P14"),
    (set_on(first_sequence, "packed", lambda p: p[:4]), "P14"),
    (change_a_block_id, "P18"),
    (repeat_a_block, "P18"),
    (hold_the_null_block, "P18"),
    (forget_a_block_in_sight, "P19"),
    (say_null_of_a_held_block, "P18"),
    (forget_the_sequences, "P1"),
]


@pytest.mark.parametrize(("damage", "prop"), DAMAGE, ids=[d.__name__ for d, _ in DAMAGE])
def test_damage_is_seen_and_named(kv, damage, prop):
    damage(kv)
    with pytest.raises(kvcore.InvariantError) as seen:
        kvcore.PROPERTIES[prop](kv)
    assert seen.value.prop == prop
    with pytest.raises(kvcore.InvariantError):
        kvcore.check(kv)


def test_quiescence_sees_a_block_that_nobody_holds_and_nobody_freed():
    kv = kvcore.KVCacheManager(4, 2)
    kv.pool.take(1)
    with pytest.raises(kvcore.InvariantError, match="P5: no sequence is open, 2 of 3"):
        kvcore.PROPERTIES["P5"](kv)


def test_an_empty_block_that_counts_for_another_group_is_seen():
    groups = [kvcore.FullAttention(), kvcore.SlidingWindow(8, block_size=4)]
    kv = kvcore.KVCacheManager(20, 2, groups=groups)
    kv.close(kv.open([1, 2, 3]))
    kvcore.check(kv)
    kv.pool.blocks[7].group = 1
    with pytest.raises(kvcore.InvariantError, match=r"P13: .* is empty and free"):
        kvcore.check(kv)


def test_max_model_len_is_checked():
    kv = kvcore.KVCacheManager(9, 2, max_model_len=4)
    seq = kv.open([1, 2, 3])
    kv.reserve(seq, 4)
    kvcore.check(kv)
    kv.max_model_len = 2
    with pytest.raises(kvcore.InvariantError, match="P14"):
        kvcore.check(kv)
