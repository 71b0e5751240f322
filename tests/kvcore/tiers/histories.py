"""Many histories of a state machine of Hypothesis, at a third of the processor time.

The rules and the strategies of their arguments are the machine's own; values come from `random`,
because drawing them takes Hypothesis most of the time of a history. A history that breaks something
is cut down by leaving out rules while the same property breaks, and told as a program.
"""

from collections import Counter
from copy import deepcopy
from random import Random

from hypothesis.strategies._internal.lazy import unwrap_strategies

import kvcore
from tests.kvcore.tiers.faulty_disk import BrokenError

MOST_STEPS = 25


class FoundError(AssertionError):
    """A history breaks a property; the message is its program."""


def sampler(strategy):
    """What draws a value of a strategy from a `Random`."""
    found = unwrap_strategies(strategy)
    match type(found).__name__:
        case "SampledFromStrategy":
            return lambda dice: dice.choice(found.elements)
        case "BooleansStrategy":
            return lambda dice: dice.random() < 0.5
        case "IntegersStrategy":
            return lambda dice: dice.randint(found.start, found.end)
        case "ListStrategy":
            each, least, most = sampler(found.element_strategy), found.min_size, found.max_size
            return lambda dice: [each(dice) for _ in range(dice.randint(least, int(most)))]
        case "BuildsStrategy":
            drawn = [sampler(one) for one in found.args]
            return lambda dice: found.target(*[one(dice) for one in drawn])
    raise TypeError(f"sampler: wanted a strategy that is known here, got {found!r}")


def program_of(rules, dice):
    """A history: the rules that run, with their arguments.

    As in Hypothesis, some rules have no part in it, so that others come often.
    """
    first, *others = rules
    share = dice.choice([1.0, 0.5, 0.25])
    enabled = [one for one in others if dice.random() < share] or others
    chosen = [first, *dice.choices(enabled, k=dice.randint(1, MOST_STEPS))]
    return [
        (name, {key: draw(dice) for key, draw in arguments.items()}) for name, arguments in chosen
    ]


def broken_by(machine, program, seen=None):
    """Run a history; which property it breaks, or None. Any other error is raised."""
    life = machine()
    try:
        for name, arguments in program:
            getattr(life, name)(**deepcopy(arguments))  # a machine takes faults out of lists
            for one in life.invariants:
                one.function(life)
        if seen is not None:
            for tier in life.tiers.tiers:
                seen.update(tier.stats.faults)
                seen["copies loaded"] += tier.stats.num_hits
                seen["copies read"] += getattr(tier, "num_by_transport", {}).get("nixl", 0)
        life.teardown()
    except (BrokenError, kvcore.InvariantError) as error:
        return error.prop
    return None


def cut_down(machine, program, prop):
    """The program without the rules that it does not need to break the property."""
    place = len(program) - 1
    while place > 0:
        shorter = program[:place] + program[place + 1 :]
        if broken_by(machine, shorter) == prop:
            program = shorter
        place -= 1
    return program


def run_histories(machine, count, seed, report=lambda done, seen: None, every=1000):
    """Run histories from seeds that follow each other.

    Returns:
        How many faults there were, by kind, and copies that were loaded.

    Raises:
        FoundError: one of them breaks a property.
    """
    made, seen = machine(), Counter()
    [first] = made._initialize_rules_to_run
    rules = [
        (one.function.__name__, {key: sampler(draws) for key, draws in one.arguments.items()})
        for one in (first, *made.rules)
    ]
    for number in range(count):
        program = program_of(rules, Random(seed + number))
        prop = broken_by(machine, program, seen)
        if prop is not None:
            told = cut_down(machine, program, prop)
            lines = [
                f"state.{name}({', '.join([f'{key}={value!r}' for key, value in given.items()])})"
                for name, given in told
            ]
            raise FoundError("\n".join([f"{prop}, seed {seed + number}:", *lines]))
        if (number + 1) % every == 0 or number + 1 == count:
            report(number + 1, seen)
    return seen
