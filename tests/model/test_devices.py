"""What holds on a CPU and on a GPU, where the same steps and draws are recorded."""

import functools
import importlib

import pytest
import torch

import backends
from model import EngineConfig, SamplingParams
from model.attention.shared_prefix import Worth
from model.engine import Engine
from model.forward.cuda_graphs import CudaGraphs
from model.forward.network import PagedNetwork
from model.load.loader import wrap_network
from model.sample.draw_graphs import DrawGraphs
from model.sample.sampler import Draw, sample, stream_of
from tests.model import sampling_reference as reference
from tests.model.forward.test_cuda_graphs import noting_batches
from tests.model.networks import CONFIGS, build, greedy_and_margin
from tests.model.tiny_configs import make_config
from tests.model.walk import build_network

GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]


@pytest.fixture(params=["numba", pytest.param("triton", marks=GPU)])
def backend(request):
    return backends.get_backend(request.param)


def network_of(architecture, seed, device, dtype=torch.float32):
    if architecture in CONFIGS:
        built = build(architecture, seed)
    else:
        built = build_network(make_config(architecture, ""), seed)
    return wrap_network(architecture, built.network.to(device, dtype), built.codec)


@functools.cache
def clear_case(architecture, device, prompts, max_tokens, dtype=torch.float32, lead=1e-3):
    """A network whose greedy choices are clear, and its dense tokens."""
    for seed in range(100):
        model = network_of(architecture, seed, device, dtype)
        dense = [greedy_and_margin(model, prompt, max_tokens) for prompt in prompts]
        if min(margin for _, margin in dense) > lead:
            return model, [tokens for tokens, _ in dense]
    raise AssertionError("no clear network in 100")


def prepared(engine):
    """The engine, with its steps recorded where there is a GPU."""
    how = engine.prepare()
    if engine.network.device.type == "cuda":
        assert how.endswith("graphs"), how
    return engine


def tokens_of(done):
    return [one.request.output_tokens for one in done]


BEGINNING = tuple(range(40, 71))
SHARING = tuple((*BEGINNING, 7 + 3 * number, 9) for number in range(4))


@pytest.fixture
def shares_from_the_first_block(monkeypatch):
    def worth(network):
        return tuple(None if window else Worth(2, 0, 0, 1) for window in network.layout.windows)

    monkeypatch.setattr(PagedNetwork, "shared_worth", worth)


@pytest.fixture
def replayed(monkeypatch):
    """The buckets of the steps that are replayed."""
    buckets, replay = [], CudaGraphs.replay

    def noting(graphs, step, bucket):
        buckets.append(bucket)
        return replay(graphs, step, bucket)

    monkeypatch.setattr(CudaGraphs, "replay", noting)
    return buckets


def prefixes_read(backend, monkeypatch):
    """What was read once for all sequences of a recorded step."""
    read = []
    if backend.name == "triton":
        cascade = importlib.import_module("backends.triton_gpu.decode.cascade")
        attend = cascade.attend_prefix

        def noting(*given):
            if given[-1].now is not None:  # as steps that are recorded tell it; a warm-up does not
                read.append(given[-1])
            return attend(*given)

        monkeypatch.setattr(cascade, "attend_prefix", noting)
    return read


@pytest.mark.parametrize("architecture", ["qwen3", "gemma2"])
def test_a_shared_beginning_is_told_in_every_step_and_changes_no_token(
    backend, architecture, shares_from_the_first_block, replayed, monkeypatch
):
    # In float16, because queries in float32 take kernels that know of no shared prefix.
    model, dense = clear_case(architecture, backend.device, SHARING, 7, torch.float16, 0.04)
    config = EngineConfig(num_blocks=120, block_size=4, max_num_seqs=6, max_num_batched_tokens=64)
    read = prefixes_read(backend, monkeypatch)
    engine = prepared(Engine(model, backend, config))
    assert read or backend.device.type == "cpu"
    replayed.clear()  # by requests on trial
    params = [SamplingParams(max_tokens=7 - number) for number in range(4)]
    engine.generate([BEGINNING], SamplingParams(max_tokens=1))
    with noting_batches(engine.network) as batches:
        done = engine.generate(SHARING, params)
    wanted = [tokens[: 7 - number] for number, tokens in enumerate(dense)]
    assert tokens_of(done) == wanted
    assert engine.stats.num_hit_tokens > 0
    told = [bucket for bucket in replayed if bucket.shares]
    if backend.device.type == "cuda":
        assert len(told) >= 3  # and no step of one token each was launched from Python
        assert not any(batch.max_query_len == 1 for batch in batches)
    else:
        assert sum(batch.shared_prefix is not None for batch in batches) >= 3


NOISE = torch.randn(97, 320, generator=torch.Generator().manual_seed(4)) * 2
MIXED = [
    SamplingParams(max_tokens=14),
    SamplingParams(max_tokens=14, temperature=0.8, top_k=20, top_p=0.9, seed=1),
    SamplingParams(max_tokens=12, repetition_penalty=1.6, presence_penalty=0.7),
    SamplingParams(max_tokens=14, temperature=0.8, frequency_penalty=0.9, top_p=0.95, seed=2),
    SamplingParams(max_tokens=9, temperature=1.0, top_k=100, seed=3),
    SamplingParams(max_tokens=14, temperature=1.0, logit_bias=((5, 3.0),), min_p=0.1, seed=4),
]


def wanted_of(prompt, params):
    """The tokens of a request by the reference, where logits come from `NOISE`."""
    text = list(prompt)
    while len(text) < len(prompt) + params.max_tokens:
        logits = NOISE[(text[-1] * 31 + (len(text) - 1) * 7) % 97].tolist()
        output = text[len(prompt) :]
        changed = torch.tensor([reference.penalised(logits, params, prompt, output)])
        draw = None
        if not params.is_greedy:
            draw = Draw(params, stream_of(params.seed, 0, 0), len(output))
        text += sample(changed, [draw])
    return text[len(prompt) :]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("asked", [MIXED, MIXED[2:], MIXED[:2]], ids=["mixed", "apart", "plain"])
def test_penalties_beside_recorded_draws_are_those_of_the_reference(
    backend, is_async, asked, replayed, monkeypatch
):
    noise = NOISE.to(backend.device)

    def hashed_logits(step):
        rows = step.logit_rows
        tokens, positions = step.input_ids[0, rows], step.position_ids[0, rows]
        return noise[(tokens * 31 + positions * 7) % 97]

    drawn, choose = [], DrawGraphs.choose

    def noting(graphs, place, terms, numbers):
        drawn.append(terms)
        return choose(graphs, place, terms, numbers)

    monkeypatch.setattr(DrawGraphs, "choose", noting)
    model = network_of("qwen3", 0, backend.device)
    sizes = {"max_num_seqs": 7, "max_num_batched_tokens": 40, "async_scheduling": is_async}
    engine = Engine(model, backend, EngineConfig(num_blocks=90, block_size=4, **sizes))
    engine.network.logits = hashed_logits
    prepared(engine)
    drawn.clear()  # for requests on trial
    replayed.clear()
    prompts = [[3 + number, 9, 3 + number] for number in range(len(asked))]
    done = engine.generate(prompts, asked)
    wanted = [wanted_of(*both) for both in zip(prompts, asked, strict=True)]
    assert tokens_of(done) == wanted
    assert bool(replayed) == (backend.device.type == "cuda")
    assert bool(drawn) == (backend.device.type == "cuda" and any(how in MIXED[:2] for how in asked))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("architecture", ["DeepseekV3Config", "DeepseekV2Config"])
def test_latents_are_cached_and_the_tokens_are_those_of_generate(backend, architecture):
    prompts = (tuple(range(3, 30)), (*range(3, 22), 7), (5, 6, 40))
    model, dense = clear_case(architecture, backend.device, prompts, 8)
    config = EngineConfig(num_blocks=80, block_size=4, max_num_seqs=4, max_num_batched_tokens=24)
    engine = Engine(model, backend, config)
    engine.prepare()
    assert all(layer.slot.is_latent for layer in engine.network.layout.layers)
    for _ in range(2):  # the second time the prompts are hits
        assert tokens_of(engine.generate(prompts, SamplingParams(max_tokens=8))) == dense
    assert engine.kv.num_free_blocks == engine.kv.num_usable_blocks


@pytest.mark.parametrize("architecture", ["gemma2", "gpt_oss"])
def test_blocks_of_layers_with_and_without_windows_come_back_from_the_host(backend, architecture):
    prompts = (tuple(range(40, 61)), (*range(40, 61), 7, 8, 9), (200, 100, 5))
    model, dense = clear_case(architecture, backend.device, prompts, 16)
    config = EngineConfig(num_blocks=22, block_size=4, swap_memory_bytes=1 << 20)
    engine = Engine(model, backend, config)
    engine.prepare()
    assert len(engine.kv.groups) == 2
    assert tokens_of(engine.generate(prompts, SamplingParams(max_tokens=16))) == dense
    assert engine.stats.num_swaps > 0
    assert engine.stats.num_loads > 0
    assert engine.kv.num_free_blocks == engine.kv.num_usable_blocks
