"""Attention cases: ragged batches as data, and their tensors, poisoned wherever nobody may look.

A case's values depend on its seed alone; where its blocks lie depends on a second seed, so that a
case can be laid out twice with equal content. Poison: NaN in every slot that no query sees, in the
rows past the last sequence, in the output and around strided views; 2^30 and -1 in the entries of
the block table that cover nothing visible.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from backends import oracle
from backends.contract import Backend, PagedBatch, SharedPrefix


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """A batch to attend, as plain data."""

    name: str
    seqs: tuple[tuple[int, int], ...]
    """(query length, KV length) of each sequence."""
    num_kv_heads: int = 2
    group: int = 2
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    values: str = "random"
    """random; equal (all logits equal); huge (one logit dwarfs the rest)."""
    cache_dtype: torch.dtype | None = None
    """Of a quantised cache; None: the cache holds `dtype`."""
    scales: str = "none"
    """Of a quantised cache: none; tensor (one a cache); head (one a KV head)."""
    shared: int = 0
    """Positions at the start, whole blocks of them, that all sequences share before their query
    tokens, and the batch says so."""
    batch_invariant: bool = False
    strided: bool = False
    """Query, output and caches are views with gaps."""
    padding: int = 0
    """Rows past the last sequence."""
    seed: int = 0

    def with_(self, **changes: object) -> "AttentionCase":
        """The same case but for these fields."""
        return replace(self, **changes)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """The tensors of a case, and the memory they are views of."""

    query: Tensor
    k_cache: Tensor
    v_cache: Tensor
    batch: PagedBatch
    scale: float
    window: int | None
    soft_cap: float | None
    sinks: Tensor | None
    scales: dict[str, Tensor]
    """`k_scale` and `v_scale`, where there are any."""
    batch_invariant: bool
    out: Tensor
    guarded: tuple[Tensor, ...]
    """Whole memory of every argument but `out`: a call leaves each bit as it is."""
    out_memory: Tensor
    """Whole memory of `out`."""

    def run(self, backend: Backend) -> Tensor:
        """Attend into `out`, and return it."""
        attend: Callable[..., Tensor] = backend.paged_attention
        rare = {"batch_invariant": True} if self.batch_invariant else {}  # not all backends know it
        return attend(
            self.query,
            self.k_cache,
            self.v_cache,
            self.batch,
            scale=self.scale,
            window=self.window,
            soft_cap=self.soft_cap,
            sinks=self.sinks,
            out=self.out,
            **self.scales,
            **rare,
        )

    def expected(self) -> oracle.Expected:
        """The oracle's answer."""
        return oracle.attention(
            self.query,
            self.k_cache,
            self.v_cache,
            self.batch,
            scale=self.scale,
            window=self.window,
            soft_cap=self.soft_cap,
            sinks=self.sinks,
            **self.scales,
        )


def contents(case: AttentionCase) -> tuple[Tensor, list[tuple[Tensor, Tensor]], Tensor | None]:
    """Query rows, (keys, values) of each sequence, sinks: all from the seed alone."""
    generator = torch.Generator().manual_seed(case.seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(case.dtype)

    num_q_heads = case.num_kv_heads * case.group
    query = random(sum(count for count, _ in case.seqs), num_q_heads, case.head_dim)
    keys: list[tuple[Tensor, Tensor]] = []
    for _, length in case.seqs:
        k = random(length, case.num_kv_heads, case.head_dim)
        v = random(length, case.num_kv_heads, case.head_dim)
        if case.values == "equal" and length:
            k = k[:1].expand_as(k).clone()
        if case.values == "huge" and length:
            k[length // 2] *= 64
        if keys and case.shared:
            k[: case.shared], v[: case.shared] = (rows[: case.shared] for rows in keys[0])
        keys.append((k, v))
    return query, keys, random(num_q_heads).float() if case.sinks else None


def build(case: AttentionCase, device: torch.device, layout: int = 0) -> AttentionInputs:
    """Lay a case out over blocks in the order of the seed `layout`, and poison the rest."""
    query_rows, keys, sinks = contents(case)
    block_size = case.block_size
    tables, num_blocks = _place_blocks(case, layout)
    shape = (num_blocks, block_size, case.num_kv_heads, case.head_dim)
    kind = case.cache_dtype or case.dtype
    k_memory, k_cache = _poisoned(shape, kind, device, strided=case.strided)
    v_memory, v_cache = _poisoned(shape, kind, device, strided=case.strided)
    scales = _scales(case)
    k_scale, v_scale = scales.get("k_scale"), scales.get("v_scale")
    for (count, length), (k, v), row in zip(case.seqs, keys, tables, strict=True):
        k_rows, v_rows = _stored(case, k, k_scale), _stored(case, v, v_scale)
        for position in range(_first_seen(case, count, length), length if count else 0):
            block_id, offset = row[position // block_size], position % block_size
            _words(k_cache)[block_id, offset] = k_rows[position].to(device)
            _words(v_cache)[block_id, offset] = v_rows[position].to(device)
    rows = query_rows.shape[0] + case.padding
    query_shape = (rows, query_rows.shape[1], case.head_dim)
    q_memory, query = _poisoned(query_shape, case.dtype, device, strided=case.strided)
    query[: query_rows.shape[0]] = query_rows.to(device)
    out_memory, out = _poisoned(query_shape, case.dtype, device, strided=case.strided)
    batch = _batch(case, tables, rows, device)
    sinks = None if sinks is None else sinks.to(device)
    scales = {name: scale.to(device) for name, scale in scales.items()}
    guarded = [q_memory, k_memory, v_memory, batch.query_start_loc, batch.seq_lens]
    guarded += [batch.block_table, batch.slot_mapping, *([] if sinks is None else [sinks])]
    guarded += scales.values()
    return AttentionInputs(
        query, k_cache, v_cache, batch, 0.9 / math.sqrt(case.head_dim), case.window, case.soft_cap,
        sinks, scales, case.batch_invariant, out, tuple(guarded), out_memory,
    )  # fmt: skip


def bits(tensor: Tensor) -> Tensor:
    """The tensor's bits on the CPU, comparable where NaN is not."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().clone().contiguous().view(kinds[tensor.element_size()]).cpu()


def _scales(case: AttentionCase) -> dict[str, Tensor]:
    """Scales of no round numbers, far from each other."""
    if case.scales == "none":
        return {}
    heads = torch.arange(case.num_kv_heads if case.scales == "head" else 1)
    return {"k_scale": 0.011 * 1.7**heads, "v_scale": 0.23 / 1.3**heads}


def _stored(case: AttentionCase, rows: Tensor, scale: Tensor | None) -> Tensor:
    """The rows as the cache holds them; of a quantised cache as bytes."""
    return rows if case.cache_dtype is None else oracle.quantise(rows, scale)


def _words(cache: Tensor) -> Tensor:
    """The cache as rows are put into it: a quantised one as bytes."""
    return cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache


def _first_seen(case: AttentionCase, count: int, length: int) -> int:
    return 0 if case.window is None else max(0, length - count - case.window + 1)


def _place_blocks(case: AttentionCase, layout: int) -> tuple[list[list[int]], int]:
    """A block table with poison in its unseen entries, and the size of the cache."""
    width = max((-(-length // case.block_size) for _, length in case.seqs), default=0) + 2
    needed = sum(-(-length // case.block_size) for _, length in case.seqs)
    generator = torch.Generator().manual_seed(1_000_003 + layout)
    ids = (torch.randperm(needed + 3, generator=generator) + 1).tolist()
    tables: list[list[int]] = []
    for s, (count, length) in enumerate(case.seqs):
        row = [1 << 30 if (s + i) % 2 else -1 for i in range(width)]
        first = _first_seen(case, count, length) // case.block_size
        for i in range(first, -(-length // case.block_size) if count else 0):
            row[i] = tables[0][i] if tables and i * case.block_size < case.shared else ids.pop()
        tables.append(row)
    return tables, needed + 4


def _batch(
    case: AttentionCase, tables: list[list[int]], rows: int, device: torch.device
) -> PagedBatch:
    starts = [0]
    for count, _ in case.seqs:
        starts.append(starts[-1] + count)
    width = len(tables[0]) if tables else 1
    table = torch.tensor(tables, dtype=torch.int32).reshape(len(tables), width)
    return PagedBatch(
        query_start_loc=torch.tensor(starts, dtype=torch.int32, device=device),
        seq_lens=torch.tensor([n for _, n in case.seqs], dtype=torch.int32, device=device),
        block_table=table.to(device),
        slot_mapping=torch.full((rows,), -1, dtype=torch.int64, device=device),
        max_query_len=max((count for count, _ in case.seqs), default=0),
        max_seq_len=max((length for _, length in case.seqs), default=0),
        shared_prefix=SharedPrefix(0, len(case.seqs), case.shared) if case.shared else None,
    )


def _poisoned(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, strided: bool
) -> tuple[Tensor, Tensor]:
    """(whole memory, the tensor in it), NaN everywhere; strided: with gaps around each head."""
    *outer, heads, size = shape
    whole = (*outer, heads + 1, size + 16) if strided else shape
    if dtype == torch.float8_e4m3fn:  # which torch cannot fill everywhere
        memory = torch.full(whole, 0x7F, dtype=torch.uint8, device=device).view(dtype)
    else:
        memory = torch.full(whole, math.nan, dtype=dtype, device=device)
    return memory, memory[..., :heads, :size] if strided else memory
