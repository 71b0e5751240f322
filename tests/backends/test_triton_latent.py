"""Attention over latents, in the interpreter and on a GPU."""

import dataclasses
import importlib.util

import pytest
import torch

import backends
from backends import PagedBatch
from backends.conformance import AttentionCase
from backends.conformance.attention import check_attention
from backends.conformance.cases import bits, build
from tests.backends.ahead import compile_ahead

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed here"
)
ON_A_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
MLA = AttentionCase(
    "", ((1, 1700), (0, 40), (1, 1), (1, 33)), num_kv_heads=1, head_dim=576, value_dim=512,
    group=16, dtype=BF16,
)  # fmt: skip
MIXED = ((1, 900), (40, 300), (1, 64), (3, 700))
ALL = {"window": 99, "soft_cap": 5.0, "sinks": True}
SHAPES = [
    *(MLA.with_(name=f"{n} heads", group=n) for n in (1, 5, 16, 32, 40, 64, 128)),
    *(MLA.with_(name=f"{n} heads, mixed", group=n, seqs=MIXED, padding=2) for n in (16, 128)),
    *(MLA.with_(name=f"block size {n}", block_size=n) for n in (1, 5, 8, 64, 128)),
    *(
        MLA.with_(name=f"{v} + {rest}", head_dim=v + rest, value_dim=v, seqs=MIXED)
        for v, rest in ((128, 64), (256, 64), (512, 0), (96, 32))
    ),
    MLA.with_(name="all", seqs=MIXED, window=500, soft_cap=5.0, sinks=True, strided=True),
    MLA.with_(name="prompts", seqs=((200, 700), (150, 150), (1, 64), (90, 91)), block_size=64),
    MLA.with_(
        name="prompts, all", seqs=((200, 700), (70, 70)), window=100, soft_cap=5.0, sinks=True
    ),
    *(MLA.with_(name=f"{n} heads, block size 64", group=n, block_size=64) for n in (40, 128)),
    MLA.with_(
        name="128 heads, all", group=128, block_size=64, window=500, soft_cap=5.0, sinks=True
    ),
    MLA.with_(name="to verify", seqs=((4, 1700), (2, 65), (1, 1)), sinks=True),
    MLA.with_(name="float16, one huge logit", dtype=torch.float16, values="huge"),
    MLA.with_(name="float32", dtype=torch.float32, seqs=((1, 90), (9, 40)), group=4),
    MLA.with_(name="e4m3", cache_dtype=E4M3, scales="head", seqs=MIXED),
    MLA.with_(name="one long, many short", seqs=((1, 9000), *[(1, 40)] * 60)),
    MLA.with_(name="alike", seqs=MIXED, batch_invariant=True),
    MLA.with_(name="more sequences than are planned", seqs=((1, 9),) * 1030, group=2),
]


@pytest.mark.slow
@needs_triton
def test_in_the_interpreter_attention_over_latents_is_right(interpreting):
    done = interpreting.run("-m", "tests.backends.latent_check")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "attention over latents is right\n"


@pytest.fixture(scope="module")
def triton():
    compile_ahead(SHAPES)
    return backends.get_backend("triton")


class TestOnAGpu:
    pytestmark = ON_A_GPU

    @pytest.mark.parametrize("case", SHAPES, ids=lambda case: case.name)
    def test_latents_are_right_for_every_shape_and_feature(self, triton, case):
        for finding in check_attention(triton, case):
            assert finding.passed, finding

    def test_the_portable_kernel_says_the_same(self, triton, monkeypatch):
        inputs = build(MLA.with_(seqs=MIXED), triton.device)
        ours, allowed = inputs.run(triton).clone(), inputs.expected().allowed
        monkeypatch.setattr("backends.triton_gpu.latent.hopper.can_attend", lambda *_: False)
        portable = inputs.run(importlib.import_module("tests.backends.gpus").backend_apart())
        distance = (ours.double() - portable.double()).norm(dim=-1).cpu()
        assert (distance <= 2 * allowed).all()

    def test_a_graph_follows_other_lengths_when_it_is_replayed(self, triton):
        inputs = build(MLA.with_(seqs=((1, 1700), (1, 900), (1, 1))), triton.device)
        held = dataclasses.replace(inputs.batch, seq_lens=inputs.batch.seq_lens.clone())
        out = torch.empty_like(inputs.out)

        def attend():
            triton.paged_attention(inputs.query, inputs.cache, held, inputs.terms, out=out)

        attend()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            attend()
        for lengths in ((1700, 900, 1), (65, 900, 1), (1, 1, 1)):
            held.seq_lens.copy_(torch.tensor(lengths, dtype=torch.int32))
            graph.replay()
            torch.cuda.synchronize()
            again = dataclasses.replace(inputs.batch, seq_lens=held.seq_lens.clone())
            wanted = triton.paged_attention(inputs.query, inputs.cache, again, inputs.terms)
            assert torch.equal(bits(out), bits(wanted))

    @pytest.mark.parametrize("what", ["query", "cache"])
    def test_what_the_kernel_before_wrote_is_read(self, triton, what):
        first, second = (
            build(MLA.with_(seqs=((1, 3000),), seed=seed), triton.device) for seed in (1, 2)
        )
        written = second.query[:, :, :512]
        if what == "cache":
            block_id = int(second.batch.block_table[0, 90])
            written = second.cache.k[block_id, :, 0, :512][None]

        def write():
            written.fill_(float("nan"))
            triton.paged_attention(first.query, first.cache, first.batch, first.terms, out=written)

        write()
        torch.cuda.synchronize()
        wanted = second.run(triton).clone()
        assert wanted.isfinite().all()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            write()
            second.run(triton)
        for _ in range(20):
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(bits(second.out), bits(wanted))

    def test_alike_a_row_is_bit_for_bit_the_same_alone(self, triton):
        many = build(
            MLA.with_(seqs=((1, 1700),) + ((1, 300),) * 90, batch_invariant=True), triton.device
        )
        batch = many.batch
        one = PagedBatch(
            batch.query_start_loc[:2], batch.seq_lens[:1], batch.block_table[:1],
            batch.slot_mapping[:1], 1, 1700,
        )  # fmt: skip
        alone = triton.paged_attention(many.query[:1], many.cache, one, many.terms)
        assert torch.equal(bits(alone), bits(many.run(triton)[:1]))
