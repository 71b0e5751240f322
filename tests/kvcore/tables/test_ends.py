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


def test_the_next_turn_takes_the_place_of_an_end_that_a_draft_model_computes_again():
    kv = manager()
    kv.close(compute(kv, kv.open(range(24), recompute=1)))
    again = kv.open(range(44), recompute=1)
    old = {block_id for block_id in again.block_tables[1] if block_id}
    kv.close(compute(kv, again))
    assert old <= spare(kv)


def test_an_end_that_several_go_on_from_stays_known_to_a_draft_model():
    for shared, last in ((24, 24), (24, 22), (24, 40)):
        kv = manager()
        kv.close(compute(kv, kv.open(range(40), recompute=1)))
        kv.close(compute(kv, kv.open([*range(shared), *[7] * 20], recompute=1)))
        kv.close(compute(kv, kv.open([*range(last), *[8] * 20], recompute=1)))
        again = kv.open([*range(last), *[9] * 20], recompute=1)
        held = {block_id for block_id in again.block_tables[1] if block_id}
        kv.close(compute(kv, again))
        assert not held & spare(kv)


def hybrid():
    groups = [kvcore.FullAttention(), kvcore.RecurrentState(2)]
    return kvcore.KVCacheManager(90, 4, groups=groups)


def in_parts(kv, seq, answer=()):
    """Compute a prompt in steps that end where states are wanted, and then the answer."""
    while seq.num_computed_tokens < seq.num_tokens:
        count = kv.chunk_length(seq, seq.num_tokens - seq.num_computed_tokens)
        kv.reserve(seq, count)
        kv.commit(seq, count)
    return compute(kv, seq, answer)


def test_the_state_that_the_next_turn_of_a_draft_model_reads_is_not_the_first_to_go():
    for answer in (1, 3, 9):
        kv = hybrid()
        text, count = [*range(26)], 0
        for turn in range(4):
            seq = in_parts(kv, kv.open(text, recompute=1), range(50, 50 + answer))
            kv.close(seq)
            text += [*range(50, 50 + answer), *[70 + turn] * 7]
            again = kv.open(text, recompute=1)
            assert again.num_cached_tokens > count
            count = again.num_cached_tokens
            held = {block.block_id for block in again.state.read}
            kv.close(again)
            assert not held & spare(kv)


def test_a_state_at_a_boundary_stays_known_to_prompts_that_go_on_otherwise():
    kv = hybrid()
    for first in range(8):  # prompts part, so that boundaries count
        kv.close(in_parts(kv, kv.open([1, 2, 3, 4, first, *[5] * 6])))
    seq = in_parts(kv, kv.open(range(30), boundaries=[12]), range(50, 60))
    kv.close(seq)
    boundary = kv.open([*range(12), 99])
    held = {block.block_id for block in boundary.state.read}
    assert boundary.num_cached_tokens == 12
    kv.close(boundary)
    again = kv.open([*range(30), *range(50, 60), 7, 8], boundaries=[12])
    assert again.num_cached_tokens > 24
    kv.close(again)
    assert not held & spare(kv)


def test_a_look_up_that_is_retried_tells_nothing_of_where_prompts_go_on():
    kv = manager()
    kv.close(compute(kv, kv.open(range(24))))
    for prompt in (range(30), [*range(24)][:21]):
        before = kv.pool.idle_blocks.num_continued
        for _ in range(9):
            kv.close(kv.open(prompt))
        assert kv.pool.idle_blocks.num_continued == before


def test_a_request_that_resumes_is_no_next_turn():
    kv = manager()
    before = kv.pool.idle_blocks.num_continued
    for number in range(9):
        seq = kv.open(range(24 + 4 * number), resumed=number > 0)
        kv.close(compute(kv, seq))
    assert kv.pool.idle_blocks.num_continued == before
    seq = compute(kv, kv.open(range(90)))
    child, _ = kv.fork(seq)
    kv.close(child)
    kv.close(seq)
    assert kv.pool.idle_blocks.num_continued == before + 1  # once for both
