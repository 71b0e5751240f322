"""The neighbours of a batch that share a prefix: attention reads it once for all of them.

Decides: the run of sequences with the most saved blocks (shared blocks times sequences minus one).

Invariants: the result holds for every row of the run, and stays true until a row comes or goes,
because the tables of running sequences only grow.

Does not know: tensors, requests, when a backend gains.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Shared(NamedTuple):
    """A run of rows that start with the same blocks.

    Attributes:
        first: row.
        rows: number of rows.
        entries: the number of shared table entries.
    """

    first: int
    rows: int
    entries: int

    @property
    def saved(self) -> int:
        """Blocks that need not be read again. O(1)."""
        return (self.rows - 1) * self.entries


NOTHING = Shared(0, 0, 0)


class Worth(NamedTuple):
    """The least saving for which a backend gains from a shared prefix.

    Attributes:
        rows: the least number of rows.
        num_bytes: the least number of saved bytes of a layer.
        bytes_a_row: plus this for each row.
        token_bytes: of a layer.
    """

    rows: int
    num_bytes: int
    bytes_a_row: int
    token_bytes: int

    def is_reached(self, rows: int, num_tokens: int) -> bool:
        """Return True if `rows` rows that share `num_tokens` tokens gain. O(1)."""
        saved = (rows - 1) * num_tokens * self.token_bytes
        return rows >= self.rows and saved >= self.num_bytes + rows * self.bytes_a_row


def shared_run(table: NDArray[np.int32], filled: NDArray[np.int64]) -> Shared:
    """Return the run that saves most, the first of equals; `NOTHING` if no blocks are shared.

    O(rows + shared entries).

    Args:
        table: [num_rows, at least the entries of any row].
        filled: [num_rows], the entries of each row.
    """
    best = NOTHING
    open_runs: list[tuple[int, int]] = []  # (first row, blocks), both rising
    common = _common_blocks(table, filled)
    for row, blocks in enumerate([*common.tolist(), 0]):
        first = row
        while open_runs and open_runs[-1][1] >= blocks:
            first, its = open_runs.pop()
            found = Shared(first, row + 1 - first, its)
            if (found.saved, -first) > (best.saved, -best.first):
                best = found
        if blocks:
            open_runs.append((first, blocks))
    return best


def _common_blocks(table: NDArray[np.int32], filled: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the number of leading entries that each row shares with the next."""
    limits = np.minimum(filled[:-1], filled[1:])
    common = np.zeros(len(limits), np.int64)
    rows = np.flatnonzero((limits > 0) & (table[:-1, 0] == table[1:, 0]))
    common[rows] = 1
    rows = rows[limits[rows] > 1]
    at, step = 1, 8
    while len(rows):  # rows that were equal so far; compare twice as many entries each time
        piece = slice(at, at + step)
        differ = table[rows, piece] != table[rows + 1, piece]
        ends = np.where(differ.any(axis=1), differ.argmax(axis=1), differ.shape[1])
        common[rows] = np.minimum(at + ends, limits[rows])
        rows = rows[(ends == step) & (limits[rows] > at + step)]
        at, step = at + step, 2 * step
    return common
