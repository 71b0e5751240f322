"""Blocks of a size that is no power of two, as smaller blocks of one that is.

Pages that also hold recurrent states have as many tokens as fit them (144, say). Kernels of
attention want a power of two. A block of 144 tokens is nine of 16 one after another, and a block
table of these is a wider one: made on the device, once a step.
"""

from dataclasses import replace

import torch
from torch import Tensor

from backends.contract import KVCache, PagedBatch

_LEAST = 8
"""Tokens: smaller blocks are slower than odd ones."""


def small_blocks(cache: KVCache) -> KVCache:
    """The same memory in the largest blocks of a power of two that divide its own. O(1).

    The cache itself where that is so already, or where they would lie at uneven distances.
    """
    block_size = cache.k.shape[1]
    size = block_size & -block_size
    steps = {each.stride(0) / (size * each.stride(1)) for each in (cache.k, cache.v)}
    is_even = len(steps) == 1 and min(steps) >= block_size // size and min(steps).is_integer()
    if size in (block_size, *range(_LEAST)) or cache.is_latent or not is_even:
        return cache
    key, value = (_in_blocks(each, size) for each in (cache.k, cache.v))
    return KVCache(key, value, cache.k_scale, cache.v_scale)


def _in_blocks(tensor: Tensor, size: int) -> Tensor:
    blocks, block_size, *inside = tensor.shape
    slot = tensor.stride(1)
    count = (blocks - 1) * (tensor.stride(0) // (size * slot)) + block_size // size
    return tensor.as_strided((count, size, *inside), (size * slot, *tensor.stride()[1:]))


def in_small_blocks(cache: KVCache, batch: PagedBatch) -> tuple[KVCache, PagedBatch]:
    """A cache and a batch of it in small blocks. O(1), but for the first layer of a step."""
    block_size = cache.k.shape[1]
    small = cache if block_size & (block_size - 1) == 0 else small_blocks(cache)
    return (cache, batch) if small is cache else (small, _small_batch(batch, cache, small))


def _small_batch(batch: PagedBatch, cache: KVCache, small: KVCache) -> PagedBatch:
    """A batch of a cache's blocks, for its small ones. O(entries), on the device."""
    count, size = cache.k.shape[1] // small.k.shape[1], small.k.shape[1]
    step = cache.k.stride(0) // (size * cache.k.stride(1))
    kept, key = batch.kept, ("small blocks", count, step)
    found = None if kept is None else kept.get(key)
    if not isinstance(found, PagedBatch):
        table = batch.block_table
        inside = torch.arange(count, dtype=torch.int32, device=table.device)
        wide = (table[:, :, None] * step + inside).flatten(1)
        found = replace(batch, block_table=wide, kept=None if kept is None else {})
        if kept is not None:
            kept[key] = found
    return found
