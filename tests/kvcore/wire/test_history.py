"""What a history keeps, what it gives up, and what it answers, counted byte by byte."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvcore import wire

CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 9)),
        st.tuples(st.just("anew"), st.integers(1, 9)),
        st.tuples(st.just("rebase"), st.integers(1, 9)),
    ),
    max_size=12,
)


class Naive:
    """All that was ever sent, and rules that say what of it is left."""

    def __init__(self, first, limit, base, keep_base):
        self.first, self.limit, self.keep_base = first, limit, keep_base
        self.sent, self.oldest = [], first  # the number of the oldest that is kept
        self.base = (first - 1, base)

    @property
    def last(self):
        return self.first + len(self.sent) - 1

    def add(self, payload, *, anew=False):
        self.sent.append(payload)
        if anew:
            self.base = (self.last, payload)
        self.trim()

    def rebase(self, payload):
        self.base = (self.last, payload)
        self.trim()

    def trim(self):
        while self.oldest < self.last and self.size(self.oldest) > self.limit:
            if self.base is not None and self.base[0] < self.oldest:
                if self.keep_base:
                    return
                self.base = None
            self.oldest += 1

    def size(self, begin):
        return sum(map(len, self.sent[begin - self.first :]))

    def after(self, begin):
        begin = max(begin, self.oldest)
        return [*enumerate(self.sent[begin - self.first :], begin)] if self.sent else []

    def since(self, number):
        if self.oldest <= number <= self.last + 1 and (self.sent or number > self.last):
            return self.after(number)
        return self.anew()

    def anew(self):
        return None if self.base is None else [self.base, *self.after(self.base[0] + 1)]

    @property
    def is_base_old(self):
        if not self.keep_base:
            return False
        return self.size(self.base[0] + 1) > max(self.limit // 2, len(self.base[1]))


# An example costs little, so there are as many where a profile has fewer.
@settings(max_examples=max(60, settings.default.max_examples))
@given(
    CALLS, st.sampled_from([0, 1, 7]), st.integers(0, 30), st.integers(1, 9), st.booleans()
)  # fmt: skip
@example([("add", 3)] * 6, 1, 9, 2, False)
@example([("add", 3)] * 6, 1, 9, 2, True)
@example(
    [*[("add", 2)] * 5, ("rebase", 3), *[("add", 2)] * 6, ("anew", 4), ("add", 5)], 0, 8, 3, True
)
@example([("anew", 4), ("add", 3), ("add", 3), ("rebase", 9), *[("add", 3)] * 5], 7, 12, 1, True)
@example([*[("add", 1)] * 6, ("rebase", 1), *[("add", 1)] * 8], 1, 5, 1, True)
@example([("add", 9), ("add", 9)], 1, 0, 1, False)
def test_a_history_answers_as_one_that_never_forgets_would_within_its_limit(
    calls, first, limit, base, keep_base
):
    history = wire.History(first, limit, bytes(base), keep_base=keep_base)
    naive = Naive(first, limit, bytes(base), keep_base)
    for place, (verb, size) in enumerate([("", 0), *calls]):
        payload = bytes([place]) * size
        if verb == "rebase":
            history.rebase(payload)
            naive.rebase(payload)
        elif verb:
            sent = history.add(payload, anew=verb == "anew")
            naive.add(payload, anew=verb == "anew")
            assert sent == (naive.last, payload)
        assert history.last == naive.last
        assert history.is_base_old == naive.is_base_old
        assert history.anew() == naive.anew()
        for number in range(naive.last + 4):
            assert history.since(number) == naive.since(number), number
        if keep_base:
            assert history.anew() is not None


@pytest.mark.parametrize("number", [int.from_bytes(wire.SNAPSHOT, "big"), 9, 0])
def test_a_number_that_was_never_reached_gets_the_snapshot(number):
    history = wire.History(5, 100, b"base")
    history.add(b"one")
    assert history.since(number) == [(4, b"base"), (5, b"one")]
    assert history.since(6) == []
