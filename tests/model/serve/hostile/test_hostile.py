"""A few hostile requests of every kind; and bugs that are planted, each of which is found."""

import pytest

from tests.model.serve.hostile.run import Plan, run

BUSY_S = 2.0  # other tests run beside these: 50 ms is what the command asks for


def test_a_few_hostile_requests_of_every_kind_do_no_harm():
    result = run(Plan(requests=80, seed=1, clients=16, slice_s=0.5, slack_s=BUSY_S))
    assert not result.wrong, str(result)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "kind", "found"),
    [
        ("raises", "keys and names", "internal_error"),
        ("blocks", "keys and names", "beyond load"),
        ("burns", "keys and names", "beyond load"),
        ("grows", "keys and names", "memory: wanted"),
        ("keeps tasks", "keys and names", " tasks, "),
        ("keeps blocks", "keys and names", " blocks, "),
    ],
)
def test_a_planted_bug_is_found(plant, kind, found):
    result = run(Plan(requests=120, seed=1, clients=8, slice_s=1.0, kind=kind, plant=plant))
    assert any(found in wrong for wrong in result.wrong), str(result)
