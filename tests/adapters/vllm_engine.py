"""vLLM's whole engine on a tiny network, with its own manager and with kvcore's: same tokens?

`python -m tests.adapters.vllm_engine` in an environment with vLLM. Two hundred and forty requests:
eight shared beginnings, four tenants by `cache_salt`, greedy, in chunks; once with
room for all, once with so few blocks that requests give way. Each side runs in a process of its
own, in turns; the time of `schedule()` is the least of the rounds. It exits with 1 where tokens
differ. `--network`: `tiny` is this project's model, `lora` the same with two adapters of random
weights; `windows` has random weights, and two layers in three see 96 tokens; `lfm2` too, and four
layers in six are short convolutions. `--alone` compares with vLLM's own tokens for each request by
itself, without prefix caching. kvcore is the one that is found first: a compiled one if the command
runs where that lies.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from hashlib import sha256
from itertools import cycle
from pathlib import Path

import kvcore

ROOT = Path(__file__).parents[2]
SHARED = 8
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
MADE = ("windows", "lfm2")
TENANTS = (None, "red", "blue", "green")


def requests(count, seed):
    """Prompts of 20 to 300 tokens: a shared beginning, and an end of their own."""
    dice = random.Random(seed)
    beginnings = [
        [dice.randrange(3, 2000) for _ in range(dice.randrange(64, 224))] for _ in range(SHARED)
    ]
    for number in range(count):
        own = [dice.randrange(3, 2000) for _ in range(dice.randrange(20, 80))]
        prompt = {"prompt_token_ids": [*dice.choice(beginnings), *own] if number % 5 else own}
        if salt := dice.choice(TENANTS):
            prompt["cache_salt"] = salt
        yield (
            prompt,
            {
                "max_tokens": dice.randrange(16, 80),
                "temperature": 0.0,
                "repetition_penalty": 1.0 + 0.1 * (number % 3),
                "ignore_eos": True,
            },
        )


def make_windows(folder):
    """Write a network of which two layers in three see 96 tokens."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        vocab_size=2048, hidden_size=64, intermediate_size=128, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, num_hidden_layers=3, sliding_window=96,
        max_position_embeddings=1024, query_pre_attn_scalar=32, dtype="float32",
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    save(Gemma3ForCausalLM(config), folder)


def make_lfm2(folder):
    """Write a network of which four layers in six are short convolutions."""
    from transformers import Lfm2Config, Lfm2ForCausalLM

    config = Lfm2Config(
        vocab_size=2048, hidden_size=64, intermediate_size=128, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=1024, num_hidden_layers=6,
        tie_word_embeddings=True, conv_L_cache=3, conv_dim=64, block_dim=64, dtype="float32",
        block_auto_adjust_ff_dim=False, bos_token_id=None, eos_token_id=None, pad_token_id=None,
        layer_types=["conv", "conv", "full_attention", "conv", "conv", "full_attention"],
    )  # fmt: skip
    save(Lfm2ForCausalLM(config), folder)


def save(made, folder):
    """Write a network with random weights, so large that what is read decides what is written."""
    import torch

    generator = torch.Generator().manual_seed(0)
    for parameter in made.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    made.save_pretrained(folder)


def make_eagle(folder):
    """Write an EAGLE draft model of random weights for the tiny model."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    shapes = {
        "fc": (192, 384), "self_attn.q_proj": (256, 192), "self_attn.k_proj": (128, 192),
        "self_attn.v_proj": (128, 192), "self_attn.o_proj": (192, 256),
        "mlp.gate_proj": (384, 192), "mlp.up_proj": (384, 192), "mlp.down_proj": (192, 384),
    }  # fmt: skip
    weights = {
        f"{'' if name == 'fc' else 'layers.0.'}{name}.weight":
            torch.randn(shape, generator=generator) * 0.1
        for name, shape in shapes.items()
    }  # fmt: skip
    weights["layers.0.post_attention_layernorm.weight"] = torch.ones(192)
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    tiny = json.loads((ROOT / "model" / "tiny" / "config.json").read_text())
    kept = ("hidden_size", "vocab_size", "rms_norm_eps", "max_position_embeddings", "head_dim")
    told = {name: tiny[name] for name in kept} | {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 384,
        "hidden_act": "silu", "tie_word_embeddings": True, "dtype": "float32",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(told))


def make_adapter(folder, seed):
    """Write a LoRA adapter of random weights for the tiny model."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    weights = {
        f"base_model.model.model.layers.{layer}.self_attn.{name}.lora_{side}.weight":
            torch.randn(shape, generator=generator) * 0.1
        for layer in range(4)
        for name, size in (("q_proj", 256), ("v_proj", 128))
        for side, shape in (("A", (8, 192)), ("B", (size, 8)))
    }  # fmt: skip
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    told = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "bias": "none",
            "target_modules": ["q_proj", "v_proj"]}  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(told))


def drafts_of(options):
    if options.drafts == "eagle":
        return {
            "method": "eagle",
            "model": str(options.folder / "eagle"),
            "num_speculative_tokens": 3,
        }
    return NGRAM if options.drafts else None


def serve(options):
    """Run one engine in this process and print what came of it."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.v1.core.sched.scheduler import Scheduler

    spent = []
    real = Scheduler.schedule

    def timed(scheduler, *args, **kwargs):
        begin = time.process_time()
        output = real(scheduler, *args, **kwargs)
        spent.append(time.process_time() - begin)
        return output

    Scheduler.schedule = timed
    has_adapters = options.network == "lora"
    model = options.folder if options.network in MADE else ROOT / "model" / "tiny"
    llm = LLM(
        str(model), dtype="float32", block_size=32, enforce_eager=True,
        num_gpu_blocks_override=options.blocks, max_num_batched_tokens=512,
        max_num_seqs=1 if options.alone else 64, max_model_len=1024, disable_log_stats=False,
        gpu_memory_utilization=0.2, async_scheduling=options.ahead, seed=0,
        enable_prefix_caching=not options.uncached,
        speculative_config=drafts_of(options),
        # The CPU's rotary_embedding of 0.32 gives head h of token t the position of token
        # t * heads + h, of another request perhaps, where queries have three dimensions: LFM2's.
        compilation_config={"custom_ops": ["all", "-rotary_embedding"]},
        skip_tokenizer_init=True, enable_lora=has_adapters, max_loras=3 if has_adapters else 1,
    )  # fmt: skip
    adapters = [None]
    if has_adapters:
        adapters += [LoRARequest(f"a{n}", n, str(options.folder / f"a{n}")) for n in (1, 2)]
    work = list(requests(options.requests, seed=7))
    spent.clear()
    answers = llm.generate(
        [prompt for prompt, _ in work],
        [SamplingParams(**params, detokenize=False) for _, params in work],
        lora_request=[one for one, _ in zip(cycle(adapters), work, strict=False)],
        use_tqdm=False,
    )
    tokens = [list(answer.outputs[0].token_ids) for answer in answers]
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    metrics = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    print("RESULT", json.dumps({
        "manager": type(scheduler.kv_cache_manager).__module__.split(".")[0],
        "compiled": kvcore.build == "compiled",
        "groups": len(scheduler.kv_cache_config.kv_cache_groups),
        "different": len(set(map(tuple, tokens))),
        "tokens": sha256(json.dumps(tokens).encode()).hexdigest()[:12],
        "written": sum(map(len, tokens)),
        "queried": metrics["vllm:prefix_cache_queries"],
        "hits": metrics["vllm:prefix_cache_hits"],
        "preemptions": metrics["vllm:num_preemptions"],
        "accepted": metrics.get("vllm:spec_decode_num_accepted_tokens", 0),
        "steps": len(spent),
        "schedule_us": 1e6 * sum(spent) / len(spent),
        "free": scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
    }))  # fmt: skip


def run(side, blocks, options, folder):
    """Run one side in a process of its own, and return what it has printed."""
    arguments = ["--serve", "--blocks", str(blocks), "--requests", str(options.requests)]
    arguments += ["--network", options.network, "--folder", str(folder)]
    arguments += ["--uncached"] if options.uncached or side == "alone" else []
    arguments += ["--alone"] if side == "alone" else []
    arguments += ["--ahead"] if options.ahead else []
    arguments += ["--drafts", options.drafts] if options.drafts else []
    done = subprocess.run(
        [sys.executable, "-m", "tests.adapters.vllm_engine", *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=900, check=False,
        env=os.environ | {
            "VLLM_PLUGINS": "kvcore" if side == "kvcore" else "",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "OMP_NUM_THREADS": "1",  # small matrices are no work for two
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        },
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-4000:])
    return json.loads(lines[-1].removeprefix("RESULT "))


def main():
    made = argparse.ArgumentParser(prog="python -m tests.adapters.vllm_engine", description=__doc__)
    made.add_argument("--blocks", type=int, nargs="+", default=[600, 70])
    made.add_argument("--requests", type=int, default=240)
    made.add_argument("--rounds", type=int, default=1)
    made.add_argument("--ahead", action="store_true", help="vLLM's asynchronous scheduling")
    made.add_argument("--uncached", action="store_true", help="without prefix caching")
    made.add_argument("--alone", action="store_true", help="vLLM's tokens of each by itself too")
    made.add_argument("--drafts", nargs="?", const="ngram", choices=["ngram", "eagle"])
    made.add_argument("--network", default="tiny", choices=["tiny", "lora", *MADE])
    made.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    made.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = made.parse_args()
    if options.serve:
        options.blocks = options.blocks[0]
        return serve(options)
    with tempfile.TemporaryDirectory() as folder:
        return compare(options, Path(folder))


def compare(options, folder):
    """Run both sides in turns; return whether their tokens differ."""
    if options.network == "windows":
        make_windows(folder)
    elif options.network == "lfm2":
        make_lfm2(folder)
    elif options.network == "lora":
        make_adapter(folder / "a1", 1)
        make_adapter(folder / "a2", 2)
    if options.drafts == "eagle":
        make_eagle(folder / "eagle")
    differ = False
    for blocks in options.blocks:
        found = {"alone": run("alone", blocks, options, folder)} if options.alone else {}
        for _ in range(options.rounds):
            for side in ("vllm", "kvcore"):
                result = run(side, blocks, options, folder)
                before = found.get(side, result)
                result["schedule_us"] = min(result["schedule_us"], before["schedule_us"])
                found[side] = result
        for side, result in found.items():
            print(f"{blocks} blocks, {side}: {json.dumps(result)}", flush=True)
        same = len({result["tokens"] for result in found.values()}) == 1
        differ |= not same or found["kvcore"]["manager"] != "kvcore"
        print(f"{blocks} blocks: {'the same tokens' if same else 'OTHER TOKENS'}", flush=True)
    return int(differ)


if __name__ == "__main__":
    sys.exit(main())
