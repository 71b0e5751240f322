"""The trace of an engine's steps: parsed again, and checked against what the engine did."""

import functools
import io
import itertools
import json
from types import SimpleNamespace

import pytest
import torch

import kvcore
from model import EngineConfig, SamplingParams
from model.cli.step_table import Durations, step_table, summarize_steps
from model.control.step import PHASES
from model.engine import Engine
from model.forward import ranges
from model.forward.ranges import DeviceRanges
from model.trace import TRACE_BEGINS, StepRecorder, write_trace
from tests.model.networks import build
from tests.model.reference import ReferenceBackend
from tests.model.view.replay import Replay

PROMPTS = ["first", "second prompt", "second prompt, again", "a fourth one"]


CLOCK_NS = 1_000_000  # two clocks, on a machine that may be busy; a phase takes as long


@functools.cache
def network():
    return build("qwen3", 25)


def recorded(**sizes):
    """An engine that has run the prompts in a pool so small that some are preempted."""
    sizes = {"num_blocks": 16, "block_size": 4, "max_num_batched_tokens": 12, **sizes}
    engine = Engine(network(), ReferenceBackend(), EngineConfig(**sizes))
    recorder = engine.record()
    engine.generate(PROMPTS, SamplingParams(max_tokens=14))
    return engine, recorder


def parsed(recorder):
    out = io.StringIO()
    write_trace(out, recorder)
    return json.loads(out.getvalue())["traceEvents"]


def faults(events):
    """What is wrong with a trace: times that go back, spans that overlap, phases that lack."""
    found, timed = [], [event for event in events if event["ph"] != "M"]
    times = [event["ts"] for event in timed]
    if times != sorted(times) or times[0] != 0:
        found.append("times do not grow from 0")
    spans = [event for event in timed if event["ph"] == "X"]
    open_spans = []
    for span in spans:
        end = span["ts"] + span["dur"]
        while open_spans and span["ts"] >= open_spans[-1][1] - 1e-6:
            open_spans.pop()
        if open_spans and end > open_spans[-1][1] + 1e-6:
            found.append(f"{span['name']} ends after the {open_spans[-1][0]} around it")
        if bool(open_spans) != (span["name"] in PHASES):
            found.append(f"{span['name']} stands at the wrong depth")
        open_spans.append((span["name"], end))
    steps = [span for span in spans if span["name"] == "step"]
    for number, step in enumerate(steps):
        inside = [s for s in spans if s["name"] in PHASES and _within(s, step)]
        if [s["name"] for s in inside] != list(PHASES):
            found.append(f"step {number} has the phases {[s['name'] for s in inside]}")
        elif sum(s["dur"] for s in inside) != pytest.approx(step["dur"]):
            found.append(f"step {number} has gaps")
        if step["args"]["step"] != number:
            found.append(f"step {number} is called {step['args']['step']}")
    return found


def _within(span, step):
    end = span["ts"] + span["dur"]
    return step["ts"] - 1e-6 <= span["ts"] and end <= step["ts"] + step["dur"] + 1e-6


def test_every_step_is_there_with_all_its_phases_nested_and_in_order():
    engine, recorder = recorded()
    events = parsed(recorder)
    assert faults(events) == []
    steps = [event for event in events if event["name"] == "step"]
    assert len(steps) == engine.stats.num_steps > 20


def test_the_device_works_on_a_phase_between_its_begin_and_its_end():
    """On a CPU, where a call returns when its work is done; ours and the profiler's clock agree."""
    engine = Engine(network(), ReferenceBackend(), EngineConfig(num_blocks=40, block_size=4))
    recorder = engine.record()
    recorder.record_pool(network().codec.decode)
    recorder.record_device(DeviceRanges(torch.device("cpu")))
    engine.generate([[1, 2, 3], [4] * 9], SamplingParams(max_tokens=6))
    spans = recorder.device_spans()
    phases = [
        phase
        for step in recorder.steps
        for phase in step.phases()
        if phase[0] in {"forward", "sample"}
    ]
    assert [span[0] for span in spans] == [phase[0] for phase in phases]
    for (_, begin, end), (_, first, last) in zip(spans, phases, strict=True):
        assert first - CLOCK_NS < begin <= end < last + CLOCK_NS
    events = [event for event in parsed(recorder) if event.get("tid") == 1]
    assert [event["name"] for event in events] == ["thread_name", *[span[0] for span in spans]]
    assert len(spans) > 10


def test_only_so_many_ranges_of_a_device_are_recorded(monkeypatch):
    monkeypatch.setattr(ranges, "_MAX_RANGES", 2)
    clock = DeviceRanges(torch.device("cpu"))
    for _ in range(5):
        with clock.open():
            torch.zeros(3) + 1
    assert list(clock.spans()) == [0, 1]
    assert DeviceRanges(torch.device("cpu")).spans() == {}


@pytest.mark.parametrize("wrong", ["lost", "long", "early", "renamed", "unsorted"])
def test_the_checker_of_traces_sees_what_is_wrong(wrong):
    _, recorder = recorded()
    events = parsed(recorder)
    place = next(i for i, e in enumerate(events) if e["name"] == "forward" and e["ts"] > 0)
    if wrong == "lost":
        del events[place]
    elif wrong == "long":
        events[place]["dur"] += 1e6
    elif wrong == "early":
        events[place]["dur"] /= 2
    elif wrong == "renamed":
        events[place]["name"] = "backward"
    else:
        events[place], events[-1] = events[-1], events[place]
    assert faults(events) != []


def test_the_counters_say_what_the_pool_and_the_requests_did():
    engine, recorder = recorded()
    counters = {}
    for event in parsed(recorder):
        if event["ph"] == "C":
            counters.setdefault(event["name"], []).append(event["args"])
    usable = engine.kv.num_usable_blocks
    blocks, tokens, requests = counters["blocks"], counters["tokens"], counters["requests"]
    assert len(blocks) == len(tokens) == len(requests) == engine.stats.num_steps
    assert all(args["used"] + args["free"] == usable for args in blocks)
    assert max(args["used"] for args in blocks) == engine.kv.stats().peak_used_blocks
    assert all(0 < args["decode"] + args["prefill"] <= 12 for args in tokens)
    assert requests[-1] == {"running": 0, "waiting": 0}
    assert max(args["running"] for args in requests) <= engine.stats.peak_running
    assert max(args["waiting"] for args in requests) > 0


def test_every_computed_token_is_counted_once():
    engine, recorder = recorded(num_blocks=90)
    prompts = sum(map(len, PROMPTS)) - engine.stats.num_hit_tokens
    assert engine.stats.num_hit_tokens == 12
    # Of 14 tokens the last is never computed.
    stats = summarize_steps(recorder)
    assert stats.num_prefill_tokens + stats.num_decode_tokens == prompts + 4 * 13
    assert stats.num_decode_tokens >= 4 * 13


def test_the_table_is_of_the_recording_alone():
    engine, first = recorded()
    known = summarize_steps(first)
    assert known.num_steps == engine.stats.num_steps
    assert known.num_preemptions == engine.stats.num_preemptions > 0
    assert known.num_resumed_tokens > 0
    second = engine.record()
    assert summarize_steps(second).num_steps == summarize_steps(second).num_preemptions == 0
    engine.generate(PROMPTS[:1], SamplingParams(max_tokens=3))
    stats = summarize_steps(second)
    assert (stats.num_steps, stats.num_preemptions) == (3, 0)
    assert stats.num_queried_tokens == len(PROMPTS[0])
    assert len(first.steps) == known.num_steps
    assert sum(times.total_s for times in stats.phases.values()) == pytest.approx(
        stats.step.total_s
    )
    assert [line.split()[0] for line in step_table(stats).splitlines()[1:7]] == [*PHASES, "step"]


def test_a_trace_of_the_pool_says_what_the_events_say_and_which_tokens_there_were():
    sizes = EngineConfig(num_blocks=16, block_size=4, swap_memory_bytes=0)
    engine = Engine(network(), ReferenceBackend(), sizes)
    recorder = engine.record()
    recorder.record_pool(network().codec.decode)
    completions = engine.generate(PROMPTS, SamplingParams(max_tokens=14))
    out = io.StringIO()
    write_trace(out, recorder)
    document = json.loads(out.getvalue())
    assert faults(document["traceEvents"]) == []
    pool, replay = document["kvcore"], Replay(document["kvcore"])
    assert pool["num_blocks"] == 16
    assert pool["groups"] == [{"kind": "FullAttention", "block_size": 4}]
    used = [e["args"]["used"] for e in document["traceEvents"] if e["name"] == "blocks"]
    for frame, count in zip(pool["frames"], used, strict=False):
        replay.apply(frame)
        assert len({block for table in replay.held().values() for block in table}) == count
        assert replay.counts["used"] == count
    replay.apply(pool["frames"][-1])
    assert replay.held() == {}
    assert set(replay.statuses.values()) == {"length"}
    held = {b for b, state in enumerate(kvcore.pool_map(engine.kv)) if state == kvcore.CACHED}
    assert {block for block, state in replay.cached.items() if state} == held
    texts = {int(number): tokens for number, tokens in pool["texts"].items()}
    assert texts == {c.request.request_id: c.request.tokens.tolist() for c in completions}
    assert set(pool["words"]) == {str(token) for tokens in texts.values() for token in tokens}
    assert len(used) == len(pool["frames"]) - 1 == engine.stats.num_steps


def test_looking_at_the_pool_is_not_on_the_clock(monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr("model.trace.time", SimpleNamespace(perf_counter_ns=lambda: next(clock)))
    engine = Engine(network(), ReferenceBackend(), EngineConfig(num_blocks=90, block_size=4))
    recorder = engine.record()
    recorder.record_pool(network().codec.decode)
    look = recorder._pool._frames.look

    def slow(*args, **settings):
        for _ in range(1000):
            next(clock)
        return look(*args, **settings)

    recorder._pool._frames.look = slow
    engine.generate(PROMPTS[:1], SamplingParams(max_tokens=3))
    assert len(recorder.steps) == 3
    assert all(step.elapsed_ns < 100 for step in recorder.steps)
    times = [frame["t"] for frame in recorder.pool_document()["frames"]]
    assert len(times) == 4
    assert times[-1] < 1000e-9


def test_a_step_that_raised_is_not_recorded(monkeypatch):
    engine = Engine(network(), ReferenceBackend(), EngineConfig(num_blocks=30, block_size=4))
    recorder = engine.record()
    logits = engine.network.logits
    monkeypatch.setattr(engine.network, "logits", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.generate(PROMPTS[:1], SamplingParams(max_tokens=2))
    monkeypatch.setattr(engine.network, "logits", logits)
    engine.generate(PROMPTS[:1], SamplingParams(max_tokens=2))
    assert len(recorder.steps) == 2
    assert faults(parsed(recorder)) == []


def test_nothing_recorded_is_a_trace_and_a_table_too():
    engine = Engine(network(), ReferenceBackend(), EngineConfig(num_blocks=30, block_size=4))
    recorder = engine.record()
    assert [event["ph"] for event in parsed(recorder)] == ["M", "M"]
    assert "steps         0 in 0.00 s" in step_table(summarize_steps(recorder))


def test_durations_are_those_counted_by_hand():
    times = Durations.of([1000 * number for number in range(100, 0, -1)])
    assert times == Durations(total_s=0.00505, mean_us=50.5, median_us=51.0, p99_us=100.0)


def test_a_trace_begins_as_the_flag_knows_its_files():
    out = io.StringIO()
    write_trace(out, recorded()[1])
    assert out.getvalue().startswith(TRACE_BEGINS)


def test_the_clock_of_a_recorder_only_grows():
    _, recorder = recorded()
    assert isinstance(recorder, StepRecorder)
    ends = [moment for step in recorder.steps for moment in (step.begin_ns, step.end_ns)]
    assert ends == sorted(ends)
