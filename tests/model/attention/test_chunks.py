"""Attention in chunks, expressed as a batch of shorter sequences."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import backends
from model.attention.chunks import chunked_batch
from model.caches.layout import LayerShape, plan_layout
from model.errors import InvalidArgumentError

CHUNK, SIZE = 8, 4
NUMBA = backends.get_backend("numba")
STEPS = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 25)), min_size=1, max_size=4)


def test_a_prompt_over_three_chunks_is_three_sequences_and_its_slots_stay():
    table = np.array([[0, 0, 3, 4, 5, 6]], dtype=np.int32)  # the first chunk is out of sight
    slots = torch.arange(12)
    batch = chunked_batch(table, np.array([6]), np.array([18]), slots, CHUNK, SIZE)
    assert batch.query_start_loc.tolist() == [0, 2, 10, 12]
    assert batch.seq_lens.tolist() == [8, 8, 2]
    assert batch.block_table.tolist() == [[0, 0], [3, 4], [5, 6]]
    assert (batch.max_query_len, batch.max_seq_len) == (8, 8)
    assert batch.slot_mapping is slots


@given(steps=STEPS, seed=st.integers(0, 1000))
def test_attention_over_pieces_is_attention_over_chunks(steps, seed):
    starts = np.array([start for start, _ in steps])
    lengths = np.array([start + count for start, count in steps])
    draw = np.random.default_rng(seed)
    width = -(-int(lengths.max()) // SIZE)
    num_blocks = 1 + width * len(steps)
    table = 1 + draw.permutation(num_blocks - 1).reshape(len(steps), width).astype(np.int32)
    cache = torch.from_numpy(draw.standard_normal((2, num_blocks, SIZE, 1, 8), dtype=np.float32))
    query = torch.from_numpy(
        draw.standard_normal((int((lengths - starts).sum()), 2, 8), dtype=np.float32)
    )
    slots = torch.zeros(len(query), dtype=torch.int64)
    batch = chunked_batch(table, starts, lengths, slots, CHUNK, SIZE)
    got = NUMBA.paged_attention(
        query, backends.KVCache(*cache), batch, backends.AttentionTerms(0.3)
    )
    wanted, rows = [], iter(query.split([count for _, count in steps]))
    for number, (start, count) in enumerate(steps):
        own, seen = np.arange(start, start + count), np.arange(start + count)
        keys, values = (part[table[number, seen // SIZE], seen % SIZE, 0] for part in cache)
        hidden = (seen > own[:, None]) | (seen // CHUNK != own[:, None] // CHUNK)
        logits = torch.einsum("thd,sd->ths", next(rows), keys) * 0.3
        weights = logits.masked_fill(torch.from_numpy(hidden)[:, None], -torch.inf).softmax(-1)
        wanted.append(weights @ values)
    torch.testing.assert_close(got, torch.cat(wanted))


def test_a_block_that_would_hold_two_chunks_is_refused():
    layout = plan_layout([LayerShape(2, 16, torch.float32, chunk=CHUNK)])
    with pytest.raises(InvalidArgumentError, match=r"block_size: wanted a divisor of 8, .* got 3"):
        layout.groups(3)
    assert layout.groups(4)[0].chunk == CHUNK
