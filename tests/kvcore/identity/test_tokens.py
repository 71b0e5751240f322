"""Tokens arrive as sequences of ints or packed; both become the same bytes."""

from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvcore
from kvcore.identity.tokens import slices

IDS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


@given(IDS)
def test_every_form_of_the_same_tokens_packs_to_the_same_bytes(ids):
    packed = kvcore.pack(ids)
    assert list(packed) == ids
    forms = [
        tuple(ids),
        array("I", ids),
        memoryview(array("I", ids)),
        np.array(ids, dtype=np.uint32),
        np.array(ids, dtype=np.int64),
        np.array([value for value in ids for _ in range(2)], dtype=np.uint32)[::2],
    ]
    for form in forms:
        assert kvcore.pack(form) == packed


def test_packing_copies_so_that_the_callers_buffer_stays_its_own():
    mine = array("I", [1, 2, 3])
    packed = kvcore.pack(mine)
    mine[0] = 9
    mine.append(4)  # no view of it is left exported
    assert list(packed) == [1, 2, 3]


@pytest.mark.parametrize(
    "wrong",
    [
        "text",
        b"\x01\x00\x00\x00",
        bytearray(4),
        {1: 2},
        {1, 2},
        pytest.param(iter([1, 2]), id="iterator"),
        7,
        None,
        [1.5],
        [None],
        ["1"],
        [-1],
        [2**32],
        [1, [2]],
        np.zeros((2, 2), dtype=np.uint32),
        np.array([0.5]),
        np.array([-1]),
    ],
    ids=repr,
)
def test_what_is_no_token_ids_is_a_typed_error(wrong):
    with pytest.raises(kvcore.InvalidArgumentError, match="tokens: wanted"):
        kvcore.pack(wrong)


def test_a_list_that_changes_while_it_is_read_is_refused():
    class Growing:
        def __index__(self):
            tokens.append(1)
            return 1

    tokens = [Growing(), 2]
    with pytest.raises(kvcore.InvalidArgumentError, match="tokens: wanted a list of ints, got one"):
        kvcore.pack(tokens)


class Broken:
    """Fails with an error of its own when it is read."""

    def __init__(self, error):
        self.error = error

    def __len__(self):
        return 1

    def __getitem__(self, index):
        raise self.error

    def __index__(self):
        raise self.error


@pytest.mark.parametrize("error", [RuntimeError, NotImplementedError, KeyError, ZeroDivisionError])
@pytest.mark.parametrize("form", [Broken, lambda error: [Broken(error)], lambda e: (Broken(e),)])
def test_an_error_of_the_callers_own_comes_out_as_it_is(form, error):
    kv = kvcore.KVCacheManager(8, 4)
    seq = kv.open([1])
    tokens = form(error("worker died"))
    for call in (kv.open, kv.plan, lambda t: kv.extend(seq, t), lambda t: kv.decode_step([seq], t)):
        with pytest.raises(error, match="worker died") as caught:
            call(tokens)
        assert caught.type is error
    assert (seq.num_tokens, kv.num_free_blocks) == (1, 7)
    kvcore.check(kv)


@given(st.integers(0, 50), st.integers(1, 5), st.integers(0, 7))
def test_slices_are_whole_blocks_however_many(count, width, start):
    packed = kvcore.pack(range(start + count * width + 3))
    found = slices(packed, start, start + count * width, width)
    wanted = [list(range(at, at + width)) for at in range(start, start + count * width, width)]
    assert [memoryview(piece).cast("I").tolist() for piece in found] == wanted


def test_bytes_are_packed_tokens_only_when_the_caller_says_so():
    data = array("I", [7, 8]).tobytes()
    assert list(kvcore.pack(memoryview(data).cast("I"))) == [7, 8]
