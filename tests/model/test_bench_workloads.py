"""What the benchmark sends, and what its numbers mean."""

import itertools
import math
import statistics

import pytest

from model import InvalidArgumentError
from model.bench.metrics import Timeline, summarize
from model.bench.serve import Arrivals
from model.bench.workloads import SHAPES, Shape, Span, make_requests, total_lengths


def test_uniform_is_the_256_requests_and_133966_output_tokens_of_nano_vllm():
    requests = make_requests(SHAPES["uniform"], vocab_size=151_936)
    assert len(requests) == 256
    assert sum(request.max_tokens for request in requests) == 133_966
    assert {len(r.tokens) in range(100, 1025) for r in requests} == {True}
    assert max(max(r.tokens) for r in requests) == 10_000
    assert all(request.follows is None for request in requests)


@pytest.mark.parametrize("name", SHAPES)
def test_a_workload_repeats_with_its_seed_and_its_lengths_do_not_depend_on_the_vocabulary(name):
    large = make_requests(SHAPES[name], vocab_size=20_000)
    small = make_requests(SHAPES[name], vocab_size=7)
    assert large == make_requests(SHAPES[name], vocab_size=20_000)
    assert large != make_requests(SHAPES[name], vocab_size=20_000, seed=1)
    assert [(len(r.tokens), r.max_tokens) for r in small] == [
        (len(r.tokens), r.max_tokens) for r in large
    ]
    assert max(max(r.tokens) for r in small) == 6


def test_shared_prefix_prompts_share_the_prefix_and_no_more():
    shape = Shape(num_requests=9, input_len=Span(3, 5), output_len=Span(1, 1), prefix_len=40)
    prompts = [request.tokens for request in make_requests(shape, vocab_size=10_000)]
    assert len({prompt[:40] for prompt in prompts}) == 1
    assert len({prompt[40:] for prompt in prompts}) == 9
    assert {len(prompt) for prompt in prompts} == {43, 44, 45}


def test_a_chats_turn_follows_the_one_before_it_in_its_own_conversation():
    shape = Shape(
        num_requests=10, input_len=Span(2, 2), output_len=Span(3, 3), prefix_len=8, turns=4
    )
    requests = make_requests(shape, vocab_size=99)
    assert [request.follows for request in requests] == [None] * 3 + list(range(7))
    assert [len(request.tokens) for request in requests] == [10] * 3 + [2] * 7
    assert total_lengths(requests) == [13] * 3 + [18] * 3 + [23] * 3 + [28]


@pytest.mark.parametrize(("low", "high"), [(0, 4), (5, 4), (-1, -1)])
def test_a_span_that_is_none_is_refused(low, high):
    with pytest.raises(InvalidArgumentError, match=f"got {low}:{high}"):
        Span(low, high)


@pytest.mark.parametrize("wrong", [{"num_requests": 0}, {"prefix_len": -1}, {"turns": 0}])
def test_a_shape_that_is_none_is_refused_by_the_name_of_what_is_wrong(wrong):
    usual = {"num_requests": 1, "input_len": Span(1, 1), "output_len": Span(1, 1)}
    ((name, value),) = wrong.items()
    with pytest.raises(InvalidArgumentError, match=f"{name}: .* got {value}"):
        Shape(**{**usual, **wrong})


def test_the_numbers_of_two_requests_are_those_counted_by_hand():
    numbers = summarize(
        [
            Timeline(10, 0, arrival_s=0.0, token_s=(1.0, 1.5, 3.0)),
            Timeline(20, 8, arrival_s=2.0, token_s=(4.0,)),
        ]
    )
    assert numbers["duration"] == 4.0
    assert numbers["completed"] == 2
    assert (numbers["total_input_tokens"], numbers["total_output_tokens"]) == (30, 4)
    assert (numbers["request_throughput"], numbers["output_throughput"]) == (0.5, 1.0)
    assert numbers["total_token_throughput"] == 8.5
    assert (numbers["mean_ttft_ms"], numbers["median_ttft_ms"]) == (1500, 1500)
    assert (numbers["mean_tpot_ms"], numbers["std_tpot_ms"]) == (1000, 0)
    assert (numbers["mean_itl_ms"], numbers["std_itl_ms"]) == (1000, 500)
    assert numbers["p99_itl_ms"] == pytest.approx(1490)
    assert numbers["mean_e2el_ms"] == 2500


def test_one_token_a_request_has_no_time_between_tokens():
    numbers = summarize([Timeline(1, 0, 0.0, (1.0,))])
    assert numbers["mean_tpot_ms"] == numbers["p99_itl_ms"] == 0


def test_without_a_rate_all_are_due_at_once_and_with_one_at_random_moments_that_repeat():
    assert Arrivals().due(3) == [0.0, 0.0, 0.0]
    moments = Arrivals(rate=50.0, seed=3).due(4000)
    gaps = [later - earlier for earlier, later in itertools.pairwise(moments)]
    assert moments[0] == 0
    assert min(gaps) > 0
    # Poisson: the gaps' mean and standard deviation are both 1 / rate, to 5 of their own errors.
    assert statistics.mean(gaps) == pytest.approx(0.02, abs=5 * 0.02 / math.sqrt(4000))
    assert statistics.stdev(gaps) == pytest.approx(0.02, rel=0.15)
    assert moments == Arrivals(rate=50.0, seed=3).due(4000)
    assert moments != Arrivals(rate=50.0, seed=4).due(4000)
