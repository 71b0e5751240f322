from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, Qwen3NextConfig

import kvcore
from kvcore.adapters.transformers import PagedCache, PagedPool
from tests.adapters.tiny import VOCABULARY, WINDOW, draw_tokens, network

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # Transformers' own, of its next versions
]
BLOCK = 4
MODELS = {kind: network(kind) for kind in ("full", "hybrid")}


@pytest.fixture(params=MODELS)
def model(request):
    return MODELS[request.param]


@pytest.fixture
def pool(model):
    made = PagedPool(model, num_blocks=200, block_size=BLOCK)
    yield made
    made.close()


def padded(*lengths):
    """A batch of prompts of these lengths, padded on the left, and its mask."""
    width = max(lengths)
    rows = [[0] * (width - n) + draw_tokens(n, n) for n in lengths]
    mask = [[0] * (width - n) + [1] * n for n in lengths]
    return torch.tensor(rows), torch.tensor(mask)


def at_rest(pool):
    kvcore.check(pool.kv)
    return pool.kv.num_free_blocks == pool.kv.num_usable_blocks


def num_held(pool):
    return pool.kv.num_usable_blocks - pool.kv.num_free_blocks


WAYS = {
    "greedy": {},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "drawn": {"do_sample": True, "num_return_sequences": 2},
    "in chunks": {"prefill_chunk_size": 5},
    "looked up": {"prompt_lookup_num_tokens": 3},
    "assisted": {"assistant_model": network("full", seed=5)},
}


@pytest.mark.parametrize("way", WAYS)
def test_generate_writes_the_tokens_of_the_stock_cache_and_hits_the_second_time(model, pool, way):
    alone = way in {"looked up", "assisted"}  # which take one prompt
    ids, mask = padded(19) if alone else padded(19, 14, 6)
    torch.manual_seed(1)
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=12, **WAYS[way])
    hits = []
    for _ in range(2):
        with pool.open(ids, mask) as cache:
            hits.append(cache.get_seq_length())
            torch.manual_seed(1)
            found = model.generate(
                ids, attention_mask=mask, past_key_values=cache, max_new_tokens=12, **WAYS[way]
            )
        assert torch.equal(found, expected)
        assert at_rest(pool)
    assert hits == [0, 16]


def test_a_second_turn_computes_only_what_is_new(model, pool):
    ids, _ = padded(13)
    with pool.open(ids) as cache:
        first = model.generate(ids, past_key_values=cache, max_new_tokens=8)
    second = torch.cat([first, torch.tensor([draw_tokens(3, 5)])], dim=1)
    with pool.open(second) as cache:
        assert cache.get_seq_length() == 20
        found = model.generate(second, past_key_values=cache, max_new_tokens=8)
    assert torch.equal(found, model.generate(second, max_new_tokens=8))


def test_beams_share_their_prompt():
    model = MODELS["full"]
    pool = PagedPool(model, num_blocks=60, block_size=BLOCK)
    ids, _ = padded(80)
    with pool.open(ids) as cache:
        model.generate(ids, past_key_values=cache, max_new_tokens=6, num_beams=4)
        held = num_held(pool)
    stock = model.generate(ids, max_new_tokens=6, num_beams=4, return_dict_in_generate=True)
    stock_bytes = sum(2 * layer.keys.nbytes for layer in stock.past_key_values.layers)
    assert held * pool.num_bytes / 60 < stock_bytes / 3
    pool.close()


def test_namespaces_share_nothing(pool, model):
    ids, _ = padded(9)
    for salt, expected in ((b"red", 0), (b"blue", 0), (b"red", 8)):
        with pool.open(ids, namespace=kvcore.Namespace(salt=salt)) as cache:
            assert cache.get_seq_length() == expected
            model.generate(ids, past_key_values=cache, max_new_tokens=2)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("compute"), st.integers(1, 6), st.integers(0, 5)),
        st.tuples(st.just("choose"), st.lists(st.integers(0, 9), min_size=1, max_size=4)),
        st.tuples(st.just("repeat"), st.just(2)),
        st.tuples(st.just("crop"), st.integers(1, 20)),
    ),
    max_size=7,
)


class Twins:
    """A stock cache and ours, through the same steps; every logit has to be the same."""

    def __init__(self, model, pool, lengths):
        self.model, self.pool = model, pool
        self.has_window = len(pool.windows) > 1
        self.ids, self.mask = padded(*lengths)
        self.ours = pool.open(self.ids, self.mask)
        self.stock = DynamicCache(config=model.config)
        self.stock.activate_past_recording()
        self.compute(self.ids[:, self.ours.get_seq_length() :])

    def compute(self, new):
        """One forward pass of each; ours may begin where the prompt's hits end."""
        ours = self._forward(self.ours, new)
        behind = self.ours.get_seq_length() - self.stock.get_seq_length()
        stock = self._forward(self.stock, self.ids[:, -behind:])
        visible = self.mask[:, -new.shape[1] :].bool()
        last = -new.shape[1] if behind == new.shape[1] else -1  # hits give the last logits alone
        torch.testing.assert_close(
            ours[:, last:][visible[:, last:]],
            stock[:, last:][visible[:, last:]],
            atol=1e-4,
            rtol=1e-4,
        )
        if self.has_window:
            self.stock.crop(0)

    def _forward(self, cache, new):
        columns = cache.get_seq_length() + new.shape[1]
        positions = (self.mask[:, :columns].cumsum(1) - 1).clamp(min=0)[:, -new.shape[1] :]
        with torch.no_grad():
            return self.model(
                input_ids=new,
                attention_mask=self.mask[:, :columns],
                position_ids=positions,
                past_key_values=cache,
            ).logits

    def step(self, verb, *arguments):
        if verb == "compute":
            self.grow(*arguments)
        elif verb == "choose":
            self.select([row % len(self.ids) for row in arguments[0]])
        elif verb == "repeat" and len(self.ids) <= 3:
            rows = torch.arange(len(self.ids)).repeat_interleave(2)
            self.ids, self.mask = self.ids[rows], self.mask[rows]
            self.stock.batch_repeat_interleave(2)
            self.ours.batch_repeat_interleave(2)
        elif verb == "crop" and not self.has_window and self.ids.shape[1] > 1:
            self.crop(min(arguments[0], self.ids.shape[1] - 1))
        kvcore.check(self.pool.kv)

    def grow(self, count, rejected):
        """A forward pass; then drafts among its tokens are taken back."""
        seed = self.ids.shape[1]
        new = torch.tensor([draw_tokens(seed + row, count) for row in range(len(self.ids))])
        self.ids = torch.cat([self.ids, new], dim=1)
        self.mask = torch.cat([self.mask, torch.ones_like(new)], dim=1)
        behind = self.ids.shape[1] - self.ours.get_seq_length()
        if self.has_window and rejected:
            self.stock.activate_past_recording()
        self.compute(self.ids[:, -behind:])
        if not self.has_window and rejected and rejected < count:
            self.crop(rejected)

    def select(self, rows):
        index = torch.tensor(rows)
        self.ids, self.mask = self.ids[index], self.mask[index]
        self.stock.reorder_cache(index)
        self.ours.reorder_cache(index)

    def crop(self, count):
        self.ids, self.mask = self.ids[:, :-count], self.mask[:, :-count]
        self.stock.crop(-count)
        self.ours.crop(-count)


@settings(
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    kind=st.sampled_from(sorted(MODELS)),
    lengths=st.lists(st.integers(1, 17), min_size=1, max_size=3),
    steps=STEPS,
)
def test_every_logit_is_that_of_the_stock_cache(kind, lengths, steps):
    pool = PagedPool(MODELS[kind], num_blocks=400, block_size=BLOCK)
    for _ in range(2):  # the second time with hits
        twins = Twins(MODELS[kind], pool, lengths)
        for step in steps:
            twins.step(*step)
        twins.ours.close()
        assert at_rest(pool)
    pool.close()


def test_rejected_drafts_come_back_behind_a_window():
    model = MODELS["hybrid"]
    pool = PagedPool(model, num_blocks=60, block_size=BLOCK)
    ids, _ = padded(3 * WINDOW)
    with pool.open(ids) as cache, torch.no_grad():
        model(input_ids=ids, past_key_values=cache)
        model(input_ids=torch.tensor([[5, 6, 7]]), past_key_values=cache)
        cache.crop(-3)
        found = model(input_ids=torch.tensor([[8]]), past_key_values=cache).logits
        expected = model(input_ids=torch.cat([ids, torch.tensor([[8]])], dim=1)).logits[:, -1:]
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        model(input_ids=torch.tensor([[9]]), past_key_values=cache)
        with pytest.raises(kvcore.InvalidArgumentError, match="window has left"):
            cache.crop(-2 * WINDOW)
        assert cache.get_seq_length() == 3 * WINDOW + 2
    pool.close()


def test_a_full_pool_is_an_error_that_changes_nothing():
    model = MODELS["full"]
    pool = PagedPool(model, num_blocks=6, block_size=BLOCK)
    ids, _ = padded(18)
    with pool.open(ids) as cache, torch.no_grad():
        model(input_ids=ids, past_key_values=cache)
        with pytest.raises(kvcore.OutOfBlocksError):
            model(input_ids=torch.tensor([[1, 2, 3]]), past_key_values=cache)
        with pytest.raises(kvcore.OutOfBlocksError):
            cache.batch_repeat_interleave(3)
        found = model(input_ids=torch.tensor([[1]]), past_key_values=cache).logits
        expected = model(input_ids=torch.cat([ids, torch.tensor([[1]])], dim=1)).logits[:, -1:]
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert at_rest(pool)
    pool.close()


def test_a_batch_with_a_row_that_is_refused_leaves_nothing_open(pool, model):
    ids, _ = padded(9)
    with pool.open(ids) as cache, torch.no_grad():
        model(input_ids=ids, past_key_values=cache)
    with pytest.raises(kvcore.InvalidArgumentError, match="token"):
        pool.open(torch.cat([ids, torch.full((1, 9), -100)]))
    assert pool.kv.sequences == {}
    assert at_rest(pool)


@pytest.mark.parametrize("length", [28, 32])
@pytest.mark.parametrize("back", range(1, 6))
def test_a_cut_that_does_not_fit_behind_a_window_changes_no_row(length, back):
    model = MODELS["hybrid"]
    ids = torch.tensor([draw_tokens(seed, length) for seed in (1, 2)])
    for spare in range(4, 9):
        pool = PagedPool(model, num_blocks=64, block_size=BLOCK)
        with pool.open(ids) as cache, torch.no_grad():
            model(input_ids=ids, past_key_values=cache)
            model(input_ids=torch.tensor([[5], [5]]), past_key_values=cache)
            hog = pool.kv.open([1], namespace=None)
            pool.kv.reserve_to(hog, (pool.kv.num_free_blocks - spare) // 2 * BLOCK)
            before = [(s.num_tokens, s.num_blocks) for s in pool.kv.sequences.values()]
            try:
                cache.crop(-back)
            except (kvcore.OutOfBlocksError, kvcore.InvalidArgumentError):
                assert [(s.num_tokens, s.num_blocks) for s in pool.kv.sequences.values()] == before
            pool.kv.close(hog)
        pool.close()


def test_a_failed_forward_pass_publishes_nothing(monkeypatch):
    model = MODELS["full"]
    pool = PagedPool(model, num_blocks=20, block_size=BLOCK)
    ids, _ = padded(9)

    def fails(*_, **__):
        raise RuntimeError("out of memory")

    with pool.open(ids) as cache, torch.no_grad():
        with monkeypatch.context() as patch:
            patch.setattr(model.model.layers[1], "forward", fails)
            with pytest.raises(RuntimeError, match="out of memory"):
                model(input_ids=ids, past_key_values=cache)
        assert pool.kv.plan(ids[0].tolist()).num_cached_tokens == 0
        found = model(input_ids=ids, past_key_values=cache).logits
        torch.testing.assert_close(found, model(input_ids=ids).logits)
    pool.close()


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ([[1, 1, 0], [1, 1, 1]], "on the left"),
        ([[1, 0, 1], [1, 1, 1]], "on the left"),
        ([[1, 1], [1, 1]], r"wanted \(2, 3\)"),
    ],
)
def test_padding_elsewhere_is_refused(pool, mask, message):
    with pytest.raises(kvcore.InvalidArgumentError, match=message):
        pool.open(torch.ones(2, 3, dtype=torch.long), torch.tensor(mask))
    assert pool.kv.sequences == {}


def test_tokens_that_the_cache_was_not_opened_for_are_refused(model, pool):
    ids, _ = padded(6, 6)
    with pool.open(ids) as cache, torch.no_grad():
        with pytest.raises(kvcore.InvalidArgumentError, match="row 1 has other tokens"):
            model(input_ids=ids + torch.tensor([[0], [1]]) % VOCABULARY, past_key_values=cache)
        with pytest.raises(kvcore.InvalidArgumentError, match="wanted 2 rows, got 3"):
            model(input_ids=ids[[0, 0, 1]], past_key_values=cache)
        with pytest.raises(kvcore.InvalidArgumentError, match="token ids"):
            model(inputs_embeds=torch.zeros(2, 6, 16), past_key_values=cache)
        with pytest.raises(kvcore.InvalidArgumentError, match="hears which tokens"):
            model.model(input_ids=ids, past_key_values=cache)
        with pytest.raises(kvcore.InvalidArgumentError, match="-0 to 0"):
            cache.crop(3)


def test_a_layer_that_keeps_more_than_keys_and_values_is_refused():
    config = Qwen3NextConfig(
        num_hidden_layers=2, layer_types=["full_attention", "linear_attention"]
    )
    with pytest.raises(kvcore.InvalidArgumentError, match="got LinearAttentionLayer at 1"):
        PagedPool(SimpleNamespace(config=config), num_blocks=10)


def test_a_planted_slip_shows_in_the_logits(monkeypatch):
    """The tables of two rows are exchanged when rows are reordered."""
    select = PagedCache._select

    def slips(cache, chosen):
        select(cache, chosen)
        cache._rows.reverse()

    monkeypatch.setattr(PagedCache, "_select", slips)
    pool = PagedPool(MODELS["full"], num_blocks=100, block_size=BLOCK)
    twins = Twins(MODELS["full"], pool, [5, 5])
    twins.step("compute", 3, 0)
    twins.step("choose", [0, 1])
    with pytest.raises((AssertionError, kvcore.InvalidArgumentError)):
        twins.step("compute", 3, 0)
    pool.close()
