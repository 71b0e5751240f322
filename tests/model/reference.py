"""A backend of a few lines of torch: gather, softmax in float64, nothing else."""

import torch

import backends


class ReferenceBackend:
    name = "reference"
    device = torch.device("cpu")
    capabilities = backends.Capabilities(
        dtypes=(torch.float32,), max_head_dim=1024, max_group_size=1024
    )

    def store_kv(self, key, value, k_cache, v_cache, slot_mapping):
        for row, slot in enumerate(slot_mapping.tolist()):
            if slot >= 0:
                block, offset = divmod(slot, k_cache.shape[1])
                k_cache[block, offset] = key[row]
                v_cache[block, offset] = value[row]

    def paged_attention(
        self,
        query,
        k_cache,
        v_cache,
        batch,
        *,
        scale,
        window=None,
        soft_cap=None,
        sinks=None,
        out=None,
    ):
        out = torch.zeros_like(query) if out is None else out
        starts = batch.query_start_loc.tolist()
        for sequence, length in enumerate(batch.seq_lens.tolist()):
            rows = slice(starts[sequence], starts[sequence + 1])
            num_blocks = -(-length // k_cache.shape[1])
            table = batch.block_table[sequence, :num_blocks].long()
            group = query.shape[1] // k_cache.shape[2]
            key, value = (
                cache[table].flatten(0, 1)[:length].double().repeat_interleave(group, dim=1)
                for cache in (k_cache, v_cache)
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

    def compute_slot_mapping(self, query_start_loc, seq_lens, block_table, block_size, out):
        out.fill_(-1)
        starts = query_start_loc.tolist()
        for sequence, length in enumerate(seq_lens.tolist()):
            count = starts[sequence + 1] - starts[sequence]
            for row, position in enumerate(range(length - count, length), starts[sequence]):
                block = int(block_table[sequence, position // block_size])
                out[row] = block * block_size + position % block_size
