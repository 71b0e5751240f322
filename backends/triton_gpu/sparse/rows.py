"""The sequence of a query row, found by each program for itself.

In a batch of decode alone row t belongs to sequence t; other rows are found by bisection. Knows
lengths alone: neither caches nor scores.
"""

import triton.language as tl

from backends.triton_gpu.shared.place import device_function


@device_function
def find_row(
    query_start_loc: tl.tensor, seq_lens: tl.tensor, num_seqs: tl.tensor, row: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """(sequence, keys that the row sees); 0 keys if the row belongs to no sequence."""
    low = tl.minimum(row, num_seqs - 1)
    start = tl.load(query_start_loc + low)
    end = tl.load(query_start_loc + low + 1)
    is_own = (start == row) & (end == row + 1)
    high = tl.where(is_own, low + 1, num_seqs)
    low = tl.where(is_own, low, 0)
    while high - low > 1:
        middle = (low + high) // 2
        before = tl.load(query_start_loc + middle) <= row
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    end = tl.load(query_start_loc + low + 1)
    length = tl.load(seq_lens + low) - end + row + 1
    return low, tl.where(row < end, length, 0)
