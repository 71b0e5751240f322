"""The machine of managers with recurrent states, under whatever Hypothesis profile is loaded."""

import pytest

from tests.kvcore.machines.hybrid_rules import HybridMachine

TestHybrid = HybridMachine.TestCase
pytestmark = pytest.mark.machine
