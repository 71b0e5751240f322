"""Chunked attention as a batch of shorter sequences.

Where a query sees only its chunk, each chunk acts like a separate text: its keys start at the start
of the chunk, and attention in it is causal and full. So a sequence becomes one sequence per chunk
that its new tokens touch, each with its part of the block table. Kernels need not know.

Decides: where the pieces start and end. Invariants: query rows keep their order, so the slots of
the step are those of its pieces; a block holds tokens of one chunk only, because a chunk is a
multiple of the block size (`CacheLayout.groups` refuses others).

Does not know: requests, block tables of other groups, devices.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import backends


def chunked_batch(
    table: NDArray[np.int32],
    starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    slot_mapping: Tensor,
    chunk: int,
    block_size: int,
) -> backends.PagedBatch:
    """Return a step's batch for layers with chunks. O(num_tokens / chunk + num_seqs) rows, new.

    Args:
        table: [num_seqs, at least the blocks of any sequence] of the group.
        starts: [num_seqs], the position of each sequence's first new token.
        lengths: [num_seqs], its tokens, the new ones included; at least one is new.
        slot_mapping: int64 [num_tokens] of the step.
        chunk: tokens, a multiple of `block_size`.
        block_size: tokens per block.
    """
    first = starts // chunk
    counts = (lengths - 1) // chunk - first + 1
    rows = np.repeat(np.arange(len(starts)), counts)
    places = np.arange(len(rows)) - np.repeat(counts.cumsum() - counts, counts)
    begins = (first[rows] + places) * chunk
    ends = np.minimum(lengths[rows], begins + chunk)
    new = ends - np.maximum(starts[rows], begins)
    seq_lens = ends - begins
    width = -(-int(seq_lens.max()) // block_size)
    entries = (begins // block_size)[:, None] + np.arange(width)
    tables = table[rows[:, None], np.minimum(entries, table.shape[1] - 1)]
    return backends.PagedBatch(
        query_start_loc=torch.from_numpy(np.append(0, new.cumsum()).astype(np.int32)),
        seq_lens=torch.from_numpy(seq_lens.astype(np.int32)),
        block_table=torch.from_numpy(np.ascontiguousarray(tables)),
        slot_mapping=slot_mapping,
        max_query_len=int(new.max()),
        max_seq_len=int(seq_lens.max()),
        kept={},
    )
