"""Samplers with a planted bug each: the check that it breaks must say so."""

import sys
import types
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from model.sample import passes, request_sampler, sampler
from tests.model import sampling_checks as checks
from tests.model.sample import test_engine_sampling as engines

pytestmark = pytest.mark.slow  # a second each, and there are many

HUNT = settings(
    max_examples=1000,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)


# What stands in `sampler.py` or `passes.py`, what a bug makes of it, and the check that finds it.
SAMPLER_BUGS = [
    ("ranks >= cut.top_k", "ranks > cut.top_k", checks.check_cuts),
    ("searchsorted(cumulative, cut.top_p *", "searchsorted(cumulative, 0.9 *", checks.check_cuts),
    ("-math.log(params.min_p)", "1 - params.min_p", checks.check_cuts),
    ("reach = torch.minimum(reach, limit)", "reach = limit", checks.check_cuts),
    ("limit = reach.index_put((cut.rows,), limit)", "limit = limit[:1]", checks.check_cuts),
    ("target = top_p * cumulative[:, -1:]", "target = top_p * _SCALE", checks.check_cuts),
    ("masked_fill_(coarse != place, 0.0)", "masked_fill_(coarse < 0, 0.0)", checks.check_cuts),
    ("(coarse << BITS) + fine + 1", "(coarse << BITS) + 1", checks.check_cuts),
    ("elif how.top_p < 1:", "elif how.top_p < 0.5:", checks.check_cuts),
    ("* sharpness\n", "/ sharpness\n", checks.check_cuts),
    (".masked_fill(distances > reach, 0.0)", "", checks.check_inversion),
    ("(distances > reach) | ", "", checks.check_inversion),
    ("cumulative, target, right=True", "cumulative, target, right=False", checks.check_ends),
    ("- sums.gather(1, chunk))", ")", checks.check_inversion),
    (
        "tokens.index_put((rows,), chosen)",
        "tokens.index_put((rows,), chosen * 0)",
        checks.check_company,
    ),
    (
        "logits if rows is None else logits[rows]",
        "logits[: len(terms.sharpness)]",
        checks.check_company,
    ),
    ("np.array([how.index for how in drawing])", "np.arange(len(drawing))", checks.check_company),
    (">> np.uint64(27)", ">> np.uint64(28)", checks.check_numbers),
    ("np.uint64) + np.uint64(1)", "np.uint64)", checks.check_numbers),
    ("(0, seed, sample)", "(0, seed, 0)", checks.check_streams),
    ("(1, engine_seed, request_id)", "(0, engine_seed, request_id)", checks.check_streams),
    ("streams + (indexes", "streams + 0 * (indexes", checks.check_frequencies),
]


def planted(snippet, bug):
    """A copy of the sampler and its passes with a bug in one of them."""
    sources = [Path(each.__file__).read_text(encoding="utf-8") for each in (passes, sampler)]
    assert sum(source.count(snippet) for source in sources) == 1, snippet
    for name, source in zip(("planted_passes", "planted_sampler"), sources, strict=True):
        module = types.ModuleType(name)
        sys.modules[name] = module  # dataclasses look there
        changed = source.replace(snippet, bug).replace("model.sample.passes", "planted_passes")
        exec(compile(changed, name, "exec"), module.__dict__)  # noqa: S102
    return module


@pytest.mark.parametrize(
    ("snippet", "bug", "check"), SAMPLER_BUGS, ids=[bug[0] for bug in SAMPLER_BUGS]
)
def test_a_planted_bug_is_caught(snippet, bug, check, monkeypatch):
    monkeypatch.setattr(checks, "CHECK", HUNT)
    module = planted(snippet, bug)
    with pytest.raises((AssertionError, IndexError, RuntimeError)):
        check(module)


@HUNT
@given(arrivals=engines.arrivals, sizes=engines.sizes)
def company(arrivals, sizes):
    engines.check_company(arrivals, sizes)


@HUNT
@given(how=engines.penalties, prompt=engines.prompts)
def penalties(how, prompt):
    engines.check_penalties(how, prompt)


def counts_the_prompt_as_output(monkeypatch):
    monkeypatch.setattr(request_sampler, "_IN_PROMPT", 1)


def counts_nothing_that_it_draws(monkeypatch):
    monkeypatch.setattr(request_sampler._Changes, "count", lambda self, tokens: None)
    bring = request_sampler._TokenCounts._bring
    monkeypatch.setattr(
        request_sampler._TokenCounts,
        "_bring",
        lambda self, request: None if request.request_id in self._slots else bring(self, request),
    )


def penalises_twice(monkeypatch):
    apply = request_sampler._Changes.apply

    def twice(self, logits, most_likely, newest):
        return apply(self, *apply(self, logits, most_likely, newest), newest)

    monkeypatch.setattr(request_sampler._Changes, "apply", twice)


def keeps_the_counts_of_a_row_that_was_given_back(monkeypatch):
    monkeypatch.setattr(
        request_sampler._TokenCounts,
        "of",
        lambda self, requests: (
            [self._bring(r) for r in requests if r.request_id not in self._slots],
            self._table[self._rows(requests)],
        )[1],
    )


def numbers_by_the_row(monkeypatch):
    stream = request_sampler.RequestSampler._stream
    monkeypatch.setattr(
        request_sampler.RequestSampler,
        "_stream",
        lambda self, request: stream(self, request) + len(self._streams),
    )


def gives_logprobs_of_changed_logits(monkeypatch):
    compute = request_sampler._LogprobRows.compute
    monkeypatch.setattr(
        request_sampler._LogprobRows,
        "compute",
        lambda self, logits, tokens: (
            compute(self, logits - logits.mean(), tokens)
            if len(logits) == 1
            else compute(self, logits * 2, tokens)
        ),
    )


def draws_by_the_terms_of_the_step_before(monkeypatch):
    draw = request_sampler.RequestSampler.draw

    def stale(self, logits, sampling, *more):
        if len(self._terms.sampling) == len(sampling) > 0:
            self._terms = request_sampler._StepTerms(
                sampling, *[getattr(self._terms, name) for name in self._terms.__slots__[1:]]
            )
        return draw(self, logits, sampling, *more)

    monkeypatch.setattr(request_sampler.RequestSampler, "draw", stale)


@pytest.mark.parametrize(
    ("plant", "hunt"),
    [
        (counts_the_prompt_as_output, penalties),
        (counts_nothing_that_it_draws, penalties),
        (penalises_twice, penalties),
        (keeps_the_counts_of_a_row_that_was_given_back, company),
        (numbers_by_the_row, company),
        (gives_logprobs_of_changed_logits, company),
        (draws_by_the_terms_of_the_step_before, company),
    ],
)
def test_a_planted_bug_of_the_engines_sampler_is_caught(plant, hunt, monkeypatch):
    plant(monkeypatch)
    with pytest.raises((AssertionError, KeyError, IndexError)):
        hunt()
