"""Rotary factors of every kind: requests of different lengths side by side, each as if alone."""

import copy
import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM
from transformers import __version__ as transformers_version
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import backends
from model import EngineConfig, SamplingParams, Submission
from model.attention.rope import RopeSwitch, rope_switch
from model.engine import Engine
from model.errors import RequestTooLongError, UnsupportedModelError
from model.load.loader import wrap_network
from model.load.probes import check_tokens_alone, probe_layers
from tests.model.networks import ByteCodec, greedy_and_margin
from tests.model.tiny_configs import make_config

CPU = torch.device("cpu")
EDGE = 40  # where the factors of the longrope networks change
TEXT = [n * n * 31 % 250 + 3 for n in range(120)]
LENGTHS = (24, 35, 70, 31, 96)  # they share their beginnings
NUM_TOKENS = 14
GROWING = ["Phi3Config", "PhimoeConfig"]
KINDS = sorted({"default", *ROPE_INIT_FUNCTIONS})


GENERATE_COMPUTES_AGAIN = pytest.mark.skipif(
    transformers_version.startswith("5.19."),
    reason="generate of Transformers 5.19 forgets the text where the factors change",
)


@functools.cache
def clear_case(name, variant, lengths=LENGTHS):
    """A network, and `generate`'s tokens for each length, all of them clear."""
    for seed in range(30):
        torch.manual_seed(seed)
        config = make_config(name, variant)
        network = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model = wrap_network(name, network, ByteCodec())
        dense = [greedy_and_margin(model, TEXT[:length], NUM_TOKENS) for length in lengths]
        if min(margin for _, margin in dense) > 1e-3:
            return model, [tokens for tokens, _ in dense]
    raise AssertionError(f"no clear network of {name} {variant} in 30")


def engine_of(model, **sizes):
    sizes = {"block_size": 4, "num_blocks": 140, "max_num_batched_tokens": 50} | sizes
    return Engine(model, backends.get_backend("numba"), EngineConfig(**sizes))


def paged(engine, lengths=LENGTHS):
    params = SamplingParams(max_tokens=NUM_TOKENS)
    done = engine.generate([TEXT[:length] for length in lengths], params)
    assert engine.kv.num_free_blocks == engine.kv.num_usable_blocks
    return [completion.request.output_tokens for completion in done]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "longrope"])
def test_long_and_short_side_by_side_are_what_each_is_alone(kind):
    model, dense = clear_case("LlamaConfig", kind)
    engine = engine_of(model)
    assert engine.network.rope is None
    assert paged(engine) == dense


@pytest.mark.parametrize("name", [*GROWING, "LlamaConfig"])
def test_longrope_has_the_factors_of_each_texts_own_length(name):
    lengths = (24, 70, 20, 96)  # none of them grows past the edge
    model, dense = clear_case(name, "longrope", lengths)
    engine = engine_of(model)
    assert engine.network.rope.num_tokens == EDGE
    assert paged(engine, lengths) == dense
    assert engine.stats.num_hit_tokens >= 64  # of the long by the long, and of the short
    # The same network, asked by Transformers itself, is as it was.
    again = [greedy_and_margin(model, TEXT[:length], NUM_TOKENS)[0] for length in lengths]
    assert again == dense


@GENERATE_COMPUTES_AGAIN
@pytest.mark.parametrize("name", GROWING)
@pytest.mark.parametrize("late", [False, True])
def test_a_text_that_grows_past_the_edge_is_computed_again(name, late):
    model, dense = clear_case(name, "longrope")
    engine = engine_of(model, async_scheduling=late)
    assert paged(engine) == dense
    assert engine.stats.num_preemptions == 2  # 35 and 31 tokens grow past 40


@GENERATE_COMPUTES_AGAIN
@settings(max_examples=15)
@given(
    order=st.permutations(range(len(LENGTHS))),
    budget=st.integers(3, 60),
    num_blocks=st.integers(32, 90),
    swaps=st.booleans(),
    late=st.booleans(),
    max_num_seqs=st.integers(1, 5),
)
def test_however_steps_look_each_request_has_its_own_factors(
    order, budget, num_blocks, swaps, late, max_num_seqs
):
    model, dense = clear_case("Phi3Config", "longrope")
    engine = engine_of(
        model,
        num_blocks=num_blocks,
        max_num_batched_tokens=budget,
        max_num_seqs=max_num_seqs,
        swap_memory_bytes=1 << 22 if swaps else 0,
        async_scheduling=late,
    )
    got = paged(engine, [LENGTHS[place] for place in order])
    assert got == [dense[place] for place in order]


def test_where_generate_does_not_compute_again_a_text_that_would_grow_is_refused():
    model, _ = clear_case("LlamaConfig", "longrope", (24, 70))
    engine = engine_of(model)
    with pytest.raises(RequestTooLongError, match=r"beyond 40 tokens .* max_tokens=6"):
        engine.add_request(TEXT[:35], SamplingParams(max_tokens=7))
    engine.generate([TEXT[:35]], SamplingParams(max_tokens=6))


@GENERATE_COMPUTES_AGAIN
def test_samples_of_a_growing_prompt_have_its_factors():
    model, dense = clear_case("Phi3Config", "longrope")
    engine = engine_of(model)
    samples = engine.submit(Submission(TEXT[:35], SamplingParams(max_tokens=NUM_TOKENS, n=3)))
    while engine.has_unfinished:
        engine.step()
    assert [sample.output_tokens for sample in samples] == [dense[1]] * 3


def test_without_the_choice_the_network_would_be_refused():
    network = copy.deepcopy(clear_case("Phi3Config", "longrope")[0].network)
    for module in network.modules():
        module.__dict__.pop("forward", None)
    probe_layers(network, CPU)
    with pytest.raises(UnsupportedModelError, match="follow other tokens too"):
        check_tokens_alone(network, CPU, 256)
    switch = rope_switch(network)
    assert rope_switch(network) is switch
    check_tokens_alone(network, CPU, 256, switch)


def test_a_choice_for_the_whole_batch_is_found_out(monkeypatch):
    """Planted: the first token decides for all."""
    model, dense = clear_case("Phi3Config", "longrope")
    engine = engine_of(model)
    choose = RopeSwitch.choosing

    def choose_for_all(self, is_long):
        return choose(self, None if is_long is None else is_long[:, :1].expand_as(is_long))

    monkeypatch.setattr(RopeSwitch, "choosing", choose_for_all)
    assert paged(engine) != dense
