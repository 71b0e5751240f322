"""A router chooses where a request waits least, counts it once, and forgets who is gone."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvcore
from model.cluster.forwarded import Forwarded
from model.cluster.router import NoReplicaError, Router
from model.errors import InvalidArgumentError
from tests.model.cluster.simulate import Load, main, simulate


def router(policy="prefix", held=None, names="abc", **options):
    made = Router(lambda *_: held or {}, policy, block_size=4, **options)
    for name in names:
        made.add(name)
    return made


def test_the_longest_prefix_wins_among_idle_replicas():
    chosen = router(held={"a": 8, "c": 12}).choose(range(20))
    assert (chosen.replica, chosen.num_expected) == ("c", 12)


def test_a_prefix_is_worth_no_more_than_what_waits_before_it():
    made = router(held={"c": 12}, names="bc", running_weight=0, miss_weight=1)
    made._replicas["c"].num_waiting_tokens = 11
    first = made.choose(range(20))
    assert first.replica == "c"
    first.end()
    made._replicas["c"].num_waiting_tokens = 13
    assert made.choose(range(20)).replica == "b"


def test_requests_that_come_together_stay_together_before_any_is_computed():
    made = router(running_weight=1)
    prompt = list(range(100))
    first, second = made.choose(prompt), made.choose([*prompt[:98], 7, 7, 7])
    assert (second.replica, second.num_expected) == (first.replica, 96)
    first.has_begun()
    assert made.load(first.replica) == 2 + (101 - 96)


def test_what_comes_for_one_tenant_is_nothing_to_another():
    made = router(running_weight=1)
    prompt = list(range(100))
    first = made.choose(prompt, kvcore.Namespace(salt=b"a"))
    second = made.choose(prompt, kvcore.Namespace(salt=b"b"))
    third = made.choose(prompt, kvcore.Namespace(salt=b"a"))
    assert second.replica != first.replica
    assert (second.num_expected, third.num_expected) == (0, 100)
    assert third.replica == first.replica


def test_what_is_given_up_while_a_router_chooses_counts_nowhere():
    made = router(running_weight=1)
    asked = Forwarded({}, b"", list(range(100)))
    asked.take(made.choose(asked.tokens), 5)
    asked.end_ticket()  # its replica is gone; it is sent again
    again = made.choose(asked.tokens)
    asked.end()
    asked.take(again, 5)
    assert [made.load(name) for name in "abc"] == [0, 0, 0]
    assert asked.ticket is None


def test_equals_take_turns():
    made = router()
    chosen = [made.choose([number] * 8).replica for number in range(6)]
    assert sorted(chosen) == ["a", "a", "b", "b", "c", "c"]


def test_round_robin_looks_at_nothing_and_power_of_two_at_the_load():
    turns = router("round-robin", held={"a": 8})
    assert sorted(turns.choose(range(8)).replica for _ in range(3)) == ["a", "b", "c"]
    made = router("power-of-two", names="ab")
    made._replicas["a"].num_waiting_tokens = 1000
    assert {made.choose(range(8)).replica for _ in range(5)} == {"b"}


def test_a_removed_replica_is_chosen_no_more_and_its_tickets_change_nothing():
    made = router(held={"a": 8})
    ticket = made.choose(range(8))
    assert ticket.replica == "a"
    made.remove("a")
    made.add("a")
    ticket.end()
    assert made.load("a") == 0
    for name in "abc":
        made.remove(name)
    with pytest.raises(NoReplicaError, match="at least one replica"):
        made.choose([1])


@pytest.mark.parametrize(
    "options",
    [{"policy": "random"}, {"running_weight": -1}, {"miss_weight": -1}, {"block_size": 0}],
)
def test_what_cannot_be_is_refused(options):
    with pytest.raises(InvalidArgumentError, match="wanted"):
        Router(lambda *_: {}, **options)


LIVES = [("has_begun", "end"), ("end",), ("end", "end")]
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=20)


@given(
    prompts=st.lists(PROMPTS, min_size=1, max_size=12),
    policy=st.sampled_from(["prefix", "round-robin", "power-of-two"]),
    ends=st.data(),
)
def test_what_a_replica_has_to_do_is_what_was_sent_and_has_not_ended(prompts, policy, ends):
    made = router(policy, held={"a": 0}, running_weight=1)
    open_tickets = []
    for prompt in prompts:
        open_tickets.append((made.choose(prompt), len(prompt)))
        if ends.draw(st.booleans()):
            ticket, _ = open_tickets.pop(ends.draw(st.integers(0, len(open_tickets) - 1)))
            for verb in ends.draw(st.sampled_from(LIVES)):
                getattr(ticket, verb)()
        for name in "abc":
            mine = [(t, size) for t, size in open_tickets if t.replica == name]
            waiting = sum(size - ticket.num_expected for ticket, size in mine)
            assert made.load(name) == waiting + len(mine)
            assert all(0 <= ticket.num_expected < size + 1 for ticket, size in mine)
    for ticket, _ in open_tickets:
        ticket.end()
    assert [made.load(name) for name in "abc"] == [0, 0, 0]


SMALL = {"num_replicas": 4, "num_blocks": 140, "num_requests": 300, "rate": 200.0,
         "num_prefixes": 20, "prefix_tokens": 256, "own_tokens": 32, "new_tokens": 8}  # fmt: skip


def test_in_a_simulation_the_prefix_router_hits_more_and_waits_less():
    came = {policy: simulate(Load(**SMALL), policy) for policy in ("prefix", "power-of-two")}
    assert came["prefix"].hit_rate > 1.4 * came["power-of-two"].hit_rate
    assert came["prefix"].ttft_ms <= came["power-of-two"].ttft_ms


def test_replicas_that_are_cut_off_cost_hits_and_no_request_and_come_back():
    cut = simulate(Load(**SMALL, num_cut_off=2), "prefix")
    whole = simulate(Load(**SMALL), "prefix")
    assert whole.hit_rate * 0.7 < cut.hit_rate <= whole.hit_rate * 1.02
    assert cut.num_wrong >= 0


def test_the_command_prints_a_line_a_policy(capsys):
    few = ["--num-requests", "20", "--num-replicas", "2", "--num-blocks", "200"]
    assert main([*few, "--policy", "prefix", "round-robin"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["policy"] for line in lines] == ["prefix", "round-robin"]
    assert all(line["decision_us"] > 0 for line in lines)
