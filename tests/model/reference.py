"""A backend of a few lines of torch: gather, softmax in float64, nothing else."""

import torch

import backends
from backends.oracle import block_sum


class ReferenceBackend:
    name = "reference"
    device = torch.device("cpu")
    capabilities = backends.Capabilities(
        dtypes=(torch.float32,), max_head_dim=1024, max_group_size=1024, max_latent_dim=1024
    )

    def store_kv(self, key, value, cache, slot_mapping):
        for row, slot in enumerate(slot_mapping.tolist()):
            if slot >= 0:
                block, offset = divmod(slot, cache.k.shape[1])
                for tensor, rows in zip(cache.tensors, (key, value), strict=False):
                    tensor[block, offset] = rows[row]

    def paged_attention(self, query, cache, batch, terms, *, out=None):
        out = query.new_zeros(*query.shape[:2], cache.v.shape[3]) if out is None else out
        scale, window, soft_cap, sinks = terms.scale, terms.window, terms.soft_cap, terms.sinks
        starts = batch.query_start_loc.tolist()
        for sequence, length in enumerate(batch.seq_lens.tolist()):
            rows = slice(starts[sequence], starts[sequence + 1])
            num_blocks = -(-length // cache.k.shape[1])
            table = batch.block_table[sequence, :num_blocks].long()
            group = query.shape[1] // cache.k.shape[2]
            key, value = (
                part[table].flatten(0, 1)[:length].double().repeat_interleave(group, dim=1)
                for part in (cache.k, cache.v)
            )
            logits = torch.einsum("qhd,khd->hqk", query[rows].double(), key) * scale
            if soft_cap is not None:
                logits = soft_cap * torch.tanh(logits / soft_cap)
            position = torch.arange(length)
            distance = position[length - logits.shape[1] :, None] - position
            hidden = (distance < 0) | (distance >= (window or length))
            logits = logits.masked_fill(hidden, -torch.inf)
            if sinks is not None:
                sink = sinks.double()[:, None, None].expand(-1, logits.shape[1], 1)
                logits = torch.cat([logits, sink], dim=-1)
            weights = logits.softmax(dim=-1)[..., :length]
            out[rows] = torch.einsum("hqk,khd->qhd", weights, value).to(out.dtype)
        return out

    def copy_blocks(self, caches, copies):
        for cache in caches:
            cache[copies[:, 1]] = cache[copies[:, 0]]

    def move_blocks(self, caches, host, moves, sums, *, to_host):
        for number, (block_id, host_id) in enumerate(moves.tolist()):
            parts = [cache[block_id].view(torch.uint8).reshape(-1) for cache in caches]
            rows = host[host_id].split([part.numel() for part in parts])
            for part, row in zip(parts, rows, strict=True):
                (row if to_host else part).copy_(part if to_host else row)
            sums[number] = block_sum(parts)

    def compute_slot_mapping(self, query_start_loc, seq_lens, block_table, block_size, out):
        out.fill_(-1)
        starts = query_start_loc.tolist()
        for sequence, length in enumerate(seq_lens.tolist()):
            count = starts[sequence + 1] - starts[sequence]
            for row, position in enumerate(range(length - count, length), starts[sequence]):
                block = int(block_table[sequence, position // block_size])
                out[row] = block * block_size + position % block_size
