"""Networks with recurrent layers in the engine: the tokens are those of `generate`."""

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import backends
import kvcore
from kvcore.adapters.recurrent import HeldStates, StateStep
from kvcore.sanitize import SanitizerError
from model import EngineConfig, SamplingParams
from model.control.scheduler import Scheduler
from model.control.submission import Submission
from model.engine import Engine
from model.errors import RequestTooLongError, UnsupportedModelError
from model.load.loader import with_draft
from tests.model.networks import KnowingDrafter, build, preempt_in_steps
from tests.model.recurrent_networks import KINDS, NUM_TOKENS, case, engine_of
from tests.model.view.replay import Replay

PARAMS = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)


def texts_of(kind):
    """The prompts with what `generate` says to them."""
    return [(*prompt, *tokens) for prompt, tokens in case(kind)[1].items()]


def tokens_of(engine, kind):
    """What the engine says to every prompt, and what `generate` says."""
    wanted = case(kind)[1]
    done = engine.generate([*map(list, wanted)], PARAMS)
    kvcore.check(engine.kv)
    assert engine.kv.num_free_blocks == engine.kv.num_usable_blocks
    return [one.request.output_tokens for one in done], [*wanted.values()]


@pytest.mark.parametrize("kind", KINDS)
def test_a_plain_batch_gives_the_tokens_of_generate(kind):
    got, wanted = tokens_of(engine_of(kind), kind)
    assert got == wanted


@pytest.mark.parametrize("kind", KINDS[:2])
def test_a_traced_network_gives_the_tokens_of_generate(kind):
    engine = engine_of(kind, compile=True, max_num_batched_tokens=16, drafts="ngram")
    assert engine.prepare() == "traced"
    got, wanted = tokens_of(engine, kind)
    assert got == wanted
    assert engine.stats.num_hit_tokens > 0


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_of_7_tokens_hits_and_preemption_change_no_token(kind):
    engine = engine_of(kind, max_num_batched_tokens=7, max_num_seqs=4, swap_memory_bytes=0)
    preempt_in_steps(engine, {9, 30, 41})
    got, wanted = tokens_of(engine, kind)
    assert got == wanted
    assert engine.stats.num_hit_tokens > 0
    assert engine.stats.num_preemptions > 0


@pytest.mark.parametrize("kind", KINDS)
def test_swapped_states_come_back(kind):
    engine = engine_of(
        kind, max_num_batched_tokens=16, swap_memory_bytes=1 << 20, enable_prefix_caching=False
    )
    preempt_in_steps(engine, {9, 20, 31})
    got, wanted = tokens_of(engine, kind)
    assert got == wanted
    assert engine.stats.num_loads > 0


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_right_or_wrong_change_no_token(kind):
    engine = engine_of(kind, drafts="ngram")
    engine._scheduler._drafter = KnowingDrafter(texts_of(kind))
    got, wanted = tokens_of(engine, kind)
    assert got == wanted
    assert 0 < engine.stats.num_accepted_tokens < engine.stats.num_draft_tokens


@pytest.mark.parametrize("kind", KINDS[:2])
def test_a_draft_model_proposes_for_a_network_with_states(kind):
    model, _ = case(kind)
    engine = Engine(
        with_draft(model, build("llama")),
        backends.get_backend("numba"),
        EngineConfig(block_size=4, num_blocks=200, draft_model="llama"),
    )
    got, wanted = tokens_of(engine, kind)
    assert got == wanted
    assert engine.stats.num_draft_tokens > 0


def drive(kind, seed, **fixed):
    """Random sizes, arrivals, samples, priorities, turns, drafts and aborts; checks every token."""
    draw = random.Random(seed)
    wanted = case(kind)[1]
    size = engine_of(kind).config.block_size * draw.choice([1, 1, 2])
    groups = engine_of(kind).network.layout.groups(size)
    longest = max(map(len, wanted)) + NUM_TOKENS
    least = kvcore.peak_blocks(longest, size, groups=groups, chunk=1)
    sizes = {
        "block_size": size,
        "num_blocks": least + 1 + draw.randrange(2 * least),
        "max_num_batched_tokens": draw.choice([7, 11, 32, 256]),
        "max_num_seqs": draw.choice([2, 4, 8]),
        "swap_memory_bytes": draw.choice([0, 1 << 20]),
        "enable_prefix_caching": draw.random() < 0.8,
        "sanitize": draw.random() < 0.3,
        "drafts": draw.choice([None, "ngram"]),
    }
    sizes["async_scheduling"] = sizes["drafts"] is None and draw.random() < 0.5
    engine = engine_of(kind, **(sizes | fixed))
    if sizes["drafts"]:
        engine._scheduler._drafter = KnowingDrafter(texts_of(kind), seed)
    todo, requests = draw.choices([*wanted], k=draw.randrange(3, 12)), []
    while todo or engine.has_unfinished:
        while todo and draw.random() < 0.5:
            prompt = todo.pop()
            params = SamplingParams(
                max_tokens=draw.choice([1, 5, NUM_TOKENS]),
                ignore_eos=True,
                n=draw.choice([1, 1, 3]),
            )
            asked = Submission(
                list(prompt),
                params,
                priority=draw.randrange(2),
                boundaries=draw.sample(range(len(prompt)), min(2, len(prompt))),
            )
            requests += engine.submit(asked)
        engine.step() if engine.has_unfinished else None
        kvcore.check(engine.kv)
        if engine.running and draw.random() < 0.02:
            engine.abort(draw.choice(engine.running))
    assert engine.kv.num_free_blocks == engine.kv.num_usable_blocks
    for request in requests:
        output = request.output_tokens
        assert output == wanted[tuple(request.prompt_tokens)][: len(output)]


@given(kind=st.sampled_from(KINDS), seed=st.integers(0, 2**20))
@settings(max_examples=8, deadline=None)
@example(kind="Qwen3_5TextConfig", seed=0)
def test_whatever_happens_to_requests_no_token_differs(kind, seed):
    drive(kind, seed)


def _store_drafts(monkeypatch):
    commit = Scheduler._accept_drafts

    def accept(self, *args):
        self._keeps_states = False
        commit(self, *args)
        self._keeps_states = True

    monkeypatch.setattr(Scheduler, "_accept_drafts", accept)


def _changed_rows(monkeypatch, change):
    rows = StateStep.rows
    monkeypatch.setattr(StateStep, "rows", lambda self: change(rows(self)))


def _read_zeros(monkeypatch):
    _changed_rows(monkeypatch, lambda rows: replace(rows, read=torch.full_like(rows.read, -1)))


def _write_what_is_read(monkeypatch):
    _changed_rows(
        monkeypatch, lambda rows: replace(rows, write=rows.write.where(rows.read < 0, rows.read))
    )


@pytest.mark.parametrize("planted", [_store_drafts, _read_zeros, _write_what_is_read])
def test_a_state_that_is_not_the_one_of_its_tokens_is_noticed(monkeypatch, planted):
    kind = KINDS[0]
    engine = engine_of(kind, drafts="ngram", max_num_batched_tokens=16)
    engine._scheduler._drafter = KnowingDrafter(texts_of(kind))
    planted(monkeypatch)
    try:
        got, wanted = tokens_of(engine, kind)
    except (AssertionError, kvcore.KVCoreError):
        return
    assert got != wanted


def test_the_sanitizer_sees_a_state_in_the_wrong_blocks(monkeypatch):
    kind = KINDS[0]
    write_states = kvcore.write_states

    def shifted(sequences, reads, writes):
        write_states(sequences, reads, writes)
        writes[0] += 1

    engine = engine_of(kind, sanitize=True)
    monkeypatch.setattr(kvcore, "write_states", shifted)
    with pytest.raises(SanitizerError, match="the state of s0 is"):
        tokens_of(engine, kind)


def test_blocks_are_as_large_as_states_need_and_the_memory_says_so():
    engine = engine_of("FalconH1Config")
    assert engine.config.block_size == 8
    assert "blocks of 8 tokens" in engine.describe_memory()
    assert "2 recurrent with" in engine.describe_memory()
    assert engine.kv.groups[-1] == kvcore.RecurrentState(2, 0, 8)


def test_a_request_whose_states_do_not_fit_is_refused_by_the_flag():
    engine = engine_of(KINDS[0], num_blocks=4)
    with pytest.raises(RequestTooLongError, match=r"the KV cache has 3 \(--num-blocks"):
        engine.add_request([1] * 60, PARAMS)


def test_what_cannot_be_exact_with_states_is_refused_in_one_line():
    model, _ = case(KINDS[0])
    backend = backends.get_backend("numba")
    config = EngineConfig(num_blocks=200, draft_model="itself")
    with pytest.raises(UnsupportedModelError, match=r"^draft_model: wanted a network without rec"):
        Engine(with_draft(build("llama"), model), backend, config)
    with pytest.raises(UnsupportedModelError, match=r"^batch_invariant: this model has recurrent"):
        Engine(model, backend, EngineConfig(num_blocks=200, batch_invariant=True))


def test_the_recorded_pool_shows_states_as_a_table_of_their_own():
    engine = engine_of(KINDS[0])
    recorder = engine.record()
    recorder.record_pool(engine.model.codec.decode)
    tokens_of(engine, KINDS[0])
    document = recorder.pool_document()
    assert [group["kind"] for group in document["groups"]] == ["FullAttention", "RecurrentState"]
    replay, shown = Replay(document), 0
    for frame in document["frames"]:
        replay.apply(frame)
        tables = replay.held()
        blocks = [block for table in tables.values() for block in {*table} - {0}]
        assert len(blocks) >= frame["counts"]["used"]
        shown += any(group == 1 for _, group in tables)
    assert shown > NUM_TOKENS
    assert not replay.held()


@pytest.mark.parametrize("kind", KINDS[:3])
def test_decoding_copies_no_state(monkeypatch, kind):
    engine, wanted = engine_of(kind), case(kind)[1]
    requests = [engine.add_request([*prompt], PARAMS) for prompt in wanted]
    while any(not request.output_tokens for request in requests):
        engine.step()
    monkeypatch.setattr(HeldStates, "_load", lambda *_: pytest.fail("a state is copied"))
    while engine.has_unfinished:
        engine.step()
    assert [request.output_tokens for request in requests] == [*wanted.values()]


@pytest.mark.parametrize("planted", ["other results", "an error"])
def test_operations_that_do_not_give_the_results_of_the_network_are_left_alone(
    monkeypatch, planted
):
    backend = type(backends.get_backend("numba"))
    step = backend.linear_attention_step

    def wrong(*given, **named):
        if planted == "an error":
            raise backends.UnsupportedError("state", "another", "this one")
        return step(*given, **named).flip(-1)

    monkeypatch.setattr(backend, "linear_attention_step", wrong)
    engine = engine_of(KINDS[0])
    assert engine.network._recurrence.operations is None
    got, wanted = tokens_of(engine, KINDS[0])
    assert got == wanted
