"""What must hold of `model.sample.sampler`, as checks of any module in its place.

`test_sampler.py` runs them on it, `test_sampler_sabotage.py` on copies with a planted bug each.
"""

import math
from collections import Counter

import numpy as np
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from model import SamplingParams
from tests.model import sampling_reference as reference

CHECK = settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)
CPU = torch.device("cpu")
TOLERANCE = 1e-5  # of a threshold on a probability: 2**-17, and float32's own

values = st.one_of(st.floats(-20, 20, width=32), st.integers(-3, 3).map(float), st.just(-math.inf))
sizes = st.sampled_from([1, 2, 7, 40, 255, 256, 257, 600])


@st.composite
def rows_of_logits(draw):
    """A few rows: of any values, of few values that are often equal, of a random network's."""
    num_rows, size = draw(st.integers(1, 5)), draw(sizes)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    logits = torch.randn(num_rows, size, generator=generator) * draw(st.sampled_from([0.1, 2, 9]))
    if draw(st.booleans()):
        logits = logits.round()
    for place, value in draw(st.dictionaries(st.integers(0, size - 1), values, max_size=6)).items():
        logits[:, place] = value
    logits[torch.arange(num_rows), draw(st.integers(0, size - 1))] = draw(
        st.floats(0, 20, width=32)
    )
    return logits.to(draw(st.sampled_from([torch.float32, torch.bfloat16])))


params = st.builds(
    SamplingParams,
    temperature=st.floats(0.05, 5),
    top_k=st.none() | st.integers(1, 9) | st.integers(1, 700),
    top_p=st.just(1.0) | st.floats(0.01, 1),
    min_p=st.just(0.0) | st.floats(0, 1),
)


def terms_of(sampler, how, logits):
    return sampler.draw_terms(range(len(logits)), how, *logits.shape, CPU)


def check_cuts(sampler):
    """What can be drawn is what the reference leaves, and what is as likely as its last token."""

    @CHECK
    @given(logits=rows_of_logits(), data=st.data())
    def check(logits, data):
        how = data.draw(st.lists(params, min_size=len(logits), max_size=len(logits)))
        best = logits.amax(dim=-1, keepdim=True).float()
        terms = terms_of(sampler, how, logits)
        reach = sampler.furthest(logits, best, terms).squeeze(-1).tolist()
        for row, its, limit in zip(logits.tolist(), how, reach, strict=True):
            distances = [(max(row) - value) / its.temperature for value in row]
            wanted = reference.kept(row, its)
            last = max(distances[token] for token in wanted)
            slack = TOLERANCE * (1 + last)
            if its.top_k is None and its.top_p < 1:  # mass that rounds across the threshold
                fewer = reference.kept(row, with_top_p(its, its.top_p - TOLERANCE))
                more = reference.kept(row, with_top_p(its, min(1.0, its.top_p + TOLERANCE)))
            else:
                fewer = reference.kept(row, with_top_p(its, its.top_p * (1 - TOLERANCE)))
                more = reference.kept(row, with_top_p(its, its.top_p * (1 + TOLERANCE)))
            least = max(distances[token] for token in fewer)
            most = max(distances[token] for token in more)
            for distance in distances:
                if distance > 24:
                    continue  # weighs nothing
                if distance <= least - slack:
                    assert distance <= limit
                if distance > most + slack:
                    assert distance > limit

    check()


def with_top_p(how, top_p):
    return SamplingParams(
        temperature=how.temperature,
        top_k=how.top_k,
        top_p=min(1.0, max(1e-9, top_p)),
        min_p=how.min_p,
    )


def check_inversion(sampler):
    """A token is the one at which the sum of what can be drawn passes the row's number."""

    @CHECK
    @given(logits=rows_of_logits(), how=params, stream=st.integers(0, 2**64 - 1))
    def check(logits, how, stream):
        logits = logits.float()
        draws = [sampler.Draw(how, stream, index) for index in range(len(logits))]
        best = logits.amax(dim=-1, keepdim=True)
        limits = sampler.furthest(logits, best, terms_of(sampler, [how] * len(logits), logits))
        tokens = sampler.sample(logits, draws)
        for row, draw, limit, token in zip(
            logits.tolist(), draws, limits.tolist(), tokens, strict=True
        ):
            distances = [(max(row) - value) / how.temperature for value in row]
            weights = [math.exp(-d) if d <= limit[0] + 1e-6 else 0.0 for d in distances]
            before = sum(weights[:token]) / sum(weights)
            upto = sum(weights[: token + 1]) / sum(weights)
            assert weights[token] > 0
            assert before - 2e-5 <= draw.uniform() <= upto + 2e-5

    check()


def check_ends(sampler):
    """The least number takes the first token that has weight, the largest the last."""
    for size, first, last in ((300, 70, 199), (600, 300, 599), (8, 3, 3)):
        logits = torch.full((2, size), -math.inf)
        logits[:, first : last + 1] = 0.0
        terms = sampler.draw_terms(range(2), [SamplingParams(temperature=1.0)] * 2, 2, size, CPU)
        numbers = torch.tensor([[0.0], [1 - 2.0**-53]], dtype=torch.float64)
        found = sampler.choose(logits, logits.max(dim=-1), terms, numbers).tolist()
        assert found == [first, last]


def check_company(sampler):
    """A token depends on its own row alone: not on the others, their terms or their number."""

    @CHECK
    @given(logits=rows_of_logits(), data=st.data(), stream=st.integers(0, 2**64 - 9))
    def check(logits, data, stream):
        how = data.draw(
            st.lists(params | st.just(SamplingParams()), min_size=len(logits), max_size=len(logits))
        )
        draws = [sampler.Draw(its, stream + row, row) for row, its in enumerate(how)]
        together = sampler.sample(logits, draws)
        alone = [sampler.sample(logits[r : r + 1], [draws[r]])[0] for r in range(len(logits))]
        assert together == alone
        order = data.draw(st.permutations(range(len(logits))))
        mixed = sampler.sample(logits[order], [draws[row] for row in order])
        assert mixed == [together[row] for row in order]
        for row, its, token in zip(logits.tolist(), how, together, strict=True):
            assert not its.is_greedy or token == row.index(max(row))

    check()


def check_numbers(sampler):
    """Numbers are SplitMix64's, those of a request's stream in their order."""

    @CHECK
    @given(
        streams=st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=5),
        index=st.integers(0, 2**40),
    )
    def check(streams, index):
        indexes = np.arange(index, index + len(streams))
        found = sampler.uniforms(np.array(streams, np.uint64), indexes)
        for number, stream, at in zip(found.tolist(), streams, indexes.tolist(), strict=True):
            assert number == (reference.split_mix(stream, at) >> 11) / 2**53
            assert number == sampler.Draw(SamplingParams(), stream, at).uniform()

    check()


def check_streams(sampler):
    """No two requests share their numbers, but those of one seed, which repeat themselves."""
    streams = [sampler.stream_of(None, engine, number) for engine in (3, 4) for number in range(50)]
    streams += [sampler.stream_of(seed, 0, 0, one) for seed in range(50) for one in range(3)]
    assert len(set(streams)) == 250
    assert all(0 <= stream < 2**64 for stream in streams)
    assert sampler.stream_of(9, 3, 1) == sampler.stream_of(9, 4, 2)
    assert sampler.stream_of(9, 3, 1) == 0xADCFBD1AA129A42A


def check_frequencies(sampler):
    """Tokens come as often as the kept distribution says: over indexes, and over requests."""
    logits = torch.tensor([2.0, 1.5, 1.0, 0.0, 0.5, -1.0, -4.0, 1.2])
    cases = [
        SamplingParams(temperature=1.5),
        SamplingParams(temperature=0.8, top_k=5),
        SamplingParams(temperature=1.0, top_p=0.8),
        SamplingParams(temperature=0.7, top_k=6, top_p=0.9),
        SamplingParams(temperature=1.2, min_p=0.3),
    ]
    count = 3000
    for how in cases:
        left = reference.kept(logits.tolist(), how)
        likely = reference.probabilities(logits.tolist(), how.temperature)
        total = sum(likely[token] for token in left)
        expected = [count * likely[t] / total if t in left else 0 for t in range(len(logits))]
        one = [sampler.Draw(how, sampler.stream_of(7, 0, 0), index) for index in range(count)]
        many = [sampler.Draw(how, sampler.stream_of(seed, 0, 0), 3) for seed in range(count)]
        samples = [sampler.Draw(how, sampler.stream_of(1, 0, 0, s), 0) for s in range(count)]
        for draws in (one, many, samples):
            drawn = Counter(sampler.sample(logits.expand(count, -1), draws))
            assert abs(reference.chi_square([drawn[t] for t in range(8)], expected)) < 4.5
        # And what follows one another has nothing to do with another: pairs are as likely.
        tokens = sampler.sample(logits.expand(count, -1), one)
        pairs = Counter(zip(tokens[::2], tokens[1::2], strict=True))
        chances = {(a, b): expected[a] * expected[b] / 2 / count for a in left for b in left}
        assert (
            abs(reference.chi_square([pairs[pair] for pair in chances], list(chances.values())))
            < 4.5
        )
