"""One run of a plan: a replica, its clients and its faults, and what must be true of it.

Safety, after steps and at the end: the allocator's invariants hold; what a client has read is what
its request gives alone; each request ends once, for a reason that fits; when all is over no block,
lease, stream, thread or task is left. Liveness: everything ends, within a time that a plan allows,
and nothing ever waits for what cannot come.
"""

import asyncio
import math
from dataclasses import dataclass, field
from random import Random

from kvcore import InvariantError, KVCacheManager, Retention
from kvcore.inspect.invariants import check
from model.async_engine import (
    AsyncEngine,
    EngineFaultError,
    EngineState,
    NotServingError,
    QueueFullError,
)
from model.control.config import SchedulerConfig
from model.control.drafts import NgramDrafts
from model.control.params import SamplingParams
from model.control.request import FinishReason
from model.control.scheduler import Scheduler
from model.control.submission import Submission, salted
from model.engine_core import EngineCore
from model.errors import ModelError, NumericalError, RequestTooLongError
from model.serve.app import create_app
from model.serve.config import ServeConfig
from model.twins import TwinCore
from tests.simulation.device import (
    VOCABULARY,
    Device,
    DeviceError,
    NoGrammars,
    Texts,
    ViolationError,
    answer,
    make_kv,
)
from tests.simulation.http import RefusedError, complete
from tests.simulation.loop import DeadlockError, SimulatedHost, SimulatedLoop
from tests.simulation.ranks import make_groups

_CHECK_CHANCE = 0.03
_MOST_ABSENT = 25  # steps, until what a client has left must be gone
_PATIENCE_S = 0.02  # likewise
_RETENTION = Retention(0, 8, 1, 5)
_ERRORS = {  # of the engine, by the status of an answer; None: the answer had begun
    429: {QueueFullError},
    503: {NotServingError},
    400: {RequestTooLongError},
    500: {EngineFaultError, NumericalError},
    None: {NotServingError, EngineFaultError, NumericalError},
}


@dataclass
class Faults:
    """What goes wrong in the device: at which of its steps and draws."""

    steps: frozenset = frozenset()
    logits: frozenset = frozenset()
    num_steps: int = 0
    num_draws: int = 0

    def step_fails(self):
        self.num_steps += 1
        return self.num_steps - 1 in self.steps

    def logits_fail(self):
        self.num_draws += 1
        return self.num_draws - 1 in self.logits


class Checked:
    """A mixin before the class of an engine: checks the run after each step."""

    run = None

    def step(self):
        """As the engine's; an error that nobody has injected breaks a rule."""
        try:
            outputs = super().step()
        except DeviceError:
            raise
        except Exception as error:
            raise ViolationError(f"a step fails: {type(error).__name__}: {error}") from error
        self.run.stepped()
        return outputs


@dataclass
class Outcome:
    """What came of a run.

    Attributes:
        violation: what broke a rule; None: nothing did.
        story: what happened, a line each.
        num_tokens: tokens that the device computed.
        seconds: simulated.
    """

    violation: str | None = None
    story: list = field(default_factory=list)
    num_tokens: int = 0
    seconds: float = 0.0


class Heard:
    """What a client has heard of the samples that it asked for.

    Args:
        ask: its request.
    """

    def __init__(self, ask):
        self._name = f"client {ask.number}"
        self._tokens = [[] for _ in range(ask.num_samples)]
        self._texts, self._reasons = [""] * ask.num_samples, [None] * ask.num_samples

    def add(self, number, text, reason, tokens=()):
        """A piece of a sample has come; over HTTP without its tokens."""
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
    """

    def __init__(self, plan, bug=None):
        self.plan = plan
        self.bug = bug or {}
        self.outcome = Outcome()
        self._absent = {}  # requests that no client reads: for how many steps
        self._present = {}  # by client: how many samples it wants, and until when
        self.loop = SimulatedLoop(Random(plan.seed + 2))
        self._checks = Random(plan.seed + 3)

    def __call__(self):
        """Run to the end; what came of it."""
        outcome, loop = self.outcome, self.loop
        try:
            loop.run_until_complete(self._main())
        except (ViolationError, DeadlockError, ModelError) as error:
            outcome.violation = f"{type(error).__name__}: {error}"
        if loop.lost_errors and outcome.violation is None:
            outcome.violation = f"an error that nobody handles: {loop.lost_errors[0]}"
        outcome.num_tokens = sum(device.num_computed for device in self.devices)
        outcome.seconds = loop.now
        loop.close()
        return outcome

    def tell(self, line):
        """Add a line to the story."""
        self.outcome.story.append(f"{self.loop.now * 1000:9.3f} ms  {line}")

    def stepped(self):
        """A step is over."""
        engine, now = self.engine, self.loop.now
        wanted = sum(count for count, until_s in self._present.values() if now < until_s)
        left = [r for r in self.core.unfinished if r.request_id not in engine._open]
        if engine.num_open > wanted:
            raise ViolationError(f"{engine.num_open} requests are open, clients want {wanted}")
        self._absent = {request: self._absent.get(request, 0) + 1 for request in left}
        if max(self._absent.values(), default=0) > _MOST_ABSENT:
            raise ViolationError(f"computed for nobody: {left}")
        limit = self.core.max_num_seqs + self.plan.features.max_waiting
        if engine.num_open > limit:
            raise ViolationError(f"{engine.num_open} requests are open, the limit is {limit}")
        if self._checks.random() < _CHECK_CHANCE:
            self._check_pools()
            for kv in self.pools:
                kv.events.take()

    def _check_pools(self):
        for kv in self.pools:
            try:
                check(kv)
            except InvariantError as error:
                raise ViolationError(f"the pool: {error}") from error

    def _make(self):
        features = self.plan.features
        host = SimulatedHost(self.loop)
        groups = make_groups(host, features.num_ranks)
        self.pools, self.devices, cores = [], [], []
        for group in groups:
            core = self._core(host, group if len(groups) > 1 else None)
            core.run = self
            cores.append(core)
        self.core = cores[0]
        for follower in cores[1:]:
            host.start_thread("rank", follower.follow)
        front = self.bug.get("front", AsyncEngine)
        self.engine = front(self.core, max_waiting=features.max_waiting, host=host)
        if features.speaks_http:
            self.app = create_app(self.engine, ServeConfig(), has_page=False)

    def _core(self, host, group):
        """The engine of a rank; of the only one if there is no group."""
        features = self.plan.features
        of = {
            kind: frozenset(int(f.at) for f in self.plan.faults if f.kind == kind)
            for kind in ("step", "logits")
        }
        kv = make_kv(features, self.bug.get("kv", KVCacheManager))
        is_async = features.is_async and not features.drafts
        device = Device(host, kv, Faults(of["step"], of["logits"]), is_async=is_async)
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
        plans = self.bug.get("scheduler", Scheduler)(
            kv, config, NgramDrafts() if features.drafts else None
        )
        made = Texts(), kv, plans, device, NoGrammars(), VOCABULARY
        if group is None:
            return type("Core", (Checked, self.bug.get("core", EngineCore)), {})(*made)
        twin = type("Twin", (Checked, self.bug.get("twin", TwinCore), EngineCore), {})
        return twin(*made, ranks=group, is_checked=True)

    async def _main(self):
        self._make()
        self.engine.start()
        await self.engine.ready()
        self.drained = None
        tasks = [asyncio.create_task(self._client(ask)) for ask in self.plan.asks]
        for fault in self.plan.faults:
            if fault.kind == "drain":
                self.drained = asyncio.create_task(self._drain(fault.at))
        if tasks:
            await asyncio.wait(tasks, timeout=self._allowed_s())
        for task in tasks:
            if not task.done():
                raise ViolationError(f"a request never ends: {task.get_name()}")
            task.result()
        if self.drained is not None:
            await self.drained
        await self._settle()

    def _allowed_s(self):
        """Time in which everything ends: all of it one after another, several times over."""
        tokens = sum((len(a.prompt) + a.max_tokens) * a.num_samples for a in self.plan.asks)
        pauses = sum(a.pause_s * a.max_tokens * a.num_samples for a in self.plan.asks)
        return 1.0 + self.plan.asks[-1].at_s + pauses + 0.01 * tokens if self.plan.asks else 1.0

    async def _drain(self, at_s):
        await asyncio.sleep(at_s)
        self.tell("the server drains")
        await self.engine.drain(0.02)

    async def _client(self, ask):
        await asyncio.sleep(ask.at_s)
        asyncio.current_task().set_name(f"client {ask.number}")
        self.tell(
            f"client {ask.number} asks: {len(ask.prompt)} tokens, up to {ask.max_tokens}"
            + (f", {ask.num_samples} samples" if ask.num_samples > 1 else "")
        )
        ways = self._ask_server if self.plan.features.speaks_http else self._ask
        self._present[ask.number] = ask.num_samples, math.inf
        work = asyncio.ensure_future(ways(ask))
        if ask.leaves_s is not None:
            _, left = await asyncio.wait([work], timeout=ask.leaves_s)
            if left:
                self.tell(f"client {ask.number} leaves")
                work.cancel()
                self._present[ask.number] = ask.num_samples, self.loop.now + _PATIENCE_S
        try:
            how = await work
        except asyncio.CancelledError:
            how = "left"
        self.tell(f"client {ask.number}: {how}")
        self._present[ask.number] = ask.num_samples, self.loop.now + _PATIENCE_S

    def _submission(self, ask):
        params = SamplingParams(
            max_tokens=ask.max_tokens, ignore_eos=ask.ignores_eos, stop=ask.stop
        )
        return Submission(
            list(ask.prompt),
            params,
            num_samples=ask.num_samples,
            priority=ask.priority,
            namespace=salted(ask.salt),
            retain=[_RETENTION] if ask.retains else [],
        )

    async def _ask(self, ask):
        """Ask the engine directly; how it ended."""
        submission, heard = self._submission(ask), Heard(ask)
        try:
            async with await self.engine.submit(submission) as stream:
                async for delta in _deltas(stream, ask):
                    heard.add(delta.sample, delta.text, delta.finish_reason, delta.tokens)
        except ModelError as error:
            if type(error) not in self._explained(ask):
                raise ViolationError(f"client {ask.number}: refused: {error}") from error
            return type(error).__name__
        finally:
            heard.check(submission)
        return heard.ended()

    async def _ask_server(self, ask):
        """Ask over HTTP; how it ended."""
        body = {
            "prompt": list(ask.prompt), "max_tokens": ask.max_tokens, "n": ask.num_samples,
            "priority": ask.priority, "cache_salt": ask.salt or None, "stop": list(ask.stop),
            "ignore_eos": ask.ignores_eos, "stream": ask.streams, "temperature": 0,
        }  # fmt: skip
        heard = Heard(ask)
        try:
            async for number, text, reason in complete(self.app, body, ask.pause_s):
                heard.add(number, text, reason and FinishReason(reason))
        except RefusedError as refused:
            if self._explained(ask).isdisjoint(_ERRORS[refused.status]):
                raise ViolationError(f"client {ask.number}: refused: {refused}") from refused
            return str(refused)
        finally:
            heard.check(self._submission(ask))
        return heard.ended()

    def _explained(self, ask):
        """The errors for which a client finds a reason in the plan."""
        faults = {fault.kind for fault in self.plan.faults}
        reasons = {
            NotServingError: faults & {"drain", "step"},
            QueueFullError: self.plan.features.max_waiting < 1000,
            RequestTooLongError: self._is_too_long(ask),
            EngineFaultError: "step" in faults,
            NumericalError: "logits" in faults,
        }
        return {error for error, reason in reasons.items() if reason}

    def _is_too_long(self, ask):
        return len(ask.prompt) + ask.max_tokens > self.core.max_model_len

    async def _settle(self):
        """Everything is over: what is left?"""
        is_over = self.drained is not None or self.engine.health.state is EngineState.STOPPED
        if not is_over:
            await self._idle()
        if self.engine.health.state is EngineState.RECOVERING:
            raise ViolationError("the engine computes, and takes no requests")
        self._check_pools()
        await self.engine.stop()
        self._check_empty(self.core.kv)  # other ranks are told of the last ends with the next step
        await asyncio.sleep(0.001)  # the thread says so just before its end
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            raise ViolationError(f"tasks are left: {others}")
        if self.loop.num_threads:
            raise ViolationError(f"{self.loop.num_threads} threads are left")

    async def _idle(self):
        """Nobody asks any more: the engine ends what is there, and keeps nothing of it."""
        while self.core.has_unfinished or self.engine.num_open:
            await asyncio.sleep(0.001)
            if self.loop.now > 2 * self._allowed_s():
                raise ViolationError("the engine goes on although every client has gone")
        await self.engine.call(lambda engine: None)
        self._check_empty(self.core.kv)
        for name, what in [
            ("streams of the engine", self.core._streams),
            ("texts of the device", self.devices[0]._texts),
            ("open samples", self.engine._open),
            ("held samples", self.engine._held),
        ]:
            if what:
                raise ViolationError(f"{name} are left: {what}")

    def _check_empty(self, kv):
        left = kv.num_usable_blocks - kv.num_free_blocks
        if left:
            raise ViolationError(f"{left} blocks are held by requests that have ended")


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
