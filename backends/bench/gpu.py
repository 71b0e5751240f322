"""GPU cases: steps replayed from CUDA graphs, over buffer sets larger than L2, beside a copy."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from backends.bench.measured import BLOCK_SIZE, HEAD_DIM, DecodeCase, Row, row_of
from backends.contract import Backend, PagedBatch


def bench_gpu(backend: Backend, *, quick: bool) -> list[Row]:
    """Decode, prefill and stores on the GPU beside the copy bandwidth; quick: the small cases."""
    shapes = [(1, 1024), (1, 8192), (8, 1024)]
    if not quick:
        shapes += [
            (1, 32768),
            (1, 131072),
            (8, 8192),
            (64, 1024),
            (64, 8192),
            (256, 1024),
            (256, 4096),
        ]
    cases = [DecodeCase(batch, length) for batch, length in shapes]
    cases += [DecodeCase(1, 2048, new=2048), DecodeCase(16, 4096, new=512)][: 0 if quick else 2]
    device = backend.device
    source = torch.randn(1 << 28, device=device)
    target = torch.empty_like(source)
    rows = [_time_graph("copy of 1 GiB", [partial(target.copy_, source)], 2 * source.nbytes)]
    for case in cases:
        steps = []
        for _ in range(_buffer_sets(case.kv_bytes)):
            query, k, v, batch = case.inputs(device)
            out = torch.empty_like(query)
            steps.append(_attention_step(backend, query, k, v, batch, out))
        rows.append(_time_graph(case.name, steps, case.kv_bytes))
    for tokens in (1, 256, 8192) if quick else (1, 16, 256, 2048, 8192, 32768):
        size = 4 * tokens * 8 * HEAD_DIM * 2
        steps = [_store_step(backend, tokens) for _ in range(_buffer_sets(size))]
        rows.append(_time_graph(f"store_kv, {tokens} tokens, 8 heads d128, bf16", steps, size))
    return rows


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
    """Capture the steps in one CUDA graph and replay it; microseconds a step, 25 rounds."""
    for step in steps:
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for step in steps:
            step()
    replays = max(1, 32 // len(steps))
    times = []
    for _ in range(26):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(replays):
            graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / replays / len(steps))
    return row_of(case, times[1:], size, {}, {})
