"""Which neighbours of a batch have their first blocks in common: read once, they cost once.

Decides: the run of sequences whose shared tokens, each counted once less than there are sequences,
are most: what attention need not read again.

Invariants: what is told is true of every row of the run, and stays true while no row goes and none
comes, because the tables of running sequences only grow.

Does not know: tensors, requests; why a backend gains by it from there on.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Shared(NamedTuple):
    """A run of rows that begin with the same blocks.

    Attributes:
        first: row.
        rows: how many.
        entries: that all of their tables begin with.
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
    """From where on a backend gains by being told.

    Attributes:
        rows: at least.
        num_bytes: of a layer that need not be read again.
        bytes_a_row: beside these, for each row.
        token_bytes: of a layer.
    """

    rows: int
    num_bytes: int
    bytes_a_row: int
    token_bytes: int

    def is_reached(self, rows: int, num_tokens: int) -> bool:
        """Whether so many rows that share so many tokens are worth it. O(1)."""
        saved = (rows - 1) * num_tokens * self.token_bytes
        return rows >= self.rows and saved >= self.num_bytes + rows * self.bytes_a_row


def shared_run(table: NDArray[np.int32], filled: NDArray[np.int64]) -> Shared:
    """The run that saves most, the first of such; `NOTHING` if no neighbours share a block.

    O(rows + entries that neighbours have in common, and as many again).

    Args:
        table: [num_rows, at least as many entries as any row has].
        filled: [num_rows], the entries of each.
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
    """How many entries each row has in common with the next one, from the first on."""
    limits = np.minimum(filled[:-1], filled[1:])
    common = np.zeros(len(limits), np.int64)
    rows = np.flatnonzero((limits > 0) & (table[:-1, 0] == table[1:, 0]))
    common[rows] = 1
    rows = rows[limits[rows] > 1]
    at, step = 1, 8
    while len(rows):  # those that were equal so far, ever more entries at once
        piece = slice(at, at + step)
        differ = table[rows, piece] != table[rows + 1, piece]
        ends = np.where(differ.any(axis=1), differ.argmax(axis=1), differ.shape[1])
        common[rows] = np.minimum(at + ends, limits[rows])
        rows = rows[(ends == step) & (limits[rows] > at + step)]
        at, step = at + step, 2 * step
    return common
