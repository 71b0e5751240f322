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
    kv.close(filled(kv, [1, 2, 0]))
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
    ],
)
def test_a_wrong_argument_is_named_with_what_was_wanted(make, message):
    with pytest.raises(kvcore.InvalidArgumentError, match=message):
        make()


def test_what_is_no_sequence_is_refused():
    wanted = "seq: wanted a KVSequence, got str|KVSequence object expected; got str"
    with pytest.raises((kvcore.InvalidArgumentError, TypeError), match=wanted):
        kvcore.KVCacheManager(4, 4).close("seq")


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
    assert len(seq.block_hashes()) == 2
    assert kv.open([1, 2, 3, 4, 6]).block_hashes() == seq.block_hashes()
    assert kv.open([1, 2, 3], namespace=None).block_hashes() == ()


def test_representations_say_what_a_debugger_wants():
    kv = kvcore.KVCacheManager(4, 2)
    seq = filled(kv, [1, 2, 3])
    assert repr(seq) == "KVSequence(0, open, 3 tokens, 3 computed, 2 blocks)"
    assert repr(seq.tables[0].blocks[0]) == "Block(1, ref_count=1, published)"


# Numbers at their edges, verb by verb.


def test_what_a_new_manager_is_made_of():
    kv = kvcore.KVCacheManager(6, 4)
    assert (kv.num_blocks, kv.num_usable_blocks, kv.num_free_blocks) == (6, 5, 5)
    assert (kv.block_size, kv.groups) == (4, (kvcore.FullAttention(4),))
    assert (kv.events, kv.max_model_len, kv.sequences, kv.leases.active) == (None, None, {}, {})
    assert kv.stats() == kvcore.Stats(6, 0, 5, 0, 0, 0, 0, 0, 0)


def test_sequences_are_numbered_and_listed_in_the_order_of_their_opening():
    kv = kvcore.KVCacheManager(9, 4)
    first, second = kv.open([1]), kv.open([2, 3, 4, 5, 6])
    filled(kv, [7])
    child, _ = kv.fork(second)
    assert (first.seq_id, second.seq_id, child.seq_id) == (0, 1, 3)
    kv.close(second)
    assert list(kv.sequences) == [0, 2, 3]
    assert kv.open([9]).seq_id == 4
    assert (first.is_open, second.is_open) == (True, False)


def test_a_refused_fork_uses_up_no_number():
    kv = kvcore.KVCacheManager(3, 4)
    seq = filled(kv, range(6))
    with pytest.raises(kvcore.OutOfBlocksError, match="needed 1 free blocks, 0 available"):
        kv.fork(seq)
    kvcore.check(kv)
    assert kv.open([1]).seq_id == 1


@pytest.mark.parametrize("computed", [0, 3, 4, 6])
def test_a_plan_says_what_opening_and_reserving_would_take(computed):
    kv = kvcore.KVCacheManager(9, 4)
    if computed:
        kv.close(filled(kv, range(computed)))
    plan = kv.plan(range(11))
    hit = computed // 4
    assert plan == kvcore.Plan(4 * hit, 3 - hit, hit, 8, 0)
    assert plan.fits
    before = kv.num_free_blocks
    seq = kv.open(range(11))
    assert len(kv.reserve(seq, 11 - seq.num_computed_tokens)[0]) == plan.num_new_blocks
    assert type(plan.num_new_blocks) is int
    assert before - kv.num_free_blocks == plan.num_new_blocks + plan.num_revived_blocks


def test_a_plan_counts_the_blocks_that_are_not_hit_at_every_length():
    kv = kvcore.KVCacheManager(20, 4)
    filled(kv, range(13))
    for length in range(1, 30):
        plan = kv.plan(range(length))
        hit = min(12, (length - 1) // 4 * 4)
        wanted = len(range(hit, length, 4))  # one for each four tokens that are left, or fewer
        assert (plan.num_cached_tokens, plan.num_new_blocks) == (hit, wanted)


def test_a_plan_revives_only_what_nobody_holds():
    kv = kvcore.KVCacheManager(5, 4)
    filled(kv, range(5))
    plan = kv.plan(range(9))
    assert (plan.num_cached_tokens, plan.num_revived_blocks, plan.num_new_blocks) == (4, 0, 2)
    assert (plan.num_free_blocks, plan.fits) == (2, True)
    assert not kv.plan(range(13)).fits
    assert not kv.plan(range(9), namespace=None).fits


def test_a_plan_for_several_groups_counts_the_blocks_of_each():
    groups = [kvcore.FullAttention(8), kvcore.SlidingWindow(5)]
    kv = kvcore.KVCacheManager(30, 4, groups=groups)
    assert kv.plan(range(17)).num_new_blocks == 3 + 5
    kv.close(filled(kv, range(16)))
    plan = kv.plan(range(17))
    assert (plan.num_cached_tokens, plan.num_new_blocks) == (16, 1 + 1)
    assert plan.num_revived_blocks == 2 + 1  # the window sees the last block alone


def test_room_is_what_is_missing_after_the_computed_tokens():
    kv = kvcore.KVCacheManager(5, 4)
    seq = filled(kv, range(3))
    assert [kv.can_reserve(seq, count) for count in (0, 1, 13, 14)] == [True, True, True, False]
    assert kv.reserve(seq, 1) == ((),)
    assert kv.reserve(seq, 2) == ((2,),)
    assert kv.reserve(seq, 13) == ((3, 4),)
    assert kv.can_reserve(seq, 13)
    assert not kv.can_reserve(seq, 14)


@pytest.mark.parametrize("verb", ["reserve", "can_reserve", "commit", "truncate", "fail_load"])
def test_a_negative_number_of_tokens_is_named(verb):
    kv = kvcore.KVCacheManager(9, 4)
    seq = filled(kv, range(3))
    with pytest.raises(kvcore.InvalidArgumentError, match="num_tokens: wanted at least 0, got -1"):
        getattr(kv, verb)(seq, -1)
    getattr(kv, verb)(seq, 0)


@pytest.mark.parametrize("verb", ["reserve_step", "commit_step"])
def test_a_negative_number_in_a_step_is_named(verb):
    kv = kvcore.KVCacheManager(9, 4)
    seqs = [filled(kv, range(3)), filled(kv, range(3))]
    with pytest.raises(kvcore.InvalidArgumentError, match=r"num_.*ed: wanted at least 0, got -1"):
        getattr(kv, verb)(seqs, [0, -1])
    getattr(kv, verb)(seqs, [0, 0])


@pytest.mark.parametrize(
    ("verb", "most", "wrong"), [("commit", 3, 4), ("truncate", 6, 7), ("fail_load", 3, 4)]
)
def test_more_tokens_than_there_are_are_named_with_how_many_there_are(verb, most, wrong):
    kv = kvcore.KVCacheManager(9, 4)
    seq = filled(kv, range(3))
    kv.extend(seq, range(3))
    kv.reserve(seq, 3)
    with pytest.raises(kvcore.InvalidArgumentError, match=f"num_tokens.*{most}.*got {wrong}"):
        getattr(kv, verb)(seq, wrong)
    getattr(kv, verb)(seq, most)


def test_a_commit_without_room_is_named_with_the_room_there_is():
    kv = kvcore.KVCacheManager(9, 4)
    seq = kv.open(range(9))
    kv.reserve(seq, 8)
    with pytest.raises(kvcore.NotReservedError, match="9 tokens computed, blocks reserved for 8"):
        kv.commit(seq, 9)
    assert seq.num_computed_tokens == 0
    kv.commit(seq, 8)


def test_the_first_and_the_last_token_id_can_be_appended():
    kv = kvcore.KVCacheManager(9, 4)
    seq = kv.open([0])
    for token in (0, 2**32 - 1):
        kv.append(seq, token)
    assert seq.tokens == (0, 0, 2**32 - 1)
    for wrong in (-1, 2**32):
        with pytest.raises(kvcore.InvalidArgumentError, match=f"token.*4294967295.*got {wrong}"):
            kv.append(seq, wrong)


def test_a_sequence_may_be_as_long_as_max_model_len_and_no_longer():
    kv = kvcore.KVCacheManager(9, 4, max_model_len=5)
    with pytest.raises(kvcore.SequenceTooLongError, match="6 tokens, max_model_len is 5"):
        kv.open(range(6))
    seq = kv.open(range(3))
    kv.append(seq, 1)
    kv.extend(seq, [2])
    for call in (lambda: kv.append(seq, 1), lambda: kv.extend(seq, [1])):
        with pytest.raises(kvcore.SequenceTooLongError, match="6 tokens, max_model_len is 5"):
            call()
    assert seq.num_tokens == 5
    for verb in (kv.can_reserve, kv.reserve):
        with pytest.raises(kvcore.SequenceTooLongError, match="6 tokens, max_model_len is 5"):
            verb(seq, 6)
        assert verb(seq, 5)


def test_items_that_join_with_an_extension_are_counted_from_the_beginning():
    kv = kvcore.KVCacheManager(9, 4)
    seq = kv.open([1, 2, 3])
    kv.extend(
        seq,
        [9, 9, 9],
        items=[kvcore.MultimodalItem(b"cat", 3, 2), kvcore.MultimodalItem(b"dog", 5, 1)],
    )
    assert [item.start for item in seq.items] == [3, 5]
    with pytest.raises(kvcore.InvalidArgumentError, match="positions 6 to 7"):
        kv.extend(seq, [9, 9], items=[kvcore.MultimodalItem(b"cat", 6, 3)])
    assert (seq.num_tokens, len(seq.items)) == (6, 2)


@pytest.mark.parametrize(
    ("keep", "computed", "tokens", "table"),
    [
        (9, 7, 9, (1, 2, 3)),
        (8, 7, 8, (1, 2)),
        (7, 7, 7, (1, 2)),
        (6, 6, 6, (1, 2)),
        (4, 4, 4, (1,)),
        (3, 0, 3, ()),
        (1, 0, 1, ()),
        (0, 0, 0, ()),
    ],
)
def test_a_cut_keeps_the_blocks_that_its_tokens_need(keep, computed, tokens, table):
    kv = kvcore.KVCacheManager(9, 4)
    seq = kv.open(range(9))
    kv.reserve(seq, 9)
    kv.commit(seq, 7)  # block 1 is published, block 2 half full, block 3 reserved
    kv.truncate(seq, keep)
    assert (seq.num_computed_tokens, seq.num_tokens, seq.block_table) == (computed, tokens, table)
    kvcore.check(kv)


def test_a_cut_below_what_was_cached_lowers_that_too():
    kv = kvcore.KVCacheManager(9, 4)
    filled(kv, range(9))
    seq = kv.open(range(9))
    assert seq.num_cached_tokens == 8
    kv.truncate(seq, 5)
    assert (seq.num_cached_tokens, seq.num_computed_tokens) == (4, 4)


def test_the_names_after_a_cut_are_the_names_of_the_new_tokens():
    kv = kvcore.KVCacheManager(9, 2)
    seq = filled(kv, [1, 2, 3, 4, 5])
    before = seq.block_hashes()
    kv.truncate(seq, 2)
    kv.extend(seq, [8, 8])
    kv.reserve(seq, 2)
    kv.commit(seq, 2)
    assert seq.block_hashes()[0] == before[0]
    assert seq.block_hashes() == kv.open([1, 2, 8, 8, 8]).block_hashes()


def test_only_sequences_in_a_namespace_are_queried_and_resumed_ones_apart():
    kv = kvcore.KVCacheManager(20, 2)
    filled(kv, [1, 2, 3])
    filled(kv, [1, 2, 3], namespace=None)
    filled(kv, [1, 2, 3], namespace=None, resumed=True)
    filled(kv, [1, 2, 3, 4], resumed=True)
    filled(kv, [1, 2, 3, 4, 5])
    stats = kv.stats()
    assert (stats.num_queried_tokens, stats.num_hit_tokens) == (3 + 5, 4)
    assert (stats.num_resumed_tokens, stats.num_resumed_hit_tokens) == (4, 2)


def test_a_step_of_nobody_is_a_step():
    kv = kvcore.KVCacheManager(9, 4)
    assert kv.reserve_step([], []) == ()
    kv.commit_step([], [])


def test_a_step_says_for_every_group_of_every_sequence_what_it_appended():
    groups = [kvcore.FullAttention(), kvcore.SlidingWindow(9)]
    kv = kvcore.KVCacheManager(30, 4, groups=groups)
    seqs = [kv.open([number] * 12) for number in range(3)]
    kv.reserve(seqs[1], 12)
    grown = kv.reserve_step(seqs, [4, 8, 5])
    assert grown == (
        kvcore.Growth(0, 0, (7,)),
        kvcore.Growth(0, 1, (8,)),
        kvcore.Growth(2, 0, (9, 10)),
        kvcore.Growth(2, 1, (11, 12)),
    )
    kv.commit_step(seqs, [4, 8, 5])
    assert [seq.num_computed_tokens for seq in seqs] == [4, 8, 5]


def test_a_lease_holds_the_first_blocks_that_it_is_asked_to_hold():
    kv = kvcore.KVCacheManager(9, 4)
    seq = filled(kv, range(12))
    for count, held in ((0, []), (1, [1]), (4, [1]), (5, [2, 1]), (None, [3, 2, 1])):
        lease = kv.lease(seq, num_tokens=count)
        assert [block.block_id for block in lease.blocks] == held
    assert (lease.kind, lease.owner, lease.deadline) == ("step", "", None)
    with pytest.raises(kvcore.InvalidArgumentError, match="num_tokens: wanted at least 0, got -1"):
        kv.lease(seq, num_tokens=-1)


def test_time_goes_on_by_as_many_steps_as_are_said_and_by_one_if_none_are():
    kv = kvcore.KVCacheManager(9, 4)
    seq = filled(kv, range(4))
    early, late = kv.lease(seq, max_steps=1), kv.lease(seq, max_steps=4)
    kv.lease(seq)
    assert kv.tick(0) == ()
    assert kv.tick() == (early,)
    assert kv.tick(2) == ()
    assert kv.tick(1) == (late,)
    assert kv.pool.step == 4
    assert list(kv.leases.active) == [2]
    for wrong in (-1, 2**62 - 4):
        with pytest.raises(kvcore.InvalidArgumentError, match=f"num_steps.*got {wrong}"):
            kv.tick(wrong)
    kv.tick(2**62 - 5)
    assert kv.pool.step == 2**62 - 1


def test_a_failed_load_of_nothing_concerns_its_own_sequence_alone():
    kv = kvcore.KVCacheManager(9, 4)
    loader, other = filled(kv, range(8)), filled(kv, [*range(4), 9])
    assert kv.fail_load(loader, 8) == ()
    assert kv.fail_load(loader, 4) == (loader,)
    assert (loader.num_computed_tokens, other.num_computed_tokens) == (4, 5)
    assert kv.fail_load(loader, 0) == (loader, other)
    assert kv.stats().num_cached_blocks == 0


def test_a_reset_reports_what_it_forgot_and_what_still_is_in_use():
    kv = kvcore.KVCacheManager(20, 4)
    filled(kv, range(9))
    filled(kv, range(5))
    kv.close(filled(kv, [7] * 12))
    before = order(kv)
    assert kv.reset() == kvcore.ResetReport(2 + 3, 3 + 1, 2)
    assert order(kv) == [7, 6, 5, *before[:-3]]  # what lost content goes first
    assert kv.reset() == kvcore.ResetReport(0, 4, 2)
    assert kvcore.KVCacheManager(4, 4).reset() == kvcore.ResetReport(0, 0, 0)


@pytest.mark.parametrize(
    "call",
    [
        lambda kv, seq: kv.open([1], None),
        lambda kv, seq: kv.plan([1], None),
        lambda kv, seq: kv.extend(seq, [1], ()),
        lambda kv, seq: kv.lease(seq, "step", "me"),
        lambda kv, seq: kv.reset(True),
        lambda kv, seq: kv.pool.clear(True),
        lambda kv, seq: kvcore.KVCacheManager(4, 4, None),
    ],
)
def test_options_are_named_and_never_counted_off(call):
    kv = kvcore.KVCacheManager(9, 4)
    seq = filled(kv, range(4))
    with pytest.raises(TypeError, match="positional"):
        call(kv, seq)


def test_what_a_sequence_hits_is_kept_as_it_wishes_from_then_on():
    kv = kvcore.KVCacheManager(9, 2)
    filled(kv, [1, 2, 3, 4, 5])
    seq = kv.open([1, 2, 3, 4, 5], retain=[kvcore.Retention(0, 2, priority=3)])
    assert kv.pool.idle_blocks.kept == {1: ((3, 2**63 - 1),)}
    for other in list(kv.sequences.values()):
        kv.close(other)
    assert order(kv)[-1] == 1
    assert seq.retention == (kvcore.Retention(0, 2, priority=3),)


def test_a_closed_sequence_holds_nothing():
    kv = kvcore.KVCacheManager(9, 4, groups=[kvcore.FullAttention(), kvcore.SlidingWindow(4)])
    seq = filled(kv, range(10))
    kv.close(seq)
    assert (seq.is_open, seq.num_blocks, seq.block_tables) == (False, 0, ((), ()))
    assert kv.num_free_blocks == kv.num_usable_blocks
    assert seq.num_tokens == 10  # for who asks what it was


def test_a_plan_names_the_blocks_that_would_be_found():
    groups = [kvcore.FullAttention(), kvcore.SlidingWindow(5)]
    kv = kvcore.KVCacheManager(40, 2, groups=groups)
    prompt = list(range(12))
    assert kv.plan(prompt).cached_block_ids == ((), ())
    for _ in range(2):
        before = kv.open(prompt)
        todo = before.num_tokens - before.num_computed_tokens
        kv.reserve(before, todo)
        kv.commit(before, todo)
        kv.close(before)
        plan = kv.plan(prompt)
        seq = kv.open(prompt)
        held = tuple(tuple(filter(None, table)) for table in seq.block_tables)
        assert plan.cached_block_ids == held
        assert [len(ids) for ids in held] == [5, 2]
        kv.close(seq)
    assert kv.plan(prompt, skip_reading=True).cached_block_ids == ()


@pytest.mark.parametrize(("field", "most"), [("priority", 2**31 - 1), ("max_steps", 2**62)])
def test_a_wish_has_its_bounds(field, most):
    assert getattr(kvcore.Retention(0, 4, **{field: most}), field) == most
    for wrong in (0, most + 1):
        with pytest.raises(kvcore.InvalidArgumentError, match=f"{field}: wanted 1 to {most}"):
            kvcore.Retention(0, 4, **{field: wrong})


@pytest.mark.parametrize(
    "verb",
    [
        "can_reserve", "commit", "expect", "lease", "num_missing_blocks", "plan", "reserve",
        "reserve_to", "step", "tick", "truncate",
    ],
)  # fmt: skip
def test_a_number_that_python_refuses_to_print_is_refused_by_name(verb):
    kv = kvcore.KVCacheManager(8, 4)
    seq = kv.open([1, 2, 3])
    huge = 10**6000
    calls = {
        "lease": lambda: kv.lease(seq, max_steps=huge),
        "plan": lambda: kv.plan([1], chunk=huge),
        "step": lambda: kv.step([seq], huge, [1]),
        "tick": lambda: kv.tick(huge),
    }
    with pytest.raises(kvcore.InvalidArgumentError, match=r": wanted \d to \d+, got one of"):
        calls.get(verb, lambda: getattr(kv, verb)(seq, huge))()
    assert seq.num_tokens == 3
    assert kv.num_free_blocks == 7
