"""The scores of the tokens that each query row sees, on a GPU.

    out[i, p] = sum_h weights[t, h] * max(0, query[t, h] . key[p]),  t = first_row + i

Grid: (rows, chunks of keys). A program has one query row with all its index heads, and walks the
tiles of its chunk by way of the block table: a product of keys x heads on the matrix units, then
ReLU, weights and the sum over heads in registers. A key's score does not depend on the chunk or the
tile it is in. Bytes moved: the keys of a row once, shared by rows of one sequence through L2;
4 bytes a score. Tolerance: `sparse_oracle.score_index`.
"""

import math
from typing import NamedTuple, cast

import triton.language as tl
from torch import Tensor

from backends.checks import check_score_index
from backends.contract import Backend, KVCache, PagedBatch
from backends.triton_gpu.shared.launch import Launch, launcher
from backends.triton_gpu.shared.place import Place, ceil_div, power_of_two, sign
from backends.triton_gpu.sparse.rows import find_row

STAGES = 3
FEW_ROWS = 16
FEW_KEYS, MANY_KEYS = 512, 2048
"""Keys a chunk, for up to FEW_ROWS rows and for more."""


class Form(NamedTuple):
    """Compile-time values."""

    q_head: int
    """From one head of the queries to the next."""
    num_heads: int
    dim: int
    block_size: int
    block: int
    """From block to block."""
    slot: int
    align: int
    """Elements that divide both."""
    tile: int
    """Keys."""

    @property
    def heads(self) -> int:
        """`num_heads` as a power of two that matrix instructions take."""
        return max(16, power_of_two(self.num_heads))

    @property
    def width(self) -> int:
        """`dim` likewise."""
        return max(16, power_of_two(self.dim))


@launcher(
    integers=(
        "q_stride", "w_stride", "out_stride", "num_seqs", "table_stride", "first_row", "chunk",
    ),
    indices=("query_start_loc", "seq_lens", "tables"),
    pointers=("query", "weights", "cache", "out"),
)  # fmt: skip
def _score(
    query: tl.tensor,  # [num_tokens, num_heads, dim]
    weights: tl.tensor,  # float32 [num_tokens, num_heads]
    cache: tl.tensor,  # [num_blocks, block_size, 1, dim]
    out: tl.tensor,  # float32 [rows, at least the longest length]
    query_start_loc: tl.tensor,  # int32 [num_seqs + 1]
    seq_lens: tl.tensor,  # int32 [num_seqs]
    tables: tl.tensor,  # int32 [num_seqs, max_blocks]
    q_stride: tl.tensor,  # from token to token
    w_stride: tl.tensor,
    out_stride: tl.tensor,
    num_seqs: tl.tensor,
    table_stride: tl.tensor,
    first_row: tl.tensor,
    chunk: tl.tensor,  # keys a program, whole tiles
    FORM: tl.constexpr,
) -> None:
    TILE: tl.constexpr = FORM.tile
    BLOCK_SIZE: tl.constexpr = FORM.block_size
    ALIGN: tl.constexpr = FORM.align
    row = first_row + tl.program_id(0)
    begin = tl.program_id(1) * chunk
    s, length = find_row(query_start_loc, seq_lens, num_seqs, row)
    if begin >= length:
        return
    end = tl.minimum(length, begin + chunk)
    table = tables + s.to(tl.int64) * table_stride
    lane, dim, head = tl.arange(0, TILE), tl.arange(0, FORM.width), tl.arange(0, FORM.heads)
    has_head, has_dim = head < FORM.num_heads, dim < FORM.dim
    of_query = row.to(tl.int64) * q_stride + head[None, :] * FORM.q_head + dim[:, None]
    q = tl.load(query + of_query, mask=has_head[None, :] & has_dim[:, None], other=0.0)
    w = tl.load(weights + row.to(tl.int64) * w_stride + head, mask=has_head, other=0.0)
    to = out + (row - first_row).to(tl.int64) * out_stride
    block_id = tl.load(table + (begin + lane) // BLOCK_SIZE, mask=begin + lane < end, other=0)
    for tile in range(begin, end, TILE):
        key = tile + lane
        inside = key < end
        at = block_id.to(tl.int64) * FORM.block + key % BLOCK_SIZE * FORM.slot
        at = tl.multiple_of(at, ALIGN)[:, None]
        k = tl.load(cache + at + dim[None, :], mask=inside[:, None] & has_dim[None, :], other=0.0)
        ahead = key + TILE
        block_id = tl.load(table + ahead // BLOCK_SIZE, mask=ahead < end, other=0)
        dots = tl.dot(k, q, input_precision="ieee")
        tl.store(to + key, tl.sum(tl.maximum(dots, 0.0) * w[None, :], 1), mask=inside)


def score_index(
    backend: Backend,
    place: Place,
    query: Tensor,
    weights: Tensor,
    cache: KVCache,
    batch: PagedBatch,
    first_row: int,
    out: Tensor,
) -> None:
    """Score the tokens that some rows see; see `SparseBackend.score_index`.

    Raises:
        InvalidArgumentError: a shape, dtype or device breaks the contract; nothing written.
    """
    key = ("score", sign(query), sign(weights), cache.form, batch.form, first_row, sign(out))
    plan = cast("Launch | None", place.plan(key))
    room = min(out.shape[1], batch.block_table.shape[1] * cache.k.shape[1])
    if plan is None or batch.max_seq_len > room:
        check_score_index(backend, query, weights, cache, batch, first_row, out)
        plan = plan_score(place, query, weights, cache, batch, first_row, out)
        place.keep(key, plan)
    if batch.num_seqs and out.numel():
        where = (batch.query_start_loc, batch.seq_lens, batch.block_table)
        plan.run((query, weights, cache.k, out, *where))


def plan_score(
    place: Place,
    query: Tensor,
    weights: Tensor,
    cache: KVCache,
    batch: PagedBatch,
    first_row: int,
    out: Tensor,
) -> Launch:
    """Plan a call whose arguments have been checked; compiles nothing."""
    (block, slot), num_rows = cache.k.stride()[:2], out.shape[0]
    form = Form(
        query.stride(1), query.shape[1], query.shape[2], cache.k.shape[1], block, slot,
        math.gcd(16, block, slot), 128 if query.element_size() == 2 else 32,
    )  # fmt: skip
    row_bytes, room = form.width * query.element_size(), place.shared_bytes(out.device)
    while form.tile > 16 and (STAGES * form.tile + form.heads) * row_bytes > room:
        form = form._replace(tile=form.tile // 2)
    chunk = FEW_KEYS if num_rows <= FEW_ROWS else MANY_KEYS
    options = {"num_warps": 4, "num_stages": STAGES}
    variant = _score.variant(place, out.device, (query.dtype,), (form,), **options)
    numbers = (
        query.stride(0), weights.stride(0), out.stride(0), batch.num_seqs,
        batch.block_table.stride(0), first_row, chunk,
    )  # fmt: skip
    return Launch(variant, (num_rows, ceil_div(out.shape[1], chunk), 1), numbers)
