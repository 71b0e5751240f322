"""Schedulers with a planted bug each: the machine must find every one of them."""

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

import kvcore
from model import Chunk, ModelError, Request, Scheduler, Step
from tests.model.test_scheduler_machine import SchedulerMachine

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
        kv, self._kv = self._kv, _Without(self._kv, "close")
        super()._preempt(request)
        self._kv = kv


class PreemptsTheOldest(Scheduler):
    def _preempt(self, request):
        oldest = self._running[0]
        super()._preempt(oldest)


class AdmitsTheNewestFirst(Scheduler):
    def add(self, request):
        super().add(request)
        self._waiting.rotate(1)


class SpendsMoreThanTheBudget(Scheduler):
    def schedule(self):
        step = super().schedule()
        chunks = tuple(
            Chunk(c.request, c.start, len(c.request.tokens) - c.start, samples=True)
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

    def update(self, step, sampled):
        kv, self._kv = self._kv, _Without(self._kv, "commit")
        super().update(step, sampled)
        self._kv = kv


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
    def _admissions(self):
        while self._waiting:
            self._start(self._waiting.popleft())
            yield self._running[-1]


class RefusesWhatJustFits(Scheduler):
    def _check_length(self, request):
        super()._check_length(request)
        longer = Request(request.request_id, request.tokens, request.params)
        longer.tokens.append(0)
        longer.num_prompt_tokens += 1
        super()._check_length(longer)


class _Without:
    """A manager one of whose verbs does nothing."""

    def __init__(self, kv, verb):
        self._kv = kv
        self._verb = verb

    def __getattr__(self, name):
        return (lambda *_: None) if name == self._verb else getattr(self._kv, name)


BUGS = (
    ForgetsToCloseThePreempted,
    PreemptsTheOldest,
    AdmitsTheNewestFirst,
    SpendsMoreThanTheBudget,
    SamplesInTheMiddleOfAPrompt,
    PublishesBeforeItIsComputed,
    AbortsWithoutClosing,
    ForgetsTheOutputWhenItResumes,
    AdmitsMoreThanMayRun,
    RefusesWhatJustFits,
)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_the_machine_catches(bug):
    class Sabotaged(SchedulerMachine):
        scheduler_type = bug

    with pytest.raises((AssertionError, KeyError, ModelError, kvcore.KVCoreError)):
        run_state_machine_as_test(Sabotaged, settings=HUNT)
