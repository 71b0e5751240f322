"""What a careless or malicious caller may hand in, and what must not come of it."""

import copy
import pickle  # one is made, to be refused
import re
from array import array
from dataclasses import dataclass

import numpy as np
import pytest

import kvcore


def filled(kv, tokens, **options):
    seq = kv.open(tokens, **options)
    todo = seq.num_tokens - seq.num_computed_tokens
    kv.reserve(seq, todo)
    kv.commit(seq, todo)
    return seq


class Evil:
    """An integer that does something when it is looked at."""

    def __init__(self, value, action):
        self.value, self.action = value, action

    def __index__(self):
        self.action()
        return self.value


def test_items_from_a_generator_are_items_all_the_same():
    kv = kvcore.KVCacheManager(20, 4)
    tokens = [9] * 8 + [1]
    first = filled(kv, tokens, items=(kvcore.MultimodalItem(b"cat", 0, 8) for _ in range(1)))
    assert first.items == (kvcore.MultimodalItem(b"cat", 0, 8),)
    other = kv.open(tokens, items=(kvcore.MultimodalItem(b"dog", 0, 8) for _ in range(1)))
    assert other.num_cached_tokens == 0


def test_a_sequence_of_items_that_says_it_is_empty_is_still_read():
    class Shy(list):
        def __bool__(self):
            return False

    kv = kvcore.KVCacheManager(20, 4)
    seq = kv.open([9] * 9, items=Shy([kvcore.MultimodalItem(b"cat", 0, 8)]))
    assert len(seq.items) == 1


def test_what_is_no_sequence_of_items_is_refused():
    kv = kvcore.KVCacheManager(20, 4)
    seq = kv.open([1])
    for call in (lambda: kv.open([1], items=5), lambda: kv.extend(seq, [1], items=5)):
        with pytest.raises(kvcore.InvalidArgumentError, match="items: wanted a sequence"):
            call()
    assert seq.tokens == (1,)


def test_subclasses_that_may_mean_more_are_refused_rather_than_shared():
    @dataclass(frozen=True)
    class TenantNamespace(kvcore.Namespace):
        tenant: str = ""

    @dataclass(frozen=True)
    class ShapedItem(kvcore.MultimodalItem):
        shape: tuple = ()

    class Falsy(bytes):
        def __bool__(self):
            return False

    kv = kvcore.KVCacheManager(20, 4)
    with pytest.raises(kvcore.InvalidArgumentError, match="namespace: wanted a Namespace"):
        kv.open([1], namespace=TenantNamespace(tenant="a"))
    with pytest.raises(kvcore.InvalidArgumentError, match="wanted MultimodalItem, got ShapedItem"):
        kv.open([1] * 9, items=[ShapedItem(b"cat", 0, 2)])
    with pytest.raises(kvcore.InvalidArgumentError, match="salt: wanted bytes, got Falsy"):
        kvcore.Namespace(salt=Falsy(b"tenant"))


@pytest.mark.parametrize("integer", [np.uint8, np.uint32, np.uint64, np.int16])
def test_a_window_of_any_integer_type_is_the_same_window(integer):
    tables = []
    for window in (16, integer(16)):
        kv = kvcore.KVCacheManager(40, 4, groups=[kvcore.SlidingWindow(window)])
        seq = filled(kv, range(90))
        tables.append(seq.block_table)
    assert tables[0] == tables[1]
    assert type(kvcore.ChunkedLocal(integer(8)).chunk) is int
    assert type(kvcore.Retention(integer(0), integer(2)).stop) is int


def test_a_copy_of_a_handle_is_no_handle():
    kv = kvcore.KVCacheManager(9, 4)
    seq = filled(kv, range(6))
    forged = kvcore.KVSequence(kv, 77, kvcore.pack([1]), None, kv.groups, ())
    with pytest.raises((kvcore.MisuseError, TypeError)):
        copy.copy(seq)
    for stranger in (forged,):
        for call in (kv.close, kv.fork, lambda s: kv.reserve(s, 9), lambda s: kv.commit(s, 0)):
            with pytest.raises(kvcore.StaleSequenceError):
                call(stranger)
    kv.close(seq)
    assert kv.num_free_blocks == kv.num_usable_blocks


@pytest.mark.parametrize("verb", ["reserve", "commit", "truncate", "fail_load"])
def test_an_integer_that_closes_the_sequence_finds_it_closed(verb):
    kv = kvcore.KVCacheManager(9, 4)
    seq = filled(kv, range(6))
    with pytest.raises(kvcore.StaleSequenceError):
        getattr(kv, verb)(seq, Evil(0, lambda: kv.close(seq)))
    kvcore.check(kv)
    assert kv.num_free_blocks == kv.num_usable_blocks


def test_an_integer_that_closes_a_sequence_of_a_step_stops_the_step():
    kv = kvcore.KVCacheManager(9, 4)
    one, other = filled(kv, range(3)), filled(kv, range(2))
    for seq in (one, other):
        kv.append(seq, 7)
        kv.reserve(seq, 1)
    for verb in (kv.commit_step, kv.reserve_step):
        with pytest.raises(kvcore.StaleSequenceError):
            verb([one, other], [1, Evil(1, lambda: other.is_open and kv.close(other))])
    assert one.num_computed_tokens == 3
    kvcore.check(kv)


def test_arrays_of_any_integer_type_are_sequences_of_tokens():
    for typecode in "bBhHiIlLqQ":
        assert list(kvcore.pack(array(typecode, [1, 2, 3]))) == [1, 2, 3]
    with pytest.raises(kvcore.InvalidArgumentError):
        kvcore.pack(array("d", [1.0]))
    view = memoryview(array("I", [1]))
    view.release()
    with pytest.raises(kvcore.InvalidArgumentError):
        kvcore.pack(view)


def test_an_integer_too_long_to_print_is_still_a_typed_error():
    kv = kvcore.KVCacheManager(9, 4)
    seq = kv.open([1])
    with pytest.raises(kvcore.InvalidArgumentError, match="got one of 16610 bits"):
        kv.append(seq, 10**5000)


def test_completions_that_are_no_lease_ids_are_unknown():
    kv = kvcore.KVCacheManager(9, 4)
    lease = kv.lease(filled(kv, range(4)))
    for wrong in ([], None, False, 0.0, "0"):
        assert kv.leases.end(wrong) is False
    assert lease.is_active


def test_a_group_that_is_no_sequence_of_groups_is_refused():
    with pytest.raises(kvcore.InvalidArgumentError, match="wanted a sequence of layer groups"):
        kvcore.KVCacheManager(9, 4, groups=kvcore.FullAttention())


def test_a_failed_load_reaches_what_a_fork_published_before_it_went():
    kv = kvcore.KVCacheManager(12, 4)
    loader = filled(kv, [1, 2])
    child, orders = kv.fork(loader)
    assert orders[0].num_tokens == 2
    kv.extend(child, [7, 7, 7])
    kv.reserve(child, 3)
    kv.commit(child, 3)
    kv.close(child)
    assert kv.plan([1, 2, 7, 7, 9]).num_cached_tokens == 4  # with the copies of tokens 1 and 2
    kv.fail_load(loader, 1)
    assert kv.plan([1, 2, 7, 7, 9]).num_cached_tokens == 0
    kvcore.check(kv)


def test_a_failed_load_leaves_alone_what_differs_before_it():
    kv = kvcore.KVCacheManager(20, 4)
    cat, dog = kvcore.MultimodalItem(b"cat", 1, 2, b"\x01\x00"), kvcore.MultimodalItem(b"dog", 1, 2)
    loader = filled(kv, [1, 9, 9], items=[cat])
    longer = kvcore.MultimodalItem(b"cat", 1, 4, b"\x01\x00\x01\x01")
    filled(kv, [1, 9, 9, 9, 9], items=[longer])  # the same image so far: two of its four rows
    filled(kv, [1, 9, 9, 9, 9], items=[dog])
    filled(kv, [2, 9, 9, 9, 9], items=[cat])
    filled(kv, [1, 9, 9, 9, 9], items=[cat], namespace=kvcore.Namespace(salt=b"s"))
    kv.fail_load(loader, 2)
    assert kv.plan([1, 9, 9, 9, 9], items=[longer]).num_cached_tokens == 0
    assert kv.plan([1, 9, 9, 9, 9], items=[dog]).num_cached_tokens == 4
    assert kv.plan([2, 9, 9, 9, 9], items=[cat]).num_cached_tokens == 4
    salted = kv.plan([1, 9, 9, 9, 9], items=[cat], namespace=kvcore.Namespace(salt=b"s"))
    assert salted.num_cached_tokens == 4
    kvcore.check(kv)


def test_many_items_cost_a_pass_not_a_product():
    class Counting(tuple):
        __slots__ = ()
        reads = 0

        def __iter__(self):
            Counting.reads += 1
            return super().__iter__()

    items = Counting(kvcore.MultimodalItem(b"i", start, 2) for start in range(0, 4000, 4))
    chain = kvcore.HashChain(b"", 4, "xxh3-128")
    chain.hashes(kvcore.pack([1] * 4000), 1000, items)
    assert Counting.reads == 1


def test_names_in_another_algorithm_are_made_anew():
    kv = kvcore.KVCacheManager(9, 4)
    seq = filled(kv, range(4))
    assert [len(seq.block_hashes(name)[0]) for name in ("xxh3-128", "sha256", "xxh3-128")] == [
        16,
        32,
        16,
    ]


def test_what_is_one_of_its_kind_is_neither_copied_nor_pickled():
    kv = kvcore.KVCacheManager(600, 4)
    seq = filled(kv, range(2000))  # 500 blocks, each of which names the next
    for handle in (kv, seq, kv.lease(seq)):
        for call in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises((kvcore.MisuseError, TypeError)):
                call(handle)
    kvcore.check(kv)


def test_blocks_that_were_never_made_hold_nothing_bad():
    kv = kvcore.KVCacheManager(1000, 4)
    seq = filled(kv, range(9))
    assert kv.fail_blocks([999, seq.block_table[2], 500]) == (seq,)
    assert seq.num_computed_tokens == 8
    assert kv.pool.made_block(999) is None
    kvcore.check(kv)


@pytest.mark.parametrize("wrong", [None, 5, 2.5])
def test_what_cannot_be_gone_through_is_refused(wrong):
    kv = kvcore.KVCacheManager(9, 4)
    seq = filled(kv, range(6))
    table, slots = array("i", [0] * 2), array("q", [0])
    calls = {
        "seqs": [
            lambda: kv.reserve_step(wrong, [1]),
            lambda: kv.commit_step(wrong, [1]),
            lambda: kv.decode_step(wrong, [1]),
            lambda: kv.step(wrong, [1], [1]),
            lambda: kv.write_step(wrong, table, slots, row_stride=2),
            lambda: kv.num_common_blocks(wrong),
        ],
        "block_ids": [lambda: kv.fail_blocks(wrong)],
    }
    for name, each in calls.items():
        for call in each:
            with pytest.raises(kvcore.InvalidArgumentError, match=f"{name}: wanted a sequence"):
                call()
    assert seq.num_tokens == 6
    kvcore.check(kv)


def test_items_that_join_later_lie_within_what_joins():
    kv = kvcore.KVCacheManager(9, 4)
    seq = kv.open([1, 2, 3, 4])
    with pytest.raises(kvcore.InvalidArgumentError, match="within positions 4 to 6"):
        kv.extend(seq, [9, 9, 9], items=[kvcore.MultimodalItem(b"cat", 1, 2)])
    assert seq.num_tokens == 4


def test_a_manager_is_one_and_says_what_it_has():
    kv = kvcore.KVCacheManager(8, 4)
    kv.reserve(kv.open([1, 2]), 2)
    with pytest.raises(kvcore.MisuseError, match="cannot be"):
        copy.copy(kv)
    assert repr(kv) == "KVCacheManager(8 blocks of 4 tokens, 6 free, 1 sequences, 0 leases)"


FLAGS = {
    "enable_caching": lambda value: kvcore.KVCacheManager(9, 4, enable_caching=value),
    "record_lifetimes": lambda value: kvcore.KVCacheManager(9, 4, record_lifetimes=value),
    "prefault": lambda value: kvcore.KVCacheManager(9, 4, prefault=value),
    "resumed": lambda value: kvcore.KVCacheManager(9, 4).open([1], resumed=value),
    "skip_reading": lambda value: kvcore.KVCacheManager(9, 4).open([1], skip_reading=value),
    "canonical_order": lambda value: kvcore.KVCacheManager(9, 4).reset(canonical_order=value),
}


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("value", [0, 1, None, "no", [], np.True_], ids=repr)
def test_what_is_true_or_false_is_a_bool_and_nothing_else(name, value):
    for good in (False, True):
        FLAGS[name](good)
    wanted = re.escape(f"{name}: wanted True or False, got {type(value).__name__} {value!r}")
    with pytest.raises(kvcore.InvalidArgumentError, match=wanted):
        FLAGS[name](value)


def test_a_refused_flag_has_changed_nothing():
    kv = kvcore.KVCacheManager(9, 4)
    kv.close(filled(kv, range(5)))
    for call in (lambda: kv.open(range(5), resumed=1), lambda: kv.reset(canonical_order=1)):
        with pytest.raises(kvcore.InvalidArgumentError):
            call()
    assert kv.sequences == {}
    assert kv.stats().num_queried_tokens == 5
    assert kv.plan(range(5)).num_cached_tokens == 4
    assert kv.plan(range(5)).num_revived_blocks == 1


def test_a_bool_is_a_token_wherever_tokens_come_in():
    kv = kvcore.KVCacheManager(9, 4)
    seq = kv.open([True])
    kv.append(seq, True)
    kv.append(seq, False)
    kv.extend(seq, (True, False))
    kv.expect(seq, 1)
    kv.resolve(seq, [True])
    kv.reserve(seq, 7)
    kv.decode_step([seq], [True])
    assert seq.packed == array("I", [1, 1, 0, 1, 0, 1, 1])
    assert {type(token) for token in seq.tokens} == {int}


@pytest.mark.parametrize("group", [0, 1])
def test_what_is_asked_of_anothers_sequence_is_a_typed_error(group):
    groups = [kvcore.FullAttention(), kvcore.FullAttention()]
    kv, other = kvcore.KVCacheManager(20, 4, groups=groups), kvcore.KVCacheManager(20, 4)
    with pytest.raises(kvcore.ForeignSequenceError):
        kv.num_shared_blocks(other.open([1]), group=group)


@pytest.mark.parametrize("group", [-1, 2])
def test_a_layer_group_that_is_not_there_is_named(group):
    kv = kvcore.KVCacheManager(8, 4, groups=[kvcore.FullAttention(), kvcore.SlidingWindow(8)])
    seq = kv.open([1, 2])
    kv.reserve(seq, 2)
    table, slots = array("i", [0] * 4), array("q", [0] * 4)
    for call in (
        lambda: kv.num_shared_blocks(seq, group=group),
        lambda: kv.num_common_blocks([seq], group=group),
        lambda: kv.write_step([seq], table, slots, row_stride=4, group=group),
        lambda: seq.write_block_table(table, group),
        lambda: seq.write_slot_mapping(0, 2, slots, group),
    ):
        with pytest.raises(kvcore.InvalidArgumentError, match=f"group: wanted 0 to 1, got {group}"):
            call()
    assert (list(table), list(slots)) == ([0] * 4, [0] * 4)
