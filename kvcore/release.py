"""In which order a sequence gives its blocks back: the tails of all groups before the heads of any.

What is reused first is then what the fewest prefixes need. These functions name the blocks and cut
the tables; the pool counts and frees.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcore.block import Block
from kvcore.sequence import KVSequence


def blocks_tail_first(seq: KVSequence, num_tokens: int | None = None) -> list[Block]:
    """Return the blocks of a sequence in the order of release. O(num_blocks).

    Every one that it holds, or only those of its first `num_tokens` tokens.
    """
    runs: list[tuple[int, int, list[Block]]] = []
    for table in seq.tables:
        stop = len(table.blocks)
        if num_tokens is not None:
            stop = min(stop, -(-num_tokens // table.block_size))
        runs.append((table.num_null, table.block_size, table.blocks[table.num_null : stop]))
    return _tail_first(runs)


def leaving(seq: KVSequence, num_tokens: int) -> list[Block]:
    """Return every block that the first `num_tokens` tokens do not need, tail first.

    O(blocks returned).
    """
    if len(seq.tables) == 1:
        only = seq.tables[0]
        left = only.beyond(-(-num_tokens // only.block_size))
        left.reverse()
        return left
    runs: list[tuple[int, int, list[Block]]] = []
    for table in seq.tables:
        left = table.beyond(-(-num_tokens // table.block_size))
        runs.append((len(table.blocks) - len(left), table.block_size, left))
    return _tail_first(runs)


def cut_tables(seq: KVSequence, num_tokens: int) -> None:
    """Let what `leaving` returns, and the pool has got back, leave the tables. Cannot fail."""
    seq.room = seq.due = seq.stop = 0
    for table in seq.tables:
        table.cut(-(-num_tokens // table.block_size))


def _tail_first(runs: Sequence[tuple[int, int, list[Block]]]) -> list[Block]:
    """Order runs of blocks, (first place, block size, blocks) for each group, by where they end.

    The tails of all groups come before the heads of any: what is reused first is what the fewest
    prefixes need. Of blocks that end together that of the last group comes first. O(blocks).
    """
    found: list[Block] = runs[0][2][::-1]
    start, size = runs[0][0], runs[0][1]
    ends = [] if len(runs) == 1 else [(start + n) * size for n in range(len(found), 0, -1)]
    for first, width, blocks in runs[1:]:
        if blocks:
            found, ends = _merged(found, ends, first, width, blocks)
    return found


def _merged(
    one: list[Block], ends: list[int], first: int, size: int, blocks: list[Block]
) -> tuple[list[Block], list[int]]:
    """Merge blocks that end at `ends`, the last first, with the run of a later group. O(blocks)."""
    found: list[Block] = []
    found_ends: list[int] = []
    place = len(blocks)
    end = (first + place) * size
    for index, its_end in enumerate(ends):
        while place and end >= its_end:
            place -= 1
            found.append(blocks[place])
            found_ends.append(end)
            end -= size
        if not place:
            return found + one[index:], found_ends + ends[index:]
        found.append(one[index])
        found_ends.append(its_end)
    for left in range(place - 1, -1, -1):
        found.append(blocks[left])
        found_ends.append((first + left + 1) * size)
    return found, found_ends
