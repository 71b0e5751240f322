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

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from backends.contract import AttentionTerms, KVCache, PagedBatch, SharedPrefix
from backends.triton_gpu.decode.splits import MAX_PLANNED
from backends.triton_gpu.shared.e4m3 import load_scale, widen
from backends.triton_gpu.shared.launch import launcher
from backends.triton_gpu.shared.layer import Layer, head_offset, layer_of
from backends.triton_gpu.shared.place import Place, ceil_div, device_function
from backends.triton_gpu.shared.soft_cap import base2_logits
from backends.triton_gpu.shared.softmax import add_tile

ROWS = 64
WARPS = 4
STAGES = 3
KEYS_A_CHUNK = tl.constexpr(256)
MOST_CHUNKS = 32
WHOLE = tl.constexpr(32)
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
    """Parts a row, at most; 0: nothing is shared."""
    tile: int
    """Keys, of which a part is a multiple."""
    now: Tensor | None
    """`SharedPrefix.now` of the batch."""
    partial: Tensor | None
    """float32: parts [chunks, num_seqs, num_q_heads, head_dim], lses [chunks, num_seqs, ...]."""


NOT_SHARED = Shared(0, 0, 1, None, None)


@device_function
def load_shared(
    now: tl.tensor, num_seqs: tl.tensor, HAS_SHARED: tl.constexpr
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
def keys_a_part(tokens: tl.tensor, chunks: tl.tensor, TILE: tl.constexpr) -> tl.tensor:
    """Such that parts are at most `chunks`, and none much shorter than KEYS_A_CHUNK.

    A multiple of TILE.
    """
    parts = tl.maximum(tl.minimum((tokens + KEYS_A_CHUNK - 1) // KEYS_A_CHUNK, chunks), 1)
    return tl.maximum(((tokens + parts - 1) // parts + TILE - 1) // TILE, 1) * TILE


@launcher(
    integers=("q_stride", "q_head", "table_stride", "sharing"),
    indices=("query_start_loc", "tables", "now", "k_scale", "v_scale"),
    pointers=("query", "k_cache", "v_cache"),
)
def _attend_prefix(
    query: tl.tensor,  # [num_tokens, num_q_heads, head_dim]
    k_cache: tl.tensor,  # [num_blocks, block_size, num_kv_heads, head_dim], bytes if e4m3
    v_cache: tl.tensor,  # likewise
    partial: tl.tensor,  # float32 [chunks, sharing, num_q_heads, head_dim], then without head_dim
    query_start_loc: tl.tensor,  # int32 [num_seqs + 1]
    tables: tl.tensor,  # int32 [num_seqs, max_blocks]
    now: tl.tensor,  # int32 [3], see SharedPrefix
    k_scale: tl.tensor,  # float32 [1] or [num_kv_heads], read if there is one
    v_scale: tl.tensor,  # likewise
    q_stride: tl.tensor,  # from token to token
    q_head: tl.tensor,  # from head to head
    table_stride: tl.tensor,
    sharing: tl.tensor,  # sequences at most
    scale: tl.tensor,  # float
    soft_cap: tl.tensor,  # float, used if has_cap
    FORM: tl.constexpr,
) -> None:
    LAYER: tl.constexpr = FORM.layer
    HEAD_DIM: tl.constexpr = LAYER.head_dim
    NUM_KV_HEADS: tl.constexpr = LAYER.num_heads // LAYER.group
    first_seq, last_seq, tokens = load_shared(now, sharing, HAS_SHARED=True)
    chunk = keys_a_part(tokens, tl.num_programs(1), FORM.tile)
    if tl.program_id(1) * chunk >= tokens:
        return
    table = tables + first_seq.to(tl.int64) * table_stride
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    row = tl.program_id(0) // NUM_KV_HEADS * FORM.rows + tl.arange(0, FORM.rows)
    s = first_seq + row // LAYER.group
    head = kv_head * LAYER.group + row % LAYER.group
    dim = tl.arange(0, LAYER.width)
    start = tl.load(query_start_loc + s, mask=s < last_seq, other=0)
    live = tl.load(query_start_loc + s + 1, mask=s < last_seq, other=0) - start == 1
    mask = live[:, None] & (dim < HEAD_DIM)[None, :]
    at = start.to(tl.int64) * q_stride + head_offset(head, q_head, LAYER.q_align)
    q = tl.load(query + at[:, None] + dim[None, :], mask=mask, other=0.0)
    if LAYER.e4m3:
        q = q.to(tl.float16)
    scale *= load_scale(k_scale, kv_head, LAYER.k_scale)
    begin = tl.program_id(1) * chunk
    highest, total, sums = _walk_prefix(
        q, k_cache + kv_head * LAYER.k_strides[2], v_cache + kv_head * LAYER.v_strides[2], table,
        begin, tl.minimum(begin + chunk, tokens), scale, soft_cap, FORM,
    )  # fmt: skip
    sums *= load_scale(v_scale, kv_head, LAYER.v_scale)
    index = (tl.program_id(1) * sharing + s - first_seq) * LAYER.num_heads + head
    tl.store(partial + index[:, None] * HEAD_DIM + dim[None, :], sums / total[:, None], mask=mask)
    ROW: tl.constexpr = LAYER.num_heads * HEAD_DIM
    lses = partial + tl.num_programs(1) * sharing * ROW
    tl.store(lses + index, highest + tl.log2(total), mask=live)


@device_function
def _walk_prefix(
    q: tl.tensor, k_cache: tl.tensor, v_cache: tl.tensor, table: tl.tensor,
    begin: tl.tensor, end: tl.tensor, scale: tl.tensor, soft_cap: tl.tensor, FORM: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Each row's highest logit (base 2), total weight, and weighted sum of values."""
    LAYER: tl.constexpr = FORM.layer
    ROWS: tl.constexpr = FORM.rows
    WIDTH: tl.constexpr = LAYER.width
    TILE: tl.constexpr = FORM.tile
    ALIGN: tl.constexpr = LAYER.align
    highest = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, WIDTH], tl.float32)
    dim = tl.arange(0, WIDTH)
    lane = tl.arange(0, TILE)
    block_id = tl.load(table + (begin + lane) // LAYER.block_size, mask=begin + lane < end, other=0)
    for tile_start in range(begin, end, TILE):
        key = tile_start + lane
        live = key < end
        block, offset = block_id.to(tl.int64), key % LAYER.block_size
        k_at = block * LAYER.k_strides[0] + offset * LAYER.k_strides[1]
        v_at = block * LAYER.v_strides[0] + offset * LAYER.v_strides[1]
        k_at = tl.multiple_of(k_at, ALIGN)
        v_at = tl.multiple_of(v_at, ALIGN)
        inside = (dim < LAYER.head_dim)[None, :]
        k = tl.load(k_cache + k_at[:, None] + dim[None, :], mask=inside, other=0.0)
        mask = live[:, None] & inside
        v = tl.load(v_cache + v_at[:, None] + dim[None, :], mask=mask, other=0.0)
        ahead = key + TILE
        block_id = tl.load(table + ahead // LAYER.block_size, mask=ahead < end, other=0)
        if LAYER.e4m3:
            k = widen(k, LAYER.native)
            v = widen(v, LAYER.native)
        logits = tl.dot(q, tl.trans(k), input_precision="ieee")
        logits = base2_logits(logits, scale, soft_cap, LAYER.has_cap)
        logits = tl.where(live[None, :], logits, float("-inf"))
        p, highest, total, rescale = add_tile(logits, highest, total, 1)
        sums = sums * rescale[:, None]
        sums = tl.dot(p.to(v.dtype), v, sums, input_precision="ieee")
    return highest, total, sums


class Form(NamedTuple):
    """The compile-time values of the kernel."""

    layer: Layer
    rows: int
    tile: int
    """Keys."""


def cascade(
    place: Place, query: Tensor, cache: KVCache, batch: PagedBatch, terms: AttentionTerms
) -> Shared:
    """Attend the batch's shared prefix, where that pays: the part that `decode` need not read."""
    prefix = batch.shared_prefix
    if prefix is None or not pays(cache, batch, terms):
        return NOT_SHARED
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
    num_kv_heads = cache.k.shape[2]
    group = num_heads // num_kv_heads
    programs = num_kv_heads * ceil_div(prefix.num_seqs * group, ROWS)
    tile = keys_a_tile(head_dim)
    if prefix.num_tokens < WHOLE.value:
        return NOT_SHARED
    slots = 2 * place.num_multiprocessors(query.device)
    parts = ceil_div(prefix.num_tokens, KEYS_A_CHUNK.value)
    chunks = max(1, min(MOST_CHUNKS, parts, slots // programs))
    rows = chunks * prefix.num_seqs * num_heads
    partial = torch.empty(rows * (head_dim + 1), dtype=torch.float32, device=query.device)
    now = prefix.now
    if now is None:
        ends = (prefix.first_seq, prefix.first_seq + prefix.num_seqs, prefix.num_tokens)
        said = torch.tensor(ends, dtype=torch.int32, pin_memory=query.device.type == "cuda")
        now = said.to(query.device, non_blocking=True)
    form = Form(layer_of(place, query, cache, query, terms), ROWS, tile)
    variant = _attend_prefix.variant(
        place, query.device, (query.dtype, cache.k.dtype), (form,),
        num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    tensors = (
        query, cache.k, cache.v, partial, batch.query_start_loc, batch.block_table, now,
        batch.seq_lens if cache.k_scale is None else cache.k_scale,
        batch.seq_lens if cache.v_scale is None else cache.v_scale,
    )  # fmt: skip
    numbers = (
        *query.stride()[:2], batch.block_table.stride(0), prefix.num_seqs,
        float(terms.scale), terms.soft_cap or 1.0,
    )  # fmt: skip
    variant.launch((programs, chunks, 1), tensors, numbers)
    return Shared(prefix.num_seqs, chunks, tile, now, partial)


def worth() -> tuple[int, int, int]:
    """From where on it pays; see `Capabilities.shared_prefix_worth`."""
    return FEWEST, WORTH_BYTES, WORTH_BYTES_A_SEQUENCE


def pays(cache: KVCache, batch: PagedBatch, terms: AttentionTerms) -> bool:
    """Return True if the bytes that are read once save more than a launch and a merge cost.

    Never with a window, which leaves most of a long prefix out of sight, nor for more sequences
    than are planned, nor in a batch without decode.
    """
    prefix = batch.shared_prefix
    if prefix is None or terms.window is not None or batch.num_seqs > MAX_PLANNED:
        return False
    if prefix.now is not None:  # the caller has found that it pays
        return True
    saved = (prefix.num_seqs - 1) * prefix.num_tokens * sum(cache.layout.row_bytes)
    fewest, some, each = worth()
    return prefix.num_seqs >= fewest and saved >= some + prefix.num_seqs * each


def keys_a_tile(head_dim: int) -> int:
    """Keys a tile, such that the tiles of K and V in flight fit in shared memory."""
    return 64 if head_dim <= 64 else 32 if head_dim <= 128 else 16
