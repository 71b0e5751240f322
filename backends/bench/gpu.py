"""GPU cases: steps replayed from CUDA graphs, over buffer sets larger than L2, beside ceilings.

The ceilings are measured in the same run: a read-only sum and an elementwise copy of 1 GiB, and for
prefill a bfloat16 matrix product of 8192^3. A ratio is the time at the ceiling over ours.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from backends.bench.measured import BLOCK_SIZE, HEAD_DIM, DecodeCase, Row, row_of
from backends.contract import Backend, PagedBatch

READ, COPY, MATMUL = "read", "copy", "matmul"

_QUICK = (DecodeCase(1, 1024), DecodeCase(1, 8192), DecodeCase(8, 1024))
_DECODE = (
    *_QUICK,
    DecodeCase(1, 32768),
    DecodeCase(1, 131072),
    DecodeCase(8, 8192),
    DecodeCase(64, 1024),
    DecodeCase(64, 8192),
    DecodeCase(256, 1024),
    DecodeCase(256, 4096),
    DecodeCase(1, 8192, num_q_heads=16),
    DecodeCase(64, 8192, num_q_heads=16),
    DecodeCase(256, 1024, num_q_heads=16),
)
_PREFILL = (
    DecodeCase(1, 2048, new=2048),
    DecodeCase(1, 8192, new=8192),
    DecodeCase(4, 4096, new=4096),
    DecodeCase(1, 32768, new=32768),
    DecodeCase(1, 32768, new=2048),
    DecodeCase(16, 4096, new=512),
)


def bench_gpu(backend: Backend, *, quick: bool) -> list[Row]:
    """Decode, prefill and stores on the GPU beside the ceilings; quick: the small cases."""
    device = backend.device
    ceilings = _ceilings(device)
    speed = {row.case: row.gb_per_s or row.tflop_per_s for row in ceilings}
    rows = list(ceilings)
    for case in _QUICK if quick else (*_DECODE, *_PREFILL):
        steps = []
        for _ in range(_buffer_sets(case.kv_bytes)):
            query, k, v, batch = case.inputs(device)
            steps.append(_attention_step(backend, query, k, v, batch, torch.empty_like(query)))
        row = _time_graph(case.name, steps, case.kv_bytes)
        if case.new > 1:
            row = replace(row, tflop_per_s=case.flop / row.median_us / 1e6)
            rows.append(_against(row, {MATMUL: case.flop / speed[MATMUL] / 1e6}))
        else:
            at_ceiling = {name: case.kv_bytes / speed[name] / 1e3 for name in (READ, COPY)}
            rows.append(_against(row, at_ceiling))
    for tokens in (1, 256, 8192) if quick else (1, 16, 256, 2048, 8192, 32768):
        size = 4 * tokens * 8 * HEAD_DIM * 2
        steps = [_store_step(backend, tokens) for _ in range(_buffer_sets(size))]
        row = _time_graph(f"store_kv, {tokens} tokens, 8 heads d128, bf16", steps, size)
        rows.append(_against(row, {COPY: size / speed[COPY] / 1e3}))
    return rows


def _ceilings(device: torch.device) -> tuple[Row, ...]:
    source = torch.randn(1 << 28, device=device)
    target = torch.empty_like(source)
    left, right = (torch.randn(8192, 8192, device=device).bfloat16() for _ in range(2))
    product = torch.empty_like(left)
    multiply = _time_graph(MATMUL, [partial(torch.matmul, left, right, out=product)], 0)
    return (
        _time_graph(READ, [source.sum], source.nbytes),
        _time_graph(COPY, [partial(torch.neg, source, out=target)], 2 * source.nbytes),
        replace(multiply, tflop_per_s=2 * 8192**3 / multiply.median_us / 1e6),
    )


def _against(row: Row, at_ceiling: dict[str, float]) -> Row:
    ratios = {name: time / row.median_us for name, time in at_ceiling.items()}
    return replace(row, others_us=at_ceiling, ratios=ratios)


def _attention_step(
    backend: Backend, query: Tensor, k: Tensor, v: Tensor, batch: PagedBatch, out: Tensor
) -> Callable[[], object]:
    scale = query.shape[-1] ** -0.5
    return lambda: backend.paged_attention(query, k, v, batch, scale=scale, out=out)


def _store_step(backend: Backend, tokens: int) -> Callable[[], object]:
    device = backend.device
    rows = [torch.randn(tokens, 8, HEAD_DIM, device=device).bfloat16() for _ in range(2)]
    blocks = max(64, 2 * tokens // BLOCK_SIZE)
    shape = (blocks, BLOCK_SIZE, 8, HEAD_DIM)
    caches = [torch.zeros(shape, device=device, dtype=torch.bfloat16) for _ in range(2)]
    slots = torch.randperm(blocks * BLOCK_SIZE, device=device)[:tokens]
    return lambda: backend.store_kv(rows[0], rows[1], caches[0], caches[1], slots)


def _buffer_sets(size: int) -> int:
    """How many copies of the inputs exceed twice the L2 cache; at most 64."""
    l2 = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    return max(1, min(64, -(-2 * l2 // max(1, size))))


def _time_graph(case: str, steps: Sequence[Callable[[], object]], size: int) -> Row:
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
    """Microseconds that so many replays take."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(count):
        graph.replay()
    stop.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(stop)) * 1e3
