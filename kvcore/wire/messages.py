"""The message format of vLLM's KV events: encoding and decoding.

A message has three frames: a topic, a sequence number (8 bytes, big-endian), and a payload, which
is MessagePack: `[time, events, data-parallel rank]`. An event is a map with its kind under "type",
or an array that begins with its kind. Engines send maps now and sent arrays before, so both are
written here, and both are read, whatever the batch around them is.

A block hash is an unsigned 64-bit number or bytes. Unknown fields are ignored, missing optional
fields are None. An event that is not of the format is counted and
left out; the others of its batch still count. Nothing here knows of sockets or of a cache.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec

from kvcore.wire.errors import MalformedError

Form = Literal["map", "array"]
"""The encoding of an event: a map by field names, or an array by their order."""

WireHash = int | bytes
"""A block hash in a message."""

TIERS: Final = frozenset({"CPU", "STORAGE", "DISK"})
"""The media of tiers behind the cache: host memory, and disk under either name."""

END: Final = (-1).to_bytes(8, "big", signed=True)
"""The sequence number after the last batch of a replay."""

SNAPSHOT: Final = b"snapshot"
"""Asks for a snapshot, where a request otherwise names the first batch that is wanted."""


class Stored(msgspec.Struct, tag="BlockStored", gc=False):
    """Blocks can be hit now, each after the one before.

    Attributes:
        block_hashes: their block hashes.
        parent_block_hash: the hash of the block before the first; None: there is none.
        token_ids: the tokens of all of them.
        block_size: tokens a block.
        lora_id: a number of the adapter; out of use.
        medium: the place of the blocks: "GPU" or None for the cache itself, else a tier, which
            may have no tokens: the hashes are of contents that the cache has stored before.
        lora_name: the adapter.
        extra_keys: for each block what its content depends on beside tokens; None: nothing.
        group_idx: the layer group.
        kv_cache_spec_kind: the kind of attention of the group's layers.
        kv_cache_spec_sliding_window: the number of tokens of a sliding window.
        locality: "LOCAL" or "REMOTE", as the publisher sees it; None: not said.
        ownership: the name of a tier, where several have one medium; None: the first tier.
        session_id: the session of the request that stored the blocks, which others hit too.
        lookahead_token_ids: for each block the tokens after it that its hash covers, equally many;
            None: a hash covers no token after its block.
    """

    block_hashes: list[WireHash]
    parent_block_hash: WireHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[list[int]] | None = None

    @property
    def num_lookahead_tokens(self) -> int:
        """The number of tokens after each block that its hash covers."""
        return len(self.lookahead_token_ids[0]) if self.lookahead_token_ids else 0


class Removed(msgspec.Struct, tag="BlockRemoved", gc=False):
    """Blocks cannot be hit any more; the fields are those of `Stored`."""

    block_hashes: list[WireHash]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class Cleared(msgspec.Struct, tag="AllBlocksCleared", gc=False):
    """Nothing can be hit any more."""


class _StoredArray(Stored, tag="BlockStored", array_like=True, gc=False):
    pass


class _RemovedArray(Removed, tag="BlockRemoved", array_like=True, gc=False):
    pass


class _ClearedArray(Cleared, tag="AllBlocksCleared", array_like=True, gc=False):
    pass


class _Envelope(msgspec.Struct, gc=False):
    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


class _EnvelopeArray(_Envelope, array_like=True, gc=False):
    pass


WireEvent = Stored | Removed | Cleared


@dataclass(frozen=True, slots=True)
class Batch:
    """The content of one payload.

    Attributes:
        time: the time of publication, in seconds, by the publisher's clock.
        events: those that are of the format, in order.
        rank: the publisher's data-parallel rank.
        num_malformed: events that were not.
    """

    time: float
    events: tuple[WireEvent, ...]
    rank: int | None = None
    num_malformed: int = 0

    @property
    def begins_anew(self) -> bool:
        """True if it holds all that there is, because it clears what was before."""
        return bool(self.events) and isinstance(self.events[0], Cleared)


_NUM_NAMED: Final = {"BlockStored": 7, "BlockRemoved": 2, "AllBlocksCleared": 0}
"""The number of first fields that a map has whatever they say."""

_NUM_ORDERED: Final = {"BlockStored": 11, "BlockRemoved": 3, "AllBlocksCleared": 0}
"""The number of first fields that an array has whatever they say."""

_BROKEN: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_ENCODER: Final = msgspec.msgpack.Encoder()
_BATCH: Final = msgspec.msgpack.Decoder(_EnvelopeArray)
_BATCH_MAP: Final = msgspec.msgpack.Decoder(_Envelope)
_EVENT: Final = msgspec.msgpack.Decoder(_StoredArray | _RemovedArray | _ClearedArray)
_EVENT_MAP: Final = msgspec.msgpack.Decoder(Stored | Removed | Cleared)


def encode(time: float, events: Sequence[WireEvent], rank: int | None, form: Form) -> bytes:
    """Return a batch as a payload, of three parts always: some want that. O(its tokens)."""
    spelled = [_as_map(event) if form == "map" else _as_array(event) for event in events]
    return _ENCODER.encode((time, spelled, rank))


def decode(payload: bytes) -> Batch:
    """Return what a payload says. O(its tokens).

    Raises:
        MalformedError: it is no batch at all.
    """
    try:
        envelope = (_BATCH_MAP if _is_map(payload) else _BATCH).decode(payload)
    except _BROKEN as error:
        raise MalformedError(f"payload: wanted a batch of events, got {error}") from None
    events: list[WireEvent] = []
    for raw in envelope.events:
        try:
            event = (_EVENT_MAP if _is_map(raw) else _EVENT).decode(raw)
        except _BROKEN:
            continue
        if _is_sound(event):
            events.append(event)
    lost = len(envelope.events) - len(events)
    return Batch(envelope.ts, tuple(events), envelope.data_parallel_rank, lost)


def sequence_bytes(sequence: int) -> bytes:
    """Return a sequence number as its frame."""
    return struct.pack(">Q", sequence)


def sequence_of(frame: bytes) -> int:
    """Return the sequence number in a frame.

    Raises:
        MalformedError: not 8 bytes.
    """
    if len(frame) != 8:
        raise MalformedError(f"sequence: wanted 8 bytes, got {len(frame)}")
    return int.from_bytes(frame, "big")


def _is_map(data: bytes | msgspec.Raw) -> bool:
    """Say whether MessagePack begins with a map."""
    first = memoryview(data)[:1].tobytes()
    return bool(first) and (first[0] & 0xF0 == 0x80 or first[0] in {0xDE, 0xDF})


def _is_sound(event: WireEvent) -> bool:
    """Say whether the parts of an event fit each other."""
    if not isinstance(event, Stored):
        return True
    count = len(event.block_hashes)
    if event.medium in TIERS and not event.token_ids:
        return event.extra_keys is None
    return (
        event.block_size > 0
        and len(event.token_ids) == count * event.block_size
        and _are_tokens(event.token_ids)
        and (event.extra_keys is None or len(event.extra_keys) == count)
        and _is_lookahead_sound(event, count)
    )


def _is_lookahead_sound(event: Stored, count: int) -> bool:
    """Return True if every block has as many tokens after it as the others."""
    after = event.lookahead_token_ids
    if after is None:
        return True
    width = event.num_lookahead_tokens
    return len(after) == count and all(
        len(tokens) == width and _are_tokens(tokens) for tokens in after
    )


def _are_tokens(token_ids: Sequence[int]) -> bool:
    return not token_ids or 0 <= min(token_ids) <= max(token_ids) < 2**32


def _as_array(event: WireEvent) -> tuple[object, ...]:
    """Return an event by the order of its fields; later ones stand where one of them says more."""
    tag = _tag(event)
    fields = [getattr(event, name) for name in event.__struct_fields__]
    while len(fields) > _NUM_ORDERED[tag] and fields[-1] is None:
        fields.pop()
    return (tag, *fields)


def _as_map(event: WireEvent) -> dict[str, object]:
    """Return an event by names: fields that newer readers alone know only where they say more."""
    tag = _tag(event)
    spelled: dict[str, object] = {"type": tag}
    for place, name in enumerate(event.__struct_fields__):
        value = getattr(event, name)
        if value is not None or place < _NUM_NAMED[tag]:
            spelled[name] = value
    return spelled


def _tag(event: WireEvent) -> str:
    return str(event.__struct_config__.tag)
