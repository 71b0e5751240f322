"""The engine on a small random network and the reference backend."""

import functools
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import kvcore
from model import (
    EngineConfig,
    FinishReason,
    InvalidArgumentError,
    RequestTooLongError,
    SamplingParams,
    StalledError,
    Submission,
)
from model.cli.start import start
from model.control.submission import salted
from model.engine import Engine
from model.errors import UnsupportedModelError
from model.forward import warm_up
from model.sample.request_sampler import Drawn
from model.tiny import CHECKPOINT_DIR
from tests.model.networks import build, greedy_and_margin
from tests.model.reference import ReferenceBackend

MOST_FILES, MOST_CALLS = 25, 205
SEED = 25  # the greedy choices of the prompts below are clear: the first test checks it
PROMPT = "a prompt of some length, "


@functools.cache
def network():
    return build("qwen3", SEED)


@pytest.fixture(params=[False, True], ids=["read at once", "read late"], autouse=True)
def is_async(request, monkeypatch):
    """Every test runs twice: a step's tokens are read at once, or after the next was sent."""
    monkeypatch.setitem(SIZES, "async_scheduling", request.param)
    return request.param


SIZES = {"num_blocks": 60, "block_size": 4}


def make(**sizes):
    sizes = {**SIZES, **sizes}
    return Engine(network(), ReferenceBackend(), EngineConfig(**sizes))


def tokens_of(completions):
    return [completion.request.output_tokens for completion in completions]


def greedy(max_tokens=12, **fields):
    return SamplingParams(max_tokens=max_tokens, **fields)


def drawn(seed, max_tokens=12):
    return SamplingParams(max_tokens=max_tokens, temperature=1.0, top_k=50, seed=seed)


def test_the_greedy_choices_of_these_prompts_are_clear():
    for prompt, count in ((PROMPT, 30), (PROMPT + "x", 12), ("first", 20), ("short", 12)):
        tokens, margin = greedy_and_margin(network(), prompt.encode(), count)
        assert len(set(tokens)) > 4
        assert margin > 1e-3


def test_a_cached_prompt_gives_what_an_uncached_one_gives():
    engine, uncached = make(), make(enable_prefix_caching=False)
    first = engine.generate([PROMPT], greedy())
    second = engine.generate([PROMPT], greedy())
    assert (first[0].request.num_cached_tokens, second[0].request.num_cached_tokens) == (0, 24)
    alone = uncached.generate([PROMPT, PROMPT], greedy())
    assert uncached.stats.num_hit_tokens == 0
    assert tokens_of(first) == tokens_of(second) == tokens_of(alone[:1]) == tokens_of(alone[1:])
    assert first[0].text == alone[0].text


def test_a_preempted_request_gives_what_an_undisturbed_one_gives_drawn_or_greedy():
    prompts = ["first", "second", "third one"]
    params = [greedy(20), drawn(5, 20), drawn(6, 20)]
    small, large = make(num_blocks=15, swap_memory_bytes=0), make()
    disturbed = small.generate(prompts, params)
    assert sum(done.request.num_preemptions for done in disturbed) > 0
    assert tokens_of(disturbed) == tokens_of(large.generate(prompts, params))
    assert large.stats.num_preemptions == 0
    assert small.kv.num_free_blocks == small.kv.num_usable_blocks


@pytest.mark.parametrize("budget", [1, 3, 7])
def test_a_prompt_in_chunks_gives_what_a_whole_one_gives(budget):
    chunked, whole = make(max_num_batched_tokens=budget), make()
    prompts = [PROMPT, "short", PROMPT + "x"]
    assert tokens_of(chunked.generate(prompts, greedy())) == tokens_of(
        whole.generate(prompts, greedy())
    )
    assert chunked.stats.num_steps > whole.stats.num_steps


def test_a_seed_gives_the_same_tokens_in_any_company_and_another_seed_others():
    alone = make().generate([PROMPT], drawn(7))
    company = make().generate(["x", PROMPT, PROMPT], [drawn(1), drawn(7), drawn(8)])
    assert tokens_of(alone) == tokens_of(company[1:2])
    assert tokens_of(company[1:2]) != tokens_of(company[2:])


def test_without_seeds_twins_differ_and_the_same_engine_seed_repeats_them():
    first = tokens_of(make(seed=3).generate([PROMPT, PROMPT], drawn(None)))
    assert first[0] != first[1]
    assert first == tokens_of(make(seed=3).generate([PROMPT, PROMPT], drawn(None)))
    assert first != tokens_of(make(seed=4).generate([PROMPT, PROMPT], drawn(None)))


@pytest.mark.parametrize("sizes", [{}, {"num_blocks": 14}, {"max_num_seqs": 2}])
@pytest.mark.parametrize("caching", [True, False])
def test_samples_of_a_prompt_are_drawn_apart_and_do_not_change_where_blocks_or_seats_are_few(
    sizes, caching
):
    alone = make(enable_prefix_caching=False)
    requests = [
        request
        for seed in (3, 4)
        for request in alone.submit(Submission(PROMPT, replace(drawn(seed), n=4)))
    ]
    while alone.has_unfinished:
        alone.step()
    tokens = [request.output_tokens for request in requests]
    assert len({tuple(sample) for sample in tokens}) == 8
    assert tokens[:1] == tokens_of(make().generate([PROMPT], drawn(3)))
    assert alone.stats.num_forks == 6
    # 25 tokens in blocks of 4: six are shared by four samples, the seventh is copied thrice.
    assert alone.kv.stats().peak_used_blocks < 2 * (6 + 4 * 4)

    engine = make(enable_prefix_caching=caching, **sizes)
    others = [
        request
        for seed in (3, 4)
        for request in engine.submit(Submission(PROMPT, replace(drawn(seed), n=4)))
    ]
    while engine.has_unfinished:
        engine.step()
    assert [request.output_tokens for request in others] == tokens
    assert engine.kv.num_free_blocks == engine.kv.num_usable_blocks
    if "num_blocks" in sizes:
        assert engine.stats.num_preemptions > 0 or engine.stats.num_forks < 6
    else:
        assert (engine.stats.num_forks < 6) == ("max_num_seqs" in sizes)


def test_a_number_of_samples_below_one_is_refused():
    with pytest.raises(InvalidArgumentError, match="n: wanted an integer from 1 to 1024, got 0"):
        SamplingParams(n=0)
    with pytest.raises(InvalidArgumentError, match="n: add_request continues a prompt once"):
        make().add_request(PROMPT, SamplingParams(n=2))


def test_blocks_that_were_swapped_out_come_back_as_they_were():
    prompts = ["first", "second", "third one"]
    params = [greedy(20), drawn(5, 20), drawn(6, 20)]
    small = make(num_blocks=15, swap_memory_bytes=1 << 20)
    disturbed = small.generate(prompts, params)
    assert small.stats.num_swaps == small.stats.num_preemptions > 0
    assert small.stats.num_loads > 0
    large = make(swap_memory_bytes=0)
    assert tokens_of(disturbed) == tokens_of(large.generate(prompts, params))
    assert small.kv.num_free_blocks == small.kv.num_usable_blocks


def test_a_request_of_a_higher_priority_overtakes_those_that_wait():
    engine = make(max_num_seqs=1)
    late, soon = engine.add_request("late", greedy(3)), None
    engine.step()
    soon = engine.submit(Submission("soon", greedy(3), priority=-1))[0]
    while not soon.is_finished:
        engine.step()
    assert not late.is_finished
    assert late.num_preemptions == 1
    while engine.has_unfinished:
        engine.step()
    assert late.output_tokens == tokens_of(make().generate(["late"], greedy(3)))[0]


def test_streamed_pieces_are_the_text_and_tokens_come_one_a_step():
    engine = make()
    whole = engine.generate([PROMPT], greedy())[0]
    outputs = list(engine.stream([PROMPT], greedy()))
    assert [list(output.token_ids) for output in outputs] == [
        [token] for token in whole.request.output_tokens
    ]
    assert "".join(output.take_text() for output in outputs) == whole.text
    assert outputs[-1].request.is_finished


def test_closing_a_stream_early_gives_all_blocks_back():
    engine = make()
    stream = engine.stream([PROMPT, "another"], greedy())
    request = next(stream).request
    assert engine.kv.num_free_blocks < engine.kv.num_usable_blocks
    stream.close()
    assert request.finish_reason is FinishReason.ABORTED
    assert engine.kv.num_free_blocks == engine.kv.num_usable_blocks
    assert not engine.has_unfinished


def test_a_step_is_sent_before_the_tokens_of_the_last_one_are_read(is_async, monkeypatch):
    engine = make()
    happened = []
    compute, read = engine.network.logits, Drawn.read
    monkeypatch.setattr(engine.network, "logits", lambda x: happened.append("sent") or compute(x))
    monkeypatch.setattr(Drawn, "read", lambda drawn: happened.append("read") or read(drawn))
    request = engine.add_request(PROMPT, greedy(3))
    counts = []
    while engine.has_unfinished:
        counts.append(len(engine.step()))
    assert counts == ([0, 1, 1, 1] if is_async else [1, 1, 1])
    late = ["sent", "sent", "read", "sent", "read", "read"]
    assert happened == (late if is_async else ["sent", "read"] * 3)
    assert request.num_output_tokens == 3


def test_more_samples_than_seats_are_read_at_once_in_any_case(is_async):
    engine = make(max_num_seqs=2)
    requests = engine.submit(Submission(PROMPT, replace(drawn(3), n=4)))
    assert len(engine.step()) == 2  # the others found no seat
    while engine.has_unfinished:
        engine.step()
    other = make()
    again = other.submit(Submission(PROMPT, replace(drawn(3), n=4)))
    while other.has_unfinished:
        other.step()
    assert [r.output_tokens for r in requests] == [r.output_tokens for r in again]


def test_an_aborted_request_leaves_the_others_as_they_were(is_async):
    engine = make()
    kept, dropped = engine.add_all([PROMPT, "another"], greedy())
    engine.step()
    assert engine.abort(dropped)
    assert not engine.abort(dropped)
    while engine.has_unfinished:
        engine.step()
    assert dropped.num_output_tokens == (0 if is_async else 1)
    assert kept.output_tokens == tokens_of(make().generate([PROMPT], greedy()))[0]


def test_a_stop_token_ends_a_request_and_a_stop_string_cuts_its_text():
    free = make().generate([PROMPT], greedy(30))[0]
    token = free.request.output_tokens[4]
    stopped = make().generate([PROMPT], greedy(30, stop_token_ids=(token,)))[0]
    place = free.request.output_tokens.index(token) + 1
    assert stopped.request.output_tokens == free.request.output_tokens[:place]
    assert stopped.request.finish_reason is FinishReason.STOP

    stop = free.text[4:6]
    cut = make().generate([PROMPT], greedy(30, stop=(stop,)))[0]
    assert cut.text == free.text[: free.text.index(stop)]
    assert cut.request.finish_reason is FinishReason.STOP
    assert cut.request.num_output_tokens < 30


def test_a_refused_prompt_among_several_leaves_nothing_behind():
    engine = make(num_blocks=10)
    with pytest.raises(RequestTooLongError):
        engine.generate([PROMPT, "x" * 60], greedy(4))
    with pytest.raises(InvalidArgumentError, match="wanted 2 of them, got 1"):
        engine.generate([PROMPT, PROMPT], [greedy()])
    assert not engine.has_unfinished
    assert len(engine.generate([PROMPT], greedy(4))) == 1


@pytest.mark.parametrize(
    ("prompt", "message"),
    [("", "text that is not empty"), ([], "at least one token"), ([1, 320], "token ids below 320")],
)
def test_a_prompt_that_means_nothing_is_refused(prompt, message):
    with pytest.raises(InvalidArgumentError, match=message):
        make().add_request(prompt)


def test_a_prompt_longer_than_the_models_positions_is_refused():
    with pytest.raises(RequestTooLongError, match="exceeds the model's 256 positions"):
        make(num_blocks=500).add_request([1] * 250, greedy(7))


@pytest.mark.parametrize(
    ("field", "value"), [("num_blocks", 1), ("block_size", 0), ("max_num_seqs", 0)]
)
def test_a_size_out_of_range_is_refused_by_name(field, value):
    with pytest.raises(InvalidArgumentError, match=f"{field}: wanted an integer"):
        make(**{field: value})


def test_more_memory_than_there_is_is_refused_with_the_bytes():
    with pytest.raises(InvalidArgumentError, match=r"num_blocks: .* blocks of .* GiB are free"):
        make(num_blocks=2**31 - 1, block_size=2**20)


def test_memory_of_unknown_size_is_still_refused_where_it_cannot_be_had(monkeypatch):
    monkeypatch.setattr(warm_up, "host_free_bytes", lambda: None)
    with pytest.raises(InvalidArgumentError, match=r"blocks of .* could not be allocated on cpu"):
        make(num_blocks=2**31 - 1, block_size=2**20)


def test_an_engine_can_run_on_the_caches_of_another():
    engine = make(num_blocks=30)
    trial = Engine(network(), ReferenceBackend(), EngineConfig(block_size=4), caches_of=engine)
    assert trial.network.caches is engine.network.caches
    assert trial.kv.num_blocks == 30
    assert tokens_of(trial.generate([PROMPT], greedy())) == tokens_of(
        engine.generate([PROMPT], greedy())
    )
    with pytest.raises(InvalidArgumentError, match="block_size: wanted 4, which the caches have"):
        Engine(network(), ReferenceBackend(), EngineConfig(block_size=8), caches_of=engine)


def test_without_a_number_there_are_as_many_blocks_as_are_useful():
    lengths = (9, 12, 1)  # in blocks of 4: 3, 3 and 1
    assert make(num_blocks=None, expected_lengths=lengths).kv.num_usable_blocks == 7


def test_a_failing_pass_gives_all_blocks_back_and_publishes_nothing(is_async, monkeypatch):
    engine = make()
    requests = engine.add_all([PROMPT, "another"], greedy())
    if is_async:
        assert engine.step() == []

    def broken(step):
        raise FloatingPointError(len(step.logit_rows))

    monkeypatch.setattr(engine.network, "logits", broken)
    with pytest.raises(FloatingPointError):
        engine.step()
    assert not engine.has_unfinished
    assert [r.finish_reason for r in requests] == [FinishReason.ABORTED] * 2
    stats = engine.kv.stats()
    assert (stats.num_used_blocks, stats.num_cached_blocks) == (0, 0)
    monkeypatch.undo()
    assert len(engine.generate([PROMPT], greedy())) == 1


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("when", [0, 3])
def test_a_row_that_is_no_numbers_ends_its_own_request_and_no_other(
    is_async, monkeypatch, value, when
):
    """And what it has computed is not found any more: it may be no numbers either."""
    prompts = [PROMPT, "another", PROMPT + "that is longer"]  # so that no positions are alike
    expected = tokens_of(make().generate(prompts, greedy(8)))
    engine = make()
    requests = engine.add_all(prompts, greedy(8))
    logits_of = engine.network.logits

    def poisoned(step):
        logits = logits_of(step).clone()
        last = requests[1].num_prompt_tokens + when - 1
        logits[step.position_ids[0, step.logit_rows] == last] = value
        return logits

    monkeypatch.setattr(engine.network, "logits", poisoned)
    outputs = []
    while engine.has_unfinished:
        outputs += engine.step()
    assert [r.finish_reason.value for r in requests] == ["length", "error", "length"]
    assert requests[1].output_tokens == expected[1][:when]
    assert [requests[0].output_tokens, requests[2].output_tokens] == [expected[0], expected[2]]
    assert [out.tokens for out in outputs if out.request is requests[1]][-1] == ()
    assert engine.kv.stats().num_used_blocks == 0
    monkeypatch.undo()
    again = engine.add_request("another", greedy(8))
    while engine.has_unfinished:
        engine.step()
    assert (again.num_cached_tokens, again.output_tokens) == (0, expected[1])


def test_there_are_never_more_seats_than_blocks():
    engine = make(num_blocks=30, max_num_seqs=10**9)
    assert engine.config.max_num_seqs == 29
    assert len(engine.generate([PROMPT, "another"], greedy(2))) == 2


def test_an_engine_whose_blocks_someone_else_holds_says_so_and_does_not_spin():
    engine = make(num_blocks=10)
    stranger = engine.kv.open([1])
    engine.kv.reserve(stranger, 30)
    engine.add_request(PROMPT, greedy(2))
    with pytest.raises(StalledError, match="none of them can be admitted"):
        engine.step()
    engine.kv.close(stranger)
    while engine.has_unfinished:
        engine.step()


def test_a_backend_without_the_models_dtype_is_refused_by_name():
    half = build("qwen3", SEED)
    half.network.half()
    with pytest.raises(
        UnsupportedModelError, match=r"backend reference: layer 0 is torch\.float16"
    ):
        Engine(half, ReferenceBackend(), EngineConfig(num_blocks=4))


def calls_of(engine):
    """The Python calls of our own code in one step: (file, function) -> how many."""
    calls, root = Counter(), Path(__file__).parents[2]
    ours = tuple(f"{root / package}/" for package in ("model", "kvcore", "backends"))

    def count(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(ours):
            calls[frame.f_code.co_filename, frame.f_code.co_name] += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        engine.step()
    finally:
        sys.setprofile(before)
    return calls


def test_a_decode_step_takes_few_files_and_calls(is_async, capsys):
    """What a reader follows, and what the host pays, for one token of two requests on a CPU."""
    model, backend = start(str(CHECKPOINT_DIR), "numba", "float32")
    config = EngineConfig(num_blocks=64, async_scheduling=is_async, compile=True)
    engine = Engine(model, backend, config)
    engine.prepare()
    for first in (1, 2):
        engine.add_request([first] * 20, SamplingParams(max_tokens=40, ignore_eos=True))
    for _ in range(6):  # to where no block begins
        engine.step()
    calls = calls_of(engine)
    num_files = len({file for file, _ in calls})
    with capsys.disabled():
        sys.stdout.write(
            f"\none decode step: {num_files} files, {calls.total()} calls of Python functions\n"
        )
    assert num_files <= MOST_FILES
    assert calls.total() <= MOST_CALLS


def test_prompts_share_a_cached_prefix_only_with_equal_items_salts_and_no_adapter():
    engine, tokens = make(), list(range(1, 26))
    image, other = (
        kvcore.MultimodalItem(b"an image", 4, 8),
        kvcore.MultimodalItem(b"another one", 4, 8),
    )

    def hits(items=(), salt=""):
        [request] = engine.submit(
            Submission(tokens, greedy(2), items=items, namespace=salted(salt))
        )
        while not request.is_finished:
            engine.step()
        return request.num_cached_tokens

    assert [hits(), hits()] == [0, 24]
    assert [hits([image]), hits([image])] == [4, 24]  # what is before the image is the same text
    assert [hits([other]), hits([other]), hits([image])] == [4, 24, 24]
    assert [hits(salt="a"), hits(salt="a"), hits(salt="b")] == [0, 24, 0]
    for wrong in ([other, image], [kvcore.MultimodalItem(b"x", 20, 6)], [b"x"]):
        with pytest.raises(InvalidArgumentError, match=r"^items: wanted"):
            hits(wrong)
    with pytest.raises(InvalidArgumentError, match="cache_salt: wanted text"):
        salted("\ud800")
    with pytest.raises(InvalidArgumentError, match=r"there are no adapters \(--lora\), got 'x'"):
        engine.submit(Submission(tokens, namespace=kvcore.Namespace(lora_name="x")))


def test_prefaulted_blocks_change_no_output():
    assert tokens_of(make(prefault=True).generate([PROMPT], greedy())) == tokens_of(
        make().generate([PROMPT], greedy())
    )
