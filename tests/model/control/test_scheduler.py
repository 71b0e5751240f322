"""The scheduler by hand: small pools, every block id and count written out."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import kvcore
from model import (
    FinishReason,
    InvalidArgumentError,
    Request,
    RequestTooLongError,
    SamplingParams,
    Scheduler,
    SchedulerConfig,
    SchedulerStateError,
    Status,
)


def make(num_blocks, block_size, budget=64, max_num_seqs=8, *, caching=True, max_model_len=None):
    kv = kvcore.KVCacheManager(num_blocks, block_size, enable_caching=caching)
    config = SchedulerConfig(
        max_num_batched_tokens=budget, max_num_seqs=max_num_seqs, max_model_len=max_model_len
    )
    return kv, Scheduler(kv, config)


def add(scheduler, request_id, prompt, max_tokens=4):
    request = Request(request_id, prompt, SamplingParams(max_tokens=max_tokens))
    scheduler.add(request)
    return request


def planned(step):
    return [(c.request.request_id, c.start, c.num_tokens, c.samples) for c in step.chunks]


def run(scheduler, token=9):
    """One step in which every sample is `token`; what was planned."""
    step = scheduler.schedule()
    scheduler.update(step, {c.request.request_id: token for c in step.chunks if c.samples})
    return planned(step)


def test_the_life_of_a_request_block_by_block():
    kv, scheduler = make(num_blocks=6, block_size=4, budget=4)
    request = add(scheduler, 0, [1, 2, 3, 4, 5, 6])
    assert (request.status, kv.num_free_blocks) == (Status.WAITING, 5)

    # The budget cuts the prompt in two; each part takes its own blocks.
    assert run(scheduler) == [(0, 0, 4, False)]
    assert (request.status, kv.num_free_blocks) == (Status.RUNNING, 4)
    assert request.sequence.block_table == (1,)
    assert (request.sequence.num_computed_tokens, kv.stats().num_cached_blocks) == (4, 1)

    assert run(scheduler) == [(0, 4, 2, True)]
    assert (request.num_computed_tokens, request.num_tokens) == (6, 7)

    assert run(scheduler) == [(0, 6, 1, True)]
    assert (request.sequence.block_table, kv.stats().num_cached_blocks) == ((1, 2), 1)

    # The eighth token fills block 2, which can be hit from now on.
    assert run(scheduler) == [(0, 7, 1, True)]
    assert (request.sequence.block_table, kv.stats().num_cached_blocks) == ((1, 2), 2)

    # The ninth needs a third block; its logits give the fourth token, which is the last.
    step = scheduler.schedule()
    assert (planned(step), request.sequence.block_table) == ([(0, 8, 1, True)], (1, 2, 3))
    assert kv.num_free_blocks == 2
    scheduler.update(step, {0: 9})
    assert (request.status, request.finish_reason) == (Status.FINISHED, FinishReason.LENGTH)
    assert (request.output_tokens, request.sequence) == ([9, 9, 9, 9], None)
    assert (kv.num_free_blocks, kv.stats().num_cached_blocks) == (5, 2)
    assert not scheduler.has_unfinished
    assert planned(scheduler.schedule()) == []


def test_a_full_pool_makes_a_request_wait_and_then_admits_it():
    kv, scheduler = make(num_blocks=4, block_size=4)
    first = add(scheduler, 0, list(range(9)), max_tokens=3)  # 3 blocks: all there are
    second = add(scheduler, 1, list(range(50, 55)), max_tokens=2)
    assert run(scheduler) == [(0, 0, 9, True)]
    assert (second.status, kv.num_free_blocks) == (Status.WAITING, 0)
    assert run(scheduler) == [(0, 9, 1, True)]
    assert second.status is Status.WAITING
    assert run(scheduler) == [(0, 10, 1, True)]
    assert (first.finish_reason, second.status) == (FinishReason.LENGTH, Status.WAITING)
    assert run(scheduler) == [(1, 0, 5, True)]
    assert second.sequence.block_table == (3, 2)  # 3 was not full, then the tail of the first
    assert scheduler.stats.num_preemptions == 0


def test_a_waiting_request_holds_up_those_behind_it():
    _, scheduler = make(num_blocks=5, block_size=4)
    add(scheduler, 0, list(range(9)), max_tokens=2)
    add(scheduler, 1, list(range(50, 59)), max_tokens=2)
    small = add(scheduler, 2, [80], max_tokens=2)
    assert run(scheduler) == [(0, 0, 9, True)]
    assert small.status is Status.WAITING


def test_decodes_go_first_and_prefills_get_what_is_left():
    _, scheduler = make(num_blocks=20, block_size=4, budget=6)
    add(scheduler, 0, [1, 2, 3], max_tokens=9)
    assert run(scheduler) == [(0, 0, 3, True)]
    add(scheduler, 1, list(range(30, 40)), max_tokens=9)
    add(scheduler, 2, [4, 5], max_tokens=9)
    assert run(scheduler) == [(0, 3, 1, True), (1, 0, 5, False)]
    assert run(scheduler) == [(0, 4, 1, True), (1, 5, 5, True)]
    assert run(scheduler) == [(0, 5, 1, True), (1, 10, 1, True), (2, 0, 2, True)]


def test_no_more_requests_run_than_allowed():
    _, scheduler = make(num_blocks=20, block_size=4, max_num_seqs=2)
    for number in range(3):
        add(scheduler, number, [number], max_tokens=2)
    assert [row[0] for row in run(scheduler)] == [0, 1]
    assert [row[0] for row in run(scheduler)] == [0, 1]
    assert [row[0] for row in run(scheduler)] == [2]
    assert scheduler.stats.peak_running == 2


def test_the_newest_request_gives_up_its_blocks_and_is_computed_again():
    kv, scheduler = make(num_blocks=7, block_size=2)
    old = add(scheduler, 0, [1, 2], max_tokens=8)
    new = add(scheduler, 1, [5, 6], max_tokens=7)
    while scheduler.stats.num_preemptions == 0:
        last = run(scheduler)
    # Both have 6 tokens computed and 3 blocks; a fourth for the older one is not there.
    assert last == [(0, 6, 1, True)]
    assert (new.status, new.num_preemptions, new.output_tokens) == (Status.PREEMPTED, 1, [9] * 5)
    assert (scheduler.waiting, new.sequence) == ((new,), None)
    while not old.is_finished:
        run(scheduler)
    assert old.output_tokens == [9] * 8
    # Its own first block is still there, which does not count as a hit of its prompt.
    assert run(scheduler) == [(1, 2, 5, True)]
    assert (new.num_cached_tokens, scheduler.stats.num_hit_tokens) == (0, 0)
    run(scheduler)
    assert (new.output_tokens, kv.num_free_blocks) == ([9] * 7, 6)


def test_a_request_starts_only_where_every_running_one_could_take_another_block():
    kv, scheduler = make(num_blocks=5, block_size=4, caching=False)
    add(scheduler, 0, [1, 2, 3, 4], max_tokens=5)
    late = add(scheduler, 1, list(range(50, 62)), max_tokens=1)
    # 3 blocks are free and 3 are wanted; taking them would mean to be preempted in the next step.
    assert run(scheduler) == [(0, 0, 4, True)]
    assert (kv.num_free_blocks, late.status) == (3, Status.WAITING)


def test_a_request_that_fits_starts_where_the_running_ones_have_all_they_can_need():
    kv, scheduler = make(num_blocks=3, block_size=4)
    add(scheduler, 0, [1, 2], max_tokens=3)
    add(scheduler, 1, [5, 6], max_tokens=3)
    assert run(scheduler) == [(0, 0, 2, True), (1, 0, 2, True)]
    assert kv.num_free_blocks == 0


def test_a_prefix_that_is_being_computed_is_waited_for_and_then_hit():
    _, scheduler = make(num_blocks=20, block_size=4)
    shared = list(range(8))
    add(scheduler, 0, [*shared, 20], max_tokens=3)
    second = add(scheduler, 1, [*shared, 30, 31], max_tokens=3)
    assert run(scheduler) == [(0, 0, 9, True)]
    assert run(scheduler) == [(0, 9, 1, True), (1, 8, 2, True)]
    assert (second.num_cached_tokens, second.sequence.block_table[:2]) == (8, (1, 2))
    assert (scheduler.stats.num_prompt_tokens, scheduler.stats.num_hit_tokens) == (19, 8)


def test_without_a_prefix_cache_nothing_is_waited_for():
    _, scheduler = make(num_blocks=20, block_size=4, caching=False)
    shared = list(range(8))
    add(scheduler, 0, [*shared, 20])
    add(scheduler, 1, [*shared, 30])
    assert run(scheduler) == [(0, 0, 9, True), (1, 0, 9, True)]


def test_a_request_that_can_never_fit_is_refused_and_nothing_is_half_done():
    kv, scheduler = make(num_blocks=4, block_size=4)
    with pytest.raises(RequestTooLongError, match="needs 4 blocks of 4 tokens: the KV cache has 3"):
        add(scheduler, 0, list(range(10)), max_tokens=4)
    assert (scheduler.has_unfinished, kv.num_free_blocks) == (False, 3)
    # 9 tokens and 4 more: the last of them is never computed, so 12 slots are enough.
    fits = add(scheduler, 0, list(range(9)), max_tokens=4)
    while scheduler.has_unfinished:
        run(scheduler)
    assert fits.num_output_tokens == 4


def test_a_request_longer_than_the_models_positions_is_refused():
    _, scheduler = make(num_blocks=40, block_size=4, max_model_len=12)
    add(scheduler, 0, list(range(8)), max_tokens=4)
    with pytest.raises(RequestTooLongError, match="exceeds the model's 12 positions"):
        add(scheduler, 1, list(range(8)), max_tokens=5)


@settings(max_examples=40)
@given(
    num_blocks=st.integers(2, 14),
    block_size=st.integers(1, 5),
    windows=st.lists(st.integers(1, 9), max_size=2),
    budget=st.integers(1, 20),
    positions=st.none() | st.integers(1, 40),
)
@example(num_blocks=22, block_size=4, windows=[8], budget=84, positions=None)
def test_what_a_request_may_come_to_for_sure_it_comes_to_and_no_further(
    num_blocks, block_size, windows, budget, positions
):
    groups = [kvcore.FullAttention(), *map(kvcore.SlidingWindow, windows)]
    kv = kvcore.KVCacheManager(num_blocks, block_size, groups=groups)
    sizes = SchedulerConfig(max_num_batched_tokens=budget, max_model_len=positions)
    scheduler = Scheduler(kv, sizes)
    most = scheduler.max_model_len
    with pytest.raises(RequestTooLongError):
        add(scheduler, 0, [1] * most, max_tokens=1)
    if most > 1:
        fits = add(scheduler, 1, [1] * (most - 1), max_tokens=1)
        while scheduler.has_unfinished:
            run(scheduler)
        assert fits.num_tokens == most


def test_schedule_and_update_alternate():
    _, scheduler = make(num_blocks=6, block_size=2)
    add(scheduler, 0, [1, 2, 3])
    step = scheduler.schedule()
    with pytest.raises(SchedulerStateError, match="the last step has not been updated"):
        scheduler.schedule()
    with pytest.raises(SchedulerStateError, match="no token for"):
        scheduler.update(step, {})
    scheduler.update(step, {0: 1})
    with pytest.raises(SchedulerStateError, match="this is not the step in flight"):
        scheduler.update(step, {0: 1})


def test_a_request_is_added_once_and_ended_where_it_was_added():
    _, scheduler = make(num_blocks=6, block_size=2)
    _, other = make(num_blocks=6, block_size=2)
    request = add(scheduler, 0, [1, 2, 3])
    with pytest.raises(InvalidArgumentError, match="wanted a new one"):
        scheduler.add(request)
    with pytest.raises(InvalidArgumentError, match="was not added to this scheduler"):
        other.abort(request)


@pytest.mark.parametrize("name", ["max_num_batched_tokens", "max_num_seqs", "max_model_len"])
def test_a_limit_below_one_is_refused(name):
    with pytest.raises(InvalidArgumentError, match=f"{name}: wanted an integer .* 1.*, got 0"):
        SchedulerConfig(**{name: 0})
