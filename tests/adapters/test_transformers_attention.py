import sys

import pytest
import torch
from transformers import (
    CompileConfig,
    ContinuousBatchingConfig,
    GptOssConfig,
    GptOssForCausalLM,
)
from transformers.generation.continuous_batching import initialization

import backends
import kvcore
from kvcore.adapters.transformers import install, uninstall
from kvcore.adapters.transformers.attention import IMPLEMENTATION, Attention
from tests.adapters.test_transformers_batching import at_rest
from tests.adapters.tiny import SIZES, WINDOW, draw_tokens, draw_weights, gemma_2, network
from tests.adapters.transformers_runs import (
    Run,
    both,
    greedy,
    prompts_that_share,
    sizes,
    texts_that_are_right,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # Transformers' own, of its next versions
]


@pytest.mark.parametrize(
    ("kind", "num_blocks"), [("full", 200), ("full", 16), ("hybrid", 200), ("hybrid", 8)]
)
def test_the_tokens_are_those_of_the_stock_attention(kind, num_blocks):
    stock, ours = both(kind, prompts_that_share(14), num_blocks, backend="numba")
    assert ours.cache.attention.backend.name == "numba"
    assert ours.tokens == stock.tokens
    assert bool(ours.starved) == (num_blocks == 16)  # then some gave way
    assert ours.cache.kv.stats().num_hit_tokens
    assert at_rest(ours.cache)


@pytest.mark.parametrize("kind", ["full", "hybrid"])
def test_forked_requests_write_the_tokens_of_the_stock_attention(kind):
    prompts = prompts_that_share(5)
    stock, ours = both(kind, prompts, 30, generation=greedy(3), backend="numba")
    assert ours.tokens == stock.tokens
    assert len(ours.tokens) == 15


def gpt_oss():
    """Has sinks."""
    layers = ["sliding_attention", "full_attention"]
    more = {"sliding_window": WINDOW, "layer_types": layers, "num_local_experts": 2}
    more["num_experts_per_tok"] = 1
    return GptOssForCausalLM(GptOssConfig(**SIZES, num_hidden_layers=2, **more))


def test_soft_caps_are_honoured_where_the_stock_attention_passes_over_them():
    """Transformers' continuous batching writes other texts for Gemma 2 than its `generate`."""
    prompts = prompts_that_share(8)
    stock, ours, with_kernels = texts_that_are_right(gemma_2(1.5), prompts)
    assert max(stock, ours) < 8
    assert with_kernels == 8
    assert texts_that_are_right(gemma_2(None), prompts, ["stock"]) == [8]  # it is the cap


def test_sinks_are_those_of_plain_generate():
    model = draw_weights(gpt_oss())
    model.set_attn_implementation("eager")
    assert texts_that_are_right(model, prompts_that_share(4), ["numba"]) == [4]


def test_a_wrong_table_shows_in_the_tokens(monkeypatch):
    table = Attention._table
    monkeypatch.setattr(Attention, "_table", lambda told, group: table(told, group).flip(0))
    stock, ours = both("full", prompts_that_share(6), 60, backend="numba")
    assert ours.tokens != stock.tokens


def test_the_model_has_its_own_attention_again_when_the_manager_has_stopped():
    model = network("full")
    own = model.config._attn_implementation
    install(model, backend="numba")
    config = sizes(60)
    manager = model.init_continuous_batching(greedy(), config)
    assert model.config._attn_implementation == IMPLEMENTATION
    model.init_continuous_batching(greedy(), config)  # the first one was never stopped
    assert config.auto_switch_to_flash  # the caller's is left as it was
    manager.start()
    manager.stop()
    assert model.config._attn_implementation == own
    model.init_continuous_batching(greedy(), sizes(60))
    uninstall(model)
    assert model.config._attn_implementation == own


def test_installed_again_while_a_manager_was_never_stopped_it_still_knows_the_own_attention():
    model = network("full")
    own = model.config._attn_implementation
    for _ in range(3):
        install(model, backend="numba")
        model.init_continuous_batching(greedy(), sizes(60))
        assert model.config._attn_implementation == IMPLEMENTATION
    with pytest.raises(backends.UnknownBackendError):
        install(model, backend="numbat")
    assert model.config._attn_implementation == IMPLEMENTATION  # a refusal changes nothing
    uninstall(model)
    assert model.config._attn_implementation == own


def test_a_kept_manager_attends_with_the_backend_in_the_next_call_too(monkeypatch):
    called = []
    attend = Attention.attend
    monkeypatch.setattr(Attention, "attend", lambda *args: called.append(args[1]) or attend(*args))
    model = network("full")
    install(model, backend="numba")
    found = []
    for _ in range(2):
        called.clear()
        made = model.generate_batch(
            [draw_tokens(0, 17)],
            generation_config=greedy(),
            continuous_batching_config=sizes(60),
            persistent_manager=True,
        )
        found.append([output.generated_tokens for output in made.values()])
        assert set(called) == {0, 1}
    cache = model._cached_continuous_batching_manager.batch_processor.cache
    assert cache.kv.stats().num_hit_tokens == 16
    assert found[0] == found[1]
    uninstall(model)


def test_what_cannot_run_here_is_refused_before_anything_is_installed():
    model = network("full")
    with pytest.raises(backends.UnknownBackendError, match="numbat"):
        install(model, backend="numbat")
    if not torch.cuda.is_available():
        with pytest.raises(backends.BackendUnavailableError, match="triton"):
            install(model, backend="triton")
    assert not hasattr(model, "_kvcore_attention")


@pytest.mark.parametrize(
    ("field", "value"),
    [("use_cuda_graph", True), ("varlen_compile_config", True), ("default_compile_level", 1)],
)
def test_recorded_and_compiled_passes_are_refused(field, value):
    model = network("full")
    install(model, backend="numba")
    config = ContinuousBatchingConfig(num_blocks=60, page_size=4)
    setattr(config, field, value)
    with pytest.raises(kvcore.InvalidArgumentError, match=f"{field}: wanted none .* got {value}"):
        model.init_continuous_batching(greedy(), config)


@pytest.fixture
def like_flash_on_cuda(monkeypatch):
    """Transformers may choose block tables and graphs, as with flash attention on a GPU."""
    monkeypatch.setattr(initialization, "get_accelerator_graph_name", lambda: "cuda")
    monkeypatch.setattr(initialization, "ensure_decode_fast_path_is_available", lambda *_: None)


@pytest.mark.parametrize("more", [{}, {"q_padding_interval_size": 8}])
def test_what_flash_attention_would_turn_on_stays_off(like_flash_on_cuda, more):
    model = network("full")
    prompts = prompts_that_share(4)
    install(model, backend="numba")
    ours = Run(model, prompts, sizes(60, **more))
    uninstall(model)
    off = sizes(60, use_cuda_graph=False, max_blocks_per_request=0)
    assert ours.tokens == Run(model, prompts, off).tokens


def test_what_transformers_resolves_to_is_refused_by_name_too(like_flash_on_cuda):
    model = network("full")
    own = model.config._attn_implementation
    install(model, backend="numba")
    for before in (own, IMPLEMENTATION):
        with pytest.raises(
            kvcore.InvalidArgumentError, match=r"max_blocks_per_request: wanted none .* got 32"
        ):
            model.init_continuous_batching(greedy(), sizes(60, max_blocks_per_request=32))
        assert model.config._attn_implementation == before
        model.init_continuous_batching(greedy(), sizes(60))
    uninstall(model)


def test_a_compiled_pass_of_the_models_own_configuration_is_refused():
    model = network("full")
    own = model.config._attn_implementation
    model.config.compile_config = CompileConfig()
    install(model, backend="numba")
    with pytest.raises(kvcore.InvalidArgumentError, match="varlen_compile_config: wanted none"):
        model.init_continuous_batching(greedy(), sizes(60))
    assert model.config._attn_implementation == own


def test_a_call_that_is_no_batch_is_refused_by_name():
    model = network("full")
    install(model, backend="numba")
    manager = model.init_continuous_batching(greedy(), sizes(60))
    with pytest.raises(kvcore.InvalidArgumentError, match="Qwen3Attention is called without one"):
        model(torch.tensor([[1, 2, 3]]))
    manager.destroy()
    uninstall(model)
    model(torch.tensor([[1, 2, 3]]))


def test_without_the_package_backends_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "backends", None)
    monkeypatch.delitem(sys.modules, "kvcore.adapters.transformers.attention")
    with pytest.raises(kvcore.InvalidArgumentError, match=r"not installed .*'numba'"):
        install(network("full"), backend="numba")
