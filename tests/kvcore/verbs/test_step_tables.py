"""Kept block tables: what is refused leaves rows that the next call writes right."""

import pytest

import kvcore

TWO = [kvcore.FullAttention(), kvcore.SlidingWindow(8)]


def opened(manager, *lengths):
    seqs = [manager.open([number] * length) for number, length in enumerate(lengths, 1)]
    for seq, length in zip(seqs, lengths, strict=True):
        manager.reserve(seq, length)
    return seqs


def kept(group=0):
    """Tables, and what reads their rows."""
    buffers = []

    def allocate(rows, width):
        buffers.append(memoryview(bytearray(4 * rows * width)).cast("i", (rows, width)))
        return buffers[-1]

    tables = kvcore.StepTables(allocate, group)
    return tables, lambda row: buffers[-1].tolist()[row][: tables.lengths[row]]


def test_a_refused_update_leaves_no_row_of_another_sequence():
    first, second = opened(kvcore.KVCacheManager(40, 4, groups=TWO), 9, 5)
    (other,) = opened(kvcore.KVCacheManager(40, 4), 9)
    tables, row = kept(group=1)
    tables.update([first, second])
    with pytest.raises(kvcore.InvalidArgumentError, match="group"):
        tables.update([second, other, first])
    tables.update([first, second])
    assert [row(0), row(1)] == [[*first.block_tables[1]], [*second.block_tables[1]]]


def test_a_sequence_that_was_closed_is_refused_in_the_same_list():
    manager = kvcore.KVCacheManager(40, 4)
    seqs = opened(manager, 9, 5)
    tables, row = kept()
    tables.update(seqs)
    manager.close(seqs[1])
    with pytest.raises(kvcore.StaleSequenceError):
        tables.update(seqs)
    assert tables.update(seqs[:1])
    assert row(0) == [*seqs[0].block_table]


def test_what_is_no_buffer_is_refused():
    with pytest.raises(
        kvcore.InvalidArgumentError, match="allocate: wanted a writable buffer, got NoneType"
    ):
        kvcore.StepTables(lambda *_: None)


@pytest.mark.parametrize("name", ["num_computed", "num_known", "num_expected", "num_reserved"])
@pytest.mark.parametrize(
    "numbers",
    [[1.0, 1.0], [True, True], 2**70, [10**5000, 1]],
    ids=["floats", "bools", "huge", "no int"],
)
def test_numbers_of_a_step_are_integers_within_bounds(name, numbers):
    manager = kvcore.KVCacheManager(40, 4)
    seqs = opened(manager, 9, 5)
    none = dict.fromkeys(["num_computed", "num_known", "num_expected", "num_reserved"], 0)
    with pytest.raises(kvcore.InvalidArgumentError, match=name):
        manager.step(seqs, **{**none, name: numbers})
    assert [seq.num_tokens for seq in seqs] == [9, 5]
