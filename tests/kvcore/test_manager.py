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


def test_a_freed_block_still_hits_until_it_is_reused():
    kv = kvcore.KVCacheManager(4, 4)
    kv.close(filled(kv, range(9)))
    assert kv.num_free_blocks == 3
    assert kv.plan(range(9)).num_cached_tokens == 8
    kv.reserve(kv.open([9]), 4)  # the block without content goes first
    assert kv.plan(range(9)).num_cached_tokens == 8
    kv.reserve(kv.open([9]), 4)
    assert kv.plan(range(9)).num_cached_tokens == 4


def test_running_out_says_how_much_and_changes_nothing():
    kv = kvcore.KVCacheManager(3, 4)
    seq = kv.open(range(20))
    with pytest.raises(kvcore.OutOfBlocksError, match="needed 5 free blocks, 2 available") as full:
        kv.reserve(seq, 20)
    assert (full.value.needed, full.value.available) == (5, 2)
    assert seq.block_table == ()
    assert kv.reserve(seq, 8) == ((1, 2),)


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


def test_a_step_of_nobody_is_a_step():
    kv = kvcore.KVCacheManager(9, 4)
    assert kv.reserve_step([], []) == ()
    kv.commit_step([], [])


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
