"""Eleven architectures, paged, against `generate`: the same tokens, whatever the step looks like.

Random networks; from the seed given, the next is taken in which every greedy choice is clear: two
ways of computing agree token by token only where the two best logits are not nearly equal.
"""

import copy
import functools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import backends
from kvcore.sanitize import SanitizerError
from model import EngineConfig, SamplingParams, Submission
from model.attention.attention import PagedPass
from model.caches.layout import plan_layout
from model.engine import Engine
from model.load.loader import with_draft, wrap_network
from tests.model.networks import (
    CONFIGS,
    ByteCodec,
    build,
    greedy_and_margin,
    preempt_in_steps,
)
from tests.model.numerics import bfloat16_errors
from tests.model.prompts import NUM_TOKENS, prompts
from tests.model.reference import ReferenceBackend

CLEAR = 1e-3
SEEDS = {"qwen3": 18, "llama": 19, "mistral": 15, "gemma2": 0, "gemma3": 21, "gpt_oss": 10}
SEEDS |= {"qwen2": 0, "phi3": 0, "olmo2": 0, "gemma3n": 0, "gemma4": 0}
# So few blocks that the four requests, which come to 153 tokens, cannot all run to their ends.
SMALL = dict.fromkeys(CONFIGS, 24) | dict.fromkeys(
    ("gemma2", "gemma3", "gemma3n", "gemma4", "gpt_oss"), 30
)
WINDOWS_ALONE = {"mistral", "phi3"}  # never need more blocks than when they start


@functools.cache
def clear_case(architecture):
    """A network whose greedy choices are clear, and its dense tokens."""
    for seed in range(SEEDS[architecture], SEEDS[architecture] + 50):
        model = build(architecture, seed)
        dense = [greedy_and_margin(model, prompt, NUM_TOKENS) for prompt in prompts()]
        if min(margin for _, margin in dense) > CLEAR:
            return model, [tokens for tokens, _ in dense]
    raise AssertionError(f"no clear network of {architecture} in 50")


@functools.cache
def backend_of(name):
    return ReferenceBackend() if name == "reference" else backends.get_backend(name)


def paged(architecture, backend, **sizes):
    model, _ = clear_case(architecture)
    engine = Engine(model, backend_of(backend), EngineConfig(block_size=4, **sizes))
    done = engine.generate(prompts(), SamplingParams(max_tokens=NUM_TOKENS))
    assert engine.kv.num_free_blocks == engine.kv.num_usable_blocks
    return engine, [completion.request.output_tokens for completion in done]


@pytest.mark.parametrize("backend", ["reference", "numba"])
@pytest.mark.parametrize("architecture", CONFIGS)
def test_the_tokens_are_those_of_generate(architecture, backend):
    _, tokens = paged(architecture, backend, num_blocks=80)
    assert tokens == clear_case(architecture)[1]


@pytest.mark.parametrize(
    ("architecture", "swap_memory_bytes"),
    [(name, swap) for name in CONFIGS for swap in (0, 1 << 20)],
)
def test_cached_chunked_and_preempted_at_once_changes_no_token(architecture, swap_memory_bytes):
    model, dense = clear_case(architecture)
    is_forced = architecture in WINDOWS_ALONE
    finds_all = is_forced and swap_memory_bytes > 0  # what is found again is not loaded
    sizes = EngineConfig(
        block_size=4,
        num_blocks=SMALL[architecture],
        max_num_batched_tokens=11,
        swap_memory_bytes=swap_memory_bytes,
        enable_prefix_caching=not finds_all,
    )
    engine = Engine(model, backend_of("numba"), sizes)
    if is_forced:
        preempt_in_steps(engine, {6, 14, 15})
    requests = engine.add_all(prompts(), SamplingParams(max_tokens=NUM_TOKENS))
    while engine.has_unfinished:
        engine.step()
    assert [request.output_tokens for request in requests] == dense
    assert engine.stats.num_preemptions > 0
    assert (engine.stats.num_loads > 0) == (swap_memory_bytes > 0)
    assert (engine.stats.num_hit_tokens > 0) == (not finds_all)
    assert engine.stats.num_steps > NUM_TOKENS + 4


@pytest.mark.parametrize("drafts", ["itself", "another"])
@pytest.mark.parametrize("architecture", ["gemma3n", "gemma4"])
def test_drafts_change_no_token_of_layers_that_read_others(architecture, drafts):
    model, dense = clear_case(architecture)
    model = with_draft(model, build(architecture, SEEDS[architecture] + (drafts == "another")))
    sizes = EngineConfig(num_blocks=80, block_size=4, max_num_batched_tokens=16, draft_model=drafts)
    engine = Engine(model, backend_of("numba"), sizes)
    done = engine.generate(prompts(), SamplingParams(max_tokens=NUM_TOKENS))
    assert [one.request.output_tokens for one in done] == dense
    assert engine.stats.num_draft_tokens > 0
    assert (engine.stats.num_accepted_tokens > 20) == (drafts == "itself")


def _reads_the_wrong_layer(layers, *more):
    layout = plan_layout(layers, *more)
    first, second, *_ = layout.places
    return replace(layout, places=(first, second, second, first))


def _has_a_place_of_its_own(layers, *more):
    own = [replace(layer, reads=None) for layer in layers]
    return replace(plan_layout(own, *more), layers=tuple(layers))


def _keeps_what_it_is_given(layers, *more):
    own = [replace(layer, reads=None) for layer in layers]
    return replace(plan_layout(layers, *more), layers=tuple(own))


@pytest.mark.parametrize(
    ("planted", "sanitize"),
    [
        (_reads_the_wrong_layer, False),
        (_has_a_place_of_its_own, False),
        (_has_a_place_of_its_own, True),
        (_keeps_what_it_is_given, False),
    ],
)
def test_a_layer_that_reads_or_writes_elsewhere_is_noticed(monkeypatch, planted, sanitize):
    dense = clear_case("gemma4")[1]
    if planted is _keeps_what_it_is_given:  # and makes other keys than the layer that it reads
        _make_other_keys(monkeypatch)
    monkeypatch.setattr("model.forward.network.plan_layout", planted)
    if sanitize:
        with pytest.raises(SanitizerError, match=r"of layer 2: .* a slot that was never written"):
            paged("gemma4", "numba", num_blocks=80, sanitize=True)
    else:
        assert paged("gemma4", "numba", num_blocks=80)[1] != dense


def _make_other_keys(monkeypatch):
    attend = PagedPass.attend

    def attending(self, layer, query, key, value, terms):
        return attend(self, layer, query, key + layer // 2, value, terms)

    monkeypatch.setattr(PagedPass, "attend", attending)


ARRIVALS = st.tuples(
    st.integers(0, 3),  # which prompt
    st.sampled_from([0, 0, -1, 1]),  # its priority
    st.sampled_from([1, 1, 2]),  # number of samples
    st.sampled_from([None, None, None, 0, 5]),  # tokens before an abort
    st.integers(0, 4),  # steps until the next arrives
)


@pytest.mark.parametrize("architecture", ["qwen3", "gemma2", "gemma4", "mistral"])
@settings(max_examples=12)
@given(
    arrivals=st.lists(ARRIVALS, min_size=1, max_size=6),
    num_blocks=st.integers(18, 40),
    budget=st.integers(1, 40),
    max_num_seqs=st.integers(1, 5),
    swaps=st.booleans(),
)
def test_whatever_comes_and_goes_beside_it_a_request_gives_generates_tokens(
    architecture, arrivals, num_blocks, budget, max_num_seqs, swaps
):
    model, dense = clear_case(architecture)
    sizes = EngineConfig(
        block_size=4,
        num_blocks=num_blocks,
        max_num_batched_tokens=budget,
        max_num_seqs=max_num_seqs,
        priority_span=2,
        swap_memory_bytes=1 << 20 if swaps else 0,
    )
    engine = Engine(model, backend_of("numba"), sizes)
    params = SamplingParams(max_tokens=NUM_TOKENS)
    running = []
    for prompt, priority, num_samples, abort_after, steps in arrivals:
        samples = engine.submit(
            Submission(prompts()[prompt], replace(params, n=num_samples), priority=priority)
        )
        running += [(request, prompt, abort_after) for request in samples]
        for _ in range(steps):
            step_and_abort(engine, running)
    while engine.has_unfinished:
        step_and_abort(engine, running)
    for request, prompt, abort_after in running:
        tokens = request.output_tokens
        assert tokens == dense[prompt][: len(tokens)]
        assert abort_after is not None or len(tokens) == NUM_TOKENS
    assert engine.kv.num_free_blocks == engine.kv.num_usable_blocks


def step_and_abort(engine, running):
    if engine.has_unfinished:
        engine.step()
    for request, _, abort_after in running:
        if abort_after is not None and request.num_output_tokens >= abort_after:
            engine.abort(request)


@pytest.mark.parametrize("architecture", CONFIGS)
def test_logits_in_bfloat16_are_as_near_to_float32_as_dense_ones(architecture):
    paged, dense = bfloat16_errors(architecture, backend_of("numba"), prompts())
    assert paged <= 2 * dense


@pytest.mark.parametrize(
    ("architecture", "feature", "without"),
    [
        ("mistral", "sliding_window", None),
        ("phi3", "sliding_window", None),
        ("gemma2", "sliding_window", 4096),
        ("gemma2", "attn_logit_softcapping", None),
        ("gemma3", "sliding_window", 4096),
        ("gemma3n", "sliding_window", 4096),
        ("gemma4", "sliding_window", 4096),
        ("gpt_oss", "sliding_window", 4096),
    ],
)
def test_without_its_feature_a_network_says_something_else(architecture, feature, without):
    """The comparison above would not notice a feature that changes nothing."""
    model, dense = clear_case(architecture)
    config = copy.deepcopy(model.network.config)
    setattr(config, feature, without)
    network = type(model.network)(config)
    network.load_state_dict(model.network.state_dict())
    network.set_attn_implementation(model.dense_implementation)
    other = wrap_network(architecture, network, ByteCodec())
    assert [greedy_and_margin(other, prompt, NUM_TOKENS)[0] for prompt in prompts()] != dense


def test_without_its_sinks_gpt_oss_says_something_else():
    model, dense = clear_case("gpt_oss")
    network = copy.deepcopy(model.network)
    for layer in network.model.layers:
        layer.self_attn.sinks.data.fill_(-1e9)
    network.set_attn_implementation(model.dense_implementation)
    other = wrap_network("gpt_oss", network, ByteCodec())
    assert [greedy_and_margin(other, prompt, NUM_TOKENS)[0] for prompt in prompts()] != dense
