"""What the tiers of a replica must hold, once nothing runs any more.

Rules, for every rank:

- a transfer ends at its deadline, whether steps run or not;
- what the pool has published comes to be stored in each tier that has evicted nothing and whose
  device has not failed;
- a copy is what its key says: the digests of a text that was asked for. What a failed step has
  written is "spoilt", in copies too that were made of it before it failed;
- no copy is found whose write has failed, and no tier has more bytes than it may;
- at the end, when no device fails any more, a last prompt is stored in every tier. The pools are
  emptied then, and it is loaded when it is asked for again.
"""

import asyncio
from random import Random

import kvcore
from kvcore.events import node_hash
from kvcore.tiers import key_of
from model.async_engine import EngineState
from model.control.submission import salted
from tests.simulation.device import (
    VOCABULARY,
    ViolationError,
    answer,
    contents_of,
    digests_of,
)
from tests.simulation.plan import Ask
from tests.simulation.tiers import BLOCK_BYTES

_SLACK_S = 0.1  # of a deadline: a step is under way, or a rank is not asked yet
_LONGEST_S = 600.0  # many transfers that hang, one after another
_POLL_S, _IDLE_S = 0.05, 1.0
_LAST_SALT = "last"  # nothing of the last prompt is there before
_LAST_NAMESPACE = salted(_LAST_SALT)
_FORGOTTEN_S = 61.0  # the longest pause of a tier whose device has failed
_LAST_COPIES = 12  # of the last prompt: the smallest tier has room for 20


class Stored:
    """The rules of a replica's tiers.

    Args:
        replica: has the engines of all ranks.
    """

    def __init__(self, replica):
        self._replica = replica
        self._asked = {}  # of each engine: the texts that it was asked for
        self.transfers = [core.tiers for core in replica.cores if core.tiers is not None]

    def note(self, submission):
        """A text may be computed from now on: a prompt, and what the model answers."""
        params, namespace = submission.params, submission.namespace
        tokens = [*submission.prompt, *answer(submission.prompt, params, namespace)]
        self._asked[repr(namespace), tuple(tokens)] = namespace

    def check_deadlines(self):
        """No transfer is held past its deadline."""
        now_s = self._replica.run.loop.now
        for transfers in self.transfers:
            for one in (*transfers._stores, *transfers._loads.values()):
                if now_s > one.deadline_s + _SLACK_S:
                    late_s = now_s - one.deadline_s
                    raise ViolationError(f"a transfer is held {late_s:.1f} s past its deadline")

    async def settle(self):
        """Nobody asks any more. An engine that stops stores what it can, for a while."""
        await self._rest()
        if not self._has_stopped:
            self._check()
        if self._replica.engine.health.state is EngineState.READY:
            await self._ask_last()
        for transfers in self.transfers:
            self._check_copies(transfers)

    @property
    def _has_stopped(self):
        return self._replica.engine.health.state is EngineState.STOPPED

    async def _rest(self):
        """Wait until nothing is on its way, or to be stored, and what was given up has ended."""
        loop = self._replica.run.loop
        until_s, idle_s = loop.now + _LONGEST_S, 0.0
        while any(one.has_work for one in self.transfers) and not self._has_stopped:
            await asyncio.sleep(_POLL_S)
            self.check_deadlines()
            is_idle = not any(one.is_busy or one._given_up for one in self.transfers)
            idle_s = idle_s + _POLL_S if is_idle else 0.0
            if idle_s > _IDLE_S:
                raise ViolationError("published blocks wait to be stored, and nothing runs")
            if loop.now > until_s:
                raise ViolationError("stores never end while no step runs")

    def _check(self, wanted=frozenset()):
        """What is published is stored; what is `wanted` also where others were evicted for it."""
        truth = self._truth()
        for kv, transfers in zip(self._replica.pools, self.transfers, strict=True):
            keys = _keys_of_pool(kv, transfers.tiers, truth)
            for tier in transfers.tiers.tiers:
                is_whole = not (tier.stats.num_evicted or tier.stats.faults.total())
                needed = keys if is_whole else () if tier.keeps_retained() else wanted
                missing = [key for key in keys if key in needed and not tier.contains(key)]
                if missing:
                    raise ViolationError(
                        f"{len(missing)} of {len(keys)} contents of the pool were never stored in "
                        f"the {tier.name} tier, which has room"
                    )

    async def _ask_last(self):
        """The devices are sound again: a last prompt is stored, and loaded."""
        replica = self._replica
        for transfers in self.transfers:
            for tier in transfers.tiers.tiers:
                tier.mend()
        for device in replica.devices:
            device.mend()
        await asyncio.sleep(_FORGOTTEN_S)
        draw = Random(replica.run.plan.seed + 11)
        await self._leave(draw)
        groups = replica.pools[0].groups
        num_tokens = groups[0].block_size * (_LAST_COPIES // len(groups)) + 1
        prompt = [draw.randint(1, VOCABULARY - 1) for _ in range(num_tokens)]
        await self._ask(prompt)
        keys = self._truth_of(prompt, _LAST_NAMESPACE)
        self._check(frozenset(keys))
        await replica.engine.call(lambda engine: self._empty_pools())
        kinds = [one.stats for one in self.transfers]
        size = self.transfers[0].tiers._common
        usable = (len(prompt) - 1) // size * size
        needed = self._truth_of(prompt[:usable], _LAST_NAMESPACE)
        can_load = usable and all(
            any(all(map(tier.contains, needed)) for tier in one.tiers.tiers)
            for one in self.transfers
        )
        before = [_num_loads(stats) for stats in kinds]
        await self._ask(prompt)
        after = [_num_loads(stats) for stats in kinds]
        if can_load and any(was == now for was, now in zip(before, after, strict=True)):
            raise ViolationError("a prompt that a tier has is not loaded")

    async def _leave(self, draw):
        """Ask, and go away: what an abort publishes is stored, though no step follows."""
        prompt = tuple([draw.randint(1, VOCABULARY - 1) for _ in range(draw.randint(1, 9))])
        ask = Ask(-2, 0.0, prompt, max_tokens=20, ignores_eos=True)
        asking = asyncio.ensure_future(self._replica.run.ask_alone(ask, self._replica))
        await asyncio.wait([asking], timeout=draw.expovariate(300))
        asking.cancel()
        await asyncio.wait([asking])
        await self._rest()

    async def _ask(self, prompt):
        ask = Ask(-1, 0.0, tuple(prompt), max_tokens=1, ignores_eos=True, salt=_LAST_SALT)
        how = await self._replica.run.ask_alone(ask, self._replica)
        if how != "length":
            raise ViolationError(f"the last prompt ends with {how}")
        await self._rest()

    def _empty_pools(self):
        """The pools forget everything, and the tiers do not hear of it."""
        for kv in self._replica.pools:
            watcher, kv.pool.watcher = kv.pool.watcher, None
            kv.reset()
            kv.pool.watcher = watcher

    # What is true of a copy

    def _truth(self):
        """The key of every content that was asked for, and what its blocks hold."""
        truth = {}
        for (_, tokens), namespace in self._asked.items():
            truth |= self._truth_of(tokens, namespace)
        return truth

    def _truth_of(self, tokens, namespace):
        truth, digests = {}, digests_of(tokens, namespace)
        for number, group in enumerate(self._replica.pools[0].groups):
            size = group.block_size
            hashes = kvcore.block_hashes(tokens, size, namespace=namespace, algorithm="sha256")
            for place, block_hash in enumerate(hashes):
                key = key_of(number, block_hash, is_private=bool(namespace.salt))
                truth[key] = contents_of(number, group, digests[place * size : (place + 1) * size])
        return truth

    def _check_copies(self, transfers):
        """Every copy is what its key says, and its write has not failed."""
        truth, mover = self._truth(), transfers._device
        for tier in transfers.tiers.tiers:
            if tier.has_unwritten():
                raise ViolationError(f"the {tier.name} tier has a copy whose write failed")
            if tier.stats.used_bytes > tier.stats.capacity_bytes:
                raise ViolationError(f"the {tier.name} tier has more bytes than it may")
            for key in tier.held():
                if key not in truth:
                    raise ViolationError(f"the {tier.name} tier has a copy of no text")
                payload = tier.read(key, len(truth[key]) * BLOCK_BYTES)
                if payload is not None and mover.contents(payload, truth[key]) != truth[key]:
                    raise ViolationError(f"the {tier.name} tier has a copy of other bytes")


def _num_loads(stats):
    return stats.num_loads + stats.num_late_loads + stats.num_failed_loads


def _keys_of_pool(kv, tiers, truth):
    """The keys of what the pool has, whole states alone."""
    found = []
    for block in kv.pool.blocks[1:]:
        if block.node is None or not tiers._pieces(block):
            continue
        block_hash = node_hash(block.node, kv.pool.block_sizes[block.group], "sha256")
        both = [key_of(block.group, block_hash, is_private=one) for one in (False, True)]
        found.append(next(filter(truth.__contains__, both), both[0]))
    return found
