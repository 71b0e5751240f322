"""A shared prefix in decode on a GPU: read once for all its sequences, merged by log-sum-exp.

    part_c[s, h] = sum_k p_k v[k] / sum_k p_k, lse_c[s, h] = log2 sum_k 2^logit_k,  k in chunk c

Layout: a row is one (sequence, query head of the group); a program holds ROWS rows of one KV head
and walks a chunk of the prefix, which all its rows see whole: no causal mask. `decode` then starts
behind the prefix, and `merge` adds these parts to its own. Grid: (KV head and tile of rows, chunk),
tiles side by side, since they read the same keys. Bytes moved: K and V of the prefix once a tile of
rows, 8 * head_dim a chunk, sequence and query head. Sequences with other than one query token are
left alone: their rows see the prefix in `prefill`.

When it pays: it costs a launch more and a merge of every row, and saves reading the prefix once a
sequence; see `pays`.
"""

import math
from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from backends.contract import AttentionTerms, KVCache, PagedBatch, SharedPrefix
from backends.triton_gpu.e4m3 import scale_step, widen
from backends.triton_gpu.launch import launcher
from backends.triton_gpu.place import Place, ceil_div, device_function, power_of_two
from backends.triton_gpu.soft_cap import base2_logits
from backends.triton_gpu.splits import MAX_PLANNED

ROWS = 64
WARPS = 4
STAGES = 3
KEYS_A_CHUNK = 256
MOST_CHUNKS = 32
WHOLE = 32
"""Tokens at the end of a prefix that do not fill a tile of decode's are left to decode."""
WORTH_BYTES = 80 << 20
WORTH_BYTES_A_SEQUENCE = 2 << 20
"""Bytes not read again that are worth a launch more, and a merge of each sequence's rows."""
FEWEST = 3
"""Sequences: two read a prefix as fast alone, however long it is."""


@dataclass(frozen=True, slots=True)
class Shared:
    """Parts that are there before decode starts: of some sequences' first tokens."""

    num_seqs: int
    """At most."""
    chunks: int
    """Parts a row, at most; 0: nobody shares anything."""
    tile: int
    """Keys, of which a part is a multiple."""
    now: Tensor | None
    """See `SharedPrefix`."""
    partial: Tensor | None
    """float32: parts [chunks, num_seqs, num_q_heads, head_dim], lses [chunks, num_seqs, ...]."""


NOBODY = Shared(0, 0, 1, None, None)


@device_function
def load_shared(
    now: tl.tensor, num_seqs: tl.tensor, HAS_SHARED: tl.constexpr, WHOLE: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """(first sequence, past the last one, tokens): what decode leaves to this kernel."""
    first = num_seqs
    last = num_seqs
    tokens = num_seqs * 0
    if HAS_SHARED:
        first = tl.load(now)
        tokens = tl.load(now + 2) // WHOLE * WHOLE
        last = tl.where(tokens > 0, tl.load(now + 1), first)
    return first, last, tokens


@device_function
def keys_a_part(
    tokens: tl.tensor, chunks: tl.tensor, KEYS: tl.constexpr, TILE: tl.constexpr
) -> tl.tensor:
    """Such that parts are at most `chunks`, and none much shorter than KEYS; a multiple of TILE."""
    parts = tl.maximum(tl.minimum((tokens + KEYS - 1) // KEYS, chunks), 1)
    return tl.maximum(((tokens + parts - 1) // parts + TILE - 1) // TILE, 1) * TILE


@launcher(
    integers=("q_stride", "table_stride", "sharing"),
    indices=("query_start_loc", "tables", "now", "k_scale", "v_scale"),
    pointers=("query", "k_cache", "v_cache"),
)
def _attend_prefix(
    query: tl.tensor,  # [num_tokens, num_q_heads, head_dim]
    k_cache: tl.tensor,  # [num_blocks, block_size, num_kv_heads, head_dim], bytes if E4M3
    v_cache: tl.tensor,  # likewise
    partial: tl.tensor,  # float32 [chunks, sharing, num_q_heads, head_dim], then without head_dim
    query_start_loc: tl.tensor,  # int32 [num_seqs + 1]
    tables: tl.tensor,  # int32 [num_seqs, max_blocks]
    now: tl.tensor,  # int32 [3], see SharedPrefix
    k_scale: tl.tensor,  # float32 [1] or [num_kv_heads], read if K_SCALE >= 0
    v_scale: tl.tensor,  # likewise
    q_stride: tl.tensor,  # from token to token
    table_stride: tl.tensor,
    sharing: tl.tensor,  # sequences at most
    scale: tl.tensor,  # float
    soft_cap: tl.tensor,  # float, used if HAS_CAP
    Q_HEAD: tl.constexpr,  # from head to head
    K_STRIDES: tl.constexpr,  # block, offset, head
    V_STRIDES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_CAP: tl.constexpr,
    ALIGN: tl.constexpr,  # elements that divide all strides of the caches
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,  # head_dim as a power of two
    E4M3: tl.constexpr,
    NATIVE: tl.constexpr,
    K_SCALE: tl.constexpr,  # from head to head, -1: there is none
    V_SCALE: tl.constexpr,
    KEYS: tl.constexpr,  # a part
    WHOLE: tl.constexpr,
) -> None:
    first_seq, last_seq, tokens = load_shared(now, sharing, HAS_SHARED=True, WHOLE=WHOLE)
    chunk = keys_a_part(tokens, tl.num_programs(1), KEYS, TILE)
    if tl.program_id(1) * chunk >= tokens:
        return
    table = tables + first_seq.to(tl.int64) * table_stride
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    row = tl.program_id(0) // NUM_KV_HEADS * ROWS + tl.arange(0, ROWS)
    s = first_seq + row // GROUP
    head = kv_head * GROUP + row % GROUP
    dim = tl.arange(0, WIDTH)
    start = tl.load(query_start_loc + s, mask=s < last_seq, other=0)
    live = tl.load(query_start_loc + s + 1, mask=s < last_seq, other=0) - start == 1
    mask = live[:, None] & (dim < HEAD_DIM)[None, :]
    at = start.to(tl.int64) * q_stride + head * Q_HEAD
    q = tl.load(query + at[:, None] + dim[None, :], mask=mask, other=0.0)
    if E4M3:
        q = q.to(tl.float16)
    if K_SCALE >= 0:
        scale *= tl.load(k_scale + kv_head * K_SCALE)
    begin = tl.program_id(1) * chunk
    highest, total, sums = _walk_prefix(
        q, k_cache + kv_head * K_STRIDES[2], v_cache + kv_head * V_STRIDES[2], table,
        begin, tl.minimum(begin + chunk, tokens), scale, soft_cap,
        K_STRIDES, V_STRIDES, BLOCK_SIZE, HEAD_DIM, HAS_CAP, ALIGN, ROWS, TILE, WIDTH, E4M3, NATIVE,
    )  # fmt: skip
    if V_SCALE >= 0:
        sums *= tl.load(v_scale + kv_head * V_SCALE)
    num_heads: tl.constexpr = NUM_KV_HEADS * GROUP
    index = (tl.program_id(1) * sharing + s - first_seq) * num_heads + head
    tl.store(partial + index[:, None] * HEAD_DIM + dim[None, :], sums / total[:, None], mask=mask)
    lses = partial + tl.num_programs(1) * sharing * (num_heads * HEAD_DIM)
    tl.store(lses + index, highest + tl.log2(total), mask=live)


@device_function
def _walk_prefix(
    q: tl.tensor, k_cache: tl.tensor, v_cache: tl.tensor, table: tl.tensor,
    begin: tl.tensor, end: tl.tensor, scale: tl.tensor, soft_cap: tl.tensor,
    K_STRIDES: tl.constexpr, V_STRIDES: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr, HAS_CAP: tl.constexpr, ALIGN: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, WIDTH: tl.constexpr, E4M3: tl.constexpr, NATIVE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Each row's highest logit (base 2), total weight, and weighted sum of values."""
    highest = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, WIDTH], tl.float32)
    dim = tl.arange(0, WIDTH)
    lane = tl.arange(0, TILE)
    block_id = tl.load(table + (begin + lane) // BLOCK_SIZE, mask=begin + lane < end, other=0)
    for tile_start in range(begin, end, TILE):
        key = tile_start + lane
        live = key < end
        block, offset = block_id.to(tl.int64), key % BLOCK_SIZE
        k_at = tl.multiple_of(block * K_STRIDES[0] + offset * K_STRIDES[1], ALIGN)
        v_at = tl.multiple_of(block * V_STRIDES[0] + offset * V_STRIDES[1], ALIGN)
        inside = (dim < HEAD_DIM)[None, :]
        k = tl.load(k_cache + k_at[:, None] + dim[None, :], mask=inside, other=0.0)
        mask = live[:, None] & inside
        v = tl.load(v_cache + v_at[:, None] + dim[None, :], mask=mask, other=0.0)
        ahead = key + TILE
        block_id = tl.load(table + ahead // BLOCK_SIZE, mask=ahead < end, other=0)
        if E4M3:
            k = widen(k, NATIVE)
            v = widen(v, NATIVE)
        logits = tl.dot(q, tl.trans(k), input_precision="ieee")
        logits = base2_logits(logits, scale, soft_cap, HAS_CAP)
        logits = tl.where(live[None, :], logits, float("-inf"))
        now = tl.maximum(highest, tl.max(logits, 1))
        p = tl.exp2(logits - now[:, None])
        rescale = tl.exp2(highest - now)
        total = total * rescale + tl.sum(p, 1)
        sums = sums * rescale[:, None]
        sums = tl.dot(p.to(v.dtype), v, sums, input_precision="ieee")
        highest = now
    return highest, total, sums


def cascade(
    place: Place, query: Tensor, cache: KVCache, batch: PagedBatch, terms: AttentionTerms
) -> Shared:
    """Attend the batch's shared prefix, where that pays: what `decode` need not read any more."""
    prefix = batch.shared_prefix
    if prefix is None or not pays(cache, batch, terms):
        return NOBODY
    return attend_prefix(place, query, cache, batch, terms, prefix)


def attend_prefix(
    place: Place,
    query: Tensor,
    cache: KVCache,
    batch: PagedBatch,
    terms: AttentionTerms,
    prefix: SharedPrefix,
) -> Shared:
    """Attend a shared prefix, whether or not that pays."""
    num_heads, head_dim = query.shape[1:]
    block_size, num_kv_heads = cache.k.shape[1:3]
    group = num_heads // num_kv_heads
    programs = num_kv_heads * ceil_div(prefix.num_seqs * group, ROWS)
    tile = keys_a_tile(head_dim)
    if prefix.num_tokens < WHOLE:
        return NOBODY
    slots = 2 * place.num_multiprocessors(query.device)
    chunks = max(1, min(MOST_CHUNKS, ceil_div(prefix.num_tokens, KEYS_A_CHUNK), slots // programs))
    rows = chunks * prefix.num_seqs * num_heads
    partial = torch.empty(rows * (head_dim + 1), dtype=torch.float32, device=query.device)
    now = prefix.now
    if now is None:
        ends = (prefix.first_seq, prefix.first_seq + prefix.num_seqs, prefix.num_tokens)
        said = torch.tensor(ends, dtype=torch.int32, pin_memory=query.device.type == "cuda")
        now = said.to(query.device, non_blocking=True)
    k_strides, v_strides = cache.k.stride()[:3], cache.v.stride()[:3]
    variant = _attend_prefix.variant(
        place,
        query.device,
        (query.dtype, cache.k.dtype),
        (
            query.stride(1), k_strides, v_strides, block_size, num_kv_heads, group, head_dim,
            terms.soft_cap is not None, math.gcd(16, *k_strides, *v_strides), ROWS, tile,
            max(16, power_of_two(head_dim)), cache.k.dtype == torch.float8_e4m3fn,
            place.has_e4m3(query.device), scale_step(cache.k_scale), scale_step(cache.v_scale),
            KEYS_A_CHUNK, WHOLE,
        ),
        num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    tensors = (
        query, cache.k, cache.v, partial, batch.query_start_loc, batch.block_table, now,
        batch.seq_lens if cache.k_scale is None else cache.k_scale,
        batch.seq_lens if cache.v_scale is None else cache.v_scale,
    )  # fmt: skip
    numbers = (
        query.stride(0), batch.block_table.stride(0), prefix.num_seqs,
        float(terms.scale), terms.soft_cap or 1.0,
    )  # fmt: skip
    variant.launch((programs, chunks, 1), tensors, numbers)
    return Shared(prefix.num_seqs, chunks, tile, now, partial)


def worth() -> tuple[int, int, int]:
    """From where on it pays; see `Capabilities.shared_prefix_worth`."""
    return FEWEST, WORTH_BYTES, WORTH_BYTES_A_SEQUENCE


def pays(cache: KVCache, batch: PagedBatch, terms: AttentionTerms) -> bool:
    """Whether the bytes not read again are worth a launch and a merge; as measured.

    Never with a window, which leaves most of a long prefix out of sight, nor for more sequences
    than are planned, nor in a batch without decode.
    """
    prefix = batch.shared_prefix
    if prefix is None or terms.window is not None or batch.num_seqs > MAX_PLANNED:
        return False
    if prefix.now is not None:  # who says so has found it
        return True
    saved = (prefix.num_seqs - 1) * prefix.num_tokens * sum(cache.layout.row_bytes)
    fewest, some, each = worth()
    return prefix.num_seqs >= fewest and saved >= some + prefix.num_seqs * each


def keys_a_tile(head_dim: int) -> int:
    """Keys a tile, such that the tiles of K and V in flight fit in shared memory."""
    return 64 if head_dim <= 64 else 32 if head_dim <= 128 else 16
