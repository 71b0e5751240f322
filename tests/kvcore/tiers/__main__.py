"""`python -m tests.kvcore.tiers`: many histories of the tier machines, or many real kills.

    python -m tests.kvcore.tiers --histories 100000
    python -m tests.kvcore.tiers --peers --histories 10000
    python -m tests.kvcore.tiers --kills 1000

A history is up to 25 rules, drawn from `--seed`; one that breaks a property is cut down and told
as a program, and the exit code is 1 then. A kill is SIGKILL at a random moment of a process that
writes to a real folder, after which another process reads what was acknowledged.
"""

import argparse
import logging
import random
import sys
import tempfile
import time
from pathlib import Path

from tests.kvcore.tiers.histories import run_histories
from tests.kvcore.tiers.kills import kill_once
from tests.kvcore.tiers.machine import TierMachine
from tests.kvcore.tiers.peer_machine import PeerMachine


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
    began_s = time.process_time()

    def report(done, seen):
        took_s = time.process_time() - began_s
        found = ", ".join([f"{count:,} {kind}" for kind, count in sorted(seen.items())])
        print(f"{done:,} histories in {took_s:,.0f} s of a core: sound ({found})", flush=True)

    logging.disable()  # each history says what it could not load
    run_histories(machine, options.histories, options.seed, report)
    return int(options.kills > 0 and not run_kills(options.kills, options.seed))


if __name__ == "__main__":
    sys.exit(main())
