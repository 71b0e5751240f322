"""What a waiting head wants is looked up once; a plan that breaks leaves nothing of it behind."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import kvcore
from model import Request, SamplingParams, Scheduler, SchedulerConfig
from model.control import admission
from model.control.step import Step
from tests.model.control.simulation import SimulatedModel
from tests.model.control.test_scheduler_machine import GROUPS, TEXTS
from tests.model.control.test_scheduler_order import add, make


class LooksEveryTime(Scheduler):
    def _still_has_no_room(self, request, num_forks):
        return False


def counted(kv):
    """The look-ups of a manager, counted."""
    calls, plan = [], kv.plan
    kv.plan = lambda *args, **fields: calls.append(args) or plan(*args, **fields)
    return calls


def test_a_head_that_waits_for_blocks_is_looked_up_once():
    kv, scheduler = make(12, 4)
    add(scheduler, 0, list(range(100, 116)), max_tokens=20)
    add(scheduler, 1, list(range(200, 232)), max_tokens=4)
    calls = counted(kv)
    for number in range(15):
        step = scheduler.schedule()
        scheduler.update(step, {0: number})
    assert len(scheduler.waiting) == 1
    assert len(calls) == 2  # one for each, when it came to the head


def test_a_head_whose_prefix_another_computes_is_looked_up_until_that_is_done():
    kv, scheduler = make(13, 4)
    add(scheduler, 0, list(range(100, 132)), max_tokens=12)
    add(scheduler, 1, [*range(100, 132), *range(14)], max_tokens=2)
    calls = counted(kv)
    for number in range(10):
        scheduler.update(scheduler.schedule(), {0: number})
    assert len(calls) > 5


asked = st.lists(
    st.tuples(
        st.sampled_from(TEXTS),
        st.integers(1, 24),
        st.integers(1, 10),
        st.integers(0, 12),
        st.sampled_from([0, 0, 0, -1, 2]),
    ),
    min_size=2,
    max_size=8,
)


@settings(max_examples=150, deadline=None)
@given(
    asked=asked,
    num_blocks=st.integers(6, 14),
    groups=st.sampled_from(GROUPS),
    caching=st.booleans(),
    num_host_blocks=st.sampled_from([0, 12]),
)
@example(  # the fourth has a block of its own that the third would revive, until that is evicted
    asked=[(TEXTS[0], 1, 1, 0, 0), (TEXTS[0], 1, 6, 0, 0), (TEXTS[0], 8, 2, 0, 2),
           (TEXTS[0], 3, 6, 1, 0)],
    num_blocks=8, groups=GROUPS[0], caching=True, num_host_blocks=0,
)  # fmt: skip
def test_every_step_is_planned_as_if_the_head_were_looked_up_anew(
    asked, num_blocks, groups, caching, num_host_blocks
):
    plans = []
    for kind in (Scheduler, LooksEveryTime):
        kv = kvcore.KVCacheManager(num_blocks, 2, groups=groups, enable_caching=caching)
        limits = {"max_num_batched_tokens": 12, "max_num_seqs": 4, "priority_span": 3}
        scheduler = kind(kv, SchedulerConfig(**limits, num_host_blocks=num_host_blocks))
        model, plan, left = SimulatedModel(kv), [], list(enumerate(asked))
        for step_number in range(400):
            while left and left[0][1][3] <= step_number:
                number, (text, length, max_tokens, _, priority) = left.pop(0)
                params = SamplingParams(max_tokens=max_tokens)
                try:
                    scheduler.add(Request(number, text[:length], params, priority=priority))
                except ValueError:
                    continue
            step = scheduler.schedule()
            plan.append([(c.request.request_id, c.start, c.num_tokens) for c in step.chunks])
            model.copy(scheduler.update(step, model.compute(step)))
            if not left and not scheduler.has_unfinished:
                break
        assert not scheduler.has_unfinished
        plans.append(plan)
    assert plans[0] == plans[1]


@pytest.mark.parametrize("breaks", ["_transfer_back", "Transfer"])
def test_a_plan_that_breaks_while_a_copy_comes_back_leaves_nothing_behind(breaks, monkeypatch):
    groups = [kvcore.FullAttention(), kvcore.SlidingWindow(3)]
    kv = kvcore.KVCacheManager(10, 2, groups=groups, enable_caching=False)
    sizes = SchedulerConfig(
        max_num_batched_tokens=12, max_num_seqs=4, num_host_blocks=20, watermark=0.0
    )
    scheduler, model = Scheduler(kv, sizes), SimulatedModel(kv)

    def run(num_steps):
        for _ in range(num_steps):
            planned = scheduler.schedule()
            model.copy(scheduler.update(planned, model.compute(planned)))

    def fail(*_):
        raise MemoryError

    params = SamplingParams(max_tokens=8)
    scheduler.add(Request(0, [0, 1, 2, 3], params))
    run(4)
    scheduler.add(Request(1, [1, 1, 2, 3], params, priority=-5))
    monkeypatch.setattr(admission, breaks, fail)
    with pytest.raises(MemoryError):
        run(60)
    for request in scheduler.unfinished:
        scheduler.abort(request)
    scheduler.drop(Step(()))
    assert not scheduler.has_unfinished
    assert not kv.leases.active
    assert kv.num_free_blocks == kv.num_usable_blocks
    kvcore.check(kv)
