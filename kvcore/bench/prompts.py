"""Prompts: seeded random token ids, alone or with a shared beginning.

The same seed gives the same tokens on every machine. Contents never meet by chance: two prompts
share what they were made to share.
"""

from __future__ import annotations

import random
import sys
from array import array
from dataclasses import dataclass

from kvcore.bench.peer import TokenFormat, Tokens

VOCABULARY = 128_000


def seeded(seed: int) -> random.Random:
    """Return a generator of its own: nothing else draws from it."""
    return random.Random(seed)  # noqa: S311  # token ids, not secrets


def random_tokens(rng: random.Random, count: int) -> array[int]:
    """Return `count` token ids below `VOCABULARY`. O(count)."""
    raw = array("I")
    raw.frombytes(rng.randbytes(count * raw.itemsize))
    if sys.byteorder == "big":
        raw.byteswap()
    return array("I", [token % VOCABULARY for token in raw])


def in_format(tokens: array[int], wanted: TokenFormat) -> Tokens:
    """Return tokens in the form that a subject takes. O(len(tokens))."""
    return tokens if wanted == "packed" else tokens.tolist()


@dataclass(frozen=True, slots=True)
class SharedPrompts:
    """Prompts of one length that begin alike.

    Attributes:
        first: the prompt that puts the shared beginning into a cache.
        rounds: for each round, its prompts; after the beginning no two are alike.
        num_shared: tokens that all begin with.
    """

    first: array[int]
    rounds: list[list[array[int]]]
    num_shared: int

    def hits(self, block_size: int) -> int:
        """Return the tokens that each prompt after the first must hit, in whole blocks."""
        return min(self.num_shared, len(self.first) - 1) // block_size * block_size


def shared_prompts(
    rng: random.Random, length: int, percent: int, num_rounds: int, per_round: int
) -> SharedPrompts:
    """Return prompts of `length` tokens, the first `percent` % of them shared.

    With 100 % all prompts are the same. O(tokens in all).
    """
    num_shared = length * percent // 100
    shared = random_tokens(rng, num_shared)

    def prompt() -> array[int]:
        return shared + random_tokens(rng, length - num_shared)

    first = prompt()
    rounds = [[prompt() for _ in range(per_round)] for _ in range(num_rounds)]
    return SharedPrompts(first, rounds, num_shared)
