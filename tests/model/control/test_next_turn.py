"""The next turn of a conversation finds the last full block of the answer, and the state after it.

Of every length of a prompt and of an answer, however late tokens are read.
"""

import math

import pytest

import kvcore
from model import Request, SamplingParams, Scheduler, SchedulerConfig
from tests.kvcore.sabotage.registry import _with_edit

GROUPS = {
    "full": [kvcore.FullAttention()],
    "full and window": [kvcore.FullAttention(), kvcore.SlidingWindow(3)],
    "wide blocks": [kvcore.FullAttention(6), kvcore.SlidingWindow(5)],
    "state": [kvcore.FullAttention(), kvcore.RecurrentState(1)],
    "window and state": [kvcore.FullAttention(), kvcore.SlidingWindow(4), kvcore.RecurrentState(2)],
}


def answered(kv, prompt, max_tokens, reads):
    """Serve a request alone; return its tokens. The model says 0, 1, 2, 0, 1, 2, ..."""
    scheduler = Scheduler(kv, SchedulerConfig(max_num_batched_tokens=7, max_num_seqs=2))
    request = Request(0, prompt, SamplingParams(max_tokens=max_tokens))
    scheduler.add(request)
    unread, number = None, 0
    while scheduler.has_unfinished:
        step = scheduler.schedule()
        sampled = {}
        for chunk in step.chunks:
            if chunk.samples:
                sampled[chunk.request.request_id] = number % 3
                number += 1
        if reads == "at once":
            scheduler.update(step, sampled)
            continue
        if unread is not None:
            scheduler.accept(unread, advances=reads == "with the next step")
        scheduler.advance(step)
        unread = sampled
    return [*request.tokens]


def check_the_next_turn(groups, reads):
    for length in (*range(1, 8), 11):
        for max_tokens in range(1, 10):
            kv = kvcore.KVCacheManager(60, 3, groups=GROUPS[groups])
            tokens = answered(kv, [5] * length, max_tokens, reads)
            assert len(tokens) == length + max_tokens
            whole = math.lcm(*[group.block_size for group in kv.groups])
            found = kv.plan([*tokens, 7, 8]).num_cached_tokens
            assert found == (len(tokens) - 1) // whole * whole, (length, max_tokens)


@pytest.mark.parametrize("reads", ["at once", "late", "with the next step"])
@pytest.mark.parametrize("groups", GROUPS)
def test_the_next_turn_finds_all_that_the_last_one_has_computed(groups, reads):
    check_the_next_turn(groups, reads)


@pytest.mark.parametrize("groups", GROUPS)
def test_an_answer_whose_last_step_is_not_committed_is_seen(groups, monkeypatch):
    is_last = "chunk.start + chunk.num_tokens + 1 == chunk.request.max_total_tokens"
    computed = "chunk.num_tokens - len(chunk.drafts)"
    broken = _with_edit("late", Scheduler._commit, computed, f"0 if {is_last} else {computed}")
    monkeypatch.setattr(Scheduler, "_commit", broken)
    with pytest.raises(AssertionError):
        check_the_next_turn(groups, "at once")
