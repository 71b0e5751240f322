"""Positions to slots, for a whole batch on a CPU.

    out[j] = block_table[s, position // block_size] * block_size + position % block_size
    position = seq_lens[s] - query_start_loc[s + 1] + j, for the query rows j of sequence s

Exact, in int64. The rest of `out` becomes -1. O(num_tokens); nothing is written if a value breaks
the contract.
"""

from collections.abc import Callable
from functools import lru_cache

import numpy as np
from torch import Tensor

from backends.checks import check_slot_mapping
from backends.contract import Backend
from backends.errors import InvalidArgumentError
from backends.numba_cpu.bits import at, jit
from backends.numba_cpu.schedule import FAULTS, SOURCE_DIGEST, check_batch

_NO_LIMIT = (1 << 31) - 1


@lru_cache(maxsize=1)
def _kernel(source_digest: int) -> Callable[..., tuple[int, int, int]]:
    """Compile for the sources with this digest; closing over it makes it part of the cache key."""

    @jit(cache=True)
    def fill(
        tensors: tuple[int, int, int, int],  # query_start_loc, seq_lens, block_table, out
        num_seqs: int,
        num_tokens: int,
        stride: int,  # of the tables
        max_blocks: int,
        block_size: int,
    ) -> tuple[int, int, int]:
        """(fault, sequence, value) as `check_batch`; fault 0: `out` is filled."""
        _ = source_digest
        starts = at(tensors[0], num_seqs + 1, np.int32(0))
        lengths = at(tensors[1], num_seqs, np.int32(0))
        tables = at(tensors[2], 1, np.int32(0))
        out = at(tensors[3], num_tokens, np.int64(0))
        window = 1  # of the keys a query sees, only its own matters here
        found = check_batch(
            starts, lengths, tables, stride, max_blocks, block_size, _NO_LIMIT + 1, num_tokens,
            window, (_NO_LIMIT, _NO_LIMIT),
        )  # fmt: skip
        if found[0]:
            return found
        for s in range(num_seqs):
            for j in range(starts[s], starts[s + 1]):
                position = np.int64(lengths[s]) - starts[s + 1] + j
                block_id = np.int64(tables[s * stride + position // block_size])
                out[j] = block_id * block_size + position % block_size
        for j in range(starts[num_seqs], num_tokens):
            out[j] = -1
        return found

    return fill


def compute_slot_mapping(
    backend: Backend,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    block_size: int,
    out: Tensor,
) -> None:
    """Fill `out` with the slots of the new tokens; see `Backend.compute_slot_mapping`.

    Raises:
        InvalidArgumentError: a shape, dtype, device or value breaks the contract; nothing written.
    """
    check_slot_mapping(backend, query_start_loc, seq_lens, block_table, block_size, out)
    tensors = (query_start_loc, seq_lens, block_table, out)
    fault, index, value = _kernel(SOURCE_DIGEST)(
        tuple([tensor.data_ptr() for tensor in tensors]),
        seq_lens.shape[0],
        out.shape[0],
        block_table.stride(0),
        block_table.shape[1],
        block_size,
    )
    if fault:
        wanted = (
            "",
            f"0 first, then ascending, to at most {out.shape[0]}",
            "at least the query length, and entries in block_table for it",
            "a block id, which is at least 0",
        )[fault]
        raise InvalidArgumentError(f"{FAULTS[fault]}[{index}]", wanted, str(value))
