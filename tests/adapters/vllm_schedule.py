"""What a step of vLLM's scheduler costs with its own manager and with kvcore's, without a network.

`python -m tests.adapters.vllm_schedule` in an environment with vLLM. Both schedulers run the same
requests in one process, in turns, and are given the same made-up tokens; a step's time is the least
of all rounds, and a case's is the sum over its steps. `schedule` is `schedule()` alone, `update` is
`update_from_output()` and `step` both; `arrival` is what `Request` and `add_request()` take: there
vLLM hashes. `--events` turns KV events on, on both sides; they are made and given to a publisher
that drops them.
"""

import argparse
import gc
import random
import time
from functools import cache
from pathlib import Path

import torch
from vllm.config import CacheConfig, KVEventsConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core import single_type_kv_cache_manager as kinds
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched import scheduler as module
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from kvcore.adapters.vllm.engine import Plugin

MODEL = Path(__file__).parents[2] / "model" / "tiny"
SHAPE = {"block_size": 16, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
FULL = FullAttentionSpec(**SHAPE)
WINDOW = SlidingWindowSpec(**SHAPE, sliding_window=128)
STATE = MambaSpec(16, ((4, 8),), (torch.float32,), mamba_cache_mode="align")
PLUGIN = Plugin()


def prompts(count, length, shared=0, seed=1):
    dice = random.Random(seed)
    begin = [dice.randrange(2000) for _ in range(shared)]
    return [begin + [dice.randrange(2000) for _ in range(length - shared)] for _ in range(count)]


# name: specs of groups, blocks, tokens a step, requests at once, prompts, tokens to write, ahead
CASES = {
    "decode": ([FULL], 20_000, 8192, 256, prompts(256, 100), 200, False),
    "decode, a step ahead": ([FULL], 20_000, 8192, 256, prompts(256, 100), 200, True),
    "prefill": ([FULL], 20_000, 2048, 64, prompts(128, 1500), 2, False),
    "hits": ([FULL], 20_000, 2048, 64, prompts(256, 1100, 1024), 4, False),
    "few blocks": ([FULL], 600, 2048, 64, prompts(64, 300), 100, False),
    "hybrid": ([FULL, WINDOW, WINDOW], 40_000, 2048, 128, prompts(128, 400), 150, False),
    "states": ([FULL, STATE, STATE], 40_000, 2048, 128, prompts(128, 400), 150, False),
    "states, hits": ([FULL, STATE], 40_000, 2048, 64, prompts(192, 1100, 1024), 4, False),
    "hybrid hits": ([FULL, WINDOW, WINDOW], 40_000, 2048, 64, prompts(192, 1100, 1024), 4, False),
}


@cache
def model_config():
    return ModelConfig(str(MODEL), dtype="float32", skip_tokenizer_init=True, max_model_len=2048)


def make(specs, num_blocks, budget, at_once, *, ahead, policy="fcfs", chunk=0, events=False):
    has_states = STATE in specs
    blocks = CacheConfig(block_size=16, enable_prefix_caching=True)
    blocks.num_gpu_blocks = num_blocks
    if has_states:
        blocks.mamba_cache_mode = "align"
    config = VllmConfig(
        model_config=model_config(),
        cache_config=blocks,
        scheduler_config=SchedulerConfig(
            max_num_seqs=at_once,
            max_num_batched_tokens=budget,
            max_model_len=2048,
            is_encoder_decoder=False,
            async_scheduling=ahead,
            policy=policy,
            long_prefill_token_threshold=chunk,
        ),
        kv_events_config=KVEventsConfig(enable_kv_cache_events=events, publisher="null"),
    )
    if hasattr(kinds, "register_all_kvcache_specs"):  # not in 0.22
        kinds.register_all_kvcache_specs(config)
    groups = [KVCacheGroupSpec([f"layer{n}"], spec) for n, spec in enumerate(specs)]
    return (AsyncScheduler if ahead else Scheduler)(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks, [], groups, **{"prefix_cache_retention_interval": 0} if has_states else {}
        ),
        block_size=16,
        log_stats=True,
        structured_output_manager=StructuredOutputManager(config),
    )


def run(case, *, events=False):
    """Run a case once with the manager that the module names now; return its times."""
    specs, num_blocks, budget, at_once, texts, written, ahead = case
    scheduler = make(specs, num_blocks, budget, at_once, ahead=ahead, events=events)
    hasher = None
    if scheduler.kv_cache_manager.__class__.__module__.startswith("vllm"):
        hasher = get_request_block_hasher(16, sha256)
    params = SamplingParams(max_tokens=written, ignore_eos=True, temperature=0.0)
    clock = time.process_time
    begin = clock()
    for number, tokens in enumerate(texts):
        scheduler.add_request(Request(str(number), tokens, params, None, block_hasher=hasher))
    arrival = clock() - begin
    schedule, update, hits, flying = [], [], [], []
    gc.collect()
    gc.disable()
    while scheduler.has_unfinished_requests() or flying:
        begin = clock()
        output = scheduler.schedule()
        schedule.append(clock() - begin)
        if output.total_num_scheduled_tokens:
            flying.append((output, answer(scheduler, output)))
            if ahead and len(flying) < 2:
                continue
        begin = clock()
        made = scheduler.update_from_output(*flying.pop(0))
        update.append(clock() - begin)
        stats = next(iter(made.values())).scheduler_stats if made else None
        hits.append(stats.prefix_cache_stats.hits if stats else 0)
    gc.enable()
    return {"schedule": schedule, "update": update, "arrival": [arrival], "hits": hits}


def answer(scheduler, output):
    """Make up what the network would have sampled, the same for both sides."""
    names = list(output.num_scheduled_tokens)
    tokens = []
    for name in names:
        request = scheduler.requests[name]
        sampled = (request.num_computed_tokens * 7 + len(name)) % 2000
        tokens.append([] if request.is_prefill_chunk else [sampled])
    return ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: place for place, name in enumerate(names)},
        sampled_token_ids=tokens,
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
    )


def main():
    made = argparse.ArgumentParser(
        prog="python -m tests.adapters.vllm_schedule", description=__doc__
    )
    made.add_argument("--rounds", type=int, default=5)
    made.add_argument("--case", nargs="+", default=list(CASES), choices=CASES)
    made.add_argument("--events", action="store_true")
    options = made.parse_args()
    init_none_hash(sha256)
    sides = {"vllm": PLUGIN.own_manager, "kvcore": PLUGIN.manager}
    print("us a step: vLLM -> kvcore, steps, hit tokens")
    for name in options.case:
        best = {}
        for _ in range(options.rounds):
            for side, manager in sides.items():
                module.KVCacheManager = manager
                found = run(CASES[name], events=options.events)
                old = best.setdefault(side, found)
                for key in ("schedule", "update", "arrival"):
                    old[key] = [min(pair) for pair in zip(old[key], found[key], strict=True)]
        report(name, best["vllm"], best["kvcore"])


def report(name, own, ours):
    parts = [f"{name:22}"]
    for label, keys in (
        ("schedule", ["schedule"]), ("update", ["update"]), ("step", ["schedule", "update"]),
        ("arrival", ["arrival"]),
    ):  # fmt: skip
        times = [
            1e6 * sum(sum(one[key]) for key in keys) / len(one[keys[0]]) for one in (own, ours)
        ]
        parts.append(f"{label} {times[0]:.0f} -> {times[1]:.0f} ({times[1] / times[0] - 1:+.0%})")
    parts.append(f"steps {len(own['schedule'])}, {len(ours['schedule'])}")
    parts.append(f"hits {sum(own['hits'])}, {sum(ours['hits'])}")
    print(*parts, sep="; ", flush=True)


if __name__ == "__main__":
    main()
