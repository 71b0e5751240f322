"""`--workload host`: what a step costs the host, beside the network.

Decides: what host work is: every phase of a step but `forward`, of the real engine, with a network
so small that it says nothing (one layer, 16 numbers a token), all requests decoding; and what of it
the allocator alone needs for the same steps: `reserve_step`, `write_step`, `commit_step` and an
`append` a sequence.

Invariants: only steps in which every request decodes are counted; lengths are spread, so that in
every step one sequence in `block_size` takes a block; times are medians over the steps.

Does not know: how a step is run.
"""

import json
import statistics
import sys
import time
from array import array
from dataclasses import asdict, dataclass
from functools import partial

import kvcore
from model.bench.networks import load
from model.bench.options import BenchOptions
from model.cli.start import start
from model.control.config import EngineConfig
from model.control.params import SamplingParams
from model.engine import Engine
from model.trace import FORWARD, PHASES, StepRecord

_PROMPT_LEN = 64


@dataclass(frozen=True, slots=True)
class HostReport:
    """What was found; times of a step in microseconds, medians.

    Attributes:
        num_running: requests that decode at once.
        num_steps: steps that were counted.
        phases_us: each phase but `forward`.
        host_us: all of them together.
        allocator_us: the allocator alone.
    """

    num_running: int
    num_steps: int
    phases_us: dict[str, float]
    host_us: float
    allocator_us: float


def execute(options: BenchOptions) -> None:
    """Measure and print.

    Raises:
        ModelError: the options cannot be run.
    """
    report = measure(options)
    if options.json:
        json.dump({"workload": "host", **asdict(report)}, sys.stdout)
        print()
    else:
        print(table(report))


def measure(options: BenchOptions) -> HostReport:
    """Run the engine, then the allocator. O(steps * requests)."""
    steps = _run_engine(options)
    phases: dict[str, list[int]] = {name: [] for name in PHASES if name != FORWARD}
    for step in steps:
        for name, begin, end in step.phases():
            if name != FORWARD:
                phases[name].append(end - begin)
    return HostReport(
        num_running=options.shape.num_requests,
        num_steps=len(steps),
        phases_us={name: statistics.median(times) / 1e3 for name, times in phases.items()},
        host_us=statistics.median(map(sum, zip(*phases.values(), strict=True))) / 1e3,
        allocator_us=_allocator_us(options),
    )


def table(report: HostReport) -> str:
    """The report as aligned lines. O(1)."""
    each = report.num_running
    lines = [f"{each} requests decode, {report.num_steps} steps", ""]
    lines.append(f"{'':<12}{'us a step':>12}{'us a request':>14}")
    rows = {**report.phases_us, "host": report.host_us, "allocator": report.allocator_us}
    lines += [f"{name:<12}{us:>12,.1f}{us / each:>14.2f}" for name, us in rows.items()]
    return "\n".join(lines)


def _lengths(options: BenchOptions) -> list[int]:
    return [
        _PROMPT_LEN + number % options.engine.block_size
        for number in range(options.shape.num_requests)
    ]


def _num_blocks(options: BenchOptions) -> int:
    longest = max(_lengths(options)) + options.host.steps + options.shape.num_requests
    return 1 + options.shape.num_requests * (longest // options.engine.block_size + 2)


def _run_engine(options: BenchOptions) -> list[StepRecord]:
    """The steps in which all requests decode."""
    model, backend = start("nothing", "auto", "float32", load=partial(load, dummy_weights=True))
    config = EngineConfig(
        num_blocks=_num_blocks(options),
        block_size=options.engine.block_size,
        max_num_seqs=options.shape.num_requests,
        max_num_batched_tokens=max(2048, options.shape.num_requests),
    )
    engine = Engine(model, backend, config)
    vocab_size = model.network.config.get_text_config().vocab_size
    requests = [
        engine.add_request(
            # No two begin alike, or they would share blocks.
            [number % vocab_size, number // vocab_size, *[0] * (length - 2)],
            SamplingParams(
                max_tokens=2 * options.shape.num_requests + options.host.steps, ignore_eos=True
            ),
        )
        for number, length in enumerate(_lengths(options))
    ]
    while any(request.num_output_tokens == 0 for request in requests):
        engine.step()
    recorder = engine.record()
    for _ in range(options.host.steps):
        engine.step()
    for request in requests:
        engine.abort(request)
    return [step for step in recorder.steps if step.num_decode_tokens == options.shape.num_requests]


def _allocator_us(options: BenchOptions) -> float:
    """What kvcore needs for a decode step of as many sequences of the same lengths."""
    kv = kvcore.KVCacheManager(_num_blocks(options), options.engine.block_size)
    seqs = []
    for number, length in enumerate(_lengths(options)):
        seq = kv.open([number, *[0] * (length - 1)])
        kv.reserve(seq, length)
        kv.commit(seq, length)
        seqs.append(seq)
    stride = max(_lengths(options)) // options.engine.block_size + options.host.steps + 1
    tables = array("i", [0] * (stride * len(seqs)))
    slots = array("q", [0] * len(seqs))
    ones = [1] * len(seqs)
    times = []
    for number in range(options.host.steps):
        begin = time.perf_counter_ns()
        for seq in seqs:
            kv.append(seq, number)
        kv.reserve_step(seqs, ones)
        kv.write_step(seqs, tables, slots, row_stride=stride)
        kv.commit_step(seqs, ones)
        times.append(time.perf_counter_ns() - begin)
    return statistics.median(times) / 1e3
