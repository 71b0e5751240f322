"""Positions to slots, and what may be written where (P14, P23)."""

from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvcore


@given(
    st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=6),
    st.integers(1, 64),
    st.data(),
)
def test_slots_of_a_range_are_the_slots_of_its_positions(table, block_size, data):
    room = len(table) * block_size
    start = data.draw(st.integers(0, room))
    stop = data.draw(st.integers(start, room))
    wanted = [kvcore.slot_of(table, position, block_size) for position in range(start, stop)]
    assert list(kvcore.slots_of(table, start, stop, block_size)) == wanted


def test_slots_are_wider_than_32_bits():
    assert list(kvcore.slots_of([2**31 - 1], 0, 1, 1024)) == [(2**31 - 1) * 1024]


@pytest.fixture
def opened():
    kv = kvcore.KVCacheManager(8, 4)
    seq = kv.open(range(10))
    kv.reserve(seq, 10)
    return kv, seq


@pytest.mark.parametrize("make", [lambda n: array("i", [-7] * n), lambda n: np.full(n, -7, "i4")])
def test_a_block_table_is_written_at_the_start_of_a_buffer(opened, make):
    _, seq = opened
    out = make(5)
    assert seq.write_block_table(out) == 3
    assert list(out) == [1, 2, 3, -7, -7]


@pytest.mark.parametrize("make", [lambda n: array("q", [-7] * n), lambda n: np.full(n, -7, "i8")])
def test_a_slot_mapping_is_written_at_the_start_of_a_buffer(opened, make):
    _, seq = opened
    out = make(6)
    assert seq.write_slot_mapping(3, 6, out) == 3
    assert list(out) == [7, 8, 9, -7, -7, -7]
    assert seq.write_slot_mapping(6, 6, out) == 0


@pytest.mark.parametrize(
    "out",
    [
        array("i", [0]),  # too short
        array("q", [0] * 9),  # too wide
        array("I", [0] * 9),  # unsigned
        array("f", [0] * 9),
        np.zeros((3, 3), "i4"),
        np.zeros(18, "i4")[::2],
        bytes(36),
        memoryview(bytes(36)).cast("i"),  # read-only
        [0] * 9,
        None,
    ],
    ids=lambda out: type(out).__name__,
)
def test_a_buffer_that_does_not_fit_is_refused_and_untouched(opened, out):
    _, seq = opened
    before = (
        None
        if out is None
        else bytes(memoryview(out).tobytes() if not isinstance(out, list) else out)
    )
    with pytest.raises(kvcore.InvalidArgumentError, match="out: wanted"):
        seq.write_block_table(out)
    if before is not None:
        assert before == bytes(memoryview(out).tobytes() if not isinstance(out, list) else out)


def test_slots_without_a_block_are_refused(opened):
    _, seq = opened
    out = array("q", [0] * 20)
    assert seq.write_slot_mapping(0, 12, out) == 12
    with pytest.raises(kvcore.NotReservedError, match="positions 0 to 12"):
        seq.write_slot_mapping(0, 13, out)
    with pytest.raises(kvcore.InvalidArgumentError, match="stop"):
        seq.write_slot_mapping(3, 2, out)
