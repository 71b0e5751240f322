"""How many blocks a sequence comes to hold at once, against a manager that walks there (P13)."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import kvcore
from tests.kvcore.machines.outlook import most_taken

FULL = kvcore.FullAttention
SIZES = st.sampled_from([2, 4, 6])
KINDS = st.one_of(
    st.builds(FULL, SIZES),
    st.builds(kvcore.SlidingWindow, st.integers(1, 15), SIZES),
    st.builds(kvcore.ChunkedLocal, st.integers(1, 15), SIZES),
)
GROUPS = st.lists(KINDS, min_size=1, max_size=3)
FULL_AND_CHUNK = [FULL(2), kvcore.ChunkedLocal(4, 2)]
PLENTY = 400


def most(groups, total, chunk):
    """The most blocks at one moment, whatever the steps before: every length, then one step."""
    kv = kvcore.KVCacheManager(PLENTY, 2, groups=groups, enable_caching=False)
    peak = 0
    for computed in range(total):
        seq = kv.open([7] * total)
        kv.reserve(seq, computed)
        kv.commit(seq, computed)
        kv.reserve(seq, min(chunk, total - computed))
        peak = max(peak, seq.num_blocks)
        kv.close(seq)
    return peak


@given(groups=GROUPS, total=st.integers(0, 60), chunk=st.integers(1, 20))
@example(groups=FULL_AND_CHUNK, total=11, chunk=1)  # the sum of both peaks, 9, is never held
def test_a_sequence_alone_holds_so_many_blocks_at_some_moment_and_never_more(groups, total, chunk):
    wanted = most(groups, total, chunk)
    assert kvcore.peak_blocks(total, 2, groups=groups, chunk=chunk) == wanted


def test_full_attention_and_a_chunk_do_not_peak_together():
    assert kvcore.peak_blocks(11, 2, groups=FULL_AND_CHUNK, chunk=1) == 8


@given(groups=GROUPS, steps=st.lists(st.integers(1, 9), min_size=1, max_size=12))
def test_a_pool_of_the_peak_is_enough_for_any_steps(groups, steps):
    total, chunk = sum(steps), max(steps)
    peak = kvcore.peak_blocks(total, 2, groups=groups, chunk=chunk)
    kv = kvcore.KVCacheManager(1 + peak, 2, groups=groups)
    seq = kv.open([7] * total)
    for step in steps:
        left = kv.num_missing_blocks(seq, total - seq.num_computed_tokens, chunk=chunk)
        assert left <= kv.num_free_blocks
        kv.reserve(seq, step)
        kv.commit(seq, step)
    assert kv.num_missing_blocks(seq, 0, chunk=chunk) == 0


def used(groups, shared, *, holds):
    """A manager in which a prefix is found, perhaps held by another sequence."""
    kv = kvcore.KVCacheManager(PLENTY, 2, groups=groups)
    first = kv.open(range(shared))
    kv.reserve(first, shared)
    kv.commit(first, shared)
    if not holds:
        kv.close(first)
    return kv


@given(
    groups=GROUPS,
    shared=st.integers(1, 30),
    more=st.integers(1, 20),
    chunk=st.integers(1, 20),
    holds=st.booleans(),
)
def test_a_plan_in_chunks_is_what_is_taken_at_the_worst_moment(groups, shared, more, chunk, holds):
    """What is found may be another's too: that a window has passed it frees nothing then."""
    total = shared + more
    plan = used(groups, shared, holds=holds).plan(range(total), chunk=chunk)
    taken = 0
    for computed in range(plan.num_cached_tokens, total):
        kv = used(groups, shared, holds=holds)
        free = kv.num_free_blocks
        seq = kv.open(range(total))
        if computed == seq.num_computed_tokens:
            assert kv.num_missing_blocks(seq, total - computed, chunk=chunk) == plan.num_new_blocks
        kv.reserve_to(seq, computed)
        kv.commit(seq, computed - seq.num_computed_tokens)
        left, begun = kv.num_missing_blocks(seq, total - computed, chunk=chunk), kv.num_free_blocks
        kv.reserve(seq, min(chunk, total - computed))
        assert left >= begun - kv.num_free_blocks
        taken = max(taken, free - kv.num_free_blocks)
    assert plan.num_new_blocks + plan.num_revived_blocks == taken


@given(groups=GROUPS, total=st.integers(0, 60), chunk=st.integers(1, 20), data=st.data())
def test_a_sequence_whose_beginning_is_loaded_holds_so_many_blocks(groups, total, chunk, data):
    external = data.draw(st.integers(0, total))
    kv = kvcore.KVCacheManager(PLENTY, 2, groups=groups, enable_caching=False)
    free, seq = kv.num_free_blocks, kv.open([7] * (total + 1))
    peak = kvcore.peak_blocks(total, 2, groups=groups, chunk=chunk, num_external=external)
    assert peak == most_taken(kv, seq, total, chunk, external, free)


@given(
    groups=GROUPS,
    computed=st.integers(0, 30),
    reserved=st.integers(0, 50),
    told=st.integers(0, 40),
    unknown=st.integers(0, 6),
    more=st.integers(0, 60),
    chunk=st.none() | st.integers(1, 12),
    external=st.integers(0, 40),
    shares=st.booleans(),
)
@example(  # room that reaches further than the first periods of both
    groups=[kvcore.SlidingWindow(3, 2), kvcore.ChunkedLocal(12, 6)],
    computed=1,
    reserved=40,
    told=1,
    unknown=0,
    more=60,
    chunk=1,
    external=0,
    shares=False,
)
def test_what_a_sequence_still_takes_is_what_its_way_takes(
    groups, computed, reserved, told, unknown, more, chunk, external, shares
):
    """Whatever is told of it, whatever room it has, and whether others hold its blocks."""
    kv = kvcore.KVCacheManager(PLENTY, 2, groups=groups)
    seq = kv.open([7] * (told + 1))
    kv.expect(seq, unknown)
    kv.reserve_to(seq, max(computed, 1))
    kv.commit(seq, min(computed, seq.num_tokens))
    if shares:
        kv.lease(seq)
    kv.reserve_to(seq, reserved)
    total, external = seq.num_computed_tokens + more, min(external, told + 1)
    said = kv.num_missing_blocks(seq, more, chunk=chunk, num_external=external)
    assert said == most_taken(kv, seq, total, chunk, external, kv.num_free_blocks)


@pytest.mark.parametrize("chunk", [0, -1, True, "4"])
def test_a_chunk_is_a_number_of_tokens(chunk):
    kv = kvcore.KVCacheManager(9, 2)
    seq = kv.open([1, 2, 3])
    for call in (
        lambda: kv.plan([1, 2], chunk=chunk),
        lambda: kv.num_missing_blocks(seq, 2, chunk=chunk),
        lambda: kvcore.peak_blocks(2, 2, chunk=chunk),
    ):
        with pytest.raises(kvcore.InvalidArgumentError, match="chunk: wanted"):
            call()
