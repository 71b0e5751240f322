"""The scores of the tokens that each query row sees, on a CPU.

    out[i, p] = sum_h weights[t, h] * max(0, query[t, h] . key[p]),  t = first_row + i

Layout: a unit is a query row with all its index heads. Keys come in tiles of 64, by way of the
block table, and are widened to float32 as they are loaded. Bytes moved: a row's keys once a row,
out of the core's cache where rows of one sequence follow each other. Tolerance:
`sparse_oracle.score_index`. Values of the batch are checked before anything is written.
"""

import zlib
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
from torch import Tensor

from backends.checks import check_score_index
from backends.contract import Backend, KVCache, PagedBatch
from backends.errors import InvalidArgumentError
from backends.numba_cpu import schedule, tiles
from backends.numba_cpu.bits import TAGS, Tag, at, jit, span, widen
from backends.numba_cpu.launch import Plans, Workers, sign
from backends.numba_cpu.schedule import FAULTS, Longs, check_batch
from backends.numba_cpu.tiles import TILE, Floats, score_tile

SOURCE_DIGEST = zlib.crc32(tiles.SOURCE_DIGEST.to_bytes(4), schedule.SOURCE_DIGEST)
SOURCE_DIGEST = zlib.crc32(Path(__file__).read_bytes(), SOURCE_DIGEST)

GRAIN = 1 << 16  # multiply-adds a thread: fewer cost more to hand out than to compute
_ZERO = np.float32(0.0)


@jit()
def _score_row(
    queries: Floats,  # [num_heads, size], widened
    weights: Floats,  # [num_heads]
    keys: Floats,  # the cache, flat
    table: Longs,  # of the row's sequence
    place: tuple[int, int, int],  # block_size, from block to block, from slot to slot
    length: int,  # keys that the row sees
    offsets: Longs,  # workspace [TILE]
    dots: Floats,  # workspace [num_heads, TILE]
    out: Floats,  # [length], written
) -> None:
    heads, size = weights.size, queries.size // weights.size
    for tile in range(0, length, TILE):
        live = min(TILE, length - tile)
        for t in range((live + 3) // 4 * 4):
            position = tile + min(t, live - 1)
            block = np.int64(table[position // place[0]])
            offsets[t] = block * place[1] + position % place[0] * place[2]
        score_tile(queries, 1, heads, heads, size, keys, offsets, 0, live, dots)
        part = span(out, tile, live)
        for t in range(live):
            part[t] = _ZERO
        for h in range(heads):
            w, row = weights[h], span(dots, h * TILE, live)
            for t in range(live):
                part[t] += w * max(_ZERO, row[t])


@lru_cache(maxsize=1)
def _kernels(source_digest: int) -> tuple[Callable[..., tuple[int, int, int]], Callable[..., None]]:
    """Compile for the sources with this digest; closing over it makes it part of the cache key."""

    @jit(cache=True)
    def find_fault(
        tensors: tuple[int, int, int],  # query_start_loc, seq_lens, block_table
        num_seqs: int,
        num_tokens: int,
        table: tuple[int, int, int, int],  # row stride, entries a row, block_size, num_blocks
        limits: tuple[int, int],  # max_query_len, max_seq_len
    ) -> tuple[int, int, int]:
        """(fault, sequence, value) as `check_batch`."""
        _ = source_digest
        starts = at(tensors[0], num_seqs + 1, np.int32(0))
        lengths = at(tensors[1], num_seqs, np.int32(0))
        tables = at(tensors[2], 1, np.int32(0))
        return check_batch(starts, lengths, tables, *table, num_tokens, 0, limits)

    @jit(cache=True)
    def score(
        tensors: tuple[int, int, int, int],  # query, weights, cache, out
        tag: Tag,  # of query and cache
        batch: tuple[int, int, int, int, int],  # query_start_loc, seq_lens, table, stride, num_seqs
        sizes: tuple[int, int],  # num_heads, size
        strides: tuple[int, int, int, int],  # tokens and heads of queries, weights, out
        place: tuple[int, int, int],  # block_size, from block to block, from slot to slot
        first_row: int,
        start: int,  # first row of `out`
        stop: int,  # past the last one
    ) -> None:
        _ = source_digest
        heads, size = sizes
        query, cache = at(tensors[0], 1, tag), at(tensors[2], 1, tag)
        weights, out = at(tensors[1], 1, np.float32(0)), at(tensors[3], 1, np.float32(0))
        starts = at(batch[0], batch[4] + 1, np.int32(0))
        lengths = at(batch[1], batch[4], np.int32(0))
        tables = at(batch[2], 1, np.int32(0))
        queries = np.empty(heads * size, np.float32)
        offsets, dots = np.empty(TILE, np.int64), np.empty(heads * TILE, np.float32)
        for s in range(batch[4]):
            table = span(tables, s * batch[3], 1)
            first = max(first_row + start, starts[s])
            for row in range(first, min(first_row + stop, starts[s + 1])):
                for h in range(heads):
                    source = span(query, row * strides[0] + h * strides[1], size)
                    target = span(queries, h * size, size)
                    for d in range(size):
                        target[d] = widen(source[d])
                length = lengths[s] - (starts[s + 1] - row) + 1
                _score_row(
                    queries, span(weights, row * strides[2], heads), cache, table, place, length,
                    offsets, dots, span(out, (row - first_row) * strides[3], length),
                )  # fmt: skip

    return find_fault, score


def score_index(
    backend: Backend,
    workers: Workers,
    plans: Plans[bool],
    query: Tensor,
    weights: Tensor,
    cache: KVCache,
    batch: PagedBatch,
    first_row: int,
    out: Tensor,
) -> None:
    """Score the tokens that some rows see; see `SparseBackend.score_index`.

    Raises:
        InvalidArgumentError: a shape, dtype, device or value breaks the contract; nothing written.
    """
    signature = (sign(query, weights, out), cache.form, first_row, batch.form)
    table, (num_blocks, block_size, _, size) = batch.block_table, cache.k.shape
    room = min(out.shape[1], table.shape[1] * block_size)
    if plans.get(signature) is None or batch.max_seq_len > room:
        check_score_index(backend, query, weights, cache, batch, first_row, out)
        plans.keep(signature, plan=True)
    find_fault, score = _kernels(SOURCE_DIGEST)
    starts, lengths = batch.query_start_loc, batch.seq_lens
    addresses = (starts.data_ptr(), lengths.data_ptr(), table.data_ptr())
    fault, index, value = find_fault(
        addresses,
        batch.num_seqs,
        batch.num_tokens,
        (table.stride(0), table.shape[1], block_size, num_blocks),
        (batch.max_query_len, batch.max_seq_len),
    )
    if fault:
        wanted = (
            "",
            f"0 first, then ascending by at most {batch.max_query_len}, to {batch.num_tokens}",
            f"at least the query length, at most {batch.max_seq_len}, and entries in block_table",
            f"a block id of 0 .. {num_blocks - 1}",
        )[fault]
        raise InvalidArgumentError(f"batch.{FAULTS[fault]}[{index}]", wanted, str(value))
    heads = query.shape[1]
    work = partial(
        score,
        (query.data_ptr(), weights.data_ptr(), cache.k.data_ptr(), out.data_ptr()),
        TAGS[query.dtype],
        (*addresses, table.stride(0), batch.num_seqs),
        (heads, size),
        (*query.stride()[:2], weights.stride(0), out.stride(0)),
        (block_size, *cache.k.stride()[:2]),
        first_row,
    )
    workers.run_evenly(work, out.shape[0], GRAIN // max(1, heads * size * batch.max_seq_len))
