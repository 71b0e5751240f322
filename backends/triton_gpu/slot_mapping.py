"""Positions to slots, for a whole batch on a GPU.

    out[j] = block_table[s, position // block_size] * block_size + position % block_size
    position = seq_lens[s] - query_start_loc[s + 1] + j, for the query rows j of sequence s

Layout: a row of `out` is one query token, in the order of the batch. Grid: tiles of 128 rows; each
row finds its sequence by bisection. Bytes moved: 8 a row written, an entry of the table read, and
per step of the bisection a query_start_loc, which lies in L1. Exact, in int64. The rest of `out`
becomes -1. Values are the caller's duty.
"""

from typing import cast

import triton.language as tl
from torch import Tensor

from backends.checks import check_slot_mapping
from backends.contract import Backend
from backends.triton_gpu.shared.launch import Launch, launcher
from backends.triton_gpu.shared.place import Place, ceil_div, sign

TILE = 128
WARPS = 4


@launcher(
    integers=("num_seqs", "num_rows", "table_stride", "steps"),
    indices=("query_start_loc", "seq_lens", "tables", "out"),
)
def _fill(
    query_start_loc: tl.tensor,  # int32 [num_seqs + 1]
    seq_lens: tl.tensor,  # int32 [num_seqs]
    tables: tl.tensor,  # int32 [num_seqs, max_blocks]
    out: tl.tensor,  # int64 [num_rows]
    num_seqs: tl.tensor,
    num_rows: tl.tensor,
    table_stride: tl.tensor,
    steps: tl.tensor,  # of the bisection: bits of num_seqs
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    live = row < tl.load(query_start_loc + num_seqs)
    low = tl.zeros([TILE], tl.int32)
    high = low + num_seqs
    for _ in range(steps):  # the last sequence that starts at or before the row
        middle = (low + high) // 2
        before = tl.load(query_start_loc + middle) <= row
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    end = tl.load(query_start_loc + low + 1, mask=live, other=0)
    position = tl.load(seq_lens + low, mask=live, other=0) - end + row
    entry = tables + low.to(tl.int64) * table_stride + position // BLOCK_SIZE
    block_id = tl.load(entry, mask=live, other=0).to(tl.int64)
    slot = tl.where(live, block_id * BLOCK_SIZE + position % BLOCK_SIZE, -1)
    tl.store(out + row, slot, mask=row < num_rows)


def compute_slot_mapping(
    backend: Backend,
    place: Place,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    block_size: int,
    out: Tensor,
) -> None:
    """Fill `out` with the slots of the new tokens; see `Backend.compute_slot_mapping`.

    Raises:
        InvalidArgumentError: a shape, dtype or device breaks the contract; nothing written.
    """
    key = (
        "slots", sign(query_start_loc), sign(seq_lens), sign(block_table), block_size, sign(out)
    )  # fmt: skip
    plan = cast("Launch | None", place.plan(key))
    if plan is None:
        check_slot_mapping(backend, query_start_loc, seq_lens, block_table, block_size, out)
        num_rows, num_seqs = out.shape[0], seq_lens.shape[0]
        variant = _fill.variant(place, out.device, (), (block_size, TILE), num_warps=WARPS)
        numbers = (num_seqs, num_rows, block_table.stride(0), num_seqs.bit_length())
        plan = Launch(variant, (ceil_div(num_rows, TILE), 1, 1), numbers)
        place.keep(key, plan)
    if plan.grid[0]:
        tensors = (query_start_loc, seq_lens, block_table, out)
        plan.run(tensors)
