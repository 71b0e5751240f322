"""Bugs of the corpus that cannot be said here: each test tries to, and shows why not."""

import dataclasses
import itertools
from array import array

import pytest

import kvcore


def filled(kv, tokens, **options):
    seq = kv.open(tokens, **options)
    todo = seq.num_tokens - seq.num_computed_tokens
    kv.reserve(seq, todo)
    kv.commit(seq, todo)
    return seq


def test_nothing_that_a_call_returns_can_be_changed_from_outside():
    kv = kvcore.KVCacheManager(20, 4, record_events="xxh3-128")
    seq = kv.open(range(9), items=[kvcore.MultimodalItem(b"cat", 1, 2)])
    grown = kv.reserve(seq, 9)
    kv.commit(seq, 9)
    _, orders = kv.fork(seq)
    given = [
        *(grown, grown[0], orders, seq.tokens, seq.items, seq.block_table, seq.block_tables),
        *(seq.block_tables[0], seq.block_hashes(), kv.snapshot().stored, kv.events.take()),
        *(kv.tick(), kv.fail_load(seq, 8), kv.reserve_step([seq], [4])),
    ]
    assert all(type(value) is tuple for value in given)
    values = [*orders, *given[10], kv.snapshot(), kv.plan([1]), kv.stats(), kv.reset()]
    for value in [*values, *seq.items, kvcore.Namespace(), kvcore.Retention(0, 1)]:
        name = dataclasses.fields(value)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, name, None)


def test_names_that_a_caller_extends_do_not_come_back_extended():
    kv = kvcore.KVCacheManager(20, 4)
    seq = filled(kv, range(8))
    mine = [*seq.block_hashes()]
    mine += mine
    assert len(seq.block_hashes()) == 2


def test_a_table_that_was_given_out_never_changes():
    kv = kvcore.KVCacheManager(20, 4)
    seq = filled(kv, range(12))
    tables = seq.block_tables
    rows, slots = array("i", [0] * 4), array("q", [0])
    kv.append(seq, 1)
    kv.reserve(seq, 1)
    kv.write_step([seq], rows, slots, row_stride=4)
    kv.close(seq)
    filled(kv, [7] * 12)
    assert tables == ((1, 2, 3),)
    assert list(rows) == [1, 2, 3, 4]


def test_room_that_somebody_else_took_is_a_typed_error_and_changes_nothing():
    kv = kvcore.KVCacheManager(4, 4)
    first, second = kv.open(range(8)), kv.open([7] * 8)
    assert kv.can_reserve(first, 8)
    assert kv.can_reserve(second, 8)
    kv.reserve(second, 8)
    with pytest.raises(kvcore.OutOfBlocksError) as refused:
        kv.reserve(first, 8)
    assert (refused.value.needed, refused.value.available) == (2, 1)
    assert first.block_table == ()
    assert kv.num_free_blocks == 1


def test_a_part_of_a_block_has_no_name_that_could_be_promoted():
    kv = kvcore.KVCacheManager(9, 4, record_events="xxh3-128")
    seq = kv.open(range(4))
    kv.reserve(seq, 4)
    for _ in range(3):
        kv.commit(seq, 1)
        assert seq.block_hashes() == ()
        assert kv.events.take() == ()
    kv.commit(seq, 1)
    (stored,) = kv.events.take()
    assert stored.tokens == (0, 1, 2, 3)
    with pytest.raises(kvcore.InvalidArgumentError, match="contents: wanted 16 bytes, got 12"):
        kv.pool.publish(kv.pool.take(1), b"", None, [bytes(12)])


def test_an_image_whose_bytes_are_token_ids_is_no_text():
    kv = kvcore.KVCacheManager(20, 4)
    tokens = [5, 6, 7, 8, 9]
    content = kvcore.pack([6, 7]).tobytes()
    filled(kv, tokens)
    assert kv.plan(tokens, items=[kvcore.MultimodalItem(content, 1, 2)]).num_cached_tokens == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda: kvcore.Namespace(lora_name=["a"]),
        lambda: kvcore.Namespace(salt=None),
        lambda: kvcore.MultimodalItem(b"", 0, 1),
        lambda: kvcore.MultimodalItem(None, 0, 1),
        lambda: kvcore.MultimodalItem(b"cat", 0, 2, b""),
        lambda: kvcore.MultimodalItem(b"cat", 0, 2, b"\x01\x02"),
    ],
)
def test_what_cannot_be_described_is_refused_and_never_cached_without_a_key(make):
    with pytest.raises(kvcore.InvalidArgumentError):
        make()
    kv = kvcore.KVCacheManager(20, 4)
    filled(kv, range(9), namespace=None)
    assert kv.stats().num_cached_blocks == 0
    assert kv.plan(range(9)).num_cached_tokens == 0


def test_equal_requests_have_equal_names_whatever_their_objects_are():
    names = set()
    for tokens in ([1, 2, 3, 4], (1, 2, 3, 4), array("Q", [1, 2, 3, 4]), range(1, 5)):
        for salt in (b"ab", bytes(bytearray(b"ab"))):
            kv = kvcore.KVCacheManager(9, 2)
            name = str(b"adapter", "ascii")
            seq = filled(kv, tokens, namespace=kvcore.Namespace(salt=salt, lora_name=name))
            names.add(seq.block_hashes("sha256"))
    assert len(names) == 1


def test_a_prefix_counts_as_computed_only_where_every_group_has_it():
    """A drafter's layers are a group like any other: nothing is restored for the target alone."""
    groups = [kvcore.FullAttention(), kvcore.SlidingWindow(4)]
    kv = kvcore.KVCacheManager(30, 4, groups=groups)
    kv.close(filled(kv, range(8)))
    second = kv.plan([*range(8), 9])
    assert second.num_cached_tokens == 8
    lost = [block for block in kv.pool.blocks if block.node is not None and block.group == 1]
    kv.pool.forget(lost)
    assert kv.plan([*range(8), 9]).num_cached_tokens == 0


@pytest.mark.parametrize("typecode", ["i", "q"])
def test_block_ids_past_65535_and_slots_past_2_to_the_31_arrive_whole(typecode):
    kv = kvcore.KVCacheManager(70_001, 2**20)
    kv.pool.take(69_998)
    seq = kv.open(range(5))
    kv.reserve(seq, 2**20 + 5)
    assert seq.block_table == (69_999, 70_000)
    table, slots = array("i", [0, 0]), array("q", [0] * 7)
    seq.write_block_table(table)
    assert list(table) == [69_999, 70_000]
    seq.write_slot_mapping(2**20 - 2, 2**20 + 5, slots)
    wanted = [69_999 * 2**20 + 2**20 - 2, 69_999 * 2**20 + 2**20 - 1]
    assert list(slots) == [*wanted, *(70_000 * 2**20 + offset for offset in range(5))]
    assert min(slots) > 2**31
    kv.commit(seq, 4)
    rows = array(typecode, [0, 0])
    kv.write_step([seq], rows, slots, row_stride=2)
    assert list(rows) == [69_999, 70_000]
    assert slots[0] == 69_999 * 2**20 + 4


def test_isolation_and_sharing_hold_together_for_every_pair_of_namespaces():
    """Different salts: no hit. The same salt: a hit. Either alone would pass with a dead cache."""
    namespaces = [
        kvcore.Namespace(),
        kvcore.Namespace(salt=b"X"),
        kvcore.Namespace(lora_name="X"),
        kvcore.Namespace(lora_name="X", lora_version=1),
        kvcore.Namespace(salt=b"X", lora_name="X"),
        kvcore.Namespace(weight_epoch=1),
    ]
    for one, other in itertools.product(namespaces, repeat=2):
        kv = kvcore.KVCacheManager(9, 4)
        kv.close(filled(kv, range(5), namespace=one))
        hit = kv.plan(range(5), namespace=other).num_cached_tokens
        assert hit == (4 if one == other else 0)
