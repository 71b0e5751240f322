"""Known ends of cached prefixes, by hand: what goes first, and what waits like all else."""

import kvcore


def manager(window=8, **options):
    groups = [kvcore.FullAttention(), kvcore.SlidingWindow(window)]
    return kvcore.KVCacheManager(60, 4, groups=groups, **options)


def compute(kv, seq, answer=()):
    kv.reserve(seq, seq.num_tokens - seq.num_computed_tokens)
    kv.commit(seq, seq.num_tokens - seq.num_computed_tokens)
    for token in answer:
        kv.append(seq, token)
        kv.reserve(seq, 1)
        kv.commit(seq, 1)
    return seq


def spare(kv):
    return {block.block_id for block in kv.pool.idle_blocks.spare}


def window_at(kv, tokens):
    """The blocks of the window group that a hit of these tokens needs, by id."""
    seq = kv.open([*tokens, 99])
    ids = {block_id for block_id in seq.block_tables[1] if block_id}
    assert seq.num_cached_tokens == len(tokens)
    kv.close(seq)
    return ids


def test_what_has_left_the_window_goes_first_and_its_end_does_not():
    kv = manager()
    seq = kv.open(range(24))
    kv.reserve(seq, 24)
    first = seq.block_tables[1]
    kv.commit(seq, 24)
    kv.close(seq)
    assert spare(kv) == set(first[:3])  # a hit of 20 tokens, and one of 24, see the other three
    kvcore.check(kv)


def test_a_block_that_the_end_inside_the_next_block_needs_waits_until_that_is_full():
    kv = manager()
    seq = compute(kv, kv.open(range(24)), answer=range(50, 53))
    kv.close(seq)  # 27 tokens: the window of a query has left a block that a hit of 24 needs
    assert not window_at(kv, range(24)) & spare(kv)


def test_the_next_turn_takes_the_place_of_the_end_that_it_goes_on_from():
    kv = manager()
    kv.close(compute(kv, kv.open(range(24))))
    old = window_at(kv, range(24))
    kv.close(compute(kv, kv.open(range(44))))
    assert old <= spare(kv)


def test_an_end_that_several_go_on_from_stays_known():
    kv = manager()
    kv.close(compute(kv, kv.open(range(24))))
    kv.close(compute(kv, kv.open([*range(24), *[7] * 20])))
    kv.close(compute(kv, kv.open([*range(24), *[8] * 20])))  # where prompts part
    kv.close(compute(kv, kv.open([*range(24), *[9] * 20])))
    assert not window_at(kv, range(24)) & spare(kv)


def test_the_end_of_a_neighbour_that_shares_the_window_stays_known():
    kv = manager()
    first = compute(kv, kv.open(range(24)))
    other = compute(kv, kv.open([*range(24), 7]))
    kv.close(other)
    needed = window_at(kv, range(24))
    compute(kv, first, answer=range(50, 70))
    assert not needed & spare(kv)


def test_a_fork_keeps_the_end_that_its_parent_leaves():
    kv = manager(window=9)
    seq = compute(kv, kv.open(range(24)), answer=range(50, 53))
    child, _ = kv.fork(seq)
    kv.close(child)
    compute(kv, seq, answer=range(60, 90))
    assert not window_at(kv, range(24)) & spare(kv)


def test_a_look_up_that_computes_nothing_leaves_what_it_finds_where_it_was():
    kv = manager()
    kv.close(compute(kv, kv.open(range(24))))
    before = [block.block_id for block in kv.pool.free_blocks()]
    kv.close(kv.open(range(21)))
    assert [block.block_id for block in kv.pool.free_blocks()] == before


def test_ends_of_a_draft_model_need_the_tokens_that_it_computes_again():
    kv = manager()
    seq = compute(kv, kv.open(range(24), recompute=1))
    kv.close(seq)
    again = kv.open([*range(24), 99], recompute=1)
    held = {block_id for block_id in again.block_tables[1] if block_id}
    assert again.num_cached_tokens == 20
    kv.close(again)
    assert not held & spare(kv)


def test_a_retained_block_goes_first_only_when_its_retention_ends():
    kv = manager()
    seq = kv.open(range(24), retain=[kvcore.Retention(0, 24, max_steps=2)])
    kv.close(compute(kv, seq))
    assert spare(kv) == set()
    kv.tick(2)
    assert len(spare(kv)) == 3
    kvcore.check(kv)


def test_full_attention_alone_knows_no_ends():
    kv = kvcore.KVCacheManager(20, 4)
    seq = compute(kv, kv.open(range(24)))
    assert seq.ends is None
    kv.close(seq)
    assert (kv.pool.idle_blocks.num_ends, spare(kv)) == (0, set())


def test_a_state_that_the_next_turn_has_read_goes_first():
    groups = [kvcore.FullAttention(), kvcore.RecurrentState(2)]
    kv = kvcore.KVCacheManager(60, 4, groups=groups)
    kv.close(compute(kv, kv.open(range(24)), answer=[50]))
    seq = kv.open([*range(24), 50, 51])
    assert seq.num_cached_tokens == 24
    old = {block.block_id for block in seq.state.read}
    kv.close(compute(kv, seq, answer=range(60, 70)))
    assert old <= spare(kv)
    kvcore.check(kv)
