"""`check_scheduler` finds nothing in a sound scheduler, and each broken one by what it breaks."""

import pytest

from kvcore.testing import PropertyError, check_scheduler
from tests.kvcore.engines import scheduling


@pytest.mark.parametrize("sound", [scheduling.Scheduler, scheduling.Ahead])
def test_a_sound_scheduler_keeps_its_promises(sound):
    seen = check_scheduler(sound, range(60))
    assert all(seen.values()), seen


@pytest.mark.parametrize(
    ("broken", "prop"),
    [
        (scheduling.FreesAtTheAbort, "P17"),
        (scheduling.CommitsTheFailed, "P1"),
        (scheduling.ForgetsTheLate, "P5"),
        (scheduling.WaitsForTheFailed, "P5"),
        (scheduling.TellsTheEndTooEarly, "P5"),
        (scheduling.FreesUnderTheStep, "P17"),
    ],
)
def test_a_broken_scheduler_is_caught(broken, prop):
    with pytest.raises(PropertyError) as caught:
        check_scheduler(broken, range(60))
    assert caught.value.prop == prop
    assert "scheduler.add('r0'" in caught.value.program
