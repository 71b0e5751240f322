"""Copy whole blocks inside caches on a GPU, for forks and copy-on-write.

    cache[dst] = cache[src], for every (src, dst) and every cache

Layout: a block is one run of memory, cut into pieces of which a program copies one. Grid: (copies,
caches * pieces of a block); one launch for all caches whose blocks have one size and spacing, by
way of a list on the GPU of how far they are from the first one. That list is written when a set of
caches is met for the first time, which a CUDA graph being captured cannot do: copy once before.
Bytes moved: each block read once and written once. Exact: words of up to 8 bytes, 16 bytes a thread
and copy. Block ids and overlaps are the caller's mistake and are not looked for, which would need
the GPU to be waited for.
"""

import functools
import math
from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

from backends.checks import check_copy_blocks
from backends.contract import Backend
from backends.triton_gpu.shared.launch import launcher
from backends.triton_gpu.shared.place import Place, ceil_div, power_of_two

PIECE_BYTES = 4096
WARPS = 4

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@launcher(indices=("copies", "distances"), integers=("pair_stride",), pointers=("first",))
def _copy(
    first: tl.tensor,  # block 0 of the first cache, as words
    copies: tl.tensor,  # int64 [num_copies, 2], any stride
    distances: tl.tensor,  # int64 [num_caches]: words from the first cache to each
    pair_stride: tl.tensor,
    STRIDE: tl.constexpr,  # words from block to block
    SIZE: tl.constexpr,  # words a block
    ALIGN: tl.constexpr,  # words that divide distances and strides
    PIECES: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    pair = copies + tl.program_id(0).to(tl.int64) * pair_stride
    piece = tl.program_id(1) % PIECES
    start = tl.load(distances + tl.program_id(1) // PIECES)
    source = tl.multiple_of(start + tl.load(pair) * STRIDE, ALIGN)
    target = tl.multiple_of(start + tl.load(pair + 1) * STRIDE, ALIGN)
    word = piece * WIDTH + tl.arange(0, WIDTH)
    data = tl.load(first + source + word, mask=word < SIZE)
    tl.store(first + target + word, data, mask=word < SIZE)


def copy_blocks(backend: Backend, place: Place, caches: Sequence[Tensor], copies: Tensor) -> None:
    """Copy blocks inside each cache; see `Backend.copy_blocks`.

    Raises:
        InvalidArgumentError: a shape, dtype or device breaks the contract; nothing written.
    """
    check_copy_blocks(backend, caches, copies)
    num_copies = copies.shape[0]
    if num_copies == 0:
        return
    layouts: dict[tuple[int, int], list[Tensor]] = {}
    for cache in caches:
        width = cache.element_size()
        layout = (cache.stride(0) * width, cache[0].numel() * width)
        layouts.setdefault(layout, []).append(cache)
    for (stride, size), alike in layouts.items():
        first = alike[0]
        distances = [cache.data_ptr() - first.data_ptr() for cache in alike]
        align = math.gcd(16, stride, size, first.data_ptr(), *distances)
        word = min(8, align)
        width = power_of_two(min(PIECE_BYTES, size)) // word
        pieces = ceil_div(size // word, width)
        constants = (stride // word, size // word, align // word, pieces, width)
        kind = _WORDS[word]
        variant = _copy.variant(place, first.device, (kind,), constants, num_warps=WARPS)
        far = _on_device(first.device, tuple(distance // word for distance in distances))
        tensors = (first[0].flatten().view(kind), copies, far)
        variant.launch((num_copies, len(alike) * pieces, 1), tensors, (copies.stride(0),))


@functools.cache
def _on_device(device: torch.device, distances: tuple[int, ...]) -> Tensor:
    """The list as a tensor there; kept for good, since a captured graph may read it."""
    return torch.tensor(distances, dtype=torch.int64, device=device)
