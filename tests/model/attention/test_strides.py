"""The strides of queries do not grow with a step, because kernels are compiled for them."""

import pytest

import backends
from model import EngineConfig, SamplingParams
from model.engine import Engine
from tests.model.tiny_configs import make_config
from tests.model.walk import build_network

PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [3, 4, 5]]


@pytest.mark.parametrize("kind", ["Qwen3_5TextConfig", "PhiConfig", "Qwen3Config"])
def test_heads_of_a_query_are_as_far_apart_in_every_step(kind, monkeypatch):
    backend = backends.get_backend("numba")
    own, strides = type(backend).paged_attention, set()

    def spied(self, query, *args, **kwargs):
        if len(query) > 1:
            strides.add(query.stride())
        return own(self, query, *args, **kwargs)

    engine = Engine(
        build_network(make_config(kind, ""), 1),
        backend,
        EngineConfig(num_blocks=100, block_size=16, max_num_batched_tokens=40),
    )
    monkeypatch.setattr(type(backend), "paged_attention", spied)
    for prompt in PROMPTS:  # steps of several lengths
        engine.generate([prompt], SamplingParams(max_tokens=2))
    assert len(strides) == 1
