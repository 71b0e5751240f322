"""A benchmark from its options to its report.

Decides: the order of a benchmark: load, warm up, then rounds in which we and the peers take turns,
so that a machine that slows down slows all of them. Invariants: every turn serves the same requests
on an empty cache; a ratio is taken between turns of one round; with `--json` stdout holds one
document.

Does not know: what is measured in a turn (`serve.py`, `peers.py`), how it is printed (`report.py`).
"""

import dataclasses
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from model.bench.metrics import summarize
from model.bench.networks import load
from model.bench.options import BenchOptions
from model.bench.peers import PEERS, Job, PeerSettings
from model.bench.process import CollectorWatch, process_age_s
from model.bench.report import Counters, Report, Versus, document, table
from model.bench.serve import Arrivals, Served, serve
from model.bench.workloads import BenchRequest, make_requests, total_lengths
from model.cli.bars import bar
from model.cli.files import OutputFile
from model.cli.start import input_errors, start, warm_up
from model.cli.step_table import StepStats, summarize_steps
from model.engine import Engine
from model.errors import visible
from model.forward.ranges import DeviceRanges
from model.load.loader import LoadedModel
from model.trace import write_trace
from model.twins import TwinEngine, engine_of


@dataclass(frozen=True, slots=True)
class _Bench:
    """What every turn needs."""

    options: BenchOptions
    model: LoadedModel
    engine: Engine
    requests: list[BenchRequest]
    network: str


@dataclass(frozen=True, slots=True)
class _Turn:
    """One of our turns: what was answered, and what the cache did meanwhile."""

    served: list[Served]
    counters: Counters

    @property
    def numbers(self) -> dict[str, float]:
        """Its numbers, under vLLM's names. O(tokens)."""
        return summarize([one.timeline for one in self.served])


def execute(options: BenchOptions) -> None:
    """Run a benchmark and print what it found.

    Raises:
        ModelError: the options cannot be run.
        OSError: what was printed could not be written.
    """
    with input_errors():
        if options.model.follows:
            follow(options)
            return
        trace = options.trace.file(options.model.path, options.engine.draft_model)
        report = measure(options, trace)
    if options.json:
        json.dump(document(report), sys.stdout)
        print()
    else:
        print(visible(table(report)))


def follow(options: BenchOptions) -> None:
    """Be a process that shares the network of one that measures, until that has done so.

    Raises:
        ModelError: the options cannot be run.
        RankLostError: another process is gone.
    """
    engine = _prepare(options).engine
    if isinstance(engine, TwinEngine):
        engine.follow()


def measure(options: BenchOptions, trace: OutputFile | None = None) -> Report:
    """Run a benchmark. Takes rounds * (1 + peers) times what serving the requests takes.

    Args:
        options: what to run.
        trace: where the steps of our first turn are written; None: nowhere.

    Raises:
        ModelError: the options cannot be run.
    """
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    bench = _prepare(options)
    startup_s = process_age_s()
    recorder = bench.engine.record() if options.trace.stats or trace is not None else None
    if recorder is not None and trace is not None:
        recorder.record_pool(bench.model.codec.decode)
        if bench.model.network.device.type == "cuda":
            recorder.record_device(DeviceRanges(bench.model.network.device))
    steps: StepStats | None = None
    collector = CollectorWatch()
    ours: list[_Turn] = []
    others: dict[str, list[dict[str, float]]] = {name: [] for name in options.work.peer}
    for number in range(options.work.rounds):
        label = f"round {number + 1} of {options.work.rounds}"
        with collector:
            ours.append(_our_turn(bench, label))
        if number == 0 and recorder is not None:
            bench.engine.stop_recording()
            steps = summarize_steps(recorder) if options.trace.stats else None
        for name, turns in others.items():
            turns.append(_peer_turn(bench, name, ours[0].served, label))
    if recorder is not None and trace is not None:
        with trace.replaced() as out:
            write_trace(out, recorder)
    bench.engine.end()
    waited = {
        "startup_s": startup_s,
        "first_token_s": startup_s + ours[0].served[0].timeline.token_s[0],
        "num_gc_pauses": collector.num_pauses,
        "max_gc_pause_ms": collector.longest_s * 1e3,
    }
    return dataclasses.replace(_report(bench, waited, ours, others), steps=steps)


def _prepare(options: BenchOptions) -> _Bench:
    what = options.model
    model, backend = start(
        what.path,
        what.backend,
        what.dtype,
        draft_name=options.engine.draft_model,
        num_ranks=what.tp,
        expert_parallel=what.expert_parallel,
        load=partial(load, dummy_weights=options.weights.dummy_weights),
    )
    vocab_size: int = model.network.config.get_text_config().vocab_size
    requests = make_requests(options.shape, vocab_size=vocab_size, seed=options.arrivals.seed)
    lengths = tuple([total - 1 for total in total_lengths(requests)])  # the last is not computed
    config = dataclasses.replace(
        options.engine, expected_lengths=lengths, seed=options.arrivals.seed
    )
    engine = engine_of(model, backend, config, checks_ranks=options.model.check_ranks)
    return _Bench(options, model, engine, requests, warm_up(engine))


def _our_turn(bench: _Bench, label: str, *, prefix_cache: bool = True) -> _Turn:
    options, engine = bench.options, bench.engine
    arrivals = Arrivals(
        rate=options.arrivals.request_rate,
        max_concurrency=options.arrivals.max_concurrency,
        seed=options.arrivals.seed,
    )
    # Nothing runs, so the cache can be emptied, and turned off for a turn.
    engine.empty_cache(enable_caching=prefix_cache and options.engine.enable_prefix_caching)
    engine.stats.peak_running = 0
    before = _counters(engine)
    try:
        with bar(label, len(bench.requests)) as advance:
            served = serve(
                engine,
                bench.requests,
                arrivals,
                params=options.arrivals.params,
                on_finish=advance,
            )
    finally:
        engine.empty_cache(enable_caching=options.engine.enable_prefix_caching)
    return _Turn(served, _counters(engine).since(before))


def _peer_turn(bench: _Bench, name: str, served: Sequence[Served], label: str) -> dict[str, float]:
    """The numbers of a peer: all of ours for our own engine, else duration and throughput."""
    if name == "no-prefix-cache":
        return _our_turn(bench, f"{label}, {name}", prefix_cache=False).numbers
    options = bench.options
    jobs = [Job(one.prompt, len(one.output)) for one in served]
    limit = min(
        options.arrivals.max_concurrency or len(jobs), options.engine.max_num_seqs, len(jobs)
    )
    settings = PeerSettings(temperature=options.arrivals.temperature, batch_size=limit)
    with bar(f"{label}, {name}", len(jobs)) as advance:
        seconds = PEERS[name](bench.model, jobs, settings, advance)
    tokens = sum(job.max_tokens for job in jobs)
    return {"duration": seconds, "output_throughput": tokens / seconds}


def _counters(engine: Engine) -> Counters:
    cache, steps = engine.kv.stats(), engine.stats
    return Counters(
        num_steps=steps.num_steps,
        num_prompt_tokens=steps.num_prompt_tokens,
        num_hit_tokens=steps.num_hit_tokens,
        num_preemptions=steps.num_preemptions,
        num_evicted_blocks=cache.num_evicted_blocks,
        peak_running=steps.peak_running,
        peak_used_blocks=cache.peak_used_blocks,
        num_usable_blocks=engine.kv.num_usable_blocks,
        num_draft_tokens=steps.num_draft_tokens,
        num_accepted_tokens=steps.num_accepted_tokens,
    )


def _report(
    bench: _Bench,
    waited: Mapping[str, float],
    ours: Sequence[_Turn],
    others: dict[str, list[dict[str, float]]],
) -> Report:
    numbers = [turn.numbers for turn in ours]
    order = sorted(range(len(ours)), key=lambda number: numbers[number]["duration"])
    middle = order[(len(order) - 1) // 2]
    options, network = bench.options, bench.model.network
    return Report(
        about={
            "workload": options.work.workload,
            "model": options.model.path,
            "dummy_weights": options.weights.dummy_weights,
            "network": bench.network,
            "device": str(network.device),
            "dtype": str(network.dtype).removeprefix("torch."),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "num_prompts": len(bench.requests),
            "request_rate": str(options.arrivals.request_rate),
            "max_concurrency": options.arrivals.max_concurrency,
            "max_num_seqs": options.engine.max_num_seqs,
            "seed": options.arrivals.seed,
            "temperature": options.arrivals.temperature,
            "top_k": options.arrivals.top_k,
            "top_p": options.arrivals.top_p,
            "rounds": options.work.rounds,
            **waited,
        },
        numbers=numbers[middle],
        counters=ours[middle].counters,
        peers=[Versus.between(name, numbers, turns) for name, turns in others.items()],
    )
