"""The files of a disk tier hold what was written, however few bytes a system call moves."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.tiers.folder import Folder
from tests.kvcore.sabotage.registry import _with_edit

WRITES = st.tuples(
    st.integers(1, 2),  # which segment
    st.integers(0, 9),  # how far behind its beginning
    st.lists(st.integers(0, 7), min_size=1, max_size=3),  # how long each piece is
)
MOST = st.lists(st.integers(1, 5), min_size=1, max_size=6)


def check_short_calls(folder, most, writes, cut):
    """Write, cut and read as bytes in memory, with at most so many bytes a system call, in turn."""
    write, read, turn = os.pwritev, os.pread, iter(range(10**6))

    def limit():
        return most[next(turn) % len(most)]

    def short_write(file, pieces, offset):
        data = b"".join(pieces)[: limit()]
        if next(turn) > 2000:
            raise TimeoutError
        return write(file, [data], offset)

    wanted = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwritev", short_write)
        patch.setattr(os, "pread", lambda file, count, at: read(file, min(count, limit()), at))
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
            assert folder.read(number, 0, len(file) + 3) == file
            assert folder.read(number, 2, 4) == file[2:6]
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
        ("write", "while left:\n            count", "if left:\n            count"),
        ("write", "offset += count", "pass"),
        ("write", "left[0] = left[0][count:]", "pass"),
        ("read", "while 0 < len(data) < length:", "while False:"),
        ("read", "offset + len(data))", "offset)"),
    ],
)
def test_a_short_call_that_counts_as_whole_is_seen(tmp_path, monkeypatch, function, old, new):
    broken = Folder(tmp_path)
    broken.start()
    original = getattr(Folder, function)
    monkeypatch.setattr(original, "__code__", _with_edit("short", original, old, new).__code__)
    with pytest.raises((AssertionError, TimeoutError)):
        check_short_calls(broken, [2, 3], [(1, 0, [5, 4]), (1, 3, [7])], 9)
