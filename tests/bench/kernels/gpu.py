"""GPU cases: steps replayed from CUDA graphs, over buffer sets larger than L2, beside ceilings.

The ceilings are measured in the same run: a read-only sum and an elementwise copy of 1 GiB, and for
prefill a bfloat16 matrix product of 8192^3. A ratio is the time at the ceiling over ours. Beside
attention over latents, which reads little for long contexts, also a sum over the same memory: it
starts and ends as a kernel does. What a call costs the host is measured without a graph.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import Tensor

from backends.contract import AttentionTerms, Backend, Capabilities, KVCache, PagedBatch
from backends.sparse import SparseBackend
from backends.states import StateBackend
from tests.bench.kernels import host, moves, prefill, sparse, states
from tests.bench.kernels.cases import DecodeCase, Row, ragged
from tests.bench.kernels.graphs import against, buffer_sets, time_graph

READ, COPY, FLAT, AS_MANY = "read", "copy", "unshared", "a sum of as many bytes"
MATMUL = prefill.MATMUL
ONLY = ("latents", "sparse", "states")
"""What can be measured alone."""

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
_SHAPES = (
    DecodeCase(512, 512),
    DecodeCase(17, 5000, num_q_heads=64),
    DecodeCase(8, 4096, 8, 2),
    DecodeCase(64, 4096, 8, 1),
    DecodeCase(128, 2048, 16, 16, 64),
    DecodeCase(32, 3000, 24, 8, 96),
    DecodeCase(32, 4096, 8, 4, 256),
)
_RAGGED_48 = ragged(48, 200, 9000, 2200)
_RAGGED = (
    _RAGGED_48,
    replace(_RAGGED_48, num_q_heads=28, num_kv_heads=4),
    ragged(128, 100, 3000, 700),
    ragged(200, 30, 16000, 1200),
    DecodeCase(1, 100_000, others=((1, 500),) * 63, what="decode 1 x 100000 and 63 x 500"),
)
_EVEN = ((1, 8192), (1, 131072), (8, 8192), (64, 1024), (64, 4096), (64, 8192))
_QUANTISED = (
    *(DecodeCase(*shape) for shape in (*_EVEN, (256, 1024), (256, 4096))),
    *_RAGGED[:2],
)
_SHARED = (DecodeCase(64, 8192, shared=7168), DecodeCase(256, 2048, shared=1536))


LATENT_DIM = 576
_LATENTS = tuple(
    DecodeCase(batch, length, heads, 1, LATENT_DIM, value_dim=512, new=new, block_size=block_size)
    for batch, length, heads, new, block_size in (
        (1, 1024, 16, 1, 16),
        (1, 8192, 16, 1, 16),
        (1, 32768, 16, 1, 16),
        (8, 8192, 16, 1, 16),
        (32, 4096, 16, 1, 16),
        (64, 4096, 16, 1, 16),
        (132, 4096, 16, 1, 16),
        (256, 1024, 16, 1, 16),
        (256, 4096, 16, 1, 16),
        (64, 4096, 16, 2, 16),
        (64, 4096, 32, 1, 16),
        (64, 4096, 64, 1, 16),
        (64, 4096, 128, 1, 16),
        (64, 4096, 128, 1, 64),
        (256, 1024, 128, 1, 16),
        (1, 32768, 128, 1, 16),
        (1, 2048, 16, 2048, 16),
        (1, 8192, 16, 8192, 16),
        (1, 8192, 16, 8192, 64),
        (1, 2048, 128, 2048, 16),
        (4, 1024, 16, 1024, 16),
        (1, 16384, 16, 512, 16),
    )
)


def latent_cases(can: Capabilities) -> tuple[DecodeCase, ...]:
    """Attention over latents, if the backend has it: decode and prompts."""
    return _LATENTS if can.max_latent_dim >= LATENT_DIM else ()


def decode_cases(can: Capabilities) -> tuple[DecodeCase, ...]:
    """Decode of every kind, and latents: what a backend of these capabilities is timed on."""
    latents = latent_cases(can)
    plain = (*_DECODE, *_SHAPES, *_RAGGED)
    again = (*_QUANTISED, *(case for case in latents if case.batch == 64 and case.new == 1))
    quantised = tuple(replace(case, cache_dtype=kind) for kind in can.quantised for case in again)
    return (*plain, *quantised, *_SHARED, *latents)


def bench_gpu(backend: Backend, *, quick: bool, only: str | None = None) -> Iterator[Row]:
    """Decode, prefill, stores and states on the GPU beside the ceilings; quick: the small cases.

    Each row comes when it is measured: on a machine that compiles all of them that takes minutes.

    Args:
        backend: what to measure.
        quick: the small cases.
        only: one of ONLY.
    """
    device, can = backend.device, backend.capabilities
    found = ceilings(device)
    speed = {row.case: row.gb_per_s or row.tflop_per_s for row in found}
    yield from found
    if can.max_index_dim and only in (None, "sparse"):
        yield from sparse.bench_sparse(cast("SparseBackend", backend), speed[READ], quick=quick)
    if isinstance(backend, StateBackend) and only in (None, "states"):
        yield from states.bench_states(backend, speed[COPY], COPY, quick=quick)
    if only == "latents":
        yield from _bench_decode(backend, latent_cases(can), speed)
    if only is not None:
        return
    yield from _bench_decode(backend, _QUICK if quick else decode_cases(can), speed)
    if not quick:
        yield from prefill.bench_prefill(backend, speed[MATMUL])
    yield from moves.bench_moves(backend, quick=quick)
    yield from host.bench_host(backend)


def _bench_decode(
    backend: Backend, cases: Iterable[DecodeCase], speed: Mapping[str, float]
) -> Iterator[Row]:
    for case in cases:
        sets = [case.inputs(backend.device) for _ in range(buffer_sets(case.kv_bytes))]
        steps = [_attention_step(backend, *each) for each in sets]
        row = time_graph(case.name, steps, case.kv_bytes)
        at_ceiling = {name: case.kv_bytes / speed[name] / 1e3 for name in (READ, COPY)}
        if case.shared:
            at_ceiling[FLAT] = _without_sharing(backend, case)
        if case.value_dim:  # whose products may take longer than reading
            row = replace(row, tflop_per_s=case.flop / row.median_us / 1e6)
            sums = [cache.k.view(torch.float32).sum for _, cache, _ in sets]
            at_ceiling[AS_MANY] = time_graph(AS_MANY, sums, case.kv_bytes).median_us
        yield against(row, at_ceiling)


def _without_sharing(backend: Backend, case: DecodeCase) -> float:
    """Microseconds of the same step without its shared prefix."""
    steps = []
    for _ in range(buffer_sets(case.kv_bytes)):
        query, cache, batch = case.inputs(backend.device)
        batch = replace(batch, shared_prefix=None)
        steps.append(_attention_step(backend, query, cache, batch))
    return time_graph(case.name, steps, case.kv_bytes).median_us


def ceilings(device: torch.device) -> tuple[Row, ...]:
    """What the GPU can do: read 1 GiB, copy it, multiply matrices."""
    source = torch.randn(1 << 28, device=device)
    target = torch.empty_like(source)
    left, right = (torch.randn(8192, 8192, device=device).bfloat16() for _ in range(2))
    product = torch.empty_like(left)
    multiply = time_graph(MATMUL, [partial(torch.matmul, left, right, out=product)], 0)
    return (
        time_graph(READ, [source.sum], source.nbytes),
        time_graph(COPY, [partial(torch.neg, source, out=target)], 2 * source.nbytes),
        replace(multiply, tflop_per_s=2 * 8192**3 / multiply.median_us / 1e6),
    )


def _attention_step(
    backend: Backend, query: Tensor, cache: KVCache, batch: PagedBatch
) -> Callable[[], object]:
    terms = AttentionTerms(query.shape[-1] ** -0.5)
    out = query.new_empty(*query.shape[:2], cache.v.shape[3])
    return lambda: backend.paged_attention(query, cache, batch, terms, out=out)
