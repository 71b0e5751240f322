"""The machine of tiers is itself checked: every planted bug is caught by the property it breaks.

Each is hunted with the rules of the machine, in stories that a tier meets in its life.
"""

import errno

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

import kvcore
from tests.kvcore.sabotage.registry import _with_edit, same_draws
from tests.kvcore.tiers.faulty_disk import READS, WRITES, BrokenError
from tests.kvcore.tiers.faulty_link import FAULTS
from tests.kvcore.tiers.faulty_memory import FAULTS as MEMORY_FAULTS
from tests.kvcore.tiers.machine import GROUPS, SALTS, TierMachine, prompt
from tests.kvcore.tiers.peer_machine import PeerMachine
from tests.kvcore.tiers.planted import PLANTED, UNAIDED


def come_back(life, weights="a", kind="killed", share=1):
    life.restart(kind, weights, share, 0)
    for salt in SALTS:
        life.serve(prompt(15, 0), salt, stores=True)
        life.serve(prompt(12, 4), salt, stores=False)


def restarts(life):
    life.churn([0, 4, 5])
    come_back(life)
    life.churn([1, 2, 3, 6])
    come_back(life, kind="closed")


def other_weights(life):
    life.churn([0, 4, 5])
    come_back(life, weights="b")
    come_back(life, weights="a")


def faulty_writes(life):
    for kind in WRITES[:-1]:
        life.the_disk_misbehaves([None, kind, None, kind], [], False, False)
        life.churn([0, 4])
        come_back(life)
        life.disk.land()
        come_back(life)


def faulty_reads(life):
    for kind in READS:
        life.churn([0, 4, 5])
        life.restart("killed", "a", 1, 0)
        life.the_disk_misbehaves([], [None, kind, None, kind], False, False)
        life.churn([0, 5])
        life.restart("killed", "a", 1, 0)
        life.the_disk_misbehaves([], [kind], False, False)
        life.serve(prompt(15, 0), SALTS[1], stores=True)


def resets(life):
    for runs in (False, True):
        life.churn([0, 5])
        life.serve(prompt(15, 3), b"", stores=False)
        life.store(runs)
        life.reset()
        life.end_store(0, runs=True)
        life.serve(prompt(15, 3), b"", stores=False)
        life.serve(prompt(15, 0), b"", stores=False)
        life.reset_while_it_stores()
        life.serve(prompt(15, 3), b"", stores=False)
        come_back(life)


def steps_fail(life):
    for number in range(4):
        life.churn([0, 4, 5])
        life.a_step_fails(prompt(15, 2 * number), SALTS[number & 1])
        life.serve(prompt(15, 2 * number), SALTS[number & 1], stores=False)
    come_back(life)


def stored_again_after_a_reset(life):
    life.serve(prompt(5, 0), b"", stores=False)
    life.reset_while_it_stores()
    life.serve(prompt(5, 0), b"", stores=True)


def fails_for_good(life):
    for kind in ("failed", "torn"):
        life.churn([0, 1])
        life.another_process_leaves_files(shift=1, cut=0)
        life.the_disk_misbehaves([], [kind], undeletable=True, lands=False)
        life.churn([0, 1, 2, 3])
        come_back(life)


def device_fails(life):
    for room, refusal in ((0, None), (300, None), (None, errno.EROFS), (None, errno.EIO)):
        for resets in (False, True):
            life.churn([0, 4, 5])
            life.the_device_fails_for_a_while(room, refusal)
            life.churn([1, 2, 3])
            life.the_disk_misbehaves([], ["failed"] * 9, undeletable=False, lands=False)
            life.churn([0, 4, 5])
            if resets:
                life.reset()
            life.the_device_works_again(prompt(15, 0))
            life.churn([0, 4, 5])
            life.churn([6, 7, 8, 9])
            life.churn([1, 2, 3])


def dies(life):
    for left in range(12):
        for share in (0, 0.5, 0.9, 1):
            life.the_process_is_to_die(left, share)
            life.churn([left % 10, 1, 2, 3])
            life.restart("killed", "a", 1, 0, (left % 3, share))


def bad_transfers(life):
    life.churn([0, 4])
    life.a_transfer_turns_out_bad(prompt(12, 0))
    life.serve(prompt(15, 0), b"", stores=False)
    come_back(life)


def waits(life):
    for number in range(8):
        life.churn([0, 4])
        life.restart("killed", "a", 1, 0)
        life.wait_for_a_load(prompt(15, 0), b"")
        life.end_load(0, runs=number & 1, closes=number & 2, twice=number & 4)


def late_stores(life):
    for runs in (False, True):
        life.serve(prompt(15, 0), b"", stores=False)
        life.store(runs=False)
        for fork in (1, 2, 3, 4):
            life.serve(prompt(15, fork), b"tenant", stores=False)
        life.end_store(0, runs)
        life.churn([0])


def fills_up(life):
    life.churn([0, 1, 2, 3])
    life.churn([5, 6, 7, 8])
    life.the_disk_misbehaves(["torn", None, "torn", "full"], [], False, False)
    life.churn([0, 1, 2, 3])
    come_back(life)
    life.churn([4, 6, 7, 8])
    come_back(life, share=2)
    life.churn([0, 1, 2, 3])


def memory_is_overwritten(life):
    for number in range(8):
        life.serve(prompt(15, 0), b"", stores=True)
        for fork in (1, 2, 3):
            life.serve(prompt(9, fork), b"tenant", stores=number & 1)
        for which in range(10):
            life.host_memory_is_overwritten(which, 13 * which)
        life.serve(prompt(15, 0), b"", stores=True)
        life.wait_for_a_load(prompt(15, 0), b"")
        life.end_load(0, runs=True, closes=False, twice=False)


def half_writes(life):
    for _ in range(12):
        life.churn([0, 1, 2, 3])
        life.the_disk_misbehaves(["torn", None, None, None] * 9, [], False, False)
        life.churn([5, 6, 7, 8])


def keeps_what_is_used(life):
    life.serve(prompt(15, 0), b"", stores=True)
    for fork in (1, 2, 3, 4, 1, 2, 3, 4):
        life.serve(prompt(5, 0), b"", stores=True)
        life.serve(prompt(9, fork), b"tenant", stores=True)
        life.serve(prompt(5, 0), b"", stores=True)


def outlives_its_copies(life):
    for length in (15, 9, 5):
        life.serve(prompt(length, 0), b"", stores=True)
        for fork in (1, 2, 3):
            life.serve(prompt(9, fork), b"tenant", stores=True)
        life.serve(prompt(length, 0), b"", stores=True)


def peer_serves(life):
    for fork, salt in ((0, b""), (4, b""), (0, b"tenant"), (2, b"")):
        life.the_other_serves(prompt(15, fork), salt, hears=True)
        life.serve(prompt(15, fork), salt, stores=False)
        life.serve(prompt(12, fork), SALTS[1], stores=True)


def peer_misbehaves(life):
    for kind in FAULTS:
        for before in range(3):
            life.the_link_misbehaves([])
            life.the_other_serves(prompt(15, before), b"", hears=True)
            life.disk.files.clear()
            life.was_sound = False
            life.restart("killed", "a", 1, 0)
            life.hear()
            life.the_link_misbehaves([*[None] * before, kind, None, kind])
            for fork in (before, before + 1, before):
                life.serve(prompt(15, fork), b"", stores=False)
                life.hear()
    peer_serves(life)


def peer_is_a_stranger(life):
    peer_serves(life)
    for number in range(8):
        life.a_stranger_asks(number & 1, number & 2, 1 + number // 4)


def peer_resets(life):
    for number in range(6):
        life.the_other_serves(prompt(15, number % 4), b"", hears=True)
        life.wait_for_a_load(prompt(15, number % 4), b"")
        if number & 1:
            life.the_other_resets_while_it_answers()
        if number & 2:
            life.the_other_resets(late=True)
        life.end_load(0, runs=True, closes=False, twice=True)
        life.the_other_serves(prompt(15, 4), b"", hears=True)
        if number == 3:
            life.reset()
        life.the_link_misbehaves(["torn", None])
        life.hear()
        life.hear()
        life.serve(prompt(15, 4), b"", stores=False)
        life.wait_for_a_load(prompt(9, number % 4), b"")
        life.the_other_resets(late=False)
        life.end_load(0, runs=True, closes=False, twice=True)


def peer_evicts(life):
    for forks in ([0, 1, 2, 3], [5, 6, 7, 8], [0, 4, 1, 2]):
        life.other.churn(forks)
        life.hear()
        life.serve(prompt(15, 4), b"", stores=False)


def peer_is_read(life):
    peer_serves(life)
    for kind in (None, *MEMORY_FAULTS):
        for before in range(3):
            life.the_link_misbehaves(["lost"])
            life.hear()
            life.the_other_serves(prompt(15, before), b"", hears=True)
            life.the_memory_misbehaves([*[None] * before, kind, None, kind])
            life.disk.files.clear()
            life.was_sound = False
            life.restart("killed", "a", 1, 0)
            life.hear()
            for fork in (before, before + 1):
                life.serve(prompt(15, fork), b"", stores=False)
                life.the_other_serves(prompt(15, fork + 2), b"", hears=True)


PEER_STORIES = (
    peer_is_read,
    peer_serves,
    peer_misbehaves,
    peer_is_a_stranger,
    peer_resets,
    peer_evicts,
)

STORIES = (  # the short ones find most
    restarts, other_weights, faulty_writes, faulty_reads, resets, bad_transfers, waits, late_stores,
    stored_again_after_a_reset, steps_fail, fails_for_good, device_fails, dies, fills_up,
    half_writes, keeps_what_is_used, outlives_its_copies, memory_is_overwritten,
)  # fmt: skip


def lives(stories):
    for story in stories:
        machine = PeerMachine if story in PEER_STORIES else TierMachine
        more = (True,) if story is peer_is_read else ()
        for number, groups in enumerate(GROUPS):
            yield story, machine(), groups, number & 1, 1, 9, *more
            yield story, machine(), groups, not number & 1, 3, 14, *more


def hunt(stories):
    """Live through stories; return the property that is broken first, or None."""
    for story, life, *world in lives(stories):
        try:
            life.begin(*world)
            story(life)
            life.every_block_is_accounted_for()
            life.finish_all()
            life.teardown()
        except (BrokenError, kvcore.InvariantError) as error:
            return error.prop
    return None


def test_nothing_is_broken_where_no_bug_is_planted():
    assert hunt((*STORIES, *PEER_STORIES)) is None


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_of_tiers_is_caught_for_the_right_reason(name):
    properties, story, owner, function, old, new = PLANTED[name]
    original = getattr(owner, function)
    code = _with_edit(name, original, old, new).__code__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(original, "__code__", code)
        assert hunt([globals()[story]]) in properties.split()


HUNT = settings(
    max_examples=300, stateful_step_count=25, derandomize=True, database=None,
    phases=[Phase.generate], report_multiple_bugs=False, print_blob=False, deadline=None,
)  # fmt: skip


@pytest.mark.source_build
@pytest.mark.parametrize("name", UNAIDED)
def test_a_planted_bug_of_a_disk_is_caught_by_all_rules_without_a_seed(name, monkeypatch):
    properties, owner, function, old, new = UNAIDED[name]
    original = getattr(owner, function)
    monkeypatch.setattr(original, "__code__", _with_edit(name, original, old, new).__code__)
    with pytest.raises(BrokenError) as caught, same_draws():
        run_state_machine_as_test(type(name, (TierMachine,), {}), settings=HUNT)
    assert caught.value.prop in properties.split()
