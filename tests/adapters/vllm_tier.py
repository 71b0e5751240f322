"""vLLM's whole engine on the tiny network with kvcore's disk tier, and without: same tokens?

`python -m tests.adapters.vllm_tier` in an environment with vLLM 0.32. Two hundred requests of
`vllm_engine.py`: shared beginnings, tenants by `cache_salt`, greedy, in chunks, with so few blocks
and so little host memory that most of a prefix has left both when it comes again. Six processes,
one after the other: without a tier, with one on an empty folder, with one on the folder that the
second has left, with one after a bit was flipped in every twentieth KiB of it, and one that is
killed in the middle, after which another serves. It exits with 1 where tokens differ, where the
third finds nothing, or the fourth no fault. `--network`: see `vllm_engine.py`. On a CPU the worker
of `vllm_tier_worker.py` copies in the place of vLLM's, which wants a GPU.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from hashlib import sha256
from pathlib import Path

from tests.adapters.vllm_engine import ROOT, make_windows, requests

CAPACITY = 256 << 20


def serve(options):
    """Run one engine in this process and print what came of it."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    tier = {
        "type": "kvcore",
        "module_path": "kvcore.adapters.vllm_tier",
        "path": str(options.folder),
        "capacity": options.capacity,
    }
    transfer = KVTransferConfig(
        kv_connector="OffloadingConnector",
        kv_role="kv_both",
        kv_connector_extra_config={
            "spec_name": "OnCpu",
            "spec_module_path": "tests.adapters.vllm_tier_worker",
            "cpu_bytes_to_use": options.host_bytes,
            "blocks_per_chunk": options.blocks_per_chunk,
            "secondary_tiers": [tier],
        },
    )
    llm = LLM(
        str(options.model), dtype="float32", block_size=32, enforce_eager=True,
        num_gpu_blocks_override=options.blocks, max_num_seqs=16, max_num_batched_tokens=512,
        max_model_len=1024, disable_log_stats=False, gpu_memory_utilization=0.2, seed=0,
        skip_tokenizer_init=True, kv_transfer_config=transfer if options.folder else None,
    )  # fmt: skip
    tokens = []
    work = list(requests(options.requests, seed=7))
    for start in range(0, len(work), options.at_once):
        some = work[start : start + options.at_once]
        answers = llm.generate(
            [prompt for prompt, _ in some],
            [SamplingParams(**params, detokenize=False) for _, params in some],
            use_tqdm=False,
        )
        tokens += [list(answer.outputs[0].token_ids) for answer in answers]
        print("SERVED", len(tokens), flush=True)
    told = {
        "different": len(set(map(tuple, tokens))),
        "tokens": sha256(json.dumps(tokens).encode()).hexdigest()[:12],
        "written": sum(map(len, tokens)),
    }
    metrics = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    told["hits"] = metrics["vllm:prefix_cache_hits"]
    told["external_hits"] = metrics.get("vllm:external_prefix_cache_hits")
    if options.folder:
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        manager = scheduler.connector.connector_scheduler.manager
        stats = manager.secondary_tiers[0].disk.stats
        told |= {
            "records": stats.num_records, "stored": stats.num_stored, "read": stats.num_hits,
            "used_bytes": stats.used_bytes, "faults": dict(stats.faults),
        }  # fmt: skip
    print("RESULT", json.dumps(told), flush=True)
    llm.llm_engine.engine_core.shutdown()


def run(options, folder, *, kill_after=None):
    """Run one engine in a process of its own; return what it has printed, None if killed."""
    arguments = ["--serve", "--requests", str(options.requests), "--blocks", str(options.blocks)]
    arguments += ["--host-bytes", str(options.host_bytes), "--at-once", str(options.at_once)]
    arguments += ["--blocks-per-chunk", str(options.blocks_per_chunk)]
    arguments += ["--capacity", str(options.capacity), "--model", str(options.model)]
    arguments += ["--folder", str(folder)] if folder else []
    told = os.environ | {
        "VLLM_PLUGINS": "",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "PYTHONPATH": str(ROOT),
    }
    lines = []
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            [sys.executable, "-m", "tests.adapters.vllm_tier", *arguments],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True, env=told,
        ) as process,
    ):  # fmt: skip
        for line in process.stdout:
            lines.append(line)
            if kill_after and line.startswith("SERVED") and int(line.split()[1]) >= kill_after:
                process.kill()
                return None
        if process.wait():
            errors.seek(0)
            raise SystemExit("".join(lines)[-2000:] + errors.read()[-4000:])
    [result] = [line for line in lines if line.startswith("RESULT ")]
    return json.loads(result.removeprefix("RESULT "))


def flip_bits(folder):
    """Damage records of every segment."""
    for segment in folder.rglob("*.kvseg"):
        data = bytearray(segment.read_bytes())
        for place in range(10_000, len(data), 20 << 10):
            data[place] ^= 16
        segment.write_bytes(data)


def compare(options, folder):
    """Run all engines; return what each has printed."""
    options.model = ROOT / "model" / "tiny"
    if options.network == "windows":
        options.model = folder / "windows"
        make_windows(options.model)
    found = {"without": run(options, None), "first": run(options, folder / "tier")}
    found["after a restart"] = run(options, folder / "tier")
    flip_bits(folder / "tier")
    found["after bits flipped"] = run(options, folder / "tier")
    run(options, folder / "other", kill_after=options.requests // 2)
    found["after a kill"] = run(options, folder / "other")
    return found


def main():
    made = argparse.ArgumentParser(prog="python -m tests.adapters.vllm_tier", description=__doc__)
    made.add_argument("--requests", type=int, default=200)
    made.add_argument("--blocks", type=int, default=70)
    made.add_argument("--blocks-per-chunk", type=int, default=1)
    made.add_argument("--host-bytes", type=int, default=8 << 20)
    made.add_argument("--at-once", type=int, default=20)
    made.add_argument("--capacity", type=int, default=CAPACITY)
    made.add_argument("--network", default="tiny", choices=["tiny", "windows"])
    made.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    made.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    made.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = made.parse_args()
    if options.serve:
        return serve(options)
    with tempfile.TemporaryDirectory() as folder:
        found = compare(options, Path(folder))
    for name, result in found.items():
        print(f"{name}: {json.dumps(result)}", flush=True)
    same = len({result["tokens"] for result in found.values()}) == 1
    again = found["after a restart"]
    is_found = again["external_hits"] > found["first"]["external_hits"] and again["read"] > 0
    is_seen = found["after bits flipped"]["faults"].get("corrupted", 0) > 0
    print("the same tokens" if same else "OTHER TOKENS")
    print("flipped bits were seen" if is_seen else "NO FLIPPED BIT WAS SEEN")
    print("found after the restart" if is_found else "NOTHING FOUND AFTER THE RESTART")
    return int(not (same and is_found and is_seen))


if __name__ == "__main__":
    sys.exit(main())
