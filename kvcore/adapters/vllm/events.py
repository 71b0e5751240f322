"""kvcore's events as vLLM's: what its publisher sends to routers and stores.

One event of kvcore is one of vLLM's, or one for each group that has a piece of a state. A name is
spelled as vLLM spells its hashes (the low 64 bits, or all bytes, as
`VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES` says). `extra_keys` are those of vLLM: the adapter,
`(identifier, offset)` of what is not tokens, the salt in a prompt's first block.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from kvcore import (
    BlockHash,
    BlocksRemoved,
    BlocksStored,
    Event,
    Namespace,
    decode_namespace,
)

_ITEM_HEAD: Final = struct.Struct("<IQIBI")  # before its content: block-hashes.md
_MEDIUM: Final = "GPU"


Kind = tuple[int, str, int | None]
"""The number of a group of vLLM's, its kind and its window, in vLLM's words."""


class Speller:
    """Turns events into vLLM's.

    Args:
        kinds: for each layer group of kvcore vLLM's: several where each has a piece of a state.
    """

    def __init__(self, kinds: Sequence[Sequence[Kind]]) -> None:
        self._kinds = tuple(kinds)

    def __call__(self, events: Iterable[Event]) -> list[Any]:
        """Return events as vLLM's, in their order. O(tokens in them)."""
        told: list[Any] = []
        for event in events:
            if isinstance(event, BlocksStored):
                told += [self._stored(event, kind) for kind in self._kinds[event.group]]
            elif isinstance(event, BlocksRemoved):
                names = _spelled(event.block_hashes)
                told += [
                    BlockRemoved(block_hashes=names, medium=_MEDIUM, group_idx=group)
                    for group, _, _ in self._kinds[event.group]
                ]
            else:  # all is gone, or what happened is lost and what is cached is told anew
                told.append(AllBlocksCleared())
        return told

    @staticmethod
    def _stored(run: BlocksStored, as_there: Kind) -> BlockStored:
        namespace = decode_namespace(run.namespace_key)
        group, kind, window = as_there
        return BlockStored(
            block_hashes=_spelled(run.block_hashes),
            parent_block_hash=None if run.parent is None else _spelled([run.parent])[0],
            token_ids=array("I", run.packed).tolist(),
            block_size=run.block_size,
            lora_id=namespace.lora_version or None,
            medium=_MEDIUM,
            lora_name=namespace.lora_name,
            extra_keys=_extra_keys(run, namespace),
            group_idx=group,
            kv_cache_spec_kind=kind,
            kv_cache_spec_sliding_window=window,
        )


def _spelled(names: Sequence[BlockHash]) -> list[Any]:
    spell: Callable[[bytes], Any] = maybe_convert_block_hash
    return [spell(name) for name in names]


def _extra_keys(run: BlocksStored, namespace: Namespace) -> list[tuple[Any, ...] | None] | None:
    """Return what each block depends on beside its tokens; None: nothing of it on anything."""
    found: list[tuple[Any, ...] | None] = []
    adapter = () if namespace.lora_name is None else (namespace.lora_name,)
    for place, encoded in enumerate(run.items):
        keys = [*adapter, *_spans(encoded)]
        if namespace.salt and place == 0 and run.parent is None:
            keys.append(namespace.salt.decode("utf-8", "surrogatepass"))
        found.append(tuple(keys) or None)
    return found if any(found) else None


def _spans(encoded: bytes) -> Iterator[tuple[str, int] | bytes]:
    """Yield each item that reaches into a block: an image's identifier, and where it begins."""
    start = 0
    while start < len(encoded):
        place, row, count, masked, size = _ITEM_HEAD.unpack_from(encoded, start)
        first = start + _ITEM_HEAD.size
        content = encoded[first : first + size]
        try:
            yield content.decode("utf-8"), place - row
        except UnicodeDecodeError:
            yield content  # the digest of embeddings
        start = first + size + count * masked
