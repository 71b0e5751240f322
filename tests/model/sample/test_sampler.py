"""From logits to tokens: what can be drawn, how often, and what a draw depends on."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from model import SamplingParams
from model.errors import NumericalError
from model.sample import passes, sampler
from model.sample.sampler import Draw, sample
from tests.model import sampling_checks as checks


def test_what_can_be_drawn_is_what_sorting_in_float64_leaves():
    checks.check_cuts(sampler)


def test_a_token_is_where_the_sum_of_what_can_be_drawn_passes_the_number():
    checks.check_inversion(sampler)


def test_a_token_depends_on_its_own_row_alone():
    checks.check_company(sampler)


def test_numbers_are_those_of_split_mix_at_their_place():
    checks.check_numbers(sampler)


def test_requests_have_numbers_of_their_own():
    checks.check_streams(sampler)


def test_tokens_come_as_often_as_their_distribution_says():
    checks.check_frequencies(sampler)


@pytest.mark.parametrize("how", [{"top_k": 20, "top_p": 0.95}, {"top_p": 0.7}, {"min_p": 0.05}, {}])
def test_a_large_vocabulary_is_worked_on_in_pieces_that_do_not_show(how, monkeypatch):
    logits = torch.randn(5, 30_000, generator=torch.Generator().manual_seed(3)) * 2
    draws = [Draw(SamplingParams(temperature=0.6, **how), 5, row) for row in range(5)]
    whole = sample(logits, draws)
    monkeypatch.setattr(passes, "_PIECE", 70_000)
    assert sample(logits, draws) == whole


def test_greedy_cut_and_whole_rows_of_one_batch_keep_to_themselves():
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(1))
    whole, cut = SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_k=3)
    draws = [None, Draw(whole, 1, 0), Draw(cut, 2, 0), None, Draw(cut, 3, 0), Draw(whole, 4, 0)]
    together = sample(logits, draws)
    assert together == [sample(logits[[row]], draws[row : row + 1])[0] for row in range(6)]
    assert [together[0], together[3]] == logits[[0, 3]].argmax(dim=-1).tolist()
    for row in (2, 4):
        assert together[row] in logits[row].topk(3).indices.tolist()


@pytest.mark.parametrize("temperature", [1e-300, 1e6])
def test_no_temperature_overflows(temperature):
    logits = torch.tensor([[3.0, 3.5, -torch.inf]])
    draws = [Draw(SamplingParams(temperature=temperature), 1, index) for index in range(64)]
    found = set(sample(logits.expand(64, 3), draws))
    assert found == ({1} if temperature < 1 else {0, 1})


@given(
    how=st.builds(
        SamplingParams,
        temperature=st.floats(0.1, 3),
        top_k=st.none() | st.integers(1, 5),
        top_p=st.floats(0.1, 1),
    )
)
def test_a_token_of_no_probability_is_never_drawn(how):
    logits = torch.tensor([[-torch.inf, 1.0, -torch.inf]])
    draws = [Draw(how, stream=1, index=index) for index in range(20)]
    assert set(sample(logits.expand(20, 3), draws)) == {1}


def test_the_least_and_the_largest_number_take_the_first_and_the_last_token_that_weigh():
    checks.check_ends(sampler)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("how", [{}, {"top_k": 1}, {"top_p": 0.5}, {"temperature": 0}])
def test_logits_that_are_no_numbers_are_refused(value, how):
    draw = Draw(SamplingParams(**{"temperature": 1.0, **how}), 0, 0)
    with pytest.raises(NumericalError, match="row 1 has others"):
        sample(torch.tensor([[0.0, 1.0], [value, 1.0]]), [draw] * 2)


def test_choosing_looks_at_no_value_so_that_a_graph_can_record_it():
    how = [
        SamplingParams(temperature=1.0, **cut)
        for cut in ({}, {"top_k": 3, "top_p": 0.9}, {"top_p": 0.5}, {"min_p": 0.1})
    ]
    terms = sampler.draw_terms([0, 2, 3, 4], how, 5, 700, checks.CPU)
    numbers = torch.rand(4, 1, dtype=torch.float64)
    with FakeTensorMode(allow_non_fake_inputs=True):  # it has shapes and no values
        logits = torch.empty(5, 700)
        tokens = sampler.choose(logits, logits.max(dim=-1), terms, numbers)
        assert (tokens.shape, tokens.dtype) == ((5,), torch.int64)
        with pytest.raises(DataDependentOutputException):
            tokens.tolist()


def test_nothing_to_sample_gives_nothing():
    assert sample(torch.empty(0, 7), []) == []


def test_the_kernels_of_a_draw_give_what_operators_give_and_a_planted_bug_is_seen(
    interpreting,
):
    done = interpreting.run("-m", "tests.model.draw_kernels_check", "cpu", "12", "planted")
    assert done.stdout == "44 draws", done.stderr
    assert done.stderr.splitlines()[-1].startswith("AssertionError: top")
