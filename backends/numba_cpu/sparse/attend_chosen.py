"""Attention to chosen tokens on a CPU: each query row is a sequence, in blocks of one token.

    entry[t, i] = block_table[s, p // block_size] * first + p % block_size * second
    p = chosen[t, i]

The rest is `paged_attention` over the cache as `by_slot` shows it, with a length of
min(count, position + 1) a row. Bytes moved beside that: 4 a chosen token, read and written.
"""

import zlib
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from backends.checks import check_attend_chosen
from backends.contract import AttentionTerms, Backend, KVCache, PagedBatch
from backends.errors import InvalidArgumentError
from backends.numba_cpu import bits
from backends.numba_cpu.bits import at, exact
from backends.sparse import by_slot

SOURCE_DIGEST = zlib.crc32(Path(__file__).read_bytes(), bits.SOURCE_DIGEST)


@lru_cache(maxsize=1)
def _kernel(source_digest: int) -> Callable[..., tuple[int, int]]:
    """Compile for the sources with this digest; closing over it makes it part of the cache key."""

    @exact(cache=True)
    def locate(
        tensors: tuple[int, int, int, int],  # query_start_loc, seq_lens, block_table, chosen
        made: tuple[int, int, int],  # the same three of rows as sequences, written
        num_seqs: int,
        num_rows: int,
        count: int,
        table: tuple[int, int],  # row stride, entries a row
        place: tuple[int, int, int],  # block_size, factors of `by_slot`
    ) -> tuple[int, int]:
        """(row, position) of the first that is no position the row sees; row -1: none."""
        _ = source_digest
        starts = at(tensors[0], num_seqs + 1, np.int32(0))
        lengths = at(tensors[1], num_seqs, np.int32(0))
        tables, chosen = at(tensors[2], 1, np.int32(0)), at(tensors[3], 1, np.int32(0))
        of_rows = at(made[0], num_rows + 1, np.int32(0))
        seen, entries = at(made[1], num_rows, np.int32(0)), at(made[2], 1, np.int32(0))
        of_rows[0] = 0
        for s in range(num_seqs):
            for row in range(starts[s], starts[s + 1]):
                length = lengths[s] - (starts[s + 1] - row) + 1
                of_rows[row + 1], seen[row] = row + 1, min(count, length)
                for i in range(row * count, row * count + seen[row]):
                    p = chosen[i]
                    if p < 0 or p >= length or p // place[0] >= table[1]:
                        return row, p
                    block = tables[s * table[0] + p // place[0]]
                    entries[i] = block * place[1] + p % place[0] * place[2]
        for row in range(starts[num_seqs], num_rows):
            of_rows[row + 1], seen[row] = starts[num_seqs], 0
        return -1, 0

    return locate


def attend_chosen(
    backend: Backend,
    query: Tensor,
    cache: KVCache,
    batch: PagedBatch,
    chosen: Tensor,
    terms: AttentionTerms,
    out: Tensor | None,
) -> Tensor:
    """Attend to chosen tokens; see `SparseBackend.attend_chosen`.

    Raises:
        InvalidArgumentError: a shape, dtype, device or value breaks the contract; nothing written.
    """
    check_attend_chosen(backend, batch, chosen, terms)
    seen, *factors = by_slot(cache)
    num_rows, count = chosen.shape
    starts, table = torch.empty(num_rows + 1, dtype=torch.int32), torch.empty_like(chosen)
    lengths = torch.empty(num_rows, dtype=torch.int32)
    tensors = (batch.query_start_loc, batch.seq_lens, batch.block_table, chosen)
    row, position = _kernel(SOURCE_DIGEST)(
        tuple([tensor.data_ptr() for tensor in tensors]),
        (starts.data_ptr(), lengths.data_ptr(), table.data_ptr()),
        batch.num_seqs,
        num_rows,
        count,
        (batch.block_table.stride(0), batch.block_table.shape[1]),
        (cache.k.shape[1], *factors),
    )
    if row >= 0:
        raise InvalidArgumentError(
            f"chosen[{row}]", "ascending positions that the row sees", f"position {position}"
        )
    longest = min(count, batch.max_seq_len)
    rows = PagedBatch(starts, lengths, table, batch.slot_mapping, min(1, num_rows), longest)
    return backend.paged_attention(query, seen, rows, terms, out=out)
