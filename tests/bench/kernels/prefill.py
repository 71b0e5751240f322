"""Prefill on a GPU: each case beside the matrix ceiling and other installed libraries.

Others are the plug-in backends that can run here, on the same tensors, and where the queries are
the whole context torch's own attention over contiguous K and V: its FlashAttention-2 kernel and
cuDNN's. A library that refuses a case is left out of its row.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from backends.contract import AttentionTerms, Backend, KVCache, PagedBatch
from backends.errors import BackendError
from backends.registry import backend_names, get_backend
from tests.bench.kernels.cases import DecodeCase, Row
from tests.bench.kernels.graphs import against, buffer_sets, time_graph

MATMUL = "matmul"
BUILT_IN = ("numba", "triton")
_LENGTHS = tuple(100 + 260 * (7 * number % 16) for number in range(16))
PROMPTS = DecodeCase(
    1,
    _LENGTHS[0],
    new=_LENGTHS[0],
    others=tuple((length, length) for length in _LENGTHS[1:]),
    what="16 prompts of 100 to 4000",
)
CASES = (
    DecodeCase(1, 2048, new=2048),
    DecodeCase(1, 8192, new=8192),
    DecodeCase(4, 4096, new=4096),
    DecodeCase(1, 32768, new=32768),
    DecodeCase(1, 32768, new=2048),
    DecodeCase(16, 4096, new=512),
    PROMPTS,
    DecodeCase(64, 4096, new=4),
    DecodeCase(4, 16384, new=4),
    DecodeCase(1, 32768, new=8),
    DecodeCase(1, 8192, new=32),
    DecodeCase(1, 32768, new=128),
    DecodeCase(4, 16384, new=64),
    DecodeCase(1, 8192, 64, 8, 64, new=8192),
    DecodeCase(1, 8192, 24, 8, 96, new=8192),
    DecodeCase(1, 8192, 8, 4, 256, new=8192),
    DecodeCase(
        128, 2048, others=((2048, 2048),), what="a mixed step: decode 128 x 2048, a prompt of 2048"
    ),
    DecodeCase(
        64, 4096, others=((512, 8192),), what="a mixed step: decode 64 x 4096, 512 tokens of 8192"
    ),
    DecodeCase(
        15, 4096, others=((64, 8192),), what="a mixed step: decode 15 x 4096, 64 tokens of 8192"
    ),
    DecodeCase(
        3, 32768, others=((128, 32768),), what="a mixed step: decode 3 x 32768, 128 tokens of 32768"
    ),
)
_DENSE = {
    "FlashAttention-2 of torch": SDPBackend.FLASH_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
}

Step = Callable[[], object]


def bench_prefill(backend: Backend, tflop_per_s: float) -> Iterator[Row]:
    """Every case beside a matrix product of this speed and the others."""
    chunk = DecodeCase(1, 32768, new=2048)
    quantised = (replace(chunk, cache_dtype=kind) for kind in backend.capabilities.quantised)
    for case in (*CASES, *quantised):
        inputs = [case.inputs(backend.device) for _ in range(buffer_sets(case.kv_bytes))]
        row = time_graph(case.name, [_paged(backend, *one) for one in inputs], case.kv_bytes)
        at = {MATMUL: case.flop / tflop_per_s / 1e6}
        for name, steps in _others(backend, case, inputs):
            try:
                at[name] = time_graph(name, steps, case.kv_bytes).median_us
            except (RuntimeError, BackendError):
                continue
        yield against(replace(row, tflop_per_s=case.flop / row.median_us / 1e6), at)


def _paged(backend: Backend, query: Tensor, cache: KVCache, batch: PagedBatch) -> Step:
    out, terms = torch.empty_like(query), AttentionTerms(query.shape[-1] ** -0.5)
    return lambda: backend.paged_attention(query, cache, batch, terms, out=out)


def _others(
    backend: Backend, case: DecodeCase, inputs: list[tuple[Tensor, KVCache, PagedBatch]]
) -> Iterator[tuple[str, list[Step]]]:
    for name in set(backend_names()) - {backend.name, *BUILT_IN}:
        try:
            other = get_backend(name)
        except BackendError:
            continue
        yield name, [_paged(other, *one) for one in inputs]
    if case.new == case.length and not case.others:
        for name, kind in _DENSE.items():
            yield name, [_dense(case, kind, *one[:2]) for one in inputs]


def _dense(case: DecodeCase, kind: SDPBackend, query: Tensor, cache: KVCache) -> Step:
    """Attention of torch on as much K and V, without gaps and in order."""
    shape = (case.batch, case.length, -1, case.head_dim)
    q = query.view(shape).transpose(1, 2)
    k, v = (each[1:].reshape(shape).transpose(1, 2) for each in cache.tensors)

    def attend() -> Tensor:
        with sdpa_kernel(kind):
            return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return attend
