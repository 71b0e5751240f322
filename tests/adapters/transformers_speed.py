"""What Transformers' continuous batching takes with its own attention and with a backend's.

`python -m tests.adapters.transformers_speed`, on a GPU with `--device cuda --network 0.6b`; random
weights, greedy. All sides in one process, in turns; each line is the least of its rounds.
"""

import argparse
import random
import warnings

import torch
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM, logging

from kvcore.adapters.transformers import install, uninstall
from tests.adapters.transformers_runs import ContinuousBatchingConfig, Run
from tests.bench.engine.networks import CONFIGS

SMALL = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
NETWORKS = {"small": SMALL, "0.6b": {name: CONFIGS["qwen3-0.6b"][name] for name in SMALL}}


def draw_prompts(options, vocabulary):
    """Half of each prompt is one of eight beginnings."""
    numbers = random.Random(0)

    def draw(count):
        return [numbers.randrange(1, vocabulary) for _ in range(count)]

    half = options.prompt // 2
    beginnings = [draw(half) for _ in range(8)]
    return [
        beginnings[n % 8] + draw(numbers.randrange(half // 2, half + 1))
        for n in range(options.requests)
    ]


def run(model, prompts, options, backend, *, ours, ahead=False):
    """One side's run; the stock attention's where no backend is named."""
    if ours:
        install(model, backend=backend)
    else:
        uninstall(model)
    config = ContinuousBatchingConfig(
        page_size=options.page,
        num_blocks=options.blocks,
        max_batch_tokens=options.batch_tokens,
        max_requests_per_batch=options.running,
        auto_switch_to_flash=False,
        use_async_batching=ahead or None,
    )
    generation = GenerationConfig(max_new_tokens=options.new, do_sample=False, eos_token_id=-1)
    generation.num_return_sequences = 1
    return Run(model, prompts, config, generation)


def main():
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--network", default="small", choices=NETWORKS)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--backend", default="auto")
    for name, number in (
        ("requests", 32), ("prompt", 512), ("new", 16), ("running", 16), ("page", 16),
        ("blocks", 1200), ("batch-tokens", 512), ("rounds", 3), ("threads", 1),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=number)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    sizes = NETWORKS[options.network]
    with torch.device(options.device):
        model = Qwen3ForCausalLM(Qwen3Config(**sizes)).to(getattr(torch, options.dtype)).eval()
    model.generation_config.eos_token_id = -1
    prompts = draw_prompts(options, sizes["vocab_size"])
    sides = {
        "stock": {"backend": None, "ours": False},
        "kvcore": {"backend": None, "ours": True},
        f"kvcore, {options.backend}": {"backend": options.backend, "ours": True},
    }
    if options.device != "cpu":
        ahead = {"backend": options.backend, "ours": True, "ahead": True}
        sides[f"kvcore, {options.backend}, ahead"] = ahead
    found = {name: [] for name in sides}
    for side in sides.values():
        if side["backend"] is not None:
            run(model, prompts, options, **side)  # compiles
    for _ in range(options.rounds):
        for name, side in sides.items():
            found[name].append(run(model, prompts, options, **side))
    for name, runs in found.items():
        first = found["stock"][0].tokens
        tokens = sum(map(len, first.values()))
        same = sum(runs[0].tokens[key] == first[key] for key in first)
        wall, cpu = min(made.wall_s for made in runs), min(made.cpu_s for made in runs)
        print(
            f"{name:24} {tokens / wall:9.1f} tokens/s  {wall:7.2f} s, {cpu:7.2f} s CPU  computed "
            f"{runs[0].computed:7}  gave way {runs[0].starved:4}  same {same} of {len(first)}"
        )


if __name__ == "__main__":
    main()
