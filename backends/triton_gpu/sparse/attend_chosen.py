"""Attention to chosen tokens on a GPU: each query row is a sequence, in blocks of one token.

    entry[t, i] = block_table[s, p // block_size] * first + p % block_size * second
    p = chosen[t, i]

The rest is `paged_attention` over the cache as `by_slot` shows it, with a length of
min(count, position + 1) a row; its kernels read each key from wherever its entry says. Grid: (rows,
tiles of chosen tokens). Bytes moved beside that: 4 a chosen token, read and written.
"""

from typing import NamedTuple, cast

import torch
import triton.language as tl
from torch import Tensor

from backends.checks import check_attend_chosen
from backends.contract import AttentionTerms, Backend, KVCache, PagedBatch
from backends.sparse import by_slot
from backends.triton_gpu.shared.launch import Launch, launcher
from backends.triton_gpu.shared.place import Place, ceil_div, sign
from backends.triton_gpu.sparse.rows import find_row

TILE = 512


class Form(NamedTuple):
    """Compile-time values."""

    most: int
    block_size: int
    first: int
    second: int
    tile: int


@launcher(
    integers=("num_seqs", "table_stride"),
    indices=("query_start_loc", "seq_lens", "tables", "chosen", "starts", "lengths", "entries"),
)
def _locate(
    query_start_loc: tl.tensor,  # int32 [num_seqs + 1]
    seq_lens: tl.tensor,  # int32 [num_seqs]
    tables: tl.tensor,  # int32 [num_seqs, max_blocks]
    chosen: tl.tensor,  # int32 [num_rows, count]
    starts: tl.tensor,  # int32 [num_rows + 1], written, as the next two
    lengths: tl.tensor,  # int32 [num_rows]
    entries: tl.tensor,  # int32 [num_rows, count]
    num_seqs: tl.tensor,
    table_stride: tl.tensor,
    FORM: tl.constexpr,
) -> None:
    BLOCK_SIZE: tl.constexpr = FORM.block_size
    row, part = tl.program_id(0), tl.program_id(1)
    s, length = find_row(query_start_loc, seq_lens, num_seqs, row)
    seen = tl.minimum(length, FORM.most)
    if part == 0:
        total = tl.load(query_start_loc + num_seqs)
        tl.store(starts + row + 1, tl.minimum(row + 1, total))
        tl.store(lengths + row, seen)
        if row == 0:
            tl.store(starts, 0)
    i = part * FORM.tile + tl.arange(0, FORM.tile)
    at = row.to(tl.int64) * FORM.most + i
    position = tl.load(chosen + at, mask=i < seen, other=0)
    table = tables + s.to(tl.int64) * table_stride
    block_id = tl.load(table + position // BLOCK_SIZE, mask=i < seen, other=0)
    entry = block_id * FORM.first + position % BLOCK_SIZE * FORM.second
    tl.store(entries + at, entry, mask=i < seen)


def attend_chosen(
    backend: Backend,
    place: Place,
    query: Tensor,
    cache: KVCache,
    batch: PagedBatch,
    chosen: Tensor,
    terms: AttentionTerms,
    out: Tensor | None,
) -> Tensor:
    """Attend to chosen tokens; see `SparseBackend.attend_chosen`.

    Raises:
        InvalidArgumentError: a shape, dtype or device breaks the contract; nothing written.
    """
    key = ("chosen", cache.form, batch.form, sign(chosen), terms.form)
    plan = cast("Launch | None", place.plan(key))
    seen, first, second = by_slot(cache)
    num_rows, count = chosen.shape
    if plan is None:
        check_attend_chosen(backend, batch, chosen, terms)
        form = Form(count, cache.k.shape[1], first, second, TILE)
        variant = _locate.variant(place, chosen.device, (), (form,), num_warps=4)
        numbers = (batch.num_seqs, batch.block_table.stride(0))
        plan = Launch(variant, (num_rows, ceil_div(count, TILE), 1), numbers)
        place.keep(key, plan)
    made = torch.empty(2 * num_rows + 1, dtype=torch.int32, device=chosen.device)
    starts, lengths, entries = made[: num_rows + 1], made[num_rows + 1 :], torch.empty_like(chosen)
    if batch.num_seqs and num_rows:
        where = (batch.query_start_loc, batch.seq_lens, batch.block_table)
        plan.run((*where, chosen, starts, lengths, entries))
    else:
        made.zero_()
    longest = min(count, batch.max_seq_len)
    rows = PagedBatch(starts, lengths, entries, batch.slot_mapping, min(1, num_rows), longest)
    return backend.paged_attention(query, seen, rows, terms, out=out)
