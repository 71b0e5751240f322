"""Tiers on real files: rights, the lock, versions, corrupted bytes, a killed process."""

import random
from contextlib import contextmanager
from threading import Event, Thread

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvcore
from kvcore import tiers
from kvcore.tiers import record
from tests.hang import HANG_S
from tests.kvcore.tiers.kills import MEANING, NUM_BYTES, key, kill_once, open_tier, payload_of


def test_a_restart_finds_what_was_stored(tmp_path):
    tier = open_tier(tmp_path)
    assert all(tier.put(key(number), payload_of(number), 0, 0) for number in range(50))
    tier.close()
    again = open_tier(tmp_path)
    assert all(again.get(key(number), NUM_BYTES) == payload_of(number) for number in range(50))


def test_copies_are_read_together_into_their_places(tmp_path, monkeypatch):
    """In any order, some of them not there, and with one call for those that lie together."""
    tier, calls, read = open_tier(tmp_path), [], tiers.Folder.read
    for number in range(40):
        tier.put(key(number), payload_of(number), 0, 0)
    monkeypatch.setattr(tiers.Folder, "read", lambda *args: calls.append(args) or read(*args))
    numbers = [7, 3, 99, *range(20, 30), 8, 9]
    memory = memoryview(bytearray(NUM_BYTES * len(numbers)))
    rows = [memory[n * NUM_BYTES : (n + 1) * NUM_BYTES] for n in range(len(numbers))]
    targets = [[row[:5], row[5:]] for row in rows]
    found = tier.begin_read([key(number) for number in numbers], targets)()
    assert found == [number != 99 for number in numbers]
    for number, row in zip(numbers, rows, strict=True):
        assert row == (payload_of(number) if number != 99 else bytes(NUM_BYTES))
    assert len(calls) < 10
    assert tier.stats.num_hits == len(numbers) - 1
    tier.close()


def test_a_copy_that_is_evicted_while_it_is_read_is_a_miss_that_is_counted(tmp_path):
    tier = open_tier(tmp_path)
    tier.put(key(1), payload_of(1), 0, 0)
    wait = tier.begin_read([key(1)], [[memoryview(bytearray(NUM_BYTES))]])
    tier.clear()
    assert wait() == [True]  # it was read before
    tier.put(key(1), payload_of(1), 0, tier.epoch)
    with monkeypatch_of_reads(tier, b"x" * 300):
        wait = tier.begin_read([key(1)], [[memoryview(bytearray(NUM_BYTES))]])
        tier.forget(0, [key(1)])
        assert wait() == [False]
    assert tier.stats.faults == {"gone": 1}
    assert tier.stats.is_enabled


@contextmanager
def monkeypatch_of_reads(tier, content):
    """Reads find other bytes, as where a segment was deleted and another one has its place."""

    def read(number, offset, buffers):
        for buffer in buffers:
            buffer[:] = content[: len(buffer)].ljust(len(buffer))
        return sum(map(len, buffers))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tier._files, "read", read)
        yield


def test_files_are_for_their_owner_alone(tmp_path):
    tier = open_tier(tmp_path / "new" / "folder")
    tier.put(key(1), payload_of(1), 0, 0)
    folder = tmp_path / "new" / "folder" / "kvcore-tier"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


def test_a_folder_has_one_process_at_a_time(tmp_path):
    first = open_tier(tmp_path)
    with pytest.raises(tiers.TierError, match="is in use by another process"):
        open_tier(tmp_path)
    first.close()
    open_tier(tmp_path).close()


@pytest.mark.parametrize("name", ["a file", "a folder that cannot be made"])
def test_a_path_that_cannot_be_used_is_refused_in_one_line(tmp_path, name):
    (tmp_path / "file").write_bytes(b"")
    path = tmp_path / "file" if name == "a file" else tmp_path / "file" / "below"
    with pytest.raises(tiers.TierError, match="cannot be used") as error:
        open_tier(path)
    assert "\n" not in str(error.value)


def test_a_folder_of_another_version_is_refused(tmp_path):
    tier = open_tier(tmp_path)
    tier.put(key(1), payload_of(1), 0, 0)
    tier.close()
    [segment] = (tmp_path / "kvcore-tier").glob("*.kvseg")
    data = bytearray(segment.read_bytes())
    data[8:12] = (2).to_bytes(4, "little")
    data[: record.SEGMENT_BYTES] = record._sealed(bytes(data[: record.SEGMENT_BYTES]))
    segment.write_bytes(data)
    with pytest.raises(tiers.TierError, match="version 2"):
        open_tier(tmp_path)


def test_a_capacity_without_room_for_copies_is_refused(tmp_path):
    with pytest.raises(tiers.TierError, match="wanted a capacity of at least"):
        open_tier(tmp_path, 10_000)
    with pytest.raises(tiers.TierError, match="wanted room for a copy"):
        tiers.HostTier(100).start(MEANING, NUM_BYTES)


@pytest.mark.parametrize("make", [open_tier, lambda path: tiers.HostTier(1 << 18)])
def test_the_lowest_priority_goes_first_and_then_the_least_recently_used(tmp_path, make):
    tier = make(tmp_path)
    if tier.in_blocks:
        tier.start(MEANING, NUM_BYTES)
    tier.put(key(0), payload_of(0), 1, 0)
    for number in range(1, 400):
        tier.touch(key(1))
        tier.put(key(number), payload_of(number), 0, 0)
    assert tier.stats.num_evicted > 100
    assert tier.contains(key(0))
    assert tier.contains(key(1))
    assert not tier.contains(key(2))
    live = [number for number in range(2, 400) if tier.contains(key(number))]
    assert live == list(range(min(live), 400))


def test_capacity_holds_over_restarts_and_a_smaller_one_is_reached_at_the_start(tmp_path):
    for capacity in (1 << 19, 1 << 18):
        tier = open_tier(tmp_path, capacity)
        for number in range(150):
            tier.put(key(number + capacity), payload_of(number), 0, 0)
            held = sum(path.stat().st_size for path in tmp_path.rglob("*.kvseg"))
            assert held <= capacity
            assert held == tier.stats.used_bytes
        tier.close()


@given(st.integers(0, 127 + NUM_BYTES), st.integers(0, 7))
def test_a_record_with_any_bit_flipped_is_a_miss(place, bit):
    payload = payload_of(7)
    checksum = record.checksum_of(payload)
    header = record.Header(key(7), MEANING, 3, 1, 2, NUM_BYTES, checksum)
    data = bytearray(header.encode() + payload)

    def fault_of(data):
        return record.fault_of(data[:128], [memoryview(data)[128:]], header)

    assert fault_of(data) is None
    assert record.decode_header(bytes(data)) == header
    data[place] ^= 1 << bit
    assert fault_of(data) is not None
    assert fault_of(data[:place]) is not None


def test_meanings_are_equal_exactly_if_their_fields_are():
    fields = {"weights": "a", "rank": 1}
    assert tiers.meaning_of(fields) == tiers.meaning_of({"rank": 1, "weights": "a"})
    others = [{"weights": "a"}, {"weights": "a", "rank": "1"}, {"weights": "ar", "ank": 1}, {}]
    assert len({tiers.meaning_of(one) for one in [fields, *others]}) == 5
    with pytest.raises(kvcore.InvalidArgumentError, match="wanted text and numbers"):
        tiers.meaning_of({"weights": b"a"})


def test_a_manager_that_names_events_otherwise_is_refused():
    kv = kvcore.KVCacheManager(8, 4, record_events="xxh3-128")
    with pytest.raises(kvcore.InvalidArgumentError, match="record_events"):
        tiers.TierManager(kv, [], None, block_bytes=4, meaning={})


@pytest.mark.slow
def test_a_killed_process_leaves_whole_records_or_misses(tmp_path):
    """`kill -9` in the middle of writing: what was acknowledged is found, and nothing is wrong."""
    dice = random.Random(0)
    found = acknowledged = first = 0
    for _ in range(6):
        some, whole, first = kill_once(tmp_path, first, dice)
        acknowledged, found = acknowledged + some, found + whole
    assert found >= 0.99 * acknowledged > 0


class LateMover:
    """Moves to the device end when they are let go."""

    def __init__(self):
        self.inner = tiers.OneByOne(Blocks(), 64)
        self.has_begun, self.may_end, self.told = Event(), Event(), []

    def allocate(self, num_blocks):
        return self.inner.allocate(num_blocks)

    def store(self, block_ids, host_ids):
        return self.inner.store(block_ids, host_ids)

    def sums(self, host_ids):
        return self.inner.sums(host_ids)

    def free(self):
        self.inner.free()

    def load(self, host_ids, block_ids):
        found = self.inner.load(host_ids, block_ids)
        self.has_begun.set()

        def wait():
            assert self.may_end.wait(HANG_S)
            self.told.append("moved")
            return found()

        return wait


def test_a_load_that_is_given_up_has_ended_its_moves():
    kv, mover = kvcore.KVCacheManager(12, 4), LateMover()
    how = {"block_bytes": 64, "meaning": {}, "max_store_blocks": 11, "batch_bytes": 128}
    made = tiers.TierManager(kv, [tiers.HostTier(1 << 16)], mover, **how)
    for first in (0, 100):  # the second evicts the first
        compute(kv, first)
        job = made.begin_store()
        job.run()
        made.finish_store(job)
    job = made.begin_load(kv.open(range(40)))
    runs = Thread(target=job.run)
    runs.start()
    assert mover.has_begun.wait(HANG_S)
    gives_up = Thread(target=lambda: (job.cancel(), mover.told.append("given up")))
    gives_up.start()
    while not job._is_cancelled:
        gives_up.join(0.001)
    mover.may_end.set()
    gives_up.join(HANG_S)
    runs.join(HANG_S)
    assert mover.told[0] == "moved"
    assert not made.finish_load(job)
    kvcore.check(kv)


class Blocks:
    """The blocks of a device: each holds its own number."""

    def read_block(self, block_id):
        return bytes([block_id]) * 64

    def write_block(self, block_id, data):
        pass


def compute(kv, first):
    """A prompt of 40 tokens is computed, and its blocks are free again."""
    seq = kv.open(range(first, first + 40))
    kv.reserve(seq, 40 - seq.num_computed_tokens)
    kv.commit(seq, 40 - seq.num_computed_tokens)
    kv.close(seq)


def chosen(job):
    return None if job is None else [part.block_ids for part in job.parts]


def test_shards_choose_the_same_blocks_whatever_their_tiers_have():
    """One has room for all copies, the other one for three, and has done with its stores later."""
    shards, stores = [], []
    for room in (100, 3):
        kv, host = kvcore.KVCacheManager(12, 4), tiers.HostTier(room * (64 + 512))
        how = {"block_bytes": 64, "meaning": {"rank": room}, "max_store_blocks": 11}
        made = tiers.TierManager(kv, [host], Blocks(), is_shard=True, **how)
        shards.append((kv, made))
        told = []
        for first in (0, 100, 0, 100):  # each evicts the one before, and computes it again
            compute(kv, first)
            job = made.begin_store()
            if room == 100:
                job.run()
            made.cancel_stores()
            again = made.begin_store()
            again.run()
            made.finish_store(again, is_done=True)
            told += [chosen(job), chosen(again)]
        stores.append(told)
    assert stores[0] == stores[1]
    assert None not in stores[0]

    seqs = [kv.open(range(40)) for kv, _ in shards]
    found = [made.find(seq).num_tokens for (_, made), seq in zip(shards, seqs, strict=True)]
    assert found[0] == 36 > found[1]
    jobs = [
        made.begin_load(seq, num_tokens=34) for (_, made), seq in zip(shards, seqs, strict=True)
    ]
    assert chosen(jobs[0]) == chosen(jobs[1])
    for job in jobs:
        job.run()
    assert [job.is_whole for job in jobs] == [True, False]
    ended = [made.finish_load(job) for (_, made), job in zip(shards, jobs, strict=True)]
    assert ended == [True, False]
    assert [seq.num_computed_tokens for seq in seqs] == [32, 4]  # one block was in the pool
    assert shards[0][1].begin_store() is None  # every shard has what was loaded
    for kv, _ in shards:
        kvcore.check(kv)
