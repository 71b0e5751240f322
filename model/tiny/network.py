"""Decides the tiny network's shape, its optimizers, and how its quality is measured.

A Qwen3 of 1.9 million parameters: grouped query heads, tied embeddings, rotary positions. Matrices
inside the layers learn by Muon (K. Jordan, 2024, as `torch.optim.Muon`, torch >= 2.9), embeddings
and norms by AdamW. It does not know where the tokens come from.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW, Muon, Optimizer
from torch.utils.hooks import RemovableHandle
from transformers import Qwen3Config, Qwen3ForCausalLM

MAX_POSITIONS = 2048


def build_network(*, vocab_size: int, end_of_text_id: int) -> Qwen3ForCausalLM:
    """A network with random weights, float32, on the CPU."""
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=192,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=None,
        eos_token_id=end_of_text_id,
        pad_token_id=None,
        use_cache=True,
    )
    return Qwen3ForCausalLM(config)


def add_dropout(network: Qwen3ForCausalLM, share: float) -> list[RemovableHandle]:
    """Zero this share of the embeddings' and the MLPs' outputs while training.

    The architecture has no dropout of its own there, and a small corpus is soon known by heart.
    Remove the returned handles when the training is over.
    """

    def drop(module: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return functional.dropout(output, share, training=module.training)

    places = [network.model.embed_tokens, *(layer.mlp for layer in network.model.layers)]
    return [place.register_forward_hook(drop) for place in places]


def build_optimizers(network: nn.Module, *, rate: float) -> list[Optimizer]:
    """Muon at 2.5 times `rate` for the layers' matrices, AdamW at `rate` for the rest."""
    named = dict(network.named_parameters())  # tied weights appear once
    matrices = [p for name, p in named.items() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in named.items() if p.ndim != 2 or "embed" in name]
    return [
        Muon(matrices, lr=2.5 * rate, weight_decay=0.1, momentum=0.95),
        AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def next_token_loss(network: nn.Module, windows: Tensor) -> Tensor:
    """The mean cross entropy, in nats, of every token but the first given those before it.

    windows: int64 [batch, length].
    """
    logits = network(input_ids=windows[:, :-1], use_cache=False).logits
    return functional.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())


@torch.no_grad()
def bits_per_byte(network: nn.Module, tokens: Tensor, num_bytes: int, window: int) -> float:
    """The bits the network needs for each byte of the text that the tokens stand for.

    Every token but the very first is predicted once, from up to `window` tokens before it; the
    end-of-text tokens cost bits and count no bytes. tokens: int64 [num_tokens]. O(num_tokens).
    """
    nats = 0.0
    for start in range(0, len(tokens) - 1, window):
        piece = tokens[start : start + window + 1]
        nats += next_token_loss(network, piece[None]).item() * (len(piece) - 1)
    return nats / math.log(2) / num_bytes
