"""Drafts change when tokens come, and nothing else."""

import random
from array import array
from collections import Counter
from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from backends import get_backend
from model import (
    EngineConfig,
    FinishReason,
    InvalidArgumentError,
    Request,
    SamplingParams,
    SchedulerStateError,
    Submission,
)
from model.control.drafts import NgramDrafts, accepted_tokens
from model.control.grammar import Grammar
from model.engine import Engine
from tests.model import sampling_reference as reference
from tests.model.control.test_scheduler_order import add
from tests.model.control.test_scheduler_order import make as make_scheduler
from tests.model.networks import build
from tests.model.reference import ReferenceBackend
from tests.model.sample.test_engine_sampling import NOISE, VOCAB, asked, hashed_logits, run
from tests.model.test_engine import PROMPT, greedy, network, tokens_of

TEXTS = [[7] * 5, [7] * 5 + [9] * 6, [1, 2, 3], [250, 3]]


class Foretold:
    """Drafts from what each request is known to give, with some tokens replaced by others."""

    def __init__(self, outputs, wrong):
        self.outputs, self.wrong = outputs, wrong

    def propose(self, wanted):
        return [self.guess(request, most) for request, most in wanted]

    def guess(self, request, most):
        start = request.num_output_tokens
        known = self.outputs.get(request.request_id, [])[start : start + most]
        return [
            (token + ((request.request_id + start + place) % 5 in self.wrong)) % VOCAB
            for place, token in enumerate(known)
        ]

    def discard(self, request):
        pass


def make(**sizes):
    sizes = {"num_blocks": 60, "block_size": 4, **sizes}
    return Engine(network(), ReferenceBackend(), EngineConfig(**sizes))


def hashed(**sizes):
    engine = make(**sizes)
    engine.network.logits = hashed_logits
    return engine


def drafting(outputs, wrong=(), **sizes):
    engine = make(drafts="ngram", **sizes)
    engine._scheduler._drafter = Foretold(outputs, wrong)
    return engine


arrivals = st.lists(
    st.tuples(st.integers(0, 3), asked, st.integers(0, 6), st.integers(1, 2)),
    min_size=1,
    max_size=5,
)
sizes = st.fixed_dictionaries(
    {
        "max_num_batched_tokens": st.sampled_from([3, 8, 64]),
        "max_num_seqs": st.sampled_from([1, 3, 64]),
        "num_blocks": st.sampled_from([12, 16, 60]),
        "draft_tokens": st.integers(1, 6),
        "sanitize": st.booleans(),
    }
)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(arrivals=arrivals, sizes=sizes, wrong=st.sets(st.integers(0, 4), max_size=3))
def test_tokens_and_how_likely_they_were_are_the_same_with_drafts(arrivals, sizes, wrong):
    alone = hashed(enable_prefix_caching=False)
    wanted, requests = {}, []
    for prompt, params, _, samples in arrivals:
        own = alone.submit(Submission(TEXTS[prompt], replace(params, n=samples)))
        wanted |= {r.request_id: told for r, told in zip(own, run(alone, own), strict=True)}
        requests += own
    outputs = {request.request_id: request.output_tokens for request in requests}
    engine = drafting(outputs, wrong, swap_memory_bytes=0, **sizes)
    engine.network.logits = hashed_logits
    waiting, found, step = list(arrivals), {}, 0
    while waiting or engine.has_unfinished:
        while waiting and (waiting[0][2] <= step or not engine.has_unfinished):
            prompt, params, _, samples = waiting.pop(0)
            engine.submit(Submission(TEXTS[prompt], replace(params, n=samples)))
        for output in engine.step():
            found.setdefault(output.request.request_id, []).extend(output.tokens)
        step += 1
    assert found == wanted
    assert engine.kv.num_free_blocks == engine.kv.num_usable_blocks
    if not wrong:
        assert engine.stats.num_accepted_tokens == engine.stats.num_draft_tokens
    is_counted = any(params.counts_tokens for _, params, _, _ in arrivals)
    if not is_counted and any(params.max_tokens > 4 for _, params, _, _ in arrivals):
        assert engine.stats.num_draft_tokens > 0 or sizes["max_num_batched_tokens"] == 3


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3"])
def test_several_texts_at_once_on_a_real_network_are_the_same_with_drafts(architecture):
    """Their tables shrink and take other blocks: each row is read as it is now."""
    model = build(architecture, 25)
    engines = [
        Engine(model, get_backend("numba"), EngineConfig(num_blocks=90, block_size=2, **fields))
        for fields in ({}, {"drafts": "ngram", "draft_tokens": 5, "sanitize": True})
    ]
    prompts = [PROMPT[:12] * 2, "abcabcabcab", "xyxyxyx"]
    wanted = engines[0].generate(prompts, greedy(24))
    engines[1]._scheduler._drafter = Foretold(dict(enumerate(tokens_of(wanted))), {1, 3})
    assert tokens_of(engines[1].generate(prompts, greedy(24))) == tokens_of(wanted)
    stats = engines[1].stats
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert stats.num_steps < engines[0].stats.num_steps


def test_a_stop_string_and_a_stop_token_end_a_text_among_its_drafts():
    [whole] = make().generate([PROMPT], greedy(12))
    tokens = whole.request.output_tokens
    stop = whole.text[1:3]
    assert len(stop) == 2
    for params in (
        greedy(12, stop=(stop,)),
        greedy(12, stop_token_ids=(tokens[5],)),
        SamplingParams(max_tokens=12, stop=(stop,), logprobs=2),
    ):
        [wanted] = make().generate([PROMPT], params)
        engine = drafting({0: tokens}, draft_tokens=8)
        [found] = engine.generate([PROMPT], params)
        assert found.request.output_tokens == wanted.request.output_tokens
        assert found.text == wanted.text
        for one, other in zip(found.tokens, wanted.tokens, strict=True):
            assert one.token_id == other.token_id
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert found.request.finish_reason is FinishReason.STOP
        assert engine.kv.num_free_blocks == engine.kv.num_usable_blocks
        assert engine.stats.num_steps < len(wanted.request.output_tokens)


def test_a_text_that_follows_a_grammar_or_counts_its_tokens_brings_no_drafts():
    for params in (
        SamplingParams(max_tokens=8, repetition_penalty=1.1),
        SamplingParams(max_tokens=8, presence_penalty=0.5),
        SamplingParams(max_tokens=8, grammar=Grammar.regex("[a-z]{8}")),
    ):
        engine = drafting({0: [1] * 8})
        engine.check_grammar = lambda _: None
        engine._grammars.mask = lambda guided, _: torch.full((len(guided), VOCAB // 32), -1).int()
        engine._grammars.is_whole, engine._grammars.error = lambda _: False, lambda _: None
        engine._grammars.open = lambda _: None
        engine.generate([PROMPT], params)
        assert engine.stats.num_draft_tokens == 0


def test_a_row_behind_a_draft_that_is_no_numbers_counts_only_once_it_is_reached():
    wanted = tokens_of(make().generate([PROMPT], greedy(8)))
    engine = drafting({0: wanted[0]})
    logits_of, at = engine.network.logits, len(PROMPT) + 3

    def poisoned(step):
        logits = logits_of(step).clone()
        logits[step.position_ids[0, step.logit_rows] == at - 1] = torch.nan
        return logits

    engine.network.logits = poisoned
    [done] = engine.generate([PROMPT], greedy(8))
    assert done.request.finish_reason is FinishReason.ERROR
    assert done.request.output_tokens == wanted[0][:3]
    assert engine.kv.stats().num_cached_blocks == 0


def test_with_drafts_tokens_are_drawn_as_often_as_they_are_likely():
    """A chi-square test of what is drawn behind a draft that held, and where one did not."""
    count, prompt, how = 1200, [3, 4], {"temperature": 1.0, "top_k": 6}
    params = [SamplingParams(max_tokens=3, seed=number, **how) for number in range(count)]

    def row(place, before):
        return NOISE[(before * 31 + (len(prompt) + place - 1) * 7) % 97].tolist()

    first = row(0, prompt[-1]).index(max(row(0, prompt[-1])))
    second = row(1, first).index(max(row(1, first)))
    engine = drafting(
        {n: [first, second, 0] for n in range(count)}, num_blocks=2000, max_num_seqs=256
    )
    engine.network.logits = hashed_logits
    requests = engine.add_all([prompt] * count, params)
    run(engine, requests)
    assert 50 < engine.stats.num_accepted_tokens < engine.stats.num_draft_tokens - 50
    for place in (1, 2):
        pairs = Counter(tuple(r.output_tokens[place - 1 : place + 1]) for r in requests)
        for before, total in Counter(before for before, _ in pairs.elements()).items():
            if total < 100:
                continue
            logits = row(place, before)
            kept = reference.kept(logits, params[0])
            likely = reference.probabilities([logits[token] for token in kept])
            found = [pairs[before, token] for token in kept]
            assert sum(found) == total
            assert abs(reference.chi_square(found, [chance * total for chance in likely])) < 4


def best_places(tokens, most):
    """What a look at all places finds, by the definition."""
    found, longest = None, 1
    seen = [end for end in range(2, len(tokens)) if tokens[end - 2 : end] == tokens[-2:]]
    for end in sorted(seen, reverse=True)[:8]:
        common = 2
        while common < min(end, 16) and tokens[end - common - 1] == tokens[-common - 1]:
            common += 1
        if common > longest:
            found, longest = end, common
    if found is None:
        return []
    period = tokens[found:]
    return (period * (most // len(period) + 1))[:most]


@settings(max_examples=200, deadline=None)
@example(tokens=[256, 256, 256, 1, 1], cuts=[], most=3, indexed=1)  # 256 256 has 1's bytes inside
@given(
    tokens=st.lists(st.sampled_from([0, 1, 256]), min_size=1, max_size=60),
    cuts=st.lists(st.integers(1, 60), max_size=4),
    most=st.integers(1, 9),
    indexed=st.sampled_from([1, 2, 5, 1024]),
)
def test_a_look_at_the_text_proposes_what_followed_the_longest_match(tokens, cuts, most, indexed):
    drafts = NgramDrafts()
    for cut in sorted({min(cut, len(tokens)) for cut in (*cuts, len(tokens))}):
        request = Request(0, tokens[:cut], SamplingParams(max_tokens=99))
        with mock.patch("model.control.drafts._MAX_INDEXED", indexed):
            [found] = drafts.propose([(request, most)])
        request.tokens.append(1)  # nothing holds them
        assert list(found) == best_places(tokens[:cut], most)
    assert drafts._texts
    drafts.discard(request)
    assert not drafts._texts


def test_a_long_prompt_is_indexed_in_several_calls_and_guesses_are_those_of_all_of_it():
    draw = random.Random(3)
    tokens = [draw.randrange(40) for _ in range(5000)]
    tokens[4900:] = tokens[100:200]
    drafts, chained = NgramDrafts(), []
    for _ in range(6):
        request = Request(0, tokens, SamplingParams(max_tokens=99))
        [found] = drafts.propose([(request, 8)])
        assert list(found) == best_places(tokens, 8)
        chained.append(len(drafts._texts[0]._before))
        tokens.append(tokens[len(tokens) - 4800])
    assert chained == [1026, 2050, 3074, 4098, 5004, 5005]


def test_drafts_hold_up_to_the_first_that_is_not_what_is_drawn():
    request = Request(0, [1], SamplingParams(max_tokens=9, stop_token_ids=(5,)))
    assert accepted_tokens(request, [2, 3, 4], 2, [3, 4, 6]) == [2, 3, 4, 6]
    assert accepted_tokens(request, [2, 3, 4], 2, [9, 4, 6]) == [2, 9]
    assert accepted_tokens(request, [2, 3], 7, [3, 4]) == [7]
    assert accepted_tokens(request, [2, 5, 4], 2, [5, 4, 6]) == [2, 5]
    assert accepted_tokens(request, [2, 3, 4], 2, [3, None, 6]) == [2, 3]
    assert accepted_tokens(request, [], 2, []) == [2]


def test_a_step_with_drafts_is_accepted_before_the_next_is_planned():
    class Guess:
        def propose(self, wanted):
            return [array("I", [8, 9])[:most] for _, most in wanted]

        def discard(self, request):
            pass

    kv, scheduler = make_scheduler(20, 2)
    scheduler._drafter = Guess()
    request = add(scheduler, 0, [1, 2, 3], max_tokens=9)
    scheduler.update(scheduler.schedule(), {0: 7})
    step = scheduler.schedule()
    assert [(c.start, c.num_tokens, c.drafts) for c in step.chunks] == [(3, 3, (8, 9))]
    for further in ([9], [9, 9, 9], [8, 9]):
        with pytest.raises(SchedulerStateError, match="further"):
            scheduler.update(step, {0: 7}, {0: further})
    scheduler.advance(step)
    with pytest.raises(SchedulerStateError, match="draft tokens"):
        scheduler.schedule()
    assert scheduler.accept({0: 8}, {0: [6]}) == [request]
    assert request.output_tokens == [7, 8, 6]
    assert kv.plan([1, 2, 3, 7, 8, 9, 9]).num_cached_tokens == 4
    assert kv.stats().num_used_blocks == 3


def test_drafts_and_tokens_that_are_read_late_are_refused_together():
    with pytest.raises(
        InvalidArgumentError, match="async_scheduling: cannot be combined with drafts"
    ):
        EngineConfig(drafts="ngram", async_scheduling=True)
    assert make(drafts="ngram")._runner.is_async is False


def test_a_step_has_rows_for_every_request_and_each_of_its_drafts():
    limits = {"max_num_seqs": 5, "max_num_batched_tokens": 64}
    assert EngineConfig(**limits, drafts="ngram", draft_tokens=3).max_rows == 20
    assert EngineConfig(**limits).max_rows == 5
    assert EngineConfig(**limits, drafts="ngram", draft_tokens=30).max_rows == 64
