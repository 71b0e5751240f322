"""What the server costs: both turns do the same work, and a client that is cut off is told of."""

import math

import pytest

from model.errors import ModelError
from model.serve.cost import CostOptions, measure
from tests.model.serve.conftest import DEADLINE_S


@pytest.mark.parametrize("request_rate", [math.inf, 200.0])
@pytest.mark.parametrize("whole", [False, True])
def test_both_turns_answer_every_request(make_engine, request_rate, whole):
    options = CostOptions(
        rounds=1,
        num_requests=6,
        concurrency=3,
        input_len=5,
        output_len=4,
        whole=whole,
        request_rate=request_rate,
    )
    [(alone, served)] = measure(make_engine(), options)
    for turn in (alone, served):
        assert len(turn.first_s) == 6
        assert all(0 < first_s <= DEADLINE_S for first_s in turn.first_s)
        assert max(turn.first_s) <= turn.clock_s


def test_answers_that_are_not_whole_are_an_error(make_engine):
    longer_than_fits = CostOptions(rounds=1, num_requests=2, input_len=9, output_len=100_000)
    with pytest.raises(ModelError):
        measure(make_engine(), longer_than_fits)
