"""What must hold of the index of a disk tier, beside the bytes on its faulty disk."""

from kvcore.tiers.record import RECORD_BYTES, decode_header
from tests.kvcore.tiers.faulty_disk import BrokenError


def check_records(tier, disk):
    """P37: just after a start each record that is found stands where the index says, and whole."""
    for key, (header, offset) in tier._entries.items():
        file = disk.files.get(header.segment, b"")
        there = decode_header(bytes(file[offset : offset + RECORD_BYTES]))
        if header.key != key or there != header:
            raise BrokenError("P37: a record is found that does not stand where the index says")
        if offset + RECORD_BYTES + header.length > len(file):
            raise BrokenError("P37: a record is found that is torn")


def check_counts(tier):
    """P39: the live bytes and the keys of each segment are those of the records in it."""
    live, keys = dict.fromkeys(tier._segments, 0), {number: set() for number in tier._segments}
    for key, (header, _) in tier._entries.items():
        if header.segment not in live:
            raise BrokenError("P39: a record is found in a segment that is not there")
        live[header.segment] += RECORD_BYTES + header.length
        keys[header.segment].add(key)
    for number, segment in tier._segments.items():
        if (segment.live, {*segment.keys}) != (live[number], keys[number]):
            raise BrokenError("P39: a segment counts other records than those that it has")
