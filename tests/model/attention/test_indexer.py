"""Layers that choose tokens by an index: generate's tokens, and what is refused."""

import copy
from dataclasses import replace

import pytest
import torch

import backends
from backends import sparse_oracle
from kvcore.sanitize import SanitizerError
from model import EngineConfig, ModelError, SamplingParams
from model.attention import indexer
from model.attention.attention import PagedPass
from model.engine import Engine
from model.errors import UnsupportedModelError
from model.load.probes import probe_layers
from model.load.recurrence import find_states
from tests.model import walk
from tests.model.networks import greedy_logits
from tests.model.prompts import NUM_TOKENS, prompts
from tests.model.tiny_configs import make_config

NUMBA = backends.get_backend("numba")
COUNT = 5


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level("ERROR")


def network_of(name="DeepseekV32", **changes):
    config = make_config(f"{name}Config", "")
    for field, value in ({"index_topk": COUNT} | changes).items():
        setattr(config, field, value)
    return walk.build_network(copy.deepcopy(config), seed=0)


def engine_of(model, **settings):
    return Engine(model, NUMBA, EngineConfig(block_size=4, num_blocks=90, **settings))


def tokens_of(engine):
    done = engine.generate(prompts(), SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True))
    return [one.request.output_tokens for one in done]


def wanted_of(model):
    return [greedy_logits(model, prompt, NUM_TOKENS)[0] for prompt in prompts()]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("planted", ["all", "last", "stale keys"])
def test_the_comparison_with_generate_sees_another_choice(monkeypatch, planted):
    model = network_of()
    engine, wanted = engine_of(model), wanted_of(model)
    choose = PagedPass.choose

    def wrong(self, layer, query, weights, key, count):
        if planted == "stale keys":
            return choose(self, layer, query, weights, key.roll(1, 0), count)
        chosen = choose(self, layer, query, weights, key, count)
        batch = self.batches[0]
        for t, (_, length) in enumerate(sparse_oracle.rows_of(batch)):
            last = torch.arange(max(0, length - count), length)
            chosen[t, : len(last)] = last
        return chosen if planted == "last" else None

    monkeypatch.setattr(PagedPass, "choose", wrong)
    if planted == "all":
        monkeypatch.setattr(indexer, "_Choice", lambda _: indexer.NoChoice())
        monkeypatch.setattr(indexer.NoChoice, "indices", property(lambda self: self), raising=False)
        monkeypatch.setattr(PagedPass, "choose", lambda *_: torch.zeros(1))
    assert tokens_of(engine) != wanted


@pytest.mark.filterwarnings("ignore")
def test_a_shared_choice_draft_tokens_and_a_dense_network_equal_generate():
    dense = {"mlp_layer_types": ["dense", "dense"]}
    for name, changes, settings in (
        ("GlmMoeDsa", {"indexer_types": ["full", "shared"]}, {"drafts": "ngram"}),
        ("DeepseekV32", dense, {"max_num_batched_tokens": 11}),
    ):
        model = network_of(name, **changes)
        wanted, engine = wanted_of(model), engine_of(model, **settings)
        if changes is dense:
            engine.network.trace()
        assert tokens_of(engine) == wanted, name


@pytest.mark.filterwarnings("ignore")
def test_a_layer_has_index_keys_and_one_that_shares_a_choice_has_none():
    model = network_of("GlmMoeDsa", indexer_types=["full", "shared"])
    engine = engine_of(model)
    first, second = engine.network.layout.layers
    assert (first.index.dim, first.index.count, second.index) == (32, COUNT, None)
    assert first.token_bytes == second.token_bytes + 4 * 32
    caches = engine.network.caches
    assert [*caches.indexes] == [0]
    assert caches.indexes[0].k.shape == (90, 4, 1, 32)
    assert sum(each.numel() for each in caches.storages) == engine.network.layout.kv_bytes(90, 4)
    first, second = engine.network.layer_calls()
    assert (first.index.num_heads, first.num_chosen) == (8, COUNT)
    assert (second.index, second.num_chosen) == (None, COUNT)


@pytest.mark.filterwarnings("ignore")
def test_a_backend_without_an_index_is_refused_by_what_it_lacks():
    model = network_of()
    without = copy.copy(NUMBA)
    for change, reason in (
        ({"max_index_dim": 0}, "and this backend chooses none; use --backend triton"),
        ({"max_chosen": 4}, "layer 0 attends to 5 tokens .* at most 4 tokens"),
    ):

        class Without(type(without)):
            capabilities = replace(NUMBA.capabilities, **change)

        with pytest.raises(UnsupportedModelError, match=reason):
            Engine(model, Without(), EngineConfig(block_size=4, num_blocks=90))


@pytest.mark.filterwarnings("ignore")
def test_an_index_that_chooses_nothing_is_refused():
    with pytest.raises(ModelError, match="index_topk: wanted at least 1, got 0"):
        engine_of(network_of(index_topk=0))


def _squared(scores):
    return scores.pow(2)


CHANGES = {
    "no ReLU": ("relu", lambda scores: scores, "multiplies its scores by"),
    "another activation": ("relu", torch.sigmoid, "computes sigmoid of its scores"),
    "squares": ("relu", _squared, "takes pow of its scores"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("change", CHANGES)
def test_an_index_of_another_kind_is_refused_by_what_it_computes(monkeypatch, change):
    name, function, reason = CHANGES[change]
    model = network_of()
    module = __import__(type(model.network).__module__, fromlist=["F"])
    with monkeypatch.context() as patch:
        patch.setattr(module.F, name, function)
        find_states(model.network, torch.device("cpu"))
        with pytest.raises(UnsupportedModelError, match=f"DeepseekV32Indexer .*{reason}"):
            probe_layers(model.network, torch.device("cpu"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "setting", [{"kv_dtype": "fp8"}, {"sanitize": True}, {"batch_invariant": True}]
)
def test_other_settings_serve_an_index_too(setting):
    model = network_of(mlp_layer_types=["dense", "dense"])
    found = tokens_of(engine_of(model, **setting))
    if "kv_dtype" in setting:
        assert [*map(len, found)] == [NUM_TOKENS] * len(found)
    else:
        assert found == wanted_of(model)


@pytest.mark.filterwarnings("ignore")
def test_the_sanitizer_sees_a_choice_of_a_slot_that_was_never_written(monkeypatch):
    engine = engine_of(network_of(), sanitize=True)
    choose = PagedPass.choose

    def too_far(self, layer, query, weights, key, count):
        batch = self.batches[0]
        tables, unused = batch.block_table.numpy(), self.caches.layers[0].k.shape[0] - 1
        tables[0, 0] = unused  # after the checks of the step
        return choose(self, layer, query, weights, key, count)

    monkeypatch.setattr(PagedPass, "choose", too_far)
    with pytest.raises(SanitizerError, match="attend_chosen of layer 0 has read a slot"):
        tokens_of(engine)
