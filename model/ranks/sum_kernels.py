"""Sums over the GPUs of one host by one kernel, which writes into the other GPUs' memory.

A line is 16 bytes: two words of data, each followed by the number of the sum. A GPU writes its
lines into the memory of the others, and reads its own memory until every line has the right number.
So data and the news of them are one message, and no GPU waits for another one at a barrier. This is
NCCL's protocol LL ("Demystifying NCCL", arXiv:2507.04786), with two schemes:

- once: each GPU writes all of its part to all, and adds up. One message from end to end.
- twice: each GPU adds up one slice for all, and writes the sum to all. Two messages, less data.

Layout: a program takes TILE lines of each slice, and waits for the program of its number on the
other GPUs alone. Bytes written by each GPU, for a part of `n` bytes on `size` GPUs: `2 * n * size`
once, `4 * n` twice. Parts are added up in float32 in the order of the GPUs, so all have equal bits.

Memory: a tensor of int64 on each GPU: the addresses of all GPUs' tensors, the number of the last
sum of each program, and lines `[2 messages, 2 halves, size, most]`. Sums take the two halves in
turn: a GPU that writes the number `n` has the lines of number `n - 1` of all others, which they
write after they have read those of number `n - 2`, in the same half.

Does not know: when a sum is worth it (`parallel.py`).
"""

# ruff: noqa: N803 - compile-time arguments are upper case, as everywhere in Triton

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 256
"""Lines per program, each read by one thread."""
_MOST_PROGRAMS = 2048
_MOST_SIZE = 8
_HEAD = _MOST_SIZE + _MOST_PROGRAMS // 2
"""Words of int64 before the lines."""
MOST_BYTES = 4 << 20
"""The largest part; NCCL is faster for larger ones."""
_ONCE_BYTES = 192 << 10
"""The most bytes that a GPU receives by one message, where two take longer."""

_WORDS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
_DATA_BYTES = 8  # of a line


def _inner(function: Any) -> Any:  # noqa: ANN401  # Triton has no types
    """A function that kernels call."""
    return triton.jit(function)


def _kernel(function: Any) -> Any:  # noqa: ANN401  # Triton has no types
    """A kernel, compiled once for all numbers of lines."""
    return triton.jit(function, do_not_specialize=["num_lines"])


@_inner
def _wait_for_lines(first: tl.tensor, second: tl.tensor, number: tl.tensor) -> tl.tensor:
    """Read two tiles of lines until each has the number; return their words."""
    return tl.inline_asm_elementwise(
        """
        {
            .reg .pred %p<4>;
            .reg .b32 %f<4>;
        again:
            ld.volatile.global.v4.b32 {$0, %f0, $1, %f1}, [$4];
            ld.volatile.global.v4.b32 {$2, %f2, $3, %f3}, [$5];
            setp.ne.b32 %p0, %f0, $6;
            setp.ne.or.b32 %p1, %f1, $6, %p0;
            setp.ne.or.b32 %p2, %f2, $6, %p1;
            setp.ne.or.b32 %p3, %f3, $6, %p2;
            @%p3 bra again;
        }
        """,
        "=&r,=&r,=&r,=&r,l,l,r",
        [first, second, number],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=False,
        pack=1,
    )


@_inner
def _numbers(word: tl.tensor, DTYPE: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Return the numbers of a word in float32: the first, and the second if there are two."""
    if DTYPE == tl.float32:  # noqa: SIM300
        first = word.to(tl.float32, bitcast=True)
        second = first
    else:
        first = (word & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
        second = (word >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    return first, second


@_inner
def _word(first: tl.tensor, second: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """Return the word of two numbers."""
    if DTYPE == tl.float32:  # noqa: SIM300
        word = first.to(tl.int32, bitcast=True)
    else:
        low = first.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        word = low | (second.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) << 16)
    return word


@_inner
def _packed(words: tl.tensor, number: tl.tensor) -> tl.tensor:
    return (number.to(tl.int64) << 32) | (words.to(tl.int64) & 0xFFFFFFFF)


@_inner
def _added(
    lines: tl.tensor,  # pointers to those of the first GPU
    number: tl.tensor,
    SIZE: tl.constexpr,
    MOST: tl.constexpr,
    DTYPE: tl.constexpr,
) -> tl.tensor:
    """Return the sum of the lines of all GPUs: int32 [2 * TILE]."""
    a, b, c, d = _wait_for_lines(lines, lines + MOST * 2, number)
    even, second = _numbers(a, DTYPE)
    odd, fourth = _numbers(b, DTYPE)
    x, y = _numbers(c, DTYPE)
    even, second = even + x, second + y
    x, y = _numbers(d, DTYPE)
    odd, fourth = odd + x, fourth + y
    for source in tl.static_range(2, SIZE, 2):
        at = lines + source * MOST * 2
        a, b, c, d = _wait_for_lines(at, at + MOST * 2, number)
        x, y = _numbers(a, DTYPE)
        even, second = even + x, second + y
        x, y = _numbers(b, DTYPE)
        odd, fourth = odd + x, fourth + y
        x, y = _numbers(c, DTYPE)
        even, second = even + x, second + y
        x, y = _numbers(d, DTYPE)
        odd, fourth = odd + x, fourth + y
    return tl.interleave(_word(even, second, DTYPE), _word(odd, fourth, DTYPE))


@_inner
def _send(
    peer: tl.constexpr,
    shared: tl.tensor,
    at: tl.tensor,
    packed: tl.tensor,
    mask: tl.tensor,
    SIZE: tl.constexpr,
    HEAD: tl.constexpr,
) -> None:
    """Write words into the memory of a GPU."""
    memory = tl.load(shared + peer % SIZE).to(tl.pointer_type(tl.int64)) + HEAD
    tl.store(memory + at, packed, mask=mask)


@_kernel
def _sum_once(
    part: tl.tensor,  # int32 [2 * num_lines]
    out: tl.tensor,  # int32 [2 * num_lines]
    shared: tl.tensor,  # int64
    num_lines: tl.tensor,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    MOST: tl.constexpr,
    DTYPE: tl.constexpr,
    HEAD: tl.constexpr,
    FIRST: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    numbers = (shared + FIRST).to(tl.pointer_type(tl.int32)) + program
    number = tl.load(numbers) + 1
    half = (number & 1) * SIZE * MOST
    words = program * TILE * 2 + tl.arange(0, TILE * 2)
    is_there = words < 2 * num_lines
    lines = tl.minimum(program * TILE + tl.arange(0, TILE), num_lines - 1)
    packed = _packed(tl.load(part + words, mask=is_there), number)
    for peer in tl.static_range(SIZE):
        at = 2 * (half + RANK * MOST) + words
        _send(RANK + peer, shared, at, packed, is_there, SIZE, HEAD)
    at = shared + HEAD + 2 * (half + lines)
    tl.store(out + words, _added(at, number, SIZE, MOST, DTYPE), mask=is_there)
    tl.debug_barrier()  # all threads have read the number
    tl.store(numbers, number)


@_kernel
def _sum_twice(
    part: tl.tensor,  # int32 [SIZE, 2 * num_lines]
    out: tl.tensor,  # int32 [SIZE, 2 * num_lines]
    shared: tl.tensor,  # int64
    num_lines: tl.tensor,  # of a slice
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    MOST: tl.constexpr,
    DTYPE: tl.constexpr,
    HEAD: tl.constexpr,
    FIRST: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    numbers = (shared + FIRST).to(tl.pointer_type(tl.int32)) + program
    number = tl.load(numbers) + 1
    half = (number & 1) * SIZE * MOST
    second = half + 2 * SIZE * MOST
    words = program * TILE * 2 + tl.arange(0, TILE * 2)
    is_there = words < 2 * num_lines
    lines = tl.minimum(program * TILE + tl.arange(0, TILE), num_lines - 1)
    for peer in tl.static_range(SIZE):
        place = (RANK + peer) % SIZE * 2 * num_lines + words
        packed = _packed(tl.load(part + place, mask=is_there), number)
        at = 2 * (half + RANK * MOST) + words
        _send(RANK + peer, shared, at, packed, is_there, SIZE, HEAD)
    first = shared + HEAD + 2 * (half + lines)
    packed = _packed(_added(first, number, SIZE, MOST, DTYPE), number)
    for peer in tl.static_range(SIZE):
        at = 2 * (second + RANK * MOST) + words
        _send(RANK + peer, shared, at, packed, is_there, SIZE, HEAD)
    for source in tl.static_range(0, SIZE, 2):
        sums = shared + HEAD + 2 * (second + source * MOST + lines)
        a, b, c, d = _wait_for_lines(sums, sums + MOST * 2, number)
        place = source * 2 * num_lines + words
        tl.store(out + place, tl.interleave(a, b), mask=is_there)
        tl.store(out + place + 2 * num_lines, tl.interleave(c, d), mask=is_there)
    tl.debug_barrier()  # all threads have read the number
    tl.store(numbers, number)


def shared_words() -> int:
    """Return the length of the memory of each GPU. O(1)."""
    return _HEAD + 8 * MOST_BYTES // _DATA_BYTES


def begin(shared: Tensor, addresses: Sequence[int]) -> None:
    """Clear this GPU's memory before the first sum, and wait for that; then all may send.

    Args:
        shared: int64 [`shared_words`].
        addresses: of this tensor on each GPU.
    """
    shared.zero_()
    shared[: len(addresses)] = torch.tensor(addresses, device=shared.device)
    torch.cuda.synchronize(shared.device)


def takes(part: Tensor, size: int) -> bool:
    """Return True if `add_up` can add up such a part on `size` GPUs. O(1)."""
    count = part.numel() * part.element_size()
    return (
        part.dtype in _WORDS
        and 0 < count <= MOST_BYTES
        and count % (_DATA_BYTES * size) == part.data_ptr() % 16 == 0
    )


def add_up(part: Tensor, shared: Tensor, rank: int, size: int) -> Tensor:
    """Return the sum of the parts of all GPUs, one launch.

    Args:
        part: contiguous; `takes` it.
        shared: int64 [`shared_words`], after `begin` on all GPUs.
        rank: of this GPU.
        size: the number of GPUs, even and at most 8.
    """
    count, most = part.numel() * part.element_size(), MOST_BYTES // _DATA_BYTES // size
    is_small = count * (size - 1) <= _ONCE_BYTES
    lines = count // _DATA_BYTES // (1 if is_small else size)
    out = torch.empty_like(part)
    (_sum_once if is_small else _sum_twice)[(triton.cdiv(lines, TILE),)](
        part.view(-1).view(torch.int32),
        out.view(-1).view(torch.int32),
        shared,
        lines,
        RANK=rank,
        SIZE=size,
        MOST=most,
        DTYPE=_WORDS[part.dtype],
        HEAD=_HEAD,
        FIRST=_MOST_SIZE,
        TILE=TILE,
        num_warps=8,
    )
    return out
