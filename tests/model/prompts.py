"""The four prompts that every architecture is tried with."""

import random

NUM_TOKENS = 20
NUM_SHARED = 21


def prompts() -> list[list[int]]:
    """Three share `NUM_SHARED` tokens; all but the last are longer than the window of 7."""
    draw = random.Random(0)
    shared = [draw.randrange(256) for _ in range(NUM_SHARED)]
    tails = [[draw.randrange(256) for _ in range(size)] for size in (1, 9, 14)]
    return [*(shared + tail for tail in tails), [draw.randrange(256) for _ in range(5)]]
