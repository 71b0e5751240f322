"""Decode, stores and copies on a GPU: batch-invariance, quantised caches, sharing, no compiling."""

import dataclasses
import os
import random
import shutil
import subprocess
import sys

import pytest
import torch

import backends
from backends import KVCache, LayerCall, PagedBatch
from backends.conformance import AttentionCase
from backends.conformance.attention import check_attention
from backends.conformance.cases import bits, build
from tests.backends.ahead import compile_ahead

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

E4M3 = torch.float8_e4m3fn
LONG = AttentionCase("", ((1, 1700), (0, 40), (1, 1), (1, 33), (1, 512)), dtype=torch.bfloat16)
QUANTISED = LONG.with_(cache_dtype=E4M3, scales="head")
SHARED = LONG.with_(seqs=((1, 400), (1, 513), (1, 3000), (1, 386)), shared=384)
CASES = [
    QUANTISED.with_(name="quantised"),
    QUANTISED.with_(name="quantised, float16, one scale", dtype=torch.float16, scales="tensor"),
    QUANTISED.with_(name="quantised, no scales", scales="none", head_dim=128),
    QUANTISED.with_(name="quantised, all", window=900, soft_cap=5.0, sinks=True, strided=True),
    QUANTISED.with_(name="quantised, a wide group of wide heads", group=16, head_dim=256),
    QUANTISED.with_(name="quantised, head_dim 80", group=5, head_dim=80, block_size=5),
    QUANTISED.with_(name="quantised, alike", batch_invariant=True),
    LONG.with_(name="alike", batch_invariant=True, sinks=True),
    LONG.with_(name="alike, window", batch_invariant=True, window=700, group=8, head_dim=256),
    SHARED.with_(name="shared"),
    SHARED.with_(name="shared, quantised", cache_dtype=E4M3, scales="head", head_dim=128),
    SHARED.with_(name="shared, all", soft_cap=5.0, sinks=True, strided=True, group=5, head_dim=80),
    SHARED.with_(name="shared, wide heads", head_dim=256, group=3, block_size=128),
    SHARED.with_(name="shared by many", seqs=((1, 60),) * 90, shared=48, group=4),
    SHARED.with_(name="shared among prefill", seqs=((1, 80), (9, 90)), shared=64),
]


@pytest.fixture(scope="module")
def compiled():
    """What the cases need, compiled side by side."""
    compile_ahead(CASES)


@pytest.fixture
def triton(monkeypatch):
    """The backend, sharing whether or not that pays."""
    from backends.triton_gpu.decode import cascade  # noqa: PLC0415 - where there is a GPU alone

    for name in ("WORTH_BYTES", "WORTH_BYTES_A_SEQUENCE", "FEWEST"):
        monkeypatch.setattr(cascade, name, 0)
    return backends.get_backend("triton")


@pytest.mark.parametrize("seqs", [((1, 700), (1, 33)), ((300, 700), (40, 40))])
def test_a_soft_cap_hides_no_nan(triton, seqs):
    inputs = build(LONG.with_(seqs=seqs, soft_cap=5.0), triton.device)
    inputs.query.fill_(torch.nan)
    out = triton.paged_attention(inputs.query, inputs.cache, inputs.batch, inputs.terms)
    assert out[: sum(count for count, _ in seqs)].isnan().all()


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_decode_is_right_for_every_kind_of_cache_and_plan(triton, case):
    for finding in check_attention(triton, case):
        assert finding.passed, finding


def test_a_batch_invariant_row_is_bit_for_bit_the_same_in_any_company(triton):
    """One sequence, alone and among random others; decode and prefill, and many of them."""
    draw = random.Random(7)
    base = LONG.with_(batch_invariant=True, head_dim=128, group=4)
    for own in ((1, 1), (1, 255), (1, 257), (1, 5000), (1, 9000), (37, 300), (2, 2000)):
        company = [(1, draw.randint(1, 3000)) for _ in range(draw.choice((1, 7, 90)))]
        company += [(draw.randint(2, 90), 200) for _ in range(draw.choice((0, 2)))]
        alone = build(base.with_(seqs=(own,)), triton.device)
        wanted = alone.run(triton)
        others = build(base.with_(seqs=tuple(company), seed=3), triton.device)
        blocks = alone.cache.k.shape[0]
        width = max(alone.batch.block_table.shape[1], others.batch.block_table.shape[1])
        table = torch.zeros(1 + len(company), width, dtype=torch.int32, device=triton.device)
        table[0, : alone.batch.block_table.shape[1]] = alone.batch.block_table
        table[1:, : others.batch.block_table.shape[1]] = others.batch.block_table + blocks
        starts = torch.cat([alone.batch.query_start_loc[:1], others.batch.query_start_loc + own[0]])
        rows = alone.query.shape[0] + others.query.shape[0]
        batch = PagedBatch(
            starts, torch.cat([alone.batch.seq_lens, others.batch.seq_lens]), table,
            torch.full((rows,), -1, dtype=torch.int64, device=triton.device),
            max(own[0], others.batch.max_query_len), max(own[1], others.batch.max_seq_len),
        )  # fmt: skip
        together = triton.paged_attention(
            torch.cat([alone.query, others.query]),
            KVCache(*map(torch.cat, zip(alone.cache.tensors, others.cache.tensors, strict=True))),
            batch, alone.terms,
        )  # fmt: skip
        assert torch.equal(bits(together[: own[0]]), bits(wanted)), (own, len(company))


def test_without_that_mode_company_can_change_bits(triton):
    """So the test above can fail: the plan for one sequence is not that for eighty."""
    case = LONG.with_(seqs=((1, 5000),) + ((1, 3000),) * 80, head_dim=128)
    many = build(case, triton.device)
    batch = many.batch
    one = PagedBatch(
        batch.query_start_loc[:2], batch.seq_lens[:1], batch.block_table[:1],
        batch.slot_mapping[:1], 1, 5000,
    )  # fmt: skip
    alone = triton.paged_attention(many.query[:1], many.cache, one, many.terms)
    assert not torch.equal(bits(alone), bits(many.run(triton)[:1]))


def test_after_a_warm_up_decode_compiles_nothing(triton):
    import triton as toolchain  # noqa: PLC0415 - where there is a GPU alone

    case = LONG.with_(group=4, head_dim=128, seqs=((1, 700),) * 3)
    first = build(case, triton.device)
    layer = LayerCall(8, torch.bfloat16, first.cache, first.terms)
    triton.warmup([layer], max_num_seqs=70, max_query_len=64)
    compiled = []
    hook = toolchain.knobs.runtime.jit_post_compile_hook
    toolchain.knobs.runtime.jit_post_compile_hook = lambda **options: compiled.append(options)
    try:
        long = (((40, 1500),), ((64, 3000),), ((17, 1200), (3, 9)), ((30, 1100), (1, 2000)))
        short = (((1, 700),) * 3, ((1, 5),), ((1, 90),) * 33, ((1, 9),) * 70, ((20, 64),))
        for seqs in (*short, *long):
            step = build(case.with_(seqs=seqs), triton.device)
            step.run(triton)
            rows = torch.zeros(5, 2, 128, dtype=torch.bfloat16, device=triton.device)
            slots = torch.tensor([3, -1, 0, 7, 5], device=triton.device)
            triton.store_kv(rows, rows, step.cache, slots)
    finally:
        toolchain.knobs.runtime.jit_post_compile_hook = hook
    assert compiled == []


def test_a_launch_on_another_stream_runs_there(triton):
    """The cheap way to launch follows the current stream, as Triton's own does."""
    inputs = build(LONG, triton.device)
    wanted = bits(inputs.run(triton))
    stream = torch.cuda.Stream()
    inputs.out.fill_(torch.nan)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        inputs.run(triton)
        assert not stream.query()  # still behind the sleep
    stream.synchronize()
    assert torch.equal(bits(inputs.out), wanted)


def test_data_that_starts_anywhere_is_read_and_written_right(triton):
    """Pointers off 16 bytes take kernels of their own."""
    case = LONG.with_(head_dim=64)
    plain = build(case, triton.device)
    wanted = bits(plain.run(triton))

    def moved(tensor):
        memory = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
        memory[1:] = tensor.flatten()
        return memory[1:].view(tensor.shape)

    for change in ("query", "k", "v", "out"):
        of = plain.cache if change in ("k", "v") else plain
        changed = dataclasses.replace(of, **{change: moved(getattr(of, change))})
        odd = changed if of is plain else dataclasses.replace(plain, cache=changed)
        assert torch.equal(bits(odd.run(triton)), wanted), change


@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="no compute-sanitizer here")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_the_sanitizer_finds_nothing(tool):
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9"]
    command += [sys.executable, "-m", "tests.backends.sanitize_set"]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every kernel ran" in done.stdout
