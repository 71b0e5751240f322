"""The positions of each row's highest scores, on a CPU.

A float32 becomes an unsigned number of the same order. Four passes over a row, eight bits each from
the highest on, count how many scores have each next digit, which gives the lowest score chosen and
how many are equal to it; a last pass writes positions in ascending order. O(5 * length) a row,
exact. The batch's values are those that `score_index` has checked.
"""

import zlib
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
from torch import Tensor

from backends.checks import check_choose_tokens
from backends.contract import Backend, PagedBatch
from backends.numba_cpu import bits
from backends.numba_cpu.bits import at, exact, span
from backends.numba_cpu.launch import Plans, Workers, sign
from backends.numba_cpu.schedule import Ints

SOURCE_DIGEST = zlib.crc32(Path(__file__).read_bytes(), bits.SOURCE_DIGEST)

GRAIN = 1 << 14  # scores a thread
_LAST = np.int64(0xFFFFFFFF)


@exact()
def _ordered(word: np.int32) -> np.int64:
    """The bits of a float32 as a number of the same order, 0 .. 2^32 - 1; -0 is 0."""
    number = np.int64(word) & _LAST
    if number == 0x80000000:
        number = np.int64(0)
    return _LAST - number if number >> 31 else number | np.int64(0x80000000)


@exact()
def _lowest(scores: Ints, count: int, digits: Ints) -> tuple[np.int64, int]:
    """(the lowest of the `count` highest scores, how many are chosen of those equal to it)."""
    prefix, left = np.int64(0), count
    for shift in (24, 16, 8, 0):
        digits[:] = 0
        for p in range(scores.size):
            number = _ordered(scores[p])
            if number >> (shift + 8) == prefix:
                digits[(number >> shift) & 255] += 1
        digit = 255
        while digits[digit] < left:
            left -= digits[digit]
            digit -= 1
        prefix = prefix << 8 | digit
    return prefix, left


@lru_cache(maxsize=1)
def _kernel(source_digest: int) -> Callable[..., None]:
    """Compile for the sources with this digest; closing over it makes it part of the cache key."""

    @exact(cache=True)
    def choose(
        tensors: tuple[int, int, int, int],  # scores, query_start_loc, seq_lens, out
        num_seqs: int,
        stride: int,  # of the scores
        count: int,
        first_row: int,
        start: int,  # first row of `out`
        stop: int,  # past the last one
    ) -> None:
        _ = source_digest
        scores = at(tensors[0], 1, np.int32(0))
        starts = at(tensors[1], num_seqs + 1, np.int32(0))
        lengths = at(tensors[2], num_seqs, np.int32(0))
        out, digits = at(tensors[3], 1, np.int32(0)), np.empty(256, np.int32)
        for s in range(num_seqs):
            first = max(first_row + start, starts[s])
            for row in range(first, min(first_row + stop, starts[s + 1])):
                length = lengths[s] - (starts[s + 1] - row) + 1
                mine = span(scores, (row - first_row) * stride, length)
                target = span(out, (row - first_row) * count, count)
                lowest, equal = np.int64(-1), 0
                if length > count:
                    lowest, equal = _lowest(mine, count, digits)
                n = 0
                for p in range(length):
                    number = _ordered(mine[p])
                    if number > lowest or (number == lowest and equal > 0):
                        equal -= number == lowest
                        target[n] = p
                        n += 1
                target[n:] = -1

    return choose


def choose_tokens(
    backend: Backend,
    workers: Workers,
    plans: Plans[bool],
    scores: Tensor,
    batch: PagedBatch,
    first_row: int,
    out: Tensor,
) -> None:
    """Choose the tokens of some rows; see `SparseBackend.choose_tokens`.

    Raises:
        InvalidArgumentError: a shape, dtype or device breaks the contract; nothing written.
    """
    signature = (sign(scores, batch.query_start_loc, batch.seq_lens, out), first_row, batch.form)
    if plans.get(signature) is None or scores.shape[1] < batch.max_seq_len:
        check_choose_tokens(backend, scores, batch, first_row, out)
        plans.keep(signature, plan=True)
    tensors = (scores, batch.query_start_loc, batch.seq_lens, out)
    work = partial(
        _kernel(SOURCE_DIGEST),
        tuple([tensor.data_ptr() for tensor in tensors]),
        batch.num_seqs,
        scores.stride(0),
        out.shape[1],
        first_row,
    )
    workers.run_evenly(work, out.shape[0], GRAIN // max(1, batch.max_seq_len))
