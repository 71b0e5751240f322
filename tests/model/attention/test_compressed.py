"""Compressed keys (DeepSeek-V4): generate's tokens, what a step completes, and what is refused."""

import copy
import functools
from dataclasses import replace

import pytest
import torch

import backends
from model import EngineConfig, SamplingParams, Submission
from model.attention.compressed import PagedEntries
from model.caches.layout import EntriesShape, IndexShape, LayerShape, plan_layout
from model.engine import Engine
from model.errors import UnsupportedModelError
from model.load.probes import check_tokens_alone, probe_layers
from model.load.recurrence import find_states
from tests.model import walk
from tests.model.networks import KnowingDrafter, greedy_and_margin, preempt_in_steps
from tests.model.tiny_configs import make_config

CPU = torch.device("cpu")
NUM_TOKENS = 20
SAMPLING = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
COMMON = 32  # tokens: blocks of 4 rows, and entries of 8 tokens

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level("ERROR")


def network_of(seed=0, **changes):
    config = make_config("DeepseekV4Config", "")
    for field, value in changes.items():
        setattr(config, field, value)
    model = walk.build_network(copy.deepcopy(config), seed)
    for name, parameter in model.network.named_parameters():
        if "compressor" in name and "norm" not in name:  # they begin at little that shows
            torch.nn.init.normal_(parameter)
    return model


@functools.cache
def clear_case():
    """A network, prompts of which two share 70 tokens, and generate's tokens."""
    draw = torch.Generator().manual_seed(5)
    shared, *others = [
        torch.randint(3, 256, (count,), generator=draw).tolist() for count in (70, 3, 9, 41, 6)
    ]
    texts = [[*shared, *others[0]], [*shared, *others[1]], *others[2:]]
    for seed in range(20):
        model = network_of(seed)
        found = [greedy_and_margin(model, text, NUM_TOKENS) for text in texts]
        if min(margin for _, margin in found) > 1e-3:
            return model, texts, [tokens for tokens, _ in found]
    raise AssertionError("no clear network")


def engine_of(model, **settings):
    numbers = {"block_size": 4, "num_blocks": 160} | settings
    return Engine(model, backends.get_backend("numba"), EngineConfig(**numbers))


def tokens_of(engine, texts):
    return [one.request.output_tokens for one in engine.generate(texts, SAMPLING)]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 11, "swap_memory_bytes": 0},
        {"max_num_batched_tokens": 7, "swap_memory_bytes": 1 << 22},
        {"max_num_batched_tokens": 13, "host_memory_bytes": 1 << 22},
        {"max_num_batched_tokens": 50, "async_scheduling": True},
        {"max_num_batched_tokens": 11, "block_size": 2, "num_blocks": 320},
    ],
    ids=["whole", "recomputed", "swapped", "host memory", "read late", "small blocks"],
)
def test_chunks_hits_and_preemption_give_the_tokens_of_generate(settings):
    model, texts, wanted = clear_case()
    engine = engine_of(model, **settings)
    if "swap_memory_bytes" in settings:
        preempt_in_steps(engine, {6, 14, 15, 30})
    assert tokens_of(engine, texts) == wanted
    assert tokens_of(engine, texts) == wanted
    assert engine.stats.num_hit_tokens >= 2 * COMMON
    assert (engine.stats.num_preemptions > 0) == ("swap_memory_bytes" in settings)
    assert engine.kv.num_free_blocks == engine.kv.num_usable_blocks


def test_rejected_drafts_leave_no_part_and_no_entry():
    model, texts, wanted = clear_case()
    engine = engine_of(model, drafts="ngram")
    whole = [(*text, *tokens) for text, tokens in zip(texts, wanted, strict=True)]
    engine._scheduler._drafter = KnowingDrafter(whole)
    assert tokens_of(engine, texts) == wanted
    stats = engine.stats
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


def test_forks_of_a_prompt_copy_what_is_not_complete():
    model, texts, wanted = clear_case()
    engine = engine_of(model)
    requests = engine.submit(Submission(texts[0], replace(SAMPLING, n=3)))
    while engine.has_unfinished:
        engine.step()
    assert [request.output_tokens for request in requests] == [wanted[0]] * 3


def _forgets_entries(monkeypatch):
    monkeypatch.setattr(PagedEntries, "store_entries", lambda *_, **__: None)


def _keeps_too_few_parts(monkeypatch):
    beside = LayerShape.beside
    monkeypatch.setattr(
        LayerShape,
        "beside",
        lambda self: (
            shape if shape.window is None else replace(shape, window=1) for shape in beside(self)
        ),
    )


def _overlaps_with_nothing(monkeypatch):
    complete = PagedEntries.complete

    def wrong(self, layer, parts, rate, *, is_index):
        found = complete(self, layer, parts, rate, is_index=is_index)
        found.parts[~found.is_new] = 0
        return found

    monkeypatch.setattr(PagedEntries, "complete", wrong)


def _chooses_the_oldest(monkeypatch):
    choose = PagedEntries.choose_entries

    def wrong(self, layer, query, weights, count):
        choose(self, layer, query, weights, count)
        for key, chosen in self.kept.items():
            if key[0] == "chosen":
                chosen[:] = torch.arange(count)

    monkeypatch.setattr(PagedEntries, "choose_entries", wrong)


def _is_off_by_an_entry(monkeypatch):
    completed = PagedEntries._completed

    def wrong(self, entries):
        *others, slots = completed(self, entries)
        return *others, slots.roll(1)

    monkeypatch.setattr(PagedEntries, "_completed", wrong)


@pytest.mark.parametrize(
    "planted",
    [
        _forgets_entries,
        _keeps_too_few_parts,
        _overlaps_with_nothing,
        _chooses_the_oldest,
        _is_off_by_an_entry,
    ],
)
def test_the_comparison_with_generate_sees_a_planted_bug(planted, monkeypatch):
    model, texts, wanted = clear_case()
    planted(monkeypatch)
    engine = engine_of(model, block_size=2, num_blocks=320, max_num_batched_tokens=11)
    assert tokens_of(engine, texts) != wanted


def test_the_sanitizer_finds_nothing():
    model, texts, wanted = clear_case()
    engine = engine_of(model, sanitize=True, max_num_batched_tokens=23)
    assert tokens_of(engine, texts[2:]) == wanted[2:]


def test_entries_lie_in_the_place_of_their_layer_and_take_a_row_for_their_rate():
    def layer(entries):
        return LayerShape(1, 16, torch.bfloat16, window=8, value_dim=16, entries=entries)

    index = IndexShape(4, torch.bfloat16, 3)
    heavy, sparse = EntriesShape(8, 2, 8), EntriesShape(4, 4, 8, index)
    layers = [layer(one) for one in (heavy, sparse, None) * 4]
    layout = plan_layout(layers)
    assert layout.own_layers == tuple(layers)
    assert len({*layout.places}) == len(layout.layers) == 12 + 4 * 3 + 4 * 5
    for number, (*parts, entries) in layout.beside.items():
        assert layout.places[entries][1] == layout.places[number][1]
        assert layout.layers[entries].rate == layers[number].entries.rate
        assert [layout.layers[part].window for part in parts] == [8] * len(parts)
    sizes = [group.block_size for group in layout.groups(4)]
    assert {*sizes} == {4, 16, 32}
    assert sizes == [4 * rate for rate in layout.rates]
    of_parts, of_entries = 4 * (2 * 32 + 4 * (32 + 8)), 4 * (32 // 8 + (32 + 8) // 4)
    assert layout.token_bytes == 12 * 32 + of_parts + of_entries


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"kv_dtype": "fp8"}, "kv_dtype: wanted layers without compressed keys"),
        ({"batch_invariant": True}, "one row of 16 numbers .* without --batch-invariant"),
    ],
)
def test_settings_that_cannot_serve_them_are_refused(change, reason):
    model, texts, _ = clear_case()
    with pytest.raises(UnsupportedModelError, match=reason):
        tokens_of(engine_of(model, **change), texts)


def test_a_backend_without_latents_is_refused():
    numba = backends.get_backend("numba")

    class Without(type(numba)):
        capabilities = replace(numba.capabilities, max_latent_dim=8)

    with pytest.raises(UnsupportedModelError, match=r"one row of 16 numbers .* at most 8; use"):
        Engine(clear_case()[0], Without(), EngineConfig(block_size=4, num_blocks=90))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda cache: cache.keep_all("x"), "asks its cache for keep_all"),
        (
            lambda cache: cache.store_compression_weights("other", *[torch.ones(1, 2, 16)] * 2),
            "keeps other",
        ),
        (
            lambda cache: cache.store_compression_weights(
                "compressor", *[torch.ones(1, 2, 24)] * 2
            ),
            "compresses",
        ),
    ],
)
def test_a_compressor_of_another_kind_is_refused_by_what_it_does(change, reason, monkeypatch):
    network = network_of().network
    compressor = network.model.layers[0].self_attn.compressor
    monkeypatch.setattr(
        type(compressor), "forward", lambda self, rows, _, __, cache, ___: change(cache.layers[0])
    )
    find_states(network, CPU)
    with pytest.raises(UnsupportedModelError, match=f"DeepseekV4HCACompressor .*: it {reason}"):
        probe_layers(network, CPU)


def test_parts_that_follow_other_tokens_are_found(monkeypatch):
    network = network_of().network
    compressor = network.model.layers[0].self_attn.compressor
    forward = compressor.kv_proj.forward
    monkeypatch.setattr(compressor.kv_proj, "forward", lambda rows: forward(rows).cumsum(1))
    find_states(network, CPU)
    with pytest.raises(UnsupportedModelError, match="the parts of entries of layer 0 follow other"):
        check_tokens_alone(network, CPU, 100)
