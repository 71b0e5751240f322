"""What requests are made of: lengths at the edges of blocks, prompts that share prefixes, tenants.

Small alphabets on purpose: whole, half and missed hits must all be common, and blocks of equal
tokens must occur behind different prefixes.
"""

from __future__ import annotations

from functools import cache
from typing import Final

from hypothesis import strategies as st

TENANTS: Final = ("", "red", "blue")
"""Three tenants, one of them without a name; an adapter may map them to salts or to adapters."""


@cache  # a strategy is checked when it is first drawn from, which costs more than a draw
def lengths(block_size: int, max_blocks: int) -> st.SearchStrategy[int]:
    """Return lengths of k blocks and -1, 0 or 1 tokens: where off-by-ones live. At least 1."""
    return st.builds(
        lambda blocks, edge: max(1, blocks * block_size + edge),
        st.integers(0, max_blocks),
        st.integers(-1, 1),
    )


@cache
def prompts(
    block_size: int, max_blocks: int = 4, num_branches: int = 3
) -> st.SearchStrategy[list[int]]:
    """Return prompts that agree up to some position, in a block or at its edge, and then differ.

    Args:
        block_size: tokens a block.
        max_blocks: of the longest.
        num_branches: how many different tokens there are after the fork.
    """
    return st.builds(
        lambda length, fork, branch: [0] * min(fork, length) + [branch] * max(0, length - fork),
        lengths(block_size, max_blocks),
        lengths(block_size, max_blocks) | st.just(0),
        st.integers(0, num_branches - 1),
    )
