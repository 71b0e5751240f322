"""The translation of a cache's events into the format of the wire.

One event of kvcore is one event of the format, with these fields:

    block_hashes    the low 64 bits of each block hash, or the whole hash as bytes
    lora_name       the adapter of the namespace
    extra_keys      an image or embedding that reaches into a block: (its content in hex, where it
                    begins, counted from the block's first token); where tokens and adapter do not
                    identify the content: `MARK_ITEMS` and `MARK_NAMESPACE`, for our own index
    group_idx       the layer group, and under `kv_cache_spec_kind` the kind of its attention

Copies in tiers are reported by block hash alone, with their medium: their tokens were reported when
the cache stored them. A run contains its namespace, so published blocks are not remembered. Content
with a salt is left out unless the salt may be published: a reader could test prompts against its
hashes. The hashes of omitted contents are remembered, so that their removal is omitted too.
"""

from __future__ import annotations

import struct
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from kvcore import (
    DEFAULT_NAMESPACE,
    BlockHash,
    BlocksRemoved,
    BlocksStored,
    ChunkedLocal,
    Event,
    EventsLost,
    FullAttention,
    InvalidArgumentError,
    LayerGroup,
    Namespace,
    RecurrentState,
    Snapshot,
    decode_namespace,
    encode_namespace,
)
from kvcore.wire.messages import Cleared, Form, Removed, Stored, WireEvent, WireHash, encode

HashForm = Literal["u64", "bytes"]
"""A block hash in a message: a 64-bit number that every reader takes, or all its bytes."""

MARK_NAMESPACE: Final = b"KVN1"
"""An extra key of a chain's first block that begins so is its namespace, encoded."""

MARK_ITEMS: Final = b"KVI1"
"""An extra key that begins so has, after it, the encoded items that reach into the block."""

_DEFAULT_KEY: Final = encode_namespace(DEFAULT_NAMESPACE)
_ITEM_HEAD: Final = struct.Struct("<IQIBI")  # before its content: block-hashes.md


@dataclass(frozen=True, slots=True)
class CopiesChanged:
    """Copies came to a tier and went from it; a publisher sends it among its manager's events.

    Attributes:
        medium: of the tier.
        changed: by layer group and block hash, whether there is a copy now.
        is_salted: of these contents the ones whose namespace has a salt.
    """

    medium: str
    changed: Mapping[tuple[int, BlockHash], bool]
    is_salted: frozenset[tuple[int, BlockHash]]


class Encoder:
    """Turns events into payloads.

    Args:
        groups: the cache's layer groups.
        form: the encoding of an event.
        hash_form: "u64": the low 64 bits of a block hash; "bytes": the whole hash.
        rank: the data-parallel rank.
        lora_ids: numbers of adapters, for readers that want them.
        publish_salted: publish content with a salt, and the salt.
        clock: seconds, for the time of a batch.

    Raises:
        InvalidArgumentError: an unknown form.
    """

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        *,
        form: Form = "map",
        hash_form: HashForm = "u64",
        rank: int = 0,
        lora_ids: Mapping[str, int] | None = None,
        publish_salted: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if form not in {"map", "array"}:
            raise InvalidArgumentError(f"form: wanted 'map' or 'array', got {form!r}")
        if hash_form not in {"u64", "bytes"}:
            raise InvalidArgumentError(f"hash_form: wanted 'u64' or 'bytes', got {hash_form!r}")
        self._kinds = [_kind(group) for group in groups]
        self._form: Form = form
        self._spell: Callable[[Sequence[BlockHash]], list[WireHash]] = (
            _as_numbers if hash_form == "u64" else _as_bytes
        )
        self._rank = rank
        self._lora_ids = dict(lora_ids or {})
        self._publish_salted = publish_salted
        self._clock = clock
        self._left_out: set[tuple[int, BlockHash]] = set()

    def batch(self, events: Iterable[Event | CopiesChanged]) -> bytes | None:
        """Return events as a payload, or None if none of them is published. O(their tokens).

        Raises:
            InvalidArgumentError: some were lost: a snapshot has to be sent in their place.
        """
        told: list[WireEvent] = []
        for event in events:
            if isinstance(event, BlocksStored):
                told += self._stored(event)
            elif isinstance(event, BlocksRemoved):
                told += self._removed(event)
            elif isinstance(event, CopiesChanged):
                told += self._copies(event)
            elif isinstance(event, EventsLost):
                raise InvalidArgumentError(f"events: wanted all of them, {event.number} were lost")
            else:
                self._left_out.clear()
                told.append(Cleared())
        return encode(self._clock(), told, self._rank, self._form) if told else None

    def snapshot(self, snapshot: Snapshot, copies: Iterable[CopiesChanged] = ()) -> bytes:
        """Return a snapshot as a payload that clears the index before. O(contents + copies)."""
        self._left_out.clear()
        told: list[WireEvent] = [Cleared()]
        for run in snapshot.stored:
            told += self._stored(run)
        for each in copies:
            told += self._copies(each)
        return encode(self._clock(), told, self._rank, self._form)

    def _copies(self, event: CopiesChanged) -> Iterator[WireEvent]:
        """Tell what a tier has, an event for each layer group, as vLLM does: hashes alone."""
        hidden = frozenset() if self._publish_salted else event.is_salted
        told: dict[tuple[bool, int], list[BlockHash]] = {}
        for (group, name), is_there in event.changed.items():
            if (group, name) not in hidden:
                told.setdefault((is_there, group), []).append(name)
        for (is_there, group), names in told.items():
            hashes = self._spell(names)
            if is_there:
                yield Stored(hashes, None, [], 0, medium=event.medium, group_idx=group)
            else:
                yield Removed(hashes, event.medium, group)

    def _stored(self, run: BlocksStored) -> list[WireEvent]:
        plain = run.namespace_key == _DEFAULT_KEY
        namespace = DEFAULT_NAMESPACE if plain else decode_namespace(run.namespace_key)
        if namespace.salt and not self._publish_salted:
            self._left_out.update([(run.group, name) for name in run.block_hashes])
            return []
        lora = namespace.lora_name
        kind, window = self._kinds[run.group]
        return [
            Stored(
                block_hashes=self._spell(run.block_hashes),
                parent_block_hash=None if run.parent is None else self._spell([run.parent])[0],
                token_ids=array("I", run.packed).tolist(),
                block_size=run.block_size,
                lora_id=None if lora is None else self._lora_ids.get(lora),
                medium="GPU",
                lora_name=lora,
                extra_keys=_extra_keys(run, namespace),
                group_idx=run.group,
                kv_cache_spec_kind=kind,
                kv_cache_spec_sliding_window=window,
            )
        ]

    def _removed(self, event: BlocksRemoved) -> list[WireEvent]:
        hashes: Sequence[BlockHash] = event.block_hashes
        if self._left_out:
            hidden = self._left_out.intersection([(event.group, name) for name in hashes])
            self._left_out -= hidden
            hashes = [name for name in hashes if (event.group, name) not in hidden]
        return [Removed(self._spell(hashes), "GPU", event.group)] if hashes else []


def wire_hashes(hashes: Sequence[BlockHash], form: HashForm = "u64") -> list[WireHash]:
    """Return names as they are on the wire. O(hashes)."""
    return _as_numbers(hashes) if form == "u64" else _as_bytes(hashes)


def _as_numbers(hashes: Sequence[BlockHash]) -> list[WireHash]:
    if len(hashes) == 1:
        return [int.from_bytes(hashes[0][-8:], "big")]
    gap = f"{len(hashes[0]) - 8}xQ" if hashes else ""
    return list(struct.unpack(">" + gap * len(hashes), b"".join(hashes)))


def _as_bytes(hashes: Sequence[BlockHash]) -> list[WireHash]:
    return list(hashes)


def _kind(group: LayerGroup) -> tuple[str, int | None]:
    """Return what a group sees, in the format's words."""
    if isinstance(group, FullAttention):
        return "full_attention", None
    if isinstance(group, ChunkedLocal):
        return "chunked_local_attention", None
    if isinstance(group, RecurrentState):
        return "mamba", None
    return "sliding_window", group.window


def _extra_keys(run: BlocksStored, namespace: Namespace) -> list[tuple[object, ...] | None] | None:
    """Return what the contents of a run depend on beside tokens; None: nothing."""
    keys: list[tuple[object, ...] | None] = []
    size = len(run.packed) // len(run.contents)
    exact = namespace != Namespace(lora_name=namespace.lora_name)
    if not exact and all(len(content) == size for content in run.contents):
        return None
    for index, content in enumerate(run.contents):
        found: list[object] = []
        if len(content) > size:
            found += [(identity.hex(), begin) for identity, begin in _spans(content[size:])]
            found.append(MARK_ITEMS + content[size:])
        if exact and index == 0 and run.parent is None:
            if namespace.salt:
                found.append(namespace.salt.decode("utf-8", "backslashreplace"))
            found.append(run.namespace_key)
        keys.append(tuple(found) or None)
    return keys


def _spans(encoded: bytes) -> Iterator[tuple[bytes, int]]:
    """Yield the content of each item that reaches into a block, and where in it that begins."""
    start = 0
    while start < len(encoded):
        place, row, count, masked, size = _ITEM_HEAD.unpack_from(encoded, start)
        content = start + _ITEM_HEAD.size
        yield encoded[content : content + size], place - row
        start = content + size + count * masked
