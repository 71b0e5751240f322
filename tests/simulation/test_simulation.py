"""The simulation finds nothing in the product, finds every planted bug, and repeats itself."""

import hashlib
import logging
import os
import subprocess
import sys

import pytest

from tests.kvcore.sabotage import SABOTAGES
from tests.simulation.__main__ import main, plan_of
from tests.simulation.bugs import BUGS, planted
from tests.simulation.shrink import Shrinker
from tests.simulation.world import Run

_NUM_SEEDS = 400
_FROM = {  # where a bug that few runs show was found; the hunt goes on behind it
    "DropsATokenOfABurst": 157,
    "FailsWithoutAWord": 33,
    "IsNeverReadyAgain": 19,
    "GoesOnAfterAFault": 19,
    "does_not_see_a_client_leave": 53,
    "closes_nothing": 44,
    "leaves_open_what_comes_too_late": 45,
}


@pytest.fixture(autouse=True)
def silent():
    """Faults are logged, as they should be."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def stories(seeds):
    digest = hashlib.sha256()
    for seed in seeds:
        outcome = Run(plan_of(seed))()
        assert outcome.violation is None, seed
        digest.update("\n".join(outcome.story).encode())
    return digest.hexdigest()


def test_a_seed_is_one_run_whatever_strings_hash_to():
    code = f"from tests.simulation.test_simulation import stories; print(stories({[*range(12)]}))"
    ended = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONHASHSEED": "7"},
        check=True,
    )
    assert ended.stdout.strip() == stories(range(12))


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name):
    first = _FROM.get(name, 0)
    with planted(name) as bug:
        assert any(Run(plan_of(seed), bug)().violation for seed in range(first, _NUM_SEEDS))


def test_a_run_checks_the_invariants_of_the_pool():
    bug = {"kv": SABOTAGES["manager_counts_what_the_closed_have_computed"].make}
    assert Run(plan_of(0), bug)().violation.startswith("ViolationError: the pool: P13: ")


def test_a_run_that_fails_is_cut_down():
    with planted("CopiesForksTooLate") as bug:
        seed = next(seed for seed in range(_NUM_SEEDS) if Run(plan_of(seed), bug)().violation)
        whole = plan_of(seed)
        plan, outcome = Shrinker(whole, bug)()
    assert "reads what is not its own" in outcome.violation
    assert len(plan.asks) == 1 < len(whole.asks)
    assert plan.asks[0].num_samples > 1  # the bug needs a fork
    assert len(outcome.story) < 6


def test_the_command_tells_what_it_ran_and_a_failure_as_a_story(capsys):
    assert main(["--seed", "5", "--hours", "0.0001"]) == 0
    assert "runs from seed 5: nothing wrong;" in capsys.readouterr().out
    assert main(["--seed", "5", "--once"]) == 0
    assert "client 0 asks: " in capsys.readouterr().out
    with planted("closes_nothing"):
        assert main(["--seed", "44", "--hours", "1"]) == 1
    told = capsys.readouterr().out
    assert "cut down in" in told
    assert "again: python -m tests.simulation --seed " in told
