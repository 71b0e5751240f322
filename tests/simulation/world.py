"""One run of a plan: a replica, its clients and its faults, and what must be true of it.

Safety, after steps and at the end: the allocator's invariants hold; what a client has read is what
its request gives alone; each request ends once, for a reason that fits; when all is over no block,
lease, stream, thread or task is left. Liveness: everything ends, within a time that a plan allows,
and nothing ever waits for what cannot come.
"""

import asyncio
import dataclasses
import gc
import hashlib
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random

from kvcore import Retention
from model.async_engine import EngineFaultError, EngineState, NotServingError, QueueFullError
from model.control.params import SamplingParams
from model.control.request import FinishReason
from model.control.submission import Submission, salted
from model.errors import ModelError, NumericalError, RequestTooLongError
from tests.simulation.device import Texts, ViolationError, answer
from tests.simulation.fleet import Fleet
from tests.simulation.http import RefusedError, complete
from tests.simulation.loop import DeadlockError, SimulatedHost, SimulatedLoop
from tests.simulation.plan import FLEET_FAULTS
from tests.simulation.replica import PATIENCE_S, Replica
from tests.simulation.tiers import HANGS_S

_RETENTION = Retention(0, 8, 1, 5)
_RETRIES = 4
_BUSY_S = 3.0  # in which stores that hang are given up
_RECOVERY_STEPS = 4  # of the device, from one that fails to the end of those that try it
_PAUSE_S = 0.005  # before a request is sent again
_LOST = "the replica was lost"
_NOT_TAKEN = (_LOST, "503", "NotServingError")
_FAILED = ("500", "None", "EngineFaultError", "NumericalError")
_ERRORS = {  # of the engine, by the status of an answer; None: the answer had begun
    429: {QueueFullError},
    503: {NotServingError},
    400: {RequestTooLongError},
    500: {EngineFaultError, NumericalError},
    None: {NotServingError, EngineFaultError, NumericalError},
}


@dataclass
class Outcome:
    """What came of a run.

    Attributes:
        violation: what broke a rule; None: nothing did.
        story: what happened, a line each.
        num_tokens: tokens that the device computed.
        seconds: simulated.
        last_draw: what comes next of the numbers that decide who runs: it says how many were drawn.
    """

    violation: str | None = None
    story: list = field(default_factory=list)
    num_tokens: int = 0
    seconds: float = 0.0
    last_draw: float = 0.0

    @property
    def digest(self):
        """Of all that happened: equal for one seed on every machine and version of Python."""
        told = "\n".join([*self.story, f"{self.violation} {self.num_tokens} {self.last_draw}"])
        return hashlib.sha256(told.encode()).hexdigest()[:16]


class Heard:
    """What a client has heard of the samples that it asked for.

    Args:
        ask: its request.
    """

    def __init__(self, ask):
        self._name = f"client {ask.number}"
        self._tokens = [[] for _ in range(ask.num_samples)]
        self._texts, self._reasons = [""] * ask.num_samples, [None] * ask.num_samples
        self.has_begun = False

    def add(self, number, text, reason, tokens=()):
        """A piece of a sample has come; over HTTP without its tokens."""
        self.has_begun = True
        if self._reasons[number] is not None:
            raise ViolationError(f"{self._name}: told twice that sample {number} has ended")
        self._tokens[number] += [token.token_id for token in tokens]
        self._texts[number] += text
        self._reasons[number] = reason

    def ended(self):
        """Why each sample has ended."""
        for number, reason in enumerate(self._reasons):
            if reason is None:
                raise ViolationError(f"{self._name}: sample {number} has no end")
        return " ".join(reason.value for reason in self._reasons)

    def follow_up(self, ask):
        """The next question of a client whose answer broke off: all that was said, and a token."""
        return dataclasses.replace(ask, prompt=(*ask.prompt, *self._tokens[0], 1))

    def check(self, submission):
        """Compare with what the request gives alone."""
        whole = answer(submission.prompt, submission.params, submission.namespace)
        text = Texts().decode(whole)
        ends = [place for stop in submission.params.stop if (place := text.find(stop)) >= 0]
        shown = text[: min(ends)] if ends else text
        for number, (tokens, read) in enumerate(zip(self._tokens, self._texts, strict=True)):
            what = f"{self._name}: sample {number}"
            if tokens != whole[: len(tokens)]:
                raise ViolationError(f"{what} read {tokens}, alone it gives {whole}")
            if not shown.startswith(read):
                raise ViolationError(f"{what} read {read!r} of {shown!r}")
            is_whole = read == shown and (not tokens or ends or tokens == whole)
            if self._reasons[number] in (FinishReason.LENGTH, FinishReason.STOP) and not is_whole:
                raise ViolationError(f"{what} ended with {read!r}, alone it gives {shown!r}")


class Run:
    """Carries a plan out.

    Args:
        plan: what is done.
        bug: classes with a planted bug, in place of "kv", "scheduler", "core", "twin" or "front".
        checks_all: whether the allocator is checked after every step, and not after a few.
    """

    def __init__(self, plan, bug=None, *, checks_all=False):
        self.plan, self.checks_all = plan, checks_all
        self.bug = bug or {}
        self.outcome = Outcome()
        self.loop = SimulatedLoop(Random(plan.seed + 2))
        self.host = SimulatedHost(self.loop)
        self.replicas, self.fleet, self.drained = [], None, None

    def __call__(self):
        """Run to the end; what came of it."""
        outcome, loop = self.outcome, self.loop
        gc.disable()  # a run is short, and what it leaves is collected once
        try:
            loop.run_until_complete(self._main())
        except (ViolationError, DeadlockError, ModelError) as error:
            outcome.violation = f"{type(error).__name__}: {error}"
        if loop.lost_errors and outcome.violation is None:
            outcome.violation = f"an error that nobody handles: {loop.lost_errors[0]}"
        for replica in self.replicas:
            outcome.num_tokens += sum(device.num_computed for device in replica.devices)
        outcome.seconds, outcome.last_draw = loop.now, loop.draw.random()
        loop.close()
        gc.enable()
        return outcome

    def tell(self, line):
        """Add a line to the story."""
        self.outcome.story.append(f"{self.loop.now * 1000:9.3f} ms  {line}")

    async def _main(self):
        faults = self.plan.faults
        if self.plan.features.num_replicas > 1:
            self.fleet = Fleet(self)
            self.replicas = self.fleet.all
            await self.fleet.start()
        else:
            self.replicas.append(Replica(self, "the server"))
            self.replicas[0].engine.start()
            await self.replicas[0].engine.ready()
        tasks = [asyncio.create_task(self._client(ask)) for ask in self.plan.asks]
        failing = [
            asyncio.create_task(self.fleet.fail(fault))
            for fault in faults
            if self.fleet is not None and fault.kind in FLEET_FAULTS
        ]
        for fault in faults:
            if fault.kind == "drain" and self.fleet is None:
                self.drained = asyncio.create_task(self._drain(fault.at))
        if tasks:
            await asyncio.wait(tasks, timeout=self._allowed_s())
        for task in tasks:
            if not task.done():
                raise ViolationError(f"a request never ends: {task.get_name()}")
            task.result()
        for task in (*failing, *([] if self.drained is None else [self.drained])):
            await task
        await self._settle()

    def _allowed_s(self):
        """Time in which everything ends: all of it one after another, several times over."""
        tokens = sum((len(a.prompt) + a.max_tokens) * a.num_samples for a in self.plan.asks)
        pauses = sum(a.pause_s * a.max_tokens * a.num_samples for a in self.plan.asks)
        pauses += _BUSY_S * bool(self.plan.features.tiers)
        allowed_s = 1.0 + pauses + 0.01 * tokens
        return _RETRIES * allowed_s + (self.plan.asks[-1].at_s if self.plan.asks else 0.0)

    async def _drain(self, at_s):
        await asyncio.sleep(at_s)
        self.tell("the server drains")
        await self.replicas[0].engine.drain(0.02)

    async def _client(self, ask):
        await asyncio.sleep(ask.at_s)
        asyncio.current_task().set_name(f"client {ask.number}")
        self.tell(
            f"client {ask.number} asks: {len(ask.prompt)} tokens, up to {ask.max_tokens}"
            + (f", {ask.num_samples} samples" if ask.num_samples > 1 else "")
        )
        work = asyncio.ensure_future(self._send(ask))
        if ask.leaves_s is not None:
            _, left = await asyncio.wait([work], timeout=ask.leaves_s)
            if left:
                self.tell(f"client {ask.number} leaves")
                work.cancel()
                for replica in self.replicas:
                    replica.expect(ask, self.loop.now + PATIENCE_S)
        try:
            how = await work
        except asyncio.CancelledError:
            how = "left"
        self.tell(f"client {ask.number}: {how}")

    async def _send(self, ask):
        """Send a request, again where it is lost, not taken or fails; how it ended."""
        how = "no replica"
        for _ in range(_RETRIES):
            if self.fleet is None:
                replica, ticket = self.replicas[0], None
            else:
                replica, ticket = self.fleet.choose(ask)
            if replica is not None:
                heard = Heard(ask)
                try:
                    how = await self._attempt(ask, replica, heard, ticket and ticket.has_begun)
                finally:
                    if ticket is not None:
                        self.fleet.end(ticket)
                if not (how in _FAILED or (how in _NOT_TAKEN and not heard.has_begun)):
                    return how
                self.tell(f"client {ask.number}: {how}, it asks again")
                ask = heard.follow_up(ask) if how in _FAILED else ask
            await asyncio.sleep(_PAUSE_S)
        return how

    async def _attempt(self, ask, replica, heard, begun=None):
        """Ask one replica; how it ended."""
        if replica.host.is_killed:
            return _LOST
        replica.expect(ask)
        ways = self._ask_server if replica.app is not None else self._ask
        work = asyncio.ensure_future(ways(ask, replica, heard, begun))
        replica.attempts[work] = None
        try:
            return await work
        except asyncio.CancelledError:
            if asyncio.current_task().cancelling() or not replica.host.is_killed:
                work.cancel()
                raise
            return _LOST
        finally:
            replica.attempts.pop(work, None)
            replica.expect(ask, self.loop.now + PATIENCE_S)

    async def ask_alone(self, ask, replica):
        """Ask a replica when no client does any more; how it ended."""
        return await self._attempt(ask, replica, Heard(ask))

    def _submission(self, ask):
        params = SamplingParams(
            n=ask.num_samples, max_tokens=ask.max_tokens, ignore_eos=ask.ignores_eos, stop=ask.stop
        )
        return Submission(
            list(ask.prompt),
            params,
            priority=ask.priority,
            client=ask.client,
            namespace=salted(ask.salt),
            retain=[_RETENTION] if ask.retains else [],
        )

    async def _ask(self, ask, replica, heard, begun):
        """Ask the engine directly; how it ended."""
        submission = self._submission(ask)
        try:
            async with await replica.engine.submit(submission) as stream:
                async for delta in _deltas(stream, ask):
                    if begun is not None:
                        begun()
                    heard.add(delta.sample, delta.text, delta.finish_reason, delta.tokens)
        except ModelError as error:
            if type(error) not in self._explained(ask):
                raise ViolationError(f"client {ask.number}: refused: {error}") from error
            return type(error).__name__
        finally:
            heard.check(submission)
        return heard.ended()

    async def _ask_server(self, ask, replica, heard, begun):
        """Ask over HTTP; how it ended."""
        body = {
            "prompt": list(ask.prompt), "max_tokens": ask.max_tokens, "n": ask.num_samples,
            "priority": ask.priority, "cache_salt": ask.salt or None, "stop": list(ask.stop),
            "user": ask.client, "ignore_eos": ask.ignores_eos, "stream": ask.streams,
            "temperature": 0,
        }  # fmt: skip
        try:
            pieces = complete(replica.app, replica.host, body, ask.pause_s)
            async for number, text, reason in pieces:
                if begun is not None:
                    begun()
                heard.add(number, text, reason and FinishReason(reason))
        except RefusedError as refused:
            if self._explained(ask).isdisjoint(_ERRORS[refused.status]):
                raise ViolationError(f"client {ask.number}: refused: {refused}") from refused
            return str(refused.status)
        finally:
            heard.check(self._submission(ask))
        return heard.ended()

    def _explained(self, ask):
        """The errors for which a client finds a reason in the plan."""
        faults = {fault.kind for fault in self.plan.faults}
        ends = {"drain", "step", "read", "kill", "restart", "leave"}
        reasons = {
            NotServingError: faults & ends,
            QueueFullError: self.plan.features.max_waiting < 1000,
            RequestTooLongError: self._is_too_long(ask),
            EngineFaultError: faults & {"step", "read"},
            NumericalError: "logits" in faults,
        }
        return {error for error, reason in reasons.items() if reason}

    def _is_too_long(self, ask):
        return len(ask.prompt) + ask.max_tokens > self.replicas[0].core.max_model_len

    def _check_recovered(self):
        """An engine stops only if its device fails again while it sees whether that computes."""
        at = sorted(f.at for f in self.plan.faults if f.kind in ("step", "read"))
        fails_again = any(b - a <= _RECOVERY_STEPS for a, b in pairwise(at))
        if self.drained is None and not fails_again:
            for replica in self.replicas:
                is_stopped = replica.engine.health.state is EngineState.STOPPED
                if is_stopped and not replica.is_over:
                    raise ViolationError(f"{replica.name} has stopped, and its device computes")

    async def _settle(self):
        """Everything is over: what is left?"""
        self._check_recovered()
        if self.drained is None:
            for replica in self.replicas:
                if not replica.is_over and replica.engine.health.state is not EngineState.STOPPED:
                    await self._idle(replica)
        if self.fleet is not None:
            await self.fleet.settle()
        for replica in self.replicas:
            if not replica.host.is_killed:
                await replica.settle(self._idle)
        # The threads end just after that, those of tiers when their device answers.
        await asyncio.sleep(2 * max(HANGS_S) if self.plan.features.tiers else 0.001)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            raise ViolationError(f"tasks are left: {others}")
        if self.loop.num_threads:
            raise ViolationError(f"{self.loop.num_threads} threads are left")

    async def _idle(self, replica):
        """Nobody asks any more: the engine ends what is there."""
        until_s = self.loop.now + 2 * self._allowed_s()
        while replica.core.has_unfinished or replica.engine.num_open:
            await asyncio.sleep(0.001)
            if self.loop.now > until_s:
                raise ViolationError("the engine goes on although every client has gone")


async def _deltas(stream, ask):
    """What comes, as it comes or at the end."""
    if not ask.streams:
        for delta in await stream.whole():
            yield delta
        return
    while not stream.is_over:
        for delta in await stream.news():
            yield delta
        if ask.pause_s:
            await asyncio.sleep(ask.pause_s)
