"""Histories that are drawn without Hypothesis's engine find planted bugs, and say how."""

import pytest

from tests.kvcore.sabotage.registry import _with_edit
from tests.kvcore.tiers.histories import FoundError, run_histories
from tests.kvcore.tiers.machine import TierMachine
from tests.kvcore.tiers.peer_machine import PeerMachine
from tests.kvcore.tiers.planted import PLANTED


@pytest.mark.parametrize("machine", [TierMachine, PeerMachine])
def test_histories_break_nothing_and_see_faults(machine):
    seen = run_histories(machine, 150, 0)
    assert seen["copies loaded"] > 10
    assert seen.total() > 100


@pytest.mark.parametrize(
    ("name", "machine", "most_lines"),
    [
        ("loads_that_fail_keep_their_blocks", TierMachine, 8),
        ("stores_go_on_after_a_reset", TierMachine, 6),
        ("memory_of_a_peer_is_never_read", PeerMachine, 8),
    ],
)
def test_a_planted_bug_is_found_and_told_as_a_short_program(name, machine, most_lines, monkeypatch):
    prop, _, owner, function, old, new = PLANTED[name]
    original = getattr(owner, function)
    monkeypatch.setattr(original, "__code__", _with_edit(name, original, old, new).__code__)
    with pytest.raises(FoundError, match=rf"^{prop}, seed \d+:\nstate\.begin\(") as found:
        run_histories(machine, 2000, 0)
    program = str(found.value).splitlines()[1:]
    assert 1 < len(program) <= most_lines
