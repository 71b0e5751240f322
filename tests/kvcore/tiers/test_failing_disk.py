"""A disk tier on a device that fails for a while: it comes back, logs it once, and does not hammer.

`Clock` is the tier's; nothing here waits.
"""

import errno
import logging
import shutil
from itertools import pairwise

import pytest

from kvcore import tiers
from tests.kvcore.tiers.faulty_disk import FaultyDisk
from tests.kvcore.tiers.kills import MEANING, NUM_BYTES, key, payload_of

CAPACITY = 1 << 20
RECORD = 128 + NUM_BYTES


class Clock:
    """Seconds that pass when a test says so."""

    now_s = 0.0

    def __call__(self):
        return self.now_s

    def wait(self, seconds):
        self.now_s += seconds


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def disk():
    """A faulty disk whose bytes are compared with the capacity at each write (P39)."""
    disk = FaultyDisk()
    disk.capacity = CAPACITY
    return disk


def open_tier(clock, disk=None, path=""):
    tier = tiers.DiskTier(path, CAPACITY, segments=disk, now_s=clock)
    tier.start(MEANING, NUM_BYTES)
    return tier


def put(tier, numbers):
    """Store copies; return how many the tier has taken."""
    return sum(tier.put(key(n), payload_of(n), 0, tier.epoch) for n in numbers)


def found(tier, numbers):
    """Return how many copies the tier serves, each with its bytes."""
    served = [tier.get(key(n), NUM_BYTES) for n in numbers]
    assert all(one is None or one == payload_of(n) for n, one in zip(numbers, served, strict=True))
    return sum(one is not None for one in served)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
@pytest.mark.parametrize("num_held", [0, 1, 20, 400])
def test_one_moment_without_space_does_not_cost_the_tier(code, num_held, clock, disk, caplog):
    tier = open_tier(clock, disk)
    put(tier, range(num_held))
    disk.refusal = code
    assert put(tier, range(1000, 1010)) == 0
    disk.refusal = None
    assert tier.stats.capacity_bytes < CAPACITY
    assert tier.stats.is_enabled == (tier.stats.num_records > 0)
    clock.wait(1)
    assert put(tier, range(2000, 2100)) == 100
    assert tier.stats.capacity_bytes == CAPACITY
    assert tier.stats.is_enabled
    assert found(tier, range(2000, 2100)) == 100
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "full" in record.getMessage()
    assert tier.stats.faults["full"] >= 1


def test_a_first_write_that_makes_no_file_leaves_no_bytes_behind(clock, tmp_path, monkeypatch):
    """As on a device without inodes: the file is not made, so it cannot be cut either."""
    tier = open_tier(clock, path=tmp_path)

    def no_inode(*_):
        raise OSError(errno.ENOSPC, "no inode is left")

    with monkeypatch.context() as patch:
        patch.setattr(tiers.Folder, "write", no_inode)
        assert put(tier, [1]) == 0
    assert tier.stats.used_bytes == 0
    clock.wait(1)
    assert put(tier, range(50)) == 50
    held = sum(path.stat().st_size for path in tmp_path.rglob("*.kvseg"))
    assert held == tier.stats.used_bytes


def test_a_device_that_others_fill_and_free_is_used_as_far_as_there_is_room(clock, disk):
    """The copies fit into what others leave, and the whole capacity comes back with it."""
    tier = open_tier(clock, disk)
    put(tier, range(400))
    number = 1000
    for room in (CAPACITY // 2, CAPACITY // 4, CAPACITY // 2, 2 * CAPACITY):
        disk.room = room
        taken = 0
        for _ in range(300):
            clock.wait(0.5)
            taken += put(tier, [number])
            number += 1
        assert taken > 250
        assert disk.total <= max(room, CAPACITY // 2)
        assert found(tier, range(number - 20, number)) >= 18
        assert tier.stats.num_records * RECORD > min(room, CAPACITY) // 2
    assert tier.stats.capacity_bytes == CAPACITY


def test_a_device_that_stays_full_keeps_the_copies_that_fit(clock, disk):
    """Each further try costs nothing that the device has room for."""
    tier = open_tier(clock, disk)
    disk.room = CAPACITY // 2
    number = 0
    held = []
    for _ in range(60):
        clock.wait(61)
        put(tier, range(number, number + 30))
        number += 30
        held.append(tier.stats.num_records)
    assert min(held[10:]) * RECORD > disk.room // 2
    assert min(held[10:]) >= min(held[4:10]) - 4


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EACCES])
def test_a_device_that_stays_broken_is_tried_less_and_less_and_logged_once(
    code, clock, disk, caplog
):
    tier = open_tier(clock, disk)
    disk.refusal = code
    put(tier, range(20))
    before, tries = disk.num_changes, 0
    for number in range(36_000):  # an hour
        clock.wait(0.1)
        assert put(tier, [number]) == 0
        tries += disk.num_changes > before
        before = disk.num_changes
    assert 55 <= tries <= 70
    assert len(caplog.records) == 1
    disk.refusal = None
    clock.wait(60)
    assert put(tier, range(100)) == 100
    put(tier, range(100, 110))
    clock.wait(60)
    disk.refusal = code  # sound for longer than the last pause: another episode
    put(tier, range(200, 220))
    assert len([one for one in caplog.records if one.levelno == logging.WARNING]) == 2
    disk.refusal = None
    clock.wait(1)
    assert put(tier, range(300, 310)) == 10


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_device_that_is_full_again_after_it_came_back_waits_longer(code, clock, disk, caplog):
    """It works for a moment at each try, and is logged once all the same."""
    tier = open_tier(clock, disk)
    tries = []
    for number in range(3000):
        clock.wait(0.1)
        disk.refusal = None
        is_taken = put(tier, [2 * number])
        disk.refusal = code
        put(tier, [2 * number + 1])
        if is_taken:
            tries.append(clock.now_s)
    pauses = [after - before for before, after in pairwise(tries)]
    assert max(pauses) > 30
    assert len([one for one in caplog.records if one.levelno == logging.WARNING]) == 1


def test_a_read_only_device_serves_what_it_has_and_loses_nothing(clock, disk, caplog):
    tier = open_tier(clock, disk)
    assert put(tier, range(200)) == 200
    held = {*tier._entries}
    disk.refusal = errno.EROFS
    for number in range(1000, 1600):
        clock.wait(1)
        put(tier, [number])
    assert len(held & {*tier._entries}) >= len(held) - 1
    assert tier.stats.is_enabled
    assert found(tier, range(100, 200)) >= 99
    disk.refusal = None
    clock.wait(60)
    assert put(tier, range(2000, 2010)) == 10
    assert len([one for one in caplog.records if one.levelno == logging.WARNING]) == 1


def test_a_device_whose_writes_fail_while_reads_succeed_keeps_its_copies(clock, disk):
    """Reads in between do not hide that writes fail again and again."""
    tier = open_tier(clock, disk)
    put(tier, range(240))
    disk.refusal = errno.EIO
    for number in range(1000, 1300):
        clock.wait(0.01)
        put(tier, [number])
        found(tier, [number % 100 + 100])
    assert tier.stats.is_enabled
    assert tier.stats.num_records > 150
    disk.refusal = None
    clock.wait(61)
    assert put(tier, range(2000, 2010)) == 10


def test_a_device_that_cannot_be_read_is_off_and_found_again_with_its_copies(clock, disk):
    tier = open_tier(clock, disk)
    put(tier, range(100))
    disk.read_faults = ["failed"] * 8
    assert found(tier, range(20)) == 0
    assert not tier.stats.is_enabled
    assert not tier.contains(key(50))
    clock.wait(1)
    assert put(tier, [500]) == 1
    assert tier.stats.is_enabled
    assert found(tier, range(20, 100)) == 80
    assert tier.stats.used_bytes == disk.total


@pytest.mark.parametrize("comes_back", ["with its files", "empty"])
@pytest.mark.parametrize("goes", ["the path", "the folder in it"])
def test_a_folder_that_vanishes_and_comes_back_is_used_again(comes_back, goes, clock, tmp_path):
    path = tmp_path / "mounted" / "kv"
    tier = open_tier(clock, path=path)
    put(tier, range(100))
    moved = path if goes == "the path" else path / "kvcore-tier"
    moved.rename(tmp_path / "elsewhere")
    for number in range(1000, 1040):
        assert put(tier, [number]) == 0
        found(tier, [number - 1000])
    assert not tier.stats.is_enabled
    for _ in range(5 if goes == "the path" else 0):
        clock.wait(60)
        put(tier, [2000])
        assert not path.exists()  # where a device was mounted nothing is written
    if comes_back == "empty":
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(exist_ok=True)
    else:
        shutil.rmtree(moved, ignore_errors=True)
        (tmp_path / "elsewhere").rename(moved)
    clock.wait(60)
    assert put(tier, [3000]) == 1
    assert found(tier, range(50, 100)) == (50 if comes_back == "with its files" else 0)
    with pytest.raises(tiers.TierInUseError):
        open_tier(clock, path=path)
    tier.close()
    assert found(open_tier(clock, path=path), [3000]) == 1


def test_a_folder_that_another_process_has_taken_meanwhile_is_left_to_it(clock, tmp_path):
    tier = open_tier(clock, path=tmp_path)
    put(tier, range(10))
    shutil.rmtree(tmp_path / "kvcore-tier")
    put(tier, range(20, 40))
    other = open_tier(clock, path=tmp_path)
    assert put(other, range(100, 110)) == 10
    clock.wait(1)
    assert put(tier, range(200, 210)) == 0
    assert found(other, range(100, 110)) == 10
    other.close()
    clock.wait(60)
    assert put(tier, range(200, 210)) == 10
    assert found(tier, range(100, 110)) == 10


@pytest.mark.parametrize("verb", ["clear", "forget"])
@pytest.mark.parametrize("when", ["before it is off", "while it is off"])
def test_what_was_forgotten_does_not_come_back_with_the_device(verb, when, clock, disk):
    """The files still have it: nothing could be deleted or marked."""
    tier = open_tier(clock, disk)
    put(tier, range(100))
    moment = tier.mark()
    put(tier, range(100, 120))

    def forget():
        disk.refusal = errno.EIO
        tier.clear() if verb == "clear" else tier.forget(moment, [key(3)])

    if when == "before it is off":
        forget()
    disk.read_faults = ["failed"] * 8
    found(tier, range(20))
    if when == "while it is off":
        forget()
    assert disk.files
    disk.refusal = None
    disk.read_faults = []
    clock.wait(60)
    assert put(tier, [500]) == 1
    assert found(tier, [3, *range(100, 120)]) == 0
    assert tier.stats.used_bytes == disk.total


def test_what_was_evicted_without_a_mark_is_forgotten_with_the_rest(clock, disk):
    """A copy that a failed write has left in the files is not found again after a failed step."""
    tier = open_tier(clock, disk)
    put(tier, range(190))
    disk.refusal = errno.EIO
    with tier._lock:
        tier._bury(key(7))
    disk.refusal = None
    tier.forget(tier.mark(), [key(7)])
    disk.read_faults = ["failed"] * 8
    put(tier, range(200, 210))
    found(tier, range(200, 210))
    disk.read_faults = []
    clock.wait(60)
    put(tier, [500])
    assert found(tier, [7]) == 0


def test_a_reset_while_the_files_are_out_of_sight_empties_them_later(clock, disk, monkeypatch):
    tier = open_tier(clock, disk)
    put(tier, range(100))
    disk.read_faults = ["failed"] * 8
    found(tier, range(20))
    with monkeypatch.context() as patch:
        patch.setattr(disk, "sizes", lambda: disk.read(10**6, 0, []))
        clock.wait(1)
        assert put(tier, [500]) == 0
        tier.clear()
    clock.wait(60)
    assert put(tier, [501]) == 1
    assert found(tier, range(100)) == 0


def test_a_closed_tier_does_not_come_back(clock, disk):
    tier = open_tier(clock, disk)
    disk.refusal = errno.ENOSPC
    put(tier, [1])
    disk.refusal = None
    tier.close()
    clock.wait(100)
    assert put(tier, range(10)) == 0
    assert not disk.files
