"""Argument checks that every launcher makes before it touches memory.

Shapes, dtypes, devices and capabilities: all are O(1) and need no synchronisation with a GPU.
Values (a slot past the cache, a table entry that is no block) are checked by backends for which
that is cheap; otherwise they are the caller's duty.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from backends.contract import AttentionTerms, Backend, KVCache, PagedBatch, require_tensor
from backends.errors import InvalidArgumentError, UnsupportedError


def check_cache(backend: Backend, cache: KVCache) -> None:
    """A cache on the backend's device, within its capabilities."""
    cache.check()
    k, can = cache.k, backend.capabilities
    if k.device.type != backend.device.type:
        raise InvalidArgumentError("cache.k", f"device {backend.device}", f"{k.device}")
    if k.dtype not in can.dtypes and k.dtype not in can.quantised:
        names = _names((*can.dtypes, *can.quantised))
        raise UnsupportedError("cache.k", f"a dtype of {names}", str(k.dtype))
    head_dim, limit = k.shape[3], can.max_head_dim
    if cache.is_latent:
        limit = can.max_latent_dim
        if limit == 0:
            wanted = f"keys and values, because the backend {backend.name} does not support latents"
            raise UnsupportedError("cache", wanted, "latents")
    if head_dim > limit:
        raise UnsupportedError("cache.k", f"a head_dim of at most {limit}", str(head_dim))


def _dtype_beside(backend: Backend, name: str, tensor: Tensor, cache: KVCache) -> torch.dtype:
    """The dtype wanted of keys, values and queries: the cache's, or any beside a quantised one."""
    if cache.k.dtype not in backend.capabilities.quantised:
        return cache.k.dtype
    require_tensor(name, tensor)
    if tensor.dtype not in backend.capabilities.dtypes:
        wanted = f"a dtype of {_names(backend.capabilities.dtypes)}"
        raise UnsupportedError(name, wanted, str(tensor.dtype))
    return tensor.dtype


def check_store_kv(
    backend: Backend, key: Tensor, value: Tensor | None, cache: KVCache, slot_mapping: Tensor
) -> None:
    """The arguments of `store_kv` agree with each other."""
    check_cache(backend, cache)
    dtype, device = _dtype_beside(backend, "key", key, cache), cache.k.device
    require_tensor("slot_mapping", slot_mapping, dtype=torch.int64, shape=(None,), device=device)
    shape = (slot_mapping.shape[0], *cache.k.shape[2:])
    require_tensor("key", key, dtype=dtype, shape=shape, device=device)
    if not cache.is_latent:
        require_tensor("value", value, dtype=dtype, shape=shape, device=device)
    elif value is not None:
        raise InvalidArgumentError("value", "None beside a cache of latents", "a value")


def check_paged_attention(
    backend: Backend,
    query: Tensor,
    cache: KVCache,
    batch: PagedBatch,
    terms: AttentionTerms,
    out: Tensor | None,
) -> None:
    """The arguments of `paged_attention` agree with each other and the capabilities."""
    check_cache(backend, cache)
    dtype, device = _dtype_beside(backend, "query", query, cache), cache.k.device
    if batch.device != device:
        raise InvalidArgumentError("batch", f"device {device}", f"device {batch.device}")
    block_size, num_kv_heads, head_dim = cache.k.shape[1:]
    require_tensor(
        "query", query, dtype=dtype, shape=(batch.num_tokens, None, head_dim), device=device
    )
    num_q_heads, can = query.shape[1], backend.capabilities
    if num_q_heads == 0 or num_q_heads % num_kv_heads:
        raise InvalidArgumentError(
            "query", f"a multiple of {num_kv_heads} heads", f"{num_q_heads} heads"
        )
    limit = can.max_group_size
    if num_q_heads // num_kv_heads > limit and not cache.is_latent:
        came = f"{num_q_heads} over {num_kv_heads}"
        raise UnsupportedError("query", f"at most {limit} query heads a KV head", came)
    room = batch.block_table.shape[1] * block_size
    if room < batch.max_seq_len:
        wanted = f"entries for max_seq_len = {batch.max_seq_len} tokens"
        raise InvalidArgumentError("batch.block_table", wanted, f"entries for {room}")
    if out is not None:
        shape = (batch.num_tokens, num_q_heads, cache.v.shape[3])
        require_tensor("out", out, dtype=dtype, shape=shape, device=device)
    _check_terms(backend, terms, num_q_heads, device)


def _check_terms(
    backend: Backend, terms: AttentionTerms, num_q_heads: int, device: torch.device
) -> None:
    for feature, value in (
        ("window", terms.window),
        ("soft_cap", terms.soft_cap),
        ("sinks", terms.sinks),
        ("batch_invariant", terms.batch_invariant or None),
    ):
        if value is not None and feature not in backend.capabilities.features:
            wanted = f"None, because the backend {backend.name} does not support it"
            raise UnsupportedError(f"terms.{feature}", wanted, "a value")
    if terms.sinks is not None:
        require_tensor("terms.sinks", terms.sinks, shape=(num_q_heads,), device=device)


def check_copy_blocks(backend: Backend, caches: Sequence[Tensor], copies: Tensor) -> None:
    """Caches have blocks that are dense inside; `copies` is a list of pairs beside them."""
    require_tensor("copies", copies, dtype=torch.int64, shape=(None, 2))
    if copies.device.type != backend.device.type:
        raise InvalidArgumentError("copies", f"device {backend.device}", f"{copies.device}")
    for index, cache in enumerate(caches):
        name = f"caches[{index}]"
        require_tensor(name, cache, device=copies.device)
        if cache.dim() < 2 or 0 in cache.shape:
            raise InvalidArgumentError(name, "[num_blocks, ...]", f"shape {list(cache.shape)}")
        if not cache[0].is_contiguous():
            raise InvalidArgumentError(name, "blocks that are contiguous inside", "gaps")


def check_slot_mapping(
    backend: Backend,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    block_size: int,
    out: Tensor,
) -> None:
    """The arguments of `compute_slot_mapping` agree with each other."""
    require_tensor("seq_lens", seq_lens, dtype=torch.int32, shape=(None,))
    if seq_lens.device.type != backend.device.type:
        raise InvalidArgumentError("seq_lens", f"device {backend.device}", f"{seq_lens.device}")
    device, num_seqs = seq_lens.device, seq_lens.shape[0]
    require_tensor(
        "query_start_loc", query_start_loc, dtype=torch.int32, shape=(num_seqs + 1,), device=device
    )
    require_tensor(
        "block_table", block_table, dtype=torch.int32, shape=(num_seqs, None), device=device
    )
    require_tensor("out", out, dtype=torch.int64, shape=(None,), device=device)
    if block_size < 1:
        raise InvalidArgumentError("block_size", "at least 1", str(block_size))


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(str(dtype) for dtype in dtypes)
