"""Attention over the paged cache on a GPU: which kernel takes a sequence, and the one for prefill.

Sequences with one query token go to `decode`, the others to the kernel here: two launches for a
mixed batch, decided by `max_query_len`, which the host knows. float32, which has no matrix
instruction, and a single sequence that may be long stay here whatever their length.

    out[j, h] = sum_k p_k v[k, h // group] / (sum_k p_k + p_sink)
    p_k = exp(logit_k - max);  logit_k = scale * q.k, or cap * tanh(scale * q.k / cap)

Layout: a row is one (query token, head of the group); a program holds a tile of rows of one
sequence and KV head and walks the keys it can see, a tile at a time, by way of the block table.
Grid: (KV head, tile of rows), where sequence s owns the tiles from query_start_loc[s] // TOKENS + s
on and each program finds its sequence by bisection (the numbering is vLLM's): no plan on the host,
no synchronisation, and at most one idle program a sequence and KV head.

Bytes moved: K and V once a tile of rows. Sums and the softmax are float32; the probabilities are
rounded to the cache's dtype before they meet V. Error: at most twice that of the same algorithm
emulated in that dtype. Deterministic; blocks may lie in any order. Only `block_id * stride` is
int64. Values are the caller's duty.
"""

# ruff: noqa: N803 - compile-time arguments are upper case, as everywhere in Triton

import torch
import triton.language as tl
from torch import Tensor

from backends.checks import check_paged_attention
from backends.contract import Backend, PagedBatch
from backends.triton_gpu.decode import decode
from backends.triton_gpu.place import Place, device_function, jit, power_of_two
from backends.triton_gpu.soft_cap import LOG2E, cap_logits

DECODE_ROWS = 16
PREFILL_ROWS = 64


@device_function
def _find_tile(
    query_start_loc: tl.tensor,
    seq_lens: tl.tensor,
    num_seqs: tl.tensor,
    tile: tl.tensor,
    TOKENS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """(sequence, its first row, its query length, position of query token 0, tile's first token).

    The sequence is the last one whose first tile is at or before this one.
    """
    low = tile * 0
    high = low + num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        before = tl.load(query_start_loc + middle) // TOKENS + middle <= tile
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    start = tl.load(query_start_loc + low)
    query_len = tl.load(query_start_loc + low + 1) - start
    first = tl.load(seq_lens + low) - query_len
    return low, start, query_len, first, (tile - start // TOKENS - low) * TOKENS


@device_function
def _start_rows(
    sinks: tl.tensor, head: tl.tensor, live: tl.tensor, ROWS: tl.constexpr, HAS_SINKS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Running maximum and total of each row before its first key: nothing, or its sink."""
    highest = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks + head, mask=live, other=0.0) * LOG2E
        highest = tl.maximum(highest, sink)
        total = tl.exp2(sink - highest)
    return highest, total


@device_function
def _walk_keys(
    q: tl.tensor, highest: tl.tensor, total: tl.tensor, position: tl.tensor,  # [ROWS, ...]
    k_cache: tl.tensor, v_cache: tl.tensor, table: tl.tensor, kv_head: tl.tensor,
    seen: tl.tensor, stop: tl.tensor,  # positions of the keys that some row sees
    scale: tl.tensor, soft_cap: tl.tensor, window: tl.tensor,
    K_STRIDES: tl.constexpr, V_STRIDES: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr, HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
    TILE: tl.constexpr, WIDTH: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """The rows' weighted sums of values, and the totals of their weights."""
    sums = tl.zeros([q.shape[0], WIDTH], tl.float32)
    dim = tl.arange(0, WIDTH)
    for tile_start in range(seen // TILE * TILE, stop, TILE):
        key = tile_start + tl.arange(0, TILE)
        key_live = (key >= seen) & (key < stop)
        block_id = tl.load(table + key // BLOCK_SIZE, mask=key_live, other=0).to(tl.int64)
        offset = key % BLOCK_SIZE
        k_at = block_id * K_STRIDES[0] + (offset * K_STRIDES[1] + kv_head * K_STRIDES[2])
        k_mask = (dim < HEAD_DIM)[:, None] & key_live[None, :]
        k = tl.load(k_cache + k_at[None, :] + dim[:, None], mask=k_mask, other=0.0)
        v_at = block_id * V_STRIDES[0] + (offset * V_STRIDES[1] + kv_head * V_STRIDES[2])
        v_mask = key_live[:, None] & (dim < HEAD_DIM)[None, :]
        v = tl.load(v_cache + v_at[:, None] + dim[None, :], mask=v_mask, other=0.0)

        logits = tl.dot(q, k, input_precision="ieee") * scale
        if HAS_CAP:
            logits = cap_logits(logits, soft_cap)
        visible = key_live[None, :] & (key[None, :] <= position[:, None])
        if HAS_WINDOW:
            visible = visible & (key[None, :] > position[:, None] - window)
        logits = tl.where(visible, logits * LOG2E, float("-inf"))
        now = tl.maximum(highest, tl.max(logits, 1))
        p = tl.exp2(logits - now[:, None])
        rescale = tl.exp2(highest - now)
        total = total * rescale + tl.sum(p, 1)
        sums = sums * rescale[:, None]
        sums = tl.dot(p.to(v.dtype), v, sums, input_precision="ieee")
        highest = now
    return sums, total


@jit(do_not_specialize=["num_seqs", "table_stride", "window", "shortest"])
def _attend(
    query: tl.tensor,  # [num_tokens, num_q_heads, head_dim]
    k_cache: tl.tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
    v_cache: tl.tensor,  # likewise
    out: tl.tensor,  # like query
    query_start_loc: tl.tensor,  # int32 [num_seqs + 1]
    seq_lens: tl.tensor,  # int32 [num_seqs]
    tables: tl.tensor,  # int32 [num_seqs, max_blocks]
    sinks: tl.tensor,  # float32 [num_q_heads], read if HAS_SINKS
    num_seqs: tl.tensor,
    table_stride: tl.tensor,
    scale: tl.tensor,  # float
    soft_cap: tl.tensor,  # float, used if HAS_CAP
    window: tl.tensor,  # used if HAS_WINDOW
    shortest: tl.tensor,  # query tokens; sequences with fewer are left alone
    Q_STRIDES: tl.constexpr,  # token, head
    K_STRIDES: tl.constexpr,  # block, offset, head
    V_STRIDES: tl.constexpr,
    O_STRIDES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,  # ROWS // GROUP
    TILE: tl.constexpr,  # keys
    WIDTH: tl.constexpr,  # head_dim as a power of two
) -> None:
    kv_head = tl.program_id(0)
    tile = tl.program_id(1)
    s, start, query_len, first, token_start = _find_tile(
        query_start_loc, seq_lens, num_seqs, tile, TOKENS
    )
    query_len = tl.where(query_len < shortest, 0, query_len)
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, WIDTH)
    token = token_start + row // GROUP
    head = kv_head * GROUP + row % GROUP
    live = (token < query_len) & (row < TOKENS * GROUP)
    mask = live[:, None] & (dim < HEAD_DIM)[None, :]
    offsets = (start + token).to(tl.int64) * Q_STRIDES[0] + head * Q_STRIDES[1]
    q = tl.load(query + offsets[:, None] + dim[None, :], mask=mask, other=0.0)
    position = first + token

    highest, total = _start_rows(sinks, head, live, ROWS, HAS_SINKS)
    stop = first + tl.minimum(token_start + TOKENS, query_len)
    stop = tl.where(token_start < query_len, stop, 0)
    seen = stop * 0
    if HAS_WINDOW:
        seen = tl.maximum(first + token_start - window + 1, 0)
    table = tables + s.to(tl.int64) * table_stride
    sums, total = _walk_keys(
        q, highest, total, position, k_cache, v_cache, table, kv_head, seen, stop,
        scale, soft_cap, window, K_STRIDES, V_STRIDES, BLOCK_SIZE, HEAD_DIM, HAS_CAP, HAS_WINDOW,
        TILE, WIDTH,
    )  # fmt: skip
    result = sums / tl.where(live, total, 1.0)[:, None]
    offsets = (start + token).to(tl.int64) * O_STRIDES[0] + head * O_STRIDES[1]
    tl.store(out + offsets[:, None] + dim[None, :], result.to(out.dtype.element_ty), mask=mask)


def paged_attention(
    backend: Backend,
    place: Place,
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of every query row; see `Backend.paged_attention`.

    Raises:
        InvalidArgumentError: a shape, dtype or device breaks the contract; nothing written.
    """
    check_paged_attention(
        backend, query, k_cache, v_cache, batch,
        scale=scale, window=window, soft_cap=soft_cap, sinks=sinks, out=out,
    )  # fmt: skip
    if out is None:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if batch.num_seqs == 0 or batch.num_tokens == 0:
        return out
    if sinks is not None:
        sinks = sinks.float().contiguous()
    if window is not None:
        window = min(window, batch.max_seq_len + 1)
    decodes = query.element_size() == 2 and (batch.max_query_len <= 1 or batch.num_seqs > 1)
    if decodes:
        decode(
            place, query, k_cache, v_cache, batch, out,
            scale=scale, window=window, soft_cap=soft_cap, sinks=sinks,
        )  # fmt: skip
    if batch.max_query_len > 1 or not decodes:
        _prefill(
            place, query, k_cache, v_cache, batch, out, shortest=2 if decodes else 1,
            scale=scale, window=window, soft_cap=soft_cap, sinks=sinks,
        )  # fmt: skip
    return out


def _prefill(
    place: Place,
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: PagedBatch,
    out: Tensor,
    *,
    shortest: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: Tensor | None,
) -> None:
    """Write the rows of the sequences that `decode` leaves alone."""
    num_kv_heads, head_dim = k_cache.shape[2:]
    group = query.shape[1] // num_kv_heads
    width = max(16, power_of_two(head_dim))
    row_bytes = width * query.element_size()
    rows = rows_a_program(row_bytes, group, batch.max_query_len)
    tokens = rows // group
    with place.guard(query.device):
        _attend[num_kv_heads, batch.num_tokens // tokens + batch.num_seqs](
            query, k_cache, v_cache, out,
            batch.query_start_loc, batch.seq_lens, batch.block_table,
            out if sinks is None else sinks,
            batch.num_seqs, batch.block_table.stride(0), scale,
            1.0 if soft_cap is None else soft_cap,
            window or 0,
            shortest,
            query.stride()[:2], k_cache.stride()[:3], v_cache.stride()[:3], out.stride()[:2],
            k_cache.shape[1], group, head_dim,
            soft_cap is not None, window is not None, sinks is not None,
            rows, tokens, keys_a_tile(row_bytes), width,
            num_warps=4, num_stages=2,
        )  # fmt: skip


def rows_a_program(row_bytes: int, group: int, max_query_len: int) -> int:
    """Rows a program: few for decode; for prefill as many as 32 KiB of shared memory hold."""
    decode = max_query_len * group <= DECODE_ROWS
    rows = DECODE_ROWS if decode else max(DECODE_ROWS, min(PREFILL_ROWS, (32 << 10) // row_bytes))
    return max(rows, power_of_two(group))


def keys_a_tile(row_bytes: int) -> int:
    """Keys a tile: K and V in two stages stay within 64 KiB of shared memory."""
    return max(16, min(64, 64 * 256 // row_bytes))
