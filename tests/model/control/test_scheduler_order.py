"""Order, samples and swaps by hand: every request, block and copy written out."""

import pytest

import kvcore
from model import (
    InvalidArgumentError,
    Request,
    RequestTooLongError,
    SamplingParams,
    Scheduler,
    SchedulerConfig,
    Status,
)


def make(num_blocks, block_size, *, caching=True, groups=None, **limits):
    kv = kvcore.KVCacheManager(num_blocks, block_size, enable_caching=caching, groups=groups)
    limits = {"max_num_batched_tokens": 64, "max_num_seqs": 8, "watermark": 0.0, **limits}
    return kv, Scheduler(kv, SchedulerConfig(**limits))


def add(scheduler, request_id, prompt, max_tokens=4, **fields):
    request = Request(request_id, prompt, SamplingParams(max_tokens=max_tokens), **fields)
    scheduler.add(request)
    return request


def run(scheduler, token=9):
    """One step in which every sample is `token`; what was planned."""
    step = scheduler.schedule()
    sampled = {request.request_id: token for c in step.chunks for request in c.sampling}
    scheduler.update(step, sampled)
    return [(c.request.request_id, c.start, c.num_tokens) for c in step.chunks]


def ids(requests):
    return [request.request_id for request in requests]


def test_a_stream_of_urgent_requests_starves_no_request():
    _, scheduler = make(40, 4, max_num_seqs=1, priority_span=5)
    patient = add(scheduler, 0, [1], max_tokens=2)
    for number in range(1, 40):
        add(scheduler, number, [number], max_tokens=2, priority=-1)
        run(scheduler)
        run(scheduler)
        if patient.is_finished:
            break
    assert number == 5


def test_an_urgent_request_takes_the_seat_of_the_last_in_order():
    _, scheduler = make(40, 4, max_num_seqs=2)
    first, last = (add(scheduler, number, [number], max_tokens=9) for number in range(2))
    run(scheduler)
    urgent = add(scheduler, 2, [2], max_tokens=9, priority=-1)
    assert run(scheduler) == [(0, 1, 1), (2, 0, 1)]
    assert [r.status for r in (first, last, urgent)] == [
        Status.RUNNING,
        Status.PREEMPTED,
        Status.RUNNING,
    ]
    assert ids(scheduler.running) == [2, 0]


def test_no_request_is_preempted_for_an_urgent_one_that_would_not_fit_even_then():
    _, scheduler = make(9, 4)
    urgent_before = add(scheduler, 0, [1] * 20, max_tokens=4, priority=-9)  # 5 blocks, then 6
    run(scheduler)
    small = add(scheduler, 1, [2], max_tokens=3)
    run(scheduler)
    # 4 blocks, where 2 are free and the small one has 1.
    large = add(scheduler, 2, [3] * 13, max_tokens=4, priority=-1)
    run(scheduler)
    assert [r.status for r in (urgent_before, small)] == [Status.RUNNING] * 2
    assert large.status is Status.WAITING


def test_a_start_leaves_the_watermark_free():
    kv, scheduler = make(11, 4, watermark=0.3)
    add(scheduler, 0, [1] * 7, max_tokens=2)  # 2 blocks of 10, and never more
    late = add(scheduler, 1, [2] * 23, max_tokens=2)  # 6 blocks: 2 would be left, not 3
    run(scheduler)
    assert (late.status, kv.num_free_blocks) == (Status.WAITING, 8)
    run(scheduler)
    assert run(scheduler) == [(1, 0, 23)]  # with no other request


def test_the_last_in_order_waits_for_a_block_with_all_it_has():
    kv, scheduler = make(4, 2, caching=False)
    first = add(scheduler, 0, [1, 2, 3], max_tokens=2)  # 2 blocks, and never more
    last = add(scheduler, 1, [5], max_tokens=5)  # 1 block, in the end 3
    run(scheduler)
    run(scheduler)
    assert first.is_finished
    assert last.num_preemptions == 0
    stranger = kv.open([7])
    kv.reserve(stranger, 2 * kv.num_free_blocks)
    assert run(scheduler) == []
    assert last.status is Status.RUNNING
    kv.close(stranger)
    assert run(scheduler) == [(1, 2, 1)]


def test_the_first_in_order_has_a_token_of_every_step():
    _, scheduler = make(40, 4, max_num_batched_tokens=2)
    for number in range(2):
        add(scheduler, number, [number], max_tokens=9)
    run(scheduler)
    add(scheduler, 2, [5, 6, 7], max_tokens=2, priority=-9)
    assert run(scheduler) == [(0, 1, 1), (2, 0, 1)]
    assert run(scheduler) == [(0, 2, 1), (2, 1, 1)]
    assert run(scheduler) == [(2, 2, 1), (0, 3, 1)]  # its last token is like a decode


def test_samples_share_the_blocks_of_their_prompt_and_copy_its_last():
    kv, scheduler = make(20, 4)
    leader = add(scheduler, 0, [1, 2, 3, 4, 5, 6])
    others = [add(scheduler, number, [1, 2, 3, 4, 5, 6], leader=leader) for number in (1, 2)]
    step = scheduler.schedule()
    (chunk,) = step.chunks
    assert chunk.followers == tuple(others)
    orders = scheduler.update(step, {0: 7, 1: 8, 2: 9})
    assert [(o.src, o.dst, o.num_tokens) for o in orders] == [(2, 3, 2), (2, 4, 2)]
    assert [r.sequence.block_table for r in (leader, *others)] == [(1, 2), (1, 3), (1, 4)]
    assert [list(r.tokens[6:]) for r in (leader, *others)] == [[7], [8], [9]]
    assert (scheduler.stats.num_forks, scheduler.stats.num_prompt_tokens) == (2, 6)
    assert run(scheduler) == [(0, 6, 1), (1, 6, 1), (2, 6, 1)]
    assert kv.stats().num_used_blocks == 4


def test_a_prompt_of_whole_blocks_forks_without_a_copy():
    _, scheduler = make(20, 4)
    leader = add(scheduler, 0, [1, 2, 3, 4])
    add(scheduler, 1, [1, 2, 3, 4], leader=leader)
    step = scheduler.schedule()
    assert scheduler.update(step, {0: 7, 1: 8}) == ()
    assert run(scheduler) == [(0, 4, 1), (1, 4, 1)]


def test_samples_wait_for_their_leader_and_those_behind_go_on():
    _, scheduler = make(40, 4, max_num_batched_tokens=5)
    leader = add(scheduler, 0, list(range(8)))
    add(scheduler, 1, list(range(8)), leader=leader)
    add(scheduler, 2, [30])
    assert run(scheduler) == [(0, 0, 5)]
    assert run(scheduler) == [(0, 5, 3), (2, 0, 1)]
    assert ids(scheduler.running) == [0, 1, 2]


def test_without_a_seat_a_sample_waits_its_turn_and_finds_the_prompt_in_the_cache():
    _, scheduler = make(40, 4, max_num_seqs=1)
    leader = add(scheduler, 0, [1, 2, 3, 4, 5], max_tokens=2)
    sample = add(scheduler, 1, [1, 2, 3, 4, 5], max_tokens=2, leader=leader)
    assert run(scheduler) == [(0, 0, 5)]
    assert (sample.status, sample.num_output_tokens) == (Status.WAITING, 0)
    run(scheduler)
    assert run(scheduler) == [(1, 4, 1)]


@pytest.mark.parametrize("between", [False, True])
def test_samples_of_a_leader_that_ends_early_go_their_own_way(between):
    _, scheduler = make(40, 4)
    leader = add(scheduler, 0, [1, 2, 3, 4, 5])
    sample = add(scheduler, 1, [1, 2, 3, 4, 5], leader=leader)
    if between:
        step = scheduler.schedule()
        scheduler.abort(leader)
        scheduler.update(step, {})
    else:
        scheduler.abort(leader)
    assert run(scheduler) == [(1, 0, 5)]
    assert sample.num_output_tokens == 1


def test_a_leader_has_the_same_prompt_and_has_still_to_compute_it():
    _, scheduler = make(40, 4)
    leader = add(scheduler, 0, [1, 2])
    stranger = Request(5, [1, 2], SamplingParams())
    for wrong in (
        Request(1, [1, 3], SamplingParams(), leader=leader),
        Request(1, [1, 2], SamplingParams(), leader=leader, priority=1),
        Request(1, [1, 2], SamplingParams(), leader=stranger),
    ):
        with pytest.raises(InvalidArgumentError, match="leader: wanted an unfinished request of"):
            scheduler.add(wrong)
    run(scheduler)
    with pytest.raises(InvalidArgumentError, match="that has no token yet"):
        scheduler.add(Request(1, [1, 2], SamplingParams(), leader=leader))


def swapping(num_host_blocks=8):
    """Two requests in 6 blocks of 2: the older wants a fourth when both have three."""
    kv, scheduler = make(7, 2, num_host_blocks=num_host_blocks)
    old, new = add(scheduler, 0, [1, 2], max_tokens=8), add(scheduler, 1, [5, 6], max_tokens=7)
    while scheduler.stats.num_preemptions == 0:
        last = scheduler.schedule()
        if scheduler.stats.num_preemptions:
            return kv, scheduler, old, new, last
        scheduler.update(last, {0: 9, 1: 9})
    raise AssertionError("no request was preempted")


def test_blocks_are_leased_while_they_are_stored_and_free_afterwards():
    kv, scheduler, old, new, step = swapping()
    (store,) = step.stores
    assert (store.block_ids, store.ranges, store.request) == ((2, 4, 6), ((0, 3),), new)
    assert (new.host_copy.num_tokens, new.host_copy.num_blocks) == (6, 3)
    assert step.chunks == ()  # the older one waits for a step: its block is on its way out
    assert (kv.leases.counts(), kv.num_free_blocks) == ({"store": 1}, 0)
    scheduler.update(step, {})
    assert (kv.leases.counts(), kv.num_free_blocks) == ({}, 3)
    assert run(scheduler) == [(0, 6, 1)]
    assert old.num_preemptions == 0


def test_no_request_is_preempted_for_blocks_that_come_free_anyhow():
    """Three have three blocks of nine, and each wants a fourth: one is stored, and two go on."""
    _, scheduler = make(10, 2, num_host_blocks=8)
    requests = [add(scheduler, n, [10 + n, 20 + n], max_tokens=8) for n in range(3)]
    while scheduler.stats.num_preemptions == 0:
        run(scheduler)
    assert [r.num_preemptions for r in requests] == [0, 0, 1]
    assert run(scheduler) == [(0, 6, 1), (1, 6, 1)]


def test_what_was_stored_is_loaded_and_computed_no_more():
    kv, scheduler, old, new, step = swapping()
    scheduler.update(step, {})
    while not old.is_finished:
        run(scheduler)
    step = scheduler.schedule()
    (load,) = step.loads
    # The first block is found in the cache still; the other two come from the host.
    assert (step.chunks, load.ranges, len(load.block_ids)) == ((), ((1, 3),), 2)
    assert (new.load, new.sequence.num_computed_tokens) == (load.lease, 2)
    assert kv.leases.counts() == {"load": 1}
    scheduler.update(step, {})
    assert (new.sequence.num_computed_tokens, new.host_copy, new.load) == (6, None, None)
    assert load.block_ids == new.sequence.block_table[1:]
    assert run(scheduler) == [(1, 6, 1)]
    assert (scheduler.stats.num_swaps, scheduler.stats.num_loads) == (1, 1)


def test_where_host_memory_is_too_small_the_blocks_are_given_up():
    _, scheduler, _, new, step = swapping(num_host_blocks=2)
    assert (step.stores, new.host_copy, scheduler.stats.num_swaps) == ((), None, 0)
    assert [c.request.request_id for c in step.chunks] == [0]


def test_a_prefix_that_others_have_is_not_stored():
    kv, scheduler = make(9, 2, num_host_blocks=8)
    shared = [1, 2, 3, 4]
    old = add(scheduler, 0, [*shared, 5], max_tokens=8)
    run(scheduler)
    new = add(scheduler, 1, [*shared, 6], max_tokens=8)
    while scheduler.stats.num_swaps == 0:
        step = scheduler.schedule()
        scheduler.update(step, {c.request.request_id: 9 for c in step.chunks if c.samples})
    assert new.host_copy.places[0][0] == 2
    assert set(step.stores[0].block_ids).isdisjoint(old.sequence.block_table)
    assert kv.num_free_blocks > 0


def test_of_a_window_what_is_in_sight_is_stored_and_comes_back():
    groups = [kvcore.FullAttention(), kvcore.SlidingWindow(3)]
    kv, scheduler = make(12, 2, groups=groups, num_host_blocks=8)
    old, new = add(scheduler, 0, [1, 2], max_tokens=12), add(scheduler, 1, [5, 6], max_tokens=9)
    while scheduler.stats.num_preemptions == 0:
        step = scheduler.schedule()
        scheduler.update(step, {c.request.request_id: 9 for c in step.chunks if c.samples})
    (full, window) = new.host_copy.places
    first_seen = new.host_copy.num_tokens - 3 + 1
    assert (full[0], window[0]) == (0, first_seen // 2)
    assert full[1] == window[1] == -(-new.host_copy.num_tokens // 2)
    assert len(step.stores[0].block_ids) == new.host_copy.num_blocks == 2 * full[1] - window[0]
    while not old.is_finished:
        run(scheduler)
    kv.reset()  # else all of it would be found again
    step = scheduler.schedule()
    (load,) = step.loads
    assert load.ranges == ((0, full[1]), (full[1], full[1] + window[1] - window[0]))
    scheduler.update(step, {})
    assert new.num_computed_tokens == load.copy.num_tokens
    tables = new.sequence.tables
    assert [table.num_null for table in tables] == [0, window[0]]
    assert list(load.block_ids) == [n for t in tables for n in t.block_ids[t.num_null :]]
    while not new.is_finished:
        run(scheduler)
    end = len(new.tokens) - 1
    assert kv.open([*new.tokens]).num_cached_tokens == end - end % 2  # others share it again


def test_a_prompt_longer_than_its_window_needs_only_a_window_of_blocks():
    kv, scheduler = make(5, 2, groups=[kvcore.SlidingWindow(3)], max_num_batched_tokens=4)
    request = add(scheduler, 0, list(range(20)), max_tokens=3)
    steps = []
    while not request.is_finished:
        steps += run(scheduler)
    assert [num_tokens for _, _, num_tokens in steps[:3]] == [4, 4, 4]
    assert kv.stats().peak_used_blocks <= 4


def test_blocks_that_a_running_request_holds_anyhow_are_not_wanted_again():
    kv, scheduler = make(8, 2)
    shared = [1, 2, 3, 4, 5, 6]
    add(scheduler, 0, [*shared, 7], max_tokens=2)  # 4 blocks, and never more
    run(scheduler)
    add(scheduler, 1, [*shared, 8], max_tokens=2)  # 4 as well, of which 3 are there
    assert kv.num_free_blocks == 3
    assert run(scheduler) == [(0, 7, 1), (1, 6, 1)]


def test_a_start_leaves_a_block_for_each_sample_that_is_to_fork():
    _, scheduler = make(8, 4, max_num_batched_tokens=11)
    leader = add(scheduler, 0, list(range(9)), max_tokens=2)  # 3 blocks of 7, and never more
    add(scheduler, 1, list(range(9)), max_tokens=2, leader=leader)  # one: its copy of the third
    late = add(scheduler, 2, [50] * 16, max_tokens=1)  # the 4 that are left
    assert run(scheduler) == [(0, 0, 9)]
    assert late.status is Status.WAITING
    assert ids(scheduler.running) == [0, 1]


def test_no_request_is_preempted_whose_blocks_are_all_shared():
    kv, scheduler = make(9, 2)
    shared = [1, 2, 3, 4, 5, 6]
    first = add(scheduler, 0, [*shared, 7], max_tokens=9, priority=-9)
    run(scheduler)
    last = add(scheduler, 1, [*shared, 8], max_tokens=2)  # one block of its own
    run(scheduler)
    free = kv.num_free_blocks
    # As many as are free and all of the last one's come to, but three of those are the first's.
    urgent = add(scheduler, 2, [30] * 2 * (free + 2), max_tokens=1, priority=-5)
    run(scheduler)
    assert (first.status, urgent.status) == (Status.RUNNING, Status.WAITING)
    assert last.num_preemptions == 0


def test_a_copy_whose_beginning_is_gone_is_dropped_and_all_is_computed_again():
    kv, scheduler = make(9, 2, num_host_blocks=8)
    shared = [1, 2, 3, 4]
    old = add(scheduler, 0, [*shared, 5], max_tokens=8)
    run(scheduler)
    new = add(scheduler, 1, [*shared, 6], max_tokens=8)
    while scheduler.stats.num_swaps == 0:
        run(scheduler)
    assert new.host_copy.places[0][0] == 2
    scheduler.abort(old)
    kv.reset()  # the shared beginning with it
    assert run(scheduler) == [(1, 0, len(new.tokens) - 1)]
    assert (new.host_copy, scheduler._admission.num_host_blocks_left) == (None, 8)
    assert scheduler.stats.num_loads == 0


def test_without_a_prefix_cache_all_is_stored_shared_or_not():
    _, scheduler = make(8, 2, caching=False, num_host_blocks=8)
    leader = add(scheduler, 0, [1, 2, 3, 4], max_tokens=9)
    sample = add(scheduler, 1, [1, 2, 3, 4], max_tokens=9, leader=leader)
    while scheduler.stats.num_swaps == 0:
        run(scheduler)
    assert (sample.host_copy.places[0][0], scheduler.stats.num_forks) == (0, 1)


def test_a_copy_that_the_cache_has_outgrown_is_dropped():
    _, scheduler = make(40, 2, max_num_batched_tokens=4, max_num_seqs=1, num_host_blocks=8)
    slow = add(scheduler, 0, list(range(8)), max_tokens=2)
    assert run(scheduler) == [(0, 0, 4)]
    urgent = add(scheduler, 1, list(range(8)), max_tokens=1, priority=-1)
    while not urgent.is_finished:
        run(scheduler)
    assert slow.host_copy.num_tokens == 4
    assert run(scheduler) == [(0, 6, 2)]
    assert (scheduler._admission.num_host_blocks_left, scheduler.stats.num_loads) == (8, 0)


def test_the_first_in_order_gets_its_room_whatever_those_behind_it_share():
    _, scheduler = make(8, 2)
    leader = add(scheduler, 0, [1, 2, 3, 4], max_tokens=2)
    add(scheduler, 1, [1, 2, 3, 4], max_tokens=2, leader=leader)
    run(scheduler)  # both have the same two blocks, and neither has one of its own
    add(scheduler, 2, list(range(30, 44)), max_tokens=1, priority=-9)  # all 7 blocks
    assert run(scheduler) == [(2, 0, 14)]
    assert scheduler.stats.num_preemptions == 2


def test_an_urgent_request_does_not_wait_for_a_prefix_that_one_behind_it_computes():
    _, scheduler = make(40, 4, max_num_batched_tokens=5)
    add(scheduler, 0, list(range(20)))
    assert run(scheduler) == [(0, 0, 5)]
    add(scheduler, 1, list(range(20)), priority=-1)
    assert run(scheduler) == [(1, 4, 5)]


def test_an_urgent_request_waits_for_the_one_that_is_stored_for_it_and_asks_no_other():
    _, scheduler = make(10, 2, num_host_blocks=8, max_num_seqs=3)
    others = [add(scheduler, n, [10 + n, 20 + n, 30 + n, 40 + n, 1], max_tokens=2) for n in (0, 1)]
    run(scheduler)  # three blocks each, and never more: three are free
    urgent = add(scheduler, 2, list(range(50, 59)), max_tokens=1, priority=-1)  # five
    run(scheduler)
    assert [r.num_preemptions for r in others] == [0, 1]
    assert urgent.status is Status.WAITING
    assert (2, 0, 9) in run(scheduler)


def test_a_text_may_grow_to_the_edge_of_its_keys_and_values_and_no_further():
    """The last token is never computed, so it may stand behind the edge."""
    _, scheduler = make(40, 4, long_above=8, may_cross=False)
    add(scheduler, 0, [1] * 5, max_tokens=4)
    add(scheduler, 1, [1] * 9, max_tokens=4)  # is beyond from its first token on
    with pytest.raises(RequestTooLongError, match=r"max_tokens=4$"):
        add(scheduler, 2, [1] * 5, max_tokens=5)
    _, scheduler = make(40, 4, long_above=8, may_cross=True)
    add(scheduler, 2, [1] * 5, max_tokens=5)
