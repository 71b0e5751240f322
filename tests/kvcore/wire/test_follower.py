"""What a follower does with each batch, call by call; the machines say what must come of it."""

from dataclasses import asdict

import pytest

from kvcore import wire
from tests.kvcore.wire.machine import num_changed


class Log:
    """An index that notes what it is told: the time of a batch, or that all is forgotten."""

    def __init__(self):
        self.done = []

    def apply(self, publisher, batch):
        assert publisher == "p"
        self.done.append(batch.time)

    def forget(self, publisher):
        assert publisher == "p"
        self.done.append("forgotten")


def batch(time, *, anew=False, num_malformed=0):
    events = (wire.Cleared(),) if anew else (wire.Removed([1]),)
    return wire.Batch(time, events, num_malformed=num_malformed)


class Case:
    """A follower that has applied the batches 4 and 5, at the times 4.0 and 5.0."""

    def __init__(self, **options):
        self.log = Log()
        self.follower = wire.Follower("p", self.log, **options)
        assert not self.follower.live(4, batch(4.0, anew=True))
        assert not self.follower.live(5, batch(5.0))
        self.before = wire.FollowerStats(num_batches=2)
        assert self.follower.stats == self.before
        self.log.done.clear()

    def expect(self, done, next_number, **counted):
        assert self.log.done == done
        assert self.follower.next == next_number
        assert num_changed(self.before, self.follower.stats) == counted


@pytest.fixture
def case():
    return Case()


def test_a_follower_has_met_nothing_at_first():
    follower = wire.Follower("p", Log())
    assert set(asdict(follower.stats).values()) == {0}
    assert (follower.next, follower.asking) == (None, False)
    assert follower.ask() == 0
    assert follower.asking


def test_a_first_batch_is_applied_if_its_number_is_0_and_asked_about_otherwise():
    for number in (0, 1, 7):
        log = Log()
        follower = wire.Follower("p", log)
        assert follower.live(number, batch(1.0)) == (number > 0)
        assert log.done == ([] if number else [1.0])


def test_batches_of_one_time_follow_each_other(case):
    assert not case.follower.live(6, batch(5.0))
    assert not case.follower.live(9, batch(5.0, anew=True))
    case.expect([5.0, 5.0], 10, num_batches=2)


def test_a_repeat_of_the_last_time_is_dropped(case):
    for number, time in ((5, 5.0), (4, 4.0), (3, 5.0)):
        assert not case.follower.live(number, batch(time))
        assert not case.follower.live(number, batch(time, anew=True))
    case.expect([], 6, num_repeated=6)


def test_an_older_number_with_a_newer_time_is_a_new_life(case):
    assert case.follower.live(5, batch(5.5))
    case.expect(["forgotten"], None, num_restarts=1, num_gaps=1)
    assert case.follower.ask() == 0
    assert not case.follower.replayed(0, batch(5.1))
    assert not case.follower.replay_ended()
    case.expect(["forgotten", 5.1], 1, num_restarts=1, num_gaps=1, num_batches=1)
    assert not case.follower.live(0, batch(5.0))  # of the life before
    case.expect(["forgotten", 5.1], 1, num_restarts=1, num_gaps=1, num_batches=1, num_repeated=1)


def test_what_clears_all_is_applied_over_a_gap_if_it_is_newer(case):
    assert not case.follower.live(8, batch(8.0, anew=True))
    case.expect([8.0], 9, num_batches=1)
    assert case.follower.live(20, batch(7.0, anew=True))
    case.expect([8.0], 9, num_batches=1, num_gaps=1)


def test_the_next_number_with_an_older_time_is_asked_for(case):
    assert case.follower.live(6, batch(4.5))
    case.expect([], 6, num_gaps=1)
    assert case.follower.ask() == 5
    assert not case.follower.replayed(5, batch(5.0))
    assert not case.follower.replayed(6, batch(4.5))  # a clock that was set back
    assert not case.follower.replay_ended()
    case.expect([4.5], 7, num_gaps=1, num_batches=1)


def test_where_nothing_can_be_asked_the_next_number_is_applied_and_a_gap_forgets():
    case = Case(can_ask=False)
    assert not case.follower.live(6, batch(4.5))
    case.expect([4.5], 7, num_batches=1)
    assert not case.follower.live(8, batch(8.0))
    case.expect([4.5, "forgotten", 8.0], 9, num_batches=2, num_lost=1)
    assert not case.follower.live(12, batch(12.0, anew=True))
    case.expect([4.5, "forgotten", 8.0, 12.0], 13, num_batches=3, num_lost=1)


def test_a_gap_is_filled_and_what_came_meanwhile_is_applied_after_it(case):
    assert case.follower.live(7, batch(7.0))
    assert case.follower.ask() == 5
    assert not case.follower.live(9, batch(9.0))
    assert not case.follower.live(8, batch(8.0))
    case.expect([], 6, num_gaps=1)
    for number in (5, 6, 7):
        assert not case.follower.replayed(number, batch(float(number)))
    assert not case.follower.replay_ended()
    assert not case.follower.asking
    case.expect([6.0, 7.0, 8.0, 9.0], 10, num_gaps=1, num_batches=4)


def test_what_came_after_the_request_and_not_next_is_asked_for_in_its_turn(case):
    assert case.follower.live(7, batch(7.0))
    case.follower.ask()
    case.follower.live(8, batch(8.0))
    case.follower.live(10, batch(10.0))
    case.follower.live(12, batch(12.0))
    for number in (5, 6, 7):
        case.follower.replayed(number, batch(float(number)))
    assert case.follower.replay_ended()
    case.expect([6.0, 7.0, 8.0], 9, num_gaps=2, num_batches=3)
    assert case.follower.ask() == 8
    for number in (8, 9):
        case.follower.replayed(number, batch(float(number)))
    assert not case.follower.replay_ended()  # the answer has it, or it was a life before's
    case.expect([6.0, 7.0, 8.0, 9.0], 10, num_gaps=2, num_batches=4)


def test_an_answer_that_knows_nothing_of_the_last_batch_is_a_new_life(case):
    case.follower.ask()
    assert case.follower.replay_ended()
    case.expect(["forgotten"], None, num_restarts=1)
    assert not case.follower.live(5, batch(5.0))  # a repeat of the life before
    case.expect(["forgotten"], None, num_restarts=1, num_repeated=1)


@pytest.mark.parametrize("time", [4.9, 5.1])
def test_an_answer_whose_last_batch_is_another_is_a_new_life(case, time):
    case.follower.ask()
    assert case.follower.replayed(5, batch(time))
    case.expect(["forgotten"], None, num_restarts=1)


def test_an_answer_may_have_more_than_was_asked_for(case):
    case.follower.ask()
    for number in (3, 4, 5):
        assert not case.follower.replayed(number, batch(float(number)))
    assert not case.follower.replay_ended()
    case.expect([], 6)


@pytest.mark.parametrize("number", [6, 7])
def test_an_answer_that_begins_after_the_last_batch_forgets(case, number):
    case.follower.ask()
    assert not case.follower.replayed(number, batch(9.0))
    assert not case.follower.replayed(number + 1, batch(9.5))
    assert not case.follower.replay_ended()
    case.expect(["forgotten", 9.0, 9.5], number + 2, num_lost=1, num_batches=2)


def test_an_answer_with_a_gap_forgets(case):
    case.follower.ask()
    for number in (5, 6, 8):
        assert not case.follower.replayed(number, batch(float(number)))
    case.expect([6.0, "forgotten", 8.0], 9, num_lost=1, num_batches=2)


def test_an_answer_that_begins_by_clearing_all_is_applied(case):
    case.follower.ask()
    assert not case.follower.replayed(2, batch(1.0, anew=True))
    case.expect([1.0], 3, num_batches=1)


def test_without_an_answer_newer_batches_are_applied_and_what_they_followed_is_forgotten(case):
    case.follower.live(7, batch(7.0))
    case.follower.ask()
    case.follower.live(8, batch(8.0))
    case.follower.live(9, batch(6.5))  # of a life before
    case.follower.live(11, batch(11.0))
    assert not case.follower.replay_ended(answered=False)
    assert not case.follower.asking
    done = ["forgotten", 7.0, 8.0, "forgotten", 11.0]
    case.expect(done, 12, num_gaps=1, num_lost=2, num_batches=3, num_repeated=1)


def lacking(case):
    """After batches 6 and 7 were lost, and no answer came."""
    case.follower.ask()
    case.follower.live(8, batch(8.0))
    assert not case.follower.replay_ended(answered=False)
    assert case.follower.lacks
    case.log.done.clear()
    assert case.follower.ask() == 0
    return case.follower


def test_what_could_not_be_had_is_asked_for_again_and_a_snapshot_has_it(case):
    follower = lacking(case)
    assert not follower.replayed(8, batch(8.5, anew=True))
    assert not follower.replayed(9, batch(9.0))
    assert not follower.replay_ended()
    assert (case.log.done, follower.lacks, follower.ask()) == ([8.5, 9.0], False, 9)


def test_what_could_not_be_had_is_in_a_history_that_is_whole(case):
    follower = lacking(case)
    for number in range(9):
        assert not follower.replayed(number, batch(float(number)))
    assert not follower.replay_ended()
    assert (case.log.done[0], case.log.done[-1], follower.lacks) == ("forgotten", 8.0, False)
    assert case.log.done.count("forgotten") == 1


def test_what_an_answer_does_not_have_is_not_asked_for_again(case):
    follower = lacking(case)
    assert not follower.replayed(8, batch(8.0))
    assert not follower.replay_ended()
    assert (case.log.done, follower.lacks, follower.ask()) == ([], False, 8)


def test_without_an_answer_everything_is_asked_for_again(case):
    follower = lacking(case)
    assert not follower.replay_ended(answered=False)
    assert follower.lacks


def test_without_an_answer_what_is_next_is_applied(case):
    case.follower.ask()
    case.follower.live(6, batch(6.0))
    assert not case.follower.replay_ended(answered=False)
    case.expect([6.0], 7, num_batches=1)


def test_without_an_answer_a_later_batch_of_the_same_time_as_the_last_is_applied(case):
    case.follower.ask()
    case.follower.live(8, batch(5.0))
    assert not case.follower.replay_ended(answered=False)
    case.expect(["forgotten", 5.0], 9, num_lost=1, num_batches=1)


def test_without_an_answer_nothing_of_a_life_before_is_asked_for_again(case):
    case.follower.ask()
    for number in (5, 6, 7):
        case.follower.live(number, batch(4.5))
    assert not case.follower.replay_ended(answered=False)
    case.expect([], 6, num_repeated=3)


def test_without_an_answer_a_first_batch_is_applied_and_a_later_one_is_too():
    for number, done in ((0, [1.0]), (1, ["forgotten", 1.0])):
        log = Log()
        follower = wire.Follower("p", log)
        follower.ask()
        follower.live(number, batch(1.0))
        assert not follower.replay_ended(answered=False)
        assert log.done == done
        assert follower.stats.num_lost == number


def test_without_an_answer_an_older_number_with_a_newer_time_is_a_new_life(case):
    case.follower.ask()
    case.follower.live(3, batch(9.0))
    assert case.follower.replay_ended(answered=False)
    case.expect(["forgotten"], None, num_restarts=1, num_gaps=1)


def test_large_numbers_are_compared_by_what_they_are():
    follower = wire.Follower("p", Log())
    follower.live(10**6, batch(4.0, anew=True))
    follower.ask()
    assert not follower.replayed(10**6, batch(4.0))
    assert follower.replayed(10**6, batch(4.5))
    assert follower.stats.num_restarts == 1


def test_so_many_batches_wait_for_an_answer_and_no_more(case, monkeypatch):
    monkeypatch.setattr("kvcore.wire.follower.MAX_EARLY", 4)
    assert case.follower.live(7, batch(7.0))
    case.follower.ask()
    for number in (8, 9, 10, 11, 12):
        assert not case.follower.live(number, batch(float(number)))
    for number in (5, 6, 7):
        case.follower.replayed(number, batch(float(number)))
    assert not case.follower.replay_ended()
    case.expect([6.0, 7.0, 8.0, 9.0, 10.0], 11, num_gaps=1, num_batches=5)


def test_what_is_malformed_in_a_batch_that_is_applied_is_counted_once(case):
    case.follower.live(6, batch(6.0, num_malformed=2))
    case.follower.live(6, batch(6.0, num_malformed=2))
    case.expect([6.0], 7, num_batches=1, num_repeated=1, num_malformed=2)


def test_a_follower_that_has_failed_knows_nothing_and_takes_what_comes_next(case):
    case.follower.fail()
    case.expect(["forgotten"], None, num_failed=1)
    assert not case.follower.live(0, batch(0.5))
    case.expect(["forgotten", 0.5], 1, num_failed=1, num_batches=1)
