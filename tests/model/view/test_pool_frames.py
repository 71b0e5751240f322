"""Frames, read back, are the pool and its requests at every look; folded they say the same."""

import itertools
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvcore
from model.control.config import SchedulerConfig
from model.control.params import SamplingParams
from model.control.pool_frames import FrameLog, PoolFrames, fold
from model.control.request import Request
from model.control.scheduler import Scheduler
from tests.model.control.simulation import SimulatedModel
from tests.model.view.replay import Replay

GROUPS = ([kvcore.FullAttention()], [kvcore.FullAttention(), kvcore.SlidingWindow(3)])


class Run:
    """A scheduler with a simulated model, driven by draws; `look` is called in every step."""

    def __init__(self, seed, look=None, num_blocks=14):
        self.draw = random.Random(seed)
        self.kv = kvcore.KVCacheManager(num_blocks, 2, groups=self.draw.choice(GROUPS))
        limits = SchedulerConfig(max_num_batched_tokens=8, max_num_seqs=3)
        self.scheduler = Scheduler(self.kv, limits)
        self.model = SimulatedModel(self.kv)
        self.ended = []
        self.frames = PoolFrames(
            self.kv,
            self.scheduler,
            label=lambda request: f"#{request.request_id}",
            ended=self.ended.append,
        )
        self.look = look or (lambda: None)
        self.requests = []

    def add(self):
        tokens = [0] * self.draw.randrange(9) + [self.draw.randrange(2)] * self.draw.randrange(1, 5)
        params = SamplingParams(max_tokens=self.draw.randrange(1, 5))
        leader = None
        for sample in range(self.draw.choice([1, 1, 2])):
            request = Request(len(self.requests), tokens, params, leader=leader, sample=sample)
            leader = leader or request
            self.scheduler.add(request)
            self.requests.append(request)

    def step(self):
        if self.draw.random() < 0.4 or not self.scheduler.has_unfinished:
            self.add()
        if self.draw.random() < 0.1:
            self.scheduler.abort(self.draw.choice(self.requests))
        if self.draw.random() < 0.05:
            self.kv.reset()
        step = self.scheduler.schedule()
        self.look()
        self.model.copy(self.scheduler.update(step, self.model.compute(step)))
        self.look()


def seen(kv, scheduler):
    """Tables of the running requests, and the free blocks with content, as they really are."""
    tables = {
        (request.request_id, group): list(ids)
        for request in scheduler.running
        for group, ids in enumerate(request.running_sequence.block_tables)
        if ids
    }
    cached = {b.block_id for b in kv.pool.blocks if b.node is not None and not b.ref_count}
    return tables, cached


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_at_every_look_the_frames_say_what_is(seed):
    documents = []

    def look():
        documents.append(json.loads(json.dumps(run.frames.look(len(documents)).document())))
        replay.apply(documents[-1])
        tables, cached = seen(run.kv, run.scheduler)
        assert replay.held() == tables
        assert {block_id for block_id, state in replay.cached.items() if state} == cached
        for request in (*run.scheduler.running, *run.scheduler.waiting):
            number = request.request_id
            assert replay.statuses[number] == request.status.value
            assert replay.begun[number] == [request.num_prompt_tokens, request.sample]
            assert (number in replay.labels) >= (request.sequence is not None)
            assert replay.progress[number] == [request.num_computed_tokens, request.num_tokens]
        for request in run.ended:
            assert replay.statuses[request.request_id] == request.finish_reason.value
        whole = Replay(run.frames.head())
        whole.apply(run.frames.whole().document())
        assert whole.state() == replay.state()

    run = Run(seed, look)
    replay = Replay(run.frames.head())
    for _ in range(25):
        run.step()
    outputs = sum(r.num_output_tokens for r in run.requests)
    assert replay.counts["output"] == outputs
    used = run.kv.num_usable_blocks - run.kv.num_free_blocks
    assert replay.counts["used"] == used


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), cut=st.integers(1, 49), closely=st.booleans())
def test_folded_frames_say_what_they_said_one_by_one(seed, cut, closely):
    frames = []
    run = Run(seed, lambda: frames.append(run.frames.look(len(frames), looks_closely=closely)))
    for _ in range(25):
        run.step()
    single, folded, both = [Replay(run.frames.head()) for _ in range(3)]
    for frame in frames:
        single.apply(frame.document())
    log = FrameLog(max_size=300)
    for frame in frames:
        log.add(frame)
    for frame in log.frames:
        folded.apply(frame.document())
    left, right = frames[0], frames[cut]
    for frame in frames[1:cut]:
        left = fold(left, frame)
    for frame in frames[cut + 1 :]:
        right = fold(right, frame)
    both.apply(left.document())
    both.apply(right.document())
    assert folded.state() == single.state() == both.state()
    times = [frame.time_s for frame in log.frames]
    assert times == sorted(set(times))
    assert times[-1] == frames[-1].time_s


def test_a_log_of_any_length_stays_bounded_and_spread_over_the_run():
    log = FrameLog(max_size=2000)
    run = Run(5, lambda: log.add(run.frames.look(run.scheduler.stats.num_steps)))
    for _ in range(600):
        run.step()
        assert sum(frame.size + 1 for frame in log.frames) <= 2000
    times = [frame.time_s for frame in log.frames]
    assert len(times) > 15
    assert max(b - a for a, b in itertools.pairwise(times)) < 600 / 8


def test_hits_are_counted_by_content_and_begin_anew_with_it():
    kv = kvcore.KVCacheManager(8, 2)
    scheduler = Scheduler(kv, SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=4))
    model, frames = SimulatedModel(kv), PoolFrames(kv, scheduler)
    replay = Replay(frames.head())

    def run(number, tokens):
        scheduler.add(Request(number, tokens, SamplingParams(max_tokens=1)))
        step = scheduler.schedule()
        replay.apply(frames.look(number).document())
        scheduler.update(step, model.compute(step))

    for number in range(3):
        run(number, [1, 1, 2, 2, number])
    assert replay.state()[5] == {1: 2, 2: 2}
    run(3, [3] * 14)
    run(4, [1, 1, 2, 2, 9])
    assert replay.state()[5] == {}
    run(5, [1, 1, 2, 2, 9])
    assert sum(replay.state()[5].values()) == 2


@pytest.mark.parametrize("field", ["tables", "cached", "progress", "status", "hits"])
def test_a_frame_that_leaves_something_out_is_noticed(field):
    """The checks above can fail: without a part of the frames they do."""
    run = Run(3)
    replay, broken = Replay(run.frames.head()), Replay(run.frames.head())
    run.look = lambda: documents.append(run.frames.look(len(documents)).document())
    documents = []
    for _ in range(25):
        run.step()
    differed = False
    for document in documents:
        replay.apply(document)
        kept = {name: part for name, part in document.items() if name != field}
        try:
            broken.apply(kept)
            differed |= broken.state() != replay.state()
        except (AssertionError, KeyError):
            differed = True
    assert differed
