"""KV from outside: what a load takes, what joins, and what becomes of one that fails."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import kvcore
from tests.kvcore.test_manager import filled
from tests.kvcore.verbs.test_peaks import GROUPS, PLENTY, used

WINDOW = [kvcore.FullAttention(), kvcore.SlidingWindow(6)]


@pytest.fixture
def kv():
    return kvcore.KVCacheManager(64, 4, groups=WINDOW, record_events="xxh3-128")


def test_a_window_has_null_entries_for_what_no_query_after_the_load_sees(kv):
    seq = kv.open(range(30))
    lease = kv.begin_load(seq, 24, owner="disk")
    assert lease.load.block_ids == ((1, 2, 3, 4, 5, 6), (7, 8))
    assert lease.load.first_blocks == (0, 4)
    assert (seq.num_computed_tokens, seq.block_tables) == (0, ((), ()))
    assert kv.plan(range(30)).num_cached_tokens == 0
    assert kv.commit_load(lease)
    assert seq.block_tables == ((1, 2, 3, 4, 5, 6), (0, 0, 0, 0, 7, 8))
    assert (seq.num_computed_tokens, seq.num_cached_tokens) == (24, 0)
    assert kv.open(range(30)).num_cached_tokens == 24
    kvcore.check(kv)


def test_a_load_in_half_a_block_can_be_hit_once_the_block_is_full(kv):
    seq = kv.open(range(30))
    assert kv.commit_load(kv.begin_load(seq, 26))
    assert seq.block_tables[1] == (0, 0, 0, 0, 0, 8, 9)
    assert kv.plan(range(30)).num_cached_tokens == 0  # a query at 24 sees position 19
    kv.reserve(seq, 4)
    kv.commit(seq, 4)
    assert kv.plan(range(30)).num_cached_tokens == 28


def test_what_is_found_is_not_loaded_again_and_passes_when_the_load_has_joined(kv):
    first = filled(kv, range(16))
    seq = kv.open(range(30))
    assert seq.block_tables == first.block_tables == ((1, 2, 3, 4), (0, 0, 7, 8))
    lease = kv.begin_load(seq, 24)
    assert lease.load.first_blocks == (4, 4)
    kv.close(first)
    assert kv.commit_load(lease)
    assert seq.block_tables[1][:4] == (0, 0, 0, 0)
    assert kv.plan(range(17)).num_cached_tokens == 16  # they are free, and found


def test_a_sequence_that_goes_on_meanwhile_keeps_what_it_computes(kv):
    seq = kv.open(range(30))
    lease = kv.begin_load(seq, 24)
    kv.reserve(seq, 10)
    kv.commit(seq, 10)
    own = seq.block_tables[0]
    assert kv.commit_load(lease)
    assert seq.block_tables[0][:2] == own[:2]
    assert seq.num_computed_tokens == 24
    kvcore.check(kv)
    other = kv.open([*range(40, 60)])
    late = kv.begin_load(other, 8)
    kv.reserve(other, 20)
    kv.commit(other, 20)
    assert not kv.commit_load(late)


@pytest.mark.parametrize(("before", "after"), [(b"a", b"a"), (b"a", b"b"), (b"b", b"a")])
def test_a_load_joins_no_sequence_whose_items_have_become_others(kv, before, after):
    seq = kv.open(range(8), items=[kvcore.MultimodalItem(before, 4, 2)])
    lease = kv.begin_load(seq, 8)
    kv.truncate(seq, 4)
    kv.extend(seq, range(4, 8), items=[kvcore.MultimodalItem(after, 4, 2)])
    assert kv.commit_load(lease) == (before == after)


@pytest.mark.parametrize("count", range(1, 41))
def test_of_a_window_whose_blocks_no_hit_can_use_a_load_leaves_what_computing_leaves(count):
    groups = [kvcore.FullAttention(block_size=16), kvcore.SlidingWindow(3, block_size=4)]
    loaded, computed = (kvcore.KVCacheManager(64, 4, groups=groups) for _ in range(2))
    seqs = [kv.open(range(40)) for kv in (loaded, computed)]
    assert loaded.commit_load(loaded.begin_load(seqs[0], count))
    computed.reserve(seqs[1], count)
    tables = [seqs[0].block_tables, seqs[1].block_tables]
    computed.commit(seqs[1], count)
    loaded.close(seqs[0])
    computed.close(seqs[1])
    for pair in zip(*tables, strict=True):
        for ours, other in zip(*pair, strict=True):
            if ours:
                states = [
                    kvcore.describe_block(loaded, ours),
                    kvcore.describe_block(computed, other),
                ]
                assert states[0].state == states[1].state


@pytest.mark.parametrize("stop", range(1, 25))
def test_what_is_loaded_is_kept_as_far_as_the_wish_reaches(stop):
    kv = kvcore.KVCacheManager(64, 4)
    seq = kv.open(range(24), retain=[kvcore.Retention(stop - 1, stop)])
    assert kv.commit_load(kv.begin_load(seq, 24))
    assert kv.pool.idle_blocks.kept.keys() == set(seq.block_table[: -(-stop // 4)])


def test_a_load_from_before_a_reset_is_shared_with_nobody(kv):
    seq = kv.open(range(30))
    lease = kv.begin_load(seq, 24)
    kv.reset()
    assert kv.commit_load(lease)
    assert seq.num_computed_tokens == 24
    assert kv.plan(range(30)).num_cached_tokens == 0
    kvcore.check(kv)


def test_what_cannot_be_loaded_is_refused(kv):
    seq = filled(kv, range(10))
    kv.expect(seq, 3)
    for count in (-1, 0, 10, 11):  # computed, or not told yet
        with pytest.raises(kvcore.InvalidArgumentError, match="num_tokens: wanted"):
            kv.begin_load(seq, count)
    fresh = kv.open([1, 2, 3])
    # Compiled, another type is a TypeError.
    for options in ({"max_steps": 0}, {"owner": 7}):
        with pytest.raises((kvcore.InvalidArgumentError, TypeError)):
            kv.begin_load(fresh, 3, **options)
    with pytest.raises(kvcore.InvalidArgumentError, match="lease: wanted"):
        kv.commit_load(kv.lease(seq))
    with pytest.raises((kvcore.InvalidArgumentError, TypeError)):
        kv.commit_load(None)
    other = kvcore.KVCacheManager(8, 4)
    foreign = other.begin_load(other.open([1, 2, 3]), 2)
    with pytest.raises(kvcore.InvalidArgumentError, match="lease: wanted"):
        kv.commit_load(foreign)
    for call in (kv.plan, lambda tokens, **o: kv.num_missing_blocks(fresh, 0, **o)):
        with pytest.raises(kvcore.InvalidArgumentError, match="num_external: wanted"):
            call([1, 2, 3], num_external=4)


def test_a_window_leaves_nothing_in_the_tree_once_its_blocks_are_reused(kv):
    seq = kv.open(range(30))
    kv.commit_load(kv.begin_load(seq, 24))
    assert len(list(kv.pool.trees[1].nodes())) == 6
    stored = kv.events.take()
    assert [(run.group, len(run.block_hashes)) for run in stored] == [(0, 6), (1, 2)]
    assert stored[1].parent == stored[0].block_hashes[3]  # the names are those of the whole prefix
    kv.close(seq)
    kv.reserve(kv.open(range(100, 101), namespace=None), 4 * 31)
    kvcore.check(kv)
    assert list(kv.pool.trees[1].nodes()) == []
    assert kvcore.fold([*stored, *kv.events.take()]) == kvcore.fold((), kv.snapshot())


def most(kv, seq, external, total, chunk):
    """The most blocks in use at one moment, whatever the chunks are."""
    worst = 0
    for first in range(external, total + 1):
        child = kv.open(seq, skip_reading=True)
        if external:
            assert kv.commit_load(kv.begin_load(child, external))
        kv.reserve(child, first - external)
        kv.commit(child, first - external)
        kv.reserve(child, min(chunk, total - first))
        worst = max(worst, child.num_blocks)
        kv.close(child)
    return worst


@given(
    groups=GROUPS, total=st.integers(1, 50), external=st.integers(0, 50), chunk=st.integers(1, 20)
)
@example(groups=[kvcore.SlidingWindow(9, 2)], total=40, external=40, chunk=1)
def test_a_sequence_that_is_loaded_holds_so_many_blocks_and_never_more(
    groups, total, external, chunk
):
    external = min(external, total)
    kv = kvcore.KVCacheManager(PLENTY, 2, groups=groups, enable_caching=False)
    wanted = most(kv, [7] * total, external, total, chunk)
    peak = kvcore.peak_blocks(total, 2, groups=groups, chunk=chunk, num_external=external)
    assert peak == wanted


@given(
    groups=GROUPS,
    known=st.integers(1, 30),
    held=st.booleans(),
    more=st.integers(1, 30),
    rest=st.integers(0, 12),
    chunk=st.integers(1, 9),
)
def test_a_plan_of_a_load_says_what_comes_to_be_taken(groups, known, held, more, rest, chunk):
    """Hits, then a load, then any chunks: at some moment as much as planned, and never more."""
    external, total = known + more, known + more + rest
    worst, wanted = 0, set()
    for first in range(external, total + 1):
        kv = used(groups, known, holds=held)
        plan = kv.plan(range(total), chunk=chunk, num_external=external)
        free = kv.num_free_blocks
        seq = kv.open(range(total))
        left = total - seq.num_computed_tokens
        missing = kv.num_missing_blocks(seq, left, chunk=chunk, num_external=external)
        wanted.add((plan.num_new_blocks + plan.num_revived_blocks, plan.num_new_blocks - missing))
        lease = kv.begin_load(seq, external)
        worst = max(worst, free - kv.num_free_blocks)
        assert kv.commit_load(lease)
        kv.reserve(seq, first - external)
        kv.commit(seq, first - external)
        kv.reserve(seq, min(chunk, total - first))
        worst = max(worst, free - kv.num_free_blocks)
        kvcore.check(kv)
    assert wanted == {(worst, 0)}


@pytest.mark.parametrize("namespace", [kvcore.DEFAULT_NAMESPACE, None])
def test_after_a_load_a_whole_step_counts_no_token_past_the_table(namespace):
    """Whole steps had counted up to what the table had before."""
    kv = kvcore.KVCacheManager(64, 4)
    seq = kv.open([1, 2, 3], namespace=namespace)
    kv.reserve(seq, 40)
    kv.commit(seq, 3)
    kv.append(seq, 5)
    kv.decode_step([seq], [6])
    kv.decode_step([seq], [6])
    assert kv.commit_load(kv.begin_load(seq, seq.num_tokens))
    kvcore.check(kv)
    for _ in range(12):
        kv.decode_step([seq], [7])
        kvcore.check(kv)
    assert (seq.num_computed_tokens, len(seq.block_table)) == (17, 5)


class _Number:
    """An integer that does something when it is looked at."""

    def __init__(self, does):
        self.does = does

    def __index__(self):
        self.does()
        return 3


def test_a_deadline_that_calls_the_manager_is_looked_at_before_anything_is_taken():
    kv = kvcore.KVCacheManager(9, 4, enable_caching=False)
    first, second = kv.open(range(12)), kv.open(range(12))
    lease = kv.begin_load(first, 12, max_steps=_Number(lambda: kv.reserve(second, 12)))
    assert not {*lease.load.block_ids[0]} & {*second.block_table}
    kvcore.check(kv)
    with pytest.raises(kvcore.StaleSequenceError):
        kv.lease(second, max_steps=_Number(lambda: kv.close(second)))
    kvcore.check(kv)
    assert kv.num_free_blocks == 5
