"""Tokens that are read one step late, by hand."""

import pytest

from model import FinishReason, Request, SamplingParams, SchedulerStateError, Status
from tests.model.control.test_scheduler_order import add, ids, make


def go(scheduler, tokens=None):
    """Plan a step, accept the tokens of the one before, send it; what was planned."""
    step = scheduler.schedule()
    if tokens is not None:
        scheduler.accept(tokens)
    scheduler.advance(step)
    return [(c.request.request_id, c.start, c.num_tokens) for c in step.chunks]


def test_a_step_is_planned_before_the_tokens_of_the_last_one_are_read():
    kv, scheduler = make(20, 2)
    request = add(scheduler, 0, [1, 2, 3], max_tokens=3)
    assert go(scheduler) == [(0, 0, 3)]
    assert request.output_tokens == []
    assert go(scheduler, {0: 7}) == [(0, 3, 1)]
    assert request.output_tokens == [7]
    assert go(scheduler, {0: 8}) == [(0, 4, 1)]
    # Three tokens are drawn; the last one is never computed, and still to be read.
    assert request.is_complete
    assert not request.is_finished
    assert go(scheduler, {0: 9}) == []
    assert request.output_tokens == [7, 8, 9]
    assert request.finish_reason is FinishReason.LENGTH
    assert kv.num_free_blocks == kv.num_usable_blocks
    assert kv.open([1, 2, 3, 7, 8, 9, 1]).num_cached_tokens == 4


def test_what_a_request_was_planned_to_do_after_its_stop_token_is_dropped():
    kv, scheduler = make(20, 2)
    request = Request(0, [1, 2, 3], SamplingParams(max_tokens=9, stop_token_ids=(7,)))
    scheduler.add(request)
    go(scheduler)
    assert go(scheduler, {0: 7}) == [(0, 3, 1)]
    assert (request.output_tokens, request.finish_reason) == ([7], FinishReason.STOP)
    assert kv.num_free_blocks == kv.num_usable_blocks
    # The second token that it drew is dropped.
    assert go(scheduler, {0: 8}) == []
    assert request.output_tokens == [7]


def test_an_abort_between_the_drawing_and_the_reading_leaves_what_was_read():
    _, scheduler = make(20, 2)
    request, other = add(scheduler, 0, [1, 2, 3]), add(scheduler, 1, [4])
    go(scheduler)
    go(scheduler, {0: 7, 1: 7})
    assert scheduler.abort(request)
    assert request.output_tokens == [7]
    assert go(scheduler, {1: 8}) == [(1, 2, 1)]
    assert other.output_tokens == [7, 8]


def test_a_request_without_its_last_token_does_not_start():
    _, scheduler = make(20, 2)
    request = add(scheduler, 0, [1, 2, 3])
    go(scheduler)
    scheduler._preempt(request)
    assert go(scheduler, {0: 7}) == []
    assert (request.status, request.output_tokens) == (Status.PREEMPTED, [7])
    assert go(scheduler) == [(0, 2, 2)]


def test_a_seat_is_free_when_the_last_token_is_read():
    _, scheduler = make(20, 2, max_num_seqs=1)
    add(scheduler, 0, [1], max_tokens=1)
    add(scheduler, 1, [2], max_tokens=1)
    assert go(scheduler) == [(0, 0, 1)]
    assert go(scheduler, {0: 7}) == []
    assert go(scheduler, {}) == [(1, 0, 1)]
    assert ids(scheduler.running) == [1]


def test_tokens_are_accepted_before_the_next_step_is_sent():
    _, scheduler = make(20, 2)
    request = add(scheduler, 0, [1, 2, 3])
    go(scheduler)
    step = scheduler.schedule()
    for late in (lambda: scheduler.advance(step), lambda: scheduler.update(step, {0: 8})):
        with pytest.raises(SchedulerStateError, match="previous step have not been accepted"):
            late()
    with pytest.raises(SchedulerStateError, match="no token for Request"):
        scheduler.accept({})
    assert request.output_tokens == []
    scheduler.accept({0: 7})
    scheduler.advance(step)
    assert (request.output_tokens, request.num_output_tokens) == ([7], 2)
