"""Whether a load is worth it: never slower, at any rates of computing and loading."""

import threading
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.control.tier_transfers import TierTransfers, TransferCosts


class Found:
    """What `TierManager.find` says of 100 tokens in 10 copies on a disk."""

    num_device_tokens, num_tokens, num_copies = 0, 100, {"disk": 10}


def test_a_load_is_chosen_where_it_was_measured_to_be_quicker():
    costs = TransferCosts(1000)
    assert costs.is_worth(Found, 0.0)  # nothing is known
    costs.note_step(100, 1.0)
    assert costs.is_worth(Found, 0.0)  # it is tried, but not for long
    assert costs.deadline_s(1000, {"disk": 10}) == pytest.approx(0.5)
    costs.note_load({"disk": 10}, 0.5)
    assert costs.is_worth(Found, 0.4)
    assert not costs.is_worth(Found, 0.7)
    assert costs.is_worth(Found, 0.4)  # the load was not slow, those before it were
    costs.note_load({"disk": 10}, 40.0)
    assert not costs.is_worth(Found, 0.0)
    costs.load_s["disk"] = 0.0
    assert not costs.is_worth(Found, 0.0)  # until it is measured again
    costs.note_rate("disk", 1000, 0.01)
    assert costs.is_worth(Found, 0.0)


def test_a_tier_that_was_tried_in_vain_is_measured_beside_requests_that_compute():
    costs = TransferCosts(1000)
    costs.note_step(100, 1.0)
    costs.note_late({"disk": 10, "host": 0}, 0.05)
    assert costs.doubted == {"disk"}
    assert not costs.is_worth(Found, 0.0)


def test_steps_that_decode_say_nothing_of_a_prefill():
    costs = TransferCosts(1000)
    costs.note_step(8192, 0.8)
    for _ in range(99):
        costs.note_step(64, 0.64)
    assert costs.compute_s == pytest.approx(0.8 / 8192)


@given(
    compute_s=st.floats(1e-6, 1e-2),
    rates=st.lists(st.floats(1e-12, 1e-3), min_size=2, max_size=2),
    probed=st.booleans(),
    finds=st.lists(st.tuples(st.integers(1, 500), st.integers(0, 500)), min_size=1, max_size=20),
)
def test_with_any_rates_no_first_token_is_later_than_without_tiers(compute_s, rates, probed, finds):
    """In simulated time, each find after the load before it: at most 5 %, or a trial's length once.

    A tier that was never measured costs a trial; after that none is later at all.
    """
    costs, names = TransferCosts(1000), ("host", "disk")
    costs.note_step(1000, 1000 * compute_s)
    for name, rate in zip(names, rates, strict=True) if probed else ():
        costs.note_rate(name, 1000, 1000 * rate)
    tried = set()
    for counts in finds:
        copies = dict(zip(names, counts, strict=True))
        num_tokens = 16 * sum(counts)
        without_s = took_s = compute_s * num_tokens
        found = SimpleNamespace(num_device_tokens=0, num_tokens=num_tokens, num_copies=copies)
        used = {name for name in names if copies[name]}
        new = used - costs.load_s.keys()
        if costs.is_worth(found, 0.0):
            loading_s = sum(1000 * n * rate for n, rate in zip(counts, rates, strict=True))
            deadline_s = costs.deadline_s(num_tokens, copies)
            if loading_s <= deadline_s:
                took_s = loading_s
                costs.note_load(copies, loading_s)
            else:
                took_s += deadline_s
                costs.note_late(copies, deadline_s)
            if new:
                assert not new & tried
                tried |= new
        most_s = max(0.25, 0.05 * without_s) if new else 1e-9
        assert took_s <= without_s * (1 + 1e-9) + most_s


def test_a_tier_that_fails_while_it_is_measured_ends_no_thread():
    def fail(_):
        raise RuntimeError("the driver refuses a copy of blocks")

    disk = SimpleNamespace(name="disk")
    tiers = SimpleNamespace(marks=tuple, tiers=(disk,), probe=fail)
    costs = TransferCosts(1000)
    costs.doubted.add("disk")
    transfers, goes_on = TierTransfers(tiers, None, costs), threading.Event()
    transfers._probe(Found)
    transfers._queues[0].put(goes_on.set)
    assert goes_on.wait(60)
    assert costs.doubted == {"disk"}
    for queue in transfers._queues:
        queue.put(None)
