"""A decode step in one call: what it does, what it refuses, and that it leaves no garbage."""

import gc
import sys
from array import array
from unittest import mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import kvcore
from tests.kvcore.views import manager_view


def running(kv, count, length=8):
    """Sequences whose prompts are computed."""
    seqs = [kv.open([index, *range(length - 1)]) for index in range(count)]
    for seq in seqs:
        todo = length - seq.num_computed_tokens
        kv.reserve(seq, todo)
        kv.commit(seq, todo)
    return seqs


@pytest.mark.parametrize(
    ("tokens", "error", "message"),
    [
        ([1], kvcore.InvalidArgumentError, "tokens: wanted 2 in all, got 1"),
        ([1, -1], kvcore.InvalidArgumentError, r"token ids in \[0, 2\*\*32\)"),
        ([1, "x"], kvcore.InvalidArgumentError, "integer token ids"),
    ],
)
def test_wrong_tokens_are_refused_and_nothing_has_changed(tokens, error, message):
    kv = kvcore.KVCacheManager(64, 4)
    seqs = running(kv, 2)
    with pytest.raises(error, match=message):
        kv.decode_step(seqs, tokens)
    assert [seq.num_tokens for seq in seqs] == [8, 8]


def test_sequences_that_cannot_take_a_step_are_refused():
    kv = kvcore.KVCacheManager(64, 4)
    first, second = running(kv, 2)
    stranger = kvcore.KVCacheManager(64, 4).open([1])
    new = kv.open([7] * 9)
    closed = kv.open([1])
    kv.close(closed)
    for seqs, error in [
        ([first, first], kvcore.InvalidArgumentError),
        ([first, stranger], kvcore.ForeignSequenceError),
        ([first, closed], kvcore.StaleSequenceError),
        ([first, new], kvcore.NotReservedError),
        ([first, "second"], (kvcore.InvalidArgumentError, TypeError)),
    ]:
        with pytest.raises(error):
            kv.decode_step(seqs, [1, 2])
        assert first.num_tokens == first.num_computed_tokens == 8
    kv.decode_step([first, second], [1, 2])
    kvcore.check(kv)


@given(
    st.lists(st.integers(1, 9), min_size=2, max_size=4),
    st.integers(0, 6),
    st.booleans(),
    st.sampled_from([{}, {"enable_caching": False}, {"groups": [kvcore.SlidingWindow(6)]}]),
)
@example([4, 5], 3, False, {})  # one only counts, and the one after it finds no block
def test_a_step_that_finds_no_block_has_not_counted_either(lengths, steps, drafts, layout):
    kv = kvcore.KVCacheManager(64, 4, **layout)
    seqs = [kv.open(range(100 * index, 100 * index + n)) for index, n in enumerate(lengths)]
    for seq in seqs:
        kv.reserve(seq, seq.num_tokens)
        kv.commit(seq, seq.num_tokens)
    for token in range(steps):
        kv.decode_step(seqs, [token] * len(seqs))
    if drafts:
        kv.append(seqs[0], 7)
        kv.reserve(seqs[0], 2)
    kv.reserve(kv.open([1]), 4 * kv.num_free_blocks)
    is_refused = False
    for token in range(5):
        before = manager_view(kv)
        try:
            kv.decode_step(seqs, [token] * len(seqs))
        except kvcore.OutOfBlocksError:
            is_refused = True
            assert manager_view(kv) == before
        kvcore.check(kv)
    assert is_refused or "groups" in layout  # a window gives back what it takes


@pytest.mark.source_build
@pytest.mark.parametrize("block_size", [1, 2, 3])
def test_a_step_that_fails_late_takes_back_the_room_that_it_has_made(monkeypatch, block_size):
    kv = kvcore.KVCacheManager(32, block_size)
    seqs = [kv.open(range(6 - more)) for more in (0, 1, 2)]
    for seq in seqs:
        kv.reserve(seq, seq.num_tokens)
    before = [seq.block_table for seq in seqs]

    def fail(*_):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(kvcore.BlockPool, "hand_out", fail)
        with pytest.raises(MemoryError):
            kv.decode_step(seqs, [1, 2, 3])
    assert [seq.block_table for seq in seqs] == before
    assert [(seq.num_tokens, seq.num_computed_tokens) for seq in seqs] == [(6, 0), (5, 0), (4, 0)]
    kvcore.check(kv)
    kv.decode_step(seqs, [1, 2, 3])
    kvcore.check(kv)


def test_the_same_step_again_is_refused_once_one_of_it_is_closed():
    kv = kvcore.KVCacheManager(64, 4)
    seqs = running(kv, 3)
    for verb in (kv.decode_step, kv.commit_step):
        kv.decode_step(seqs, [1, 2, 3])
        kv.close(seqs[1])
        with pytest.raises(kvcore.StaleSequenceError):
            verb(seqs, [1, 1, 1])
        seqs[1:2] = running(kv, 1)
    kv.decode_step(seqs, [1, 2, 3])


class Twin:
    """Has all that a sequence has, and says that it equals anything."""

    __hash__ = None

    def __init__(self, seq, when_asked):
        object.__setattr__(self, "seq", seq)
        object.__setattr__(self, "when_asked", when_asked)

    def __getattr__(self, name):
        return getattr(self.seq, name)

    def __setattr__(self, name, value):
        setattr(self.seq, name, value)

    def __eq__(self, other):
        self.when_asked()
        return True


@pytest.mark.parametrize("is_warm", [False, True])
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("verb", ["decode_step", "commit_step", "reserve_step"])
def test_what_says_that_it_equals_a_sequence_is_none(verb, place, is_warm):
    kv = kvcore.KVCacheManager(64, 4)
    seqs = running(kv, 2)
    if is_warm:
        kv.decode_step(seqs, [1, 2])
    before = manager_view(kv)
    twin = Twin(seqs[0], lambda: kv.close(seqs[1 - place]))
    for stranger in (twin, mock.ANY):
        step = list(seqs)
        step[place] = stranger
        with pytest.raises((kvcore.InvalidArgumentError, TypeError), match="KVSequence"):
            getattr(kv, verb)(step, [0, 0])
        assert manager_view(kv) == before


@pytest.mark.parametrize("windows", [[], [kvcore.SlidingWindow(5)]])
def test_a_chunk_whose_prompt_has_room_is_found_from_its_step_on(windows):
    """Tokens stand behind the chunk, told and with room: none of that lets its blocks wait."""
    kv = kvcore.KVCacheManager(40, 4, groups=[kvcore.FullAttention(), *windows])
    prompt = list(range(300, 319))
    seq = kv.open(prompt)
    kv.reserve(seq, len(prompt))
    for count, cached in ((3, 0), (2, 4), (9, 12), (5, 16)):
        kv.step([seq], count, num_known=0)
        assert kv.plan(prompt).num_cached_tokens == cached
        kvcore.check(kv)


def test_a_step_may_have_more_than_256_of_everything():
    """Up to there CPython has one object for a number, and what compares objects agrees too."""
    kv = kvcore.KVCacheManager(2000, 4)
    seqs = running(kv, 300)
    kv.reserve_step(seqs, [2] * 300)
    tokens = list(range(300))
    kv.step(seqs, [0] * 300, tokens)
    kv.step(seqs, [1] * 300, num_known=[0] * 300, num_expected=[1] * 300)
    kv.resolve_step(seqs, tokens)
    kv.commit_step(seqs, [1] * 300)
    kv.decode_step(seqs, tokens)
    assert [seq.tokens[8:] for seq in seqs] == [(token,) * 3 for token in tokens]
    kvcore.check(kv)


def test_an_empty_step_is_a_step():
    assert kvcore.KVCacheManager(4, 4).decode_step([], []) == ()


def test_a_decode_step_in_steady_state_leaves_no_container_behind():
    """Nothing that the collector would have to walk: blocks and nodes are used again."""
    kv = kvcore.KVCacheManager(65, 4)
    for turn in range(4):  # until the pool is full of content that is not used
        seqs = running(kv, 4)
        for token in range(44):
            kv.decode_step(seqs, array("I", [1000 * turn + token] * 4))
        for seq in seqs:
            kv.close(seq)
    seqs = running(kv, 4)
    for token in range(8):  # where new content branches off the old, a dictionary is made
        kv.decode_step(seqs, array("I", [9000 + token] * 4))
    gc.collect()
    gc.disable()
    try:
        known = set(map(id, gc.get_objects()))
        allocated = sys.getallocatedblocks()
        for token in range(8, 40):
            kv.decode_step(seqs, array("I", [9000 + token] * 4))
        grown = sys.getallocatedblocks() - allocated
        left = set(map(id, gc.get_objects())) - known
        assert left == {id(known)}
    finally:
        gc.enable()
    assert grown < 4 * 32  # not one object a token: what stays is the content of full blocks
