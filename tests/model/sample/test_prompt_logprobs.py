"""Log-probabilities of prompt tokens are those of the dense network, however steps are cut."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import backends
from model.control import admission
from model.control.config import EngineConfig
from model.control.params import SamplingParams
from model.control.submission import Submission
from model.engine import Engine
from model.sample import prompt_scores
from tests.model.networks import build, preempt_in_steps

MODEL = build("qwen3", seed=7)
BACKEND = backends.get_backend("numba")
VOCABULARY = MODEL.network.config.vocab_size
PROMPTS = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=40)


def engine_of(**config):
    return Engine(build("qwen3", seed=7), BACKEND, EngineConfig(num_blocks=120, **config))


def dense(prompt, num_tops):
    """What the network without a cache says: of each token but the first, and of the best."""
    with torch.inference_mode():
        logits = DENSE(torch.tensor([prompt])).logits[0, :-1].float().log_softmax(-1)
    tops = logits.topk(num_tops, dim=-1)
    own = logits.gather(1, torch.tensor(prompt[1:], dtype=torch.int64)[:, None])[:, 0]
    return own, tops


DENSE = build("qwen3", seed=7).network


def check(request, prompt, num_tops):
    scored = request.prompt_logprobs
    assert [token.token_id for token in scored] == prompt[1:]
    if len(prompt) == 1:
        return
    own, tops = dense(prompt, num_tops)
    found = torch.tensor([token.logprob for token in scored])
    torch.testing.assert_close(found, own, atol=1e-3, rtol=1e-3)
    for token, values in zip(scored, tops.values, strict=True):
        assert len(token.top_logprobs) == num_tops
        got = torch.tensor([value for _, value in token.top_logprobs])
        torch.testing.assert_close(got, values, atol=1e-3, rtol=1e-3)


def run(engine, prompts, num_tops, n=1):
    params = SamplingParams(n=n, max_tokens=2, prompt_logprobs=num_tops)
    groups = [engine.submit(Submission(prompt, params)) for prompt in prompts]
    plain = engine.submit(Submission(prompts[0], SamplingParams(max_tokens=3)))
    while engine.has_unfinished:
        engine.step()
    for prompt, group in zip(prompts, groups, strict=True):
        for request in group:
            check(request, prompt, num_tops)
    assert plain[0].prompt_logprobs == []


@settings(max_examples=25)
@given(
    st.lists(PROMPTS, min_size=1, max_size=4),
    st.integers(0, 3),
    st.sampled_from([1, 4]),
    st.sampled_from([3, 16, 4096]),
    st.booleans(),
    st.sampled_from([set(), {2}, {1, 3, 4}]),
)
def test_they_are_the_dense_networks_through_chunks_hits_and_preemption(
    prompts, num_tops, block_size, budget, is_async, preempted
):
    engine = engine_of(
        block_size=block_size, max_num_batched_tokens=budget, async_scheduling=is_async
    )
    preempt_in_steps(engine, preempted)
    run(engine, prompts, num_tops)
    run(engine, [*prompts, prompts[0][:5]], num_tops)  # all of it is in the cache now


def test_samples_share_them_and_a_prompt_without_them_hits_what_they_left():
    engine = engine_of(block_size=4)
    prompt = [*range(1, 21)]
    run(engine, [prompt], 2, n=3)
    hit = engine.submit(Submission(prompt, SamplingParams(max_tokens=1)))[0]
    asked = SamplingParams(max_tokens=1, prompt_logprobs=0)
    scored = engine.submit(Submission(prompt, asked))[0]
    while engine.has_unfinished:
        engine.step()
    assert (hit.num_cached_tokens, scored.num_cached_tokens) == (16, 0)


def test_a_step_holds_a_bounded_number_of_rows(monkeypatch):
    monkeypatch.setattr(admission, "MAX_SCORED_TOKENS", 5)
    engine, rows = engine_of(), []
    score = prompt_scores.score_prompts

    def noted(chunks, logits):
        rows.append(len(logits))
        return score(chunks, logits)

    monkeypatch.setattr("model.forward.step_runner.score_prompts", noted)
    prompts = [[*range(1, 18)], [*range(3, 14)]]
    run(engine, prompts, 1)
    assert max(rows) == 5
    assert sum(rows) == 16 + 10


def test_the_check_sees_tokens_that_are_off_by_one(monkeypatch):
    def shifted(chunk):
        return chunk.request.tokens[chunk.start : chunk.start + chunk.num_scored].tolist()

    monkeypatch.setattr(prompt_scores, "_following", shifted)
    with pytest.raises(AssertionError):
        run(engine_of(), [[*range(1, 9)]], 0)


def test_drafts_and_scores_go_together():
    engine = engine_of(drafts="ngram", block_size=4)
    run(engine, [[1, 2, 3] * 8, [4, 5, 6, 7]], 1)
