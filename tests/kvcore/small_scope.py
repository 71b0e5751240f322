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
from tests.kvcore.machines import HybridMachine, ManagerMachine
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
    "full and state": (8, ([0] * 3, [0] * 2 + [1] * 3)),
    "full and three pieces": (12, ([0] * 3, [0] * 2 + [1] * 3)),
    "full and state, told later": (8, ([0] * 3, [0] * 2 + [1] * 3)),
}
"""By layout: how many blocks, the null block included, and the prompts."""
MAX_LIVE = 2
DEFAULT = kvcore.Namespace()


def operations(machine):
    """Yield (name, function of a machine) for everything that can be done next."""
    if len(machine.live) < MAX_LIVE:
        for number, prompt in enumerate(machine.prompts):
            yield f"open {number}", lambda m, p=prompt: begin(m, p)
    for index in range(len(machine.live)):
        for verb in machine.verbs:
            if verb in LEFT_OUT and not LEFT_OUT[verb](machine):
                continue
            yield f"{verb} {index}", lambda m, v=verb, i=index: m.verbs[v](m, m.live[i])
    if isinstance(machine, HybridMachine):
        yield from transfers_of_states(machine)
        yield "reset", lambda m: m.reset(chance=0, canonical=False)
        return
    for number in machine.naive.leases:
        yield f"end lease {number}", lambda m, n=number: end_lease(m, n)
        if number in machine.naive.loads:
            yield f"commit load {number}", lambda m, n=number: commit_load(m, n)
    yield "reset", reset


def begin(machine, prompt):
    if isinstance(machine, HybridMachine):
        machine.begin(prompt[:], "default")
    else:
        machine.begin(prompt, DEFAULT, packed=False)


def transfers_of_states(machine):
    for number in machine.leased:
        yield f"end lease {number}", lambda m: m.end_lease(0)
        if number in machine.loads:
            yield f"commit load {number}", lambda m: m.commit_load(0)
        else:
            yield f"fail the transfer {number}", lambda m: m.fail_transfer(0)


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


def commit_one(machine, entry):
    if entry.todo and entry.real.state.write:
        room = min(len(table.blocks) * table.block_size for table in entry.real.tables)
        if entry.computed < room:
            machine.commit(entry, 1)


def decode(machine, entry):
    """A token becomes known in the step that computes the one before."""
    if not entry.future and machine.ready(entry):
        machine.step([entry], [([1], 1, [], 1)])


def append_to_state(machine, entry):
    if not entry.future:
        machine.kv.extend(entry.real, [1])
        entry.known.append(1)


def expect_one(machine, entry):
    machine.kv.expect(entry.real, 1)
    entry.future.append(1)


def tell(machine, entry):
    if entry.future:
        machine.resolve([e for e in machine.live if e.future].index(entry), 1)


def split(machine, entry):
    if len(machine.live) < MAX_LIVE:
        machine.split(entry)


def lease_state(machine, entry):
    if not machine.leased:
        machine.take_lease(entry, "store")


def load_state(machine, entry):
    if not machine.leased and entry.computed < len(entry.known):
        machine.start_load(entry, len(entry.known))


STATE_VERBS = {
    "reserve a block for": lambda m, e: m.reserve(e, 2),
    "commit one of": commit_one,
    "run": lambda m, e: m.run_all(e),
    "decode": decode,
    "append to": append_to_state,
    "cut to 1": lambda m, e: m.cut(e, min(1, len(e.tokens))),
    "cut to 2": lambda m, e: m.cut(e, min(2, len(e.tokens))),
    "cut to 3": lambda m, e: m.cut(e, min(3, len(e.tokens))),
    "fork": split,
    "lease": lease_state,
    "load": load_state,
    "fail the load of": lambda m, e: m.fail_load(m.live.index(e), min(1, e.computed), None),
    "expect one of": expect_one,
    "tell": tell,
    "close": lambda m, e: m.end(e),
}


OTHER_WAYS = {"": ("expect one of", "tell"), "told later": ("lease", "load", "fork", "append to")}
"""By how tokens come the verbs on states that a scope does without."""
KEPT = {
    *("groups", "kv", "naive", "other", "memory", "epoch", "live", "folded", "last_event"),
    *("pieces", "common", "every", "caching", "ended", "retained", "leased", "loads", "events"),
    "num_opened",
}


def start(layout="full"):
    """Return a machine at rest, and remember which namespace its requests are in."""
    name, _, way = layout.partition(", ")
    machine = HybridMachine() if name in HybridMachine.layouts else ManagerMachine()
    num_blocks, machine.prompts = SCOPES[layout]
    about = {"num_blocks": num_blocks, "layout": machine.layouts.index(name), "caching": True}
    if isinstance(machine, ManagerMachine):
        machine.verbs = VERBS
        machine.start(**about, events=False)
    else:
        machine.verbs = {v: one for v, one in STATE_VERBS.items() if v not in OTHER_WAYS[way]}
        machine.start(**about, size=2, pieces=1, grid=0, events=False)
    return machine


def clone(machine):
    """Copy what the machine drives and compares with; not what Hypothesis keeps in it."""
    twin = object.__new__(type(machine))
    twin.prompts, twin.verbs = machine.prompts, machine.verbs
    kept = {name: value for name, value in vars(machine).items() if name in KEPT}
    vars(twin).update(copied(kept))
    return twin


def signature(machine):
    """All that later calls can depend on; counters that only count are left out."""
    pool = pool_view(machine.kv.pool)
    for counter in ("evicted", "allocated", "peak"):
        del pool[counter]
    active = machine.kv.leases.active
    leases = [[b.block_id for b in lease.blocks] for lease in active.values()]
    if isinstance(machine, HybridMachine):
        sequences = [
            (sequence_view(one.real), one.known, one.future, one.kept, one.prompt, one.wanted)
            for one in machine.live
        ]
        loads = [(n, repr(active[n].load), known) for n, (_, known) in machine.loads.items()]
        return repr((pool, sequences, leases, loads))
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
