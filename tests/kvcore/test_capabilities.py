"""Groups, forks, leases, items, events, steps by example: small pools, ids by hand."""

from array import array

import numpy as np
import pytest

import kvcore


def filled(kv, tokens, **options):
    """Open, reserve and commit everything."""
    seq = kv.open(tokens, **options)
    todo = seq.num_tokens - seq.num_computed_tokens
    kv.reserve(seq, todo)
    kv.commit(seq, todo)
    return seq


# Layer groups.


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([], "at least one layer group"),
        (["full"], "wanted FullAttention"),
    ],
)
def test_groups_that_cannot_be_are_named(groups, message):
    with pytest.raises(kvcore.InvalidArgumentError, match=message):
        kvcore.KVCacheManager(9, 4, groups=groups)


def test_slots_of_positions_that_a_window_gave_back_are_refused():
    kv = kvcore.KVCacheManager(20, 4, groups=[kvcore.SlidingWindow(window=4)])
    seq = filled(kv, range(12))
    out = array("q", [0] * 4)
    assert seq.write_slot_mapping(8, 12, out) == 4
    with pytest.raises(kvcore.NotReservedError, match="blocks for 8 to 11"):
        seq.write_slot_mapping(7, 11, out)


# Planning.


def test_a_plan_fits_above_a_watermark_where_that_many_blocks_are_left():
    kv = kvcore.KVCacheManager(6, 4)
    kv.close(filled(kv, range(10)))
    plan = kv.plan(range(14))  # two blocks revived, two new, one left
    assert [plan.fits_above(watermark) for watermark in (0, 1, 2)] == [True, True, False]
    assert plan.fits
    kv.reserve(kv.open(range(14)), 6)
    assert kv.num_free_blocks == 1
    with pytest.raises(kvcore.InvalidArgumentError, match="watermark: wanted at least 0"):
        plan.fits_above(-1)


# Leases and loads.


def test_blocks_under_a_lease_are_handed_out_only_after_it():
    kv = kvcore.KVCacheManager(4, 4)
    seq = filled(kv, range(12))
    lease = kv.lease(seq, "store", owner="disk")
    kv.close(seq)
    assert kv.num_free_blocks == 0
    assert kv.plan([1]).num_deferred_blocks == 3
    assert kv.leases.counts() == {"store": 1}
    assert lease.end() is True
    assert kv.num_free_blocks == 3
    assert lease.end() is False
    assert kv.leases.end(99) is False
    kvcore.check(kv)


def test_a_lease_is_a_context_and_ends_with_an_error_too():
    kv = kvcore.KVCacheManager(4, 4)
    seq = filled(kv, range(4))
    free_under_lease = []

    def step():
        with kv.lease(seq):
            kv.close(seq)
            free_under_lease.append(kv.num_free_blocks)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        step()
    assert free_under_lease == [2]
    assert kv.num_free_blocks == 3


def test_a_lease_ends_at_its_deadline():
    kv = kvcore.KVCacheManager(4, 4)
    lease = kv.lease(filled(kv, range(4)), "load", max_steps=2)
    assert kv.tick() == ()
    assert kv.tick() == (lease,)
    assert not lease.is_active
    with pytest.raises(kvcore.InvalidArgumentError, match="max_steps"):
        kv.lease(kv.open([1]), max_steps=0)
    with pytest.raises((kvcore.InvalidArgumentError, TypeError), match=r"kind|str object expected"):
        kv.lease(kv.open([1]), kind=1)  # a compiled function refuses it at its door


# Retention.


@pytest.mark.parametrize(
    "wrong",
    [
        {"start": -1, "stop": 2},
        {"start": 2, "stop": 2},
    ],
)
def test_a_wish_that_means_nothing_is_refused(wrong):
    with pytest.raises(kvcore.InvalidArgumentError, match="wanted"):
        kvcore.Retention(**wrong)


def test_a_wish_of_another_kind_is_refused_before_anything_is_opened():
    kv = kvcore.KVCacheManager(6, 2)
    with pytest.raises(kvcore.InvalidArgumentError, match="retain: wanted Retention, got str"):
        kv.open([1, 2, 3], retain=["forever"])
    assert not kv.sequences


# Items.


def cat(start, **more):
    return kvcore.MultimodalItem(b"cat", start, 3, **more)


def test_which_rows_of_an_image_lie_in_a_block_matters():
    kv = kvcore.KVCacheManager(20, 4)
    filled(kv, [9] * 8 + [1], items=[kvcore.MultimodalItem(b"cat", 0, 8)])
    assert (
        kv.plan([9] * 8 + [1], items=[kvcore.MultimodalItem(b"cat", 0, 8)]).num_cached_tokens == 8
    )
    # The same content, begun again at the block's edge: row 0 stands where row 4 stood.
    twice = [kvcore.MultimodalItem(b"cat", 0, 4), kvcore.MultimodalItem(b"cat", 4, 4)]
    assert kv.plan([9] * 8 + [1], items=twice).num_cached_tokens == 4


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: kvcore.MultimodalItem("cat", 0, 1), "content: wanted bytes"),
        (lambda: kvcore.MultimodalItem(b"", 0, 1), "at least one byte"),
        (lambda: kvcore.MultimodalItem(b"c", -1, 1), "start"),
        (lambda: kvcore.MultimodalItem(b"c", 0, 0), "length"),
        (lambda: kvcore.MultimodalItem(b"c", 0, 2, b"\x01"), "mask: wanted 2 bytes"),
        (lambda: kvcore.MultimodalItem(b"c", 0, 1, b"\x02"), "mask: wanted 1 bytes"),
        (lambda: kvcore.MultimodalItem(b"c", 0, 1, [1]), "mask: wanted bytes, got list"),
        (lambda: kvcore.KVCacheManager(9, 4).open([1, 2], items=[cat(0)]), "within positions 0"),
        (lambda: kvcore.KVCacheManager(9, 4).open([1] * 9, items=[cat(2), cat(3)]), "apart"),
        (
            lambda: kvcore.KVCacheManager(9, 4).open([1] * 9, items=["cat"]),
            "wanted MultimodalItem, got str",
        ),
    ],
)
def test_an_item_that_cannot_be_described_is_refused(make, message):
    with pytest.raises(kvcore.InvalidArgumentError, match=message):
        make()


def test_a_cut_through_an_image_keeps_its_first_rows():
    kv = kvcore.KVCacheManager(9, 4)
    seq = filled(kv, [9] * 6, items=[kvcore.MultimodalItem(b"cat", 1, 4, b"\x01\x00\x01\x01")])
    kv.truncate(seq, 3)
    assert seq.items == (kvcore.MultimodalItem(b"cat", 1, 2, b"\x01\x00"),)
    kv.truncate(seq, 1)
    assert seq.items == ()


# Events.


def test_events_name_contents_and_a_late_reader_needs_only_a_snapshot():
    kv = kvcore.KVCacheManager(4, 2, record_events="sha256")
    seq = filled(kv, [1, 2, 3, 4, 5])
    (run,) = kv.events.take()
    first, second = names = seq.block_hashes("sha256")
    assert (run.number, run.group, run.block_hashes, run.parent) == (1, 0, names, None)
    assert run.namespace_key == kvcore.encode_namespace(kvcore.DEFAULT_NAMESPACE)
    assert (run.tokens, run.items, run.block_size) == ((1, 2, 3, 4), (b"", b""), 2)
    assert run.packed == kvcore.pack([1, 2, 3, 4]).tobytes()
    snapshot = kv.snapshot()
    assert snapshot == kvcore.Snapshot(1, (run,))
    kv.close(seq)
    kv.reserve(kv.open([7]), 4)  # takes the block without content, and the tail's
    (removed,) = kv.events.take()
    assert removed == kvcore.BlocksRemoved(2, 0, (second,))
    assert kvcore.fold([run, removed]) == {(0, first)}
    assert kvcore.fold([run, removed], snapshot) == {(0, first)}
    kv.reset()
    assert kv.events.take() == (kvcore.AllCleared(3),)


def test_what_becomes_findable_or_goes_together_is_one_event():
    groups = [kvcore.FullAttention(), kvcore.SlidingWindow(4)]
    kv = kvcore.KVCacheManager(23, 2, groups=groups, record_events="xxh3-128")
    seq = filled(kv, range(11))
    runs = kv.events.take()
    assert [(run.group, len(run.block_hashes), run.parent) for run in runs] == [
        (0, 5, None),
        (1, 5, None),
    ]
    kv.extend(seq, range(5))
    kv.reserve(seq, 5)
    kv.commit(seq, 5)
    more = kv.events.take()
    assert [(run.group, len(run.block_hashes), run.parent) for run in more] == [
        (0, 3, runs[0].block_hashes[-1]),
        (1, 3, runs[1].block_hashes[-1]),
    ]
    assert {run.namespace_key for run in more} == {runs[0].namespace_key}
    told = kvcore.fold([*runs, *more])
    assert told >= kvcore.fold((), kv.snapshot())
    kv.close(seq)
    assert [(run.group, len(run.block_hashes)) for run in kv.snapshot().stored] == [(0, 8), (1, 8)]
    kv.reserve(kv.open([99]), 22)  # eleven blocks of each group: all is evicted
    gone = kv.events.take()
    assert [(run.group, len(run.block_hashes)) for run in gone] == [(0, 8), (1, 8)]
    assert kvcore.fold([*runs, *more, *gone]) == frozenset()


def test_a_run_is_broken_by_what_others_have_published():
    kv = kvcore.KVCacheManager(20, 2, record_events="xxh3-128")
    twin = kv.open([1, 2, 3, 4, 5, 6, 9])
    seq = filled(kv, [1, 2, 3, 4])
    kv.reserve(twin, 7)
    kv.commit(twin, 7)  # its first two blocks are copies
    first, second = kv.events.take()
    assert (len(first.block_hashes), len(second.block_hashes)) == (2, 1)
    assert (second.parent, second.tokens) == (first.block_hashes[1], (5, 6))
    kv.close(seq)
    kv.reset()
    assert [type(event) for event in kv.events.take()] == [kvcore.AllCleared]


def test_events_that_nobody_takes_have_an_end():
    kv = kvcore.KVCacheManager(6, 2, record_events="xxh3-128")
    assert kv.events.max_hashes == 65_536  # or as many as there are blocks
    kv.events.max_hashes = 12
    late = kvcore.fold(kv.events.take(), kv.snapshot())
    for number in range(9):
        kv.close(filled(kv, range(10 * number, 10 * number + 8)))
    lost, *known = kv.events.take()
    assert lost == kvcore.EventsLost(16)  # each request but the first takes four names away
    assert [event.number for event in known] == [17]
    with pytest.raises(kvcore.InvalidArgumentError, match="snapshot at event 16 or later"):
        kvcore.fold([lost, *known], kvcore.Snapshot(15, ()))
    assert late == frozenset() != kvcore.fold([lost, *known], kv.snapshot())
    kv.close(filled(kv, range(8)))
    assert not any(isinstance(event, kvcore.EventsLost) for event in kv.events.take())
    big = kvcore.KVCacheManager(100_000, 2, record_events="xxh3-128")
    assert big.events.max_hashes == 100_000


def test_without_events_there_is_no_snapshot_to_give():
    with pytest.raises(kvcore.InvalidArgumentError, match="record_events"):
        kvcore.KVCacheManager(4, 2).snapshot()
    with pytest.raises(kvcore.InvalidArgumentError, match="algorithm"):
        kvcore.KVCacheManager(4, 2, record_events="md5")


# Steps.


def test_a_commit_of_a_step_that_one_sequence_cannot_make_is_made_by_none():
    kv = kvcore.KVCacheManager(9, 4)
    seqs = [filled(kv, range(4)), filled(kv, [7] * 6)]
    kv.append(seqs[1], 1)
    with pytest.raises(kvcore.InvalidArgumentError):
        kv.commit_step([seqs[1], seqs[0]], [1, 1])
    assert seqs[1].num_computed_tokens == 6


def test_a_step_takes_each_sequence_once_and_one_number_for_each():
    kv = kvcore.KVCacheManager(9, 4)
    seq = filled(kv, range(4))
    with pytest.raises(kvcore.InvalidArgumentError, match="wanted each once"):
        kv.reserve_step([seq, seq], [1, 1])
    with pytest.raises(kvcore.InvalidArgumentError, match="one for each of 1"):
        kv.commit_step([seq], [])


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_a_step_is_written_into_the_callers_buffers(dtype):
    kv = kvcore.KVCacheManager(9, 4)
    seqs = [filled(kv, range(6)), filled(kv, [7] * 4)]
    for seq in seqs:
        kv.append(seq, 1)
    kv.reserve_step(seqs, [1, 1])
    tables = np.full((2, 3), -1, dtype)
    slots = np.full(4, -1, np.int64)
    kv.write_step(seqs, tables.reshape(-1), slots, row_stride=3)
    assert tables.tolist() == [[1, 2, -1], [3, 4, -1]]
    assert slots.tolist() == [2 * 4 + 2, 4 * 4, -1, -1]


def test_buffers_too_small_for_a_step_are_untouched():
    kv = kvcore.KVCacheManager(9, 4)
    seq = filled(kv, range(6))
    tables, slots = array("i", [-1] * 4), array("q", [-1])
    with pytest.raises(kvcore.InvalidArgumentError, match="row_stride: wanted at least 2"):
        kv.write_step([seq], tables, slots, row_stride=1)
    with pytest.raises(kvcore.InvalidArgumentError, match="block_tables: wanted room for 2"):
        kv.write_step([seq], array("i", [-1]), slots, row_stride=2)
    with pytest.raises(kvcore.InvalidArgumentError, match="slot_mapping: wanted room for 1"):
        kv.write_step([seq], tables, array("q"), row_stride=2)
    full = filled(kv, [3] * 4)
    with pytest.raises(kvcore.NotReservedError, match="no block for its next token"):
        kv.write_step([full], tables, slots, row_stride=2)
    assert list(tables) == [-1] * 4
    assert list(slots) == [-1]


# Costs.


@pytest.mark.parametrize("newest_first", [False, True])
def test_evicting_one_of_many_siblings_does_not_walk_past_those_that_left(newest_first):
    """Either end of a dictionary whose entries there were deleted is found by a walk."""

    def walks(num_siblings):
        kv = kvcore.KVCacheManager(num_siblings + 1, 1)
        seqs = [filled(kv, [token]) for token in range(num_siblings)]
        for seq in reversed(seqs) if newest_first else seqs:
            kv.close(seq)
        (root,) = kv.pool.trees[0].roots()
        walked = []

        class Watched(dict):
            def values(self):
                walked.append(len(self))
                return super().values()

        root.children = Watched(root.children)
        kv.pool.take(num_siblings)
        assert list(kv.pool.trees[0].roots()) == []
        return len(walked)

    assert walks(50) == walks(400) == 1  # once, when a single sibling is left
