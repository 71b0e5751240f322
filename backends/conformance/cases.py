"""Attention cases: ragged batches as data, and their tensors, poisoned where none may read.

A case's values depend on its seed alone; where its blocks lie depends on a second seed, so that a
case can be laid out twice with equal content. Poison: NaN in every slot that no query sees, in the
rows past the last sequence, in the output and around strided views; 2^30 and -1 in the entries of
the block table that cover nothing visible.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from backends import oracle
from backends.contract import (
    AttentionTerms,
    Backend,
    KVCache,
    KVLayout,
    PagedBatch,
    SharedPrefix,
)


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
    sink_lead: float = 0.0
    """Is added to the logits of the sinks."""
    values: str = "random"
    """random; equal (all logits equal); huge (one logit dwarfs the rest); tiny (as small as the
    dtype has numbers); zero."""
    cache_dtype: torch.dtype | None = None
    """Of a quantised cache; None: the cache holds `dtype`."""
    scales: str = "none"
    """Of a quantised cache: none; tensor (one a cache); head (one a KV head); tiny (one a cache,
    the smallest normal number)."""
    value_dim: int = 0
    """Above 0: a cache of latents whose first `value_dim` numbers are values; one KV head."""
    shared: int = 0
    """Positions at the start, whole blocks of them, that all sequences share before their query
    tokens, as the batch's `shared_prefix` states."""
    shared_now: tuple[int, int, int] | None = None
    """The `now` of the shared prefix: the first sequence, the one past the last, the positions. The
    batch's other fields are then upper limits. None: those fields are exact."""
    batch_invariant: bool = False
    strided: bool = False
    """Query, output and caches are views with gaps."""
    padding: int = 0
    """Rows past the last sequence."""
    seed: int = 0

    @property
    def layout(self) -> KVLayout:
        """The layout of a token in its slot of the cache."""
        dtype = self.cache_dtype or self.dtype
        value_dim = self.value_dim or self.head_dim
        return KVLayout(
            self.num_kv_heads, self.head_dim, value_dim, dtype, is_latent=self.value_dim > 0
        )

    @property
    def cost(self) -> int:
        """Pairs of a query token and a key, times the query heads and their size."""
        pairs = sum(count * length for count, length in self.seqs)
        return pairs * self.num_kv_heads * self.group * self.head_dim

    def with_(self, **changes: object) -> "AttentionCase":
        """The same case but for these fields."""
        return replace(self, **changes)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """The tensors of a case, and the memory they are views of."""

    query: Tensor
    cache: KVCache
    batch: PagedBatch
    terms: AttentionTerms
    out: Tensor
    guarded: tuple[Tensor, ...]
    """Whole memory of every argument but `out`: a call leaves each bit as it is."""
    out_memory: Tensor
    """Whole memory of `out`."""

    def run(self, backend: Backend) -> Tensor:
        """Attend into `out`, and return it."""
        return backend.paged_attention(self.query, self.cache, self.batch, self.terms, out=self.out)

    def expected(self) -> oracle.Expected:
        """The oracle's answer."""
        return oracle.attention(self.query, self.cache, self.batch, self.terms)


def contents(case: AttentionCase) -> tuple[Tensor, list[tuple[Tensor, Tensor]], Tensor | None]:
    """Query rows, (keys, values) of each sequence, sinks: all from the seed alone.

    Latents are the keys; the values drawn beside them are stored nowhere.
    """
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
        if case.values in {"tiny", "zero"}:
            v = v * (torch.finfo(case.dtype).smallest_normal if case.values == "tiny" else 0)
        if keys and case.shared:
            k[: case.shared], v[: case.shared] = (rows[: case.shared] for rows in keys[0])
        keys.append((k, v))
    return query, keys, random(num_q_heads).float() + case.sink_lead if case.sinks else None


@oracle.one_thread()
def build(case: AttentionCase, device: torch.device, layout: int = 0) -> AttentionInputs:
    """Lay a case out over blocks in the order of the seed `layout`, and poison the rest."""
    query_rows, keys, sinks = _stored_contents(case)
    tables, num_blocks = _place_blocks(case, layout)
    memories, cache = _cache(case, num_blocks, device)
    stored = [_words(tensor) for tensor in cache.tensors]
    scales = (cache.k_scale, cache.v_scale)
    for (count, length), rows, table in zip(case.seqs, keys, tables, strict=True):
        seen = torch.arange(_first_seen(case, count, length) if count else length, length)
        block_ids = torch.tensor(table)[seen // case.block_size].to(device)
        offsets = (seen % case.block_size).to(device)
        for words, each in zip(stored, rows, strict=True):
            words[block_ids, offsets] = each[seen].to(device)
    num_rows = query_rows.shape[0] + case.padding
    q_memory, query = _poisoned(
        (num_rows, *query_rows.shape[1:]), case.dtype, device, strided=case.strided
    )
    query[: query_rows.shape[0]] = query_rows.to(device)
    out_shape = (num_rows, query_rows.shape[1], cache.v.shape[3])
    out_memory, out = _poisoned(out_shape, case.dtype, device, strided=case.strided)
    batch = _batch(case, tables, num_rows, device)
    sinks = None if sinks is None else sinks.to(device)
    guarded = [q_memory, *memories, batch.query_start_loc, batch.seq_lens]
    guarded += [batch.block_table, batch.slot_mapping, *([] if sinks is None else [sinks])]
    guarded += [scale for scale in scales if scale is not None]
    terms = AttentionTerms(
        0.9 / math.sqrt(case.head_dim), case.window, case.soft_cap, sinks, case.batch_invariant
    )
    return AttentionInputs(query, cache, batch, terms, out, tuple(guarded), out_memory)


def _cache(
    case: AttentionCase, num_blocks: int, device: torch.device
) -> tuple[list[Tensor], KVCache]:
    """(whole memories, the cache in them), poisoned."""
    layout = case.layout
    shape = (num_blocks, case.block_size, layout.num_kv_heads, layout.head_dim)
    made = [_poisoned(shape, layout.dtype, device, strided=case.strided) for _ in layout.row_bytes]
    scales = [None if scale is None else scale.to(device) for scale in _scales(case)]
    cache = layout.over([tensor for _, tensor in made], *scales)
    return [memory for memory, _ in made], cache


def bits(tensor: Tensor) -> Tensor:
    """The tensor's bits on the CPU, comparable where NaN is not."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().clone().contiguous().view(kinds[tensor.element_size()]).cpu()


def _scales(case: AttentionCase) -> tuple[Tensor | None, Tensor | None]:
    """Scales of no round numbers, far from each other."""
    if case.scales == "none":
        return None, None
    if case.scales == "tiny":
        scale = torch.tensor([torch.finfo(torch.float32).smallest_normal])
        return scale, scale
    heads = torch.arange(case.num_kv_heads if case.scales == "head" else 1)
    k_scale = 0.011 * 1.7**heads
    return k_scale, k_scale if case.value_dim else 0.23 / 1.3**heads


@lru_cache(maxsize=1)
def _stored_contents(
    case: AttentionCase,
) -> tuple[Tensor, list[tuple[Tensor, ...]], Tensor | None]:
    """The contents as the cache holds them: of a quantised one as bytes, of latents the keys alone.

    The last case's are kept, because a case is laid out more than once; they are read-only.
    """
    query, keys, sinks = contents(case)
    pairs = [pair[: len(case.layout.row_bytes)] for pair in keys]
    if case.cache_dtype is not None:
        scales = _scales(case)
        pairs = [tuple(map(oracle.quantise, pair, scales)) for pair in pairs]
    return query, pairs, sinks


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
        shared_prefix=_shared(case, device) if case.shared else None,
    )


def _shared(case: AttentionCase, device: torch.device) -> SharedPrefix:
    if case.shared_now is None:
        return SharedPrefix(0, len(case.seqs), case.shared)
    longest = max(length for _, length in case.seqs)
    now = torch.tensor(case.shared_now, dtype=torch.int32, device=device)
    return SharedPrefix(0, len(case.seqs), longest - 1, now)


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
