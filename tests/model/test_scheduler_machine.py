"""Any mix of arrivals, lengths, aborts and pool sizes, on a simulated model."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import kvcore
from model import (
    FinishReason,
    Request,
    RequestTooLongError,
    SamplingParams,
    Scheduler,
    SchedulerConfig,
    Status,
)
from tests.model.simulation import VOCAB_SIZE, SimulatedModel, undisturbed

# Prompts are cut from one of two texts, so that many of them share a prefix.
TEXTS = ([i * i % 7 % VOCAB_SIZE for i in range(40)], [i % 3 for i in range(40)])


class SchedulerMachine(RuleBasedStateMachine):
    scheduler_type = Scheduler

    @initialize(
        num_blocks=st.integers(2, 14),
        block_size=st.integers(1, 4),
        budget=st.integers(1, 12),
        max_num_seqs=st.integers(1, 4),
        caching=st.booleans(),
    )
    def start(self, num_blocks, block_size, budget, max_num_seqs, caching):
        self.kv = kvcore.KVCacheManager(num_blocks, block_size, enable_caching=caching)
        self.config = SchedulerConfig(max_num_batched_tokens=budget, max_num_seqs=max_num_seqs)
        self.scheduler = self.scheduler_type(self.kv, self.config)
        self.model = SimulatedModel(self.kv)
        self.requests = []
        self.admitted = []

    @rule(
        text=st.sampled_from(TEXTS),
        length=st.integers(1, 24),
        max_tokens=st.integers(1, 10),
        stop=st.sampled_from([(), (0,)]),
    )
    def add(self, text, length, max_tokens, stop):
        params = SamplingParams(max_tokens=max_tokens, stop_token_ids=stop)
        request = Request(len(self.requests), text[:length], params)
        fits = -(-(length + max_tokens - 1) // self.kv.block_size) <= self.kv.num_usable_blocks
        try:
            self.scheduler.add(request)
        except RequestTooLongError:
            assert not fits
            assert request.status is Status.WAITING
            assert request not in self.scheduler.waiting
        else:
            assert fits
            self.requests.append(request)

    @rule(data=st.data())
    def abort(self, data):
        if self.requests:
            request = data.draw(st.sampled_from(self.requests))
            was_finished = request.is_finished
            assert self.scheduler.abort(request) is not was_finished
            assert request.is_finished

    @rule(data=st.data(), abort_between=st.booleans())
    def step(self, data, abort_between):
        before = [request for request in self.requests if request.status is Status.RUNNING]
        step = self.scheduler.schedule()
        self.check_plan(step, before)
        if abort_between and step.chunks:
            chunk = data.draw(st.sampled_from(step.chunks))
            assert self.scheduler.abort(chunk.request)
        self.scheduler.update(step, self.model.compute(step))

    def check_plan(self, step, before):
        planned = [chunk.request for chunk in step.chunks]
        assert len(set(planned)) == len(planned)
        assert step.num_tokens <= self.config.max_num_batched_tokens
        assert len(self.scheduler.running) <= self.config.max_num_seqs
        for chunk in step.chunks:
            assert chunk.num_tokens >= 1
            assert chunk.samples == (chunk.start + chunk.num_tokens == len(chunk.request.tokens))
            if chunk.request not in self.admitted:
                self.admitted.append(chunk.request)
        if before:  # the oldest running request is never preempted, and something runs
            assert before[0] in self.scheduler.running
        assert step.chunks or not self.scheduler.has_unfinished

    @invariant()
    def blocks_are_accounted_for(self):
        if not hasattr(self, "kv"):
            return
        kvcore.check(self.kv)
        held = {id(request.sequence) for request in self.scheduler.running}
        assert held == {id(sequence) for sequence in self.kv.sequences.values()}

    @invariant()
    def everyone_is_in_order_of_arrival(self):
        if not hasattr(self, "kv"):
            return
        queued = [r.request_id for r in (*self.scheduler.running, *self.scheduler.waiting)]
        assert queued == sorted(queued)
        assert [r.request_id for r in self.admitted] == sorted(r.request_id for r in self.admitted)
        unfinished = [r.request_id for r in self.requests if not r.is_finished]
        assert queued == unfinished

    def teardown(self):
        if not hasattr(self, "kv"):
            return
        owed = sum(2 * request.max_total_tokens for request in self.requests)
        while self.scheduler.has_unfinished:
            assert owed > 0, "no progress"
            owed -= 1
            step = self.scheduler.schedule()
            self.scheduler.update(step, self.model.compute(step))
        assert self.kv.num_free_blocks == self.kv.num_usable_blocks
        assert not self.kv.sequences
        for request in self.requests:
            wanted = undisturbed(request.prompt_tokens, request.params)
            if request.finish_reason is FinishReason.ABORTED:
                assert request.output_tokens == wanted[: request.num_output_tokens]
            else:
                assert request.output_tokens == wanted


TestSchedulerMachine = SchedulerMachine.TestCase
