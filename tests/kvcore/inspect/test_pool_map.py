"""A look at the pool says what the blocks themselves say, and changes nothing."""

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import kvcore
from tests.kvcore.test_determinism import managers, one_call
from tests.kvcore.views import pool_view


def lived(seed, num_calls):
    """A manager with two groups, three namespaces, leases and retention, after some calls."""
    (kv,), draw = managers(), random.Random(seed)
    for _ in range(num_calls):
        try:
            one_call(kv, draw)
        except kvcore.OutOfBlocksError:
            kv.close(next(iter(kv.sequences.values())))
    return kv


def faults(kv, states, reports):
    """Where a map and its reports differ from what the blocks and the tables say."""
    found = []
    for block, state, report in zip(kv.pool.blocks, states, reports, strict=True):
        wanted = kvcore.HELD if block.ref_count else kvcore.CACHED if block.node else kvcore.EMPTY
        if state != wanted or report.state != wanted:
            found.append(f"{block!r} is shown as {state} and {report.state}")
        if (report.num_holders, report.can_be_hit) != (block.ref_count, block.node is not None):
            found.append(f"{block!r} is reported as {report}")
        holders = [
            seq
            for seq in kv.sequences.values()
            for t in seq.tables
            if block in t.blocks[t.num_null :]
        ]
        if list(report.sequences) != holders:
            found.append(f"{block!r} is held by {holders}, reported are {report.sequences}")
        for seq in holders:
            size = seq.tables[report.group].block_size
            place = seq.tables[report.group].blocks.index(block)
            told = tuple(seq.packed[place * size : (place + 1) * size])
            if (report.start, report.tokens) != (place * size, told) and not seq.num_unknown_tokens:
                found.append(f"{block!r} holds {told}, reported is {report}")
    return found


def looked(kv):
    return kvcore.pool_map(kv), [kvcore.describe_block(kv, n) for n in range(kv.num_blocks)]


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), num_calls=st.integers(0, 150))
@example(seed=0, num_calls=150)
def test_a_map_says_of_every_block_what_the_block_says(seed, num_calls):
    kv = lived(seed, num_calls)
    before = pool_view(kv.pool)
    states, reports = looked(kv)
    assert pool_view(kv.pool) == before
    assert faults(kv, states, reports) == []
    used = kv.num_usable_blocks - kv.num_free_blocks
    assert (states.count(kvcore.HELD), states[kvcore.NULL_BLOCK]) == (used, kvcore.EMPTY)


@pytest.mark.parametrize("wrong", ["held", "cached", "holders", "tokens"])
def test_the_checker_of_maps_sees_what_is_wrong(wrong):
    kv = kvcore.KVCacheManager(8, 2)
    first = kv.open([1, 2, 3, 4, 5])
    kv.reserve(first, 5)
    kv.commit(first, 5)
    states, reports = looked(kv)
    states = bytearray(states)
    assert faults(kv, states, reports) == []
    if wrong in {"held", "cached"}:
        states[1 if wrong == "held" else 5] = kvcore.CACHED
    elif wrong == "holders":
        reports[1] = kvcore.describe_block(kv, 7)
    else:
        reports[1] = kvcore.describe_block(kv, 2)
    assert faults(kv, states, reports) != []


def test_a_report_outlives_its_request_and_ends_with_the_content():
    kv = kvcore.KVCacheManager(4, 2)
    tenant = kvcore.Namespace(salt=b"t")
    first = kv.open([1, 2, 3, 4, 5], namespace=tenant)
    kv.reserve(first, 5)
    kv.commit(first, 5)
    second = kv.open([1, 2, 9], namespace=tenant)
    shared = kvcore.describe_block(kv, 1)
    assert (shared.num_holders, shared.sequences) == (2, (first, second))
    assert kvcore.describe_block(kv, 3).tokens == (5,)
    assert not kvcore.describe_block(kv, 3).can_be_hit
    kv.close(first)
    kv.close(second)
    assert kvcore.pool_map(kv) == bytes([0, kvcore.CACHED, kvcore.CACHED, 0])
    left = kvcore.describe_block(kv, 2)
    assert (left.state, left.start, left.tokens) == (kvcore.CACHED, 2, (3, 4))
    assert (left.namespace, left.sequences) == (tenant, ())
    kv.reserve(kv.open([7]), 6)
    assert kvcore.describe_block(kv, 2).tokens == ()


def test_what_is_shared_with_nobody_has_no_namespace():
    kv = kvcore.KVCacheManager(4, 2)
    private = kv.open([1, 2, 3], namespace=None)
    kv.reserve(private, 3)
    kv.commit(private, 3)
    assert kvcore.describe_block(kv, 1).namespace is None
    assert kvcore.describe_block(kv, 1).tokens == (1, 2)


def test_a_look_makes_no_block():
    kv = kvcore.KVCacheManager(100_000, 16)
    kv.reserve(kv.open([1]), 1)
    assert kvcore.pool_map(kv).count(kvcore.HELD) == 1
    assert kvcore.describe_block(kv, 99_999).state == kvcore.EMPTY
    assert len(kv.pool._made) < 10


@pytest.mark.parametrize("number", [-1, 4, 2**40])
def test_a_block_that_does_not_exist_is_refused(number):
    with pytest.raises(kvcore.InvalidArgumentError, match=r"block_id: wanted .* 3, got"):
        kvcore.describe_block(kvcore.KVCacheManager(4, 2), number)
