"""`--workload waste`: what paging saves, measured and printed.

Decides: the block sizes that a trace is replayed on; the last is a flat cache's row, as long as the
longest request. Bytes are slots times what a token takes in a model's full attention.

Does not know: how slots are counted (`waste.py`).
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from model.bench.networks import config_of
from model.bench.options import BenchOptions
from model.bench.waste import Holding, TraceRow, hold, replay
from model.bench.workloads import make_requests, total_lengths
from model.cli.bars import bar
from model.control.config import SchedulerConfig

_VOCAB_SIZE = 10_001


@dataclass(frozen=True, slots=True)
class WasteReport:
    """What was found; bytes are slots times `token_bytes`."""

    model: str
    token_bytes: int
    trace: str
    num_slots: int
    flat: Holding
    paged: Holding
    rows: tuple[TraceRow, ...]


def execute(options: BenchOptions) -> None:
    """Measure and print.

    Raises:
        ModelError: the options cannot be run.
    """
    report = measure(options)
    if options.json:
        json.dump({"workload": "waste", **asdict(report)}, sys.stdout)
        print()
    else:
        print(table(report))


def measure(options: BenchOptions) -> WasteReport:
    """Hold the given lengths in both caches, and replay the trace on every block size.

    Raises:
        ModelError: the options cannot be run.
    """
    requests = make_requests(options.shape, vocab_size=_VOCAB_SIZE, seed=options.arrivals.seed)
    row_slots = max(total_lengths(requests))
    sizes = [size for size in options.waste.block_sizes if size < row_slots]
    limits = SchedulerConfig(
        max_num_batched_tokens=options.engine.max_num_batched_tokens,
        max_num_seqs=options.engine.max_num_seqs,
    )
    num_slots = options.waste.rows * row_slots
    with bar("replayed", len(requests) * (len(sizes) + 1)) as advance:
        rows = [replay(requests, size, num_slots, limits, advance) for size in (*sizes, row_slots)]
    return WasteReport(
        model=options.model.path,
        token_bytes=_token_bytes(options),
        trace=options.waste.trace_of,
        num_slots=num_slots,
        flat=hold(options.waste.lengths, options.waste.row_slots),
        paged=hold(options.waste.lengths, options.engine.block_size),
        rows=tuple(rows),
    )


def table(report: WasteReport) -> str:
    """The report as aligned lines. O(rows)."""
    lines = [f"{'':<22}{'tokens':>9}{'slots':>9}{'MiB':>9}{'wasted':>9}"]
    for kind, one in (("flat, rows", report.flat), ("paged, blocks", report.paged)):
        size = one.num_slots * report.token_bytes / 2**20
        lines.append(
            f"{f'{kind} of {one.block_size:,}':<22}"
            f"{one.num_tokens:>9,}{one.num_slots:>9,}{size:>9.1f}{one.wasted:>9.1%}"
        )
    lines += ["", *_trace_lines(report.trace, report.num_slots, report.rows)]
    return "\n".join(lines)


def _trace_lines(trace: str, num_slots: int, rows: Sequence[TraceRow]) -> list[str]:
    head = f"{'block size':<12}{'steps':>8}{'running':>9}{'peak':>6}{'idle slots':>12}"
    head += f"{'occupied':>10}{'peak':>7}{'hits':>7}{'preempted':>11}"
    lines = [f"{trace}, in {num_slots:,} slots", head]
    for number, row in enumerate(rows):
        name = f"{row.block_size:,}" + (" flat" if number == len(rows) - 1 else "")
        lines.append(
            f"{name:<12}{row.num_steps:>8,}{row.mean_running:>9.1f}{row.peak_running:>6,}"
            f"{row.fragmentation:>12.1%}{row.mean_occupancy:>10.1%}{row.peak_occupancy:>7.0%}"
            f"{row.hit_rate:>7.0%}{row.num_preemptions:>11,}"
        )
    return lines


def _token_bytes(options: BenchOptions) -> int:
    """Bytes of a token's keys and values in all layers, each holding every token."""
    config = config_of(options.model.path).get_text_config()
    name = "bfloat16" if options.model.dtype == "auto" else options.model.dtype
    dtype: torch.dtype = getattr(torch, name)
    heads: int = config.num_key_value_heads
    layers: int = config.num_hidden_layers
    head_dim: int = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    return 2 * layers * heads * head_dim * dtype.itemsize
