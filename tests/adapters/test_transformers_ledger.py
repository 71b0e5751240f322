"""Transformers' own ledger of blocks under the machines, as other-engines.md says."""

import io

import pytest

from kvcore.testing import command
from tests.engines.transformers_5_23 import Scheduled

pytestmark = pytest.mark.filterwarnings("ignore")  # Transformers' own, of its next versions
ADAPTER = "tests.engines.transformers_5_23:Scheduled"


@pytest.mark.parametrize("machine", ["RequestMachine", "BranchMachine"])
def test_nothing_is_found_in_the_stock_ledger_but_what_the_page_says(machine):
    arguments = [ADAPTER, "--profile", "quick", "--machine", machine, "--block-size", "3"]
    known = ["--known", "P24: begin", "--known", "P13: fork"]
    out = io.StringIO()
    found = command.main([*arguments, *known, "--no-pictures"], out)
    assert found in {command.NOTHING, command.KNOWN}, out.getvalue()


def test_what_does_not_fit_empties_the_stock_cache():

    allocator = Scheduled()
    allocator.start(2, 3)
    first, _ = allocator.begin([0, 0, 0], "")
    allocator.reserve(first, 3)
    allocator.commit(first, 3)
    allocator.finish(first)
    second, _ = allocator.begin([0, 0, 0, 0], "")
    assert second.position_offset == 3
    allocator.finish(second)
    large, _ = allocator.begin([0, 0, 1, 1, 1, 1, 1], "")
    assert allocator.reserve(large, 7) is None
    assert allocator.begin([0, 0, 0, 0], "")[1] == 0
