"""Planted bugs in the engine, its asynchronous front, its ranks, the server, router and wire.

Each is what `Run` takes as `bug`, or a pair of an attribute and what stands in its place. Some are
those of other tests: of the scheduler, of loads and leases, of the wire. A run that does not find
them proves nothing.
"""

import asyncio
import dataclasses
from array import array
from collections import Counter
from contextlib import ExitStack, contextmanager
from math import inf
from unittest import mock

from kvcore import KVCacheManager, wire
from kvcore.identity.block_hash import digest
from kvcore.tiers import DiskTier, HostTier, StoreJob, TierManager, disk, tier_manager
from kvcore.wire import publisher, subscriber
from model import async_engine
from model.async_engine import AsyncEngine, EngineState
from model.cluster.router import Router, Ticket
from model.control import admission
from model.control.clients import FairLimit, FairOrder
from model.control.scheduler import Scheduler
from model.control.tier_transfers import TierTransfers
from model.engine_core import EngineCore
from model.serve import generation
from model.token_stream import TokenStream
from model.twins import TwinCore
from tests.kvcore.wire import sabotage as wire_sabotage
from tests.model.control import test_scheduler_sabotage as scheduler_sabotage

BUGS = {}
_own_hash_before = tier_manager._Run._hash_before
_own_transfer_back = admission._transfer_back
_own_begin_store, _own_finish_store = TierManager.begin_store, TierManager.finish_store
_own_run, _own_adopt, _own_write = StoreJob.run, HostTier.adopt, DiskTier._write
_UNSALTED = KVCacheManager(2, 1).open([0]).namespace_key


def bug(part):
    """Register a class with a bug: a `part` of `Run`."""

    def register(planted):
        BUGS[planted.__name__] = ({part: planted}, ())
        return planted

    return register


def replaces(owner, name):
    """Register a function with a bug that takes the place of another one."""

    def register(planted):
        BUGS[planted.__name__] = ({}, ((owner, name, planted),))
        return planted

    return register


@contextmanager
def planted(name):
    """Plant a bug; what `Run` takes."""
    classes, patches = BUGS[name]
    with ExitStack() as stack:
        for owner, attribute, new in patches:
            stack.enter_context(mock.patch.object(owner, attribute, new))
        yield classes


@bug("front")
class AbortsOnlyOnTheLoop(AsyncEngine):
    """The engine computes on for a client that has gone."""

    def _abort_requests(self, requests):
        pass


@bug("front")
class ForgetsTheQueueAtTheEnd(AsyncEngine):
    """What waits in the inbox when the thread ends is never answered (vllm#45388)."""

    def _ended(self, error):
        self._state = EngineState.STOPPED
        self._fault = error
        if not self._gone.done():
            self._gone.set_result(None)


@bug("front")
class LeavesStreamsOpenAfterAFault(AsyncEngine):
    """A step fails, and clients wait for ever."""

    def _fail_all(self, error):
        self._open.clear()


@bug("front")
class CountsArrivalsForEver(AsyncEngine):
    """A request that is refused stays counted, so a drain never ends (sglang#27024)."""

    def _ask(self, run, settle, *, counted=None):
        return super()._ask(run, settle)


@bug("front")
class TellsTheEndTwice(AsyncEngine):
    """A sample that has ended stays among those that have news."""

    def _forget(self, sample, reason):
        held = self._held.get(sample.request.request_id)
        is_open = super()._forget(sample, reason)
        if held is not None:
            self._held[sample.request.request_id] = held
        return is_open


@bug("front")
class DropsATokenOfABurst(AsyncEngine):
    """Of accepted draft tokens the last one is lost on the way."""

    def _deliver(self, now_s, given):
        super()._deliver(
            now_s,
            [(n, tokens[:-1] if len(tokens) > 2 else tokens, r, e) for n, tokens, r, e in given],
        )


@replaces(async_engine, "_close")
def leaves_open_what_comes_too_late(value):
    """A client goes away while its request is on its way to the engine."""


@bug("front")
class TakesAnyNumberOfRequests(AsyncEngine):
    """Nothing bounds how many wait."""

    def _check_room(self, num_prompts, num_samples):
        pass


@bug("front")
class IsNeverReadyAgain(AsyncEngine):
    """After a fault the engine refuses everything, although it computes again."""

    def _recovered(self):
        pass


@bug("core")
class KeepsTextsOfTheAborted(EngineCore):
    """Every client that leaves costs some memory for ever."""

    def abort(self, request):
        self._runner.discard(request)
        return self._scheduler.abort(request)


@bug("core")
class KeepsTheDevicesPartOfTheFinished(EngineCore):
    """What the sampler keeps of a request outlives it."""

    def _end(self, request, stream):
        discard, self._runner.discard = self._runner.discard, lambda _: None
        super()._end(request, stream)
        self._runner.discard = discard


@bug("core")
class GoesOnAfterAFault(EngineCore):
    """A step that failed is given up, but what was sent before it is read later."""

    def _abandon(self, step):
        for request in self._scheduler.unfinished:
            self.abort(request)
        self._scheduler.drop(step)


@bug("core")
class TellsTheEndWithTheTokenBefore(EngineCore):
    """Where a step is too wide to be read late, a request has two outputs, and both say its end."""

    def _read_at_once(self, launched, before):
        return before + super()._read_at_once(launched, [])


@bug("core")
class KeepsWhatCouldNotBeRead(EngineCore):
    """What a step has written is found, although the device failed before it could be read."""

    def _read_at_once(self, launched, before):
        abandon, self._abandon = self._abandon, lambda _: None
        try:
            return super()._read_at_once(launched, before)
        finally:
            self._abandon = abandon


@bug("core")
class CopiesForksTooLate(EngineCore):
    """The copies of forks are carried out one step late."""

    late = ()

    def _run_step(self):
        runner = self._runner
        copy = runner.copy

        def later(orders):
            before, self.late = self.late, orders
            if before:
                copy(before)

        runner.copy = later
        try:
            return super()._run_step()
        finally:
            runner.copy = copy


@bug("core")
class AcceptsWhatWasNotVerified(EngineCore):
    """Every draft token counts as accepted (vllm#43559)."""

    def _verify(self, flight, tokens):
        further = {}
        for request, drafts, _ in flight.ahead():
            number = request.request_id
            if not request.is_finished and number in tokens:
                for token in (tokens[number], *drafts):
                    self._streams[number].add(token)
                further[number] = list(drafts)
        return further


@bug("core")
class FailsWithoutAWord(EngineCore):
    """A request whose logits are not finite ends, and its client is not told."""

    def _fail(self, request, error):
        return _Silent(super()._fail(request, error))


class _Silent:
    """An output that says nothing."""

    def __init__(self, output):
        self.request, self.tokens, self.token_ids = _Unfinished(output.request), (), ()


class _Unfinished:
    finish_reason = error = None
    is_finished = False
    num_prompt_tokens, tokens = 0, (0,)

    def __init__(self, request):
        self.request_id = request.request_id


@bug("twin")
class TellsOtherRanksOfNoAbort(TwinCore):
    """Other ranks compute on for a request that has ended on the first."""

    def abort(self, request):
        return EngineCore.abort(self, request)


@bug("twin")
class TellsOtherRanksTooLate(TwinCore):
    """Other ranks are told of new requests one step too late."""

    def step(self):
        self._ranks.broadcast(None)
        return self._step()


@bug("twin")
class OtherRanksAbortFirst(TwinCore):
    """The order of what the first rank says is lost."""

    def step(self):
        self._said.sort(key=lambda said: type(said).__name__ != "_Aborted")
        self._said.reverse()
        return super().step()


@replaces(generation, "_gone")
async def does_not_see_a_client_leave(receive):
    """A client goes away, and its request is computed to its end."""
    del receive
    await asyncio.Event().wait()


@replaces(generation, "_check_logprobs")
def serves_only_the_ready(asked, service):
    """An engine that does not run is an error of the server's own."""
    del asked
    service.engine.engine.config  # noqa: B018  # there is none


@replaces(TokenStream, "close")
def closes_nothing(self):
    """A stream that is closed goes on."""


@replaces(TokenStream, "_wake")
def wakes_only_for_news(self):
    """A reader is not woken by an error or an end without news."""
    if self._news and self._waiter is not None and not self._waiter.done():
        self._waiter.set_result(None)


@bug("front")
class ForgetsWhatIsHeldAtAFault(AsyncEngine):
    """Tokens that wait for their turn are handed out after the end of their stream."""

    def _fail_all(self, error):
        held, self._held = self._held, {}
        super()._fail_all(error)
        self._held = held


@bug("front")
class DoesNotCountThoseOnTheirWay(AsyncEngine):
    """More requests come in at once than may wait."""

    def _check_room(self, num_prompts, wanted):
        counts, self._counts = self._counts, FairLimit()
        self._counts.add(Counter(sample.request.client for _, sample in self._open.values()))
        try:
            super()._check_room(num_prompts, wanted)
        finally:
            self._counts = counts


@bug("core")
class DropsTheLastFlight(EngineCore):
    """The tokens of a request that runs alone are not read where the next step is sent first."""

    def _run_step(self):
        outputs = super()._run_step()
        if len(self._scheduler.running) == 1:
            self._unread = None
        return outputs


@bug("core")
class QueuesHalf(EngineCore):
    """A refused request leaves its first samples behind."""

    def submit(self, asked):
        requests = super().submit(asked)
        if len(requests) > 2:
            self._streams[-1] = self._streams[requests[0].request_id]
        return requests


@bug("twin")
class OtherRanksNeverEnd(TwinCore):
    """Other ranks wait for a step that never comes."""

    def end(self, *, goes_on=False):
        pass


@bug("twin")
class TellsOtherRanksTwice(TwinCore):
    """What was said before a step that fails is said again."""

    def step(self):
        said = [one for one in self._said if hasattr(one, "params")]
        outputs = super().step()
        self._said += said[1:]
        return outputs


@bug("twin")
class ForgetsPriorities(TwinCore):
    """Other ranks get requests without their priorities."""

    def submit(self, asked):
        requests = super().submit(asked)
        self._said[-1] = type(asked)(self._said[-1].prompt, asked.params)
        return requests


@bug("scheduler")
class NewOnesFirst(Scheduler):
    """What has just come starts before what was preempted."""

    def _first_waiting(self):
        fresh = [r for r in self._waiting if not r.is_led and not r.num_preemptions]
        found, count = super()._first_waiting()
        return (fresh[0], count) if fresh and found is not None else (found, count)


@bug("scheduler")
class ShortOnesFirst(Scheduler):
    """A stream of short prompts starves a long one."""

    def _first_waiting(self):
        found, count = super()._first_waiting()
        free = [r for r in self._waiting if not r.is_led]
        return (min(free, key=lambda r: r.num_tokens), count) if free else (found, count)


@bug("scheduler")
class PriorityIsEverything(Scheduler):
    """One level of priority moves a request ahead of all others."""

    def add(self, request):
        super().add(request)
        request.order = (request.priority * 10**6 + request.order[1], request.order[1])
        self._waiting.sort(key=lambda one: one.order)


@replaces(FairOrder, "add")
def gives_each_request_the_turn_of_now(self, client, priority, turns=1):
    """A client with many requests delays all others."""
    self._num_unfinished[client] += 1
    self._next[client] = self.now
    return self.now + priority * self._span


@bug("router")
class ChoosesTheLost(Router):
    """A replica that was removed is chosen when nothing waits at it."""

    def remove(self, name):
        pass


@bug("router")
class TakesTheBusiest(Router):
    """Requests are sent again and again to where they were refused."""

    def _next(self):
        return next(iter(self._replicas))

    def add(self, name):
        super().add(name)
        self._replicas[name].num_running += 1


@replaces(Ticket, "end")
def ends_without_its_tokens(self):
    """A request that ends before its first token counts as waiting for ever."""
    with self._lock:
        if not self._is_over:
            self._is_over = True
            self._at.num_running -= 1


@replaces(Ticket, "end")
def ends_twice(self):
    """A request that is sent again is taken off twice."""
    with self._lock:
        self._begin()
        self._at.num_running -= 1
        self._is_over = True


@replaces(Ticket, "has_begun")
def begins_with_every_token(self):
    """Each token takes the prompt off what waits."""
    with self._lock:
        self._at.num_waiting_tokens -= 1
        self._begin()


@replaces(Ticket, "_begin")
def keeps_what_comes(self):
    """Prompts on their way are remembered for ever."""
    self._at.num_waiting_tokens -= self._num_waiting
    self._num_waiting = 0


@bug("subscriber")
class KeepsTheRemoved(wire.Subscriber):
    """A replica that is gone is known for ever."""

    def remove(self, name):
        with self._lock:
            self._links.pop(name).close()


class NeverCatchesUp(wire.Follower):
    """What was lost stays unknown where a snapshot could be had later."""

    def ask(self, **how):
        self.lacks = False
        return super().ask(**how)


BUGS["NeverCatchesUp"] = ({}, ((subscriber, "Follower", NeverCatchesUp),))


@bug("subscriber")
class NeverEnds(wire.Subscriber):
    """A subscriber that is closed goes on listening."""

    def close(self):
        self._transport.wake()


@bug("tiers")
class StartsBeforeItsBytesAreThere(TierTransfers):
    """A load counts as done when it was begun (sglang#39830)."""

    def settle(self):
        for load in self._loads.values():
            load.is_over = load.job.is_done = load.job.has_succeeded = True
        return super().settle()


@bug("tiers")
class KeepsTheBlocksOfTheAborted(TierTransfers):
    """A request that ends while its KV is on its way leaves its blocks behind (LMCache#4676)."""

    def forget(self, request):
        self._loads.pop(request, None)


@bug("tiers")
class WaitsForEver(TierTransfers):
    """A load that never comes is waited for (vllm#45388)."""

    def begin(self, request):
        waits = super().begin(request)
        if waits:
            self._loads[request].deadline_s = inf
        return waits


@bug("tiers")
class LeavesOutTheEndOfALoad(TierTransfers):
    """What has come is taken for all of it."""

    def begin(self, request):
        waits = super().begin(request)
        if waits:
            job = self._loads[request].job
            job.parts = job.parts[: (len(job.parts) + 1) // 2]
        return waits


@bug("tiers")
class RanksDecideAlone(TierTransfers):
    """Each rank loads what it has found, and goes on when its own copies are there."""

    def _agreed(self, numbers):
        return numbers


@bug("tiers")
class OneRankDecides(TierTransfers):
    """What one rank has found, or has done with, counts for all."""

    def _agreed(self, numbers):
        if self._ranks is None:
            return numbers
        told = self._ranks.all_gather(array("q", numbers).tobytes())
        return [max(each) for each in zip(*[array("q", one) for one in told], strict=True)]


@bug("tiers")
class ChoosesStoresByItsOwnTiers(TierTransfers):
    """A rank stores what its own tiers lack, and nothing else."""

    def __init__(self, tiers, *others):
        super().__init__(tiers, *others)
        tiers._is_shard = False


@bug("twin")
class TendsOneRankAlone(TwinCore):
    """Other ranks are not told that transfers go on while no step runs."""

    tend = EngineCore.tend


@replaces(tier_manager._Run, "_hash_before")
def finds_what_other_salts_have(self):
    """Below the pool, salts are ignored (sglang#37160)."""
    self._is_private = False
    return _own_hash_before(self) if self._first else digest(_UNSALTED, "sha256")


@replaces(StoreJob, "cancel")
def stores_what_is_reused(self):
    """A store goes on when its blocks have been given back."""


@replaces(admission, "_transfer_back")
def swaps_back_in_reverse(request, copy, lease):
    """A request that was swapped out gets its blocks in another order."""
    transfer = _own_transfer_back(request, copy, lease)
    return dataclasses.replace(transfer, block_ids=transfer.block_ids[::-1])


@replaces(admission, "_transfer_back")
def swaps_back_from_the_begin(request, copy, lease):
    """Of a copy the first blocks are restored where its begin was found in the cache."""
    transfer = _own_transfer_back(request, copy, lease)
    places, ranges = [], transfer.ranges
    for (first, stop), (_, end) in zip(copy.places, ranges, strict=True):
        begin = end - (stop - first)
        places.append((begin, begin + len(range(*ranges[len(places)]))))
    return dataclasses.replace(transfer, ranges=tuple(places))


@bug("tiers")
class StoresNothing(TierTransfers):
    """What is published is never stored."""

    def store(self, now_s):
        pass


class _Nowhere:
    """A queue that nothing comes out of."""

    def put(self, run):
        pass


@bug("tiers")
class LosesStores(TierTransfers):
    """Every third store is lost on the way to its thread."""

    num_asked = 0

    def store(self, now_s):
        queues, self.num_asked = self._queues, self.num_asked + 1
        if self.num_asked % 3 == 0:
            self._queues = queues[0], _Nowhere()
        super().store(now_s)
        self._queues = queues


@bug("tiers")
class LateStoresCountAsDone(TierTransfers):
    """What was not stored in time is never stored."""

    def _settle_store(self, store, state):
        store.job.is_done |= state == 0
        finish = self.tiers.finish_store
        self.tiers.finish_store = lambda job, **_: finish(job, is_done=True)
        super()._settle_store(store, state)
        self.tiers.finish_store = finish


@bug("tiers")
class WaitsForWhatWasGivenUp(TierTransfers):
    """After four stores that hang nothing is stored any more."""

    def settle(self):
        given_up = self._given_up
        has_ended = super().settle()
        self._given_up = [*dict.fromkeys([*given_up, *self._given_up])]
        return has_ended


@bug("tiers")
class StoresInStepsAlone(TierTransfers):
    """What is left when the last step is over waits for the next request."""

    def tend(self):
        self.settle()


@bug("tiers")
class TrustsFailedSteps(TierTransfers):
    """Copies of what a failed step has written stay."""

    def distrust_steps(self):
        self.tiers.reset(self.tiers.marks())


@bug("tiers")
class TrustsTheStepBeforeTheLast(TierTransfers):
    """With asynchronous scheduling the step that fails is the one before the last."""

    def distrust_steps(self):
        self.tiers.reset(self._step_marks[-1])


@bug("tiers")
class NeverLoads(TierTransfers):
    """What is stored is never read (eugr/spark-vllm-docker#373)."""

    def begin(self, request):
        request.has_asked_tiers = True
        return False


@bug("core")
class SleepsThroughDeadlines(EngineCore):
    """An idle engine holds the blocks of a store that hangs until it ends."""

    patience_s = None


@bug("core")
class PublishesInSilence(EngineCore):
    """What a request publishes when it is aborted is not stored until the next step."""

    def abort(self, request):
        woken, self.tiers = self.tiers, None
        try:
            return super().abort(request)
        finally:
            self.tiers = woken


@bug("twin")
class TendsOnlyWhatIsBusy(TwinCore):
    """Stores that were given up keep others from being begun while no step runs."""

    def tend(self):
        if self.tiers is not None and self.tiers.is_busy:
            super().tend()


@replaces(TierManager, "begin_store")
def stores_the_first_alone(self):
    """What a store has no room for is forgotten."""
    job = _own_begin_store(self)
    self._published.clear()
    return job


@replaces(TierManager, "finish_store")
def queues_nothing_again(self, job, *, is_done=None):
    """A store that is given up takes its contents along."""
    _own_finish_store(self, job, is_done=is_done)
    for block in job.lease.blocks:
        self._published.pop(block, None)


@replaces(StoreJob, "run")
def stores_in_the_first_tier_alone(self):
    """The disk is never written where there is host memory."""
    self._tiers = self._tiers[:1]
    _own_run(self)


@replaces(StoreJob, "run")
def stores_under_the_next_key(self):
    """A copy holds what another one should."""
    keys = [part.key for part in self.parts]
    self.parts = tuple([
        dataclasses.replace(part, key=key)
        for part, key in zip(self.parts, keys[1:] + keys[:1], strict=True)
    ])  # fmt: skip
    _own_run(self)


@replaces(HostTier, "adopt")
def has_no_capacity_any_more(self, key, copy, priority, epoch):
    """After some copies the capacity is 0, and nothing says so."""
    if self.stats.num_stored >= 3:
        self.stats.capacity_bytes = 0
    return _own_adopt(self, key, copy, priority, epoch)


@replaces(disk._Pauses, "end")
def never_tries_a_disk_again(self):
    """A disk that was full for a moment stays as small as it was then."""
    return False


@replaces(DiskTier, "_write")
def takes_a_failed_write_for_done(self, number, pieces, size):
    """A copy can be found although its bytes could not be written (mooncake#3741)."""
    try:
        _own_write(self, number, pieces, size)
    except OSError:
        if number not in self._segments:
            raise


_OF_THE_SCHEDULER = (
    "ForgetsToCloseThePreempted", "StartsTheLastFirst", "SortsByPriorityAlone",
    "KeepsNoTokenForTheFirst", "SpendsMoreThanTheBudget", "SamplesInTheMiddleOfAPrompt",
    "AbortsWithoutClosing", "HandsOutWhatStandsIn", "ForksWhatTheLeaderExpects",
    "DraftsBeforeOthersAreServed", "FindsShortTextsForLongOnes",
)  # fmt: skip
_OF_THE_WIRE = {
    "DeafFollower": (subscriber, "Follower"), "GaplessFollower": (subscriber, "Follower"),
    "ImpatientFollower": (subscriber, "Follower"), "EarlyHistory": (publisher, "History"),
    "BlindEncoder": (publisher, "Encoder"), "OneSpaceIndex": (subscriber, "Index"),
    "KeepingIndex": (subscriber, "Index"),
}  # fmt: skip
BUGS |= {name: ({"scheduler": getattr(scheduler_sabotage, name)}, ()) for name in _OF_THE_SCHEDULER}
BUGS |= {
    name: ({}, ((*place, getattr(wire_sabotage, name)),)) for name, place in _OF_THE_WIRE.items()
}
