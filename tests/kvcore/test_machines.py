"""The machines on the real thing, under whatever Hypothesis profile is loaded."""

import pytest

from tests.kvcore import machines

TestFreeQueue = machines.FreeQueueMachine.TestCase
TestPool = machines.PoolMachine.TestCase
TestManager = machines.ManagerMachine.TestCase
pytestmark = pytest.mark.machine


def hidden_rules(machine):
    """Rules that never run, because a class further down has given its name to another."""
    return [
        f"{owner.__name__}.{name}"
        for owner in machine.__mro__
        for name, thing in vars(owner).items()
        if hasattr(thing, "hypothesis_stateful_rule") and getattr(machine, name) is not thing
    ]


@pytest.mark.parametrize(
    "machine", [machines.FreeQueueMachine, machines.PoolMachine, machines.ManagerMachine]
)
def test_no_rule_of_a_machine_is_hidden_by_another_of_its_name(machine):
    assert hidden_rules(machine) == []


def test_a_hidden_rule_is_seen():
    other = vars(machines.PoolMachine)["take"]
    broken = type("Broken", (machines.PoolMachine,), {"release": other})
    assert hidden_rules(broken) == ["PoolMachine.release"]
