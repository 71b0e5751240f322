"""Tiers of a network on two processes: the tokens of no tiers, whatever fails on one of them."""

import json

import pytest

from tests.model.ranks.test_ranks import _MAIN, Ranked

_NUM_PROMPTS = 18


def run(forks, folder, *kinds):
    """What both ranks say of an engine of each kind, one after the other."""
    ended = Ranked(forks, 2, [_MAIN, "tiers", str(folder), *kinds]).end()
    assert ended.returncode == 0, ended.stderr[-4000:]
    told = [json.loads(line) for line in ended.stdout.splitlines()]
    return {
        kind: sorted((one for one in told if one["kind"] == kind), key=lambda one: one["rank"])
        for kind in kinds
    }


@pytest.mark.slow
def test_ranks_with_tiers_write_what_they_write_without_and_load_after_a_restart(forks, tmp_path):
    started = run(forks, tmp_path, "none", "first")
    wanted = started["none"][0]["tokens"]
    assert len(wanted) == _NUM_PROMPTS
    assert started["first"][0]["tokens"] == wanted
    assert sorted(one.name for one in tmp_path.iterdir()) == ["rank-0", "rank-1"]
    kinds = ("again", "slow", "other", "full", "corrupted", "alone")
    again, slow, other, full, corrupted, alone = run(forks, tmp_path, *kinds).values()

    assert again[0]["tokens"] == wanted
    for one in again:
        assert one["num_loads"] == _NUM_PROMPTS
        assert one["num_loaded_tokens"] == again[0]["num_loaded_tokens"] > 1000
        assert one["faults"] == one["num_failed_loads"] == 0

    # A device of rank 1 hangs: it gives up, and with it rank 0, whose copies have come.
    assert slow[0]["tokens"] == wanted
    assert [one["num_loads"] for one in slow] == [0, 0]
    assert (slow[0]["num_failed_loads"], slow[1]["num_late_loads"]) == (_NUM_PROMPTS, _NUM_PROMPTS)

    # A part of the weights that rank 1 alone has: what rank 0 has stored is of another network.
    assert all(one["faults"] > 0 for one in other)

    assert full[0]["tokens"] == wanted
    assert (full[0]["faults"], full[1]["faults"] > 0) == (0, True)

    # Records of rank 1 are found, and are not what they say.
    assert corrupted[0]["tokens"] == wanted
    for one in corrupted:
        assert (one["num_loads"], one["num_failed_loads"]) == (0, _NUM_PROMPTS)
    assert corrupted[1]["faults"] >= corrupted[0]["faults"] + _NUM_PROMPTS  # one a record

    # The same, and no rank asks the other one: the comparison of their plans says so.
    line = "rank 1 and rank 0 have different block tables after the same calls"
    assert [one.get("error") for one in alone] == [line, line]
