"""The meaning of the operations of sparse attention: float64 scores and sums; exact choices.

Decides the expected results, and how far a backend may be from each. Knows nothing of speed.
"""

import math

import torch
from torch import Tensor

from backends import oracle
from backends.contract import AttentionTerms, KVCache, PagedBatch
from backends.state_oracle import Number

_U = 2.0**-24


def rows_of(batch: PagedBatch) -> list[tuple[int, int]]:
    """(sequence, tokens seen) of each query row that belongs to one."""
    starts, lengths = batch.query_start_loc.tolist(), batch.seq_lens.tolist()
    return [
        (s, length - starts[s + 1] + row + 1)
        for s, length in enumerate(lengths)
        for row in range(starts[s], starts[s + 1])
    ]


def score_index(query: Tensor, weights: Tensor, cache: KVCache, batch: PagedBatch) -> Number:
    """Exact scores [rows of sequences, max_seq_len]; NaN past a row's position.

    The error allowed, for a kernel in float32 (unit roundoff u = 2^-24): a dot product of d numbers
    errs by (sqrt(d) + 2) u times the sum of the sizes of its products, and the sum over h heads by
    (sqrt(h) + 2) u times the sum of the sizes of its terms, as derived in `state_oracle`.
    """
    rows = rows_of(batch)
    value = torch.full((len(rows), batch.max_seq_len), math.nan, dtype=torch.float64)
    error = torch.zeros_like(value)
    tables, (_, block_size, _, dim) = batch.block_table.cpu(), cache.k.shape
    keys, q, w = (each.detach().double().cpu() for each in (cache.k[:, :, 0], query, weights))
    of_dots, of_sums = math.sqrt(dim) + 2, math.sqrt(q.shape[1]) + 2
    for t, (s, length) in enumerate(rows):
        at = torch.arange(length)
        k = keys[tables[s, at // block_size].long(), at % block_size]
        dots = (q[t] @ k.T).clamp(min=0)
        sizes = w[t].abs()
        value[t, :length] = w[t] @ dots
        error[t, :length] = _U * sizes @ (of_dots * (q[t].abs() @ k.abs().T) + of_sums * dots)
    return Number(value, error)


def choose_tokens(scores: Tensor, batch: PagedBatch, count: int) -> Tensor:
    """int32 [rows of sequences, count]: the positions of the highest scores, ascending, then -1."""
    rows = rows_of(batch)
    chosen = torch.full((len(rows), count), -1, dtype=torch.int32)
    for t, (_, length) in enumerate(rows):
        order = torch.sort(scores[t, :length].cpu(), descending=True, stable=True).indices
        best = order[:count].sort().values
        chosen[t, : len(best)] = best
    return chosen


def attend_chosen(
    query: Tensor, cache: KVCache, batch: PagedBatch, chosen: Tensor, terms: AttentionTerms
) -> oracle.Expected:
    """Exact attention of each row over copies of its chosen tokens."""
    rows, (num_rows, count) = rows_of(batch), chosen.shape
    tables, block_size = batch.block_table.cpu(), cache.k.shape[1]
    slots, lengths = torch.zeros((num_rows, count), dtype=torch.long), [0] * num_rows
    for t, (s, length) in enumerate(rows):
        lengths[t] = min(count, length)
        at = chosen[t, : lengths[t]].long().cpu()
        slots[t, : lengths[t]] = tables[s, at // block_size] * block_size + at % block_size
    whole = [each.detach().cpu().contiguous() for each in cache.tensors]
    tensors = [each.flatten(0, 1)[slots.flatten(), None] for each in whole]
    scales = [None if each is None else each.cpu() for each in (cache.k_scale, cache.v_scale)]
    starts = [min(t, len(rows)) for t in range(num_rows + 1)]
    table = torch.arange(num_rows * count, dtype=torch.int32).view(num_rows, count)
    batch = PagedBatch(
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor(lengths, dtype=torch.int32),
        table,
        torch.full((num_rows,), -1),
        1,
        count,
    )
    return oracle.attention(query, cache.layout.over(tensors, *scales), batch, terms)
