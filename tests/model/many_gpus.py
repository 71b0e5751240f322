"""Measure several GPUs of one host: `python -m tests.model.many_gpus [--gpus N] [PART...]`.

Each part runs in processes of its own, with its own limit of time, so that a part that fails or
hangs loses nothing of the others. Every result is a line of JSON as soon as it is known.

- `sums`: all-reduces of many sizes against float64, and how long they take by our kernels (in one
  message and in two), by PyTorch's one-shot kernel and by NCCL.
- `tokens`: tokens of all ranks against those of one, with prefix cache hits, chunked prompts,
  preemption, draft tokens and host memory, for cut-down networks of every kind.
- `shapes`: the same for the shapes of an 8B network, of Qwen3-30B-A3B and of DeepSeek's latents,
  with fewer layers.
- `logits`: how far bfloat16 logits of one GPU and of all are from those of float32.
- `decode`: the speed of the 8B network on one GPU, on two and on all, batch 1 and 128.
- `experts`: the speed of Qwen3-30B-A3B on one GPU and on all, expert parallel, batch 256.
- `loss`: a rank is killed while the others load, make the engine, or run requests.

On a machine without GPUs everything runs on CPUs with small networks.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory as symmetric_memory
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel
from transformers.utils import logging

import backends
import model.ranks
from model import EngineConfig, SamplingParams
from model.async_engine import AsyncEngine
from model.cli.exits import leaves
from model.engine import Engine, TwinEngine, engine_of
from model.engine_core import Output
from model.errors import ModelError, RankLostError
from model.forward import cuda_graphs, warm_up
from model.load.loader import LoadedModel, load_model
from model.ranks import parallel
from model.ranks.parallel import check_cut
from model.ranks.ranks import Ranks, join_ranks
from model.tiny import CHECKPOINT_DIR
from tests.bench.engine import networks
from tests.model.ranks import cut_networks

_ROOT = Path(__file__).parents[2]
_BEGAN = float(os.environ.get("MANY_GPUS_BEGAN", time.time()))
_IS_GPU = torch.cuda.is_available()
_DEVICE = "cuda" if _IS_GPU else "cpu"
_DTYPE = torch.bfloat16 if _IS_GPU else torch.float32
_STEPS = 100 if _IS_GPU else 4
_NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
_QWEN3_MOE = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 151_936,
    "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "max_position_embeddings": 40_960, "rms_norm_eps": 1e-6, "num_experts": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
_DEEPSEEK = {
    "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "vocab_size": 129_280,
    "hidden_size": 2048, "intermediate_size": 4096, "num_hidden_layers": 4,
    "num_attention_heads": 32, "num_key_value_heads": 32, "n_routed_experts": 64,
    "num_experts_per_tok": 8, "moe_intermediate_size": 512, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "q_lora_rank": 512,
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "max_position_embeddings": 40_960, "tie_word_embeddings": False, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
networks.CONFIGS["qwen3-30b-a3b"] = _QWEN3_MOE
networks.CONFIGS["deepseek-latents"] = _DEEPSEEK
_LAYERS = {"qwen3-8b": 12, "qwen3-30b-a3b": 4, "deepseek-latents": 4}


def tell(part: str, **values: object) -> None:
    at = {"at_s": round(time.time() - _BEGAN, 1), "part": part}
    sys.stdout.write(f"{json.dumps({**at, **values})}\n")  # in one go: all processes write there
    sys.stdout.flush()


def wait_for_device() -> None:
    if _IS_GPU:
        torch.cuda.synchronize()


# Sums


def microseconds(run: Callable[[], object], count: int, times: int = 20) -> float:
    """Return the median time of one of `count` operations in a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            run()
    taken: list[float] = []
    for _ in range(times):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end))
    return round(1e3 * statistics.median(taken) / count, 2)


def sums(ranks: Ranks) -> None:
    made = parallel.Sums(torch.device(_DEVICE), ranks)
    if ranks.leads:
        tell("sums", ranks=ranks.size, shared_words=len(made._shared))
    if not _IS_GPU:
        is_right = made(torch.ones(8)).tolist() == [ranks.size] * 8
        if ranks.leads:
            tell("sums", is_right=is_right)
        return
    kernels = sum_kernels()
    group, own = made.group, (made._shared, ranks.rank, ranks.size)
    scratch = symmetric_memory.empty(8 << 20, dtype=_DTYPE, device=torch.device(_DEVICE))
    symmetric_memory.rendezvous(scratch, group)  # type: ignore[arg-type]  # a name is one
    are_right(ranks, made)
    usual = kernels._ONCE_BYTES
    for kib in (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 16384):
        part = torch.randn((kib << 10) // _DTYPE.itemsize, device=_DEVICE, dtype=_DTYPE)
        ways: dict[str, tuple[int, Callable[[], Tensor]]] = {
            "nccl": (0, partial(parallel._summed, part, group)),
            "torch": (0, partial(_torch_sum, scratch, part, group)),
        }
        if kib <= 4096:
            ways["twice"] = (0, partial(kernels.add_up, part, *own))
        if kib <= 512:
            ways["once"] = (1 << 40, partial(kernels.add_up, part, *own))
        found: dict[str, object] = {}
        for name, (once_bytes, way) in ways.items():
            kernels._ONCE_BYTES = once_bytes
            found[name] = microseconds(way, 50)
        kernels._ONCE_BYTES = usual
        if ranks.leads:
            tell("sums", ranks=ranks.size, KiB=kib, **found)


def sum_kernels() -> Any:  # Triton has no types
    return model.ranks.sum_kernels


def _torch_sum(scratch: Tensor, part: Tensor, group: str) -> Tensor:
    done: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(
        scratch[: part.numel()], part, "sum", group
    )
    return done


def are_right(ranks: Ranks, made: parallel.Sums) -> None:
    """Compare sums of many sizes and types, one behind the other, with those in float64."""
    wrong, draw = 0, torch.Generator().manual_seed(7)  # the same on every rank
    for number in range(600):
        dtype = (torch.bfloat16, torch.float16, torch.float32)[number % 3]
        count = int(torch.randint(1, 1 << (5 + number % 14), (1,), generator=draw)) * 32
        part = torch.randn(count, device=_DEVICE, dtype=dtype)
        got = made(part)
        exact = parallel._summed(part.double(), made.group)
        limit = 1e-5 if dtype == torch.float32 else 1e-2
        first = parallel._all_gather(got.reshape(1, -1), ranks.size, made.group)
        is_equal = bool((first == first[:1]).all())  # to the bit, on all ranks
        wrong += not (is_equal and float((got - exact).norm() / exact.norm()) < limit)
    if ranks.leads:
        tell("sums", ranks=ranks.size, wrong=wrong, of=600)


# Tokens


def load_shape(name: str, dtype: torch.dtype, layers: int, ranks: Ranks | None) -> LoadedModel:
    """Return a network with random weights."""
    fields = networks.CONFIGS[name]
    before = fields["num_hidden_layers"]
    fields["num_hidden_layers"] = layers
    try:
        model: LoadedModel = networks.load(
            name, torch.device(_DEVICE), dtype, ranks, dummy_weights=True
        )
    finally:
        fields["num_hidden_layers"] = before
    if ranks is not None:
        check_cut(model.network, ranks)
    return model


def tokens(ranks: Ranks) -> None:
    device = torch.device(_DEVICE)
    for kind in cut_networks.KINDS:
        compare(ranks, kind, partial(cut_networks.load, kind, device))
    if ranks.size <= 4:  # its heads
        few_graphs()

        def tiny(cut: Ranks | None) -> LoadedModel:
            return load_model(str(CHECKPOINT_DIR), device, torch.float32, cut)

        compare(ranks, "tiny", tiny)
        compare(ranks, "tiny", tiny, prepares=True)


def shapes(ranks: Ranks) -> None:
    for name, layers in _LAYERS.items():
        compare(ranks, name, partial(load_shape, name, torch.float32, layers))


def compare(ranks: Ranks, name: str, way: cut_networks.Load, *, prepares: bool = False) -> None:
    """Tell how many texts of all ranks equal those of one process, with drafts and without."""
    began, block_size = time.monotonic(), 16 if _IS_GPU else 4
    try:
        every = cut_networks.one_and_many(
            way, ranks, block_size, drafts=(True, False), prepares=prepares
        )
    except RankLostError:
        raise
    except Exception as error:  # noqa: BLE001  # the next network may run
        every = [{"error": f"{type(error).__name__}: {str(error)[:300]}"}]
    if ranks.leads:
        took = round(time.monotonic() - began, 1)
        for found in every:
            tell("tokens", ranks=ranks.size, network=name, prepares=prepares, **found, s=took)


# Speed


def few_graphs() -> None:
    """Capture two sizes of steps of one token a sequence; the others take a minute."""
    setattr(cuda_graphs, "_FEW", (2,))  # noqa: B010  # it has a longer type
    cuda_graphs._STEP = 1000
    warm_up.captured_tokens = lambda *_: 0


def step_s(engine: Engine, batch: int) -> tuple[float, dict[str, float]]:
    """Return the seconds of a step in which `batch` requests decode, and its kernels' in ms."""
    params = SamplingParams(max_tokens=_STEPS + 40, ignore_eos=True)
    vocab = min(engine.vocab_size, 150_000)
    asked = [
        [(number * 977 + place * 31) % vocab for place in range(32)] for number in range(batch)
    ]
    requests = [engine.add_request(prompt, params) for prompt in asked]
    while min(request.num_output_tokens for request in requests) < 8:
        engine.step()
    wait_for_device()
    begin = time.perf_counter()
    for _ in range(_STEPS):
        engine.step()
    wait_for_device()
    took = (time.perf_counter() - begin) / _STEPS
    found = kernels(engine)
    for request in requests:
        engine.abort(request)
    engine.step()
    engine.step()
    return took, found


def far(got: Tensor, wanted: Tensor) -> float:
    return round(float((got - wanted).norm() / wanted.norm()), 5)


def logits(ranks: Ranks) -> None:
    """In bfloat16, how far the logits of one and of all are from those of float32."""
    alone = load_shape("qwen3-8b", torch.bfloat16, 36, None).network

    def logits_of(network: PreTrainedModel) -> Tensor:
        ids = torch.arange(1, 129, device=network.device).view(2, 64) * 7919 % 150_000
        with torch.inference_mode():
            found: Tensor = network(input_ids=ids, use_cache=False).logits
        return found.float()

    one = logits_of(alone)
    exact = logits_of(alone.float())
    del alone
    shared = load_shape("qwen3-8b", torch.bfloat16, 36, ranks).network
    many = logits_of(shared)
    if ranks.leads:
        best = exact.argmax(-1)
        same = [round(float((each.argmax(-1) == best).float().mean()), 3) for each in (one, many)]
        tell(
            "logits", ranks=ranks.size, one=far(one, exact), many=far(many, exact),
            apart=far(many, one), same_best=same,
        )  # fmt: skip


def kernels(engine: Engine) -> dict[str, float]:
    """Return the ms a step of kernels: all, while any runs, and those that sum or gather."""
    kind = ProfilerActivity.CUDA if _IS_GPU else ProfilerActivity.CPU
    with profile(activities=[kind]) as profiled:
        for _ in range(8):
            engine.step()
        wait_for_device()
    found: dict[str, float] = {"all": 0.0, "busy": 0.0, "sums": 0.0, "nccl": 0.0}
    until = 0.0
    longest: dict[str, float] = {}
    for event in sorted(profiled.events() or (), key=lambda one: one.time_range.start):
        span = event.time_range
        found["busy"] += max(0.0, span.end - max(span.start, until)) / 8e3
        until = max(until, span.end)
        name, took = event.name, event.device_time_total / 8e3
        found["all"] += took
        longest[name] = longest.get(name, 0.0) + took
        if "nccl" in name.lower():
            found["nccl"] += took
        elif name.startswith("_sum_"):
            found["sums"] += took
    for name in sorted(longest, key=longest.__getitem__)[-6:]:
        found[name[:60]] = longest[name]
    return {name: round(value, 3) for name, value in found.items()}


def speed(part: str, ranks: Ranks | None, name: str, layers: int, batches: Sequence[int]) -> None:
    few_graphs()
    leads = ranks is None or ranks.leads
    if _IS_GPU:
        model = load_shape(name, _DTYPE, layers, ranks)
    else:
        model = load_model(str(CHECKPOINT_DIR), torch.device("cpu"), _DTYPE, ranks)
    size = 1 if ranks is None else ranks.size
    if leads:
        tell(part, ranks=size, network=name, event="loaded")
    config = EngineConfig(
        num_blocks=4096, max_num_seqs=max(batches), max_num_batched_tokens=1024, compile=True
    )
    engine = engine_of(model, backends.get_backend("auto"), config)
    how = engine.prepare()
    if isinstance(engine, TwinEngine) and not leads:
        engine.follow()
        return
    tell(part, ranks=size, network=name, event="prepared", how=how)
    for batch in batches:
        took, found = step_s(engine, batch)
        tell(
            part, ranks=size, network=name, batch=batch, step_ms=round(1e3 * took, 3),
            tokens_s=round(batch / took, 1), kernels_ms=found,
        )  # fmt: skip
    engine.end()


def decode(ranks: Ranks | None) -> None:
    speed("decode", ranks, "qwen3-8b", 36, (1, 128) if _IS_GPU else (1, 6))


def experts(ranks: Ranks | None) -> None:
    speed("experts", ranks, "qwen3-30b-a3b", 48, (256,) if _IS_GPU else (6,))


# A lost rank


_MOMENTS = {  # who is killed when: rank (from the end if negative), and in which step
    "load": (1, None), "engine": (-1, None), "step 3": (1, 3), "step 20": (-1, 20),
}  # fmt: skip
_NUM_CLIENTS = 6


def die() -> list[Output]:
    tell("loss", event="killed")
    os.kill(os.getpid(), signal.SIGKILL)
    return []


def loss(ranks: Ranks, moment: str) -> None:
    rank, step = _MOMENTS[moment]
    is_victim = ranks.rank == rank % ranks.size
    backend = backends.get_backend("auto")
    if is_victim and moment == "load":
        die()
    model = load_model(str(CHECKPOINT_DIR), backend.device, None, ranks)
    if is_victim and moment == "engine":
        die()
    config = EngineConfig(num_blocks=256, max_num_seqs=16)
    engine = TwinEngine(model, backend, config)
    few_graphs()
    engine.prepare()
    if ranks.leads:
        asyncio.run(serve(engine, moment))
        return
    left, run = iter(range(step or 0)), engine._step
    if is_victim:
        engine._step = lambda: die() if next(left, None) is None else run()  # type: ignore[method-assign]
    engine.follow()


async def serve(engine: TwinEngine, moment: str) -> None:
    """Ask for long texts; every client has to be told that the engine failed."""
    serving = AsyncEngine(engine)
    serving.start()
    await serving.ready()
    params = SamplingParams(max_tokens=900, ignore_eos=True)
    told: list[str] = []

    async def ask(number: int) -> None:
        try:
            async for _ in serving.generate([number + 5] * 9, params):
                pass
        except ModelError as error:
            told.append(f"{type(error).__name__}: {error}")

    await asyncio.gather(*map(ask, range(_NUM_CLIENTS)))
    told_s = time.time()
    fault = await serving.ended()
    kv = engine.kv
    tell(
        "loss", moment=moment, told=len(told), of=_NUM_CLIENTS, error=told[0] if told else None,
        time_s=told_s, lost_blocks=kv.num_usable_blocks - kv.num_free_blocks,
    )  # fmt: skip
    if fault is not None:
        raise fault


# Processes


class Part(NamedTuple):
    """A part, the number of its processes, its first GPU and its limit."""

    name: str
    size: int
    first: int = 0
    limit_s: float = 100.0
    arguments: tuple[str, ...] = ()


class Processes:
    """The processes of a part, which end together."""

    def __init__(self, part: Part) -> None:
        self.part = part
        self.until_s = time.monotonic() + part.limit_s
        self.ended_s: dict[int, float] = {}
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        visible = ",".join(str(part.first + rank) for rank in range(part.size))
        shared = {
            **os.environ,
            **_NO_MULTICAST,
            "MANY_GPUS_BEGAN": str(_BEGAN),
            "WORLD_SIZE": str(part.size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": visible,
            "PYTHONPATH": os.pathsep.join(paths),
        }
        command = [sys.executable, "-m", "tests.model.many_gpus", "--run", part.name]
        self.ranks = [
            subprocess.Popen(
                [*command, *part.arguments],
                cwd=_ROOT,
                env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stderr=subprocess.PIPE if part.name == "loss" else None,
                text=True,
            )
            for rank in range(part.size)
        ]

    def poll(self) -> bool:
        """Return True if all have ended; a part that is over its limit is killed."""
        for rank, process in enumerate(self.ranks):
            if rank not in self.ended_s and process.poll() is not None:
                self.ended_s[rank] = time.time()
        if len(self.ended_s) == len(self.ranks):
            return True
        if time.monotonic() > self.until_s:
            tell(self.part.name, event="over its limit", limit_s=round(self.part.limit_s))
            self.until_s = math.inf
            self.kill()
        return False

    def kill(self) -> None:
        for process in self.ranks:
            process.kill()

    def report(self) -> None:
        codes = [process.returncode for process in self.ranks]
        found: dict[str, object] = {"codes": codes}
        if self.part.name == "loss":
            lines = [
                line
                for process in self.ranks
                for line in (process.stderr.read() if process.stderr else "").splitlines()
                if line.startswith(("error", "Traceback", "RuntimeError", "This is a bug"))
            ]
            victim = codes.index(-signal.SIGKILL) if -signal.SIGKILL in codes else 0
            last = max(self.ended_s.values()) - self.ended_s[victim]
            found |= {"moment": self.part.arguments[0], "ended_after_s": round(last, 2)}
            found |= {"lines": lines}
        tell(self.part.name, event="ended", ranks=self.part.size, **found)


def run_all(rounds: Sequence[Sequence[Part]], seconds: float) -> None:
    """Run rounds of parts, those of a round at once, until the time is over."""
    for parts in rounds:
        left = seconds - (time.time() - _BEGAN)
        if left < 10:
            tell("all", event="no time left", parts=[part.name for part in parts])
            continue
        running = [Processes(part._replace(limit_s=min(part.limit_s, left))) for part in parts]
        try:
            while running:
                for each in [one for one in running if one.poll()]:
                    each.report()
                    running.remove(each)
                time.sleep(0.01)
        finally:
            for each in running:
                each.kill()


_SPEED: dict[str, Callable[[Ranks | None], None]] = {"decode": decode, "experts": experts}
_SHARED: dict[str, Callable[..., None]] = {
    "sums": sums, "tokens": tokens, "shapes": shapes, "logits": logits, "loss": loss,
}  # fmt: skip
_PARTS = (*_SPEED, *_SHARED)


def plan(gpus: int, wanted: Sequence[str]) -> list[list[Part]]:
    """Return the rounds of parts for a number of GPUs; what needs few runs at once."""
    pair = [Part("decode", 2, 1, 130)] if gpus >= 4 else []
    alone = [Part("experts", 1, gpus - 1, 150)] if gpus >= 4 else []
    losses = [Part("loss", gpus, 0, 60, (moment,)) for moment in _MOMENTS]
    rounds = [
        [Part("sums", gpus, 0, 60)],
        *([losses] if _IS_GPU else [[each] for each in losses]),
        [Part("decode", 1, 0, 130), *pair, *alone],
        [Part("decode", gpus, 0, 110)],
        [Part("experts", gpus, 0, 120)],
        [Part("tokens", gpus, 0, 120)],
        [Part("shapes", gpus, 0, 90)] if _IS_GPU else [],
        [Part("logits", gpus, 0, 60)] if _IS_GPU else [],
    ]
    chosen = [
        [part for part in parts if {part.name, f"{part.name}:{part.size}"} & {*(wanted or _PARTS)}]
        for parts in rounds
    ]
    return [parts for parts in chosen if parts]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.model.many_gpus")
    found = torch.cuda.device_count() if _IS_GPU else 4
    parser.add_argument("parts", nargs="*", help=f"of {_PARTS}, NAME:GPUS; none: all")
    parser.add_argument("--gpus", type=int, default=found, help="GPUs; on a CPU, processes")
    parser.add_argument("--seconds", type=float, default=470.0)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run is None:
        run_all(plan(options.gpus, options.parts), options.seconds)
        return
    if not _IS_GPU:
        torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    size = int(os.environ["WORLD_SIZE"])
    with leaves():
        ranks = join_ranks(size, expert_parallel=options.run == "experts" and size > 1)
        if options.run in _SPEED:
            _SPEED[options.run](ranks)
        elif ranks is not None:
            _SHARED[options.run](ranks, *options.parts)
        if ranks is not None:
            ranks.disarm()
            dist.barrier()


if __name__ == "__main__":
    main()
