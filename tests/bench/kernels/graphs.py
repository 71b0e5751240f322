"""Timing on a GPU: steps captured in a CUDA graph and replayed, medians over rounds."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from tests.bench.kernels.cases import Row, row_of


def buffer_sets(size: int) -> int:
    """How many copies of the inputs exceed twice the L2 cache; at most 64."""
    l2 = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    return max(1, min(64, -(-2 * l2 // max(1, size))))


def time_graph(case: str, steps: Sequence[Callable[[], object]], size: int) -> Row:
    """Capture the steps in one CUDA graph and replay it; microseconds a step, 25 or 5 rounds."""
    for step in steps:
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for step in steps:
            step()
    first = _replay(graph, 1)
    replays = max(1, min(-(-64 // len(steps)), int(20_000 / first)))
    rounds = 25 if first * replays < 100_000 else 5
    times = [_replay(graph, replays) / replays / len(steps) for _ in range(rounds)]
    return row_of(case, times, size, {}, {})


def _replay(graph: torch.cuda.CUDAGraph, count: int) -> float:
    """Microseconds that the replays take."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(count):
        graph.replay()
    stop.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(stop)) * 1e3


def against(row: Row, at_ceiling: dict[str, float]) -> Row:
    """The row beside what it would take at the ceilings, in microseconds."""
    ratios = {name: time / row.median_us for name, time in at_ceiling.items()}
    return replace(row, others_us=at_ceiling, ratios=ratios)
