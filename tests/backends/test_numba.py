"""The CPU backend against the oracle, and alone: threads, forks, widths, caches past 2^31."""

import os
import threading

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import backends
from backends import conformance
from backends.conformance import AttentionCase
from backends.conformance.attention import check_attention
from backends.conformance.cases import bits, build
from backends.numba_cpu.launch import Workers
from backends.numba_cpu.matmul import multiply_rows
from tests.backends.strategies import attention_cases

NUMBA = backends.get_backend("numba")
CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MIXED = AttentionCase("mixed", ((1, 300), (40, 70), (1, 5), (0, 0), (9, 9)), num_kv_heads=3)
REPEATED = AttentionCase(
    "the same value again and again", ((0, 3), (15, 52), (0, 0), (0, 0)),
    num_kv_heads=1, group=1, head_dim=4, value_dim=1, block_size=1, values="equal",
)  # fmt: skip


@pytest.mark.parametrize("quick", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_it_passes_the_conformance_kit(quick):
    report = conformance.run(NUMBA, quick=quick)
    assert report.passed, report.as_text()


@given(attention_cases(DTYPES, quantised=(torch.float8_e4m3fn,)))
@example(AttentionCase("one huge logit under a cap", ((1, 40),), values="huge", soft_cap=0.5))
@example(AttentionCase("nothing at all", ()))
@example(AttentionCase("no query token beside a window", ((0, 9), (1, 9)), window=2))
@example(REPEATED)
@example(AttentionCase("several items a prompt", ((90, 260),), 1, 8, 24, window=70, sinks=True))
@example(
    AttentionCase("rows that see no more of a tile", ((64, 200),), 1, 3, 8, window=70, sinks=True)
)
def test_random_batches_match_the_oracle(case):
    for finding in check_attention(NUMBA, case):
        assert finding.passed, finding


@given(
    slots=st.lists(st.integers(-3, 59), max_size=40, unique=True),
    dtype=st.sampled_from((*DTYPES, torch.float32)),
    block_size=st.sampled_from((1, 3, 4, 20)),
)
def test_stored_rows_are_found_where_the_slots_say(slots, dtype, block_size):
    generator = torch.Generator().manual_seed(len(slots))
    key, value = torch.randn((2, len(slots), 2, 6), generator=generator).to(dtype)
    caches = torch.full((2, 60 // block_size, block_size, 2, 6), 7.0, dtype=dtype)
    wanted = caches.clone().view(2, 60, 2, 6)
    for i, slot in enumerate(slots):
        if slot >= 0:
            wanted[0, slot], wanted[1, slot] = key[i], value[i]
    cache, where = backends.KVCache(*caches), torch.tensor(slots, dtype=torch.int64)
    NUMBA.store_kv(key, value, cache, where)
    assert torch.equal(bits(caches.view(2, 60, 2, 6)), bits(wanted))


def test_a_product_of_four_rows_is_numpys_and_its_bits_do_not_depend_on_how_wide_it_is():
    generator = np.random.default_rng(0)
    for num_terms, width in ((0, 16), (1, 64), (7, 48), (64, 80), (33, 128)):
        c, a, b = (
            generator.normal(size=shape).astype(np.float32)
            for shape in ((4, width), (4, num_terms), (num_terms, width))
        )
        wide, narrow = c.flatten(), c.flatten()
        multiply_rows(wide, width, a.flatten(), num_terms, b.flatten(), width, num_terms, width)
        for j in range(0, width, 16):
            part = narrow[j:], width, a.flatten(), num_terms, b.flatten()[j:], width, num_terms, 16
            multiply_rows(*part)
        assert np.allclose(wide.reshape(4, width), c + a @ b, rtol=1e-5, atol=1e-5)
        assert (wide == narrow).all()


def test_every_number_of_threads_gives_the_same_bits(monkeypatch):
    inputs = build(MIXED, CPU)
    results = []
    for width in (1, 2, 3, 7):
        monkeypatch.setattr(torch, "get_num_threads", lambda width=width: width)
        results.append(bits(inputs.run(NUMBA)))
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_many_threads_may_call_at_once():
    cases = [MIXED.with_(seed=i, dtype=DTYPES[i % 3]) for i in range(6)]
    inputs = [build(case, CPU) for case in cases]
    alone = [bits(each.run(NUMBA)) for each in inputs]
    wrong = []
    start = threading.Barrier(len(cases))

    def work(i):
        start.wait()
        for _ in range(20):
            inputs[i].out.fill_(torch.nan)
            if not torch.equal(bits(inputs[i].run(NUMBA)), alone[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_it_works_in_a_forked_child_after_use_in_the_parent(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)  # so that the pool has threads
    inputs = build(MIXED, CPU)
    wanted = inputs.run(NUMBA).clone().numpy()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            inputs.out.numpy()[:] = 0
            inputs.run(NUMBA)
            status = 0 if (inputs.out.numpy() == wanted).all() else 2
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_what_a_slice_raises_reaches_the_caller_after_all_slices_ended():
    ended = []

    def work(start, stop):
        ended.append(start)
        if start == 1:
            raise KeyError(start)

    with pytest.raises(KeyError):
        Workers().run(work, [(0, 1), (1, 2), (2, 3)])
    assert sorted(ended) == [0, 1, 2]


def test_even_slices_cover_the_work_once(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    for total, grain, parts in ((0, 1, 1), (1, 1, 1), (10, 1, 4), (10, 4, 2), (10, 100, 1)):
        seen = []
        Workers().run_evenly(lambda *piece, seen=seen: seen.append(piece), total, grain)
        assert len(seen) == parts
        assert [i for piece in sorted(seen) for i in range(*piece)] == list(range(total))


def test_a_cache_past_2_to_the_31_elements(tmp_path):
    """Block ids past 65,535 and element offsets past 2^31, in a sparse file: no memory is used."""
    num_blocks, block_size, heads, size = 70_000, 16, 8, 256
    shape = (num_blocks, block_size, heads, size)
    count = num_blocks * block_size * heads * size
    assert count > 1 << 31
    caches = [
        torch.from_file(str(tmp_path / name), shared=True, size=count, dtype=torch.float16).view(
            shape
        )
        for name in ("k", "v")
    ]
    blocks = (69_999, 65_536, 3)
    case = AttentionCase("far", ((2, 40),), num_kv_heads=heads, head_dim=size, dtype=torch.float16)
    near = build(case, CPU)
    table = torch.tensor([blocks], dtype=torch.int32)
    slots = torch.empty(40, dtype=torch.int64)
    whole = torch.tensor([0, 40], dtype=torch.int32)
    NUMBA.compute_slot_mapping(whole, near.batch.seq_lens, table, block_size, slots)
    assert slots.max() == 69_999 * 16 + 15
    rows = [
        cache[near.batch.block_table[0, :3].long()].flatten(0, 1)[:40].contiguous()
        for cache in near.cache.tensors
    ]
    cache = backends.KVCache(*caches)
    NUMBA.store_kv(*rows, cache, slots)
    NUMBA.copy_blocks(caches, torch.tensor([[69_999, 69_998]]))
    assert torch.equal(caches[0][69_998], caches[0][69_999])
    batch = backends.PagedBatch(
        near.batch.query_start_loc, near.batch.seq_lens, table, near.batch.slot_mapping, 2, 40
    )
    far = NUMBA.paged_attention(near.query, cache, batch, near.terms)
    assert torch.equal(bits(far), bits(near.run(NUMBA)))


def test_tensors_of_a_graph_are_taken_as_values():
    inputs = build(MIXED, CPU)
    wanted = inputs.run(NUMBA).clone()
    query = inputs.query.clone().requires_grad_()
    out = NUMBA.paged_attention(query, inputs.cache, inputs.batch, inputs.terms)
    assert not out.requires_grad
    live = int(inputs.batch.query_start_loc[-1])
    assert torch.equal(out[:live], wanted[:live])


def test_infinite_values_stay_visible():
    inputs = build(AttentionCase("", ((1, 20),)), CPU)
    block = int(inputs.batch.block_table[0, 0])
    inputs.cache.v[block, 3] = torch.inf
    assert inputs.run(NUMBA).isposinf().all()
    inputs.cache.k[block, 3] = torch.nan
    assert inputs.run(NUMBA).isnan().all()
