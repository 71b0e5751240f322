"""Every launcher refuses what breaks the contract, by the argument's name, and writes nothing."""

import dataclasses
import math

import pytest
import torch

import backends
from backends import (
    AttentionTerms,
    InvalidArgumentError,
    KVCache,
    KVLayout,
    PagedBatch,
    SharedPrefix,
    UnsupportedError,
)
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
        ("slot_mapping", [1, 2, 3, 4], "a tensor, got list"),
        ("seq_lens", torch.empty(2, dtype=torch.int32, device="meta"), "device meta"),
        ("shared_prefix", SharedPrefix(0, 3, 1), r"sequences of 0 .. 1, got 0 .. 2"),
        ("shared_prefix", SharedPrefix(-1, 2, 1), r"sequences of 0 .. 1"),
        ("shared_prefix", SharedPrefix(1, 0, 1), r"sequences of 0 .. 1"),
        ("shared_prefix", SharedPrefix(0, 2, 5), r"a num_tokens of 1 .. 4, got 5"),
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


def _attend(backend, **changes):
    """Attention of arguments that keep the contract but for these; a cache that is all zeros."""
    zeros = torch.zeros(5, 4, 2, 8)
    given = {"query": torch.zeros(4, 6, 8), "batch": _batch(), "out": None}
    given |= {"k": zeros, "v": zeros.clone(), "scale": 1.0} | changes

    def record(kind):
        names = (field.name for field in dataclasses.fields(kind))
        return kind(**{name: given[name] for name in names if name in given})

    cache, terms = record(KVCache), record(AttentionTerms)
    return backend.paged_attention(given["query"], cache, given["batch"], terms, out=given["out"])


def _store(backend, **changes):
    given = {"key": torch.ones(2, 2, 8), "value": torch.ones(2, 2, 8)}
    given |= {"k": torch.zeros(5, 4, 2, 8), "v": torch.zeros(5, 4, 2, 8)}
    given |= {"slot_mapping": torch.tensor([0, 3])} | changes
    scales = [given.get("k_scale"), given.get("v_scale")]
    cache = KVCache(given["k"], given["v"], *scales, is_latent=given.get("is_latent", False))
    before = [bits(tensor) for tensor in cache.tensors]
    try:
        backend.store_kv(given["key"], given["value"], cache, given["slot_mapping"])
    except InvalidArgumentError:
        after = [bits(tensor) for tensor in cache.tensors]
        assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
        raise


META, EMPTY = torch.zeros(5, 4, 2, 8, device="meta"), torch.zeros(0, 4, 2, 8)
BAD_ATTENTION = [
    ({"query": torch.zeros(3, 6, 8)}, "query", r"shape \[4, any, 8\]"),
    ({"query": torch.zeros(4, 5, 8)}, "query", "a multiple of 2 heads"),
    ({"query": torch.zeros(4, 6, 8).double()}, "query", "torch.float32"),
    ({"query": torch.zeros(4, 6, 16)[..., ::2]}, "query", "a contiguous last dimension"),
    ({"query": torch.zeros(4, 6, 8, device="meta")}, "query", "device cpu"),
    ({"k": torch.zeros(5, 4, 16)}, "cache.k", "shape"),
    ({"k": EMPTY, "v": EMPTY}, "cache.k", "no empty dimension"),
    ({"k": META, "v": META}, "cache.k", "device cpu"),
    ({"k": torch.zeros(5, 4, 2, 8, device="meta")}, "cache.v", "device meta"),
    ({"v": torch.zeros(5, 4, 2, 9)}, "cache.v", r"shape \[5, 4, 2, 8\]"),
    ({"v": torch.zeros(5, 4, 2, 8).half()}, "cache.v", "torch.float32"),
    ({"batch": _batch(max_seq_len=9)}, "batch.block_table", "max_seq_len = 9"),
    ({"out": torch.zeros(4, 6, 9)}, "out", "shape"),
    ({"out": torch.zeros(4, 6, 8).half()}, "out", "torch.float32"),
    ({"scale": math.nan}, "terms.scale", "finite"),
    ({"window": 0}, "terms.window", "at least 1"),
    ({"soft_cap": 0.0}, "terms.soft_cap", "above 0"),
    ({"soft_cap": math.inf}, "terms.soft_cap", "finite"),
    ({"sinks": torch.zeros(2)}, "terms.sinks", r"shape \[6\]"),
    ({"sinks": torch.zeros(6, dtype=torch.int32)}, "terms.sinks", "floating"),
]
E4M3 = torch.zeros(5, 4, 2, 8, dtype=torch.float8_e4m3fn)
QUANTISED = {"k": E4M3, "v": E4M3}
BAD_ATTENTION += [
    ({"k_scale": torch.ones(1)}, "cache.k_scale", "None beside a cache of torch.float32"),
    (QUANTISED | {"v_scale": torch.ones(3)}, "cache.v_scale", r"shape \[1\] or \[2\]"),
    (QUANTISED | {"v_scale": torch.ones(1, 2)}, "cache.v_scale", r"shape \[any\]"),
    (QUANTISED | {"k_scale": torch.ones(2).double()}, "cache.k_scale", "torch.float32"),
    (QUANTISED | {"k_scale": 1.0}, "cache.k_scale", "a tensor, got float"),
    (QUANTISED | {"k_scale": torch.ones(2, device="meta")}, "cache.k_scale", "device cpu"),
    (QUANTISED | {"k_scale": torch.tensor([1.0, 0.0])}, "cache.k_scale[1]", "above 0"),
    (QUANTISED | {"v_scale": torch.tensor([math.nan])}, "cache.v_scale[0]", "finite"),
    (QUANTISED | {"query": torch.zeros(4, 6, 8).double()}, "query", "torch.bfloat16"),
    (QUANTISED | {"out": torch.zeros(4, 6, 8).half()}, "out", "torch.float32"),
    ({"v": E4M3}, "cache.v", "torch.float32"),
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
    (_batch(shared_prefix=SharedPrefix(0, 2, 1)), "batch.shared_prefix.*got 0"),
    (
        _batch(seq_lens=_ints(5, 5), shared_prefix=SharedPrefix(0, 2, 2), block_table=TABLE),
        "batch.shared_prefix.*different ones",
    ),
]


@pytest.mark.parametrize(("changes", "name", "wanted"), BAD_ATTENTION)
def test_attention_refuses_a_bad_argument_and_writes_nothing(numba, changes, name, wanted):
    out = torch.full((4, 6, 8), math.nan)
    with pytest.raises(InvalidArgumentError, match=wanted) as caught:
        _attend(numba, **({"out": out} | changes))
    assert caught.value.argument == name
    assert out.isnan().all()


@pytest.mark.parametrize(("batch", "name"), BAD_VALUES)
def test_attention_on_the_cpu_refuses_a_bad_value_and_writes_nothing(numba, batch, name):
    out = torch.full((4, 6, 8), math.nan)
    with pytest.raises(InvalidArgumentError, match=name):
        _attend(numba, batch=batch, out=out)
    assert out.isnan().all()


ROWS = torch.zeros(5, 4, 1, 8)


@pytest.mark.parametrize(
    ("tensors", "name", "wanted"),
    [
        ((torch.zeros(5, 4, 2, 8), torch.zeros(5, 4, 2, 8)[..., :6]), "cache.k", "one KV head"),
        ((ROWS, ROWS.clone()[..., :6]), "cache.v", "the first numbers of cache.k's rows"),
        ((ROWS, ROWS[..., 1:]), "cache.v", "the first numbers"),
        ((ROWS[..., :6], ROWS), "cache.v", "the first numbers"),
        ((ROWS, ROWS[..., :0]), "cache.v", "the first numbers"),
        ((ROWS, ROWS[:, :2, :, :6]), "cache.v", r"shape \[5, 4, 1, 6\]"),
        ((E4M3[:, :, :1], E4M3[:, :, :1, :6], torch.ones(1)), "cache.v_scale", "of latents"),
    ],
)
def test_a_cache_of_latents_is_one_tensor_of_one_head_or_refused(tensors, name, wanted):
    with pytest.raises(InvalidArgumentError, match=wanted) as caught:
        KVCache(*tensors, is_latent=True)
    assert caught.value.argument == name


def test_a_layout_makes_the_cache_that_it_is_the_layout_of():
    pairs, latents = KVLayout(2, 8, 8, torch.half), KVLayout(1, 8, 6, torch.half, is_latent=True)
    assert (pairs.row_bytes, latents.row_bytes) == ((32, 32), (16,))
    for layout, shape in ((pairs, (5, 4, 2, 8)), (latents, (5, 4, 1, 8))):
        tensors = [torch.zeros(shape, dtype=torch.half) for _ in layout.row_bytes]
        cache = layout.over(tensors)
        assert cache.layout == layout
        assert [each.data_ptr() for each in cache.tensors] == [t.data_ptr() for t in tensors]


def test_what_a_backend_cannot_do_is_unsupported_not_wrong(numba):
    doubles = {"k": torch.zeros(5, 4, 2, 8).double(), "v": torch.zeros(5, 4, 2, 8).double()}
    with pytest.raises(UnsupportedError, match=r"torch.float32.*got torch.float64"):
        _attend(numba, **doubles)
    limited = HonestBackend()

    def allow(**limits):
        limited.capabilities = dataclasses.replace(limited.capabilities, **limits)

    def refuses(wanted, **changes):
        cache, terms = KVCache(ROWS, ROWS[..., :6], is_latent=True), AttentionTerms(1.0)
        if "latents" not in wanted:
            cache = KVCache(torch.zeros(5, 4, 2, 8), torch.zeros(5, 4, 2, 8))
            terms = AttentionTerms(1.0, **changes)
        with pytest.raises(UnsupportedError, match=wanted):
            check_paged_attention(limited, torch.zeros(4, 6, 8), cache, _batch(), terms, None)

    allow(max_head_dim=4, features=frozenset(), max_latent_dim=0)
    refuses("head_dim of at most 4")
    refuses("does not support latents")
    allow(max_head_dim=8, max_group_size=2)
    refuses("at most 2 query heads")
    allow(max_group_size=3)
    refuses("terms.window", window=3)
    refuses("terms.soft_cap", soft_cap=1.0)
    refuses("terms.sinks", sinks=torch.zeros(6))
    refuses("terms.batch_invariant", batch_invariant=True)


BAD_STORES = [
    ({"slot_mapping": torch.tensor([1, 20])}, r"slot_mapping\[1\]"),
    ({"slot_mapping": _ints(1, 2)}, "slot_mapping"),
    ({"slot_mapping": torch.tensor([1, 2, 3])}, "key"),
    ({"key": torch.ones(2, 3, 8)}, "key"),
    ({"key": torch.ones(2, 2, 16)[..., ::2]}, "key"),
    ({"key": [1.0]}, "key"),
    ({"value": torch.ones(2, 2, 8).half()}, "value"),
    ({"value": None}, "value"),
    ({"v": torch.ones(5, 4, 2, 9)}, "cache.v"),
    ({"v_scale": torch.ones(1)}, "cache.v_scale"),
    ({"k": ROWS, "v": ROWS[..., :6], "is_latent": True, "key": torch.ones(2, 1, 8)}, "value"),
    (QUANTISED | {"k_scale": torch.ones(5)}, "cache.k_scale"),
    (QUANTISED | {"v_scale": -torch.ones(2)}, r"cache.v_scale\[0\]"),
    (QUANTISED | {"key": torch.ones(2, 2, 8).double()}, "key"),
    (QUANTISED | {"value": torch.ones(2, 2, 8).half()}, "value"),
]


@pytest.mark.parametrize(("change", "name"), BAD_STORES)
def test_store_kv_refuses_a_bad_argument_and_writes_nothing(numba, change, name):
    with pytest.raises(InvalidArgumentError, match=name):
        _store(numba, **change)


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


@pytest.mark.parametrize(
    ("moves", "to_host", "wanted"),
    [
        ([[0, 3]], True, "0 .. 2, which host has"),
        ([[0, -1]], False, "0 .. 2, which host has"),
        ([[5, 0]], True, "0 .. 4, which caches has"),
        ([[0, 1], [2, 1]], True, "each target once"),
        ([[2, 0], [2, 1]], False, "each target once"),
    ],
)
def test_move_blocks_refuses_bad_moves_and_writes_nothing(numba, moves, to_host, wanted):
    caches, host = [torch.zeros(5, 8), torch.zeros(5, 2)], torch.ones(3, 40, dtype=torch.uint8)
    sums = torch.full((len(moves),), 7)
    with pytest.raises(InvalidArgumentError, match=wanted):
        numba.move_blocks(caches, host, torch.tensor(moves), sums, to_host=to_host)
    assert host.all()
    assert not caches[0].any()


def test_move_blocks_refuses_host_memory_of_another_size(numba):
    host, sums = torch.ones(3, 41, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64)
    caches = [torch.zeros(5, 8), torch.zeros(5, 2)]
    with pytest.raises(InvalidArgumentError, match=r"host.*\[any, 40\]"):
        numba.move_blocks(caches, host, torch.tensor([[0, 1]]), sums, to_host=True)


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


def _caches():
    k, v = torch.zeros(2, 9, 4, 2, 16)
    scale = torch.ones(2)
    stored = [each.to(torch.float8_e4m3fn) for each in (k, v)]
    latents = torch.zeros(9, 4, 1, 16)
    shifted = torch.zeros(k.numel() + 1)[1:].view(k.shape)
    return {
        "as it is": KVCache(k, v),
        "fewer blocks": KVCache(k[:8], v[:8]),
        "gaps": KVCache(k[:, :, :, :8], v[:, :, :, :8]),
        "float16": KVCache(k.half(), v.half()),
        "off 16 bytes": KVCache(k, shifted),
        "e4m3": KVCache(*stored),
        "e4m3, scaled": KVCache(*stored, scale, scale),
        "e4m3, one scale": KVCache(*stored, scale[:1], scale),
        "latents": KVLayout(1, 16, 16, torch.float32, is_latent=True).over([latents]),
        "pairs in the same memory": KVCache(latents, latents),
    }


def test_forms_are_equal_for_what_looks_alike_and_for_nothing_else():
    first, second = _caches(), _caches()
    assert {name: each.form for name, each in first.items()} == {
        name: each.form for name, each in second.items()
    }
    assert len({each.form for each in first.values()}) == len(first)
    terms = (
        AttentionTerms(0.1), AttentionTerms(-0.1), AttentionTerms(0.0), AttentionTerms(1, 5),
        AttentionTerms(1, None, 2.0), AttentionTerms(1, sinks=torch.zeros(2)),
        AttentionTerms(1, sinks=torch.zeros(2).half()), AttentionTerms(1, batch_invariant=True),
    )  # fmt: skip
    assert len({each.form for each in terms}) == len(terms)
    assert AttentionTerms(0.1, 5).form == AttentionTerms(7.0, 9).form
    batches = (
        _batch(), _batch(shared_prefix=SharedPrefix(0, 2, 2)),
        _batch(slot_mapping=torch.zeros(5).long()),
        _batch(block_table=torch.zeros(2, 3).int()),
        _batch(block_table=torch.zeros(2, 3).int()[:, :2]),
    )  # fmt: skip
    assert len({each.form for each in batches}) == len(batches)
    assert _batch().form == _batch(seq_lens=_ints(4, 3), max_seq_len=4).form
