"""Clients take turns: one with hundreds of requests delays only itself."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.control.clients import FairLimit, FairOrder
from tests.model.control.test_scheduler_order import add, ids, make, run


def finish_one(scheduler):
    """Run until one request ends; its client."""
    before = scheduler.unfinished
    while len(scheduler.unfinished) == len(before):
        run(scheduler)
    [ended] = [request for request in before if request.is_finished]
    return ended.client


def test_a_new_client_comes_before_all_but_the_first_of_a_client_with_many():
    _, scheduler = make(40, 4)
    for number in range(6):
        add(scheduler, number, [number], client="many")
    for number in range(6, 9):
        add(scheduler, number, [number], client="new")
    assert ids(scheduler.waiting) == [0, 6, 1, 7, 2, 8, 3, 4, 5]


def test_a_new_client_takes_the_seat_of_the_last_of_a_client_that_has_all():
    _, scheduler = make(40, 4, max_num_seqs=2)
    for number in range(5):
        add(scheduler, number, [number], client="many", max_tokens=9)
    run(scheduler)
    add(scheduler, 5, [5], client="new", max_tokens=9)
    run(scheduler)
    assert ids(scheduler.running) == [0, 5]


def test_requests_that_end_before_they_run_take_nobody_s_turn():
    _, scheduler = make(40, 4)
    mine = [add(scheduler, number, [number], client="many") for number in range(9)]
    for request in mine[4:]:
        scheduler.abort(request)
    add(scheduler, 9, [9], client="new")
    assert ids(scheduler.waiting) == [0, 9, 1, 2, 3]


def test_an_urgent_request_does_not_put_all_of_its_client_before_a_new_one():
    _, scheduler = make(40, 4, max_num_seqs=1, priority_span=100)
    for number in range(9):
        add(scheduler, number, [number], client="many")
    add(scheduler, 9, [9], client="many", priority=-1)
    finish_one(scheduler)
    add(scheduler, 10, [10], client="new")
    assert ids(scheduler.waiting)[:4] == [0, 1, 10, 2]


def test_priorities_come_on_top():
    _, scheduler = make(40, 4, priority_span=3)
    for number in range(4):
        add(scheduler, number, [number], client="many")
    add(scheduler, 4, [4], client="many", priority=-1)
    add(scheduler, 5, [5], client="new", priority=1)
    assert ids(scheduler.waiting) == [0, 1, 4, 2, 3, 5]


@given(st.lists(st.sampled_from([None, "red", "blue"]), min_size=2, max_size=40))
def test_clients_with_requests_waiting_are_served_in_turns(clients):
    _, scheduler = make(200, 4, max_num_seqs=1)
    for number, client in enumerate(clients):
        add(scheduler, number, [number], client=client, max_tokens=2)
    served, left = Counter(), Counter(clients)
    while scheduler.has_unfinished:
        client = finish_one(scheduler)
        assert served[client] == min(served[one] for one in left if left[one])
        served[client] += 1
        left[client] -= 1


@given(st.lists(st.integers(-1, 1) | st.none(), max_size=40), st.sampled_from(["red", None]))
def test_one_client_alone_sees_no_change(acts, client):
    _, scheduler = make(200, 4, max_num_seqs=2, priority_span=3)
    numbers = {}
    for priority in acts:
        if priority is None:
            run(scheduler)
        else:
            number = len(numbers)
            request = add(
                scheduler, number, [number], client=client, max_tokens=3, priority=priority
            )
            numbers[request] = (number + 3 * priority, number)
        for queue in (scheduler.running, scheduler.waiting):
            assert list(queue) == sorted(queue, key=numbers.get)


def test_a_stream_of_new_clients_starves_no_request():
    _, scheduler = make(40, 4, max_num_seqs=1)
    for number in range(20):
        add(scheduler, number, [number], client="many", max_tokens=2)
    last, most_clients, number = scheduler.waiting[-1], 0, 20
    while not last.is_finished:
        add(scheduler, number, [number], client=f"new {number}", max_tokens=2)
        number += 1
        most_clients = max(most_clients, len({r.client for r in scheduler.unfinished}))
        finish_one(scheduler)
    assert number - 20 <= 20 * most_clients


@given(st.lists(st.tuples(st.booleans(), st.sampled_from("abc")), max_size=60))
def test_places_grow_and_a_client_that_has_nothing_is_forgotten(acts):
    order, places = FairOrder(1), {}
    for adds, client in acts:
        mine, now = places.setdefault(client, []), order.now
        if adds:
            place = order.add(client, 0)
            assert place == max([now, *(last + 1 for last in mine[-1:])])
            mine.append(place)
        elif mine:
            order.end(client, 0, mine.pop(0), has_run=True)
            assert order.now > now
    assert {*order._next} == {client for client, mine in places.items() if mine}


def most_requests(limit, num_clients=None):
    """The most that so many clients can have together; None: any number."""
    return sum([limit // k for k in range(1, 1 + (num_clients or limit))])


def hold_to_the_rule(limiting):
    """Add and remove requests of many clients, and compare with the rule."""

    @settings(derandomize=True, max_examples=300)
    @given(
        st.integers(1, 12),
        st.lists(st.tuples(st.integers(0, 20), st.integers(-6, 6).filter(bool)), max_size=80),
    )
    def run(limit, acts):
        limits, held = limiting(), {}
        for client, count in acts:
            mine = held.get(client, 0)
            if count < 0:
                limits.remove({client: min(mine, -count)})
                held[client] = mine - min(mine, -count)
            elif limits.admits({client: count}, limit):
                limits.add({client: count})
                held[client] = mine + count
            else:  # not because of others
                num_clients = len({client} | {one for one, has in held.items() if has})
                assert mine + count > limit // num_clients
                assert sum(held.values()) + count > limit
            assert limits.total == sum(held.values()) <= most_requests(limit)
        assert +Counter(held) == limits._counts

    run()


def test_a_client_with_less_than_its_share_is_never_refused_and_the_total_is_bounded():
    hold_to_the_rule(FairLimit)


class RefusesAll(FairLimit):
    """One client that fills the queue has all others refused."""

    def admits(self, wanted, limit):
        return self.total + sum(wanted.values()) <= limit


class AdmitsWhoHasLess(FairLimit):
    """Any number of new clients come in, and what one asks for is not counted."""

    def admits(self, wanted, limit):
        return super().admits(dict.fromkeys(wanted, 0), limit)


class ForgetsNoClient(FairLimit):
    """Clients that have nothing left make the share of the others smaller."""

    def remove(self, wanted):
        self.total -= sum(wanted.values())
        self._counts.subtract(wanted)


@pytest.mark.parametrize("broken", [RefusesAll, AdmitsWhoHasLess, ForgetsNoClient])
def test_a_planted_bug_breaks_the_rule(broken):
    with pytest.raises(AssertionError):
        hold_to_the_rule(broken)


def test_clients_that_come_one_after_another_reach_the_bound():
    limits, limit = FairLimit(), 20
    for client in range(limit + 5):
        while limits.admits({client: 1}, limit):
            limits.add({client: 1})
        assert limits.total == sum([limit // (k + 1) for k in range(client + 1)])
    assert limits.total == most_requests(limit)
