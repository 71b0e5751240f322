"""How often tokens are handed out: within the share of time that they may take, and every one."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

import backends
from model.async_engine import AsyncEngine
from model.control.config import EngineConfig
from model.control.params import SamplingParams
from model.engine import Engine
from model.pace import Pace
from tests.model.networks import build

DEADLINE_S = 60


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
    costs=st.lists(st.floats(0, 0.01), min_size=1, max_size=50),
)
def test_rounds_that_wait_until_they_are_due_take_their_share_of_the_time(share, costs):
    clocks = Clocks()
    pace = clocks.pace(share)
    for cost_s in costs:
        clocks.now_s += pace.wait_s()
        assert pace.wait_s() <= 1e-9, "a round that has waited is due"
        pace.begin()
        clocks.work(cost_s)
    # But for the last round, which has not rested yet.
    assert clocks.worked_s - costs[-1] <= share * clocks.now_s + 1e-9


def test_a_round_that_cost_nothing_is_followed_at_once_and_a_whole_share_never_waits():
    clocks = Clocks()
    pace, whole = clocks.pace(0.1), clocks.pace(1.0)
    assert pace.wait_s() == whole.wait_s() == 0
    pace.begin()
    whole.begin()
    assert pace.wait_s() == 0
    clocks.work(1.0)
    assert pace.wait_s() == pytest.approx(9.0)
    assert whole.wait_s() == 0


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
    if waits_s > DEADLINE_S:  # a first token and an end do not wait for a round
        assert [[len(delta.tokens) for delta in deltas] for deltas in found] == [[1, 19]] * 2
