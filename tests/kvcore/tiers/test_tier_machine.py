"""P37 to P41: tiers on a disk that fails in every way, against a ghost."""

from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.kvcore.tiers.machine import TierMachine


def test_no_fault_makes_a_tier_serve_wrong_bytes():
    run_state_machine_as_test(
        TierMachine, settings=settings(max_examples=25, stateful_step_count=25, deadline=None)
    )
