"""No guard is an `assert`: the machines find the same errors under `python -O`."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.source_build  # an assert that is gone from the source is gone from both

SCRIPT = """
import sys
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from tests.kvcore import machines, sabotage
from tests.kvcore.views import PropertyError

assert False, "this line must not run"
options = dict(derandomize=True, database=None, deadline=None, print_blob=False)
brief = settings(max_examples=25, stateful_step_count=30, **options)
for machine in (machines.FreeQueueMachine, machines.PoolMachine, machines.ManagerMachine):
    run_state_machine_as_test(machine, settings=brief)

planted = sabotage.SABOTAGES["pool_accepts_a_double_free"]
broken = type("Broken", (planted.machine,), {"make_pool": staticmethod(planted.make)})
try:
    run_state_machine_as_test(
        broken,
        settings=settings(max_examples=500, phases=[Phase.generate], **options),
    )
except PropertyError as error:
    print("caught", error.prop)
"""


def test_the_machines_pass_and_catch_under_python_o():
    result = subprocess.run(
        [sys.executable, "-O", "-c", SCRIPT],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.splitlines()[-1] in {"caught P2", "caught P3"}
