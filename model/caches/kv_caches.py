"""The KV tensors of a model, one cache per layer, and the states of its recurrent layers.

Decides: that layers of different groups at one place are views of the same memory, and so are a
layer and one that reads its keys and values. With recurrent layers all places of a block are one
page, which may hold a piece of a state instead.

Invariants: every layer's cache has the same number of blocks of the same size; exactly
`CacheLayout.kv_bytes` bytes are allocated; block 0 is the null block and is never written.

Does not know: which sequence has a block (`kvcore`), how many blocks to allocate (`memory.py`), how
a kernel reads a block (`backends`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

import backends
from kvcore.adapters.recurrent import StateTensors, aligned, state_views
from model.caches.layout import CacheLayout
from model.errors import InvalidArgumentError

Scales = tuple[tuple[Tensor, Tensor | None], ...]
"""For each layer the scales of its keys and of its values: float32 [num_kv_heads]."""


@dataclass(frozen=True, slots=True)
class KVCaches:
    """Keys and values of every layer.

    Attributes:
        layers: each layer's cache, as a backend takes it.
        storages: all memory: for each place keys, then values, or latents alone, then index keys,
            uint8 [num_blocks, bytes of a block], or with recurrent layers one tensor of pages;
            moving whole blocks means moving these.
        states: those of the recurrent layers.
        indexes: by the number of a layer with an index the cache of its index keys.
    """

    layers: tuple[backends.KVCache, ...]
    storages: tuple[Tensor, ...]
    states: StateTensors = field(default_factory=dict)
    indexes: dict[int, backends.KVCache] = field(default_factory=dict)

    @classmethod
    def allocate(
        cls,
        layout: CacheLayout,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        scales: Scales = (),
    ) -> "KVCaches":
        """Allocate zeroed caches of `layout.kv_bytes(num_blocks, block_size)` bytes.

        Args:
            layout: what each layer stores, and where.
            num_blocks: the null block included.
            block_size: tokens per block.
            device: of the tensors.
            scales: of quantised caches, for each layer; empty: none, or all are 1.

        Raises:
            InvalidArgumentError: the device has too little memory.
        """
        pages = layout.page_bytes(block_size) if layout.states else 0
        try:
            if pages:
                storages = [_zeros(num_blocks, pages, device)]
                places = _columns(storages[0], layout, block_size)
            else:
                places = [
                    [_zeros(num_blocks, block_size * size, device) for size in sizes]
                    for sizes in layout.place_bytes
                ]
                storages = [storage for storages in places for storage in storages]
        except (RuntimeError, MemoryError, ValueError) as error:
            raise InvalidArgumentError(
                f"num_blocks: {num_blocks} blocks of {block_size} tokens take "
                f"{layout.kv_bytes(num_blocks, block_size):,} bytes, "
                f"which could not be allocated on {device}"
            ) from error
        layers = tuple(
            _over(places[place], shape.slot, block_size, *own)
            for shape, (_, place), own in zip(
                layout.layers, layout.places, scales or [()] * len(layout.layers), strict=True
            )
        )
        states = state_views(layout.states, storages[0]) if layout.states else {}
        indexes = {
            number: _over(places[place][len(shape.slot.row_bytes) :], shape.index.slot, block_size)
            for number, (shape, (_, place)) in enumerate(
                zip(layout.layers, layout.places, strict=True)
            )
            if shape.index is not None
        }
        return cls(layers, tuple(storages), states, indexes)


def _zeros(num_blocks: int, block_bytes: int, device: torch.device) -> Tensor:
    """Zeroed bytes; on a CPU the system allocates a page when it is first touched."""
    if device.type == "cpu":
        return torch.from_numpy(np.zeros((num_blocks, block_bytes), dtype=np.uint8))
    return torch.zeros((num_blocks, block_bytes), dtype=torch.uint8, device=device)


def _columns(pages: Tensor, layout: CacheLayout, block_size: int) -> list[list[Tensor]]:
    """The part of each page that a tensor of each place takes."""
    begin, places = 0, list[list[Tensor]]()
    for sizes in layout.place_bytes:
        places.append([])
        for size in sizes:
            places[-1].append(pages[:, begin : begin + block_size * size])
            begin += aligned(block_size * size)
    return places


def _over(
    storages: Sequence[Tensor],
    slot: backends.KVLayout,
    block_size: int,
    *scales: Tensor | None,
) -> backends.KVCache:
    """The cache that lies in the first of these tensors."""
    views = [
        _view(storage, slot, block_size, size)
        for storage, size in zip(storages, slot.row_bytes, strict=False)
    ]
    return slot.over(views, *scales)


def _view(storage: Tensor, slot: backends.KVLayout, block_size: int, token_bytes: int) -> Tensor:
    """The part of each block that a layer uses, in its own shape."""
    used = storage[:, : block_size * token_bytes]
    num_blocks, (heads, dim) = storage.shape[0], (slot.num_kv_heads, slot.head_dim)
    return used.view(slot.dtype).view(num_blocks, block_size, heads, dim)
