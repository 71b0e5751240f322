"""P37 to P41: tiers on a disk, and a link to a peer, that fail in every way, against a ghost."""

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.kvcore.tiers.machine import TierMachine
from tests.kvcore.tiers.peer_machine import PeerMachine

pytestmark = pytest.mark.machine


def test_no_fault_of_a_link_makes_a_peer_be_believed_wrongly():
    run_state_machine_as_test(
        PeerMachine, settings=settings(max_examples=15, stateful_step_count=20, deadline=None)
    )


def test_no_fault_makes_a_tier_serve_wrong_bytes():
    run_state_machine_as_test(
        TierMachine, settings=settings(max_examples=25, stateful_step_count=25, deadline=None)
    )
