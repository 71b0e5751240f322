"""Chats in turns, side by side, as rules: what known ends need is reused last.

A turn goes on where the last one ended, and beside it others do so, from the same prefix.
"""

from hypothesis import strategies as st
from hypothesis.stateful import rule

import kvcore
from tests.kvcore.machines.outlook import OutlookRules
from tests.kvcore.machines.requests import PROMPTS

TURNS = st.lists(
    st.tuples(st.integers(0, 9), st.integers(1, 6), st.integers(0, 2), st.sampled_from([0, 0, 1])),
    min_size=1,
    max_size=4,
)
"""Tokens of an answer, tokens of the next question, what it asks, what it computes again."""


class ChatRules(OutlookRules):
    """Requests that go on where others ended."""

    @rule(prompt=PROMPTS, turns=TURNS, chunk=st.integers(2, 9), blocks=st.integers(0, 4))
    def take_turns(self, prompt, turns, chunk, blocks):
        """A chat: each prompt is the last one, its answer and a question; others come between."""
        text, again = prompt, 0
        for answer, question, token, more in turns:
            entry = self.begin(text, kvcore.Namespace(), packed=False, recompute=again)
            if entry is None:
                return
            self.run_in_chunks(entry, chunk)
            for _ in range(answer if entry[1].computed == len(text) else 0):
                self.append(entry, [token])
                self.run(entry)
                self.agree()
            text = [*entry[1].tokens, *[token + 3] * question]
            self.end(entry)
            self.agree()
            self.press(blocks)
            self.agree()
            again = more
            if len(text) > 30:
                return

    @rule(
        prompt=PROMPTS,
        lengths=st.tuples(*[st.integers(0, 7)] * 4),
        first=st.booleans(),
        splits=st.booleans(),
        blocks=st.integers(0, 4),
    )
    def go_on_side_by_side(self, prompt, lengths, first, splits, blocks):
        """Two go on from one prefix, at the same time, and one ends first; then they come back."""
        pair = []
        for number, more in enumerate(lengths[:2]):
            text = [*prompt, *[number + 4] * more]
            entry = self.begin(text, kvcore.Namespace(), packed=False)
            if entry is None:
                return
            self.run_in_chunks(entry, 5)
            pair.append(entry)
        if splits:
            pair[1] = self.fork(pair[0])
            pair[1] = pair[1] if pair[1] in self.live else pair[0]
        for turn in range(max(lengths[2:])):
            for entry, answer in zip(pair, lengths[2:], strict=True):
                if turn < answer and entry[1].computed == len(entry[1].tokens):
                    self.append(entry, [turn % 3])
                    self.run(entry)
            self.agree()
        pair = pair if first else pair[::-1]
        self.end_and_press(pair, blocks)
        for entry in pair:
            again = self.begin([*entry[1].tokens, 8], kvcore.Namespace(), packed=False)
            if again is not None:
                self.agree()
                self.end(again)

    def end_and_press(self, pair, blocks):
        """They end one after the other, and others take blocks in between."""
        for entry in pair:
            if entry in self.live:
                self.end(entry)
                self.agree()
                self.press(blocks)

    def run_in_chunks(self, entry, chunk):
        """A prompt is computed in parts, as far as there is room."""
        naive = entry[1]
        while naive.computed < len(naive.tokens):
            count = min(chunk, len(naive.tokens) - naive.computed)
            if not self.naive.can_reserve(naive, count):
                return
            self.reserve(entry, count)
            self.write_and_commit(entry, count)
            self.agree()
