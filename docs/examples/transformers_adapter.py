"""kvcore inside Transformers: a random network of 100,000 weights, nothing to download."""

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from kvcore.adapters.transformers import PagedPool, install

torch.manual_seed(0)
sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
model = Qwen3ForCausalLM(
    Qwen3Config(**sizes, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
).eval()
model.generation_config = GenerationConfig(max_new_tokens=8, eos_token_id=511, pad_token_id=0)
prefix = list(range(100, 164))
prompts = [[*prefix, 200 + n] for n in range(6)]


def stock():
    """What Transformers writes by itself."""
    return [
        model.generate(torch.tensor([prompt]), max_new_tokens=8)[0, 65:].tolist()
        for prompt in prompts
    ]


def in_batches():
    """Continuous batching: one call installs kvcore, everything else is called as ever."""
    install(model)
    config = ContinuousBatchingConfig(page_size=16, num_blocks=64, max_requests_per_batch=2)
    outputs = model.generate_batch(
        prompts, continuous_batching_config=config, persistent_manager=True
    )
    manager = model.init_continuous_batching()  # the one that was kept
    stats = manager.batch_processor.cache.kv.stats()
    model.destroy_cached_continuous_batching_manager()
    print(f"generate_batch: {stats.num_hit_tokens} of {stats.num_queried_tokens} tokens hit")
    return [output.generated_tokens for output in outputs.values()]


def one_by_one():
    """Plain generate: each prompt opens a cache that has what the ones before it computed."""
    pool = PagedPool(model, num_blocks=64, block_size=16)
    texts = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with pool.open(ids) as cache:
            texts.append(model.generate(ids, past_key_values=cache, max_new_tokens=8)[0, 65:])
    stats = pool.kv.stats()
    print(f"generate: {stats.num_hit_tokens} of {stats.num_queried_tokens} tokens hit")
    pool.close()
    return [text.tolist() for text in texts]


if __name__ == "__main__":
    expected = stock()
    print("the same tokens:", in_batches() == expected, one_by_one() == expected)
