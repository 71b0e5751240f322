"""Short programs of whole steps for the manager's machine, the same ones every time.

Random rules rarely put two decoders with drafts at the end of a block, and then take another step.
Here are steps alone, in every form, on sequences at every place of a block; at the end others hold
some of the blocks too, and what is said of blocks that will be taken is compared with taking them.
"""

import random

import kvcore
from tests.kvcore.machines.manager import ManagerMachine
from tests.kvcore.machines.requests import GROUPS, with_image
from tests.kvcore.machines.steps import FORMS

PLENTY = 40
IMAGE = (b"cat", 2, 5, False)


def programs(seed, count):
    """Yield what a machine starts with, its prompts, and its steps."""
    choice = random.Random(seed).choice
    for _ in range(count):
        start = {
            "num_blocks": choice([PLENTY, PLENTY, PLENTY, 8]),
            "layout": choice(range(len(GROUPS))),
            "caching": choice([True, True, False]),
            "events": choice([True, False]),
            "longest": choice([None, None, 13, 16]),
        }
        prompts = [
            with_image([number] * choice(range(1, 14)), choice([None, None, IMAGE]))
            for number in range(choice([1, 2, 3]))
        ]
        runs = [[choice(FORMS)] * choice([1, 1, 2, 3]) for _ in range(6)]
        runs.append([choice(["ahead", "ahead", "decode", "some ahead"])] * choice([0, 0, 6]))
        moves = [
            (
                choice([1, 1, 1, 0, 2, 3]),
                choice([1, 1, 1, 0, 2, 3, 5]),
                choice([0, 1, 1, 2, 2, 3, 4, 6]),
            )
            for _ in range(7)
        ]
        yield start, prompts, choice([0, 1, 2, 2]), [form for run in runs for form in run], moves


def run_programs(seed, count):
    """Run so many programs; raise at the first that shows a broken property, and say which."""
    for program in programs(seed, count):
        start, prompts, computed, forms, moves = program
        machine = ManagerMachine()
        machine.start(**start)
        for prompt in prompts:
            machine.begin(prompt, kvcore.Namespace(), packed=False)
        try:
            machine.serve(forms, moves, computed, token=1)
            share(machine, moves[0][0])
            turn(machine)
            outlook(machine, prompts[0], moves)
            expire(machine, moves)
        except Exception as error:
            error.add_note(repr(program))
            raise


def share(machine, number):
    """Others hold blocks too, half-full ones among them: leases, and sequences that split off."""
    for entry in machine.live[:number]:
        machine.kv.lease(entry[0])
        machine.naive.lease(entry[1], None)
    for entry in machine.live[number:]:
        machine.fork(entry)


def turn(machine):
    """The rows of a step go with their sequences to other places; some of them shrink."""
    live = machine.live
    for order in (live, live[::-1], live[1:], live[1:] + live[:1], live):
        for number, rows in enumerate(machine.rows):
            rows.check(order, number)
    for entry in live:
        machine.truncate(entry, len(entry[1].tokens) // 2)
        machine.agree()


def outlook(machine, prompt, moves):
    """What is said of blocks in this state, and once there is more to be computed or loaded."""
    _, left, room = moves[0]
    for entry, (joins, more, chunk) in zip(machine.live, moves, strict=False):
        if chunk % 2:
            machine.expect(entry, [1] * (more + 1))
            machine.run(entry)
        machine.foresee(entry, 3 * joins + more, 1 + chunk // 2, 0)
        machine.foresee(entry, joins + more, None, 0)
        machine.append(entry, [2] * (left + 1))
        machine.foresee(entry, 3 * more, 1 + joins, max(0, len(entry[1].tokens) - room))
    longer = prompt + [2] * 5
    machine.foresee_a_prompt(longer, None, "default", 1 + left, len(prompt) // 4 * 4 + room, False)


def expire(machine, moves):
    """Leases of several deadlines end in one tick."""
    for entry, (_, steps, count) in zip(machine.live, moves, strict=False):
        machine.lease(entry, "store", steps, count, None)
    for entry, (steps, _, _) in zip(machine.live, moves, strict=False):
        machine.lease(entry, "load", steps, 1, None)
    for entry in machine.live[1:]:
        machine.end(entry)
    machine.tick(4)
    machine.agree()
