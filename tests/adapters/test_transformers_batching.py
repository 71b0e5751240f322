import random

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

import kvcore
from kvcore.adapters import transformers_batching
from kvcore.adapters.transformers import (
    KVCoreCache,
    UnsupportedVersionError,
    install,
    uninstall,
)
from tests.adapters.tiny import draw_tokens, network

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # Transformers' own, of its next versions
]
WAIT_S = 60
PAGE = 4


def sizes(num_blocks, **more):
    return ContinuousBatchingConfig(
        page_size=PAGE,
        num_blocks=num_blocks,
        **{"max_batch_tokens": 32, "max_requests_per_batch": 6, **more},
    )


def greedy(num_return_sequences=1):
    made = GenerationConfig(max_new_tokens=7, do_sample=False, eos_token_id=-1)
    made.num_return_sequences = num_return_sequences  # twins, which its own check refuses
    return made


class Run:
    """What a model's continuous batching makes of some prompts, and what that took."""

    def __init__(self, model, prompts, config, generation=None, cancelled=()):
        self.computed = self.starved = 0
        self.tokens = {}
        generation = generation or greedy()
        manager = model.init_continuous_batching(generation, config)
        processor = manager.batch_processor = manager._create_batch_processor()
        self._count(processor)
        self.cache = processor.cache
        ids = [manager.add_request(list(prompt)) for prompt in prompts]
        for number in cancelled:
            manager.cancel_request(ids[number])
        wanted = generation.num_return_sequences * len(prompts) - len(cancelled)
        manager.start()  # with all of it in the queue: every run schedules the same
        try:
            self._collect(manager, wanted)
        finally:
            manager.stop()
            manager.destroy()

    def _collect(self, manager, wanted):
        while len(self.tokens) < wanted:
            result = manager.get_result(timeout=WAIT_S)
            assert result is not None, manager.background_thread_status.fatal_error
            assert result.error is None, result.error
            if result.is_finished():
                self.tokens[result.request_id] = result.generated_tokens

    def _count(self, processor):
        batches = processor.inputs_and_outputs
        prepare = batches.prepare_batch_tensors

        def counted(requests_in_batch, **more):
            self.starved += len(processor.scheduler.starved_requests)
            self.computed += sum(future.query_length for future in requests_in_batch)
            prepare(requests_in_batch=requests_in_batch, **more)

        batches.prepare_batch_tensors = counted


def prompts_that_share(count, seed=1):
    numbers = random.Random(seed)
    prefixes = [draw_tokens(seed + n, 24) for n in range(3)]
    return [
        numbers.choice(prefixes)[: numbers.choice([24, 20, 13])]
        + draw_tokens(seed * 1000 + n, numbers.randrange(1, 12))
        for n in range(count)
    ]


def at_rest(cache):
    kvcore.check(cache.kv)
    return not cache.sequences and cache.kv.num_free_blocks == cache.kv.num_usable_blocks


def both(kind, prompts, num_blocks, **more):
    """The stock cache's run, and ours."""
    model = network(kind)
    stock = Run(model, prompts, sizes(num_blocks), **more)
    install(model)
    return stock, Run(model, prompts, sizes(num_blocks), **more)


@pytest.mark.parametrize(
    ("kind", "num_blocks"), [("full", 200), ("full", 16), ("hybrid", 200), ("hybrid", 8)]
)
def test_the_tokens_are_those_of_the_stock_cache(kind, num_blocks):
    stock, ours = both(kind, prompts_that_share(14), num_blocks)
    assert ours.tokens == stock.tokens
    assert bool(ours.starved) == (num_blocks == 16)  # then some gave way
    assert at_rest(ours.cache)


@pytest.mark.parametrize("kind", ["full", "hybrid"])
def test_forked_requests_write_the_tokens_of_the_stock_cache(kind):
    stock, ours = both(kind, prompts_that_share(5), 30, generation=greedy(3))
    assert ours.tokens == stock.tokens
    assert len(ours.tokens) == 15
    assert at_rest(ours.cache)


def test_a_wrong_hit_shows_in_the_tokens(monkeypatch):
    prompts = [draw_tokens(0, 16) + draw_tokens(n, 9) for n in range(1, 5)]

    def hits_another_prompt(cache, request_id, prompt_ids):
        return find(cache, request_id, prompts[0][:16] + prompt_ids[:4] + prompt_ids[20:])

    find = KVCoreCache.search_prefix_match
    monkeypatch.setattr(KVCoreCache, "search_prefix_match", hits_another_prompt)
    model = network("full")
    stock = Run(model, prompts, sizes(60))
    install(model)
    ours = Run(model, prompts, sizes(60))
    assert ours.tokens != stock.tokens


def test_a_hot_prefix_outlives_prompts_that_come_once():
    hot = draw_tokens(0, 32)
    prompts = [
        (hot if n % 3 == 0 else draw_tokens(100 + n, 32)) + draw_tokens(n, 3) for n in range(30)
    ]
    model = network("full")
    one_at_a_time = sizes(40, max_requests_per_batch=1, safety_margin=0.5)
    stock = Run(model, prompts, one_at_a_time)
    install(model)
    ours = Run(model, prompts, sizes(40, max_requests_per_batch=1, safety_margin=0.5))
    assert ours.tokens == stock.tokens
    assert ours.cache.kv.stats().num_hit_tokens == 9 * 32
    assert stock.computed - ours.computed >= 5 * 32


def test_layers_with_a_window_share_prefixes_which_the_stock_cache_does_not():
    prompts = [draw_tokens(0, 32) + draw_tokens(n, 3) for n in range(1, 9)]
    stock, ours = both("hybrid", prompts, 200)
    assert ours.tokens == stock.tokens
    assert stock.cache.use_prefix_sharing is False
    assert ours.computed < stock.computed / 2


def test_a_cancelled_request_gives_its_blocks_back():
    model = network("full")
    install(model)
    run = Run(model, prompts_that_share(8), sizes(40), cancelled=[1, 6])
    assert len(run.tokens) == 6
    assert at_rest(run.cache)


def test_nobody_shares_without_a_namespace_or_when_sharing_is_off():
    prompts = [draw_tokens(0, 16)] * 4
    model = network("full")
    install(model, namespace=None)
    assert Run(model, prompts, sizes(60)).cache.kv.stats().num_hit_tokens == 0
    install(model)
    off = Run(model, prompts, sizes(60, allow_block_sharing=False))
    assert off.cache.kv.stats().num_hit_tokens == 0


def test_a_kept_manager_hits_what_an_earlier_call_has_computed():
    model = network("full")
    install(model)
    for expected in (0, 16):
        made = model.generate_batch(
            [draw_tokens(0, 17)],
            generation_config=greedy(),
            continuous_batching_config=sizes(60),
            persistent_manager=True,
        )
        assert [len(output.generated_tokens) for output in made.values()] == [7]
        cache = model._cached_continuous_batching_manager.batch_processor.cache
        assert cache.kv.stats().num_hit_tokens == expected
    uninstall(model)
    assert not hasattr(model, "_cached_continuous_batching_manager")


def test_other_models_keep_the_stock_cache():
    installed, other = network("full"), network("full")
    install(installed)
    prompts = [draw_tokens(0, 9)]
    assert not hasattr(Run(other, prompts, sizes(40)).cache, "kv")
    assert hasattr(Run(installed, prompts, sizes(40)).cache, "kv")
    uninstall(installed)
    assert not hasattr(Run(installed, prompts, sizes(40)).cache, "kv")


def test_another_version_is_refused_by_name(monkeypatch):
    with pytest.raises(UnsupportedVersionError, match=r"wanted 5\.\d+\.x.*, got 4\.57\.1"):
        transformers_batching.check_version("4.57.1")
    monkeypatch.setattr(transformers_batching, "SUPPORTED", ("4.0",))
    model = network("full")
    with pytest.raises(UnsupportedVersionError):
        install(model)
    assert "init_continuous_batching" not in vars(model)


def test_what_cannot_generate_is_refused():
    with pytest.raises(kvcore.InvalidArgumentError, match="got Linear"):
        install(torch.nn.Linear(1, 1))
