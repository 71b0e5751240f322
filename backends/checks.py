"""Argument checks that every launcher makes before it touches memory.

Shapes, dtypes, devices and capabilities: all are O(1) and need no synchronisation with a GPU.
Values (a slot past the cache, a table entry that is no block) are checked by backends for which
that is cheap; otherwise they are the caller's duty.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from backends.contract import AttentionTerms, Backend, KVCache, PagedBatch, require_tensor
from backends.errors import InvalidArgumentError, UnsupportedError
from backends.states import LinearAttentionTerms, LinearRows, ShortConvTerms, StateBatch

_CPU = torch.device("cpu")


def check_cache(backend: Backend, cache: KVCache) -> None:
    """Raise unless a cache is on the backend's device, within its capabilities."""
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
    """Return the dtype of keys, values and queries: the cache's, or any with a quantised one."""
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
    """Raise unless the arguments of `store_kv` agree with each other."""
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
    """Raise unless the arguments of `paged_attention` agree with each other and capabilities."""
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
    """Raise unless caches have blocks dense inside, and `copies` is a list of pairs."""
    require_tensor("copies", copies, dtype=torch.int64, shape=(None, 2))
    if copies.device.type != backend.device.type:
        raise InvalidArgumentError("copies", f"device {backend.device}", f"{copies.device}")
    _check_blocks(caches, copies.device)


def _check_blocks(caches: Sequence[Tensor], device: torch.device) -> None:
    for index, cache in enumerate(caches):
        name = f"caches[{index}]"
        require_tensor(name, cache, device=device)
        if cache.dim() < 2 or 0 in cache.shape:
            raise InvalidArgumentError(name, "[num_blocks, ...]", f"shape {list(cache.shape)}")
        if not cache[0].is_contiguous():
            raise InvalidArgumentError(name, "blocks that are contiguous inside", "gaps")


def check_move_blocks(backend: Backend, caches: Sequence[Tensor], host: Tensor) -> None:
    """Host memory has room for a block of every cache."""
    if not caches:
        raise InvalidArgumentError("caches", "at least one", "none")
    if caches[0].device.type != backend.device.type:
        raise InvalidArgumentError("caches", f"device {backend.device}", f"{caches[0].device}")
    _check_blocks(caches, caches[0].device)
    sizes = [cache[0].nbytes for cache in caches]
    require_tensor("host", host, dtype=torch.uint8, shape=(None, sum(sizes)), device=_CPU)
    word = math.gcd(8, *sizes)
    steps = [cache.stride(0) * cache.element_size() for cache in caches]
    starts = [tensor.data_ptr() for tensor in (host, *caches)]
    if any(each % word for each in (host.stride(0), *steps, *starts)):
        raise InvalidArgumentError("caches", f"blocks that begin on {word} bytes", "others")


def check_moves(
    backend: Backend,
    caches: Sequence[Tensor],
    host: Tensor,
    moves: Tensor,
    sums: Tensor,
    *,
    to_host: bool,
) -> None:
    """All blocks of a list are there, no target twice, and each has a sum. O(moves)."""
    require_tensor("moves", moves, dtype=torch.int64, shape=(None, 2), device=_CPU)
    require_tensor("sums", sums, dtype=torch.int64, shape=moves.shape[:1])
    if sums.device.type != backend.device.type:
        raise InvalidArgumentError("sums", f"device {backend.device}", f"{sums.device}")
    ids = moves.numpy()
    sizes = min(cache.shape[0] for cache in caches), host.shape[0]
    for column, most, where in zip(ids.T, sizes, ("caches", "host"), strict=True):
        if len(column) and not 0 <= column.min() <= column.max() < most:
            wanted = f"block ids of 0 .. {most - 1}, which {where} has"
            raise InvalidArgumentError("moves", wanted, f"{column.min()} .. {column.max()}")
    targets = ids[:, 1 if to_host else 0]
    if np.unique(targets).size < targets.size:
        raise InvalidArgumentError("moves", "each target once", "one twice")


def check_slot_mapping(
    backend: Backend,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    block_size: int,
    out: Tensor,
) -> None:
    """Raise unless the arguments of `compute_slot_mapping` agree with each other."""
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


def check_short_conv(
    backend: Backend,
    x: Tensor,
    state: Tensor,
    batch: StateBatch,
    terms: ShortConvTerms,
    out: Tensor | None,
) -> None:
    """Raise unless the arguments of `short_conv_step` agree with each other and capabilities."""
    channels, width = terms.weight.shape
    _check_state(backend, state, batch, (width - 1, channels))
    require_tensor("x", x, shape=(_num_rows(batch), channels))
    shape, weight = x.shape, (terms.weight, terms.weight.shape)
    _check_rows(
        state.device, state.dtype, x=(x, shape), out=(out, shape), **{"terms.weight": weight}
    )


def check_linear_attention(
    backend: Backend,
    rows: LinearRows,
    state: Tensor,
    batch: StateBatch,
    terms: LinearAttentionTerms,
    out: Tensor | None,
) -> None:
    """Raise unless the arguments of `linear_attention_step` agree, also with capabilities."""
    (query, key, value, decay, beta), gate, limit = rows, terms.gate, backend.capabilities
    _check_state(backend, state, batch, (None, None, None))
    heads, key_dim, value_dim = state.shape[1:]
    if max(key_dim, value_dim) > limit.max_state_dim:
        wanted = f"dimensions of at most {limit.max_state_dim}"
        raise UnsupportedError("state", wanted, f"{key_dim} and {value_dim}")
    require_tensor("query", query, shape=(_num_rows(batch), None, key_dim))
    count = query.shape[0]
    require_tensor("decay", decay)
    if query.dtype not in limit.dtypes:
        raise UnsupportedError("query", f"a dtype of {_names(limit.dtypes)}", str(query.dtype))
    if query.shape[1] == 0 or heads % query.shape[1]:
        raise InvalidArgumentError("query", f"a divisor of {heads} heads", str(query.shape[1]))
    of_keys, of_heads, of_values = query.shape, (count, heads), (count, heads, value_dim)
    by_channel = gate is None and decay.dim() == 3
    _check_rows(state.device, query.dtype, query=(query, of_keys), key=(key, of_keys))
    _check_rows(state.device, query.dtype, value=(value, of_values), out=(out, of_values))
    of_decay = (count, heads, key_dim) if by_channel else of_heads
    kind = torch.float32 if gate is None else query.dtype
    _check_rows(state.device, kind, decay=(decay, of_decay))
    if terms.delta_rule == (beta is None):
        wanted = "a tensor with the delta rule, None without it"
        raise InvalidArgumentError("beta", wanted, "None" if beta is None else "a tensor")
    _check_rows(state.device, query.dtype, beta=(beta, of_heads))
    of_terms = {"terms.skip": (terms.skip, (heads,))}
    if gate is not None:
        of_terms["terms.gate.a"] = (gate.a, (heads,))
    _check_rows(state.device, torch.float32, **of_terms)


def _check_state(
    backend: Backend, state: Tensor, batch: StateBatch, inside: tuple[int | None, ...]
) -> None:
    """Raise unless states are on the backend's device, of its dtypes, without gaps in a slot."""
    can = backend.capabilities
    require_tensor("state", state, shape=(None, *inside))
    if state.device.type != backend.device.type:
        raise InvalidArgumentError("state", f"device {backend.device}", f"{state.device}")
    if state.dtype not in can.state_dtypes:
        wanted = f"a dtype of {_names(can.state_dtypes)}"
        if not can.state_dtypes:
            wanted = f"a backend with operations on states, which {backend.name} is not"
        raise UnsupportedError("state", wanted, str(state.dtype))
    if 0 in state.shape or not state[0].is_contiguous():
        came = f"shape {list(state.shape)} with strides {list(state.stride())}"
        raise InvalidArgumentError(
            "state", "slots that are not empty and have no gaps inside", came
        )
    if batch.read_slots.device != state.device:
        came = f"device {batch.read_slots.device}"
        raise InvalidArgumentError("batch", f"device {state.device}", came)


def _num_rows(batch: StateBatch) -> int | None:
    """Return the rows of a call: one a sequence without `query_start_loc`, else any number."""
    return batch.num_seqs if batch.query_start_loc is None else None


def _check_rows(
    device: torch.device, dtype: torch.dtype, **wanted: tuple[Tensor | None, tuple[int, ...]]
) -> None:
    """Raise unless tensors have this dtype and shape, by name; only rows must be given."""
    for name, (tensor, shape) in wanted.items():
        if tensor is not None or name in {"key", "value"}:
            require_tensor(name, tensor, dtype=dtype, shape=shape, device=device)


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(str(dtype) for dtype in dtypes)


def check_score_index(
    backend: Backend,
    query: Tensor,
    weights: Tensor,
    cache: KVCache,
    batch: PagedBatch,
    first_row: int,
    out: Tensor,
) -> None:
    """Raise unless the arguments of `score_index` agree with each other and capabilities."""
    limit, device = backend.capabilities.max_index_dim, cache.k.device
    check_cache(backend, cache)
    index_dim = cache.k.shape[3]
    if not cache.is_latent or cache.v.shape[3] != index_dim or index_dim > limit:
        wanted = f"latents of at most {limit} numbers, all of them values"
        raise UnsupportedError("cache", wanted, f"{index_dim}, {cache.v.shape[3]} of them values")
    if cache.k.dtype not in backend.capabilities.dtypes:
        names = _names(backend.capabilities.dtypes)
        raise UnsupportedError("cache.k", f"index keys of {names}", str(cache.k.dtype))
    if batch.device != device:
        raise InvalidArgumentError("batch", f"device {device}", f"device {batch.device}")
    shape = (batch.num_tokens, None, index_dim)
    require_tensor("query", query, dtype=cache.k.dtype, shape=shape, device=device)
    heads = tuple(query.shape[:2])
    require_tensor("weights", weights, dtype=torch.float32, shape=heads, device=device)
    _check_scores("out", out, batch, first_row)
    room = batch.block_table.shape[1] * cache.k.shape[1]
    if room < batch.max_seq_len:
        wanted = f"entries for max_seq_len = {batch.max_seq_len} tokens"
        raise InvalidArgumentError("batch.block_table", wanted, f"entries for {room}")


def check_choose_tokens(
    backend: Backend, scores: Tensor, batch: PagedBatch, first_row: int, out: Tensor
) -> None:
    """Raise unless the arguments of `choose_tokens` agree with each other and capabilities."""
    _check_scores("scores", scores, batch, first_row)
    _check_chosen(backend, "out", out, scores.shape[0], scores.device)


def check_attend_chosen(
    backend: Backend, batch: PagedBatch, chosen: Tensor, terms: AttentionTerms
) -> None:
    """Raise unless `chosen` and `terms` suit `attend_chosen`; `paged_attention` checks the rest."""
    _check_chosen(backend, "chosen", chosen, batch.num_tokens, batch.device)
    if terms.window is not None:
        raise UnsupportedError("terms.window", "None beside chosen tokens", str(terms.window))


def _check_scores(name: str, scores: Tensor, batch: PagedBatch, first_row: int) -> None:
    require_tensor(name, scores, dtype=torch.float32, shape=(None, None), device=batch.device)
    if scores.shape[1] < batch.max_seq_len:
        wanted = f"[num_rows, at least {batch.max_seq_len}]"
        raise InvalidArgumentError(name, wanted, f"shape {list(scores.shape)}")
    if not 0 <= first_row <= batch.num_tokens - scores.shape[0]:
        wanted = f"0 .. {batch.num_tokens - scores.shape[0]}, for {scores.shape[0]} rows"
        raise InvalidArgumentError("first_row", wanted, str(first_row))


def _check_chosen(
    backend: Backend, name: str, chosen: Tensor, num_rows: int, device: torch.device
) -> None:
    shape = (num_rows, None)
    require_tensor(name, chosen, dtype=torch.int32, shape=shape, device=device)
    limit = backend.capabilities.max_chosen
    if not chosen.is_contiguous() or not 0 < chosen.shape[1] <= limit:
        wanted = f"1 .. {limit} positions a row, without gaps"
        raise UnsupportedError(name, wanted, f"shape {list(chosen.shape)}")
