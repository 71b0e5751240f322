"""Follows one publisher's batches: which to apply, which to drop, and what to ask for again.

Batches are numbered without a gap. A follower applies the next one, keeps those that come too early
and asks for what is between, from the last one that it has applied on: if that now says something
else, the publisher has started again, and what was known of it is forgotten. A batch with an older
number and a newer time says the same. A batch that begins by clearing everything holds all there
is, so it may follow anything. Where what is missing cannot be had, the publisher's contents are
forgotten, because what they have become is not known.

A batch with the next number is older than the last one applied if it comes late from a life before:
it is asked for like a batch that comes too early. And an answer that does not begin with the last
batch applied proves nothing about what was known: that is forgotten.

A publisher can repeat at least its last batch. So an answer covers all that had come before it was
asked for: it has it, or has what followed, or it was a life before's, which came late. What came
after the request is looked at when the answer has ended, and may be asked for in its turn.

Nothing here knows of sockets or clocks, so that a test can lose, repeat and delay what it likes.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from kvcore.wire.index import Index
from kvcore.wire.messages import Batch

MAX_EARLY = 4096
"""The most early batches that are kept while missing ones are requested."""


@dataclass(slots=True)
class FollowerStats:
    """Counters of a follower.

    Attributes:
        num_batches: batches applied.
        num_repeated: batches dropped because they were known.
        num_gaps: the number of requests for missed batches.
        num_lost: times what was missing could not be had.
        num_restarts: times the publisher had started again.
        num_malformed: events and batches that were not of the format.
        num_failed: times that it was forgotten because what it sent could not be applied.
    """

    num_batches: int = 0
    num_repeated: int = 0
    num_gaps: int = 0
    num_lost: int = 0
    num_restarts: int = 0
    num_malformed: int = 0
    num_failed: int = 0


class Follower:
    """The state of an index about one publisher.

    Args:
        publisher: its name in the index.
        index: the index to apply its batches to.
        can_ask: True if missed batches can be requested again.

    Attributes:
        next: the number of the next batch; None: nothing is known of the publisher.
        asking: True while an answer to a request is awaited.
        lacks: True if contents are unknown because no answer came; `ask` requests everything.
        stats: its counters.
    """

    __slots__ = ("_can_ask", "_due", "_early", "_heard", "_index", "_is_in_doubt", "_time",
                 "asking", "lacks", "next", "publisher", "stats")  # fmt: skip

    def __init__(self, publisher: str, index: Index, *, can_ask: bool = True) -> None:
        self.publisher = publisher
        self.next: int | None = None
        self.asking = self.lacks = False
        self.stats = FollowerStats()
        self._index = index
        self._can_ask = can_ask
        self._time = 0.0
        self._early: dict[int, Batch] = {}
        self._due: dict[int, Batch] = {}  # the batches that had come when it was requested
        self._heard = False
        self._is_in_doubt = False  # another life may have begun, and no answer has come since

    def ask(self, *, is_reconnected: bool = False) -> int:
        """Say from which batch on to ask, and await the answer. O(1).

        The batches come to `replayed`, and after them `replay_ended` is called. A request that
        stays without an answer is made again by another call.

        Args:
            is_reconnected: True if the connection was made anew: the publisher may have started
                again with the very number that is next. If no answer comes, all is forgotten.
        """
        self._is_in_doubt |= is_reconnected
        self.asking = True
        self._heard = False
        self._due |= self._early
        self._early = {}
        return 0 if self.next is None or self.lacks else max(0, self.next - 1)

    def live(self, sequence: int, batch: Batch) -> bool:
        """Take a batch as it was published; return True if a request is needed. O(batch)."""
        if self.asking:
            if len(self._early) + len(self._due) < MAX_EARLY:
                self._early[sequence] = batch
            return False
        if self.next is None or sequence < self.next:
            if batch.time <= self._time:
                self.stats.num_repeated += 1
                return False
            if self.next is not None:
                self._restart()
        is_newer = batch.time >= self._time
        is_next = sequence == (self.next or 0) and (is_newer or not self._can_ask)
        if is_next or (batch.begins_anew and is_newer):
            self._apply(sequence, batch)
            return False
        if self._can_ask:
            self.stats.num_gaps += 1
            self._early[sequence] = batch
            return True
        self._leap(sequence, batch)
        return False

    def replayed(self, sequence: int, batch: Batch) -> bool:
        """Take a requested batch; return True if everything must be requested again. O(batch).

        True: the publisher has started again. The rest of the answer is of no use.
        """
        if self.lacks and not self._heard and sequence == 0:
            self.forget()  # all that it ever published follows
        known = self.next
        follows = self._heard or known is None  # else it need not be the life that is known
        self._heard = True
        if batch.begins_anew or (follows and sequence == (known or 0)):
            self._apply(sequence, batch)
        elif known is None or sequence >= known:
            self._leap(sequence, batch)
        elif sequence == known - 1 and batch.time != self._time:
            self._restart()
            return True
        return False

    def replay_ended(self, *, answered: bool = True) -> bool:
        """Take the end of an answer; return True if another request is needed. O(early).

        Args:
            answered: False: there was no answer, and none is awaited any more.
        """
        self.asking = False
        due, self._due = self._due, {}
        if answered and self.next is not None and not self._heard:
            self._restart()  # a publisher can repeat at least its last batch
            return True
        if not answered and self._is_in_doubt and self.next is not None:
            self._lose()
            self.lacks = True
        self._is_in_doubt = False
        self.lacks = self.lacks and not answered
        early, self._early = self._early if answered else due | self._early, {}
        numbers = sorted(early)
        for place, sequence in enumerate(numbers):
            batch = early[sequence]
            if not answered and batch.time < self._time:
                self.stats.num_repeated += 1  # or of a life before: it is not requested any more
            elif not answered and sequence > (self.next or 0):
                self._leap(sequence, batch)
                self.lacks = not batch.begins_anew
            elif self.live(sequence, batch):
                self._early = {number: early[number] for number in numbers[place:]}
                return True
        return False

    def _restart(self) -> None:
        """Forget the publisher's life before; what comes late from it is a repeat by its time."""
        self.stats.num_restarts += 1
        time = self._time
        self.forget()
        self._time = time

    def _leap(self, sequence: int, batch: Batch) -> None:
        """Apply a batch though what comes before it cannot be had."""
        if not batch.begins_anew:
            self._lose()
        self._apply(sequence, batch)

    def _lose(self) -> None:
        self.stats.num_lost += 1
        self.forget()

    def forget(self) -> None:
        """Know nothing of the publisher. O(what it holds)."""
        self.next = None
        self._time = 0.0
        self.lacks = False
        self._index.forget(self.publisher)

    def fail(self) -> None:
        """Know nothing of the publisher, because what it sent could not be applied: a bug here.

        It is followed again from what it says next. O(what it holds).
        """
        self.stats.num_failed += 1
        with contextlib.suppress(Exception):  # what holds its bits stays, and no answer names it
            self.forget()

    def _apply(self, sequence: int, batch: Batch) -> None:
        self._index.apply(self.publisher, batch)
        self.next = sequence + 1
        self._time = batch.time
        self.lacks = self.lacks and not batch.begins_anew
        self.stats.num_batches += 1
        self.stats.num_malformed += batch.num_malformed
