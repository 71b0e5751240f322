"""A second network that guesses: it changes when tokens come, and nothing else."""

import functools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backends import get_backend
from model import (
    EngineConfig,
    SamplingParams,
    Submission,
)
from model.control.submission import Prompt
from model.engine import Engine
from model.loader import with_draft
from tests.model.networks import build
from tests.model.test_engine import PROMPT, network
from tests.model.test_engine_sampling import run

TEXTS: list[Prompt] = [PROMPT, PROMPT + "and another", "abcabcabcab", [7] * 21, "x"]


@functools.cache
def near(noise):
    """The network of the tests with noise in its weights: guesses that hold now and then."""
    model = build("qwen3", 25)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.network.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=noise)
    return model


@functools.cache
def guided(kind):
    """The network of the tests with a draft model of some kind."""
    drafts = {"same": lambda: near(0.0), "near": lambda: near(0.03), "windows": other_windows}
    return with_draft(network(), drafts[kind]())


def other_windows():
    return build("gemma3", 4)


def make(kind="same", **sizes):
    sizes = {"num_blocks": 60, "block_size": 4, "draft_model": kind, **sizes}
    return Engine(guided(kind), get_backend("numba"), EngineConfig(**sizes))


@functools.cache
def alone():
    config = EngineConfig(num_blocks=60, block_size=4, enable_prefix_caching=False)
    return Engine(network(), get_backend("numba"), config)


def is_empty(kv):
    return kv.num_free_blocks == kv.num_usable_blocks


asked = st.builds(
    lambda how, seed, max_tokens, logprobs: SamplingParams(
        max_tokens=max_tokens, logprobs=logprobs, **how, **({"seed": seed} if how else {})
    ),
    st.sampled_from([{}, {}, {"temperature": 0.7}, {"temperature": 1.0, "top_k": 20}]),
    st.integers(0, 3),
    st.integers(1, 14),
    st.sampled_from([None, 2]),
)
arrivals = st.lists(
    st.tuples(st.integers(0, 4), asked, st.integers(0, 6), st.integers(1, 2), st.booleans()),
    min_size=1,
    max_size=5,
)
sizes = st.fixed_dictionaries(
    {
        "max_num_batched_tokens": st.sampled_from([3, 11, 64]),
        "max_num_seqs": st.sampled_from([1, 3, 64]),
        "num_blocks": st.sampled_from([17, 21, 60]),
        "block_size": st.sampled_from([2, 4]),
        "draft_tokens": st.integers(1, 6),
        "enable_prefix_caching": st.booleans(),
        "sanitize": st.booleans(),
    }
)


@functools.cache
def wanted_of(text, params, sample):
    """What a sample of a prompt gives with the machine to itself."""
    engine = alone()
    requests = engine.submit(Submission(TEXTS[text], params, num_samples=sample + 1))
    return [token.token_id for token in run(engine, requests)[sample]]


def guesses(kind, arrivals, sizes, engine_type=make):
    """Run arrivals with drafts, some of them aborted: what was wrong, in words; and the engine."""
    if sizes["block_size"] == 2:
        sizes = sizes | {"num_blocks": 2 * sizes["num_blocks"]}
    engine = engine_type(kind, swap_memory_bytes=0, **sizes)
    waiting, expected, requests, step, aborted = list(arrivals), {}, [], 0, set()
    while waiting or engine.has_unfinished:
        while waiting and (waiting[0][2] <= step or not engine.has_unfinished):
            text, params, _, samples, is_aborted = waiting.pop(0)
            own = engine.submit(Submission(TEXTS[text], params, num_samples=samples))
            requests += own
            expected |= {one: wanted_of(text, params, one.sample) for one in own}
            aborted |= set(own[:1]) if is_aborted and len(requests) > 1 else set()
        engine.step()
        step += 1
        for one in [one for one in aborted if one.num_output_tokens > 2]:
            engine.abort(one)
            aborted.remove(one)
    wrong = [
        f"{one!r} said {one.output_tokens}, wanted {expected[one]}"
        for one in requests
        if one.output_tokens != expected[one][: one.num_output_tokens]
    ]
    stats = engine.stats
    if kind == "same" and stats.num_accepted_tokens < stats.num_draft_tokens:
        wrong.append(f"{stats.num_draft_tokens - stats.num_accepted_tokens} drafts did not hold")
    if not (is_empty(engine.kv) and is_empty(engine.draft.kv)):
        wrong.append("blocks are held when all have ended")
    return wrong, engine


@pytest.mark.parametrize("kind", ["same", "near", "windows"])
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(arrivals=arrivals, sizes=sizes)
def test_tokens_are_the_same_and_a_twin_of_the_network_is_always_right(kind, arrivals, sizes):
    wrong, _ = guesses(kind, arrivals, sizes)
    assert wrong == []
