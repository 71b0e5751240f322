"""Layers that keep latents give what they give with keys and values, and only those are changed."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import PreTrainedConfig

import backends
from model import EngineConfig, SamplingParams
from model.attention.latents import absorb, absorbed
from model.engine import Engine
from tests.model.prompts import prompts
from tests.model.tiny_configs import make_config
from tests.model.walk import build_network


class Layer(nn.Module):
    """What Transformers' MLA layers have in common."""

    def __init__(self, heads=2, latent=8, rotated=4, plain=6, values=5):
        super().__init__()
        self.config = PreTrainedConfig()
        self.config._attn_implementation = "kvcore_paged"
        self.kv_lora_rank, self.qk_rope_head_dim = latent, rotated
        self.qk_nope_head_dim, self.v_head_dim = plain, values
        self.kv_b_proj = nn.Linear(latent, heads * (plain + values), bias=False).double()

    def expand_kv(self, latent, rotated):
        both = self.kv_b_proj(latent[:, 0]).unflatten(
            -1, (-1, self.qk_nope_head_dim + self.v_head_dim)
        )
        both = both.transpose(1, 2)
        keys, values = both.tensor_split([self.qk_nope_head_dim], -1)
        return torch.cat([keys, rotated.expand(-1, keys.shape[1], -1, -1)], -1), values


class ValuesFirst(Layer):
    """Its matrix is laid out in another way."""

    def expand_kv(self, latent, rotated):
        keys, values = super().expand_kv(latent, rotated)
        return keys.flip(-1), values


class Added(Layer):
    """Does more than a product."""

    def expand_kv(self, latent, rotated):
        keys, values = super().expand_kv(latent, rotated)
        return keys, values + 1


class WithABias(Layer):
    def __init__(self):
        super().__init__()
        self.kv_b_proj = nn.Linear(8, 22).double()


@given(
    heads=st.integers(1, 5), latent=st.integers(1, 9), rotated=st.integers(1, 6),
    plain=st.integers(1, 7), values=st.integers(1, 7), seed=st.integers(0, 99),
)  # fmt: skip
def test_absorbed_attention_is_attention_over_what_the_layer_makes(
    heads, latent, rotated, plain, values, seed
):
    torch.manual_seed(seed)
    layer = Layer(heads, latent, rotated, plain, values)
    c, r = torch.randn(1, 1, 5, latent).double(), torch.randn(1, 1, 5, rotated).double()
    query = torch.randn(5, heads, plain + rotated).double()
    keys, full = Layer.expand_kv(layer, c, r)
    weights = torch.einsum("thd,hnd->htn", query, keys[0]).softmax(-1)
    wanted = torch.einsum("htn,hnd->thd", weights, full[0])
    assert absorb(layer, latent + rotated) == 1
    record = absorbed(layer)
    rows, firsts = layer.expand_kv(c, r)
    assert (rows.shape, firsts.shape) == ((1, 1, 5, latent + rotated), (1, 1, 5, latent))
    logits = torch.einsum("thd,nd->htn", record.queries(query), rows[0, 0])
    out = torch.einsum("htn,nd->thd", logits.softmax(-1), firsts[0, 0])
    torch.testing.assert_close(record.values(out), wanted)


@pytest.mark.parametrize("kind", [ValuesFirst, Added, WithABias, nn.Linear])
def test_a_layer_that_does_something_else_is_left_alone(kind):
    layer = kind(3, 3) if kind is nn.Linear else kind()
    assert absorb(layer, 1000) == 0
    assert absorbed(layer) is None


def test_a_latent_that_is_too_wide_for_the_backend_is_left_alone():
    assert (absorb(Layer(), 11), absorb(Layer(), 12), absorb(Layer(), 0)) == (0, 1, 0)


def test_under_another_attention_a_layer_is_as_it_was_and_again_when_it_is_let_go():
    layer = Layer()
    c, r = torch.randn(1, 1, 5, 8).double(), torch.randn(1, 1, 5, 4).double()
    wanted = layer.expand_kv(c, r)
    absorb(layer, 12)
    layer.config._attn_implementation = "sdpa"
    assert all(torch.equal(*pair) for pair in zip(layer.expand_kv(c, r), wanted, strict=True))
    layer.config._attn_implementation = "kvcore_paged"
    assert layer.expand_kv(c, r)[0].shape == (1, 1, 5, 12)
    absorb(layer, 0)
    assert all(torch.equal(*pair) for pair in zip(layer.expand_kv(c, r), wanted, strict=True))


@pytest.mark.filterwarnings("ignore")
def test_deepseeks_latents_are_what_is_cached_and_the_tokens_are_the_same_without():
    model = build_network(make_config("DeepseekV3Config", ""), 0)
    config = EngineConfig(block_size=4, num_blocks=80)
    found = []
    for most in (1 << 16, 0):
        backend = Limited(most)
        engine = Engine(model, backend, config)
        done = engine.generate(prompts(), SamplingParams(max_tokens=8))
        layers = engine.network.layout.layers
        assert {layer.slot.is_latent for layer in layers} == {most > 0}
        found.append([completion.request.output_tokens for completion in done])
    assert found[0] == found[1]


class Limited:
    """Numba, with a largest latent."""

    def __init__(self, most):
        self._inner = backends.get_backend("numba")
        self.capabilities = dataclasses.replace(self._inner.capabilities, max_latent_dim=most)

    def __getattr__(self, name):
        return getattr(self._inner, name)
