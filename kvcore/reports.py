"""What calls report beside their effect: plain values that nothing here changes afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import SupportsIndex

from kvcore.arguments import as_int
from kvcore.block import BlockId


@dataclass(frozen=True, slots=True)
class Plan:
    """What opening a sequence and reserving all its tokens would take now.

    Attributes:
        num_cached_tokens: tokens that would be found computed.
        num_new_blocks: blocks to be taken for the rest.
        num_revived_blocks: hits that nobody holds: they leave the free queue too.
        num_free_blocks: blocks free now.
        num_deferred_blocks: blocks that only leases still hold: free when those end.
    """

    num_cached_tokens: int
    num_new_blocks: int
    num_revived_blocks: int
    num_free_blocks: int
    num_deferred_blocks: int = 0

    @property
    def fits(self) -> bool:
        """Whether `open` and `reserve` of the whole sequence would succeed now."""
        return self.fits_above(0)

    def fits_above(self, watermark: SupportsIndex) -> bool:
        """Say whether it fits and leaves at least `watermark` blocks free for others. O(1).

        Raises:
            InvalidArgumentError: a negative number.
        """
        taken = self.num_new_blocks + self.num_revived_blocks
        return taken + as_int("watermark", watermark, 0) <= self.num_free_blocks


@dataclass(frozen=True, slots=True)
class CopyOrder:
    """KV that the caller has to copy before it writes to either block.

    Attributes:
        src: the block to copy from.
        dst: the block to copy to.
        num_tokens: how many tokens of it, from its beginning.
        group: the layer group that both belong to.
    """

    src: BlockId
    dst: BlockId
    num_tokens: int
    group: int


@dataclass(unsafe_hash=True, slots=True)  # frozen costs three times as much to make
class Growth:
    """Blocks that a step appended to one table.

    Attributes:
        index: which sequence of the step.
        group: which of its tables.
        block_ids: what was appended.
    """

    index: int
    group: int
    block_ids: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True)
class ResetReport:
    """What `reset` did, and what still is in use.

    Attributes:
        num_forgotten_blocks: blocks whose content cannot be hit any more.
        num_used_blocks: blocks that open sequences still hold.
        num_open_sequences: those sequences; they go on, and share nothing any more.
    """

    num_forgotten_blocks: int
    num_used_blocks: int
    num_open_sequences: int
