"""What requests ask of their tokens, through the whole engine: in any company, read late or not."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvcore
from model import InvalidArgumentError, Request, SampledToken, SamplingParams, Submission
from tests.model import sampling_reference as reference
from tests.model.test_engine import PROMPT, greedy, is_async, make, network, tokens_of  # noqa: F401

VOCAB = 320
NOISE = torch.randn(97, VOCAB, generator=torch.Generator().manual_seed(4)) * 2


def hashed_logits(step):
    """Logits that depend on a row's last token and its position alone, exactly."""
    rows = step.logit_rows
    tokens, positions = step.input_ids[0, rows], step.position_ids[0, rows]
    return NOISE[(tokens * 31 + positions * 7) % 97]


def hashed(**sizes):
    engine = make(**sizes)
    engine.network.logits = hashed_logits
    return engine


def logits_after(tokens):
    """What `hashed_logits` gives for a text."""
    return NOISE[(tokens[-1] * 31 + (len(tokens) - 1) * 7) % 97].tolist()


def run(engine, requests):
    told = {request.request_id: [] for request in requests}
    while engine.has_unfinished:
        for output in engine.step():
            if output.request.request_id in told:
                told[output.request.request_id] += output.tokens
    return [told[request.request_id] for request in requests]


def test_log_probabilities_are_those_of_the_model_whatever_is_done_to_its_logits():
    plain = {"logprobs": 3, "max_tokens": 6}
    changed = {"repetition_penalty": 1.3, "logit_bias": ((5, 4.0),), "temperature": 0.7, "seed": 3}
    engine = hashed()
    how = [SamplingParams(**plain), SamplingParams(**plain, **changed), greedy(6), greedy(6)]
    how[3] = SamplingParams(logprobs=0, max_tokens=6)
    requests = engine.add_all([PROMPT, PROMPT, PROMPT, "x"], how)
    found = run(engine, requests)
    for request, tokens in zip(requests[:2], found[:2], strict=True):
        text = request.prompt_tokens
        for token in tokens:
            likely = reference.probabilities(logits_after(text))
            assert token.logprob == pytest.approx(math.log(likely[token.token_id]), abs=1e-4)
            ranked = sorted(range(VOCAB), key=lambda one: -likely[one])[:3]
            assert [one for one, _ in token.top_logprobs] == ranked
            for one, value in token.top_logprobs:
                assert value == pytest.approx(math.log(likely[one]), abs=1e-4)
            text.append(token.token_id)
        assert text == list(request.tokens)
    assert found[2] == [SampledToken(token, None, ()) for token in requests[2].output_tokens]
    assert all(token.logprob is not None and token.top_logprobs == () for token in found[3])


def test_a_completion_has_its_tokens_with_how_likely_they_were():
    [done] = make().generate([PROMPT], SamplingParams(max_tokens=3, logprobs=1))
    assert [token.token_id for token in done.tokens] == done.request.output_tokens
    assert [token.top_logprobs[0][0] for token in done.tokens] == done.request.output_tokens


penalties = st.fixed_dictionaries(
    {},
    optional={
        "repetition_penalty": st.sampled_from([0.5, 1.3, 4.0]),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "logit_bias": st.dictionaries(
            st.integers(0, VOCAB - 1), st.floats(-100, 100), max_size=4
        ).map(lambda pairs: tuple(pairs.items())),
    },
)


prompts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8)


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(how=penalties, prompt=prompts)
def test_penalties_and_bias_are_those_of_the_reference_token_by_token(how, prompt):
    check_penalties(how, prompt)


def check_penalties(how, prompt):
    engine, params = hashed(), SamplingParams(max_tokens=9, **how)
    request = engine.add_request(prompt, params)
    run(engine, [request])
    output = []
    for token in request.output_tokens:
        logits = logits_after(prompt + output)
        changed = reference.penalised(logits, params, prompt, output)
        assert changed[token] >= max(changed) - 1e-4
        output.append(token)
    assert len(output) == 9


asked = st.builds(
    lambda how, draws, logprobs, count: SamplingParams(
        max_tokens=count, logprobs=logprobs, **how, **draws
    ),
    penalties,
    st.fixed_dictionaries(
        {"temperature": st.sampled_from([0.0, 0.5, 1.0, 3.0]), "seed": st.integers(0, 3)},
        optional={
            "top_k": st.integers(1, 400),
            "top_p": st.floats(0.05, 1),
            "min_p": st.floats(0, 1),
        },
    ),
    st.none() | st.integers(0, 3),
    st.integers(1, 12),
)
arrivals = st.lists(
    st.tuples(
        st.integers(0, 3),  # the prompt
        asked,
        st.integers(0, 4),  # steps before it comes
        st.integers(1, 2),  # samples
        st.sampled_from([None, None, None, 2, 5]),  # steps before an abort
    ),
    min_size=1,
    max_size=5,
)


sizes = st.fixed_dictionaries(
    {
        "max_num_batched_tokens": st.sampled_from([1, 3, 8, 64]),
        "max_num_seqs": st.sampled_from([1, 3, 64]),
        "num_blocks": st.sampled_from([12, 16, 60]),
    }
)


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(arrivals=arrivals, sizes=sizes)
def test_tokens_are_the_same_in_any_company_chunks_and_preemptions(arrivals, sizes):
    check_company(arrivals, sizes)


def check_company(arrivals, sizes):
    """What comes out of a busy engine is what each request gives alone."""
    texts = [[7] * 5, [7] * 5 + [9] * 6, [1, 2, 3], [250, 3]]
    busy = hashed(swap_memory_bytes=0, **sizes)
    waiting = sorted(enumerate(arrivals), key=lambda pair: pair[1][2])
    found, tokens, ends = {}, {}, {}
    step = 0
    while waiting or busy.has_unfinished:
        while waiting and waiting[0][1][2] <= step:
            number, (prompt, params, _, samples, end) = waiting.pop(0)
            found[number] = busy.submit(Submission(texts[prompt], replace(params, n=samples)))
            ends[number] = None if end is None else step + end
        for output in busy.step() if busy.has_unfinished else ():
            tokens.setdefault(output.request.request_id, []).extend(output.tokens)
        step += 1
        for number, requests in found.items():
            if ends[number] == step:
                for request in requests:
                    busy.abort(request)
    assert busy.kv.num_free_blocks == busy.kv.num_usable_blocks
    assert not busy._sampler._streams
    assert not busy._sampler._counts._slots
    alone = hashed(enable_prefix_caching=False)
    for number, (prompt, params, _, samples, _) in enumerate(arrivals):
        requests = alone.submit(Submission(texts[prompt], replace(params, n=samples)))
        for request, wanted in zip(found[number], run(alone, requests), strict=True):
            got = tokens.get(request.request_id, [])
            assert [t.token_id for t in got] == [t.token_id for t in wanted][: len(got)]
            assert len(got) == len(wanted) or request.finish_reason.value == "aborted"
            for one, other in zip(got, wanted, strict=False):
                assert one.top_logprobs == other.top_logprobs
                assert one.logprob == other.logprob


def test_a_token_that_the_model_does_not_have_cannot_be_biased():
    with pytest.raises(InvalidArgumentError, match="logit_bias: wanted token ids below 320"):
        make().add_request(PROMPT, SamplingParams(logit_bias=((320, 1.0),)))


def test_a_row_that_is_no_numbers_ends_by_that_even_if_a_bias_hides_it():
    engine = make()
    broken = NOISE[:1].clone()
    broken[0, 3] = torch.nan
    engine.network.logits = lambda step: broken.expand(len(step.logit_rows), -1)
    how = SamplingParams(max_tokens=3, logit_bias=((3, -100.0),), logprobs=1)
    request = engine.add_request(PROMPT, how)
    assert run(engine, [request]) == [[]]
    assert request.finish_reason.value == "error"


def test_requests_share_what_they_compute_exactly_where_their_namespaces_are_equal():
    engine, tenants = make(), [kvcore.Namespace(salt=salt) for salt in (b"one", b"two")]
    found = []
    for namespace in (*tenants, *tenants, kvcore.DEFAULT_NAMESPACE):
        request = engine.submit(Submission(PROMPT, greedy(3), namespace=namespace))[0]
        run(engine, [request])
        found.append(request.num_cached_tokens)
    assert found == [0, 0, 24, 24, 0]


def test_a_request_waits_for_a_prefix_that_another_computes_in_its_namespace_only():
    for namespace, steps in ((kvcore.DEFAULT_NAMESPACE, 2), (kvcore.Namespace(salt=b"x"), 1)):
        engine = make()
        engine.add_request(PROMPT, greedy(3))
        second = engine.submit(Submission(PROMPT, greedy(3), namespace=namespace))[0]
        count = 0
        while second.sequence is None:
            engine.step()
            count += 1
        assert count == steps


def test_what_is_to_be_kept_outlives_what_is_not_until_its_steps_are_over():
    hits = []
    for retain in ((), (kvcore.Retention(0, 24),), (kvcore.Retention(0, 24, max_steps=4),)):
        engine = make(num_blocks=16)
        first = engine.submit(Submission(PROMPT, greedy(2), retain=retain))[0]
        run(engine, [first])
        for number in range(3):
            run(engine, [engine.add_request([number] * 30, greedy(2))])
        again = engine.add_request(PROMPT, greedy(2))
        run(engine, [again])
        hits.append(again.num_cached_tokens)
    assert hits == [0, 24, 0]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("namespace", b"salt", "namespace: wanted a kvcore.Namespace, got b'salt'"),
        ("namespace", None, "namespace: wanted a kvcore.Namespace, got None"),
        ("namespace", kvcore.Namespace(weight_epoch=2**63), "wanted a weight_epoch of at most"),
        ("retain", (3,), "retain: wanted kvcore.Retention, got 3"),
    ],
)
def test_what_is_no_namespace_and_no_retention_is_refused_by_name(field, value, message):
    with pytest.raises(InvalidArgumentError, match=message):
        Request(0, [1], greedy(), **{field: value})
