"""What is found out about a network by running it, and that a network that lies is found out."""

import functools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import AttentionInterface, masking_utils
from transformers.models.llama import modeling_llama

import backends
from backends import AttentionTerms
from kvcore.adapters.recurrent import CACHE_ARGUMENT
from model import EngineConfig, SamplingParams
from model.attention.attention import attend
from model.attention.positions import RowsElsewhere
from model.caches.layout import LayerShape
from model.engine import Engine
from model.errors import UnsupportedModelError
from model.load import probes
from model.load.probes import (
    MaskPattern,
    Probe,
    check_tokens_alone,
    find_mask_pattern,
    probe_layers,
)
from tests.model.networks import build, greedy_and_margin

CPU = torch.device("cpu")
SIGHTS = st.one_of(
    st.just(MaskPattern()),
    st.integers(1, 5000).map(lambda size: MaskPattern(window=size)),
    st.integers(2, 5000).map(lambda size: MaskPattern(chunk=size)),
)


def mask_of(sight):
    """The mask that Transformers makes for it."""
    if sight.window is not None:
        return masking_utils.sliding_window_causal_mask_function(sight.window)
    if sight.chunk is not None:
        return masking_utils.chunked_causal_mask_function(sight.chunk, torch.zeros(1, dtype=int))
    return masking_utils.causal_mask_function


@given(sight=SIGHTS)
def test_a_mask_says_what_it_lets_a_query_see(sight):
    assert find_mask_pattern(mask_of(sight), CPU) == sight


@given(
    sight=SIGHTS,
    queries=st.lists(st.integers(0, 20_000), min_size=1, max_size=20),
    offset=st.integers(-3, 3),
)
def test_what_it_sees_is_what_the_mask_says_at_any_place(sight, queries, offset):
    first = [max(0, sight.first(query) + offset) for query in queries]
    zeros, (q, k) = torch.zeros(len(queries), dtype=int), torch.tensor([queries, first])
    wanted = [sight.first(a) <= b <= a for a, b in zip(queries, first, strict=True)]
    assert mask_of(sight)(zeros, zeros, q, k).tolist() == wanted


def _with_first_tokens(batch, head, q, k):
    return ((k > q - 64) | (k < 4)) & (k <= q)


@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        (masking_utils.bidirectional_mask_function, "its mask is bidirectional"),
        (masking_utils.sliding_window_bidirectional_mask_function(8), "its mask is bidirectional"),
        (lambda batch, head, q, k: (k <= q) & (q % 2 == k % 2), "none of them"),
        (_with_first_tokens, "none of them"),
        (lambda batch, head, q, k: torch.zeros(1)[q] == 0, "it reads a value of each token"),
        (lambda batch, head, q, k: k < q, "none of them"),
    ],
)
def test_a_mask_that_is_something_else_is_refused(mask, reason):
    with pytest.raises(UnsupportedModelError, match=reason):
        find_mask_pattern(mask, CPU)


def test_a_probe_measures_every_layer():
    model = build("gemma3")
    window, full = (LayerShape(2, 16, torch.float32, window) for window in (7, None))
    assert tuple(probe_layers(model.network, CPU).values()) == (window, full)
    assert window.token_bytes == full.token_bytes == 2 * 2 * 16 * 4


@pytest.mark.parametrize("architecture", ["gemma3n", "gemma4"])
def test_a_probe_finds_which_layers_read_the_keys_and_values_of_others(architecture):
    shapes = [*probe_layers(build(architecture).network, CPU).values()]
    assert [shape.reads for shape in shapes] == [None, None, 0, 1]
    assert shapes[2:] == [replace(shapes[n], reads=n) for n in (0, 1)]


def _copied(states, query):
    return tuple(part.clone() for part in states)


def _only_alone(states, query):
    return states if query.shape[2] == 1 else _copied(states, query)


def _changed_in_place(states, query):
    return tuple(part.mul_(1) for part in states)


@pytest.mark.parametrize("passed_on", [_copied, _only_alone, _changed_in_place])
def test_a_layer_that_may_have_other_keys_than_the_one_it_follows_stores_its_own(
    monkeypatch, passed_on
):
    def planted(module, query, key, value, *args, **kwargs):
        if module.layer_idx == 3:
            key, value = passed_on((key, value), query)
        return attend_probing(module, query, key, value, *args, **kwargs)

    attend_probing = probes._attend_probing
    monkeypatch.setitem(AttentionInterface._global_mapping, probes._PROBING, planted)
    shapes = probe_layers(build("gemma4").network, CPU)
    assert [shape.reads for shape in shapes.values()] == [None, None, 0, None]


def test_a_layer_that_sees_more_than_the_one_it_follows_stores_its_own():
    probe, kept = Probe(), torch.zeros(3, 2, 16)
    for layer, pattern in enumerate([MaskPattern(7), MaskPattern(), MaskPattern(7)]):
        probe.patterns[layer] = pattern
        probe.attend(layer, kept, kept[:], kept[:], AttentionTerms(scale=1.0))
    assert [shape.reads for shape in probe.shapes.values()] == [None, None, 0]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("sliding_window", 5, "layer 0 asks for a window of 7, and its mask is a window of 5"),
        ("attn_logit_softcapping", 3.0, "layer 0 .* a soft cap of 3.0 and asks .* for 2.0"),
    ],
)
def test_a_layer_that_asks_for_something_else_than_its_configuration_is_refused(
    field, value, message
):
    model = build("gemma2")
    setattr(model.network.config, field, value)
    with pytest.raises(UnsupportedModelError, match=f"Gemma2ForCausalLM: {message}"):
        probe_layers(model.network, CPU)


# Planted: a class of Transformers that does not do what a paged cache takes for granted.


def _no_mask(*args, **kwargs):
    return None


def _own_mask(*args, **kwargs):
    return torch.zeros(1, 1, 1, 1)


@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        (masking_utils.create_bidirectional_mask, "layer 0: wanted causal .* is bidirectional"),
        (_no_mask, "layer 0 has no mask: what it sees is unknown"),
        (_own_mask, "layer 0 makes a mask of its own"),
    ],
)
def test_a_network_that_is_not_causal_is_refused(monkeypatch, mask, reason):
    def planted(*args, position_ids=None, **kwargs):
        return mask(*args, **kwargs)

    monkeypatch.setattr(modeling_llama, "create_causal_mask", planted)
    with pytest.raises(UnsupportedModelError, match=f"LlamaForCausalLM: {reason}"):
        probe_layers(build("llama").network, CPU)


def _follows_the_longest(self, x, position_ids):
    scale = 1 + position_ids.max() / 64
    cos, sin = _ROTATED(self, x, position_ids)
    return cos * scale, sin * scale


def _counts_by_itself(self, x, position_ids):
    return _ROTATED(self, x, torch.arange(x.shape[1])[None])


_ROTATED = modeling_llama.LlamaRotaryEmbedding.forward


@pytest.mark.parametrize("forward", [_follows_the_longest, _counts_by_itself])
def test_a_rotation_that_follows_the_batch_is_refused(monkeypatch, forward):
    network = build("llama").network
    probe_layers(network, CPU)
    check_tokens_alone(network, CPU, 256)
    monkeypatch.setattr(modeling_llama.LlamaRotaryEmbedding, "forward", forward)
    with pytest.raises(UnsupportedModelError, match="the queries of layer 0 follow other tokens"):
        check_tokens_alone(network, CPU, 256)


def test_a_network_that_mixes_tokens_outside_its_attention_is_refused():
    network = build("llama").network
    probe_layers(network, CPU)

    class Mixing(nn.Module):
        def __init__(self, mlp):
            super().__init__()
            self.mlp = mlp

        def forward(self, x):
            return self.mlp(x) + nn.functional.pad(x, (0, 0, 1, -1))  # a convolution of two

    network.model.layers[0].mlp = Mixing(network.model.layers[0].mlp)
    with pytest.raises(UnsupportedModelError, match="of layer 1 follow other tokens"):
        check_tokens_alone(network, CPU, 256)


# Planted: layers that know a token's place by the row, or by the length of the cache.


class _ScaledQueries(nn.Module):
    """A projection of queries whose results are scaled by `1 + scale(number of rows)`."""

    def __init__(self, inner, scale):
        super().__init__()
        self.inner, self.scale = inner, scale

    def forward(self, x):
        return self.inner(x) * (1 + self.scale(x)[:, None])


def _by_its_row(x):
    return torch.floor(torch.arange(x.shape[1]) / 100) * 0.1


def _by_a_count(x):
    rows = torch.ones(x.shape[:2], dtype=torch.int64).cumsum(-1)
    return 0.1 * (rows[0] > 100)


def _in_place(x):
    scale = torch.zeros(x.shape[1])
    scale += torch.arange(1, x.shape[1] + 1) // 100
    return scale


@pytest.mark.parametrize("scale", [_by_its_row, _by_a_count, _in_place])
def test_a_layer_that_scales_by_the_row_is_refused_though_the_first_hundred_are_alike(scale):
    network = build("llama").network
    probe_layers(network, CPU)
    attention = network.model.layers[1].self_attn
    attention.q_proj = _ScaledQueries(attention.q_proj, scale)
    with pytest.raises(UnsupportedModelError, match="queries of layer 1 follow its row in a step"):
        check_tokens_alone(network, CPU, 256)


def _counting(network, places):
    """Let a layer scale its queries by `places(cache, rows)`, as Llama 4 does."""
    attention = network.model.layers[1].self_attn
    own, scaled = attention.forward, _ScaledQueries(attention.q_proj, None)
    attention.q_proj = scaled

    def forward(*args, **kwargs):
        cache = kwargs.get(CACHE_ARGUMENT)
        scaled.scale = lambda x: torch.floor(places(cache, x.shape[1]) / 8) * 0.1
        return own(*args, **kwargs)

    attention.forward = forward
    return network


def _position(cache, rows):
    return torch.arange(rows) + (0 if cache is None else cache.get_seq_length(1))


def _length(cache, rows):
    return torch.zeros(rows) + (0 if cache is None else cache.get_seq_length(1))


@pytest.mark.parametrize("is_traced", [False, True])
def test_a_layer_that_takes_positions_from_its_cache_gives_what_it_gives_in_generate(is_traced):
    model = build("llama", 19)
    _counting(model.network, _position)
    tokens, _ = greedy_and_margin(model, list(range(30)), 20)
    assert tokens != greedy_and_margin(build("llama", 19), list(range(30)), 20)[0]
    sizes = EngineConfig(num_blocks=60, block_size=4, max_num_batched_tokens=9)
    engine = Engine(model, backends.get_backend("numba"), sizes)
    if is_traced:
        engine.network.trace()
    prompts = [list(range(30)), list(range(20)), list(range(30))]
    first, _, again = engine.generate(prompts, SamplingParams(max_tokens=20, ignore_eos=True))
    assert first.request.output_tokens == again.request.output_tokens == tokens
    assert engine.stats.num_hit_tokens > 0
    assert greedy_and_margin(model, list(range(30)), 20)[0] == tokens  # it is left as it was


def test_a_layer_that_follows_the_length_of_its_cache_alone_is_refused():
    network = build("llama").network
    probe_layers(network, CPU)
    _counting(network, _length)
    with pytest.raises(UnsupportedModelError, match="from position_ids, the queries of layer 1"):
        check_tokens_alone(network, CPU, 256)


def test_rows_elsewhere_leave_indices_and_what_cancels_out_as_they_are():
    values, elsewhere = torch.rand(4), RowsElsewhere(4, 1000)
    with elsewhere:
        rows = torch.arange(4)
        picked, selected = values[rows], values.index_select(0, rows)
        less, (left, right) = (rows + 7) - rows, (rows.float() / 2).split(2)
    for tensor in (picked, selected, values):
        assert elsewhere.twin(tensor) is tensor
    assert elsewhere.twin(less).tolist() == less.tolist() == [7] * 4
    assert (elsewhere.twin(left) - left).tolist() == (elsewhere.twin(right) - right).tolist()
    assert (elsewhere.twin(right) - right).tolist() == [500.0, 500.0]


class Layer(nn.Module):
    layer_idx = 0


STATES = torch.zeros(1, 2, 3, 16)


def test_a_layer_that_passes_nothing_on_is_refused():
    with pytest.raises(UnsupportedModelError, match="Identity: wanted an attention layer"):
        attend(nn.Identity(), STATES, STATES, STATES, None)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"position_bias": STATES}, "Layer: its attention gets position_bias, which"),
        ({"is_causal": False}, "Layer: wanted causal attention, it is bidirectional"),
        ({"dropout": 0.1}, "Layer: wanted a network in evaluation, got dropout=0.1"),
    ],
)
def test_what_a_layer_asks_for_is_done_or_refused(asked, message):
    with pytest.raises(UnsupportedModelError, match=message):
        attend(Layer(), STATES, STATES, STATES, None, paged=Probe(), **asked)


def test_a_layer_that_says_of_itself_that_it_is_not_causal_is_refused():
    layer = Layer()
    layer.is_causal = False
    with pytest.raises(UnsupportedModelError, match="wanted causal attention"):
        attend(layer, STATES, STATES, STATES, None, paged=Probe())


def test_what_says_nothing_is_passed_over():
    asked = {"position_bias": None, "output_attentions": False, "position_ids": torch.zeros(1, 3)}
    probe = Probe()
    attend(Layer(), STATES, STATES, STATES, None, paged=probe, is_causal=True, dropout=0.0, **asked)
    assert probe.shapes == {0: LayerShape(2, 16, torch.float32)}


@pytest.mark.parametrize(("of_keys", "of_values"), [(16, 8), (8, 16)])
def test_values_of_another_size_are_attended_to_exactly(of_keys, of_values):
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0))
    query, key, value = draw(1, 2, 3, of_keys), draw(1, 2, 3, of_keys), draw(1, 2, 3, of_values)

    class Dense:
        def attend(self, layer, query, key, value, terms):
            assert query.shape == key.shape == value.shape
            logits = torch.einsum("qhd,khd->hqk", query, key) * terms.scale
            logits = logits.masked_fill(~torch.ones(3, 3).tril().bool(), -torch.inf)
            return torch.einsum("hqk,khd->qhd", logits.softmax(-1), value)

    out, _ = attend(Layer(), query, key, value, None, paged=Dense())
    wanted = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    torch.testing.assert_close(out, wanted.transpose(1, 2))
