"""No client waits for the size of another one's requests; time is simulated."""

import math
from itertools import count

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

import kvcore
from model import Request, SamplingParams, Scheduler, SchedulerConfig
from model.control import scheduler as module
from model.control.shares import STEP_S, Shares, StepBudget, fair_shares

MOST = 2048


class Server:
    """A scheduler on a device whose steps take a time for each token, and one for each step."""

    def __init__(self, kind=Scheduler, token_s=1e-4, step_s=0.002, max_num_seqs=32):
        self.kv = kvcore.KVCacheManager(6000, 16)
        limits = SchedulerConfig(max_num_batched_tokens=MOST, max_num_seqs=max_num_seqs)
        self.scheduler = kind(self.kv, limits)
        self.token_s, self.step_s, self.now_s = token_s, step_s, 0.0
        self.numbers = count()
        self.computed = {}

    def add(self, client, length, max_tokens=4):
        number = next(self.numbers)
        prompt = [number, *range(length - 1)]
        request = Request(number, prompt, SamplingParams(max_tokens=max_tokens), client=client)
        self.scheduler.add(request)
        return request

    def step(self):
        step = self.scheduler.schedule()
        drawn = {request.request_id: 7 for chunk in step.chunks for request in chunk.sampling}
        for chunk in step.chunks:
            client = chunk.request.client
            self.computed[client] = self.computed.get(client, 0) + chunk.num_tokens
        took_s = self.step_s + step.num_tokens * self.token_s
        self.now_s += took_s
        self.scheduler.update(step, drawn)
        self.scheduler.shared_budget.note(step.num_tokens, took_s)
        return step

    def wait_s(self, request):
        """The time until a request has its first token."""
        began_s = self.now_s
        while not request.num_output_tokens:
            self.step()
            assert self.now_s < began_s + 60
        return self.now_s - began_s


floods = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(1, 3000), st.integers(1, 40), st.integers(0, 3)),
    min_size=1,
    max_size=16,
)
long_ones = [(client, 3000, 1, 0) for client in "abcabc"]
hunt = settings(
    derandomize=True,
    max_examples=30,
    deadline=None,
    database=None,
    phases=[Phase.explicit, Phase.generate],
)


def hold_to_the_bound(kind):
    """However many requests others send, and however long: a short one waits for one step."""

    @hunt
    @given(floods, st.sampled_from([2e-5, 1e-4, 3e-4]), st.integers(1, 40))
    @example(long_ones, 3e-4, 40)  # draws alone find some planted bugs by luck
    def run(flood, token_s, length):
        server = Server(kind, token_s)
        server.add("polite", length)
        server.add("a", 4000)
        for _ in range(12):  # until the time of steps is known
            server.step()
        for client, size, max_tokens, steps in flood:
            server.add(client, size, max_tokens)
            for _ in range(steps):
                server.step()
        num_clients = 1 + len({request.client for request in server.scheduler.unfinished})
        polite = server.add("polite", length)
        share = server.scheduler.shared_budget.tokens // (2 * num_clients)
        num_steps = math.ceil(length / share) if share else length
        assert server.wait_s(polite) <= 1.5 * STEP_S * num_steps

    run()


def test_a_polite_client_waits_for_the_shares_of_others_and_not_for_their_prompts():
    hold_to_the_bound(Scheduler)


class TakesPrefillsInOrder(Scheduler):
    """A long prompt that has begun has all of each step."""

    def _plan_others(self):
        self._plan_in_order()


class MeasuresNothing(Scheduler):
    def __init__(self, *made):
        super().__init__(*made)
        self.shared_budget.note = lambda *_: None


class LeavesOutThoseWhoWait(Scheduler):
    """Requests that have not begun have no share."""

    def _plan_others(self):
        wanted = module.wanted_tokens
        module.wanted_tokens = lambda running, _: wanted(running, ())
        try:
            super()._plan_others()
        finally:
            module.wanted_tokens = wanted


class SharesTheWholeBudget(Scheduler):
    """A step has the tokens of a client alone, whatever its time."""

    def schedule(self):
        self.shared_budget.tokens = MOST
        return super().schedule()


@pytest.mark.parametrize(
    "broken", [TakesPrefillsInOrder, MeasuresNothing, LeavesOutThoseWhoWait, SharesTheWholeBudget]
)
def test_a_planted_bug_breaks_the_bound(broken):
    with pytest.raises(AssertionError):
        hold_to_the_bound(broken)


def served_of_two():
    """The requests that end of two clients, of which one's are long, while both have some."""
    server, every = Server(max_num_seqs=1), []
    for client, length in (("long", 2000), ("short", 20)):
        every += [server.add(client, length, max_tokens=1) for _ in range(60)]
    while sum(request.is_finished for request in every) < 40:
        server.step()
    return sum(request.is_finished for request in every if request.client == "long")


def test_a_client_with_long_requests_has_fewer_turns_than_one_with_short_ones(monkeypatch):
    assert served_of_two() == 5  # a prompt of 2,000 tokens takes 8 turns
    monkeypatch.setattr(module, "turns_of", lambda num_tokens: 1)
    assert served_of_two() == 20


def test_output_counts_as_turns_of_the_next_request():
    server = Server()
    first = server.add("many", 10, max_tokens=1030)
    other = server.add("many", 10, max_tokens=2000)
    while not first.is_finished:
        server.step()
    late = server.add("many", 10)
    assert late.order[0] - other.order[0] == 1 + 4


def test_a_client_alone_has_the_whole_budget_until_another_one_comes():
    server = Server()
    for _ in range(3):
        server.add("a", 4000)
    assert [server.step().num_tokens for _ in range(3)] == [MOST] * 3
    server.add("b", 10)
    assert server.step().num_tokens < 400  # for most of 30 ms, beside the time of the step itself
    assert server.step().num_tokens < 400


def test_a_client_that_was_there_lately_finds_steps_that_are_short(monkeypatch):
    monkeypatch.setattr(module, "RECENT_STEPS", 10)
    server = Server()
    for _ in range(3):
        server.add("a", 4000)
    server.step()
    server.add("b", 10, max_tokens=1)
    steps = [server.step().num_tokens for _ in range(16)]
    assert max(steps[1:10]) < 400
    assert MOST in steps[10:]


@given(st.dictionaries(st.integers(), st.integers(1, 100), min_size=1, max_size=12),
       st.integers(1, 300))  # fmt: skip
def test_shares_are_equal_but_for_those_who_want_less(wanted, budget):
    shares = fair_shares(wanted, budget)
    assert shares.keys() == wanted.keys()
    assert all(1 <= share <= wanted[client] for client, share in shares.items())
    assert sum(shares.values()) <= max(budget, len(wanted))
    cut = [share for client, share in shares.items() if share < wanted[client]]
    if cut:
        assert min(cut) >= max(shares.values()) - 1
        assert sum(shares.values()) >= budget


def test_what_a_share_leaves_is_for_all():
    shares = Shares({"a": 5, "b": 100}, 50)
    shares.take("b", 45)
    assert (shares.of("a"), shares.of("b")) == (5, 0)
    shares.join()
    assert shares.of("b") == shares.of("new") == 5


@pytest.mark.parametrize(("token_s", "step_s"), [(1e-4, 0.0), (1e-4, 0.01), (5e-6, 0.001)])
def test_the_budget_follows_the_time_of_steps(token_s, step_s):
    budget = StepBudget(8192)
    for factor in (1, 4, 1):  # the device becomes slow for a while
        for _ in range(30):
            tokens = budget.tokens
            budget.note(tokens, step_s + factor * tokens * token_s)
            budget.note(1, step_s + token_s)  # a step that says nothing
        took_s = step_s + factor * budget.tokens * token_s
        assert took_s == pytest.approx(STEP_S, rel=0.1) or budget.tokens == 8192


@pytest.mark.parametrize(("token_s", "step_s"), [(1e-4, 0.04), (2e-4, 0.045), (1e-4, 0.2)])
def test_where_few_tokens_take_long_a_prompt_is_not_cut_smaller_than_that_is_worth(token_s, step_s):
    budget = StepBudget(8192)
    for _ in range(60):
        budget.note(budget.tokens, step_s + budget.tokens * token_s)
        budget.note(1, step_s + token_s)
    took_s = step_s + budget.tokens * token_s
    assert took_s == pytest.approx(2 * step_s, rel=0.1)
    budget.note(1, 1e3)  # one slow step changes little
    budget.note(budget.tokens, took_s)
    assert budget.tokens * token_s <= 1.5 * step_s
    for _ in range(60):  # the device has become fast
        budget.note(budget.tokens, budget.tokens * token_s)
        budget.note(1, token_s)
    assert budget.tokens * token_s == pytest.approx(STEP_S, rel=0.1)


def test_the_budget_has_bounds_whatever_was_measured():
    budget = StepBudget(100)
    for took_s in (1e9, 1e9, 1e9, 1e9):
        budget.note(50, took_s)
    assert budget.tokens == 32
    for _ in range(9):
        budget.note(budget.tokens, 1e-9)
    assert budget.tokens == 100
    budget.note(0, 5.0)
    budget.note(5, 0.0)
    assert budget.tokens == 100
