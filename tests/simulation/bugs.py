"""Planted bugs in the engine, its asynchronous front, its ranks and the server.

Each is what `Run` takes as `bug`, or a pair of an attribute and what stands in its place. Those of
the scheduler (`tests/model/control/test_scheduler_sabotage.py`) and of the allocator
(`tests/kvcore/sabotage`) can be planted too; a run that does not find them proves nothing.
"""

import asyncio
from contextlib import ExitStack, contextmanager
from unittest import mock

from model import async_engine
from model.async_engine import AsyncEngine, EngineState
from model.engine_core import EngineCore
from model.serve import generation
from model.token_stream import TokenStream
from model.twins import TwinCore

BUGS = {}


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

    def _arriving(self, num_samples):
        self._num_arriving += num_samples
        return super()._arriving(num_samples)


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
