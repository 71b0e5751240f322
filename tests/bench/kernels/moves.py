"""What moves without computing, on a GPU: stores, block copies, slots.

Beside stores and copies stands a plain elementwise copy that moves as many bytes.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from backends.contract import Backend, KVCache
from tests.bench.kernels.cases import BLOCK_SIZE, HEAD_DIM, Row
from tests.bench.kernels.graphs import against, buffer_sets, time_graph

HEADS = 8
LAYERS = 32
COPY = "copy of as many bytes"


def bench_moves(backend: Backend, *, quick: bool) -> Iterator[Row]:
    """Rows for stores, copies and slots."""
    kinds = (torch.bfloat16, *(() if quick else backend.capabilities.quantised))
    for kind in kinds:
        for tokens in (1, 256, 8192) if quick else (1, 16, 256, 2048, 8192, 32768):
            size = 2 * tokens * HEADS * HEAD_DIM * (2 + kind.itemsize)
            steps = [_store_step(backend, tokens, kind) for _ in range(buffer_sets(size))]
            name = f"store_kv, {tokens} tokens, 8 heads d128, bf16 to {str(kind)[6:]}"
            row = time_graph(name, steps, size)
            yield against(row, {COPY: copy_us(backend.device, size)})
    for seqs, new in ((1, 1), (256, 1), (1, 8192), (64, 128)):
        name = f"compute_slot_mapping, {seqs} x {new}"
        yield time_graph(name, [_slots_step(backend, seqs, new)] * 32, 0)
    if not quick:
        for blocks in (1, 64, 256):
            size = 4 * LAYERS * blocks * BLOCK_SIZE * HEADS * HEAD_DIM * 2
            name = f"copy_blocks, {blocks} blocks x {LAYERS} layers, bf16"
            steps = [_copy_step(backend, blocks) for _ in range(buffer_sets(size))]
            row = time_graph(name, steps, size)
            yield against(row, {COPY: copy_us(backend.device, size)})


def _store_step(backend: Backend, tokens: int, kind: torch.dtype) -> Callable[[], object]:
    device = backend.device
    rows = [torch.randn(tokens, HEADS, HEAD_DIM, device=device).bfloat16() for _ in range(2)]
    blocks = max(64, 2 * tokens // BLOCK_SIZE)
    shape = (blocks, BLOCK_SIZE, HEADS, HEAD_DIM)
    caches = [torch.zeros(shape, device=device).to(kind) for _ in range(2)]
    slots = torch.randperm(blocks * BLOCK_SIZE, device=device)[:tokens]
    scales = []
    if kind in backend.capabilities.quantised:
        scales = [torch.ones(HEADS, device=device) for _ in caches]
    cache = KVCache(*caches, *scales)
    return lambda: backend.store_kv(rows[0], rows[1], cache, slots)


def copy_us(device: torch.device, size: int) -> float:
    """Microseconds of an elementwise copy that reads and writes this number of bytes in all."""
    steps = []
    for _ in range(buffer_sets(size)):
        source = torch.randn(size // 4, device=device).bfloat16()
        steps.append(partial(torch.neg, source, out=torch.empty_like(source)))
    return time_graph(COPY, steps, size).median_us


def _slots_step(backend: Backend, seqs: int, new: int) -> Callable[[], object]:
    device = backend.device
    starts = torch.arange(0, seqs * new + 1, new, dtype=torch.int32, device=device)
    lengths = torch.full((seqs,), new + 1000, dtype=torch.int32, device=device)
    blocks = -(-(new + 1000) // BLOCK_SIZE)
    table = torch.randperm(seqs * blocks, device=device).view(seqs, blocks).int()
    out = torch.empty(seqs * new, dtype=torch.int64, device=device)
    return lambda: backend.compute_slot_mapping(starts, lengths, table, BLOCK_SIZE, out)


def _copy_step(backend: Backend, blocks: int) -> Callable[[], object]:
    """All layers' caches, as many blocks again as are copied between."""
    device = backend.device
    shape = (4 * blocks, BLOCK_SIZE, HEADS, HEAD_DIM)
    caches = [torch.zeros(shape, device=device).bfloat16() for _ in range(2 * LAYERS)]
    copies = torch.randperm(4 * blocks, device=device)[: 2 * blocks].view(-1, 2)
    return lambda: backend.copy_blocks(caches, copies)
