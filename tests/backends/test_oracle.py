"""The oracle against answers worked out by hand, and against torch on its own ground."""

import math

import pytest
import torch

from backends import PagedBatch, oracle
from backends.conformance import AttentionCase
from backends.conformance.cases import build, contents


def _two_keys(**options):
    """One query at position 1; logits log(3) and 0; values 1 and 5; block 2, then slot order."""
    cache = torch.full((3, 2, 1, 1), math.nan)
    keys, values = cache.clone(), cache.clone()
    keys[2, :, 0, 0] = torch.tensor([math.log(3.0), 0.0])
    values[2, :, 0, 0] = torch.tensor([1.0, 5.0])
    batch = PagedBatch(
        query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
        seq_lens=torch.tensor([2], dtype=torch.int32),
        block_table=torch.tensor([[2, -1]], dtype=torch.int32),
        slot_mapping=torch.tensor([5]),
        max_query_len=1,
        max_seq_len=2,
    )
    query = torch.ones(1, 1, 1)
    return oracle.attention(query, keys, values, batch, scale=1.0, **options)


@pytest.mark.parametrize(
    ("options", "answer"),
    [
        ({}, 2.0),  # 3/4 of 1 and 1/4 of 5
        ({"window": 1}, 5.0),
        ({"window": 2}, 2.0),
        ({"sinks": torch.zeros(1)}, 8 / 5),  # weights 3, 1, and 1 for nothing
        ({"sinks": torch.tensor([math.log(4.0)])}, 1.0),
        ({"soft_cap": 1e6}, 2.0),
        # tanh is at most 1: the cap makes both logits nearly equal
        ({"soft_cap": 1e-6}, 3.0),
    ],
)
def test_two_keys_by_hand(options, answer):
    assert _two_keys(**options).out.item() == pytest.approx(answer, abs=1e-5)


def test_without_features_it_is_torchs_attention():
    case = AttentionCase("", ((5, 12),), num_kv_heads=2, group=3, dtype=torch.bfloat16)
    inputs = build(case, torch.device("cpu"))
    query, [(k, v)], _ = contents(case)
    mask = torch.ones(5, 12, dtype=torch.bool).tril(12 - 5)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        query.double().transpose(0, 1),
        k.double().repeat_interleave(3, 1).transpose(0, 1),
        v.double().repeat_interleave(3, 1).transpose(0, 1),
        attn_mask=mask,
        scale=inputs.scale,
    )
    got = oracle.attention(
        inputs.query, inputs.k_cache, inputs.v_cache, inputs.batch, scale=inputs.scale
    )
    assert torch.allclose(got.out, wanted.transpose(0, 1), rtol=1e-12, atol=1e-12)
    assert got.worst_ratio(got.out.bfloat16()) <= 1
    assert got.worst_ratio(got.out * 1.05) > 1
    assert got.worst_ratio(got.out * math.nan) == math.inf
    assert got.relative_error(got.out * 1.5) == pytest.approx(0.5)


def test_slots_by_hand():
    batch = PagedBatch(
        query_start_loc=torch.tensor([0, 3, 3, 4], dtype=torch.int32),
        seq_lens=torch.tensor([6, 2, 1], dtype=torch.int32),
        block_table=torch.tensor([[7, 2], [-1, -1], [9, -1]], dtype=torch.int32),
        slot_mapping=torch.zeros(6, dtype=torch.int64),
        max_query_len=3,
        max_seq_len=6,
    )
    assert oracle.slot_mapping(batch, 4, 6) == [31, 8, 9, 36, -1, -1]
