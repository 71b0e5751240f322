"""A backend in plain torch that keeps the contract, written to be broken in one place at a time.

Slow on purpose: one query row at a time, in float32. Each step that a bug could live in is a
method.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from backends import AttentionTerms, Capabilities, KVCache, PagedBatch, oracle


class HonestBackend:
    name = "honest"
    device = torch.device("cpu")
    capabilities = Capabilities(
        dtypes=(torch.float32,),
        max_head_dim=256,
        max_group_size=64,
        features=frozenset({"window", "soft_cap", "sinks", "batch_invariant"}),
        quantised=(torch.float8_e4m3fn,),
        max_latent_dim=64,
    )

    def store_kv(self, key, value, cache, slot_mapping) -> None:
        given = ((key, cache.k, cache.k_scale), (value, cache.v, cache.v_scale))
        for rows, tensor, scale in given[: len(cache.tensors)]:
            if tensor.dtype == torch.float8_e4m3fn:
                rows, tensor = self.quantised(rows, scale), tensor.view(torch.uint8)  # noqa: PLW2901
            for i, slot in enumerate(slot_mapping.tolist()):
                if self.stores(slot):
                    tensor[self.place(slot, tensor.shape[1])] = rows[i]

    def quantised(self, rows: Tensor, scale: Tensor | None) -> Tensor:
        """Rows as bytes of e4m3; torch rounds to even."""
        if scale is not None:
            rows = rows * (1 / self.per_head(scale, rows.shape[1]))
        rows = self.clamped(rows)
        stored = rows.to(torch.float8_e4m3fn).view(torch.uint8)
        return stored.masked_fill(rows.isnan(), 0x7F)

    def clamped(self, rows: Tensor) -> Tensor:
        return rows.clamp(-448, 448)

    def per_head(self, scale: Tensor, num_kv_heads: int) -> Tensor:
        return scale.expand(num_kv_heads)[:, None]

    def widened(self, cache: Tensor, scale: Tensor | None) -> Tensor:
        if cache.dtype != torch.float8_e4m3fn:
            return cache
        values = cache.float()
        return values if scale is None else values * self.per_head(scale, cache.shape[2])

    def warmup(self, layers, *, max_num_seqs, max_query_len) -> None:
        """Nothing here is compiled."""

    def copy_blocks(self, caches: Sequence[Tensor], copies: Tensor) -> None:
        for cache in caches:
            for src, dst in copies.tolist():
                cache[dst] = cache[src]

    def move_blocks(self, caches, host, moves, sums, *, to_host) -> None:
        for number, (block_id, host_id) in enumerate(moves.tolist()):
            parts = [cache[block_id].view(torch.uint8).reshape(-1) for cache in caches]
            rows = host[host_id].split([part.numel() for part in parts])
            for part, row in zip(parts, rows, strict=True):
                (row if to_host else part).copy_(part if to_host else row)
            sums[number] = oracle.block_sum(parts)

    def compute_slot_mapping(self, query_start_loc, seq_lens, block_table, block_size, out) -> None:
        out.fill_(-1)
        for s in range(len(seq_lens)):
            start, stop = query_start_loc[s : s + 2].tolist()
            for row in range(start, stop):
                position = int(seq_lens[s]) - stop + row
                block_id = int(block_table[s, position // block_size])
                out[row] = block_id * block_size + position % block_size

    def paged_attention(
        self,
        query: Tensor,
        cache: KVCache,
        batch: PagedBatch,
        terms: AttentionTerms,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        if out is None:
            out = query.new_empty(*query.shape[:2], cache.v.shape[3])
        k_cache = self.widened(cache.k, cache.k_scale)
        v_cache = self.widened(cache.v, cache.v_scale)
        starts = batch.query_start_loc.tolist()
        for s, length in enumerate(batch.seq_lens.tolist()):
            for row in range(starts[s], starts[s + 1]):
                position = self.position(length, starts[s + 1] - starts[s], row - starts[s])
                first, last = self.seen(position, terms.window, k_cache.shape[1])
                keys = self.gather(k_cache, batch.block_table[self.table_row(s)], first, last)
                values = self.gather(v_cache, batch.block_table[self.table_row(s)], first, last)
                heads = self.kv_heads(query.shape[1], k_cache.shape[2])
                logits = torch.einsum("hd,nhd->hn", query[row], keys[:, heads])
                logits = self.shape_logits(logits, terms.scale, terms.soft_cap)
                p = self.probabilities(logits, terms.sinks)
                out[row] = torch.einsum("hn,nhd->hd", p, values[:, heads])
        return out

    def stores(self, slot: int) -> bool:
        return slot >= 0

    def place(self, slot: int, block_size: int) -> tuple[int, int]:
        return slot // block_size, slot % block_size

    def position(self, length: int, count: int, index: int) -> int:
        return length - count + index

    def seen(self, position: int, window: int | None, block_size: int) -> tuple[int, int]:
        return (0 if window is None else max(0, position - window + 1)), position

    def table_row(self, s: int) -> int:
        return s

    def gather(self, cache: Tensor, table: Tensor, first: int, last: int) -> Tensor:
        seen, size = torch.arange(first, last + 1), cache.shape[1]
        return cache[table[seen // size].long(), seen % size]

    def kv_heads(self, num_q_heads: int, num_kv_heads: int) -> Tensor:
        return torch.arange(num_q_heads) // (num_q_heads // num_kv_heads)

    def shape_logits(self, logits: Tensor, scale: float, soft_cap: float | None) -> Tensor:
        logits = logits * scale
        return logits if soft_cap is None else soft_cap * torch.tanh(logits / soft_cap)

    def probabilities(self, logits: Tensor, sinks: Tensor | None) -> Tensor:
        if sinks is None:
            return logits.softmax(-1)
        return torch.cat([logits, sinks.float()[:, None]], 1).softmax(-1)[:, :-1]
