"""Sparse decode at the sizes of DeepSeek-V3.2: 2,048 of a long context's tokens a query.

Each operation alone, then a layer's three in a row. Beside scores stands the time of reading the
index keys at the ceiling; beside attention to chosen tokens, dense attention over a context of as
many; beside the layer, both together, the reading at 0.8 of the ceiling.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from backends.contract import AttentionTerms, KVCache
from backends.sparse import SparseBackend, choose
from tests.bench.kernels.cases import DecodeCase, Row
from tests.bench.kernels.graphs import against, buffer_sets, time_graph

CHOSEN, INDEX_HEADS, INDEX_DIM = 2048, 64, 128
SHARE = 0.8
DENSE, READING, BOTH = "dense over as many", "read", "dense + read at 0.8"
_LATENTS = DecodeCase(32, 65536, num_q_heads=16, num_kv_heads=1, head_dim=576, value_dim=512)
CASES = (
    _LATENTS,
    replace(_LATENTS, num_q_heads=128),
    replace(_LATENTS, batch=1),
    replace(_LATENTS, batch=32, length=8192),
)


def bench_sparse(backend: SparseBackend, read_gb_per_s: float, *, quick: bool) -> Iterator[Row]:
    """Rows for each case beside the ceiling of reads and dense attention."""
    for case in CASES[:1] if quick else CASES:
        size = case.batch * case.length * INDEX_DIM * 2
        reading = size / read_gb_per_s / 1e3
        dense = replace(case, length=CHOSEN)
        kept = [_Layer(backend, dense) for _ in range(buffer_sets(dense.kv_bytes))]
        dense_us = time_graph(DENSE, [each.attend for each in kept], dense.kv_bytes).median_us
        kept = [_Layer(backend, case) for _ in range(max(2, buffer_sets(size)))]
        name = f"{case.batch} x {CHOSEN} of {case.length}, {case.num_q_heads} heads"

        def timed(what: str, call: Callable[["_Layer"], Callable[[], object]], moved: int) -> Row:
            return time_graph(f"sparse {what}, {name}", [call(each) for each in kept], moved)  # noqa: B023

        yield against(timed("scores", lambda each: each.score, size), {READING: reading})
        yield timed("choice", lambda each: each.choose, 4 * case.batch * case.length)
        attended = timed("attention", lambda each: each.attend_chosen, dense.kv_bytes)
        yield against(attended, {DENSE: dense_us})
        both = {BOTH: dense_us + reading / SHARE}
        yield against(timed("layer", lambda each: each.run, size + dense.kv_bytes), both)


class _Layer:
    """A layer's tensors, and its calls; index keys lie in the blocks of the latents."""

    def __init__(self, backend: SparseBackend, case: DecodeCase) -> None:
        self._backend = backend
        device = backend.device
        self._query, self._cache, self._batch = case.inputs(device)
        keys = torch.randn(*self._cache.k.shape[:3], INDEX_DIM, device=device).to(case.dtype)
        self._index = KVCache(keys, keys, is_latent=True)
        shape = (case.batch, INDEX_HEADS, INDEX_DIM)
        self._index_query = torch.randn(shape, device=device).to(case.dtype)
        self._weights = torch.randn(shape[:2], device=device)
        self._scores = torch.empty((case.batch, case.length), device=device)
        self._chosen = torch.zeros((case.batch, CHOSEN), dtype=torch.int32, device=device)
        self._terms = AttentionTerms(case.head_dim**-0.5)
        self.score()
        self.choose()

    def attend(self) -> object:
        """Dense attention."""
        return self._backend.paged_attention(self._query, self._cache, self._batch, self._terms)

    def score(self) -> object:
        """The scores of the index."""
        call = (self._index_query, self._weights, self._index, self._batch, 0, self._scores)
        return self._backend.score_index(*call)

    def choose(self) -> object:
        """The choice."""
        return self._backend.choose_tokens(self._scores, self._batch, 0, self._chosen)

    def attend_chosen(self) -> object:
        """Attention to what is chosen."""
        call = (self._query, self._cache, self._batch, self._chosen, self._terms)
        return self._backend.attend_chosen(*call)

    def run(self) -> object:
        """All three, as the engine calls them."""
        call = (self._index_query, self._weights, self._index, self._batch, CHOSEN)
        chosen = choose(self._backend, *call)
        return self._backend.attend_chosen(
            self._query, self._cache, self._batch, chosen, self._terms
        )
