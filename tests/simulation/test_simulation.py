"""The simulation finds nothing in the product, finds every planted bug, and repeats itself."""

import logging
import os
import subprocess
import sys

import pytest

from tests.kvcore.sabotage import SABOTAGES
from tests.simulation import specification, transfers
from tests.simulation.__main__ import main, plan_of
from tests.simulation.bugs import planted
from tests.simulation.shrink import Shrinker
from tests.simulation.world import Run

_NUM_SEEDS = 400
_PYTHONS = os.environ.get("KVCORE_PYTHONS", "").split(os.pathsep)  # with what the server imports
_PLAIN = [name for name, (faults, _) in specification.BUGS.items() if not faults]
_FROM = {  # the first seed that shows a bug
    "AbortsOnlyOnTheLoop": 1, "ForgetsTheQueueAtTheEnd": 79,
    "LeavesStreamsOpenAfterAFault": 23, "CountsArrivalsForEver": 0, "TellsTheEndTwice": 1,
    "DropsATokenOfABurst": 4, "leaves_open_what_comes_too_late": 6,
    "TakesAnyNumberOfRequests": 2, "IsNeverReadyAgain": 65, "KeepsTextsOfTheAborted": 0,
    "KeepsTheDevicesPartOfTheFinished": 0, "GoesOnAfterAFault": 187,
    "TellsTheEndWithTheTokenBefore": 41, "KeepsWhatCouldNotBeRead": 91,
    "CopiesForksTooLate": 3, "AcceptsWhatWasNotVerified": 3, "FailsWithoutAWord": 9,
    "TellsOtherRanksOfNoAbort": 20, "TellsOtherRanksTooLate": 17,
    "OtherRanksAbortFirst": 17, "does_not_see_a_client_leave": 107,
    "serves_only_the_ready": 10, "closes_nothing": 1, "wakes_only_for_news": 11,
    "ForgetsWhatIsHeldAtAFault": 69, "DoesNotCountThoseOnTheirWay": 2,
    "DropsTheLastFlight": 1, "QueuesHalf": 1, "OtherRanksNeverEnd": 17,
    "TellsOtherRanksTwice": 17, "ForgetsPriorities": 17, "NewOnesFirst": 23,
    "ShortOnesFirst": 1, "PriorityIsEverything": 1, "ChoosesTheLost": 9,
    "TakesTheBusiest": 0, "ends_without_its_tokens": 0, "ends_twice": 0,
    "begins_with_every_token": 0, "keeps_what_comes": 1, "KeepsTheRemoved": 3,
    "NeverCatchesUp": 6, "NeverEnds": 0, "ForgetsToCloseThePreempted": 1,
    "StartsTheLastFirst": 1, "SortsByPriorityAlone": 1, "KeepsNoTokenForTheFirst": 1,
    "SpendsMoreThanTheBudget": 0, "SamplesInTheMiddleOfAPrompt": 0,
    "AbortsWithoutClosing": 0, "HandsOutWhatStandsIn": 1, "ForksWhatTheLeaderExpects": 1,
    "DraftsBeforeOthersAreServed": 11, "FindsShortTextsForLongOnes": 4, "DeafFollower": 6,
    "GaplessFollower": 6, "ImpatientFollower": 0, "EarlyHistory": 91, "BlindEncoder": 31,
    "OneSpaceIndex": 31, "KeepingIndex": 3,
    "StartsBeforeItsBytesAreThere": 4, "LeavesOutTheEndOfALoad": 4,
    "finds_what_other_salts_have": 7, "stores_what_is_reused": 28, "WaitsForEver": 397,
    "KeepsTheBlocksOfTheAborted": 5, "RanksDecideAlone": 18, "OneRankDecides": 18,
    "ChoosesStoresByItsOwnTiers": 18, "TendsOneRankAlone": 18,
    "gives_each_request_the_turn_of_now": 0,
    "swaps_back_in_reverse": 12, "swaps_back_from_the_begin": 18,
    "StoresNothing": 2, "LosesStores": 2, "LateStoresCountAsDone": 115,
    "WaitsForWhatWasGivenUp": 7, "StoresInStepsAlone": 2, "TrustsFailedSteps": 5,
    "TrustsTheStepBeforeTheLast": 323, "NeverLoads": 2, "SleepsThroughDeadlines": 7,
    "PublishesInSilence": 693, "TendsOnlyWhatIsBusy": 18, "stores_the_first_alone": 2,
    "queues_nothing_again": 28, "stores_in_the_first_tier_alone": 5,
    "stores_under_the_next_key": 2, "has_no_capacity_any_more": 2,
    "never_tries_a_disk_again": 58, "takes_a_failed_write_for_done": 537,
}  # fmt: skip


@pytest.fixture(autouse=True)
def silent():
    """Faults are logged, as they should be."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def digests(seeds):
    outcomes = [Run(plan_of(seed))() for seed in seeds]
    assert not [outcome.violation for outcome in outcomes if outcome.violation]
    return [outcome.digest for outcome in outcomes]


@pytest.mark.parametrize("python", [sys.executable, *filter(None, _PYTHONS)])
def test_a_seed_is_one_run_whatever_strings_hash_to_and_on_every_version(python):
    code = (
        "import logging; logging.disable(); from tests.simulation.world import Run; "
        "from tests.simulation.__main__ import plan_of; "
        "print(*[Run(plan_of(seed))().digest for seed in range(12)])"
    )
    ended = subprocess.run(
        [python, "-c", code],
        capture_output=True, text=True, check=True, env={**os.environ, "PYTHONHASHSEED": "7"},
    )  # fmt: skip
    assert ended.stdout.split() == digests(range(12))


@pytest.mark.parametrize(
    "seed",
    [24, 43, 121, 1304, 90237, 300088, 400071, 500176, 500253, 654, 693, 700060, 1795875488],
)
def test_a_seed_that_has_shown_a_bug_breaks_no_rule(seed):
    assert Run(plan_of(seed))().violation is None


@pytest.mark.parametrize("name", _FROM)
def test_a_planted_bug_is_found(name):
    first = _FROM[name]
    with planted(name) as bug:
        runs = (Run(plan_of(seed), bug)().violation for seed in range(first, first + 60))
        violation = next(filter(None, runs), None)
    assert violation is not None
    assert "TypeError" not in violation  # a bug that has not followed its class proves nothing


@pytest.mark.parametrize("name", transfers.BUGS)
def test_a_planted_bug_of_transfers_is_found(name):
    assert transfers.first_violation(range(60), bug=name) is not None


@pytest.mark.parametrize(
    "name",
    ["leases_hold_nothing", "leases_end_with_their_sequence", "loads_are_never_found",
     "loads_are_found_before_they_arrive", "transfers_fail_and_hold_their_blocks"],
)  # fmt: skip
def test_transfers_find_what_is_wrong_in_the_allocator(name):
    with SABOTAGES[name].planted():
        assert transfers.first_violation(range(20), make=SABOTAGES[name].make) is not None


def test_loads_and_leases_follow_the_specification():
    assert transfers.first_violation(range(40)) is None


@pytest.mark.parametrize("name", _PLAIN)
def test_the_specification_rejects(name):
    assert specification.rejected(name) is not None


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in specification.BUGS if name not in _PLAIN])
def test_the_specification_rejects_with_faults(name):
    assert specification.rejected(name) is not None


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
        assert main(["--seed", "5", "--hours", "1"]) == 1
    told = capsys.readouterr().out
    assert "cut down in" in told
    assert "again: python -m tests.simulation --seed " in told
