"""Networks of a few thousand random weights, for adapters to run in."""

import random

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.model.tiny_configs import make_config

VOCABULARY = 61
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 512,
}
WINDOW = 7


def network(kind, seed=0):
    """A decoder in float32: "full" attention alone, or "hybrid" with a sliding window."""
    if kind == "full":
        made = Qwen3ForCausalLM(Qwen3Config(**SIZES, num_hidden_layers=2))
    else:
        layers = ["sliding_attention", "full_attention", "sliding_attention"]
        config = Gemma3TextConfig(
            **SIZES, num_hidden_layers=3, sliding_window=WINDOW, layer_types=layers
        )
        made = Gemma3ForCausalLM(config)
    return draw_weights(made, seed)


def gemma_2(soft_cap, seed=0):
    """A Gemma 2 whose attention scores reach beyond its soft cap; None: it has no cap."""
    layers = ["sliding_attention", "full_attention"]
    config = Gemma2Config(
        **SIZES, num_hidden_layers=2, sliding_window=WINDOW, layer_types=layers,
        attn_logit_softcapping=soft_cap, query_pre_attn_scalar=SIZES["head_dim"],
    )  # fmt: skip
    made = Gemma2ForCausalLM(config)
    made.set_attn_implementation("eager")  # the one that Transformers wants for Gemma 2
    return draw_weights(made, seed)


def recurrent(kind):
    """A decoder with layers that keep a state: the smallest of a family of Transformers."""
    config = make_config(f"{kind}Config", "")
    if kind == "MiniMax":
        config.sliding_window = None  # as in those that are published
    torch.manual_seed(0)
    return draw_weights(AutoModelForCausalLM.from_config(config, dtype=torch.float32))


def draw_weights(made, seed=0):
    """The network with weights that set the best token far ahead of the second."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in made.parameters():
        if parameter.dim() > 1:  # larger than usual
            torch.nn.init.normal_(parameter, std=0.5, generator=generator)
    made.generation_config.pad_token_id = 0
    made.generation_config.bos_token_id = made.generation_config.eos_token_id = None
    return made.eval()


def draw_tokens(seed, count):
    """Token ids, none of them the padding's."""
    numbers = random.Random(seed)
    return [numbers.randrange(1, VOCABULARY) for _ in range(count)]
