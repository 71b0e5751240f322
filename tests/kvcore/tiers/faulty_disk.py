"""A disk that fails in every way that disks do, one operation at a time, and counts its bytes."""

import errno

from kvcore.tiers import TierError

WRITES = ("torn", "lost", "late", "repeated", "stale", "elsewhere", "corrupted", "short", "full",
          "gone")  # fmt: skip
READS = ("failed", "corrupted", "short", "stale")


class BrokenError(AssertionError):
    """A property does not hold; the message begins with its number."""

    @property
    def prop(self):
        """Its number, as `kvcore.InvariantError` has it."""
        return str(self).partition(":")[0]


class CrashedError(BaseException):
    """The process has died; nothing of it goes on."""


class FaultyDisk:
    """Segments in memory. It outlives the process that uses it.

    `write_faults` and `read_faults` say what becomes of the next operations; None: they succeed.
    `room`: the bytes that the device has for the files; None: any number. `refusal`: the error that
    each change of a file raises, as on a read-only device; None: none.
    `crash`: how many operations that change files still succeed before the process dies, and the
    share of the next one that takes place; None: it lives.
    """

    def __init__(self):
        self.files = {}
        self.write_faults = []
        self.read_faults = []
        self.crash = self.room = self.refusal = None
        self.late = []
        self.capacity = None
        self.is_gone = self.is_taken = self.is_undeletable = False
        self.num_moved = self.num_changes = 0
        self.unwritten = set()  # (number, offset) of writes that have failed

    def start(self):
        if self.is_taken:
            raise TierError("disk tier: in use by another process")
        self.is_taken = True

    def retake(self):
        self._check_changeable()

    def close(self):
        self.is_taken = False

    def _share(self):
        """The share of an operation that takes place; None: all, and the process lives on."""
        if self.crash is None:
            return None
        left, share = self.crash
        if left:
            self.crash = left - 1, share
            return None
        self.crash = None
        return share

    def sizes(self):
        self._check_there()
        return {number: len(data) for number, data in self.files.items()}

    def write(self, number, offset, pieces):
        try:
            self._write(number, offset, pieces)
        except OSError:
            self.unwritten.add((number, offset))
            raise
        self.unwritten.discard((number, offset))

    def _write(self, number, offset, pieces):
        self._check_changeable()
        data = b"".join(pieces)
        self._check_room(number, offset, data)
        share = self._share()
        if share is not None:
            self._put(number, offset, data[: int(len(data) * share)])
            raise CrashedError
        fault = self.write_faults.pop(0) if self.write_faults else None
        if fault == "gone":
            self.is_gone = True
            self._check_there()
        half = data[: len(data) // 2]
        if fault in ("torn", "full"):
            self._put(number, offset, half)
            raise OSError(errno.EIO if fault == "torn" else errno.ENOSPC, fault)
        if fault in ("late", "lost"):
            self._put(number, offset, bytes(len(data)))
        elif fault == "short":  # the header is there, and all but the end of the payload
            self._put(number, offset, data[:-7])
        elif fault == "corrupted" and len(data) > 3:
            spot = len(data) - 3
            self._put(number, offset, data[:spot] + bytes([data[spot] ^ 4]) + data[spot + 1 :])
        elif fault == "elsewhere" and len(self.files) > 1:  # what stands last in another file
            others = [file for other, file in self.files.items() if other != number]
            self._put(number, offset, bytes(others[-1][-len(data) :]).ljust(len(data), b"\0"))
        elif fault == "stale":  # what stood in these places of the device before
            older = b"".join(self.files.values())[-len(data) :]
            self._put(number, offset, older.ljust(len(data), b"\0"))
        else:
            self._put(number, offset, data)
        if fault in ("late", "repeated"):
            self.late.append((number, offset, data))

    def land(self):
        """Carry out what is late, and again what is repeated, where the file still is."""
        for number, offset, data in self.late:
            if offset + len(data) <= len(self.files.get(number, b"")):
                self._put(number, offset, data)
        self.late = []

    def read(self, number, offset, buffers):
        """All in one piece, as far as it goes."""
        data = self._read(number, offset, sum(map(len, buffers)))
        left = data
        for buffer in buffers:
            buffer[: len(left)] = left[: len(buffer)]
            left = left[len(buffer) :]
        return len(data)

    def _read(self, number, offset, length):
        self._check_there()
        if number not in self.files:
            raise FileNotFoundError(errno.ENOENT, "no such segment")
        data = bytes(self.files[number][offset : offset + length])
        fault = self.read_faults.pop(0) if self.read_faults else None
        if fault == "failed":
            raise OSError(errno.EIO, fault)
        if fault == "corrupted" and len(data) > 3:
            spot = len(data) - 3
            return data[:spot] + bytes([data[spot] ^ 4]) + data[spot + 1 :]
        if fault == "short":
            return data[: len(data) // 2]
        if fault == "stale":
            others = [file for other, file in self.files.items() if other != number]
            return bytes(others[0][offset : offset + length]) if others else data
        return data

    def cut(self, number, size):
        self._check_changeable()
        if number not in self.files:
            raise FileNotFoundError(errno.ENOENT, "no such segment")
        share = self._share()
        if share != 0:
            del self.files[number][size:]
        if share is not None:
            raise CrashedError

    def delete(self, number):
        self._check_changeable()
        if self.is_undeletable:
            raise OSError(errno.EPERM, "not permitted")
        if number not in self.files:
            raise FileNotFoundError(errno.ENOENT, "no such segment")
        share = self._share()
        if share != 0:
            del self.files[number]
        if share is not None:
            raise CrashedError

    def lose_power(self, num_bytes):
        """The end of what was written last is missing, and what is late never comes."""
        self.late = []
        if self.files:
            last = self.files[max(self.files)]
            del last[max(0, len(last) - num_bytes) :]

    @property
    def total(self):
        return sum(map(len, self.files.values()))

    def _check_room(self, number, offset, data):
        """Write as much as there is room for, and fail, unless there is room for all."""
        if self.room is None:
            return
        grows = max(0, offset + len(data) - len(self.files.get(number, b"")))
        missing = min(len(data), self.total + grows - self.room)
        if missing > 0:
            self._put(number, offset, data[:-missing])
            raise OSError(errno.ENOSPC, "no space left")

    def _put(self, number, offset, data):
        file = self.files.setdefault(number, bytearray())
        file.extend(bytes(max(0, offset - len(file))))
        file[offset : offset + len(data)] = data
        self.num_moved += len(data)
        if self.capacity is not None and self.total > self.capacity:
            raise BrokenError(f"P39: {self.total} bytes on a disk tier of {self.capacity}")

    def _check_changeable(self):
        self._check_there()
        self.num_changes += 1
        if self.refusal is not None:
            raise OSError(self.refusal, "the device takes no changes")

    def _check_there(self):
        if self.is_gone:
            raise FileNotFoundError(errno.ENOENT, "the folder is gone")
