"""Tiny networks with recurrent layers, and what `generate` says."""

import functools
import random

import backends
from model import EngineConfig
from model.engine import Engine
from tests.model.networks import greedy_logits
from tests.model.tiny_configs import make_config
from tests.model.walk import build_network

NUM_TOKENS = 16
KINDS = ("Qwen3_5TextConfig", "Lfm2MoeConfig", "FalconH1Config", "JambaConfig")
"""Gated delta attention, a convolution alone, state and attention in one layer, and a module that
continues from a state token by token."""


@functools.cache
def case(kind):
    """A network, and for each of some prompts with common beginnings the greedy tokens."""
    model = build_network(make_config(kind, ""), 1)
    draw = random.Random(5)
    base = [draw.randrange(300) for _ in range(70)]
    lengths = (0, 5, 16, 33, 40, 64, 70)
    texts = [
        base[:n] + [draw.randrange(300) for _ in range(draw.randrange(1, 20))] for n in lengths
    ]
    texts += [[*base[:33], 1], [*base[:33], 2, 3]]
    wanted = {tuple(text): greedy_logits(model, text, NUM_TOKENS)[0] for text in texts}
    for text in texts[:3]:  # a further turn
        longer = [*text, *wanted[tuple(text)], 7, 8]
        wanted[tuple(longer)] = greedy_logits(model, longer, NUM_TOKENS)[0]
    return model, wanted


def engine_of(kind, **sizes):
    """An engine with blocks as small as its states allow."""
    model, _ = case(kind)
    config = {"block_size": 4, "num_blocks": 200} | sizes
    return Engine(model, backends.get_backend("numba"), EngineConfig(**config))
