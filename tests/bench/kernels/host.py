"""What a call costs the host: arguments checked, kernels launched, nothing waited for.

Of several sequences also what it costs the later layers of a step, which find the first one's list
of work in `PagedBatch.kept`.
"""

import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from functools import partial

import torch

from backends.contract import AttentionTerms, Backend
from tests.bench.kernels.cases import BLOCK_SIZE, DecodeCase, Row, row_of

PREFILL = (
    DecodeCase(1, 2048, new=64),
    DecodeCase(1, 512, new=256),
    DecodeCase(1, 2048, new=2048),
    DecodeCase(1, 8192, new=32),
    DecodeCase(4, 512, new=64),
    DecodeCase(16, 256, new=256),
    DecodeCase(4, 512, others=((64, 512),), what="a mixed step: decode 4 x 512, 64 tokens of 512"),
)
CALLS = 50  # of a few microseconds of the GPU each, or enough of them that the host runs ahead
ROUNDS = 41


def bench_host(backend: Backend) -> Iterator[Row]:
    """Microseconds of the host a call of each operation, launched without a graph."""
    for case in (DecodeCase(1, 1024), DecodeCase(64, 256)):
        for name, call in _calls(backend, case):
            yield _time_host(f"host: {name}", call)
    for case in PREFILL:
        yield _time_host(f"host: {case.name}", _attend(backend, case))
        if len(case.seqs) > 1:
            yield _time_host(f"host: {case.name}, a later layer", _attend(backend, case, {}))


def _calls(backend: Backend, case: DecodeCase) -> Iterator[tuple[str, Callable[[], object]]]:
    _, cache, batch = case.inputs(backend.device)
    yield case.name, _attend(backend, case)
    rows = torch.randn(case.batch, case.num_kv_heads, case.head_dim, device=backend.device)
    slots = torch.arange(case.batch, device=backend.device)
    rows = rows.to(case.dtype)
    store = partial(backend.store_kv, rows, rows, cache, slots)
    yield f"store_kv, {case.batch} tokens", store
    where = (batch.query_start_loc, batch.seq_lens, batch.block_table, BLOCK_SIZE, slots)
    fill = partial(backend.compute_slot_mapping, *where)
    yield f"compute_slot_mapping, {case.batch} x 1", fill


def _attend(
    backend: Backend, case: DecodeCase, kept: dict[Hashable, object] | None = None
) -> Callable[[], object]:
    query, cache, batch = case.inputs(backend.device)
    out, terms = torch.empty_like(query), AttentionTerms(0.1)
    batch = replace(batch, kept=kept)
    return partial(backend.paged_attention, query, cache, batch, terms, out=out)


def _time_host(case: str, call: Callable[[], object]) -> Row:
    """Calls in a row, few enough that the GPU's queue never fills, waited for in between."""
    times = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter_ns()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter_ns() - start) / 1e3 / CALLS)
    return row_of(case, times[1:], 0, {}, {})
