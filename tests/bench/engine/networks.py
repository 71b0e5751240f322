"""Networks with random weights: speed does not depend on what weights say, so none are needed."""

from functools import partial

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from model.load.architectures import check_architecture
from model.load.loader import load_config, load_model, wrap_network
from model.ranks.parallel import Sums, shard_network


def _qwen3(vocab_size, hidden, intermediate, layers, heads, kv_heads, head_dim, *, tied):
    return {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 1 << 20 if vocab_size == 256 else 40_960,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _qwen3_5(vocab_size, hidden, intermediate, layers, heads, kv_heads, head_dim, *, full_every):
    return {
        "model_type": "qwen3_5_text",
        "architectures": ["Qwen3_5ForCausalLM"],
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "layer_types": [
            "linear_attention" if (layer + 1) % full_every else "full_attention"
            for layer in range(layers)
        ],
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 262_144,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,
    }


CONFIGS = {
    "nothing": _qwen3(256, 16, 16, 1, 1, 1, 16, tied=True),  # what is left is the host's work
    "qwen3-0.6b": _qwen3(151_936, 1024, 3072, 28, 16, 8, 128, tied=True),
    "tiny-qwen3.5": _qwen3_5(256, 64, 64, 2, 2, 2, 32, full_every=2)
    | {f"linear_num_{part}_heads": 2 for part in ("key", "value")}
    | {f"linear_{part}_head_dim": 16 for part in ("key", "value")},
    "tiny-qwen3.5-attending": _qwen3(256, 64, 64, 2, 2, 2, 32, tied=True),
    "qwen3.5-4b": _qwen3_5(248_320, 2560, 9216, 32, 16, 4, 256, full_every=4),
    # Attention alone, with 3 % fewer weights.
    "qwen3.5-4b-attending": _qwen3(248_320, 2560, 9216, 32, 24, 4, 256, tied=True),
    "qwen3-8b": _qwen3(151_936, 4096, 12_288, 36, 32, 8, 128, tied=False),
}


class Wordless:
    """A codec of a network without a tokenizer: the text of a token is its number."""

    def encode(self, text, *, adds_special_tokens=True):
        raise ValueError(f"wanted token ids, dummy weights have no words; got {text!r}")

    def decode(self, tokens):
        return "".join(f" {token}" for token in tokens)

    def describe(self):
        """There is no tokenizer."""

    def open_step(self):
        """No piece changes another, so nothing is kept between them."""


def config_of(name):
    """The configuration of a name of `CONFIGS`, a folder or an id."""
    return AutoConfig.for_model(**CONFIGS[name]) if name in CONFIGS else load_config(name)


def load(name, device, dtype, ranks=None, *, dummy_weights):
    """Load a model, or draw the weights of a configuration, the same each time."""
    if not dummy_weights:
        return load_model(name, device, dtype, ranks)
    config = config_of(name)
    check_architecture(config)
    torch.manual_seed(0)
    with device:
        network = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if ranks is not None:
        shard_network(network, ranks, Sums(device, ranks))
    return wrap_network(name, network, Wordless(), ranks)


def loader(name):
    """What `start` calls for a model of this name; those of `CONFIGS` have no weights to read."""
    return partial(load, dummy_weights=name in CONFIGS)
