"""Any mix of arrivals, priorities, lengths, samples, aborts, swaps and pool sizes, on a simulated
model."""

from zlib import crc32

import pytest
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
from tests.model.control.simulation import (
    VOCAB_SIZE,
    SimulatedModel,
    next_token,
    peak_alone,
    undisturbed,
)

# Prompts are cut from one of two texts, so that many of them share a prefix.
TEXTS = ([i * i % 7 % VOCAB_SIZE for i in range(40)], [i % 3 for i in range(40)])
FULL = kvcore.FullAttention()
GROUPS = (
    [FULL],
    [FULL],
    [kvcore.SlidingWindow(5)],
    [FULL, kvcore.SlidingWindow(3)],
    [FULL, kvcore.SlidingWindow(1), kvcore.SlidingWindow(7)],
    [FULL, kvcore.ChunkedLocal(4)],
)


def checked_promises(scheduler):
    """Compare what a start has to leave free for others with a count of every running request."""
    admission, kv = scheduler._admission, scheduler._kv
    counted = admission.num_to_leave_free

    def promised(running, num_forks, leaving=()):
        stay = [request for request in running if request not in leaving]
        found = sum([outlook(kv, request) for request in stay]) + num_forks * len(kv.groups)
        number = counted(running, num_forks, leaving)
        assert number == (max(admission._watermark, found) if stay else 0)
        return number

    admission.num_to_leave_free = promised


def outlook(kv, request):
    """Blocks for all that a running request knows, and one more a group if it can grow."""
    sequence, length = request.sequence, request.num_tokens
    room = -(-length // kv.block_size) * kv.block_size
    left = max(0, length - sequence.num_computed_tokens)
    missing = kv.num_missing_blocks(sequence, left, chunk=1)
    if request.load is not None and request.host_copy is not None:
        stored = request.host_copy.num_tokens
        missing = kv.num_missing_blocks(sequence, left, chunk=1, num_external=stored)
        missing -= request.load.num_exclusive_blocks
    return missing + (request.max_total_tokens - 1 > room) * len(kv.groups)


class SchedulerMachine(RuleBasedStateMachine):
    scheduler_type = Scheduler

    @initialize(
        num_blocks=st.integers(2, 14),
        block_size=st.integers(1, 4),
        budget=st.integers(1, 12),
        max_num_seqs=st.integers(1, 4),
        caching=st.booleans(),
        groups=st.sampled_from(GROUPS),
        num_host_blocks=st.sampled_from([0, 2, 12]),
        watermark=st.sampled_from([0.0, 0.2]),
        priority_span=st.integers(1, 5),
        late=st.booleans(),
    )
    def start(
        self,
        num_blocks,
        block_size,
        budget,
        max_num_seqs,
        caching,
        groups,
        num_host_blocks,
        watermark,
        priority_span,
        late,
    ):
        self.make(
            kvcore.KVCacheManager(num_blocks, block_size, groups=groups, enable_caching=caching),
            max_num_batched_tokens=budget,
            max_num_seqs=max_num_seqs,
            num_host_blocks=num_host_blocks,
            watermark=watermark,
            priority_span=priority_span,
            late=late,
        )

    def make(self, kv, *, late, **limits):
        """Late: a step's tokens are read when the next one is on its way."""
        self.kv = kv
        self.late, self.unread = late, None
        self.config = SchedulerConfig(**limits)
        self.scheduler = self.scheduler_type(self.kv, self.config, self.drafter())
        checked_promises(self.scheduler)
        self.checked_places(self.scheduler._clients)
        self.model = SimulatedModel(self.kv, self.config.long_above)
        self.requests, self.places = [], {}
        self.first, self.gave_way, self.num_loads = None, set(), 0

    def checked_places(self, order):
        """A client's first request stands at virtual time, the others behind its last."""
        add = order.add

        def place_of(client, priority, turns=1):
            left = [r for r in self.requests if r.client == client and not r.is_finished]
            place = add(client, priority, turns)
            self.place = place - priority * self.config.priority_span
            if left:
                assert self.place > max(self.places[request] for request in left)
            else:
                assert self.place == pytest.approx(order.now)  # a place is rounded
            return place

        order.add = place_of

    def drafter(self):
        """Nothing is guessed."""
        return

    @rule(
        text=st.sampled_from(TEXTS),
        length=st.integers(1, 24),
        max_tokens=st.integers(1, 10),
        stop=st.sampled_from([(), (0,)]),
        priority=st.sampled_from([0, 0, 0, -1, 2]),
        num_samples=st.sampled_from([1, 1, 2, 3]),
        client=st.sampled_from([None, None, "red", "blue"]),
    )
    def add(self, text, length, max_tokens, stop, priority, num_samples, client=None):
        params = SamplingParams(max_tokens=max_tokens, stop_token_ids=stop)
        most = peak_alone(self.kv.groups, self.kv.block_size, length + max_tokens - 1)
        leader = None
        for _ in range(num_samples):
            request = Request(
                len(self.requests),
                text[:length],
                params,
                priority=priority,
                client=client,
                leader=leader,
            )
            try:
                self.scheduler.add(request)
            except RequestTooLongError:
                assert most > self.kv.num_usable_blocks
                assert request.status is Status.WAITING
                assert request not in self.scheduler.waiting
                return
            assert most <= self.kv.num_usable_blocks
            self.requests.append(request)
            self.places[request] = self.place
            leader = leader or request

    @rule(data=st.data())
    def abort(self, data):
        if self.requests:
            request = data.draw(st.sampled_from(self.requests))
            was_finished = request.is_finished
            assert self.scheduler.abort(request) is not was_finished
            assert request.is_finished

    @rule(data=st.data(), abort_between=st.booleans())
    def step(self, data, abort_between):
        before = self.unfinished()
        running = {request for request in before if request.status is Status.RUNNING}
        step = self.scheduler.schedule()
        self.check_plan(step, before, running)
        if abort_between and self.unfinished():
            assert self.scheduler.abort(data.draw(st.sampled_from(self.unfinished())))
        self.finish_step(step)

    def finish_step(self, step):
        sampled = self.model.compute(step)
        if self.late:
            if self.unread is not None:
                self.scheduler.accept(self.unread)
            self.unread = sampled
            self.model.copy(self.scheduler.advance(step))
        else:
            further = self.model.further(step, sampled)
            self.model.copy(self.scheduler.update(step, sampled, further))
        self.check_rooms()
        assert not self.kv.leases.active

    def check_rooms(self):
        """No request has a block that its tokens do not need: rejected drafts leave none."""
        for request in self.scheduler.running:
            for table in request.sequence.tables:
                assert len(table.block_ids) <= -(-request.num_tokens // table.block_size)

    def unfinished(self):
        """In order: by place, a level of priority worth `priority_span` arrivals."""
        requests = [request for request in self.requests if not request.is_finished]
        span = self.config.priority_span
        return sorted(requests, key=lambda r: (self.places[r] + r.priority * span, r.request_id))

    def check_plan(self, step, before, running):
        planned = [chunk.request for chunk in step.chunks]
        planned += [transfer.request for transfer in step.loads]
        assert len(set(planned)) == len(planned)
        assert set(planned) <= set(self.scheduler.running)
        assert step.num_tokens <= self.config.max_num_batched_tokens
        assert len(self.scheduler.running) <= self.config.max_num_seqs
        for chunk in step.chunks:
            assert chunk.num_tokens >= 1
            assert chunk.start + chunk.num_tokens < chunk.request.max_total_tokens
            assert chunk.samples == (chunk.start + chunk.num_known == chunk.request.num_tokens)
        assert not step.is_empty or not before or self.may_wait(before, running)
        for transfer in (*step.stores, *step.loads):
            assert transfer.lease.is_active
            assert set(transfer.block_ids) <= {block.block_id for block in transfer.lease.blocks}
        self.check_order(before, running)
        self.check_progress(step, before)

    def may_wait(self, before, running):
        return any(request.is_complete for request in running)

    def check_order(self, before, running):
        """No request starts before an earlier one of its client that could; the first is never
        preempted. Another client may have had its share of the step."""
        started = [r for r in self.scheduler.running if r not in running]
        for request in started:
            held_up = [
                r for r in self.scheduler.waiting if not r.is_led and r.client == request.client
            ]
            assert before.index(request) < min(map(before.index, held_up), default=len(before))
        if before and before[0] in running:
            assert before[0] in self.scheduler.running

    def check_progress(self, step, before):
        """The first in order is computed in every step but those in which blocks are copied for it:
        its own come back once, and a request that is stored for it gives way once. So does one that
        waits for its last token to be read."""
        first = next((request for request in before if not request.is_complete), None)
        if first is None:
            return
        is_computed = any(chunk.request is first for chunk in step.chunks)
        if is_computed or first is not self.first:
            self.first, self.gave_way, self.num_loads = first, set(), 0
        if not is_computed:
            stored = {store.request for store in step.stores}
            stored |= {request for request in before if request.is_complete}
            loads = sum(load.request is self.first for load in step.loads)
            assert stored or loads
            assert not stored & self.gave_way
            self.gave_way |= stored
            self.num_loads += loads
            assert self.num_loads <= 1

    @invariant()
    def blocks_are_accounted_for(self):
        if not hasattr(self, "kv"):
            return
        kvcore.check(self.kv)
        held = {id(request.sequence) for request in self.scheduler.running}
        assert held == {id(sequence) for sequence in self.kv.sequences.values()}
        copies = [r.host_copy.num_blocks for r in self.requests if r.host_copy is not None]
        left = self.scheduler._admission.num_host_blocks_left
        assert left + sum(copies) == self.config.num_host_blocks
        assert left >= 0

    @invariant()
    def everyone_is_in_order_and_somewhere(self):
        if not hasattr(self, "kv"):
            return
        unfinished = self.unfinished()
        for queue in (self.scheduler.running, self.scheduler.waiting):
            assert list(queue) == [request for request in unfinished if request in queue]
        assert len(self.scheduler.running) + len(self.scheduler.waiting) == len(unfinished)
        assert self.scheduler.has_unfinished == bool(unfinished)

    def teardown(self):
        if not hasattr(self, "kv"):
            return
        # For each token of the first in order one step, one for its copy, one a request it stores.
        owed = sum(request.max_total_tokens for request in self.requests)
        owed *= 2 + len(self.requests)
        owed += self.late  # for the last token to be read
        while self.scheduler.has_unfinished:
            assert owed > 0, "no progress"
            owed -= 1
            before = self.unfinished()
            running = {request for request in before if request.status is Status.RUNNING}
            step = self.scheduler.schedule()
            self.check_plan(step, before, running)
            self.finish_step(step)
        assert self.kv.num_free_blocks == self.kv.num_usable_blocks
        assert not self.kv.sequences
        self.blocks_are_accounted_for()
        for request in self.requests:
            wanted = undisturbed(request.prompt_tokens, request.params)
            if request.finish_reason is FinishReason.ABORTED:
                assert request.output_tokens == wanted[: request.num_output_tokens]
            else:
                assert request.output_tokens == wanted


class SwappingMachine(SchedulerMachine):
    """Requests that outgrow the pool, and host memory to store them in."""

    @initialize(
        num_blocks=st.integers(6, 16),
        block_size=st.integers(1, 2),
        caching=st.booleans(),
        groups=st.sampled_from([[FULL], [FULL, kvcore.SlidingWindow(3)]]),
        num_host_blocks=st.integers(1, 20),
        late=st.booleans(),
    )
    def start(self, num_blocks, block_size, caching, groups, num_host_blocks, late):
        self.make(
            kvcore.KVCacheManager(num_blocks, block_size, groups=groups, enable_caching=caching),
            max_num_batched_tokens=12,
            max_num_seqs=4,
            num_host_blocks=num_host_blocks,
            watermark=0.0,
            priority_span=2,
            late=late,
        )

    @rule(
        text=st.sampled_from(TEXTS),
        length=st.integers(1, 6),
        max_tokens=st.integers(4, 10),
        priority=st.sampled_from([0, 0, -1]),
        num_samples=st.sampled_from([1, 1, 2]),
    )
    def add(self, text, length, max_tokens, priority, num_samples):
        super().add(text, length, max_tokens, (), priority, num_samples)


class ForkingMachine(SchedulerMachine):
    """Several samples of every prompt, which soon end."""

    @initialize(num_blocks=st.integers(6, 14), block_size=st.integers(2, 4), late=st.booleans())
    def start(self, num_blocks, block_size, late):
        self.make(
            kvcore.KVCacheManager(num_blocks, block_size),
            max_num_batched_tokens=12,
            max_num_seqs=4,
            priority_span=2,
            late=late,
        )

    @rule(
        text=st.sampled_from(TEXTS),
        length=st.integers(1, 6),
        max_tokens=st.integers(1, 3),
        num_samples=st.integers(2, 3),
    )
    def add(self, text, length, max_tokens, num_samples):
        super().add(text, length, max_tokens, (), 0, num_samples)


class BusyMachine(SchedulerMachine):
    """Steps too small for all that runs."""

    @initialize(budget=st.integers(1, 2), block_size=st.integers(1, 4), late=st.booleans())
    def start(self, budget, block_size, late):
        self.make(
            kvcore.KVCacheManager(40, block_size),
            max_num_batched_tokens=budget,
            max_num_seqs=4,
            priority_span=5,
            late=late,
        )


class GrowingMachine(SwappingMachine):
    """Texts beyond 6 tokens have other keys and values; those that grow past that begin again."""

    @initialize(
        num_blocks=st.integers(8, 24),
        budget=st.integers(1, 12),
        caching=st.booleans(),
        groups=st.sampled_from([[FULL], [FULL, kvcore.SlidingWindow(3)]]),
        num_host_blocks=st.sampled_from([0, 20]),
        late=st.booleans(),
    )
    def start(self, num_blocks, budget, caching, groups, num_host_blocks, late):
        self.make(
            kvcore.KVCacheManager(num_blocks, 2, groups=groups, enable_caching=caching),
            max_num_batched_tokens=budget,
            max_num_seqs=4,
            num_host_blocks=num_host_blocks,
            watermark=0.0,
            priority_span=2,
            long_above=6,
            late=late,
        )

    def may_wait(self, before, running):
        """A request that begins again first waits until its last token has been read."""
        return super().may_wait(before, running) or any(r.is_expecting for r in before)

    def check_order(self, before, running):
        """A request that begins again is preempted for itself."""

    def check_progress(self, step, before):
        """Likewise."""


class Guesses:
    """Drafts that all hold, that hold at first, or that do not hold, as the text decides."""

    def __init__(self):
        self.ended = set()

    def propose(self, wanted):
        return [self.guess(request.tokens[:], most) for request, most in wanted]

    def guess(self, tokens, most):
        kind, known = crc32(b"kind" + tokens.tobytes()), len(tokens)
        for place in range(kind // 8 % (most + 1)):
            is_right = kind % 4 < 2 or (kind % 4 == 2 and place < 2)
            tokens.append((next_token(tokens) + (not is_right)) % VOCAB_SIZE)
        return tokens[known:]

    def discard(self, request):
        self.ended.add(request)


class DraftingMachine(SchedulerMachine):
    """Drafts, in pools and steps that have little room for them."""

    @initialize(
        num_blocks=st.integers(4, 16),
        block_size=st.integers(1, 4),
        budget=st.sampled_from([2, 3, 5, 16]),
        draft_tokens=st.integers(1, 5),
        groups=st.sampled_from(GROUPS),
        num_host_blocks=st.sampled_from([0, 12]),
    )
    def start(self, num_blocks, block_size, budget, draft_tokens, groups, num_host_blocks):
        self.make(
            kvcore.KVCacheManager(num_blocks, block_size, groups=groups),
            max_num_batched_tokens=budget,
            max_num_seqs=3,
            num_host_blocks=num_host_blocks,
            draft_tokens=draft_tokens,
            late=False,
        )

    def drafter(self):
        return Guesses()

    def teardown(self):
        super().teardown()
        if hasattr(self, "kv"):
            assert self.scheduler._drafter.ended == set(self.requests)


class GrowingDraftsMachine(GrowingMachine):
    """Drafts of texts that become long."""

    drafter = DraftingMachine.drafter

    def make(self, kv, **limits):
        super().make(kv, **{**limits, "late": False})


TestDraftingMachine = DraftingMachine.TestCase
TestGrowingDraftsMachine = GrowingDraftsMachine.TestCase
TestForkingMachine = ForkingMachine.TestCase
TestGrowingMachine = GrowingMachine.TestCase
TestSchedulerMachine = SchedulerMachine.TestCase
TestSwappingMachine = SwappingMachine.TestCase
TestBusyMachine = BusyMachine.TestCase
pytestmark = pytest.mark.machine


def test_a_window_that_is_found_and_one_that_is_computed_are_one_window():
    """Counted apart, as blocks to revive and blocks to add, they were more than the pool has."""
    machine = SchedulerMachine()
    machine.start(3, 4, 4, 1, True, [kvcore.SlidingWindow(5)], 0, 0.0, 1, False)
    for _ in range(2):
        machine.add(TEXTS[0], 9, 1, (), 0, 1)
        step = machine.scheduler.schedule()
        machine.check_plan(step, machine.unfinished(), set())
        machine.finish_step(step)
        machine.scheduler.abort(machine.requests[-1])
    machine.teardown()
