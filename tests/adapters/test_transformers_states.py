"""Models with recurrent layers in continuous batching: the tokens are those of `generate`."""

import functools

import pytest
import torch

import kvcore
from kvcore.adapters.recurrent import Run as Rows
from kvcore.adapters.recurrent import StateStep, is_divided
from kvcore.adapters.transformers import KVCoreCache, install, states, uninstall
from kvcore.adapters.transformers.states import States
from tests.adapters.tiny import draw_tokens, recurrent
from tests.adapters.transformers_runs import Run, greedy, sizes, texts_alone

KINDS = ("Qwen3_5", "Lfm2", "FalconH1", "Jamba")
"""Gated delta attention behind an encoder of images, a convolution alone, state and attention in
one layer, and a module that continues from a state token by token."""

SMALL = {"FalconH1": 12} | dict.fromkeys(("Qwen3_5", "Lfm2", "Jamba"), 6)
"""Pools, in blocks of keys and values of all layers, in which not all requests fit at once."""

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # Transformers' own, of its next versions
]


def longer(num_return_sequences=1):
    made = greedy(num_return_sequences)
    made.max_new_tokens = 20
    return made


@functools.cache
def case(kind):
    """A model, and what `generate` writes for each of some prompts with common beginnings."""
    model, base = recurrent(kind), draw_tokens(1, 60)
    prompts = [
        base[:shared] + draw_tokens(shared + own, own)
        for shared, own in ((60, 3), (40, 14), (60, 19), (20, 16), (60, 3), (40, 1))
    ]
    return model, prompts, texts_alone(model, prompts, longer())


def run(kind, num_blocks=100, generation=None, backend=None, **more):
    """A run with states in blocks of 16 tokens, whose every text was compared."""
    model, prompts, wanted = case(kind)
    install(model, backend=backend)
    config = sizes(num_blocks, **more)
    config.page_size = 16
    made = Run(model, prompts, config, generation or longer())
    for request_id, text in made.tokens.items():
        number = made.request_ids.index(request_id.partition("__child")[0])
        assert text == wanted[number]
    kvcore.check(made.cache.kv)
    assert not made.cache.sequences
    assert made.cache.kv.num_free_blocks == made.cache.kv.num_usable_blocks
    return made


@pytest.mark.parametrize(
    ("kind", "backend"), [*((kind, None) for kind in KINDS), ("Qwen3_5", "numba")]
)
def test_chunks_and_hits_change_no_token(kind, backend):
    made = run(kind, backend=backend, max_batch_tokens=7)
    assert made.cache.kv.stats().num_hit_tokens > 100
    assert len(made.tokens) == 6


@pytest.mark.parametrize("kind", KINDS)
def test_requests_that_give_way_begin_anew_from_a_cached_state(kind, monkeypatch):
    left, free = [], KVCoreCache.free_blocks

    def noted(cache, request_id, no_cache=False):
        left.extend([request_id] * no_cache)
        free(cache, request_id, no_cache)

    monkeypatch.setattr(KVCoreCache, "free_blocks", noted)
    made = run(kind, num_blocks=SMALL[kind], safety_margin=0.0)
    assert left
    assert made.cache.kv.stats().num_hit_tokens > 100


@pytest.mark.parametrize("kind", ["Qwen3_5", "FalconH1"])
def test_forked_requests_go_on_from_one_state(kind):
    assert len(run(kind, generation=longer(3)).tokens) == 18


@pytest.mark.parametrize("kind", ["Qwen3_5", "FalconH1"])
def test_states_come_back_from_the_host(kind, monkeypatch):
    back = []
    empty, pageable = torch.empty, {"pin_memory": False}  # a CPU alone has no other memory
    monkeypatch.setattr(torch, "empty", lambda *sizes, **more: empty(*sizes, **more | pageable))
    restore = States._restore

    def noted(states, theirs, offloading, batch):
        back.extend(future for future in batch if future.state.is_cpu_offloaded)
        restore(states, theirs, offloading, batch)

    monkeypatch.setattr(States, "_restore", noted)
    run(
        kind,
        num_blocks=SMALL[kind],
        safety_margin=0.0,
        cpu_offload_space=0.001,
        allow_block_sharing=False,
    )
    assert back


@pytest.mark.parametrize("planted", ["a state is not read", "a state is not stored"])
def test_a_wrong_state_shows_in_the_tokens(planted, monkeypatch):
    if planted == "a state is not stored":
        monkeypatch.setattr(states, "StateStep", lambda runs, read, _: StateStep(runs, read, None))
    else:
        monkeypatch.setattr(states, "Run", lambda *rows, has_state: Rows(*rows, has_state=False))
    with pytest.raises(AssertionError):
        run("Lfm2")


def test_a_conversation_hits_the_turn_before():
    model, prompts, _ = case("Qwen3_5")
    install(model)
    config = sizes(100)
    config.page_size = 16
    text = prompts[0]
    for turn in range(3):
        uncached = model.generate_batch(
            [text],
            generation_config=greedy(),
            continuous_batching_config=config,
            persistent_manager=True,
        )
        text = text + next(iter(uncached.values())).generated_tokens + draw_tokens(turn, 9)
        cache = model._cached_continuous_batching_manager.batch_processor.cache
        hits = cache.kv.stats().num_hit_tokens
        assert hits == [0, 64, 64 + 80][turn]
    uninstall(model)


def test_uninstall_gives_the_modules_their_forwards_back():
    model, prompts, wanted = case("Lfm2")
    install(model)
    assert is_divided(model)
    assert texts_alone(model, prompts, longer()) == wanted  # plain generate is as before
    uninstall(model)
    assert not is_divided(model)
    assert not model._forward_pre_hooks
    with pytest.raises(ValueError, match="Invalid layer type"):
        model.init_continuous_batching(greedy(), sizes(40))


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("page_size", 4, "page_size: wanted at least 7, because the state of a layer takes"),
        ("use_async_batching", True, "use_async_batching: wanted none beside layers that keep"),
        ("max_blocks_per_request", 4, "max_blocks_per_request: wanted none beside layers that"),
        ("use_cuda_graph", True, "use_cuda_graph: wanted none beside layers that keep a recurrent"),
    ],
)
def test_a_configuration_that_states_cannot_follow_is_refused(field, value, reason):
    model = case("Qwen3_5")[0]
    install(model)
    config = sizes(40)
    config.page_size = 16
    setattr(config, field, value)
    with pytest.raises(kvcore.InvalidArgumentError, match=reason):
        model.init_continuous_batching(greedy(), config)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("KimiLinear", "wanted keys and values of 4 heads of 8, .* layer 1 of .* has 4 of 24"),
        ("Mamba2", "wanted a layer that attends, all layers of Mamba2ForCausalLM keep a state"),
        ("InklingText", "InklingAttention: its attention gets sliding_window, which Transformers'"),
        ("Zamba", "ZambaAttention: wanted a layer_idx, it serves several layers"),
        ("Rwkv", "or keep a state in Transformers' cache, RwkvForCausalLM has others"),
        ("DeepseekV32", "DeepseekV32ForCausalLM has others: indexed_attention"),
    ],
)
def test_a_family_that_cannot_be_served_is_refused_by_name(kind, reason):
    model = recurrent(kind)
    own = model.config._attn_implementation
    with pytest.raises(kvcore.InvalidArgumentError, match=reason):
        install(model)
    assert model.config._attn_implementation == own
    assert not is_divided(model)
    assert "init_continuous_batching" not in vars(model)
