"""LoRA adapters of the tiny model as PEFT writes them, with the tokens of PEFT's own `generate`."""

import copy
import json
from pathlib import Path

import pytest
import torch

from model.load.loader import load_model
from model.tiny import CHECKPOINT_DIR
from tests.model.networks import greedy_logits

peft = pytest.importorskip("peft")

PROMPTS = ("A tuple is", "A tuple is a list of", "The method returns the index of", "A tuple is")
TARGETS = {
    "attention": ["q_proj", "v_proj"],
    "all": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}
NUM_TOKENS = 12
Wanted = dict[str | None, list[list[int]]]
"""The tokens of each prompt, by the name of an adapter; None: without one."""


def write_adapters(place: Path) -> tuple[list[list[int]], Wanted]:
    """Write the adapters of `TARGETS` into folders of their names.

    Returns:
        The prompts in tokens, and what follows them.
    """
    model = load_model(str(CHECKPOINT_DIR), torch.device("cpu"))
    encoded = [model.codec.encode(text) for text in PROMPTS]
    wanted: Wanted = {None: [greedy_logits(model, prompt, NUM_TOKENS)[0] for prompt in encoded]}
    for seed, (name, targets) in enumerate(TARGETS.items()):
        torch.manual_seed(seed)
        config = peft.LoraConfig(
            r=4, lora_alpha=8, target_modules=targets, use_rslora=bool(seed),
            rank_pattern={"layers.1.self_attn.q_proj": 2},
            alpha_pattern={"layers.2.self_attn.q_proj": 3},
        )  # fmt: skip
        network = peft.get_peft_model(copy.deepcopy(model.network), config)
        for key, parameter in network.named_parameters():
            if "lora_" in key:
                parameter.data.normal_(std=0.3)
        network.save_pretrained(place / name)
        wanted[name] = [
            network.generate(
                input_ids=torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0,
            )[0, len(prompt) :].tolist()
            for prompt in encoded
        ]  # fmt: skip
    assert len({json.dumps(tokens) for tokens in wanted.values()}) == 3
    return encoded, wanted
