"""Every sequence of operations on a small cache, to a depth, with equal states visited once.

What random search may miss by bad luck this cannot miss at all, as far as it reaches: most bugs of
allocators show with a few blocks, two requests and a handful of calls (the small scope hypothesis,
Jackson, "Software Abstractions"). Each state is checked like every step of the manager's machine,
whose verbs are used here: against the naive model, the ghost memory and `kvcore.check`.

    python -m tests.kvcore.small_scope --depth 6
"""

import argparse
import time

import kvcore
from tests.kvcore.machines import ManagerMachine
from tests.kvcore.machines.outlook import copied
from tests.kvcore.views import pool_view, sequence_view

SMALL = (5, ([0] * 5, [0] * 4 + [1] * 5))
SCOPES = {
    "full": SMALL,
    "full and window": SMALL,
    "six before four": (8, ([0] * 13, [0] * 4 + [1] * 6)),
    "uneven three": (13, ([0] * 13, [0] * 4 + [1] * 6)),
    "window, told later": (5, ([0] * 3, [0] * 4 + [1] * 5)),
    "full and window, loaded": (8, ([0] * 9, [0] * 4 + [1] * 5)),
}
"""By layout: how many blocks, the null block included, and the prompts."""
MAX_LIVE = 2
DEFAULT = kvcore.Namespace()


def operations(machine):
    """Yield (name, function of a machine) for everything that can be done next."""
    if len(machine.live) < MAX_LIVE:
        for number, prompt in enumerate(machine.prompts):
            yield f"open {number}", lambda m, p=prompt: m.begin(p, DEFAULT, packed=False)
    for index in range(len(machine.live)):
        for verb in VERBS:
            if verb in LEFT_OUT and not LEFT_OUT[verb](machine):
                continue
            yield f"{verb} {index}", lambda m, v=verb, i=index: VERBS[v](m, m.live[i])
    for number in machine.naive.leases:
        yield f"end lease {number}", lambda m, n=number: end_lease(m, n)
        if number in machine.naive.loads:
            yield f"commit load {number}", lambda m, n=number: commit_load(m, n)
    yield "reset", reset


def end_lease(machine, number):
    machine.kv.leases.end(number)
    machine.naive.end_lease(number)


def begin_load(machine, entry):
    naive = entry[1]
    if len(machine.naive.leases) < 1 and naive.computed < len(naive.tokens):
        machine.begin_load(entry, len(naive.tokens) - naive.computed, 0)


def commit_load(machine, number):
    machine.commit_load(machine.kv.leases.active[number])


def reset(machine):
    machine.epoch += 1
    machine.kv.reset()
    machine.naive.reset([naive for _, naive, _ in machine.live], canonical=False)


def close(machine, entry):
    machine.kv.close(entry[0])
    machine.naive.close(entry[1])
    machine.live.remove(entry)


def lease(machine, entry):
    if len(machine.naive.leases) < 1:
        machine.kv.lease(entry[0])
        machine.naive.lease(entry[1], None)


def fork(machine, entry):
    if len(machine.live) < MAX_LIVE:
        machine.fork(entry)


def truncate(machine, entry, keep):
    machine.truncate(entry, min(keep, len(entry[1].tokens)))


VERBS = {
    "reserve a block for": lambda m, e: m.reserve(e, 4),
    "commit one of": lambda m, e: m.write_and_commit(e, 1),
    "run": lambda m, e: m.run(e),
    "append to": lambda m, e: m.append(e, [1]),
    "cut to 3": lambda m, e: truncate(m, e, 3),
    "cut to 4": lambda m, e: truncate(m, e, 4),
    "cut to 10": lambda m, e: truncate(m, e, 10),
    "fork": fork,
    "lease": lease,
    "load": begin_load,
    "fail the load of": lambda m, e: m.fail_load(e, min(2, e[1].computed)),
    "expect one of": lambda m, e: m.expect(e, [1]),
    "tell": lambda m, e: m.resolve(e, 1),
    "close": close,
}
LEFT_OUT = {
    "cut to 10": lambda m: len(m.prompts[0]) > 10,
    "expect one of": lambda m: len(m.prompts[0]) < 5,
    "tell": lambda m: len(m.prompts[0]) < 5,
    "load": lambda m: len(m.prompts[0]) == 9,
}
"""Verbs that only some scopes have, so that they can go deeper."""


def start(layout="full"):
    """Return a machine at rest, and remember which namespace its requests are in."""
    machine = ManagerMachine()
    num_blocks, machine.prompts = SCOPES[layout]
    machine.start(
        num_blocks=num_blocks,
        layout=machine.layouts.index(layout.partition(",")[0]),
        caching=True,
        events=False,
    )
    return machine


def clone(machine):
    """Copy what the machine drives and compares with; not what Hypothesis keeps in it."""
    kept = ("groups", "kv", "naive", "other", "memory", "epoch", "live", "folded", "last_event")
    twin = object.__new__(ManagerMachine)
    twin.prompts = machine.prompts
    vars(twin).update(copied({name: vars(machine)[name] for name in kept}))
    return twin


def signature(machine):
    """All that later calls can depend on; counters that only count are left out."""
    pool = pool_view(machine.kv.pool)
    for counter in ("evicted", "allocated", "peak"):
        del pool[counter]
    active = machine.kv.leases.active
    leases = [[b.block_id for b in lease.blocks] for lease in active.values()]
    loads = [(n, naive.computed, naive.tokens) for n, (naive, *_) in machine.naive.loads.items()]
    loads = [repr(active[number].load) + str(load) for number, *load in loads if number in active]
    return repr((pool, [sequence_view(real) for real, _, _ in machine.live], leases, loads))


def foresee(machine):
    """Ask what each sequence still takes, alone and after a load, and compare with taking it."""
    for entry in machine.live:
        machine.foresee(entry, more=7, chunk=2, external=0)
        machine.foresee(entry, more=5, chunk=3, external=len(entry[1].tokens))


def explore(depth, layout="full", seconds=None, *, foresees=False):
    """Visit every state that `depth` operations reach; raise at the first that is wrong.

    With `foresees` every state is also asked what its sequences still take.

    Returns:
        The number of different states at each depth, and how many operations were carried out. It
        stops after the depth that `seconds` ends in.
    """
    begun = time.monotonic()
    first = start(layout)
    seen = {signature(first)}
    frontier, counts, steps = [(first, ())], [1], 0
    for _ in range(depth):
        reached = []
        for machine, history in frontier:
            for name, operation in operations(machine):
                successor = clone(machine)
                steps += 1
                try:
                    operation(successor)
                    successor.agree()
                except Exception as error:
                    error.add_note(" -> ".join([*history, name]))
                    raise
                key = signature(successor)
                if key not in seen:
                    if foresees:
                        foresee(successor)
                    seen.add(key)
                    reached.append((successor, (*history, name)))
        frontier = reached
        counts.append(len(reached))
        if seconds is not None and time.monotonic() - begun > seconds:
            break
    return counts, steps


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--layout", default="full", choices=SCOPES)
    arguments = parser.parse_args()
    found, carried_out = explore(arguments.depth, arguments.layout)
    print(f"states at each depth: {found}; {sum(found)} states, {carried_out} operations")
