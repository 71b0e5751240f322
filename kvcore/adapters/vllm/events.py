"""kvcore's events as vLLM's: what its publisher sends to routers and stores.

One event of kvcore is one of vLLM's, or one for each group that has a piece of a state. A name is
spelled as vLLM spells its hashes (the low 64 bits, or all bytes, as
`VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES` says). `extra_keys` are those of vLLM: the adapter,
`(identifier, offset)` of what is not tokens, the salt in a prompt's first block. It imports nothing
of vLLM.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from kvcore import (
    BlockHash,
    BlocksRemoved,
    BlocksStored,
    Event,
    Namespace,
    decode_namespace,
)
from kvcore.adapters.vllm.lookahead import Told, as_it_stands

_ITEM_HEAD: Final = struct.Struct("<IQIBI")  # before its content: block-hashes.md
_MEDIUM: Final = "GPU"


Kind = tuple[int, str, int | None]
"""The number of a group of vLLM's, its kind and its window, in vLLM's words."""

Key = tuple[str, int] | bytes
"""An image's identifier and where it begins, counted from the block; or a digest of embeddings."""


class Words(NamedTuple):
    """The classes of vLLM's events, and how it spells a block hash in them."""

    stored: Callable[..., Any]
    removed: Callable[..., Any]
    cleared: Callable[..., Any]
    hash: Callable[[bytes], Any]


class Speller:
    """Turns events into vLLM's.

    Args:
        words: what vLLM's events are made of.
        kinds: for each layer group of kvcore vLLM's: several where each has a piece of a state.
        lookahead: the number of tokens after a block that its hash covers.
    """

    def __init__(self, words: Words, kinds: Sequence[Sequence[Kind]], lookahead: int = 0) -> None:
        self._words = words
        self._kinds = tuple(kinds)
        self._lookahead = lookahead

    def __call__(self, events: Iterable[Event]) -> list[Any]:
        """Return events as vLLM's, in their order. O(tokens in them)."""
        told: list[Any] = []
        for event in events:
            if isinstance(event, BlocksStored):
                told += [self._stored(event, kind) for kind in self._kinds[event.group]]
            elif isinstance(event, BlocksRemoved):
                names = self._spelled(event.block_hashes)
                told += [
                    self._words.removed(block_hashes=names, medium=_MEDIUM, group_idx=group)
                    for group, _, _ in self._kinds[event.group]
                ]
            else:  # all is gone, or what happened is lost and what is cached is told anew
                told.append(self._words.cleared())
        return told

    def _stored(self, run: BlocksStored, as_there: Kind) -> Any:  # noqa: ANN401  # vLLM's event
        namespace = decode_namespace(run.namespace_key)
        ahead = self._lookahead
        blocks: list[Told] = []
        if ahead:
            namespace, told = as_it_stands(run, namespace, ahead)
            blocks += told
            packed = [token for block in blocks for token in block.tokens]
            spans = [_spans_ahead(block.items, run.block_size, ahead) for block in blocks]
        else:
            packed = array("I", run.packed).tolist()
            spans = [[*_spans(encoded)] for encoded in run.items]
        group, kind, window = as_there
        after = {"lookahead_token_ids": [block.after for block in blocks]} if ahead else {}
        return self._words.stored(
            block_hashes=self._spelled(run.block_hashes),
            parent_block_hash=None if run.parent is None else self._words.hash(run.parent),
            token_ids=packed,
            block_size=run.block_size,
            lora_id=namespace.lora_version or None,
            medium=_MEDIUM,
            lora_name=namespace.lora_name,
            extra_keys=_extra_keys(spans, namespace, begins=run.parent is None),
            group_idx=group,
            kv_cache_spec_kind=kind,
            kv_cache_spec_sliding_window=window,
            **after,
        )

    def _spelled(self, names: Sequence[BlockHash]) -> list[Any]:
        return [self._words.hash(name) for name in names]


def _extra_keys(
    spans: Sequence[Sequence[Key]], namespace: Namespace, *, begins: bool
) -> list[tuple[Any, ...] | None] | None:
    """Return what each block depends on beside its tokens; None: nothing of it on anything.

    Args:
        spans: for each block the items that reach into it.
        namespace: what all depend on.
        begins: True if the first block is the first of its prompt.
    """
    found: list[tuple[Any, ...] | None] = []
    adapter = () if namespace.lora_name is None else (namespace.lora_name,)
    for place, keys in enumerate(spans):
        salt = []
        if namespace.salt and place == 0 and begins:
            salt.append(namespace.salt.decode("utf-8", "surrogatepass"))
        found.append((*adapter, *keys, *salt) or None)
    return found if any(found) else None


def _spans(encoded: bytes) -> Iterator[Key]:
    """Yield each item that reaches into a block: an image's identifier, and where it begins."""
    for key, _ in _spans_and_ends(encoded):
        yield key


def _spans_and_ends(encoded: bytes) -> Iterator[tuple[Key, int]]:
    """Yield each item that reaches into a block, and the place after its last row there."""
    start = 0
    while start < len(encoded):
        place, row, count, masked, size = _ITEM_HEAD.unpack_from(encoded, start)
        first = start + _ITEM_HEAD.size
        content = encoded[first : first + size]
        try:
            yield (content.decode("utf-8"), place - row), place + count
        except UnicodeDecodeError:
            yield content, place + count  # the digest of embeddings
        start = first + size + count * masked


def _spans_ahead(items: tuple[bytes, bytes], block_size: int, ahead: int) -> list[Key]:
    """Return the items that reach into a block or the next `ahead` positions.

    kvcore was told of them `ahead` positions before, and of the first such positions of the block
    with the block before it.
    """
    above, own = items
    keys: list[Key] = []
    for encoded, begin, least in ((above, -block_size, block_size - ahead), (own, 0, -1)):
        for key, end in _spans_and_ends(encoded):
            moved = key if isinstance(key, bytes) else (key[0], key[1] + begin + ahead)
            if end > least and moved not in keys:
                keys.append(moved)
    return keys
