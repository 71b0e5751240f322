"""Positions to slots, for a whole batch on a CPU.

    out[j] = block_table[s, position // block_size] * block_size + position % block_size
    position = seq_lens[s] - query_start_loc[s + 1] + j, for the query rows j of sequence s

Exact, in int64. The rest of `out` becomes -1. O(num_tokens); nothing is written if a value breaks
the contract.
"""

import numpy as np
from torch import Tensor

from backends.checks import check_slot_mapping
from backends.contract import Backend
from backends.errors import InvalidArgumentError
from backends.numba_cpu.bits import flat, jit
from backends.numba_cpu.schedule import FAULTS, Ints, Longs, check_batch

_NO_LIMIT = (1 << 31) - 1


@jit(cache=True)
def _fill(
    query_start_loc: Ints,  # [num_seqs + 1]
    seq_lens: Ints,  # [num_seqs]
    tables: Ints,  # flat [num_seqs, max_blocks]
    stride: int,
    block_size: int,
    out: Longs,  # [num_tokens]
) -> None:
    for s in range(seq_lens.size):
        for j in range(query_start_loc[s], query_start_loc[s + 1]):
            position = np.int64(seq_lens[s]) - query_start_loc[s + 1] + j
            block_id = np.int64(tables[s * stride + position // block_size])
            out[j] = block_id * block_size + position % block_size
    for j in range(query_start_loc[seq_lens.size], out.size):
        out[j] = -1


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
    starts, lengths, tables = flat(query_start_loc), flat(seq_lens), flat(block_table)
    fault, index, value = check_batch(
        starts,
        lengths,
        tables,
        block_table.stride(0),
        block_table.shape[1],
        block_size,
        _NO_LIMIT + 1,
        out.shape[0],
        1,  # of the keys a query sees, only its own matters here
        (_NO_LIMIT, _NO_LIMIT),
    )
    if fault:
        wanted = (
            "",
            f"0 first, then ascending, to at most {out.shape[0]}",
            "at least the query length, and entries in block_table for it",
            "a block id, which is at least 0",
        )[fault]
        raise InvalidArgumentError(f"{FAULTS[fault]}[{index}]", wanted, str(value))
    _fill(starts, lengths, tables, block_table.stride(0), block_size, flat(out))
