"""vLLM's whole engine on the tiny model, with its own manager and with kvcore's: same tokens?

`python -m tests.adapters.vllm_engine` in an environment with vLLM. Two hundred and forty requests:
eight shared beginnings, four tenants by `cache_salt`, greedy, in chunks; once with
room for all, once with so few blocks that requests give way. Each side runs in a process of its
own, in turns; the time of `schedule()` is the least of the rounds. It exits with 1 where tokens
differ.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHARED = 8
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


def serve(options):
    """Run one engine in this process and print what came of it."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams
    from vllm.v1.core.sched.scheduler import Scheduler

    spent = []
    real = Scheduler.schedule

    def timed(scheduler, *args, **kwargs):
        begin = time.process_time()
        output = real(scheduler, *args, **kwargs)
        spent.append(time.process_time() - begin)
        return output

    Scheduler.schedule = timed
    llm = LLM(
        str(ROOT / "model" / "tiny"), dtype="float32", block_size=32, enforce_eager=True,
        num_gpu_blocks_override=options.blocks, max_num_seqs=64, max_num_batched_tokens=512,
        max_model_len=1024, disable_log_stats=False,
        gpu_memory_utilization=0.2, async_scheduling=options.ahead, seed=0,
    )  # fmt: skip
    work = list(requests(options.requests, seed=7))
    spent.clear()
    answers = llm.generate(
        [prompt for prompt, _ in work],
        [SamplingParams(**params) for _, params in work],
        use_tqdm=False,
    )
    tokens = [list(answer.outputs[0].token_ids) for answer in answers]
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    metrics = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    print("RESULT", json.dumps({
        "manager": type(scheduler.kv_cache_manager).__module__.split(".")[0],
        "tokens": sha256(json.dumps(tokens).encode()).hexdigest()[:12],
        "written": sum(map(len, tokens)),
        "queried": metrics["vllm:prefix_cache_queries"],
        "hits": metrics["vllm:prefix_cache_hits"],
        "preemptions": metrics["vllm:num_preemptions"],
        "steps": len(spent),
        "schedule_us": 1e6 * sum(spent) / len(spent),
        "free": scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
    }))  # fmt: skip


def run(side, blocks, options):
    """Run one side in a process of its own, and return what it has printed."""
    arguments = ["--serve", "--blocks", str(blocks), "--requests", str(options.requests)]
    arguments += ["--ahead"] if options.ahead else []
    done = subprocess.run(
        [sys.executable, "-m", "tests.adapters.vllm_engine", *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=900, check=False,
        env=os.environ | {
            "VLLM_PLUGINS": "kvcore" if side == "kvcore" else "",
            "VLLM_LOGGING_LEVEL": "WARNING",
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
    made.add_argument("--rounds", type=int, default=2)
    made.add_argument("--ahead", action="store_true", help="vLLM's asynchronous scheduling")
    made.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = made.parse_args()
    if options.serve:
        options.blocks = options.blocks[0]
        return serve(options)
    differ = False
    for blocks in options.blocks:
        found = {}
        for _ in range(options.rounds):
            for side in ("vllm", "kvcore"):
                result = run(side, blocks, options)
                before = found.get(side, result)
                result["schedule_us"] = min(result["schedule_us"], before["schedule_us"])
                found[side] = result
        for side, result in found.items():
            print(f"{blocks} blocks, {side}: {json.dumps(result)}", flush=True)
        same = found["vllm"]["tokens"] == found["kvcore"]["tokens"]
        differ |= not same or found["kvcore"]["manager"] != "kvcore"
        print(f"{blocks} blocks: {'the same tokens' if same else 'OTHER TOKENS'}", flush=True)
    return int(differ)


if __name__ == "__main__":
    sys.exit(main())
