"""Argument checks that every launcher makes before it touches memory.

Shapes, dtypes, devices and capabilities: all are O(1) and need no synchronisation with a GPU. What
only the values can tell (a slot past the cache, a table entry that is no block) is checked by
backends for which looking is cheap, and is the caller's duty otherwise.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from backends.contract import Backend, PagedBatch, require_tensor
from backends.errors import InvalidArgumentError, UnsupportedError


def check_cache(
    backend: Backend,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Two caches of one shape and dtype, on the backend's device, within its capabilities.

    And their scales: only where the caches are quantised.
    """
    require_tensor("k_cache", k_cache, shape=(None, None, None, None))
    device, dtype, shape = k_cache.device, k_cache.dtype, k_cache.shape
    if device.type != backend.device.type:
        raise InvalidArgumentError("k_cache", f"device {backend.device}", f"{device}")
    can = backend.capabilities
    if dtype not in can.dtypes and dtype not in can.quantised:
        names = _names((*can.dtypes, *can.quantised))
        raise UnsupportedError("k_cache", f"a dtype of {names}", str(dtype))
    if 0 in shape:
        raise InvalidArgumentError("k_cache", "no empty dimension", f"shape {list(shape)}")
    head_dim, limit = shape[3], can.max_head_dim
    if head_dim > limit:
        raise UnsupportedError("k_cache", f"a head_dim of at most {limit}", str(head_dim))
    require_tensor("v_cache", v_cache, dtype=dtype, shape=shape, device=device)
    if k_scale is None and v_scale is None:
        return
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None:
            _check_scale(name, scale, k_cache, quantised=dtype in can.quantised)


def _check_scale(name: str, scale: Tensor, cache: Tensor, *, quantised: bool) -> None:
    if not quantised:
        raise InvalidArgumentError(name, f"None beside a cache of {cache.dtype}", "a value")
    require_tensor(name, scale, dtype=torch.float32, shape=(None,), device=cache.device)
    if scale.shape[0] not in (1, cache.shape[2]):
        came = f"shape {list(scale.shape)}"
        raise InvalidArgumentError(name, f"shape [1] or [{cache.shape[2]}]", came)


def _dtype_beside(backend: Backend, name: str, tensor: Tensor, cache: Tensor) -> torch.dtype:
    """The dtype wanted of keys, values and queries: the cache's, or any beside a quantised one."""
    if cache.dtype not in backend.capabilities.quantised:
        return cache.dtype
    require_tensor(name, tensor)
    if tensor.dtype not in backend.capabilities.dtypes:
        wanted = f"a dtype of {_names(backend.capabilities.dtypes)}"
        raise UnsupportedError(name, wanted, str(tensor.dtype))
    return tensor.dtype


def check_store_kv(
    backend: Backend,
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """The arguments of `store_kv` agree with each other."""
    check_cache(backend, k_cache, v_cache, k_scale, v_scale)
    dtype, device = _dtype_beside(backend, "key", key, k_cache), k_cache.device
    require_tensor("slot_mapping", slot_mapping, dtype=torch.int64, shape=(None,), device=device)
    shape = (slot_mapping.shape[0], k_cache.shape[2], k_cache.shape[3])
    require_tensor("key", key, dtype=dtype, shape=shape, device=device)
    require_tensor("value", value, dtype=dtype, shape=shape, device=device)


def check_paged_attention(
    backend: Backend,
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: Tensor | None,
    out: Tensor | None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    batch_invariant: bool = False,
) -> None:
    """The arguments of `paged_attention` agree with each other and the capabilities."""
    check_cache(backend, k_cache, v_cache, k_scale, v_scale)
    dtype, device = _dtype_beside(backend, "query", query, k_cache), k_cache.device
    if batch.device != device:
        raise InvalidArgumentError("batch", f"device {device}", f"device {batch.device}")
    block_size, num_kv_heads, head_dim = k_cache.shape[1:]
    require_tensor(
        "query", query, dtype=dtype, shape=(batch.num_tokens, None, head_dim), device=device
    )
    num_q_heads, can = query.shape[1], backend.capabilities
    if num_q_heads == 0 or num_q_heads % num_kv_heads:
        raise InvalidArgumentError(
            "query", f"a multiple of {num_kv_heads} heads", f"{num_q_heads} heads"
        )
    limit = can.max_group_size
    if num_q_heads // num_kv_heads > limit:
        came = f"{num_q_heads} over {num_kv_heads}"
        raise UnsupportedError("query", f"at most {limit} query heads a KV head", came)
    room = batch.block_table.shape[1] * block_size
    if room < batch.max_seq_len:
        wanted = f"entries for max_seq_len = {batch.max_seq_len} tokens"
        raise InvalidArgumentError("batch.block_table", wanted, f"entries for {room}")
    if out is not None:
        require_tensor("out", out, dtype=dtype, shape=query.shape, device=device)
    check_logits(backend, scale, window, soft_cap)
    if batch_invariant:
        _check_feature(backend, "batch_invariant")
    if sinks is not None:
        _check_feature(backend, "sinks")
        require_tensor("sinks", sinks, shape=(num_q_heads,), device=device)
        if not sinks.is_floating_point():
            raise InvalidArgumentError("sinks", "a floating dtype", str(sinks.dtype))


def check_logits(
    backend: Backend, scale: float, window: int | None, soft_cap: float | None
) -> None:
    """The numbers of `paged_attention` are finite and in range."""
    if not math.isfinite(scale):
        raise InvalidArgumentError("scale", "a finite number", str(scale))
    if window is not None:
        _check_feature(backend, "window")
        if window < 1:
            raise InvalidArgumentError("window", "at least 1, or None", str(window))
    if soft_cap is not None:
        _check_feature(backend, "soft_cap")
        if not (math.isfinite(soft_cap) and soft_cap > 0):
            raise InvalidArgumentError(
                "soft_cap", "a finite number above 0, or None", str(soft_cap)
            )


def _check_feature(backend: Backend, feature: str) -> None:
    if feature not in backend.capabilities.features:
        raise UnsupportedError(feature, f"None: {backend.name} does not have it", "a value")


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
