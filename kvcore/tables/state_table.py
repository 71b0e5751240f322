"""The recurrent states of one sequence: which one a step reads, and where it writes the next.

A state is a list of blocks, its *pieces*: each holds the states of some layers, and together they
are what all layers have kept of the first tokens. Unlike KV a state cannot be cut or continued in
another block: a step reads the state after the computed tokens and writes the state after its own.

Invariants: a state that is published or has another holder is never written; then the step writes
to new blocks. The lists of a table are distinct objects where they are distinct blocks, and the
sequence holds each block once, whatever the roles of its list. All pieces of a state have the same
holders, so a look at the first one is enough.

The pieces of a published state are a chain in the content tree: the first one has the content of
the block that ends with its tokens, and each other one is the only child with a key of two bytes,
which no tokens have.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import final

from kvcore.block import PIECE_KEY_BYTES, Block
from kvcore.tables.block_table import BlockTable
from kvcore.tables.groups import NEVER, LayerGroup, RecurrentState, SlidingWindow, state_group


@final
class StateTable:
    """The states of one sequence.

    Attributes:
        group: the layer group.
        number: its place among the layer groups: the last.
        block_size: tokens between two positions at which a state can be hit.
        lookup: an empty table for look-ups: a prefix needs the last block of it, as for a sliding
            window of one token.
        read: the state after the computed tokens; empty if there are none: all zeros.
        write: the blocks of the state after the next step's tokens; the same list as `read` where
            it may replace it; empty: nothing is reserved.
        kept: a state at a boundary after the prompt, which is published when the sequence ends; it
            may be `read` too. Empty if there is none.
        kept_at: the number of its tokens.
        trailing_at: the number of tokens of a published state that the sequence does not hold any
            more, and after which it would be hit if it ended now; 0: there is none.
        wanted: the positions, in order, at which a state is published for other sequences.
        prompt: the number of tokens when the sequence was opened.
    """

    __slots__ = (
        "block_size",
        "group",
        "kept",
        "kept_at",
        "lookup",
        "number",
        "prompt",
        "read",
        "trailing_at",
        "wanted",
        "write",
    )

    def __init__(self, group: RecurrentState, number: int) -> None:
        self.group = group
        self.number = number
        self.block_size = group.block_size
        self.lookup = BlockTable(SlidingWindow(1, group.block_size))
        self.read: list[Block] = []
        self.write: list[Block] = []
        self.kept: list[Block] = []
        self.kept_at = self.trailing_at = 0
        self.wanted: list[int] = []
        self.prompt = 0

    def begin(self, num_tokens: int, num_cached: int, boundaries: Iterable[int]) -> None:
        """Set the positions at which states are published. O(boundaries).

        Args:
            num_tokens: the number of tokens of the prompt.
            num_cached: the number of them that need not be computed.
            boundaries: positions; the last multiple of the block size before each is meant. The
                end of the prompt, without its last token, is always among them.
        """
        size = self.block_size
        self.prompt = num_tokens
        ends = {min(end, num_tokens) // size * size for end in boundaries}
        ends.add((num_tokens - 1) // size * size)
        self.wanted = sorted([end for end in ends if end > num_cached])

    def is_wanted(self, num_tokens: int) -> bool:
        """Return whether the state after `num_tokens` tokens is to be published. O(log)."""
        every = self.group.every
        if every and num_tokens % every == 0:
            return True
        place = bisect_right(self.wanted, num_tokens)
        return place > 0 and self.wanted[place - 1] == num_tokens

    def next_stop(self, num_tokens: int) -> int:
        """Return the first position after `num_tokens` at which a state is wanted. O(log)."""
        place = bisect_right(self.wanted, num_tokens)
        stop = self.wanted[place] if place < len(self.wanted) else NEVER
        every = self.group.every
        if every:
            stop = min(stop, (num_tokens // every + 1) * every)
        return stop

    def next_kept(self, num_computed: int) -> int:
        """Return the next position whose state stays beside the one that is written then. O(log).

        Later ones need no further blocks.
        """
        stop = self.next_stop(num_computed)
        if is_writable(self.kept) and (self.write or self.kept is not self.read):
            return stop  # its blocks are written at the next boundary
        if self.kept is self.read and self.kept:
            return num_computed
        size = self.block_size
        return min(stop, -(-max(num_computed + 1, self.prompt) // size) * size)

    def room(self, num_computed: int) -> int:
        """Return how many tokens have room for their state after `num_computed` ones. O(1)."""
        return NEVER if self.write else num_computed

    def next_due(self, num_computed: int, num_known: int) -> int:
        """Return the next position at which a step does not just replace the state. O(log)."""
        if self.write and self.write is not self.read:
            return num_computed + 1
        if self.kept and self.kept_at > num_known:
            return self.kept_at
        size = self.block_size
        later = max(num_computed + 1, self.prompt)
        return min(self.next_stop(num_computed), -(-later // size) * size)

    def has_room(self) -> bool:
        """Return whether a step can write a state without a new block. O(1)."""
        return bool(self.write) or is_writable(self.read)

    def num_missing(self) -> int:
        """Return the number of blocks to take before a step can write a state. O(1)."""
        return 0 if self.has_room() else self.group.num_blocks

    def lists(self) -> list[list[Block]]:
        """Return the distinct states. O(1)."""
        found = [self.kept] if self.kept else []
        if self.read and self.read is not self.kept:
            found.append(self.read)
        if self.write and self.write is not self.read and self.write is not self.kept:
            found.append(self.write)
        return found

    def blocks(self) -> list[Block]:
        """Return every block of the table, the first to be released first. O(blocks)."""
        return [block for pieces in self.lists() for block in pieces]

    def forget(self) -> None:
        """Have no state, after the blocks were released. Cannot fail."""
        self.read = self.write = self.kept = []
        self.kept_at = self.trailing_at = 0


def new_states(groups: Sequence[LayerGroup]) -> StateTable | None:
    """Return an empty table for the last group if that one keeps states; otherwise None."""
    group = state_group(groups)
    return None if group is None else StateTable(group, len(groups) - 1)


def is_writable(pieces: list[Block]) -> bool:
    """Return whether a sequence that holds a state may write it again. O(1)."""
    return len(pieces) > 0 and pieces[0].ref_count == 1 and pieces[0].node is None


def piece_keys(num_blocks: int) -> list[bytes]:
    """Return the keys of the pieces after the first one in the content tree."""
    return [number.to_bytes(PIECE_KEY_BYTES, "big") for number in range(1, num_blocks)]
