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


@pytest.mark.parametrize(
    "make",
    [
        lambda n: array("q", [-7] * n),
        lambda n: np.full(n, -7, "i8"),
        lambda n: array("i", [-7] * n),
        lambda n: np.full(n, -7, "i4"),
    ],
)
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


@pytest.fixture(scope="module")
def wide():
    """A sequence whose last block begins at slot 2**31."""
    kv = kvcore.KVCacheManager(2**11 + 2, 2**20)
    kv.pool.take(2**11 - 2)
    seq = kv.open([1])
    kv.reserve(seq, 2**20 + 1)
    assert seq.block_table == (2**11 - 1, 2**11)
    return kv, seq


def test_slots_are_written_in_32_bits_as_long_as_they_fit(wide):
    kv, seq = wide
    for name in ("out", "slot_mapping"):
        slots, tables = array("i", [-7] * 2), array("i", [-7] * 2)

        def write(slots=slots, tables=tables, name=name):
            if name == "out":
                return seq.write_slot_mapping(2**20 - 1, 2**20 + 1, slots)
            seq.num_computed_tokens = 2**20
            try:
                return kv.write_step([seq], tables, slots, row_stride=2)
            finally:
                seq.num_computed_tokens = 0

        with pytest.raises(kvcore.InvalidArgumentError, match=f"{name}: .* int64 for slot {2**31}"):
            write()
        assert [*slots, *tables] == [-7] * 4
    assert seq.write_slot_mapping(2**20 - 2, 2**20, slots) == 2
    assert list(slots) == [2**31 - 2, 2**31 - 1]


ROWS = st.tuples(st.integers(0, 5), st.integers(1, 6))


@given(
    lengths=st.lists(st.integers(1, 12), max_size=4),
    shape=ROWS,
    kind=st.sampled_from(["i4", "i8"]),
    slot_kind=st.sampled_from(["i4", "i8"]),
)
def test_rows_of_two_dimensions_are_those_of_one_with_a_stride(lengths, shape, kind, slot_kind):
    """Or both are refused, and nothing is written."""
    kv = kvcore.KVCacheManager(64, 4)
    seqs = [kv.open([7] * length) for length in lengths]
    for seq in seqs:
        kv.reserve(seq, seq.num_tokens)
    tables, slots = np.full(shape, -7, kind), np.full(sum(lengths), -7, slot_kind)
    longest = max((len(seq.block_table) for seq in seqs), default=0)
    if shape[0] < len(seqs) or shape[1] < longest:
        with pytest.raises(kvcore.InvalidArgumentError, match=f"wanted at least {len(seqs)} rows"):
            kv.write_step(seqs, tables, slots, counts=lengths)
        assert (tables == -7).all()
        assert (slots == -7).all()
        return
    kv.write_step(seqs, tables, slots, counts=lengths)
    flat, same = np.full(shape[0] * shape[1], -7, kind), np.full(sum(lengths), -7, "i8")
    kv.write_step(seqs, flat, same, counts=lengths, row_stride=shape[1])
    assert tables.reshape(-1).tolist() == flat.tolist()
    assert slots.tolist() == same.tolist()
    for row, seq in zip(tables.tolist(), seqs, strict=False):
        table = list(seq.block_table)
        assert row == table + [-7] * (shape[1] - len(table))


@pytest.mark.parametrize(
    ("tables", "stride", "message"),
    [
        (np.zeros(8, "i4"), None, "two dimensions, or one and a row_stride, got 1 and none"),
        (np.zeros((2, 4), "i4"), 4, "two dimensions, or one and a row_stride, got 2 and 4"),
        (np.zeros((1, 2, 4), "i4"), None, "got 3 and none"),
        (np.zeros((4, 2), "i4").T, None, "wanted a writable, contiguous buffer"),
        (np.zeros((2, 8), "i4")[:, :4], None, "wanted a writable, contiguous buffer"),
        (np.zeros((2, 4), "u4"), None, "block_tables: wanted int32 or int64"),
        (np.zeros((2, 4), "i2"), None, "block_tables: wanted int32 or int64"),
    ],
)
def test_rows_that_cannot_be_meant_are_refused(opened, tables, stride, message):
    kv, seq = opened
    slots = array("q", [-7])
    with pytest.raises(kvcore.InvalidArgumentError, match=message):
        kv.write_step([seq], tables, slots, counts=[1], row_stride=stride)
    assert not tables.any()
    assert list(slots) == [-7]


def step_of_prompts(groups=None):
    """The two prompts of the tutorial, with room, as their first step finds them."""
    kv = kvcore.KVCacheManager(num_blocks=32, block_size=4, groups=groups)
    running = [kv.open([1, 2, 3, 4, 5]), kv.open([1, 2, 9])]
    kv.reserve_step(running, [5, 3])
    return kv, running


def test_without_counts_one_slot_a_sequence_is_written_also_for_a_token_that_is_expected():
    kv, running = step_of_prompts()
    kv.step(running, [5, 3], num_known=0, num_expected=1)
    tables, slots = np.zeros((2, 4), "i4"), np.zeros(2, "i8")
    kv.write_step(running, tables, slots)
    assert slots.tolist() == [9, 15]
    kv.step(running, [1, 0], num_known=0, num_expected=1)
    with pytest.raises(kvcore.InvalidArgumentError, match=r"counts: .*KVSequence\(1, .*2 tokens"):
        kv.write_step(running, tables, slots)


@given(
    lengths=st.lists(st.integers(1, 14), max_size=4),
    data=st.data(),
    kind=st.sampled_from(["i4", "i8"]),
)
def test_a_mixed_step_is_written_as_each_sequence_would_be(lengths, data, kind):
    """Chunks, decoders and room for drafts, in every group; what there is no room for is refused.

    Each sequence's own verb is the oracle.
    """
    groups = [kvcore.FullAttention(block_size=8), kvcore.SlidingWindow(5, block_size=4)]
    kv = kvcore.KVCacheManager(64, 4, groups=groups)
    seqs = [kv.open([index] * length) for index, length in enumerate(lengths)]
    for seq in seqs:
        done = data.draw(st.integers(0, seq.num_tokens))
        kv.reserve(seq, done)
        kv.commit(seq, done)
        kv.reserve(seq, data.draw(st.integers(0, 7)))
    group = data.draw(st.integers(0, 1))
    size = kv.groups[group].block_size
    counts = [data.draw(st.integers(0, 9)) for _ in seqs]
    rooms = [len(seq.tables[group].blocks) * size - seq.num_computed_tokens for seq in seqs]
    tables, slots = np.full((len(seqs), 6), -7, "i4"), np.full(sum(counts) + 1, -7, kind)
    if any(count > room for count, room in zip(counts, rooms, strict=True)):
        with pytest.raises(kvcore.NotReservedError, match="counts"):
            kv.write_step(seqs, tables, slots, counts=counts, group=group)
        assert (tables == -7).all()
        assert (slots == -7).all()
        return
    kv.write_step(seqs, tables, slots, counts=counts, group=group)
    wanted, rows = np.full_like(slots, -7), np.full_like(tables, -7)
    end = 0
    for row, seq, count in zip(rows, seqs, counts, strict=True):
        seq.write_block_table(row, group)
        start = seq.num_computed_tokens
        end += seq.write_slot_mapping(start, start + count, wanted[end:], group)
    assert tables.tolist() == rows.tolist()
    assert slots.tolist() == wanted.tolist()


class Closes:
    """A number that closes a sequence when it is read."""

    def __init__(self, seq):
        self.seq = seq

    def __index__(self):
        self.seq.owner.close(self.seq)
        return 5


HOSTILE_STEPS = {
    "InvalidArgumentError: counts: wanted an integer": [
        lambda kv, a, b: ([a, b], [5.0, 3]),
        lambda kv, a, b: ([a, b], np.array([5.0, 3.0])),
        lambda kv, a, b: ([a, b], [True, 3]),
        lambda kv, a, b: ([a, b], "53"),
    ],
    "InvalidArgumentError: counts: wanted at least 0": [
        lambda kv, a, b: ([a, b], [-1, 3]),
        lambda kv, a, b: ([a, b], np.array([5, -3])),
    ],
    "InvalidArgumentError: counts: wanted 0 to": [lambda kv, a, b: ([a, b], [10**5000, 3])],
    "InvalidArgumentError: counts: wanted a sequence": [lambda kv, a, b: ([a, b], 8)],
    "InvalidArgumentError: counts: wanted one for each of 2 sequences": [
        lambda kv, a, b: ([a, b], [8]),
        lambda kv, a, b: ([a, b], []),
        lambda kv, a, b: ([a, b], [5, 3, 0]),
    ],
    "NotReservedError: counts: .* blocks for 8 tokens .* got 9": [
        lambda kv, a, b: ([a, b], [9, 3]),
    ],
    "InvalidArgumentError: seqs: wanted each once": [lambda kv, a, b: ([a, a], [1, 1])],
    "ForeignSequenceError: .* another manager": [
        lambda kv, a, b: ([a, step_of_prompts()[1][1]], [5, 3]),
    ],
    "StaleSequenceError: .* is closed": [
        lambda kv, a, b: (kv.close(b), ([a, b], [5, 3]))[1],
        lambda kv, a, b: ([a, b], [Closes(a), 3]),
    ],
    "InvalidArgumentError: seq: wanted a KVSequence, got None|KVSequence object expected": [
        lambda kv, a, b: ([a, None], [5, 3]),
    ],
}


@pytest.mark.parametrize(
    ("wanted", "make"), [(wanted, make) for wanted, each in HOSTILE_STEPS.items() for make in each]
)
def test_a_step_that_cannot_be_meant_is_a_typed_error_and_writes_nothing(wanted, make):
    kv, running = step_of_prompts()
    seqs, counts = make(kv, *running)
    tables, slots = np.full((3, 4), -7, "i4"), np.full(16, -7, "i8")
    error, message = wanted.split(": ", 1)
    with pytest.raises((getattr(kvcore, error), TypeError), match=message):  # compiled code's own
        kv.write_step(seqs, tables, slots, counts=counts)
    assert (tables == -7).all()
    assert (slots == -7).all()
    kvcore.check(kv)


@pytest.mark.parametrize(
    "slots",
    [
        np.full(7, -7, "i8"),  # one short of 5 + 3
        np.full(8, -7, "f8"),
        np.full(8, 7, "u8"),
        np.full(8, -7, "i2"),
        np.full(8, -7, ">i8"),
        np.full((1, 8), -7, "i8"),
        np.full(16, -7, "i8")[::2],
        [-7] * 8,
    ],
    ids=lambda slots: str(getattr(slots, "dtype", list)),
)
def test_slots_of_a_step_that_do_not_fit_are_refused_and_untouched(slots):
    kv, running = step_of_prompts()
    tables, before = np.full((2, 4), -7, "i4"), np.array(slots)
    with pytest.raises(kvcore.InvalidArgumentError, match="slot_mapping: wanted"):
        kv.write_step(running, tables, slots, counts=[5, 3])
    assert (tables == -7).all()
    assert (np.array(slots) == before).all()


def test_a_tag_is_the_callers_own(opened):
    """On both builds: a handle of compiled code has no weak references."""
    kv, seq = opened
    assert seq.tag is None
    seq.tag = request = object()
    kv.commit(seq, 10)
    child, _ = kv.fork(seq)
    kv.close(seq)
    assert (seq.tag, child.tag) == (request, None)
