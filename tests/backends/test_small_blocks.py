"""Blocks of a size that is no power of two are seen as smaller ones: the same slots, in order."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from backends import KVCache, PagedBatch
from backends.triton_gpu.shared.blocks import in_small_blocks


def pages_of(num_blocks, block_size, *, layers=2, odd=0):
    """Two caches in pages that also hold others'; each slot has its number in the pages."""
    slots = torch.arange(num_blocks * (2 * layers * block_size + odd), dtype=torch.float32)
    pages = slots.view(num_blocks, -1)[..., None, None] + torch.arange(4) / 8
    starts = [part * block_size for part in range(2 * layers)]
    parts = [pages[:, start : start + block_size] for start in starts]
    return [KVCache(*pair) for pair in zip(parts[::2], parts[1::2], strict=True)]


def batch_of(table, kept=None):
    ints = torch.tensor([0, 1], dtype=torch.int32)
    return PagedBatch(ints, ints[1:], table, torch.zeros(1).long(), 1, 1, kept=kept)


@given(st.sampled_from([24, 48, 144, 176, 272]), st.integers(1, 5), st.integers(0, 1 << 20))
def test_a_small_block_holds_the_slots_of_its_part_of_a_block(block_size, layers, seed):
    generator = torch.Generator().manual_seed(seed)
    table = torch.randint(0, 7, (3, 4), generator=generator).int()[:1]
    for cache in pages_of(7, block_size, layers=layers):
        small, batch = in_small_blocks(cache, batch_of(table))
        size = small.k.shape[1]
        assert size == block_size & -block_size
        for one, other in ((small.k, cache.k), (small.v, cache.v)):
            found, wanted = one[batch.block_table[0].long()], other[table[0].long()]
            assert torch.equal(found.flatten(0, 1), wanted.flatten(0, 1))
            assert one.data_ptr() == other.data_ptr()


@pytest.mark.parametrize(("block_size", "odd"), [(16, 0), (64, 0), (12, 0), (7, 0), (48, 5)])
def test_blocks_that_cannot_be_divided_stay(block_size, odd):
    table = torch.zeros(1, 3, dtype=torch.int32)
    [cache, _], batch = pages_of(3, block_size, odd=odd), batch_of(table)
    assert in_small_blocks(cache, batch) == (cache, batch)


def test_a_table_is_made_once_a_step():
    table = torch.tensor([[2, 1]], dtype=torch.int32)
    [cache, other], batch = pages_of(3, 48), batch_of(table, {})
    first = in_small_blocks(cache, batch)[1]
    assert in_small_blocks(other, batch)[1] is first
    assert first.block_table.tolist() == [[24, 25, 26, 12, 13, 14]]
