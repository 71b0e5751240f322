"""The life of a request, and what its parameters may be."""

import math

import pytest

import kvcore
from model import (
    FinishReason,
    InvalidArgumentError,
    Request,
    RequestStateError,
    SamplingParams,
    Status,
)

KV = kvcore.KVCacheManager(4, 2)


def running(params=None, eos=frozenset()):
    request = Request(0, [1, 2], params or SamplingParams(), eos)
    request.start(KV.open([1, 2]))
    return request


def drawn(request, token):
    KV.append(request.running_sequence, token)
    return request.ending(token)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 2.0),
        ("max_tokens", True),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", 10**400),
        ("temperature", "1"),
        ("top_k", -2),
        ("top_p", 0),
        ("top_p", 1.5),
        ("seed", -1),
        ("seed", 2**63),
        ("stop", ("",)),
        ("stop", [""]),
        ("prompt_logprobs", 21),
        ("stop_token_ids", ("a",)),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", (2**32,)),
        ("ignore_eos", 1),
    ],
)
def test_a_parameter_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(InvalidArgumentError, match=f"^{name}: wanted .*, got "):
        SamplingParams(**{name: value})


def test_a_number_too_long_to_write_is_still_refused_by_name():
    with pytest.raises(InvalidArgumentError, match=r"^max_tokens: .*, got a int too long to write"):
        SamplingParams(max_tokens=10**5000)


def test_a_long_value_is_shown_by_its_beginning():
    with pytest.raises(InvalidArgumentError) as error:
        SamplingParams(top_k="x" * 1000)
    assert str(error.value).endswith("got '" + "x" * 79 + "...")


def test_an_empty_prompt_is_refused():
    with pytest.raises(InvalidArgumentError, match="at least one token"):
        Request(0, [], SamplingParams())


@pytest.mark.parametrize("token", [-1, 2**32])
def test_what_is_no_token_id_is_refused(token):
    with pytest.raises(InvalidArgumentError, match=f"got {token}"):
        Request(0, [1, token], SamplingParams())


def test_a_request_knows_its_prompt_from_its_output():
    request = running(SamplingParams(max_tokens=3))
    assert [drawn(request, 7), drawn(request, 8)] == [None, None]
    assert drawn(request, 9) is FinishReason.LENGTH
    assert (request.prompt_tokens, request.output_tokens) == ([1, 2], [7, 8, 9])


def test_a_stop_token_ends_a_request_and_stays_in_its_output():
    request = running(SamplingParams(stop_token_ids=(5,)))
    assert drawn(request, 5) is FinishReason.STOP
    assert request.output_tokens == [5]


def test_an_end_of_text_ends_a_request_unless_it_is_ignored():
    assert drawn(running(eos=frozenset({5})), 5) is FinishReason.STOP
    ignoring = SamplingParams(ignore_eos=True, max_tokens=2)
    assert drawn(running(ignoring, frozenset({5})), 5) is None


def test_a_token_that_is_expected_counts_and_is_not_shown():
    request = running(SamplingParams(max_tokens=2))
    assert drawn(request, 7) is None
    KV.expect(request.running_sequence, 1)
    for _ in ("running", "preempted"):
        assert (request.num_output_tokens, request.output_tokens) == (2, [7])
        assert request.is_expecting
        assert request.is_complete
        if request.sequence is not None:
            KV.close(request.preempt())
    request.tell(8)
    assert request.ending(8) is FinishReason.LENGTH
    assert (request.is_expecting, request.output_tokens) == (False, [7, 8])


def test_the_tokens_of_a_running_request_are_its_sequences_own():
    request = running()
    KV.extend(request.running_sequence, [7, 8])
    assert request.tokens is request.running_sequence.packed
    assert (request.num_tokens, request.num_uncomputed_tokens) == (4, 4)
    sequence = request.preempt()
    KV.extend(sequence, [9])  # what becomes of it is nothing to the request any more
    assert request.tokens.tolist() == [1, 2, 7, 8]
    KV.close(sequence)


def test_a_request_that_ends_forgets_what_it_expects():
    request = running()
    assert drawn(request, 7) is None
    KV.expect(request.running_sequence, 1)
    request.finish(FinishReason.ABORTED)
    assert (request.num_output_tokens, request.output_tokens) == (1, [7])
    with pytest.raises(RequestStateError, match="a preempted request that expects a token"):
        request.tell(8)


def test_only_a_running_request_takes_tokens_or_holds_a_sequence():
    request = Request(0, [1], SamplingParams())
    with pytest.raises(RequestStateError, match="a preempted request that expects a token"):
        request.tell(1)
    with pytest.raises(RequestStateError, match="only a running request holds a sequence"):
        request.preempt()
    assert request.status is Status.WAITING


def test_a_preempted_request_runs_again_and_a_finished_one_never():
    request = running()
    sequence = request.preempt()
    assert (request.status, request.sequence) == (Status.PREEMPTED, None)
    request.start(sequence)
    with pytest.raises(RequestStateError, match="cannot become running"):
        request.start(sequence)
    assert request.finish(FinishReason.ABORTED) is sequence
    for again in (lambda: request.start(sequence), lambda: request.finish(FinishReason.STOP)):
        with pytest.raises(RequestStateError, match="cannot become"):
            again()
    assert request.finish_reason is FinishReason.ABORTED


def test_a_bias_and_a_weight_epoch_may_be_at_their_bounds_and_not_beyond():
    assert SamplingParams(logit_bias=((1, -100), (2, 100))).logit_bias == ((1, -100), (2, 100))
    for bias in (-101, 101):
        with pytest.raises(InvalidArgumentError, match="logit_bias: wanted"):
            SamplingParams(logit_bias=((1, bias),))
    last = 2**63 - 1
    Request(0, [1], SamplingParams(), namespace=kvcore.Namespace(weight_epoch=last))
    with pytest.raises(InvalidArgumentError, match=f"weight_epoch of at most {last}"):
        Request(0, [1], SamplingParams(), namespace=kvcore.Namespace(weight_epoch=last + 1))
