"""What two GPUs give that one does not: `torchrun --nproc-per-node 2 tests/model/two_gpus.py`.

One preparation a network, because that takes longest: decoding of an 8B network, random weights in
bfloat16, by each GPU alone and by both, its sums by the kernel and by NCCL; sums of all sizes; how
far the logits are from float32's; the tiny model's tokens in float32; at last one rank is killed
while the other one waits for its GPU, which has to end it with one line.

With `quick`, the last three alone, where nothing is compiled.

A process that fails ends the other one; run it under `timeout` all the same. What is known is
printed at once. On CPUs it runs through with the tiny model, to be tried.
"""

import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel
from transformers.utils import logging

import backends
from model import EngineConfig, SamplingParams
from model.cli.exits import leaves
from model.engine import Engine, TwinEngine
from model.engine_core import Output
from model.forward import cuda_graphs, warm_up
from model.load.loader import LoadedModel, load_model
from model.ranks import parallel
from model.ranks.parallel import check_cut
from model.ranks.ranks import Ranks, join_ranks
from model.tiny import CHECKPOINT_DIR
from model.twins import _Ended
from tests.bench.engine.networks import load

_BEGAN = time.monotonic()
_HIDDEN, _LAYERS = 4096, 36
_SUMS = 2 * _LAYERS + 1
_IS_GPU = torch.cuda.is_available()
_DTYPE = torch.bfloat16 if _IS_GPU else torch.float32
_MODEL = "qwen3-8b" if _IS_GPU else str(CHECKPOINT_DIR)
_BATCHES = (1, 128) if _IS_GPU else (1, 6)
_STEPS = 100 if _IS_GPU else 6
_TOKENS_BEFORE_S = float(os.environ.get("TWO_GPUS_TOKENS_BEFORE_S", "165"))


def tell(ranks: Ranks, what: str, **values: object) -> None:
    told = {"at_s": round(time.monotonic() - _BEGAN, 1), "rank": ranks.rank, "what": what}
    sys.stdout.write(f"{json.dumps({**told, **values})}\n")  # in one go: both write there
    sys.stdout.flush()


def wait_for_device() -> None:
    if _IS_GPU:
        torch.cuda.synchronize()


def timed(run: Callable[[], object], times: int = 20) -> float:
    """Median milliseconds of the device."""
    taken = []
    for _ in range(times):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end))
    return statistics.median(taken)


def in_graph(run: Callable[[], Tensor]) -> Callable[[], None]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def by_nccl(_scratch: Tensor, part: Tensor, group: str) -> Tensor:
    return parallel._summed(part, group)


def sums_alone(ranks: Ranks, sums: parallel.Sums) -> None:
    """A step's sums and nothing else, each of the one before."""
    by_kernel = parallel._summed_by_kernel
    for rows in (2, 8, 32, 128, 256):
        part = torch.full((rows, _HIDDEN), 1e-30, device="cuda", dtype=torch.bfloat16)

        def chain(part: Tensor = part) -> Tensor:
            for _ in range(_SUMS):
                part = sums(part)
            return part

        found = {}
        for name, way in (("nccl", by_nccl), ("kernel", by_kernel)):
            parallel._summed_by_kernel = way
            found[name] = round(1e3 * timed(in_graph(chain)) / _SUMS, 2)
        parallel._summed_by_kernel = by_kernel
        tell(ranks, "one sum, us", rows=rows, KiB=rows * _HIDDEN * 2 >> 10, **found)
    for rows in (2, 128):
        logits = torch.zeros((1, rows * 151_936 // 2), device="cuda", dtype=torch.bfloat16)
        took = timed(in_graph(lambda one=logits: parallel._all_gather(one, 2, sums.group)))
        tell(ranks, "logits gathered, us", rows=rows, nccl=round(1e3 * took, 1))


def make(ranks: Ranks | None, backend: backends.Backend) -> LoadedModel:
    model = load(_MODEL, backend.device, _DTYPE, ranks, dummy_weights=True)
    if ranks is not None:
        check_cut(model.network, ranks)
    return model


def logits_of(network: PreTrainedModel) -> Tensor:
    """A network's logits for some tokens, as it is: nothing of ours but how it is cut."""
    vocab_size = network.config.get_text_config().vocab_size
    ids = torch.arange(1, 129, device=network.device).view(2, 64) * 7919 % vocab_size
    with torch.inference_mode():
        logits: Tensor = network(input_ids=ids, use_cache=False).logits
    return logits.float()


def logits(ranks: Ranks) -> None:
    """In bfloat16, how far one GPU's logits and two GPUs' are from those of float32."""
    device = backends.get_backend("auto").device
    tiny = partial(load_model, str(CHECKPOINT_DIR))
    for name, way in (("tiny", tiny), (_MODEL, partial(load, _MODEL, dummy_weights=True))):
        alone = way(device, torch.bfloat16, None).network
        one = logits_of(alone)
        exact = logits_of(alone.float())
        del alone
        two = logits_of(way(device, torch.bfloat16, ranks).network)
        best = exact.argmax(-1)
        if not ranks.leads:
            continue
        tell(
            ranks, "bfloat16 logits from float32's", model=name,
            one=far(one, exact), two=far(two, exact), apart=far(two, one),
            same_best_one=round(float((one.argmax(-1) == best).float().mean()), 3),
            same_best_two=round(float((two.argmax(-1) == best).float().mean()), 3),
            is_within=far(two, exact) <= 1.25 * far(one, exact),
        )  # fmt: skip


def far(got: Tensor, wanted: Tensor) -> float:
    return round(float((got - wanted).norm() / wanted.norm()), 5)


def engine_for(model: LoadedModel, backend: backends.Backend) -> Engine:
    config = EngineConfig(
        num_blocks=2048, max_num_seqs=128, max_num_batched_tokens=1024, compile=True
    )
    if model.ranks is None:
        return Engine(model, backend, config)
    return TwinEngine(model, backend, config)


def decoded(engine: Engine, batch: int) -> tuple[float, list[list[int]]]:
    """Seconds of a step in which `batch` requests decode, and what came first."""
    params = SamplingParams(max_tokens=_STEPS + 24, ignore_eos=True)
    vocab = min(engine.vocab_size, 150_000)
    prompts = [
        [(number * 977 + place * 31) % vocab for place in range(32)] for number in range(batch)
    ]
    requests = [engine.add_request(prompt, params) for prompt in prompts]
    while min(request.num_output_tokens for request in requests) < 8:
        engine.step()
    wait_for_device()
    begin = time.perf_counter()
    for _ in range(_STEPS):
        engine.step()
    wait_for_device()
    took = (time.perf_counter() - begin) / _STEPS
    firsts = [request.output_tokens[:8] for request in requests]
    for request in requests:
        engine.abort(request)
    engine.step()
    engine.step()
    engine.empty_cache(enable_caching=True)
    return took, firsts


def kernels(engine: Engine, batch: int) -> dict[str, float]:
    """Milliseconds a step of the device's kernels: all of them, and those that add up or gather."""
    params = SamplingParams(max_tokens=64, ignore_eos=True)
    requests = [engine.add_request([number + 3] * 32, params) for number in range(batch)]
    while min(request.num_output_tokens for request in requests) < 8:
        engine.step()
    wait_for_device()
    kind = ProfilerActivity.CUDA if _IS_GPU else ProfilerActivity.CPU
    with profile(activities=[kind]) as profiled:
        for _ in range(8):
            engine.step()
        wait_for_device()
    found = {"all": 0.0, "shared": 0.0}
    for event in profiled.events() or ():
        name = event.name.lower()
        took = event.device_time_total / 8e3
        found["all"] += took
        if "nccl" in name or "all_reduce" in name:
            found["shared"] += took
    for request in requests:
        engine.abort(request)
    engine.step()
    engine.step()
    return {name: round(value, 3) for name, value in found.items()}


def measure(ranks: Ranks, engine: Engine, label: str, firsts: dict[int, list[list[int]]]) -> None:
    for batch in _BATCHES:
        took, first = decoded(engine, batch)
        same = firsts.setdefault(batch, first)
        equal = sum(one == two for one, two in zip(first, same, strict=True))
        tell(
            ranks, f"decode {label}", batch=batch, step_ms=round(1e3 * took, 3),
            tokens_s=round(batch / took, 1), first_8_as_alone=f"{equal} of {batch}",
        )  # fmt: skip


def few_graphs() -> None:
    """Two sizes of steps of one token a sequence; the others take a minute."""
    cuda_graphs._FEW, cuda_graphs._STEP = (2,), 1000
    warm_up.captured_tokens = lambda *_: 0


def probe(ranks: Ranks, device: torch.device) -> None:
    sums = parallel.Sums(_DTYPE, device, ranks)
    tell(ranks, "memory that the GPUs share", elements=len(sums._scratch))
    if _IS_GPU:
        with torch.inference_mode():
            sums_alone(ranks, sums)


def speed(ranks: Ranks) -> TwinEngine:
    backend = backends.get_backend("auto")
    alone = make(None, backend)
    tell(ranks, "alone: loaded")
    engine = engine_for(alone, backend)
    tell(ranks, "alone: prepared", how=engine.prepare())
    firsts: dict[int, list[list[int]]] = {}
    measure(ranks, engine, "alone", firsts)
    tell(ranks, "kernels alone, ms", **{str(batch): kernels(engine, batch) for batch in _BATCHES})
    del engine, alone
    if _IS_GPU:
        torch.cuda.empty_cache()
    dist.barrier()
    probe(ranks, backend.device)
    model = make(ranks, backend)
    twin = engine_for(model, backend)
    tell(ranks, "two: prepared", how=twin.prepare())
    by_kernel, profiled = parallel._summed_by_kernel, set[str]()
    for name, way in (("kernel", by_kernel), ("nccl", by_nccl), ("kernel", by_kernel)):
        parallel._summed_by_kernel = way
        if twin._runner._graphs is not None:
            twin._runner._graphs.record()
        if ranks.leads:
            measure(ranks, twin, f"two, {name}", firsts)
            if name not in profiled:
                found = {str(batch): kernels(twin, batch) for batch in _BATCHES}
                tell(ranks, f"kernels two, {name}, ms", **found)
                profiled.add(name)
            ranks.broadcast(_Ended(goes_on=True))  # the connection is still minded
        else:
            twin.follow()
    return twin


def tokens(ranks: Ranks, *, is_prepared: bool = False) -> TwinEngine:
    """The tiny model's requests in float32; prepared: steps as CUDA graphs."""
    backend = backends.get_backend("auto")
    prompts = [list(range(3, 40)), [7] * 20, list(range(100, 108))]
    params = [SamplingParams(max_tokens=40), SamplingParams(max_tokens=40, temperature=0.8, seed=1)]
    every = [(prompt, each) for prompt in prompts for each in params]
    config, how, found = EngineConfig(num_blocks=64, max_num_seqs=8), "as it is", []
    for shared in (None, ranks):
        model = load_model(str(CHECKPOINT_DIR), backend.device, torch.float32, shared)
        if shared is None:
            engine = Engine(model, backend, config)
        else:
            engine = TwinEngine(model, backend, config, is_checked=True)
        if is_prepared:
            how = engine.prepare()
        if shared is not None and not ranks.leads:
            engine.follow()
            return engine
        done = engine.generate([prompt for prompt, _ in every], [each for _, each in every])
        found.append([one.request.output_tokens for one in done])
    ranks.broadcast(_Ended(goes_on=True))
    equal = sum(one == two for one, two in zip(*found, strict=True))
    count = sum(map(len, found[0]))
    tell(
        ranks, "float32: requests with the tokens of one", how=how,
        equal=f"{equal} of {len(every)}", tokens=count,
    )  # fmt: skip
    return engine


def die(ranks: Ranks, engine: TwinEngine) -> None:
    if not ranks.leads:
        step, left = engine._step, iter(range(20))

        def killed() -> list[Output]:
            if next(left, None) is None:
                tell(ranks, "killed")
                os.kill(os.getpid(), signal.SIGKILL)
            return step()

        engine._step = killed
        engine.follow()
        return
    tell(ranks, "one is killed", at_step=20)
    engine.generate([[5] * 9], SamplingParams(max_tokens=400, ignore_eos=True))
    tell(ranks, "nothing was noticed")


def main() -> None:
    if not _IS_GPU:
        torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    ranks = join_ranks(2)
    tell(ranks, "joined", torch=torch.__version__)
    few_graphs()
    if "quick" not in sys.argv[1:]:
        engine = speed(ranks)
    if ranks.all_reduce_min(int(time.monotonic() - _BEGAN)) < _TOKENS_BEFORE_S:
        engine = tokens(ranks)
        logits(ranks)
        tokens(ranks, is_prepared=True)
    die(ranks, engine)


if __name__ == "__main__":
    with leaves():  # as the commands end: a process that fails is gone, and says why
        main()
