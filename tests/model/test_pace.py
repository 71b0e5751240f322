"""How often tokens are handed out: within the share of time that they may take, and every one."""

import asyncio
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

import backends
from model.async_engine import AsyncEngine
from model.control.config import EngineConfig
from model.control.params import SamplingParams
from model.engine import Engine
from model.pace import LONGEST_S, Pace
from tests.hang import HANG_S as DEADLINE_S
from tests.model.networks import build


class Clocks:
    """A clock on the wall, and one that runs while work is done."""

    def __init__(self):
        self.now_s = self.worked_s = 0.0

    def work(self, cost_s):
        self.now_s += cost_s
        self.worked_s += cost_s

    def pace(self, share):
        return Pace(share, now=lambda: self.now_s, worked=lambda: self.worked_s)


@given(
    share=st.floats(0.01, 0.99),
    rounds=st.lists(st.tuples(st.floats(0, 0.05), st.floats(0, 1.0)), min_size=1, max_size=50),
)
def test_rounds_that_wait_until_they_are_due_take_their_share_of_the_time(share, rounds):
    """Other work of the thread, before a round or after it, is not counted."""
    clocks = Clocks()
    pace = clocks.pace(share)
    told_s = longest_s = 0.0
    for cost_s, other_s in rounds:
        wait_s = pace.wait_s()
        assert wait_s <= LONGEST_S
        clocks.now_s += wait_s
        assert pace.wait_s() <= 1e-9, "a round that has waited is due"
        begun_s = clocks.now_s
        pace.begin()
        clocks.work(cost_s)
        pace.end()
        assert pace.wait_s() == pytest.approx(
            max(0.0, begun_s + min(cost_s / share, LONGEST_S) - clocks.now_s), abs=1e-9
        )
        clocks.work(other_s)
        told_s, longest_s = told_s + cost_s, max(longest_s, cost_s)
    if longest_s / share < LONGEST_S:
        assert told_s - rounds[-1][0] <= share * clocks.now_s + 1e-9


def test_a_round_that_cost_nothing_is_followed_at_once_and_a_whole_share_never_waits():
    clocks = Clocks()
    pace, whole = clocks.pace(0.1), clocks.pace(1.0)
    assert pace.wait_s() == whole.wait_s() == 0
    for cost_s, rest_s in ((0.0, 0.0), (0.004, 0.036), (50.0, 0.0)):
        pace.begin()
        whole.begin()
        clocks.work(cost_s)
        pace.end()
        whole.end()
        assert pace.wait_s() == pytest.approx(rest_s)
        assert whole.wait_s() == 0
        clocks.now_s += rest_s


@pytest.fixture(scope="module")
def network():
    return build("qwen3")


@pytest.mark.parametrize("waits_s", [0.0, 1e-4, 3600.0])
def test_every_token_is_handed_out_once_however_long_a_round_waits(network, waits_s, monkeypatch):
    monkeypatch.setattr(Pace, "wait_s", lambda self: waits_s)
    engine = Engine(network, backends.get_backend("numba"), EngineConfig(num_blocks=64))
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    wanted = [done.request.output_tokens for done in engine.generate(["ab", "c"], params)]

    async def one(served, prompt):
        return [delta async for delta in served.generate(prompt, params)]

    async def main():
        async with asyncio.timeout(DEADLINE_S), AsyncEngine(engine) as served:
            return await asyncio.gather(*[one(served, prompt) for prompt in ("ab", "c")])

    found = asyncio.run(main())
    assert [[t.token_id for d in deltas for t in d.tokens] for deltas in found] == wanted
    assert all(delta.tokens for deltas in found for delta in deltas)
    if waits_s > DEADLINE_S:  # a first token and an end do not wait for a round
        assert all(len(deltas) <= 2 for deltas in found)


def test_tokens_come_however_often_a_round_has_to_wait(network, monkeypatch):
    """Each step waits until the reader has what the step before gave."""
    monkeypatch.setattr(Pace, "wait_s", lambda self: 1e-4)
    engine = Engine(network, backends.get_backend("numba"), EngineConfig(num_blocks=64))
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    may_step, step = threading.Semaphore(3), engine.step  # a step is read after the next began

    def waits():
        assert may_step.acquire(timeout=DEADLINE_S)
        return step()

    monkeypatch.setattr(engine, "step", waits)

    async def main():
        tokens = 0
        async with asyncio.timeout(DEADLINE_S), AsyncEngine(engine) as served:
            async for delta in served.generate("ab", params):
                tokens += len(delta.tokens)
                may_step.release(len(delta.tokens))
        return tokens

    assert asyncio.run(main()) == 20
