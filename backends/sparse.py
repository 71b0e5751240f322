"""Sparse attention: an index scores tokens, each query chooses the best and attends to them alone.

The part of the contract for layers whose queries do not attend to all tokens they see, but to a few
that an index chooses for them ("lightning indexer", DeepSeek-V3.2, arXiv:2512.02556). Invariants:

- The index has one key a token, in a separate cache of latents: `KVCache` with one KV head whose
  values are its keys. `Backend.store_kv` stores index keys, in the slots of the token's other keys:
  one block table serves both.
- The score of a token at position p for query row t is the sum over the index heads h of
  `weights[t, h] * max(0, query[t, h] . key[p])`, in float32.
- A row chooses the `count` tokens with the highest scores among those at or before its own position
  (causality), or all of these if there are no more. Of equal scores (-0 equals 0) the lower
  position comes first. No score is NaN.
- Attention to chosen tokens is attention, and its cost follows `count`, not the context.
- A slot is read only if a query of the batch sees it, as in every operation; attention reads only
  the slots of chosen tokens. An operation writes only its outputs.

Knows nothing of how layers make index keys and weights, or of layers that share a choice: the
caller passes the positions on.
"""

import math
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from backends.contract import AttentionTerms, Backend, KVCache, PagedBatch
from backends.errors import UnsupportedError

SCORE_BYTES = 1 << 28
"""Memory that the scores of a step may take; a step with more is scored some rows at a time."""
_WIDTH = 1024
"""Scores of a row are allocated in multiples of this, so that most steps look alike."""


@runtime_checkable
class SparseBackend(Backend, Protocol):
    """A backend with an index, where `Capabilities.max_index_dim` is not 0."""

    def score_index(
        self, query: Tensor, weights: Tensor, cache: KVCache, batch: PagedBatch,
        first_row: int, out: Tensor,
    ) -> None:  # fmt: skip
        """Score the tokens that some rows see: `out[i, p]` of row `first_row + i` and position p.

        Args:
            query: [num_tokens, num_index_heads, index_dim], the dtype of the cache.
            weights: float32 [num_tokens, num_index_heads].
            cache: of index keys; read.
            batch: the places of the keys.
            first_row: the first query row that is scored.
            out: float32 [num_rows, at least max_seq_len], written up to each row's own position;
                rows past `query_start_loc[-1]` are left as they are.
        """
        ...

    def choose_tokens(self, scores: Tensor, batch: PagedBatch, first_row: int, out: Tensor) -> None:
        """Write the positions of each row's highest scores, in ascending order, then -1.

        Args:
            scores: as `score_index` writes them; entries past a row's position are not read.
            batch: the batch of these rows.
            first_row: the row that `scores` begins with.
            out: int32 [num_rows, count], contiguous, written; rows past `query_start_loc[-1]` are
                left as they are.
        """
        ...

    def attend_chosen(
        self,
        query: Tensor,
        cache: KVCache,
        batch: PagedBatch,
        chosen: Tensor,
        terms: AttentionTerms,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """Compute attention of every query row over its chosen tokens; see `Backend`.

        Args:
            query: as `paged_attention` takes it.
            cache: of keys and values or latents; read at chosen tokens alone.
            batch: the places of the keys.
            chosen: int32 [num_tokens, count], contiguous, as `choose_tokens` writes it: each row
                has min(count, position + 1) positions.
            terms: scale, soft cap and sinks of the layer; no window.
            out: as `paged_attention` takes it.
        """
        ...


def choose(
    backend: SparseBackend,
    query: Tensor,
    weights: Tensor,
    cache: KVCache,
    batch: PagedBatch,
    count: int,
) -> Tensor:
    """Score and choose for a whole batch; return int32 [num_tokens, count].

    Takes 4 * max_seq_len bytes a row, and at most about `SCORE_BYTES` at a time.
    """
    num_rows, width = batch.num_tokens, -(-batch.max_seq_len // _WIDTH) * _WIDTH
    chosen = torch.empty((num_rows, count), dtype=torch.int32, device=batch.device)
    step = max(1, min(num_rows, SCORE_BYTES // (4 * max(1, width))))
    scores = torch.empty((step, width), dtype=torch.float32, device=batch.device)
    for first in range(0, num_rows, step):
        rows = min(step, num_rows - first)
        backend.score_index(query, weights, cache, batch, first, scores[:rows])
        backend.choose_tokens(scores[:rows], batch, first, chosen[first : first + rows])
    return chosen


def by_slot(cache: KVCache) -> tuple[KVCache, int, int]:
    """Return the cache as one of blocks of one token, and the place of a token in it. O(1).

    Attention to chosen tokens is attention over such a cache, with a block table of tokens.

    Returns:
        The cache, and two factors: the token in a slot of `block_id` and `offset` is block
        `block_id * first + offset * second`.

    Raises:
        UnsupportedError: keys and values lie at different distances.
    """
    views, factors = [], set()
    for tensor in (cache.k, cache.v):
        (num_blocks, block_size, heads, size), strides = tensor.shape, tensor.stride()
        unit = math.gcd(strides[0], strides[1])
        first, second = strides[0] // unit, strides[1] // unit
        count = (num_blocks - 1) * first + (block_size - 1) * second + 1
        place = (unit, unit, strides[2], strides[3])
        views.append(tensor.as_strided((count, 1, heads, size), place))
        factors.add((first, second))
    if len(factors) > 1:
        wanted = "keys and values with the same ratio of the distances of blocks and slots"
        raise UnsupportedError("cache", wanted, f"{cache.k.stride()} and {cache.v.stride()}")
    (first, second) = factors.pop()
    k, v = views
    seen = KVCache(k, v, cache.k_scale, cache.v_scale, is_latent=cache.is_latent)
    return seen, first, second
