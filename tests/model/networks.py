"""Tiny random networks of several architectures, a byte codec, and what the dense network says."""

import copy
import random
import re
from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma2Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from model.engine import Engine
from model.forward.lora import Adapter, Product
from model.load.codec import plain_chat
from model.load.loader import LoadedModel, wrap_network

_COMMON: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,  # wide, so that the most likely token is so by far
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,  # tied, a large embedding scale repeats its input
}
_HYBRID = ["sliding_attention", "full_attention"]
_READERS: dict[str, Any] = {  # the last two layers read the keys and values of the first two
    **_COMMON,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": 2 * _HYBRID,
    "sliding_window": 7,
    "vocab_size_per_layer_input": 320,
    "hidden_size_per_layer_input": 16,
}

_DERIVED = {name: value for name, value in _COMMON.items() if name != "head_dim"} | {
    "hidden_size": 64  # so that a head has 16 as well
}

CONFIGS: dict[str, PreTrainedConfig] = {
    "qwen3": Qwen3Config(**_COMMON),
    "qwen2": Qwen2Config(**_DERIVED),
    "llama": LlamaConfig(**_COMMON),
    "mistral": MistralConfig(**_COMMON, sliding_window=7),
    "phi3": Phi3Config(**_DERIVED, sliding_window=7),
    "olmo2": Olmo2Config(**_DERIVED),
    "gemma2": Gemma2Config(
        **_COMMON,
        sliding_window=7,
        layer_types=_HYBRID,
        attn_logit_softcapping=2.0,
        query_pre_attn_scalar=24,
    ),
    "gemma3": Gemma3TextConfig(
        **_COMMON, sliding_window=7, layer_types=_HYBRID, query_pre_attn_scalar=24
    ),
    "gemma3n": Gemma3nTextConfig(
        **_READERS, laurel_rank=8, activation_sparsity_pattern=[0.9, 0.0, 0.9, 0.0]
    ),
    "gemma4": Gemma4TextConfig(**_READERS, global_head_dim=32),
    "gpt_oss": GptOssConfig(
        **_COMMON,
        sliding_window=7,
        layer_types=_HYBRID,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    ),
}


class ByteCodec:
    """One token a byte; ids from 256 on are no text."""

    chat_template = None
    model_type = ""

    def encode(self, text: str, *, adds_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def encode_chat(self, messages, *, opens_answer=True, options=None):
        return self.encode(plain_chat(messages, opens_answer=opens_answer))

    def begun_answer(self, messages, *, opens_answer=True, options=None):
        return ""

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode(errors="replace")

    def describe(self):
        shown = [*range(33, 127), *range(161, 173), *range(174, 256)]  # a byte-level alphabet
        hidden = [byte for byte in range(256) if byte not in shown]
        letters = {byte: chr(byte) for byte in shown}
        letters |= {byte: chr(256 + number) for number, byte in enumerate(hidden)}
        vocabulary = {letters[byte]: byte for byte in range(256)} | {"<end>": 256}
        tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens(["<end>"])
        return tokenizer.to_str()

    def open_step(self):
        return None


def build(architecture: str, seed: int = 0) -> LoadedModel:
    """A random network, in float32, the same for the same seed."""
    torch.manual_seed(seed)
    config = copy.deepcopy(CONFIGS[architecture])  # a network writes its attention into it
    network = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if name.endswith("sinks"):  # they begin at nothing that shows
                parameter.normal_(std=2.0)
    return wrap_network(architecture, network, ByteCodec())


def random_adapter(
    network: torch.nn.Module, name: str, seed: int, rank: int = 3, size: float = 0.3
) -> Adapter:
    """An adapter for all linear layers of a decoder, with weights that show."""
    random_numbers = torch.Generator().manual_seed(seed)
    products = {}
    for path, layer in network.named_modules():
        if isinstance(layer, torch.nn.Linear) and re.search(r"\.\d+\.", path):
            shapes = (rank, layer.in_features), (layer.out_features, rank)
            halves = [torch.randn(shape, generator=random_numbers) * size for shape in shapes]
            products[path] = Product(*[half.to(layer.weight) for half in halves])
    return Adapter(f"{name}=", name, seed, products)


def greedy_and_margin(
    model: LoadedModel, prompt: Sequence[int], num_tokens: int
) -> tuple[list[int], float]:
    """`generate`'s greedy tokens, and the least lead of a best logit over the second best."""
    tokens, logits = greedy_logits(model, prompt, num_tokens)
    top = logits.topk(2).values
    return tokens, float((top[:, 0] - top[:, 1]).min())


def greedy_logits(
    model: LoadedModel, prompt: Sequence[int], num_tokens: int
) -> tuple[list[int], torch.Tensor]:
    """`generate`'s greedy tokens, and their logits: [num_tokens, vocab_size]."""
    network = model.network
    current = network.config.get_text_config()._attn_implementation
    try:
        network.set_attn_implementation(model.dense_implementation)
    except ValueError:  # one that a part of the network, which makes no text, does not have
        network.set_attn_implementation("eager")
    output = network.generate(
        input_ids=torch.tensor([list(prompt)], device=network.device),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64, device=network.device),
        max_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    network.set_attn_implementation(current)
    return output.sequences[0, len(prompt) :].tolist(), torch.cat(output.logits)


def preempt_in_steps(engine: Engine, steps: set[int]) -> None:
    """Have the last of the running requests give way at the beginning of these steps.

    Once in each: a step that only swaps is not counted as one, so its number comes again.
    """
    scheduler, left = engine._scheduler, {*steps}
    plan_decodes = scheduler._plan_decodes

    def plan_fewer_decodes() -> None:
        if scheduler.stats.num_steps in left and scheduler.running:
            left.remove(scheduler.stats.num_steps)
            scheduler._preempt(scheduler.running[-1])
        plan_decodes()

    scheduler._plan_decodes = plan_fewer_decodes


class KnowingDrafter:
    """Proposes how texts go on that `generate` has written, spoilt now and then."""

    def __init__(self, texts, seed=0):
        self._texts = [[*text] for text in texts]
        self._draw = random.Random(seed)

    def propose(self, wanted):
        """Drafts of each request."""
        return [self._drafts([*request.tokens], most) for request, most in wanted]

    def discard(self, request):
        """Nothing is kept."""

    def _drafts(self, tokens, most):
        count = self._draw.randint(0, min(most, 5))
        for text in self._texts:
            if text[: len(tokens)] == tokens:
                drafts = text[len(tokens) : len(tokens) + count]
                return tuple(3 if self._draw.random() < 0.25 else token for token in drafts)
        return ()
