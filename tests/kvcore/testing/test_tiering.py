"""`check_tier` finds nothing in a sound tier, and each broken one by what it breaks."""

import pytest

from kvcore.testing import PropertyError, check_tier
from tests.kvcore.engines import tiering


@pytest.mark.parametrize("tier", [tiering.Tier, tiering.OurDisk])
def test_a_sound_tier_keeps_its_promises(tier):
    seen = check_tier(tier, range(60))
    assert all(seen.values()), seen


def test_the_host_tier_keeps_its_promises():
    seen = check_tier(tiering.Ours, range(60))
    assert min(seen[name] for name in ("hits", "misses", "restart", "reset")) > 0


BROKEN_TIERS = [
    (tiering.HasNoChecksum, "P37"),
    (tiering.DoesNotCompareNames, "P37"),
    (tiering.IgnoresTheLayout, "P37"),
    (tiering.CountsNoFaults, "P37"),
    (tiering.KeepsAllAtAReset, "P37"),
    (tiering.IsFoundTooEarly, "P38"),
    (tiering.ReadsAfterTheEnd, "P37 P38"),
    (tiering.EndsTwice, "P38"),
    (tiering.WritesAfterTheEnd, "P38"),
    (tiering.NeverEvicts, "P39"),
    (tiering.ForgetsWhatIsThere, "P39"),
    (tiering.WritesAndNeverReads, "P24"),
    (tiering.EvictsTheNewest, "P24 P38"),
    (tiering.LosesTheJobOfAFullDevice, "P41"),
    (tiering.NeverEnds, "P41"),
]


@pytest.mark.parametrize(("broken", "prop"), BROKEN_TIERS)
def test_a_broken_tier_is_caught(broken, prop):
    with pytest.raises(PropertyError) as caught:
        check_tier(broken, range(40))
    assert caught.value.prop in prop.split()
    assert "tier.start(" in caught.value.program
