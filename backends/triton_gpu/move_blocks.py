"""Copy whole blocks between caches on a GPU and page-locked host memory, and sum their bytes.

    host[h] = block b of every cache, one behind the other, for every move (b, h); or back
    sums[move] = sum over words i of (low(i) + LOW * i) * (high(i) + HIGH * (i + 1))

A word has 8 bytes, or as many as divide the size of every cache's block; low and high are its
halves, and everything but the product is taken modulo 2^32. A changed block keeps its sum with a
chance of about 2^-32.

On a GPU its copy engines move the blocks (`shared/link.py`), and this kernel sums them where they
are on the GPU: before they have left, or after they have come. In the interpreter it copies too.

Layout: a block of a cache is one run of memory, cut into pieces of which a program sums one. Grid:
(moves * caches * pieces); one launch for all caches whose blocks have one size and spacing. Many
short programs disturb other kernels less than a few long ones, which the link would wait for.
Bytes moved: each block read once and written once, and read once more on the GPU for its sum.
"""

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, cast

import torch
import triton.language as tl
from torch import Tensor

from backends.checks import check_move_blocks, check_moves
from backends.contract import Backend
from backends.oracle import SUM_HIGH, SUM_LOW
from backends.triton_gpu.shared import link
from backends.triton_gpu.shared.launch import Variant, launcher
from backends.triton_gpu.shared.place import Place, ceil_div, power_of_two, sign

PIECE_BYTES = 16384
WARPS = 8

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_MASKS = {1: 0xFF, 2: 0xFFFF, 4: 0xFFFFFFFF, 8: -1}


@launcher(indices=("moves", "places", "sums"), integers=("move_stride",), pointers=("first",))
def _move(
    first: tl.tensor,  # block 0 of the first cache, as words
    moves: tl.tensor,  # int64 [num_moves, 2], any stride
    places: tl.tensor,  # int64 [num_caches + 1, 2]: words from `first` to each, offset in a block
    sums: tl.tensor,  # int64 [num_moves]
    move_stride: tl.tensor,
    STRIDE: tl.constexpr,  # words from block to block
    SIZE: tl.constexpr,  # words a block
    HOST_STRIDE: tl.constexpr,  # words from block to block of host memory
    ALIGN: tl.constexpr,  # words that divide distances, offsets and strides
    CACHES: tl.constexpr,
    PIECES: tl.constexpr,
    WIDTH: tl.constexpr,
    TO_HOST: tl.constexpr,  # whether the kernel copies, and which way
    FROM_HOST: tl.constexpr,
    MASK: tl.constexpr,  # the bits of a word
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
) -> None:
    move = tl.program_id(0) // (CACHES * PIECES)
    cache = tl.program_id(0) // PIECES % CACHES
    word = tl.program_id(0) % PIECES * WIDTH + tl.arange(0, WIDTH)
    pair = moves + move.to(tl.int64) * move_stride
    offset = tl.load(places + 2 * cache + 1)
    block = tl.load(places + 2 * cache) + tl.load(pair) * STRIDE
    block = tl.multiple_of(block, ALIGN)
    host = tl.load(places + 2 * CACHES)
    copy = tl.multiple_of(host + tl.load(pair + 1) * HOST_STRIDE + offset, ALIGN)
    source = copy if FROM_HOST else block
    data = tl.load(first + source + word, mask=word < SIZE)
    if TO_HOST:
        tl.store(first + copy + word, data, mask=word < SIZE)
    if FROM_HOST:
        tl.store(first + block + word, data, mask=word < SIZE)
    at = (word + offset).to(tl.uint32)
    bits = data.to(tl.int64) & MASK
    low = bits.to(tl.uint32) + at * LOW
    high = (bits >> 32).to(tl.uint32) + (at + 1) * HIGH
    terms = low.to(tl.uint64) * high.to(tl.uint64)
    found = tl.sum(tl.where(word < SIZE, terms.to(tl.int64, bitcast=True), 0))
    tl.atomic_add(sums + move, found, sem="relaxed")


class _Sums(NamedTuple):
    """The launch for caches whose blocks have one size and spacing."""

    variant: Variant
    first: Tensor
    places: Tensor
    programs: int
    """For each move."""


class _Plan(NamedTuple):
    """A call for the caches and the host memory of an earlier one, which was checked."""

    sides: link.Sides
    sums: tuple[_Sums, ...]


def move_blocks(
    backend: Backend,
    place: Place,
    caches: Sequence[Tensor],
    host: Tensor,
    moves: Tensor,
    sums: Tensor,
    *,
    to_host: bool,
) -> None:
    """Copy blocks to or from host memory; see `Backend.move_blocks`.

    Raises:
        InvalidArgumentError: a shape, dtype, device or block id breaks the contract; nothing
            written.
        RuntimeError: host memory is not page-locked.
    """
    tensors = (host, *caches)
    key = ("move_blocks", to_host, *map(sign, tensors), *[each.data_ptr() for each in tensors])
    plan = cast("_Plan | None", place.plan(key))
    if plan is None:
        check_move_blocks(backend, caches, host)
        plan = _planned(place, caches, host, to_host=to_host)
        place.keep(key, plan)
    check_moves(backend, caches, host, moves, sums, to_host=to_host)
    sums.zero_()
    if not len(moves):
        return
    if not place.interpreting:
        stream = place.stream(caches[0].device.index)
        link.move(stream, plan.sides, moves.numpy(), to_host=to_host)
        moves = moves.pin_memory().to(caches[0].device, non_blocking=True)
    for each in plan.sums:
        grid = (len(moves) * each.programs, 1, 1)
        each.variant.launch(grid, (each.first, moves, each.places, sums), (moves.stride(0),))


def _planned(place: Place, caches: Sequence[Tensor], host: Tensor, *, to_host: bool) -> _Plan:
    sizes = [cache[0].nbytes for cache in caches]
    word, kernel_copies = math.gcd(8, *sizes), place.interpreting
    offsets = [*accumulate(sizes[:-1], initial=0)]
    layouts: dict[tuple[int, int], list[tuple[Tensor, int]]] = {}
    for cache, size, offset in zip(caches, sizes, offsets, strict=True):
        layout = (cache.stride(0) * cache.element_size(), size)
        layouts.setdefault(layout, []).append((cache, offset))
    launches: list[_Sums] = []
    for (stride, size), alike in layouts.items():
        first, kind = alike[0][0], _WORDS[word]
        begin = first.data_ptr()
        places = [(cache.data_ptr() - begin, offset) for cache, offset in alike]
        places.append((host.data_ptr() - begin, 0))
        align = math.gcd(16, stride, size, host.stride(0), begin, *[n for p in places for n in p])
        width = power_of_two(min(PIECE_BYTES, size)) // word
        pieces = ceil_div(size // word, width)
        constants = (
            stride // word, size // word, host.stride(0) // word, max(1, align // word),
            len(alike), pieces, width, kernel_copies and to_host, kernel_copies and not to_host,
            _MASKS[word], SUM_LOW, SUM_HIGH,
        )  # fmt: skip
        variant = _move.variant(place, first.device, (kind,), constants, num_warps=WARPS)
        words = [(distance // word, offset // word) for distance, offset in places]
        there = torch.tensor(words, dtype=torch.int64, device=first.device)
        whole = first[0].flatten().view(kind)
        launches.append(_Sums(variant, whole, there, len(alike) * pieces))
    return _Plan(link.Sides.of(caches, host), tuple(launches))
