"""What recurrent layers keep of a sequence, and where it lies in the pages of the KV cache.

A recurrent layer keeps a state of fixed size instead of keys and values per token: the last inputs
of a short convolution, or the state of linear attention or of a state space. A sequence's state is
all of these together. It is divided into pieces of whole layers, and each piece takes one page: a
block of the same pool and of the same size as a block of keys and values.

Decides: which layers share a piece, and the block size whose pages hold pieces with little waste.

Invariants: a layer's state is never cut; no two tensors of a piece overlap; each begins at a
multiple of `ALIGNMENT` bytes.

Does not know: which blocks a sequence has (`kvcore`), how a layer computes its state.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

ALIGNMENT = 64
"""Bytes; at least what a kernel reads at once."""

_EMPTY_TOKENS = 512
"""Of a block without keys and values, at least: it takes a page all the same."""


class StateKey(NamedTuple):
    """Which tensor of a state.

    Attributes:
        layer: index of the layer.
        kind: "conv": the last inputs of a convolution; "recurrent": a recurrent state.
        number: counts those of one kind in one layer.
    """

    layer: int
    kind: str
    number: int


@dataclass(frozen=True, slots=True)
class StateShape:
    """One tensor of a state, of one sequence.

    Attributes:
        key: which tensor it is.
        shape: without a dimension for sequences.
        dtype: as the network keeps it.
        is_transposed: its last two dimensions lie exchanged in memory, as a backend wants them.
    """

    key: StateKey
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_transposed: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes, rounded up to `ALIGNMENT`. O(1)."""
        return aligned(torch.Size(self.shape).numel() * self.dtype.itemsize)


def aligned(num_bytes: int) -> int:
    """Round up to a multiple of `ALIGNMENT`. O(1)."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def layer_bytes(shapes: Sequence[StateShape]) -> list[int]:
    """The bytes of each recurrent layer's state, in the order of the layers. O(shapes)."""
    sizes: dict[int, int] = {}
    for shape in shapes:
        sizes[shape.key.layer] = sizes.get(shape.key.layer, 0) + shape.num_bytes
    return [sizes[layer] for layer in sorted(sizes)]


def num_pieces(shapes: Sequence[StateShape], page_bytes: int) -> int:
    """Pages of `page_bytes` bytes that a state takes. O(shapes)."""
    return 1 + max([piece for _, piece, _ in state_places(shapes, page_bytes)], default=-1)


def fitting_block_size(shapes: Sequence[StateShape], block_size: int, slot_bytes: int) -> int:
    """The block size itself if its pages hold the state of a layer, otherwise a multiple of it.

    Larger pages hold more layers each, so fewer are needed: the multiple is the one for which one
    state and one page of keys and values take the fewest bytes together. Where no layer attends,
    blocks of tokens are empty pages, so they have many tokens. O(layers ** 2).

    Args:
        shapes: of the network's states.
        block_size: tokens.
        slot_bytes: of a token's keys and values in one block; 0: no layer attends.
    """
    sizes = layer_bytes(shapes)
    unit_bytes = block_size * slot_bytes
    if not slot_bytes:
        return -(-_EMPTY_TOKENS // block_size) * block_size
    if max(sizes) <= unit_bytes:
        return block_size
    costs: list[tuple[int, int]] = []
    for group in range(1, len(sizes) + 1):
        pieces = [sum(sizes[at : at + group]) for at in range(0, len(sizes), group)]
        units = -(-max(pieces) // unit_bytes)
        costs.append(((num_pieces(shapes, units * unit_bytes) + 1) * units, units))
    return min(costs)[1] * block_size


def state_places(
    shapes: Sequence[StateShape], page_bytes: int
) -> Iterator[tuple[StateShape, int, int]]:
    """Yield each tensor with its piece and its first byte in the piece's page. O(shapes).

    Args:
        shapes: of the network's states.
        page_bytes: at least the bytes of any layer's state.
    """
    piece, begin = -1, page_bytes + 1
    for layer in sorted({shape.key.layer for shape in shapes}):
        own = [shape for shape in shapes if shape.key.layer == layer]
        if begin + sum(shape.num_bytes for shape in own) > page_bytes:
            piece, begin = piece + 1, 0
        for shape in own:
            yield shape, piece, begin
            begin += shape.num_bytes


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor of the states of all sequences.

    Attributes:
        piece: it lies in the page of this piece of a state.
        blocks: [num_blocks, *shape], a view of the pages; pages of keys and values, and of other
            pieces, hold other things there.
    """

    piece: int
    blocks: Tensor


StateTensors = dict[StateKey, StateTensor]


def state_views(shapes: Sequence[StateShape], pages: Tensor) -> StateTensors:
    """The tensors of a network's states in a pool of pages. O(shapes).

    Args:
        shapes: of the states.
        pages: uint8 [num_blocks, page_bytes].
    """
    found: StateTensors = {}
    for shape, piece, begin in state_places(shapes, pages.shape[1]):
        size = torch.Size(shape.shape).numel() * shape.dtype.itemsize
        part = pages[:, begin : begin + size].view(shape.dtype)
        if shape.is_transposed:
            *outer, rows, columns = shape.shape
            blocks = part.view(len(pages), *outer, columns, rows).transpose(-1, -2)
        else:
            blocks = part.view(len(pages), *shape.shape)
        found[shape.key] = StateTensor(piece, blocks)
    return found
