"""The known ends of a sequence: the lengths at which later prompts are expected to hit its prefix.

A window publishes every block that it fills, but a hit needs only the few blocks before its end. So
of the blocks that have left a window those that no known end needs are reused first, and so are
recurrent states at other lengths. Known ends are

- the own end of the sequence, at every moment: the last length up to which it can be hit;
- the lengths at which cached content branches off: where the cached prefix ended and other content
  goes on, and the same within the window that a hit has found;
- the end of the prompt, without its last token, which is never a hit, and the boundaries that the
  caller gives to `open`. They count unless nearly all prompts of late went on from where a sequence
  had ended, as chats do whose prompts repeat the answers: then they are room for one end of two.

A prompt that goes on where a cached sequence ended, as the next turn of a chat does, takes that
end's place: the end is none of the new sequence, so the blocks that it needed are reused first
once they leave the window. Of a prompt that others share the end stays known: content branches off
there.

Does not know which blocks are free, or in what order they are reused.
"""

from __future__ import annotations

from typing import Final, final

from kvcore.block import Block
from kvcore.tables.block_table import BlockTable

AT_ONCE: Final = 4
"""The number of blocks that leave a table's window before they are sorted: a decode step passes
one at a time, and to sort each alone would cost a fifth of the step."""


@final
class Ends:
    """The known ends of one sequence, but for its own.

    Attributes:
        unit: the least common multiple of the block sizes: a hit ends at a multiple of it.
        recompute: the number of last tokens of a cached prefix that are not hits.
        num_known: the number of ends that the pool knew when the sequence was opened.
        branches: the lengths at which cached content branches off.
        expected: the end of the prompt, and the boundaries that the caller has given.
        num_ended: 1 if the prompt goes on from where a sequence had ended, -1 if other content goes
            on there; 0 if nothing was cached, or it counts already.
    """

    __slots__ = ("branches", "expected", "num_ended", "num_known", "recompute", "unit")

    def __init__(self, unit: int, recompute: int, num_known: int) -> None:
        self.unit = unit
        self.recompute = recompute
        self.num_known = num_known
        self.branches: list[int] = []
        self.expected: list[int] = []
        self.num_ended = 0

    def branch(self, num_tokens: int) -> None:
        """Add the last end of at most `num_tokens` tokens, where content branches off. O(ends)."""
        end = num_tokens // self.unit * self.unit
        if end not in self.branches:
            self.branches.append(end)

    def expect(self, num_tokens: int) -> None:
        """Add the last end of at most `num_tokens` tokens, as it is expected. O(1)."""
        self.expected.append(num_tokens // self.unit * self.unit)

    def lengths(self, *, only_branches: bool) -> list[int]:
        """Return the lengths of the ends. O(ends)."""
        return self.branches if only_branches else self.branches + self.expected

    def last_hit(self, num_tokens: int) -> int:
        """Return the longest hit where `num_tokens` tokens are cached. O(1)."""
        end = num_tokens // self.unit * self.unit
        if self.recompute:
            end = max(0, end - self.recompute) // self.unit * self.unit
        return end


def sort_out(
    table: BlockTable, ends: Ends, num_settled: int, kept: int, *, only_branches: bool
) -> tuple[list[Block], list[Block], tuple[Block, ...]]:
    """Sort the blocks that have left a window by what needs them. O(those * ends).

    Args:
        table: the table before it forgets the blocks before `kept`; those are published.
        ends: the known ends of its sequence.
        num_settled: the number of settled tokens of the sequence.
        kept: the number of leading entries that no later query sees.
        only_branches: True if expected ends do not count.

    Returns:
        The blocks that a known end needs, those that none needs, and those that the own end of the
        sequence still needs, or may need.
    """
    gone = [*table.trailing, *table.before(kept)]
    known = trailing_blocks(table)
    first = table.num_null - len(known)
    stop = max(first, min(kept, table.first_kept(ends.last_hit(num_settled))))
    needed: list[Block] = []
    spare: list[Block] = []
    windows = windows_of(table, ends, only_branches=only_branches)
    for place in range(first, stop):
        block = gone[place - first]
        if place < table.num_null and known[place - first] is None:
            continue
        (needed if is_within(windows, place) else spare).append(block)
    return needed, spare, tuple(gone[stop - first :])


def windows_of(table: BlockTable, ends: Ends, *, only_branches: bool) -> list[tuple[int, int]]:
    """Return for each known end the first place that a hit there needs, and the one behind.

    O(ends).
    """
    size = table.block_size
    lengths = ends.lengths(only_branches=only_branches)
    return [(table.first_kept(ends.last_hit(end)), end // size) for end in lengths]


def is_within(windows: list[tuple[int, int]], place: int) -> bool:
    """Return whether one of the windows includes a place. O(windows)."""
    for start, stop in windows:  # noqa: SIM110  # a generator costs more
        if start <= place < stop:
            return True
    return False


def trailing_blocks(table: BlockTable) -> list[Block | None]:
    """Return the trailing blocks, None for those that hold other content now. O(those)."""
    found: list[Block | None] = []
    if table.trailing:
        node = table.blocks[table.num_null].node
        for block in reversed(table.trailing):
            node = None if node is None else node.parent
            found.append(None if node is None or block.node is not node else block)
        found.reverse()
    return found
