"""One replica: the engine with its ranks, its front end, its server and its publisher of KV events.

It checks itself after steps and when it is idle; `world.py` has the rules of a whole run.
"""

import math
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from random import Random

from kvcore import InvariantError, KVCacheManager, wire
from kvcore.inspect.invariants import check
from model.async_engine import AsyncEngine, EngineState, NotServingError
from model.control.config import SchedulerConfig
from model.control.drafts import NgramDrafts
from model.control.scheduler import Scheduler
from model.control.tier_transfers import TierTransfers
from model.engine_core import EngineCore
from model.errors import RanksDivergedError
from model.twins import TwinCore
from tests.model.control.test_clients import most_requests
from tests.simulation.device import (
    VOCABULARY,
    Device,
    DeviceError,
    NoGrammars,
    Texts,
    ViolationError,
    make_kv,
)
from tests.simulation.http import serve
from tests.simulation.loop import SimulatedHost
from tests.simulation.ranks import make_groups
from tests.simulation.stored import Stored
from tests.simulation.tiers import make_tiers

_PREEMPT_CHANCE = 0.5
_CHECK_CHANCE = 0.01  # of a step; a run that fails is repeated with all of them checked
_MOST_ABSENT = 25  # steps, until what a client has left must be gone
_MOST_STILL = 6  # steps in which the first in order may stand still, copies and reads included
_MOST_BUSY_S = 5.0  # the same while tiers have blocks: four stores may hang, each for a second
PATIENCE_S = 0.02  # as _MOST_ABSENT


@dataclass
class Faults:
    """What goes wrong in the device: at which of its steps and draws."""

    step: frozenset
    read: frozenset
    logits: frozenset
    num_steps: int = 0
    num_draws: int = 0

    def step_fails(self):
        self.num_steps += 1
        return self.num_steps - 1 in self.step

    def read_fails(self):
        return self.num_steps - 1 in self.read

    def logits_fail(self):
        self.num_draws += 1
        return self.num_draws - 1 in self.logits

    def end(self):
        """Nothing goes wrong any more."""
        self.step = self.read = self.logits = frozenset()


class Checked:
    """A mixin before the class of an engine: checks the replica after each step."""

    replica = None

    def submit(self, asked):
        """As the engine's."""
        self.replica.stored.note(asked)
        return super().submit(asked)

    def step(self):
        """As the engine's; an error that nobody has injected breaks a rule."""
        if self.tiers is not None:
            self.replica.let_transfers_go_on()
        try:
            outputs = super().step()
        except DeviceError:
            raise
        except Exception as error:
            raise ViolationError(f"a step fails: {type(error).__name__}: {error}") from error
        self.replica.stepped()
        return outputs


def _follow(core):
    """What another rank does; if ranks diverge, the first one says so too, and the run ends."""
    with suppress(RanksDivergedError):
        core.follow()


class Order:
    """What `Scheduler` says of the order of requests, checked after each step.

    Args:
        span: arrivals that one level of priority is worth.
    """

    def __init__(self, span):
        self._span = span
        self._waited, self._ran = frozenset(), frozenset()
        self._first, self._num_still, self._since_s = None, 0, 0.0

    def check(self, running, waiting, *, now_s, is_whole, loading=(), is_busy=False):
        """After a step; `is_whole`: the queues too, and not only what has changed.

        Those that are loading wait for their KV: others overtake them.

        Raises:
            ViolationError: something is out of its order, or the first stands still.
        """
        waits = [r for r in waiting if r.leader is None and r not in loading]
        for request in running:
            if waits and request not in self._ran and request.leader is None:
                mine = (w for w in waits if w.client == request.client)  # others have their share
                before = next((w for w in mine if w in self._waited), None)
                if before is not None and before.order < request.order:
                    raise ViolationError(f"order: {request!r} overtakes {before!r}")
        first = min([*running[:1], *waits[:1]], key=lambda one: one.order, default=None)
        self._check_progress(first, now_s, is_busy)
        self._waited, self._ran = frozenset(waits), frozenset(running)
        for queue in (running, waiting) if is_whole else ():
            for request, after in pairwise(queue):
                if request.order > after.order:
                    raise ViolationError(f"order: {after!r} stands behind {request!r}")
        turns = {}  # of each client's last request before
        arrived = sorted([*running, *waiting], key=lambda one: one.order[1]) if is_whole else ()
        for request in arrived:
            turn = request.order[0] - request.priority * self._span
            if turn < turns.get(request.client, -math.inf) + 1 - 1e-6:
                raise ViolationError(f"order: {request!r} has the turn of the one before it")
            turns[request.client] = turn

    def _check_progress(self, first, now_s, is_busy):
        """The first in order does not stand still for long."""
        state = first and (
            first, first.status, first.num_computed_tokens, len(first.tokens),
            first.num_preemptions, first.is_expecting,
        )  # fmt: skip
        if not first or state != self._first:
            self._num_still, self._since_s = 0, now_s
        elif not is_busy:
            self._num_still += 1
        if self._num_still > _MOST_STILL or now_s - self._since_s > _MOST_BUSY_S:
            raise ViolationError(f"order: {first!r} is the first, and stands still")
        self._first = state


class Replica:
    """A replica of a run.

    Args:
        run: gives the plan, the loop and the planted bug.
        name: of it.
        network: where it publishes its events; None: it does not.
        address: where there.
    """

    def __init__(self, run, name, network=None, address=""):
        self.run, self.name, self.address = run, name, address
        self.features = features = run.plan.features
        self.host = SimulatedHost(run.loop)
        self.attempts = {}  # tasks of clients that it works for, in their order
        self.is_over = False
        self._network = network
        self._absent = {}  # requests that no client reads: for how many steps
        self._present = {}  # by client: how many samples it wants, and until when
        self._checks = Random(run.plan.seed + 3)
        self._order = Order(self.features.priority_span)
        self.pools, self.devices, self.cores = [], [], []
        groups = make_groups(self.host, features.num_ranks)
        for group in groups:
            core = self._make_core(group if len(groups) > 1 else None)
            core.replica = self
            self.cores.append(core)
        self.core = self.cores[0]
        self.stored = Stored(self)
        for follower in self.cores[1:]:
            self.host.start_thread("rank", partial(_follow, follower))
        self.engine = run.bug.get("front", AsyncEngine)(
            self.core, max_waiting=features.max_waiting, host=self.host,
            announce=None if network is None else self._announce,
        )  # fmt: skip
        self.app = None
        if features.speaks_http:
            self.app = serve(self.engine, len(run.replicas))

    def _announce(self, engine, wake):
        features = self.features
        publisher = self.run.bug.get("publisher", wire.Publisher)
        return publisher(
            engine.kv, self.address, f"{self.address}/replay", publish_salted=True,
            replay_bytes=features.replay_bytes, wake=wake if features.wakes else None,
            transport=self._network.transport(self.host),
        )  # fmt: skip

    def _make_core(self, group):
        """The engine of a rank; of the only one if there is no group."""
        features, bug = self.features, self.run.bug
        faults = Faults(**{
            kind: frozenset(int(f.at) for f in self.run.plan.faults if f.kind == kind)
            for kind in ("step", "read", "logits")
        })  # fmt: skip
        kv = make_kv(features, bug.get("kv", KVCacheManager))
        most_deferred = 0 if features.drafts else features.most_deferred
        device = Device(self.host, kv, faults, most_deferred)
        self.pools.append(kv)
        self.devices.append(device)
        config = SchedulerConfig(
            max_num_batched_tokens=features.max_num_batched_tokens,
            max_num_seqs=features.max_num_seqs,
            watermark=features.watermark,
            priority_span=features.priority_span,
            num_host_blocks=features.num_host_blocks,
            draft_tokens=3,
        )
        kind = bug.get("tiers", TierTransfers)
        tiers = make_tiers(self.run.plan, self.host, kv, device, kind, group)
        plans = bug.get("scheduler", Scheduler)(
            kv, config, NgramDrafts() if features.drafts else None, tiers
        )
        made = Texts(), kv, plans, device, NoGrammars(), VOCABULARY, tiers
        if group is None:
            return type("Core", (Checked, bug.get("core", EngineCore)), {})(*made)
        twin = type("Twin", (Checked, bug.get("twin", TwinCore), EngineCore), {})
        return twin(*made, ranks=group, is_checked=True)

    def expect(self, ask, until_s=math.inf):
        """A client wants its samples, until some time."""
        self._present[ask.number] = ask.num_samples, until_s

    def kill(self):
        """The process is gone, in the middle of whatever it did."""
        self.host.is_killed = self.is_over = True
        for attempt in self.attempts:
            attempt.cancel()

    def let_transfers_go_on(self):
        """Between two steps the threads of transfers may run: in a process they always do."""
        if self._checks.random() < _PREEMPT_CHANCE:
            self.run.loop.pause()

    def stepped(self):
        """A step is over."""
        engine, now = self.engine, self.run.loop.now
        wanted = sum([count for count, until_s in self._present.values() if now < until_s])
        if engine.num_open > wanted:
            raise ViolationError(f"{engine.num_open} requests are open, clients want {wanted}")
        open_ids, absent = engine._open, self._absent
        left = [r for r in self.core.unfinished if r.request_id not in open_ids]
        if left or absent:
            self._absent = {request: absent.get(request, 0) + 1 for request in left}
            if max(self._absent.values(), default=0) > _MOST_ABSENT:
                raise ViolationError(f"computed for nobody: {left}")
        num_clients = len({ask.client for ask in self.run.plan.asks})
        limit = self.core.max_num_seqs + self.features.max_waiting
        limit = most_requests(limit, num_clients)
        if engine.num_open > limit:
            raise ViolationError(f"{engine.num_open} requests are open, the limit is {limit}")
        self.stored.check_deadlines()
        is_checked = self.run.checks_all or self._checks.random() < _CHECK_CHANCE
        tiers = self.core.tiers
        loading, is_busy = ((), False) if tiers is None else (tiers.requests, tiers.is_busy)
        self._order.check(
            self.core.running,
            self.core.waiting,
            now_s=now,
            is_whole=is_checked,
            loading=loading,
            is_busy=is_busy,
        )
        if is_checked:
            self.check_pools()
            if self._network is None:
                for kv in self.pools:
                    kv.events.take()

    def check_pools(self):
        """The allocator's invariants, of every rank."""
        for kv in self.pools:
            try:
                check(kv)
            except InvariantError as error:
                raise ViolationError(f"the pool: {error}") from error

    async def settle(self, idle):
        """Everything is over, or the replica has to end: what is left?

        Args:
            idle: waits until it has nothing to do.
        """
        if not self.is_over and self.engine.health.state is not EngineState.STOPPED:
            await idle(self)
            with suppress(*([] if self.core.tiers is None else [NotServingError])):
                await self.engine.call(lambda engine: None)  # else a fault is ending it just now
            if self.core.tiers is not None:
                await self.stored.settle()
            self._check_nothing_kept()
        if self.engine.health.state is EngineState.RECOVERING:
            raise ViolationError("the engine computes, and takes no requests")
        self.check_pools()
        await self.engine.stop()
        self._check_empty()  # other ranks are told of the last ends with the next step

    def _check_nothing_kept(self):
        """No client asks any more: the engine keeps nothing of what there was."""
        self._check_empty()
        for name, what in [
            ("streams of the engine", self.core._streams),
            ("texts of the device", self.devices[0]._texts),
            ("open samples", self.engine._open),
            ("held samples", self.engine._held),
        ]:
            if what:
                raise ViolationError(f"{name} are left: {what}")

    def _check_empty(self):
        left = self.core.kv.num_usable_blocks - self.core.kv.num_free_blocks
        if left:
            raise ViolationError(f"{left} blocks are held by requests that have ended")
