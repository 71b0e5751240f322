"""A second network that guesses: it changes when tokens come, and nothing else."""

import copy
import functools
import json
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvcore
from backends import get_backend
from kvcore.sanitize import SanitizerError
from model import (
    EngineConfig,
    InvalidArgumentError,
    SamplingParams,
    Submission,
    UnsupportedModelError,
)
from model.cli.start import start
from model.control.tier_transfers import TransferCosts
from model.engine import Engine
from model.errors import ModelNotFoundError
from model.forward.draft_model import DraftModel
from model.forward.warm_up import Prepared
from model.load.loader import with_draft
from tests.model import sampling_reference as reference
from tests.model.forward.test_cuda_graphs import Uncaptured, UncapturedDraws
from tests.model.networks import CONFIGS, build
from tests.model.reference import ReferenceBackend
from tests.model.sample.test_engine_sampling import NOISE, hashed_logits, run
from tests.model.test_engine import PROMPT, greedy, network, tokens_of

TEXTS = [PROMPT, PROMPT + "and another", "abcabcabcab", [7] * 21, "x"]


@functools.cache
def near(noise):
    """The network of the tests with noise in its weights: guesses that hold now and then."""
    model = build("qwen3", 25)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.network.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=noise)
    return model


@functools.cache
def guided(kind):
    """The network of the tests with a draft model of some kind."""
    drafts = {"same": lambda: near(0.0), "near": lambda: near(0.03), "windows": other_windows}
    return with_draft(network(), drafts[kind]())


def other_windows():
    return build("gemma3", 4)


def make(kind="same", **sizes):
    sizes = {"num_blocks": 60, "block_size": 4, "draft_model": kind, **sizes}
    # A window leaves slots behind that the plain backend multiplies by nothing.
    backend = get_backend("numba") if kind == "windows" else ReferenceBackend()
    return Engine(guided(kind), backend, EngineConfig(**sizes))


@functools.cache
def alone():
    config = EngineConfig(num_blocks=60, block_size=4, enable_prefix_caching=False)
    return Engine(network(), ReferenceBackend(), config)


def is_empty(kv):
    return kv.num_free_blocks == kv.num_usable_blocks


asked = st.builds(
    lambda how, seed, max_tokens, logprobs: SamplingParams(
        max_tokens=max_tokens, logprobs=logprobs, **how, **({"seed": seed} if how else {})
    ),
    st.sampled_from([{}, {}, {"temperature": 0.7}, {"temperature": 1.0, "top_k": 20}]),
    st.integers(0, 3),
    st.integers(1, 14),
    st.sampled_from([None, 2]),
)
arrivals = st.lists(
    st.tuples(st.integers(0, 4), asked, st.integers(0, 6), st.integers(1, 2), st.booleans()),
    min_size=1,
    max_size=5,
)
sizes = st.fixed_dictionaries(
    {
        "max_num_batched_tokens": st.sampled_from([3, 11, 64]),
        "max_num_seqs": st.sampled_from([1, 3, 64]),
        "num_blocks": st.sampled_from([17, 21, 60]),
        "block_size": st.sampled_from([2, 4]),
        "draft_tokens": st.integers(1, 6),
        "enable_prefix_caching": st.booleans(),
        "sanitize": st.booleans(),
    }
)


@functools.cache
def wanted_of(text, params, sample):
    """What a sample of a prompt gives with the machine to itself."""
    engine = alone()
    requests = engine.submit(Submission(TEXTS[text], replace(params, n=sample + 1)))
    return [token.token_id for token in run(engine, requests)[sample]]


def guesses(kind, arrivals, sizes, engine_type=make):
    """Run arrivals with drafts, some of them aborted: what was wrong, in words; and the engine."""
    if sizes["block_size"] == 2:
        sizes = sizes | {"num_blocks": 2 * sizes["num_blocks"]}
    engine = engine_type(kind, swap_memory_bytes=0, **sizes)
    waiting, expected, requests, step, aborted = list(arrivals), {}, [], 0, set()
    wrong = []
    while waiting or engine.has_unfinished:
        while waiting and (waiting[0][2] <= step or not engine.has_unfinished):
            text, params, _, samples, is_aborted = waiting.pop(0)
            own = engine.submit(Submission(TEXTS[text], replace(params, n=samples)))
            requests += own
            expected |= {one: wanted_of(text, params, one.sample) for one in own}
            aborted |= set(own[:1]) if is_aborted and len(requests) > 1 else set()
        engine.step()
        step += 1
        for follower in engine.draft._followers.values():
            count = follower.own.num_computed_tokens
            if follower.own.tokens[:count] != follower.request.tokens[:count]:
                wrong.append(f"{follower.request!r} has drafts that did not hold in the cache")
        for one in [one for one in aborted if one.num_output_tokens > 2]:
            engine.abort(one)
            aborted.remove(one)
    wrong += [
        f"{one!r} said {one.output_tokens}, wanted {expected[one]}"
        for one in requests
        if one.output_tokens != expected[one][: one.num_output_tokens]
    ]
    stats = engine.stats
    if kind == "same" and stats.num_accepted_tokens < stats.num_draft_tokens:
        wrong.append(f"{stats.num_draft_tokens - stats.num_accepted_tokens} drafts did not hold")
    if not (is_empty(engine.kv) and is_empty(engine.draft.kv)):
        wrong.append("blocks are held when all have ended")
    return wrong, engine


@pytest.mark.parametrize("kind", ["same", "near", "windows"])
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(arrivals=arrivals, sizes=sizes)
def test_tokens_are_the_same_and_a_twin_of_the_network_is_always_right(kind, arrivals, sizes):
    wrong, _ = guesses(kind, arrivals, sizes)
    assert wrong == []


class CommitsDraftsBeforeTheyHold(DraftModel):
    def _settle(self, ready, flights):
        drafts = super()._settle(ready, flights)
        for follower in ready:
            if follower.num_drafts > 1:
                self._kv.commit(follower.own.running_sequence, follower.num_drafts - 1)
                follower.num_drafts = 1
        return drafts


class KeepsWhatDidNotHold(DraftModel):
    """The tokens are right, and what was computed of others is taken for theirs."""

    def _catch_up(self, follower):
        written = follower.num_drafts - 1
        super()._catch_up(follower)
        left = follower.own.num_uncomputed_tokens - 1
        if min(written, left) > 0:
            self._kv.reserve(follower.own.running_sequence, left)
            self._kv.commit(follower.own.running_sequence, min(written, left))


class DrawsAtAnotherPlace(DraftModel):
    def _following(self, request):
        follower = super()._following(request)
        if follower is not None:
            follower.own.num_prompt_tokens = request.num_prompt_tokens - 1
        return follower


class KeepsFollowersOfTheWaiting(DraftModel):
    def discard(self, request):
        if request.is_finished:
            super().discard(request)


class GuessesWithoutThePast(DraftModel):
    """A prompt that comes in chunks is taken for computed after the first."""

    def _plan(self, followers, most_of):
        for follower in followers:
            sequence, left = follower.own.running_sequence, follower.own.num_uncomputed_tokens
            if left > 3 and self._kv.can_reserve(sequence, left):
                self._kv.reserve(sequence, left)
                self._kv.commit(sequence, left - 3)
        return super()._plan(followers, most_of)


BUGS = [
    CommitsDraftsBeforeTheyHold,
    KeepsWhatDidNotHold,
    DrawsAtAnotherPlace,
    GuessesWithoutThePast,
]
GREEDY, DRAWN = greedy(14), SamplingParams(max_tokens=14, temperature=0.7, seed=2)
CROWD = [(0, GREEDY, 0, 1, False), (1, DRAWN, 1, 2, False), (2, GREEDY, 2, 1, True)]
CROWD += [(3, DRAWN, 3, 1, False), (0, DRAWN, 9, 1, False)]
FEW_ROWS = {"max_num_batched_tokens": 64, "max_num_seqs": 64, "num_blocks": 21, "block_size": 4}
FEW_ROWS |= {"draft_tokens": 5, "enable_prefix_caching": True, "sanitize": True}


@pytest.mark.parametrize("bug", [None, *BUGS])
def test_a_planted_bug_shows(bug, monkeypatch):
    if bug is not None:
        monkeypatch.setattr("model.engine.DraftModel", bug)
    sizes = (FEW_ROWS, FEW_ROWS | {"sanitize": False, "num_blocks": 60})
    runs = [(kind, some) for kind in ("same", "near") for some in sizes]
    problems = []
    while runs and not problems:
        try:
            problems, _ = guesses(runs[0][0], CROWD, runs[0][1])
        except (kvcore.KVCoreError, SanitizerError, AssertionError) as error:
            problems = [str(error)]
        runs.pop(0)
    assert (bug is None) == (problems == [])


def test_a_twin_is_always_right_where_passes_are_replayed_from_fixed_tensors():
    """As from CUDA graphs: what a pass has drawn is where the next one's tensors take it."""
    engine = make(max_num_seqs=6, num_blocks=90)
    draws = UncapturedDraws(30, torch.device("cpu"))
    parts = (engine.draft.network, engine.draft.drawn, [64], 4, 6, 64, draws)
    engine.draft.use(Prepared("", graphs := Uncaptured(*parts)))
    texts = [(0, GREEDY), (2, GREEDY), (3, DRAWN), (1, DRAWN)]
    done = engine.generate([TEXTS[text] for text, _ in texts], [how for _, how in texts])
    assert tokens_of(done) == [wanted_of(text, how, 0) for text, how in texts]
    assert engine.stats.num_accepted_tokens == engine.stats.num_draft_tokens > 30
    assert {bucket.longest == 1 for bucket in graphs.seen} == {True, False}


def test_guesses_are_fewer_steps_and_a_stranger_costs_none():
    prompts, wanted = [TEXTS[0], TEXTS[2]], [wanted_of(0, GREEDY, 0), wanted_of(2, GREEDY, 0)]
    for kind in ("same", "near", "windows"):
        engine = make(kind)
        assert tokens_of(engine.generate(prompts, GREEDY)) == wanted
        stats = engine.stats
        assert stats.num_draft_tokens > 0
        assert stats.num_steps <= 14
        assert (stats.num_steps <= 5) == (kind == "same")
        if kind == "near":
            assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


def computed(engine):
    """How many tokens each pass of the draft model computes, from now on."""
    counts, logits = [], engine.draft.network.logits

    def counted(step):
        counts.append(step.input_ids.shape[1])
        return logits(step)

    engine.draft.network.logits = counted
    return counts


def test_what_was_computed_for_one_request_is_found_for_the_next():
    engine = make(draft_tokens=2)
    counts = computed(engine)
    for times in range(2):
        engine.generate([PROMPT], greedy(4))  # 25 tokens; one is drawn, then two drafts and one
        assert counts == [26, 1] if not times else [2, 1]
        counts.clear()
    assert engine.draft.kv.plan(list(PROMPT.encode())).num_cached_tokens == 24
    requests = engine.submit(Submission("another prompt, of 31 tokens...", replace(GREEDY, n=3)))
    engine.step()
    engine.step()
    assert sum(counts) < 32 + 3  # of three samples one computes the prompt
    run(engine, requests)
    assert is_empty(engine.draft.kv)


def test_a_prompt_that_takes_several_steps_holds_up_no_other():
    engine = make(max_num_batched_tokens=8, draft_tokens=2)
    counts = computed(engine)
    first = engine.add_request("x", greedy(60))
    while first.num_output_tokens < 10:
        engine.step()
    second = engine.add_request([5] * 40, greedy(30))
    while not second.num_output_tokens:
        engine.step()
    counts.clear()
    before = engine.stats.num_draft_tokens
    for _ in range(3):
        engine.step()
    assert max(counts) <= 8
    assert engine.stats.num_draft_tokens == before + 6
    while engine.has_unfinished:
        engine.step()
    assert engine.stats.num_accepted_tokens == engine.stats.num_draft_tokens > before + 30


def test_a_draft_model_guesses_as_far_as_it_has_positions():
    model = with_draft(network(), replace(near(0.0), max_positions=30))
    sizes = EngineConfig(num_blocks=60, block_size=4, draft_model="short")
    engine = Engine(model, get_backend("numba"), sizes)
    [done] = engine.generate([PROMPT], GREEDY)
    assert done.request.output_tokens == wanted_of(0, GREEDY, 0)
    # After one token there are 26, and five more places; a pass tells four drafts and a token.
    assert engine.stats.num_draft_tokens == 4


@pytest.mark.parametrize("place", [0, 2])
def test_guesses_that_are_no_numbers_end_the_guessing_of_that_request_alone(place):
    engine = make(enable_prefix_caching=True)
    logits, passes = engine.draft.network.logits, []

    def poisoned(step):
        found = logits(step).clone()
        passes.append(len(found))
        if len(passes) == 2 + place:  # the first is of the prompts; a row is poisoned once
            found[0] = torch.nan
        return found

    engine.draft.network.logits = poisoned
    prompts = [TEXTS[0], TEXTS[2]]
    done = engine.generate(prompts, GREEDY)
    assert tokens_of(done) == [wanted_of(0, GREEDY, 0), wanted_of(2, GREEDY, 0)]
    assert passes[-1] == 1
    assert engine.stats.num_accepted_tokens == engine.stats.num_draft_tokens > 8
    assert is_empty(engine.draft.kv)
    assert engine.draft._followers == {}


def test_where_the_draft_model_has_no_blocks_there_are_no_drafts():
    engine = make()
    kv = engine.draft.kv
    taken = kv.open(range(4 * kv.num_usable_blocks - 8))
    kv.reserve(taken, taken.num_tokens)
    done = engine.generate([TEXTS[0], "xy"], greedy(5))
    assert done[0].request.output_tokens == wanted_of(0, greedy(5), 0)
    assert engine.stats.num_drafts < 3  # for the short one alone there is room
    kv.close(taken)
    engine.generate([TEXTS[0]], GREEDY)
    assert engine.stats.num_accepted_tokens > 8
    assert is_empty(kv)


def test_a_pass_of_the_draft_model_that_fails_gives_all_blocks_back():
    engine = make(swap_memory_bytes=1 << 20)
    engine.add_all([TEXTS[0], TEXTS[2]], GREEDY)
    engine.step()

    def broken(step):
        raise FloatingPointError(len(step.logit_rows))

    logits, engine.draft.network.logits = engine.draft.network.logits, broken
    with pytest.raises(FloatingPointError):
        engine.step()
    assert not engine.has_unfinished
    assert is_empty(engine.kv)
    assert is_empty(engine.draft.kv)
    engine.draft.network.logits = logits
    assert tokens_of(engine.generate([TEXTS[0]], GREEDY)) == [wanted_of(0, GREEDY, 0)]


def test_tokens_are_drawn_as_often_as_they_are_likely_whatever_the_draft_model_thinks():
    """A chi-square test of what is drawn behind drafts that held, and where one did not."""
    count, prompt, how = 1200, [3, 4], {"temperature": 1.0, "top_k": 6}
    params = [SamplingParams(max_tokens=3, seed=number, **how) for number in range(count)]
    engine = make(num_blocks=2000, max_num_seqs=256)
    engine.network.logits = hashed_logits
    engine.draft.network.logits = lambda step: (
        hashed_logits(step) + 0.4 * NOISE[(step.input_ids[0, step.logit_rows] * 13) % 97]
    )
    requests = engine.add_all([prompt] * count, params)
    run(engine, requests)
    assert 50 < engine.stats.num_accepted_tokens < engine.stats.num_draft_tokens - 50
    for place in (1, 2):
        pairs = Counter(tuple(r.output_tokens[place - 1 : place + 1]) for r in requests)
        for before, total in Counter(before for before, _ in pairs.elements()).items():
            if total < 100:
                continue
            row = NOISE[(before * 31 + (len(prompt) + place - 1) * 7) % 97].tolist()
            kept = reference.kept(row, params[0])
            likely = reference.probabilities([row[token] for token in kept])
            found = [pairs[before, token] for token in kept]
            assert sum(found) == total
            assert abs(reference.chi_square(found, [chance * total for chance in likely])) < 4


class GuessesTheMostLikely(DraftModel):
    def _following(self, request):
        follower = super()._following(request)
        if follower is not None:
            follower.own.params = replace(follower.own.params, temperature=0.0)
        return follower


def test_a_guess_drawn_by_the_same_number_holds_more_often_than_the_most_likely_token(monkeypatch):
    params = [SamplingParams(max_tokens=10, temperature=1.0, seed=n) for n in range(20)]
    model, shares = with_draft(network(), near(0.003)), []
    for kind in (DraftModel, GuessesTheMostLikely):
        monkeypatch.setattr("model.engine.DraftModel", kind)
        config = EngineConfig(num_blocks=200, block_size=4, draft_model="near")
        engine = Engine(model, ReferenceBackend(), config)
        engine.generate([[n] * 3 for n in range(20)], params)
        shares.append(engine.stats.num_accepted_tokens / engine.stats.num_draft_tokens)
    assert 1 > shares[0] > 2 * shares[1]


@pytest.mark.parametrize("num_blocks", [2, 3, 4, 12])
def test_an_engine_is_prepared_by_guesses_too_as_far_as_there_is_room(num_blocks):
    config = EngineConfig(num_blocks=num_blocks, block_size=4, draft_model="same", draft_tokens=6)
    engine = Engine(guided("same"), get_backend("numba"), config)
    counts = computed(engine)
    assert engine.prepare() == "eager; draft model: eager"
    assert (sum(counts) > 32 + 5) == (num_blocks == 12)
    assert engine.stats.num_steps == 0
    assert is_empty(engine.draft.kv)
    assert tokens_of(engine.generate(["x"], greedy(4))) == [wanted_of(4, greedy(4), 0)]


def test_settings_that_exclude_a_draft_model_or_lack_it_are_told():
    for fields, message in (
        ({"drafts": "ngram"}, "draft_model: cannot be combined with drafts"),
        ({"async_scheduling": True}, "async_scheduling: cannot be combined with draft_model"),
        ({"draft_tokens": 65}, "draft_tokens: wanted"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            EngineConfig(draft_model="x", **fields)
    with pytest.raises(InvalidArgumentError, match="was loaded without a draft model"):
        Engine(network(), get_backend("numba"), EngineConfig(num_blocks=9, draft_model="x"))


def test_another_vocabulary_and_another_folder_are_told(checkpoint):
    config = copy.deepcopy(CONFIGS["qwen3"])
    config.vocab_size = 640
    other = SimpleNamespace(name="other", network=SimpleNamespace(config=config))
    with pytest.raises(UnsupportedModelError, match=r"wanted .* 320 tokens, 'other' has 640"):
        with_draft(network(), other)
    twisted = copy.copy(network().codec)
    described = json.loads(twisted.describe())
    words = described["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    twisted.describe = lambda: json.dumps(described)
    other = SimpleNamespace(name="other", network=network().network, codec=twisted)
    with pytest.raises(UnsupportedModelError, match="token 97 is 'a': 'other' has 'b' there"):
        with_draft(network(), other)
    with pytest.raises(ModelNotFoundError, match="draft_model: there is no folder"):
        start(str(checkpoint), "numba", "auto", draft_name="./missing/model")


def test_a_prompt_from_a_tier_is_guessed_on_like_any_other(tmp_path, monkeypatch):
    """What is loaded is of the network alone: the draft model computes its own."""
    monkeypatch.setattr(TransferCosts, "is_worth", lambda *_: True)
    monkeypatch.setattr(TransferCosts, "deadline_s", lambda *_: 60.0)
    prompt = [*PROMPT.encode()] * 3
    wanted = alone().generate([prompt], greedy(12))[0].request.output_tokens
    for num_loads in (0, 1):
        engine = make(disk=str(tmp_path))
        [done] = engine.generate([prompt], greedy(12))
        assert done.request.output_tokens == wanted
        engine.end()
        assert engine.tiers.stats.num_loads == num_loads
        assert engine.stats.num_accepted_tokens == engine.stats.num_draft_tokens > 0
    assert done.request.num_loaded_tokens == (len(prompt) - 1) // 4 * 4
