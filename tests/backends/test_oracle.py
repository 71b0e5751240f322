"""The oracle against answers worked out by hand, and against torch on its own ground."""

import math

import pytest
import torch

from backends import AttentionTerms, KVCache, PagedBatch, oracle
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
    return oracle.attention(query, KVCache(keys, values), batch, AttentionTerms(1.0, **options))


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
        scale=inputs.terms.scale,
    )
    got = inputs.expected()
    assert torch.allclose(got.out, wanted.transpose(0, 1), rtol=1e-12, atol=1e-12)
    assert got.worst_ratio(got.out.bfloat16()) <= 1
    assert got.worst_ratio(got.out * 1.05) > 1
    assert got.worst_ratio(got.out * math.nan) == math.inf
    assert got.relative_error(got.out * 1.5) == pytest.approx(0.5)


@pytest.mark.parametrize("values", ["random", "equal"])
@pytest.mark.parametrize("length", [1, 52, 1500])
def test_float32_sums_one_key_at_a_time_are_allowed_and_an_error_a_few_times_theirs_is_not(
    values, length
):
    """The order with the largest error; where values are equal, all roundings go the same way."""
    case = AttentionCase("", ((1, length),), num_kv_heads=1, group=4, value_dim=32, values=values)
    inputs = build(case, torch.device("cpu"))
    query, [(k, _)], _ = contents(case)
    logits = (query[0] @ k[:, 0].T) * inputs.terms.scale
    p = torch.exp(logits - logits.amax(-1, keepdim=True))
    sums, total = torch.zeros(4, 32), torch.zeros(4)
    for i in range(length):
        sums += p[:, i, None] * k[i, :, :32]
        total += p[:, i]
    out, got = (sums / total[:, None])[None], inputs.expected()
    assert got.worst_ratio(out) <= 1
    assert got.worst_ratio(out * (1 + 4 * (length + 40) * 2.0**-24)) > 1


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


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        (0.0, 0x00),
        (-0.0, 0x80),
        (2.0**-9, 0x01),
        (2.0**-10, 0x00),  # halfway to the smallest: to even
        (1.5 * 2.0**-9, 0x02),  # halfway between 1 and 2 of the smallest: to even
        (2.0**-6, 0x08),
        (1.0, 0x38),
        (1.0625, 0x38),  # halfway between 1 and 1.125: to even
        (1.1875, 0x3A),  # halfway between 1.125 and 1.25: to even
        (-1.125, 0xB9),
        (448.0, 0x7E),
        (463.0, 0x7E),
        (1e30, 0x7E),
        (-math.inf, 0xFE),
        (math.nan, 0x7F),
        (-math.nan, 0x7F),
    ],
)
def test_quantised_values_by_hand(value, stored):
    rows = torch.tensor([[[value]]])
    assert oracle.quantise(rows, None).item() == stored
    assert oracle.quantise(rows * 4, torch.tensor([4.0])).item() == stored
    assert oracle.quantise(rows.bfloat16(), None).item() == stored or value in {463.0, 1e30}


def test_what_a_quantised_cache_stands_for_by_hand():
    cache = torch.tensor([0x38, 0xB9, 0x7F, 0x01], dtype=torch.uint8).view(torch.float8_e4m3fn)
    values = oracle.stands_for(cache.view(1, 1, 2, 2), torch.tensor([0.5, 10.0]))
    assert values.flatten()[:2].tolist() == [0.5, -0.5625]
    assert values.flatten()[2].isnan()
    assert values.flatten()[3] == 10 * 2.0**-9
