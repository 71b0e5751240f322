import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers.generation.continuous_batching.model_runner import (
    ModelRunner,
    infer_max_single_request_tokens,
)
from transformers.generation.continuous_batching.requests import RequestState

import kvcore
from kvcore.adapters.transformers import (
    KVCoreCache,
    install,
    uninstall,
)
from tests.adapters.tiny import draw_tokens, network
from tests.adapters.transformers_runs import (
    Run,
    both,
    greedy,
    hot_and_cold,
    prompts_that_share,
    sizes,
)

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # Transformers' own, of its next versions
]


def at_rest(cache):
    kvcore.check(cache.kv)
    return not cache.sequences and cache.kv.num_free_blocks == cache.kv.num_usable_blocks


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
    stock, ours = both("full", hot_and_cold(30), 40, max_requests_per_batch=1, safety_margin=0.5)
    assert ours.tokens == stock.tokens
    assert ours.cache.kv.stats().num_hit_tokens == 9 * 32  # all but the first
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


@pytest.mark.parametrize("kind", ["full", "hybrid"])
def test_a_compiled_pass_is_warmed_up_and_writes_the_tokens_of_the_stock_cache(kind, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # takes 20 s, else
    warmed = []  # how long it took: 0.0 where it has failed
    warm_up = ModelRunner.run_one_warmup

    def noted(runner, **more):
        warmed.append(warm_up(runner, **more))
        return warmed[-1]

    monkeypatch.setattr(ModelRunner, "run_one_warmup", noted)
    model = network(kind)
    found = []
    for prepare in (uninstall, install):
        prepare(model)
        made = model.generate_batch(
            prompts_that_share(5),
            generation_config=greedy(),
            continuous_batching_config=sizes(40, default_compile_level=1),
            persistent_manager=prepare is install,
        )
        found.append([output.generated_tokens for output in made.values()])
    assert found[0] == found[1]
    assert len(warmed) == 2
    assert all(warmed)
    cache = model._cached_continuous_batching_manager.batch_processor.cache
    assert at_rest(cache)
    uninstall(model)


@pytest.mark.parametrize("kind", ["full", "hybrid"])
def test_a_dry_run_for_an_unknown_request_says_what_would_fit_and_opens_nothing(kind):
    model = network(kind)
    install(model)
    manager = model.init_continuous_batching(greedy(), sizes(10))
    cache = manager._create_batch_processor().cache
    most = infer_max_single_request_tokens(cache)
    assert not cache.sequences
    for count, fits in ((most + 1, False), (most, True)):
        state = RequestState("a", initial_tokens=[0] * count)
        assert cache.can_store_request_tokens(state, count, dry_run=True) is fits
        assert cache.can_store_request_tokens(state, count) is fits
    cache.free_blocks("a")
    assert at_rest(cache)
    manager.destroy()


def test_other_models_keep_the_stock_cache():
    installed, other = network("full"), network("full")
    install(installed)
    prompts = [draw_tokens(0, 9)]
    assert not hasattr(Run(other, prompts, sizes(40)).cache, "kv")
    assert hasattr(Run(installed, prompts, sizes(40)).cache, "kv")
    uninstall(installed)
    assert not hasattr(Run(installed, prompts, sizes(40)).cache, "kv")


def test_another_version_is_refused_by_name(tmp_path):
    (tmp_path / "transformers.py").write_text('__version__ = "4.57.1"')
    command = "import kvcore.adapters.transformers"
    done = subprocess.run(
        [sys.executable, "-c", command],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr.splitlines()[-1].endswith(
        "UnsupportedVersionError: transformers: wanted 5.19, 5.20, 5.21, 5.22, 5.23 or 5.24, "
        "got 4.57.1"
    )


def test_kvcore_alone_loads_no_tensor_library():
    command = (
        "import kvcore, kvcore.adapters, sys; print({'torch', 'transformers'} & {*sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", command], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"


def test_the_example_of_the_page_prints_what_it_shows(forks):
    page = (ROOT / "docs" / "how-to" / "transformers.md").read_text(encoding="utf-8")
    program = ROOT / "docs" / "examples" / "transformers_adapter.py"
    done = forks.run(program)
    assert done.returncode == 0, done.stderr
    assert done.stdout in page


def test_what_cannot_generate_is_refused():
    with pytest.raises(kvcore.InvalidArgumentError, match="got Linear"):
        install(torch.nn.Linear(1, 1))
