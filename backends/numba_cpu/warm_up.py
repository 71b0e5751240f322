"""Compile what layers need before the first request: one small call of each kind of layer.

A kernel here is compiled once for each pair of dtypes, whatever the sizes and features.
"""

from collections.abc import Sequence
from typing import cast

import torch

from backends.contract import AttentionTerms, Backend, KVCache, LayerCall, PagedBatch
from backends.sparse import SparseBackend, choose


def warm_up(backend: Backend, layers: Sequence[LayerCall]) -> None:
    """Run every operation once a pair of dtypes, on small tensors; see `Backend.warmup`."""
    kinds = {(each.dtype, each.cache.k.dtype) for each in layers}
    for dtype, kind in sorted(kinds, key=str):
        cache = KVCache(*(torch.zeros(2, 2, 1, 8).to(kind) for _ in range(2)))
        rows = torch.zeros(2, 1, 8, dtype=dtype)
        slots = torch.empty(2, dtype=torch.int64)
        starts, lengths = (torch.tensor(n, dtype=torch.int32) for n in ([0, 2], [2]))
        table = torch.zeros(1, 1, dtype=torch.int32)
        backend.compute_slot_mapping(starts, lengths, table, 2, slots)
        backend.store_kv(rows, rows, cache, slots)
        backend.copy_blocks(cache.tensors, torch.tensor([[0, 1]]))
        batch = PagedBatch(starts, lengths, table, slots, 2, 2)
        backend.paged_attention(rows, cache, batch, AttentionTerms(1.0))
    for dtype in sorted({each.index.cache.k.dtype for each in layers if each.index}, key=str):
        _choose(cast("SparseBackend", backend), dtype)


def _choose(backend: SparseBackend, dtype: torch.dtype) -> None:
    """Store, score, choose and attend over index keys of this dtype."""
    keys, rows = torch.zeros(2, 2, 1, 8, dtype=dtype), torch.zeros(2, 1, 8, dtype=dtype)
    index, slots = KVCache(keys, keys, is_latent=True), torch.tensor([0, 1])
    starts, lengths, table = (torch.tensor(n, dtype=torch.int32) for n in ([0, 2], [2], [[0]]))
    batch = PagedBatch(starts, lengths, table, slots, 2, 2)
    backend.store_kv(rows, None, index, slots)
    chosen = choose(backend, rows, torch.zeros(2, 1), index, batch, 1)
    backend.attend_chosen(rows, index, batch, chosen, AttentionTerms(1.0))
