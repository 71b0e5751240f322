"""Schedulers with a planted bug each: the machine must find every one of them."""

import dataclasses

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

import kvcore
from model import Chunk, ModelError, Request, Scheduler, Status, Step
from tests.model.control.test_scheduler_machine import (
    BusyMachine,
    DraftingMachine,
    ForkingMachine,
    GrowingDraftsMachine,
    GrowingMachine,
    SchedulerMachine,
    SwappingMachine,
)

HUNT = settings(
    max_examples=400,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


class ForgetsToCloseThePreempted(Scheduler):
    def _preempt(self, request):
        kv, self._admission._kv = self._admission._kv, _Without(self._admission._kv, "close")
        super()._preempt(request)
        self._admission._kv = kv


class CountsThePreemptedAmongThoseThatRun(Scheduler):
    """What they might take stays free for them."""

    def _preempt(self, request):
        admission = self._admission
        admission._outlooks, outlooks = None, admission._outlooks
        super()._preempt(request)
        admission._outlooks = outlooks


class PreemptsTheFirst(Scheduler):
    def _preempt(self, request):
        super()._preempt(self._running[0])


class StartsTheLastFirst(Scheduler):
    def _first_waiting(self):
        request, num_forks = super()._first_waiting()
        return (request and self._waiting[-1]), num_forks


class SortsByPriorityAlone(Scheduler):
    """A stream of urgent requests starves all others."""

    def _enqueue(self, request):
        request.order = (request.priority, request.request_id)
        super()._enqueue(request)


class RemembersClientsThatHaveLeft(Scheduler):
    """They take turns with those that are here, and their next request comes late."""

    def __init__(self, *args):
        super().__init__(*args)
        self._clients.end = lambda *request, **how: None


class KeepsNoTokenForTheFirst(Scheduler):
    """Decodes alone use up every step."""

    def _plan_decodes(self):
        for request in self.running:
            is_running = request.status is Status.RUNNING
            if self._budget and is_running and request.num_uncomputed_tokens == 1:
                self._plan_chunk(request)


class WaitsForRoomThatNeverComes(Scheduler):
    def _has_room(self, request):
        return self._kv.can_reserve(request.running_sequence, 1)


class SpendsMoreThanTheBudget(Scheduler):
    def schedule(self):
        step = super().schedule()
        chunks = tuple(
            Chunk(c.request, c.start, c.request.num_tokens - c.start, samples=True)
            for c in step.chunks
        )
        self._in_flight = Step(chunks)
        return self._in_flight


class SamplesInTheMiddleOfAPrompt(Scheduler):
    def schedule(self):
        step = super().schedule()
        chunks = tuple(Chunk(c.request, c.start, c.num_tokens, samples=True) for c in step.chunks)
        self._in_flight = Step(chunks)
        return self._in_flight


class PublishesBeforeItIsComputed(Scheduler):
    def schedule(self):
        step = super().schedule()
        for chunk in step.chunks:
            self._kv.commit(chunk.request.running_sequence, chunk.num_tokens)
        return step

    def update(self, step, sampled, further=None):
        kv, self._kv = self._kv, _Without(self._kv, "commit_step")
        orders = super().update(step, sampled, further)
        self._kv = kv
        return orders


class AbortsWithoutClosing(Scheduler):
    def abort(self, request):
        kv, self._kv = self._kv, _Without(self._kv, "close")
        try:
            return super().abort(request)
        finally:
            self._kv = kv


class ForgetsTheOutputWhenItResumes(Scheduler):
    def _start(self, request):
        output = request.tokens[request.num_prompt_tokens :]
        del request.tokens[request.num_prompt_tokens :]
        super()._start(request)
        request.tokens.extend(output)


class AdmitsMoreThanMayRun(Scheduler):
    def _admit(self, request, num_forks):
        return True


class HandsOutWhatIsBeingStored(Scheduler):
    def _preempt(self, request):
        super()._preempt(request)
        for transfer in self._stores:
            transfer.lease.end()


class LoadsFromTheBeginning(Scheduler):
    """A copy that begins before what the prefix cache still has."""

    def schedule(self):
        step = super().schedule()
        loads = tuple(
            dataclasses.replace(
                load, ranges=tuple((0, stop - first) for first, stop in load.ranges)
            )
            for load in step.loads
        )
        self._in_flight = dataclasses.replace(step, loads=tuple(loads))
        return self._in_flight


class ForgetsToLoad(Scheduler):
    def schedule(self):
        step = super().schedule()
        for load in step.loads:
            load.copy.payload = [[None] * self._kv.block_size] * len(load.copy.payload)
        return step


class LosesHostMemory(Scheduler):
    def finish(self, request, reason):
        request.host_copy = None
        return super().finish(request, reason)


class UsesACopyWithoutItsBeginning(Scheduler):
    def _start(self, request):
        if request.host_copy is not None:
            request.host_copy.places = ((0, request.host_copy.places[0][1]),)
        super()._start(request)


class LetsOthersFindWhatAWindowLeftBehind(Scheduler):
    """What is out of sight is written nowhere."""

    def _start(self, request):
        if request.host_copy is not None:
            opened = self._admission._kv
            self._admission._kv = _Hasty(opened)
            super()._start(request)
            self._admission._kv = opened
        else:
            super()._start(request)


class TakesTheBlocksOfOneGroupForThoseOfAnother(Scheduler):
    def schedule(self):
        step = super().schedule()
        for load in step.loads:
            payload = load.copy.payload
            load.copy.payload = [*payload[1:], *payload[:1]]
        return step


class GoesOnWithTheKeysOfAShortText(Scheduler):
    def _restart_long(self):
        pass


class FindsShortTextsForLongOnes(Scheduler):
    def __init__(self, *args):
        super().__init__(*args)
        self._admission._namespace = lambda _: kvcore.DEFAULT_NAMESPACE


class ForgetsToCopyForks(Scheduler):
    def update(self, step, sampled, further=None):
        super().update(step, sampled, further)
        return ()


class EndsBeforeItForks(Scheduler):
    """What a finished request leaves is handed out as the target of a copy from another."""

    def update(self, step, sampled, further=None):
        orders = []
        for chunk in step.chunks:
            rest = tuple(other for other in step.chunks if other is not chunk)
            self._in_flight = step = dataclasses.replace(step, chunks=(chunk,))
            orders += super().update(step, sampled, further)
            self._in_flight = step = dataclasses.replace(step, chunks=rest, stores=(), loads=())
        self._in_flight = None
        return tuple(orders)


class ForksMoreThanMayRun(Scheduler):
    def _fork(self, leader, follower, orders):
        limits, self.config = self.config, dataclasses.replace(self.config, max_num_seqs=99)
        try:
            return super()._fork(leader, follower, orders)
        finally:
            self.config = limits


class RefusesWhatJustFits(Scheduler):
    def _check_length(self, request):
        super()._check_length(request)
        longer = Request(request.request_id, request.tokens, request.params)
        longer.tokens.append(0)
        longer.num_prompt_tokens += 1
        longer.max_total_tokens += 1
        super()._check_length(longer)


class GoesOnAfterTheLastToken(Scheduler):
    def _plan_decodes(self):
        limits = [(request, request.max_total_tokens) for request in self._running]
        for request, limit in limits:
            request.max_total_tokens = limit + 1
        super()._plan_decodes()
        for request, limit in limits:
            request.max_total_tokens = limit


class KeepsTheTokenForOneThatHasAll(Scheduler):
    """With a budget of one token no request goes on."""

    def _plan_decodes(self):
        if self._running and self._running[0].is_complete and self._budget == 1:
            self._budget = 0
        super()._plan_decodes()


class HandsOutWhatStandsIn(Scheduler):
    def finish(self, request, reason):
        if request.sequence is not None and request.is_expecting:
            self._kv.resolve(request.sequence, [0])
        return super().finish(request, reason)


class ForgetsTheTokensOfThePreempted(Scheduler):
    def accept(self, sampled, further=None):
        self._expecting = tuple(r for r in self._expecting if r.status is Status.RUNNING)
        super().accept(sampled)


class CommitsUnreadTokens(Scheduler):
    """A block is known by a token that has not been read."""

    def _commit(self, chunks):
        super()._commit(chunks)
        for sequence in [c.request.running_sequence for c in chunks if c.request.is_expecting]:
            self._kv.resolve(sequence, [0])


class TellsInAnotherOrder(Scheduler):
    """Every request gets the token of another one."""

    def accept(self, sampled, further=None):
        live = [r.request_id for r in self._expecting if r.request_id in sampled]
        return super().accept(
            {**sampled, **dict(zip(live, [sampled[n] for n in live[1:] + live[:1]], strict=True))}
        )


class ForksWhatTheLeaderExpects(Scheduler):
    """A sample starts without a token to come: it computes nothing, for ever."""

    def _fork(self, leader, follower, orders):
        super()._fork(leader, follower, orders)
        if follower.sequence is not None:
            self._kv.truncate(follower.sequence, follower.num_prompt_tokens)


class KeepsTheRoomOfDraftsThatDidNotHold(Scheduler):
    def _accept_drafts(self, expecting, further):
        kv, self._kv = self._kv, _Without(self._kv, "truncate")
        super()._accept_drafts(expecting, further)
        self._kv = kv


class TakesDraftsForComputedBeforeTheyHold(Scheduler):
    """What is found then may be what another text would have gone on with."""

    def _commit(self, chunks):
        super()._commit(chunks)
        for chunk in chunks:
            if chunk.drafts:
                self._kv.expect(chunk.request.sequence, len(chunk.drafts))
                self._kv.commit(chunk.request.sequence, len(chunk.drafts))
                self._kv.truncate(chunk.request.sequence, chunk.start + 2)


class DraftsBeforeOthersAreServed(Scheduler):
    """The budget goes to guesses, and the first in order waits."""

    def _plan_others(self):
        if self._drafter is not None:
            self._plan_drafts(self._drafter)
        super()._plan_others()


class DraftsMoreThanMayCome(Scheduler):
    def _most_drafts(self, request):
        return super()._most_drafts(request) and self.config.draft_tokens


class DraftsPastTheEdge(Scheduler):
    """Keys and values of a long text that were computed as those of a short one."""

    def _most_drafts(self, request):
        limits, self.config = self.config, dataclasses.replace(self.config, long_above=None)
        try:
            return super()._most_drafts(request)
        finally:
            self.config = limits


class ForgetsTheDraftsThatHeld(Scheduler):
    """What was drawn behind them joins, and is never computed."""

    def _accept_drafts(self, expecting, further):
        for request in expecting:
            if request.sequence is not None:
                self._kv.extend(request.sequence, further.get(request.request_id, ()))


class _Hasty:
    """A manager that says of what it loads that it was computed."""

    def __init__(self, kv):
        self._kv = kv

    def begin_load(self, sequence, num_tokens, **options):
        count = num_tokens - sequence.num_computed_tokens - 1
        if self._kv.can_reserve(sequence, count):
            self._kv.reserve(sequence, count)
            self._kv.commit(sequence, count)
        return self._kv.begin_load(sequence, num_tokens, **options)

    def __getattr__(self, name):
        return getattr(self._kv, name)


class _Without:
    """A manager one of whose verbs does nothing."""

    def __init__(self, kv, verb):
        self._kv = kv
        self._verb = verb

    def __getattr__(self, name):
        return (lambda *_: None) if name == self._verb else getattr(self._kv, name)


BUGS = [
    bug
    for bug in list(globals().values())
    if isinstance(bug, type) and issubclass(bug, Scheduler) and bug is not Scheduler
]


SWAPPING = {
    HandsOutWhatIsBeingStored,
    LoadsFromTheBeginning,
    ForgetsToLoad,
    LosesHostMemory,
    UsesACopyWithoutItsBeginning,
    LetsOthersFindWhatAWindowLeftBehind,
    TakesTheBlocksOfOneGroupForThoseOfAnother,
}
DRAFTING = {
    KeepsTheRoomOfDraftsThatDidNotHold,
    TakesDraftsForComputedBeforeTheyHold,
    DraftsBeforeOthersAreServed,
    DraftsMoreThanMayCome,
    ForgetsTheDraftsThatHeld,
}
MACHINES = dict.fromkeys(SWAPPING, SwappingMachine) | {
    EndsBeforeItForks: ForkingMachine,
    GoesOnWithTheKeysOfAShortText: GrowingMachine,
    FindsShortTextsForLongOnes: GrowingMachine,
    KeepsNoTokenForTheFirst: BusyMachine,
    DraftsPastTheEdge: GrowingDraftsMachine,
    KeepsTheTokenForOneThatHasAll: BusyMachine,
}
MACHINES |= dict.fromkeys(DRAFTING, DraftingMachine)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_the_machine_catches(bug):
    class Sabotaged(MACHINES.get(bug, SchedulerMachine)):
        scheduler_type = bug

    with pytest.raises((AssertionError, KeyError, ValueError, ModelError, kvcore.KVCoreError)):
        run_state_machine_as_test(Sabotaged, settings=HUNT)
