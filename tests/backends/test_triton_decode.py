"""Decode in the interpreter and on a GPU: split sequences are right, the plan follows lengths."""

import importlib.util

import pytest
import torch

import backends
from backends.conformance import AttentionCase
from backends.conformance.attention import check_attention
from backends.conformance.cases import bits, build
from tests.backends.ahead import compile_ahead

has_triton = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not has_triton, reason="triton is not installed here")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")

LONG = AttentionCase("", ((1, 1700), (0, 40), (1, 1), (1, 33), (1, 512)), dtype=torch.bfloat16)
VERIFY = ((4, 1700), (0, 40), (1, 1), (3, 33), (2, 512))
E4M3 = torch.float8_e4m3fn
SHAPES = [
    *(LONG.with_(name=f"group {g}", group=g, head_dim=128) for g in (1, 3, 4, 5, 8, 12, 16, 20)),
    *(LONG.with_(name=f"head_dim {d}", head_dim=d) for d in (64, 80, 96, 112, 128, 256)),
    *(LONG.with_(name=f"block size {n}", block_size=n) for n in (1, 8, 16, 24, 32, 64, 128)),
    LONG.with_(name="a wide group of wide heads", group=16, head_dim=256),
    LONG.with_(name="window", window=900),
    LONG.with_(name="all", window=1000, soft_cap=5.0, sinks=True, strided=True, group=4),
    LONG.with_(name="sinks, float16", sinks=True, dtype=torch.float16),
    LONG.with_(name="one huge logit", values="huge"),
    LONG.with_(name="among prefill", seqs=((1, 1500), (40, 300), (1, 64), (3, 700)), padding=2),
    LONG.with_(name="one alone", seqs=((1, 4000),), group=4),
    *(LONG.with_(name=f"to verify, group {g}", seqs=VERIFY, group=g) for g in (1, 3, 4, 5, 8, 16)),
    *(LONG.with_(name=f"to verify, head_dim {d}", seqs=VERIFY, head_dim=d) for d in (64, 96, 256)),
    *(LONG.with_(name=f"20 to verify, group {g}", seqs=VERIFY * 4, group=g) for g in (1, 5, 16)),
    *(LONG.with_(name=f"{g} heads over one", group=g, num_kv_heads=1) for g in (48, 64)),
    LONG.with_(name="48 heads, all", group=48, window=900, soft_cap=5.0, sinks=True),
    LONG.with_(name="24 heads, e4m3", group=24, cache_dtype=E4M3, scales="head", head_dim=128),
    LONG.with_(name="to verify, alone", seqs=((4, 4000),), group=4, head_dim=128),
    LONG.with_(name="to verify, 16 tokens", seqs=((16, 4000), (7, 90)), group=1, head_dim=128),
    LONG.with_(name="to verify, window", seqs=VERIFY, window=900, soft_cap=5.0, sinks=True),
    LONG.with_(name="to verify, e4m3", seqs=VERIFY, cache_dtype=E4M3, scales="head", group=4),
    LONG.with_(name="one long, many short", seqs=((1, 9000), *[(1, 40)] * 60), group=4),
    LONG.with_(name="many short, one long", seqs=(*[(1, 40)] * 60, (1, 9000)), group=4),
    LONG.with_(name="more sequences than are planned", seqs=((1, 3), (1, 20)) * 520, head_dim=16),
]


@pytest.mark.slow
@needs_triton
def test_in_the_interpreter_the_plan_holds_and_split_sequences_are_right(interpreting):
    done = interpreting.run("-m", "tests.backends.decode_check")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "decode is right\n"


@pytest.fixture(scope="module")
def compiled():
    """What the cases need, compiled side by side."""
    compile_ahead(SHAPES)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("case", SHAPES, ids=lambda case: case.name)
def test_split_sequences_are_right_for_every_shape_and_feature(case):
    for finding in check_attention(backends.get_backend("triton"), case):
        assert finding.passed, finding


@pytest.mark.gpu
@needs_cuda
def test_a_graph_follows_other_lengths_and_tables_when_it_is_replayed():
    backend = backends.get_backend("triton")
    captured = build(
        LONG.with_(name="captured", seqs=((1, 1700), (1, 900), (0, 0))), backend.device
    )
    others = [
        build(LONG.with_(name="later", seqs=seqs, seed=seed), backend.device, layout=seed)
        for seed, seqs in enumerate((((1, 1700), (1, 1), (0, 0)), ((1, 40), (1, 1300), (1, 700))))
    ]
    blocks = max(inputs.cache.k.shape[0] for inputs in others)
    block = torch.zeros_like(captured.cache.k[:1])
    cache = backends.KVCache(*(block.repeat(blocks, 1, 1, 1) for _ in range(2)))
    query = torch.zeros_like(others[1].query)
    out = torch.zeros_like(query)
    old = captured.batch
    batch = backends.PagedBatch(
        old.query_start_loc, old.seq_lens, old.block_table,
        torch.full((3,), -1, dtype=torch.int64, device=backend.device), 1, 1700,
    )  # fmt: skip

    def attend():
        backend.paged_attention(query, cache, batch, captured.terms, out=out)

    def fill(inputs):
        rows = inputs.query.shape[0]
        query[:rows] = inputs.query
        for tensor, content in zip(cache.tensors, inputs.cache.tensors, strict=True):
            tensor[: len(content)] = content
        batch.query_start_loc.copy_(inputs.batch.query_start_loc)
        batch.seq_lens.copy_(inputs.batch.seq_lens)
        width = min(batch.block_table.shape[1], inputs.batch.block_table.shape[1])
        batch.block_table[:, :width] = inputs.batch.block_table[:, :width]

    fill(others[0])
    attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend()
    for inputs in others:
        fill(inputs)
        graph.replay()
        torch.cuda.synchronize()
        live = int(inputs.batch.query_start_loc[-1])
        assert torch.equal(bits(out[:live]), bits(inputs.run(backend)[:live]))


@pytest.mark.gpu
@needs_cuda
def test_what_is_launched_next_sees_rows_that_needed_no_merge():
    backend = backends.get_backend("triton")
    whole = LONG.with_(name="not cut", seqs=((1, 1000),) * 40, num_kv_heads=8, head_dim=128)
    inputs = build(whole, backend.device)
    wanted = inputs.run(backend).clone()
    torch.cuda.synchronize()
    for _ in range(20):
        inputs.query.neg_()  # so that rows of the last run are wrong
        inputs.run(backend)
        inputs.query.neg_()
        rows = inputs.run(backend).clone()
        assert torch.equal(bits(rows), bits(wanted))
