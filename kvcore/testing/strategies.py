"""Contents of requests: lengths at the edges of blocks, prompts that share prefixes, tenants.

Small alphabets on purpose: whole, half and missed hits must all be common, and blocks of equal
tokens must occur behind different prefixes.
"""

from __future__ import annotations

from functools import cache
from typing import Final

from hypothesis import strategies as st

TENANTS: Final = ("", "red", "blue")
"""Three tenants, one of them without a name; an adapter may map them to salts or to adapters."""


def lengths(block_size: int, max_blocks: int) -> list[int]:
    """Return the lengths of k blocks and -1, 0 or 1 tokens: where off-by-ones live. At least 1."""
    edges = (-1, 0, 1)
    found = {blocks * block_size + edge for blocks in range(max_blocks + 1) for edge in edges}
    return sorted(length for length in found if length > 0)


@cache
def prompts(
    block_size: int, max_blocks: int = 4, num_branches: int = 3
) -> st.SearchStrategy[list[int]]:
    """Return prompts that agree up to some position, in a block or at its edge, and then differ.

    Each is one choice among all, the shortest first, so that a failure shrinks well.

    Args:
        block_size: tokens a block.
        max_blocks: of the longest.
        num_branches: the number of different tokens after the fork.
    """
    every = {
        (0,) * fork + (branch,) * (length - fork)
        for length in lengths(block_size, max_blocks)
        for fork in [0, *lengths(block_size, max_blocks)]
        for branch in range(num_branches)
        if fork <= length
    }
    return st.sampled_from(sorted(every, key=lambda prompt: (len(prompt), prompt))).map(list)
