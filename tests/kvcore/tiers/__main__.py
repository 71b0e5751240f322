"""`python -m tests.kvcore.tiers`: many histories of the tier machines, or many real kills.

    python -m tests.kvcore.tiers --histories 100000
    python -m tests.kvcore.tiers --peers --histories 10000
    python -m tests.kvcore.tiers --kills 1000

A history is up to 25 rules in an order that Hypothesis draws from `--seed`; a broken property is
cut down and told as a program, and the exit code is 1 then. A kill is SIGKILL at a random moment of
a process that writes to a real folder, after which another process reads what was acknowledged.
"""

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import seed as seeded
from hypothesis.stateful import run_state_machine_as_test

from tests.kvcore.tiers.kills import kill_once
from tests.kvcore.tiers.machine import TierMachine
from tests.kvcore.tiers.peer_machine import PeerMachine

BATCH = 500


def run_histories(count, seed, machine):
    """Run histories in batches, each from a seed of its own, and say how many there were."""
    began_s, done = time.monotonic(), 0
    while done < count:

        @seeded(seed + done)
        class Batch(machine):
            """The machine, from a seed."""

        some = min(BATCH, count - done)
        run_state_machine_as_test(
            Batch,
            settings=settings(
                max_examples=some,
                stateful_step_count=25,
                deadline=None,
                database=None,
                derandomize=False,
                suppress_health_check=[*HealthCheck],
            ),
        )
        done += some
        print(f"{done:,} histories in {time.monotonic() - began_s:,.0f} s: sound", flush=True)


def run_kills(count, seed):
    """Kill writers one after another on one folder; return whether enough was found."""
    dice = random.Random(seed)
    found = acknowledged = first = 0
    with tempfile.TemporaryDirectory() as folder:
        for number in range(1, count + 1):
            some, whole, first = kill_once(Path(folder), first, dice)
            acknowledged, found = acknowledged + some, found + whole
            if number % 50 == 0 or number == count:
                share = found / acknowledged
                print(f"{number:,} kills: {found:,} of {acknowledged:,} ({share:.4%})", flush=True)
    return found >= 0.99 * acknowledged > 0


def main():
    made = argparse.ArgumentParser(prog="python -m tests.kvcore.tiers", description=__doc__)
    made.add_argument("--histories", type=int, default=0)
    made.add_argument("--kills", type=int, default=0)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--peers", action="store_true", help="histories of two processes")
    options = made.parse_args()
    machine = PeerMachine if options.peers else TierMachine
    run_histories(options.histories, options.seed, machine)
    return int(options.kills > 0 and not run_kills(options.kills, options.seed))


if __name__ == "__main__":
    sys.exit(main())
