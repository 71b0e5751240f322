"""The number of replicas follows the tokens that wait in them, within its bounds."""

from types import SimpleNamespace

import pytest

from model.cluster.scaling import WAITING, ByWaitingTokens


@pytest.mark.parametrize(
    ("waiting", "wanted"),
    [([0], 1), ([100], 1), ([101], 2), ([250, 51], 4), ([900, 900], 5), ([], 1)],
)
def test_waiting_tokens_decide_the_number_of_replicas(waiting, wanted):
    context = SimpleNamespace(
        aggregated_metrics={WAITING: dict(enumerate(waiting))} if waiting else None,
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=5,
    )
    assert ByWaitingTokens(waiting_tokens=100)(context) == (wanted, {})
