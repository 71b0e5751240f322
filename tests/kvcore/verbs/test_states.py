"""Recurrent states in single programs: each was wrong once."""

import kvcore


def manager(num_blocks=20, every=0):
    groups = [kvcore.FullAttention(), kvcore.RecurrentState(1, every)]
    return kvcore.KVCacheManager(num_blocks, 2, groups=groups)


def compute(kv, seq, *counts):
    for count in counts:
        kv.reserve(seq, count)
        kv.commit(seq, count)
    return seq


def test_a_plan_has_room_beside_a_loaded_state_that_others_can_find():
    kv = manager()
    plan = kv.plan([0] * 13, num_external=12)
    assert (
        plan.num_new_blocks == kvcore.peak_blocks(13, 2, groups=kv.groups, num_external=12) == 7 + 2
    )
    assert kvcore.peak_blocks(12, 2, groups=kv.groups, num_external=12) == 6 + 1


def test_a_plan_without_a_look_up_has_room_beside_the_state_that_is_published():
    kv = manager()
    assert kv.plan([0] * 5, chunk=4, skip_reading=True).num_new_blocks == 3 + 2
    assert kv.plan([0] * 5, chunk=4, namespace=None).num_new_blocks == 3 + 1


def test_a_leased_state_is_replaced_once_and_then_a_step_needs_another():
    kv = manager()
    seq = compute(kv, kv.open([0], namespace=None), 1)
    kv.lease(seq)
    assert kv.num_missing_blocks(seq, 1) == 0
    assert kv.num_missing_blocks(seq, 3, chunk=1) == 1 + 1


def test_what_a_sequence_takes_in_steps_has_room_for_the_state_that_it_keeps():
    kv = manager()
    seq = compute(kv, kv.open([0] * 3), 3)
    assert kv.num_missing_blocks(seq, 2, chunk=1) == 1 + 1  # it keeps the state after 4 tokens


def test_a_state_of_unknown_tokens_is_found_once_they_are_known_whatever_else_a_step_does():
    kv = manager(every=4)
    seq = compute(kv, kv.open([0, 0]), 2)
    kv.expect(seq, 3)
    compute(kv, seq, 2)
    kv.reserve(seq, 1)
    kv.step([seq], 1, [1, 1], num_known=2)
    assert kv.plan([0, 0, 1, 1, 1]).num_cached_tokens == 4


def test_a_state_that_is_kept_at_a_reset_is_not_published_after_it():
    kv = manager(every=4)
    seq = compute(kv, kv.open([0, 0]), 2)
    kv.expect(seq, 2)
    compute(kv, seq, 2)
    kv.reset()
    kv.resolve(seq, [1, 1])
    assert kv.stats().num_cached_blocks == 0


def test_a_sequence_that_is_not_cached_is_computed_in_long_steps():
    kv = manager(every=4)
    assert kv.chunk_length(kv.open([0] * 9, namespace=None), 9) == 9
    assert kv.chunk_length(kv.open([0] * 9), 9) == 4


def test_a_free_state_that_is_found_makes_room_for_a_later_one():
    groups = [kvcore.FullAttention(), kvcore.RecurrentState(num_blocks=2)]
    tokens = list(range(33))  # two boundaries inside
    peak = kvcore.peak_blocks(len(tokens), 16, groups=groups, chunk=1)
    kv = kvcore.KVCacheManager(peak + 1, 16, groups=groups)
    first = kv.open(tokens[:17])
    kv.reserve(first, 16)
    kv.commit(first, 16)
    kv.close(first)
    plan = kv.plan(tokens, chunk=1)
    assert (plan.num_cached_tokens, plan.num_revived_blocks) == (16, 3)
    assert plan.fits
    seq = kv.open(tokens)
    while seq.num_computed_tokens < len(tokens):
        kv.reserve(seq, 1)
        kv.commit(seq, 1)


def test_a_state_computed_again_is_found_though_the_step_takes_the_blocks_of_the_old_one():
    kv = manager(num_blocks=5, every=2)
    kv.close(compute(kv, kv.open([0, 0, 1]), 2))
    seq = kv.open([0, 0, 1], skip_reading=True)
    kv.reserve(seq, 2)
    assert kv.plan([0, 0, 1]).num_cached_tokens == 2
    kv.step([seq], 2, (), num_known=0, num_reserved=1)
    assert kv.num_free_blocks == 0
    assert kv.plan([0, 0, 1]).num_cached_tokens == 2


def lease_and_step(kv, seq):
    """The state blocks of a lease of another kind than a step's that the next step writes."""
    lease = kv.lease(seq, "store")
    kv.reserve(seq, 1)
    _, written = seq.state_blocks
    return {block.block_id for block in lease.blocks}.intersection(written)


def test_a_store_of_a_sequence_that_computed_nothing_leases_no_block_it_writes_a_state_to():
    kv = manager()
    seq = kv.open([0] * 5)
    kv.reserve(seq, 1)
    assert lease_and_step(kv, seq) == set()


def test_a_store_beside_a_published_state_leases_no_block_that_the_next_one_is_written_to():
    kv = manager()
    seq = compute(kv, kv.open([0] * 5), 4)  # publishes the state after 4 tokens
    kv.reserve(seq, 1)
    assert lease_and_step(kv, seq) == set()


def test_a_store_beside_a_kept_state_leases_it_and_the_next_one_is_written_elsewhere():
    kv = manager()
    seq = keeping(kv, 1)
    kv.reserve(seq, 1)
    lease = kv.lease(seq, "store")
    assert set(seq.state.kept) <= set(lease.blocks)
    assert lease_and_step(kv, seq) == set()


def test_a_lease_of_a_step_holds_what_the_step_writes():
    kv = manager()
    seq = kv.open([0] * 5)
    kv.reserve(seq, 1)
    assert set(seq.state.write) <= set(kv.lease(seq).blocks)


def keeping(kv, token):
    """A sequence whose next step would write over a state that is to be published at its end."""
    seq = compute(kv, kv.open([token] * 3), 3)
    kv.append(seq, token)
    compute(kv, seq, 1)
    kv.append(seq, token)
    return seq


def test_the_blocks_that_several_sequences_miss_are_enough_for_a_step_of_all():
    for spare in range(3):
        kv = manager(num_blocks=13)
        pair = [keeping(kv, 1), keeping(kv, 2)]
        missing = sum(kv.num_missing_blocks(seq, 1) for seq in pair)
        kv.pool.take(kv.num_free_blocks - missing - spare)
        assert all(kv.can_reserve(seq, 1) for seq in pair)
        kv.reserve_step(pair, [1, 1])
        assert kv.num_free_blocks == (0 if spare == 2 else spare)


def test_reserve_takes_the_blocks_of_a_state_more_where_they_are_free():
    kv = manager()
    seq, free = keeping(kv, 1), kv.num_free_blocks
    missing = kv.num_missing_blocks(seq, 1)
    kv.reserve(seq, 1)
    assert (free - kv.num_free_blocks, missing) == (missing + 1, 1)
