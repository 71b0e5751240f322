"""`python -m tests.simulation`: run seeds until time is up or a rule is broken.

    python -m tests.simulation                       # a minute, from a seed that the time gives
    python -m tests.simulation --seed 7 --hours 2    # seeds 7, 8, 9, ...
    python -m tests.simulation --seed 7 --once       # one run again, with its story

Seeds without faults and with them take turns: without them everything must succeed (liveness and
answers), with them nothing may be wrong or left behind (safety). A run that breaks a rule is cut
down, and told as a story; the exit code is 1 then.
"""

import argparse
import gc
import logging
import sys
import time

from tests.simulation.plan import draw_plan
from tests.simulation.shrink import Shrinker
from tests.simulation.world import Run


def plan_of(seed):
    """The plan of a seed: every other one is without faults."""
    return draw_plan(seed, faulty=seed % 2 == 1)


def main(argv=None):
    """Run; 1: a rule was broken."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation", description="Run the server in simulated time."
    )
    parser.add_argument("--seed", type=int, default=None, help="the first seed (default: the time)")
    parser.add_argument("--hours", type=float, default=1 / 60, help="how long (default: a minute)")
    parser.add_argument("--once", action="store_true", help="run this seed alone, with its story")
    options = parser.parse_args(argv)
    logging.disable(logging.CRITICAL)  # faults are logged, as they should be
    gc.freeze()  # what is imported stays
    first = int(time.time()) if options.seed is None else options.seed
    if options.once:
        return _once(first)
    began_s = time.monotonic()
    seed, num_tokens, seconds = first, 0, 0.0
    while time.monotonic() - began_s < options.hours * 3600:
        outcome = Run(plan_of(seed))()
        num_tokens, seconds = num_tokens + outcome.num_tokens, seconds + outcome.seconds
        if outcome.violation is not None:
            return _report(seed, outcome)
        seed += 1
    spent_s = time.monotonic() - began_s
    print(
        f"{seed - first:,} runs from seed {first}: nothing wrong; {num_tokens:,} tokens computed "
        f"in {seconds:,.0f} simulated seconds, {num_tokens / spent_s:,.0f} tokens/s"
    )
    return 0


def _once(seed):
    plan = plan_of(seed)
    outcome = Run(plan)()
    print(plan.features, *plan.faults, *outcome.story, sep="\n")
    print(outcome.violation or "nothing wrong", f"digest {outcome.digest}", sep="\n")
    return int(outcome.violation is not None)


def _report(seed, outcome):
    print(f"seed {seed}: {outcome.violation}")
    shrinker = Shrinker(plan_of(seed))
    plan, outcome = shrinker()
    print(f"cut down in {shrinker.num_runs} runs to:", plan.features, *plan.faults, sep="\n  ")
    print(*plan.asks, *outcome.story, sep="\n  ")
    print(outcome.violation)
    print(f"again: python -m tests.simulation --seed {seed} --once")
    return 1


if __name__ == "__main__":
    sys.exit(main())
