"""A link to a peer that fails in every way that links do, one answer at a time, in memory."""

import time

from kvcore.tiers import LinkError, PeerServer, PeerSession, link, record
from tests.kvcore.tiers.faulty_disk import BrokenError

FAULTS = (
    "torn", "late", "stale", "repeated", "corrupted", "flipped", "short", "foreign", "lost", "slow",
)  # fmt: skip
LONGEST_S = 60.0


class FaultyLink:
    """Connections to the server of another machine, which may be another process later.

    `faults` says what becomes of the next answers and news; None: they come.
    """

    def __init__(self, other, secret, memory=None):
        self.other, self.secret, self.memory = other, secret, memory
        self.server = None
        self.faults = []
        self.channels = []
        self.num_cleared = 0
        self.answers = [b"an answer of before"]

    def connect(self, deadline_s):
        check_deadline(deadline_s)
        if self.take_fault() == "lost":
            raise ConnectionRefusedError
        if self.server is None or self.server.manager is not self.other.tiers:
            self.server = PeerServer(self.other.tiers, self.secret, self.memory)
            self.server.share()
        self.channels.append(FaultyChannel(self, self.server))
        return self.channels[-1]

    def end_all(self):
        """The process that asks has ended, so its connections have."""
        for channel in self.channels:
            channel.close()
        self.channels = []

    def take_fault(self):
        return self.faults.pop(0) if self.faults else None


class FaultyChannel:
    """One connection."""

    def __init__(self, faulty, server):
        self.link, self.server = faulty, server
        self.session = PeerSession(server)
        self.coming = bytearray(self.session.welcome)
        self.held_back = b""
        self.is_over = self.had_faults = False

    def send(self, pieces, deadline_s):
        check_deadline(deadline_s)
        self.check_there()
        data = b"".join(pieces)
        if self.session.is_read and data == link.READ:
            self.session.is_read = False
            return
        if self.session.purpose:
            if self.session.is_read:
                raise BrokenError("P38: a peer asks on before it has read a copy")
            _, key, _ = link.QUESTION.unpack(data)
            if key[3] & 128:
                raise BrokenError("P37: a peer is asked for a content with a salt")
            answer = b"".join(self.session.copy(data))
            is_there = answer[record.DEAD_OFFSET : record.DEAD_OFFSET + 1] != record.DEAD
            if is_there and key not in self.link.other.since_clear:
                raise BrokenError("P37: a peer served what was forgotten by a reset")
        else:
            answer = self.session.agree(data)
        self.deliver(answer)

    def receive(self, size, deadline_s):
        check_deadline(deadline_s)
        if self.session.purpose == link.TO_HEAR and len(self.coming) < size:
            self.check_there()
            news = self.session.news()
            if any(news[at + 3] & 128 for at in range(link.NEWS.size, len(news), link.KEY_BYTES)):
                raise BrokenError("P37: a peer names a content with a salt")
            if not self.link.faults:
                self.link.num_cleared += news[0]
            self.deliver(news)
        if len(self.coming) < size:
            raise LinkError("torn" if self.is_over else "late")
        found = self.coming[:size]
        del self.coming[:size]
        return found

    def close(self):
        self.is_over = True
        self.coming.clear()
        self.session.close()

    def check_there(self):
        if self.is_over or self.server.manager is not self.link.other.tiers:
            raise ConnectionResetError

    def deliver(self, answer):
        """Let an answer come, or what its fault makes of it."""
        fault, before = self.link.take_fault(), self.link.answers[-1]
        self.had_faults |= fault is not None
        self.link.answers = [*self.link.answers[-3:], answer]
        self.coming += self.held_back
        self.held_back = b""
        if fault == "torn":
            self.coming += answer[: len(answer) // 2]
            self.is_over = True
        elif fault == "lost":
            self.close()
            raise ConnectionResetError
        elif fault in ("late", "slow"):
            self.coming += b"" if fault == "late" else answer[:-1]
            self.held_back = answer if fault == "late" else answer[-1:]
        elif fault == "stale":
            self.coming += before
        elif fault == "repeated":
            self.coming += answer + answer
        elif fault == "corrupted":
            self.coming += answer[:-3] + bytes([answer[-3] ^ 4]) + answer[-2:]
        elif fault == "flipped":
            place = min(60, len(answer) // 2)
            self.coming += answer[:place] + bytes([answer[place] ^ 4]) + answer[place + 1 :]
        elif fault in ("short", "foreign"):
            again = rewritten(answer, fault)
            if again == answer:  # not yet
                self.link.faults.insert(0, fault)
            self.coming += again
        else:
            self.coming += answer


def rewritten(answer, fault):
    """A record that is whole, but shorter, or of another meaning; anything else as it is."""
    header = record.decode_header(answer)
    if not isinstance(header, record.Header) or header.is_dead:
        return answer
    payload = answer[record.RECORD_BYTES :]
    if fault == "short":
        payload, meaning = payload[: len(payload) // 2], header.meaning
    else:
        payload, meaning = bytes([one ^ 255 for one in payload]), bytes(32)
    about = header.priority, header.segment, header.number, len(payload)
    again = record.Header(header.key, meaning, *about, record.checksum_of(payload))
    return again.encode() + payload


def check_deadline(deadline_s):
    if not deadline_s < time.monotonic() + LONGEST_S:
        raise BrokenError("P41: a peer is waited for without end")
