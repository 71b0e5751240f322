"""Memory that a peer reads, here in one process, where a read fails in the ways of real ones."""

from kvcore.tiers import LinkError
from tests.kvcore.tiers.faulty_disk import BrokenError
from tests.kvcore.tiers.faulty_link import check_deadline

FAULTS = ("torn", "late", "lost", "corrupted", "stale", "short", "unreachable")


class FaultyMemoryLink:
    """Both ends. `faults` says what becomes of the next reads; None: they succeed."""

    name = "a memory"

    def __init__(self):
        self.shared = {}  # by what describes it
        self.faults = []
        self.has_failed = False

    def share(self, size):
        return FaultyMemory(self, size)

    def reader(self, largest):
        return FaultyReader(self, largest)

    def take_fault(self):
        return self.faults.pop(0) if self.faults else None


class FaultyMemory:
    """The memory of the process that serves."""

    def __init__(self, link, size):
        self.link, self.content = link, bytearray(size)
        self.before = bytes(size)

    def describe(self):
        name = f"memory {len(self.link.shared)}".encode()
        self.link.shared[name] = self
        return name

    def write(self, offset, payload):
        self.before = bytes(self.content)
        self.content[offset : offset + len(payload)] = payload

    def progress(self):
        pass

    def close(self):
        self.content = None


class FaultyReader:
    """The reader of the process that asks; after an error nothing may be read with it."""

    def __init__(self, link, largest):
        self.link, self.largest = link, largest
        self.there = None
        self.is_broken = False

    def attach(self, description):
        self.check()
        if self.link.take_fault() == "unreachable":
            raise self.error("failed")
        self.there = self.link.shared[description]

    def read(self, offset, size, deadline_s):
        self.check()
        check_deadline(deadline_s)
        fault = self.link.take_fault()
        if fault in ("lost", "unreachable") or self.there.content is None:
            raise self.error("failed")
        if fault == "late":
            raise self.error("late")
        if size > self.largest:
            raise BrokenError("P38: more is read than there is room for")
        found = bytearray(self.there.content[offset : offset + size])
        wanted = bytes(found)
        if fault == "torn":
            found[size // 2 :] = bytes(len(found[size // 2 :]))
        elif fault == "corrupted":
            found[-1] ^= 4
        elif fault == "stale":
            found = bytearray(self.there.before[offset : offset + size])
        elif fault == "short":
            found = found[: size // 2]
        self.link.has_failed |= found != wanted
        return memoryview(found)

    def close(self):
        self.is_broken = True

    def error(self, fault):
        self.is_broken = self.link.has_failed = True
        return LinkError(fault)

    def check(self):
        if self.is_broken:
            raise BrokenError("P38: a reader that has failed is used again")
