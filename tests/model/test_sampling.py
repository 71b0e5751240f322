"""From logits to tokens: what can be drawn, and what a draw depends on."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from model import SamplingParams
from model.device.sampler import Draw, draw_key, kept_mass, sample
from model.errors import NumericalError

rows_of_logits = st.lists(
    st.lists(st.floats(-20, 20, width=32), min_size=7, max_size=7), min_size=1, max_size=5
).map(torch.tensor)
params = st.builds(
    SamplingParams,
    temperature=st.floats(0.05, 5),
    top_k=st.none() | st.integers(1, 9),
    top_p=st.floats(0.01, 1),
)
keys = st.integers(0, 2**128 - 6)


def probabilities(logits, temperature):
    exps = [math.exp((x - max(logits)) / temperature) for x in logits]
    return [e / sum(exps) for e in exps]


@given(logits=rows_of_logits)
def test_a_temperature_of_zero_takes_the_most_likely_token(logits):
    draws = [Draw(SamplingParams(), key=0, index=row) for row in range(len(logits))]
    for row, token in zip(logits.tolist(), sample(logits, draws), strict=True):
        assert token == row.index(max(row))


@given(logits=rows_of_logits, how=params)
def test_what_can_be_drawn_is_the_top_k_and_of_those_the_fewest_that_reach_top_p(logits, how):
    mass, token_ids = kept_mass(logits.double(), [how] * len(logits))
    for row, kept, ids in zip(logits.tolist(), mass.tolist(), token_ids.tolist(), strict=True):
        ranked = sorted(range(7), key=lambda token: (-row[token], token))
        assert ids == ranked
        likely = probabilities(row, how.temperature)
        top = [likely[token] for token in ranked[: how.top_k]]
        top = [p / sum(top) for p in top]
        count = sum(p > 0 for p in kept)
        assert 1 <= count <= len(top)
        assert all(p == 0 for p in kept[count:])
        assert kept[:count] == pytest.approx(top[:count], abs=1e-9)
        assert sum(top[:count]) >= min(how.top_p, sum(p for p in top if p > 0)) - 1e-9
        assert sum(top[: count - 1]) < how.top_p + 1e-9


@given(logits=rows_of_logits, how=st.lists(params, min_size=5, max_size=5), key=keys)
def test_a_token_depends_on_its_own_row_alone(logits, how, key):
    draws = [Draw(how[row], key + row, index=row) for row in range(len(logits))]
    together = sample(logits, draws)
    alone = [sample(logits[row : row + 1], [draws[row]])[0] for row in range(len(logits))]
    mixed = sample(
        torch.cat([logits, logits]), [*draws, *[Draw(SamplingParams(), 0, 0)] * len(draws)]
    )
    assert together == alone == mixed[: len(draws)]


@given(key=keys, index=st.integers(0, 2**40))
def test_a_uniform_number_is_the_same_each_time_and_below_one(key, index):
    draw = Draw(SamplingParams(temperature=1), key, index)
    assert 0 <= draw.uniform() == draw.uniform() < 1


def test_draws_have_the_frequencies_of_the_softmax():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    how = SamplingParams(temperature=1.5)
    count = 4000
    drawn = sample(logits.expand(count, 4), [Draw(how, 7, index) for index in range(count)])
    for token, wanted in enumerate(probabilities(logits[0].tolist(), 1.5)):
        spread = math.sqrt(wanted * (1 - wanted) / count)
        assert abs(Counter(drawn)[token] / count - wanted) < 5 * spread


@given(
    vocab_size=st.sampled_from([1, 2, 255, 256, 257, 512, 700]),
    temperature=st.floats(0.05, 5),
    seed=st.integers(0, 2**32),
)
def test_a_row_that_is_not_cut_is_drawn_by_inverting_its_distribution_over_the_ids(
    vocab_size, temperature, seed
):
    generator = torch.Generator().manual_seed(seed)
    row = torch.randn(vocab_size, generator=generator) * 4
    row[torch.rand(vocab_size, generator=generator) < 0.3] = -torch.inf
    row[seed % vocab_size] = 1.0
    draw = Draw(SamplingParams(temperature=temperature), key=seed, index=3)
    token = sample(row[None], [draw])[0]
    likely = probabilities(row.tolist(), temperature)
    before, upto = sum(likely[:token]), sum(likely[: token + 1])
    assert likely[token] > 0
    assert before - 1e-12 <= draw.uniform() <= upto + 1e-12


def test_greedy_cut_and_whole_rows_of_one_batch_keep_to_themselves():
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(1))
    whole, cut = SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_k=3)
    draws = [None, Draw(whole, 1, 0), Draw(cut, 2, 0), None, Draw(cut, 3, 0), Draw(whole, 4, 0)]
    together = sample(logits, draws)
    assert together == [sample(logits[[row]], draws[row : row + 1])[0] for row in range(6)]
    assert [together[0], together[3]] == logits[[0, 3]].argmax(dim=-1).tolist()
    for row in (2, 4):
        assert together[row] in logits[row].topk(3).indices.tolist()


def test_a_request_without_a_seed_has_a_key_that_no_other_request_has():
    keys = [draw_key(None, 3, number) for number in range(50)]
    keys += [draw_key(None, 4, number) for number in range(50)]
    keys += [draw_key(seed, 0, 0, sample) for seed in range(50) for sample in range(3)]
    assert len(set(keys)) == 250
    assert draw_key(9, 3, 1) == draw_key(9, 4, 2)


def test_a_tiny_temperature_is_the_most_likely_token_and_no_overflow():
    logits = torch.tensor([[3.0, 3.5, -1e30]])
    draw = Draw(SamplingParams(temperature=1e-300), key=1, index=0)
    assert sample(logits, [draw]) == [1]


def test_a_token_of_no_probability_is_never_drawn():
    logits = torch.tensor([[-torch.inf, 1.0, -torch.inf]])
    draws = [Draw(SamplingParams(temperature=2), key=1, index=index) for index in range(50)]
    assert set(sample(logits.expand(50, 3), draws)) == {1}


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_logits_that_are_no_numbers_are_refused(value):
    with pytest.raises(NumericalError, match="row 1 has others"):
        sample(torch.tensor([[0.0, 1.0], [value, 1.0]]), [Draw(SamplingParams(), 0, 0)] * 2)


def test_nothing_to_sample_gives_nothing():
    assert sample(torch.empty(0, 7), []) == []
