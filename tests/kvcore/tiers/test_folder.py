"""The files of a disk tier hold what was written, however few bytes a system call moves."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.tiers.folder import Folder, _after
from tests.kvcore.sabotage.registry import _with_edit

WRITES = st.tuples(
    st.integers(1, 2),  # which segment
    st.integers(0, 9),  # how far behind its beginning
    st.lists(st.integers(0, 7), min_size=1, max_size=3),  # how long each piece is
)
MOST = st.lists(st.integers(1, 5), min_size=1, max_size=6)


def check_short_calls(folder, most, writes, cut):
    """Write, cut and read as bytes in memory, with at most so many bytes a system call, in turn."""
    write, read, turn = os.pwritev, os.preadv, iter(range(10**6))

    def limit():
        return most[next(turn) % len(most)]

    def short_write(file, pieces, offset):
        data = b"".join(pieces)[: limit()]
        if next(turn) > 2000:
            raise TimeoutError
        return write(file, [data], offset)

    def short_read(file, buffers, offset):
        if next(turn) > 2000:
            raise TimeoutError
        return read(file, [buffers[0][: limit()]], offset)

    wanted = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwritev", short_write)
        patch.setattr(os, "preadv", short_read)
        for number, offset, lengths in writes:
            pieces = [bytes([65 + place]) * length for place, length in enumerate(lengths)]
            folder.write(number, offset, pieces)
            data, file = b"".join(pieces), wanted.setdefault(number, bytearray())
            if data:
                file.extend(bytes(max(0, offset - len(file))))
                file[offset : offset + len(data)] = data
        first = next(iter(wanted))
        folder.cut(first, min(cut, len(wanted[first])))
        del wanted[first][cut:]
        assert folder.sizes() == {number: len(file) for number, file in wanted.items()}
        for number, file in wanted.items():
            some, rest = bytearray(2), bytearray(len(file) + 1)
            assert folder.read(number, 0, [some, rest]) == len(file)
            assert (some + rest)[: len(file)] == file
            assert folder.read(number, 2, [middle := bytearray(4)]) == len(file[2:6])
            assert middle[: len(file[2:6])] == file[2:6]
            folder.delete(number)
    assert folder.sizes() == {}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = Folder(tmp_path_factory.mktemp("tier"))
    made.start()
    yield made
    made.close()


@given(most=MOST, writes=st.lists(WRITES, min_size=1, max_size=4), cut=st.integers(0, 9))
def test_a_segment_holds_what_was_written_however_short_the_calls_are(folder, most, writes, cut):
    check_short_calls(folder, most, writes, cut)


@pytest.mark.source_build
@pytest.mark.parametrize(
    ("function", "old", "new"),
    [
        (Folder.write, "while left:\n            count", "if left:\n            count"),
        (Folder.write, "offset += count", "pass"),
        (_after, "left[0] = left[0][count:]", "pass"),
        (Folder.read, "while left and", "if left and"),
        (Folder.read, "offset += count", "pass"),
    ],
)
def test_a_short_call_that_counts_as_whole_is_seen(tmp_path, monkeypatch, function, old, new):
    broken = Folder(tmp_path)
    broken.start()
    monkeypatch.setattr(function, "__code__", _with_edit("short", function, old, new).__code__)
    with pytest.raises((AssertionError, TimeoutError)):
        check_short_calls(broken, [2, 3], [(1, 0, [5, 4]), (1, 3, [7])], 9)
