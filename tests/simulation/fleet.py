"""Several replicas behind a router: who takes a request, and what the router knows of them.

As `model.cluster` does it, without Ray: a router chooses by what the index of KV events says; a
request whose replica is lost or takes none goes to another one while its client has read nothing.
Replicas are killed and replaced, or start again under their names, or are drained; the subscriber
is closed and made anew; a clock of the day jumps.
"""

import asyncio

from kvcore import wire
from model.async_engine import EngineState
from model.cluster.router import NoReplicaError, Router
from model.control.submission import salted
from tests.simulation.device import ViolationError
from tests.simulation.network import Network
from tests.simulation.replica import Replica

_ASK_AFTER_S, _FORGET_AFTER_S = 0.02, 0.2
_KNOWN_S = 2.0  # after which an index must know everything once the network is calm


class Fleet:
    """The replicas of a run.

    Args:
        run: gives the plan, the loop and the planted bug.
    """

    def __init__(self, run):
        self.run, self.features = run, run.plan.features
        self.replicas, self.all = {}, []
        self._num_made = 0
        self.network = Network(run.loop, run.plan.features.network_faults)
        self.subscriber = self._subscribe({})
        self.router = run.bug.get("router", Router)(
            self._match, self.features.policy, block_size=self.features.block_size
        )

    def _subscribe(self, sources):
        host = type(self.run.host)(self.run.loop)
        return self.run.bug.get("subscriber", wire.Subscriber)(
            sources, ask_after_s=_ASK_AFTER_S, forget_after_s=_FORGET_AFTER_S,
            transport=self.network.transport(host),
        )  # fmt: skip

    def _match(self, tokens, namespace):
        return self.subscriber.match(tokens, namespace=namespace)

    async def start(self):
        """Start all replicas."""
        for number in range(self.features.num_replicas):
            await self._join(f"address {number}")

    async def _join(self, address, name=None):
        """Start a replica, and let the router know it."""
        self._num_made += 1
        name = name or f"replica {self._num_made}"
        replica = Replica(self.run, name, self.network, address)
        self.all.append(replica)
        self.replicas[name] = replica
        replica.engine.start()
        await replica.engine.ready()
        if name not in self.router.replicas:
            self.router.add(name)
            self.subscriber.add(name, self._source(replica))

    @staticmethod
    def _source(replica):
        return wire.Source(replica.address, f"{replica.address}/replay")

    def choose(self, ask):
        """A replica for a request, and the ticket; None: there is none."""
        try:
            ticket = self.router.choose(ask.prompt, salted(ask.salt))
        except NoReplicaError:
            return None, None
        replica = self.replicas.get(ticket.replica)
        if replica is None:
            raise ViolationError(f"the router chooses {ticket.replica}, which it has lost")
        return replica, ticket

    def end(self, ticket):
        """A request is no more at its replica."""
        ticket.end()
        ticket.end()  # as the ingress does, where a client goes away

    async def fail(self, fault):
        """Carry out a fault of the plan."""
        await asyncio.sleep(fault.at)
        draw, tell = self.run.loop.draw, self.run.tell
        alive = [r for r in self.replicas.values() if not r.is_over]
        if not alive:
            return
        replica = alive[draw.randrange(len(alive))]
        tell(f"{fault.kind}: {replica.name}")
        if fault.kind == "resubscribe":
            self.subscriber.close()
            sources = {name: self._source(one) for name, one in self.replicas.items()}
            self.subscriber = self._subscribe(sources)
        elif fault.kind == "clock":
            replica.host.offset_s += draw.choice((-50.0, -0.01, 0.01, 3600.0))
        elif fault.kind == "restart":
            replica.kill()
            await asyncio.sleep(draw.random() * 0.3)
            await self._join(replica.address, replica.name)
        else:
            await self._replace(replica, is_killed=fault.kind == "kill")

    async def _replace(self, replica, *, is_killed):
        """End a replica; the router hears of it a little later, then another one starts."""
        replica.is_over = True
        ending = None
        if is_killed:
            replica.kill()
        else:
            ending = asyncio.create_task(replica.engine.drain(0.02))
        await asyncio.sleep(self.run.loop.draw.random() * 0.01)
        self.router.remove(replica.name)
        self.subscriber.remove(replica.name)
        del self.replicas[replica.name]
        if ending is not None:
            await ending
        await self._join(replica.address)

    async def settle(self):
        """Everything is over: the router counts nothing, and its index says what is true."""
        for name in self.router.replicas:
            if self.router.load(name) or self.router._replicas[name].coming:
                raise ViolationError(f"the router counts {self.router.load(name)} at {name}")
        self.network.calm()
        until_s = self.run.loop.now + _KNOWN_S
        while (wrong := await self._wrong()) is not None:
            if self.run.loop.now > until_s:
                raise ViolationError(f"the index: {wrong}")
            await asyncio.sleep(0.05)
        self.subscriber.close()

    async def _wrong(self):
        """In what the index differs from the caches; None: in nothing."""
        index = self.subscriber.index
        for name in index.publishers():
            if name not in self.replicas:
                return f"{name} is gone, and still known"
        for name, replica in self.replicas.items():
            if replica.engine.health.state is not EngineState.READY:
                continue
            snapshot = await replica.engine.call(lambda engine: engine.kv.snapshot())
            hashes = [one for run in snapshot.stored for one in run.block_hashes]
            held, known = frozenset(wire.wire_hashes(hashes)), index.held_hashes(name)
            if self.features.kinds != ("full",):  # windows: `tests/kvcore/wire/machine.py`
                continue
            if known - held:
                return f"{name} does not hold {len(known - held)} contents that are known of it"
            if held - known:
                return f"{len(held - known)} contents of {name} are not known"
        return None
