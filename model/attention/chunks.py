"""Attention in chunks, as a batch of shorter sequences.

Where a query sees its own chunk alone, a chunk is a text of its own: its keys begin where the chunk
does, and in it attention is causal over all. So a sequence goes to the kernels in as many pieces as
its new tokens touch chunks, each with the part of the block table that its chunk has. A kernel
knows nothing of it.

Decides: where pieces begin and end. Invariants: query rows stay in their order, so the slots of
the step are those of its pieces; a block holds tokens of one chunk alone, because chunks are whole
numbers of blocks (`CacheLayout.groups` refuses others).

Does not know: requests, tables of other groups, tensors' devices.
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
    """A step's batch for layers that see chunks. O(num_tokens / chunk + num_seqs) rows, new.

    Args:
        table: [num_seqs, at least as many as any has] of the group.
        starts: [num_seqs] the position of each sequence's first new token.
        lengths: [num_seqs] its tokens, the new ones included; at least one is new.
        slot_mapping: int64 [num_tokens] of the step.
        chunk: tokens, a multiple of `block_size`.
        block_size: tokens a block.
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
