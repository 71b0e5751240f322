"""A few hostile requests of every kind; and bugs that are planted, each of which is found."""

import pytest

from tests.model.serve.hostile.run import Plan, run

BUSY_S = 2.0  # other tests run beside these: 50 ms is what the command asks for


def test_a_few_hostile_requests_of_every_kind_do_no_harm():
    result = run(Plan(requests=80, seed=1, clients=16, slice_s=0.5, slack_s=BUSY_S))
    assert not result.wrong, str(result)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plants", "found"),
    [
        ("blocks", ["beyond load"]),
        ("burns", ["beyond load"]),
        (
            "raises,grows,keeps tasks,keeps blocks",  # none of which hides another one
            ["internal_error", "memory: wanted", " tasks, ", " blocks, "],
        ),
    ],
)
def test_planted_bugs_are_found(plants, found):
    plan = Plan(requests=120, seed=1, clients=8, slice_s=1.0, kind="keys and names", plants=plants)
    result = run(plan)
    for text in found:
        assert any(text in wrong for wrong in result.wrong), str(result)
