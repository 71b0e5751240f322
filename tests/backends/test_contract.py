"""Every launcher refuses what breaks the contract, by the argument's name, and writes nothing."""

import dataclasses
import math

import pytest
import torch

import backends
from backends import InvalidArgumentError, PagedBatch, SharedPrefix, UnsupportedError
from backends.checks import check_paged_attention
from backends.conformance.cases import bits
from tests.backends.honest import HonestBackend


def _ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def _batch(**changes):
    fields = {
        "query_start_loc": _ints(0, 1, 4),
        "seq_lens": _ints(5, 3),
        "block_table": torch.tensor([[1, 2], [3, -1]], dtype=torch.int32),
        "slot_mapping": torch.tensor([8, 12, 13, 14]),
        "max_query_len": 3,
        "max_seq_len": 5,
    }
    return PagedBatch(**(fields | changes))


@pytest.fixture(scope="module")
def numba():
    return backends.get_backend("numba")


@pytest.mark.parametrize(
    ("field", "value", "wanted"),
    [
        ("seq_lens", torch.tensor([5, 3]), "torch.int32"),
        ("seq_lens", _ints(5, 3).reshape(1, 2), r"shape \[any\]"),
        ("query_start_loc", _ints(0, 4), r"shape \[3\]"),
        ("query_start_loc", _ints(0, 9, 1, 9, 4)[::2], "a contiguous last dimension"),
        ("block_table", _ints(1, 2), r"shape \[2, any\]"),
        ("block_table", _ints(1, 2, 3).reshape(3, 1), r"shape \[2, any\]"),
        ("slot_mapping", _ints(1, 2, 3, 4), "torch.int64"),
        ("slot_mapping", [1, 2, 3, 4], "a tensor, came list"),
        ("seq_lens", torch.empty(2, dtype=torch.int32, device="meta"), "device meta"),
        ("shared_prefix", SharedPrefix(0, 3, 1), r"sequences of 0 .. 1, came 0 .. 2"),
        ("shared_prefix", SharedPrefix(-1, 2, 1), r"sequences of 0 .. 1"),
        ("shared_prefix", SharedPrefix(1, 0, 1), r"sequences of 0 .. 1"),
        ("shared_prefix", SharedPrefix(0, 2, 5), r"a num_tokens of 1 .. 4, came 5"),
        ("shared_prefix", SharedPrefix(0, 2, 0), r"a num_tokens of 1 .. 4"),
        ("max_query_len", -1, "at least 0"),
        ("max_seq_len", -1, "at least 0"),
    ],
)
def test_a_batch_refuses_a_bad_field(field, value, wanted):
    with pytest.raises(InvalidArgumentError, match=wanted) as caught:
        _batch(**{field: value})
    assert caught.value.argument == field or "meta" in wanted


def test_a_batch_knows_its_sizes():
    batch = _batch()
    assert (batch.num_seqs, batch.num_tokens, batch.device.type) == (2, 4, "cpu")


def _attention_arguments(**changes):
    cache = torch.zeros(5, 4, 2, 8)
    arguments = {
        "query": torch.zeros(4, 6, 8),
        "k_cache": cache,
        "v_cache": cache.clone(),
        "batch": _batch(),
        "scale": 1.0,
        "out": torch.full((4, 6, 8), math.nan),
    }
    return arguments | changes


BAD_ATTENTION = [
    ({"query": torch.zeros(3, 6, 8)}, "query", r"shape \[4, any, 8\]"),
    ({"query": torch.zeros(4, 5, 8)}, "query", "a multiple of 2 heads"),
    ({"query": torch.zeros(4, 6, 8).double()}, "query", "torch.float32"),
    ({"query": torch.zeros(4, 6, 16)[..., ::2]}, "query", "a contiguous last dimension"),
    ({"query": torch.zeros(4, 6, 8, device="meta")}, "query", "device cpu"),
    ({"k_cache": torch.zeros(5, 4, 16)}, "k_cache", "shape"),
    ({"k_cache": torch.zeros(0, 4, 2, 8)}, "k_cache", "no empty dimension"),
    ({"k_cache": torch.zeros(5, 4, 2, 8, device="meta")}, "k_cache", "device cpu"),
    ({"v_cache": torch.zeros(5, 4, 2, 9)}, "v_cache", r"shape \[5, 4, 2, 8\]"),
    ({"v_cache": torch.zeros(5, 4, 2, 8).half()}, "v_cache", "torch.float32"),
    ({"batch": _batch(max_seq_len=9)}, "batch.block_table", "max_seq_len = 9"),
    ({"out": torch.zeros(4, 6, 9)}, "out", "shape"),
    ({"out": torch.zeros(4, 6, 8).half()}, "out", "torch.float32"),
    ({"scale": math.nan}, "scale", "finite"),
    ({"window": 0}, "window", "at least 1"),
    ({"soft_cap": 0.0}, "soft_cap", "above 0"),
    ({"soft_cap": math.inf}, "soft_cap", "finite"),
    ({"sinks": torch.zeros(2)}, "sinks", r"shape \[6\]"),
    ({"sinks": torch.zeros(6, dtype=torch.int32)}, "sinks", "floating"),
]
E4M3 = torch.zeros(5, 4, 2, 8, dtype=torch.float8_e4m3fn)
QUANTISED = {"k_cache": E4M3, "v_cache": E4M3}
BAD_ATTENTION += [
    ({"k_scale": torch.ones(1)}, "k_scale", "None beside a cache of torch.float32"),
    (QUANTISED | {"v_scale": torch.ones(3)}, "v_scale", r"shape \[1\] or \[2\]"),
    (QUANTISED | {"v_scale": torch.ones(1, 2)}, "v_scale", r"shape \[any\]"),
    (QUANTISED | {"k_scale": torch.ones(2).double()}, "k_scale", "torch.float32"),
    (QUANTISED | {"k_scale": 1.0}, "k_scale", "a tensor, came float"),
    (QUANTISED | {"k_scale": torch.ones(2, device="meta")}, "k_scale", "device cpu"),
    (QUANTISED | {"k_scale": torch.tensor([1.0, 0.0])}, "k_scale[1]", "above 0"),
    (QUANTISED | {"v_scale": torch.tensor([math.nan])}, "v_scale[0]", "finite"),
    (QUANTISED | {"query": torch.zeros(4, 6, 8).double()}, "query", "torch.bfloat16"),
    (QUANTISED | {"out": torch.zeros(4, 6, 8).half()}, "out", "torch.float32"),
    ({"v_cache": E4M3}, "v_cache", "torch.float32"),
]
TABLE = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32)
BAD_VALUES = [
    (_batch(query_start_loc=_ints(1, 1, 4)), r"batch.query_start_loc\[0\]"),
    (_batch(query_start_loc=_ints(0, 3, 2)), r"batch.query_start_loc\[2\]"),
    (_batch(query_start_loc=_ints(0, 2, 5)), r"batch.query_start_loc\[2\]"),
    (_batch(query_start_loc=_ints(0, 0, 4)), r"batch.query_start_loc\[2\]"),
    (_batch(seq_lens=_ints(0, 3)), r"batch.seq_lens\[0\]"),
    (_batch(seq_lens=_ints(6, 3)), r"batch.seq_lens\[0\]"),
    (_batch(block_table=torch.tensor([[1, 5], [3, 0]]).int()), r"batch.block_table\[0\]"),
    (_batch(block_table=torch.tensor([[1, 2], [-1, 0]]).int()), r"batch.block_table\[1\]"),
    (_batch(shared_prefix=SharedPrefix(0, 2, 1)), "batch.shared_prefix.*came 0"),
    (
        _batch(seq_lens=_ints(5, 5), shared_prefix=SharedPrefix(0, 2, 2), block_table=TABLE),
        "batch.shared_prefix.*different ones",
    ),
]


@pytest.mark.parametrize(("changes", "name", "wanted"), BAD_ATTENTION)
def test_attention_refuses_a_bad_argument_and_writes_nothing(numba, changes, name, wanted):
    arguments = _attention_arguments(**changes)
    with pytest.raises(InvalidArgumentError, match=wanted) as caught:
        numba.paged_attention(**arguments)
    assert caught.value.argument == name
    assert "out" in changes or arguments["out"].isnan().all()


@pytest.mark.parametrize(("batch", "name"), BAD_VALUES)
def test_attention_on_the_cpu_refuses_a_bad_value_and_writes_nothing(numba, batch, name):
    arguments = _attention_arguments(batch=batch)
    with pytest.raises(InvalidArgumentError, match=name):
        numba.paged_attention(**arguments)
    assert arguments["out"].isnan().all()


def test_what_a_backend_cannot_do_is_unsupported_not_wrong(numba):
    with pytest.raises(UnsupportedError, match=r"torch.float32.*came torch.float64"):
        numba.paged_attention(
            **_attention_arguments(
                k_cache=torch.zeros(5, 4, 2, 8).double(), v_cache=torch.zeros(5, 4, 2, 8).double()
            )
        )
    limited = HonestBackend()
    limited.capabilities = dataclasses.replace(
        limited.capabilities, max_head_dim=4, features=frozenset()
    )
    options = {"scale": 1.0, "window": None, "soft_cap": None, "sinks": None, "out": None}
    arguments = _attention_arguments()
    tensors = [arguments[name] for name in ("query", "k_cache", "v_cache", "batch")]
    with pytest.raises(UnsupportedError, match="head_dim of at most 4"):
        check_paged_attention(limited, *tensors, **options)
    limited.capabilities = dataclasses.replace(
        limited.capabilities, max_head_dim=8, max_group_size=2
    )
    with pytest.raises(UnsupportedError, match="at most 2 query heads"):
        check_paged_attention(limited, *tensors, **options)
    limited.capabilities = dataclasses.replace(limited.capabilities, max_group_size=3)
    for feature, value in (("window", 3), ("soft_cap", 1.0), ("sinks", torch.zeros(6))):
        with pytest.raises(UnsupportedError, match=feature):
            check_paged_attention(limited, *tensors, **(options | {feature: value}))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"slot_mapping": torch.tensor([1, 20])}, r"slot_mapping\[1\]"),
        ({"slot_mapping": _ints(1, 2)}, "slot_mapping"),
        ({"slot_mapping": torch.tensor([1, 2, 3])}, "key"),
        ({"key": torch.ones(2, 3, 8)}, "key"),
        ({"value": torch.ones(2, 2, 8).half()}, "value"),
        ({"v_cache": torch.ones(5, 4, 2, 9)}, "v_cache"),
        ({"v_scale": torch.ones(1)}, "v_scale"),
        (QUANTISED | {"k_scale": torch.ones(5)}, "k_scale"),
        (QUANTISED | {"v_scale": -torch.ones(2)}, r"v_scale\[0\]"),
        (QUANTISED | {"key": torch.ones(2, 2, 8).double()}, "key"),
        (QUANTISED | {"value": torch.ones(2, 2, 8).half()}, "value"),
    ],
)
def test_store_kv_refuses_a_bad_argument_and_writes_nothing(numba, change, name):
    arguments = {
        "key": torch.ones(2, 2, 8),
        "value": torch.ones(2, 2, 8),
        "k_cache": torch.zeros(5, 4, 2, 8),
        "v_cache": torch.zeros(5, 4, 2, 8),
        "slot_mapping": torch.tensor([0, 3]),
    } | change
    with pytest.raises(InvalidArgumentError, match=name):
        numba.store_kv(**arguments)
    assert not arguments["k_cache"].view(torch.uint8).any()


@pytest.mark.parametrize(
    ("copies", "wanted"),
    [
        (torch.tensor([[0, 1], [2, 5]]), "block ids of 0 .. 4"),
        (torch.tensor([[0, 1], [-1, 3]]), "block ids of 0 .. 4"),
        (torch.tensor([[0, 1], [2, 1]]), "each dst once"),
        (torch.tensor([[0, 1], [1, 2]]), "never as a src"),
        (torch.tensor([[0, 1, 2]]), "shape"),
        (torch.tensor([[0, 1]]).int(), "torch.int64"),
    ],
)
def test_copy_blocks_refuses_bad_copies_and_writes_nothing(numba, copies, wanted):
    cache = torch.arange(40).reshape(5, 8)
    before = bits(cache)
    with pytest.raises(InvalidArgumentError, match=wanted):
        numba.copy_blocks([cache], copies)
    assert torch.equal(bits(cache), before)


def test_copy_blocks_refuses_blocks_with_gaps(numba):
    gaps = torch.zeros(5, 4, 8)[:, :, :6]
    with pytest.raises(InvalidArgumentError, match=r"caches\[1\].*contiguous inside"):
        numba.copy_blocks([torch.zeros(5, 8), gaps], torch.tensor([[0, 1]]))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"block_size": 0}, "block_size"),
        ({"out": torch.zeros(4, dtype=torch.int32)}, "out"),
        ({"out": torch.zeros(3, dtype=torch.int64)}, r"query_start_loc\[2\]"),
        ({"seq_lens": _ints(9, 3)}, r"seq_lens\[0\]"),
        ({"block_table": torch.tensor([[1, -2], [3, 0]]).int()}, r"block_table\[0\]"),
    ],
)
def test_compute_slot_mapping_refuses_a_bad_argument_and_writes_nothing(numba, change, name):
    batch = _batch()
    arguments = {
        "query_start_loc": batch.query_start_loc,
        "seq_lens": batch.seq_lens,
        "block_table": batch.block_table,
        "block_size": 4,
        "out": torch.zeros(4, dtype=torch.int64),
    } | change
    with pytest.raises(InvalidArgumentError, match=name):
        numba.compute_slot_mapping(**arguments)
    assert not arguments["out"].any()
