"""LoRA adapters on a GPU: captured and compiled steps give what eager ones give, and how fast."""

import time

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import backends
import kvcore
from model import EngineConfig, SamplingParams, Submission
from model.compile.joined_products import expands_for
from model.engine import Engine
from model.forward.cuda_graphs import CudaGraphs
from model.load.loader import wrap_network
from tests.model import lora_check
from tests.model.networks import ByteCodec, build, random_adapter
from tests.model.test_gpu import OF_THE_COMPILER, PROMPTS, compilations

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
    OF_THE_COMPILER,
]

NAMES = (None, "a", "b", "a", None, "b")
TEXTS = [*PROMPTS, *PROMPTS]


def outputs(engine, names, texts, params):
    """The tokens of each text, all computed together."""
    requests = [
        engine.submit(Submission(text, params, namespace=kvcore.Namespace(lora_name=name)))[0]
        for text, name in zip(texts, names, strict=True)
    ]
    while engine.has_unfinished:
        engine.step()
    return [request.output_tokens for request in requests]


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("architecture", ["qwen3", "gemma2", "llama"])
def test_adapters_loaded_after_the_capture_are_in_its_graphs(architecture, compiles, monkeypatch):
    backend = backends.get_backend("triton")
    built = build(architecture, 5)
    model = wrap_network(architecture, built.network.to(backend.device), built.codec)
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    sizes = {"num_blocks": 200, "block_size": 16, "max_num_batched_tokens": 40, "max_num_seqs": 6}
    found, replayed, replay = [], [], CudaGraphs.replay
    monkeypatch.setattr(
        CudaGraphs, "replay", lambda *given: replayed.append(given[2]) or replay(*given)
    )
    for is_eager in (True, False):
        how = {"eager": is_eager, "compile": compiles and not is_eager}
        engine = Engine(model, backend, EngineConfig(**sizes, **how, max_loras=2, max_lora_rank=4))
        prepared = engine.prepare()
        if not is_eager:
            assert prepared == f"{'compiled' if compiles else 'traced'}, 18 graphs"
        for seed, name in enumerate(("a", "b")):
            engine.add_adapter(random_adapter(model.network, name, seed))
        replayed.clear()
        with compilations() as seen:
            mixed = [outputs(engine, NAMES, TEXTS, params) for _ in range(2)]  # then with hits
        assert is_eager or not seen
        assert {bucket.adapted for bucket in replayed} == (set() if is_eager else {True})
        replayed.clear()
        plain = outputs(engine, (None,) * 6, TEXTS, params)
        assert {bucket.adapted for bucket in replayed} == (set() if is_eager else {False})
        engine.remove_adapter("a")
        engine.add_adapter(random_adapter(model.network, "c", 2))  # in the same slot
        again = outputs(engine, ("c", "b", None), PROMPTS, params)
        found.append((mixed, plain, again))
    assert found[0] == found[1]
    mixed, plain, again = found[0]
    assert [mixed[0][number] for number in (0, 4)] == [plain[number] for number in (0, 4)]
    assert mixed[0][1] != plain[1]
    assert again[0] != mixed[0][3]


def test_what_adapters_add_is_right_on_a_gpu():
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    assert lora_check.check("cuda", dtypes) == 30
    with pytest.raises(AssertionError):
        lora_check.check("cuda", dtypes, lora_check.of_all_slots)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("architecture", ["qwen3", "qwen2", "gemma2", "llama"])
def test_pieces_call_what_adapters_add_once_for_each_product(architecture, dtype):
    device = backends.get_backend("triton").device
    counts = (7, 64, 300, 1000)  # few rows and many
    lora_check.check_network(architecture, expands_for(device), device, dtype, counts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_batch_invariant_a_request_has_the_same_tokens_beside_other_adapters(dtype):
    backend = backends.get_backend("triton")
    built = build("qwen3", 5)
    model = wrap_network("qwen3", built.network.to(backend.device, dtype), built.codec)
    params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=1.0, seed=3)

    def engine_with_adapters():
        config = EngineConfig(num_blocks=200, max_loras=2, batch_invariant=True)
        engine = Engine(model, backend, config)
        for seed, name in enumerate(("a", "b")):
            engine.add_adapter(random_adapter(model.network, name, seed))
        return engine

    together = outputs(engine_with_adapters(), NAMES, TEXTS, params)
    alone = [
        outputs(engine_with_adapters(), [name], [text], params)[0]
        for name, text in zip(NAMES, TEXTS, strict=True)
    ]
    assert together == alone


def decode_speed(engine, names, texts, params, num_steps=200):
    """Tokens per second of steps in which all requests decode."""
    for text, name in zip(texts, names, strict=True):
        engine.submit(Submission(text, params, namespace=kvcore.Namespace(lora_name=name)))
    for _ in range(6):  # the prompts, and first tokens
        engine.step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(num_steps):
        engine.step()
    torch.cuda.synchronize()
    speed = len(texts) * num_steps / (time.perf_counter() - start)
    while engine.has_unfinished:
        engine.step()
    return speed


def test_steps_with_eight_adapters_take_little_more_time(capsys):
    """Prints tokens per second while 64 requests decode: without adapters, with 8, eagerly too."""
    backend = backends.get_backend("triton")
    config = Qwen3Config(
        vocab_size=151_936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
        eos_token_id=None, bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(backend.device):
        network = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model = wrap_network("qwen3", network, ByteCodec())
    texts = [[100 + number, *range(32)] for number in range(64)]
    params, speeds = SamplingParams(max_tokens=256, ignore_eos=True), {}
    for how in ({"compile": True}, {}, {"eager": True}):
        sizes = {"max_num_seqs": 64, "max_loras": 8, "max_lora_rank": 16, "num_blocks": 3000}
        engine = Engine(model, backend, EngineConfig(**sizes, **how))
        engine.prepare()
        for number in range(8):
            engine.add_adapter(random_adapter(network, f"a{number}", number, 16, 0.02))
        kinds = {"none": [None] * 64, "8": [f"a{number % 8}" for number in range(64)]}
        for rounds in range(3):  # in turn; the first is a warm-up
            for kind, names in kinds.items():
                speed = decode_speed(engine, names, texts, params)
                mode = next(iter(how), "traced")
                if rounds:
                    speeds[mode, kind] = max(speed, speeds.get((mode, kind), 0))
    with capsys.disabled():
        for (mode, kind), speed in speeds.items():
            print(f"{mode}, adapters: {kind}: {speed:,.0f} tokens/s")  # noqa: T201
    assert speeds["compile", "8"] > 0.8 * speeds["compile", "none"]
    assert speeds["traced", "8"] > speeds["eager", "8"]
