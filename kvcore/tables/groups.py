"""Layer groups (KV cache groups): the positions that each kind of attention still needs.

Layers that see the same part of the past share one block table, their *group*. A group is full
attention (sees everything), a sliding window (the last `window` tokens, the query's own included)
or chunked local (the tokens of the query's own chunk). Layers that keep a recurrent state instead
of keys and values are a group of another kind, which `StateTable` describes. All groups share one
pool; their block sizes are multiples of the manager's.

A group is defined by `first_visible(position)`: the lowest position that a query at `position` or
later can see; `tables/block_table.py` writes it out where it has to be fast, so a new kind changes
both. It never falls as the position grows, so blocks below it can be released. A group
keeps its visible blocks and always the last full one, because the next content is its child in the
prefix tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import Final

from kvcore.arguments import as_int
from kvcore.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True)
class FullAttention:
    """Every layer of the group sees all tokens before it.

    Attributes:
        block_size: tokens a block; 0: the manager's.
    """

    block_size: int = 0

    def first_visible(self, position: int) -> int:  # noqa: ARG002  # the same for every position
        """Return the lowest position that a query at `position` or later can see. O(1)."""
        return 0


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """Every layer of the group sees the last `window` tokens, the query's own included.

    Attributes:
        window: tokens; at least 1.
        block_size: tokens a block; 0: the manager's.
    """

    window: int
    block_size: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "window", as_int("window", self.window, 1))

    def first_visible(self, position: int) -> int:
        """Return the lowest position that a query at `position` or later can see. O(1)."""
        return max(0, position - self.window + 1)


@dataclass(frozen=True, slots=True)
class ChunkedLocal:
    """Every layer of the group sees the tokens of the query's own chunk.

    Attributes:
        chunk: tokens; at least 1.
        block_size: tokens a block; 0: the manager's.
    """

    chunk: int
    block_size: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "chunk", as_int("chunk", self.chunk, 1))

    def first_visible(self, position: int) -> int:
        """Return the lowest position that a query at `position` or later can see. O(1)."""
        return position // self.chunk * self.chunk


@dataclass(frozen=True, slots=True)
class RecurrentState:
    """The layers of the group keep a state of all tokens so far, of a size that never grows.

    Linear attention, state space models and short convolutions. The states of all layers of one
    sequence fill `num_blocks` blocks; a hit of L tokens needs the state after exactly L tokens.

    Attributes:
        num_blocks: the blocks that one state of a sequence takes; at least 1.
        every: publish the state at each multiple of this number of tokens, too; 0: only at the
            ends of prompts, where prompts diverge, and at the boundaries given to `open`.
        block_size: tokens between two positions at which a state can be hit: the least common
            multiple of the block sizes of all other groups; 0: filled in by the manager.
    """

    num_blocks: int
    every: int = 0
    block_size: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_blocks", as_int("num_blocks", self.num_blocks, 1, 2**15))
        object.__setattr__(self, "every", as_int("every", self.every, 0))

    def first_visible(self, position: int) -> int:
        """Return `position`: of what lies before it only the state is read. O(1)."""
        return position


LayerGroup = FullAttention | SlidingWindow | ChunkedLocal | RecurrentState

NEVER: Final = 2**62
"""Larger than any number of tokens."""


def first_kept_block(group: LayerGroup, block_size: int, num_computed_tokens: int) -> int:
    """Return the first block that a group keeps after `num_computed_tokens` tokens. O(1).

    All blocks before it are invisible to later queries; the last full block always stays.
    """
    visible = group.first_visible(num_computed_tokens) // block_size
    return min(visible, max(0, num_computed_tokens // block_size - 1))


def serves(group: LayerGroup, place: int, common_size: int) -> bool:
    """Return whether any hit can use the block at a place of a group. O(1).

    A hit consists of whole blocks of every group, and longer hits see less of an early block.

    Args:
        group: its block size filled in.
        place: of a full block, from the beginning of the sequence.
        common_size: the least common multiple of all groups' block sizes.
    """
    end = (place + 1) * group.block_size
    next_hit = -(-end // common_size) * common_size
    return first_kept_block(group, group.block_size, next_hit) <= place


def resolve_groups(groups: Sequence[LayerGroup] | None, block_size: int) -> tuple[LayerGroup, ...]:
    """Return the groups with their block sizes; one group of full attention for None.

    Raises:
        InvalidArgumentError: no group with attention, an unknown kind, a block size that is no
            multiple, or a recurrent state that is not the last group.
    """
    if groups is None:
        return (FullAttention(block_size),)
    if not isinstance(groups, Sequence):
        raise InvalidArgumentError(
            f"groups: wanted a sequence of layer groups, got {type(groups).__name__}"
        )
    resolved: list[LayerGroup] = []
    for group in groups:
        if not isinstance(group, (FullAttention, SlidingWindow, ChunkedLocal, RecurrentState)):
            raise InvalidArgumentError(
                "groups: wanted FullAttention, SlidingWindow, ChunkedLocal or RecurrentState, "
                f"got {type(group).__name__}"
            )
        if resolved and isinstance(resolved[-1], RecurrentState):
            raise InvalidArgumentError(
                "groups: wanted at most one RecurrentState, as the last group; one state has the "
                "blocks of all layers that keep one"
            )
        if isinstance(group, RecurrentState):
            resolved.append(_resolve_state(group, resolved))
            continue
        size = as_int("block_size", group.block_size, 0, 2**20) or block_size
        if size % block_size:
            raise InvalidArgumentError(
                f"groups: wanted block sizes that are multiples of {block_size}, got {size}"
            )
        resolved.append(replace(group, block_size=size))
    if not resolved:
        raise InvalidArgumentError("groups: wanted at least one layer group, got none")
    return tuple(resolved)


def _resolve_state(group: RecurrentState, others: Sequence[LayerGroup]) -> RecurrentState:
    """Return the group with its block size, from the groups before it."""
    if not others:
        raise InvalidArgumentError("groups: wanted a group with attention before RecurrentState")
    common = lcm(*[other.block_size for other in others])
    if group.block_size not in (0, common):
        raise InvalidArgumentError(
            f"groups: wanted RecurrentState without a block size, or {common} as its, "
            f"got {group.block_size}"
        )
    if group.every % common:
        raise InvalidArgumentError(
            f"every: wanted a multiple of the block size of all groups, {common}, got {group.every}"
        )
    return replace(group, block_size=common)


def attention_groups(groups: Sequence[LayerGroup]) -> tuple[LayerGroup, ...]:
    """Return the groups that keep keys and values, which are the first ones."""
    return tuple([group for group in groups if not isinstance(group, RecurrentState)])


def state_group(groups: Sequence[LayerGroup]) -> RecurrentState | None:
    """Return the group that keeps recurrent states; None if there is none."""
    last = groups[-1]
    return last if isinstance(last, RecurrentState) else None
