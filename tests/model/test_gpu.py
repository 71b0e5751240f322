"""The same comparisons on a GPU, with the Triton backend."""

import contextlib
import functools
import multiprocessing
import re
import sys
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch._dynamo.utils import counters

import backends
from model import EngineConfig, InvalidArgumentError, Request, SamplingParams, Submission
from model.compile import piecewise
from model.engine import Engine
from model.forward import invariant_kernels, warm_up
from model.forward.cuda_graphs import CudaGraphs
from model.forward.network import PagedNetwork
from model.load.loader import with_draft, wrap_network
from model.sample import sampler
from model.sample.draw_graphs import DrawGraphs, GraphCapturer, Place, row_terms
from model.sample.draw_kernels import GpuPasses
from model.sample.grammars import Grammars
from model.sample.request_sampler import RequestSampler, log_probabilities
from tests.model import few_rows_check, same_digest
from tests.model.draw_kernels_check import check
from tests.model.invariant_check import by_number
from tests.model.networks import CONFIGS, build, greedy_and_margin
from tests.model.numerics import bfloat16_errors
from tests.model.recurrent_networks import KINDS
from tests.model.tiny_configs import make_config
from tests.model.walk import build_network

OF_THE_COMPILER = pytest.mark.filterwarnings("ignore:.*script_method.* is deprecated")
"""PyTorch 2.11's compiler warns of PyTorch's own code when it is imported."""

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
    OF_THE_COMPILER,
]


@contextlib.contextmanager
def compilations():
    """What Triton's just-in-time compiler and PyTorch's compile meanwhile."""
    seen = []
    frames = counters["frames"]
    before, num_frames = triton.knobs.runtime.jit_post_compile_hook, frames["total"]
    triton.knobs.runtime.jit_post_compile_hook = lambda **what: seen.append(what)
    try:
        yield seen
    finally:
        triton.knobs.runtime.jit_post_compile_hook = before
        seen += ["a frame of PyTorch's"] * (frames["total"] - num_frames)


PROMPTS = [list(range(40, 61)), [*range(40, 61), 7, 8, 9], [200, 100, 5]]


@functools.cache
def clear_case(architecture, backend):
    """A network on the GPU whose greedy choices are clear, and its dense tokens."""
    for seed in range(20):
        built = build(architecture, seed)
        model = wrap_network(architecture, built.network.to(backend.device), built.codec)
        dense = [greedy_and_margin(model, prompt, 16) for prompt in PROMPTS]
        if min(margin for _, margin in dense) > 1e-3:
            return model, [tokens for tokens, _ in dense]
    raise AssertionError("no clear network in 20")


@pytest.mark.parametrize("architecture", CONFIGS)
def test_the_tokens_on_a_gpu_are_those_of_generate(architecture):
    backend = backends.get_backend("triton")
    model, dense = clear_case(architecture, backend)
    config = EngineConfig(num_blocks=30, block_size=16, max_num_batched_tokens=11)
    engine = Engine(model, backend, config)
    done = engine.generate(PROMPTS, SamplingParams(max_tokens=16))
    assert [c.request.output_tokens for c in done] == dense
    assert engine.stats.num_hit_tokens > 0


TEXTS = ["a prompt of some length, ", "short", "abc abc abc abc abc abc abc abc abc ", "x"] * 2
DRAWN = [
    SamplingParams(max_tokens=40, logprobs=3, ignore_eos=True, temperature=0.8, seed=number, **more)
    for number, more in enumerate([{}, {}, {}, {"logit_bias": {97: 9, 98: 9}}])  # repeats itself
] * 2


GRAPHS = r"traced, \d+ graphs"


def invariant_model(architecture, dtype):
    built = build(architecture, 25)
    network = built.network.to(backends.get_backend("triton").device, dtype)
    return wrap_network(architecture, network, built.codec)


def invariant_outputs(model, numbers, how="", **fields):
    """Tokens and log-probabilities of requests that find their own prompts again; statistics."""
    fields = {"num_blocks": 90, "block_size": 16, "max_num_seqs": 8, **fields}
    engine = Engine(model, backends.get_backend("triton"), EngineConfig(**fields))
    if how:
        assert re.fullmatch(how, engine.prepare())
    texts, params = [TEXTS[n] for n in numbers], [DRAWN[n] for n in numbers]
    engine.generate(texts, params)
    again = [one.tokens for one in engine.generate(texts, params)]
    return again, engine.stats


def check_invariant(model, alone, how="", **fields):
    """A request has the same bits in batches, in chunks, with hits, preempted and with drafts."""
    every = range(len(TEXTS))
    outputs = functools.partial(invariant_outputs, model, how=how, batch_invariant=True, **fields)
    together, stats = outputs(every)
    assert together == alone, "together"
    assert stats.num_hit_tokens > 0
    chunked, _ = outputs(every, max_num_batched_tokens=11)
    assert chunked == alone, "in chunks"
    pressed, stats = outputs(every, num_blocks=11)
    assert pressed == alone, "preempted"
    assert stats.num_preemptions > 0
    drafted, stats = outputs(every, drafts="ngram")
    assert drafted == alone, "with drafts"
    assert stats.num_draft_tokens > 0


def eager_alone(model):
    return [
        invariant_outputs(model, [n], batch_invariant=True, eager=True)[0][0] for n in range(4)
    ] * 2


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "gemma4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_batch_invariant_a_request_has_the_same_bits_however_it_is_computed(architecture, dtype):
    """Tokens and log-probabilities: alone, in batches, in chunks, with hits, preempted, drafted."""
    model = invariant_model(architecture, dtype)
    check_invariant(model, eager_alone(model), eager=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_batch_invariant_steps_replayed_from_graphs_have_the_same_bits(dtype, monkeypatch):
    model, replayed, replay = invariant_model("qwen3", dtype), set(), CudaGraphs.replay
    monkeypatch.setattr(
        CudaGraphs, "replay", lambda *given: replayed.add(given[2]) or replay(*given)
    )
    alone = eager_alone(model)
    assert not replayed
    check_invariant(model, alone, GRAPHS, max_num_batched_tokens=40)
    assert {bucket.longest == 1 for bucket in replayed} == {False, True}


def test_batch_invariant_compiled_steps_have_the_same_bits_however_they_are_computed():
    """Also without graphs, where a step may have a single token."""
    model = invariant_model("qwen3", torch.bfloat16)

    def engine_of(**fields):
        sizes = {"block_size": 16, "max_num_seqs": 8, **fields}
        config = EngineConfig(batch_invariant=True, compile=True, **sizes)
        engine = Engine(model, backends.get_backend("triton"), config)
        assert re.fullmatch(r"compiled, \d+ graphs", engine.prepare())
        return engine

    engine = engine_of(num_blocks=90, max_num_batched_tokens=40)
    single = [engine.generate(TEXTS[n : n + 1], DRAWN[n : n + 1])[0].tokens for n in range(4)]
    assert [one.tokens for one in engine.generate(TEXTS, DRAWN)] == single * 2
    engine._runner.use(warm_up.Prepared("compiled"))
    assert engine.generate(TEXTS[3:4], DRAWN[3:4])[0].tokens == single[3]
    assert [one.tokens for one in engine.generate(TEXTS, DRAWN)] == single * 2
    engine = engine_of(num_blocks=11, max_num_batched_tokens=11, drafts="ngram")
    assert [one.tokens for one in engine.generate(TEXTS, DRAWN)] == single * 2
    assert engine.stats.num_preemptions > 0
    assert engine.stats.num_draft_tokens > 0


def test_batch_invariant_ten_thousand_requests_have_one_digest():
    same_digest.main()


def test_batch_invariant_the_check_finds_products_that_depend_on_the_number_of_rows(monkeypatch):
    model = invariant_model("qwen3", torch.float32)  # whose sums show the order
    monkeypatch.setattr(invariant_kernels, "multiply", by_number(invariant_kernels.multiply))
    with pytest.raises(AssertionError, match="together"):
        check_invariant(model, eager_alone(model), eager=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_log_probabilities_of_a_row_have_the_same_bits_among_any_others(dtype):
    for vocab_size in (259, 151_936):
        torch.manual_seed(vocab_size)
        logits = torch.randn(70, vocab_size, device="cuda").to(dtype) * 3
        tokens = torch.arange(70, device="cuda")
        whole, ids = log_probabilities(logits, tokens, 3)
        wanted = logits.double().log_softmax(-1).gather(1, tokens[:, None])
        assert (whole[:, :1] - wanted).abs().max() < 2e-5
        for first, last in ((0, 1), (5, 9), (69, 70), (0, 40)):
            part = log_probabilities(logits[first:last], tokens[first:last], 3)
            assert torch.equal(part[0], whole[first:last])
            assert torch.equal(part[1], ids[first:last])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("drafts", [None, "ngram"])
def test_networks_with_recurrent_layers_give_the_tokens_of_generate_on_a_gpu(kind, drafts):
    backend = backends.get_backend("triton")
    model = build_network(make_config(kind, ""), 1)
    model.network.to(backend.device)
    dense = [greedy_and_margin(model, prompt, 16)[0] for prompt in PROMPTS]
    config = EngineConfig(block_size=16, num_blocks=200, max_num_batched_tokens=11, drafts=drafts)
    engine = Engine(model, backend, config)
    done = engine.generate(PROMPTS, SamplingParams(max_tokens=16, ignore_eos=True))
    assert [c.request.output_tokens for c in done] == dense
    assert engine.stats.num_hit_tokens > 0


@functools.cache
def clear_kind(kind):
    """A tiny network of a kind on the GPU whose greedy choices are clear, and its tokens."""
    for seed in range(1, 20):
        model = build_network(make_config(kind, ""), seed)
        model.network.to(backends.get_backend("triton").device)
        dense = [greedy_and_margin(model, prompt, 16) for prompt in PROMPTS]
        if min(margin for _, margin in dense) > 1e-3:
            return model, [tokens for tokens, _ in dense]
    raise AssertionError("no clear network in 20")


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("kind", ["Qwen3_5TextConfig", "FalconH1Config"])
def test_steps_with_states_are_replayed_from_graphs(kind, compiles, monkeypatch):
    model, dense = clear_kind(kind)
    config = EngineConfig(
        num_blocks=300, block_size=16, max_num_batched_tokens=40, max_num_seqs=6, compile=compiles
    )
    engine = Engine(model, backends.get_backend("triton"), config)
    how = engine.prepare()
    assert how == f"{'compiled' if compiles else 'traced'}, 9 graphs"
    replayed, replay = [], CudaGraphs.replay
    monkeypatch.setattr(
        CudaGraphs, "replay", lambda *given: replayed.append(given[2].rows) or replay(*given)
    )
    for _ in range(2):  # the second time the prompts are hits
        replayed.clear()
        steps = engine.stats.num_steps
        done = engine.generate([*PROMPTS, PROMPTS[0]], SamplingParams(max_tokens=16))
        assert [c.request.output_tokens for c in done] == [*dense, dense[0]]
        assert len(replayed) == engine.stats.num_steps - steps  # also those with prompts
    replayed.clear()
    with compilations() as seen:
        three = engine.generate(PROMPTS, SamplingParams(max_tokens=16))
    assert [c.request.output_tokens for c in three] == dense
    assert 4 in replayed  # with a row to spare
    assert not seen
    assert engine.kv.num_free_blocks == engine.kv.num_usable_blocks


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_our_operators_compile_whole_for_arguments_of_any_strides(dtype):
    import_module("model.forward.batch_invariant")
    rows, weight = torch.ops.kvcore_rows, torch.randn(24, 32, device="cuda").to(dtype)
    wide = torch.randn(1, 12, 4, 64, device="cuda").to(dtype)
    calls = {
        "multiply": lambda x: rows.multiply(x, weight, None) * 2,
        "add_up": lambda x: rows.add_up(x, True) * 2,
    }
    for name, call in calls.items():
        for x in (wide[..., :32], wide[:, ::3, :, 16:48], wide[..., ::2].transpose(1, 2)):
            torch._dynamo.reset()
            got = torch.compile(call, fullgraph=True)(x)
            wanted = call(x)
            assert (got.shape, got.stride()) == (wanted.shape, wanted.stride()), name
            assert torch.equal(got, wanted), name


def test_states_that_the_backend_does_not_step_leave_a_network_without_graphs():
    model, dense = clear_kind("JambaConfig")
    config = EngineConfig(num_blocks=300, block_size=16, max_num_batched_tokens=40)
    engine = Engine(model, backends.get_backend("triton"), config)
    how = engine.prepare()
    assert how.startswith("eager (") or "no graphs: the backend has no operation" in how
    done = engine.generate(PROMPTS, SamplingParams(max_tokens=16))
    assert [c.request.output_tokens for c in done] == dense


@pytest.mark.parametrize(
    ("architecture", "compiles"),
    [*((name, False) for name in CONFIGS), ("qwen3", True), ("gemma2", True)],
)
def test_recorded_and_compiled_steps_give_the_tokens_of_generate(architecture, compiles):
    backend = backends.get_backend("triton")
    model, dense = clear_case(architecture, backend)
    config = EngineConfig(
        num_blocks=60, block_size=16, max_num_batched_tokens=40, max_num_seqs=6, compile=compiles
    )
    engine = Engine(model, backend, config)
    how = engine.prepare()
    if architecture == "gpt_oss":  # routes to experts by what it computes
        assert how.startswith("eager (")
    else:
        assert how == f"{'compiled' if compiles else 'traced'}, 9 graphs"
    for _ in range(2):  # the second time the prompts are hits
        done = engine.generate([*PROMPTS, PROMPTS[0]], SamplingParams(max_tokens=16))
        assert [c.request.output_tokens for c in done] == [*dense, dense[0]]
    alone = engine.generate(PROMPTS[2:], SamplingParams(max_tokens=16))
    assert [c.request.output_tokens for c in alone] == dense[2:]
    assert engine.kv.num_free_blocks == engine.kv.num_usable_blocks


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("kind", ["DeepseekV32Config", "GlmMoeDsaConfig"])
def test_steps_that_choose_tokens_by_an_index_are_replayed_from_graphs(kind, compiles):
    config = make_config(kind, "")
    config.index_topk, config.mlp_layer_types = 5, ["dense", "dense"]
    if kind == "GlmMoeDsaConfig":
        config.indexer_types = ["full", "shared"]
    backend = backends.get_backend("triton")
    model = build_network(config, seed=0)
    model.network.to(backend.device)
    dense = [greedy_and_margin(model, prompt, 16)[0] for prompt in PROMPTS]
    config = EngineConfig(
        num_blocks=300, block_size=16, max_num_batched_tokens=40, max_num_seqs=6, compile=compiles
    )
    engine = Engine(model, backend, config)
    assert engine.prepare() == f"{'compiled' if compiles else 'traced'}, 9 graphs"
    with compilations() as seen:
        for _ in range(2):  # the second time the prompts are hits
            done = engine.generate([*PROMPTS, PROMPTS[0]], SamplingParams(max_tokens=16))
            assert [c.request.output_tokens for c in done] == [*dense, dense[0]]
    assert not seen


@pytest.mark.parametrize("kind", ["DeepseekV4Config", "BloomConfig", "MptConfig"])
def test_compressed_keys_and_alibi_give_the_tokens_of_generate_on_a_gpu(kind):
    model, dense = clear_kind(kind)
    config = EngineConfig(num_blocks=300, block_size=2, max_num_batched_tokens=11)
    engine = Engine(model, backends.get_backend("triton"), config)
    engine.prepare()
    for _ in range(2):  # the second time the prompts are hits
        done = engine.generate(PROMPTS, SamplingParams(max_tokens=16, ignore_eos=True))
        assert [c.request.output_tokens for c in done] == dense
    assert engine.stats.num_hit_tokens > 0


@pytest.mark.parametrize("is_async", [False, True])
def test_draws_are_the_same_whenever_they_are_read_and_however_the_network_runs(is_async):
    backend = backends.get_backend("triton")
    model, _ = clear_case("llama", backend)
    params = [
        SamplingParams(max_tokens=16, temperature=1.0, seed=3),
        SamplingParams(max_tokens=9),
        SamplingParams(max_tokens=12, temperature=0.7, top_k=20, seed=4),
    ]
    tokens = []
    for prepares in (False, True):
        config = EngineConfig(num_blocks=60, block_size=16, async_scheduling=is_async)
        engine = Engine(model, backend, config)
        if prepares:
            engine.prepare()
        done = engine.generate(PROMPTS, params)
        tokens.append([c.request.output_tokens for c in done])
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("compiles", [False, True])
def test_experts_run_in_graphs_near_the_network_as_it_is(compiles):
    backend = backends.get_backend("triton")
    built = build("gpt_oss", 3)
    model = wrap_network("gpt_oss", built.network.to(backend.device, torch.bfloat16), built.codec)
    found = []
    for prepares in (False, True):
        config = EngineConfig(
            num_blocks=60, max_num_seqs=6, max_num_batched_tokens=40, compile=compiles
        )
        engine = Engine(model, backend, config)
        if prepares:
            assert engine.prepare() in ("traced, 9 graphs", "compiled, 9 graphs")
        done = engine.generate(PROMPTS, SamplingParams(max_tokens=2, logprobs=0))
        found.append([one.tokens[0].logprob for one in done])
    assert found[1] == pytest.approx(found[0], abs=0.2)


ASKED = [
    SamplingParams(max_tokens=4, ignore_eos=True),
    SamplingParams(max_tokens=5, ignore_eos=True, temperature=0.7),
    SamplingParams(max_tokens=6, ignore_eos=True, temperature=0.7, top_k=20, top_p=0.9),
    SamplingParams(max_tokens=6, ignore_eos=True, temperature=0.7, top_p=0.9, logprobs=2),
    SamplingParams(max_tokens=5, ignore_eos=True, temperature=0.7, top_k=100, min_p=0.1),
    SamplingParams(max_tokens=4, ignore_eos=True, repetition_penalty=1.2, logit_bias=((5, 1.0),)),
]


PREPARED = [
    ("qwen3", torch.float32, False, 600),
    ("qwen3", torch.bfloat16, True, 600),
    ("qwen3", torch.bfloat16, True, 4),  # no more than have pieces of their own
    ("gemma2", torch.bfloat16, True, 600),
]


def compiled_after_the_preparation(architecture, dtype, compiles, most_tokens):
    """The names of what requests of many kinds have had to wait for."""
    backend = backends.get_backend("triton")
    built = build(architecture)
    model = wrap_network(architecture, built.network.to(backend.device, dtype), built.codec)
    config = EngineConfig(
        num_blocks=400,
        max_num_seqs=min(20, most_tokens),
        max_num_batched_tokens=most_tokens,
        compile=compiles,
    )
    engine = Engine(model, backend, config)
    engine.prepare()
    with compilations() as seen:
        for size in (1, 3, 9, 20) if most_tokens > 20 else (1, 3):
            prompts = [[number + 1] * (5 + 12 * number) for number in range(size)]
            for shift in range(len(ASKED) if size < 9 else 1):
                params = [ASKED[(number + shift) % len(ASKED)] for number in range(size)]
                engine.generate(prompts, params)
    return [str(one) for one in seen]


def test_nothing_is_compiled_after_the_preparation():
    """Each in a process of its own: what another test has compiled there would not be missed."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(len(PREPARED), spawn, max_tasks_per_child=1) as pool:
        found = list(
            pool.map(compiled_after_the_preparation, *zip(*PREPARED, strict=True), timeout=500)
        )
    assert dict(zip(PREPARED, found, strict=True)) == {key: [] for key in PREPARED}


def test_a_compilation_is_counted():
    with warnings.catch_warnings(action="ignore"), compilations() as seen:  # the compiler's own
        torch.compile(lambda x: x + 1)(torch.ones(3, device="cuda"))
    assert seen


@pytest.mark.parametrize("swap_memory_bytes", [0, 1 << 24])
def test_preempted_blocks_come_back_to_the_gpu_computed_or_from_page_locked_memory(
    swap_memory_bytes,
):
    backend = backends.get_backend("triton")
    model, dense = clear_case("llama", backend)
    config = EngineConfig(num_blocks=14, block_size=4, swap_memory_bytes=swap_memory_bytes)
    engine = Engine(model, backend, config)
    done = engine.generate(PROMPTS, SamplingParams(max_tokens=16))
    assert [c.request.output_tokens for c in done] == dense
    assert engine.stats.num_preemptions > 0
    assert (engine.stats.num_loads > 0) == (swap_memory_bytes > 0)
    assert engine.kv.num_free_blocks == engine.kv.num_usable_blocks


def test_samples_that_fork_on_a_gpu_draw_what_they_draw_alone():
    backend = backends.get_backend("triton")
    model, _ = clear_case("gemma2", backend)
    params = SamplingParams(max_tokens=12, temperature=1.0, top_k=40, seed=3)
    tokens = []
    for sizes in ({}, {"max_num_seqs": 1}):
        engine = Engine(model, backend, EngineConfig(num_blocks=60, block_size=4, **sizes))
        requests = engine.submit(Submission(PROMPTS[0], replace(params, n=4)))
        while engine.has_unfinished:
            engine.step()
        assert engine.stats.num_forks == (0 if sizes else 3)
        tokens.append([request.output_tokens for request in requests])
    assert tokens[0] == tokens[1]
    assert len({tuple(sample) for sample in tokens[0]}) == 4


@pytest.mark.parametrize("rows", [0, 3])
def test_what_was_sent_is_done_when_it_is_read_even_if_nothing_was_drawn(rows):
    logits = torch.zeros(rows, 10, device="cuda")
    chooser = RequestSampler(
        10, logits.device, 0, Grammars(lambda: None, 10, frozenset(), EngineConfig())
    )
    requests = tuple(Request(number, [1], SamplingParams()) for number in range(rows))
    chooser.draw(logits, requests).read()  # what is loaded or allocated first may wait
    torch.cuda._sleep(1_000_000_000)
    drawn = chooser.draw(logits, requests)
    assert not torch.cuda.current_stream().query()
    assert drawn.read() == [0] * rows
    assert torch.cuda.current_stream().query()


@pytest.mark.parametrize("architecture", CONFIGS)
def test_logits_in_bfloat16_on_a_gpu_are_as_near_to_float32_as_dense_ones(architecture):
    paged, dense = bfloat16_errors(architecture, backends.get_backend("triton"), PROMPTS)
    assert paged <= 2 * dense


def test_the_cache_takes_its_share_of_what_the_largest_step_leaves():
    backend = backends.get_backend("triton")
    built = build("gemma2")
    model = wrap_network("gemma2", built.network.to(backend.device, torch.bfloat16), built.codec)
    config = EngineConfig(kv_memory_fraction=0.1, max_num_batched_tokens=4096)
    engine = Engine(model, backend, config)
    free, total = torch.cuda.mem_get_info()
    assert 0.05 * total < engine.memory.kv_bytes <= 0.1 * engine.memory.free_bytes
    assert engine.memory.free_bytes < total
    assert free + engine.memory.kv_bytes < total
    del engine
    with pytest.raises(InvalidArgumentError, match="max_num_batched_tokens: a step of 2000000000"):
        Engine(model, backend, EngineConfig(max_num_batched_tokens=2 * 10**9))


@triton.jit
def _double(source, target, size: tl.constexpr):
    numbers = tl.arange(0, size)
    tl.store(target + numbers, 2 * tl.load(source + numbers))


def test_a_kernel_may_be_used_first_in_a_capture():
    given = torch.arange(64.0, device="cuda")

    def compute():
        doubled = torch.empty_like(given)
        _double[(1,)](given, doubled, 64)
        square = torch.lgamma(doubled + 1).view(8, 8)
        return square @ square[:, :3]

    with GraphCapturer(given.device) as capturer:
        square = given.view(8, 8)
        first, _ = capturer.capture(lambda: square @ square, "a kind")  # it holds the pool
        graph, found = capturer.capture(compute, "a kind")
    first.replay()
    torch.testing.assert_close(found, compute())
    given += 1
    graph.replay()
    torch.testing.assert_close(found, compute())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_draws_are_recorded_in_graphs_and_are_the_cpus(dtype):
    cuts = ({}, {"top_k": 20, "top_p": 0.95}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 64})
    logits = torch.randn(7, 5000, generator=torch.Generator().manual_seed(2)).to(dtype) * 3
    here, draws = logits.cuda(), DrawGraphs(8, torch.device("cuda"))
    place = Place(7, is_single=True)
    with GraphCapturer(here.device) as capturer:
        draws.capture(place, here, here.max(dim=-1), capturer)
    for number in range(20):
        how = [cuts[(number + row) % (1 + number % 5)] for row in range(7)]
        temperatures = [0.0 if row == number % 8 else 0.8 for row in range(7)]
        params = [
            SamplingParams(temperature=t, **own) for t, own in zip(temperatures, how, strict=True)
        ]
        alone = [sampler.Draw(its, number, row) for row, its in enumerate(params)]
        terms = row_terms(params, 5000)
        numbers = np.array([alone[row].uniform() for row in terms.drawing])
        found = draws.choose(place, terms, numbers)
        assert found.tolist() == sampler.sample(logits, alone)


def test_the_kernels_of_a_draw_give_on_a_gpu_what_operators_give():
    assert check("cuda", 60, GpuPasses()) > 200


def test_the_kernels_of_few_rows_give_on_a_gpu_what_operators_give():
    dtypes, kinds = (torch.float16, torch.bfloat16), few_rows_check.IN_LAYERS
    assert few_rows_check.check("cuda", dtypes, kinds=kinds) == 48
    assert few_rows_check.check_heads("cuda", dtypes) == 24
    bug = few_rows_check.without_the_last
    with pytest.raises(AssertionError):
        few_rows_check.check("cuda", dtypes, bug, kinds)


@pytest.mark.parametrize("architecture", ["qwen3", "qwen2", "gemma2"])
def test_steps_of_few_tokens_are_as_near_to_the_network_as_those_of_many(architecture, monkeypatch):
    monkeypatch.setattr(piecewise, "LEAST_WEIGHT", 0)
    backend = backends.get_backend("triton")
    built = build(architecture, 3)
    model = wrap_network(
        architecture, built.network.to(backend.device, torch.bfloat16), built.codec
    )
    found = []
    for compiles in (False, True):
        config = EngineConfig(
            num_blocks=60, max_num_seqs=3, max_num_batched_tokens=40, compile=compiles
        )
        engine = Engine(model, backend, config)
        engine.prepare()
        assert getattr(engine.network._traced[False], "has_few_row_pieces", False) == compiles
        params = SamplingParams(max_tokens=6, logprobs=0, ignore_eos=True)
        done = engine.generate(PROMPTS, params)
        found.append([[(token.token_id, token.logprob) for token in one.tokens] for one in done])
    compared = 0
    for wanted, got in zip(*found, strict=True):
        for (token, chance), (own, own_chance) in zip(wanted, got, strict=True):
            assert own_chance == pytest.approx(chance, abs=0.2)
            compared += 1
            if own != token:  # two were as likely, and what follows is another text
                break
    assert compared >= 6


def test_draws_on_a_gpu_repeat_with_their_seed():
    backend = backends.get_backend("triton")
    built = build("qwen3")
    model = wrap_network("qwen3", built.network.to(backend.device, torch.bfloat16), built.codec)
    params = [SamplingParams(max_tokens=12, temperature=1.0, seed=seed) for seed in (1, 1, 2)]
    engine = Engine(model, backend, EngineConfig(num_blocks=30, enable_prefix_caching=False))
    first, twin, other = (
        done.request.output_tokens for done in engine.generate([PROMPTS[0]] * 3, params)
    )
    assert first == twin != other


def last_logits(model, tokens):
    """What the dense network says behind a text, in float32."""
    network = model.network
    current = network.config._attn_implementation
    network.set_attn_implementation(model.dense_implementation)
    with torch.inference_mode():
        logits = network(torch.tensor([tokens], device=network.device)).logits[0, -1].float()
    network.set_attn_implementation(current)
    return logits


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("how", ["ngram", "draft model"])
def test_with_drafts_a_text_in_bfloat16_changes_only_where_two_tokens_are_as_likely(how, compiles):
    """One token a sequence and several are other kernels, which round otherwise."""
    backend = backends.get_backend("triton")
    built = [build("llama", 5) for _ in range(3)]
    model, draft, exact = (
        wrap_network("llama", one.network.to(backend.device, torch.bfloat16), one.codec)
        for one in built
    )
    exact.network.float()  # the same weights, computed without rounding
    sizes = {"num_blocks": 200, "max_num_seqs": 8, "max_num_batched_tokens": 80}
    sizes |= {"compile": compiles}
    guess = {"drafts": "ngram"} if how == "ngram" else {"draft_model": "twin"}
    prompts = [[number + 1, 2, 3] * 4 for number in range(8)]
    texts = []
    for drafts in ({}, guess):
        engine = Engine(with_draft(model, draft), backend, EngineConfig(**sizes, **drafts))
        engine.prepare()
        done = engine.generate(prompts, SamplingParams(max_tokens=48))
        texts.append([list(one.request.tokens) for one in done])
        assert bool(drafts) == (engine.stats.num_accepted_tokens > 0)
    differ = 0
    for plain, drafted in zip(*texts, strict=True):
        places = [place for place in range(len(plain)) if plain[place] != drafted[place]]
        if places:
            differ += 1
            logits = last_logits(exact, plain[: places[0]])
            rounding = float((last_logits(model, plain[: places[0]]) - logits).abs().max())
            leads = [float(logits.max() - logits[text[places[0]]]) for text in (plain, drafted)]
            sys.stdout.write(f"{how}: behind the best by {leads}, rounding {rounding}\n")
            # Each of two logits is off by twice as much as the dense network's, at most.
            assert max(leads) <= 4 * rounding
    sys.stdout.write(f"{how}, compiled {compiles}: {differ} of {len(prompts)} texts differ\n")


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3"])
@pytest.mark.parametrize("prepares", [False, True])
def test_a_twin_of_the_network_guesses_right_on_a_gpu_and_nothing_is_compiled(
    architecture, prepares
):
    backend = backends.get_backend("triton")
    model, dense = clear_case(architecture, backend)
    for seed in range(20):  # the same network once more
        twin = build(architecture, seed)
        if torch.equal(next(twin.network.parameters()), next(model.network.parameters()).cpu()):
            break
    twin = wrap_network("twin", twin.network.to(backend.device), twin.codec)
    config = EngineConfig(
        num_blocks=80, max_num_seqs=6, max_num_batched_tokens=64, draft_model="t", draft_tokens=3
    )
    engine = Engine(with_draft(model, twin), backend, config)
    if prepares:
        assert engine.prepare().count("graphs") == 2
    with compilations() as seen:
        for _ in range(2):
            done = engine.generate([*PROMPTS, PROMPTS[0]], SamplingParams(max_tokens=16))
            assert [c.request.output_tokens for c in done] == [*dense, dense[0]]
    assert seen == [] or not prepares
    assert engine.stats.num_accepted_tokens == engine.stats.num_draft_tokens > 0
    assert engine.draft.kv.num_free_blocks == engine.draft.kv.num_usable_blocks


def test_a_full_step_with_drafts_is_replayed_and_its_memory_is_counted():
    backend = backends.get_backend("triton")
    built = build("qwen3")
    model = wrap_network("qwen3", built.network.to(backend.device), built.codec)
    sizes = {"max_num_seqs": 40, "max_num_batched_tokens": 512, "kv_memory_fraction": 0.02}
    config = EngineConfig(**sizes, drafts="ngram", draft_tokens=8)
    engine = Engine(model, backend, config)
    engine.prepare()
    engine.network.logits = None  # whatever runs now is a replay
    prompts = [[number + 1, 2, 3] * 6 for number in range(40)]
    requests = engine.add_all(prompts, SamplingParams(max_tokens=40, ignore_eos=True))
    most = 0
    while engine.has_unfinished:
        before = engine.stats.num_draft_tokens
        engine.step()
        most = max(most, engine.stats.num_draft_tokens - before)
    assert all(request.num_output_tokens == 40 for request in requests)
    assert most > 24  # with the 40 that are drawn anyway more rows than smaller buckets have
    peaks = []
    for guess in (None, "ngram"):
        network = PagedNetwork(model, backend)
        limits = EngineConfig(max_num_seqs=64, max_num_batched_tokens=512, drafts=guess)
        network.allocate(1, limits.block_size)
        peaks.append(warm_up._peak_bytes(network, limits))
        network.free()
    # 320 rows in place of 64, of 320 float32 logits each, and what a draw makes of them
    assert peaks[1] > peaks[0] + 256 * 320 * 4


def test_a_cache_of_float8_changes_logits_little_on_a_gpu():
    backend = backends.get_backend("triton")
    for architecture in ("llama", "qwen3", "gemma2"):
        built = build(architecture, 5)
        model = wrap_network(
            architecture, built.network.to(backend.device, torch.bfloat16), built.codec
        )
        rows = {}
        for kv_dtype in ("auto", "fp8"):
            config = EngineConfig(num_blocks=60, max_num_batched_tokens=64, kv_dtype=kv_dtype)
            engine = Engine(model, backend, config)
            done = engine.generate(PROMPTS, SamplingParams(max_tokens=1, logprobs=20))
            again = engine.generate(PROMPTS, SamplingParams(max_tokens=1, logprobs=20))
            rows[kv_dtype] = [dict(one.tokens[0].top_logprobs) for one in (*done, *again)]
            rows[kv_dtype, "bytes"] = engine.network.layout.token_bytes
        assert 2 * rows["fp8", "bytes"] == rows["auto", "bytes"]
        apart = [
            abs(value - other[token])
            for one, other in zip(rows["auto"], rows["fp8"], strict=True)
            for token, value in one.items()
            if token in other
        ]
        far, mean = max(apart), sum(apart) / len(apart)
        sys.stdout.write(f"{architecture}: log-probabilities apart by {far:.3f}, {mean:.3f} mean\n")
        assert 0 < far < 1.0
