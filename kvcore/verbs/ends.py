"""The known ends of cached content that a look-up shows (`kvcore.tables.ends`).

A prompt learns the lengths at which cached content branches off its tokens. If it goes on from a
hit, the ends before that one are older turns of the same text, and no longer expected to be hit:
the blocks that only they need are reused first. Where content branches off, the end stays known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from kvcore.block import Block
from kvcore.content_tree import find_pieces
from kvcore.pool import BlockPool
from kvcore.sequence import KVSequence
from kvcore.tables.block_table import BlockTable
from kvcore.tables.ends import Ends, is_within, windows_of
from kvcore.tables.state_table import StateTable
from kvcore.verbs.states import only_branches_of_states


@final
class Sight:
    """The cached content along a prompt, as a look-up has seen it.

    Attributes:
        branches: the lengths at which the cached content of a group goes on otherwise.
        paths: for each layer group the block of every node along the prompt, None where it has
            none.
        older: the blocks that only ends before the hit need.
        is_resumed: True if the request was preempted: it goes on from where that was.
    """

    __slots__ = ("branches", "is_resumed", "older", "paths")

    def __init__(self, *, is_resumed: bool = False) -> None:
        self.is_resumed = is_resumed
        self.branches: list[int] = []
        self.paths: list[list[Block | None]] = []
        self.older: list[Block] = []

    def add(self, path: list[Block | None], longest: int, size: int) -> None:
        """Add the path of the next layer group, of which `longest` tokens were looked for. O(1)."""
        if len(path) < longest // size and _goes_on(path[-1]):
            self.branches.append(len(path) * size)
        self.paths.append(path)


def first_ends(pool: BlockPool, num_tokens: int, boundaries: Sequence[int], recompute: int) -> Ends:
    """Return the known ends of a new sequence of `num_tokens` tokens. O(boundaries)."""
    ends = Ends(pool.common_size, recompute, pool.idle_blocks.num_ends)
    for end in [*boundaries, num_tokens - (recompute == 0)]:
        ends.expect(min(end, num_tokens))
    return ends


def learn_ends(pool: BlockPool, seq: KVSequence, sight: Sight, cached: int) -> None:
    """Add the ends that a look-up has found to those of its sequence. O(blocks of the prefix).

    The hit has `cached` tokens. Changes nothing in the pool.
    """
    ends = seq.ends
    if ends is None:
        return
    ends.num_ended = 0 if sight.is_resumed else _num_ended(seq.tables, sight.paths)
    for end in sight.branches:
        ends.branch(end)
    if not cached:
        return
    only_branches = pool.idle_blocks.only_branches
    for number, table in enumerate(seq.tables):
        path = sight.paths[number]
        place = cached // table.block_size
        if _parts(path, place, ends.recompute):
            ends.branch(cached)
        if table.forgets:
            first = table.first_kept(cached)
            for before in range(first + 1, place):
                if _branches(path[before - 1]):
                    ends.branch(before * table.block_size)
            windows = windows_of(table, ends, only_branches=only_branches)
            sight.older += _superseded(table, ends, path[:first], windows)
    if seq.state is not None:
        only_branches = only_branches_of_states(pool, seq)
        lengths = ends.lengths(only_branches=only_branches)
        _add_older_states(seq.tables, seq.state, sight, cached, lengths)


def _num_ended(tables: Sequence[BlockTable], paths: list[list[Block | None]]) -> int:
    """Return `Ends.num_ended`, by a group that sees all of the prefix if it can. O(groups)."""
    whole = 0
    for number, table in enumerate(tables):
        if not table.forgets:
            whole = number
            break
    if whole >= len(paths) or not paths[whole]:
        return 0
    return -1 if _goes_on(paths[whole][-1]) else 1


def _add_older_states(
    tables: Sequence[BlockTable],
    state: StateTable,
    sight: Sight,
    cached: int,
    lengths: Sequence[int],
) -> None:
    """Add the free states before a hit, but for those where content branches off, and at `lengths`.

    O(prefix * groups and lengths).
    """
    for place, block in enumerate(sight.paths[-1][: cached // state.block_size - 1]):
        end = (place + 1) * state.block_size
        if end in lengths or block is None or not _may_wait(block):
            continue
        if not _is_branch(tables, sight.paths, end):
            sight.older += find_pieces(block, state.group.num_blocks)


def _superseded(
    table: BlockTable,
    ends: Ends,
    path: Sequence[Block | None],
    windows: list[tuple[int, int]],
) -> list[Block]:
    """Return the free blocks of a window group that no end needs, before the window of a hit.

    `path` ends where that window begins; `windows` are those of the known ends.
    O(len(path), and blocks found * ends).
    """
    found: list[Block] = []
    reach = len(path)  # the first place that the last branch seen so far needs
    for place in range(len(path) - 1, -1, -1):
        block = path[place]
        if block is None:
            continue
        if _branches(block):
            reach = min(reach, table.first_kept(ends.last_hit((place + 1) * table.block_size)))
        if place < reach and _may_wait(block) and not is_within(windows, place):
            found.append(block)
    return found


def _is_branch(
    tables: Sequence[BlockTable], paths: Sequence[Sequence[Block | None]], num_tokens: int
) -> bool:
    """Return True if content of a group branches off after `num_tokens` of a path. O(groups)."""
    for number, table in enumerate(tables):
        if _branches(paths[number][num_tokens // table.block_size - 1]):
            return True
    return False


def _may_wait(block: Block) -> bool:
    """Return whether a block is free and does not go first already. O(1)."""
    return not block.ref_count and block.last_end >= 0


def _goes_on(last: Block | None) -> bool:
    """Return whether content follows that of the last node of a path. O(1).

    A node without a block is there for the sake of what follows.
    """
    node = None if last is None else last.node
    return node is None or node.has_children()


def _parts(path: list[Block | None], place: int, recompute: int) -> bool:
    """Return whether other content goes on where a hit of `place` blocks ends. O(len(path)).

    With `recompute` a hit ends before the cached content that the prompt goes on from, which is no
    other content.
    """
    if not recompute:
        return _goes_on(path[place - 1])
    for behind in range(place - 1, len(path) - 1):
        if _branches(path[behind]):
            return True
    return _goes_on(path[-1])


def _branches(block: Block | None) -> bool:
    """Return whether two contents or more follow that of a block. O(1)."""
    node = None if block is None else block.node
    return node is not None and node.children is not None
