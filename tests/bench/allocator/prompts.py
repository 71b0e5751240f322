"""Prompts: seeded random token ids, alone or with a shared beginning.

The same seed gives the same tokens on every machine. Contents never meet by chance: two prompts
share what they were made to share.
"""

import random
import sys
from array import array
from typing import NamedTuple

VOCABULARY = 128_000


def random_tokens(rng, count):
    """`count` token ids below `VOCABULARY`, packed. O(count)."""
    raw = array("I")
    raw.frombytes(rng.randbytes(count * raw.itemsize))
    if sys.byteorder == "big":
        raw.byteswap()
    return array("I", [token % VOCABULARY for token in raw])


def given(tokens, subject):
    """Packed tokens in the form that a subject's peer takes. O(len(tokens))."""
    return tokens if subject.peer.packed else tokens.tolist()


class SharedPrompts(NamedTuple):
    """Prompts of one length that begin alike; `first` puts the beginning into a cache."""

    first: array
    rounds: list
    num_shared: int

    def hits(self, block_size):
        """The tokens that each prompt after the first must hit, in whole blocks."""
        return min(self.num_shared, len(self.first) - 1) // block_size * block_size


def shared_prompts(seed, length, percent, num_rounds, per_round):
    """Prompts of `length` tokens, the first `percent` % shared; with 100 % all are the same."""
    rng = random.Random(seed)
    num_shared = length * percent // 100
    shared = random_tokens(rng, num_shared)

    def prompt():
        return shared + random_tokens(rng, length - num_shared)

    first = prompt()
    rounds = [[prompt() for _ in range(per_round)] for _ in range(num_rounds)]
    return SharedPrompts(first, rounds, num_shared)
