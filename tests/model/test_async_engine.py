"""The engine on its thread: same tokens, refusals, cancelled waits, faults, drains."""

import asyncio
import contextlib
import threading
from dataclasses import replace

import pytest

import backends
from model import Submission, async_engine
from model.async_engine import (
    AsyncEngine,
    EngineFaultError,
    EngineState,
    NotServingError,
    QueueFullError,
)
from model.control.config import EngineConfig
from model.control.params import SamplingParams
from model.control.request import FinishReason
from model.engine import Engine
from model.errors import InvalidArgumentError, RankLostError
from tests.hang import HANG_S as DEADLINE_S
from tests.model.networks import build

LONG = SamplingParams(max_tokens=200, ignore_eos=True)


@pytest.fixture(scope="module")
def network():
    return build("qwen3")


@pytest.fixture
def engine(network):
    return Engine(network, backends.get_backend("numba"), EngineConfig(num_blocks=64))


def run(coroutine):
    async def bounded():
        async with asyncio.timeout(DEADLINE_S):
            return await coroutine

    return asyncio.run(bounded())


def num_used(engine):
    return engine.kv.stats().num_used_blocks


@pytest.mark.parametrize("stop", [(), ("a",), ("\x00", "q", "ZZ")])
def test_it_says_what_the_engine_alone_says(engine, stop):
    prompts = ["one", "another text", "and a third one"]
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=5, stop=stop)
    wanted = engine.generate(prompts, params)
    engine.kv.reset()

    async def one(served, prompt):
        return [delta async for delta in served.generate(prompt, params)]

    async def main():
        async with AsyncEngine(engine) as served:
            return await asyncio.gather(*[one(served, prompt) for prompt in prompts])

    for deltas, completion in zip(run(main()), wanted, strict=True):
        assert "".join(delta.text for delta in deltas) == completion.text
        tokens = [token.token_id for delta in deltas for token in delta.tokens]
        assert tokens == completion.request.output_tokens
        assert deltas[-1].finish_reason is completion.request.finish_reason
    assert num_used(engine) == 0


def test_samples_of_several_prompts_are_numbered_through_and_queued_all_or_none(engine):
    async def main():
        async with AsyncEngine(engine) as served:
            async with await served.submit(
                *[Submission(text, replace(LONG, n=2)) for text in ("ab", "cd")]
            ) as stream:
                assert [sample.number for sample in stream.samples] == [0, 1, 2, 3]
                assert stream.num_prompt_tokens == 4
                assert len({delta.sample for delta in await stream.whole()}) == 4
            with pytest.raises(InvalidArgumentError, match="prompt"):
                await served.submit(Submission("ab", LONG), Submission("", LONG))
            assert await served.call(lambda one: one.has_unfinished) is False

    run(main())


def test_a_stream_that_is_closed_has_its_blocks_back_before_the_next_step(engine):
    async def main():
        async with AsyncEngine(engine) as served:
            stream = await served.add("a text that takes a few blocks of the pool", LONG)
            await anext(stream)
            assert await served.call(num_used) > 0
            stream.close()
            assert await served.call(num_used) == 0
            with pytest.raises(NotServingError):
                await stream.whole()
            generating = served.generate("another", LONG)
            await anext(generating)
            await generating.aclose()
            assert await served.call(num_used) == 0

    run(main())


def test_a_wait_that_is_cancelled_at_any_moment_leaves_nothing(engine):
    async def main():
        async with AsyncEngine(engine) as served:
            for turns in range(12):
                adding = asyncio.create_task(served.add("a text", LONG))
                for _ in range(turns):
                    await asyncio.sleep(0)
                adding.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    (await adding).close()
                await served.call(num_used)  # what was on its way has come
                assert await served.call(num_used) == 0
                assert served.num_open == 0

    run(main())


def test_no_more_may_wait_than_may(engine):
    async def main():
        served = AsyncEngine(engine, max_waiting=1)
        async with served:
            seats = engine.config.max_num_seqs
            with pytest.raises(InvalidArgumentError, match="n: wanted at most"):
                await served.submit(Submission("x", replace(LONG, n=seats + 2)))
            async with await served.submit(Submission("x", replace(LONG, n=seats + 1))):
                with pytest.raises(QueueFullError, match="max_waiting"):
                    await served.add("y", LONG)
            async with await served.add("y", SamplingParams(max_tokens=1)) as stream:
                await stream.whole()

    run(main())


def test_a_client_that_fills_the_queue_has_no_other_one_refused(engine):
    seats = engine.config.max_num_seqs
    share = (seats + 1) // 2

    def asked(client, n):
        return Submission("x", replace(LONG, n=n), client=client)

    async def main():
        async with AsyncEngine(engine, max_waiting=1) as served:
            many = await served.submit(asked("many", seats + 1))
            for _ in range(2):  # the second time, what has ended is not counted
                with pytest.raises(QueueFullError, match="this client has its share"):
                    await served.submit(asked("many", 1))
                with pytest.raises(QueueFullError, match="this client has its share"):
                    await served.submit(asked("new", share + 1))
                async with await served.submit(asked("new", share)):
                    assert served.num_open == seats + 1 + share
                    with pytest.raises(QueueFullError, match="this client has its share"):
                        await served.submit(asked("new", 1))
            with pytest.raises(InvalidArgumentError):
                await served.submit(asked("new", 1), Submission([-1], client="new"))
            many.close()
            await served.call(num_used)
            assert served.num_open == 0

    run(main())


def test_a_fault_fails_the_requests_it_meets_and_the_engine_goes_on(engine, monkeypatch):
    sound = engine._runner.send
    faults = iter([True])

    def send(*args):
        if next(faults, False):
            raise RuntimeError("planted")
        return sound(*args)

    monkeypatch.setattr(engine._runner, "send", send)

    async def main():
        async with AsyncEngine(engine) as served:
            stream = await served.add("a text", LONG)
            with pytest.raises(EngineFaultError, match="planted"):
                await stream.whole()
            await served.call(num_used)  # comes after whatever is done about the fault
            assert served.health.is_ready
            assert served.health.num_faults == 1
            assert "planted" in served.health.last_fault
            deltas = [d async for d in served.generate("a text", SamplingParams(max_tokens=3))]
            assert deltas[-1].finish_reason is FinishReason.LENGTH
            assert await served.call(num_used) == 0

    run(main())


@pytest.mark.parametrize("ends_by", ["fault", "stop", "abort"])
def test_what_was_held_is_told_before_what_ended_it(engine, monkeypatch, ends_by):
    sound, num_steps, steps_wanted = engine._runner.send, 0, threading.Event()

    def send(*args):
        nonlocal num_steps
        num_steps += 1
        if num_steps >= 6:
            steps_wanted.set()
            if ends_by == "fault" and num_steps == 6:
                raise RuntimeError("planted")
        return sound(*args)

    monkeypatch.setattr(engine._runner, "send", send)

    async def main():
        async with AsyncEngine(engine) as served:
            monkeypatch.setattr(served._pace, "wait_s", lambda: 3600.0)  # every round rests
            stream = await served.add("a text", LONG)
            [first] = await stream.news()
            await asyncio.to_thread(steps_wanted.wait, DEADLINE_S)
            await served.call(num_used)  # what was computed before has come
            if ends_by == "stop":
                await served.stop()
            elif ends_by == "abort":
                stream.close()
            told = []
            with pytest.raises(EngineFaultError if ends_by == "fault" else NotServingError):
                await take_all(stream, told)
            assert all(delta.finish_reason is None for delta in (first, *told))
            if ends_by != "abort":  # an abort wants no more of it
                assert told
                tokens = [token for delta in (first, *told) for token in delta.tokens]
                assert tokens == stream.samples[0].tokens

    async def take_all(stream, told):
        while news := await stream.news():
            told += news

    run(main())


def test_an_engine_that_computes_no_more_stops_and_says_so(engine, monkeypatch):
    def send(*args):
        raise RuntimeError("planted")

    monkeypatch.setattr(engine._runner, "send", send)

    async def main():
        async with AsyncEngine(engine) as served:
            stream = await served.add("a text", LONG)
            with pytest.raises(EngineFaultError, match="planted"):
                await stream.whole()
            with pytest.raises(NotServingError):
                await served.call(num_used)
            assert served.health.state is EngineState.STOPPED
            for asked in (served.add("x"), served.call(num_used)):
                with pytest.raises(NotServingError):
                    await asked

    run(main())


def test_a_lost_rank_is_told_to_all_while_the_engine_waits_for_a_gpu(engine, monkeypatch):
    tells, release, send = [], threading.Event(), engine._runner.send
    left = iter(range(3))

    def wait(*args):
        if next(left, None) is None:
            release.wait(DEADLINE_S)
        return send(*args)

    monkeypatch.setattr(engine._runner, "send", wait)
    monkeypatch.setattr(engine, "woken_by", lambda _, lose: tells.append(lose))
    lost = RankLostError("rank 3 is gone")

    async def main():
        served = AsyncEngine(engine)
        served.start()
        await served.ready()
        streams = [await served.add(text, LONG) for text in ("a", "b")]
        late = asyncio.create_task(served.call(num_used))  # waits for a step that never ends
        await asyncio.to_thread(tells[0], lost)
        for stream in streams:
            with pytest.raises(EngineFaultError, match="rank 3 is gone"):
                await stream.whole()
        assert await served.ended() is lost
        assert (served.num_open, served.health.num_faults) == (0, 1)
        with pytest.raises(NotServingError):
            await served.add("c")
        release.set()
        with contextlib.suppress(NotServingError):
            await late
        await served.stop()

    run(main())


def test_what_keeps_an_engine_from_being_made_is_told_where_it_is_waited_for():
    def make():
        raise InvalidArgumentError("num_blocks: planted")

    async def main():
        served = AsyncEngine(make)
        served.start()
        with pytest.raises(InvalidArgumentError, match="planted"):
            await served.ready()
        await served.stop()
        assert served.health.state is EngineState.STOPPED

    run(main())


def test_a_drain_waits_for_what_runs_takes_nothing_new_and_cuts_off_at_its_deadline(engine):
    async def main():
        served = AsyncEngine(engine)
        async with served:
            short = await served.add("a text", SamplingParams(max_tokens=5, ignore_eos=True))
            draining = asyncio.create_task(served.drain(DEADLINE_S))
            await asyncio.sleep(0)
            with pytest.raises(NotServingError, match="draining"):
                await served.add("too late")
            assert len((await short.whole())[0].tokens) == 5
            assert await draining == 0
        again = AsyncEngine(engine)
        async with again:
            stream = await again.add("a text", LONG)
            await anext(stream)
            assert await again.drain(0) == 1
            with pytest.raises(NotServingError):
                await stream.whole()
        assert num_used(engine) == 0

    run(main())


def test_a_call_runs_between_two_steps_and_raises_what_it_raises(engine):
    async def main():
        async with AsyncEngine(engine) as served:
            assert await served.call(lambda one: one.kv.num_free_blocks) == 63
            with pytest.raises(ZeroDivisionError):
                await served.call(lambda _: 1 // 0)
            assert served.health.is_ready

    run(main())


def test_a_first_token_and_an_end_are_taken_before_the_next_step(engine, monkeypatch):
    """However late the loop is: it waits here for a step that must not begin."""
    monkeypatch.setattr(async_engine, "_HAND_OVER_S", DEADLINE_S)
    seen, step, begins = [], engine.step, threading.Event()

    async def main():
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(DEADLINE_S), AsyncEngine(engine) as served:
            deliver = served._deliver

            def taking(now_s, given):
                seen.extend(("taken", number, reason is not None) for number, _, reason, _ in given)
                deliver(now_s, given)

            def stepping():
                begins.set()
                seen.append(("step", None, False))
                outputs = step()
                seen.extend(("given", o.request.request_id, o.request.is_finished) for o in outputs)
                begins.clear()
                loop.call_soon_threadsafe(begins.wait, 0.02)
                return outputs

            monkeypatch.setattr(served, "_deliver", taking)
            monkeypatch.setattr(engine, "step", stepping)
            first = await served.add("ab", SamplingParams(max_tokens=9, ignore_eos=True))
            second = await served.add("c", SamplingParams(max_tokens=4, ignore_eos=True))
            await asyncio.gather(first.whole(), second.whole())

    asyncio.run(main())
    begun, num_urgent = set(), 0
    for place, (what, number, ends) in enumerate(seen):
        if what == "given" and (ends or number not in begun):
            begun.add(number)
            num_urgent += 1
            after = seen[place + 1 :]
            assert ("step", None, False) not in after[: after.index(("taken", number, ends))]
    assert num_urgent == 4
