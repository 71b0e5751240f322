"""Caches of float8: near the same text in a quarter of float32's memory."""

import pytest
import torch

from backends import get_backend
from model import EngineConfig, SamplingParams
from model.engine import Engine
from model.errors import UnsupportedModelError
from model.forward import quantised
from tests.model.networks import build
from tests.model.reference import ReferenceBackend
from tests.model.test_engine import PROMPT, greedy, tokens_of


def make(architecture="qwen3", change=lambda network: None, **fields):
    model = build(architecture, 25)
    with torch.no_grad():
        change(model.network)
    sizes = {"num_blocks": 90, "block_size": 4, "kv_dtype": "fp8", **fields}
    return Engine(model, get_backend("numba"), EngineConfig(**sizes))


def logprobs(engine, count=6):
    """How likely the tokens of a fixed text are, one after the other."""
    how = SamplingParams(max_tokens=1, logprobs=20)
    prompts = [PROMPT * 2 + "x" * number for number in range(count)]
    done = engine.generate(prompts, how)
    return [dict(one.tokens[0].top_logprobs) for one in done]


def distance(left, right):
    return sum(
        abs(one[token] - other[token])
        for one, other in zip(left, right, strict=True)
        for token in one.keys() & other.keys()
    )


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3", "gemma4", "mistral"])
def test_what_is_likely_stays_so_with_a_quarter_of_the_memory(architecture):
    exact, small = make(architecture, kv_dtype="auto"), make(architecture)
    assert small.memory.kv_bytes * 4 == exact.memory.kv_bytes
    wanted, found = logprobs(exact), logprobs(small)
    assert 0 < distance(wanted, found) < 0.3 * sum(map(len, wanted))
    assert all(max(one, key=one.get) in other for one, other in zip(wanted, found, strict=True))


def test_calibrated_scales_keep_numbers_that_are_too_small_for_a_scale_of_one(monkeypatch):
    def shrink(network):
        for layer in network.model.layers:
            layer.self_attn.v_proj.weight.mul_(2.0**-11)
            layer.self_attn.o_proj.weight.mul_(2.0**11)

    wanted = logprobs(make(change=shrink, kv_dtype="auto"))
    calibrated = distance(wanted, logprobs(make(change=shrink)))
    monkeypatch.setattr(quantised, "_scales", lambda *_: ())
    plain = distance(wanted, logprobs(make(change=shrink)))
    assert calibrated < plain / 4


def test_blocks_of_float8_are_shared_swapped_and_preempted_like_any():
    prompts, params = [PROMPT, PROMPT + "x", "third one"], greedy(20)
    large = tokens_of(make(num_blocks=200).generate(prompts, params))
    for fields in ({"swap_memory_bytes": 1 << 20}, {"swap_memory_bytes": 0}, {"sanitize": True}):
        small = make(num_blocks=22, **fields)
        assert tokens_of(small.generate(prompts, params)) == large
        assert small.stats.num_preemptions > 0
        assert small.stats.num_hit_tokens > 0


def test_a_backend_without_such_caches_is_told_so():
    with pytest.raises(UnsupportedModelError, match="kv_dtype: backend reference has no caches"):
        Engine(build("qwen3"), ReferenceBackend(), EngineConfig(num_blocks=9, kv_dtype="fp8"))
