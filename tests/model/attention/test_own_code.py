"""Classes that attend by code of their own: ALiBi in wider heads, and what is left as it was."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

import backends
from model import EngineConfig, ModelError
from model.attention import own_code
from model.attention.own_code import OWN_CODE, add_alibi
from model.engine import Engine
from tests.model import walk
from tests.model.networks import greedy_logits
from tests.model.prompts import prompts
from tests.model.tiny_configs import config_classes, make_config

PRECISION = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-16, torch.float16: 2.0**-20}


@pytest.mark.parametrize("dtype", PRECISION)
@given(
    places=st.lists(st.integers(0, (1 << 24) - 1), min_size=1, max_size=5),
    slopes=st.lists(st.floats(2.0**-8, 8), min_size=2, max_size=2),
)
def test_the_numbers_that_are_added_give_slope_times_position(dtype, places, slopes):
    query = torch.zeros((1, 2, len(places), 4), dtype=dtype)
    slopes = torch.tensor(slopes)
    wider, placed = add_alibi(query, query[:, :1], slopes, torch.tensor(places))
    assert wider.shape == (1, 2, len(places), 12)
    assert placed.shape == (1, 1, len(places), 12)
    assert wider.dtype == placed.dtype == dtype
    got = wider.double() @ placed.double().transpose(2, 3)
    wanted = slopes.double()[:, None] * torch.tensor(places).double()
    bound = PRECISION[dtype] * wanted[:, None] + 1e-4 * wanted.gt(0)[:, None]
    assert ((got[0] - wanted[:, None]).abs() <= bound).all()


@pytest.mark.parametrize("num_heads", [1, 2, 3, 6, 8, 12, 16, 40, 71, 112])
def test_slopes_are_those_of_the_classes(num_heads):
    got = torch.tensor(own_code._alibi_slopes(num_heads))
    of_bloom = build_alibi_tensor(torch.ones(1, 2), num_heads, torch.float32)
    assert torch.allclose(got, of_bloom[:, 0, 1], rtol=1e-5)
    bias = build_mpt_alibi_tensor(num_heads, 2)
    assert torch.allclose(got, -bias[:, 0, 0], rtol=1e-5)


def engine_of(network, **sizes):
    backend = backends.get_backend("numba")
    return Engine(network, backend, EngineConfig(block_size=4, num_blocks=90, **sizes))


KINDS = [
    name for name, kind in config_classes().items() if getattr(kind, "model_type", "") in OWN_CODE
]


def test_every_class_of_the_table_is_tried():
    assert len(KINDS) == len(OWN_CODE)
    assert all(walk.stored()[name, ""] == "equal" for name in KINDS)


@pytest.mark.parametrize("name", KINDS)
def test_without_our_pass_a_network_is_the_classs_own(name):
    model = walk.build_network(make_config(name, ""), 0)
    before = greedy_logits(model, prompts()[0], 3)[1]
    engine_of(model)
    assert torch.equal(greedy_logits(model, prompts()[0], 3)[1], before)


def _flat(slopes):
    return lambda num_heads: [0.9 * slope for slope in slopes(num_heads)]


@pytest.mark.parametrize(("name", "variant"), [("BloomConfig", ""), ("FalconConfig", "alibi")])
def test_the_walk_sees_slopes_that_are_wrong(monkeypatch, name, variant):
    monkeypatch.setattr(own_code, "_alibi_slopes", _flat(own_code._alibi_slopes))
    assert walk.outcome(name, variant).startswith("WRONG: ")


def test_positions_that_are_counted_are_refused(monkeypatch):
    def counted(query, key, slopes, positions):
        return add_alibi(query, key, slopes, torch.arange(len(positions)))

    monkeypatch.setattr(own_code, "add_alibi", counted)
    assert walk.outcome("BloomConfig", "").startswith("refused: ")


def test_a_cache_that_cannot_hold_positions_is_refused():
    model = walk.build_network(make_config("BloomConfig", ""), 0)
    with pytest.raises(ModelError, match="leave out --kv-dtype"):
        engine_of(model, kv_dtype="fp8")
    plain = walk.build_network(make_config("GPTJConfig", ""), 0)
    engine_of(plain, kv_dtype="fp8")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_alibi_in_wider_heads_is_near_the_exact_attention(dtype):
    torch.manual_seed(0)
    tokens, heads, size, first = 40, 6, 16, 3000
    query, key, value = (torch.randn((1, heads, tokens, size)).to(dtype) for _ in range(3))
    slopes, places = torch.tensor(own_code._alibi_slopes(heads)), torch.arange(tokens) + first
    scale = size**-0.5
    logits = query.double() @ key.double().transpose(2, 3) * scale
    logits += slopes.double()[:, None, None] * (places - places[:, None])
    future = torch.ones((tokens, tokens), dtype=torch.bool).triu(1)
    wanted = logits.masked_fill(future, -torch.inf).softmax(-1) @ value.double()
    wider, placed = add_alibi(query, key, slopes / scale, places)
    products = (wider.float() @ placed.float().transpose(2, 3)) * scale
    got = products.masked_fill(future, -torch.inf).softmax(-1) @ value.float()
    assert (got - wanted).abs().max() < 4e-3  # float32 has 2e-4 at a logit of 2,000
