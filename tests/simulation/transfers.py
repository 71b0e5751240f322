"""Loads, leases and transfers of one allocator in simulated time, and whether the specification
has them.

Requests find their prompt cached, load it from a peer or a store, or compute it; what they load may
be late, come after its deadline, fail, or hold other bytes. `kvcore`'s allocator is real, the
connector is the one here: a tier takes its place as `connector` (`Connector` says how).

`views` are all changes that `specification.py` allows, seen from one block: whether it is found,
who holds it, and what may still read or write it. After every call to the allocator the change of
each block must be among them (trace conformance).
"""

import asyncio
from functools import cache
from random import Random

import kvcore
from kvcore.inspect.invariants import check
from tests.simulation.device import ViolationError, digest, seed_of
from tests.simulation.loop import DeadlockError, SimulatedLoop
from tests.simulation.specification import Specification, explore

_SIZE = 2
_DEADLINE_S = 0.01
_FENCE_S = 0.03  # after which nothing of a transfer can come any more


@cache
def views():
    """The changes of one block that the specification allows. Some seconds, once."""
    found = set()

    def note(state, name, after):
        del name
        for place in range(len(state.blocks)):
            before, then = _view(state, place), _view(after, place)
            if before != then:
                found.add((before, then))

    for wanted, faults in (("AA", ()), ("A", ("abort",))):
        assert explore(Specification(wanted), faults, note).wrong is None
    return frozenset(found)


def _view(state, place):
    """A block of the specification: found, holder, what may write it, whether it is stored."""
    phases = [phase for phase, block, _ in state.requests if block == place]
    holder = "computing" if "computing" in phases else len(phases)
    writer = next((status for status, target in state.transfers if target == place), "")
    return bool(state.blocks[place][1]), holder, writer, place in [b for _, b in state.writing]


class Connector:
    """Carries KV between blocks and somewhere else.

    Args:
        world: the run; has `loop`, `memory` and `draw`.

    `load` fills the blocks of a lease and says whether it did; `store` reads those of one. Both may
    take any time and fail; when `load` has ended, nothing of it is written any more.
    """

    def __init__(self, world):
        self._world = world

    async def load(self, lease, contents):
        """Write `contents`, by block, into the blocks of a load."""
        world = self._world
        kind = world.draw.random()
        await asyncio.sleep(world.draw.expovariate(1 / 0.004) if kind < 0.8 else _FENCE_S * 0.9)
        if kind < 0.1:
            return False
        for block_id, content in contents.items():
            world.memory[block_id] = content if kind > 0.2 else "other bytes"
        return kind > 0.2  # their checksum says so

    async def store(self, lease):
        """Read the blocks of a lease; what they held."""
        blocks = [block.block_id for block in lease.blocks]
        before = [self._world.memory[block_id] for block_id in blocks]
        await asyncio.sleep(self._world.draw.expovariate(1 / 0.004))
        after = [self._world.memory[block_id] for block_id in blocks]
        if before != after:
            raise ViolationError(f"blocks {blocks} are reused while they are stored")
        return after


class Transfers:
    """One run.

    Args:
        seed: decides everything.
        make: the allocator, or one with a planted bug.
        connector: what carries KV.
        bug: one of `BUGS`: in what requests do.
    """

    def __init__(self, seed, make=kvcore.KVCacheManager, connector=Connector, bug=None):
        self.draw, self.loop, self.bug = Random(seed), SimulatedLoop(Random(seed + 1)), bug
        self.kv = make(self.draw.choice((6, 9, 14)), _SIZE)
        self.memory = [None] * self.kv.num_blocks
        self.connector = connector(self)
        self._writing, self._storing = {}, []  # by block: the loads; the stores that are under way
        self._seen = {}

    def __call__(self):
        """Run to the end; what broke a rule, or None."""
        try:
            self.loop.run_until_complete(self._main())
        except (ViolationError, DeadlockError, kvcore.KVCoreError) as error:
            return f"{type(error).__name__}: {error}"
        finally:
            self.loop.close()
        return None

    async def _main(self):
        draw = self.draw
        prompts = [tuple(draw.choices((1, 2), k=_SIZE * draw.randint(1, 4))) for _ in range(3)]
        tasks = []
        for _ in range(draw.randint(3, 12)):
            await asyncio.sleep(draw.expovariate(1 / 0.002))
            tasks.append(asyncio.create_task(self._request(draw.choice(prompts))))
            if draw.random() < 0.2:
                self.loop.call_later(draw.random() * 0.02, tasks[-1].cancel)
        await asyncio.wait(tasks, timeout=10)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            await asyncio.wait(others, timeout=10)
        for task in (*tasks, *others):
            if not task.done():
                raise ViolationError("a request or a transfer never ends")
            if not task.cancelled():
                task.result()
        if self.kv.num_free_blocks != self.kv.num_usable_blocks:
            raise ViolationError("blocks are held by requests and transfers that have ended")

    async def _request(self, prompt):
        """One request: its prompt is cached, loaded or computed; where no block is free, later."""
        digests, found = [], seed_of(kvcore.DEFAULT_NAMESPACE)
        for token in prompt:
            found = digest(found, token)
            digests.append(found)
        wanted = digests[_SIZE - 1 :: _SIZE]  # of each block
        is_served = False
        while not is_served:
            sequence = self.kv.open(prompt)
            self._look("open")
            try:
                is_served = await self._serve(sequence, wanted)
            finally:
                self.kv.close(sequence)
                self._look("close")
            await asyncio.sleep(0.001)

    async def _serve(self, sequence, wanted):
        try:
            if self.draw.random() < 0.6:
                await self._load(sequence, wanted)
            if sequence.num_computed_tokens < sequence.num_tokens:
                await self._compute(sequence, wanted)
        except kvcore.OutOfBlocksError:
            return False
        if self.draw.random() < 0.4:
            lease = self.kv.lease(sequence, "store")
            self._storing += [block.block_id for block in lease.blocks]
            self._look("lease")
            asyncio.create_task(self._store(lease))  # noqa: RUF006  # `_main` waits for it
        await asyncio.sleep(self.draw.random() * 0.003)
        held = [self.memory[block_id] for block_id in sequence.block_table]
        if held != wanted:
            raise ViolationError(f"a request reads what is not its own: {sequence.block_table}")
        return True

    async def _compute(self, sequence, wanted):
        missing = sequence.num_tokens - sequence.num_computed_tokens
        self.kv.reserve(sequence, missing)
        self._look("reserve")
        await asyncio.sleep(0.0005)
        for place in range(sequence.num_computed_tokens // _SIZE, len(wanted)):
            self.memory[sequence.block_table[place]] = wanted[place]
        self.kv.commit(sequence, missing)
        self._look("commit")

    async def _load(self, sequence, wanted):
        if sequence.num_computed_tokens == sequence.num_tokens:
            return
        lease = self.kv.begin_load(sequence, sequence.num_tokens)
        ids, first = lease.load.block_ids[0], lease.load.first_blocks[0]
        contents = dict(zip(ids, wanted[first:], strict=True))
        self._writing |= dict.fromkeys(ids, "wanted")
        self._look("begin_load")
        loading = asyncio.create_task(self.connector.load(lease, contents))
        try:
            await asyncio.wait([loading], timeout=_DEADLINE_S)
        except asyncio.CancelledError:
            self._give_up(lease, loading, "frees_at_the_abort")
            raise
        if loading.done():
            self._end(lease, is_good=loading.result() or self.bug == "commits_unchecked")
        else:
            self._give_up(lease, loading, "frees_at_the_deadline")

    def _give_up(self, lease, loading, frees):
        """The request goes another way; the blocks stay leased until nothing can write them."""
        self._writing |= {block.block_id: "cut" for block in lease.blocks}
        if self.bug == frees:
            lease.end()
        self._look("give up")
        if self.bug != "forgets_what_is_late":
            asyncio.create_task(self._outlast(lease, loading))  # noqa: RUF006  # as above

    async def _outlast(self, lease, loading):
        has_come = await loading
        is_closed = not lease.load.seq.is_open  # then a commit only gives the blocks back
        self._end(lease, is_good=has_come and (is_closed or self.bug == "commits_late_loads"))

    def _end(self, lease, *, is_good):
        for block in lease.blocks:
            self._writing.pop(block.block_id, None)
        if is_good:
            self.kv.commit_load(lease)
        else:
            self.kv.fail_transfer(lease)
        self._look("end of a load")

    async def _store(self, lease):
        if self.bug == "stores_without_a_lease":
            lease.end()
        await self.connector.store(lease)
        for block in lease.blocks:
            self._storing.remove(block.block_id)
        lease.end()
        self._look("end of a store")

    def _look(self, what):
        """Compare what has changed with what the specification allows."""
        held = {}
        for sequence in self.kv.sequences.values():
            for block in sequence.tables[0].blocks:
                held[block.block_id] = held.get(block.block_id, 0) + 1
        for block in self.kv.pool.blocks[1:]:
            number, is_found = block.block_id, block.node is not None
            holder = min(2, held.get(number, 0))
            now = (
                is_found, holder if is_found or not holder else "computing",
                self._writing.get(number, ""), number in self._storing,
            )  # fmt: skip
            before = self._seen.get(number, (False, 0, "", False))
            if now != before and (before, now) not in views():
                raise ViolationError(f"{what}: block {number} goes from {before} to {now}")
            self._seen[number] = now
        check(self.kv)


BUGS = {
    "frees_at_the_deadline": "the target of a late load is handed out (vllm#46453)",
    "frees_at_the_abort": "an abort gives back what a load still writes (mini-sglang#142)",
    "commits_unchecked": "a load counts whatever it has brought (vllm#50754)",
    "commits_late_loads": "a load that was given up is committed when it comes",
    "forgets_what_is_late": "what a late load was to fill is never given back (vllm#46283)",
    "stores_without_a_lease": "what is stored is reused meanwhile (LMCache#4492)",
}


def first_violation(seeds, **run):
    """The first seed that breaks a rule, and what it says; None: none does."""
    for seed in seeds:
        violation = Transfers(seed, **run)()
        if violation is not None:
            return seed, violation
    return None
