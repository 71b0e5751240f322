"""Copy whole blocks inside caches on a GPU, for forks and copy-on-write.

    cache[dst] = cache[src], for every (src, dst) and every cache

Grid: (copies, pieces of a block), one launch a cache. Bytes moved: each block read once and written
once. Exact: elements are moved as bits. Block ids and overlaps are the caller's mistake and are not
looked for, which would need the GPU to be waited for.
"""

# ruff: noqa: N803 - compile-time arguments are upper case, as everywhere in Triton

from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

from backends.checks import check_copy_blocks
from backends.contract import Backend
from backends.triton_gpu.place import Place, ceil_div, jit, power_of_two

MAX_WIDTH = 4096

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@jit()
def _copy(
    cache: tl.tensor,  # [num_blocks, size]
    copies: tl.tensor,  # int64 [num_copies, 2], any stride
    STRIDE: tl.constexpr,  # from block to block
    SIZE: tl.constexpr,  # elements a block
    PAIR_STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    pair = copies + tl.program_id(0).to(tl.int64) * PAIR_STRIDE
    source = cache + tl.load(pair) * STRIDE
    target = cache + tl.load(pair + 1) * STRIDE
    element = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    data = tl.load(source + element, mask=element < SIZE)
    tl.store(target + element, data, mask=element < SIZE)


def copy_blocks(backend: Backend, place: Place, caches: Sequence[Tensor], copies: Tensor) -> None:
    """Copy blocks inside each cache; see `Backend.copy_blocks`.

    Raises:
        InvalidArgumentError: a shape, dtype or device breaks the contract; nothing written.
    """
    check_copy_blocks(backend, caches, copies)
    num_copies = copies.shape[0]
    if num_copies == 0:
        return
    for cache in caches:
        size = cache[0].numel()
        width = min(MAX_WIDTH, power_of_two(size))
        with place.guard(cache.device):
            _copy[num_copies, ceil_div(size, width)](
                cache.view(_BITS[cache.element_size()]),
                copies,
                cache.stride(0),
                size,
                copies.stride(0),
                width,
            )
