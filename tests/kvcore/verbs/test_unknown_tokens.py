"""Tokens that are told later: what engines that run ahead rely on, and are refused."""

import copy
import functools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import kvcore

LAYOUTS = {
    "full": None,
    "window": [kvcore.SlidingWindow(6)],
    "full and window": [kvcore.FullAttention(), kvcore.SlidingWindow(6)],
    "six and four": [kvcore.FullAttention(6), kvcore.SlidingWindow(5, 4)],
}


def manager(layout, num_blocks=120):
    return kvcore.KVCacheManager(
        num_blocks, 2 if layout == "six and four" else 4, groups=LAYOUTS[layout],
        record_events="xxh3-128",
    )  # fmt: skip


def prefilled(kv, prompt):
    seq = kv.open(prompt)
    todo = len(prompt) - seq.num_computed_tokens
    kv.reserve(seq, todo)
    kv.commit(seq, todo)
    return seq


def seen(kv, seqs):
    """What can be hit, what was said of it, and what each sequence holds."""
    events = [
        (type(event), name, event.group)
        for event in kv.events.take()
        for name in event.block_hashes
    ]
    tables = [seq.block_tables for seq in seqs]
    return events, tables, [seq.tokens for seq in seqs], kvcore.fold((), kv.snapshot())


@pytest.mark.parametrize("layout", LAYOUTS)
@given(
    prompts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), min_size=1, max_size=3),
    steps=st.lists(st.integers(0, 2), min_size=1, max_size=14),
    lag=st.integers(1, 3),
)
@example([[0] * 4, [0] * 9], [1] * 9, 2)
def test_tokens_resolved_later_give_the_same_result(layout, prompts, steps, lag):
    """One engine reads every step at once, the other a few steps later; then both have read all."""
    sync, ahead = manager(layout), manager(layout)
    one = [prefilled(sync, prompt) for prompt in prompts]
    two = [prefilled(ahead, prompt) for prompt in prompts]
    for kv, seqs in ((sync, one), (ahead, two)):
        kv.reserve_step(seqs, [1] * len(seqs))
    ones = [1] * len(prompts)
    none = [0] * len(prompts)
    unread = []
    for number, token in enumerate(steps):
        tokens = [(token + index) % 3 for index in range(len(prompts))]
        computed = ones if number else none
        sync.step(one, computed, tokens)
        ahead.step(two, computed, num_known=0, num_expected=1)
        unread.append(tokens)
        if len(unread) > lag:
            ahead.resolve_step(two, unread.pop(0))
        kvcore.check(ahead)
    for tokens in unread:
        ahead.resolve_step(two, tokens)
    kvcore.check(ahead)
    mine, its = seen(sync, one), seen(ahead, two)
    if layout == "full":
        assert mine == its  # ids, hits, events in their order
    else:  # a window gives its blocks back a few steps later, so the next ids are others
        assert mine[2:] == its[2:]
        assert [[len(t) for t in table] for table in mine[1]] == [
            [len(t) for t in table] for table in its[1]
        ]
    for prompt in prompts:
        longer = [*prompt, 0, 1, 2, 3]
        assert sync.plan(longer).num_cached_tokens == ahead.plan(longer).num_cached_tokens


@pytest.mark.parametrize(
    ("tokens", "start", "wanted"),
    [
        ([7, 8, 9], None, "at most 2 tokens from position 3 on, got 3"),
        ([7], 2, "from position 3 on, got 1 from 2 on"),
        ([7], 4, "from position 3 on, got 1 from 4 on"),
    ],
)
def test_what_nobody_expects_is_refused(tokens, start, wanted):
    kv = kvcore.KVCacheManager(16, 4)
    seq = prefilled(kv, [1, 2, 3])
    kv.expect(seq, 2)
    for call in (
        lambda: kv.resolve(seq, tokens, start=start),
        lambda: kv.resolve_step(
            [seq], tokens, num_resolved=[len(tokens)], starts=None if start is None else [start]
        ),
    ):
        with pytest.raises(kvcore.NotExpectedError, match=wanted):
            call()
    assert (seq.tokens, seq.num_unknown_tokens) == ((1, 2, 3), 2)


def test_no_more_is_computed_than_was_told_or_is_expected():
    kv = kvcore.KVCacheManager(16, 8)
    seq = prefilled(kv, [1, 2, 3])
    kv.expect(seq, 1)
    kv.reserve(seq, 5)
    for call in (
        lambda: kv.commit(seq, 2),
        lambda: kv.commit_step([seq], [2]),
        lambda: kv.step([seq], [3], num_known=0),
    ):
        with pytest.raises(kvcore.InvalidArgumentError, match=r"at most the 1 tokens .* got \d"):
            call()
        assert (seq.num_tokens, seq.num_computed_tokens) == (4, 3)
    kv.commit(seq, 1)
    assert seq.num_settled_tokens == 3


def test_what_was_sampled_before_a_cut_is_found_out_after_it():
    kv = kvcore.KVCacheManager(16, 4)
    seq = prefilled(kv, [1, 2, 3])
    kv.expect(seq, 2)
    kv.truncate(seq, 2)
    with pytest.raises(kvcore.NotExpectedError):
        kv.resolve(seq, [4])
    kv.expect(seq, 1)  # something else is to stand where the cut was
    with pytest.raises(kvcore.NotExpectedError):
        kv.resolve(seq, [4], start=3)
    kv.resolve(seq, [9], start=2)
    assert seq.tokens == (1, 2, 9)
    kv.close(seq)
    with pytest.raises(kvcore.StaleSequenceError):
        kv.resolve(seq, [4])


@pytest.mark.parametrize("join", ["append", "extend"])
def test_a_known_token_does_not_overtake_an_expected_one(join):
    kv = kvcore.KVCacheManager(16, 4)
    first, seq = prefilled(kv, [5]), prefilled(kv, [1, 2, 3])
    kv.expect(seq, 1)
    kv.reserve(seq, 1)
    calls = {
        "append": lambda: kv.append(seq, 4),
        "extend": lambda: kv.extend(seq, [4]),
    }
    with pytest.raises(kvcore.UnknownTokensError, match="1 are not"):
        calls[join]()
    assert (first.tokens, seq.tokens, seq.num_tokens) == ((5,), (1, 2, 3), 4)
    kvcore.check(kv)


@pytest.mark.parametrize("count", [-1, True, 1.0, "1"])
def test_a_count_of_expected_tokens_is_a_count(count):
    kv = kvcore.KVCacheManager(16, 4)
    seq = kv.open([1])
    with pytest.raises(kvcore.InvalidArgumentError, match="num_tokens"):
        kv.expect(seq, count)


STEP = {
    "seqs": None,
    "num_computed": [1, 1],
    "tokens": [7, 8],
    "num_known": None,
    "room": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "error", "wanted"),
    [
        ({"num_computed": [1]}, kvcore.InvalidArgumentError, "each of 2 sequences, got 1"),
        ({"num_computed": [1, 2]}, kvcore.InvalidArgumentError, "not computed, got 2"),
        ({"num_computed": [1, -1]}, kvcore.InvalidArgumentError, "num_computed: wanted at least 0"),
        ({"num_known": [2]}, kvcore.InvalidArgumentError, "each of 2 sequences, got 1"),
        ({"num_known": [2, 1]}, kvcore.InvalidArgumentError, "tokens: wanted 3 in all, got 2"),
        ({"room": [1]}, kvcore.InvalidArgumentError, "each of 2 sequences, got 1"),
        ({"room": [1, 1000]}, kvcore.OutOfBlocksError, "needed 250 free blocks"),
        ({"tokens": [1]}, kvcore.InvalidArgumentError, "tokens: wanted 2 in all, got 1"),
        ({"tokens": [1, "x"]}, kvcore.InvalidArgumentError, "integer token ids"),
    ],
)
def test_a_step_that_is_refused_has_moved_nobody(changed, error, wanted):
    kv = kvcore.KVCacheManager(32, 4)
    seqs = [prefilled(kv, [1, 2]), prefilled(kv, [3, 4])]
    for seq in seqs:
        kv.append(seq, 5)
        kv.reserve(seq, 1)
    before = [copy.copy((s.tokens, s.num_computed_tokens, s.block_table)) for s in seqs]
    step = {**STEP, "seqs": seqs, **changed}
    if changed.get("num_computed") == [1, 2]:
        step["num_known"], step["tokens"] = [1, 0], [7]
    with pytest.raises(error, match=wanted):
        kv.step(
            step["seqs"], step["num_computed"], step["tokens"],
            num_known=step["num_known"], num_reserved=step["room"],
        )  # fmt: skip
    assert [(s.tokens, s.num_computed_tokens, s.block_table) for s in seqs] == before
    kvcore.check(kv)


def test_reserve_to_makes_room_up_to_a_length():
    kv = kvcore.KVCacheManager(16, 4, max_model_len=20)
    seq = prefilled(kv, [1, 2, 3, 4, 5])
    assert kv.reserve_to(seq, 12) == ((3,),)
    assert kv.reserve_to(seq, 3) == ((),)
    too_long = functools.partial(kv.reserve_to, seq, 21)
    with pytest.raises(kvcore.SequenceTooLongError):
        too_long()
