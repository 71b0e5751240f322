"""What a payload is, byte for byte, and what is made of one that is broken."""

import contextlib
import os
import struct
import subprocess

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvcore
from kvcore import wire
from kvcore.wire.messages import sequence_bytes, sequence_of
from tests.hang import HANG_S


def text(value):
    return bytes([0xA0 + len(value)]) + value.encode()


U64 = struct.Struct(">BQ")
NAMESPACE = kvcore.Namespace(lora_name="sql")
TIME = b"\xcb" + struct.pack(">d", 2.5)


def told(names="u64", form="map", namespace=NAMESPACE, groups=None, items=(), **options):
    """A manager that has stored a run of two blocks, and the payload that says so."""
    num_blocks = 8 if groups is None else 16
    kv = kvcore.KVCacheManager(num_blocks, 2, record_events="xxh3-128", groups=groups)
    seq = kv.open([1, 300, 70_000, 4, 5], namespace=namespace, items=items)
    kv.reserve(seq, 5)
    kv.commit(seq, 5)
    encoder = wire.Encoder(kv.groups, form=form, hash_form=names, clock=lambda: 2.5, **options)
    return kv, seq, encoder, encoder.batch(kv.events.take())


def spelled(names, token_ids, form):
    """The bytes of that event, from the format's own rules."""
    hashes = b"\x92" + b"".join(
        [U64.pack(0xCF, int.from_bytes(name[-8:], "big")) for name in names]
    )
    tokens = b"\x94\x01\xcd\x01\x2c\xce\x00\x01\x11\x70\x04"
    fields = [
        (text("block_hashes"), hashes),
        (text("parent_block_hash"), b"\xc0"),
        (text("token_ids"), tokens),
        (text("block_size"), b"\x02"),
        (text("lora_id"), b"\x07"),
        (text("medium"), text("GPU")),
        (text("lora_name"), text("sql")),
        (text("extra_keys"), b"\xc0"),
        (text("group_idx"), b"\x00"),
        (text("kv_cache_spec_kind"), text("full_attention")),
        (text("kv_cache_spec_sliding_window"), b"\xc0"),
    ]
    if form == "array":
        return b"\x9c" + text("BlockStored") + b"".join([value for _, value in fields])
    new = fields[:7] + [field for field in fields[7:] if field[1] != b"\xc0"]
    spelled = [part for field in new for part in field]
    return b"\x8a" + text("type") + text("BlockStored") + b"".join(spelled)


@pytest.mark.parametrize("form", ["map", "array"])
def test_a_stored_run_is_these_bytes(form):
    _kv, seq, _, payload = told(form=form, lora_ids={"sql": 7}, rank=3)
    names = seq.block_hashes("xxh3-128")
    assert payload == b"\x93" + TIME + b"\x91" + spelled(names, seq.tokens, form) + b"\x03"


def test_a_removal_and_a_clearing_are_these_bytes():
    kv, seq, encoder, _ = told()
    names = seq.block_hashes("xxh3-128")
    kv.close(seq)
    other = kv.open(range(9, 23))
    kv.reserve(other, 14)
    kv.reset()
    payload = encoder.batch(kv.events.take())
    hashes = b"\x92" + b"".join(
        [U64.pack(0xCF, int.from_bytes(name[-8:], "big")) for name in reversed(names)]
    )
    removed = b"\x84" + text("type") + text("BlockRemoved") + text("block_hashes") + hashes
    removed += text("medium") + text("GPU") + text("group_idx") + b"\x00"
    cleared = b"\x81" + text("type") + text("AllBlocksCleared")
    assert payload == b"\x93" + TIME + b"\x92" + removed + cleared + b"\x00"


def test_hashes_as_bytes_are_whole():
    _, seq, _, payload = told(names="bytes")
    [event] = wire.decode(payload).events
    assert event.block_hashes == list(seq.block_hashes("xxh3-128"))


def test_what_a_group_sees_is_said():
    groups = (kvcore.FullAttention(), kvcore.SlidingWindow(4), kvcore.ChunkedLocal(4))
    _, _, _, payload = told(groups=groups)
    kinds = [
        (event.group_idx, event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window)
        for event in wire.decode(payload).events
    ]
    assert kinds == [
        (0, "full_attention", None), (1, "sliding_window", 4), (2, "chunked_local_attention", None)
    ]  # fmt: skip


def test_an_image_is_an_extra_key_of_the_blocks_that_it_reaches_into():
    image = kvcore.MultimodalItem(b"\xca\xfe", 1, 2)
    _, _, _, payload = told(items=[image])
    [event] = wire.decode(payload).events
    first, second = event.extra_keys
    assert first[0] == ["cafe", 1]
    assert second[0] == ["cafe", -1]
    assert first[1].startswith(b"KVI1")


def test_salted_content_is_left_out_and_so_is_its_removal():
    salted = kvcore.Namespace(salt=b"tenant-7")
    kv, seq, encoder, payload = told(namespace=salted)
    assert payload is None
    kv.close(seq)
    kv.reserve(kv.open(range(9, 23)), 14)
    removed = kv.events.take()
    assert removed
    assert encoder.batch(removed) is None


def test_a_salt_that_may_be_published_is_an_extra_key_of_the_first_block():
    salted = kvcore.Namespace(salt=b"tenant-7")
    _, _, _, payload = told(namespace=salted, publish_salted=True)
    [event] = wire.decode(payload).events
    assert event.extra_keys == [("tenant-7", kvcore.encode_namespace(salted)), None]


# vLLM's structs, from the format: what its own readers decode with.


class VllmEvent(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    pass


class BlockStored(VllmEvent):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(VllmEvent):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(VllmEvent):
    pass


class VllmBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class OldStored(BlockStored, array_like=True, tag="BlockStored"):
    pass


class OldRemoved(BlockRemoved, array_like=True, tag="BlockRemoved"):
    pass


class OldCleared(AllBlocksCleared, array_like=True, tag="AllBlocksCleared"):
    pass


class OldBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[OldStored | OldRemoved | OldCleared]
    data_parallel_rank: int | None = None


@pytest.mark.parametrize(("form", "batch"), [("map", VllmBatch), ("array", OldBatch)])
@pytest.mark.parametrize("rank", [0, 1])
def test_vllms_own_structs_decode_what_we_send(form, batch, rank):
    groups = (kvcore.FullAttention(), kvcore.SlidingWindow(4))
    kv, _seq, encoder, payload = told(form=form, groups=groups, rank=rank)
    read = msgspec.msgpack.decode(payload, type=batch)
    assert (read.ts, read.data_parallel_rank) == (2.5, rank)
    assert read.events[0].token_ids == [1, 300, 70_000, 4]
    assert read.events[0].lora_name == "sql"
    assert read.events[1].kv_cache_spec_sliding_window == 4
    snapshot = msgspec.msgpack.decode(encoder.snapshot(kv.snapshot()), type=batch)
    assert isinstance(snapshot.events[0], AllBlocksCleared)
    assert snapshot.events[1:] == read.events


VLLMS_READER = """
import sys, msgspec
from vllm.distributed.kv_events import KVEventBatch
read = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=KVEventBatch)
for event in read.events:
    print(type(event).__name__, getattr(event, "token_ids", None))
"""


@pytest.mark.skipif("VLLM_PYTHON" not in os.environ, reason="VLLM_PYTHON names no Python with vLLM")
def test_vllms_own_decoder_reads_a_snapshot():
    kv, _seq, encoder, _payload = told(groups=(kvcore.FullAttention(), kvcore.SlidingWindow(4)))
    done = subprocess.run(
        [os.environ["VLLM_PYTHON"], "-c", VLLMS_READER],
        input=encoder.snapshot(kv.snapshot()), capture_output=True, timeout=HANG_S, check=True,
    )  # fmt: skip
    stored = "BlockStored [1, 300, 70000, 4]"
    assert done.stdout.decode().splitlines()[-3:] == ["AllBlocksCleared None", stored, stored]


@pytest.mark.parametrize("shape", [(VllmBatch, BlockStored), (OldBatch, OldStored)])
def test_what_vllm_sends_is_read(shape):
    batch, stored = shape
    event = stored([1, b"two"], 7, [1, 2, 3, 4], 2, None, "GPU", None)
    read = wire.decode(msgspec.msgpack.encode(batch(1.0, [event], 0)))
    assert read.num_malformed == 0
    assert read.rank == 0
    assert read.events[0].block_hashes == [1, b"two"]


@pytest.mark.parametrize("form", ["map", "array"])
def test_what_is_sent_is_read_whatever_it_says(form):
    events = (
        wire.Stored(
            [1, b"two"], 7, [1, 2, 3, 4], 2, medium="STORAGE", group_idx=0, locality="REMOTE",
            ownership="a disk", session_id="one", lookahead_token_ids=[[3], [5]],
        ),
        wire.Stored([3], None, [], 0, medium="CPU", group_idx=0, ownership="kvcr"),
        wire.Removed([1], "CPU", 0, "LOCAL", "kvcr"),
        wire.Removed([1], "GPU"),
        wire.Cleared(),
    )  # fmt: skip
    read = wire.decode(wire.encode(1.0, events, 0, form))
    assert read.num_malformed == 0
    names = [one.__struct_fields__ for one in events]
    for sent, got, fields in zip(events, read.events, names, strict=True):
        assert [getattr(sent, name) for name in fields] == [getattr(got, name) for name in fields]
        again = wire.decode(wire.encode(1.0, [got], 0, "map")).events[0]
        assert again == sent


def test_a_batch_may_be_a_map_and_its_events_of_either_form():
    events = [{"type": "AllBlocksCleared"}, ["BlockRemoved", [1], "GPU"], ["AllBlocksCleared"]]
    read = wire.decode(msgspec.msgpack.encode({"ts": 1.0, "events": events, "more": 1}))
    assert [isinstance(event, wire.Cleared) for event in read.events] == [True, False, True]


BLOCK = {"type": "BlockStored", "block_hashes": [1, 2], "parent_block_hash": None,
         "token_ids": [1, 2, 3, 4], "block_size": 2}  # fmt: skip
BROKEN_EVENTS = {
    "tokens after too few blocks": BLOCK | {"lookahead_token_ids": [[3]]},
    "more tokens after one block": BLOCK | {"lookahead_token_ids": [[3], [5, 6]]},
    "after a block what is no token": BLOCK | {"lookahead_token_ids": [[3], [-1]]},
    "no kind": {},
    "an unknown kind": {"type": "BlockMoved"},
    "names that are text": ["BlockRemoved", ["one"], "GPU"],
    "no tokens": ["BlockStored", [1], None],
    "too few tokens": ["BlockStored", [1], None, [1], 2],
    "a token that is none": ["BlockStored", [1], None, [1, -1], 2],
    "a token too large": ["BlockStored", [1], None, [1, 2**32], 2],
    "blocks of nothing": ["BlockStored", [1], None, [], 0],
    "too few extra keys": ["BlockStored", [1], None, [1, 2], 2, None, "GPU", None, []],
    "a number": 7,
    "a kind that is no text": msgspec.Raw(b"\x81\xa4type\xa4\x80abc"),
}


@pytest.mark.parametrize("name", BROKEN_EVENTS)
def test_a_broken_event_is_counted_and_the_others_still_count(name):
    events = [["AllBlocksCleared"], BROKEN_EVENTS[name], ["BlockRemoved", [1], "GPU"]]
    read = wire.decode(msgspec.msgpack.encode([1.0, events]))
    assert read.num_malformed == 1
    assert len(read.events) == 2


@given(st.binary(max_size=40))
def test_bytes_that_are_no_batch_are_refused_and_nothing_else_happens(payload):
    with contextlib.suppress(wire.MalformedError):
        wire.decode(payload)


@given(st.data())
def test_a_payload_that_is_cut_or_changed_is_refused_or_read(data):
    _, _, _, payload = told()
    at = data.draw(st.integers(0, len(payload) - 1))
    changed = payload[:at] + data.draw(st.binary(max_size=2)) + payload[at + 1 :]
    for broken in (payload[:at], changed):
        try:
            batch = wire.decode(broken)
        except wire.MalformedError:
            continue
        wire.Index().apply("a", batch)


def test_nesting_without_end_is_refused():
    with pytest.raises(wire.MalformedError):
        wire.decode(b"\x91" * 100_000)


def test_lost_events_cannot_be_a_batch():
    encoder = wire.Encoder([kvcore.FullAttention(2)])
    with pytest.raises(kvcore.InvalidArgumentError, match="wanted all of them"):
        encoder.batch([kvcore.EventsLost(4)])


@pytest.mark.parametrize("options", [{"form": "yaml"}, {"hash_form": "text"}])
def test_an_unknown_form_is_refused(options):
    with pytest.raises(kvcore.InvalidArgumentError, match="wanted"):
        wire.Encoder([kvcore.FullAttention(2)], **options)


def test_each_image_is_an_extra_key_wherever_it_reaches_and_whatever_it_masks():
    film = kvcore.MultimodalItem(b"a film", 0, 3, b"\x01\x00\x01")
    kv = kvcore.KVCacheManager(8, 4, record_events="xxh3-128")
    items = [
        film,
        kvcore.MultimodalItem(b"\x00\x01\xff", 3, 2),
        kvcore.MultimodalItem(b"cat", 6, 2),
    ]
    seq = kv.open(range(8), items=items)
    kv.reserve(seq, 8)
    kv.commit(seq, 8)
    encoder = wire.Encoder(kv.groups)
    [event] = wire.decode(encoder.batch(kv.events.take())).events
    first, second = [keys[:-1] for keys in event.extra_keys]
    assert first == (["612066696c6d", 0], ["0001ff", 3])
    assert second == (["0001ff", -1], ["636174", 2])
    assert all(keys[-1].startswith(b"KVI1") for keys in event.extra_keys)


@pytest.mark.parametrize("algorithm", ["xxh3-128", "sha256"])
def test_a_name_on_the_wire_is_its_last_8_bytes_or_all_of_it(algorithm):
    names = kvcore.block_hashes(range(6), 2, algorithm=algorithm)
    for some in ((), names[:1], names):
        numbers = [int.from_bytes(name[-8:], "big") for name in some]
        assert wire.wire_hashes(some) == wire.wire_hashes(some, "u64") == numbers
        assert wire.wire_hashes(some, "bytes") == [*some]


def test_the_end_of_an_answer_is_the_number_that_no_batch_has():
    assert wire.END == b"\xff" * 8


@pytest.mark.parametrize("size", [0, 7, 9])
def test_a_sequence_number_is_8_bytes(size):
    assert sequence_of(sequence_bytes(2**62 + 5)) == 2**62 + 5
    with pytest.raises(wire.MalformedError, match=f"wanted 8 bytes, got {size}"):
        sequence_of(bytes(size))


SOUND_EVENTS = {
    "tokens after each block": BLOCK | {"lookahead_token_ids": [[3, 4], [5, 6]]},
    "blocks of one token": ["BlockStored", [1, 2], None, [7, 8], 1],
    "the largest token": ["BlockStored", [1], None, [0, 2**32 - 1], 2],
    "no blocks": ["BlockStored", [], None, [], 4],
    "more fields than are known": ["BlockStored", [1], None, [7], 1, *[None] * 20],
    "a map of more than 15": {"type": "BlockRemoved", "block_hashes": [1]} | {
        f"new {number}": 0 for number in range(20)
    },
    "many extra keys": [
        "BlockStored", [*range(300)], None, [7] * 300, 1, None, "GPU", None, [None] * 300
    ],
}  # fmt: skip
BROKEN_TOO = {
    "too many tokens": ["BlockStored", [1], None, [1, 2, 3], 2],
    "blocks of less than nothing": ["BlockStored", [1], None, [], -1],
    "no block and blocks of less than nothing": ["BlockStored", [], None, [], -1],
    "too many extra keys": ["BlockStored", [1], None, [1], 1, None, "GPU", None, [None, None]],
    "a later token too large": ["BlockStored", [1], None, [2**33, 1], 2],
}


@pytest.mark.parametrize("name", [*SOUND_EVENTS, *BROKEN_TOO])
def test_an_event_is_read_where_its_parts_fit_each_other(name):
    event = (SOUND_EVENTS | BROKEN_TOO)[name]
    read = wire.decode(msgspec.msgpack.encode([1.0, [*[event] * 3, ["AllBlocksCleared"]]]))
    is_sound = name in SOUND_EVENTS
    assert (len(read.events), read.num_malformed) == ((4, 0) if is_sound else (1, 3))


@pytest.mark.parametrize("head", [b"\xde\x00\x01", b"\xdf\x00\x00\x00\x01"])
def test_a_map_may_say_its_length_in_two_bytes_or_in_four(head):
    event = head + text("type") + text("AllBlocksCleared")
    batch = head[:-1] + b"\x02" + text("ts") + TIME + text("events") + b"\x92" + event
    read = wire.decode(batch + msgspec.msgpack.encode(["AllBlocksCleared"]))
    assert (read.time, read.num_malformed) == (2.5, 0)
    assert [isinstance(event, wire.Cleared) for event in read.events] == [True, True]


def test_a_batch_begins_anew_where_it_begins_by_clearing_all():
    cleared, removed = wire.Cleared(), wire.Removed([1])
    told = [(), (cleared,), (cleared, removed), (removed, cleared)]
    assert [wire.Batch(1.0, events).begins_anew for events in told] == [False, True, True, False]
    assert wire.Batch(1.0, ()).num_malformed == 0
