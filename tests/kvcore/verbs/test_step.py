"""Steps of an engine in every form, one after another, beside the naive manager."""

import pytest

from tests.kvcore.machines.programs import run_programs

SEEDS = [0, *[pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 9)]]


@pytest.mark.parametrize("seed", SEEDS)
def test_steps_in_every_form_are_the_verbs_of_each_and_take_what_was_said(seed):
    run_programs(seed, 200)
