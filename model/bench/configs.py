"""Configurations of models that are worth timing, as numbers.

Decides: their names. Invariants: the sizes are those of the published models, so times are too.

Does not know: weights, Transformers.
"""

from collections.abc import Mapping
from typing import Any

CONFIGS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "nothing": (  # a network that takes no time: what is left is the host's work
        "qwen3",
        {
            "architectures": ["Qwen3ForCausalLM"],
            "vocab_size": 256,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "max_position_embeddings": 1 << 20,
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": None,
        },
    ),
    "qwen3-0.6b": (
        "qwen3",
        {
            "architectures": ["Qwen3ForCausalLM"],
            "vocab_size": 151_936,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40_960,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
            "tie_word_embeddings": True,
            "bos_token_id": 151_643,
            "eos_token_id": 151_645,
        },
    ),
    "qwen3-8b": (
        "qwen3",
        {
            "architectures": ["Qwen3ForCausalLM"],
            "vocab_size": 151_936,
            "hidden_size": 4096,
            "intermediate_size": 12_288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40_960,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
            "tie_word_embeddings": False,
            "bos_token_id": 151_643,
            "eos_token_id": 151_645,
        },
    ),
}
"""By name: a model type of Transformers, and the arguments of its configuration."""
