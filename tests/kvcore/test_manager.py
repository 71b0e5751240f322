"""The manager's verbs by example: small pools, ids by hand."""

import pytest

import kvcore


def filled(kv, tokens, **options):
    """Open, reserve and commit everything."""
    seq = kv.open(tokens, **options)
    todo = seq.num_tokens - seq.num_computed_tokens
    kv.reserve(seq, todo)
    kv.commit(seq, todo)
    return seq


def order(kv):
    return [block.block_id for block in kv.pool.free_blocks()]


def test_blocks_are_handed_out_in_order_and_never_the_null_block():
    kv = kvcore.KVCacheManager(6, 4)
    seq = kv.open(range(9))
    assert kv.reserve(seq, 9) == ((1, 2, 3),)
    assert kv.reserve(seq, 9) == ((),)
    assert kv.reserve(seq, 20) == ((4, 5),)
    assert seq.block_table == (1, 2, 3, 4, 5)
    assert kvcore.NULL_BLOCK == 0


def test_a_second_request_shares_the_whole_blocks_of_a_prefix():
    kv = kvcore.KVCacheManager(9, 4)
    first = filled(kv, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    second = kv.open([1, 2, 3, 4, 5, 6, 7, 8, 10, 11])
    assert second.num_cached_tokens == second.num_computed_tokens == 8
    assert second.block_table == first.block_table[:2]


def test_the_last_token_of_a_prompt_never_hits():
    kv = kvcore.KVCacheManager(9, 4)
    filled(kv, range(8))
    assert kv.open(range(8)).num_cached_tokens == 4
    assert kv.open(range(9)).num_cached_tokens == 8
    assert kv.open(range(4)).num_cached_tokens == 0


def test_blocks_are_visible_only_once_all_their_tokens_are_committed():
    kv = kvcore.KVCacheManager(9, 4)
    seq = kv.open(range(9))
    kv.reserve(seq, 9)
    assert kv.plan(range(9)).num_cached_tokens == 0
    kv.commit(seq, 7)
    assert kv.plan(range(9)).num_cached_tokens == 4
    kv.commit(seq, 1)
    assert kv.plan(range(9)).num_cached_tokens == 8


def test_an_aborted_prefill_leaves_nothing_that_could_be_hit():
    kv = kvcore.KVCacheManager(9, 4)
    seq = kv.open(range(9))
    kv.reserve(seq, 9)
    kv.close(seq)
    assert kv.plan(range(9)).num_cached_tokens == 0
    assert kv.stats().num_cached_blocks == 0


def test_a_freed_block_still_hits_until_it_is_reused():
    kv = kvcore.KVCacheManager(4, 4)
    kv.close(filled(kv, range(9)))
    assert kv.num_free_blocks == 3
    assert kv.plan(range(9)).num_cached_tokens == 8
    kv.reserve(kv.open([9]), 4)  # the block without content goes first
    assert kv.plan(range(9)).num_cached_tokens == 8
    kv.reserve(kv.open([9]), 4)
    assert kv.plan(range(9)).num_cached_tokens == 4


def test_the_tail_of_a_sequence_is_reused_before_its_head():
    kv = kvcore.KVCacheManager(8, 2)
    older, newer = filled(kv, [1, 2, 3, 4]), filled(kv, [5, 6, 7, 8])
    kv.close(older)
    kv.close(newer)
    assert order(kv) == [5, 6, 7, 2, 1, 4, 3]


def test_a_hit_makes_a_free_block_the_most_recently_used():
    kv = kvcore.KVCacheManager(5, 2)
    for tokens in ([1, 2, 0], [3, 4, 0]):
        kv.close(filled(kv, tokens))
    assert order(kv) == [3, 4, 1, 2]
    kv.close(kv.open([1, 2, 0]))
    assert order(kv) == [3, 4, 2, 1]


def test_two_requests_that_computed_the_same_both_keep_their_blocks():
    kv = kvcore.KVCacheManager(5, 2)
    first, second = kv.open([1, 2, 3]), kv.open([1, 2, 3])
    for seq in (first, second):
        kv.reserve(seq, 3)
        kv.commit(seq, 3)
    assert first.block_table == (1, 2)
    assert second.block_table == (3, 4)
    kv.close(first)
    taken = kv.open([9])
    kv.reserve(taken, 4)  # reuses blocks 2 and 1: one copy is gone
    assert taken.block_table == (2, 1)
    assert kv.open([1, 2, 3]).block_table == (3,)


def test_namespaces_never_share_and_equal_ones_always_do():
    kv = kvcore.KVCacheManager(30, 2)
    everyone = [
        kvcore.Namespace(),
        kvcore.Namespace(salt=b"X"),
        kvcore.Namespace(lora_name="X"),
        kvcore.Namespace(lora_name="X", lora_version=1),
        kvcore.Namespace(weight_epoch=1),
    ]
    for namespace in everyone:
        assert filled(kv, [1, 2, 3], namespace=namespace).num_cached_tokens == 0
    for namespace in everyone:
        assert kv.plan([1, 2, 3], namespace=namespace).num_cached_tokens == 2


def test_without_a_namespace_or_with_caching_off_nothing_is_shared():
    kv = kvcore.KVCacheManager(9, 2)
    filled(kv, [1, 2, 3], namespace=None)
    assert kv.plan([1, 2, 3], namespace=None).num_cached_tokens == 0
    assert kv.plan([1, 2, 3]).num_cached_tokens == 0
    off = kvcore.KVCacheManager(9, 2, enable_caching=False)
    filled(off, [1, 2, 3])
    assert off.plan([1, 2, 3]).num_cached_tokens == 0
    assert off.stats().num_cached_blocks == 0


def test_running_out_says_how_much_and_changes_nothing():
    kv = kvcore.KVCacheManager(3, 4)
    seq = kv.open(range(20))
    with pytest.raises(kvcore.OutOfBlocksError, match="needed 5 free blocks, 2 available") as full:
        kv.reserve(seq, 20)
    assert (full.value.needed, full.value.available) == (5, 2)
    assert seq.block_table == ()
    assert kv.reserve(seq, 8) == ((1, 2),)


def test_drafts_join_are_judged_and_leave():
    kv = kvcore.KVCacheManager(9, 4)
    seq = filled(kv, range(6))
    kv.extend(seq, [6, 7, 8, 9])  # a token and three drafts
    assert kv.reserve(seq, 4) == ((3,),)
    kv.commit(seq, 2)  # one draft was accepted
    kv.truncate(seq, 8)
    assert seq.block_table == (1, 2)
    assert seq.num_computed_tokens == seq.num_tokens == 8
    assert order(kv)[0] == 3


def test_a_cut_inside_a_published_block_gives_it_back_with_its_content():
    kv = kvcore.KVCacheManager(9, 4)
    seq = filled(kv, range(10))
    kv.truncate(seq, 6)
    assert seq.block_table == (1,)
    assert seq.num_computed_tokens == 4
    kv.extend(seq, [60, 70])
    assert kv.reserve(seq, 4) == ((3,),)  # 3 lost its content when it left, 2 kept it
    kv.commit(seq, 4)
    assert kv.open(range(9)).block_table == (1, 2)
    assert kv.open([0, 1, 2, 3, 4, 5, 60, 70, 80]).block_table == (1, 3)


def test_a_cut_inside_an_unpublished_block_keeps_what_is_computed():
    kv = kvcore.KVCacheManager(9, 4)
    seq = filled(kv, range(7))
    kv.truncate(seq, 6)
    assert seq.block_table == (1, 2)
    assert seq.num_computed_tokens == 6


def test_a_sequence_cannot_outgrow_max_model_len():
    kv = kvcore.KVCacheManager(9, 4, max_model_len=10)
    with pytest.raises(kvcore.SequenceTooLongError, match="11 tokens, max_model_len is 10"):
        kv.open(range(11))
    seq = kv.open(range(10))
    with pytest.raises(kvcore.SequenceTooLongError):
        kv.append(seq, 1)
    with pytest.raises(kvcore.SequenceTooLongError):
        kv.reserve(seq, 11)
    assert len(kv.reserve(seq, 10)[0]) == 3


def test_statistics_count_tokens_blocks_and_evictions():
    kv = kvcore.KVCacheManager(4, 2)
    kv.close(filled(kv, [1, 2, 3]))
    kv.close(filled(kv, [1, 2, 4]))
    kv.close(filled(kv, [5, 6, 7, 8, 9]))
    stats = kv.stats()
    assert (stats.num_queried_tokens, stats.num_hit_tokens) == (11, 2)
    assert stats.hit_rate == 2 / 11
    assert (stats.num_allocated_blocks, stats.num_evicted_blocks) == (2 + 1 + 3, 1)
    assert (stats.num_used_blocks, stats.num_free_blocks, stats.peak_used_blocks) == (0, 3, 3)
    assert kvcore.KVCacheManager(2, 1).stats().hit_rate == 0.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: kvcore.KVCacheManager(1, 4), "num_blocks: wanted 2 to"),
        (lambda: kvcore.KVCacheManager(4, 0), "block_size: wanted 1 to"),
        (lambda: kvcore.KVCacheManager(4.0, 4), "num_blocks: wanted an integer, got float"),
        (lambda: kvcore.KVCacheManager(True, 4), "num_blocks: wanted an integer, got the bool"),
        (lambda: kvcore.KVCacheManager(4, 4, max_model_len=0), "max_model_len: wanted at least 1"),
        (lambda: kvcore.KVCacheManager(4, 4).open([]), "tokens: wanted at least one token"),
        (lambda: kvcore.KVCacheManager(4, 4).open([1], namespace="a"), "namespace: wanted a Name"),
        (lambda: kvcore.KVCacheManager(4, 4).close("seq"), "seq: wanted a KVSequence, got str"),
    ],
)
def test_a_wrong_argument_is_named_with_what_was_wanted(make, message):
    with pytest.raises(kvcore.InvalidArgumentError, match=message):
        make()


def test_a_token_that_is_no_token_id_is_refused_and_nothing_is_appended():
    kv = kvcore.KVCacheManager(4, 4)
    seq = kv.open([1])
    for wrong in (-1, 2**32, 1.0, None, "1"):
        with pytest.raises(kvcore.InvalidArgumentError, match="token: wanted"):
            kv.append(seq, wrong)
    with pytest.raises(kvcore.InvalidArgumentError, match="tokens: wanted"):
        kv.extend(seq, [2, -3])
    assert seq.tokens == (1,)


def test_asking_for_names_does_not_change_what_hits():
    kv = kvcore.KVCacheManager(9, 2)
    seq = filled(kv, [1, 2, 3, 4, 5])
    assert len(seq.block_names()) == 2
    assert kv.open([1, 2, 3, 4, 6]).block_names() == seq.block_names()
    assert kv.open([1, 2, 3], namespace=None).block_names() == ()


def test_representations_say_what_a_debugger_wants():
    kv = kvcore.KVCacheManager(4, 2)
    seq = filled(kv, [1, 2, 3])
    assert repr(seq) == "KVSequence(0, open, 3 tokens, 3 computed, 2 blocks)"
    assert repr(seq.tables[0].blocks[0]) == "Block(1, ref_count=1, published)"
