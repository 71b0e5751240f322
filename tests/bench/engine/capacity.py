"""`python -m tests.bench capacity`: how many requests of a hybrid model fit into a memory.

The layouts are those of published models; no weights are needed, and nothing is computed. Requests
come to the real allocator until one does not fit: prompts of a length, computed in chunks as an
engine does it, or conversations that end and leave the states at the ends of their prompts behind.
`--peer vllm` does the same with vLLM's own cache configuration and manager (prefix caching in the
mode "align"). All is counted: the same on every machine.
"""

import importlib
from typing import NamedTuple

import torch

import kvcore
from kvcore.adapters.recurrent import StateKey, StateShape
from model.caches.layout import LayerShape, plan_layout
from tests.bench.measure import Row, Spread

HEADINGS = {"capacity": "Requests and states of hybrid models that fit into a memory."}
CHUNK = 2048
KEPT_LENGTH = 2000
NUM_RUNNING = 64


class Layout(NamedTuple):
    """What the layers of a published model keep.

    Attributes:
        num_layers: with attention.
        heads: of keys and values; None: a latent.
        dim: of a head, or of a latent.
        num_recurrent: layers with a state.
        conv: the shape of the last inputs of a convolution, in bfloat16.
        recurrent: of the recurrent state, in float32; None: there is none.
    """

    num_layers: int
    heads: int | None
    dim: int
    num_recurrent: int
    conv: tuple[int, ...]
    recurrent: tuple[int, ...] | None


LAYOUTS = {  # from the config.json of each
    "Qwen3-Next-80B-A3B": Layout(12, 2, 256, 36, (8192, 3), (32, 128, 128)),
    "Qwen3.5-4B": Layout(8, 4, 256, 24, (8192, 3), (32, 128, 128)),
    "Kimi-Linear-48B-A3B": Layout(7, None, 576, 20, (12288, 3), (32, 128, 128)),
    "Nemotron-H-8B": Layout(4, 8, 128, 24, (10240, 3), (128, 64, 128)),
    "Bamba-9B": Layout(3, 8, 128, 29, (8448, 3), (128, 64, 128)),
    "LFM2-1.2B": Layout(6, 8, 64, 10, (2048, 2), None),
}


def add_flags(parser):
    parser.add_argument("--layout", choices=LAYOUTS, action="append")
    parser.add_argument("--gigabytes", type=float, default=80.0)
    parser.add_argument("--peer", action="append", default=[], choices=["vllm"])


def rows(options):
    engines = [Ours]
    if options.peer:
        engines.append(importlib.import_module("tests.bench.engine.capacity_vllm").Theirs)
    memory = int(options.gigabytes * 1e9) // (20 if options.quick else 1)
    for name in options.layout or LAYOUTS:
        for case, count in CASES.items():
            for make in engines:
                engine = make(LAYOUTS[name], memory)
                yield Row(
                    group="capacity",
                    case=f"{name}: {case}.",
                    subject=make.name,
                    unit="",
                    cost=Spread(*[float(count(engine))] * 3),
                    rates={"block size": engine.block_size, "blocks": engine.num_blocks},
                )


def running(engine, length):
    """The number of requests that run at once, each with its whole prompt computed."""
    count = 0
    while engine.begin(prompt(count, length)):
        count += 1
    return count


def kept(engine):
    """The tokens that the next turns of conversations hit, beside running requests."""
    for number in range(NUM_RUNNING):
        if not engine.begin(prompt(number, 8192)):
            return 0
    count = 0
    fits = True
    while fits and count < 20_000:
        fits = engine.begin(prompt(100_000 + count, KEPT_LENGTH), ends=True)
        count += fits
        if count % 64 == 0 and not engine.hits([*prompt(100_000, KEPT_LENGTH), 1]):
            break  # the first one is evicted: from now on each takes the place of another
    found = [engine.hits([*prompt(100_000 + n, KEPT_LENGTH), 1]) for n in range(count)]
    return sum(found)


CASES = {
    "requests of 8,192 tokens at once": lambda engine: running(engine, 8192),
    "requests of 12 tokens at once": lambda engine: running(engine, 12),
    f"tokens that the next turns of past conversations of {KEPT_LENGTH:,} tokens hit, beside "
    f"{NUM_RUNNING} running requests of 8,192": kept,
}


def prompt(number, length):
    """Tokens that no other prompt begins with."""
    return [number + 1] + [0] * (length - 1)


class Ours:
    """kvcore, laid out as the runner does it."""

    name = "kvcore"

    def __init__(self, layout, memory):
        value_dim = 512 if layout.heads is None else None
        shape = LayerShape(layout.heads or 1, layout.dim, torch.bfloat16, value_dim=value_dim)
        states = []
        for layer in range(layout.num_recurrent):
            number = layout.num_layers + layer
            states.append(StateShape(StateKey(number, "conv", 0), layout.conv, torch.bfloat16))
            if layout.recurrent is not None:
                key = StateKey(number, "recurrent", 0)
                states.append(StateShape(key, layout.recurrent, torch.float32))
        planned = plan_layout([shape] * layout.num_layers, states=states)
        self.block_size = planned.fitting_block_size(16)
        self.num_blocks = memory // planned.page_bytes(self.block_size)
        groups = planned.groups(self.block_size)
        self.kv = kvcore.KVCacheManager(self.num_blocks, self.block_size, groups=groups)

    def begin(self, tokens, *, ends=False):
        """Compute a prompt; says whether there was room."""
        seq = self.kv.open(tokens)
        try:
            while seq.num_computed_tokens < len(tokens):
                left = min(CHUNK, len(tokens) - seq.num_computed_tokens)
                count = self.kv.chunk_length(seq, left)
                self.kv.reserve(seq, count)
                self.kv.commit(seq, count)
        except kvcore.OutOfBlocksError:
            self.kv.close(seq)
            return False
        if ends:
            self.kv.close(seq)
        return True

    def hits(self, tokens):
        """How many tokens of a prompt are cached."""
        return self.kv.plan(tokens).num_cached_tokens
