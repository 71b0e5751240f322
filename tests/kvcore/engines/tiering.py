"""A small tier that is sound, what may go wrong in one, and kvcore's own under the same verbs."""

from random import Random

from kvcore.testing import Ended, KilledError
from kvcore.tiers import DiskTier, HostTier, key_of, meaning_of
from tests.kvcore.tiers.faulty_disk import CrashedError, FaultyDisk


class Tier:
    """A device of records `(key, layout, payload, checksum)`, the least recently stored first."""

    survives = True
    layouts = ("one", "two")

    def __init__(self):
        self.device, self.is_full, self.left = {}, False, None
        self.generation = 0

    def start(self, capacity_bytes, memory, row_bytes, layout):
        self.room = capacity_bytes // row_bytes
        self.memory, self.row_bytes, self.layout = memory, row_bytes, layout
        self.work, self.done, self.noticed = [], [], 0
        self.begin_again()
        return self.room

    def begin_again(self):
        while len(self.device) > self.room:
            self.evict()

    def evict(self):
        del self.device[next(iter(self.device))]

    def name(self, key):
        return key, self.layout

    def find(self, key):
        return self.name(key) in self.device

    def store(self, job, moves):
        self.work.append((job, moves, self.store_one, []))

    def load(self, job, moves):
        self.work.append((job, moves, self.load_one, []))

    def advance(self):
        if not self.work:
            return False
        job, moves, move_one, moved = self.work[0]
        key, row = moves[0]
        if move_one(key, slice(row * self.row_bytes, (row + 1) * self.row_bytes)):
            moved.append(key)
        self.work[0] = job, moves[1:], move_one, moved
        if len(moves) == 1:
            del self.work[0]
            self.end(job, moved)
        return True

    def end(self, job, moved):
        self.done.append(Ended(job, moved))

    def store_one(self, key, span):
        if self.is_full:
            return False
        if not self.find(key):
            while len(self.device) >= self.room:
                self.evict()
            self.write(key, self.memory[span])
        return True

    def write(self, key, data):
        if self.left is not None:
            left, share = self.left
            self.left = left - 1, share
            if not left:
                self.left = None
                self.put(key, data, data[: int(len(data) * share)])
                raise KilledError
        self.put(key, data, data)

    def put(self, key, data, written):
        self.device[self.name(key)] = self.name(key), written, hash(data)

    def load_one(self, key, span):
        if not self.find(key):
            return False
        name, data, checksum = self.device[self.name(key)]
        if not self.is_right(name, self.name(key), data, checksum):
            self.notice(key)
            return False
        self.memory[span] = data.ljust(self.row_bytes, b"\0")
        return True

    def is_right(self, name, wanted, data, checksum):
        return name == wanted and hash(data) == checksum

    def notice(self, key):
        self.noticed += 1
        del self.device[self.name(key)]

    def ended(self):
        done, self.done = self.done, []
        return done

    def drain(self):
        for job, _, _, moved in self.work:
            self.end(job, moved)
        self.work = []

    def stop(self):
        self.work = []

    def used_bytes(self):
        return sum(len(data) for _, data, _ in self.device.values())

    def reset(self):
        self.device.clear()

    def num_faults(self):
        return self.noticed

    def flip(self, key):
        if self.find(key):
            name, data, checksum = self.device[self.name(key)]
            self.device[self.name(key)] = name, bytes([data[0] ^ 1]) + data[1:], checksum

    def swap(self, key, other):
        if self.find(key) and self.find(other):
            one, two = self.name(key), self.name(other)
            self.device[one], self.device[two] = self.device[two], self.device[one]

    def tear(self):
        if self.device:
            last = [*self.device][-1]
            name, data, checksum = self.device[last]
            self.device[last] = name, data[: len(data) // 2], checksum

    def fill(self, is_full):
        self.is_full = is_full

    def kill(self, num_writes, share):
        self.left = num_writes, share


class HasNoChecksum(Tier):
    """vllm#54363, #57912: a flipped bit or a torn record is served."""

    def is_right(self, name, wanted, data, checksum):
        return name == wanted


class DoesNotCompareNames(Tier):
    """What stands in the place of a record is taken for it."""

    def is_right(self, name, wanted, data, checksum):
        return hash(data) == checksum


class IgnoresTheLayout(Tier):
    """vllm#55904, #55191: records are used again in another layout or by other ranks."""

    def name(self, key):
        return key, ""


class CountsNoFaults(Tier):
    """A damaged record is a miss, and no counter says so."""

    def num_faults(self):
        return 0


class KeepsAllAtAReset(Tier):
    """sglang#39830: the KV of the weights before is served."""

    def reset(self):
        pass


class IsFoundTooEarly(Tier):
    """A record is found when its store begins."""

    def find(self, key):
        begun = [
            move.key for _, moves, run, _ in self.work for move in moves if run != self.load_one
        ]
        return super().find(key) or key in begun

    def store_one(self, key, span):
        self.work[0], work = (0, (), None, ()), self.work[0]
        stored = super().store_one(key, span)
        self.work[0] = work
        return stored

    def load_one(self, key, span):
        return self.name(key) in self.device and super().load_one(key, span)


class ReadsAfterTheEnd(Tier):
    """LMCache#4492: a row is read when the engine has it for something else already."""

    late = None

    def store_one(self, key, span):
        self.late = key, span
        return super().store_one(key, span)

    def store(self, job, moves):
        super().store(job, moves)
        if self.late and self.find(self.late[0]):
            key, span = self.late
            self.put(key, self.memory[span], self.memory[span])


class EndsTwice(Tier):
    """A job that was drained ends once more when the next is begun."""

    last = None

    def drain(self):
        super().drain()
        self.last = self.done[-1] if self.done else None

    def load(self, job, moves):
        super().load(job, moves)
        if self.last:
            self.done.append(self.last)


class WritesAfterTheEnd(Tier):
    """vllm#32255: a load goes on into a row that was given up."""

    def drain(self):
        work = self.work
        super().drain()
        self.late = [each for each in work if each[2] == self.load_one]

    late = ()

    def store(self, job, moves):
        super().store(job, moves)
        for _, late, _, _ in self.late:
            for key, row in late:
                self.load_one(key, slice(row * self.row_bytes, (row + 1) * self.row_bytes))
        self.late = ()


class NeverEvicts(Tier):
    """vllm#52784: no path ever deletes a file."""

    def evict(self):
        self.room += 1


class ForgetsWhatIsThere(Tier):
    """vllm#54779: after a restart, what the device has does not count."""

    def begin_again(self):
        self.room += len(self.device)


class WritesAndNeverReads(Tier):
    """vllm#47636: names are those of one process."""

    def begin_again(self):
        self.generation += 1

    def name(self, key):
        return key, self.layout, self.generation


class EvictsTheNewest(Tier):
    """What has just come goes first."""

    def evict(self):
        del self.device[[*self.device][-1]]


class LosesTheJobOfAFullDevice(Tier):
    """vllm#45388: a store that fails never ends."""

    def end(self, job, moved):
        if moved or not self.is_full:
            super().end(job, moved)


class NeverEnds(Tier):
    """A damaged record is read again and again."""

    def advance(self):
        work = [*self.work]
        noticed, has_moved = self.noticed, super().advance()
        if self.noticed > noticed:
            self.work, self.done = work, []
            self.noticed -= 1
        return has_moved

    def notice(self, key):
        self.noticed += 1


class Ours:
    """A `kvcore.tiers.Tier`, driven as a job of its manager drives it."""

    survives = False
    layouts = ("one", "two")

    def make(self, capacity_bytes):
        return HostTier(capacity_bytes)

    def start(self, capacity_bytes, memory, row_bytes, layout):
        self.tier = self.make(capacity_bytes)
        self.memory, self.row_bytes = memory, row_bytes
        self.work, self.done = [], []
        self.tier.start(meaning_of({"layout": layout}), row_bytes)
        return self.room(capacity_bytes)

    def room(self, capacity_bytes):
        return capacity_bytes // (self.row_bytes + 512)

    def find(self, key):
        return self.tier.contains(key_of(0, key))

    def store(self, job, moves):
        self.work.append([job, [*moves], self.tier.epoch, []])

    def load(self, job, moves):
        self.work.append([job, [*moves], None, []])

    def advance(self):
        if not self.work:
            return False
        _, moves, epoch, moved = self.work[0]
        key, row = moves.pop(0)
        span = slice(row * self.row_bytes, (row + 1) * self.row_bytes)
        if epoch is None:
            data = self.tier.get(key_of(0, key), self.row_bytes)
            if data is not None:
                self.memory[span] = data
                moved.append(key)
        elif self.tier.put(key_of(0, key), memoryview(self.memory)[span], 0, epoch):
            moved.append(key)
        if not moves:
            self.end(self.work.pop(0))
        return True

    def end(self, work):
        self.done.append(Ended(work[0], work[3]))

    def ended(self):
        done, self.done = self.done, []
        return done

    def drain(self):
        while self.work:
            self.end(self.work.pop(0))

    def stop(self):
        self.tier.close()

    def used_bytes(self):
        return self.tier.stats.used_bytes

    def reset(self):
        self.tier.clear()

    def num_faults(self):
        return self.tier.stats.faults.total()


class OurDisk(Ours):
    """`DiskTier` on a device in memory that fails as it is told."""

    survives = True

    def __init__(self):
        self.disk = FaultyDisk()

    def make(self, capacity_bytes):
        self.disk.is_taken, self.disk.crash = False, None
        self.disk.write_faults = []
        return DiskTier("unused", capacity_bytes, segments=self.disk)

    def room(self, capacity_bytes):
        return self.tier._live_limit() // (self.row_bytes + 128) - 1

    def advance(self):
        try:
            return super().advance()
        except CrashedError:
            raise KilledError from None

    def used_bytes(self):
        return self.disk.total

    def flip(self, key):
        found = self.tier._entries.get(key_of(0, key))
        if found:
            header, offset = found
            self.disk.files[header.segment][offset + 128 + Random(key).randrange(4096)] ^= 8

    def tear(self):
        self.disk.lose_power(1000)

    def fill(self, is_full):
        self.disk.write_faults = ["full"] * 1000 * is_full

    def kill(self, num_writes, share):
        self.disk.crash = num_writes, share

    def swap(self, key, other):
        places = [self.tier._entries.get(key_of(0, each)) for each in (key, other)]
        if all(places):
            spans = [(self.disk.files[h.segment], slice(at, at + 4224)) for h, at in places]
            records = [bytes(data[span]) for data, span in spans]
            for (data, span), record in zip(spans, records[::-1], strict=True):
                data[span] = record
