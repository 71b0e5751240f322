"""The sequence of a program's rows, if sequences have any numbers of rows."""

import triton.language as tl

from backends.triton_gpu.shared.place import device_function


@device_function
def sequence_of_tile(
    query_start_loc: tl.tensor, num_seqs: tl.tensor, tile: tl.tensor, TOKENS: tl.constexpr
) -> tl.tensor:
    """Return the last sequence whose first tile is at or before this one.

    The first tile of sequence s is `query_start_loc[s] // TOKENS + s`, so that each has room for
    its rows whatever comes before, and a grid needs num_rows // TOKENS + num_seqs programs.
    """
    low = tile * 0
    high = low + num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        before = tl.load(query_start_loc + middle) // TOKENS + middle <= tile
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    return low
