"""Namespaces encode injectively and canonically; names are chained, and derived (P8, P10)."""

import dataclasses
import hashlib
import struct
import subprocess
import sys
from array import array

import numpy as np
import pytest
import xxhash
from hypothesis import assume, example, given
from hypothesis import strategies as st

import kvcore
from kvcore.identity import block_hash as naming

NAMESPACES = st.builds(
    lambda salt, name, version, epoch: kvcore.Namespace(
        salt=salt,
        lora_name=name,
        lora_version=version if name is not None else 0,
        weight_epoch=epoch,
    ),
    st.binary(max_size=12),
    st.none() | st.text(max_size=6),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**64 - 1),
)
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=24)


@given(NAMESPACES)
def test_a_namespace_decodes_to_itself(namespace):
    assert kvcore.decode_namespace(kvcore.encode_namespace(namespace)) == namespace


@given(NAMESPACES, NAMESPACES)
@example(kvcore.Namespace(salt=b"X"), kvcore.Namespace(lora_name="X"))  # vLLM #44701
@example(kvcore.Namespace(lora_name=None), kvcore.Namespace(lora_name=""))
def test_namespaces_are_equal_exactly_when_their_bytes_are(one, other):
    assert (one == other) == (kvcore.encode_namespace(one) == kvcore.encode_namespace(other))


@given(st.binary(max_size=40) | NAMESPACES.map(kvcore.encode_namespace).map(lambda b: b + b"\x00"))
def test_only_canonical_bytes_decode(data):
    try:
        namespace = kvcore.decode_namespace(data)
    except kvcore.InvalidArgumentError:
        return
    assert kvcore.encode_namespace(namespace) == data


@given(NAMESPACES, st.data())
def test_bytes_with_one_bit_changed_never_decode_to_the_same_namespace(namespace, data):
    encoded = bytearray(kvcore.encode_namespace(namespace))
    bit = data.draw(st.integers(0, 8 * len(encoded) - 1))
    encoded[bit // 8] ^= 1 << bit % 8
    try:
        other = kvcore.decode_namespace(bytes(encoded))
    except kvcore.InvalidArgumentError:
        return
    assert other != namespace


def test_integer_types_and_string_objects_do_not_change_the_bytes():
    plain = kvcore.Namespace(salt=b"ab", lora_name="ab", lora_version=1)
    built = kvcore.Namespace(
        salt=bytes([97, 98]), lora_name=str(b"ab", "ascii"), lora_version=np.int64(1)
    )
    assert built == plain
    assert kvcore.encode_namespace(built) == kvcore.encode_namespace(plain)


@pytest.mark.parametrize(
    "wrong",
    [
        {"salt": "text"},
        {"lora_name": b"bytes"},
        {"lora_name": "\ud800"},
        {"lora_name": "x", "lora_version": -1},
        {"lora_name": "x", "lora_version": 1.0},
        {"lora_name": "x", "lora_version": True},
        {"lora_version": 1},
        {"weight_epoch": 2**64},
        {"weight_epoch": None},
    ],
    ids=repr,
)
def test_a_namespace_that_cannot_be_described_is_refused(wrong):
    with pytest.raises(kvcore.InvalidArgumentError, match=": wanted"):
        kvcore.Namespace(**wrong)


def names(tokens, block_size, namespace, algorithm="xxh3-128"):
    chain = kvcore.HashChain(kvcore.encode_namespace(namespace), block_size, algorithm)
    return chain.hashes(kvcore.pack(tokens), len(tokens) // block_size)


@given(TOKENS, TOKENS, NAMESPACES, NAMESPACES, st.integers(1, 4))
def test_names_are_equal_exactly_where_prefix_and_namespace_are(one, other, here, there, size):
    pairs = zip(names(one, size, here), names(other, size, there), strict=False)
    for index, (left, right) in enumerate(pairs):
        end = (index + 1) * size
        assert (left == right) == ((here, one[:end]) == (there, other[:end]))


@given(TOKENS, st.lists(st.tuples(st.integers(0, 24), TOKENS), max_size=4), st.integers(1, 4))
def test_a_chain_that_was_cut_and_extended_equals_one_from_scratch(tokens, edits, size):
    namespace = kvcore.Namespace(salt=b"s")
    chain = kvcore.HashChain(kvcore.encode_namespace(namespace), size, "sha256")
    for keep, more in edits:
        chain.hashes(kvcore.pack(tokens), len(tokens) // size)
        tokens = tokens[:keep] + more
        chain.cut(min(keep, len(tokens)) // size)
    incremental = chain.hashes(kvcore.pack(tokens), len(tokens) // size)
    assert incremental == names(tokens, size, namespace, "sha256")


def test_a_name_is_the_digest_that_the_documentation_spells_byte_for_byte():
    namespace = kvcore.Namespace(salt=b"s", lora_name="L", lora_version=2, weight_epoch=3)
    root_bytes = (
        b"KVN1"
        + struct.pack("<BI", 1, 1)
        + b"s"
        + struct.pack("<BI", 2, 1)
        + b"L"
        + struct.pack("<BIQ", 3, 8, 2)
        + struct.pack("<BIQ", 4, 8, 3)
    )
    assert kvcore.encode_namespace(namespace) == root_bytes
    digests = {
        "sha256": lambda data: hashlib.sha256(data).digest(),
        "xxh3-128": xxhash.xxh3_128_digest,
    }
    for algorithm, digest in digests.items():
        parent = digest(root_bytes)
        first = digest(
            b"KVB1" + bytes([len(parent)]) + parent + struct.pack("<III", 2, 10, 2**32 - 1)
        )
        second = digest(b"KVB1" + bytes([len(first)]) + first + struct.pack("<III", 2, 12, 13))
        assert names([10, 2**32 - 1, 12, 13], 2, namespace, algorithm) == (first, second)


@given(TOKENS, TOKENS, st.binary(min_size=16, max_size=16))
def test_block_encodings_of_different_tokens_differ(one, other, parent):
    assume(one != other)
    packed = [array("I", tokens).tobytes() for tokens in (one, other)]
    assert kvcore.encode_block(parent, packed[0], len(one)) != kvcore.encode_block(
        parent, packed[1], len(other)
    )


@pytest.mark.parametrize("algorithm", ["", "md5", "sha", "sha256 ", "xxh3", "xxh3-128s", "zzz"])
def test_only_the_two_algorithms_name_anything(algorithm):
    with pytest.raises(kvcore.InvalidArgumentError, match=f"algorithm.*{algorithm!r}"):
        kvcore.digest(b"", algorithm)


def test_an_unknown_algorithm_is_refused():
    with pytest.raises(kvcore.InvalidArgumentError, match="sha256"):
        kvcore.KVCacheManager(4, 2).open([1]).block_hashes("md5")


def test_a_name_is_the_same_where_integers_stand_the_other_way_round(monkeypatch):
    tokens, items = struct.pack("<3I", 1, 2**24, 7), b"an item"
    little = kvcore.encode_block(b"parent", tokens + items, 3)
    monkeypatch.setattr(sys, "byteorder", "big")
    assert kvcore.encode_block(b"parent", struct.pack(">3I", 1, 2**24, 7) + items, 3) == little


def field(tag, value):
    return struct.pack("<BI", tag, len(value)) + value


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "KVN1, got b''"),
        (b"KVN2", "KVN1, got b'KVN2'"),
        (b"KVN234", "KVN1, got b'KVN2'"),
        (b"KVN1" + b"\x01", "byte 4"),
        (b"KVN1" + field(1, b"salt")[:-1], "byte 4"),
        (b"KVN1" + field(0, b""), "byte 4"),
        (b"KVN1" + field(5, b""), "byte 4"),
        (b"KVN1" + field(1, b"s") + b"\x02\x00", "byte 10"),
        (b"KVN1" + field(2, b"\xff"), "decode"),
        (b"KVN1" + field(4, b"1234567"), "decode"),
        (b"KVN1" + field(1, b""), "canonical"),  # a field with its default
        (b"KVN1" + field(4, bytes(8)), "canonical"),
        (b"KVN1" + field(1, b"a") + field(1, b"b"), "canonical"),  # a field twice
        (b"KVN1" + field(1, b"b") + field(1, b"a"), "canonical"),
        (b"KVN1" + field(2, b"L") + field(1, b"s"), "canonical"),  # fields out of order
    ],
)
def test_bytes_that_encode_no_namespace_are_refused_where_they_are_wrong(data, message):
    with pytest.raises(kvcore.InvalidArgumentError, match=message):
        kvcore.decode_namespace(data)


def test_a_namespace_is_a_small_value_that_never_changes():
    namespace = kvcore.Namespace(salt=b"s")
    assert not hasattr(namespace, "__dict__")
    assert hash(namespace) == hash(kvcore.Namespace(salt=b"s"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        namespace.salt = b""


@pytest.mark.parametrize("field", ["lora_version", "weight_epoch"])
def test_a_version_has_64_bits(field):
    name = "L" if field == "lora_version" else None
    most = kvcore.Namespace(lora_name=name, **{field: 2**64 - 1})
    assert kvcore.decode_namespace(kvcore.encode_namespace(most)) == most
    for wrong in (-1, 2**64):
        with pytest.raises(kvcore.InvalidArgumentError, match=f"{field}.*{wrong}"):
            kvcore.Namespace(lora_name=name, **{field: wrong})


def test_long_names_decode_like_short_ones():
    namespace = kvcore.Namespace(salt=bytes(300), lora_name="L" * 1000, weight_epoch=1)
    assert kvcore.decode_namespace(kvcore.encode_namespace(namespace)) == namespace


def test_a_version_without_an_adapter_is_named():
    with pytest.raises(kvcore.InvalidArgumentError, match=r"lora_version.*lora_name.*7"):
        kvcore.Namespace(lora_version=7)


@pytest.mark.source_build
def test_names_that_were_asked_for_once_are_not_made_again(monkeypatch):
    made = []
    real = naming.hashlib.sha256
    monkeypatch.setattr(naming.hashlib, "sha256", lambda data: made.append(data) or real(data))
    chain = kvcore.HashChain(b"key", 2, "sha256")
    tokens = kvcore.pack(range(10))
    all_names = chain.hashes(tokens, 5)
    assert chain.hashes(tokens, 2) == all_names[:2]
    assert chain.hashes(tokens, 0) == ()
    assert chain.hashes(tokens, 5) == all_names
    assert len(made) == 1 + 5  # the root, and each block once
    chain.cut(3)
    assert chain.hashes(tokens, 5) == all_names
    assert len(made) == 1 + 5 + 2


@given(
    st.lists(st.integers(0, 5), max_size=13),
    st.sampled_from([kvcore.DEFAULT_NAMESPACE, kvcore.Namespace(salt=b"s")]),
    st.sampled_from(["xxh3-128", "sha256"]),
    st.integers(1, 4),
    st.booleans(),
)
def test_names_before_and_after_it_is_computed_are_the_same(tokens, space, algorithm, size, seen):
    items = [kvcore.MultimodalItem(b"cat", 1, 2)] if seen and len(tokens) > 2 else []
    options = {"namespace": space, "items": items}
    before = kvcore.block_hashes(tokens, size, algorithm=algorithm, **options)
    kv = kvcore.KVCacheManager(20, size)
    seq = kv.open([*tokens, 9], **options)
    kv.reserve(seq, len(tokens))
    kv.commit(seq, len(tokens))
    assert before == seq.block_hashes(algorithm)
    parent = kvcore.digest(kvcore.encode_namespace(space), algorithm)
    contents = naming.block_contents(kvcore.pack(tokens), items, 0, len(tokens) // size, size)
    for name, content in zip(before, contents, strict=True):  # as the page spells it
        assert name == kvcore.digest(kvcore.encode_block(parent, content, size), algorithm)
        parent = name


def test_each_group_has_the_names_of_its_block_size():
    groups = [kvcore.FullAttention(4), kvcore.SlidingWindow(3)]
    kv = kvcore.KVCacheManager(40, 2, groups=groups)
    seq = kv.open(range(13))
    kv.reserve(seq, 13)
    kv.commit(seq, 13)
    assert seq.tables[1].num_null == 5
    for group, size in ((0, 4), (1, 2), (0, 4)):
        assert seq.block_hashes(group=group) == kvcore.block_hashes(range(13), size)
    kv.truncate(seq, 12)
    kv.extend(seq, [99, 99])
    kv.reserve(seq, 2)
    kv.commit(seq, 2)
    for group, size in ((0, 4), (1, 2)):
        assert seq.block_hashes(group=group) == kvcore.block_hashes([*range(12), 99, 99], size)
    with pytest.raises(kvcore.InvalidArgumentError, match="group: wanted"):
        seq.block_hashes(group=2)


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("namespace: wanted a Namespace, got", {"namespace": None}),
        ("block_size: wanted at least 1|block_size: wanted 1", {"block_size": 0}),
        ("tokens: wanted", {"tokens": "text"}),
        ("items: wanted them apart", {"items": [kvcore.MultimodalItem(b"x", 3, 9)]}),
        ("algorithm: wanted", {"algorithm": "md5"}),
    ],
)
def test_what_cannot_be_named_is_refused(message, change):
    given = {"tokens": [1, 2, 3, 4], "block_size": 2, **change}
    with pytest.raises(kvcore.InvalidArgumentError, match=message):
        kvcore.block_hashes(given.pop("tokens"), given.pop("block_size"), **given)


def test_what_stands_in_blocks_is_their_tokens_and_then_their_items():
    tokens = kvcore.pack(range(8))
    plain = naming.block_contents(tokens, (), 1, 3, 2)
    assert plain == [kvcore.pack([2, 3]).tobytes(), kvcore.pack([4, 5]).tobytes()]
    items = (kvcore.MultimodalItem(b"cat", 3, 2),)
    pictured = naming.block_contents(tokens, items, 1, 3, 2)
    assert pictured[0] == plain[0] + struct.pack("<IQIBI", 1, 0, 1, 0, 3) + b"cat"
    assert pictured[1] == plain[1] + struct.pack("<IQIBI", 0, 1, 1, 0, 3) + b"cat"
    assert naming.block_contents(tokens, items, 0, 1, 2) == [kvcore.pack([0, 1]).tobytes()]


SCRIPT = """
import kvcore
kv = kvcore.KVCacheManager(9, 2)
for name in (None, "adapter"):
    seq = kv.open(range(9), namespace=kvcore.Namespace(salt=b"x", lora_name=name))
    kv.reserve(seq, 9), kv.commit(seq, 9)
    print(seq.block_table, [name.hex() for name in seq.block_hashes("sha256")])
    kv.close(seq)
print([block.block_id for block in kv.pool.free_blocks()])
"""


def test_names_and_ids_are_the_same_in_a_process_with_another_hash_seed():
    outputs = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "4242")
    }
    assert len(outputs) == 1
    assert "(1, 2, 3, 4, 5)" in outputs.pop()
